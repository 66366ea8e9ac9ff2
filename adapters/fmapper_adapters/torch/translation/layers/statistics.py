"""Layers for norms of Equinox, whose running statistics are in a state beside the model."""

from __future__ import annotations

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.torch.translation.layers.site import name_of
from fmapper_adapters.torch.translation.printers import shortest

_KINDS = {
    "DebiasedBatchNorm": {
        "batch_counter": "count",
        "batch_state_index.0": "running_mean",
        "batch_state_index.1": "running_var",
    },
    "AveragedBatchNorm": {
        "ema_first_time_index": "is_first",
        "ema_state_index.0": "running_mean",
        "ema_state_index.1": "running_var",
    },
}


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the layer for an `eqx.nn.BatchNorm` in training, in either of its modes."""
    cls = structure.program.types.get(unit.path, "")
    if not (cls.startswith("equinox.") and cls.endswith(".BatchNorm")) or len(unit.gives) != 1:
        return None
    own = {name: local_array(structure, unit, name) for name in unit.given}
    held = {local: name for name, local in own.items() if local}
    given = [name for name, local in own.items() if not local]
    found = next((one for one, names in _KINDS.items() if held.keys() >= names.keys()), None)
    if found is None or len(given) != 1 or given[0] in structure.sizes:
        return None
    arrays = {held.pop(local): (attr, None) for local, attr in _KINDS[found].items()}
    is_affine = bool(held)
    if is_affine and held.keys() != {"weight", "bias"}:
        return None
    arrays |= {name: (local, None) for local, name in held.items()}
    shape = structure.values[given[0]][1]
    mean = next(name for name, (attr, _) in arrays.items() if attr == "running_mean")
    (features,) = structure.values[mean][1]
    calls = {call.name: call for call in unit.calls()}
    eps, keep = _eps(calls), _keep(calls, mean)
    if shape[1:2] != (features,) or eps is None or keep is None:
        return None
    options = "" if shortest(eps) == 1e-5 else f", eps={shortest(eps)!r}"
    options += "" if shortest(keep) == 0.99 else f", keep={shortest(keep)!r}"
    options += "" if is_affine else ", affine=False"
    code = expr(f"{found}({features}{options})")
    return Layer(code, (given[0],), unit.gives[0], arrays, found, "norm")


def _eps(calls: dict[str, Call]) -> float | None:
    """Returns what is added to the variance."""
    root = next((call for call in calls.values() if name_of(call) == "torch.sqrt"), None)
    total = calls.get(root.args[0].name) if root is not None else None
    eps = total.args[1] if total is not None and len(total.args) > 1 else None
    return eps if isinstance(eps, float) else None


def _keep(calls: dict[str, Call], mean: str) -> float | None:
    """Returns by what the running mean is multiplied."""
    for call in calls.values():
        if name_of(call) == "operator.mul" and call.args[0] == Ref(mean):
            return call.args[1] if isinstance(call.args[1], float) else None
    return None
