"""Files for Flax NNX: how layers are made, and the code that files take along.

layers   layers with PyTorch's arguments, initial values and layouts of images
pools    windows and edges of images and sequences
recurrent  those of them that run over sequences
idioms   operations with the sizes of the source
weights  initial values, and `load_weights`
derivatives  operations with a derivative of their own
rows     rows that are picked by values
transformers  counterparts of a library's infrastructure
constructions  calls of layers' constructors
"""
