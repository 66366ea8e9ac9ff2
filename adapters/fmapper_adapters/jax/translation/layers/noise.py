"""Layers of NNX that draw: dropout, stochastic depth, and attention with dropout."""

from __future__ import annotations

import operator
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr
from fmapper_adapters.jax.translation.layers.site import Site


def dropout(site: Site) -> Layer | None:
    """Returns dropout."""
    given, rate = site.arg(0), site.arg(1)
    if not isinstance(given, Ref) or not isinstance(rate, float | int):
        return None
    if site.arg(2, True) is False:
        return None
    used = {
        call.name
        for call in site.structure.program.graph.calls
        if call.op == "sym::getitem" and call.args == (Ref(site.call.name), 1)
    }
    if used & site.results():
        others = [c for c in site.structure.program.graph.walk() if {*c.refs()} & used]
        if others:
            return None
    output = site.result_of(0)
    code = f"nnx.Dropout({rate!r}, rngs=rngs)"
    return Layer(
        expr(code), (given.name,), output, {}, "nnx.Dropout", "dropout",
        site.results() - {output}, draws=True,
    )  # fmt: skip


def attention(site: Site) -> Layer | None:
    """Returns attention with dropout; without dropout it is a function."""
    inputs = [one for one in site.call.args[:4] if one is not None]
    if not all(isinstance(one, Ref) for one in inputs):
        return None
    rate, is_causal = site.arg(4, 0.0), site.arg(5, False)
    scale = site.call.kwargs.get("scale")
    if isinstance(scale, Ref) or site.call.kwargs.get("enable_gqa"):
        return None
    options = "" if scale is None else f"scale={scale!r}, "
    options += "is_causal=True, " if is_causal else ""
    code = f"DotProductAttention({rate!r}, {options}rngs=rngs)"
    names = tuple(one.name for one in inputs)
    return Layer(expr(code), names, site.call.name, {}, "DotProductAttention", "attend", draws=True)


def drop_path(structure: Structure, unit: Unit, calls: list[Call]) -> Layer | None:
    """Finds dropout whose mask is shared along dimensions, as stochastic depth is."""
    masks = [call for call in calls if call.op.startswith(("aten::rand.", "aten::bernoulli.p"))]
    if len(masks) != 1 or len(unit.given) != 1 or len(unit.gives) != 1:
        return None
    given, (mask,) = unit.given[0], masks
    shape, drawn = structure.values[given][1], mask.result[0][1]
    if _is_held(structure, given) or len(shape) != len(drawn):
        return None
    shared = [i for i, size in enumerate(drawn) if size == 1 and shape[i] != 1]
    if any(size not in (1, shape[i]) for i, size in enumerate(drawn)):
        return None
    if structure.values[unit.gives[0]] != structure.values[given]:
        return None
    kept, dropped = (_with_draw(calls, given, unit.gives[0], draw) for draw in (True, False))
    if kept is None or dropped != 0 or kept <= 1:
        return None
    keep = next((v for call in calls for v in call.args if v == 1 / kept), 1 / kept)
    keep = mask.args[1] if mask.op.startswith("aten::bernoulli") else keep
    if not isinstance(keep, float) or abs(kept * keep - 1) > 1e-6:
        return None
    rate = float(f"{1 - keep:.12g}")
    options = f"broadcast_dims={tuple(shared)}, " if shared else ""
    code = f"nnx.Dropout({rate!r}, {options}rngs=rngs)"
    return Layer(expr(code), (given,), unit.gives[0], {}, "nnx.Dropout", "drop_path", draws=True)


def _is_held(structure: Structure, value: str) -> bool:
    given = structure.inputs.get(value)
    return given is not None and given.kind != "user"


def _with_draw(calls: list[Call], given: str, output: str, draw: bool) -> float | None:
    """Evaluates arithmetic on a mask where it keeps and where it drops; None for other code."""
    known: dict[str, float] = {given: 1.0}
    for call in calls:
        name = call.op.partition("::")[2].partition(".")[0]
        args = [known.get(one.name) if isinstance(one, Ref) else one for one in call.args]
        if name in ("rand", "bernoulli"):
            known[call.name] = (1.0 if name == "bernoulli" else 1 - 2**-24) if draw else 0.0
        elif name.removeprefix("new_").startswith("empty"):
            known[call.name] = float("nan")
        elif name == "floor" and isinstance(args[0], float):
            known[call.name] = float(args[0] // 1)
        elif name in _ARITHMETIC and len(args) == 2 and not call.kwargs:
            if not all(isinstance(one, float | int) for one in args):
                return None
            known[call.name] = float(_ARITHMETIC[name](*args))
        else:
            return None
    return known.get(output)


_ARITHMETIC: dict[str, Any] = {
    "add": operator.add, "mul": operator.mul, "div": operator.truediv,
}  # fmt: skip
