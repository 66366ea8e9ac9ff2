"""Records loops over the experts that were hit for all experts, so that any inputs may hit others.

    hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
    for expert in hit:
        choice, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, experts(x[token], expert) * weights[token, choice, None])

The body runs for each expert; for one that is not hit `torch.where` finds no place. That is the
same program only if a body does nothing else than to add rows of those places. It is proved for
each loop, or the recording is given up: by the code, that no name is handed from one turn to
another; by what is computed, that no tensor is, and that only such rows are written to others.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch.overrides import TorchFunctionMode

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record import value_asserts

_Tensor = torch.Tensor
_Place: TypeAlias = tuple[types.CodeType, int, int]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NONZERO: set[Any] = {torch.nonzero, _Tensor.nonzero}
_PLACES: set[Any] = {torch.where, _Tensor.where, *_NONZERO}
_ADDS: set[Any] = {_Tensor.index_add_, _Tensor.index_put_, _Tensor.__setitem__}
_BUILTINS = {"int", "float", "bool", "str", "len", "min", "max", "abs", "isinstance", "getattr"}
_CHANGES = {"append", "extend", "insert", "remove", "pop", "popitem", "popleft", "appendleft"}
_CHANGES |= {"update", "setdefault", "discard", "clear", "send", "register_buffer", "__next__"}


class NotProved(Exception):
    """A loop that may do more than to add rows; says what."""


class Beyond(Exception):
    """A turn asks for an expert that is not there: masks often have a row for dropped tokens."""


def are_in(module: torch.nn.Module) -> bool:
    """Tells whether the code of a module looks as if it had such loops."""
    classes = {cls for inner in module.modules() for cls in type(inner).__mro__}
    return any(map(_has_loop, classes))


@functools.cache
def _has_loop(cls: type) -> bool:
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return False
    return "nonzero" in source


def over_all(forward: Callable[..., Any], missing: set[_Place]) -> Callable[..., Any]:
    """Returns the forward of a module, whose loops over experts go over all of them.

    Args:
        forward: The forward.
        missing: The turns that are left out, for experts that are not there; that they are not hit
            is asserted. It gets those that are met.

    Raises:
        NotProved: From the call, where one does more than to add rows.
        Beyond: From the call, where `missing` has got another turn: call it again.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        loops = _Loops(missing)
        try:
            with loops:
                result = forward(*args, **kwargs)
        except IndexError as error:
            if loops.turn is None or loops.turn.place in missing:
                raise
            missing.add(loops.turn.place)
            raise Beyond(str(error)) from error
        if not loops.met:
            raise NotProved("there is no loop over the places of true elements")
        loops.refuse_own(result)
        return result

    return run


class _Loops(TorchFunctionMode):
    """Watches a call.

    Attributes:
        met: Whether there was a loop.
        hits: What nonzero gave for a row of bools, by identity, and that row.
        past: The memory of what was computed in turns that are over.
        turn: The one that is running.
        missing: Turns that are left out.
    """

    def __init__(self, missing: set[_Place]) -> None:
        super().__init__()
        self.met = False
        self.missing = missing
        self.hits: dict[int, tuple[_Tensor, _Tensor]] = {}
        self.past: set[int] = set()
        self.kept: list[_Tensor] = []  # so that no memory is used twice
        self.turn: _Turn | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.turn is not None:
            return self.turn.call(func, args, kwargs)
        self.refuse_own((args, kwargs))
        if func is _Tensor.unbind and args and id(args[0]) in self.hits:
            frame = _caller()
            if args[1:] in ((), (0,)) and not kwargs:
                return _Turns(self, self.hits[id(args[0])][1], frame)
        result = func(*args, **kwargs)
        is_row = func in _NONZERO and isinstance(result, _Tensor) and args and args[0].ndim == 1
        if is_row and isinstance(args[0].shape[0], int):
            self.hits[id(result)] = (result, args[0])
        return result

    def refuse_own(self, tree: Any) -> None:
        """Raises where a tensor comes out of a turn that is over."""
        if self.past and any(_memory(x) in self.past for x in _tensors(tree)):
            raise NotProved("a tensor of one turn is used outside of it")


