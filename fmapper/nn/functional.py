"""Neural functions on the arrays of any backend, each computed by that backend's own kernels.

Layouts and names of arguments are torch's: channels first, weights (out, in, ...). The first
argument decides the backend; arrays of two backends in one call are an error. What comes out has
the dtype that went in. Convolutions and products take the backend's own default precision, which on
GPUs may be TF32.
"""

from __future__ import annotations

import math
from typing import Any

from fmapper import random
from fmapper.backends.discovery import load_new
from fmapper.nn.arguments import (
    Ints,
    Padding,
    axis_of,
    check_indices,
    check_windows,
    common,
    floating,
    kernels,
    pads,
    shape_error,
    sizes,
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

load_new()  # a compiler that traces a first call cannot trace how adapters are found

_REDUCTIONS = ("none", "mean", "sum")


# --- linear maps ---------------------------------------------------------------------------------


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Computes `x @ weight.T + bias`.

    Args:
        x: Of shape (..., in).
        weight: Of shape (out, in).
        bias: Of shape (out,).

    Returns:
        Of shape (..., out).

    Examples:
        >>> import numpy as np
        >>> from fmapper.nn import functional as F
        >>> F.linear(np.ones((2, 3)), np.ones((4, 3))).shape
        (2, 4)
    """
    found = common("linear", x, ("weight", weight), ("bias", bias))
    if len(weight.shape) != 2 or not len(x.shape) or x.shape[-1] != weight.shape[1]:
        raise shape_error("linear", "x (..., in) and weight (out, in)", x=x, weight=weight)
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        raise shape_error("linear", "a bias (out,)", weight=weight, bias=bias)
    return found.linear(x, weight, bias)


def embedding(x: Any, weight: Any) -> Any:
    """Returns the rows of a table.

    Args:
        x: Indices, integers of any shape.
        weight: The table, of shape (rows, width).

    Returns:
        Of shape (*x.shape, width). An index that is negative or too large is an IndexError in NumPy
        and torch; JAX cannot raise in compiled programs and gives a row of NaN.
    """
    found = common("embedding", x, ("weight", weight))
    if len(weight.shape) != 2:
        raise shape_error("embedding", "a weight (rows, width)", weight=weight)
    check_indices("embedding", "x", x)
    return found.embedding(x, weight)


def one_hot(x: Any, num_classes: int, *, dtype: Any = None) -> Any:
    """Returns ones at the indices, zeros elsewhere.

    Args:
        x: Indices, integers of any shape.
        num_classes: How many classes there are.
        dtype: A dtype by name; that of x if it is None.

    Returns:
        Of shape (*x.shape, num_classes); an index out of range gives zeros.
    """
    found = kernels("one_hot", x)
    if num_classes < 1:
        raise ValueError(f"one_hot: num_classes={num_classes} must be at least 1")
    check_indices("one_hot", "x", x)
    return found.one_hot(x, num_classes, dtype)


# --- convolution ---------------------------------------------------------------------------------


def conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Any:
    """Convolves over one dimension; see `conv2d`.

    Args:
        x: Of shape (batch, in, length) or (in, length).
        weight: Of shape (out, in / groups, width).
        bias: Of shape (out,).
        stride: Step of the window.
        padding: As for `conv2d`.
        dilation: Step between the elements of the window.
        groups: How many blocks of channels do not see each other.
    """
    return _conv("conv1d", 1, x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Any:
    """Convolves over two dimensions, as neural networks define it: the kernel is not flipped.

    Args:
        x: Of shape (batch, in, height, width) or (in, height, width).
        weight: Of shape (out, in / groups, kernel height, kernel width).
        bias: Of shape (out,).
        stride: Step of the window: an integer, or one per dimension.
        padding: Zeros around x: an integer, one per dimension, a pair (before, after) per
            dimension, "valid" for none, or "same" for as many as keep the size at stride 1 (the odd
            one after).
        dilation: Step between the elements of the window.
        groups: How many blocks of channels do not see each other.

    Returns:
        Of shape (batch, out, new height, new width), without batch if x has none.

    Examples:
        >>> import numpy as np
        >>> from fmapper.nn import functional as F
        >>> x, weight = np.ones((1, 3, 8, 8)), np.ones((6, 3, 5, 5))
        >>> F.conv2d(x, weight, padding="same").shape
        (1, 6, 8, 8)
    """
    return _conv("conv2d", 2, x, weight, bias, stride, padding, dilation, groups)


def conv3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Any:
    """Convolves over three dimensions; see `conv2d`.

    Args:
        x: Of shape (batch, in, depth, height, width) or without batch.
        weight: Of shape (out, in / groups, three sizes of the kernel).
        bias: Of shape (out,).
        stride: Step of the window.
        padding: As for `conv2d`.
        dilation: Step between the elements of the window.
        groups: How many blocks of channels do not see each other.
    """
    return _conv("conv3d", 3, x, weight, bias, stride, padding, dilation, groups)


def _conv(
    function: str,
    count: int,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Ints,
    padding: Padding,
    dilation: Ints,
    groups: int,
) -> Any:
    found = common(function, x, ("weight", weight), ("bias", bias))
    given, shape = tuple(x.shape), tuple(weight.shape)  # slices of a torch.Size are slow
    rank = len(given)
    if (
        not count < rank <= count + 2
        or len(shape) != count + 2
        or given[rank - count - 1] != shape[1] * groups
        or shape[0] % groups
    ):
        raise shape_error(
            function,
            f"x (batch, in, {count} sizes) and weight (out, in / {groups}, {count} sizes)",
            x=x,
            weight=weight,
        )
    if bias is not None and tuple(bias.shape) != (shape[0],):
        raise shape_error(function, "a bias (out,)", weight=weight, bias=bias)
    stride = sizes(function, "stride", stride, count)
    dilation = sizes(function, "dilation", dilation, count)
    padding = pads(function, padding, shape[2:], stride, dilation)
    for size, kernel, step, (low, high) in zip(
        given[-count:], shape[2:], dilation, padding, strict=True
    ):
        if size + low + high <= step * (kernel - 1):
            spread = [d * (k - 1) + 1 for d, k in zip(dilation, shape[2:], strict=True)]
            check_windows(function, x, spread, padding)
    if rank == count + 1:
        return found.conv(x[None], weight, bias, stride, padding, dilation, groups)[0]
    return found.conv(x, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Any:
    """Returns the transposed convolution over one dimension; see `conv_transpose2d`."""
    return _conv_transpose(
        "conv_transpose1d", 1, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Any:
    """Computes the transpose of the linear map `conv2d` with the same weight.

    Args:
        x: Of shape (batch, in, height, width) or (in, height, width).
        weight: Of shape (in, out / groups, kernel height, kernel width).
        bias: Of shape (out,).
        stride: Step of that convolution.
        padding: Padding of that convolution: an integer, or one per dimension.
        output_padding: How much is added at the end of each dimension, since a convolution
            with stride forgets the remainder of the size.
        groups: How many blocks of channels do not see each other.
        dilation: Step between the elements of the window.

    Returns:
        Of shape (batch, out, new height, new width), each size
        (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1.
    """
    return _conv_transpose(
        "conv_transpose2d", 2, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Any:
    """Returns the transposed convolution over three dimensions; see `conv_transpose2d`."""
    return _conv_transpose(
        "conv_transpose3d", 3, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def _conv_transpose(
    function: str,
    count: int,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> Any:
    found = common(function, x, ("weight", weight), ("bias", bias))
    rank, shape = len(x.shape), weight.shape
    if (
        not count < rank <= count + 2
        or len(shape) != count + 2
        or x.shape[rank - count - 1] != shape[0]
        or shape[0] % groups
    ):
        raise shape_error(
            function,
            f"x (batch, in, {count} sizes) and weight (in, out / {groups}, {count} sizes)",
            x=x,
            weight=weight,
        )
    if bias is not None and tuple(bias.shape) != (shape[1] * groups,):
        raise shape_error(function, "a bias (out,)", weight=weight, bias=bias)
    stride = sizes(function, "stride", stride, count)
    dilation = sizes(function, "dilation", dilation, count)
    padding = sizes(function, "padding", padding, count, least=0)
    extra = sizes(function, "output_padding", output_padding, count, least=0)
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        raise ValueError(
            f"{function}: output_padding={extra} must be less than stride={stride} or "
            f"dilation={dilation}"
        )
    spatial = x.shape[rank - count :]
    new = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(
            spatial, stride, padding, dilation, shape[2:], extra, strict=True
        )
    ]
    if min(new) < 1:
        raise ValueError(f"{function}: padding={padding} leaves a result of sizes {tuple(new)}")
    args = (weight, bias, stride, padding, extra, groups, dilation)
    if rank == count + 1:
        return found.conv_transpose(x[None], *args)[0]
    return found.conv_transpose(x, *args)


# --- pooling -------------------------------------------------------------------------------------


def max_pool1d(x: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0) -> Any:
    """Returns the largest element of each window of one dimension; see `max_pool2d`."""
    return _pool("max_pool1d", 1, x, kernel_size, stride, padding)


def max_pool2d(x: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0) -> Any:
    """Returns the largest element of each window.

    Args:
        x: Of shape (batch, channels, height, width) or (channels, height, width).
        kernel_size: The window: an integer, or one per dimension.
        stride: Its step; that of the window's size if it is None.
        padding: What is put around x, as the least number: at most half of the window.

    Returns:
        Of shape (batch, channels, new height, new width). Windows that do not fit are left out. The
        gradient goes to the first of several equal elements.
    """
    return _pool("max_pool2d", 2, x, kernel_size, stride, padding)


def max_pool3d(x: Any, kernel_size: Ints, stride: Any = None, padding: Ints = 0) -> Any:
    """Returns the largest element of each window of three dimensions; see `max_pool2d`."""
    return _pool("max_pool3d", 3, x, kernel_size, stride, padding)


def avg_pool1d(
    x: Any,
    kernel_size: Ints,
    stride: Any = None,
    padding: Ints = 0,
    *,
    count_include_pad: bool = True,
) -> Any:
    """Returns the mean of each window of one dimension; see `avg_pool2d`."""
    return _pool("avg_pool1d", 1, x, kernel_size, stride, padding, count_include_pad)


def avg_pool2d(
    x: Any,
    kernel_size: Ints,
    stride: Any = None,
    padding: Ints = 0,
    *,
    count_include_pad: bool = True,
) -> Any:
    """Returns the mean of each window.

    Args:
        x: Of shape (batch, channels, height, width) or (channels, height, width).
        kernel_size: The window: an integer, or one per dimension.
        stride: Its step; that of the window's size if it is None.
        padding: Zeros around x: at most half of the window.
        count_include_pad: Whether these zeros count as elements.

    Returns:
        Of shape (batch, channels, new height, new width).
    """
    return _pool("avg_pool2d", 2, x, kernel_size, stride, padding, count_include_pad)


def avg_pool3d(
    x: Any,
    kernel_size: Ints,
    stride: Any = None,
    padding: Ints = 0,
    *,
    count_include_pad: bool = True,
) -> Any:
    """Returns the mean of each window of three dimensions; see `avg_pool2d`."""
    return _pool("avg_pool3d", 3, x, kernel_size, stride, padding, count_include_pad)


def _pool(
    function: str,
    count: int,
    x: Any,
    kernel_size: Ints,
    stride: Any,
    padding: Ints,
    count_include_pad: bool | None = None,
) -> Any:
    found = (kernels if count_include_pad is None else floating)(function, x)
    rank = len(x.shape)
    if not count < rank <= count + 2:
        raise shape_error(function, f"x (batch, channels, {count} sizes)", x=x)
    window = sizes(function, "kernel_size", kernel_size, count)
    step = window if stride is None else sizes(function, "stride", stride, count)
    around = sizes(function, "padding", padding, count, least=0)
    if any(p > k // 2 for p, k in zip(around, window, strict=True)):
        raise ValueError(f"{function}: padding={around} is more than half of kernel_size={window}")
    check_windows(function, x, window, tuple([(p, p) for p in around]))
    batched = x if rank == count + 2 else x[None]
    if count_include_pad is None:
        out = found.max_pool(batched, window, step, around)
    else:
        out = found.avg_pool(batched, window, step, around, count_include_pad)
    return out if rank == count + 2 else out[0]


# --- activations ---------------------------------------------------------------------------------


def relu(x: Any) -> Any:
    """Computes `max(x, 0)`; its gradient at 0 is 0."""
    return kernels("relu", x).relu(x)


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    """Returns the positive part of x, elsewhere `negative_slope * x`."""
    return floating("leaky_relu", x).leaky_relu(x, negative_slope)


def elu(x: Any, alpha: float = 1.0) -> Any:
    """Returns the positive part of x, elsewhere `alpha * (exp(x) - 1)` (Clevert et al., 2016)."""
    return floating("elu", x).elu(x, alpha)


def gelu(x: Any, approximate: str = "none") -> Any:
    """Multiplies x by the normal distribution function of x (Hendrycks and Gimpel, 2016).

    Args:
        x: Of any shape.
        approximate: "none", or "tanh" for the formula with a hyperbolic tangent.
    """
    found = floating("gelu", x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate={approximate!r} is neither 'none' nor 'tanh'")
    return found.gelu(x, approximate == "tanh")


def silu(x: Any) -> Any:
    """Computes `x * sigmoid(x)`."""
    return floating("silu", x).silu(x)


def sigmoid(x: Any) -> Any:
    """Computes `1 / (1 + exp(-x))`."""
    return floating("sigmoid", x).sigmoid(x)


def softplus(x: Any, beta: float = 1.0) -> Any:
    """Computes `log(1 + exp(beta * x)) / beta` in full precision for all x, without a threshold."""
    return floating("softplus", x).softplus(x, beta)


def softmax(x: Any, dim: int = -1) -> Any:
    """Computes `exp(x) / sum(exp(x))` along a dimension, without overflow.

    float16 and bfloat16 are summed in float32.
    """
    return floating("softmax", x).softmax(x, axis_of("softmax", x, dim))


def log_softmax(x: Any, dim: int = -1) -> Any:
    """Returns the logarithm of `softmax`."""
    return floating("log_softmax", x).log_softmax(x, axis_of("log_softmax", x, dim))


def logsumexp(x: Any, dim: int = -1, *, keepdim: bool = False) -> Any:
    """Computes `log(sum(exp(x)))` along a dimension, without overflow."""
    return floating("logsumexp", x).logsumexp(x, axis_of("logsumexp", x, dim), keepdim)


# --- normalisation -------------------------------------------------------------------------------


def layer_norm(
    x: Any, normalized_shape: Ints, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Normalises the last dimensions to mean 0 and variance 1, then scales (Ba et al., 2016).

    Args:
        x: Of shape (..., *normalized_shape).
        normalized_shape: The sizes of these dimensions.
        weight: The scale, of that shape.
        bias: What is added, of that shape.
        eps: Added to the variance.
    """
    floating("layer_norm", x)
    found = common("layer_norm", x, ("weight", weight), ("bias", bias))
    shape = _last("layer_norm", x, normalized_shape, weight=weight, bias=bias)
    return found.layer_norm(x, shape, weight, bias, eps)


def rms_norm(x: Any, normalized_shape: Ints, weight: Any = None, eps: float | None = None) -> Any:
    """Normalises the last dimensions to mean square 1, then scales (Zhang and Sennrich, 2019).

    Args:
        x: Of shape (..., *normalized_shape).
        normalized_shape: The sizes of these dimensions.
        weight: The scale, of that shape.
        eps: Added to the mean square; the machine epsilon of x's dtype if it is None.
    """
    floating("rms_norm", x)
    found = common("rms_norm", x, ("weight", weight))
    shape = _last("rms_norm", x, normalized_shape, weight=weight)
    return found.rms_norm(x, shape, weight, eps)


def _last(function: str, x: Any, shape: Ints, **scales: Any) -> tuple[int, ...]:
    found = (shape,) if isinstance(shape, int) else tuple(shape)
    if not found or tuple(x.shape[len(x.shape) - len(found) :]) != found:
        raise shape_error(function, f"x that ends in {found}", x=x)
    for name, scale in scales.items():
        if scale is not None and tuple(scale.shape) != found:
            raise shape_error(function, f"a {name} of shape {found}", **{name: scale})
    return found


def group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Normalises groups of channels to mean 0 and variance 1, then scales (Wu and He, 2018).

    Args:
        x: Of shape (batch, channels, ...).
        num_groups: How many groups there are.
        weight: The scale, of shape (channels,).
        bias: What is added, of shape (channels,).
        eps: Added to the variance.
    """
    floating("group_norm", x)
    found = common("group_norm", x, ("weight", weight), ("bias", bias))
    if len(x.shape) < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise shape_error(
            "group_norm", f"x (batch, channels, ...) with channels in {num_groups} groups", x=x
        )
    _per_channel("group_norm", x, weight=weight, bias=bias)
    return found.group_norm(x, num_groups, weight, bias, eps)


def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, Any, Any]:
    """Normalises channels over the batch to mean 0, variance 1, then scales (Ioffe, Szegedy, 2015).

    Nothing is changed in place: keep what comes back.

    Args:
        x: Of shape (batch, channels, ...).
        running_mean: What is known of the mean, of shape (channels,).
        running_var: What is known of the variance, of shape (channels,).
        weight: The scale, of shape (channels,).
        bias: What is added, of shape (channels,).
        training: Whether to take mean and variance from the batch, else what is known of them.
        momentum: How much of the batch goes into the running values: new = (1 - momentum) * old +
            momentum * batch, with the unbiased variance. No gradient goes through these.
        eps: Added to the variance.

    Returns:
        The result, the new running mean and the new running variance. Without `training` the last
        two are those that were given.
    """
    floating("batch_norm", x)
    found = common(
        "batch_norm",
        x,
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    )
    if len(x.shape) < 2:
        raise shape_error("batch_norm", "x (batch, channels, ...)", x=x)
    _per_channel(
        "batch_norm",
        x,
        running_mean=running_mean,
        running_var=running_var,
        weight=weight,
        bias=bias,
    )
    if not training:
        out = found.batch_norm_with(x, running_mean, running_var, weight, bias, eps)
        return out, running_mean, running_var
    if math.prod(x.shape) <= x.shape[1]:
        raise shape_error("batch_norm", "more than one value per channel, or training=False", x=x)
    result: tuple[Any, Any, Any] = found.batch_norm(
        x, running_mean, running_var, weight, bias, momentum, eps
    )
    return result


def _per_channel(function: str, x: Any, **scales: Any) -> None:
    for name, scale in scales.items():
        if scale is not None and tuple(scale.shape) != (x.shape[1],):
            raise shape_error(function, f"a {name} (channels,)", x=x, **{name: scale})


def dropout(x: Any, rate: float, key: Any, *, training: bool = True) -> Any:
    """Sets elements to zero with probability `rate` and scales the others by `1 / (1 - rate)`.

    Args:
        x: Of any shape.
        rate: The probability.
        key: A key of `fmapper.random`, of any backend; inside torch.compile a tensor. The same key
            drops the same elements on every backend: those where
            `random.bernoulli(key, 1 - rate, x.shape)` is false.
        training: Whether to do so at all; else x comes back.
    """
    found = kernels("dropout", x)
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: rate={rate} is not a probability")
    if not training or rate == 0:
        return x
    floating("dropout", x)
    kept = random.bernoulli(key, 1 - rate, tuple(x.shape), like=x)
    return found.dropout(x, kept, 0.0 if rate == 1 else 1 / (1 - rate))


# --- attention -----------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Computes `softmax(query @ key.T * scale + mask) @ value` (Vaswani et al., 2017).

    Args:
        query: Of shape (..., L, E).
        key: Of shape (..., S, E).
        value: Of shape (..., S, V).
        attn_mask: Broadcasts to (..., L, S): bool, true where a query may look, or floats
            that are added.
        is_causal: A query looks at keys up to its own place, counted from the front; then there is
            no mask.
        scale: 1 / sqrt(E) if it is None.

    Returns:
        Of shape (..., L, V); zeros for a query that may look nowhere by a bool mask.
    """
    name = "scaled_dot_product_attention"
    floating(name, query, "query")
    found = common(name, query, ("key", key), ("value", value), ("attn_mask", attn_mask))
    ranks = len(query.shape), len(key.shape), len(value.shape)
    if (
        min(ranks) < 2
        or query.shape[-1] != key.shape[-1]
        or key.shape[-2] != value.shape[-2]
        or len({*ranks}) > 1
    ):
        raise shape_error(
            name, "query (..., L, E), key (..., S, E), value (..., S, V)",
            query=query, key=key, value=value,
        )  # fmt: skip
    if is_causal and attn_mask is not None:
        raise ValueError(f"{name}: give attn_mask or is_causal, not both")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    return found.attention(query, key, value, attn_mask, is_causal, scale)


# --- losses --------------------------------------------------------------------------------------


def cross_entropy(
    x: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes `-log(softmax(x)[target])`.

    Args:
        x: Logits of shape (batch, classes, ...) or (classes,).
        target: Indices of classes, integers of shape (batch, ...) or (); or probabilities, floats
            of the shape of x.
        ignore_index: Targets with this index do not count; for indices only.
        reduction: "mean" over the targets that count (NaN if none does), "sum", or "none".
        label_smoothing: How much of each target is spread evenly over all classes.

    Returns:
        A scalar, or for "none" an array of the shape of the indices.
    """
    floating("cross_entropy", x)
    found = common("cross_entropy", x, ("target", target))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing={label_smoothing} is not in [0, 1]")
    _check_reduction("cross_entropy", reduction)
    shape, given = tuple(x.shape), tuple(target.shape)
    if not shape or (given != shape and given != (*shape[:1], *shape[2:])[: len(shape) - 1]):
        raise shape_error(
            "cross_entropy",
            "x (batch, classes, ...) and target (batch, ...) or (batch, classes, ...)",
            x=x,
            target=target,
        )
    axis = 0 if len(shape) == 1 else 1
    if given == shape:
        return found.soft_cross_entropy(x, target, axis, reduction, label_smoothing)
    check_indices("cross_entropy", "target", target)
    return found.cross_entropy(x, target, axis, ignore_index, reduction, label_smoothing)


def mse_loss(x: Any, target: Any, *, reduction: str = "mean") -> Any:
    """Returns the squared difference.

    Args:
        x: Of any shape.
        target: Of the same shape.
        reduction: "mean", "sum", or "none".
    """
    floating("mse_loss", x)
    found = common("mse_loss", x, ("target", target))
    _check_reduction("mse_loss", reduction)
    if tuple(x.shape) != tuple(target.shape):
        raise shape_error("mse_loss", "x and target of one shape", x=x, target=target)
    return found.mse_loss(x, target, reduction)


def _check_reduction(function: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{function}: reduction={reduction!r} is none of {', '.join(_REDUCTIONS)}")
