"""A program as plain data, which a source framework records and a target framework lowers.

It does not depend on a framework: dtypes are names, operations are names with a namespace, and
arrays are looked up by name, so a program can be written to a file and run where its source is not
installed.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fmapper.backends.equality import equals
from fmapper.errors import ConversionError
from fmapper.programs.sizes import names_in, show_shape, size_of, solve_names
from fmapper.programs.treespec import Ref, TreeSpec
from fmapper.render import as_html, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNKNOWN = re.compile(r"\bu\d+")  # torch's names of sizes that depend on values


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a graph.

    Attributes:
        name: The name by which later calls refer to its result.
        op: The operation: `aten::add.Tensor`, `sym::mul`, `higher_order::cond`, `mylib::f.default`.
        args: Python scalars, strings, None, tuples, dicts, `Ref`, `DType`, and a `Graph` where a
            higher-order operation takes a function.
        kwargs: The same by name.
        module: The path of the submodule that contains it, such as `layers.0.attn`; empty for the
            root. If parts are recorded, the name of the part: `layers.0.attn@1` for the second
            call.
        source: The file and line that called it.
        result: The dtype and shape of each array that it returned for the example inputs; a dynamic
            size is a string.
    """

    name: str
    op: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    source: str = ""
    result: tuple[tuple[str, tuple[int | str, ...]], ...] = ()

    def refs(self) -> list[str]:
        """Returns the names that its arguments refer to."""
        return list(refs_in((self.args, self.kwargs)))

    def graphs(self) -> list[Graph]:
        """Returns the graphs among its arguments."""
        return list(graphs_in((self.args, self.kwargs)))


@dataclass(slots=True, eq=False)
class Graph:
    """Calls in the order in which they run.

    Attributes:
        inputs: The names of its inputs, in order.
        calls: The calls.
        outputs: Its outputs: a tuple of `Ref`s and constants, nested for inner graphs.
        kinds: The dtype and shape of each input, if they are not stated elsewhere.
    """

    inputs: tuple[str, ...]
    calls: list[Call]
    outputs: Any
    kinds: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
    _last_uses: dict[str, tuple[str, ...]] | None = None
    _used: frozenset[str] | None = None

    def walk(self) -> Iterator[Call]:
        """Yields every call, those of inner graphs after the call that holds them."""
        for call in self.calls:
            yield call
            for inner in graphs_in((call.args, call.kwargs)):
                yield from inner.walk()

    def uses(self) -> frozenset[str]:
        """Returns the names that a call or an output refers to."""
        if self._used is None:
            names = set(refs_in(self.outputs))
            for call in self.calls:
                names.update(refs_in((call.args, call.kwargs)))
            self._used = frozenset(names)
        return self._used

    def last_uses(self) -> dict[str, tuple[str, ...]]:
        """Maps the name of each call to the results that it is the last to use."""
        if self._last_uses is None:
            seen = set(refs_in(self.outputs))
            last: dict[str, tuple[str, ...]] = {}
            for call in reversed(self.calls):
                names = dict.fromkeys((*refs_in((call.args, call.kwargs)), call.name))
                last[call.name] = tuple(name for name in names if name not in seen)
                seen.update(names)
            self._last_uses = last
        return self._last_uses

    def without_dead_calls(self, keep: Callable[[Call], bool]) -> Graph:
        """Removes calls whose results are unused, unless `keep` says otherwise."""
        used = set(refs_in(self.outputs))
        calls = []
        for call in reversed(self.calls):
            if call.name in used or keep(call):
                used.update(refs_in((call.args, call.kwargs)))
                calls.append(call)
        return Graph(self.inputs, calls[::-1], self.outputs, self.kinds)


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph of a program.

    Attributes:
        kind: parameter, buffer, constant, user (an array or a varying number), or static (a value
            that the program is fixed to).
        target: The name of the array; for a user's input the position among the flattened inputs.
        dtype: The dtype of an array; `int`, `float` or `boolean` for a number.
        shape: The shape of an array; a dynamic size is its name.
        value: The required value of a static input.
    """

    kind: str
    target: str | int
    dtype: str = ""
    shape: tuple[int | str, ...] = ()
    value: Any = None

    def is_array(self) -> bool:
        """Returns whether the input is an array rather than a number."""
        return self.kind != "static" and self.dtype not in ("int", "float", "boolean")

    def accepts(self, value: Any) -> bool:
        """Returns whether a value equals that of the static input; True is not 1 here."""
        return equals(self.value, value)


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph of a program.

    Attributes:
        kind: user; or buffer, parameter or input for the new value of an array changed in place.
        target: The name of the array; the position among the flattened inputs or outputs.
    """

    kind: str
    target: str | int


