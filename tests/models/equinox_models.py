"""Models of Equinox as its users write them, small: name -> a function that builds one.

Each gives the model as `fmapper.convert` takes it, and what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {}


def model(function: Callable[[], Case]) -> Callable[[], Case]:
    MODELS[f"equinox/{function.__name__}"] = function
    return function


def normal(*shape: int, seed: int = 7) -> Any:
    return jr.normal(jr.key(seed), shape)


def integers(*shape: int, below: int, seed: int = 8) -> Any:
    return jr.randint(jr.key(seed), shape, 0, below)


def made(cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module, made in one compiled program."""
    return eqx.filter_jit(lambda key: cls(*args, **kwargs, key=key))(jr.PRNGKey(0))


@model
def mlp() -> Case:
    return made(eqx.nn.MLP, 4, 3, 16, 2), (normal(4),), {}


@model
def mlp_batched() -> Case:
    return jax.vmap(made(eqx.nn.MLP, 4, "scalar", 8, 1, activation=jnp.tanh)), (normal(5, 4),), {}


@model
def pair_with_vmap() -> Case:
    def forward(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    return (
        (forward, made(eqx.nn.MLP, 4, 2, 8, 2, final_activation=jax.nn.sigmoid)),
        (
            normal(5, 4),
            normal(5, 2, seed=2),
        ),
        {},
    )


@model
def cnn() -> Case:
    """The MNIST example of Equinox."""

    class CNN(eqx.Module):
        layers: list[Any]

        def __init__(self, key: Any):
            k1, k2, k3, k4 = jr.split(key, 4)
            self.layers = [
                eqx.nn.Conv2d(1, 3, kernel_size=4, key=k1),
                eqx.nn.MaxPool2d(kernel_size=2),
                jax.nn.relu,
                jnp.ravel,
                eqx.nn.Linear(768, 32, key=k2),
                jax.nn.sigmoid,
                eqx.nn.Linear(32, 16, key=k3),
                jax.nn.relu,
                eqx.nn.Linear(16, 10, key=k4),
                jax.nn.log_softmax,
            ]

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return made(CNN), (normal(1, 20, 20),), {}


@model
def convolutions() -> Case:
    class Convolutions(eqx.Module):
        a: eqx.nn.Conv1d
        b: eqx.nn.Conv2d
        c: eqx.nn.Conv3d
        d: eqx.nn.ConvTranspose1d
        e: eqx.nn.ConvTranspose2d
        f: eqx.nn.Conv2d
        g: eqx.nn.ConvTranspose3d

        def __init__(self, key: Any):
            keys = jr.split(key, 7)
            self.a = eqx.nn.Conv1d(3, 4, 3, padding="SAME", key=keys[0])
            self.b = eqx.nn.Conv2d(2, 4, (3, 2), stride=2, padding=1, groups=2, key=keys[1])
            self.c = eqx.nn.Conv3d(2, 3, 2, dilation=2, use_bias=False, key=keys[2])
            self.d = eqx.nn.ConvTranspose1d(3, 2, 4, stride=2, padding=1, key=keys[3])
            self.e = eqx.nn.ConvTranspose2d(2, 3, 3, 2, output_padding=1, padding=1, key=keys[4])
            self.f = eqx.nn.Conv2d(2, 2, 3, padding="SAME", padding_mode="REFLECT", key=keys[5])
            self.g = eqx.nn.ConvTranspose3d(2, 2, 2, stride=2, key=keys[6])

        def __call__(self, x: Any, y: Any, z: Any) -> Any:
            return self.a(x), self.b(y), self.c(z), self.d(x), self.e(y), self.f(y), self.g(z)

    return made(Convolutions), (normal(3, 9), normal(2, 8, 7), normal(2, 4, 5, 4)), {}


@model
def pools() -> Case:
    class Pools(eqx.Module):
        layers: list[Any]
        weight: Any

        def __init__(self, key: Any):
            self.layers = [
                eqx.nn.AvgPool1d(2, 2), eqx.nn.MaxPool1d(3, 2, padding=1),
                eqx.nn.AdaptiveAvgPool1d(3), eqx.nn.AdaptiveMaxPool1d(4),
            ]  # fmt: skip
            self.weight = jr.normal(key, (2, 1, 1))

        def __call__(self, x: Any) -> Any:
            x = x * self.weight
            flat = [layer(x[:, 0]) for layer in self.layers]
            two = eqx.nn.AvgPool2d(3, 2, padding=1)(x), eqx.nn.MaxPool2d(2, 2, use_ceil=True)(x)
            adaptive = eqx.nn.AdaptiveAvgPool2d((2, 3))(x), eqx.nn.AdaptiveMaxPool2d(3)(x)
            cube = jnp.stack([x, 2 * x, -x], 1)
            three = (
                eqx.nn.AvgPool3d(2)(cube),
                eqx.nn.MaxPool3d(2)(cube),
                eqx.nn.AdaptiveAvgPool3d(2)(cube),
            )
            return flat, two, adaptive, three, eqx.nn.AdaptiveMaxPool3d((1, 2, 2))(cube)

    return made(Pools), (normal(2, 7, 8),), {}


@model
def norms() -> Case:
    class Norms(eqx.Module):
        layer: eqx.nn.LayerNorm
        rms: eqx.nn.RMSNorm
        group: eqx.nn.GroupNorm
        plain: eqx.nn.LayerNorm
        prelu: eqx.nn.PReLU

        def __init__(self, key: Any):
            self.layer = eqx.nn.LayerNorm((6,))
            self.rms = eqx.nn.RMSNorm(6)
            self.group = eqx.nn.GroupNorm(2, 4)
            self.plain = eqx.nn.LayerNorm((4, 6), use_weight=False, use_bias=False)
            self.prelu = eqx.nn.PReLU(0.2)

        def __call__(self, x: Any) -> Any:
            return (
                jax.vmap(self.layer)(x),
                jax.vmap(self.rms)(x),
                self.group(x),
                self.plain(x),
                self.prelu(x),
            )

    return made(Norms), (normal(4, 6),), {}


@model
def batch_norm_state() -> Case:
    """Stateful layers: the state goes in and comes out."""

    class Model(eqx.Module):
        norm1: eqx.nn.BatchNorm
        spectral_linear: eqx.nn.SpectralNorm
        norm2: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self, key: Any):
            k1, k2, k3 = jr.split(key, 3)
            self.norm1 = eqx.nn.BatchNorm(input_size=3, axis_name="batch", mode="batch")
            self.spectral_linear = eqx.nn.SpectralNorm(
                layer=eqx.nn.Linear(3, 8, key=k1), weight_name="weight", key=k2
            )
            self.norm2 = eqx.nn.BatchNorm(input_size=8, axis_name="batch", mode="ema")
            self.linear = eqx.nn.Linear(8, 2, key=k3)

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm1(x, state)
            x, state = self.spectral_linear(x, state)
            x, state = self.norm2(jax.nn.relu(x), state)
            return self.linear(x), state

    module, state = eqx.nn.make_with_state(Model)(jr.PRNGKey(0))

    def batched(module: Any, x: Any, state: Any) -> Any:
        return jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    return (batched, module), (normal(6, 3), state), {}


