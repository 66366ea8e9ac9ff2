"""Devices: their names, which are available, and on which one a tree is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fmapper.backends.arrays import DEVICE_KINDS, Arrays, Device, DeviceInfo
from fmapper.backends.discovery import (
    adapter_of,
    adapters,
    get_adapter,
    installed_backends,
    known_backends,
    working_adapters,
)
from fmapper.errors import (
    BackendUnavailableError,
    DeviceError,
    DeviceUnavailableError,
    MixedDevicesError,
    UnsupportedLeafError,
)
from fmapper.render import as_html, table
from fmapper.tracebacks import short_traceback
from fmapper.tree.keypath import Link, format_link
from fmapper.tree.nodes import sync
from fmapper.tree.walk import walk

_SPEC = re.compile(
    r"(?:(?P<backend>[a-z_]\w*):)?(?P<kind>[a-z]+)(?::(?P<index>\d+))?(?:/(?P<memory>[a-z_]+))?"
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A parsed device string; the backend may be open."""

    backend: str | None
    kind: str
    index: int | None = None
    memory: str | None = None

    def __str__(self) -> str:
        parts = [self.backend, self.kind, None if self.index is None else str(self.index)]
        memory = f"/{self.memory}" if self.memory else ""
        return ":".join(part for part in parts if part is not None) + memory


def parse_device(device: Any) -> DeviceSpec:
    """Reads `"cuda:1"`, `"jax:gpu:1/pinned_host"`, a `Device`, or a framework's own device object.

    Raises:
        DeviceError: It is not a device; the message lists the valid strings.
        DeviceUnavailableError: It belongs to a framework that is not installed.
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, Device):
        if isinstance(device.index, tuple):
            raise DeviceError(f"{device} stands for several devices; name one of them.")
        return DeviceSpec(device.backend, device.kind, device.index, device.memory)
    if not isinstance(device, str):
        spec = next(filter(None, (adapter.as_device(device) for adapter in adapters(Arrays))), None)
        if spec is not None:
            return parse_device(spec)
    match = _SPEC.fullmatch(device) if isinstance(device, str) else None
    if match is not None and match["kind"] in DEVICE_KINDS:
        _check_installed(device, match["backend"])
    if match is None or not _is_known(match["backend"], match["kind"]):
        raise DeviceError(
            f"{device!r} is not a device. Devices of this machine: {', '.join(good_strings())}."
        )
    index = None if match["index"] is None else int(match["index"])
    return DeviceSpec(match["backend"], match["kind"], index, match["memory"])


def _check_installed(device: str, backend: str | None) -> None:
    """Raises for a device whose framework is missing, unless the string is a typo."""
    if backend is None or backend in installed_backends() or backend not in known_backends():
        return
    try:
        get_adapter(backend, Arrays)
    except BackendUnavailableError as error:
        raise DeviceUnavailableError(
            f"{device} is not available: {str(error).rstrip('.')}. "
            f"Here: {', '.join(map(str, _known_devices()))}."
        ) from error


def _is_known(backend: str | None, kind: str) -> bool:
    """Returns whether a backend is available and a kind is a common one or an adapter's."""
    if backend is not None and backend not in installed_backends():
        return False
    return kind in DEVICE_KINDS or any(
        kind in adapter.aliases or any(device.kind == kind for device in adapter.known_devices())
        for adapter in adapters(Arrays)
    )


def good_strings() -> list[str]:
    """Returns the device strings that are valid on this machine, short forms first.

    Does not start any device.
    """
    available = _known_devices()
    short: dict[str, None] = {"cpu": None}
    for device in available:
        if device.is_accelerator:
            short[device.kind] = None
            short["gpu"] = None
    full = [str(device) for device in available]
    return [*short, *full]


class _Devices(list[Device]):
    """The result of `devices`: a list that notebooks show as a table."""

    def _repr_html_(self) -> str:
        headings = ("device", "backend", "kind", "index")
        rows = (
            (
                str(device),
                device.backend,
                device.kind,
                "" if device.index is None else str(device.index),
            )
            for device in self
        )
        return as_html(table(headings, rows))


def devices() -> list[Device]:
    """Returns every device of every installed backend, CPUs first within a backend.

    Asking imports the backends that are installed, and starts JAX.

    Examples:
        >>> import fmapper
        >>> "numpy:cpu" in map(str, fmapper.devices())
        True
    """
    return _Devices(device for adapter in working_adapters() for device in adapter.devices())


