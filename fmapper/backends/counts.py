"""What one run of a model asks of an accelerator, in numbers that need no accelerator to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What one run of a model asks of an accelerator.

    Attributes:
        launches: How many kernels it starts.
        flops: Floating point operations; a multiplication and an addition are two.
        nbytes: Bytes that the kernels read from and write to the memory of the device.
        syncs: How often it waits for a value to come to the host: `.item()`, `bool(x)`, `.cpu()`.
        compiled: Whether one program is started and starts the kernels, instead of Python.
        unseen: What could not be counted, in words.
    """

    launches: float
    flops: float
    nbytes: float
    syncs: float = 0
    compiled: bool = False
    unseen: tuple[str, ...] = ()