@model
def weight_norm_and_lambda() -> Case:
    class Model(eqx.Module):
        seq: eqx.nn.Sequential

        def __init__(self, key: Any):
            k1, k2 = jr.split(key)
            self.seq = eqx.nn.Sequential(
                [
                    eqx.nn.WeightNorm(eqx.nn.Linear(5, 8, key=k1)),
                    eqx.nn.Lambda(jax.nn.silu),
                    eqx.nn.Identity(),
                    eqx.nn.WeightNorm(eqx.nn.Linear(8, 2, key=k2), axis=None),
                ]
            )

        def __call__(self, x: Any) -> Any:
            return self.seq(x)

    return made(Model), (normal(5),), {}


class Dropped(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key: Any):
        k1, k2 = jr.split(key)
        self.linear = eqx.nn.Linear(5, 16, key=k1)
        self.dropout = eqx.nn.Dropout(0.4)
        self.out = eqx.nn.Linear(16, 2, key=k2)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return self.out(self.dropout(jax.nn.gelu(self.linear(x)), key=key))


@model
def dropout_train() -> Case:
    return made(Dropped), (normal(5),), {"key": jr.PRNGKey(4)}


@model
def dropout_inference() -> Case:
    return eqx.nn.inference_mode(made(Dropped)), (normal(5),), {}


