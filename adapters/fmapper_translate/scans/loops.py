"""Loops over blocks as scans: what they carry from block to block, and what they collect."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fmapper.translation import text
from fmapper_translate.functions import Function
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.files import File
    from fmapper_translate.statements import Statements


@dataclass(frozen=True)
class Collection:
    """A list or tuple that each block adds an array to.

    Attributes:
        body: The statements among which it is added.
        at: The place of the one that adds it.
        value: The array.
        brackets: Those of such a list or tuple.
        is_conditional: Whether it is below a condition, the same one for all blocks.
    """

    body: list[ast.stmt]
    at: int
    value: ast.expr
    brackets: tuple[str, str]
    is_conditional: bool


@dataclass(frozen=True)
class Flow:
    """The variables of a loop over blocks.

    Attributes:
        block: The variable for the block.
        carried: Variables that a block changes for the next one, or for what follows.
        collected: Lists and tuples that each block adds an array to -> how.
    """

    block: str
    carried: tuple[str, ...]
    collected: Mapping[str, Collection]


def flow_of(function: Function, loop: ast.For, events: Mapping[ast.AST, Any]) -> Flow:
    """Returns what a loop does with variables.

    Args:
        function: The function.
        loop: A loop in it.
        events: The evaluations of expressions.

    Raises:
        NotTranscribed: A scan cannot do it.
    """
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    around = [x for x in function.nodes if isinstance(x, ast.For | ast.While) and x is not loop]
    if any(loop in ast.walk(outer) for outer in around):
        raise NotTranscribed("its loop is in another one")
    ends = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.FunctionDef, ast.NamedExpr)
    if loop.orelse or any(isinstance(node, ends) for node in inside):
        raise NotTranscribed("its loop may end early")
    block = loop.target
    if isinstance(block, ast.Tuple):  # of `enumerate`
        number, block = block.elts
        if _names(inside, ast.Load) & _names([number], ast.Store):
            raise NotTranscribed(f"its loop reads the number `{ast.unparse(number)}`")
    if not isinstance(block, ast.Name):
        raise NotTranscribed(f"its loop has the variable `{ast.unparse(loop.target)}`")
    collected = dict(_collections(loop.body, inside, events))
    assigned = {*_variables(inside)}
    before = {node.arg for node in ast.walk(function.tree.args) if isinstance(node, ast.arg)}
    before |= {
        node.id for node in function.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        and node.lineno < loop.lineno
    }  # fmt: skip
    for node in inside:
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), method))):
                if name in before - collected.keys() and not method.endswith("_"):
                    raise NotTranscribed(f"its loop changes `{name}`")
    after = _first_loads(_rest_after(function.tree.body, loop))
    lost = sorted((assigned - before | {block.id}) & after)
    if lost:
        raise NotTranscribed(f"`{lost[0]}` of the last block is read after its loop")
    read = _names(inside, ast.Load) | after
    carried = sorted((assigned & before & read) - collected.keys())
    if not carried:
        raise NotTranscribed("its blocks are not called one after the other")
    return Flow(block.id, tuple(carried), collected)


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context]) -> set[str]:
    every = (part for node in nodes for part in ast.walk(node))
    return {x.id for x in every if isinstance(x, ast.Name) and isinstance(x.ctx, context)}


def _variables(nodes: list[ast.AST]) -> Iterator[str]:
    """Returns the variables that statements change.

    Raises:
        NotTranscribed: They change an object.
    """
    for node in nodes:
        match node:
            case ast.Name(name, ast.Store()) | ast.Subscript(ast.Name(name), ctx=ast.Store()):
                yield name
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                raise NotTranscribed(f"its loop changes `{ast.unparse(node)}`")
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), method))) if method[-1] == "_":
                yield name


def _collections(
    body: list[ast.stmt],
    inside: list[ast.AST],
    events: Mapping[ast.AST, Any],
    *,
    below: bool = False,
) -> Iterator[tuple[str, Collection]]:
    """Returns the lists and tuples that a loop adds an array to, each in one statement.

    Raises:
        NotTranscribed: It adds something else.
    """
    for at, statement in enumerate(body):
        added: ast.expr | None = None
        match statement:
            case ast.If():
                for side in (statement.body, statement.orelse):
                    yield from _collections(side, inside, events, below=True)
                continue
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [value])):
                added = ast.List([value])
            case ast.AugAssign(ast.Name(name), ast.Add(), ast.Tuple() | ast.List() as added):
                pass
            case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(same), ast.Add(), added)):
                added = added if same == name else None
            case ast.Assign([ast.Name(name)], ast.Tuple([ast.Starred(ast.Name(same)), value])):
                added = ast.Tuple([value]) if same == name else None
        if not isinstance(added, ast.Tuple | ast.List) or len(added.elts) != 1:
            continue
        value, pair = added.elts[0], ("(", ")") if isinstance(added, ast.Tuple) else ("[", "]")
        uses = [node for node in inside if isinstance(node, ast.Name) and node.id == name]
        own = [node for node in ast.walk(statement) if node in uses]
        values = [event.value for event in events.get(value, ())]
        if len(uses) > len(own) or not all(isinstance(x, torch.Tensor) for x in values):
            raise NotTranscribed(f"its loop collects what is not one array in `{name}`")
        yield name, Collection(body, at, value, pair, below)


def _rest_after(body: list[ast.stmt], loop: ast.For) -> list[ast.stmt]:
    """Returns the statements after a loop, from the inside out."""
    for at, statement in enumerate(body):
        if statement is loop:
            return body[at + 1 :]
        for inner in (getattr(statement, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(inner, list) and any(loop in ast.walk(item) for item in inner):
                return [*_rest_after(inner, loop), *body[at + 1 :]]
    return []


def _first_loads(body: list[ast.stmt]) -> set[str]:
    """Returns the variables that statements read before they set them."""
    read: set[str] = set()
    known: set[str] = set()
    for statement in body:
        inner = [
            item
            for name in ("body", "orelse", "finalbody", "handlers")
            for item in getattr(statement, name, [])
        ]
        if not inner:
            read |= _names([statement], ast.Load) - known
            if isinstance(statement, ast.AugAssign):
                read |= _names([statement.target], ast.Store) - known
            known |= _names([statement], ast.Store)
            continue
        head = [x for x in ast.iter_child_nodes(statement) if x not in inner]
        set_there = _names(head, ast.Store)
        read |= (_names(head, ast.Load) | (_first_loads(inner) - set_there)) - known
    return read


def print_scan(
    statements: Statements, file: File, function: Function, loop: ast.For
) -> Iterator[str]:
    """Returns a loop over blocks as a scan.

    Args:
        statements: The printer of its function.
        file: The file.
        function: The function.
        loop: The loop.
    """
    flow = flow_of(function, loop, file.recording.events)
    source, more = loop.iter, ""
    if isinstance(source, ast.Subscript):  # of all blocks, as the scan checks
        assert isinstance(source.slice, ast.Slice)
        if source.slice.upper is not None:
            more = f", length={text(statements.code(source.slice.upper))}"
        source = source.value
    elif isinstance(source, ast.Call):
        source = source.args[0]
    blocks = text(statements.code(source))
    news = {name: f"new_{name}" for name in flow.collected}
    carry, each = map(_one_or_all, (flow.carried, [*news.values()]))
    is_one = len(flow.carried) == 1
    lines = [] if is_one else [f"{carry} = carry"]
    lines += [f"{news[x]} = None" for x, how in flow.collected.items() if how.is_conditional]
    with _variables_for(flow.collected, news):
        lines += statements.block(loop.body, strict=True)
    call, given = (
        f"call_{blocks.rpartition('.')[2]}",
        f"{carry if is_one else 'carry'}, {flow.block}",
    )
    more_given, first, argument = file.target.keys_of_scan(function, lines)
    yield f"def {call}({given}{more_given}):"
    yield from (f"    {line}".rstrip() for line in [*first, *lines])
    yield f"    return {carry}, {each or None}"
    yield ""
    yield f"{carry}, {each or '_'} = {blocks}.scan({call}, {carry}{argument}{more})"
    for name, how in flow.collected.items():
        left, right = how.brackets
        if how.is_conditional:
            yield f"if {news[name]} is not None:"
        indent = "    " * how.is_conditional
        yield f"{indent}{name} = {left}*{name}, *{news[name]}{right}"


@contextlib.contextmanager
def _variables_for(collected: Mapping[str, Collection], news: Mapping[str, str]) -> Iterator[None]:
    """Has statements assign what they add to a list or tuple to a variable instead."""
    olds = {name: how.body[how.at] for name, how in collected.items()}
    for name, how in collected.items():
        new = ast.Assign([ast.Name(news[name], ast.Store())], how.value)
        how.body[how.at] = ast.copy_location(new, olds[name])
    try:
        yield
    finally:
        for name, how in collected.items():
            how.body[how.at] = olds[name]


def _one_or_all(names: Sequence[str]) -> str:
    return f"({', '.join(names)})" if len(names) > 1 else "".join(names)
