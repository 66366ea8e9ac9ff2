"""Layers as functions of arrays, for those that are described in the terms of NNX."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from fmapper.translation import Layer, expr, text

# The code of a layer is `LAYER(function, what makes its arrays, **what the function is told)`.
LAYER = "LAYER"
_FUNCTIONS = {
    "nnx.Linear": "linear",
    "nnx.Embed": "embedding",
    "PaddedEmbed": "padded_embedding",
    "nnx.LayerNorm": "layer_norm",
    "nnx.Dropout": "dropout",
    "BatchNorm": "batch_norm",
    "GroupNorm": "group_norm",
    "Conv": "conv",
    "ConvTranspose": "conv_transpose",
    "GroupedConvTranspose": "conv_transpose",
    "DotProductAttention": "attention_with_dropout",
    "Recurrent": "recurrent",
    "LSTMCell": "lstm_cell",
    "GRUCell": "gru_cell",
    "RNNCell": "rnn_cell",
}
_WORDS = {
    "epsilon": "eps",
    "use_scale": "use_weight",
    "kernel_dilation": "dilation",
    "strides": "stride",
    "feature_group_count": "groups",
    "param_dtype": "dtype",
}
_TO_MAKE = ("use_weight", "use_bias", "dtype", "num_layers", "bidirectional")
_DROPPED = ("use_fast_variance", "transpose_kernel", "dtype", "rngs", "momentum")
_ARRAYS = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}


def restate(layer: Layer | None) -> Layer | None:
    """Returns a layer as a function of its inputs and arrays; None for one that has none."""
    if layer is None or layer.kind not in _FUNCTIONS:
        return None
    assert isinstance(layer.made, ast.Call)
    keywords = {
        _WORDS.get(str(one.arg), str(one.arg)): one.value
        for one in layer.made.keywords
        if one.arg not in _DROPPED
    }
    args, name = list(layer.made.args), _FUNCTIONS[layer.kind]
    making = {key: keywords.pop(key) for key in _TO_MAKE if key in keywords}
    maker = f"init_{name}"
    if name == "padded_embedding":
        maker = "init_embedding"
    if name in ("layer_norm", "group_norm"):
        maker = "init_norm"
    if name == "group_norm":
        keywords = {"groups": args.pop(1), **keywords}
    if name in ("dropout", "attention_with_dropout"):
        keywords = {"rate": args.pop(0), **keywords}
        made = expr("None")
    if name == "conv_transpose":
        sizes = ast.literal_eval(args[2])
        _pad_the_output(keywords, sizes)
    if name.startswith("conv") and "groups" in keywords:
        making["groups"] = keywords["groups"]
    if name == "recurrent":
        cell = _FUNCTIONS[ast.unparse(args[0])]
        keywords = {"cell": expr(cell), **_without_dropout(keywords)}
        keywords |= {"bidirectional": making["bidirectional"]} if "bidirectional" in making else {}
        args[0] = ast.Constant({"lstm_cell": 4, "gru_cell": 3}.get(cell, 1))
    if name.endswith("_cell"):
        maker = "init_cell"
        args.insert(0, ast.Constant({"lstm_cell": 4, "gru_cell": 3}.get(name, 1)))
    if name == "conv" and text(keywords["padding"]) == "0":
        del keywords["padding"]
    if layer.arrays:
        drawn = [] if maker in ("init_norm", "init_batch_norm") else [expr("keys()")]
        options = [ast.keyword(key, value) for key, value in making.items()]
        made = ast.Call(expr(maker), [*drawn, *args], options)
    told = [ast.keyword(key, value) for key, value in keywords.items()]
    arrays = {
        value: _place(name, layer, attr, order) for value, (attr, order) in layer.arrays.items()
    }
    code = ast.Call(expr(LAYER), [expr(name), made], told)
    return replace(layer, made=code, kind=name, arrays=arrays, inner={})


def _without_dropout(keywords: dict[str, ast.expr]) -> dict[str, ast.expr]:
    return {("rate" if key == "dropout" else key): value for key, value in keywords.items()}


def _place(
    name: str, layer: Layer, attr: str, order: tuple[int, ...] | None
) -> tuple[str, tuple[int, ...] | None]:
    """Returns the path of an array, and the order of its dimensions: that of torch."""
    owner, _, last = attr.rpartition(".")
    own = _ARRAYS.get(last, last)
    turned = name == "linear" and last == "kernel" and order is None
    return f"{owner}.{own}" if owner else own, (1, 0) if turned else None


def _pad_the_output(keywords: dict[str, ast.expr], sizes: tuple[int, ...]) -> None:
    """Restates the padding of the input of a transposed convolution as that of its output."""
    dilation = ast.literal_eval(keywords["dilation"]) if "dilation" in keywords else 1
    each = dilation if isinstance(dilation, tuple) else (dilation,) * len(sizes)
    reach = [d * (k - 1) for d, k in zip(each, sizes, strict=True)]
    pads = ast.literal_eval(keywords.pop("padding"))
    pads = [(pads, pads)] * len(sizes) if isinstance(pads, int) else pads
    padding = tuple(r - low for r, (low, _) in zip(reach, pads, strict=True))
    extra = tuple(high - low for low, high in pads)
    for key, value in (("padding", padding), ("output_padding", extra)):
        if any(value):
            keywords[key] = expr(repr(_same(value)))


def _same(values: tuple[int, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else values