@model
def dropout_batched_keys() -> Case:
    def forward(module: Any, x: Any, key: Any) -> Any:
        return jax.vmap(lambda x, k: module(x, key=k))(x, jr.split(key, x.shape[0]))

    return (forward, made(Dropped)), (normal(6, 5), jr.key(2)), {}


class AttentionBlock(eqx.Module):
    layer_norm1: eqx.nn.LayerNorm
    layer_norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear
    dropout1: eqx.nn.Dropout
    dropout2: eqx.nn.Dropout

    def __init__(self, dim: int, hidden: int, heads: int, rate: float, key: Any):
        k1, k2, k3 = jr.split(key, 3)
        self.layer_norm1 = eqx.nn.LayerNorm(dim)
        self.layer_norm2 = eqx.nn.LayerNorm(dim)
        self.attention = eqx.nn.MultiheadAttention(heads, dim, key=k1)
        self.linear1 = eqx.nn.Linear(dim, hidden, key=k2)
        self.linear2 = eqx.nn.Linear(hidden, dim, key=k3)
        self.dropout1 = eqx.nn.Dropout(rate)
        self.dropout2 = eqx.nn.Dropout(rate)

    def __call__(self, x: Any, enable_dropout: bool, key: Any) -> Any:
        y = jax.vmap(self.layer_norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.linear1)(jax.vmap(self.layer_norm2)(x))
        key1, key2 = jr.split(key)
        y = self.dropout1(jax.nn.gelu(y), inference=not enable_dropout, key=key1)
        y = self.dropout2(jax.vmap(self.linear2)(y), inference=not enable_dropout, key=key2)
        return x + y


