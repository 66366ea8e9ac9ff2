"""Rules as TOML.

There is one table per rule, in order: `do` names the rule, the other keys are its fields.

    [[rules]]
    do = "stack"
    from = "layers.{i}.w"
    to = "layers.w"
    over = "i"
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fmapper.checkpoints.rules.arithmetic import Offset, Scale, Sum
from fmapper.checkpoints.rules.joining import Concatenate, Split, Stack, Unstack
from fmapper.checkpoints.rules.layout import Cast, Interleave, Reshape, Transpose
from fmapper.checkpoints.rules.naming import AddConstant, Drop, Lack, Rename, Tie
from fmapper.checkpoints.rules.rule import Names, Rule
from fmapper.errors import CheckpointError
from fmapper.files.untrusted import Misfit, open_regular, show

KINDS: tuple[type[Rule], ...] = (
    Rename,
    Tie,
    Drop,
    Lack,
    AddConstant,
    Transpose,
    Reshape,
    Interleave,
    Cast,
    Split,
    Concatenate,
    Stack,
    Unstack,
    Offset,
    Scale,
    Sum,
)
_NAMES = {"ClassVar": ClassVar, "Sequence": Sequence, "Names": Names, "Rule": Rule}
_MOST_BYTES = 1 << 19
_MOST_RULES = 10_000
_MOST_NUMBER = 1 << 40
_MOST_PUNCTUATION = 16  # tomllib is quadratic in the number of parts of a key
_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*(?:"|\\?$)' + r"|'[^'\n]*(?:'|$)", re.MULTILINE)
_PUNCTUATION = re.compile(r"[^.\[\n]+")


def write_toml(rules: Iterable[Rule]) -> str:
    """Returns rules as TOML."""
    tables = []
    for rule in rules:
        fields = {"do": rule.do, **rule.fields()}
        lines = [f"{name} = {_value(value)}" for name, value in fields.items()]
        tables.append("\n".join(["[[rules]]", *lines]) + "\n")
    return "\n".join(tables) or "rules = []\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")  # TOML requires an escape
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return repr(value)
    if all(isinstance(item, str) for item in value) and sum(map(len, value)) > 60:
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    return f"[{', '.join(map(_value, value))}]"


def read_file(path: Path) -> list[Rule]:
    """Reads rules from a file.

    Raises:
        CheckpointError: The file does not contain valid rules.
        OSError: The file cannot be read.
    """
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise Misfit(f"exceeds the limit of {_MOST_BYTES} bytes for rules")
            text = file.read(_MOST_BYTES + 1).decode()
    except (Misfit, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    try:
        return read_toml(text)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_toml(text: str) -> list[Rule]:
    """Reads rules from TOML.

    Raises:
        CheckpointError: The text does not contain valid rules.
    """
    if len(text) > _MOST_BYTES:
        raise CheckpointError(f"rules of {len(text)} characters exceed the limit of {_MOST_BYTES}")
    bare = _STRING.sub("", text)
    if '"""' in text or "'''" in text or "{" in bare:
        raise CheckpointError("rules must not use multi-line strings or inline tables")
    if max(map(len, _PUNCTUATION.sub("", bare).splitlines()), default=0) > _MOST_PUNCTUATION:
        raise CheckpointError("the rules have a line with too many dots or brackets")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError, or too long a number
        raise CheckpointError(f"the rules are not TOML: {show(str(error))}") from None
    tables = document.get("rules")
    if set(document) - {"rules"} or type(tables) is not list:
        raise CheckpointError(
            'the rules must be tables under [[rules]], such as\n[[rules]]\ndo = "rename"\n'
            'from = "layers.{i}.weight"\nto = "blocks.{i}.kernel"'
        )
    if len(tables) > _MOST_RULES:
        raise CheckpointError(f"there are {len(tables)} rules; {_MOST_RULES} are allowed")
    return [_rule(table, number) for number, table in enumerate(tables, 1)]


def _rule(table: Any, number: int) -> Rule:
    by_name = {kind.do: kind for kind in KINDS}
    if type(table) is not dict or type(table.get("do")) is not str or table["do"] not in by_name:
        raise CheckpointError(
            f'rule {number}: the key do is missing or unknown. Write do = "..." with one of '
            f"{', '.join(by_name)}"
        )
    kind = by_name[table["do"]]
    types_of = _fields(kind)
    values = {}
    for name, value in table.items():
        if name == "do":
            continue
        if name not in types_of:
            allowed = ", ".join(types_of)
            raise CheckpointError(
                f"rule {number}, {kind.do}: has no field {show(name)}; it takes {allowed}"
            )
        if not _is_of(value, types_of[name]):
            raise CheckpointError(
                f"rule {number}, {kind.do}: {name} is {_show(value)}. Write "
                f"{_describe_type(types_of[name])}"
            )
        values["from_" if name == "from" else name] = value
    try:
        return kind(**values)
    except TypeError:
        missing = [name for name in types_of if name not in table]
        raise CheckpointError(
            f"rule {number}, {kind.do}: a required field is missing, one of {', '.join(missing)}"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"rule {number}: {error}") from None


def _fields(kind: type[Rule]) -> dict[str, Any]:
    """Returns the types of a rule's fields by their TOML names."""
    hints = typing.get_type_hints(kind, _NAMES)  # the classes' __module__ is the public package
    return {
        name.rstrip("_"): hint
        for name, hint in hints.items()
        if typing.get_origin(hint) is not typing.ClassVar
    }


def _describe_type(hint: Any) -> str:
    """Describes the values that a field accepts, for an error message."""
    if typing.get_origin(hint) in (Sequence, tuple):
        of = typing.get_args(hint)[0]
        return 'a name as "...", or a list of names' if of is str else "a list of numbers"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        wanted = (
            _describe_type(member) for member in typing.get_args(hint) if member is not type(None)
        )
        return max(wanted, key=len)  # the description of a list covers a single value
    descriptions = {
        str: 'a text as "..."',
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }
    return descriptions[hint]


def _show(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else show(value)


def _is_of(value: Any, hint: Any) -> bool:
    if hint in (str, bool):
        return type(value) is hint
    if hint is int:
        return type(value) is int and abs(value) <= _MOST_NUMBER
    if hint is float:
        return type(value) is float
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_is_of(value, member) for member in typing.get_args(hint))
    if hint is type(None):
        return False
    if typing.get_origin(hint) in (Sequence, tuple):
        of = typing.get_args(hint)[0]
        if of is str and type(value) is str:
            return True  # a list of one
        return type(value) is list and all(_is_of(item, of) for item in value)
    raise TypeError(f"a field of the type {hint}")
