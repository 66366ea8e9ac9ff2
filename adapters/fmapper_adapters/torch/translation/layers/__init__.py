"""Layers of torch in the place of operations that compute the same with a module's own arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr
from fmapper_adapters.torch.translation.layers import (
    convolutions,
    statistics,
    training,
)
from fmapper_adapters.torch.translation.layers.site import Site, dtype_option, name_of, stem_of
from fmapper_adapters.torch.translation.printers import shortest


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the layer of torch that does all that a submodule does."""
    return (
        _layer_of_unit(structure, unit)
        or training.layer_of_unit(structure, unit)
        or statistics.layer_of_unit(structure, unit)
    )


def _layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    calls = [step for step in unit.steps if isinstance(step, Call)]
    if len(calls) != len(unit.steps) or len(unit.gives) != 1:
        return None
    for call in calls:
        site = Site(structure, unit, whole=True)
        make = _WHOLE.get(name_of(call))
        found = make(site, call) if make is not None else None
        if found is None or _trains_buffers(structure, found):
            continue
        if found.output == unit.gives[0] and site.is_all(found, calls):
            return found
    return None


def layer_of_call(structure: Structure, unit: Unit, call: Call) -> Layer | None:
    """Returns the layer of torch that computes an operation."""
    make = _CALLS.get(name_of(call))
    found = make(Site(structure, unit, whole=False), call) if make is not None else None
    return None if found is None or _trains_buffers(structure, found) else found


def _trains_buffers(structure: Structure, layer: Layer) -> bool:
    """Returns whether a layer would have arrays as parameters that the model does not train."""
    return any(
        structure.inputs[name].kind == "buffer" and not attr.startswith("running_")
        for name, (attr, _) in layer.arrays.items()
    )


def _arg(call: Call, at: int, key: str, default: Any = None) -> Any:
    return call.args[at] if at < len(call.args) else call.kwargs.get(key, default)


# --- products -------------------------------------------------------------------------------------


def _linear(site: Site, call: Call) -> Layer | None:
    """Finds `F.linear(x, weight, bias)`."""
    x, bias = call.args[0], _arg(call, 2, "bias")
    return _dense(site, call, x, call.args[1], bias, (0, 1))


def _addmm(site: Site, call: Call) -> Layer | None:
    """Finds `torch.addmm(bias, x, weight)`."""
    bias, x, weight = call.args[:3]
    return None if call.kwargs else _dense(site, call, x, weight, bias, (1, 0))


def _matmul(site: Site, call: Call) -> Layer | None:
    """Finds `x @ weight` or `weight @ x` of a vector, and the bias that is added to it."""
    x, weight = call.args[:2]
    order = (1, 0)
    if isinstance(weight, Ref) and len(site.shape(weight)) == 1:
        x, weight, order = weight, x, (0, 1)
    user = site.user(call.name)
    if user is not None and name_of(user) in ("operator.add", "torch.add"):
        others = [one for one in user.args if one != Ref(call.name)]
        bias = site.array(others[0]) if len(others) == 1 else None
        if bias is not None and len(site.shape(bias[0])) == 1:
            found = _dense(site, call, x, weight, others[0], order, user.name)
            if found is not None:
                return found
    return _dense(site, call, x, weight, None, order)


def _dense(
    site: Site, call: Call, x: Any, weight: Any, bias: Any, order: tuple[int, int],
    output: str = "",
) -> Layer | None:  # fmt: skip
    held = site.merge(weight)
    if held is None or not isinstance(x, Ref) or len(held[2]) != 2:
        return None
    own = None if bias is None else site.merge(bias)
    if (own is None) != (bias is None) or (own is not None and len(own[2]) != 1):
        return None
    sizes = site.shape(held[0])
    rows, columns = (held[2][i] for i in order)
    if not all(isinstance(size, int) for size in sizes):
        return None
    out, size = (math.prod(sizes[i] for i in group) for group in (rows, columns))
    if site.dtype(x) != site.dtype(held[0]) or site.shape(x)[-1:] != (size,):
        return None
    site.seen |= {call.name, *([output] if output else [])}
    options = "" if own else ", bias=False"
    code = f"nn.Linear({size}, {out}{options}{dtype_option(site, held[0])})"
    turned = rows + columns
    arrays: dict[str, Any] = {held[0]: ("weight", None if turned == (0, 1) else turned)}
    if own:
        arrays[own[0]] = ("bias", None if own[2] == ((0,),) else own[2][0])
    return Layer(expr(code), (x.name,), output or call.name, arrays, "nn.Linear",
                 stem_of(held[1], "linear"))  # fmt: skip


# --- look-ups -------------------------------------------------------------------------------------

_OF_INDICES = (
    "torch.lt", "operator.lt", "torch.where", "operator.add", "to", "torch.clamp", "squeeze",
    "unsqueeze", "expand", "operator.ge", "operator.le", "torch.ge", "torch.le", "operator.and_",
    "torch.logical_and", "reshape",
)  # fmt: skip


def _embedding(site: Site, call: Call) -> Layer | None:
    """Finds `F.embedding(ids, weight)`."""
    ids, weight = call.args[:2]
    held = site.array(weight)
    told = {key: value for key, value in call.kwargs.items() if key != "norm_type"}
    if held is None or held[2] is not None or not isinstance(ids, Ref) or any(told.values()):
        return None
    site.seen.add(call.name)
    count, features = site.shape(held[0])
    code = f"nn.Embedding({count}, {features}{dtype_option(site, held[0])})"
    return Layer(expr(code), (ids.name,), call.name, {held[0]: ("weight", None)}, "nn.Embedding",
                 stem_of(held[1], "embed"))  # fmt: skip


