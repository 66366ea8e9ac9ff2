"""Lists of code whose items differ in a few numbers, as comprehensions."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence

from fmapper.translation.code import expr, identifier, replace_nodes, text
from fmapper.translation.merging.align import Defaults, copy_aligned
from fmapper.translation.merging.numbers import SHORTER, mask_numbers, numbers_in

_LEAST = 3  # items that are one expression
_MOST = 3  # numbers that differ
_WIDEST = 100  # characters of a line
_CALLEE = 10  # of the name of what is called
_LONGEST = 88  # characters of a list that stays


def with_comprehensions(
    node: ast.expr,
    parameters: Mapping[str, Sequence[str]],
    general: Mapping[str, str] | None = None,
    defaults: Defaults | None = None,
) -> ast.expr:
    """Writes long lists whose items differ in a few numbers as comprehensions.

    Items that are alike and stand side by side among others are one as well.

    Args:
        node: The code.
        parameters: What functions and classes call what they take by position.
        general: Code for a special case -> the same as others have it for other numbers.
        defaults: Classes -> what their keywords are where they are not given.

    Examples:
        >>> blocks = ", ".join(f"Block({n}, features=8, rngs=rngs)" for n in (2, 4, 6, 8))
        >>> made = ast.parse(f"[{blocks}]", mode="eval").body
        >>> text(with_comprehensions(made, {"Block": ("width",)}))
        '[Block(width, features=8, rngs=rngs) for width in (2, 4, 6, 8)]'
        >>> made = ast.parse(f"[Stem(rngs=rngs), {blocks}]", mode="eval").body
        >>> text(with_comprehensions(made, {"Block": ("width",)}))
        '[Stem(rngs=rngs), *[Block(width, features=8, rngs=rngs) for width in (2, 4, 6, 8)]]'
        >>> made = ast.parse("[" + ", ".join(f"F(lambda x: pool(x, ({n}, {n})), name_of_the_layer)"
        ...                                  for n in (1, 2, 3)) + "]", mode="eval").body
        >>> text(with_comprehensions(made, {"pool": ("x", "size")}))
        '[F(lambda x, size=size: pool(x, (size, size)), name_of_the_layer) for size in (1, 2, 3)]'
        >>> made = ast.parse("[Conv(width, (kernel_size,), padding=padding, rngs=rngs), "
        ...                  "Conv(width, (kernel_size,), stride=2, padding=padding_2, rngs=rngs), "
        ...                  "Conv(width, (kernel_size,), stride=2, padding=padding, rngs=rngs)]",
        ...                  mode="eval").body
        >>> text(with_comprehensions(made, {}, None, {"Conv": {"stride": 1}})).partition(" for ")[2]
        'stride, padding in ((1, padding), (2, padding_2), (2, padding))]'
    """
    run = _Comprehensions(parameters, general or {}, defaults or {})
    found: ast.expr = _Ones().visit(run.visit(copy.deepcopy(node)))
    return found


class _Ones(ast.NodeTransformer):
    """Leaves out factors of one, which a list had for its loop variable and kept."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        is_one = isinstance(node.right, ast.Constant) and repr(node.right.value) == "1"
        return node.left if is_one and isinstance(node.op, ast.Mult) else node


