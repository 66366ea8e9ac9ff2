"""Loops that collect the further results of the parts of a list, as keys for a cache."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence

from fmapper.translation.code import identifier, statement_text, text

_CALL = re.compile(r"self(?:\.\w+|\[\d+\])*\.\w+\[(\d+)\]")


def collect(lines: Sequence[str]) -> list[str]:
    """Rewrites calls of a list's parts whose further results become the items of a tuple.

    Then the calls are equal but for their index, and `with_loops` finds them.

    Examples:
        >>> lines = ["x, k = self.h[0](x)", "x, k_2 = self.h[1](x)", "return f(x, all=(k, k_2))"]
        >>> print("; ".join(collect(lines)))
        all_2 = []; x, k = self.h[0](x); all_2.append(k); x, k = self.h[1](x); all_2.append(k); \
return f(x, all=tuple(all_2))
    """
    found = list(lines)
    at = 0
    while at < len(found):
        run = _run_at(found, at)
        if run is not None:
            rewritten = _rewrite(found, at, *run)
            if rewritten is not None:
                grown = len(rewritten) - len(found)
                found = rewritten
                at += grown
            at += len(run[1])
        at += 1
    return found


def _run_at(lines: Sequence[str], at: int) -> tuple[list[list[str]], list[ast.Call]] | None:
    """Returns the targets and the calls of a run that begins at a line."""
    targets: list[list[str]] = []
    calls: list[ast.Call] = []
    begin = 0
    for line in lines[at:]:
        known = _assignment(line)
        if known is None:
            break
        names, call = known
        index = _CALL.fullmatch(text(call.func))
        if index is None:
            break
        begin = int(index[1]) if not calls else begin
        expected = text(calls[0].func) if calls else ""
        if calls and (
            len(names) != len(targets[0])
            or int(index[1]) != begin + len(calls)
            or text(call.func) != f"{expected.rpartition('[')[0]}[{index[1]}]"
        ):
            break
        targets.append(names)
        calls.append(call)
    return (targets, calls) if len(calls) > 1 else None


def _assignment(line: str) -> tuple[list[str], ast.Call] | None:
    """Returns the names that a line assigns to, and the call."""
    if "self." not in line or "\n" in line:
        return None
    (node,) = ast.parse(line).body
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return None
    (target,) = node.targets
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    if not all(isinstance(one, ast.Name) for one in names):
        return None
    return [one.id for one in names if isinstance(one, ast.Name)], node.value


def _rewrite(
    lines: list[str], at: int, targets: list[list[str]], calls: list[ast.Call]
) -> list[str] | None:
    columns = list(zip(*targets, strict=True))
    varying = [i for i, column in enumerate(columns) if len({*column}) == len(column)]
    if not varying or any(
        len({*column}) > 1 for i, column in enumerate(columns) if i not in varying
    ):
        return None
    base = [targets[0][i] for i in varying]
    renames = [dict(zip((row[i] for i in varying), base, strict=True)) for row in targets]
    fresh = {name for names in renames for name in names}
    count = len(targets)
    before, after = lines[:at], [ast.parse(line) for line in lines[at + count :]]
    if fresh & {name for call in calls[1:] for name in _names([text(call)])}:
        return None
    taken = {*_names(lines)}
    collector = _Collector(renames, taken)
    after = [collector.visit(tree) for tree in after]
    rest = [statement_text(tree) for tree in after]
    if not collector.lists or fresh & {*_names(rest)}:
        return None
    found = [*before, *(f"{name} = []" for name in collector.lists)]
    codes = [text(call) for call in calls]
    state = [name for i, name in enumerate(targets[0]) if i not in varying]
    begun = _begin(codes, state)
    if begun:
        found.append(begun)
    for code in codes:
        found.append(f"{', '.join(targets[0])} = {code}")
        found += [f"{name}.append({item})" for name, item in collector.lists.items()]
    return [*found, *rest]


def _begin(codes: list[str], state: Sequence[str]) -> str:
    """Makes the first call like the later ones; returns the assignment that goes before it."""
    index = _CALL.match(codes[1])
    assert index is not None
    later = codes[1][: index.start(1)] + "0" + codes[1][index.end(1) :]
    first = _CALL.sub(lambda m: m[0].replace(f"[{m[1]}]", "[0]"), codes[0], count=1)
    own = {*_names([first])}
    for name in state:
        for other in sorted(own - {"self", name}):
            if name not in own and re.sub(rf"(?<![.\w]){other}\b(?!\s*=)", name, first) == later:
                number = _CALL.match(codes[0])
                assert number is not None
                codes[0] = codes[1].replace(f"[{index[1]}]", f"[{number[1]}]", 1)
                return f"{name} = {other}"
    return ""


def _names(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield from _names_of(ast.parse(line))


def _names_of(tree: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


class _Collector(ast.NodeTransformer):
    """Replaces tuples of what the calls of a run have given by a list that is filled in the run."""

    def __init__(self, renames: Sequence[Mapping[str, str]], taken: set[str]) -> None:
        self._renames = renames
        self._taken = taken
        self._wanted = "results"
        self.lists: dict[str, str] = {}  # their names -> the item that each call adds

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        before, self._wanted = self._wanted, node.arg or self._wanted
        self.generic_visit(node)
        self._wanted = before
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        if any(isinstance(item, ast.Slice | ast.Starred) for item in node.elts):
            return self.generic_visit(node)
        items = {
            text(_Rename(names).visit(copy.deepcopy(item)))
            for names, item in zip(self._renames, node.elts, strict=False)
        }
        has_all = len(node.elts) == len(self._renames) and all(
            {*_names_of(item)} & {*names}
            for names, item in zip(self._renames, node.elts, strict=True)
        )
        if not has_all or len(items) != 1 or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        name = identifier(
            self._wanted, self._taken | {self._wanted if _is_builtin(self._wanted) else ""}
        )
        self._taken.add(name)
        self.lists[name] = items.pop()
        return ast.parse(f"tuple({name})", mode="eval").body


def _is_builtin(name: str) -> bool:
    import builtins

    return hasattr(builtins, name)


class _Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)