@model
def vision_transformer() -> Case:
    """The ViT example of Equinox."""

    class ViT(eqx.Module):
        patch: eqx.nn.Linear
        positional_embedding: Any
        cls_token: Any
        attention_blocks: list[AttentionBlock]
        dropout: eqx.nn.Dropout
        mlp: eqx.nn.Sequential

        def __init__(self, key: Any):
            keys = jr.split(key, 6)
            self.patch = eqx.nn.Linear(48, 16, key=keys[0])
            self.positional_embedding = jr.normal(keys[1], (10, 16))
            self.cls_token = jr.normal(keys[2], (1, 16))
            self.attention_blocks = [AttentionBlock(16, 32, 2, 0.1, k) for k in keys[3:5]]
            self.dropout = eqx.nn.Dropout(0.1)
            self.mlp = eqx.nn.Sequential([eqx.nn.LayerNorm(16), eqx.nn.Linear(16, 5, key=keys[5])])

        def __call__(self, x: Any, enable_dropout: bool, key: Any) -> Any:
            c, h, w = x.shape
            x = x.reshape(c, h // 4, 4, w // 4, 4).transpose(1, 3, 0, 2, 4).reshape(-1, c * 16)
            x = jnp.concatenate((self.cls_token, jax.vmap(self.patch)(x)), axis=0)
            x += self.positional_embedding[: x.shape[0]]
            dropout_key, *attention_keys = jr.split(key, 1 + len(self.attention_blocks))
            x = self.dropout(x, inference=not enable_dropout, key=dropout_key)
            for block, k in zip(self.attention_blocks, attention_keys, strict=True):
                x = block(x, enable_dropout, key=k)
            return self.mlp(x[0])

    return made(ViT), (normal(3, 12, 12), True, jr.PRNGKey(1)), {}


@model
def bert() -> Case:
    """The BERT example of Equinox."""

    class Embedder(eqx.Module):
        token: eqx.nn.Embedding
        segment: eqx.nn.Embedding
        position: eqx.nn.Embedding
        layernorm: eqx.nn.LayerNorm

        def __init__(self, key: Any):
            k1, k2, k3 = jr.split(key, 3)
            self.token = eqx.nn.Embedding(30, 16, key=k1)
            self.segment = eqx.nn.Embedding(2, 16, key=k2)
            self.position = eqx.nn.Embedding(12, 16, key=k3)
            self.layernorm = eqx.nn.LayerNorm(16)

        def __call__(self, ids: Any, segments: Any, positions: Any) -> Any:
            x = jax.vmap(self.token)(ids) + jax.vmap(self.segment)(segments)
            return jax.vmap(self.layernorm)(x + jax.vmap(self.position)(positions))

    class Bert(eqx.Module):
        embedder: Embedder
        layers: list[AttentionBlock]
        pooler: eqx.nn.Linear

        def __init__(self, key: Any):
            k1, k2, k3 = jr.split(key, 3)
            self.embedder = Embedder(k1)
            self.layers = [AttentionBlock(16, 24, 2, 0.0, k) for k in jr.split(k2, 2)]
            self.pooler = eqx.nn.Linear(16, 16, key=k3)

        def __call__(self, inputs: dict[str, Any], key: Any) -> Any:
            x = self.embedder(inputs["token_ids"], inputs["segment_ids"], inputs["position_ids"])
            for layer in self.layers:
                x = layer(x, False, key)
            return {"embeddings": x, "pooled": jnp.tanh(self.pooler(x[0]))}

    inputs = {
        "token_ids": integers(8, below=30),
        "segment_ids": jnp.repeat(jnp.arange(2), 4),
        "position_ids": jnp.arange(8),
    }
    return made(Bert), (inputs, jr.PRNGKey(0)), {}


@model
def rotary_attention() -> Case:
    class Attention(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        rope: eqx.nn.RotaryPositionalEmbedding

        def __init__(self, key: Any):
            self.attention = eqx.nn.MultiheadAttention(
                2, 16, use_query_bias=True, use_output_bias=True, dropout_p=0.2, key=key
            )
            self.rope = eqx.nn.RotaryPositionalEmbedding(8)

        def __call__(self, x: Any, key: Any) -> Any:
            def process(q: Any, k: Any, v: Any) -> Any:
                turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
                return turn(q), turn(k), v

            mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
            return self.attention(x, x, x, mask=mask, key=key, process_heads=process)

    return made(Attention), (normal(6, 16), jr.key(3)), {}


@model
def gru_classifier() -> Case:
    """The RNN example of Equinox."""

    class RNN(eqx.Module):
        cell: eqx.nn.GRUCell
        linear: eqx.nn.Linear
        bias: Any
        hidden_size: int

        def __init__(self, key: Any):
            ckey, lkey = jr.split(key)
            self.hidden_size = 8
            self.cell = eqx.nn.GRUCell(2, 8, key=ckey)
            self.linear = eqx.nn.Linear(8, 1, use_bias=False, key=lkey)
            self.bias = jnp.zeros(1)

        def __call__(self, x: Any) -> Any:
            out, _ = lax.scan(lambda c, x: (self.cell(x, c), None), jnp.zeros(self.hidden_size), x)
            return jax.nn.sigmoid(self.linear(out) + self.bias)

    return jax.vmap(made(RNN)), (normal(3, 6, 2),), {}


@model
def stacked_lstm() -> Case:
    class LSTM(eqx.Module):
        cells: tuple[eqx.nn.LSTMCell, ...]
        embedding: eqx.nn.Embedding

        def __init__(self, key: Any):
            k1, k2, k3 = jr.split(key, 3)
            self.embedding = eqx.nn.Embedding(12, 5, key=k3)
            self.cells = (
                eqx.nn.LSTMCell(5, 6, key=k1),
                eqx.nn.LSTMCell(6, 6, use_bias=False, key=k2),
            )

        def __call__(self, ids: Any) -> Any:
            x = jax.vmap(self.embedding)(ids)
            for cell in self.cells:

                def step(carry: Any, x: Any, cell: Any = cell) -> Any:
                    carry = cell(x, carry)
                    return carry, carry[0]

                _, x = lax.scan(step, (jnp.zeros(6), jnp.zeros(6)), x)
            return x

    return made(LSTM), (integers(7, below=12),), {}


@model
def shared_embedding() -> Case:
    """eqx.nn.Shared: one array in two places."""

    class LanguageModel(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key: Any):
            k1, k2 = jr.split(key)
            embedding = eqx.nn.Embedding(12, 6, key=k1)
            linear = eqx.nn.Linear(6, 12, key=k2)
            self.shared = eqx.nn.Shared(
                (embedding, linear), where=lambda p: p[1].weight, get=lambda p: p[0].weight
            )

        def __call__(self, ids: Any) -> Any:
            embedding, linear = self.shared()
            return jax.vmap(linear)(jnp.tanh(jax.vmap(embedding)(ids)))

    return made(LanguageModel), (integers(5, below=12),), {}


@model
def ensemble_of_mlps() -> Case:
    """filter_vmap over the construction and over the call."""
    keys = jr.split(jr.PRNGKey(0), 3)
    models = eqx.filter_jit(eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 2, 8, 1, key=key)))(keys)

    @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
    def evaluate(member: Any, x: Any) -> Any:
        return jax.vmap(member)(x)

    return (evaluate, models), (normal(5, 4),), {}


