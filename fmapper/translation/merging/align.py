"""Copies keywords between similar classes, with their defaults."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmapper.translation.code import literal, text
from fmapper.translation.merging.numbers import mask_numbers, numbers_in

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch

Defaults = Mapping[str, Mapping[str, object]]


def align(sketches: Sequence[Sketch], defaults: Defaults) -> None:
    """Adds the keywords of similar submodules to constructors, where that makes them one class.

    Args:
        sketches: What each submodule needs; what its constructor sets is changed.
        defaults: Classes of the target -> what their keywords are where they are not given.
    """
    alike: dict[tuple[object, ...], list[Sketch]] = {}
    for sketch in sketches:
        key = (sketch.title, *(name for name, _ in sketch.made))
        alike.setdefault(key, []).append(sketch)
    for group in alike.values():
        _share_methods(group)
        by_methods: dict[tuple[str, ...], list[Sketch]] = {}
        for sketch in group:
            methods = (*(one.shape() for one in sketch.methods), *sketch.ties)
            by_methods.setdefault(methods, []).append(sketch)
        for one in by_methods.values():
            _share_keywords(one, defaults)


def _share_keywords(group: Sequence[Sketch], defaults: Defaults) -> None:
    """Gives submodules the same keywords where that makes them one class."""
    if len({sketch.shape_of_parts() for sketch in group}) == 1:
        return
    before = [list(sketch.made) for sketch in group]
    _align_all(group, defaults)
    merged: dict[str, list[Sketch]] = {}
    for sketch in group:
        merged.setdefault(sketch.shape_of_parts(), []).append(sketch)
    for sketch, made in zip(group, before, strict=True):
        sketch.made[:] = made
    for one in merged.values():
        _align_all(one, defaults)


def _align_all(group: Sequence[Sketch], defaults: Defaults) -> None:
    for at, (attr, _) in enumerate(group[0].made):
        nodes = copy_aligned([sketch.made[at][1] for sketch in group], defaults)
        for sketch, node in zip(group, nodes, strict=True):
            sketch.made[at] = (attr, node)


def align_parts(sketches: Sequence[Sketch], defaults: Defaults) -> None:
    """Gives the parts of one name the same keywords, whichever others their owners have."""
    for attr in {attr for sketch in sketches for attr, _ in sketch.made}:
        having = [sketch for sketch in sketches if attr in dict(sketch.made)]
        nodes = copy_aligned([dict(sketch.made)[attr] for sketch in having], defaults)
        for sketch, node in zip(having, nodes, strict=True):
            sketch.made[:] = [(x, node if x == attr else old) for x, old in sketch.made]


def fill_lacking(sketches: Sequence[Sketch]) -> dict[int, dict[str, ast.expr]]:
    """Returns the parts that sketches lack, by the identity of a sketch, as they could be there.

    Their numbers are those that other parts have, where these are the same in the sketches that
    have both: one argument of the constructor is then for both. Other widths are the first ones.
    """
    parts = [dict(sketch.made) for sketch in sketches]
    common = [attr for attr in parts[0] if all(attr in one for one in parts)]
    rows = [[one for attr in common for one in numbers_in(part[attr])] for part in parts]
    columns = [
        (_purpose(several[0][1]), tuple(constant.value for constant, _ in several))
        for several in zip(*rows, strict=True)
    ]
    columns = [one for one in columns if len({*map(repr, one[1])}) > 1]
    own_widths = [[c.value for c, key in row if _purpose(key) == "width"] for row in rows]
    found: dict[int, dict[str, ast.expr]] = {id(sketch): {} for sketch in sketches}
    for attr in {attr for one in parts for attr in one} - {*common}:
        having = [at for at, one in enumerate(parts) if attr in one]
        lists = [[c.value for c, _ in numbers_in(parts[at][attr])] for at in having]
        for at in {*range(len(parts))} - {*having}:
            node = copy.deepcopy(parts[having[0]][attr])
            numbers = zip(numbers_in(node), zip(*lists, strict=True), strict=True)
            for (constant, key), values in numbers:
                wanted = _purpose(key), values
                alike = [
                    several
                    for purpose, several in columns
                    if (purpose, tuple(several[i] for i in having)) == wanted
                ]
                alike += rows_by_name(values, sketches, having)
                alike += [
                    several
                    for _, several in columns
                    if len({*values}) > 1 and tuple(several[i] for i in having) == values
                ]
                if alike:
                    constant.value = alike[0][at]
                elif wanted[0] == "width" and own_widths[at] and len({*values}) > 1:
                    constant.value = own_widths[at][0]
            found[id(sketches[at])][attr] = node
    return found


def rows_by_name(
    values: Sequence[Any], sketches: Sequence[Sketch], having: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Returns what submodules have as numbers that those with a part call its numbers.

    Args:
        values: What some of them have in one place of the part.
        sketches: All of them.
        having: Which of them have it.
    """
    rows = {name: tuple(one.numbers.get(name) for one in sketches) for name in sketches[0].numbers}
    own = [repr(value) for value in values]
    return [
        row
        for row in rows.values()
        if None not in row and [repr(row[i]) for i in having] == own and len({*map(repr, row)}) > 1
    ]


