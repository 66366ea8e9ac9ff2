"""Layers of torch in the place of operations that compute the same with a module's own arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr
from fmapper_adapters.torch.translation.layers import training
from fmapper_adapters.torch.translation.layers.site import Order, Site, name_of, permutation_of
from fmapper_adapters.torch.translation.printers import shortest


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the layer of torch that does all that a submodule does."""
    return _layer_of_unit(structure, unit) or training.layer_of_unit(structure, unit)


def _layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    calls = [step for step in unit.steps if isinstance(step, Call)]
    if len(calls) != len(unit.steps) or len(unit.gives) != 1:
        return None
    for call in calls:
        site = Site(structure, unit, whole=True)
        make = _WHOLE.get(name_of(call))
        found = make(site, call) if make is not None else None
        if found is not None and found.output == unit.gives[0] and site.is_all(found, calls):
            return found
    return None


def layer_of_call(structure: Structure, unit: Unit, call: Call) -> Layer | None:
    """Returns the layer of torch that computes an operation."""
    make = _CALLS.get(name_of(call))
    return make(Site(structure, unit, whole=False), call) if make is not None else None


def _dtype(name: str) -> str:
    return "" if name == "float32" else f", dtype=torch.{name}"


def _stem(local: str, default: str) -> str:
    """Names a layer after its weight."""
    *path, last = local.split(".")
    for end in ("weight", "kernel", "scale", "embedding"):
        last = last.removesuffix(end)
    return last.strip("_") or (path[-1] if path else default)


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
    code = f"nn.Linear({size}, {out}{options}{_dtype(site.dtype(held[0]))})"
    turned = rows + columns
    arrays: dict[str, Any] = {held[0]: ("weight", None if turned == (0, 1) else turned)}
    if own:
        arrays[own[0]] = ("bias", None if own[2] == ((0,),) else own[2][0])
    return Layer(expr(code), (x.name,), output or call.name, arrays, "nn.Linear",
                 _stem(held[1], "linear"))  # fmt: skip


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
    code = f"nn.Embedding({count}, {features}{_dtype(site.dtype(held[0]))})"
    return Layer(expr(code), (ids.name,), call.name, {held[0]: ("weight", None)}, "nn.Embedding",
                 _stem(held[1], "embed"))  # fmt: skip