@model
def scan_over_layers() -> Case:
    """Improve compile times with scan over layers: the trick of the documentation."""

    class Deep(eqx.Module):
        layers: Any
        final: eqx.nn.Linear

        def __init__(self, key: Any):
            k1, k2 = jr.split(key)
            make = eqx.filter_vmap(lambda k: AttentionBlock(8, 12, 2, 0.0, k))
            self.layers = make(jr.split(k1, 3))
            self.final = eqx.nn.Linear(8, 2, key=k2)

        def __call__(self, x: Any, key: Any) -> Any:
            dynamic, static = eqx.partition(self.layers, eqx.is_array)

            def body(x: Any, dynamic_layer: Any) -> Any:
                return eqx.combine(dynamic_layer, static)(x, False, key), None

            x, _ = lax.scan(body, x, dynamic)
            return jax.vmap(self.final)(x)

    return made(Deep), (normal(5, 8), jr.PRNGKey(1)), {}


@model
def neural_ode() -> Case:
    """Runge-Kutta by hand in a scan."""

    class Field(eqx.Module):
        mlp: eqx.nn.MLP
        scale: Any

        def __init__(self, key: Any):
            self.mlp = eqx.nn.MLP(
                3, 2, 12, 2, activation=jax.nn.softplus, final_activation=jnp.tanh, key=key
            )
            self.scale = jnp.ones(())

        def __call__(self, t: Any, y: Any) -> Any:
            return self.scale * self.mlp(jnp.append(y, t))

    class ODE(eqx.Module):
        func: Field

        def __init__(self, key: Any):
            self.func = Field(key)

        def __call__(self, ts: Any, y0: Any) -> Any:
            def step(y: Any, span: Any) -> Any:
                t0, t1 = span
                h = t1 - t0
                k1 = self.func(t0, y)
                k2 = self.func(t0 + h / 2, y + h / 2 * k1)
                k3 = self.func(t0 + h / 2, y + h / 2 * k2)
                k4 = self.func(t1, y + h * k3)
                y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                return y, y

            _, ys = lax.scan(step, y0, (ts[:-1], ts[1:]))
            return jnp.concatenate([y0[None], ys])

    return made(ODE), (jnp.linspace(0, 1, 8), normal(2)), {}