@dataclass(frozen=True, slots=True)
class Part:
    """A call of a submodule while the model was recorded.

    Attributes:
        name: Its path, for a later call with a number: `layers.0@1`. `Call.module` refers to it.
        path: The path by which it was called.
        parent: The name of the call that contains it; empty for the whole model.
        arguments: Its arguments by parameter name, in the order of the signature: `Ref`, `Size`,
            numbers, strings, None, `Other`, tuples and dicts of those.
        result: Its result.
        source: The file and line from which it was called.
        prefix: How many arguments can be passed by position: those before the first omitted one.
        positional: How many were passed by position.
        method: The called method of the submodule, if not `__call__`.
    """

    name: str
    path: str
    parent: str
    arguments: Mapping[str, Any]
    result: Any
    source: str = ""
    prefix: int = 0
    positional: int = 0
    method: str = ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a program's signature.

    Attributes:
        name: Its name.
        kind: positional, keyword, args (`*args`) or kwargs (`**kwargs`).
        default: The default, if it is None, a bool, a number or a string.
        required: Whether there is no default.
    """

    name: str
    kind: str
    default: Any = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on sizes that vary, which held for the example inputs and must hold at each call.

    Python code depended on it while the program was recorded, such as a branch on `n % 2 == 0`.

    Attributes:
        expression: An expression of the sizes, such as `mod(n, 2)`; see `size_of`.
        relation: `==`, `!=`, `>=` or `<=`.
        value: The value with which the expression is compared.
        question: The code that asked, and where.
    """

    expression: str
    relation: str
    value: int
    question: str = ""

    def holds(self, sizes: Mapping[str, Any]) -> Any:
        """Returns whether the condition holds; True if the sizes are unknown."""
        size = size_of(self.expression, sizes)
        return size is None or RELATIONS[self.relation](size, self.value)


# The types of variables of Flax NNX that a file may name.
VARIABLE_TYPES = frozenset({
    "Param", "LoRAParam", "BatchStat", "Cache", "Intermediate", "Perturbation",
    "RngState", "RngKey", "RngCount", "OptState", "OptArray", "OptVariable",
})  # fmt: skip

# Integers that are stored in bytes -> the dtype that stores them.
FEW_BITS = {"int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8"}

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
}