def _lookup(site: Site, call: Call) -> Layer | None:
    """Finds what JAX does for indices from behind and outside, around a look-up.

    Where an index is outside JAX gives NaN, and torch raises.
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
    stem = _stem(next(one[1] for one in held.values() if one), "norm")
    code = f"{kind}({sizes[0]}{options}{_dtype(site.dtype(x))})"
    return Layer(expr(code), (x.name,), call.name, arrays, kind, stem)


def _batch_norm(site: Site, call: Call) -> Layer | None:
    """Finds `F.batch_norm` with the running statistics, channels first or last."""
    if _arg(call, 5, "training", False):
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
    return _channels(
        site, call, f"BatchNorm{dims}d", f"{features}{options}{_dtype(site.dtype(call.name))}",
        arrays, "norm",
    )  # fmt: skip


def _channels(
    site: Site, call: Call, kind: str, options: str, arrays: dict[str, Any], stem: str,
    output: str = "",
) -> Layer | None:  # fmt: skip
    """Returns a layer that takes the channels first or, if that is what is done around it, last."""
    x: Any = call.args[0]
    before = site.made.get(x.name) if site.whole else None
    ndim = len(site.shape(call.name))
    to_first = (0, ndim - 1, *range(1, ndim - 1))
    to_last = (0, *range(2, ndim), 1)
    user = site.user(output or call.name)
    if (
        before is not None
        and user is not None
        and permutation_of(before, ndim) == to_first
        and permutation_of(user, ndim) == to_last
    ):
        site.seen |= {call.name, before.name, user.name, output or call.name}
        return Layer(expr(f"{kind}Last({options})"), (before.args[0].name,), user.name, arrays,
                     f"{kind}Last", stem)  # fmt: skip
    site.seen |= {call.name, output or call.name}
    return Layer(expr(f"nn.{kind}({options})"), (x.name,), output or call.name, arrays,
                 f"nn.{kind}", stem)  # fmt: skip


# --- convolutions ---------------------------------------------------------------------------------


def _convolution(site: Site, call: Call) -> Layer | None:
    """Finds a convolution, with padding before it and a bias after it."""
    x, weight = call.args[:2]
    bias = _arg(call, 2, "bias")
    held = site.array(weight)
    if held is None or not isinstance(x, Ref):
        return None
    shape = [site.shape(held[0])[i] for i in (held[2] or range(len(site.shape(held[0]))))]
    dims = len(shape) - 2
    if dims < 1 or len(site.shape(x)) != dims + 2:
        return None
    stride, padding = (_each(_arg(call, at, key, usual), dims)
                       for at, key, usual in ((3, "stride", 1), (4, "padding", 0)))  # fmt: skip
    dilation, groups = _each(_arg(call, 5, "dilation", 1), dims), _arg(call, 6, "groups", 1)
    arrays: dict[str, Any] = {held[0]: ("weight", held[2])}
    own = None
    if bias is not None:
        own = site.array(bias)
        if own is None:
            return None
    last = call.name
    added = _bias_after(site, last, dims) if own is None else None
    if added is not None:
        own, last = added
    if own is not None:
        arrays[own[0]] = ("bias", None)
    pad = site.call(x, "torch.constant_pad_nd", "F.pad") if site.whole else None
    told = uneven = ""
    if pad is not None:
        widths = tuple(pad.args[1])
        value = _arg(pad, 2, "value", 0)
        if value != 0 or len(widths) > 2 * dims or any(padding) or any(map(_is_ref, widths)):
            return None
        widths += (0,) * (2 * dims - len(widths))
        sides = [(widths[2 * i], widths[2 * i + 1]) for i in reversed(range(dims))]
        if all(low == high for low, high in sides):
            padding = tuple(low for low, _ in sides)
        else:
            uneven = f", pad={widths}"
        site.seen.add(pad.name)
        call = _with_input(call, pad.args[0])
    size = tuple(shape[2:])
    told += "" if set(stride) == {1} else f", stride={_same(stride)}"
    told += "" if set(padding) == {0} else f", padding={_same(padding)}"
    told += "" if set(dilation) == {1} else f", dilation={_same(dilation)}"
    told += "" if groups == 1 else f", groups={groups}"
    told += "" if own is not None else ", bias=False"
    options = f"{shape[1] * groups}, {shape[0]}, {_same(size)}{told}{_dtype(site.dtype(held[0]))}"
    options += uneven
    found = _around(
        site, call, f"Conv{dims}d", options, arrays, _stem(held[1], "conv"), last, added
    )
    return None if found is not None and uneven and not found.kind.endswith("Last") else found


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


def _with_input(call: Call, x: Any) -> Call:
    from dataclasses import replace

    return replace(call, args=(x, *call.args[1:]))


def _bias_after(site: Site, value: str, dims: int) -> tuple[tuple[str, str, Order], str] | None:
    """Returns the bias that is added to a result, through a permutation, and what that gives."""
    user = site.user(value)
    at = value
    if user is not None and permutation_of(user, dims + 2) is not None:
        at, user = user.name, site.user(user.name)
    if user is None or name_of(user) not in ("operator.add", "torch.add"):
        return None
    others = [one for one in user.args if one != Ref(at)]
    bias = site.array(others[0]) if len(others) == 1 else None
    if bias is None or bias[2] is not None or len(site.shape(bias[0])) != 1 or at == value:
        return None
    return bias, user.name


def _around(
    site: Site, call: Call, kind: str, options: str, arrays: dict[str, Any], stem: str,
    output: str, added: Any,
) -> Layer | None:  # fmt: skip
    if added is None:
        return _channels(site, call, kind, options, arrays, stem)
    ndim = len(site.shape(call.name))
    before = site.made.get(call.args[0].name)
    user = site.user(call.name)
    if before is None or user is None:
        return None
    if permutation_of(before, ndim) != (0, ndim - 1, *range(1, ndim - 1)):
        return None
    if permutation_of(user, ndim) != (0, *range(2, ndim), 1):
        return None
    site.seen |= {call.name, before.name, user.name, output}
    return Layer(expr(f"{kind}Last({options})"), (before.args[0].name,), output, arrays,
                 f"{kind}Last", stem)  # fmt: skip


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _same(values: tuple[int, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else values


_CONVOLUTIONS = dict.fromkeys(
    ("torch.conv1d", "torch.conv2d", "torch.conv3d", "F.conv1d", "F.conv2d", "F.conv3d"),
    _convolution,
)
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
    **_CONVOLUTIONS,
}
_WHOLE = {**_CALLS, "F.embedding": _lookup}
