"""Functions of neural networks beyond the array API standard: `fmapper.nn.functional`.

functional     the public module, with all functions
arguments      checks of arguments: one backend, shapes, axes
linear         linear maps, embeddings
convolution    convolutions and transposed convolutions
pooling        maxima and means of windows
activation     activations, softmax
normalization  layer, group and batch norms; dropout
attention      scaled dot-product attention
loss           losses
"""

from fmapper.nn import functional

__all__ = ["functional"]
