"""Normalises the arguments of neural functions: backends, sizes, paddings."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import fmapper
from fmapper.backends.compute import Compute
from fmapper.backends.discovery import adapter_of
from fmapper.backends.dtypes import is_inexact
from fmapper.errors import MixedDevicesError, UnsupportedLeafError

Ints: TypeAlias = int | Sequence[int]
Pads: TypeAlias = tuple[tuple[int, int], ...]
_is_inexact = is_inexact.__wrapped__  # see `_dtype`

Padding: TypeAlias = str | int | Sequence[int] | Sequence[tuple[int, int]]


def kernels(function: str, x: Any) -> Any:
    """Returns the kernels of the backend of an array.

    Raises:
        TypeError: `x` is not an array.
        UnsupportedLeafError: The adapter of its backend has no kernels.
    """
    adapter = adapter_of(x)
    if adapter is None:
        raise TypeError(
            f"{function}: x is a {type(x).__name__}, not an array. Create one of the desired "
            f"backend: numpy.asarray, torch.as_tensor or jax.numpy.asarray."
        )
    functional = adapter.functional if isinstance(adapter, Compute) else None
    if functional is None:
        raise UnsupportedLeafError(
            f"{function}: the {adapter.name} adapter has no neural functions. "
            "Move the arrays first: to_torch, to_jax or to_numpy."
        )
    return functional


def floating_kernels(function: str, x: Any, name: str = "x") -> Any:
    """Returns the kernels of a floating or complex array; raises for integers.

    Raises:
        TypeError: `x` is not an array, or its dtype is neither floating nor complex.
        UnsupportedLeafError: Its adapter has no kernels.
    """
    functional = kernels(function, x)
    dtype = _dtype(x)
    if not _is_inexact(dtype):
        raise TypeError(
            f"{function}: {name} is of dtype {dtype}, which cannot hold the result. Cast it to a "
            f"floating-point dtype first, with astype of its fmapper.array_namespace."
        )
    return functional


def check_indices(function: str, name: str, x: Any) -> None:
    """Raises for indices that are not integers.

    Raises:
        TypeError: They are not integers.
    """
    dtype = _dtype(x)
    if _is_inexact(dtype):
        raise TypeError(
            f"{function}: {name} holds indices, but is of dtype {dtype}. Cast it to an integer "
            f"dtype."
        )


def _dtype(x: Any) -> str:
    """Returns the dtype's name without a cache: torch.compile warns about caches that it traces."""
    return getattr(x.dtype, "name", None) or str(x.dtype).rpartition(".")[2]


def common(function: str, x: Any, *others: tuple[str, Any]) -> Any:
    """Returns the kernels of the one backend that all arrays belong to; others may be None.

    Raises:
        MixedDevicesError: The arrays belong to several backends; names the first that differs.
        TypeError: One of them is not an array.
    """
    functional = kernels(function, x)
    cls = type(x)
    for name, other in others:
        if other is None or type(other) is cls:
            continue
        adapter = adapter_of(other)
        if not isinstance(adapter, Compute) or adapter.functional is not functional:
            raise _mixing_error(function, x, name, other)
    return functional


def _mixing_error(function: str, x: Any, name: str, other: Any) -> Exception:
    owner, adapter = adapter_of(x), adapter_of(other)
    assert owner is not None
    if adapter is None:
        return TypeError(f"{function}: {name} is a {type(other).__name__}, not an array.")
    mover = f"to_{owner.name}" if hasattr(fmapper, f"to_{owner.name}") else "to_device"
    return MixedDevicesError(
        f"{function}: the first argument is an array of {owner.name}, but {name} is one of "
        f"{adapter.name}. Move one of them first: {mover}({name})."
    )


def shape_error(function: str, expected: str, **arrays: Any) -> ValueError:
    """Returns the error for shapes that a function does not accept."""
    given = ", ".join(f"{name} {tuple(a.shape)}" for name, a in arrays.items() if a is not None)
    return ValueError(f"{function}: expected {expected}, got {given}")


def sizes(function: str, name: str, value: Any, count: int, *, least: int = 1) -> tuple[int, ...]:
    """Returns one integer per spatial dimension from one integer or several.

    Raises:
        ValueError: There are too many, too few, or one is too small.
    """
    if type(value) is int and value >= least:  # the usual case
        return (value,) * count
    if isinstance(value, int):
        values: tuple[int, ...] = (value,) * count
    elif isinstance(value, Sequence):
        values = tuple([operator.index(v) for v in value])
    else:
        values = (operator.index(value),) * count
    if len(values) != count or min(values) < least:
        raise ValueError(
            f"{function}: {name}={value!r} must be one integer or {count}, each at least {least}"
        )
    return values


def pads(
    function: str,
    padding: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Pads:
    """Returns the padding before and after each spatial dimension.

    Raises:
        ValueError: The padding has none of the accepted forms.
    """
    count = len(kernel)
    if isinstance(padding, int):
        if padding < 0:
            raise ValueError(f"{function}: padding={padding} is negative")
        return ((padding, padding),) * count
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * count
        if padding != "same":
            raise ValueError(f"{function}: padding={padding!r} is neither 'same' nor 'valid'")
        if max(stride) > 1:
            raise ValueError(
                f"{function}: padding='same' requires stride 1, not {tuple(stride)}, because "
                f"frameworks disagree otherwise. Pass the padding as numbers."
            )
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple([(t // 2, t - t // 2) for t in total])
    if len(padding) == count and all(isinstance(p, Sequence) for p in padding):
        both = tuple([sizes(function, "padding", p, 2, least=0) for p in padding])
        return tuple([(low, high) for low, high in both])
    return tuple([(p, p) for p in sizes(function, "padding", padding, count, least=0)])


def check_windows(function: str, x: Any, kernel: Sequence[int], padding: Pads) -> None:
    """Raises for a window that is larger than the padded array.

    Raises:
        ValueError: The window does not fit; the message has both sizes.
    """
    spatial = x.shape[len(x.shape) - len(kernel) :]
    for size, window, (low, high) in zip(spatial, kernel, padding, strict=True):
        if size + low + high < window:
            padded = tuple(s + a + b for s, (a, b) in zip(spatial, padding, strict=True))
            raise ValueError(
                f"{function}: windows of {tuple(kernel)} (dilation included) do not fit into "
                f"{tuple(padded)}, the padded x of shape {tuple(x.shape)}"
            )


def axis_of(function: str, x: Any, dim: int) -> int:
    """Returns a dimension counted from the front.

    Raises:
        ValueError: There is no such dimension.
    """
    rank = len(x.shape)
    if not -rank <= dim < rank:
        raise ValueError(f"{function}: dim={dim}, but x has shape {tuple(x.shape)}")
    return dim % rank