@model
def score_mixer() -> Case:
    """The score based diffusion example: a mixer, and its loss with random times."""

    class MixerBlock(eqx.Module):
        patch_mixer: eqx.nn.MLP
        hidden_mixer: eqx.nn.MLP
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm

        def __init__(self, patches: int, hidden: int, key: Any):
            k1, k2 = jr.split(key)
            self.patch_mixer = eqx.nn.MLP(patches, patches, 8, depth=1, key=k1)
            self.hidden_mixer = eqx.nn.MLP(hidden, hidden, 8, depth=1, key=k2)
            self.norm1 = eqx.nn.LayerNorm((hidden, patches))
            self.norm2 = eqx.nn.LayerNorm((patches, hidden))

        def __call__(self, y: Any) -> Any:
            y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
            y = y.T
            y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
            return y.T

    class Mixer2d(eqx.Module):
        conv_in: eqx.nn.Conv2d
        conv_out: eqx.nn.ConvTranspose2d
        blocks: list[MixerBlock]
        norm: eqx.nn.LayerNorm
        t1: float = eqx.field(static=True)

        def __init__(self, key: Any):
            k1, k2, *keys = jr.split(key, 4)
            self.conv_in = eqx.nn.Conv2d(2, 6, 2, stride=2, key=k1)
            self.conv_out = eqx.nn.ConvTranspose2d(6, 1, 2, stride=2, key=k2)
            self.blocks = [MixerBlock(9, 6, key=k) for k in keys]
            self.norm = eqx.nn.LayerNorm((6, 9))
            self.t1 = 10.0

        def __call__(self, t: Any, y: Any) -> Any:
            t = jnp.broadcast_to(t / self.t1, (1, *y.shape[1:]))
            y = self.conv_in(jnp.concatenate([y, t]))
            shape = y.shape
            y = y.reshape(shape[0], -1)
            for block in self.blocks:
                y = block(y)
            return self.conv_out(self.norm(y).reshape(shape))

    def single_loss(net: Any, data: Any, t: Any, key: Any) -> Any:
        int_beta = t
        mean = data * jnp.exp(-0.5 * int_beta)
        std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-int_beta), 1e-5))
        noise = jr.normal(key, data.shape)
        pred = net(t, mean + std * noise)
        return (1 - jnp.exp(-t)) * jnp.mean((pred + noise / std) ** 2)

    def batch_loss(net: Any, data: Any, key: Any) -> Any:
        n = data.shape[0]
        tkey, losskey = jr.split(key)
        t = jr.uniform(tkey, (n,), minval=0, maxval=10.0 / n) + (10.0 / n) * jnp.arange(n)
        return jnp.mean(jax.vmap(lambda *a: single_loss(net, *a))(data, t, jr.split(losskey, n)))

    return (batch_loss, made(Mixer2d)), (normal(4, 1, 6, 6), jr.key(9)), {}


@model
def unet_nested() -> Case:
    class UNet(eqx.Module):
        down: list[Any]
        up: list[Any]
        out: eqx.nn.Conv2d

        def __init__(self, key: Any):
            k = jr.split(key, 6)
            self.down = [
                eqx.nn.Conv2d(1, 4, 3, padding=1, key=k[0]),
                eqx.nn.Conv2d(4, 8, 4, 2, 1, key=k[1]),
            ]
            self.up = [
                {
                    "t": eqx.nn.ConvTranspose2d(8, 4, 4, 2, padding=1, key=k[2]),
                    "c": eqx.nn.Conv2d(8, 4, 3, padding="SAME", key=k[3]),
                }
            ]
            self.out = eqx.nn.Conv2d(4, 1, 1, key=k[4])

        def __call__(self, x: Any) -> Any:
            a = jax.nn.relu(self.down[0](x))
            b = jax.nn.relu(self.down[1](a))
            for level in self.up:
                b = jax.nn.relu(level["c"](jnp.concatenate([level["t"](b), a])))
            return self.out(b)

    return made(UNet), (normal(1, 8, 8),), {}


@model
def gan_generator() -> Case:
    class Generator(eqx.Module):
        layers: list[Any]

        def __init__(self, key: Any):
            k = jr.split(key, 3)
            self.layers = [
                eqx.nn.ConvTranspose2d(6, 8, 4, 1, padding=0, use_bias=False, key=k[0]),
                eqx.nn.GroupNorm(2, 8),
                jax.nn.relu,
                eqx.nn.ConvTranspose2d(8, 4, 4, 2, padding=1, use_bias=False, key=k[1]),
                jax.nn.relu,
                eqx.nn.ConvTranspose2d(4, 1, 4, 2, padding=1, key=k[2]),
                jax.nn.tanh,
            ]

        def __call__(self, z: Any) -> Any:
            for layer in self.layers:
                z = layer(z)
            return z

    return made(Generator), (normal(6, 1, 1),), {}


@model
def deep_sets_and_maxout() -> Case:
    class DeepSets(eqx.Module):
        phi: eqx.nn.MLP
        rho: eqx.nn.MLP

        def __init__(self, key: Any):
            k1, k2 = jr.split(key)
            self.phi = eqx.nn.MLP(3, 8, 8, 1, activation=jax.nn.elu, key=k1)
            self.rho = eqx.nn.MLP(16, 2, 8, 1, key=k2)

        def __call__(self, x: Any, mask: Any) -> Any:
            h = jax.vmap(self.phi)(x)
            total = jnp.sum(h, axis=0, where=mask[:, None])
            high = jnp.max(h, axis=0, where=mask[:, None], initial=-jnp.inf)
            return self.rho(jnp.concatenate([total, high]))

    return made(DeepSets), (normal(6, 3), jnp.array([1, 1, 0, 1, 0, 1], bool)), {}


