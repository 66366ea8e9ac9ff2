"""Layers of NNX in the place of operations that compute the same with arrays of a module's own."""

from __future__ import annotations

import ast
import operator
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the layer of NNX that does all that a submodule does."""
    calls = [step for step in unit.steps if isinstance(step, Call)]
    if len(calls) != len(unit.steps):
        return None
    meaningful = [call for call in calls if not call.op.startswith("sym::getitem")]
    if len(meaningful) == 1 or (len(meaningful) == 2 and _counts(meaningful[0])):
        found = layer_of_call(structure, unit, meaningful[-1])
        if found is not None and [*unit.gives] in ([found.output], []):
            return found
    return (
        _rms_norm(structure, unit, calls)
        or _addmm(structure, unit, calls)
        or _drop_path(structure, unit, calls)
    )


def _counts(call: Call) -> bool:
    """Tells whether a call counts the batches that a normalisation has seen."""
    return call.op == "aten::add.Tensor" and not (call.result and call.result[0][1])


def layer_of_call(structure: Structure, unit: Unit, call: Call) -> Layer | None:
    """Returns the layer of NNX that computes an operation."""
    name = call.op.partition("::")[2].partition(".")[0]
    make = _LAYERS.get(name)
    return make(_Site(structure, unit, call)) if make is not None else None


class _Site:
    """A call with what is known of its arguments."""

    def __init__(self, structure: Structure, unit: Unit, call: Call) -> None:
        self.structure = structure
        self.unit = unit
        self.call = call

    def arg(self, at: int, default: Any = None) -> Any:
        return self.call.args[at] if at < len(self.call.args) else default

    def array(self, at: int) -> tuple[str, str] | None:
        """Returns the name of an array of the module's own and its local name."""
        given = self.arg(at)
        if not isinstance(given, Ref):
            return None
        local = local_array(self.structure, self.unit, given.name)
        return None if local is None else (given.name, local)

    def shape(self, name: str) -> tuple[Any, ...]:
        return self.structure.values[name][1]

    def dtype(self, name: str) -> str:
        return self.structure.values[name][0]

    def result_of(self, index: int) -> str:
        """Returns the value that is a result of the call among several."""
        for call in self.unit.calls():
            if call.op == "sym::getitem" and call.args == (Ref(self.call.name), index):
                return call.name
        return self.call.name

    def results(self) -> frozenset[str]:
        return frozenset(
            call.name
            for call in self.unit.calls()
            if call.op == "sym::getitem" and call.args[0] == Ref(self.call.name)
        )


def _keywords(dtype: str) -> str:
    """Returns what says that a layer computes in another dtype than float32."""
    return "" if dtype == "float32" else f"dtype=jnp.{dtype}, param_dtype=jnp.{dtype}, "


def _made(code: str) -> ast.expr:
    return expr(code)


def _stem(local: str, default: str) -> str:
    """Returns what to call a layer after its weight."""
    *path, last = local.split(".")
    stem = last.removesuffix("weight").rstrip("_")
    return stem or (path[-1] if path else default)


def _linear(site: _Site) -> Layer | None:
    weight, bias = site.array(1), site.array(2)
    given = site.arg(0)
    if weight is None or not isinstance(given, Ref) or (bias is None and site.arg(2) is not None):
        return None
    shape = site.shape(weight[0])
    if len(shape) != 2 or site.dtype(given.name) != site.dtype(weight[0]):
        return None
    options = f"{'' if bias else 'use_bias=False, '}{_keywords(site.dtype(weight[0]))}"
    code = f"nnx.Linear({shape[1]}, {shape[0]}, {options}rngs=rngs)"
    arrays: dict[str, Any] = {weight[0]: ("kernel", (1, 0))}
    if bias:
        arrays[bias[0]] = ("bias", None)
    return Layer(
        _made(code), (given.name,), site.call.name, arrays, "nnx.Linear", _stem(weight[1], "linear")
    )


