"""Files for Flax NNX.

target   what they have in place of PyTorch's layers, arrays and random numbers
table    the table of layers

Files take along what these define:

layers   layers with PyTorch's arguments, initial values and layouts of images
recurrent  those of them that run over sequences
weights  kinds of arrays, and `load_weights`
transformers  counterparts of a library's infrastructure
"""
