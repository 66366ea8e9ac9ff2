"""Random numbers that are the same on every backend: JAX's threefry2x32 in NumPy, torch and JAX.

A key is an array of two uint32 numbers, of any backend, so that movers take keys along and
compilers trace them. Without `like` the numbers belong to the backend and device of the key.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from fmapper.backends.arrays import HOST
from fmapper.backends.compute import Compute
from fmapper.backends.discovery import adapter_of, get_adapter
from fmapper.backends.dtypes import bare_name
from fmapper.errors import LossyCastError, UnsupportedLeafError

__all__ = [
    "bernoulli",
    "bits",
    "fold_in",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "key",
    "lecun_normal",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (32, 64, 8, 16))
_UNSIGNED = ("uint32", "uint64", "uint8", "uint16")
# The standard deviation of a standard normal distribution that is cut off at -2 and 2.
_CUT_DEVIATION = 0.87962566103423978


def key(seed: int) -> Any:
    """Returns a key from a seed: a NumPy array, which the functions here accept for any backend.

    Args:
        seed: An integer of 64 bits, signed or not.

    Returns:
        uint32 of shape (2,), equal to `jax.random.key_data(jax.random.key(seed))` with
        jax_enable_x64. Without it JAX drops the upper half of a seed.

    Raises:
        ValueError: The seed has more than 64 bits.

    Examples:
        >>> from fmapper import random
        >>> random.key(2**32 + 7)
        array([1, 7], dtype=uint32)
    """
    number = operator.index(seed)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"a seed has at most 64 bits, but {number} has {number.bit_length()}")
    return _host_kernels().key(number)


def split(key: Any, num: int | Sequence[int] = 2, *, like: Any = None) -> Any:
    """Returns several new keys from one, which must not be used again.

    Args:
        key: A key.
        num: How many, or the shape of an array of keys.
        like: An array with the backend and device for the keys.

    Returns:
        uint32 of shape (num, 2), equal to the result of `jax.random.split`.
    """
    return _exact("split", key, like, "uint32", _shape(num))


def fold_in(key: Any, data: Any, *, like: Any = None) -> Any:
    """Returns a new key from a key and a number, such as the count of a step.

    Args:
        key: A key.
        data: An integer, of which the lower 32 bits are used, or a scalar integer array.
        like: An array with the backend and device for the key. A NumPy key is moved to those of
            `data`, so that `data` may be traced.
    """
    # Dynamo cannot trace the search for an adapter, which a number does not have.
    is_array = not isinstance(data, int) and adapter_of(data) is not None
    if like is None and is_array and _kernels(key, "key").HOST:
        like = data
    return _exact("fold_in", key, like, "uint32", data)


def bits(
    key: Any, shape: int | Sequence[int] = (), dtype: Any = "uint32", *, like: Any = None
) -> Any:
    """Draws random bits as unsigned integers of 8, 16, 32 or 64 bits; `jax.random.bits`."""
    name = _dtype(dtype, _UNSIGNED)
    return _exact("bits", key, like, name, int(name[4:]), _shape(shape))


def uniform(
    key: Any,
    shape: int | Sequence[int] = (),
    dtype: Any = "float32",
    minval: Any = 0.0,
    maxval: Any = 1.0,
    *,
    like: Any = None,
) -> Any:
    """Returns floats in [minval, maxval), the numbers of `jax.random.uniform`.

    Args:
        key: A key.
        shape: The shape of the result.
        dtype: float32, float64, float16 or bfloat16.
        minval: The lower bound, a number or an array that broadcasts to the shape.
        maxval: The upper bound, reached only through rounding.
        like: An array with the backend and device for the numbers.

    Examples:
        >>> from fmapper import random
        >>> random.uniform(random.key(0), 3)
        array([0.947667  , 0.9785799 , 0.33229148], dtype=float32)
    """
    name = _dtype(dtype, _FLOATS)
    return _exact("uniform", key, like, name, _shape(shape), name, minval, maxval)


def normal(
    key: Any, shape: int | Sequence[int] = (), dtype: Any = "float32", *, like: Any = None
) -> Any:
    """Returns numbers from the normal distribution with mean 0 and variance 1.

    From a key in host memory, of NumPy or torch, every backend gets the same bits: NumPy draws
    them, and they move to the device of `like`. A key that belongs to JAX, is on a GPU or is traced
    gives numbers that differ from these by the rounding of a logarithm, a few units in the last
    place.
    """
    name = _dtype(dtype, _FLOATS)
    return _draw("normal", key, like, name, _shape(shape), name)


def truncated_normal(
    key: Any,
    lower: float,
    upper: float,
    shape: int | Sequence[int] = (),
    dtype: Any = "float32",
    *,
    like: Any = None,
) -> Any:
    """Draws from the normal distribution, given that numbers lie between two bounds; see `normal`.

    Args:
        key: A key.
        lower: The lower bound, in standard deviations.
        upper: The upper bound.
        shape: The shape of the result.
        dtype: float32, float64, float16 or bfloat16.
        like: An array with the backend and device for the numbers.
    """
    name = _dtype(dtype, _FLOATS)
    if not lower < upper:
        raise ValueError(f"lower={lower} is not below upper={upper}")
    return _draw(
        "truncated_normal", key, like, name, float(lower), float(upper), _shape(shape), name
    )


def bernoulli(
    key: Any, p: Any = 0.5, shape: int | Sequence[int] | None = None, *, like: Any = None
) -> Any:
    """Draws True with probability p: whether a float32 of `uniform` is below p.

    Args:
        key: A key.
        p: A probability, or an array of them, taken as float32.
        shape: The shape of the result; that of p if it is None.
        like: An array with the backend and device for the result.

    Examples:
        >>> from fmapper import random
        >>> random.bernoulli(random.key(0), 0.5, 3)
        array([False, False,  True])
    """
    return _exact("bernoulli", key, like, "bool", p, None if shape is None else _shape(shape))


def randint(
    key: Any,
    shape: int | Sequence[int],
    minval: Any,
    maxval: Any,
    dtype: Any = "int32",
    *,
    like: Any = None,
) -> Any:
    """Returns integers in [minval, maxval), the numbers of `jax.random.randint`.

    Args:
        key: A key.
        shape: The shape of the result.
        minval: The lower bound, clipped to the range of the dtype.
        maxval: The upper bound, exclusive. If it is not above minval, the result is minval.
        dtype: An integer dtype.
        like: An array with the backend and device for the numbers.
    """
    name = _dtype(dtype, _INTEGERS)
    return _exact("randint", key, like, name, _shape(shape), minval, maxval, name)


def permutation(
    key: Any, x: Any, axis: int = 0, *, independent: bool = False, like: Any = None
) -> Any:
    """Returns the integers below x in random order, or an array shuffled along an axis.

    Args:
        key: A key.
        x: An integer, or an array of one dimension or more; then the result is on its backend.
        axis: The axis that is shuffled.
        independent: Whether each row gets an order of its own.
        like: For an integer x, an array with the backend and device for the result.
    """
    if hasattr(x, "__index__") and not getattr(x, "shape", ()):
        return _exact("permutation", key, like, "int32", operator.index(x), 0, False)
    if adapter_of(x) is None or not x.shape:
        raise TypeError(f"permutation takes an integer or an array of one dimension or more: {x!r}")
    if not -len(x.shape) <= axis < len(x.shape):
        raise ValueError(f"axis {axis} of an array of shape {tuple(x.shape)}")
    place = axis % len(x.shape)
    return _native("permutation", key, x, x, place, independent)


def glorot_uniform(
    key: Any,
    shape: Sequence[int],
    dtype: Any = "float32",
    *,
    in_axis: int | Sequence[int] = 1,
    out_axis: int | Sequence[int] = 0,
    like: Any = None,
) -> Any:
    """Returns weights with variance 2 / (fan_in + fan_out), uniform (Glorot and Bengio, 2010).

    Args:
        key: A key.
        shape: The shape of the weights.
        dtype: float32, float64, float16 or bfloat16.
        in_axis: The axes of the inputs. The default is that of torch's layouts, (out, in, ...);
            a weight that is multiplied from the right, (in, out), has `in_axis=0, out_axis=1`.
        out_axis: The axes of the outputs. All other axes are the receptive field: the fans are the
            sizes of inputs and outputs times its size.
        like: An array with the backend and device for the weights.
    """
    fan_in, fan_out = _fans(shape, in_axis, out_axis)
    return _uniform_weights(key, shape, dtype, 2 / (fan_in + fan_out), like)


def glorot_normal(
    key: Any,
    shape: Sequence[int],
    dtype: Any = "float32",
    *,
    in_axis: int | Sequence[int] = 1,
    out_axis: int | Sequence[int] = 0,
    like: Any = None,
) -> Any:
    """Draws normal weights with variance 2 / (fan_in + fan_out), truncated at two deviations.

    Arguments as for `glorot_uniform`.
    """
    fan_in, fan_out = _fans(shape, in_axis, out_axis)
    return _normal_weights(key, shape, dtype, 2 / (fan_in + fan_out), like)


def he_uniform(
    key: Any,
    shape: Sequence[int],
    dtype: Any = "float32",
    *,
    in_axis: int | Sequence[int] = 1,
    out_axis: int | Sequence[int] = 0,
    like: Any = None,
) -> Any:
    """Draws weights with variance 2 / fan_in, uniform: for layers before ReLU (He et al., 2015).

    Arguments as for `glorot_uniform`.
    """
    return _uniform_weights(key, shape, dtype, 2 / _fans(shape, in_axis, out_axis)[0], like)


def he_normal(
    key: Any,
    shape: Sequence[int],
    dtype: Any = "float32",
    *,
    in_axis: int | Sequence[int] = 1,
    out_axis: int | Sequence[int] = 0,
    like: Any = None,
) -> Any:
    """Draws normal weights with variance 2 / fan_in, truncated at two standard deviations.

    Arguments as for `glorot_uniform`.
    """
    return _normal_weights(key, shape, dtype, 2 / _fans(shape, in_axis, out_axis)[0], like)


def lecun_normal(
    key: Any,
    shape: Sequence[int],
    dtype: Any = "float32",
    *,
    in_axis: int | Sequence[int] = 1,
    out_axis: int | Sequence[int] = 0,
    like: Any = None,
) -> Any:
    """Draws normal weights with variance 1 / fan_in, truncated at two standard deviations.

    Arguments as for `glorot_uniform`.
    """
    return _normal_weights(key, shape, dtype, 1 / _fans(shape, in_axis, out_axis)[0], like)


# --- dispatch to kernels -------------------------------------------------------------------------


def _exact(name: str, key: Any, like: Any, dtype: str, *args: Any) -> Any:
    """Calls a kernel that gives the same bits on every backend, on the device of the result."""
    return _native(name, key, key if like is None else like, *args, dtype=dtype)


def _native(name: str, key: Any, like: Any, *args: Any, dtype: str = "") -> Any:
    owner, words = _source(key)
    target = _kernels(like, "like")
    if target is not owner:
        words = target.put(owner.to_host(words), like)
    elif like is not key:
        words = target.put(words, like)
    _check_storable(like, dtype)
    if name != "permutation" and target.on_host(words, dtype) and _plain(args):
        drawn = getattr(_host_kernels(), name)(target.to_host(words), *args)
        return target.put(drawn, words)
    return getattr(target, name)(words, *args)


def _plain(args: Sequence[Any]) -> bool:
    """Returns whether the bounds are plain numbers or NumPy arrays."""
    return all(isinstance(x, int | float | str | tuple) or x is None for x in args)


def _draw(name: str, key: Any, like: Any, dtype: str, *args: Any) -> Any:
    """Calls a kernel whose bits depend on the backend, on the host if the key is there."""
    owner, words = _source(key)
    if not owner.HOST and not owner.on_host(words, dtype):
        return _native(name, key, key if like is None else like, *args, dtype=dtype)
    drawn = getattr(_host_kernels(), name)(owner.to_host(words), *args)
    place = words if like is None else like
    _check_storable(place, dtype)
    return _kernels(place, "like").put(drawn, place)


def _source(key: Any) -> tuple[Any, Any]:
    kernels = _kernels(key, "key")
    words = kernels.raw(key)
    if words is None:
        raise TypeError(
            "a key is an array of two uint32 numbers, from fmapper.random.key(seed); got dtype "
            f"{key.dtype} and shape {tuple(key.shape)}. Map over several keys with vmap."
        )
    return kernels, words


def _host_kernels() -> Any:
    return get_adapter(HOST.backend, Compute).random


def _kernels(x: Any, what: str) -> Any:
    adapter = adapter_of(x)
    if adapter is None:
        hint = "Write fmapper.random.key(seed)." if what == "key" else "Give an array."
        raise TypeError(f"{what}={x!r} is a {type(x).__name__}, not an array. {hint}")
    kernels = adapter.random if isinstance(adapter, Compute) else None
    if kernels is None:
        raise UnsupportedLeafError(f"the {adapter.name} adapter draws no random numbers")
    return kernels


def _check_storable(place: Any, dtype: str) -> None:
    reason = _kernels(place, "like").lacks(dtype)
    if reason:
        raise LossyCastError(reason)


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, Sequence):
        sizes = tuple(map(operator.index, shape))
    else:
        sizes = (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape has no negative sizes: {sizes}")
    return sizes


def _dtype(dtype: Any, allowed: Sequence[str]) -> str:
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = bare_name(dtype)
    if name not in allowed:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(allowed)}")
    return name


# --- initial weights -----------------------------------------------------------------------------


def _fans(
    shape: Sequence[int], in_axis: int | Sequence[int], out_axis: int | Sequence[int]
) -> tuple[float, float]:
    sizes = _shape(shape)
    try:
        inputs, outputs = (
            math.prod([sizes[at] for at in ((axis,) if isinstance(axis, int) else axis)])
            for axis in (in_axis, out_axis)
        )
    except IndexError:
        raise ValueError(
            f"weights of shape {sizes} have no axes in_axis={in_axis}, out_axis={out_axis}. Name "
            "the axes of inputs and outputs, () for none."
        ) from None
    if not math.prod(sizes):
        raise ValueError(f"weights of shape {sizes} have no elements, so no fans either")
    field = math.prod(sizes) / inputs / outputs
    return inputs * field, outputs * field


def _uniform_weights(key: Any, shape: Sequence[int], dtype: Any, variance: float, like: Any) -> Any:
    drawn = uniform(key, shape, dtype, -1.0, 1.0, like=like)
    return _kernels(drawn, "like").scale(drawn, math.sqrt(3 * variance))


def _normal_weights(key: Any, shape: Sequence[int], dtype: Any, variance: float, like: Any) -> Any:
    drawn = truncated_normal(key, -2, 2, shape, dtype, like=like)
    return _kernels(drawn, "like").scale(drawn, math.sqrt(variance) / _CUT_DEVIATION)