@dataclass(slots=True, eq=False)
class Program:
    """The computation of a model, with its arrays.

    Attributes:
        graph: The calls.
        inputs: The role of each input of the graph.
        outputs: The role of each output of the graph.
        in_spec: The structure of the example inputs: a tuple and a dict of keywords.
        out_spec: The structure of the outputs.
        signature: The parameters of the forward method.
        ones_like: Arguments that may be omitted, and then are ones in the shape of another: their
            names -> the name of the other, an array of integers.
        parameters: Arrays that are trained, by name, each once.
        buffers: Arrays that are not trained, by name.
        constants: Arrays that the code of the model holds.
        aliases: For tied arrays: the other names -> the name under which the array is stored.
        frozen: Names of parameters that are not trained.
        transient: Names of buffers that are not part of the state dict.
        variable_types: For arrays that were in variables of Flax: their names -> the type of the
            variable, one of `VARIABLE_TYPES` or, until the program is saved, another by module and
            name. It is never looked up by import.
        few_bits: Arrays of bytes that hold integers of fewer bits -> the dtype, one of `FEW_BITS`.
        axes: The axes of a mesh that the model declares for its arrays: their names -> an axis for
            each dimension, with the model's names, such as `("tensor", None)`.
        symbols: Dynamic sizes -> the smallest and largest value, None for no bound.
        guards: Further conditions on these sizes, on which Python code depended.
        fixed: Sizes that should vary but are fixed, each in a sentence with the reason.
        default_dtype: The floating dtype of numbers without a dtype of their own.
        train: Whether it was recorded for training.
        name: The class of the model.
        starts_in_training: Whether the model was in training mode.
        lacks_training: Why training was not recorded, for a model that has modes.
        evaluation: For a program for training, the one for evaluation: it has its own constants,
            and shares parameters and buffers with this one.
        origin: The folder from which the model was loaded, if any. It is not saved.
        lines: The source lines of calls, as read during recording. They are not saved, and never
            read later, because a program file could name any file.
        parts: The calls of submodules, if they were recorded; they are not saved.
        types: With `parts`, the paths of all submodules -> their classes.
        first_paths: With `parts`, these paths -> the first path of the same submodule.
        stacks: With `parts`, arrays that are recorded as their rows -> `parameters` and `buffers`.
        source_names: With `parts`, names of arrays by the paths of submodules -> those of the
            source.
    """

    graph: Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    signature: tuple[Parameter, ...] = ()
    ones_like: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()
    variable_types: dict[str, str] = field(default_factory=dict)
    few_bits: dict[str, str] = field(default_factory=dict)
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    symbols: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    fixed: tuple[str, ...] = ()
    default_dtype: str = "float32"
    train: bool = False
    name: str = ""
    starts_in_training: bool = False
    lacks_training: str = ""
    evaluation: Program | None = None
    origin: str = ""
    lines: dict[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    types: dict[str, str] = field(default_factory=dict)
    first_paths: dict[str, str] = field(default_factory=dict)
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source_names: dict[str, str] = field(default_factory=dict)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, sparing: bool = False
    ) -> list[Any]:
        """Returns the leaves of a call, in the order of the inputs."""
        from fmapper.programs import bind as _calls

        return _calls.bind(self, args, kwargs, sparing=sparing)

    def kinds(self) -> dict[str, tuple[str, tuple[int | str, ...]]]:
        """Returns the dtype and shape of each input and of each single result, by name."""
        pairs = zip(self.graph.inputs, self.inputs, strict=True)
        kinds = {name: (given.dtype, given.shape) for name, given in pairs}
        return kinds | {
            call.name: call.result[0] for call in self.graph.calls if len(call.result) == 1
        }

    def input_paths(self) -> list[str]:
        """Returns the path of each input, for errors."""
        from fmapper.programs import bind as _calls

        return _calls.leaf_paths(self)

    def name_sizes(self, text: str) -> str:
        """Replaces the names of sizes that a recorder made by the places where they are given."""
        from fmapper.programs import bind as _calls

        return _calls.name_sizes(self, text)

    def shape_problem(
        self, wanted: tuple[int | str, ...], have: tuple[Any, ...], sizes: dict[str, Any]
    ) -> str:
        """Describes a mismatch of a shape; empty for none. Adds its sizes to `sizes`."""
        shown = f"expected shape {show_shape(wanted)}, got {tuple(have)}"
        if len(wanted) != len(have):
            return shown
        for size, given in zip(wanted, have, strict=True):
            if isinstance(size, int):
                if size != given:
                    return (
                        f"{shown}: sizes are fixed unless dynamic_shapes lets them vary and the "
                        f"code does not fix them (len(x) and loops over x fix x.shape[0])"
                    )
                continue
            if sizes.setdefault(size, given) != given:
                return f"{shown}: {size} is {sizes[size]} elsewhere"
            low, high = self.symbols.get(size, (None, None))
            if not isinstance(given, int):  # a JAX symbol, whose value is unknown
                continue
            # torch states 2 as the minimum of sizes whose values 0 and 1 it has not examined
            if (low is not None and 2 < low > given) or (high is not None and given > high):
                return f"{shown}: {size} may be from {low} to {high or 'any size'}"
        return ""

    def size_problem(self, sizes: dict[str, Any]) -> str:
        """Describes sizes that contradict one another; empty if none do."""
        solved = solve_names(sizes)
        for expression, given in sizes.items():
            wanted = size_of(expression, solved)
            if wanted is not None and wanted != given:
                return f"a size is {given}, but {expression} is {wanted}"
        for guard in self.guards:
            if not guard.holds(solved):
                return self._guard_problem(guard, sizes)
        return ""

    def _guard_problem(self, guard: Guard, sizes: Mapping[str, Any]) -> str:
        guarded = {*names_in(guard.expression)}
        given = ", ".join(
            f"{name} is {size}" for name, size in sizes.items() if guarded & {*names_in(name)}
        )
        return (
            f"{given}: the program was recorded for sizes with {guard.expression} {guard.relation} "
            f"{guard.value}, since the model depends on it ({guard.question}). Convert the model "
            "with examples of these sizes"
        )

    def has_unknown_sizes(self) -> bool:
        """Returns whether sizes depend on values, such as the number of nonzero elements."""
        shapes = (shape for call in self.graph.walk() for _, shape in call.result)
        return any(isinstance(s, str) and _UNKNOWN.search(s) for shape in shapes for s in shape)

    def check_has_arrays(self) -> None:
        """Raises for a program without its arrays.

        Raises:
            ConversionError: It belongs to a converted model, which holds the arrays itself.
        """
        held = {*self.parameters, *self.buffers, *self.constants, *self.aliases}
        kinds = ("parameter", "buffer", "constant")
        missing = [str(i.target) for i in self.inputs if i.kind in kinds and i.target not in held]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConversionError(
                f"{self.name or 'the program'} has no values for {', '.join(missing[:3])}{more}: "
                "the program of a converted model is without the model's arrays. Convert that "
                "model, or save it with model.save(path) and convert what load_program reads."
            )

    def without_state(self) -> Program:
        """Returns the program without its parameters, buffers and constants."""
        return replace(self, parameters={}, buffers={}, constants={})

    def ops(self) -> dict[str, list[str]]:
        """Maps the operations of the program to the paths of the modules that use them."""
        paths: dict[str, dict[str, None]] = {}
        for call in self.graph.walk():
            paths.setdefault(call.op, {})[call.module] = None
        return {op: list(modules) for op, modules in paths.items()}

    def __rich__(self) -> RenderableType:
        given = [user for user in self.inputs if user.kind == "user"]
        counts = Counter(call.op for call in self.graph.walk()).most_common()
        rows = {
            "inputs": "; ".join(f"{user.dtype} {show_shape(user.shape)}" for user in given),
            "sizes that vary": self.name_sizes(", ".join(self.symbols)),
            "parameters": f"{len(self.parameters) or ''}",  # a converted model holds these itself
            "operations": ", ".join(f"{op} {count}" for op, count in counts[:8])
            + (f" and {len(counts) - 8} kinds more" if counts[8:] else ""),
        }
        return pairs(self.name or "program", rows.items())

    def _repr_html_(self) -> str:
        return as_html(self)


def graphs_in(value: Any) -> Iterator[Graph]:
    """Yields the graphs among arguments."""
    if isinstance(value, Graph):
        yield value
    elif isinstance(value, tuple):
        for inner in value:
            yield from graphs_in(inner)
    elif isinstance(value, Mapping):
        yield from graphs_in(tuple(value.values()))


def refs_in(value: Any) -> Iterator[str]:
    """Yields the names that arguments refer to; inner graphs have names of their own."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for inner in value:
            yield from refs_in(inner)
    elif isinstance(value, Mapping):
        yield from refs_in(tuple(value.values()))


def substitute(value: Any, values: Mapping[str, Any]) -> Any:
    """Replaces references in arguments by other values."""
    if not values:
        return value
    return map_arguments(value, lambda v: values.get(v.name, v) if isinstance(v, Ref) else v)


def map_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to everything in arguments but tuples and dicts."""
    if isinstance(value, tuple):
        return tuple(map_arguments(inner, change) for inner in value)
    if isinstance(value, Mapping):
        return {key: map_arguments(inner, change) for key, inner in value.items()}
    return change(value)
