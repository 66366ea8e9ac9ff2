"""Neural network functions on arrays of any backend, each computed by that backend's own kernels.

Layouts and argument names are torch's: channels first, weights (out, in, ...). The first argument
decides the backend; arrays of two backends in one call are an error. The result has the dtype of
the input. Convolutions and matrix products use the backend's default precision, which on GPUs may
be TF32.
"""

from fmapper.backends.discovery import load_new
from fmapper.nn.activation import (
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    logsumexp,
    relu,
    sigmoid,
    silu,
    softmax,
    softplus,
)
from fmapper.nn.attention import scaled_dot_product_attention
from fmapper.nn.convolution import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from fmapper.nn.linear import embedding, linear, one_hot
from fmapper.nn.loss import cross_entropy, mse_loss
from fmapper.nn.normalization import batch_norm, dropout, group_norm, layer_norm, rms_norm
from fmapper.nn.pooling import (
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)

__all__ = [
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "group_norm",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsumexp",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "mse_loss",
    "one_hot",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
]

load_new()  # torch.compile cannot trace the discovery of adapters
