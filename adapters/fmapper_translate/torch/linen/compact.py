"""The layers and arrays that a method of a Linen module makes in its call."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from typing import Any

from flax import linen

from fmapper_adapters.jax.libraries import train_flags
from fmapper_translate.functions import Function
from fmapper_translate.recording import Recording
from fmapper_translate.torch import tables
from fmapper_translate.walk.errors import NotTranscribed

TRAINING = [name for name, is_training in train_flags.NAMES.items() if is_training]
STILL = [name for name, is_training in train_flags.NAMES.items() if not is_training]
_ARRAYS = ("param", "variable")


class Compact:
    """The parts that a `compact` method makes, each by the call that makes it.

    Args:
        function: The method.
        recording: What the source did.

    Attributes:
        names: Calls that make a part -> its names, by evaluation.
        late: Those of them whose arguments or conditions depend on arrays that are given.
        kept: Statements that the others need.
    """

    def __init__(self, function: Function, recording: Recording) -> None:
        self.function = function
        self._events = recording.events
        self._source = recording.source
        self.names: dict[ast.Call, list[str]] = {}
        is_unbound = function.owner is not None and function.is_static
        for node in function.nodes:
            is_call = isinstance(node, ast.Call) and function.name != "setup" and not is_unbound
            names = self._names(node) if is_call else []  # type: ignore[arg-type]
            if isinstance(node, ast.Call) and names:
                self.names[node] = names
        given = recording.arguments_of(function)
        parameters = [arg.arg for arg in ast.walk(function.tree.args) if isinstance(arg, ast.arg)]
        self._flags = {
            name for name in parameters
            if name != "self" and not any(map(self._has_array, given.get(name, [])))
        }  # fmt: skip
        self._given = {*parameters} - {"self"}
        if function.owner is None:  # a function that is given the module
            self._flags, self._given = set(), self._given | {"self"}
        self.late: set[ast.Call] = {*self.names} if function.owner is None else set()
        self.kept: set[ast.stmt] = set()
        for _ in range(2):  # loops give names to what stands before
            self._follow(function.tree.body, is_given=False)
        shared = {self.prefix(node) for node in self.late if self.has_number(node)}
        self.late |= {x for x in self.names if self.has_number(x) and self.prefix(x) in shared}
        self._keep(function.tree.body, set())
        self.used = self._used()

    def _has_array(self, value: Any) -> bool:
        if isinstance(value, tuple | list | dict):
            inner = value.values() if isinstance(value, dict) else value
            return any(map(self._has_array, inner))
        return self._source.is_array(value)

    def _names(self, node: ast.Call) -> list[str]:
        names = []
        for event in self._events.get(node, ()):
            func = event.parts.get(node.func)
            callee = func.value if func is not None else None
            inner = callee.func if isinstance(callee, functools.partial) else callee
            if isinstance(inner, type) and issubclass(inner, linen.Module):
                names.append(event.value.name)
            elif is_method(callee, *_ARRAYS):
                at = node.args[0 if is_method(callee, "param") else 1]
                known = event.parts.get(at)
                names.append(known.value if known else ast.literal_eval(at))
        return names

    # --- names ------------------------------------------------------------------------------------

    def prefix(self, node: ast.Call) -> str:
        """Returns what Linen's name of a part begins with."""
        return self.names[node][0].rpartition("_")[0]

    def name_node(self, node: ast.Call) -> ast.expr | None:
        """Returns the expression that names a part; None if Linen does."""
        value = self._events[node][0].value
        if not isinstance(value, linen.Module):
            return node.args[0 if self._source.is_array(value) and not isinstance(
                value, linen.Variable) else 1]  # fmt: skip
        given = next((key.value for key in node.keywords if key.arg == "name"), None)
        is_left_out = isinstance(given, ast.Constant) and given.value is None
        return None if is_left_out else given

    def has_number(self, node: ast.Call) -> bool:
        """Returns whether Linen gives a part a number, another one for another evaluation."""
        prefix = self.prefix(node)
        every = [x for x in self.names if self.name_node(x) is None and self.prefix(x) == prefix]
        return node in every and any(len({*self.names[call]}) > 1 for call in every)

    def counters(self) -> list[str]:
        """Returns the prefixes of the names of numbered parts that no loop's variable numbers."""
        numbered = (x for x in self.names if self.has_number(x) and self.loop_variable(x) is None)
        return [*dict.fromkeys(map(self.prefix, numbered))]

    def loop_variable(self, node: ast.Call) -> str | None:
        """Returns the name in a single loop over a range that numbers a part; None if none does."""
        prefix = self.prefix(node)
        every = [x for x in self.names if self.name_node(x) is None and self.prefix(x) == prefix]
        around = [
            item for item in self.function.nodes
            if isinstance(item, ast.For | ast.If | ast.While | ast.IfExp | ast.ListComp)
            and node in ast.walk(item)
        ]  # fmt: skip
        if len(every) > 1 or len(around) != 1:
            return None
        match around[0]:
            case ast.For(
                ast.Tuple([ast.Name(name), _]), ast.Call(ast.Name("enumerate"), [_], [])
            ) | ast.For(ast.Name(name), ast.Call(ast.Name("range"), [_], [])):
                return name
        return None

    # --- modes ------------------------------------------------------------------------------------

    def modes(self, node: ast.Call) -> dict[str, ast.expr]:
        """Returns the arguments of a call that set the mode of a part, by name."""
        given = {str(key.arg): key.value for key in node.keywords if key.arg in train_flags.NAMES}
        kind = type(self._events[node][0].value) if node in self.names else None
        if tables.layer_of(kind) is not None and not given:
            fields = [*kind.__dataclass_fields__]  # type: ignore[union-attr]
            given = {name: arg for name, arg in zip(fields, node.args, strict=False)
                     if name in STILL}  # fmt: skip
        return given

    def mode_of(self, node: ast.expr) -> tuple[str, ast.expr] | None:
        """Returns the argument that set the mode of what an expression gives, by name."""
        if isinstance(node, ast.Name):
            values = [
                item.value for item in self.function.nodes
                if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == node.id
            ]  # fmt: skip
            modes = {found for value in values if (found := self.mode_of(value))}
            if modes and len(values) > 1:
                raise NotTranscribed(f"{node.id} has the mode of several assignments")
            return next(iter(modes), None)
        if isinstance(node, ast.Call):
            for name, value in self.modes(node).items():
                return name, value
            func = self._events[node][0].parts.get(node.func) if self._events.get(node) else None
            is_maker = func is not None and isinstance(func.value, functools.partial | type)
            return self.mode_of(node.func) if is_maker and isinstance(node.func, ast.Name) else None
        return None

    def _reads(self, node: ast.AST) -> Iterator[str]:
        """Returns the names that an expression reads, but for what sets modes."""
        skipped = [*self.modes(node).values()] if isinstance(node, ast.Call) else []
        if isinstance(node, ast.Name):
            yield node.id
        for child in ast.iter_child_nodes(node):
            if child not in skipped and getattr(child, "value", None) not in skipped:
                yield from self._reads(child)

    # --- what depends on arrays, and what the parts need ------------------------------------------

    def _follow(self, body: Collection[ast.stmt], *, is_given: bool) -> None:
        for statement in body:
            match statement:
                case ast.If(test, then, other) | ast.While(test, then, other):
                    depends = is_given or self._depends(test)
                    self._note(test, is_given=is_given)
                    self._follow([*then, *other], is_given=depends)
                case ast.For(target, items, inner, other):
                    depends = is_given or self._depends(items)
                    self._note(items, is_given=is_given)
                    if depends:
                        self._given |= {*self._reads(target)}
                    self._follow([*inner, *other], is_given=depends)
                case ast.Assign(targets=[*_], value=value) | ast.AugAssign(value=value):
                    self._note(value, is_given=is_given)
                    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                    names = {name for target in targets for name in self._reads(_base(target))}
                    if is_given or self._depends(value):
                        self._given |= names
                    values = [event.value for event in self._events.get(value, ())]
                    is_flag = values and not any(map(self._has_array, values))
                    if is_flag and {*self._reads(value)} & self._flags:
                        self._flags |= names
                case _:
                    self._note(statement, is_given=is_given)

    def _depends(self, node: ast.AST) -> bool:
        return bool({*self._reads(node)} & self._given)

    def _note(self, node: ast.AST, *, is_given: bool) -> None:
        for part in ast.walk(node):
            for loop in getattr(part, "generators", []):  # of a comprehension
                if self._depends(loop.iter):
                    self.late |= {x for x in ast.walk(part) if x in self.names}
        for call in (item for item in ast.walk(node) if item in self.names):
            assert isinstance(call, ast.Call)
            flags = sorted({*self._reads(call)} & self._flags)
            if flags:
                raise NotTranscribed(
                    f"`{ast.unparse(call)}` depends on the argument {', '.join(flags)} of the call"
                )
            if is_given or self._depends(call):
                self.late.add(call)

    def makers_in(self, node: ast.AST) -> list[ast.Call]:
        """Returns the calls in a statement that make parts in the constructor, inner ones first."""
        inner: list[ast.Call] = []
        for child in ast.iter_child_nodes(node):
            inner += self.makers_in(child)
        is_made = isinstance(node, ast.Call) and node in self.names and node not in self.late
        return [*inner, node] if is_made else inner  # type: ignore[list-item]

    def _keep(self, body: Collection[ast.stmt], needed: set[str]) -> None:
        for statement in reversed([*body]):
            match statement:
                case ast.If(test, then, other):
                    for side in (other, then):
                        self._keep(side, needed)
                    if self.makers_in(statement) or self.kept & {*ast.walk(statement)}:
                        needed |= {*self._reads(test)}
                case ast.For(_, items, inner):
                    for _ in range(2):
                        self._keep(inner, needed)
                    if self.makers_in(statement) or self.kept & {*ast.walk(statement)}:
                        needed |= {*self._reads(items)}
                case _:
                    targets = getattr(statement, "targets", [])
                    names = {ast.unparse(x) for item in targets for x in ast.walk(item)
                             if isinstance(getattr(x, "ctx", None), ast.Store)}  # fmt: skip
                    if names & needed:
                        self.kept.add(statement)
                        needed |= {*self._reads(statement)}
                    for call in self.makers_in(statement):
                        needed |= {*self._reads(call)}
                    for part in ast.walk(statement):
                        for loop in getattr(part, "generators", []) if self.makers_in(part) else ():
                            needed |= {*self._reads(loop.iter)}

    def _used(self) -> set[str]:
        """Returns the names that the call reads, without what only makes parts."""

        def reads(node: ast.AST) -> Iterator[str]:
            if isinstance(node, ast.Call) and node in self.names and node not in self.late:
                mode = self.mode_of(node)
                yield from self._reads(mode[1]) if mode else ()
                name = self.name_node(node)
                yield from self._reads(name) if name is not None else ()
                return
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id
            for child in ast.iter_child_nodes(node):
                if not (isinstance(child, ast.Assign) and self.is_unread(child, used)):
                    yield from reads(child)

        used = {node.id for node in self.function.nodes if isinstance(node, ast.Name)}
        for _ in range(len(self.function.tree.body) + 1):
            used = {*reads(self.function.tree)}
        return used

    def is_unread(self, statement: ast.stmt, used: set[str] | None = None) -> bool:
        """Returns whether a statement gives a name a value that only the constructor reads."""
        match statement:
            case ast.Assign([ast.Name(name)]):
                return name not in (self.used if used is None else used)
        return False


def _base(target: Any) -> ast.expr:
    """Returns what an assignment changes: of an element its container."""
    while isinstance(target, ast.Subscript):
        target = target.value
    elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return ast.Tuple([*map(_base, elements)]) if elements != [target] else target


def is_method(value: Any, *names: str) -> bool:
    """Returns whether something is a method of Linen's modules, of these names."""
    owner = getattr(value, "__self__", None)
    return isinstance(owner, linen.Module) and getattr(value, "__name__", "") in names
