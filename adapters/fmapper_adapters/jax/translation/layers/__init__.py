"""Layers of NNX in the place of operations that compute the same with arrays of a module's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmapper import ConversionError
from fmapper.programs import Program
from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array
from fmapper_adapters.jax.translation.layers import recurrent
from fmapper_adapters.jax.translation.layers.bags import bag
from fmapper_adapters.jax.translation.layers.convolutions import convolution, transposed_conv
from fmapper_adapters.jax.translation.layers.gradients import with_own_gradients
from fmapper_adapters.jax.translation.layers.noise import attention, drop_path, dropout
from fmapper_adapters.jax.translation.layers.products import linear_of_rows, product, with_linears
from fmapper_adapters.jax.translation.layers.rows import with_bounded_rows
from fmapper_adapters.jax.translation.layers.site import Site, keywords, stem_of
from fmapper_adapters.jax.translation.layers.slices import Slices, with_slices
from fmapper_adapters.jax.translation.layers.stacks import with_broadcasts, with_stacks
from fmapper_adapters.jax.translation.layers.weight_norms import layer_under_norm

# Layers that a model may only read -> their arrays.
_ARRAYS = {
    "torch.nn.modules.linear.Linear": frozenset({"weight", "bias"}),
    "torch.nn.modules.sparse.Embedding": frozenset({"weight"}),
}


def prepare_program(program: Program) -> tuple[Program, Slices]:
    """Returns a program as a file has it, and its arrays that are divided.

    Raises:
        ConversionError: It cannot be written; says what and where.
    """
    simple = with_own_gradients(with_bounded_rows(with_stacks(program)))
    parted, slices = with_slices(simple)
    return with_broadcasts(with_linears(parted)), slices


def layer_of_unit(structure: Structure, unit: Unit) -> Layer | None:
    """Returns the layer of NNX that computes a whole submodule."""
    calls = [step for step in unit.steps if isinstance(step, Call)]
    if len(calls) != len(unit.steps):  # what has submodules
        return layer_under_norm(structure, unit, layer_of_call)
    meaningful = [call for call in calls if not call.op.startswith("sym::getitem")]
    if len(meaningful) == 1 or (len(meaningful) == 2 and _counts(meaningful[0])):
        found = layer_of_call(structure, unit, meaningful[-1])
        if found is not None and [*unit.gives] in ([found.output], []):
            return found
    return (
        recurrent.layers(structure, unit, calls)
        or recurrent.cell(structure, unit, calls)
        or _rms_norm(structure, unit, calls)
        or linear_of_rows(structure, unit, calls)
        or drop_path(structure, unit, calls)
        or bag(structure, unit, calls)
        or layer_under_norm(structure, unit, layer_of_call)
    )


def _counts(call: Call) -> bool:
    """Returns whether a call counts the batches of a normalisation."""
    return call.op == "aten::add.Tensor" and not (call.result and call.result[0][1])


def layer_of_call(structure: Structure, unit: Unit, call: Call) -> Layer | None:
    """Returns the layer of NNX that computes an operation."""
    name = call.op.partition("::")[2].partition(".")[0]
    make = _LAYERS.get(name)
    return make(Site(structure, unit, call)) if make is not None else None


def layer_of_arrays(structure: Structure, kind: str, arrays: Mapping[str, str]) -> Layer | None:
    """Returns the layer of NNX for a linear layer or a table that the code only reads."""
    names = {*arrays} if {*arrays} <= _ARRAYS.get(kind, frozenset()) else set()
    if "weight" not in names or any(
        structure.inputs[one].kind != "parameter" for one in arrays.values()
    ):
        return None
    weight = arrays["weight"]
    rows, columns = structure.values[weight][1]
    options = keywords(structure.values[weight][0])
    held: dict[str, Any] = {weight: ("embedding", None)}
    if kind.endswith(".Embedding"):
        code = expr(f"nnx.Embed({rows}, {columns}, {options}rngs=rngs)")
        return Layer(code, (), "", held, "nnx.Embed")
    options = options if "bias" in names else f"use_bias=False, {options}"
    held = {weight: ("kernel", (1, 0))} | {arrays[one]: ("bias", None) for one in names & {"bias"}}
    code = expr(f"nnx.Linear({columns}, {rows}, {options}rngs=rngs)")
    return Layer(code, (), "", held, "nnx.Linear")


def _linear(site: Site) -> Layer | None:
    weight, bias = site.array(1), site.array(2)
    given = site.arg(0)
    if weight is None or not isinstance(given, Ref) or (bias is None and site.arg(2) is not None):
        return None
    shape = site.shape(weight[0])
    if len(shape) != 2 or site.dtype(given.name) != site.dtype(weight[0]):
        return None
    options = f"{'' if bias else 'use_bias=False, '}{keywords(site.dtype(weight[0]))}"
    code = f"nnx.Linear({shape[1]}, {shape[0]}, {options}rngs=rngs)"
    arrays: dict[str, Any] = {weight[0]: ("kernel", (1, 0))}
    if bias:
        arrays[bias[0]] = ("bias", None)
    return Layer(
        expr(code),
        (given.name,),
        site.call.name,
        arrays,
        "nnx.Linear",
        stem_of(weight[1], "linear"),
    )


def _embedding(site: Site) -> Layer | None:
    weight, given = site.array(0), site.arg(1)
    if weight is None or not isinstance(given, Ref):
        return None
    count, features = site.shape(weight[0])
    padding = site.arg(2, -1)  # a row that gets no gradient
    kind, options = "nnx.Embed", keywords(site.dtype(weight[0]))
    if padding >= 0:
        kind, options = "PaddedEmbed", f"padding_idx={padding}, {options}"
    code = expr(f"{kind}({count}, {features}, {options}rngs=rngs)")
    arrays: dict[str, Any] = {weight[0]: ("embedding", None)}
    return Layer(code, (given.name,), site.call.name, arrays, kind, stem_of(weight[1], "embed"))


def _rows(site: Site) -> Layer | None:
    """Finds `weight[ids]`, which looks rows up."""
    weight, indices = site.array(0), site.arg(1)
    if weight is None or not isinstance(indices, tuple) or len(indices) != 1:
        return None
    (given,) = indices
    if not isinstance(given, Ref) or len(site.shape(weight[0])) != 2:
        return None
    is_table = site.structure.inputs[weight[0]].kind == "parameter"
    if not is_table or site.dtype(given.name) not in ("int32", "int64"):
        return None
    count, features = site.shape(weight[0])
    dtype = site.dtype(weight[0])
    if not dtype.startswith(("float", "bfloat")):
        return None
    code = expr(f"nnx.Embed({count}, {features}, {keywords(dtype)}rngs=rngs)")
    arrays: dict[str, Any] = {weight[0]: ("embedding", None)}
    stem = stem_of(weight[1], "embed")
    return Layer(code, (given.name,), site.call.name, arrays, "nnx.Embed", stem)


def _layer_norm(site: Site) -> Layer | None:
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
    code = f"nnx.LayerNorm({sizes[0]}, {options}{keywords(dtype)}rngs=rngs)"
    arrays: dict[str, Any] = {}
    if weight:
        arrays[weight[0]] = ("scale", None)
    if bias:
        arrays[bias[0]] = ("bias", None)
    stem = stem_of((weight or bias or ("", ""))[1], "norm")
    return Layer(
        expr(code), (given.name,), site.result_of(0), arrays, "nnx.LayerNorm", stem,
        site.results() - {site.result_of(0)},
    )  # fmt: skip


def _batch_norm(site: Site) -> Layer | None:
    name = site.call.op.partition("::")[2].partition(".")[0]
    given = site.arg(0)
    weight, bias, mean, var = (site.array(at) for at in (1, 2, 3, 4))
    _refuse_average(site)
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
    if momentum is None or isinstance(momentum, Ref):
        return None
    options = f"momentum={float(f'{1 - momentum:.12g}')!r}, "
    options += "" if eps == 1e-5 else f"epsilon={eps!r}, "
    options += "" if weight else "use_scale=False, use_bias=False, "
    code = f"BatchNorm({features}, {options}{keywords(site.dtype(mean[0]))}rngs=rngs)"
    arrays: dict[str, Any] = {mean[0]: ("mean", None), var[0]: ("var", None)}
    if weight and bias:
        arrays |= {weight[0]: ("scale", None), bias[0]: ("bias", None)}
    output = site.result_of(0)
    return Layer(
        expr(code), (given.name,), output, arrays, "BatchNorm",
        stem_of(weight[1], "norm") if weight else "norm", site.results() - {output},
    )  # fmt: skip


def _refuse_average(site: Site) -> None:
    """Raises for statistics that weigh all batches alike.

    Raises:
        ConversionError: They do; names the module.
    """
    made = site.arg(3)
    for call in site.unit.calls():
        if Ref(call.name) == made and call.op.startswith("aten::zeros_like"):
            raise ConversionError(
                f"{site.unit.path or 'the model'}: its statistics are the average over all batches "
                "(BatchNorm with momentum=None), which is translated for evaluation alone. Give it "
                "a momentum, or use train=False (--eval)"
            )


def _group_norm(site: Site) -> Layer | None:
    given, groups = site.arg(0), site.arg(1)
    weight, bias = site.array(2), site.array(3)
    if not isinstance(given, Ref) or weight is None or bias is None:
        return None
    features = site.shape(weight[0])[0]
    eps = site.arg(4, 1e-5)
    code = (
        f"GroupNorm({features}, {groups}, epsilon={eps!r}, use_fast_variance=False, "
        f"{keywords(site.dtype(weight[0]))}rngs=rngs)"
    )
    arrays: dict[str, Any] = {weight[0]: ("scale", None), bias[0]: ("bias", None)}
    return Layer(
        expr(code), (given.name,), site.call.name, arrays, "GroupNorm", stem_of(weight[1], "norm")
    )


_LAYERS = {
    "scaled_dot_product_attention_with_dropout": attention,
    "linear": _linear,
    "matmul": product,
    "mm": product,
    "embedding": _embedding,
    "index": _rows,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "convolution": convolution,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "conv_transpose1d": transposed_conv,
    "conv_transpose2d": transposed_conv,
    "conv_transpose3d": transposed_conv,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "native_dropout": dropout,
    "dropout": dropout,
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
            options = f"epsilon={eps!r}, use_fast_variance=False, {keywords(dtype)}"
            code = f"nnx.RMSNorm({shape[0]}, {options}rngs=rngs)"
            return Layer(
                expr(code), (source.name,), unit.gives[0], {weight.name: ("scale", None)},
                "nnx.RMSNorm", "norm",
            )  # fmt: skip
    return None
