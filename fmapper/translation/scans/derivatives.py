"""Functions with a derivative of their own, which a file has beside the model's classes."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.programs.program import Call, Graph, Input, Output, Part, Program, refs_in
from fmapper.programs.treespec import Ref, TreeSpec
from fmapper.translation.code import expr, identifier
from fmapper.translation.functions.forms import Form
from fmapper.translation.naming import RESERVED
from fmapper.translation.units import Unit, structure_of

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect
    from fmapper.translation.functions.bodies import BodyWriter

ITSELF = "this_function"  # in the code of a function's derivative: what calls it itself


@dataclass(frozen=True, slots=True)
class Derived:
    """A function with a derivative of its own, as code.

    Attributes:
        title: What its class is to be called.
        label: What it is called in the model's own code.
        parameters: What it takes.
        lines: Its statements.
        saved: The parameters that its derivative needs.
        gradients: The parameters of the derivative: the gradients of results.
        backward: The statements of the derivative, which gives a gradient or None for each
            parameter of the function, and which calls the function `ITSELF`; or why there is none.
        once: Whether the derivative has none itself.
    """

    title: str
    label: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]
    saved: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    backward: tuple[str, ...] | str = ()
    once: bool = False

    def is_differentiable(self) -> bool:
        """Returns whether its derivative was recorded."""
        return not isinstance(self.backward, str)


@dataclass(frozen=True, slots=True)
class Enclosing:
    """The function whose derivative is being written.

    Attributes:
        function: The function, as yet without a derivative.
        again: What its derivative calls as the same function.
    """

    function: Derived
    again: list[Derived]

    def is_same(self, other: Derived) -> bool:
        """Returns whether another function computes the same.

        Its derivative has to be the same, too, if it was recorded: they are up to some order only.
        """
        mine = self.function
        return (other.label, other.parameters, _without_names(other.lines)) == (
            mine.label,
            mine.parameters,
            _without_names(mine.lines),
        )


def call_derived(
    call: Call,
    given: Sequence[ast.expr],
    writer: BodyWriter,
    dialect: Dialect,
    names: Collection[str],
) -> ast.expr:
    """Returns the call of a function with a derivative of its own, and has the file have that.

    Args:
        call: The call, `call::derivative`.
        given: The code of its operands.
        writer: That of the function with the call.
        dialect: The target.
        names: The parameters of the function with the call, which may hide others.

    Raises:
        ConversionError: It draws random numbers, or needs sizes that its operands do not tell.
    """
    draft = _Draft(call, given, writer)
    found = draft.write()
    taken = [given[i] for i in draft.kept]
    enclosing = writer.enclosing
    if enclosing is not None and enclosing.is_same(found):
        enclosing.again.append(found)
        node: ast.expr = ast.Call(expr(ITSELF), taken, [])
    else:
        titles = {kind.rpartition(".")[2] for kind in writer.program.types.values()}
        node = dialect.call_derived(found, taken, {*titles, *names})
    return ast.Tuple([node], ast.Load()) if len(call.result) == 1 else node


class _Draft:
    """Writes one function with a derivative of its own.

    Args:
        call: Its call.
        given: The code of the operands.
        writer: That of the function with the call.
    """

    def __init__(self, call: Call, given: Sequence[ast.expr], writer: BodyWriter) -> None:
        self._call, self._writer = call, writer
        self._label = str(call.kwargs["name"]).removeprefix("jax::")
        self._body, self._backward, _ = call.args
        takes, needs = call.kwargs["takes"], call.kwargs["needs"]
        used = {takes[i] for i, name in enumerate(self._body.inputs) if name in _used(self._body)}
        self._needed: set[int] = set()
        if isinstance(self._backward, Graph):
            known = _used(self._backward)
            pairs = zip(needs, self._backward.inputs, strict=False)
            self._needed = {i for i, name in pairs if name in known}
        self.kept = sorted(used | self._needed | {*call.kwargs["differentiable"]})
        inputs = dict(zip(takes, self._body.inputs, strict=True))
        above = writer.enclosing.function if writer.enclosing is not None else None
        if above is not None and (above.label, len(above.parameters)) == (
            self._label,
            len(self.kept),
        ):
            self._names = dict(zip(self.kept, above.parameters, strict=True))
        else:
            self._names = _names(self.kept, inputs, given, writer)

    def write(self) -> Derived:
        """Returns the function; its derivative calls it itself where that is what it calls."""
        takes = self._call.kwargs["takes"]
        names = [self._names.get(i, "") for i in takes]
        inputs = dict(zip(self._body.inputs, names, strict=True))
        made = Derived(
            _title(self._label),
            self._label,
            tuple(self._names.values()),
            self._lines(self._body, inputs, _one_or_all(self._body.outputs), None),
            tuple(self._names[i] for i in self.kept if i in self._needed),
            self._gradients(),
            once=bool(self._call.kwargs.get("once")),
        )
        if not isinstance(self._backward, Graph):
            reason = str(self._backward)
            if {*re.findall(r"\w+", reason)} & {*self._writer.program.symbols}:
                raise ConversionError(f"{self._label} has no gradient where sizes vary: {reason}")
            return replace(made, backward=reason)
        again: list[Derived] = []
        found = replace(made, backward=self._derivative(Enclosing(made, again)))
        known = [one for one in again if one.is_differentiable()]
        if all(_has_same_derivative(one, found) for one in known):
            return found
        if all(_gives_more(one, found) and one == known[0] for one in known):
            return known[0]
        return replace(made, backward=self._derivative(None))

    def _gradients(self) -> tuple[str, ...]:
        """Returns the parameters of the derivative; what it does not need begins with a line."""
        count, own = len(self._call.result), self._call.kwargs["cotangents"]
        if count == 1:
            return ("gradient",)
        return tuple(f"gradient_{i}" if i in own else f"_{i}" for i in range(count))

    def _derivative(self, enclosing: Enclosing | None) -> tuple[str, ...]:
        kwargs, gradients = self._call.kwargs, self._gradients()
        places = [self._names.get(i, "") for i in kwargs["needs"]]
        places += [gradients[i] for i in kwargs["cotangents"]]
        found = dict(zip(kwargs["differentiable"], self._backward.outputs, strict=True))
        wanted = tuple(found.get(i) for i in self.kept)
        inputs = dict(zip(self._backward.inputs, places, strict=True))
        return self._lines(self._backward, inputs, _one_or_all(wanted), enclosing)

    def _lines(
        self,
        graph: Graph,
        names: Mapping[str, str],
        returns: Any,
        enclosing: Enclosing | None,
    ) -> tuple[str, ...]:
        """Returns the statements of a graph as a function.

        Args:
            graph: The graph.
            names: Its inputs -> the parameters that they are; empty for what it does not need.
            returns: What it gives.
            enclosing: The function whose derivative it is, if that may call itself.
        """
        arguments = {parameter: Ref(value) for value, parameter in names.items() if parameter}
        lines = dict(self._writer.program.lines)
        lines.pop(self._call.source, None)  # that calls it: what it does itself is elsewhere
        program = _program(graph, arguments, returns, lines)
        structure = structure_of(program)
        unit = structure.root
        unit.parent = Unit("", "", unit.part)  # it is not the model, which checks what it is given
        form = self._writer.write_inner(structure, returns, enclosing)
        if [one.name for one in form.arguments] != [*arguments] or not _is_alone(form):
            raise ConversionError(
                f"{self._label} has a derivative of its own, and draws random numbers or needs a "
                "size that its arguments do not have: it cannot be written as a function"
            )
        return tuple(form.body.lines() if form.body is not None else ())


def _without_names(lines: Sequence[str]) -> str:
    """Returns code with numbers in the place of its variables, which depend on the call.

    Examples:
        >>> _without_names(["total = x + 1", "return total"]) == _without_names(
        ...     ["y = x + 1", "return y"]
        ... )
        True
        >>> _without_names(["y = x + 1", "return y"])  # what the next statement alone reads
        'return x + 1'
    """
    tree = ast.parse("\n".join(lines))
    for first, second in itertools.pairwise([*tree.body]):
        match first:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                read = [x for x in ast.walk(tree) if isinstance(x, ast.Name) and x.id == name]
                uses = [x for x in ast.walk(second) if x in read]
                if len(read) == 2 and len(uses) == 1 and not isinstance(second, ast.For):
                    tree.body[tree.body.index(second)] = _Put(uses[0], value).visit(second)
                    tree.body.remove(first)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Store))
    numbers = {variable: f"_{at}" for at, variable in enumerate(made)}
    for node in names:
        node.id = numbers.get(node.id, node.id)
    return ast.unparse(tree)


class _Put(ast.NodeTransformer):
    """Puts code in the place of a variable."""

    def __init__(self, variable: ast.AST, value: ast.expr) -> None:
        self._variable, self._value = variable, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._value if node is self._variable else node


def _has_same_derivative(one: Derived, other: Derived) -> bool:
    is_called_alike = (one.saved, one.gradients) == (other.saved, other.gradients)
    return is_called_alike and _without_names(tuple(one.backward)) == _without_names(
        tuple(other.backward)
    )


def _gives_more(one: Derived, other: Derived) -> bool:
    """Returns whether the derivative of a function is that of another, with more gradients."""
    mine, theirs = [*one.backward], [*other.backward]
    if (one.saved, one.gradients, mine[:-1]) != (other.saved, other.gradients, theirs[:-1]):
        return False
    given, wanted = _gradients_in(mine[-1]), _gradients_in(theirs[-1])
    return len(given) == len(wanted) > 1 and all(
        b in (a, "None") for a, b in zip(given, wanted, strict=True)
    )


def _gradients_in(line: str) -> list[str]:
    """Returns what a statement returns, if those are several values."""
    (node,) = ast.parse(line).body
    found = node.value if isinstance(node, ast.Return) else None
    return [ast.unparse(one) for one in found.elts] if isinstance(found, ast.Tuple) else []


def _is_alone(form: Form) -> bool:
    body = form.body
    return body is not None and not (body.holds or body.layers or body.arrays or body.randoms)


def _program(
    graph: Graph, arguments: Mapping[str, Ref], returns: Any, lines: dict[str, str]
) -> Program:
    """Returns a graph as a program."""
    kinds = dict(zip(graph.inputs, graph.kinds, strict=True))
    values = [one.name for one in arguments.values()]
    leaf, count = TreeSpec("leaf"), len(values)
    return Program(
        Graph(tuple(values), graph.calls, graph.outputs),
        tuple(Input("user", i, *kinds[value]) for i, value in enumerate(values)),
        tuple(Output("user", i) for i in range(len(graph.outputs))),
        leaf,
        leaf,
        parts=(Part("", "", "", arguments, returns, prefix=count, positional=count),),
        lines=lines,
    )


def _used(graph: Graph) -> set[str]:
    """Returns the values that the results of a graph need."""
    found = {*refs_in(graph.outputs)}
    for call in reversed(graph.calls):
        if call.name in found:
            found.update(_refs(call))
    return found


def _refs(call: Call) -> Iterable[str]:
    """Yields what a call refers to, and the calls within it."""
    yield from call.refs()
    for graph in call.graphs():
        yield from refs_in(graph.outputs)
        for inner in graph.calls:
            yield from _refs(inner)


def _one_or_all(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _names(
    kept: Sequence[int], inputs: Mapping[int, str], given: Sequence[ast.expr], writer: BodyWriter
) -> dict[int, str]:
    """Returns the parameters: as the model's code calls them, or what it gives there."""
    found: dict[int, str] = {}
    for i in kept:
        wanted = re.sub(r"_*$", "", inputs.get(i, ""))
        if not wanted or re.fullmatch(r"(in|held)_\d+", wanted):
            node = given[i]
            wanted = node.id if isinstance(node, ast.Name) and len(kept) > 1 else "x"
        taken = {*found.values(), *writer.reserved_names(), *RESERVED, "gradient"}
        found[i] = identifier(wanted, taken)
    return found


def _title(label: str) -> str:
    """Returns the name of a class for a function.

    Examples:
        >>> _title("straight_through"), _title("Net.__call__.<locals>.quantise"), _title("<lambda>")
        ('StraightThrough', 'Quantise', 'OwnGradient')
    """
    words = re.findall(r"[A-Za-z0-9]+", label.rpartition(".")[2].replace("<lambda>", ""))
    title = "".join(word[0].upper() + word[1:] for word in words)
    return title if len(title) > 1 else "OwnGradient"