class _Turns:
    """What is iterated over instead of the places."""

    def __init__(self, loops: _Loops, hit: _Tensor, frame: types.FrameType) -> None:
        self.loops, self.hit, self.frame = loops, hit, frame
        self.asked = _prove(frame)

    def __iter__(self) -> Iterator[_Tensor]:
        loops = self.loops
        loops.met = True
        hit = self.hit != 0
        line = self.frame.f_lineno
        for expert in range(self.hit.shape[0]):
            place = self.frame.f_code, line, expert
            if place in loops.missing:
                _private.assert_async(~hit[expert], f"there is no expert {expert}, and it is hit")
                continue
            index = torch.tensor([expert])
            turn = _Turn(loops, hit[expert], self.frame, self.asked, place)
            loops.turn = turn
            yield index
            loops.turn = None
            loops.past |= turn.own
            loops.kept += turn.kept


class _Turn:
    """One expert's turn.

    Attributes:
        is_hit: Whether the expert is hit.
        asked: The lines that go on with the next expert where there is no row.
        place: The code and the line of the loop, and which expert it is.
        own: The memory of what was computed in it.
        others: The memory of what it was given.
        rows: The sizes of the places that it looks at.
        left_out: Those on which it ends early.
    """

    def __init__(
        self,
        loops: _Loops,
        is_hit: _Tensor,
        frame: types.FrameType,
        asked: set[int],
        place: _Place,
    ) -> None:
        self.loops, self.is_hit, self.frame, self.asked = loops, is_hit, frame, asked
        self.place = place
        self.own: set[int] = set()
        self.others: set[int] = set()
        self.kept: list[_Tensor] = []
        self.rows: set[Any] = set()
        self.left_out: set[Any] = set()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _tensors((args, kwargs))
        self.loops.refuse_own(given)
        self.others |= {_memory(x) for x in given} - self.own
        if func is _Tensor.numel and (found := self._asked_for_rows(args[0])) is not None:
            return found
        if value_asserts.is_written(func, args):  # as a part of the name of a module
            number = args[0].item()
            if not isinstance(number, int):
                raise NotProved("a number that is not the expert's is written")
            return format(number, *args[1:])
        before = [_private.version_of(x) for x in given]
        looks = func in _PLACES and len(args) == 1 and not kwargs.keys() - {"as_tuple"}
        if looks:
            condition = args[0] if args[0].dtype is torch.bool else args[0] != 0
            args = (condition & self.is_hit,)
        result = func(*args, **kwargs)
        made = _tensors(result)
        if looks:
            self.rows |= {_size(x) for x in made if x.ndim}
        changed = [
            x for x, version in zip(given, before, strict=True) if _private.version_of(x) != version
        ]
        name = getattr(func, "__name__", "")
        if func in _ADDS or (name.endswith("_") and not name.endswith("__")):
            changed += given[:1]
        if any(_memory(x) not in self.own for x in changed) and not self._adds(func, args, kwargs):
            raise NotProved(f"{name or func} writes to a tensor from outside")
        self.own |= {_memory(x) for x in made} - self.others
        self.kept += made
        return result

    def _adds(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tells whether a call writes only rows in the places looked at: none, if not hit."""
        if func not in _ADDS or kwargs.keys() - {"alpha"}:
            return False
        if func is _Tensor.index_add_:
            indices: tuple[Any, ...] = args[2:3]
        else:
            indices = tuple(args[1]) if isinstance(args[1], tuple | list) else args[1:2]
        sizes = {_size(x) for x in indices if isinstance(x, _Tensor) and x.ndim == 1}
        if not sizes & self.rows:
            return False
        return not self.left_out or self.left_out == sizes & self.rows

    def _asked_for_rows(self, x: _Tensor) -> int | None:
        """Returns 1: there are rows, in a line that ends the turn where there are none."""
        frame = _caller()
        if frame.f_code is not self.frame.f_code or frame.f_lineno not in self.asked:
            return None
        if x.ndim != 1 or _size(x) not in self.rows:
            raise NotProved("a turn ends early for something else than that it has no row")
        self.left_out.add(_size(x))
        return 1


def _size(x: _Tensor) -> Any:
    """Returns the symbol of the first size; what is not a symbol of its own equals nothing."""
    size = x.shape[0]
    found = size.node.expr if isinstance(size, torch.SymInt) else None
    return found if isinstance(found, sympy.Symbol) else object()


def _tensors(tree: Any) -> list[_Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, _Tensor)]


def _memory(x: _Tensor) -> int:
    found: int = _private.identity_of(x.untyped_storage())
    return found


def _caller() -> types.FrameType:
    """Returns the frame outside of torch and of this file that calls a function."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH):
            break
        frame = frame.f_back
    return frame


# --- the code -------------------------------------------------------------------------------------


def _prove(frame: types.FrameType) -> set[int]:
    """Proves that no name goes from turn to turn; returns the lines that end a turn early.

    Raises:
        NotProved: It may.
    """
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError) as error:
        raise NotProved("there is no source") from error
    ast.increment_lineno(tree, first - 1)
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For)]
    found = [one for one in loops if one.iter.lineno == frame.f_lineno]
    if len(found) != 1 or (isinstance(found[0].iter, ast.Call) and not _is_nonzero(found[0].iter)):
        raise NotProved("it is not the tensor itself that is iterated over")
    (loop,) = found
    if not isinstance(loop.target, ast.Name) or loop.orelse:
        raise NotProved("the loop has several names, or an else")
    stored = {loop.target.id, *_names(loop.body, ast.Store)}
    body = _Body(frame, stored)
    body.block(loop.body, {loop.target.id})
    inside = {id(one) for part in loop.body for one in ast.walk(part)}
    outer = [one for one in ast.walk(tree) if isinstance(one, ast.For | ast.While)]
    is_nested = any(one is not loop and loop in ast.walk(one) for one in outer)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise NotProved("names of other scopes are written")
        if not isinstance(node, ast.Name) or id(node) in inside or node.id not in stored:
            continue
        if isinstance(node.ctx, ast.Load) and (is_nested or node.lineno > loop.lineno):
            raise NotProved(f"{node.id} is read after the loop")
    if stored & {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}:
        raise NotProved("names of the loop are read by other functions")
    return body.asked


