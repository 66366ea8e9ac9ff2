"""Programs as JSON. Files are not trusted: size, depth and form are bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from fmapper.errors import ConversionError
from fmapper.files.untrusted import Misfit, show, within
from fmapper.programs.program import (
    VARIABLE_TYPES,
    Call,
    Graph,
    Guard,
    Input,
    Output,
    Parameter,
    Program,
)
from fmapper.programs.treespec import DType, Ref, Scalar, Size, TreeSpec

_PLAIN = {
    cls.__name__: cls for cls in (Call, Guard, Input, Output, Parameter, Scalar, Size, TreeSpec)
}
_FIELDS = {name: tuple(field.name for field in fields(cls)) for name, cls in _PLAIN.items()}
_GRAPH = ("inputs", "calls", "outputs", "kinds")
_APART = {
    "parameters", "buffers", "constants", "evaluation", "origin", "lines", "parts", "types",
    "first_paths", "stacks", "source_names",
}  # fmt: skip
_PROGRAM = {field.name: field for field in fields(Program) if field.name not in _APART}

# Fields that older files lack; they are written only if they are not empty.
_LATER = {"guards", "fixed", "variable_types", "few_bits", "axes", "ones_like"}
_LARGEST = 1 << 64
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_FINITE = {"inf", "-inf", "nan"}


# --- writing --------------------------------------------------------------------------------------


def encode_program(program: Program) -> dict[str, Any]:
    """Encodes a program as JSON, without its arrays and the program for evaluation."""
    types = {n: kind for n, kind in program.variable_types.items() if kind in VARIABLE_TYPES}
    program = replace(program, variable_types=types)
    return {
        name: _encode(getattr(program, name))
        for name in _PROGRAM
        if name not in _LATER or getattr(program, name)
    }


def _encode(value: Any) -> Any:
    """Encodes a value as JSON; types that JSON lacks become objects with one key."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real), _encode(value.imag)]}
    if isinstance(value, tuple | list):
        return [_encode(inner) for inner in value]
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, Graph):
        return {"graph": [_encode(getattr(value, name)) for name in _GRAPH]}
    if isinstance(value, Mapping):
        return {"map": [[_encode(key), _encode(inner)] for key, inner in value.items()]}
    name = type(value).__name__
    if type(value) is _PLAIN.get(name):
        encoded = [_encode(getattr(value, field)) for field in _FIELDS[name]]
        if isinstance(value, TreeSpec) and not value.fixed:
            del encoded[-1]  # few structures have any
        return {name: encoded}
    raise ConversionError(f"an object of type {name} cannot be written to a file")


# --- reading --------------------------------------------------------------------------------------


def decode_program(data: Any) -> Program:
    """Decodes a program without its arrays; `check_program` checks its fields.

    Raises:
        Misfit: The JSON is not a program.
    """
    if not isinstance(data, dict):
        raise Misfit("is not an object")
    given = {}
    for name, value in data.items():
        if name not in _PROGRAM:
            raise Misfit(f"a program has no {show(name)}")
        with within(name):
            given[name] = _decode(value)
    for name, field in _PROGRAM.items():
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_needed and name not in given:
            raise Misfit(f"{name} is missing")
    return Program(**given)


def _decode(data: Any) -> Any:
    kind = type(data)
    if kind is str:
        if not data.isascii() and _SURROGATE.search(data):
            raise Misfit("contains half of a surrogate pair")
        return data
    if kind is int:
        if not -_LARGEST <= data <= _LARGEST:
            raise Misfit("is too large a number")
        return data
    if kind is list:
        return _decode_each(data)
    if kind is not dict:
        return data
    if len(data) != 1:
        raise Misfit("must be an object with exactly one key")
    ((what, value),) = data.items()
    if what not in _SPECIAL and what not in _PLAIN:
        raise Misfit(f"{show(what)} is not a type of value in a program")
    if what in _SPECIAL:
        return _SPECIAL[what](value)
    names = _FIELDS[what]
    parts = _decode_each(_list_of(value, range(1, len(names) + 1), what), names)
    try:
        return _PLAIN[what](*parts)
    except TypeError:
        raise Misfit(f"a field of {what} is missing") from None


def _decode_each(values: list[Any], names: tuple[str, ...] = ()) -> tuple[Any, ...]:
    decoded: list[Any] = []
    try:
        for value in values:
            decoded.append(_decode(value))
    except Misfit as error:
        error.place.append(names[len(decoded)] if names else len(decoded))
        raise
    return tuple(decoded)


def _list_of(value: Any, counts: range, what: str) -> list[Any]:
    if type(value) is not list or len(value) not in counts:
        raise Misfit(f"{what} must be a list of its fields")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Misfit(f"{show(value)} is not a name")
    text: str = _decode(value)
    return text


def _number(value: Any) -> float:
    if type(value) is not str or value not in _NOT_FINITE:
        raise Misfit(f"{show(value)} is not inf, -inf or nan")
    return float(value)


def _complex(value: Any) -> complex:
    parts = _decode_each(_list_of(value, range(2, 3), "complex"))
    if not all(type(part) in (int, float) for part in parts):
        raise Misfit("is not a complex number")
    return complex(*parts)


def _map(value: Any) -> dict[Any, Any]:
    if type(value) is not list:
        raise Misfit("a map must be a list of pairs")
    entries: dict[Any, Any] = {}
    for i, (first, inner) in enumerate(_pairs(value)):
        with within(i):
            key = _decode(first)
            if type(key) not in (str, int, bool, float, tuple, type(None)) or not _hashable(key):
                raise Misfit(f"{show(key)} is not a key")
            if key in entries:
                raise Misfit(f"the key {show(key)} occurs twice")
        with within(key if isinstance(key, str) and key.isidentifier() else i):
            entries[key] = _decode(inner)
    return entries


def _pairs(value: list[Any]) -> Iterator[list[Any]]:
    for i, pair in enumerate(value):
        if type(pair) is not list or len(pair) != 2:
            raise Misfit("is not a pair", i)
        yield pair


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _graph(value: Any) -> Graph:
    parts = _decode_each(_list_of(value, range(3, 5), "graph"), _GRAPH)
    if type(parts[1]) is not tuple:
        raise Misfit("is not a list", "calls")
    return Graph(parts[0], list(parts[1]), *parts[2:])


_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "ref": lambda value: Ref(_text(value)),
    "dtype": lambda value: DType(_text(value)),
    "float": _number,
    "complex": _complex,
    "map": _map,
    "graph": _graph,
}
