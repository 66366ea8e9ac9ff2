"""Layers of Equinox, for those that are described in the terms of NNX."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fmapper.translation import Layer, expr, text

_KINDS = {
    "nnx.Linear": "Linear",
    "nnx.Embed": "Embedding",
    "PaddedEmbed": "PaddedEmbedding",
    "nnx.LayerNorm": "LayerNorm",
    "nnx.Dropout": "Dropout",
}
_KEYWORDS = {
    "epsilon": "eps",
    "use_scale": "use_weight",
    "kernel_dilation": "dilation",
    "strides": "stride",
    "feature_group_count": "groups",
}
_DRAWN = ("Linear", "Embedding", "PaddedEmbedding", "Conv", "ConvTranspose", "Recurrent", "Cell",
          )  # fmt: skip
# What a layer of Equinox does without being told.
_GONE = ("use_fast_variance", "transpose_kernel", "param_dtype", "rngs", "momentum")


def restate(layer: Layer | None) -> Layer | None:
    """Returns a layer in the terms of Equinox; None where it has no such layer."""
    if layer is None or layer.kind == "SpectralNorm":
        return None
    if layer.kind == "WeightNorm":
        return _weight_norm(layer)
    assert isinstance(layer.made, ast.Call)
    given = {str(one.arg): one.value for one in layer.made.keywords}
    kind, args = _KINDS.get(layer.kind, layer.kind), list(layer.made.args)
    keywords = {_KEYWORDS.get(key, key): value for key, value in given.items() if key not in _GONE}
    if kind == "GroupedConvTranspose":
        return None  # its weights are in another order for each group
    if kind in ("Conv", "ConvTranspose"):
        sizes = ast.literal_eval(args[2])
        args[2] = expr(repr(_same(sizes)))
        if kind == "Conv" and text(keywords["padding"]) == "0":
            del keywords["padding"]
        if kind == "ConvTranspose" and not _is_transposed_as_torch(keywords, sizes):
            return None
        kind = f"{kind}{len(sizes)}d"
    if text(keywords.get("eps", expr("None"))) == "1e-05":
        del keywords["eps"]
    if kind == "GroupNorm":
        args = [args[1], args[0]]
    if kind == "Dropout" and "broadcast_dims" in keywords:
        kind = "DropPath"
    if kind.startswith(_DRAWN) or kind.endswith("Cell"):
        keywords["key"] = expr("keys()")
    made = ast.Call(expr(kind), args, [ast.keyword(key, value) for key, value in keywords.items()])
    held = {
        value: (_place(attr), _order(kind, order) if attr == "kernel" else None)
        for value, (attr, order) in layer.arrays.items()
    }
    inner = {path: _KINDS.get(one, one) for path, one in layer.inner.items()}
    return replace(layer, made=made, kind=kind, arrays=held, inner=inner)


def _weight_norm(layer: Layer) -> Layer | None:
    """Returns a layer that `eqx.nn.WeightNorm` normalises."""
    assert isinstance(layer.made, ast.Call)
    held = {
        value: (attr.removeprefix("layer."), order)
        for value, (attr, order) in layer.arrays.items()
        if attr != "scale"
    }
    made, inner = layer.made.args[0], layer.inner["layer"]
    if inner == "nnx.Embed":
        return None
    found = restate(replace(layer, made=made, kind=inner, arrays=held, inner={}))
    scale, order = next((v, o) for v, (attr, o) in layer.arrays.items() if attr == "scale")
    given = [ast.literal_eval(one.value) for one in layer.made.keywords]
    if found is None or order is None:
        return None
    axis = order[given[0] if given else -1]  # in the source
    own = _order(found.kind, order) if found.kind != "Linear" else None
    if own is not None and axis > 1:
        return None  # along which they are turned around
    arrays: dict[str, Any] = {v: (f"layer.{attr}", o) for v, (attr, o) in found.arrays.items()}
    arrays[scale] = ("g", own)
    axis = axis if own is None else own.index(axis)
    code = expr("eqx.nn.WeightNorm({0})" if not axis else f"eqx.nn.WeightNorm({{0}}, axis={axis})",
                found.made)  # fmt: skip
    kind = "eqx.nn.WeightNorm"
    return replace(found, made=code, kind=kind, arrays=arrays, inner={"layer": found.kind})


def _place(attr: str) -> str:
    """Returns what Equinox calls an array of NNX."""
    owner, _, last = attr.rpartition(".")
    own = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(last, last)
    own = {"mean": "running_mean", "var": "running_var"}.get(own, own)
    return f"{owner}.{own}" if owner else own


def _order(kind: str, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Returns the order of an array's dimensions: that of torch, but where it is transposed."""
    if kind == "Linear":
        return None if order else (1, 0)
    if order is None or not kind.startswith("ConvTranspose"):
        return None
    return (1, 0, *(~i for i in range(2, len(order))))


def _is_transposed_as_torch(keywords: dict[str, ast.expr], sizes: tuple[int, ...]) -> bool:
    """Restates the padding of the input as torch has it, of the output; False where it cannot."""
    dilation = ast.literal_eval(keywords["dilation"]) if "dilation" in keywords else 1
    each = dilation if isinstance(dilation, tuple) else (dilation,) * len(sizes)
    reach = [d * (k - 1) for d, k in zip(each, sizes, strict=True)]
    pads = ast.literal_eval(keywords.pop("padding"))
    pads = [(pads, pads)] * len(sizes) if isinstance(pads, int) else pads
    padding = tuple(r - low for r, (low, _) in zip(reach, pads, strict=True))
    extra = tuple(high - low for low, high in pads)
    if any(padding):
        keywords["padding"] = expr(repr(_same(padding)))
    if any(extra):
        keywords["output_padding"] = expr(repr(_same(extra)))
    return all(one >= 0 for one in padding)


def _same(values: tuple[int, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def kind_of(made: ast.expr, classes: Mapping[str, str]) -> str:
    """Returns the annotation of a field for the code that makes it."""
    if isinstance(made, ast.IfExp):
        sides = (made.body, made.orelse)
        several = ("None" if text(one) == "None" else kind_of(one, classes) for one in sides)
        return " | ".join(dict.fromkeys(several))
    if isinstance(made, ast.List | ast.ListComp):
        items = made.elts if isinstance(made, ast.List) else [made.elt]
        kinds = {kind_of(one, classes) for one in items}
        return f"list[{kinds.pop()}]" if len(kinds) == 1 else "list"
    if isinstance(made, ast.Call):
        if isinstance(made.func, ast.Call) and isinstance(made.func.args[0], ast.Lambda):
            return kind_of(made.func.args[0].body, classes)  # blocks that are one module
        name = text(made.func)
        return classes.get(name, "jax.Array")
    is_function = isinstance(made, ast.Lambda) or text(made).startswith("jax.nn.")
    return "Callable" if is_function else "jax.Array"
