"""State in plain attributes: numbers, lists and objects that no framework registers."""

from __future__ import annotations

import collections
import functools
import math
import sys
import types
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping
from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.errors import ConversionWarning
from fmapper.tree.classes import slot_names
from fmapper.warn import warn

_MOST_NAMES = 8
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_FIXED = (tuple, frozenset, types.MethodType, functools.partial)
_CLOSED = (type, types.ModuleType, *_SCALARS)
_get = object.__getattribute__  # a class's `__getattr__` may raise anything
_set = object.__setattr__

Contents = dict[Hashable, Any]


class PlainState:
    """The contents of a model's attributes, containers, objects and closures at one moment.

    Objects of the standard library, of fmapper and of `libraries` are not entered, except instances
    of classes that it `opens`.

    Args:
        root: The model.
        libraries: The packages of the framework.
        opens: Whether instances of a framework's class have attributes of the user.
        hides: Whether an attribute belongs to the framework, which restores it itself.
        unnamed: Attributes of the framework whose items are named like attributes.

    Attributes:
        arrays: The arrays among the contents by name, each once.
    """

    def __init__(
        self,
        root: Any,
        *,
        libraries: Collection[str],
        opens: Callable[[type], bool],
        hides: Callable[[str], bool] = lambda name: False,
        unnamed: Collection[str] = (),
    ) -> None:
        self._opens = opens
        self._closed = {"fmapper", "fmapper_adapters", *libraries, *sys.stdlib_module_names}
        self._hides = hides
        self._unnamed = {*unnamed, "__func__"}
        self._holders: list[tuple[str, Any, type, Contents]] = []
        self._contents: dict[int, Contents] = {}
        self._alive: list[Any] = []  # since ids are reused
        self.arrays: dict[str, Any] = {}
        self._read(root)

    def changes(self, besides: Container[str] = ()) -> list[str]:
        """Returns the names of attributes whose contents have changed since then.

        Another array is a change, an equal number or container is not. For changed items, the
        container is named; for changed attributes of the model itself, the attribute.

        Args:
            besides: The names of attributes and items to ignore, with their contents.
        """
        names: dict[str, None] = {}
        for name, holder, cls, before in self._holders:
            if type(holder) is not cls:
                continue
            now = self._contents_of(holder) or {}
            for key in (*before, *(key for key in now if key not in before)):
                item = self._join(name, key)
                is_same = key in now and key in before and self._equals(before[key], now[key])
                if not is_same and not _is_within(item, besides):
                    names[name if name and isinstance(holder, _CONTAINERS) else item] = None
        return list(names)

    def restore(self) -> None:
        """Restores everything that has been replaced, added or removed since."""
        for _, holder, cls, before in self._holders:
            if type(holder) is not cls:  # a lazy module that has got its shapes
                continue
            now = self._contents_of(holder) or {}
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
                _fill(holder, before, now)

    def _read(self, root: Any) -> None:
        seen = set[int]()
        todo = [("", root)]
        while todo:
            name, x = todo.pop()
            if id(x) in seen or isinstance(x, _CLOSED):
                continue
            seen.add(id(x))
            self._alive.append(x)
            if adapter_of(x) is not None:
                self.arrays[name] = x
                continue
            contents = self._contents_of(x)
            if contents is None:
                continue
            self._contents[id(x)] = contents
            if not isinstance(x, _FIXED):
                self._holders.append((name, x, type(x), contents))
            inner = [
                (self._join(name, key), value)
                for key, value in contents.items()
                if not isinstance(value, _SCALARS)
            ]
            todo += reversed(inner)

    def _contents_of(self, x: Any) -> Contents | None:
        """Returns the contents of an object by key; None for an opaque object."""
        if isinstance(x, dict):
            return dict(dict.items(x))
        if isinstance(x, list | tuple | collections.deque):
            return dict(enumerate(x))
        if isinstance(x, set | frozenset):
            return dict.fromkeys(x)
        if isinstance(x, types.MethodType):
            return {"": x.__self__, "__func__": x.__func__}
        if isinstance(x, functools.partial):
            parts: Contents = {"": x.func, "args": x.args}
            parts.update(x.keywords)
            return parts
        if not self._is_open(x):
            return None
        contents: Contents = {name: v for name, v in _attributes(x) if not self._hides(name)}
        contents.update(_cells(x))
        return contents

    def _is_open(self, x: Any) -> bool:
        cls = type(x)
        if cls is types.SimpleNamespace or self._opens(cls):
            return True
        origin = x.__module__ if issubclass(cls, types.FunctionType) else cls.__module__
        return str(origin).partition(".")[0] not in self._closed

    def _join(self, name: str, key: Hashable) -> str:
        return ".".join(filter(None, (name, "" if key in self._unnamed else str(key))))

    def _equals(self, old: Any, new: Any) -> bool:
        if old is new:
            return True
        if type(old) is not type(new):
            return False
        if isinstance(old, float) and math.isnan(old):
            return math.isnan(new)
        if isinstance(old, _SCALARS):
            return bool(old == new)
        if not isinstance(old, _CONTAINERS):
            return False
        before = self._contents.get(id(old)) or self._contents_of(old) or {}
        now = self._contents_of(new) or {}
        return before.keys() == now.keys() and all(
            self._equals(before[key], now[key]) for key in before
        )


def _is_within(name: str, names: Container[str]) -> bool:
    keys = name.split(".")
    return any(".".join(keys[:end]) in names for end in range(1, len(keys) + 1))


def warn_of_changes(model: str, names: Collection[str], remedy: str) -> None:
    """Warns about attributes that a call of the model changes; the converted model changes none.

    Args:
        model: The name of the model.
        names: The names of the attributes.
        remedy: How the framework keeps state, as an imperative.
    """
    shown = ", ".join([*names][:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    warn(
        f"{model}: a call changes {shown}{more}, which only plain attributes hold. The converted "
        f"model computes each call as the next one of the model, and changes none of them: "
        f"{remedy}.",
        ConversionWarning,
    )


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    for name in slot_names(type(x)):
        try:
            yield name, _get(x, name)
        except AttributeError:  # not set
            continue
    try:
        yield from _get(x, "__dict__").items()
    except AttributeError:
        return


def _cells(x: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(x, types.FunctionType):
        return
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _fill(holder: Any, contents: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Restores the contents of an object."""
    if isinstance(holder, dict):
        cls: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
        cls.clear(holder)
        for key, value in contents.items():
            cls.__setitem__(holder, key, value)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(None), list(contents.values()))
    elif isinstance(holder, collections.deque):
        collections.deque.clear(holder)
        collections.deque.extend(holder, contents.values())
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, contents)
    else:
        _fill_attributes(holder, contents, now)


def _fill_attributes(holder: Any, contents: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    cells = {}
    if isinstance(holder, types.FunctionType):
        cells = dict(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
    slots = slot_names(type(holder))
    for name in (*contents, *(name for name in now if name not in contents)):
        if name in contents and name in now and contents[name] is now[name]:
            continue
        if name in cells:
            if name in contents:
                cells[name].cell_contents = contents[name]
            else:
                del cells[name].cell_contents
        elif name in slots:
            if name in contents:
                _set(holder, name, contents[name])
            else:
                object.__delattr__(holder, name)
        elif name in contents:
            _get(holder, "__dict__")[name] = contents[name]
        else:
            _get(holder, "__dict__").pop(name, None)
