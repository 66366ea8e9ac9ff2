"""Layers of NNX in the place of operations that compute the same with arrays of a module's own."""

from __future__ import annotations

from typing import Any

from fmapper import ConversionError
from fmapper.programs import Program
from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr
from fmapper_adapters.jax.translation.layers import recurrent
from fmapper_adapters.jax.translation.layers.convolutions import convolution, transposed_conv
from fmapper_adapters.jax.translation.layers.gradients import with_own_gradients
from fmapper_adapters.jax.translation.layers.noise import attention, drop_path, dropout
from fmapper_adapters.jax.translation.layers.rows import with_bounded_rows
from fmapper_adapters.jax.translation.layers.site import Site, keywords, stem_of
from fmapper_adapters.jax.translation.layers.slices import Slices, with_slices
from fmapper_adapters.jax.translation.layers.stacks import with_broadcasts, with_stacks
from fmapper_adapters.jax.translation.layers.weight_norms import layer_under_norm


def prepare_program(program: Program) -> tuple[Program, Slices]:
    """Returns a program as a file has it, and its arrays that are divided.

    Raises:
        ConversionError: It cannot be written; says what and where.
    """
    simple = with_own_gradients(with_bounded_rows(with_stacks(program)))
    parted, slices = with_slices(simple)
    return with_broadcasts(parted), slices


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
        or drop_path(structure, unit, calls)
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
    "embedding": _embedding,
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
