"""Unstacks layers whose arrays are stacked, and that a `scan` runs one after the other.

If the calls of submodules are recorded, a `scan` over the rows of a model's own arrays becomes
calls of submodules `blocks.0`, `blocks.1` and so on, each with its own row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper.programs import Graph, Input, Program, Ref, refs_in
from fmapper_adapters.jax.record import parts
from fmapper_adapters.jax.record.equations import loops

_MOST = 256  # the most rows to unstack


def operands(eqn: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many carry."""
    if "ft_in" in eqn.params:  # from JAX 0.11 on
        constants, carry, _ = eqn.params["ft_in"].unpack()
        return len(constants), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


class Stacks:
    """The stacked arrays of one recording.

    Args:
        targets: Inputs of the graph that are arrays of the model -> their names.
        kept: Inputs that stay whole, since something else uses them, too.

    Attributes:
        targets: The given ones, and the inputs for rows.
        rows: Inputs that were unstacked -> the inputs for their rows.
    """

    def __init__(self, targets: Mapping[str, str], kept: set[str]) -> None:
        self.targets = dict(targets)
        self._kept = kept
        self.rows: dict[str, list[str]] = {}

    def find(
        self,
        eqn: Any,
        args: Sequence[Any],
        name: Callable[[str], str],
        own_names: Callable[[int], Sequence[str]],
    ) -> Any:
        """Finds the arrays of the model whose rows a scan takes.

        Args:
            eqn: The equation.
            args: Its operands.
            name: Makes an unused name.
            own_names: Returns the names of the arrays of the part that a mark belongs to.

        Returns:
            For each operand its rows, or None for operands without; None if no operand has rows.
        """
        length = eqn.params["length"]
        first = sum(operands(eqn))
        if not isinstance(length, int) or not 0 < length <= _MOST:
            return None
        labels = {
            arg.name
            for arg in args[first:]
            if isinstance(arg, Ref) and arg.name in self.targets and arg.name not in self._kept
        }
        others = [
            var.aval
            for arg, var in zip(args[first:], eqn.invars[first:], strict=True)
            if not (isinstance(arg, Ref) and arg.name in labels)
        ]
        marks = _marks(eqn.params["jaxpr"].jaxpr)
        if not labels or not (marks or not any(map(_is_float, others))):
            return None
        called = [names for mark in marks if (names := own_names(mark))]
        prefix = _common_path(_with_paths([self.targets[label] for label in labels], called))
        return [
            self._take_apart(arg.name, prefix, length, name)
            if at >= first and isinstance(arg, Ref) and arg.name in labels
            else None
            for at, arg in enumerate(args)
        ]

    def find_shared(self, graph: Graph, count: int, changed: Sequence[str]) -> set[str]:
        """Returns the unstacked arrays that something else uses or changes, too.

        Args:
            graph: The whole graph.
            count: How many of its outputs are the model's.
            changed: The names of the arrays whose new values are the other outputs.
        """
        used = set(refs_in(graph.outputs[:count]))
        for call in graph.calls:
            used.update(refs_in((call.args, call.kwargs)))
        for name, value in zip(changed, graph.outputs[count:], strict=True):
            label = next((row for row in self.rows if self.targets[row] == name), "")
            if label and value != Ref(label):
                used.add(label)
        return used & self.rows.keys()

    def _take_apart(
        self, array: str, prefix: str, length: int, name: Callable[[str], str]
    ) -> list[Ref]:
        if array not in self.rows:
            self.rows[array] = [name(f"{array}_row") for _ in range(length)]
            whole = self.targets[array]
            stem = prefix or whole.partition(".")[0]
            for i, row in enumerate(self.rows[array]):
                self.targets[row] = f"{stem}.{i}{whole[len(stem) :]}"
        return [Ref(row) for row in self.rows[array]]


