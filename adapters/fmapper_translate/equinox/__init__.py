"""Files for Equinox.

target   their counterparts of PyTorch's layers, arrays and random numbers
table    the table of layers
fields   the fields of classes

Files take along what these define:

layers   layers with PyTorch's arguments, initial values and layouts, for batches
norms    weights that are normalised at each call
recurrent  those of them that run over sequences
weights  random keys, first values, statistics of batches, and `load_weights`
library  counterparts of a library's models
"""