def _known_devices() -> list[Device]:
    return [device for adapter in working_adapters() for device in adapter.known_devices()]


@short_traceback
def device_info(device: Any) -> DeviceInfo:
    """Returns the name of a device, its total memory and its free memory.

    A `Device` is a cheap, hashable name without these values, which must be queried and change. The
    numbers are those of the backend: host memory for a CPU, within the limits of a container; the
    driver's numbers for a GPU in torch; for a GPU in JAX the memory that JAX may use, three
    quarters by default. The query may start the device, which takes some hundred megabytes of a
    CUDA GPU.

    Args:
        device: A `Device`, a qualified string (`"torch:cuda:0"`), or a framework's own device.

    Returns:
        Name, total and free memory in bytes, each None where the backend does not know it.

    Raises:
        DeviceError: It is not a device, or does not name a backend.
        DeviceUnavailableError: It is not available.

    Examples:
        >>> import fmapper
        >>> info = fmapper.device_info("numpy:cpu")
        >>> info.device
        Device(backend='numpy', kind='cpu', index=None, memory=None)
        >>> info.total is None or info.total > 2**20
        True
    """
    spec = parse_device(device)
    if spec.backend is None:
        raise DeviceError(f"{spec} does not name a backend: write torch:{spec}, for example.")
    adapter = get_adapter(spec.backend, Arrays)
    return adapter.device_info(adapter.find_device(spec.kind, spec.index))


def missing_devices() -> dict[str, str]:
    """Explains for each backend why it offers only the CPU, or is missing altogether."""
    reasons: dict[str, str] = {}
    for name in known_backends():
        try:
            adapter = get_adapter(name, Arrays)
        except ImportError as error:
            reasons[name] = str(error)
            continue
        if not adapter.host_only and all(device.kind == "cpu" for device in adapter.devices()):
            reasons[adapter.name] = adapter.why_not(adapter.aliases.get("gpu", "gpu"), None)
    return reasons


@short_traceback
def get_device(tree: Any) -> Device | None:
    """Returns the one device on which all arrays of a tree live; None if it holds no arrays.

    Arrays in undeclared objects are ignored. An array that is spread over several devices is on all
    of them: its index is then a sorted tuple, however the array is divided. In torch, `meta` counts
    as a device. A JAX tracer has no device yet: inside `jax.jit` it counts as being on the device
    of the concrete arrays beside it, and a tree of tracers alone is on JAX's default device.

    Raises:
        MixedDevicesError: There are several; the message lists the paths on each.
        UnsupportedLeafError: An array was donated or deleted.

    Examples:
        >>> import fmapper, numpy as np
        >>> str(fmapper.get_device({"w": np.zeros(2), "n": 3}))
        'numpy:cpu'
    """
    sync()
    return common_device((link, leaf) for link, leaf, kind, _ in walk(tree) if kind is None)


def common_device(leaves: Iterable[tuple[Link, Any]]) -> Device | None:
    """Returns the one device of all arrays among leaves with paths; see `get_device`."""
    places: dict[Device, list[Link]] = {}
    traced: dict[Device, list[Link]] = {}
    for link, leaf in leaves:
        adapter = adapter_of(leaf)
        if adapter is not None:
            try:
                device = adapter.device(leaf)
            except RuntimeError as error:
                raise UnsupportedLeafError(f"{format_link(link)}: {error}.") from error
            by_device = traced if adapter.is_traced(leaf) else places
            by_device.setdefault(device, []).append(link)
    settled = {device.backend for device in places}
    for device, links in traced.items():
        if device.backend not in settled:
            places[device] = links
    if len(places) > 1:
        lines = [f"  {device}: {_some(links)}" for device, links in places.items()]
        raise MixedDevicesError(
            "the arrays of this tree are on several devices:\n"
            + "\n".join(lines)
            + "\nMove them to one device first: to_device(...), or to_torch / to_jax / to_numpy."
        )
    return next(iter(places), None)


def _some(links: list[Link], at_most: int = 8) -> str:
    more = len(links) - at_most
    paths = map(format_link, links[:at_most])
    return ", ".join(paths) + (f" and {more} more" if more > 0 else "")
