"""Proves from its source code that a loop carries nothing from one iteration to the next."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

_Tensor = torch.Tensor
_BUILTINS = {"int", "float", "bool", "str", "len", "min", "max", "abs", "isinstance", "getattr"}
_CHANGES = {"append", "extend", "insert", "remove", "pop", "popitem", "popleft", "appendleft"}
_CHANGES |= {"update", "setdefault", "discard", "clear", "send", "register_buffer", "__next__"}

_COUNTS = {"numel": False, "any": True, "sum": True}  # method -> whether it is called on a mask
# A comparison of a count with a number -> its result if there are rows.
_COMPARED = {
    (ast.Eq, 0): False, (ast.LtE, 0): False, (ast.Lt, 1): False,
    (ast.NotEq, 0): True, (ast.Gt, 0): True, (ast.GtE, 1): True,
}  # fmt: skip


class NotProved(Exception):
    """Raised for a loop that may do more than add rows, with the reason."""


def sources_of(module: torch.nn.Module) -> set[str]:
    """Returns the source code of the classes of a module and of those inside, except torch's."""
    return {_source(cls) for inner in module.modules() for cls in type(inner).__mro__}


@functools.cache
def _source(cls: type) -> str:
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return ""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def prove(frame: types.FrameType) -> set[int]:
    """Proves that the iterations are independent; returns the lines that end an iteration early.

    Raises:
        NotProved: Iterations may depend on each other.
    """
    tree = tree_of(frame.f_code)
    if tree is None:
        raise NotProved("the source code is not available")
    loops = [child for child in ast.walk(tree) if isinstance(child, ast.For)]
    matches = [child for child in loops if child.iter.lineno == frame.f_lineno]
    if len(matches) != 1 or (
        isinstance(matches[0].iter, ast.Call) and not _is_nonzero(matches[0].iter)
    ):
        raise NotProved("the loop does not iterate over the tensor itself")
    (loop,) = matches
    if not isinstance(loop.target, ast.Name) or loop.orelse:
        raise NotProved("the loop has several targets or an else block")
    outer = [child for child in ast.walk(tree) if isinstance(child, ast.For | ast.While)]
    is_nested = any(child is not loop and loop in ast.walk(child) for child in outer)

    def is_late(node: ast.Name) -> bool:
        return isinstance(node.ctx, ast.Load) and (is_nested or node.lineno > loop.lineno)

    return prove_block(frame, tree, loop.body, {loop.target.id}, is_late)


