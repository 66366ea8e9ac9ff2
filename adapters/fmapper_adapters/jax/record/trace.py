"""Records the computation of a function of arrays as a program with its arrays."""

from __future__ import annotations

import inspect
import keyword
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from fmapper import (
    ConversionError,
    FmapperError,
    NotAFunctorError,
    ProgramInputError,
    fleaves,
    to_jax,
)
from fmapper.backends import equals, holds_arrays
from fmapper.programs import Graph, Input, Output, Parameter, Program, Size, warn_of_changes
from fmapper.programs.reading import statements_at
from fmapper_adapters.jax.arrays import few_bits, prng_keys
from fmapper_adapters.jax.record import dynamic_shapes as _dynamic
from fmapper_adapters.jax.record import jaxpr, states, tracer_errors, treespec
from fmapper_adapters.jax.record.parts import PartCalls, PartReader, call_and_note, record_calls
from fmapper_adapters.jax.record.parts.scans import record_loops
from fmapper_adapters.jax.record.stacks import Stacks, with_rows


@dataclass
class Source:
    """A model as a function of its arrays.

    Attributes:
        call: Takes parameters and buffers by name, then arguments and keywords; returns the output
            and the changed arrays by name.
        parameters: The trained arrays.
        buffers: The other arrays, among them random keys.
        aliases: Other names of arrays -> their name in `parameters` or `buffers`.
        frozen: Names of parameters that are not trained.
        transient: Names of buffers that are not part of a state dict.
        variable_types: Names of arrays -> the types of their variables, as names in a program.
        axes: Names of arrays -> the mesh axes that the model names for them.
        function: The function that has the model's signature.
        skipped: The number of its first parameters that are not arguments of the model.
        signature: The signature itself, if it is known.
        defaults: Optional parameters of the signature -> their default values.
        name: The name in errors.
        suspects: Arrays of undeclared objects, with the error `refusal`, which is raised if the
            program uses them, because they would be constants.
        changed: Names of plain attributes that calls have changed so far, and that have been
            restored.
        short_names: Names of arrays -> their names below the path of their submodule, if these
            differ.
    """

    call: Callable[..., Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    skipped: int = 0
    signature: tuple[Parameter, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    suspects: list[Any] = field(default_factory=list)
    refusal: NotAFunctorError | None = None
    variable_types: dict[str, str] = field(default_factory=dict)
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)
    short_names: dict[str, str] = field(default_factory=dict)

    def with_short_names(self) -> Source:
        """Returns the source with its short names, which contain the paths of submodules."""
        if not self.short_names:
            return self
        short, call = self.short_names, self.call
        full = {other: name for name, other in short.items()}

        def keys(named: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
            return {names.get(name, name): value for name, value in named.items()}

        def run(parameters: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
            output, changed = call(keys(parameters, full), keys(buffers, full), *args, **kwargs)
            return output, keys(changed, short)

        return replace(
            self,
            call=run,
            parameters=keys(self.parameters, short),
            buffers=keys(self.buffers, short),
            aliases={short.get(a, a): short.get(n, n) for a, n in self.aliases.items()},
            axes=keys(self.axes, short),
        )

    def uses_suspects(self, constants: Iterable[Any]) -> bool:
        """Returns whether a program holds arrays of undeclared objects."""
        suspects = [_host(suspect) for suspect in self.suspects if not prng_keys.is_key(suspect)]
        held = [_host(array) for array in constants if not prng_keys.is_key(array)]
        return any(equals(array, suspect) for array in held for suspect in suspects)

    def parameters_of_call(self) -> tuple[Parameter, ...]:
        """Returns the signature, with its defaults."""
        signature = self.signature or _signature(self.function)[self.skipped :]
        parameters = [
            replace(p, default=self.defaults[p.name], required=False)
            if p.name in self.defaults
            else p
            for p in signature
        ]
        named = {p.name for p in parameters}
        rest = [Parameter(n, "keyword", x, False) for n, x in self.defaults.items()
                if n not in named]  # fmt: skip
        at = next((i for i, p in enumerate(parameters) if p.kind == "kwargs"), len(parameters))
        return (*parameters[:at], *rest, *parameters[at:])


def record(
    source: Source,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
    strict: bool | None = None,
    parts: bool = False,
) -> Program:
    """Returns the program of a model for example inputs.

    Args:
        source: The model.
        args: The examples by position.
        kwargs: The examples by keyword.
        dynamic_shapes: The sizes that may vary; see `trace_sizes`.
        train: Whether the program is for training.
        strict: False turns arrays of undeclared objects into constants.
        parts: Whether to record the calls of submodules.

    Raises:
        ConversionError: The model cannot be recorded.
        NotAFunctorError: Inputs or outputs are of classes that hold arrays and are not declared.
    """
    if strict is False:
        source.suspects = []
    if parts:
        source = source.with_short_names()
    calls = PartCalls() if parts else None
    with record_calls(calls), record_loops(wanted=parts):
        return record_with_equations(
            source, args, kwargs, dynamic_shapes=dynamic_shapes, train=train, calls=calls
        )[0]


def record_with_equations(
    source: Source,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
    calls: PartCalls | None = None,
) -> tuple[Program, dict[str, Any]]:
    """Records a model; also returns the equation of each outermost call, by the call's name."""
    fleaves(())  # enters new functors into JAX's registry
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_none)
    spec = treespec.tree_spec(tree)
    signature = source.parameters_of_call()
    paths = list(_paths(signature, spec))
    static = [not _is_array(leaf) for leaf in leaves]
    for path, leaf in zip(paths, leaves, strict=True):
        _check_leaf(leaf, f"the input {path}")
    arrays = [to_jax(leaf) for leaf, fixed in zip(leaves, static, strict=True) if not fixed]
    traced = Traced(source, leaves, tree, static)
    state = (
        [*map(_as_array, source.parameters.values())],
        [*map(_as_array, source.buffers.values())],
    )
    outcome = _dynamic.trace_sizes(
        lambda shapes: traced.run(*state, shapes),
        (spec, arrays, static, [p.name for p in signature]),
        dynamic_shapes,
    )
    names = [("parameter", n) for n in source.parameters]
    names += [("buffer", n) for n in source.buffers]
    closed = outcome.jaxpr
    positions = [i for i, f in enumerate(static) if not f]
    labels = _distinct([*(_label(paths[p]) for p in positions), *(_label(n) for _, n in names)])
    labels = [*labels[len(positions) :], *labels[: len(positions)]]
    targets = {label: n for label, (_, n) in zip(labels, names, strict=False)}
    count = sum(not fixed for _, fixed in traced.outputs)
    kept: set[str] = set()  # stacked arrays that something else uses, too
    while True:
        stacks = None if calls is None else Stacks(targets, kept)
        parts = None if calls is None or stacks is None else PartReader(calls, stacks.targets)
        reader = jaxpr.Reader(parts, stacks)
        graph = reader.root(closed, labels)
        shared = set() if stacks is None else stacks.find_shared(graph, count, traced.changed)
        if not shared:
            break
        kept |= shared
    if source.refusal is not None and source.uses_suspects(reader.constants.values()):
        raise source.refusal
    kinds = [prng_keys.physical(v.aval) for v in closed.jaxpr.invars]
    shown = [(d, tuple(n if isinstance(n, int) else str(n) for n in s)) for d, s in kinds]
    inputs = [Input(kind, n, *shown[i]) for i, (kind, n) in enumerate(names)]
    users = {p: Input("user", p, *shown[len(names) + i]) for i, p in enumerate(positions)}
    constants = [
        Input(
            "constant",
            n,
            prng_keys.physical(jax.typeof(a))[0],
            prng_keys.physical(jax.typeof(a))[1],
        )
        for n, a in reader.constants.items()
    ]
    given = dict(zip(positions, graph.inputs[len(names) : len(names) + len(users)], strict=True))
    order = [given.get(i, f"static_{i}") for i in range(len(leaves))]
    graph.inputs = (
        *graph.inputs[: len(names)], *order, *graph.inputs[len(names) + len(users) :]
    )  # fmt: skip
    rest = iter(graph.outputs)
    values = [_static(leaf) if f else next(rest) for leaf, f in traced.outputs]
    input_of = {n: label for (_, n), label in zip(names, graph.inputs, strict=False)}
    changed = []
    for name, value in zip(traced.changed, rest, strict=True):
        if getattr(value, "name", None) != input_of[name]:  # otherwise returned unchanged
            changed.append((name, value))
    graph.outputs = (*values, *(value for _, value in changed))
    written = [Output("parameter" if n in source.parameters else "buffer", n) for n, _ in changed]
    program = Program(
        graph=graph,
        inputs=(
            *inputs,
            *(users.get(i) or Input("static", i, value=leaf) for i, leaf in enumerate(leaves)),
            *constants,
        ),
        outputs=(*(Output("user", i) for i in range(len(values))), *written),
        in_spec=spec,
        out_spec=treespec.tree_spec(traced.out_tree),
        signature=signature,
        parameters={n: _raw(x) for n, x in source.parameters.items()},
        buffers={n: _raw(x) for n, x in source.buffers.items()},
        constants={n: _raw(x) for n, x in reader.constants.items()},
        aliases=source.aliases,
        frozen=source.frozen,
        transient=source.transient,
        variable_types=source.variable_types,
        few_bits={
            n: str(x.dtype)
            for n, x in (*source.parameters.items(), *source.buffers.items())
            if few_bits.holder(str(x.dtype)) != str(x.dtype)
        },
        axes=source.axes,
        symbols=outcome.symbols,
        guards=outcome.guards,
        fixed=tuple(
            f"{paths[positions[i]]}.shape[{d}] is {arrays[i].shape[d]}: {why[:500]}"
            for i, d, why in sorted(outcome.fixed)
        ),
        train=train,
        name=source.name,
        lines=_lines(graph),
        source_names={}
        if calls is None
        else {short: name for name, short in source.short_names.items()},
    )
    if source.changed:
        warn_of_changes(source.name, source.changed, _REMEDY)
    if calls is not None and parts is not None:
        program.parts = parts.parts()
        program.types = calls.types | parts.types
        program.first_paths = calls.first_paths | {path: path for path in parts.types}
        sources = {call.source for call in graph.walk()} | {part.source for part in program.parts}
        stateful = {noted["source"] for noted in calls.noted if noted["gives_state"]}
        program.lines = {
            source: states.statement_without(line) if source in stateful else line
            for source, line in statements_at(sources).items()
        }
    return (program if stacks is None else with_rows(program, stacks)), reader.equations


_REMEDY = "keep arrays in variables, or take and return what changes"


def _static(leaf: Any) -> Any:
    """Returns the form of an output that is not an array in a program."""
    return Size(str(leaf)) if jax.export.is_symbolic_dim(leaf) else leaf


def _lines(graph: Graph) -> dict[str, str]:
    """Returns the lines of code that the calls come from."""
    lines: dict[str, str] = {}
    for call in graph.walk():
        file, _, line = call.source.rpartition(":")
        if file and call.source not in lines:
            lines[call.source] = linecache.getline(file, int(line)).strip()
    return lines


class Traced:
    """The function that is traced, and its results other than arrays.

    Attributes:
        outputs: Each leaf of the output, and whether it is not an array.
        out_tree: The structure of the output.
        changed: The names of arrays that are changed.
    """

    def __init__(self, source: Source, leaves: list[Any], tree: Any, static: list[bool]) -> None:
        self._source = source
        self._leaves = leaves
        self._tree = tree
        self._static = static
        self.outputs: list[tuple[Any, bool]] = []
        self.out_tree: Any = None
        self.changed: list[str] = []

    def run(self, parameters: list[Any], buffers: list[Any], given: list[Any]) -> Any:
        """Returns a function of flat lists, to be traced with arrays or shapes."""
        shapes = [_shape(x) for x in (*parameters, *buffers)]
        try:
            return jax.make_jaxpr(self.flat)(*shapes, *given)
        except ProgramInputError as error:  # from a model that was converted before
            raise ConversionError(str(error)) from error
        except FmapperError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConversionError(tracer_errors.explain(self._source.name, error)) from error

    def flat(self, *arrays: Any) -> Any:
        """Returns the function of parameters, buffers and input arrays as one flat list."""
        source = self._source
        rest = iter(arrays)
        params = {name: next(rest) for name in source.parameters}
        held = {name: next(rest) for name in source.buffers}
        return self._call(params, held, rest)

    def _call(self, params: Any, buffers: Any, given: Iterator[Any]) -> Any:
        full = [
            leaf if fixed else next(given)
            for leaf, fixed in zip(self._leaves, self._static, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self._tree, full)
        changed: dict[str, Any] = {}

        def run(*given: Any, **named: Any) -> Any:
            result, new = self._source.call(params, buffers, *given, **named)
            changed.update(new)
            return result

        source = self._source
        output = call_and_note(source.function, source.skipped, args, kwargs, run, source.defaults)
        flat, self.out_tree = jax.tree.flatten(output, is_leaf=_is_none)
        for leaf in flat:
            _check_leaf(leaf, "the output")
        self.outputs = [(x, not _is_array(x)) for x in flat]
        self.changed = list(changed)
        return [x for x, fixed in self.outputs if not fixed], list(changed.values())


def _check_leaf(leaf: Any, where: str) -> None:
    """Checks that an object that holds arrays is a pytree of JAX."""
    if not _is_array(leaf) and not callable(leaf) and holds_arrays(leaf):
        cls = type(leaf).__name__
        raise NotAFunctorError(
            f"{where} is a {cls}, which holds arrays but is not a functor. Decorate it with "
            f"@fmapper.functor, or register it with jax.tree_util."
        )


def _shape(x: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(x.shape, x.dtype)


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else to_jax(x)


def _host(x: Any) -> Any:
    return np.asarray(x)


def _is_none(x: Any) -> bool:
    return x is None


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _raw(x: Any) -> Any:
    return jax.random.key_data(x) if prng_keys.is_key(x) else few_bits.in_bytes(x)


# --- names ----------------------------------------------------------------------------------------


def _paths(signature: tuple[Parameter, ...], spec: Any) -> Iterator[str]:
    """Yields the name of each input: its parameter, and the path within that."""
    positional, named = spec.children
    names = [p.name for p in signature if p.kind == "positional"]
    rest = next((p.name for p in signature if p.kind == "args"), "input")
    for i, child in enumerate(positional.children):
        root = names[i] if i < len(names) else f"{rest}[{i - len(names)}]"
        yield from child.leaf_paths(root)
    for key, child in zip(named.keys, named.children, strict=True):
        yield from child.leaf_paths(str(key))


def _label(name: str) -> str:
    """Returns a name as an identifier: `batch['image']` as `batch_image`."""
    label = "".join(c if c.isalnum() and c.isascii() else "_" for c in name.replace("'", ""))
    label = "_".join(part for part in label.split("_") if part) or "value"
    if keyword.iskeyword(label) or label == "self" or label.startswith(("constant_", "static_")):
        label += "_"
    return label if label[0].isalpha() else f"_{label}"


def _distinct(labels: list[str]) -> list[str]:
    taken: set[str] = set()
    distinct = []
    for label in labels:
        name, number = label, 0
        while name in taken:
            number += 1
            name = f"{label}_{number}"
        taken.add(name)
        distinct.append(name)
    return distinct


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}


def _signature(function: Callable[..., Any] | None) -> tuple[Parameter, ...]:
    """Returns the parameters of a function in the form of a program."""
    if function is None:
        return ()
    parameters = []
    for p in inspect.signature(function).parameters.values():
        default = p.default if isinstance(p.default, bool | int | float | str | None) else None
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        parameters.append(Parameter(p.name, _KINDS[p.kind], default, required))
    return tuple(parameters)
