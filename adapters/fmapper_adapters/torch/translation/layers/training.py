"""Layers that do something else in training: dropout, and normalisation by the batch."""

from __future__ import annotations

from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.torch.translation.printers import shortest

_ADD, _MUL = ("operator.add", "torch.add"), ("operator.mul", "torch.mul")


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the layer that a submodule is in training."""
    if len(unit.gives) != 1:
        return None
    made = {call.name: call for call in unit.calls()}
    last = made.get(unit.gives[0])
    if last is None:
        return None
    found = _dropout(structure, made, last) or _batch_norm(structure, unit, made, last)
    is_whole = found is not None and {*found.inputs} <= {*unit.given}
    return found if is_whole else None  # else it is what the submodule ends with


def _name(call: Call | None) -> str:
    return "" if call is None else call.op.partition("::")[2]


def _dropout(structure: Structure, made: dict[str, Call], last: Call) -> Layer | None:
    """Finds `where(uniform < keep, x / keep, 0)`."""
    if _name(last) != "torch.where" or last.args[2] != 0:
        return None
    mask, scaled = (made.get(one.name) if isinstance(one, Ref) else None for one in last.args[:2])
    while mask is not None and _name(mask) in ("expand", "reshape", "unsqueeze"):
        mask = made.get(mask.args[0].name)
    if mask is None or _name(mask) not in ("torch.lt", "operator.lt"):
        return None
    drawn = made.get(mask.args[0].name) if isinstance(mask.args[0], Ref) else None
    if drawn is None or not drawn.op.endswith("threefry:uniform"):
        return None
    if structure.values[drawn.name][1] != structure.values[last.name][1]:
        return None  # what is dropped is so for several examples at once
    keep = _number(made, mask.args[1])
    if scaled is None or not isinstance(keep, float) or not isinstance(scaled.args[0], Ref):
        return None
    factor = {"operator.truediv": keep, "operator.mul": 1 / keep}.get(_name(scaled))
    scale = _number(made, scaled.args[1])
    if factor is None or scale is None or abs(scale - factor) > 1e-6 * factor:
        return None
    rate = round(1 - keep, 6)
    return Layer(expr(f"nn.Dropout({rate!r})"), (scaled.args[0].name,), last.name, {},
                 "nn.Dropout", "dropout")  # fmt: skip


def _number(made: dict[str, Call], value: Any) -> float | None:
    """Returns the number that a value is, such as `1 - rate` of an array that is filled with it."""
    call = made.get(value.name) if isinstance(value, Ref) else None
    if call is None:
        return value if isinstance(value, float) else None
    if _name(call) == "detach":
        return _number(made, call.args[0])
    if _name(call) == "torch.full" and call.args[0] == ():
        return _number(made, call.args[1])
    if _name(call) == "operator.sub":
        one, other = (_number(made, arg) for arg in call.args)
        return None if one is None or other is None else one - other
    return None


def _batch_norm(
    structure: Structure, unit: Unit, made: dict[str, Call], last: Call
) -> Layer | None:
    """Finds normalisation by mean and variance of the batch, channels last, and their averages."""
    running = _averages(structure, unit, made)
    root = next((call for call in made.values() if _name(call) == "torch.rsqrt"), None)
    if len(running) != 2 or root is None:
        return None
    total = made.get(root.args[0].name)
    if total is None or _name(total) not in _ADD or not isinstance(total.args[1], float):
        return None
    (mean, keep, x), (var, other, _) = sorted(running, key=lambda one: one[2] is None)
    if x is None or keep != other or not isinstance(x, Ref):
        return None
    shape = structure.values[x.name][1]
    features = structure.values[mean][1]
    if features != shape[-1:]:
        return None
    arrays: dict[str, Any] = {mean: ("mean", None), var: ("var", None)}
    own = [
        value
        for value in unit.given
        if value not in arrays and local_array(structure, unit, value) is not None
    ]
    if len(own) not in (0, 2):
        return None
    if own:
        bias = next((one.name for one in last.args if isinstance(one, Ref) and one.name in own), "")
        if not bias:
            return None
        (scale,) = (value for value in own if value != bias)
        arrays |= {scale: ("weight", None), bias: ("bias", None)}
    options = "" if own else ", affine=False"
    code = (
        f"BatchNormLast({features[0]}, eps={shortest(total.args[1])!r}, "
        f"keep={shortest(keep)!r}{options})"
    )
    return Layer(expr(code), (x.name,), last.name, arrays, "BatchNormLast", "norm")


def _averages(
    structure: Structure, unit: Unit, made: dict[str, Call]
) -> list[tuple[str, float, Any]]:
    """Returns the buffers that become `keep * buffer + (1 - keep) * now`, and of what `now` is."""
    program = structure.program
    found = []
    for value, output in zip(program.graph.outputs, program.outputs, strict=True):
        call = made.get(value.name) if isinstance(value, Ref) else None
        if output.kind != "buffer" or call is None:
            continue
        if _name(call) == "detach":
            call = made.get(call.args[0].name)
        if call is None or _name(call) not in _ADD:
            continue
        terms = [made.get(one.name) for one in call.args if isinstance(one, Ref)]
        found += _average(structure, unit, made, [one for one in terms if one is not None])
    return found


def _average(
    structure: Structure, unit: Unit, made: dict[str, Call], terms: list[Call]
) -> list[tuple[str, float, Any]]:
    if len(terms) != 2 or any(_name(term) not in _MUL for term in terms):
        return []
    for before, now in (terms, terms[::-1]):
        buffer, keep = before.args
        if not isinstance(buffer, Ref) or local_array(structure, unit, buffer.name) is None:
            continue
        if not isinstance(keep, float) or abs(keep + now.args[1] - 1) > 1e-6:
            continue
        mean: Any = made.get(now.args[0].name)
        x = None
        if mean is not None and _name(mean) == "operator.truediv":  # by a size that varies
            mean = made.get(mean.args[0].name) if isinstance(mean.args[0], Ref) else None
        if _name(mean) in ("torch.mean", "torch.sum") and isinstance(mean.args[0], Ref):
            ndim = len(structure.values[mean.args[0].name][1])
            if tuple(mean.args[1]) == tuple(range(ndim - 1)):
                x = mean.args[0]
        return [(buffer.name, keep, x)]
    return []