def _is_nonzero(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "nonzero"


def _names(parts: Iterable[ast.AST], context: type) -> list[str]:
    nodes = [node for part in parts for node in ast.walk(part)]
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


class _Body:
    """Goes through the statements of a loop."""

    def __init__(self, frame: types.FrameType, stored: set[str]) -> None:
        self.frame = frame
        self.stored = stored
        self.asked: set[int] = set()

    def block(self, body: list[ast.stmt], known: set[str]) -> set[str] | None:
        """Returns the names that are set after some statements; None where those end the turn."""
        for one in body:
            found = self.statement(one, known)
            if found is None:
                return None
            known = found
        return known

    def statement(self, one: ast.stmt, known: set[str]) -> set[str] | None:
        if isinstance(one, ast.Pass):
            return known
        if isinstance(one, ast.Continue):  # as its condition, which is known, says of this expert
            return None
        if isinstance(one, ast.Assign):
            self.expression(one.value, known)
            return known.union(*[self.target(target, known) for target in one.targets])
        if isinstance(one, ast.AugAssign):
            self.expression(one.value, known)
            if isinstance(one.target, ast.Name):
                self.read(one.target.id, known)
                return known
            return known | self.target(one.target, known)
        if isinstance(one, ast.Expr):
            call = one.value
            if not isinstance(call, ast.Constant):
                owner = getattr(getattr(call, "func", None), "value", None)
                if not isinstance(owner, ast.Name) or not self.is_tensor(owner.id):
                    raise NotProved(f"line {one.lineno} does something else than to add rows")
                self.expression(call, known)
            return known
        if isinstance(one, ast.With) and all(i.optional_vars is None for i in one.items):
            for item in one.items:
                self.expression(item.context_expr, known)
            return self.block(one.body, known)
        if isinstance(one, ast.If):
            if _ends_without_rows(one):
                self.expression(one.test, known)
                self.asked.add(one.test.lineno)
                return known
            self.expression(one.test, known)
            ways = [self.block(way, known) for way in (one.body, one.orelse)]
            left = [way for way in ways if way is not None]
            return set.intersection(*left) if left else None
        raise NotProved(f"line {one.lineno} is a statement that may do something else")

    def target(self, target: ast.expr, known: set[str]) -> set[str]:
        if isinstance(target, ast.Name):
            return {target.id}
        if isinstance(target, ast.Tuple):
            return {name for one in target.elts for name in self.target(one, known)}
        owner = target.value if isinstance(target, ast.Subscript) else None
        if (
            isinstance(target, ast.Subscript)
            and isinstance(owner, ast.Name)
            and self.is_tensor(owner.id)
        ):
            self.expression(target.slice, known)
            return set()
        raise NotProved(f"line {target.lineno} keeps something beyond the turn")

    def is_tensor(self, name: str) -> bool:
        """Tells whether a name from outside of the loop is a tensor."""
        return name not in self.stored and isinstance(self.frame.f_locals.get(name), _Tensor)

    def read(self, name: str, known: set[str]) -> None:
        if name in self.stored and name not in known:
            raise NotProved(f"{name} goes from one turn to the next")

    def expression(self, value: ast.expr, known: set[str]) -> None:
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                self.read(node.id, known)
            elif isinstance(node, ast.Call):
                self.callee(node.func)
            elif isinstance(
                node, ast.NamedExpr | ast.Lambda | ast.Yield | ast.YieldFrom | ast.Await
                | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
            ):  # fmt: skip
                raise NotProved(f"line {node.lineno} is an expression that may do something else")

    def callee(self, func: ast.expr) -> None:
        """Accepts only a module, a function of torch, or a method of a tensor as what is called."""
        if isinstance(func, ast.Name) and func.id in _BUILTINS:
            return
        if isinstance(func, ast.Subscript):  # a module out of several
            owner = self.value(func.value)
            several = isinstance(owner, torch.nn.ModuleList | torch.nn.ModuleDict)
            if several and all(_is_called_alike(inner) for inner in owner.children()):
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

    def value(self, node: ast.expr) -> Any:
        """Returns what a name or attribute is outside of the loop; None where that is not known."""
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return None if owner is None else getattr(owner, node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.stored:
            return None
        frame = self.frame
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))


def _is_torch(value: Any) -> bool:
    """Tells whether something is torch's own: a function, a method of a tensor, a context."""
    if isinstance(getattr(value, "__self__", None), _Tensor):
        return True
    name = getattr(value, "__module__", None) or ""
    return name.split(".")[0] == "torch" or value in vars(torch).values()


def _is_called_alike(value: Any) -> bool:
    """Tells whether each call of a module or function is as the first."""
    called = value.forward if isinstance(value, torch.nn.Module) else value
    return _is_torch(called) or _keeps_nothing(called)


def _keeps_nothing(value: Any) -> bool:
    """Tells whether a function of others keeps nothing from one call to the next, by its code."""
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


def _ends_without_rows(one: ast.If) -> bool:
    """Tells whether it is `if rows.numel() == 0: continue`."""
    test = one.test
    return (
        len(one.body) == 1
        and isinstance(one.body[0], ast.Continue)
        and not one.orelse
        and isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Call)
        and isinstance(test.left.func, ast.Attribute)
        and test.left.func.attr == "numel"
        and isinstance(test.ops[0], ast.Eq)
        and len(test.ops) == 1
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == 0
    )
