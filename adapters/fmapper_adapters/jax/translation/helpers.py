"""Functions that a file of code for JAX has where an operation takes more than one line."""

from __future__ import annotations

from inspect import cleandoc

from fmapper.translation import CHECK_SHAPES

HELPERS: dict[str, str] = {}


def _enter(source: str) -> None:
    source = cleandoc(source)
    HELPERS[source.split("(")[0].split()[-1]] = source


_enter('''
def attention(query, key, value, mask=None, scale=None, is_causal=False, dropout=None):
    """Computes scaled dot-product attention; fully masked rows give zeros."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.swapaxes(-1, -2)
    logits = jnp.matmul(query, key, preferred_element_type=jnp.float32) * scale
    if mask is not None and mask.dtype != bool:
        logits = logits + mask
    if is_causal:
        mask = jnp.tri(*logits.shape[-2:], dtype=bool)
    if mask is not None and mask.dtype == bool:
        logits = jnp.where(mask, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    weights = weights if dropout is None else dropout(weights)
    return (weights.astype(value.dtype) @ value).astype(query.dtype)
''')
_enter('''
def as_pairs(x):
    """Returns complex numbers as pairs of real ones, in a last dimension of two."""
    return jnp.stack([x.real, x.imag], axis=-1)
''')
_enter('''
def as_complex(x):
    """Returns pairs of real numbers, in the last dimension, as complex ones."""
    return jax.lax.complex(x[..., 0], x[..., 1])
''')
_enter('''
def as_strided(x, shape, strides, offset=0):
    """Returns the elements at `offset + i * strides[0] + j * strides[1] ...`, copied."""
    at = jnp.full((), offset, jnp.int32)
    for size, stride in zip(shape, strides, strict=True):
        at = at[..., None] + jnp.arange(size, dtype=jnp.int32) * stride
    return x.reshape(-1)[at]
''')
_enter('''
def sinusoids(length, frequencies, interleaved=False):
    """Returns the sines, then the cosines, of positions times frequencies; or both in turn."""
    frequencies = jnp.asarray(frequencies, jnp.float32)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    both = [jnp.sin(angles), jnp.cos(angles)]
    if interleaved:
        return jnp.stack(both, axis=-1).reshape(length, -1)
    return jnp.concatenate(both, axis=-1)
''')
_enter('''
def exact_sinusoids(length, width, base, interleaved=False):
    """Returns the sines, then the cosines, of positions; or both in turn. Computes in float64."""
    half = width // 2
    angles = np.arange(length)[:, None] / base ** (np.arange(half) / half)
    both = [np.sin(angles), np.cos(angles)]
    table = np.stack(both, axis=-1) if interleaved else np.concatenate(both, axis=-1)
    return jnp.asarray(table.reshape(length, width), jnp.float32)
''')
_enter('''
def gelu(x):
    """Computes GELU by erf, as PyTorch does; `jax.nn.gelu` takes erfc, which is slower."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))
''')
_enter('''
def prelu(x, weight):
    """Multiplies what is not above zero by a weight."""
    return jnp.where(x > 0, x, x * weight)
''')
_enter('''
def max_with_index(x, axis, keepdims=False):
    """Returns the largest elements along an axis and where they are."""
    return largest(x, axis, keepdims), x.argmax(axis=axis, keepdims=keepdims)
''')
_enter('''
def min_with_index(x, axis, keepdims=False):
    """Returns the smallest elements along an axis and where they are."""
    return -largest(-x, axis, keepdims), x.argmin(axis=axis, keepdims=keepdims)
''')
_enter('''
def largest(x, axis=None, keepdims=False, shared=False):
    """Returns the largest elements; the first of equal ones has the gradient, or all share it.

    That of `x.max` is zero where XLA computes `x` once more to compare it, and rounds otherwise.
    """
    axes = axis if isinstance(axis, tuple) else range(x.ndim) if axis is None else (axis,)

    def rows_of(y):
        y = jnp.moveaxis(y, axes, range(-len(axes), 0))
        return y.reshape(*y.shape[: y.ndim - len(axes)], -1)

    @jax.custom_jvp
    def compute(x):
        return x.max(axis=axis, keepdims=keepdims)

    @compute.defjvp
    def differentiate(given, slopes):
        rows, slope = rows_of(given[0]), rows_of(slopes[0])
        is_one = jax.nn.one_hot(rows.argmax(axis=-1), rows.shape[-1], dtype=bool)
        if shared:
            is_one = is_one | (rows == rows.max(axis=-1, keepdims=True))
        slope = jnp.where(is_one, slope, 0).sum(axis=-1) / is_one.sum(axis=-1)
        return compute(*given), jnp.expand_dims(slope, axes) if keepdims else slope

    return compute(x)
''')
_enter('''
def sort_with_index(x, axis=-1, descending=False):
    """Sorts along an axis; returns the elements and where they were."""
    index = jnp.argsort(x, axis=axis, descending=descending)
    return jnp.take_along_axis(x, index, axis=axis), index
''')
_enter('''
def top_k(x, k, axis=-1, largest=True):
    """Returns the k largest or smallest elements along an axis, and where they are."""
    index = jnp.argsort(x, axis=axis, descending=largest)
    index = jax.lax.slice_in_dim(index, 0, k, axis=axis)
    return jnp.take_along_axis(x, index, axis=axis), index
''')
_enter('''
def layer_norm(x, axes=1, weight=None, bias=None, eps=1e-5):
    """Normalises the last axes to zero mean and unit variance, in float32."""
    axis = tuple(range(-axes, 0))
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = y - y.mean(axis=axis, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=axis, keepdims=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.astype(x.dtype)
''')
_enter('''
def rms_norm(x, axes=1, weight=None, eps=None):
    """Divides by the root mean square over the last axes, in float32."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    eps = jnp.finfo(y.dtype).eps if eps is None else eps
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=tuple(range(-axes, 0)), keepdims=True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)
''')
_enter('''
def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    """Normalises groups of channels, of x with axes (batch, channels, ...), in float32."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(x.shape[0], groups, -1)
    centred = y - y.mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    y, shape = y.reshape(x.shape), (1, -1, *(1,) * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return y.astype(x.dtype)
''')
_enter('''
def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolves x (batch, in, ...) with weight (out, in / groups, ...)."""
    count = weight.ndim - 2
    stride, padding, dilation = (
        v * count if len(v) == 1 else v
        for v in (v if isinstance(v, tuple) else (v,) for v in (stride, padding, dilation))
    )
    axes = ("NCDHW"[:2] + "DHW"[3 - count :], "OI" + "DHW"[3 - count :])
    y = jax.lax.conv_general_dilated(
        x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation,
        dimension_numbers=(*axes, axes[0]), feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * count)
''')
_enter('''
def over_windows(x, start, function, window, strides, padding=0, ceil_mode=False):
    """Reduces windows over the last axes; with ceil_mode the last one may reach beyond the end."""
    first = (1,) * (x.ndim - len(window))
    padding = (padding,) * len(window) if isinstance(padding, int) else padding
    pads = [(0, 0)] * len(first)
    for size, k, s, p in zip(x.shape[len(first) :], window, strides, padding):
        extra = -(size + 2 * p - k) % s if ceil_mode else 0
        begins_inside = (size + 2 * p - k + extra) // s * s < size + p
        pads.append((p, p + extra * begins_inside))
    return jax.lax.reduce_window(x, start, function, (*first, *window), (*first, *strides), pads)
''')
_enter('''
def max_pool(x, window, strides, padding=0, ceil_mode=False):
    """Takes the largest element of windows over the last axes."""
    return over_windows(x, -jnp.inf, jax.lax.max, window, strides, padding, ceil_mode)
''')
_enter('''
def avg_pool(x, window, strides, padding=0, ceil_mode=False, count_padding=True):
    """Takes the mean of windows over the last axes."""
    total = over_windows(x, 0.0, jax.lax.add, window, strides, padding, ceil_mode)
    if count_padding and not ceil_mode:
        return total / math.prod(window)
    ones = jnp.ones(x.shape[x.ndim - len(window) :], x.dtype)
    return total / over_windows(ones, 0.0, jax.lax.add, window, strides, padding, ceil_mode)
''')
_enter('''
def adaptive_avg_pool(x, sizes):
    """Takes means over the last axes of bins of nearly the same size."""
    for axis, count in enumerate(sizes, x.ndim - len(sizes)):
        size = x.shape[axis]
        ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        means = [jax.lax.slice_in_dim(x, *e, axis=axis).mean(axis, keepdims=True) for e in ends]
        x = jnp.concatenate(means, axis)
    return x
''')
_enter('''
def resize_nearest(x, sizes):
    """Resizes the last axes to others, with the pixel at or before each place, as PyTorch does."""
    for axis, size in enumerate(sizes, x.ndim - len(sizes)):
        step = np.float32(x.shape[axis]) / np.float32(size)
        at = np.floor(np.arange(size, dtype=np.float32) * step).astype(np.int32)
        x = jnp.take(x, np.minimum(at, x.shape[axis] - 1), axis=axis)
    return x
''')
_enter('''
def check(condition, message):
    """Raises where a condition does not hold; under jit once it is known."""
    if isinstance(condition, jax.core.Tracer):
        jax.debug.callback(lambda known: check(known, message), condition)
    elif not np.all(condition):
        raise ValueError(message)
''')
_enter('''
def from_text(text, dtype):
    """Returns numbers from their bytes, compressed and written as text."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype)
''')
_enter('''
def nll_loss(log_probs, target, ignore_index=-100):
    """Computes the mean negative log-likelihood of classes; NaN where there is no such class."""
    is_known = target != ignore_index
    index = jnp.where(is_known, jnp.where(target < 0, log_probs.shape[1], target), 0)
    picked = jnp.take_along_axis(log_probs, index[:, None], axis=1, mode="fill")[:, 0]
    return -jnp.where(is_known, picked, 0).sum() / is_known.sum()
''')
_enter('''
def absolute(x):
    """Returns absolute values; at zero their slope is zero, as in PyTorch."""
    return x * jnp.sign(x)
''')
_enter('''
def vector_norm(x, axis=None, keepdims=False):
    """Computes Euclidean norms; at zero their slope is zero, as in PyTorch."""
    square = jnp.square(x).sum(axis=axis, keepdims=keepdims)
    is_zero = square == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, square)))
''')
_enter('''
def standard_deviation(x, axis=None, ddof=0, keepdims=False):
    """Computes standard deviations; where all elements are one their slope is zero."""
    var = x.var(axis=axis, ddof=ddof, keepdims=keepdims)
    is_zero = var == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, var)))
''')
_enter('''
def huber_loss(x, target, delta=1.0):
    """Returns half the square of differences up to delta, and the line that goes on from there."""
    size = jnp.abs(x - target)
    near = jnp.minimum(size, delta)
    return 0.5 * jnp.square(near) + delta * (size - near)
''')
HELPERS["binary_cross_entropy"] = '''@jax.custom_jvp
def binary_cross_entropy(x, target):
    """Computes the loss of probabilities; their logarithms are at least -100, as in PyTorch."""
    is_not = (target - 1) * jnp.maximum(jnp.log1p(-x), -100)
    return is_not - target * jnp.maximum(jnp.log(x), -100)


binary_cross_entropy.defjvps(
    lambda slope, value, x, target: slope * (x - target) / jnp.maximum((1 - x) * x, 1e-12),
    lambda slope, value, x, target: slope * (jnp.log1p(-x) - jnp.log(x)),
)'''
HELPERS["check_shapes"] = CHECK_SHAPES
for _name, _made in (("var", "x.var("), ("std", "standard_deviation(x, ")):
    HELPERS[f"{_name}_mean"] = f'''def {_name}_mean(x, ddof=0, **options):
    """Returns the {"variance" if _name == "var" else "standard deviation"} and the mean."""
    return {_made}ddof=ddof, **options), x.mean(**options)'''
HELPERS["split_key"] = '''def split_key(key, count):
    """Returns a key for each block; None where there is none."""
    return None if key is None else jax.random.split(key, count)'''
HELPERS["Keys"] = '''class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new'''
_enter('''
def places_of(mask):
    """Returns the indices of elements that hold, one row for each, and then rows beyond the end."""
    return jnp.argwhere(mask, size=mask.size, fill_value=mask.size)
''')
