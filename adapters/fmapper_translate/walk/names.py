"""Names that several modules of the source define: different ones in a file."""

from __future__ import annotations

import inspect
import io
import itertools
import sys
import tokenize
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fmapper_translate.functions import Function, source_of_class
from fmapper_translate.walk.errors import NotTranscribed

Item = type | Function


def place_of(item: Item) -> tuple[str, int]:
    """Returns where something is in the source."""
    if isinstance(item, Function):
        return item.module, item.target.__code__.co_firstlineno
    return item.__module__, source_of_class(item)[1]


def name_of(item: Item) -> str:
    """Returns the name of a class or function in the source."""
    return item.name if isinstance(item, Function) else item.__name__


class Marks:
    """Names in code that tell which of several definitions they stand for, until it is printed.

    Args:
        functions: The functions of the source.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        items = dict.fromkeys(item.owner or item for item in functions)
        count = Counter(map(name_of, items))
        self._items = [item for item in items if count[name_of(item)] > 1]

    def mark(self, item: Item) -> str:
        """Returns the name of a class or function; with a mark where others have it, too."""
        return (
            f"{name_of(item)}{_MARK}{self._items.index(item)}"
            if item in self._items
            else name_of(item)
        )

    def resolve(self, code: str, names: Mapping[Any, str]) -> str:
        """Returns code with the names that definitions have in the file."""
        for item in reversed(self._items):
            code = code.replace(self.mark(item), names.get(item, name_of(item)))
        return code

    def read(self, name: str) -> tuple[str, list[Item]]:
        """Returns a name without its mark, and the definition that this tells."""
        plain, _, at = name.partition(_MARK)
        return plain, [self._items[int(at)]] if at else []


_MARK = "__of_definition_"


def disambiguate(
    printed: Mapping[Any, str], first: type, marks: Marks
) -> tuple[dict[Any, str], dict[Any, str]]:
    """Returns definitions without a name that several have, and the name of each.

    Those whose code is the same, and that of all that it names, keep one name.

    Args:
        printed: The classes and functions -> their code, with the names of the source.
        first: The class that keeps its name in any case.
        marks: What names in the code tell.

    Raises:
        NotTranscribed: It is not known which of several a name stands for.
    """
    ordered = sorted(printed, key=lambda item: (item is not first, place_of(item)))
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in ordered:
        groups[name_of(item)].append(item)
    several = {name: items for name, items in groups.items() if len(items) > 1}
    places = {item: list(_places(code, item, several, marks)) for item, code in printed.items()}
    # Partition refinement: those of one code are the same until something that they name differs.
    kinds: dict[Any, Any] = {item: (name_of(item), printed[item]) for item in ordered}
    count = 0
    while count < (count := len({*kinds.values()})):
        numbers = {kind: at for at, kind in enumerate(dict.fromkeys(kinds.values()))}
        kinds = {
            item: (numbers[kind], *(numbers.get(kinds.get(x[0])) for _, x in places[item]))
            for item, kind in kinds.items()
        }
    names = {item: name_of(item) for item in ordered}
    for name, items in several.items():
        kept = {kinds[items[0]]: name}
        for item in items[1:]:
            if kinds[item] not in kept:
                kept[kinds[item]] = _new_name(item, {*names.values(), *kept.values()})
            names[item] = kept[kinds[item]]
    made = dict(printed)
    for item, found in places.items():
        lines = printed[item].splitlines()
        for token, meant in reversed(found):
            if len({kinds.get(x) for x in meant}) != 1:
                raise NotTranscribed(f"{token.string} is the name of several definitions")
            (row, start), (_, end) = token.start, token.end
            new = names.get(meant[0], name_of(meant[0]))  # of what the file does without
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
        made[item] = "\n".join(lines)
    return made, names


def _new_name(item: Item, taken: set[str]) -> str:
    """Returns a name with that of its module in front: `layers_norm`, `LayersNorm`."""
    module = place_of(item)[0].split(".")
    for count in range(1, len(module) + 1):
        words = "_".join(module[-count:])
        start = words.title().replace("_", "") if isinstance(item, type) else f"{words}_"
        if f"{start}{name_of(item)}" not in taken:
            return f"{start}{name_of(item)}"
    raise NotTranscribed(f"{'.'.join(module)} has several definitions of {name_of(item)}")


def _places(
    code: str, item: Item, several: Mapping[str, list[Item]], marks: Marks
) -> Iterator[tuple[tokenize.TokenInfo, list[Item]]]:
    """Yields where code has one of these names, and the definitions that it may stand for."""
    if not several and _MARK not in code:
        return
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    padded = itertools.chain([None], tokens, [None])
    for before, token, after in _triples(padded):
        is_keyword = after is not None and after.string == "=" and before.string in ("(", ",")
        name, marked = marks.read(token.string) if token.type == tokenize.NAME else ("", [])
        is_plain = not is_keyword and (before is None or before.string != ".")
        if marked or (name in several and is_plain):
            yield token, marked or _candidates(name, item, several[name])


def _triples(items: Iterator[Any]) -> Iterator[tuple[Any, Any, Any]]:
    listed = list(items)
    return zip(listed, listed[1:], listed[2:], strict=False)


def _candidates(name: str, item: Item, items: list[Item]) -> list[Item]:
    """Returns which of the definitions of a name another definition can mean by it."""
    if item in items:
        return [item]
    if isinstance(item, Function):
        space = item.target.__globals__
    else:
        space = vars(sys.modules[item.__module__])
    values = [space[name]] if name in space else [*space.values()]
    for module in [x for x in values if isinstance(x, types.ModuleType)]:
        values += vars(module).values()
    known = {id(inspect.unwrap(x) if callable(x) else x) for x in values}
    found = [x for x in items if id(x.target if isinstance(x, Function) else x) in known]
    return found or items
