"""Linear layers that are written as products: `x @ weight.T + bias`, and products of rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fmapper.programs import Call, Program, Ref, refs_in
from fmapper.translation import Layer, Structure, Unit, expr, local_array
from fmapper_adapters.jax.translation.layers.site import Site, keywords, stem_of

_PRODUCTS = ("aten::matmul.default", "aten::mm.default")
_VIEWS = ("aten::view.", "aten::reshape.", "aten::_unsafe_view.")


def with_linears(program: Program) -> Program:
    """Returns a program in which products with transposed parameters are `linear`.

    Only those of one part: what another part is given stays as it is.
    """
    graph = program.graph
    parameters = {
        label: given.shape
        for label, given in zip(graph.inputs, program.inputs, strict=True)
        if given.kind == "parameter"
    }
    uses = Counter(name for call in graph.walk() for name in refs_in((call.args, call.kwargs)))
    uses.update(refs_in(graph.outputs))
    for part in program.parts:  # a part has to find what it was given, and what it gave
        uses.update({*refs_in((part.arguments, part.result))})
    turned = {
        call.name: call.args[0].name
        for call in graph.calls
        if call.op == "aten::permute.default"
        and call.args[1:] == ((1, 0),)
        and isinstance(call.args[0], Ref)
        and len(parameters.get(call.args[0].name, ())) == 2
    }
    calls: dict[str, Call] = {}
    for call in _with_weight_last(graph.calls, parameters):
        new = _linear(call, turned, parameters) or _with_bias(call, calls, parameters, uses)
        if new is None:
            calls[call.name] = call
            continue
        for name in {*call.refs()} - {*new.refs()}:
            uses[name] -= 1
            if not uses[name]:
                calls.pop(name, None)
        calls[call.name] = new
        uses.update({*new.refs()} - {*call.refs()})
    return dataclasses.replace(program, graph=dataclasses.replace(graph, calls=[*calls.values()]))


def _with_weight_last(
    calls: Sequence[Call], parameters: Mapping[str, tuple[Any, ...]]
) -> Iterator[Call]:
    """Yields calls with `linear(y.mT, w).mT` for `w @ y`."""
    made: dict[str, Call] = {}
    for call in calls:
        made[call.name] = call
        if call.op not in _PRODUCTS or not call.result:
            yield call
            continue
        weight, y = call.args
        dtype, shape = call.result[0]
        is_weight = isinstance(weight, Ref) and len(parameters.get(weight.name, ())) == 2
        if not is_weight or not isinstance(y, Ref) or y.name in parameters or len(shape) < 2:
            yield call
            continue
        *rest, out, length = shape
        order = (*range(len(rest)), len(rest) + 1, len(rest))
        other = made.get(y.name)
        is_turned = other is not None and other.op == "aten::permute.default"
        if (
            other is not None
            and is_turned
            and (other.args[1], other.module) == (order, call.module)
        ):
            given = other.args[0]
        else:
            given = Ref(f"{call.name}_given")
            width = parameters[weight.name][1]
            yield dataclasses.replace(
                call, name=given.name, op="aten::permute.default", args=(y, order),
                result=((dtype, (*rest, length, width)),),
            )  # fmt: skip
        product = dataclasses.replace(
            call, name=f"{call.name}_product", op="aten::linear.default", args=(given, weight),
            result=((dtype, (*rest, length, out)),),
        )  # fmt: skip
        yield product
        args = (Ref(product.name), order)
        yield dataclasses.replace(call, op="aten::permute.default", args=args)


def _linear(
    call: Call, turned: Mapping[str, str], parameters: Mapping[str, tuple[Any, ...]]
) -> Call | None:
    """Returns `linear(x, w)` for `x @ w.T`, and `linear(x, w, b)` for that with a bias."""
    if call.kwargs:
        return None
    weight: Any = None
    bias: tuple[Any, ...] = ()
    if call.op in _PRODUCTS:
        x, weight = call.args
    elif call.op == "aten::addmm.default":
        added, x, weight = call.args
        bias = (added,)
    elif call.op.startswith("aten::einsum"):
        return _of_einsum(call)
    if not isinstance(weight, Ref) or weight.name not in turned or not isinstance(x, Ref):
        return None
    held = turned[weight.name]
    if any(parameters.get(one.name) != parameters[held][:1] for one in bias):
        return None  # another shape is another sum
    return _as_linear(call, x, Ref(held), *bias)


def _as_linear(call: Call, *args: Any) -> Call:
    return dataclasses.replace(call, op="aten::linear.default", args=args)


def _of_einsum(call: Call) -> Call | None:
    """Returns the `linear` that `einsum("bld,od->blo", x, w)` is."""
    if len(call.args) != 2 or not isinstance(call.args[1], tuple) or len(call.args[1]) != 2:
        return None
    left, arrow, result = str(call.args[0]).replace(" ", "").partition("->")
    if left.startswith("...") and result.startswith("..."):
        left, result = f"_{left[3:]}", f"_{result[3:]}"
    x, _, weight = left.partition(",")
    is_plain = arrow and len({*x}) == len(x) > 1 and "." not in left
    if not is_plain or len(weight) != 2 or weight[1] != x[-1] or weight[0] in x:
        return None
    return _as_linear(call, *call.args[1]) if result == x[:-1] + weight[0] else None


def _with_bias(
    call: Call,
    calls: Mapping[str, Call],
    parameters: Mapping[str, tuple[Any, ...]],
    uses: Mapping[str, int],
) -> Call | None:
    """Returns the `linear` with a bias that the sum of one without and a parameter is."""
    if call.op != "aten::add.Tensor" or call.kwargs or len(call.args) != 2:
        return None
    for given, bias in (call.args, call.args[::-1]):
        if not isinstance(given, Ref) or not isinstance(bias, Ref):
            continue
        made = calls.get(given.name)
        if made is None or made.op != "aten::linear.default" or len(made.args) != 2:
            continue
        is_whole = made.module == call.module and made.result == call.result
        shape = parameters.get(bias.name)
        if is_whole and uses[given.name] == 1 and shape == made.result[0][1][-1:]:
            return _as_linear(call, *made.args, bias)
    return None


def product(site: Site) -> Layer | None:
    """Returns a linear layer for `x @ weight`."""
    given, weight = site.arg(0), site.array(1)
    if weight is None or not isinstance(given, Ref) or not _is_parameter(site.structure, weight[0]):
        return None
    shape, dtype = site.shape(weight[0]), site.dtype(weight[0])
    wanted = site.call.result[0] if site.call.result else None
    if len(shape) != 2 or site.dtype(given.name) != dtype or wanted is None or wanted[0] != dtype:
        return None
    stem = stem_of(weight[1], "linear")
    stem = f"{stem}_layer" if stem == weight[1] else stem
    made = expr(f"nnx.Linear({shape[0]}, {shape[1]}, use_bias=False, {keywords(dtype)}rngs=rngs)")
    arrays: dict[str, Any] = {weight[0]: ("kernel", None)}
    return Layer(made, (given.name,), site.call.name, arrays, "nnx.Linear", stem)


def linear_of_rows(structure: Structure, unit: Unit, calls: Sequence[Call]) -> Layer | None:
    """Finds `x @ weight + bias`, with the weight as it is or transposed, maybe of rows."""
    made = {call.name: call for call in calls}
    seen: set[str] = set()

    def producer(value: Any, *, views: bool = True) -> Call | None:
        """Returns the call that made a value, and marks it and views after it as seen."""
        while isinstance(value, Ref) and value.name in made:
            call = made[value.name]
            seen.add(call.name)
            if not views or not call.op.startswith(_VIEWS):
                return call
            value = call.args[0]
        return None

    if len(unit.gives) != 1:
        return None
    call = producer(Ref(unit.gives[0]))
    bias: Any = None
    if call is not None and call.op == "aten::add.Tensor" and not call.kwargs:
        at = [i for i, one in enumerate(call.args) if _is_own(structure, unit, one)]
        if len(at) != 1 or len(call.args) != 2:
            return None
        bias, call = call.args[at[0]], producer(call.args[1 - at[0]])
    if call is None or call.kwargs:
        return None
    order: tuple[int, ...] | None = None
    if call.op in _PRODUCTS:
        x, weight = call.args
    elif call.op == "aten::addmm.default" and bias is None:
        bias, x, weight = call.args
    elif call.op == "aten::linear.default" and (bias is None or len(call.args) == 2):
        x, weight, order = *call.args[:2], (1, 0)
        bias = call.args[2] if len(call.args) > 2 else bias
    else:
        return None
    while isinstance(x, Ref) and x.name in made and made[x.name].op.startswith(_VIEWS):
        seen.add(x.name)
        x = made[x.name].args[0]
    held = [one for one in (weight, bias) if one is not None]
    if not isinstance(x, Ref) or x.name in made or seen != made.keys():
        return None
    if not all(_is_own(structure, unit, one) for one in held) or _is_own(structure, unit, x):
        return None
    values = structure.values
    kinds = {values[name][0] for name in (x.name, unit.gives[0], *(one.name for one in held))}
    given, wanted = values[x.name][1], values[unit.gives[0]][1]
    shape = values[weight.name][1]
    shape = shape[::-1] if order else shape
    if len(kinds) != 1 or len(shape) != 2 or (given[-1:], wanted[-1:]) != (shape[:1], shape[1:]):
        return None
    if given[:-1] != wanted[:-1] or (bias is not None and values[bias.name][1] != shape[1:]):
        return None
    options = ("" if bias is not None else "use_bias=False, ") + keywords(kinds.pop())
    code = f"nnx.Linear({shape[0]}, {shape[1]}, {options}rngs=rngs)"
    arrays: dict[str, Any] = {weight.name: ("kernel", order)}
    if bias is not None:
        arrays[bias.name] = ("bias", None)
    return Layer(expr(code), (x.name,), unit.gives[0], arrays, "nnx.Linear", "linear")


def _is_own(structure: Structure, unit: Unit, value: Any) -> bool:
    """Returns whether a value is an array of the submodule's own."""
    return isinstance(value, Ref) and local_array(structure, unit, value.name) is not None


def _is_parameter(structure: Structure, name: str) -> bool:
    return structure.inputs[name].kind == "parameter"