def _lookup(site: Site, call: Call) -> Layer | None:
    """Finds what JAX does for indices from behind and outside, around a look-up.

    Where an index is outside JAX gives NaN, or the nearest row; and torch raises.
    """
    found = _embedding(site, call)
    if found is None:
        return None
    before: set[str] = set()
    sources: set[str] = set()
    todo = [call.args[0]]
    while todo:
        value = todo.pop()
        made = site.made.get(value.name) if isinstance(value, Ref) else None
        if made is None:
            if isinstance(value, Ref) and not _is_size(site, value):
                sources.add(value.name)
            continue
        if name_of(made) not in _OF_INDICES and name_of(made) != "sym_size":
            return None
        if made.name not in before:
            before.add(made.name)
            todo += [one for one in _flat(made.args) if isinstance(one, Ref)]
    if len(sources) != 1:
        return None
    (ids,) = sources
    output = call.name
    after: set[str] = set()
    user = site.user(output)
    if user is not None and name_of(user) == "torch.where" and user.args[1] == Ref(output):
        last = user.args[2]
        if not (isinstance(last, float) and math.isnan(last)):
            return None
        todo = [user.args[0]]
        while todo:
            made = site.made.get(todo.pop().name)
            if made is not None and made.name not in before | after:
                if name_of(made) not in _OF_INDICES:
                    return None
                after.add(made.name)
                todo += [one for one in _flat(made.args) if isinstance(one, Ref)]
        after.add(user.name)
        output = user.name
    if site.shape(Ref(output))[:-1] != site.shape(Ref(ids)):
        return None
    site.seen |= before | after
    return Layer(found.made, (ids,), output, found.arrays, found.kind, found.name)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [inner for one in value for inner in _flat(one)]
    return [value]


def _is_size(site: Site, value: Ref) -> bool:
    return value.name in site.structure.sizes


# --- norms ----------------------------------------------------------------------------------------


def _layer_norm(site: Site, call: Call) -> Layer | None:
    return _norm(site, call, "nn.LayerNorm", 1e-5)


def _rms_norm(site: Site, call: Call) -> Layer | None:
    return _norm(site, call, "nn.RMSNorm", None)


def _norm(site: Site, call: Call, kind: str, usual: Any) -> Layer | None:
    x, sizes = call.args[:2]
    if not isinstance(x, Ref) or not isinstance(sizes, tuple) or len(sizes) != 1:
        return None
    names = ("weight", "bias") if kind == "nn.LayerNorm" else ("weight",)
    given = {key: _arg(call, at, key) for at, key in enumerate(names, 2)}
    held = {key: site.array(value) for key, value in given.items() if value is not None}
    if not held or any(one is None or one[2] is not None for one in held.values()):
        return None
    if any(site.dtype(one[0]) != site.dtype(x) for one in held.values() if one):
        return None
    eps = _arg(call, 2 + len(names), "eps", usual)
    options = "" if eps == usual else f", eps={shortest(eps)!r}"
    if kind == "nn.LayerNorm" and "weight" not in held:
        return None
    if kind == "nn.LayerNorm" and "bias" not in held:
        options += ", bias=False"
    site.seen.add(call.name)
    arrays: dict[str, Any] = {one[0]: (key, None) for key, one in held.items() if one}
    stem = stem_of(next(one[1] for one in held.values() if one), "norm")
    code = f"{kind}({sizes[0]}{options}{dtype_option(site, x)})"
    return Layer(expr(code), (x.name,), call.name, arrays, kind, stem)


def _batch_norm(site: Site, call: Call) -> Layer | None:
    """Finds `F.batch_norm` with the running statistics, channels first or last.

    In a file that trains it stays a call, as train() would have a layer use those of the batch.
    """
    if _arg(call, 5, "training", False) or not site.structure.program.lacks_training:
        return None
    given = {
        "running_mean": call.args[1], "running_var": call.args[2],
        "weight": _arg(call, 3, "weight"), "bias": _arg(call, 4, "bias"),
    }  # fmt: skip
    held = {key: site.array(value) for key, value in given.items() if value is not None}
    if any(one is None or one[2] is not None for one in held.values()):
        return None
    if ("weight" in held) != ("bias" in held):
        return None
    dims = max(len(site.shape(call.name)) - 2, 1)
    eps = _arg(call, 7, "eps", 1e-5)
    options = "" if shortest(eps) == 1e-5 else f", eps={shortest(eps)!r}"
    options += "" if "weight" in held else ", affine=False"
    (features,) = site.shape(held["running_mean"][0])  # type: ignore[index]
    arrays: dict[str, Any] = {one[0]: (key, None) for key, one in held.items() if one}
    return convolutions.channels(
        site, call, f"BatchNorm{dims}d", f"{features}{options}{dtype_option(site, call.name)}",
        arrays, "norm",
    )  # fmt: skip


_CALLS: dict[str, Callable[[Site, Call], Layer | None]] = {
    "F.linear": _linear,
    "torch.addmm": _addmm,
    "torch.matmul": _matmul,
    "torch.mv": _matmul,
    "operator.matmul": _matmul,
    "F.embedding": _embedding,
    "F.layer_norm": _layer_norm,
    "F.rms_norm": _rms_norm,
    "F.batch_norm": _batch_norm,
    **dict.fromkeys((*convolutions.PLAIN, *convolutions.TRANSPOSED), convolutions.convolution),
}
_WHOLE = {**_CALLS, "F.embedding": _lookup}