@model
def bounded_while_loop() -> Case:
    """eqx.internal's checkpointed loops are not public; error_if and filter_checkpoint are."""

    class Solver(eqx.Module):
        mlp: eqx.nn.MLP

        def __init__(self, key: Any):
            self.mlp = eqx.nn.MLP(3, 3, 8, 1, activation=jnp.tanh, key=key)

        def __call__(self, x: Any) -> Any:
            step = eqx.filter_checkpoint(lambda z: 0.5 * jnp.tanh(self.mlp(z)) + x)
            for _ in range(3):
                x = step(x)
            return x

    return made(Solver), (normal(3),), {}


@model
def fourier_operator() -> Case:
    """A Fourier neural operator: complex parameters."""

    class SpectralConv(eqx.Module):
        real: Any
        imag: Any
        modes: int = eqx.field(static=True)

        def __init__(self, channels: int, modes: int, key: Any):
            k1, k2 = jr.split(key)
            self.modes = modes
            self.real = jr.uniform(k1, (channels, channels, modes)) / channels
            self.imag = jr.uniform(k2, (channels, channels, modes)) / channels

        def __call__(self, x: Any) -> Any:
            _, n = x.shape
            ft = jnp.fft.rfft(x)
            weight = self.real + 1j * self.imag
            out = jnp.einsum("iM,ioM->oM", ft[:, : self.modes], weight)
            full = jnp.zeros((x.shape[0], ft.shape[-1]), ft.dtype).at[:, : self.modes].set(out)
            return jnp.fft.irfft(full, n=n)

    class FNO(eqx.Module):
        lifting: eqx.nn.Conv1d
        spectral: list[SpectralConv]
        bypass: list[eqx.nn.Conv1d]
        projection: eqx.nn.Conv1d

        def __init__(self, key: Any):
            k = jr.split(key, 6)
            self.lifting = eqx.nn.Conv1d(2, 4, 1, key=k[0])
            self.spectral = [SpectralConv(4, 3, k[1]), SpectralConv(4, 3, k[2])]
            self.bypass = [eqx.nn.Conv1d(4, 4, 1, key=k[3]), eqx.nn.Conv1d(4, 4, 1, key=k[4])]
            self.projection = eqx.nn.Conv1d(4, 1, 1, key=k[5])

        def __call__(self, x: Any) -> Any:
            x = self.lifting(x)
            for spectral, bypass in zip(self.spectral, self.bypass, strict=True):
                x = jax.nn.gelu(spectral(x) + bypass(x))
            return self.projection(x)

    return made(FNO), (normal(2, 12),), {}


@model
def linear_recurrent_unit() -> Case:
    """Complex diagonal states by associative_scan."""

    class LRU(eqx.Module):
        nu_log: Any
        theta_log: Any
        b_re: Any
        b_im: Any
        c_re: Any
        c_im: Any
        d: Any

        def __init__(self, key: Any):
            k = jr.split(key, 6)
            self.nu_log = jnp.log(-0.5 * jnp.log(jr.uniform(k[0], (5,), minval=0.3, maxval=0.9)))
            self.theta_log = jnp.log(jr.uniform(k[1], (5,)) * 3)
            self.b_re, self.b_im = jr.normal(k[2], (2, 5, 3))
            self.c_re, self.c_im = jr.normal(k[3], (2, 3, 5))
            self.d = jr.normal(k[4], (3,))

        def __call__(self, u: Any) -> Any:
            lam = jnp.exp(-jnp.exp(self.nu_log) + 1j * jnp.exp(self.theta_log))
            gamma = jnp.sqrt(1 - jnp.abs(lam) ** 2)
            b = (self.b_re + 1j * self.b_im) * gamma[:, None]
            bu = u @ b.T
            lams = jnp.repeat(lam[None], u.shape[0], axis=0)

            def combine(x: Any, y: Any) -> Any:
                return y[0] * x[0], y[0] * x[1] + y[1]

            _, h = lax.associative_scan(combine, (lams, bu))
            return (h @ (self.c_re + 1j * self.c_im).T).real + self.d * u

    return made(LRU), (normal(8, 3),), {}


