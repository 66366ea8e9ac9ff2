"""Loops that collect what each part of a list is given or gives, as all hidden states."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence

from fmapper.translation.code import identifier, text

_CALL = re.compile(r"self(?:\.\w+|\[\d+\])*\.\w+\[(\d+)\]")


def collect_states(lines: Sequence[str]) -> list[str]:
    """Rewrites a chain of calls whose intermediate values are items of a tuple.

    Then the calls are equal but for their index.

    Examples:
        >>> lines = ["x_2 = self.h[0](x)", "x_3 = self.h[1](x_2)", "return norm(x_3), (x, x_2)"]
        >>> print("; ".join(collect_states(lines)))
        states = []; states.append(x); x = self.h[0](x); states.append(x); x = self.h[1](x); \
return norm(x), (*states,)
    """
    found = list(lines)
    at = 0
    while at < len(found):
        values = _chain_at(found, at)
        new = _rewrite(found, at, values) if len(values) > 2 else None
        if new is not None:
            at += len(new) - len(found) + len(values) - 1
            found = new
        else:
            at += 1
    return found


def part_nested(lines: Sequence[str]) -> list[str]:
    """Writes calls of a list's parts that are in one another as statements of their own.

    Examples:
        >>> part_nested(["return g(self.h[1](self.h[0](x)))"])
        ['y = self.h[0](x)', 'y = self.h[1](y)', 'return g(y)']
    """
    found: list[str] = []
    taken = {word for line in lines for word in re.findall(r"\w+", line)}
    for line in lines:
        tree = ast.parse(line)
        chain = _nested_calls(tree) if "\n" not in line else []
        if not chain:
            found.append(line)
            continue
        target, equals, code = line.partition(" = ")
        is_whole = equals and target.isidentifier() and code == text(chain[-1])
        variable = target if is_whole else identifier("y", taken)
        taken.add(variable)
        name = ast.Name(variable, ast.Load())
        for inner, outer in zip([None, *chain], chain, strict=False):
            step = _Replace(inner, name).visit(copy.deepcopy(outer)) if inner else outer
            found.append(f"{variable} = {text(step)}")
        if not is_whole:
            found.append(text(_Replace(chain[-1], name).visit(tree)))
    return found


def _nested_calls(tree: ast.AST) -> list[ast.Call]:
    """Returns calls of a list's parts that are in one another, inner ones first."""
    for node in ast.walk(tree):
        found: list[ast.Call] = []
        one: ast.AST | None = node
        while isinstance(one, ast.Call) and (call := _CALL.fullmatch(text(one.func))):
            found.insert(0, one)
            before = f"{call[0][: call.start(1)]}{int(call[1]) - 1}]"
            one = next(
                (a for a in one.args if isinstance(a, ast.Call) and text(a.func) == before), None
            )
        if len(found) > 1:
            return found
    return []


class _Replace(ast.NodeTransformer):
    """Puts a name in the place of a call."""

    def __init__(self, call: ast.Call, name: ast.Name) -> None:
        self._code = text(call)
        self._name = name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._name if text(node) == self._code else self.generic_visit(node)


def begin_apart(lines: Sequence[str]) -> list[str]:
    """Computes what the first part of a list is called with in a statement of its own.

    Examples:
        >>> begin_apart(["x = self.h[0](f(y), z)", "x = self.h[1](x, z)"])
        ['x = f(y)', 'x = self.h[0](x, z)', 'x = self.h[1](x, z)']
    """
    found = list(lines)
    for at in range(len(found) - 2, -1, -1):
        target, equals, code = found[at].partition(" = ")
        call = _CALL.match(code)
        if not equals or not target.isidentifier() or call is None or "\n" in found[at + 1]:
            continue
        one = ast.parse(code, mode="eval").body
        after = f"{code[: call.start(1)]}{int(call[1]) + 1}]"
        later = (node for node in ast.walk(ast.parse(found[at + 1])) if isinstance(node, ast.Call))
        other = next((node for node in later if text(node.func) == after), None)
        if not isinstance(one, ast.Call) or text(one.func) != call[0] or other is None:
            continue
        for i, (mine, theirs) in enumerate(zip(one.args, other.args, strict=False)):
            if text(theirs) == target and not isinstance(mine, ast.Name):
                one.args[i] = ast.Name(target, ast.Load())
                if text(one).replace(call[0], after, 1) == text(other):
                    found[at : at + 1] = [f"{target} = {text(mine)}", f"{target} = {text(one)}"]
                break
    return found


