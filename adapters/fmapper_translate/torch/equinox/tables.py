"""The table of layers: Equinox's classes, and what a file for PyTorch has in their place."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import equinox as eqx

from fmapper_translate.torch.tables import LAYERS, Layer
from fmapper_translate.walk.errors import NotTranscribed

# Classes -> the file's, and Equinox's arguments -> those of PyTorch; empty for one that it lacks.
KEYWORDS: dict[Any, tuple[str, Mapping[str, str]]] = {
    eqx.nn.Linear: ("nn.Linear", {"use_bias": "bias"}),
    eqx.nn.Embedding: ("nn.Embedding", {"embedding_size": "embedding_dim"}),
    eqx.nn.LayerNorm: ("nn.LayerNorm", {"shape": "normalized_shape", "use_bias": "bias",
                                        "use_weight": "", "elementwise_affine": ""}),
    eqx.nn.GroupNorm: ("GroupNorm", {"groups": "num_groups", "channels": "num_channels",
                                     "channelwise_affine": "affine"}),
    eqx.nn.Lambda: ("Function", {"fn": "function"}),
    eqx.nn.Identity: ("nn.Identity", {}),
}  # fmt: skip
_OWN = (
    "Conv", "ConvTranspose", "GRUCell", "LSTMCell", "RMSNorm", "PReLU", "WeightNorm", "Shared",
    "RotaryPositionalEmbedding", "Dropout", "MLP", "MultiheadAttention", "Sequential",
)  # fmt: skip
_DIMENSIONS = range(1, 4)
KEYWORDS |= {getattr(eqx.nn, name): (name, {}) for name in _OWN}
_POOLS = [getattr(eqx.nn, f"{kind}Pool{n}d") for kind in ("Max", "Avg") for n in _DIMENSIONS]
KEYWORDS |= {cls: (f"nn.{cls.__name__}", {"use_ceil": ""}) for cls in _POOLS}
# Classes for a number of dimensions -> that number, which the file's class is given first.
FIRST: dict[Any, Any] = {
    getattr(eqx.nn, f"{kind}{n}d"): n for kind in ("Conv", "ConvTranspose") for n in _DIMENSIONS
}
KEYWORDS |= {cls: (cls.__name__[:-2], {}) for cls in FIRST}
LAYERS |= {cls: Layer(name) for cls, (name, _) in KEYWORDS.items()}
# Layers that take the last dimension, whatever is before it.
OF_LAST = (
    eqx.nn.Linear, eqx.nn.Dropout, eqx.nn.Embedding, eqx.nn.MLP, eqx.nn.Identity, eqx.nn.PReLU,
    eqx.nn.RotaryPositionalEmbedding,
)  # fmt: skip


def keyword_of(kind: Any, keyword: ast.keyword) -> ast.keyword:
    """Returns an argument of a layer under PyTorch's name.

    Raises:
        NotTranscribed: PyTorch's layer does not have it.
    """
    _, names = KEYWORDS[kind]
    name = names.get(str(keyword.arg), keyword.arg)
    if not name:
        raise NotTranscribed(f"{kind.__name__} with {ast.unparse(keyword)} has no counterpart")
    return ast.keyword(name, keyword.value)


def defaults_of(kind: Any, node: ast.Call) -> list[ast.keyword]:
    """Returns what Equinox has by default, and PyTorch otherwise."""
    is_given = len(node.args) > 1 or any(key.arg == "stride" for key in node.keywords)
    if kind in _POOLS and len(node.args) > 3:
        raise NotTranscribed(f"{kind.__name__} with `use_ceil` has no counterpart")
    has_stride = kind in _POOLS and not is_given
    return [ast.keyword("stride", ast.Constant(1))] if has_stride else []


def first_of(kind: Any) -> list[ast.expr]:
    """Returns what the file's class for any number of dimensions is given first."""
    return [ast.Constant(FIRST[kind])] if kind in FIRST else []


def acts_on_last(module: Any) -> bool:
    """Returns whether a layer, mapped over the first dimension, is the layer itself."""
    is_norm = isinstance(module, eqx.nn.LayerNorm | eqx.nn.RMSNorm)
    is_row = is_norm and len(module.shape) == 1
    is_vector = not isinstance(module, eqx.nn.MLP) or module.in_size != "scalar" != module.out_size
    return is_row or (isinstance(module, OF_LAST) and is_vector)
