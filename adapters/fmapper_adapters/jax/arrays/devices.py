"""What JAX knows of its devices, why one is not here, and which settings go with a thread."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import metadata
from typing import Any

import jax
import jax.experimental

_PLATFORMS = ("cpu", "gpu", "tpu")
_GUARDS = ("host_to_device", "device_to_device", "device_to_host")
_FAILURES = (RuntimeError, AssertionError)  # what JAX 0.10 raises where no platform starts


def local() -> list[Any]:
    """Returns the devices of this process on every platform; none where JAX itself cannot start."""
    found: dict[Any, None] = {}
    for platform in (*_PLATFORMS, None):  # None is the default one, which may have another name
        try:
            found.update(dict.fromkeys(jax.local_devices(backend=platform)))
        except _FAILURES:
            continue
    return list(found)


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


def about(device: Any) -> tuple[str | None, int | None, int | None]:
    """Returns name, total and free bytes of an accelerator; None for what its plugin hides."""
    stats = device.memory_stats() or {}
    total, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    free = None if total is None or used is None else max(total - used, 0)
    return device.device_kind, total, free


def why_not(kind: str) -> str | None:
    """Tells whether the plugin, the driver or a setting is to blame that a platform is not here."""
    config: Any = jax.config
    chosen: str = config.jax_platforms or ""
    try:
        if jax.default_backend() != "cpu" or kind not in ("gpu", "tpu"):
            return None
    except _FAILURES as error:
        reason = str(error) or "none of them can be used"
        return f"jax cannot start with jax_platforms (or JAX_PLATFORMS) {chosen!r}: {reason}"
    if chosen and kind not in chosen.replace("cuda", "gpu").replace("rocm", "gpu").split(","):
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
    found = [point.value.partition(":")[0] for point in metadata.entry_points(group="jax_plugins")]
    package = importlib.util.find_spec("jax_plugins")
    places = package.submodule_search_locations if package else None
    found += [f"jax_plugins.{module.name}" for module in pkgutil.iter_modules(places or ())]
    return found


def thread_settings() -> Callable[[], AbstractContextManager[object]]:
    """Returns the settings that a thread can have for itself and that a move looks at."""
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
