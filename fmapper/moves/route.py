"""Whose a leaf becomes and where; for NumPy arrays on their way to a GPU that takes a choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from fmapper.backends.arrays import Arrays, Device
from fmapper.backends.device import DeviceSpec
from fmapper.backends.discovery import get_adapter, installed_backends
from fmapper.errors import BackendUnavailableError, DeviceError, DeviceUnavailableError


class Target(NamedTuple):
    """Whose array a leaf becomes, where, and why it stays if there was no such device."""

    adapter: Arrays
    device: Device
    note: str = ""


class Generator(NamedTuple):
    """A random generator among the leaves: whose it is, where it is, and where it is to be."""

    adapter: Arrays
    origin: Device
    device: Device
    stays: bool


def gpu_for_host_arrays(spec: DeviceSpec) -> Target:
    """Tells where arrays go that are never on a GPU themselves.

    Raises:
        DeviceUnavailableError: No backend sees a GPU.
        DeviceError: Several do, and none was chosen.
    """
    name = _gpu_backend()
    if name is None:
        raise DeviceUnavailableError(
            f"{spec} is not available: no installed backend sees a GPU ({_what_was_seen()})."
        )
    target = get_adapter(name, Arrays)
    return Target(target, target.find_device(spec.kind, spec.index))


_preferred: list[str] = []


def use_backend(name: str | None) -> AbstractContextManager[None]:
    """Says which backend `to_gpu` sends NumPy arrays to; None takes that back.

    It holds from now on, or, as `with use_backend("jax"):`, until the end of the block.

    Raises:
        BackendUnavailableError: There is no such backend here.
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
    seeing = [
        adapter.name
        for adapter in _working_adapters()
        if any(device.kind != "cpu" for device in adapter.devices())
    ]
    if _preferred:
        if _preferred[0] not in seeing:
            raise DeviceUnavailableError(
                f"{_preferred[0]} was chosen with use_backend, but sees no GPU "
                f"({_what_was_seen()})."
            )
        return _preferred[0]
    if len(seeing) < 2:
        return next(iter(seeing), None)
    raise DeviceError(
        f"NumPy has no GPU, and several backends see one: {', '.join(seeing)}. Choose one with "
        f"fmapper.use_backend({seeing[0]!r}), or name it: to_{seeing[0]}(device='gpu')."
    )


def _what_was_seen() -> str:
    reasons = [
        f"{adapter.name}: {adapter.why_not(adapter.aliases.get('gpu', 'gpu'), None)}"
        for adapter in _working_adapters()
        if not adapter.host_only
    ]
    return "; ".join(reasons) or "neither torch nor jax is installed"


def _working_adapters() -> list[Arrays]:
    found = []
    for name in installed_backends():
        try:
            found.append(get_adapter(name, Arrays))
        except BackendUnavailableError:  # installed, but broken
            continue
    return found