def _is_float(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _marks(jaxpr: Any) -> list[int]:
    """Returns the calls of parts marked in a jaxpr, in order."""
    marks: list[int] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == parts.mark.name:
            marks.append(eqn.params["part"])
        for inner in loops.inner_of(eqn):
            marks += _marks(inner)
    return marks


def _with_paths(arrays: Sequence[str], called: Iterable[Sequence[str]]) -> list[str]:
    """Returns the names of arrays, with one name in place of those of each called part.

    Examples:
        >>> _with_paths(["mlp.layers.0.weight", "mlp.layers.0.bias"], [["layers.0.weight"]])
        ['mlp.', 'mlp.layers.0.bias']
    """
    left, paths = set(arrays), []
    for names in sorted(called, key=len, reverse=True):
        for path in {a.removesuffix(f".{names[0]}") for a in left if a.endswith(f".{names[0]}")}:
            whole = {f"{path}.{name}" for name in names}
            if whole <= left:
                paths.append(f"{path}.")
                left -= whole
    return [*paths, *(array for array in arrays if array in left)]


def _common_path(names: Sequence[str]) -> str:
    """Returns the path of the innermost module that contains all of these arrays.

    Examples:
        >>> _common_path(["blocks.l1.kernel", "blocks.l1.bias", "blocks.norm.scale"])
        'blocks'
    """
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return ".".join(common)


def unroll(
    eqn: Any,
    args: Sequence[Any],
    rows: Sequence[Any],
    read: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Reads each step of a scan over layers, and returns the results of the scan.

    Args:
        eqn: The scan.
        args: Its operands.
        rows: For each operand its rows, if it is an array of the model.
        read: Reads a jaxpr with operands.
    """
    params = eqn.params
    count, carried = operands(eqn)
    length, first = params["length"], count + carried
    carry, taken, gives = list(args[count:first]), [], []
    steps = range(length)
    for i in reversed(steps) if params["reverse"] else steps:
        given = []
        for labels, array, var in zip(rows[first:], args[first:], eqn.invars[first:], strict=True):
            row = (
                labels[i]
                if labels
                else read(_row_of(var.aval.shape, var.aval.dtype, i), [array])[0]
            )
            given.append(row)
        outputs = read(params["jaxpr"], [*args[:count], *carry, *given])
        carry = list(outputs[: len(carry)])
        taken.append(given)
        gives.append(outputs[len(carry) :])
    if params["reverse"]:
        taken.reverse()
        gives.reverse()
    whole = list(zip(zip(*taken, strict=True), args[first:], strict=True))
    results = list(carry)
    for j, var in enumerate(params["jaxpr"].jaxpr.outvars[len(carry) :]):
        made = tuple(values[j] for values in gives)
        same = [array for handed, array in whole if handed == made]  # passed through
        results += same[:1] or read(_stack_of([var.aval] * length), list(made))
    return results


@functools.lru_cache(maxsize=256)
def _row_of(shape: tuple[int, ...], dtype: Any, at: int) -> Any:
    """Returns the jaxpr of one row of an array."""
    struct: Any = jax.ShapeDtypeStruct
    row = functools.partial(jax.lax.index_in_dim, index=at, keepdims=False)
    return jax.make_jaxpr(row)(struct(shape, dtype))


def _stack_of(avals: Sequence[Any]) -> Any:
    """Returns the jaxpr of a stack of rows."""
    struct: Any = jax.ShapeDtypeStruct
    rows = [struct(aval.shape, aval.dtype) for aval in avals]
    return jax.make_jaxpr(lambda *rows: jnp.stack(rows))(*rows)


def with_rows(program: Program, stacks: Stacks) -> Program:
    """Returns the program with rows as inputs in place of the unstacked arrays."""
    if not stacks.rows:
        return program
    names, inputs = list(program.graph.inputs), list(program.inputs)
    held = [dict(program.parameters), dict(program.buffers)]
    facts: list[dict[str, Any]] = [dict(program.variable_types), dict(program.few_bits)]
    axes, frozen = dict(program.axes), list(program.frozen)
    taken: dict[str, tuple[str, ...]] = {}
    for array, rows in stacks.rows.items():  # outer ones first
        at, whole = names.index(array), stacks.targets[array]
        targets = [stacks.targets[row] for row in rows]
        entry = inputs[at]
        names[at : at + 1] = rows
        inputs[at : at + 1] = [Input(entry.kind, t, entry.dtype, entry.shape[1:]) for t in targets]
        for arrays in held:
            if whole in arrays:
                value = arrays.pop(whole)
                arrays.update({target: value[i] for i, target in enumerate(targets)})
        for fact in facts:
            if whole in fact:
                fact.update(dict.fromkeys(targets, fact.pop(whole)))
        if whole in axes:
            axes.update(dict.fromkeys(targets, axes.pop(whole)[1:]))
        if whole in frozen:
            frozen[frozen.index(whole) : frozen.index(whole) + 1] = targets
        taken[whole] = tuple(targets)
    return dataclasses.replace(
        program,
        graph=dataclasses.replace(program.graph, inputs=tuple(names)),
        inputs=tuple(inputs),
        parameters=held[0],
        buffers=held[1],
        frozen=tuple(frozen),
        variable_types=facts[0],
        few_bits=facts[1],
        axes=axes,
        stacks=taken,
    )
