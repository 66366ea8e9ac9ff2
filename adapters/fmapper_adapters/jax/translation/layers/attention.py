"""Attention of several heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fmapper.programs import Other, refs_in
from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.jax.translation.layers.site import keywords

_KIND = "torch.nn.modules.activation.MultiheadAttention"
# The layers that the projections may be.
_PACKED = ({"in_proj"}, {"q_proj", "kv_proj"}, {"q_proj", "k_proj", "v_proj"})
_MASKS = ("key_padding_mask", "attn_mask")
_WEIGHT = frozenset({"weight"})
_KERNELS = ("scaled_dot_product_attention", "scaled_dot_product_attention_with_dropout")
_PRODUCTS = ("bmm", "baddbmm")
_DROPOUTS = ("native_dropout", "dropout")
# What the layer does beside: it arranges its arrays, and makes masks what is added.
_BESIDE = {
    *("permute", "transpose", "view", "reshape", "unsqueeze", "squeeze", "clone", "select"),
    *("expand", "getitem", "linear", "zeros_like", "masked_fill", "add", "softmax", "mean"),
}


def multihead_attention(structure: Structure, unit: Unit, calls: Sequence[Call]) -> Layer | None:
    """Returns the layer for `nn.MultiheadAttention`, with all that one call of it may be told."""
    if structure.program.types.get(unit.path) != _KIND or "batch_first" not in unit.part.flags:
        return None
    arrays = {name: local_array(structure, unit, name) for name in unit.given}
    held = {name: local for name, local in arrays.items() if local is not None}
    told_beside = _arguments(structure, unit, held)
    places, (inputs, names) = _places(held), _inputs(unit, told_beside)
    size, rate = _size_of_head(structure, calls), _rate(calls)
    told = _options_of_call(told_beside, calls)
    if not places or not size or told is None or rate is None:
        return None
    if {*inputs} != {*unit.given} - held.keys() or not _computes_nothing_else(calls, size):
        return None
    result = unit.part.result if isinstance(unit.part.result, tuple) else ()
    given = {*unit.gives}
    results = [one.name if isinstance(one, Ref) else "" for one in result]
    dtypes = {structure.values[name][0] for name in (*held, inputs[0])}
    if len(results) != 2 or not results[0] or not given <= {*results} or len(dtypes) != 1:
        return None
    layers = {where.rpartition(".")[0]: "nnx.Linear" for where, _ in places.values()}
    widths = {
        where.removesuffix("_proj.kernel"): structure.values[name][1][1]
        for name, (where, _) in places.items() if where.endswith(".kernel")
    }  # fmt: skip
    features = widths.pop("out")
    options = f"dropout={rate!r}, " if rate else ""
    options += "".join(
        f"{letter}dim={widths[letter]}, "
        for letter in "kv" if widths.get(letter, features) != features
    )  # fmt: skip
    options += "" if len(places) == 2 * len(layers) else "use_bias=False, "
    options += "batch_first=True, " if unit.part.flags["batch_first"] else ""
    options += "" if "in" in widths else f"packed={' '.join(sorted(widths, key='qkv'.find))!r}, "
    code = f"MultiheadAttention({features}, {int(features) // size}, {options}"
    return Layer(
        expr(f"{code}{keywords(*dtypes)}rngs=rngs)"), inputs, results[0], places,
        "MultiheadAttention", "attention", draws=bool(rate), inner=layers, names=names,
        options=told, results=tuple(name if name in given else "" for name in results),
    )  # fmt: skip


def _places(held: Mapping[str, str]) -> dict[str, Any]:
    """Returns where each array is in the layers; empty for arrays of something else."""
    places: dict[str, Any] = {}
    ends: dict[str, set[str]] = {}
    for name, local in held.items():
        owner, _, end = local.replace("_weight", ".weight").replace("_bias", ".bias").partition(".")
        places[name] = (f"{owner}.kernel", (1, 0)) if end == "weight" else (f"{owner}.bias", None)
        ends.setdefault(owner, set()).add(end)
    is_known = ends.keys() - {"out_proj"} in _PACKED and len(ends) * len(
        ends.get("out_proj", ())
    ) == len(held)
    kinds = {frozenset(one) for one in ends.values()}
    if not is_known or kinds not in ({_WEIGHT}, {_WEIGHT | {"bias"}}):
        return {}
    return places


def _arguments(structure: Structure, unit: Unit, held: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the arguments of the call, with the constant for a mask that is one."""
    given = unit.part.arguments
    masks = [name for name in _MASKS if isinstance(given.get(name), Other)]
    known = {*refs_in((given,)), *held}
    left = [name for name in unit.given if name not in known]
    kinds = [structure.inputs[name].kind for name in left if name in structure.inputs]
    if len(masks) != 1 or len(left) != 1 or kinds != ["constant"]:
        return given
    return {**given, masks[0]: Ref(left[0])}


