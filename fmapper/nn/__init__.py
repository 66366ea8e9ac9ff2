"""Functions of neural networks beyond the array API standard: `fmapper.nn.functional`.

functional     all of it, as users import it
arguments      what is asked of arguments: one backend, shapes, axes
linear         linear maps, embeddings
convolution    and transposed ones
pooling        maxima and means of windows
activation     activations, softmax
normalization  layers, groups, batches; dropout
attention      scaled dot products
loss           losses
"""

from fmapper.nn import functional

__all__ = ["functional"]