def _embedding(site: _Site) -> Layer | None:
    weight, given = site.array(0), site.arg(1)
    if weight is None or not isinstance(given, Ref):
        return None
    count, features = site.shape(weight[0])
    code = f"nnx.Embed({count}, {features}, {_keywords(site.dtype(weight[0]))}rngs=rngs)"
    arrays: dict[str, Any] = {weight[0]: ("embedding", None)}
    return Layer(
        _made(code), (given.name,), site.call.name, arrays, "nnx.Embed", _stem(weight[1], "embed")
    )


def _layer_norm(site: _Site) -> Layer | None:
    given, sizes = site.arg(0), site.arg(1)
    weight, bias = site.array(2), site.array(3)
    if not isinstance(given, Ref) or not isinstance(sizes, tuple) or len(sizes) != 1:
        return None
    if (weight is None) != (site.arg(2) is None) or (bias is None) != (site.arg(3) is None):
        return None
    if weight is None and bias is None:
        return None  # a function
    dtype = site.dtype(given.name)
    if any(array is not None and site.dtype(array[0]) != dtype for array in (weight, bias)):
        return None
    options = f"epsilon={site.arg(4, 1e-5)!r}, use_fast_variance=False, "
    options += "" if weight else "use_scale=False, "
    options += "" if bias else "use_bias=False, "
    code = f"nnx.LayerNorm({sizes[0]}, {options}{_keywords(dtype)}rngs=rngs)"
    arrays: dict[str, Any] = {}
    if weight:
        arrays[weight[0]] = ("scale", None)
    if bias:
        arrays[bias[0]] = ("bias", None)
    stem = _stem((weight or bias or ("", ""))[1], "norm")
    return Layer(
        _made(code), (given.name,), site.result_of(0), arrays, "nnx.LayerNorm", stem,
        site.results() - {site.result_of(0)},
    )  # fmt: skip


def _convolution(site: _Site) -> Layer | None:
    weight, bias = site.array(1), site.array(2)
    given = site.arg(0)
    if weight is None or not isinstance(given, Ref) or (bias is None and site.arg(2) is not None):
        return None
    name = site.call.op.partition("::")[2].partition(".")[0]
    if name == "convolution":
        stride, padding, dilation, transposed, extra, groups = site.call.args[3:9]
    else:
        rest = [*site.call.args[3:], *[None] * 6]
        transposed, extra = False, (0,)
        stride, padding, dilation, groups = (rest[0], rest[1], rest[2], rest[3])
    shape = site.shape(weight[0])
    dims = len(shape) - 2
    stride, padding = _each(stride, 1, dims), _each(padding, 0, dims)
    dilation, groups = _each(dilation, 1, dims), groups or 1
    if dims < 1 or len(site.shape(given.name)) != dims + 2 or isinstance(padding, str):
        return None
    options = "" if bias else "use_bias=False, "
    if any(s != 1 for s in stride):
        options += f"strides={_same(stride)}, "
    if any(d != 1 for d in dilation):
        options += f"kernel_dilation={_same(dilation)}, "
    options += _keywords(site.dtype(weight[0]))
    size = tuple(shape[2:])
    axes = tuple(range(2, dims + 2))
    arrays: dict[str, Any]
    if transposed:
        if groups != 1:
            return None
        extra = _each(extra, 0, dims)
        reach = [d * (k - 1) - p for d, k, p in zip(dilation, size, padding, strict=True)]
        pads = [(r, r + e) for r, e in zip(reach, extra, strict=True)]
        code = (
            f"ConvTranspose({shape[0]}, {shape[1]}, {size}, padding={pads}, transpose_kernel=True, "
            f"{options}rngs=rngs)"
        )
        arrays = {weight[0]: ("kernel", (*axes, 1, 0))}
        kind = "ConvTranspose"
    else:
        options += f"padding={_same(padding)}, "
        if groups != 1:
            options += f"feature_group_count={groups}, "
        code = f"Conv({shape[1] * groups}, {shape[0]}, {size}, {options}rngs=rngs)"
        arrays = {weight[0]: ("kernel", (*axes, 1, 0))}
        kind = "Conv"
    if bias:
        arrays[bias[0]] = ("bias", None)
    return Layer(_made(code), (given.name,), site.call.name, arrays, kind, _stem(weight[1], "conv"))


