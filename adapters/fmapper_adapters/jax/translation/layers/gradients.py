"""Custom gradients of torch that are those of their forward, as they often are to save memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper.programs import Call, Graph, Program, Ref, refs_in
from fmapper_adapters.jax.aten import table, types
from fmapper_adapters.jax.model import interpret

_OP = "fmapper::with_gradient.default"
# Of the arguments, and of the gradients of the results: one may be clipped, which shows if large.
_SCALES = ((0.1, 1e-3), (1.0, 1.0), (5.0, 1e6))
_SIZE = 3  # for sizes that vary
_TOLERANCE = 1e-4  # of the largest gradient, in float32
Kinds = Mapping[str, tuple[str, tuple[Any, ...]]]


def drop_needless_gradients(program: Program) -> Program:
    """Removes custom gradients that JAX's derivatives of the forward equal.

    Raises:
        ConversionError: A gradient differs, so that a file with the forward alone would be wrong.
    """
    graph = program.graph
    if not any(call.op == _OP for call in graph.calls):
        return program
    kinds = {
        name: (given.dtype, given.shape)
        for name, given in zip(graph.inputs, program.inputs, strict=True)
    }
    kinds.update({call.name: call.result[0] for call in graph.calls if len(call.result) == 1})
    results: dict[str, tuple[Any, ...]] = {}
    calls: list[Call] = []
    for call in graph.calls:
        picked = call.args[0].name if call.op == "sym::getitem" else None
        if call.op == _OP:
            if not _is_derivative(call, calls, kinds):
                raise ConversionError(
                    f"{call.module or program.name}: the gradient of {call.args[5]}, a "
                    "torch.autograd.Function, is not known to be the derivative of its forward. "
                    "Source code with gradients of its own cannot be written yet: "
                    "fmapper.convert keeps them in a converted model."
                )
            results[call.name] = call.args[0]
        elif picked in results:
            y = results[picked][call.args[1]]
            calls.append(dataclasses.replace(call, op="aten::alias.default", args=(y,)))
        else:
            calls.append(call)
    held = results.keys() & {*refs_in((graph.outputs, [one.args for one in calls]))}
    if not results or held:  # as a whole
        return program
    new = dataclasses.replace(graph, calls=calls).without_dead_calls(lambda call: not call.result)
    return dataclasses.replace(program, graph=new)


def _is_derivative(call: Call, before: Sequence[Call], kinds: Kinds) -> bool:
    """Returns whether the gradient of a call is the derivative of what computes its results."""
    ys, xs, _, kept, places = call.args[:5]
    starts = [x.name for x in xs]
    needed = {*refs_in((ys, kept))}
    forward: list[Call] = []
    for one in reversed(before):
        if one.name in needed and one.name not in starts:
            if one.op == _OP or one.graphs() or table.find(one.op, {}) is None:
                return False
            forward.append(one)
            needed |= {*refs_in((one.args, one.kwargs))}
    others = sorted(needed - {one.name for one in forward} - {*starts})
    inputs = _arrays_of((*starts, *others), kinds)
    if -1 in places or inputs is None:
        return False
    names = (*starts, *others)
    plain = Graph(names, forward[::-1], tuple(ys))
    custom = Graph(names, [*forward[::-1], call], Ref(call.name))
    try:
        return all(_agree(plain, custom, inputs, len(xs), *scales) for scales in _SCALES)
    except (TypeError, ValueError):  # sizes that vary have to fit each other otherwise
        return False


def _arrays_of(names: Iterable[str], kinds: Kinds) -> list[np.ndarray] | None:
    """Returns random arrays; None where a value is none of floating point, or its size unknown."""
    draw = np.random.default_rng(0)
    found = []
    for name in names:
        dtype, shape = kinds.get(name, ("", ()))
        sizes = [size if isinstance(size, int) else _SIZE for size in shape]
        plain = all(isinstance(size, int) or size.isidentifier() for size in shape)
        if not plain or dtype not in ("float32", "float16", "bfloat16"):
            return None
        found.append(draw.standard_normal(sizes, np.float32).astype(types.dtype_of(dtype)))
    return found


def _agree(
    plain: Graph, custom: Graph, inputs: list[Any], count: int, scale: float, slope: float
) -> bool:
    """Returns whether two graphs have the same results and gradients at random numbers."""
    found = {call.op: table.find(call.op, {}) for call in custom.walk()}
    run = interpret.Run({op: lowering for op, lowering in found.items() if lowering is not None})
    xs, others = [scale * x for x in inputs[:count]], inputs[count:]

    def vjp(graph: Graph) -> tuple[Any, Any]:
        ys, back = jax.vjp(lambda *xs: tuple(interpret.evaluate(graph, (*xs, *others), run)), *xs)
        draw = np.random.default_rng(1)
        given = [slope * draw.standard_normal(y.shape, np.float32).astype(y.dtype) for y in ys]
        return ys, back(tuple(given))

    with jax.ensure_compile_time_eval():
        pairs = zip(jax.tree.leaves(vjp(plain)), jax.tree.leaves(vjp(custom)), strict=True)
        return all(_is_close(one, other) for one, other in pairs)


def _is_close(one: Any, other: Any) -> bool:
    one, other = (jnp.asarray(x, jnp.float32) for x in (one, other))
    largest = float(jnp.abs(other).max(initial=0.0))
    return bool(jnp.abs(one - other).max(initial=0.0) <= _TOLERANCE * largest)