class _Comprehensions(ast.NodeTransformer):
    def __init__(
        self,
        parameters: Mapping[str, Sequence[str]],
        general: Mapping[str, str],
        defaults: Defaults,
    ) -> None:
        self._parameters = parameters
        self._general = general
        self._defaults = defaults

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        items = self._write_runs(node.elts)
        is_whole = len(items) == 1 < len(node.elts)
        return items[0] if is_whole else ast.List(items, ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if text(node.func) == "Sequential":
            items = self._write_runs(node.args)
            is_whole = len(items) == 1 < len(node.args)
            node.args = [ast.Starred(items[0], ast.Load())] if is_whole else items
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        self.generic_visit(node)
        keys = [getattr(key, "value", None) for key in node.keys]
        if len({mask_numbers(one) for one in node.values}) > 1 or None in keys:
            return node
        found = self._comprehension(node.values)
        if not isinstance(found, ast.ListComp):
            return node
        (loop,) = found.generators
        taken = {one.id for one in ast.walk(found) if isinstance(one, ast.Name)}
        name = identifier("name", taken)
        if text(loop.target) == "_":
            return expr(f"{{{name}: {{0}} for {name} in {{1}}}}", found.elt, tuple(keys))
        rows = [
            (key, *(row if isinstance(row, tuple) else (row,)))
            for key, row in zip(keys, ast.literal_eval(loop.iter), strict=True)
        ]
        target = ", ".join([name, *map(text, getattr(loop.target, "elts", [loop.target]))])
        code = f"{{{name}: {text(found.elt)} for {target} in {tuple(rows)!r}}}"
        return ast.parse(code, mode="eval").body

    def _write_runs(self, items: list[ast.expr]) -> list[ast.expr]:
        """Returns items with comprehensions for those that are alike, side by side."""
        found: list[ast.expr] = []
        runs = [*_runs(copy_aligned(self._generalise(items), self._defaults))]
        for run in runs:
            kept, comprehension = copy.deepcopy(run), self._comprehension(run)
            if comprehension is not None and len(runs) > 1:
                comprehension = ast.Starred(comprehension, ast.Load())
                if _height(comprehension) >= sum(map(_height, run)):
                    comprehension = None
            elif comprehension is not None and _height(comprehension) > 2 + sum(map(_height, run)):
                comprehension = None
            found += kept if comprehension is None else [comprehension]
        return found if len(found) < len(items) else items

    def _generalise(self, items: list[ast.expr]) -> list[ast.expr]:
        """Returns items with the code of special cases as others have it, where there are some."""
        codes = [text(one) for one in items]
        for special, usual in self._general.items():
            if any(special in code for code in codes):
                masked = {mask_numbers(one) for one in items}
                changed = [
                    expr(code.replace(special, usual)) if special in code else one
                    for one, code in zip(items, codes, strict=True)
                ]
                if {mask_numbers(one) for one in changed} < masked:
                    return changed
        return items

    def _comprehension(self, items: list[ast.expr]) -> ast.expr | None:
        """Returns the list of calls that differ in a few numbers; None for a short one."""
        is_long = len(items) >= _LEAST and len(text(ast.List(items, ast.Load()))) > _LONGEST
        if not is_long or not isinstance(items[0], ast.Call):
            return None
        slots = [[*_slots(one)] for one in items]
        rows: dict[tuple[str, ...], tuple[list[str], list[ast.expr]]] = {}  # -> keys and places
        for places in zip(*slots, strict=True):
            (node, key), values = places[0], tuple(text(one) for one, _ in places)
            if len({*values}) > 1:
                keys, nodes = rows.setdefault(values, ([], []))
                keys.append(key)
                nodes.append(node)
        if len(rows) > _MOST:
            return None
        gone = {id(one) for _, nodes in rows.values() for one in nodes}
        kept = [one for one in ast.walk(items[0]) if isinstance(one, ast.Name)]
        taken = {one.id for one in kept if id(one) not in gone}
        names: list[str] = []
        replaced: dict[int, ast.expr] = {}
        for keys, nodes in rows.values():
            known = [name for key in keys if (name := self._name(key))]
            names.append(identifier(known[0] if known else "n", taken))
            taken.add(names[-1])
            replaced.update((id(one), ast.Name(names[-1], ast.Load())) for one in nodes)
        item = text(_Bound({*names}).visit(replace_nodes(items[0], replaced)))
        if not names:
            return expr(f"[{item} for _ in range({len(items)})]")
        listed = [", ".join(row) for row in zip(*rows, strict=True)]
        code = ", ".join(listed if len(names) == 1 else (f"({row})" for row in listed))
        code = f"[{item} for {', '.join(names)} in ({code})]"
        return ast.parse(code, mode="eval").body

    def _name(self, key: str) -> str:
        """Names a number after the keyword or parameter that it is given for, if there is one."""
        function, _, at = key.rpartition(":")
        if not function:
            return SHORTER.get(key, key)
        known = self._parameters.get(function, ())
        return known[int(at)] if int(at) < len(known) else ""


def _height(node: ast.expr, indent: int = 16) -> int:
    """Returns about how many lines code has."""
    if len(text(node)) + indent <= _WIDEST:
        return 1
    if isinstance(node, ast.Starred):
        return _height(node.value, indent + 1)
    inner = [node.elt] if isinstance(node, ast.ListComp) else getattr(node, "elts", [])
    inner = [*inner, *getattr(node, "args", [])]
    inner += [one.value for one in getattr(node, "keywords", [])]
    lines = [_height(one, indent + 4) for one in inner]
    is_flat = isinstance(node, ast.Call) and len(text(node)) + indent <= _WIDEST + _CALLEE
    return 3 if is_flat else 2 + sum(lines) + isinstance(node, ast.ListComp)


def _slots(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yields the numbers in code, and the variables that are given by keyword, with the keyword."""
    yield from numbers_in(node)
    for call in ast.walk(node):
        for key in call.keywords if isinstance(call, ast.Call) else ():
            if isinstance(key.value, ast.Name):
                yield key.value, key.arg or ""


def _mask(node: ast.expr) -> str:
    """Masks what `_slots` finds."""
    node = copy.deepcopy(node)
    slots = [one for one, _ in _slots(node) if isinstance(one, ast.Name)]
    return mask_numbers(replace_nodes(node, {id(one): ast.Constant(0) for one in slots}))


def _runs(items: Sequence[ast.expr]) -> Iterator[list[ast.expr]]:
    """Yields the items side by side that differ in numbers and variables alone."""
    run: list[ast.expr] = []
    for item in items:
        if run and _mask(run[0]) != _mask(item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


class _Bound(ast.NodeTransformer):
    """Binds the variables of a comprehension in functions, which are called after it has ended."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self.generic_visit(node)
        read = {one.id: None for one in ast.walk(node.body) if isinstance(one, ast.Name)}
        for name in read:
            if name in self._names:
                node.args.args.append(ast.arg(name))
                node.args.defaults.append(ast.Name(name, ast.Load()))
        return node
