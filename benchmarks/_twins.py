"""Models of `_networks.py`, written again in Flax as one writes Flax: images are (n, h, w, c)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import fmapper

# Names are those of the torch models, so that weights find their places.


def _conv(inside: int, out: int, kernel: int, stride: int = 1) -> nnx.Conv:
    pad = kernel // 2
    return nnx.Conv(
        inside,
        out,
        (kernel, kernel),
        strides=stride,
        padding=((pad, pad), (pad, pad)),
        use_bias=False,
        rngs=nnx.Rngs(0),
    )


def _norm(width: int) -> nnx.BatchNorm:
    return nnx.BatchNorm(width, use_running_average=True, epsilon=1e-5, rngs=nnx.Rngs(0))


def _linear(inside: int, out: int) -> nnx.Linear:
    return nnx.Linear(inside, out, rngs=nnx.Rngs(0))


def _layer_norm(width: int) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, rngs=nnx.Rngs(0))


class MLP(nnx.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        pairs = itertools.pairwise(widths)
        self.layers = nnx.List([_linear(a, b) for a, b in pairs])

    def __call__(self, x: Any) -> Any:
        """Vectors (n, width)."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class Bottleneck(nnx.Module):
    """Three convolutions around which the input is added."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        self.conv1, self.bn1 = _conv(inside, width, 1), _norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), _norm(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), _norm(4 * width)
        self.has_down = stride != 1 or inside != 4 * width
        if self.has_down:
            self.down, self.down_bn = _conv(inside, 4 * width, 1, stride), _norm(4 * width)

    def __call__(self, x: Any) -> Any:
        """Images (n, h, w, inside)."""
        y = nnx.relu(self.bn1(self.conv1(x)))
        y = nnx.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return nnx.relu(y + (self.down_bn(self.down(x)) if self.has_down else x))


class ResNet(nnx.Module):
    """ResNet with bottlenecks."""

    def __init__(self, depths: tuple[int, ...], classes: int = 1000) -> None:
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), _norm(64)
        blocks, inside = [], 64
        for i, depth in enumerate(depths):
            for j in range(depth):
                blocks.append(Bottleneck(inside, 64 << i, 2 if i and not j else 1))
                inside = 4 * (64 << i)
        self.blocks = nnx.List(blocks)
        self.head = _linear(inside, classes)

    def __call__(self, x: Any) -> Any:
        """Images (n, h, w, 3) to scores (n, classes)."""
        y = nnx.relu(self.bn1(self.conv1(x)))
        y = nnx.max_pool(y, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.blocks:
            y = block(y)
        return self.head(y.mean((1, 2)))


class Attention(nnx.Module):
    """Attention, by JAX's own function."""

    def __init__(self, size: Any, *, causal: bool) -> None:
        self.heads, self.causal = size.heads, causal
        for name in ("query", "key", "value", "out"):
            setattr(self, name, _linear(size.width, size.width))

    def __call__(self, x: Any, mask: Any) -> Any:
        """Texts (n, length, width)."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (layer(x).reshape(shape) for layer in (self.query, self.key, self.value))
        y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=self.causal)
        return self.out(y.reshape(x.shape))


class TextBlock(nnx.Module):
    """Attention and two layers, normalised after or before."""

    def __init__(self, size: Any, *, causal: bool) -> None:
        self.before = causal
        self.attention = Attention(size, causal=causal)
        self.norm1, self.norm2 = _layer_norm(size.width), _layer_norm(size.width)
        self.wide = _linear(size.width, 4 * size.width)
        self.narrow = _linear(4 * size.width, size.width)

    def __call__(self, x: Any, mask: Any) -> Any:
        """Texts (n, length, width)."""
        if self.before:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.narrow(nnx.gelu(self.wide(self.norm2(x))))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.narrow(nnx.gelu(self.wide(x), approximate=False)))


class Encoder(nnx.Module):
    """An encoder as BERT."""

    def __init__(self, size: Any) -> None:
        self.tokens = nnx.Embed(size.vocabulary, size.width, rngs=nnx.Rngs(0))
        self.positions = nnx.Embed(size.length, size.width, rngs=nnx.Rngs(0))
        self.norm = _layer_norm(size.width)
        self.blocks = nnx.List([TextBlock(size, causal=False) for _ in range(size.layers)])

    def __call__(self, ids: Any, mask: Any) -> Any:
        """Ids (n, length) and a mask of that shape."""
        x = self.norm(self.tokens(ids) + self.positions(jnp.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x, mask[:, None, None].astype(bool))
        return x


class Decoder(nnx.Module):
    """A decoder as GPT-2, its head tied to its embedding."""

    def __init__(self, size: Any) -> None:
        self.tokens = nnx.Embed(size.vocabulary, size.width, rngs=nnx.Rngs(0))
        self.positions = nnx.Embed(size.length, size.width, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([TextBlock(size, causal=True) for _ in range(size.layers)])
        self.norm = _layer_norm(size.width)

    def __call__(self, ids: Any) -> Any:
        """Ids (n, length) to scores."""
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, None)
        return self.tokens.attend(self.norm(x))


# --- weights, and how a twin is called -----------------------------------------------------------

_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}


def load(twin: nnx.Module, state: dict[str, Any]) -> None:
    """Put the weights of a torch model into its twin."""
    for path, variable in nnx.to_flat_state(nnx.state(twin)):
        *parents, last = map(str, path)
        array = fmapper.to_jax(state[".".join((*parents, _NAMES.get(last, last)))])
        if last == "kernel":
            array = array.T if array.ndim == 2 else jnp.transpose(array, (2, 3, 1, 0))
        assert array.shape == variable.get_value().shape, path
        variable.set_value(array)
        nnx.update(twin, nnx.from_flat_state([(path, variable)]))


def jitted(twin: nnx.Module, *inputs: Any) -> Callable[[], Any]:
    """The call that costs least: the state is an argument of `jax.jit`, the rest a constant."""
    graph, state = nnx.split(twin)
    run = jax.jit(lambda state, *args: nnx.merge(graph, state)(*args))
    return lambda: jax.block_until_ready(run(state, *inputs))