def _inputs(unit: Unit, given: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the values that the layer is called with, and the names of those by keyword."""
    query, key, value = (given.get(name) for name in ("query", "key", "value"))
    if not isinstance(query, Ref) or not isinstance(key, Ref) or not isinstance(value, Ref):
        return (), ()
    inputs = [query.name, key.name, value.name]
    while len(inputs) > 1 and inputs[-1] == inputs[-2]:  # a value is the key, a key the query
        inputs.pop()
    names = [
        name for name in _MASKS
        if isinstance(given.get(name), Ref) and given[name].name in unit.given
    ]  # fmt: skip
    return (*inputs, *(given[name].name for name in names)), tuple(names)


def _options_of_call(given: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, bool] | None:
    """Returns what the call is told beside; None where it does something else."""
    wants, averages = (given.get(name, True) for name in ("need_weights", "average_attn_weights"))
    kernels = [call for call in calls if _name_of(call) in _KERNELS]
    others = [given[name] for name in _MASKS if given.get(name) is not None]
    if not all(isinstance(one, Ref) for one in others) or (wants is False) != bool(kernels):
        return None
    told: dict[str, bool] = {}
    if wants is not True:
        told["need_weights"] = False
    elif averages is not True:
        told["average_attn_weights"] = False
    for call in kernels:
        if (len(call.args) > 5 and call.args[5] is True) or call.kwargs.get("is_causal"):
            told["is_causal"] = True
    return told


def _size_of_head(structure: Structure, calls: Sequence[Call]) -> int | None:
    """Returns how many features a head has."""
    for call in calls:
        if _name_of(call) in (*_KERNELS, *_PRODUCTS):
            query = call.args[1] if _name_of(call) == "baddbmm" else call.args[0]
            size = structure.values[query.name][1][-1]
            return size if isinstance(size, int) else None
    return None


def _rate(calls: Sequence[Call]) -> float | None:
    """Returns how much of the weights is dropped."""
    for call in calls:
        if _name_of(call) in _KERNELS:
            rate = call.args[4] if len(call.args) > 4 else call.kwargs.get("dropout_p", 0.0)
        elif _name_of(call) in _DROPOUTS and call.args[2:] in ((), (True,)):
            rate = call.args[1]
        else:
            continue
        return float(rate) if isinstance(rate, float | int) else None
    return 0.0


def _computes_nothing_else(calls: Sequence[Call], features: int) -> bool:
    """Returns whether there is only what attention does."""
    names = [_name_of(call) for call in calls]
    kernels = sum(name in _KERNELS for name in names)
    products = sum(name in _PRODUCTS for name in names)
    known = _BESIDE | {*_KERNELS, *_PRODUCTS, *_DROPOUTS}
    scales = [call for call in calls if _name_of(call) == "mul"]
    return (
        all(name in known for name in names if name != "mul")
        and (kernels, products) in ((1, 0), (0, 2))
        and sum(name in _DROPOUTS for name in names) <= 1
        and all(_is_scale(call, features) for call in scales)
        and len(scales) == (not kernels)
        and names.count("softmax") == (not kernels)
    )


def _is_scale(call: Call, features: int) -> bool:
    factor = call.args[1]
    return isinstance(factor, float) and math.isclose(factor, features**-0.5, rel_tol=1e-9)


def _name_of(call: Call) -> str:
    return call.op.partition("::")[2].partition(".")[0]