def _each(value: Any, default: int, dims: int) -> Any:
    if value is None:
        return (default,) * dims
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _same(values: tuple[int, ...]) -> str:
    return repr(values[0] if len(set(values)) == 1 else values)


def _batch_norm(site: _Site) -> Layer | None:
    name = site.call.op.partition("::")[2].partition(".")[0]
    given = site.arg(0)
    weight, bias, mean, var = (site.array(at) for at in (1, 2, 3, 4))
    if not isinstance(given, Ref) or mean is None or var is None:
        return None
    if (weight is None) != (bias is None) or (weight is None) != (site.arg(1) is None):
        return None
    if name in ("_native_batch_norm_legit_no_training", "_batch_norm_no_update"):
        momentum, eps = site.arg(5), site.arg(6)
    elif name == "batch_norm":
        momentum, eps = site.arg(6), site.arg(7)
    else:
        momentum, eps = site.arg(6), site.arg(7)
    features = site.shape(mean[0])[0]
    options = "" if momentum in (0.1, None) else f"momentum={1 - momentum!r}, "
    options += "" if eps == 1e-5 else f"epsilon={eps!r}, "
    options += "" if weight else "use_scale=False, use_bias=False, "
    code = f"BatchNorm({features}, {options}{_keywords(site.dtype(mean[0]))}rngs=rngs)"
    arrays: dict[str, Any] = {mean[0]: ("mean", None), var[0]: ("var", None)}
    if weight and bias:
        arrays |= {weight[0]: ("scale", None), bias[0]: ("bias", None)}
    output = site.result_of(0)
    return Layer(
        _made(code), (given.name,), output, arrays, "BatchNorm",
        _stem(weight[1], "norm") if weight else "norm", site.results() - {output},
    )  # fmt: skip


def _group_norm(site: _Site) -> Layer | None:
    given, groups = site.arg(0), site.arg(1)
    weight, bias = site.array(2), site.array(3)
    if not isinstance(given, Ref) or weight is None or bias is None:
        return None
    features = site.shape(weight[0])[0]
    eps = site.arg(4, 1e-5)
    code = (
        f"GroupNorm({features}, {groups}, epsilon={eps!r}, use_fast_variance=False, "
        f"{_keywords(site.dtype(weight[0]))}rngs=rngs)"
    )
    arrays: dict[str, Any] = {weight[0]: ("scale", None), bias[0]: ("bias", None)}
    return Layer(
        _made(code), (given.name,), site.call.name, arrays, "GroupNorm", _stem(weight[1], "norm")
    )


def _dropout(site: _Site) -> Layer | None:
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
        _made(code), (given.name,), output, {}, "nnx.Dropout", "dropout",
        site.results() - {output},
    )  # fmt: skip


def _attention(site: _Site) -> Layer | None:
    """Attention with dropout; without it is a function."""
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
    return Layer(_made(code), names, site.call.name, {}, "DotProductAttention", "attend")


_LAYERS = {
    "scaled_dot_product_attention_with_dropout": _attention,
    "linear": _linear,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "convolution": _convolution,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "native_dropout": _dropout,
    "dropout": _dropout,
}


# --- layers of several operations -----------------------------------------------------------------


