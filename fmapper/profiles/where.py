"""Chooses the devices on which a model is profiled, and the accelerators that are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmapper.backends.arrays import DEVICE_KINDS, Device
from fmapper.backends.compute import Compute
from fmapper.backends.device import DeviceSpec, missing_devices, parse_device
from fmapper.backends.discovery import adapters, get_adapter, installed_backends
from fmapper.backends.models import Models
from fmapper.errors import DeviceError, DeviceUnavailableError, ProfileError
from fmapper.tree.functor import declaration_of
from fmapper.tree.keypath import format_link
from fmapper.tree.nodes import CONTAINERS
from fmapper.tree.walk import visit


@dataclass(slots=True)
class Places:
    """The devices to measure and the accelerators to predict.

    Attributes:
        measured: The devices that are present.
        asked: The devices that the user named, on which a failure is an error.
        predicted: Accelerators that are not present, with the CPU on which a run is counted.
        absent: The reason why an accelerator is not present, by its name.
        notes: Further missing devices, and why.
    """

    measured: list[Device] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    predicted: dict[str, Device] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, device: Device, *, asked: bool) -> None:
        """Adds a device to measure."""
        if device not in self.measured:
            self.measured.append(device)
        if asked:
            self.asked.add(str(device))


def places_for(
    model: Any, devices: Sequence[Any] | None, *, predict: bool, train: bool = False
) -> Places:
    """Returns the requested devices, or the first of each kind in every suitable backend.

    Raises:
        ProfileError: The model cannot run on a requested device, or on any.
        DeviceUnavailableError: A device is not present and cannot be predicted.
    """
    owner = _owner(model)
    usable = [get_adapter(name, Compute) for name in _usable(owner)]
    places = Places()
    for adapter in [adapter for adapter in usable if train]:
        why = adapter.no_transforms()
        if why is not None:
            usable.remove(adapter)
            places.notes.append(f"{adapter.name} cannot train: {why}")
    if devices is None:
        for adapter in usable:
            for device in _first_of_each_kind(adapter):
                places.add(device, asked=False)
    else:
        for spec in map(parse_device, devices):
            _add_requested_kinds(places, spec, usable, owner, predict=predict)
    if not places.measured:
        raise ProfileError("there is no device to profile on: pass at least one.")
    backends = {device.backend for device in places.measured}
    reasons = missing_devices()
    for adapter in usable:
        if adapter.name not in backends or adapter.host_only or _accelerators(adapter):
            continue
        name = f"{adapter.name}:{_gpu_kind(adapter)}"
        places.absent[name] = reasons.get(adapter.name, f"{adapter.name} sees no GPU").rstrip(".")
        if predict:
            places.predicted[name] = _cpu(adapter)
    if devices is None and owner is None:
        absent = [name for name in reasons if name not in backends]
        places.notes += [f"{name}: {reasons[name]}" for name in absent]
    return places


def _usable(owner: tuple[str, str] | None) -> Iterator[str]:
    if owner is not None:
        yield owner[0]
        return
    for name in installed_backends():
        try:
            if get_adapter(name, Compute).devices():
                yield name
        except ImportError:  # installed but broken: `missing` has the reason
            continue


def _owner(model: Any) -> tuple[str, str] | None:
    """Returns the backend to which a model is bound, and the path of a node that shows it."""
    backends: dict[str, str] = {}
    for link, node, kind in visit(model, once=True):
        cls = type(node)
        if kind is None or declaration_of(cls) is not None or isinstance(node, CONTAINERS):
            continue
        for adapter in adapters(Models):
            backend = adapter.computes_with(cls)
            if backend is not None:
                backends.setdefault(backend, f"{cls.__name__} at {format_link(link)}")
                break
    if len(backends) > 1:
        which = ", ".join(f"{name} ({where})" for name, where in backends.items())
        raise ProfileError(
            f"no backend can run this model, because it has parts that are bound to different "
            f"backends: {which}. "
            "Profile the parts, or convert one."
        )
    return next(iter(backends.items()), None)


def _add_requested_kinds(
    places: Places,
    spec: DeviceSpec,
    usable: list[Compute],
    owner: tuple[str, str] | None,
    *,
    predict: bool,
) -> None:
    if spec.kind == "meta":
        raise DeviceError(f"{spec}: arrays on meta have no values, so there is nothing to measure.")
    fitting = [adapter for adapter in usable if spec.backend in (None, adapter.name)]
    if not fitting:
        if owner is not None:
            raise ProfileError(
                f"{spec} cannot run this model: its {owner[1]} computes with {owner[0]} only. "
                "Omit this device, or convert the model."
            )
        # The adapter says why it cannot be used.
        adapter = get_adapter(spec.backend or "", Compute)
        raise ProfileError(f"{spec} cannot train: {adapter.no_transforms()}")
    failures: list[DeviceUnavailableError] = []
    for adapter in fitting:
        try:
            places.add(adapter.find_device(spec.kind, spec.index), asked=True)
        except DeviceUnavailableError as error:
            failures.append(error)
    if len(failures) < len(fitting):
        return
    countable = [adapter for adapter in fitting if not adapter.host_only]
    if not (predict and DEVICE_KINDS.get(spec.kind) == "gpu" and countable) or any(
        map(_accelerators, fitting)
    ):
        raise failures[0]
    for adapter in countable:
        places.add(_cpu(adapter), asked=True)


def _first_of_each_kind(adapter: Compute) -> Iterator[Device]:
    seen: set[str] = set()
    for device in adapter.devices():
        if device.kind not in seen:
            seen.add(device.kind)
            yield device


def _accelerators(adapter: Compute) -> list[Device]:
    return [device for device in adapter.devices() if device.kind not in ("cpu", "meta")]


def _cpu(adapter: Compute) -> Device:
    return adapter.find_device("cpu", None)


def _gpu_kind(adapter: Compute) -> str:
    return adapter.aliases.get("gpu", "gpu")