@model
def static_and_frozen_fields() -> Case:
    class Net(eqx.Module):
        weight: Any
        table: Any
        name: str = eqx.field(static=True)
        activation: Callable[[Any], Any]
        extra: Any = None

        def __init__(self, key: Any):
            self.weight = jr.normal(key, (4, 4))
            self.table = jnp.arange(4)
            self.name = "net"
            self.activation = jax.nn.relu

        @jax.named_scope("net")
        @eqx.filter_jit
        def __call__(self, x: Any) -> Any:
            return self.activation(self.weight[self.table[::-1]] @ x)

    return made(Net), (normal(4),), {}


@model
def normalising_flow_inverse() -> Case:
    """A rational quadratic spline, by searchsorted and gathers."""

    class Spline(eqx.Module):
        net: eqx.nn.MLP
        bins: int = eqx.field(static=True)

        def __init__(self, key: Any):
            self.bins = 4
            self.net = eqx.nn.MLP(1, 3 * 4 + 1, 8, 1, key=key)

        def __call__(self, x: Any) -> Any:
            w, h, d = jnp.split(self.net(x[:1]), [4, 8])
            widths, heights = jax.nn.softmax(w), jax.nn.softmax(h)
            d = jax.nn.softplus(d) + 1e-3
            xs = jnp.pad(jnp.cumsum(widths), (1, 0))
            ys = jnp.pad(jnp.cumsum(heights), (1, 0))
            v = jax.nn.sigmoid(x[1])
            k = jnp.clip(jnp.searchsorted(xs, v) - 1, 0, self.bins - 1)
            s = heights[k] / widths[k]
            e = (v - xs[k]) / widths[k]
            top = heights[k] * (s * e**2 + d[k] * e * (1 - e))
            bottom = s + (d[k + 1] + d[k] - 2 * s) * e * (1 - e)
            return jnp.stack([x[0], ys[k] + top / bottom])

    return jax.vmap(made(Spline)), (normal(6, 2),), {}


@model
def stateful_counter() -> Case:
    """State of one's own: an index, set and got."""

    class Counter(eqx.nn.StatefulLayer):
        index: eqx.nn.StateIndex
        linear: eqx.nn.Linear

        def __init__(self, key: Any):
            self.index = eqx.nn.StateIndex((jnp.array(0), jnp.zeros(3)))
            self.linear = eqx.nn.Linear(3, 2, key=key)

        def __call__(self, x: Any, state: Any, *, key: Any = None) -> Any:
            count, mean = state.get(self.index)
            mean = 0.9 * mean + 0.1 * x
            state = state.set(self.index, (count + 1, mean))
            return self.linear(x - mean) / (count + 1), state

    module, state = eqx.nn.make_with_state(Counter)(jr.PRNGKey(0))
    return module, (normal(3), state), {}


@model
def dimension_free_layers() -> Case:
    """The layers that take the number of dimensions as an argument."""

    class Net(eqx.Module):
        conv: eqx.nn.Conv
        up: eqx.nn.ConvTranspose
        pool: eqx.nn.Pool
        adaptive: eqx.nn.AdaptivePool

        def __init__(self, key: Any):
            k1, k2 = jr.split(key)
            self.conv = eqx.nn.Conv(2, 2, 4, 3, padding=((0, 1), (2, 1)), dilation=2, key=k1)
            self.up = eqx.nn.ConvTranspose(2, 4, 2, 3, stride=2, padding="SAME", key=k2)
            self.pool = eqx.nn.Pool(
                init=-jnp.inf, operation=lax.max, num_spatial_dims=2, kernel_size=2
            )
            self.adaptive = eqx.nn.AdaptivePool((3, 2), num_spatial_dims=2, operation=jnp.mean)

        def __call__(self, x: Any) -> Any:
            return self.adaptive(self.up(self.pool(self.conv(x))))

    return made(Net), (normal(2, 9, 8),), {}