def _chain_at(lines: Sequence[str], at: int) -> list[str]:
    """Returns the values of a chain: what the first part is given, and what each part gives."""
    values: list[str] = []
    pattern = ""
    for line in lines[at:]:
        target, equals, code = line.partition(" = ")
        call = _CALL.match(code)
        if not equals or not target.isidentifier() or call is None or "\n" in line:
            break
        if values and target in values:
            break
        words = dict.fromkeys(re.findall(r"(?<![.\w])[A-Za-z_]\w*\b(?!\s*=[^=])", code))
        if not values:
            first, index, given = code, int(call[1]), [word for word in words if word != "self"]
            values = [target]
            continue
        if int(call[1]) != index + len(values) or values[-1] not in words:
            break
        masked = _mask(code, values[-1])
        if not pattern:
            begun = [word for word in given if _mask(first, word) == masked]
            if not begun:
                break
            pattern, values = masked, [begun[0], *values]
            index -= 1
        elif masked != pattern:
            break
        values.append(target)
    return values if pattern else []


def _mask(code: str, name: str) -> str:
    call = _CALL.match(code)
    assert call is not None
    whole = code[: call.start(1)] + code[call.end(1) :]
    return re.sub(rf"(?<![.\w]){name}\b(?!\s*=[^=])", "\0", whole)


def _rewrite(lines: list[str], at: int, values: list[str]) -> list[str] | None:
    count = len(values) - 1
    before, after = lines[:at], [ast.parse(line) for line in lines[at + count :]]
    taken = {word for line in lines for word in re.findall(r"\w+", line)}
    collector = _Collector(values, identifier("states", taken))
    after = [collector.visit(tree) for tree in after]
    if collector.begin is None:
        return None
    begun, *inner, last = values
    left = {n.id for tree in after for n in ast.walk(tree) if isinstance(n, ast.Name)}
    if left & {*inner}:
        return None
    state = begun if begun not in left else inner[0]
    renamed = [_print(_Rename({last: state}).visit(tree)) for tree in after]
    found = [*before, f"{collector.name} = []"]
    if state != begun:
        found.append(f"{state} = {begun}")
    for given, line in zip(values, lines[at : at + count], strict=False):
        tree = _Rename({given: state}).visit(ast.parse(line.partition(" = ")[2], mode="eval"))
        step = [f"{collector.name}.append({state})", f"{state} = {text(tree)}"]
        found += step if collector.begin == 0 else step[::-1]
    return [*found, *renamed]


def _print(tree: ast.Module) -> str:
    """Returns the code of a statement, without the parentheses of a tuple that is returned."""
    (statement,) = tree.body
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
        return f"return {', '.join(map(text, statement.value.elts))}"
    return text(statement)


class _Collector(ast.NodeTransformer):
    """Replaces runs of a chain's values in tuples by a list that the loop fills."""

    def __init__(self, values: Sequence[str], name: str) -> None:
        self._values = list(values)
        self.name = name
        self.begin: int | None = None  # whether the list has what is given, or what comes out

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        self.generic_visit(node)
        names = [one.id if isinstance(one, ast.Name) else "" for one in node.elts]
        count = len(self._values) - 1
        for begin in (0, 1) if self.begin is None else (self.begin,):
            run = self._values[begin : begin + count]
            for at in range(len(names) - count + 1):
                if names[at : at + count] == run and isinstance(node.ctx, ast.Load):
                    self.begin = begin
                    starred = ast.Starred(ast.Name(self.name, ast.Load()), ast.Load())
                    node.elts[at : at + count] = [starred]
                    return node
        return node


class _Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)