def split_sequences(sketches: Sequence[Sketch]) -> dict[str, int]:
    """Splits the items that only some of the sequences of one name have from the others.

    They become a part of their own, `all_layers`, before that which has the others.

    Args:
        sketches: Those of one class of the source; what they set is changed.

    Returns:
        The sequences of which items were split -> where those begin.
    """
    found: dict[str, int] = {}
    for attr, _ in sketches[0].made:
        calls = [dict(sketch.made).get(attr) for sketch in sketches]
        items = [_items(one) for one in calls if isinstance(one, ast.Call) and not one.keywords]
        begin = _begin_of_optional(items) if len(items) == len(calls) else None
        if begin is None or any(f"all_{attr}" in dict(sketch.made) for sketch in sketches):
            continue
        least = min(map(len, items))
        for sketch, call, own in zip(sketches, calls, items, strict=True):
            end = begin + len(own) - least
            at = [name for name, _ in sketch.made].index(attr)
            sketch.made[at] = (attr, _with_items(call, [*own[:begin], *own[end:]]))
            if end > begin:
                run = ast.Tuple([*own[begin:end]], ast.Load())
                sketch.made.insert(at, (f"all_{attr}", run))
        found[attr] = begin
    return found


def join_sequences(sketch: Sketch, begins: Mapping[str, int]) -> None:
    """Puts the items that were split where they were, below the condition that they have now."""
    parts = dict(sketch.made)
    for attr, begin in begins.items():
        run = parts.pop(f"all_{attr}", ast.Tuple([], ast.Load()))
        if isinstance(run, ast.IfExp):
            run.orelse = ast.Tuple([], ast.Load())
        here = run.elts if isinstance(run, ast.Tuple) else [ast.Starred(run, ast.Load())]
        items = _items(parts[attr])
        parts[attr] = _with_items(parts[attr], [*items[:begin], *here, *items[begin:]])
    sketch.made[:] = parts.items()


def _items(call: Any) -> Sequence[ast.expr]:
    """Returns what a sequence is given: arguments, or a list of them."""
    only = call.args[0] if len(call.args) == 1 else None
    items: list[ast.expr] = only.elts if isinstance(only, ast.List) else call.args
    return [] if any(isinstance(one, ast.Starred) for one in items) else items


def _with_items(call: Any, items: list[ast.expr]) -> ast.Call:
    is_listed = len(call.args) == 1 and isinstance(call.args[0], ast.List)
    return ast.Call(call.func, [ast.List(items, ast.Load())] if is_listed else items, [])


def _begin_of_optional(several: Sequence[Sequence[ast.expr]]) -> int | None:
    """Returns where those items begin that the shorter ones of two kinds of sequences lack."""
    counts = sorted({*map(len, several)})
    kinds = {tuple(map(_kind, items)) for items in several}
    if len(counts) != 2 or len(kinds) != 2:
        return None
    short, long = sorted(kinds, key=len)
    least, lacking = counts[0], counts[1] - counts[0]
    ways = [at for at in range(least + 1) if long[:at] + long[at + lacking :] == short]
    whole = next(items for items in several if len(items) == counts[1])
    other = next(items for items in several if len(items) == least)

    def alike(at: int) -> int:
        pairs = zip([*whole[:at], *whole[at + lacking :]], other, strict=True)
        return sum(mask_numbers(one) == mask_numbers(like) for one, like in pairs)

    return max(ways, key=alike, default=None) if least > 1 else None


def _kind(node: ast.expr) -> str:
    return text(node.func) if isinstance(node, ast.Call) else text(node)


def _purpose(key: str) -> str:
    """Returns what a number is for: a width, which layers have first, or what its keyword says."""
    return "width" if key.endswith((":0", ":1")) else key


def _share_methods(group: Sequence[Sketch]) -> None:
    """Gives submodules the methods of one that has all of theirs and others, too."""
    most = max(group, key=lambda sketch: len(sketch.methods))
    known = {method.name: method for method in most.methods}
    for sketch in group:
        names = {method.name for method in sketch.methods}
        if (
            names < known.keys()
            and sketch.shape_of_parts() == most.shape_of_parts()
            and all(method.shape() == known[method.name].shape() for method in sketch.methods)
        ):
            others = [method for method in most.methods if method.name not in names]
            sketch.methods += [replace(method, shapes=[]) for method in others]


def copy_aligned(nodes: Sequence[ast.expr], defaults: Defaults) -> list[ast.expr]:
    """Returns copies of code with the same keywords in all, as far as their defaults are known."""
    found = [copy.deepcopy(node) for node in nodes]
    _align(found, defaults)
    return found


def _align(nodes: Sequence[ast.expr], defaults: Defaults) -> None:
    lists = [node for node in nodes if isinstance(node, ast.List | ast.Tuple)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if len(lists) == len(nodes) and len({len(one.elts) for one in lists}) == 1:
        for parts in zip(*(one.elts for one in lists), strict=True):
            _align(parts, defaults)
    if len(calls) < len(nodes) or len({text(one.func) for one in calls}) > 1:
        return
    by_count = [[one for one in calls if len(one.args) == n] for n in {len(c.args) for c in calls}]
    if len(by_count) > 1:
        for group in by_count:
            _align(group, defaults)
        return
    for parts in zip(*(one.args for one in calls), strict=True):
        _align(parts, defaults)
    known = defaults.get(text(calls[0].func), {})
    order = dict.fromkeys(key.arg for one in calls for key in one.keywords)
    tuples = {
        str(key.arg): len(key.value.elts)
        for one in calls for key in one.keywords if isinstance(key.value, ast.Tuple)
    }  # fmt: skip
    for call in calls:
        given = {key.arg: key for key in call.keywords}
        for key in order:
            if key in known and key not in given:
                given[key] = ast.keyword(key, literal(known[str(key)]))
            if key in given and (like := tuples.get(str(key))) and _is_number(given[key].value):
                several = [copy.deepcopy(given[key].value) for _ in range(like)]
                given[key] = ast.keyword(key, ast.Tuple(several, ast.Load()))
        usual = [key for key in known if key in order]
        others = [key for key in order if key not in known]
        call.keywords = [given[key] for key in (*usual, *others) if key in given]


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)
