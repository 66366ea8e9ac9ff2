"""Custom gradients of torch: functions with them, or none if they are those of their forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError
from fmapper.programs import Call, Graph, Program, Ref, refs_in, substitute
from fmapper_adapters.jax.aten import table, types
from fmapper_adapters.jax.model import interpret

_OP = "fmapper::with_gradient.default"
# Of the arguments, and of the gradients of the results: one may be clipped, which shows if large.
_SCALES = ((0.1, 1e-3), (1.0, 1.0), (5.0, 1e6))
_SIZE = 3  # for sizes that vary
_TOLERANCE = 1e-4  # of the largest gradient, in float32
_DERIVATIVE = "call::derivative"
_SIZE_OF = "aten::sym_size.int"
_LAST = "its gradient has none"  # within its own gradient, where nobody asks for it
Kinds = Mapping[str, tuple[str, tuple[Any, ...]]]


def with_own_gradients(program: Program) -> Program:
    """Returns a program that calls functions with a gradient of their own.

    Custom gradients that JAX's derivatives of the forward equal, as they often do to save memory,
    are left out.

    Raises:
        ConversionError: A gradient is complex, or of another shape or dtype than its argument.
    """
    graph = program.graph
    if not any(call.op == _OP for call in graph.calls):
        return program
    kinds = program.kinds()
    results: dict[str, tuple[Any, ...]] = {}
    calls: list[Call] = []
    for call in graph.calls:
        picked = call.args[0].name if call.op == "sym::getitem" else None
        if call.op == _OP and _is_derivative(call, calls, kinds):
            results[call.name] = call.args[0]
        elif call.op == _OP:
            calls.append(_own(call, calls, kinds))
        elif picked in results:
            y = results[picked][call.args[1]]
            calls.append(dataclasses.replace(call, op="aten::alias.default", args=(y,)))
        else:
            calls.append(call)
    held = results.keys() & {*refs_in((graph.outputs, [one.args for one in calls]))}
    if held:  # as a whole
        return program
    new = dataclasses.replace(graph, calls=calls).without_dead_calls(lambda call: not call.result)
    return dataclasses.replace(program, graph=new)


def _is_derivative(call: Call, before: Sequence[Call], kinds: Kinds) -> bool:
    """Returns whether the gradient of a call is the derivative of what computes its results."""
    ys, xs, _, kept, places = call.args[:5]
    starts = [x.name for x in xs]
    forward, others = _between(starts, refs_in((ys, kept)), before)
    if any(one.graphs() or table.find(one.op, {}) is None for one in forward):
        return False
    inputs = _arrays_of((*starts, *others), kinds)
    if -1 in places or inputs is None:
        return False
    names = (*starts, *others)
    plain = Graph(names, forward, tuple(ys))
    custom = Graph(names, [*forward, call], Ref(call.name))
    try:
        return all(_agree(plain, custom, inputs, len(xs), *scales) for scales in _SCALES)
    except (TypeError, ValueError):  # sizes that vary have to fit each other otherwise
        return False


def _between(
    starts: Sequence[str], ends: Iterable[str], before: Sequence[Call]
) -> tuple[list[Call], list[str]]:
    """Returns the calls that compute values from others, and what else they need.

    Args:
        starts: The values to begin with.
        ends: The values that they compute.
        before: The calls of the program up to there.
    """
    within = {*starts}
    for one in before:
        if within.intersection(refs_in((one.args, one.kwargs))):
            within.add(one.name)
    within |= {one.name for one in before if not one.result}  # sizes
    needed = {*ends}
    calls: list[Call] = []
    for one in reversed(before):
        if one.name in needed & within and one.name not in starts:
            calls.append(one)
            needed |= {*refs_in((one.args, one.kwargs))}
    return calls[::-1], sorted(needed - {one.name for one in calls} - {*starts})


def _own(call: Call, before: Sequence[Call], kinds: Kinds) -> Call:
    """Returns the call of a function with a gradient of its own, of what its `forward` computes."""
    ys, xs, _, kept, places, name = call.args[:6]
    starts = list(dict.fromkeys(x.name for x in xs))
    forward, others = _between(starts, refs_in((ys, kept)), before)
    forward, names = _with_own_sizes(call, [*starts, *others], forward, kinds)
    known = _as_parameters(call, names, {*kinds, *(one.name for one in before)})
    inputs = tuple(one.name for one in known.values())
    forward = _with(forward, known)
    function = Graph(
        inputs, forward, substitute(tuple(ys), known), tuple(kinds[one] for one in names)
    ).without_dead_calls(lambda _: False)
    kwargs = {
        "takes": (*range(len(names)),),
        "needs": (*range(len(names)),),
        "differentiable": (*range(len(starts)),),
        "cotangents": (*range(len(ys)),),
        "name": name,
        "once": len(call.args) > 6 and call.args[6],
    }
    backward: Graph | str = "its backward cannot be recorded"
    if -1 not in places:
        wanted = dict.fromkeys(xs[place].name for place in places)
        kwargs["differentiable"] = tuple(map(names.index, wanted))
        again = dataclasses.replace(
            call,
            name=f"{call.name}_again",
            op=_DERIVATIVE,
            args=(function, _LAST, tuple(map(Ref, inputs))),
            kwargs=kwargs,
        )
        backward = _backward(call, known, forward, again, kinds)
    args = (function, backward, tuple(map(Ref, names)))
    return dataclasses.replace(call, op=_DERIVATIVE, args=args, kwargs=kwargs)


def _with_own_sizes(
    call: Call, names: Sequence[str], calls: Sequence[Call], kinds: Kinds
) -> tuple[list[Call], list[str]]:
    """Returns calls that take sizes of the given arrays, and the names of the arrays alone.

    Raises:
        ConversionError: None of them has such a size.
    """
    used = {*refs_in(tuple((one.args, one.kwargs) for one in calls if one.op != _SIZE_OF))}
    used |= {*refs_in(call.args)}
    arrays = [name for name in names if name in kinds and name in used]
    own = {*arrays, *(one.name for one in calls)}
    sizes: dict[Any, tuple[Ref, int]] = {}
    for name in arrays:
        for at, size in enumerate(kinds[name][1]):
            sizes.setdefault(size, (Ref(name), at))
    found = []
    for one in calls:
        if one.op != _SIZE_OF or one.args[0].name in own:
            found.append(one)
            continue
        size = kinds[one.args[0].name][1][one.args[1]]
        if size not in sizes:
            raise ConversionError(
                f"{call.module or 'the model'}: {call.args[5]} needs the size {size}, which no "
                "array has that it is given. Files cannot have such a function; "
                "fmapper.convert without structure=True keeps it"
            )
        found.append(dataclasses.replace(one, args=sizes[size]))
    return found, arrays


def _as_parameters(call: Call, names: Sequence[str], taken: set[str]) -> dict[str, Ref]:
    """Returns values -> the parameters that they are, called as in `forward` where known.

    Args:
        call: The call of the function.
        names: The values.
        taken: The names of others in the program.
    """
    own = str(call.args[7]).split(",") if len(call.args) > 7 else []
    titles = {x.name: title for x, title in zip(call.args[1], own, strict=False) if title}
    inner = call.args[2]
    taken = {*taken, *inner.inputs, *(one.name for one in inner.calls)}
    found: dict[str, Ref] = {}
    for i, name in enumerate(names):
        title = titles.get(name, f"in_{i}")
        while title in taken:
            title += "_"  # which is left out of the code
        taken.add(title)
        found[name] = Ref(title)
    return found


def _with(calls: Iterable[Call], known: Mapping[str, Ref]) -> list[Call]:
    return [
        dataclasses.replace(
            one, args=substitute(one.args, known), kwargs=substitute(one.kwargs, known)
        )
        for one in calls
    ]


def _backward(
    call: Call, known: Mapping[str, Ref], forward: Sequence[Call], again: Call, kinds: Kinds
) -> Graph:
    """Returns the gradients of a function, of its operands and of the gradients of its results.

    What it keeps is computed again; its results by the function itself, as they have its gradient.
    """
    ys, xs, inner, kept, places = call.args[:5]
    count = len(ys)
    made = [
        Call(f"{again.name}_{i}", "sym::getitem", (Ref(again.name), i), {}, result=(kind,))
        for i, kind in enumerate(call.result)
    ]
    results = {y.name: Ref(one.name) for y, one in zip(ys, made, strict=True) if y not in xs}
    refs = substitute(kept, {**known, **results})
    own = dict(zip(inner.inputs[count:], refs, strict=True))
    after = _with(inner.calls, own)
    kinds = {**kinds, **{ref.name: kinds[one] for one, ref in known.items()}}
    kinds |= {one.name: one.result[0] for one in [*forward, *made, *after] if len(one.result) == 1}
    kinds |= dict(zip(inner.inputs, call.result, strict=False))
    found: dict[str, Ref] = {}
    for place, gradient in zip(places, substitute(inner.outputs, own), strict=True):
        x = xs[place].name
        _check_kind(call, kinds[x], kinds[gradient.name])
        if x not in found:
            found[x] = gradient
        else:  # it is given twice
            total, pair = f"{gradient.name}_total", (found[x], gradient)
            after.append(Call(total, "aten::add.Tensor", pair, {}, result=(kinds[x],)))
            found[x] = Ref(total)
    inputs = (*(one.name for one in known.values()), *inner.inputs[:count])
    calls = [*forward, again, *made, *after]
    graph = Graph(inputs, calls, tuple(found.values()), tuple(kinds[one] for one in inputs))
    return graph.without_dead_calls(lambda _: False)


def _check_kind(call: Call, argument: Any, gradient: Any) -> None:
    """Checks that a gradient is like its argument.

    Raises:
        ConversionError: It is not, or complex, where the gradients of JAX are conjugates.
    """
    if argument != gradient or argument[0].startswith("complex"):
        raise ConversionError(
            f"{call.module or 'the model'}: {call.args[5]}, a torch.autograd.Function, gives an "
            f"argument of {argument} a gradient of {gradient}. Files take real ones of the same "
            "shape and dtype; fmapper.convert without structure=True has others"
        )


def _arrays_of(names: Iterable[str], kinds: Kinds) -> list[np.ndarray] | None:
    """Returns random arrays; None where a value is none of floating point."""
    draw = np.random.default_rng(0)
    found = []
    for name in names:
        dtype, shape = kinds.get(name, ("", ()))
        sizes = [size if isinstance(size, int) else _SIZE for size in shape]
        if dtype not in ("float32", "float16", "bfloat16"):
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