def prove_block(
    frame: types.FrameType,
    tree: ast.Module,
    statements: list[ast.stmt],
    given: set[str],
    matters: Callable[[ast.Name], bool] = lambda _: True,
) -> set[int]:
    """Proves that statements only add rows, and returns the lines that end an iteration early.

    The names in `given` are set before them; `matters` tells whether a name elsewhere in the code
    must not be one that they set. Raises NotProved as `prove` does.
    """
    stored = {*given, *_names(statements)}
    body = _Body(frame, stored)
    body.block(statements, given)
    inside = {id(child) for part in statements for child in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise NotProved("the function assigns to names of other scopes")
        if not isinstance(node, ast.Name) or node.id not in stored or id(node) in inside:
            continue
        if matters(node):
            raise NotProved(f"{node.id} is used elsewhere")
    if stored & {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}:
        raise NotProved("other functions read these names")
    return body.asked


@functools.cache
def tree_of(code: types.CodeType) -> ast.Module | None:
    """Parses the code of a function; None if its source is not available."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, first - 1)
    return tree


def _is_nonzero(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "nonzero"


def _names(parts: Iterable[ast.AST]) -> list[str]:
    """Returns the names that some code sets."""
    nodes = [node for part in parts for node in ast.walk(part)]
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


class _Body:
    """Checks that statements only set local names and add rows."""

    def __init__(self, frame: types.FrameType, stored: set[str]) -> None:
        self.frame = frame
        self.stored = stored
        self.asked: set[int] = set()
        self.modules: set[str] = set()  # names of stateless modules
        self.others: set[str] = set()  # all other names

    def block(self, body: list[ast.stmt], defined: set[str]) -> set[str] | None:
        """Returns the names that are set after a block; None if it ends the iteration."""
        for statement in body:
            after = self.statement(statement, defined)
            if after is None:
                return None
            defined = after
        return defined

    def statement(self, statement: ast.stmt, defined: set[str]) -> set[str] | None:
        """Returns the names that are set after a statement; None if it ends the iteration."""
        if isinstance(statement, ast.Pass):
            return defined
        if isinstance(statement, ast.Continue):  # only under a condition on rows
            return None
        if isinstance(statement, ast.Assign):
            self.expression(statement.value, defined)
            for target in statement.targets:
                is_module = isinstance(target, ast.Name) and self.is_one_of_several(statement.value)
                (self.modules if is_module else self.others).update(_names([target]))
            return defined.union(*[self.target(target, defined) for target in statement.targets])
        if isinstance(statement, ast.AugAssign):
            self.expression(statement.value, defined)
            if isinstance(statement.target, ast.Name):
                self.read(statement.target.id, defined)
                return defined
            return defined | self.target(statement.target, defined)
        if isinstance(statement, ast.Expr):
            call = statement.value
            if not isinstance(call, ast.Constant):
                owner = getattr(getattr(call, "func", None), "value", None)
                if not isinstance(owner, ast.Name) or not self.is_tensor(owner.id):
                    raise NotProved(f"line {statement.lineno} does something other than add rows")
                self.expression(call, defined)
            return defined
        if isinstance(statement, ast.With) and all(
            i.optional_vars is None for i in statement.items
        ):
            for item in statement.items:
                self.expression(item.context_expr, defined)
            return self.block(statement.body, defined)
        if isinstance(statement, ast.If):
            self.expression(statement.test, defined)
            question = question_of(statement.test)
            if ends_iteration(statement) and question and question[1:] == (False, False):
                self.asked.add(statement.test.lineno)
                return defined
            ways = [self.block(way, defined) for way in (statement.body, statement.orelse)]
            left = [way for way in ways if way is not None]
            return set.intersection(*left) if left else None
        raise NotProved(f"line {statement.lineno} is a statement that may have other effects")

    def target(self, target: ast.expr, defined: set[str]) -> set[str]:
        """Returns the names that an assignment to a target sets."""
        if isinstance(target, ast.Name):
            return {target.id}
        if isinstance(target, ast.Tuple):
            return {name for element in target.elts for name in self.target(element, defined)}
        owner = target.value if isinstance(target, ast.Subscript) else None
        if (
            isinstance(target, ast.Subscript)
            and isinstance(owner, ast.Name)
            and self.is_tensor(owner.id)
        ):
            self.expression(target.slice, defined)
            return set()
        raise NotProved(f"line {target.lineno} keeps a value beyond the iteration")

    def is_tensor(self, name: str) -> bool:
        """Returns whether a name from outside the loop is a tensor."""
        return name not in self.stored and isinstance(self.frame.f_locals.get(name), _Tensor)

    def read(self, name: str, defined: set[str]) -> None:
        """Raises NotProved for a name that another iteration may have set."""
        if name in self.stored and name not in defined:
            raise NotProved(f"{name} is carried from one iteration to the next")

    def expression(self, value: ast.expr, defined: set[str]) -> None:
        """Raises NotProved for an expression that may have side effects."""
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                self.read(node.id, defined)
            elif isinstance(node, ast.Call):
                self.callee(node.func)
            elif isinstance(
                node, ast.NamedExpr | ast.Lambda | ast.Yield | ast.YieldFrom | ast.Await
                | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
            ):  # fmt: skip
                raise NotProved(f"line {node.lineno} is an expression that may have other effects")

    def callee(self, func: ast.expr) -> None:
        """Raises NotProved for a call of anything but a module, torch function or tensor method."""
        if isinstance(func, ast.Name) and func.id in _BUILTINS | self.modules - self.others:
            return
        if isinstance(func, ast.Subscript):
            if self.is_one_of_several(func):
                return
        elif (value := self.value(func)) is not None:
            if _is_called_alike(value):
                return
        elif isinstance(func, ast.Attribute) and func.attr not in _CHANGES:
            root = func.value
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            is_own = isinstance(root, ast.Name) and root.id in self.stored
            if (is_own or not isinstance(func.value, ast.Name)) and hasattr(_Tensor, func.attr):
                return
        raise NotProved(f"line {func.lineno} calls {ast.unparse(func)}")

    def is_one_of_several(self, node: ast.expr) -> bool:
        """Returns whether a node is an item of a ModuleList or ModuleDict of stateless modules."""
        owner = self.value(node.value) if isinstance(node, ast.Subscript) else None
        if not isinstance(owner, torch.nn.ModuleList | torch.nn.ModuleDict):
            return False
        return all(_is_called_alike(inner) for inner in owner.children())

    def value(self, node: ast.expr) -> Any:
        """Returns the value of a name or attribute from outside the loop; None if unknown."""
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return None if owner is None else getattr(owner, node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.stored:
            return None
        frame = self.frame
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))


def _is_torch(value: Any) -> bool:
    """Returns whether an object belongs to torch: a function, a tensor method, a context."""
    if isinstance(getattr(value, "__self__", None), _Tensor):
        return True
    name = getattr(value, "__module__", None) or ""
    return name.split(".")[0] == "torch" or value in vars(torch).values()


def _is_called_alike(value: Any) -> bool:
    """Returns whether calls of a module or function do not depend on earlier calls."""
    called = value.forward if isinstance(value, torch.nn.Module) else value
    return _is_torch(called) or _keeps_nothing(called)


def _keeps_nothing(value: Any) -> bool:
    """Returns whether the code of a third-party function provably keeps no state."""
    function = getattr(value, "__func__", value)
    return isinstance(function, types.FunctionType) and _is_without_state(function)


@functools.cache
def _is_without_state(function: types.FunctionType) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            return False
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in _CHANGES or called in ("setattr", "next", "exec", "eval"):
                return False
    return True


def ends_iteration(statement: ast.If) -> bool:
    """Returns whether a statement only continues with the next iteration, under a condition."""
    is_continue = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
    return is_continue and not statement.orelse


def question_of(test: ast.expr) -> tuple[ast.expr, bool, bool] | None:
    """Returns what a condition counts, whether that is a mask, and the answer if there are rows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = question_of(test.operand)
        return None if inner is None else (*inner[:2], not inner[2])
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        (limit,) = test.comparators
        value = limit.value if isinstance(limit, ast.Constant) else None
        answer = _COMPARED.get((type(test.ops[0]), value)) if type(value) is int else None
        counted = _count_of(test.left)
        return None if counted is None or answer is None else (*counted, answer)
    counted = _count_of(test)
    return None if counted is None else (*counted, True)


def _count_of(node: ast.expr) -> tuple[ast.expr, bool] | None:
    """Returns x in `x.numel()`, `x.size(0)`, `x.shape[0]`, `len(x)`, `x.any()`, ..."""
    if isinstance(node, ast.Subscript):
        shape = node.value
        is_first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
        if is_first and isinstance(shape, ast.Attribute) and shape.attr == "shape":
            return shape.value, False
        return None
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
        return node.args[0], False
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr == "item" and not node.args:
        inner = node.func.value
        return _count_of(inner) if isinstance(inner, ast.Call) else None
    if node.func.attr == "size" and [getattr(a, "value", None) for a in node.args] == [0]:
        return node.func.value, False
    owner = node.func.value
    if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in ("any", "sum"):
        return (node.args[0], True) if len(node.args) == 1 else None
    if node.func.attr in _COUNTS and not node.args:
        return owner, _COUNTS[node.func.attr]
    return None