def _rms_norm(structure: Structure, unit: Unit, calls: list[Call]) -> Layer | None:
    """Finds `x * rsqrt(mean(x ** 2) + eps) * weight`, in float32 for halves."""
    made = {call.name: call for call in calls}

    def producer(value: Any) -> Call | None:
        return made.get(value.name) if isinstance(value, Ref) else None

    def through_casts(value: Any) -> Any:
        call = producer(value)
        while call is not None and call.op.startswith(("aten::_to_copy", "aten::to.")):
            value = call.args[0]
            call = producer(value)
        return value

    if len(unit.gives) != 1:
        return None
    last = producer(through_casts(Ref(unit.gives[0])))
    if last is None or not last.op.startswith("aten::mul") or len(last.args) != 2:
        return None
    for weight, normed in (last.args, last.args[::-1]):
        if not isinstance(weight, Ref):
            continue
        local = local_array(structure, unit, weight.name)
        shape = structure.values.get(weight.name, ("", ()))[1]
        product = producer(through_casts(normed))
        if local is None or len(shape) != 1 or product is None:
            continue
        if not product.op.startswith("aten::mul"):
            continue
        for x, scale in (product.args, product.args[::-1]):
            root = producer(scale)
            if root is None or not root.op.startswith("aten::rsqrt"):
                continue
            total = producer(root.args[0])
            if total is None or not total.op.startswith("aten::add"):
                continue
            mean, eps = producer(total.args[0]), total.args[1]
            if mean is None or not mean.op.startswith("aten::mean") or isinstance(eps, Ref):
                continue
            square = producer(mean.args[0])
            if square is None or mean.args[1:] not in (((-1,), True), ([-1], True)):
                continue
            is_square = (square.op.startswith("aten::pow") and square.args[1] in (2, 2.0)) or (
                square.op.startswith("aten::mul") and square.args[0] == square.args[1]
            )
            source = through_casts(x)
            if not is_square or through_casts(square.args[0]) != source:
                continue
            if not isinstance(source, Ref) or source.name in made:
                continue
            dtype = structure.values[source.name][0]
            result = structure.values[unit.gives[0]][0]
            if dtype != result or structure.values[weight.name][0] != dtype:
                continue
            options = f"epsilon={eps!r}, use_fast_variance=False, {_keywords(dtype)}"
            code = f"nnx.RMSNorm({shape[0]}, {options}rngs=rngs)"
            return Layer(
                _made(code), (source.name,), unit.gives[0], {weight.name: ("scale", None)},
                "nnx.RMSNorm", "norm",
            )  # fmt: skip
    return None


def _addmm(structure: Structure, unit: Unit, calls: list[Call]) -> Layer | None:
    """Finds `bias + x @ weight` of rows, with the weight the other way round than in torch."""
    found = [call for call in calls if call.op.startswith("aten::addmm")]
    others = [call for call in calls if not call.op.startswith(("aten::addmm", "aten::view"))]
    if len(found) != 1 or others or len(unit.gives) != 1:
        return None
    call = found[0]
    bias, x, weight = call.args[:3]
    if call.kwargs or not all(isinstance(one, Ref) for one in (bias, x, weight)):
        return None
    if any(local_array(structure, unit, one.name) is None for one in (bias, weight)):
        return None
    made = {call.name: call for call in calls}
    source = made[x.name].args[0] if x.name in made else x
    if not isinstance(source, Ref) or source.name in made:
        return None
    shape, wanted = structure.values[weight.name][1], structure.values[unit.gives[0]][1]
    given = structure.values[source.name][1]
    if tuple(given[:-1]) != tuple(wanted[:-1]) or (given[-1], wanted[-1]) != tuple(shape):
        return None
    dtype = structure.values[weight.name][0]
    code = f"nnx.Linear({shape[0]}, {shape[1]}, {_keywords(dtype)}rngs=rngs)"
    arrays: dict[str, Any] = {weight.name: ("kernel", None), bias.name: ("bias", None)}
    return Layer(_made(code), (source.name,), unit.gives[0], arrays, "nnx.Linear", "linear")


def _drop_path(structure: Structure, unit: Unit, calls: list[Call]) -> Layer | None:
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
    return Layer(_made(code), (given,), unit.gives[0], {}, "nnx.Dropout", "drop_path")


def _is_held(structure: Structure, value: str) -> bool:
    given = structure.inputs.get(value)
    return given is not None and given.kind != "user"


def _with_draw(calls: list[Call], given: str, output: str, draw: bool) -> float | None:
    """Returns what becomes of 1 where a mask keeps it, or does not; None for other arithmetic."""
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
