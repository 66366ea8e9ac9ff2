"""JAX's devices, the reasons why one is missing, and thread-local settings."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib import metadata
from operator import attrgetter
from typing import Any

import jax
import jax.experimental

from fmapper import Device, DeviceUnavailableError
from fmapper.backends import DEVICE_KINDS
from fmapper_adapters.jax import _private

_PLATFORMS = ("cpu", "gpu", "tpu")
_WORDS = {word: general for word, general in DEVICE_KINDS.items() if word != general}
_GUARDS = ("host_to_device", "device_to_device", "device_to_host")
_FAILURES = (RuntimeError, AssertionError)  # raised by JAX 0.10 if no platform starts


def local() -> list[Any]:
    """Returns the devices of this process on every platform; none where JAX itself cannot start.

    This starts JAX on all of them.
    """
    devices: dict[Any, None] = {}
    for platform in (*_PLATFORMS, None):  # None is the default one, which may have another name
        try:
            devices.update(dict.fromkeys(jax.local_devices(backend=platform)))
        except _FAILURES:
            continue
    return list(devices)


@cache
def device_of(device: Any) -> Device:
    """Returns fmapper's device, numbered by hardware as in other frameworks.

    `device.id` counts the devices of all processes; `local_hardware_id` is CUDA's number, but it
    may be missing, or be the same for all cores of a chip.
    """
    return Device("jax", _WORDS.get(device.platform, device.platform), _number(device))


@cache
def _number(device: Any) -> int:
    peers = jax.local_devices(backend=device.platform)
    numbers = [peer.local_hardware_id for peer in peers]
    number = device.local_hardware_id
    is_good = device in peers and number is not None and number >= 0 and numbers.count(number) == 1
    return int(number if is_good else device.id)


def home(array: jax.Array) -> Device:
    """Returns the device of an array (all by number, if several) and its memory."""
    sharding = array.sharding
    devices = sorted(sharding.device_set, key=attrgetter("id"))
    first = device_of(devices[0])
    memory = sharding.memory_kind
    memory = None if memory == usual_memory(devices[0]) else memory
    if len(devices) == 1:
        return replace(first, memory=memory) if memory else first
    return Device("jax", first.kind, tuple(map(_number, devices)), memory)


@cache
def usual_memory(device: Any) -> str | None:
    """Returns the default memory kind of a device."""
    try:
        return str(device.default_memory().kind)
    except _FAILURES:  # a platform with one memory that has no name
        return None


def memories(device: Any) -> list[str]:
    """Returns the kinds of memory that a device can use."""
    return [str(memory.kind) for memory in device.addressable_memories()]


def find(device: Device) -> Any:
    """Returns JAX's own device.

    Raises:
        DeviceUnavailableError: This process has no such device.
    """
    for candidate in jax.local_devices(backend=device.kind):
        if device_of(candidate).index == device.index:
            return candidate
    raise DeviceUnavailableError(f"{device} is not a device of this process.")


def place(device: Device) -> Any:
    """Returns a device and one of its memories as a sharding."""
    jax_device = find(device)
    memory = device.memory or usual_memory(jax_device)
    return jax.sharding.SingleDeviceSharding(jax_device, memory_kind=memory)


def default() -> Any | None:
    """Returns the device for new arrays, in this thread and context; None if JAX cannot start."""
    config: Any = jax.config
    chosen = config.jax_default_device
    try:
        if isinstance(chosen, str):
            return jax.local_devices(backend=chosen)[0]
        return chosen or jax.local_devices()[0]
    except _FAILURES:
        return None


def started_devices() -> list[Any]:
    """Returns the devices of this process; none if JAX is not initialised."""
    return local() if _private.has_started() else []


def may_have_accelerator() -> bool:
    """Returns whether there is an accelerator, or may be one if JAX is not initialised."""
    if _private.has_started():
        return any(device.platform != "cpu" for device in local())
    config: Any = jax.config
    chosen: str = config.jax_platforms or ""
    if chosen:
        return any(word != "cpu" for word in chosen.split(","))
    return bool(_plugins()) or importlib.util.find_spec("libtpu") is not None


def about(device: Any) -> tuple[str | None, int | None, int | None]:
    """Returns name, total and free bytes of an accelerator; None for what its plugin hides."""
    stats = device.memory_stats() or {}
    total, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    free = None if total is None or used is None else max(total - used, 0)
    return device.device_kind, total, free


def why_not(kind: str) -> str | None:
    """Explains why a platform is missing: the plugin, the driver or a setting."""
    config: Any = jax.config
    chosen: str = config.jax_platforms or ""
    try:
        if jax.default_backend() != "cpu" or kind not in ("gpu", "tpu"):
            return None
    except _FAILURES as error:
        reason = str(error) or "none of them can be used"
        return f"jax cannot start with jax_platforms (or JAX_PLATFORMS) {chosen!r}: {reason}"
    if chosen and kind not in [_WORDS.get(word, word) for word in chosen.split(",")]:
        return f"this jax runs on the CPU only: jax_platforms (or JAX_PLATFORMS) is {chosen!r}"
    if kind == "tpu":
        return "this jax runs on the CPU only: libtpu is not installed, or finds no TPU"
    plugins = _plugins()
    if plugins:
        return f"this jax runs on the CPU only: {plugins[0]} finds no driver or no GPU"
    return (
        "this jax runs on the CPU only: no gpu plugin is installed "
        "(for CUDA: pip install 'jax[cuda13]')"
    )


def _plugins() -> list[str]:
    """Finds the plugins for other platforms as JAX does: in a namespace and an entry point."""
    names = [point.value.partition(":")[0] for point in metadata.entry_points(group="jax_plugins")]
    package = importlib.util.find_spec("jax_plugins")
    places = package.submodule_search_locations if package else None
    names += [f"jax_plugins.{module.name}" for module in pkgutil.iter_modules(places or ())]
    return names


def thread_settings() -> Callable[[], AbstractContextManager[object]]:
    """Returns the thread-local settings that affect a move."""
    config: Any = jax.config
    home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    chosen: list[tuple[Callable[[Any], AbstractContextManager[object]], Any]] = [
        (home.enable_x64, config.jax_enable_x64),
        (jax.default_device, config.jax_default_device),
    ]
    for direction in _GUARDS:
        guard = getattr(jax, f"transfer_guard_{direction}")
        chosen.append((guard, getattr(config, f"jax_transfer_guard_{direction}")))

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for setting, value in chosen:
                stack.enter_context(setting(value))
            yield

    return enter
