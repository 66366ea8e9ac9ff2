"""Files for PyTorch, of models of Flax NNX.

tables       what stands for layers, variables and their attributes
functions    what stands for functions of JAX and methods of arrays
creation, products   the same for those that make arrays, and for products, norms and transforms
expressions, statements, files   what is PyTorch's and JAX's in the walk of the source
fallback     calls and functions without counterpart, by the operations that JAX computes
layers, norms, recurrent   layers with Flax's arguments, initial values and layouts of images;
             files take them
weights      initial values, and `load_weights`; files take them
witness      the functions of a file that give something else than the source's
nnx/         arguments of constructors, and all of it
linen/, equinox/   the same for models of Flax Linen and of Equinox
"""
