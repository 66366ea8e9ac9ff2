"""Finds adapters: built-in ones, entry points, and those that were registered."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from fmapper.backends.arrays import Arrays
from fmapper.backends.framework import Framework
from fmapper.backends.nodes import Nodes
from fmapper.errors import BackendUnavailableError, FmapperWarning
from fmapper.tracebacks import frameworks
from fmapper.tree import nodes
from fmapper.tree.nodes import Kind, NodeType
from fmapper.warn import warn

GROUP = "fmapper.adapters"
_PACKAGE = "fmapper_adapters"

Facet = TypeVar("Facet", bound=Framework)


@functools.cache
def _sources() -> dict[str, Callable[[], Any]]:
    """Maps framework modules to the loaders of adapters: built-in ones, then entry points."""
    from importlib import metadata  # slow to import, and needed once

    sources: dict[str, Callable[[], Any]] = {
        name: functools.partial(_load_builtin, name) for name in _builtin()
    }
    for point in metadata.entry_points(group=GROUP):
        sources.setdefault(point.name, point.load)
    return sources


def _builtin() -> list[str]:
    package = importlib.util.find_spec(_PACKAGE)
    places = package.submodule_search_locations if package else ()
    return [module.name for module in pkgutil.iter_modules(places)]


def _load_builtin(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}").adapter


_loaded: dict[str, Framework] = {}
_by_framework: dict[str, Framework | None] = {}
_by_type: dict[type, Arrays | None] = {}
_loading = threading.RLock()
_begun: set[str] = set()  # adapters that this thread is loading, which look for new ones themselves


def register_adapter(adapter: Facet) -> Facet:
    """Registers an adapter by hand: in a notebook, a test, or before it has an entry point.

    An adapter of the same name is replaced. Installed packages provide theirs through the entry
    point group `fmapper.adapters`, with the framework's module as the name of the entry point.

    Returns:
        The adapter.
    """
    _loaded[adapter.name] = adapter
    _by_framework[adapter.framework or adapter.name] = adapter
    frameworks.add(adapter.framework or adapter.name)
    _forget_types()
    nodes.tell(adapter)
    return adapter


def unregister_adapter(name: str) -> None:
    """Removes an adapter; a discovered one is loaded again on the next request by name."""
    _loaded.pop(name, None)
    _forget_types()
    nodes.forget()


def _forget_types() -> None:
    _by_type.clear()
    for adapter in _adapters_with(Arrays):
        _by_type.update(dict.fromkeys(adapter.array_types, adapter))


def load_new() -> None:
    """Loads the adapter of every framework that was imported since the last call."""
    for name in _sources():
        if name not in _by_framework and sys.modules.get(name) is not None and _is_ready(name):
            with _loading:  # other threads wait: without the adapter they would find no arrays
                if name not in _by_framework and name not in _begun:
                    _load_once(name)


def _load_once(name: str) -> None:
    _begun.add(name)
    try:
        _load(name)
    except ImportError as error:
        warn(f"the adapter for {name} could not be loaded: {error}", FmapperWarning)
    finally:
        _begun.discard(name)
        _by_framework.setdefault(name, None)


def _is_ready(name: str) -> bool:
    """Returns whether a module is fully imported; adapters must not see a partial framework."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return not getattr(spec, "_initializing", False)


def _load(framework: str) -> Framework:
    loaded = _sources()[framework]()
    adapter: Framework = loaded() if isinstance(loaded, type) else loaded
    _by_framework[framework] = adapter
    return register_adapter(adapter)


@overload
def adapters() -> tuple[Framework, ...]: ...
@overload
def adapters(facet: type[Facet]) -> tuple[Facet, ...]: ...
def adapters(facet: type[Framework] = Framework) -> tuple[Framework, ...]:
    """Returns the adapters of all imported frameworks, those with a facet if one is given."""
    load_new()
    return _adapters_with(facet)


def all_adapters() -> Iterator[Framework]:
    """Yields the adapters of imported frameworks, then those of the others that are installed.

    The latter import their framework when they are reached.
    """
    load_new()
    yield from tuple(_loaded.values())
    for name in known_frameworks():
        if _by_framework.get(name) is None and name not in _loaded and _importable(name):
            with contextlib.suppress(BackendUnavailableError):
                yield get_adapter(name)


def memory_advice() -> list[str]:
    """Says how much accelerator memory each framework reserves where several share a device.

    Each has an allocator of its own, which reserves memory that the others then lack.
    """
    users = [
        adapter
        for adapter in adapters(Arrays)
        if any(device.is_accelerator for device in adapter.known_devices())
    ]
    return [adapter.keeps_of_a_gpu for adapter in users if len(users) > 1]


