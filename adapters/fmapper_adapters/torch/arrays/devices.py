"""Torch's devices, the reasons why one is missing, and the exchange of their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.dlpack

from fmapper import Device, DeviceUnavailableError
from fmapper_adapters.torch import _private


def accelerators() -> list[Device]:
    """Returns the accelerators that torch sees, without initialising one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [Device("torch", accelerator.type, at) for at in range(torch.accelerator.device_count())]


def is_started() -> bool:
    """Returns whether this process has begun to use an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module: Any = None if accelerator is None else getattr(torch, accelerator.type, None)
    return bool(module is not None and getattr(module, "is_initialized", bool)())


def is_capturing(tensor: torch.Tensor) -> bool:
    """Returns whether the device of a tensor is capturing a graph."""
    module: Any = None if tensor.is_cpu else getattr(torch, tensor.device.type, None)
    return bool(getattr(module, "is_current_stream_capturing", bool)())


def about(kind: str, index: int) -> tuple[str | None, int | None, int | None]:
    """Returns name, total and free bytes of an accelerator; None for what torch does not know."""
    module: Any = getattr(torch, kind)
    if hasattr(module, "recommended_max_memory"):  # memory shared with the host
        total = module.recommended_max_memory()
        return None, total, max(total - module.driver_allocated_memory(), 0)
    name = module.get_device_name(index) if hasattr(module, "get_device_name") else None
    try:
        free, total = torch.accelerator.get_memory_info(index)
    except NotImplementedError:  # not implemented for this kind
        return name, None, None
    return name, total, free


def why_not(kind: str) -> str | None:
    """Explains why there is no device of a kind: the build or the driver."""
    built = torch.accelerator.current_accelerator(check_available=False)
    if built is None:
        return (
            "this torch is a CPU-only build "
            "(others, for every kind of device: https://pytorch.org/get-started/locally)"
        )
    if built.type != kind:
        return f"this torch is built for devices of kind {built.type}"
    if torch.accelerator.is_available():
        return None
    words = kind.upper(), getattr(torch.version, kind, None)
    if torch.version.hip is not None:  # AMD's devices are called cuda, too
        words = "ROCm", torch.version.hip
    build = " ".join(filter(None, words))
    reason = _what_the_driver_says(kind)
    return f"torch was built for {build}, but finds no driver or no device: {reason}"


def check_fork(device: Device) -> None:
    """Checks that this process is not a fork of one that has used the device.

    Raises:
        DeviceUnavailableError: The process is such a fork, which drivers do not survive.
    """
    if _private.is_fork_of_user(device.kind):
        raise DeviceUnavailableError(
            f"{device} is not available: this process was forked from one that has used it, and "
            f"drivers do not survive a fork. Start workers with multiprocessing"
            ".get_context('spawn') or "
            "DataLoader(..., multiprocessing_context='spawn'); or move to it in the parent process."
        )


def _what_the_driver_says(kind: str) -> str:
    """Describes the driver's answer, and the environment variable that hides devices, if set."""
    module: Any = getattr(torch, kind)
    reason = "the driver works, but reports no device"
    try:
        module.init()
    except (RuntimeError, AssertionError, AttributeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    for variable, value in os.environ.items():
        if variable.endswith("_VISIBLE_DEVICES"):
            reason += f" ({variable} is {value!r})"
    return reason


class Shared:
    """A tensor on an accelerator, to be read through DLPack.

    torch exports only memory of its current device, so this makes the tensor's device current.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        """Returns the capsule, after synchronising with the stream in `options`."""
        device = self._tensor.device
        if options.get("stream") is None:  # the reader has no stream that could wait
            torch.accelerator.current_stream(device).synchronize()
        with torch.accelerator.device_index(device.index):
            return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """Returns the kind of device in DLPack's numbers, and its index."""
        return self._tensor.__dlpack_device__()


def take(data: Sequence[Any], private: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields tensors from foreign accelerator memory, copied unless it is private.

    The memory may be reused once the last tensor was yielded.
    """
    views = []  # otherwise memory would be reused while it is read
    try:
        for at, exporter in enumerate(data):
            view = torch.utils.dlpack.from_dlpack(exporter)
            views.append(view)
            yield view.to(device, copy=at not in private)
    finally:
        if views:
            torch.accelerator.current_stream(device).synchronize()
