"""dtypes of JAX in torch."""

from __future__ import annotations

import torch

# torch can do little but store these: arithmetic, indexing and sorting need signed integers.
_CARRIERS = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype that users see.

    Raises:
        TypeError: torch has no dtype of this name.
    """
    dtype = getattr(torch, "bool" if name == "bool" else name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name}")
    return dtype


def carrier_of(name: str) -> torch.dtype:
    """Returns the dtype that carries a dtype of JAX inside a graph."""
    return _CARRIERS.get(name) or dtype_of(name)


def is_carried(name: str) -> bool:
    """Returns whether values are carried as integers of another dtype."""
    return name in _CARRIERS


def to_signed(dtype: torch.dtype) -> torch.dtype | None:
    """Returns the signed dtype that carries an unsigned one; None for other dtypes."""
    return _CARRIERS.get(str(dtype).removeprefix("torch."))


def carried_number(value: object, name: str) -> object:
    """Returns the carried form of a number of a dtype."""
    if name in _CARRIERS and isinstance(value, int):
        bits = torch.iinfo(_CARRIERS[name]).bits
        return value - (1 << bits) if value >= 1 << (bits - 1) else value
    return value


def bits_of(dtype: torch.dtype) -> int:
    """Returns the number of bits of an integer dtype."""
    return torch.iinfo(dtype).bits
