"""Devices: what they are called, which are here, and on which a tree lives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fmapper._adapter import Device
from fmapper._discovery import adapter_of, adapters, get_adapter, installed_backends
from fmapper._errors import DeviceError, MixedDevicesError, UnsupportedLeafError
from fmapper._keypath import format_link
from fmapper._nodes import sync
from fmapper._visit import visit

_KINDS = {"cpu", "gpu", "cuda", "mps", "xpu", "tpu", "meta"}
_SPEC = re.compile(r"(?:(?P<backend>[a-z_]\w*):)?(?P<kind>[a-z]+)(?::(?P<index>\d+))?")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a device string asks for; the backend is open where the string does not say."""

    backend: str | None
    kind: str
    index: int | None = None

    def __str__(self) -> str:
        parts = [self.backend, self.kind, None if self.index is None else str(self.index)]
        return ":".join(part for part in parts if part is not None)


def parse_device(device: Any) -> DeviceSpec:
    """Reads `"cuda:1"`, `"jax:gpu:1"`, a `Device`, or a framework's own device object.

    Raises:
        DeviceError: It is not a device; the message lists what could be written here.
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, Device):
        if isinstance(device.index, tuple):
            raise DeviceError(f"{device} is several devices; name one of them.")
        return DeviceSpec(device.backend, device.kind, device.index)
    if not isinstance(device, str):
        own = next(filter(None, (adapter.as_device(device) for adapter in adapters())), None)
        if own is not None:
            return parse_device(own)
    found = _SPEC.fullmatch(device) if isinstance(device, str) else None
    if found is None or not _is_known(found["backend"], found["kind"]):
        raise DeviceError(
            f"{device!r} is not a device. Here you can write: {', '.join(good_strings())}."
        )
    index = None if found["index"] is None else int(found["index"])
    return DeviceSpec(found["backend"], found["kind"], index)


def _is_known(backend: str | None, kind: str) -> bool:
    """Whether a backend is there, and the kind is a common one or one of an adapter's own."""
    if backend is not None and backend not in installed_backends():
        return False
    return kind in _KINDS or any(
        kind in adapter.aliases or any(device.kind == kind for device in adapter.devices())
        for adapter in adapters()
    )


def good_strings() -> list[str]:
    """Every device string that means something on this machine, short forms first."""
    here = devices()
    short: dict[str, None] = {"cpu": None}
    for device in here:
        if device.kind != "cpu":
            short[device.kind] = None
            if device.kind in ("cuda", "gpu"):
                short["gpu"] = None
    full = [str(device) for device in here]
    return [*short, *full]


def devices() -> list[Device]:
    """Every device of every installed backend, CPUs first within a backend.

    Asking imports the backends that are installed.

    Examples:
        >>> import fmapper
        >>> "numpy:cpu" in map(str, fmapper.devices())
        True
    """
    found: list[Device] = []
    for name in installed_backends():
        try:
            found.extend(get_adapter(name).devices())
        except ImportError:  # installed in name only, or without an adapter for its version
            continue
    return found


def get_device(tree: Any) -> Device | None:
    """The one device on which all arrays of a tree live; None if it holds no arrays.

    Raises:
        MixedDevicesError: There are several; the message lists the paths on each.

    Examples:
        >>> import fmapper, numpy as np
        >>> str(fmapper.get_device({"w": np.zeros(2), "n": 3}))
        'numpy:cpu'
    """
    sync()
    places: dict[Device, list[str]] = {}
    for link, leaf, node_type in visit(tree, once=True):
        adapter = adapter_of(leaf) if node_type is None else None
        if adapter is not None:
            try:
                device = adapter.device(leaf)
            except RuntimeError as error:
                raise UnsupportedLeafError(f"{format_link(link)}: {error}.") from error
            places.setdefault(device, []).append(format_link(link))
    if len(places) > 1:
        lines = [f"  {device}: {_some(paths)}" for device, paths in places.items()]
        raise MixedDevicesError(
            "the arrays of this tree are on several devices:\n"
            + "\n".join(lines)
            + "\nMove them to one first: to_device(...), or to_torch / to_jax / to_numpy."
        )
    return next(iter(places), None)


def _some(paths: list[str], at_most: int = 8) -> str:
    more = len(paths) - at_most
    return ", ".join(paths[:at_most]) + (f" and {more} more" if more > 0 else "")
