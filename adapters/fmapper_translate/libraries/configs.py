"""Configurations and records of libraries as dataclasses of the fields that a file reads."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from fmapper.translation import expr, text
from fmapper_translate.libraries import infrastructure as library

_TYPES = (bool, int, float, str, list, dict, tuple)


class Configs:
    """The configurations of a file.

    Args:
        code: Returns the code for a value.
        header: The decorator of configurations.
    """

    def __init__(self, code: Callable[[Any], ast.expr], header: str = "@dataclass") -> None:
        self.header = header
        self._code = code
        self._fields: dict[type, dict[str, Any]] = defaultdict(dict)
        self._defaults: dict[type, Any] = {}
        self._filled: dict[type, set[str]] = defaultdict(set)

    def __len__(self) -> int:
        names = [*self._fields.values(), *self._filled.values()]
        return len(self._fields) + sum(map(len, names))

    def fill(self, record: type, names: Sequence[str | None], count: int) -> None:
        """Notes that a record is made with the fields of these names, and with the first ones."""
        fields = [item.name for item in dataclasses.fields(record)]
        self._filled[record] |= {
            *fields[:count],
            *(fields if None in names else filter(None, names)),
        }

    def field(self, config: Any, name: str) -> str:
        """Notes that a field is read; returns its name, which may be another one."""
        return self.keep(config, type(config).attribute_map.get(name, name))

    def keep(self, config: Any, name: str) -> str:
        """Notes that a field is read under this name; returns it."""
        self._fields[type(config)].setdefault(name, getattr(config, name))
        return name

    def names(self, cls: type) -> list[str]:
        """Returns the fields of a configuration that are read, in their order in the source."""
        order = [item.name for item in dataclasses.fields(cls)]
        read = self._fields[cls]
        return [*(name for name in order if name in read), *sorted(read.keys() - {*order})]

    def call(self, config: Any) -> ast.expr:
        """Returns the code that makes a configuration: with what differs from the defaults."""
        keywords = []
        for name in filter(functools.partial(hasattr, config), self.names(type(config))):
            made = self._code(getattr(config, name))
            if text(made) != text(self._default(type(config), name)):
                keywords.append(ast.keyword(name, made))
        return ast.Call(expr(type(config).__name__), [], keywords)

    def print(self, cls: type) -> str:
        """Returns a configuration as a dataclass."""
        rows = []
        for name in self.names(cls):
            value = self._value(cls, name)
            default = text(self._default(cls, name))
            is_row = isinstance(value, list) and {*map(type, value)} in ({int}, {str})
            if is_row and len(value) > 1 == len({*value}):
                default = f"{text(self._code(value[:1]))} * {len(value)}"
            if isinstance(value, list | dict) or library.is_config(value):
                default = f"field(default_factory=lambda: {default})"
            kind = type(value) if type(value) in _TYPES else None
            rows.append(f"    {name}: {kind.__name__ if kind else 'Any'} = {default}")
        body = "\n".join(rows) or "    pass"
        return f"{self.header}\nclass {cls.__name__}:\n{body}"

    def print_record(self, cls: type) -> str:
        """Returns the class of what a model returns, with the fields that it is made with."""
        rows = [
            f"    {item.name}: jax.Array | None = None"
            for item in dataclasses.fields(cls)
            if item.name in self._filled[cls]
        ]
        header = "@jax.tree_util.register_dataclass\n@dataclass\n"
        return f"{header}class {cls.__name__}(ModelOutput):\n" + ("\n".join(rows) or "    pass")

    def _value(self, cls: type, name: str) -> Any:
        """Returns the default of a field; what the model has where the class has none."""
        if cls not in self._defaults:
            try:
                self._defaults[cls] = cls()
            except Exception:  # it may require arguments, in its own way
                self._defaults[cls] = None
        known = self._defaults[cls]
        return self._fields[cls][name] if known is None else getattr(known, name, None)

    def _default(self, cls: type, name: str) -> ast.expr:
        return self._code(self._value(cls, name))
