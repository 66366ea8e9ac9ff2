"""Chooses the target backend and device of each leaf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from fmapper.backends.arrays import Arrays, Device
from fmapper.backends.discovery import get_adapter, working_adapters
from fmapper.errors import DeviceError, DeviceUnavailableError

if TYPE_CHECKING:
    from fmapper.backends.device import DeviceSpec


class Target(NamedTuple):
    """The target of a leaf, and why it stays if the device is missing."""

    adapter: Arrays
    device: Device
    note: str = ""


class Generator(NamedTuple):
    """A random generator among the leaves: its adapter, its device, and its target device."""

    adapter: Arrays
    origin: Device
    device: Device
    stays: bool


def gpu_for_host_arrays(spec: DeviceSpec) -> Target:
    """Chooses the GPU backend for arrays of host-only backends.

    Raises:
        DeviceUnavailableError: No backend sees a GPU.
        DeviceError: Several backends see one, and none was chosen.
    """
    name = _gpu_backend()
    if name is None:
        raise DeviceUnavailableError(
            f"{spec} is not available: no installed backend sees a GPU ({_seen_devices()})."
        )
    target = get_adapter(name, Arrays)
    device = target.find_device(spec.kind, spec.index)
    return Target(target, target.in_memory(device, spec.memory))


_preferred: list[str] = []


def use_backend(name: str | None) -> AbstractContextManager[None]:
    """Chooses the backend to which `to_gpu` sends NumPy arrays; None resets it.

    The choice lasts, or, in `with use_backend("jax"):`, holds until the end of the block.

    Raises:
        BackendUnavailableError: The backend is not installed.
    """
    before = list(_preferred)
    _preferred[:] = [] if name is None else [get_adapter(name, Arrays).name]

    @contextmanager
    def scope() -> Iterator[None]:
        try:
            yield
        finally:
            _preferred[:] = before

    return scope()


def _gpu_backend() -> str | None:
    if _preferred:
        chosen = get_adapter(_preferred[0], Arrays)
        if not any(device.is_accelerator for device in chosen.devices()):
            raise DeviceUnavailableError(
                f"{chosen.name} was chosen with use_backend, but sees no GPU "
                f"({chosen.why_not(chosen.aliases.get('gpu', 'gpu'), None)})."
            )
        return chosen.name
    seeing = [adapter.name for adapter in working_adapters() if adapter.may_have_gpu()]
    if len(seeing) < 2:
        return next(iter(seeing), None)
    raise DeviceError(
        f"NumPy has no GPU, and several backends see one: {', '.join(seeing)}. Choose one with "
        f"fmapper.use_backend({seeing[0]!r}), or name it: to_{seeing[0]}(device='gpu')."
    )


def _seen_devices() -> str:
    reasons = [
        f"{adapter.name}: {adapter.why_not(adapter.aliases.get('gpu', 'gpu'), None)}"
        for adapter in working_adapters()
        if not adapter.host_only
    ]
    return "; ".join(reasons) or "no installed framework computes on one"