def _adapters_with(facet: type[Facet]) -> tuple[Facet, ...]:
    return tuple(adapter for adapter in _loaded.values() if isinstance(adapter, facet))


@overload
def get_adapter(name: str) -> Framework: ...
@overload
def get_adapter(name: str, facet: type[Facet]) -> Facet: ...
def get_adapter(name: str, facet: type[Framework] = Framework) -> Framework:
    """Returns the adapter of a backend, asked for by name; imports its framework if need be.

    Raises:
        BackendUnavailableError: The framework is not installed, there is no such adapter, or it
            lacks the facet.
    """
    adapter = _get_adapter(name)
    if not isinstance(adapter, facet):
        raise BackendUnavailableError(f"{adapter.name} has no {facet.lacking}")
    return adapter


def _get_adapter(name: str) -> Framework:
    load_new()
    adapter = _loaded.get(name) or _by_framework.get(name)
    if adapter is not None and adapter.name in _loaded:
        return adapter
    if name not in _sources():
        names = ", ".join(known_frameworks())
        raise BackendUnavailableError(
            f"there is no adapter for {name!r}. Known: {names}. Another package can ship one "
            f"through the entry point group {GROUP!r}."
        )
    try:
        importlib.import_module(name)
        load_new()
        adapter = _by_framework.get(name)
        return adapter if adapter is not None and adapter.name in _loaded else _load(name)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        if _importable(name):
            raise BackendUnavailableError(
                f"{name} is installed but does not work: {error}"
            ) from error
        raise BackendUnavailableError(
            f"{name} is not installed ({error}). Install it: {install_command(name)}"
        ) from error


def install_command(package: str) -> str:
    """Returns the command that installs a package, such as `pip install 'torch>=2.11'`.

    It names the package itself and not an extra of fmapper, because pip would look for fmapper on
    its index, wherever this one was installed from.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        stated = requires("fmapper") or ()
    except PackageNotFoundError:  # imported from a folder
        stated = ()
    for requirement in stated:
        wanted = requirement.partition(";")[0].strip()
        if re.split(r"[^\w.-]", wanted)[0] == package:
            return f"pip install '{wanted}'"
    return f"pip install {package}"


def known_frameworks() -> list[str]:
    """Returns the frameworks with an adapter, whether they are installed or not."""
    return sorted({*_sources(), *_loaded})


def known_backends() -> list[str]:
    """Returns the backends with an adapter, whether they are installed or not."""
    return [name for name in {**_sources(), **_loaded} if _has_arrays(name)]


def installed_backends() -> list[str]:
    """Returns the backends that are installed, whether they are imported or not."""
    return [name for name in known_backends() if name in _loaded or _importable(name)]


def working_adapters() -> Iterator[Arrays]:
    """Yields the adapters of all backends that are installed and can be imported."""
    for name in installed_backends():
        try:
            yield get_adapter(name, Arrays)
        except ImportError:  # installed in name only, or without an adapter for its version
            continue


def _has_arrays(name: str) -> bool:
    """Returns whether an adapter has arrays, without loading it and its framework."""
    adapter = _loaded.get(name) or _by_framework.get(name)
    if adapter is not None:
        return isinstance(adapter, Arrays)
    return name not in _builtin() or name not in importlib.import_module(_PACKAGE).WITHOUT_ARRAYS


def _importable(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def adapter_of(x: Any) -> Arrays | None:
    """Returns the adapter of the array `x`; None if `x` belongs to no loaded backend."""
    cls = type(x)
    try:
        return _by_type[cls]
    except KeyError:
        adapter = _by_type[cls] = next((a for a in adapters(Arrays) if a.is_array_type(cls)), None)
        return adapter


def owner_of(array: Any) -> Arrays:
    """Returns the adapter of a known array."""
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter


# --- the walk's source of node types -------------------------------------------------------------


class _Adapters(nodes.Source):
    def look(self) -> None:
        load_new()

    def node_type(self, cls: type) -> NodeType | None:
        return next(filter(None, (adapter.node_type(cls) for adapter in adapters(Nodes))), None)

    def registered_type(self, cls: type) -> NodeType | None:
        return next(filter(None, (a.registered_type(cls) for a in adapters(Nodes))), None)

    def kind(self, cls: type) -> NodeType | Kind | None:
        if not any(adapter.is_array_type(cls) for adapter in adapters(Arrays)):
            return self.node_type(cls) or self.registered_type(cls)
        interned = any(adapter.is_interned_type(cls) for adapter in adapters(Arrays))
        return Kind.INTERNED if interned else Kind.LEAF


nodes.sources.append(_Adapters())
