"""Models of Flax Linen as its users write them, small: name -> a function that builds one.

Each gives the model as `fmapper.convert` takes it, and what it is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {}


def model(function: Callable[[], Case]) -> Callable[[], Case]:
    MODELS[f"linen/{function.__name__}"] = function
    return function


def key(n: int = 0) -> Any:
    return jax.random.key(n)


def normal(*shape: int, seed: int = 7) -> Any:
    return jax.random.normal(key(seed), shape)


def integers(*shape: int, below: int, seed: int = 8) -> Any:
    return jax.random.randint(key(seed), shape, 0, below)


def initialised(module: nn.Module, *args: Any, **kwargs: Any) -> Case:
    """A module with fresh variables; dropout is drawn where the call asks for it."""
    options = {name: value for name, value in kwargs.items() if name not in ("rngs", "mutable")}
    rngs = {"params": key(0), **kwargs.get("rngs", {})}
    variables = jax.jit(lambda rngs: module.init(rngs, *args, **options))(rngs)
    return (module, variables), args, kwargs


# --- dense and convolutional ----------------------------------------------------------------------


class MLP(nn.Module):
    features: Sequence[int]
    activation: Callable[[Any], Any] = nn.relu

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i, n in enumerate(self.features):
            x = nn.Dense(n, name=f"layers_{i}")(x)
            if i != len(self.features) - 1:
                x = self.activation(x)
        return x


@model
def mlp() -> Case:
    return initialised(MLP([16, 16, 4]), normal(3, 8))


@model
def mlp_activations() -> Case:
    activations = [
        nn.celu, nn.elu, nn.gelu, nn.hard_sigmoid, nn.hard_silu, nn.hard_tanh, nn.leaky_relu,
        nn.log_sigmoid, nn.log_softmax, nn.relu6, nn.selu, nn.sigmoid, nn.silu, nn.soft_sign,
        nn.softmax, nn.softplus, nn.standardize, nn.tanh,
        functools.partial(nn.gelu, approximate=False),
    ]  # fmt: skip

    class Activations(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(8)(x)
            return (
                jnp.stack([activation(x) for activation in activations]),
                nn.glu(x),
                nn.PReLU()(x),
            )

    return initialised(Activations(), normal(5, 6))


@model
def sequential() -> Case:
    module = nn.Sequential(
        [nn.Dense(8), nn.gelu, nn.Dense(8), nn.LayerNorm(), nn.tanh, nn.Dense(2)]
    )
    return initialised(module, normal(4, 5))


class CNN(nn.Module):
    """The MNIST example of Flax."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=16, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=32)(x))
        return nn.Dense(features=10)(x)


@model
def cnn() -> Case:
    return initialised(CNN(), normal(2, 12, 12, 1))


class ConvBNBlock(nn.Module):
    features: int
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        residual = x
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = norm(scale_init=nn.initializers.ones)(y)
        if residual.shape != y.shape:
            residual = nn.Conv(self.features, (1, 1), self.strides, use_bias=False, name="proj")(x)
            residual = norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    stages: Sequence[int] = (1, 1)
    classes: int = 5

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Conv(8, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False, name="init")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn_init")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for i, size in enumerate(self.stages):
            for j in range(size):
                x = ConvBNBlock(8 * 2**i, (2, 2) if i > 0 and j == 0 else (1, 1))(x, train)
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))


@model
def resnet_eval() -> Case:
    return initialised(ResNet(), normal(2, 16, 16, 3), train=False)


@model
def resnet_train() -> Case:
    return initialised(ResNet(), normal(4, 16, 16, 3), train=True, mutable=["batch_stats"])


@model
def convolutions() -> Case:
    class Convolutions(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            a = nn.Conv(6, (3, 3), padding="VALID")(x)
            b = nn.Conv(8, (3, 3), feature_group_count=4, kernel_dilation=2)(x)
            c = nn.Conv(4, (3, 3), padding="CIRCULAR")(x)
            d = nn.Conv(4, (2, 2), strides=2, padding="SAME", input_dilation=1)(x)
            e = nn.ConvTranspose(5, (3, 3), strides=(2, 2))(x)
            f = nn.ConvTranspose(5, (4, 4), strides=(2, 2), padding="VALID", transpose_kernel=True)(
                x
            )
            g = nn.ConvLocal(3, (3, 3))(x)
            h = nn.ConvTranspose(3, (4, 4), (2, 2), padding="CIRCULAR")(x)
            return a, b, c, d, e, f, g, h

    return initialised(Convolutions(), normal(2, 8, 8, 4))


@model
def conv1d_causal_wavenet() -> Case:
    class Block(nn.Module):
        channels: int
        dilation: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            kwargs = {
                "kernel_size": (2,),
                "kernel_dilation": (self.dilation,),
                "padding": "CAUSAL",
            }
            z = nn.tanh(nn.Conv(self.channels, name="filter", **kwargs)(x))
            z *= nn.sigmoid(nn.Conv(self.channels, name="gate", **kwargs)(x))
            skip = nn.Conv(self.channels, (1,), name="skip")(z)
            return x + nn.Conv(self.channels, (1,), name="residual")(z), skip

    class WaveNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(8, (1,))(x)
            skips = 0.0
            for i in range(4):
                x, skip = Block(8, 2**i)(x)
                skips = skips + skip
            return nn.Conv(16, (1,))(nn.relu(nn.Conv(8, (1,))(nn.relu(skips))))

    return initialised(WaveNet(), normal(2, 24, 1))


@model
def conv3d_video() -> Case:
    class Video(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Conv(4, (3, 3, 3))(x))
            x = nn.max_pool(x, (2, 2, 2), strides=(2, 2, 2))
            x = nn.relu(nn.Conv(8, (1, 3, 3), strides=(1, 2, 2))(x))
            return nn.Dense(3)(x.mean((1, 2, 3)))

    return initialised(Video(), normal(2, 4, 8, 8, 2))


@model
def depthwise_mobilenet() -> Case:
    class Inverted(nn.Module):
        out: int
        expand: int
        strides: int

        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            hidden = x.shape[-1] * self.expand
            y = nn.Conv(hidden, (1, 1), use_bias=False)(x)
            y = nn.relu6(nn.BatchNorm(use_running_average=not train)(y))
            y = nn.Conv(hidden, (3, 3), strides=self.strides, feature_group_count=hidden)(y)
            y = nn.relu6(nn.BatchNorm(use_running_average=not train)(y))
            # squeeze and excite
            s = nn.Dense(hidden // 4)(y.mean((1, 2), keepdims=True))
            y = y * nn.hard_sigmoid(nn.Dense(hidden)(nn.relu(s)))
            y = nn.Conv(self.out, (1, 1), use_bias=False)(y)
            return x + y if self.strides == 1 and x.shape[-1] == self.out else y

    class MobileNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = nn.hard_swish(nn.Conv(8, (3, 3), strides=2)(x))
            for out, expand, strides in ((8, 2, 1), (16, 4, 2), (16, 4, 1)):
                x = Inverted(out, expand, strides)(x, train)
            return nn.Dense(4)(jnp.mean(x, (1, 2)))

    return initialised(MobileNet(), normal(2, 16, 16, 3))


@model
def densenet_pooling() -> Case:
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(3):
                y = nn.Conv(4, (3, 3))(nn.relu(nn.GroupNorm(num_groups=2)(x)))
                x = jnp.concatenate([x, y], axis=-1)
            a = nn.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME", count_include_pad=False)
            b = nn.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
            c = nn.pool(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
            return a, b, c

    return initialised(Dense(), normal(2, 9, 9, 4))


@model
def unet() -> Case:
    class Double(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (3, 3))(x)))
            return x

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            skips = []
            for features in (8, 16):
                x = Double(features)(x)
                skips.append(x)
                x = nn.max_pool(x, (2, 2), (2, 2))
            x = Double(32)(x)
            for features, skip in zip((16, 8), skips[::-1], strict=True):
                x = nn.ConvTranspose(features, (2, 2), strides=(2, 2))(x)
                x = Double(features)(jnp.concatenate([x, skip], -1))
            return nn.Conv(2, (1, 1))(x)

    return initialised(UNet(), normal(1, 16, 16, 3))


def timestep_embedding(t: Any, dim: int) -> Any:
    half = dim // 2
    freqs = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / (half - 1))
    args = t[:, None].astype(jnp.float32) * freqs[None]
    return jnp.concatenate([jnp.sin(args), jnp.cos(args)], axis=-1)


@model
def diffusion_unet() -> Case:
    class ResBlock(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: Any, emb: Any, train: bool) -> Any:
            h = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))
            scale, shift = jnp.split(
                nn.Dense(2 * self.features)(nn.swish(emb))[:, None, None], 2, -1
            )
            h = nn.GroupNorm(4)(h) * (1 + scale) + shift
            h = nn.Dropout(0.1, deterministic=not train)(nn.swish(h))
            h = nn.Conv(self.features, (3, 3), kernel_init=nn.initializers.normal(0.1))(h)
            return h + (x if x.shape[-1] == self.features else nn.Conv(self.features, (1, 1))(x))

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            b, h, w, c = x.shape
            y = nn.GroupNorm(4)(x).reshape(b, h * w, c)
            q, k, v = (nn.DenseGeneral((2, c // 2), name=n)(y) for n in "qkv")
            weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(c // 2))
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            return x + nn.DenseGeneral(c, axis=(-2, -1))(y).reshape(b, h, w, c)

    class Denoiser(nn.Module):
        @nn.compact
        def __call__(self, x: Any, t: Any, train: bool = False) -> Any:
            emb = nn.Dense(32)(nn.swish(nn.Dense(32)(timestep_embedding(t, 16))))
            x = nn.Conv(8, (3, 3))(x)
            a = ResBlock(8)(x, emb, train)
            b = ResBlock(16)(nn.avg_pool(a, (2, 2), (2, 2)), emb, train)
            b = Attention()(b)
            up = jax.image.resize(b, (b.shape[0], *a.shape[1:3], b.shape[-1]), "nearest")
            y = ResBlock(8)(jnp.concatenate([up, a], -1), emb, train)
            return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(4)(y)))

    args = normal(2, 8, 8, 3), jnp.array([3, 500])
    return initialised(Denoiser(), *args, train=True, rngs={"dropout": key(5)})


@model
def resize_upsampling() -> Case:
    class Upsampler(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            b, h, w, _ = x.shape
            x = nn.Conv(4, (3, 3))(x)
            found = [
                jax.image.resize(x, (b, 2 * h, 2 * w, 4), method)
                for method in ("nearest", "bilinear", "bicubic", "lanczos3")
            ]
            # pixel shuffle
            y = nn.Conv(3 * 4, (3, 3))(sum(found))
            y = y.reshape(b, 2 * h, 2 * w, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5)
            small = jax.image.resize(y.reshape(b, 4 * h, 4 * w, 3), (b, 3, 5, 3), "linear")
            return found, small, jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)

    return initialised(Upsampler(), normal(1, 5, 6, 3))


# --- norms and wrappers ---------------------------------------------------------------------------


@model
def norms() -> Case:
    class Norms(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(8, (3, 3))(x)
            return (
                nn.LayerNorm(epsilon=1e-5, use_bias=False)(x),
                nn.LayerNorm(reduction_axes=(1, 2, 3), feature_axes=(3,), use_fast_variance=False)(
                    x
                ),
                nn.RMSNorm()(x),
                nn.GroupNorm(num_groups=None, group_size=2)(x),
                nn.InstanceNorm()(x),
                nn.BatchNorm(use_running_average=True, axis=-1, use_scale=False)(x),
            )

    return initialised(Norms(), normal(3, 6, 6, 2))


@model
def spectral_norm_train() -> Case:
    class Critic(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.SpectralNorm(nn.Conv(6, (3, 3)))(x, update_stats=train)
            x = nn.leaky_relu(x, 0.2).reshape(x.shape[0], -1)
            return nn.SpectralNorm(nn.Dense(1), n_steps=2)(x, update_stats=train)

    return initialised(Critic(), normal(2, 6, 6, 1), train=True, mutable=["batch_stats"])


@model
def weight_norm() -> Case:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.tanh(nn.WeightNorm(nn.Dense(8))(x))
            return nn.WeightNorm(nn.Dense(3), use_scale=False, feature_axes=None)(x)

    return initialised(Normed(), normal(4, 5))


@model
def batch_norm_dropout_train() -> Case:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.Dense(16)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
            x = nn.Dropout(0.2, broadcast_dims=(0,), deterministic=not train)(x)
            return nn.Dense(3)(x)

    return initialised(
        Net(), normal(6, 5), train=True, rngs={"dropout": key(2)}, mutable=["batch_stats"]
    )


@model
def remat_blocks() -> Case:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(3):
                x = nn.remat(Block)()(x)
            return x

    return initialised(Deep(), normal(3, 8))


@model
def scanned_layers() -> Case:
    """Layers stacked by nn.scan, as large language models do."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + nn.Dense(x.shape[-1])(nn.relu(nn.LayerNorm()(x))), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            stack = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4
            )
            return stack()(x, None)[0]

    return initialised(Stack(), normal(3, 8))


@model
def vmapped_ensemble() -> Case:
    ensemble = nn.vmap(
        MLP, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
    )
    return initialised(ensemble([8, 2]), normal(4, 5))


@model
def lifted_control_flow() -> Case:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, which: Any) -> Any:
            a, b = nn.Dense(6, name="a"), nn.Dense(6, name="b")
            if self.is_initializing():
                a(x), b(x)
            x = nn.cond(jnp.sum(x) > 0, lambda m, x: a(x), lambda m, x: b(x), self, x)
            heads = [nn.Dense(2, name=f"head{i}") for i in range(3)]
            if self.is_initializing():
                for head in heads:
                    head(x)
            return nn.switch(which, [lambda m, x, h=h: h(x) for h in heads], self, x)

    return initialised(Net(), normal(4, 5), jnp.int32(1))


@model
def linen_while_loop() -> Case:
    class Power(nn.Module):
        """A fixed point by while_loop over a mutable state."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            w = self.param("w", nn.initializers.orthogonal(), (5, 5))

            def body(carry: Any) -> Any:
                i, v = carry
                v = jnp.tanh(v @ w + x)
                return i + 1, v

            return lax.while_loop(lambda c: c[0] < 6, body, (0, jnp.zeros_like(x)))[1]

    return initialised(Power(), normal(2, 5))


@model
def parameters_by_hand() -> Case:
    class Bilinear(nn.Module):
        features: int

        def setup(self) -> None:
            self.scale = self.param("scale", nn.initializers.ones, (self.features,))
            self.offsets = self.variable("constants", "offsets", lambda: jnp.arange(4.0))
            self.left = [nn.Dense(self.features) for _ in range(2)]
            self.heads = {"mean": nn.Dense(1), "std": nn.Dense(1)}

        def __call__(self, x: Any, y: Any) -> Any:
            z = self.scale * self.left[0](x) * self.left[1](y)
            z = z + self.offsets.value
            return {name: head(z) for name, head in self.heads.items()}

    return initialised(Bilinear(4), normal(3, 5), normal(3, 6))


@model
def counter_state() -> Case:
    class Counter(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            is_there = self.has_variable("counter", "count")
            count = self.variable("counter", "count", lambda: jnp.zeros((), jnp.int32))
            mean = self.variable("ema", "mean", jnp.zeros, x.shape[1:])
            bias = self.param("bias", nn.initializers.normal(), x.shape[1:])
            if is_there:
                count.value += 1
                mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
            return x - mean.value + bias * count.value

    return initialised(Counter(), normal(3, 4), mutable=["counter", "ema"])


# --- sequences ------------------------------------------------------------------------------------


@model
def recurrent_cells() -> Case:
    class Cells(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            cells = [
                nn.LSTMCell(5), nn.OptimizedLSTMCell(5), nn.GRUCell(5), nn.MGUCell(5),
                nn.SimpleCell(5),
            ]  # fmt: skip
            return [nn.RNN(cell)(x) for cell in cells]

    return initialised(Cells(), normal(2, 6, 4))


@model
def bidirectional_lstm() -> Case:
    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, ids: Any, lengths: Any) -> Any:
            x = nn.Embed(20, 8)(ids)
            forward = nn.RNN(nn.OptimizedLSTMCell(6), return_carry=False)
            backward = nn.RNN(nn.GRUCell(6), reverse=True, keep_order=True)
            x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
            carry, x = nn.RNN(nn.LSTMCell(6), return_carry=True)(x, seq_lengths=lengths)
            return nn.Dense(5)(x), carry

    return initialised(Tagger(), integers(3, 7, below=20), jnp.array([7, 4, 2]))


@model
def conv_lstm() -> Case:
    class Forecast(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.RNN(nn.ConvLSTMCell(features=3, kernel_size=(3, 3)))(x)

    return initialised(Forecast(), normal(2, 4, 6, 6, 2))


@model
def seq2seq() -> Case:
    """Encoder and decoder with teacher forcing, as the example of Flax."""

    class DecoderCell(nn.RNNCellBase):
        features: int
        vocab: int

        @nn.compact
        def __call__(self, carry: Any, x: Any) -> Any:
            lstm, last = carry
            lstm, y = nn.LSTMCell(self.features)(lstm, x)
            logits = nn.Dense(self.vocab)(y)
            return (lstm, jnp.argmax(logits, -1)), (logits, last)

        def initialize_carry(self, rng: Any, shape: Any) -> Any:
            raise NotImplementedError

        @property
        def num_feature_axes(self) -> int:
            return 1

    class Seq2seq(nn.Module):
        @nn.compact
        def __call__(self, source: Any, target: Any) -> Any:
            carry, _ = nn.RNN(nn.LSTMCell(8), return_carry=True, name="encoder")(source)
            decoder = nn.RNN(DecoderCell(8, 6), name="decoder")
            start = carry, jnp.zeros(source.shape[0], jnp.int32)
            return decoder(target, initial_carry=start)

    x = jax.nn.one_hot(integers(2, 5, below=6), 6)
    return initialised(Seq2seq(), x, x[:, ::-1])


class TransformerBlock(nn.Module):
    heads: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Any, mask: Any = None, train: bool = False) -> Any:
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads, dropout_rate=self.dropout, deterministic=not train
        )(y, y, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        y = nn.Dense(x.shape[-1])(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class LanguageModel(nn.Module):
    """A decoder with tied embeddings, as lm1b of Flax."""

    vocab: int = 30
    dropout: float = 0.0

    @nn.compact
    def __call__(self, ids: Any, train: bool = False) -> Any:
        embed = nn.Embed(self.vocab, 16, embedding_init=nn.initializers.normal(0.5))
        position = self.param("position", nn.initializers.normal(0.5), (1, 12, 16))
        x = embed(ids) + position[:, : ids.shape[1]]
        mask = nn.combine_masks(nn.make_attention_mask(ids > 0, ids > 0), nn.make_causal_mask(ids))
        for _ in range(2):
            x = TransformerBlock(2, self.dropout)(x, mask, train)
        return embed.attend(nn.LayerNorm()(x))


@model
def language_model() -> Case:
    return initialised(LanguageModel(), integers(2, 9, below=30))


@model
def language_model_dropout() -> Case:
    return initialised(
        LanguageModel(dropout=0.3), integers(2, 9, below=30), train=True, rngs={"dropout": key(3)}
    )


@model
def vision_transformer() -> Case:
    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = nn.Conv(16, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(x)
            n, h, w, c = x.shape
            x = jnp.reshape(x, [n, h * w, c])
            cls = self.param("cls", nn.initializers.normal(0.1), (1, 1, c))
            x = jnp.concatenate([jnp.tile(cls, [n, 1, 1]), x], axis=1)
            x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, h * w + 1, c))
            for _ in range(2):
                x = TransformerBlock(4)(x, train=train)
            return nn.Dense(7, name="head")(nn.LayerNorm(name="norm")(x)[:, 0])

    return initialised(ViT(), normal(2, 12, 12, 3))


@model
def encoder_decoder_cached() -> Case:
    """Cross attention, and self attention with a cache, one step of decoding."""

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, ids: Any, memory: Any) -> Any:
            x = nn.Embed(20, 16)(ids)
            y = nn.SelfAttention(num_heads=2, decode=True)(nn.LayerNorm()(x))
            x = x + y
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(x, memory)
            return nn.Dense(20)(nn.LayerNorm()(x))

    module, memory = Decoder(), normal(2, 5, 12)
    variables = jax.jit(module.init)(key(0), jnp.zeros((2, 8), jnp.int32), memory)
    ids = integers(2, 1, below=20)
    return (module, variables), (ids, memory), {"mutable": ["cache"]}


@model
def attention_options() -> Case:
    class Attend(nn.Module):
        @nn.compact
        def __call__(self, x: Any, y: Any, bias: Any) -> Any:
            a = nn.MultiHeadAttention(num_heads=3, normalize_qk=True, out_features=5)(x, y)
            q = nn.DenseGeneral((2, 4))(x)
            k = nn.DenseGeneral((2, 4))(y)
            b = nn.dot_product_attention(q, k, k, bias=bias)
            c = nn.attention.dot_product_attention_weights(q, k)
            return a, b, c, jax.nn.dot_product_attention(q, k, k, scale=0.3)

    return initialised(
        Attend(), normal(2, 4, 6), normal(2, 5, 6, seed=3), normal(2, 2, 4, 5, seed=4)
    )


def rotary(x: Any, theta: float = 10000.0) -> Any:
    half = x.shape[-1] // 2
    freqs = 1.0 / theta ** (jnp.arange(0, half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * freqs[None]
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@model
def llama() -> Case:
    """RMSNorm, rotary embeddings, grouped queries, SwiGLU."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.RMSNorm()(x)
            q = rotary(nn.DenseGeneral((4, 4), use_bias=False, name="q")(y))
            k = rotary(nn.DenseGeneral((2, 4), use_bias=False, name="k")(y))
            v = nn.DenseGeneral((2, 4), use_bias=False, name="v")(y)
            k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 4**-0.5
            n = x.shape[1]
            scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, jnp.finfo(x.dtype).min)
            out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
            x = x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="o")(out)
            y = nn.RMSNorm()(x)
            gate = nn.silu(nn.Dense(32, use_bias=False, name="gate")(y))
            return x + nn.Dense(16, use_bias=False, name="down")(gate * nn.Dense(32, name="up")(y))

    class Llama(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(40, 16)(ids)
            for i in range(2):
                x = Block(name=f"layers_{i}")(x)
            return nn.Dense(40, use_bias=False, name="lm_head")(nn.RMSNorm(name="norm")(x))

    return initialised(Llama(), integers(2, 7, below=40))


@model
def mixture_of_experts() -> Case:
    class Experts(nn.Module):
        experts: int = 4
        k: int = 2

        @nn.compact
        def __call__(self, x: Any) -> Any:
            gates = nn.softmax(nn.Dense(self.experts, name="router")(x))
            weights, chosen = lax.top_k(gates, self.k)
            weights = weights / weights.sum(-1, keepdims=True)
            w1 = self.param("w1", nn.initializers.lecun_normal(), (self.experts, x.shape[-1], 12))
            w2 = self.param("w2", nn.initializers.lecun_normal(), (self.experts, 12, x.shape[-1]))
            dispatch = jnp.sum(nn.one_hot(chosen, self.experts) * weights[..., None], axis=-2)
            hidden = nn.gelu(jnp.einsum("td,edh->teh", x, w1))
            out = jnp.einsum("teh,ehd,te->td", hidden, w2, dispatch)
            load = jnp.mean(nn.one_hot(chosen[:, 0], self.experts), axis=0)
            self.sow("losses", "balance", self.experts * jnp.sum(load * gates.mean(0)))
            return x + out

    case, args, _ = initialised(Experts(), normal(10, 8))
    module, variables = case
    return (module, {"params": variables["params"]}), args, {"mutable": ["losses"]}


@model
def mlp_mixer() -> Case:
    class MlpBlock(nn.Module):
        dim: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.dim)(x)))

    class MixerBlock(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            x = x + jnp.swapaxes(MlpBlock(8, name="token_mixing")(y), 1, 2)
            return x + MlpBlock(24, name="channel_mixing")(nn.LayerNorm()(x))

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(12, (4, 4), strides=(4, 4), name="stem")(x)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
            for _ in range(2):
                x = MixerBlock()(x)
            x = nn.LayerNorm(name="pre_head")(x).mean(axis=1)
            return nn.Dense(3, kernel_init=nn.initializers.normal(), name="head")(x)

    return initialised(Mixer(), normal(2, 12, 12, 3))


@model
def fnet() -> Case:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mixed = jnp.fft.fft2(x, axes=(-2, -1)).real
            x = nn.LayerNorm()(x + mixed)
            return nn.LayerNorm()(x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(24)(x))))

    class FNet(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(20, 12)(ids)
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(20)(x)

    return initialised(FNet(), integers(2, 8, below=20))


@model
def perceiver() -> Case:
    class Perceiver(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            b = x.shape[0]
            n = x.shape[1]
            positions = jnp.linspace(-1, 1, n)[:, None] * jnp.pi * 2 ** jnp.arange(3)
            features = jnp.concatenate([jnp.sin(positions), jnp.cos(positions)], -1)
            x = jnp.concatenate([x, jnp.broadcast_to(features, (b, *features.shape))], -1)
            latents = self.param("latents", nn.initializers.normal(0.5), (4, 12))
            z = jnp.broadcast_to(latents, (b, *latents.shape))
            for _ in range(2):
                z = z + nn.MultiHeadDotProductAttention(1, name=None)(
                    nn.LayerNorm()(z), nn.LayerNorm()(x)
                )
                z = TransformerBlock(2)(z)
            return nn.Dense(4)(z.mean(1))

    return initialised(Perceiver(), normal(2, 10, 3))


# --- generative -----------------------------------------------------------------------------------


@model
def vae() -> Case:
    """The VAE example of Flax: a key among the arguments."""

    class Encoder(nn.Module):
        latents: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Dense(16, name="fc1")(x))
            return nn.Dense(self.latents, name="fc2_mean")(x), nn.Dense(
                self.latents, name="fc2_logvar"
            )(x)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, z: Any) -> Any:
            return nn.Dense(12, name="fc2")(nn.relu(nn.Dense(16, name="fc1")(z)))

    class VAE(nn.Module):
        latents: int = 3

        def setup(self) -> None:
            self.encoder = Encoder(self.latents)
            self.decoder = Decoder()

        def __call__(self, x: Any, z_rng: Any) -> Any:
            mean, logvar = self.encoder(x)
            std = jnp.exp(0.5 * logvar)
            z = mean + jax.random.normal(z_rng, logvar.shape) * std
            return self.decoder(z), mean, logvar

        def generate(self, z: Any) -> Any:
            return nn.sigmoid(self.decoder(z))

    return initialised(VAE(), normal(3, 12), key(4))


@model
def method_by_name() -> Case:
    (module, variables), _, _ = vae()
    return (module, variables), (normal(2, 3),), {"method": "generate"}


@model
def rngs_in_module() -> Case:
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
            gumbel = jax.random.gumbel(self.make_rng("noise"), (*x.shape[:-1], 4))
            logits = nn.Dense(4)(x)
            sample = jax.random.categorical(self.make_rng("noise"), logits)
            return (
                nn.softmax((logits + gumbel) / 0.5),
                sample,
                jax.random.bernoulli(self.make_rng("noise"), nn.sigmoid(logits)),
            )

    return initialised(Noisy(), normal(4, 6), rngs={"noise": key(11)})


@model
def conv_autoencoder() -> Case:
    class AutoEncoder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
            h = nn.relu(nn.Conv(4, (3, 3), strides=2)(h))
            h = nn.relu(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(h))
            return nn.sigmoid(nn.ConvTranspose(1, (3, 3), strides=(2, 2))(h))

    return initialised(AutoEncoder(), normal(2, 12, 12, 1))


@model
def dcgan() -> Case:
    class Generator(nn.Module):
        @nn.compact
        def __call__(self, z: Any, train: bool) -> Any:
            x = nn.Dense(4 * 4 * 8)(z).reshape(-1, 4, 4, 8)
            for features in (8, 4):
                x = nn.BatchNorm(use_running_average=not train)(x)
                x = nn.ConvTranspose(features, (5, 5), strides=(2, 2), use_bias=False)(nn.relu(x))
            return jnp.tanh(nn.Conv(1, (3, 3))(x))

    class Discriminator(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for features in (4, 8):
                x = nn.leaky_relu(nn.Conv(features, (4, 4), strides=(2, 2))(x), 0.2)
            return nn.Dense(1)(x.reshape(x.shape[0], -1))

    class GAN(nn.Module):
        def setup(self) -> None:
            self.generator = Generator()
            self.discriminator = Discriminator()

        def __call__(self, z: Any, real: Any, train: bool = True) -> Any:
            fake = self.generator(z, train)
            loss_d = nn.softplus(-self.discriminator(real)) + nn.softplus(
                self.discriminator(lax.stop_gradient(fake))
            )
            loss_g = nn.softplus(-self.discriminator(fake))
            return fake, loss_d.mean(), loss_g.mean()

    return initialised(
        GAN(), normal(3, 6), normal(3, 16, 16, 1, seed=1), train=True, mutable=["batch_stats"]
    )


@model
def pixel_cnn() -> Case:
    """Masked convolutions: the kernel is a parameter that is multiplied with a mask."""

    class MaskedConv(nn.Module):
        features: int
        kind: str

        @nn.compact
        def __call__(self, x: Any) -> Any:
            shape = 3, 3, x.shape[-1], self.features
            mask = jnp.ones(shape).at[1, 2 if self.kind == "B" else 1 :].set(0).at[2:].set(0)
            kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = lax.conv_general_dilated(
                x, kernel * mask, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return y + bias

    class PixelCNN(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = MaskedConv(8, "A")(x)
            for _ in range(2):
                x = x + MaskedConv(8, "B")(nn.elu(jnp.concatenate([x, -x], -1)))
            return nn.Conv(4, (1, 1))(nn.relu(x))

    return initialised(PixelCNN(), normal(2, 6, 6, 1))


@model
def vq_vae() -> Case:
    class Quantiser(nn.Module):
        codes: int = 8

        @nn.compact
        def __call__(self, x: Any) -> Any:
            book = self.param("codebook", nn.initializers.normal(1.0), (self.codes, x.shape[-1]))
            flat = x.reshape(-1, x.shape[-1])
            distances = (flat**2).sum(1, keepdims=True) - 2 * flat @ book.T + (book**2).sum(1)
            index = jnp.argmin(distances, axis=1)
            quantised = jnp.take(book, index, axis=0).reshape(x.shape)
            commitment = jnp.mean((lax.stop_gradient(quantised) - x) ** 2)
            codebook = jnp.mean((quantised - lax.stop_gradient(x)) ** 2)
            straight = x + lax.stop_gradient(quantised - x)
            onehot = nn.one_hot(index, self.codes)
            p = onehot.mean(0)
            return straight, codebook + 0.25 * commitment, jnp.exp(-jnp.sum(p * jnp.log(p + 1e-10)))

    class VQVAE(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            z = nn.Conv(4, (1, 1))(nn.relu(nn.Conv(8, (4, 4), strides=2)(x)))
            z, loss, perplexity = Quantiser()(z)
            return nn.ConvTranspose(1, (4, 4), strides=(2, 2))(z), loss, perplexity

    return initialised(VQVAE(), normal(2, 8, 8, 1))


@model
def real_nvp() -> Case:
    class Coupling(nn.Module):
        flip: bool

        @nn.compact
        def __call__(self, x: Any) -> Any:
            a, b = jnp.split(x, 2, -1)
            if self.flip:
                a, b = b, a
            h = nn.tanh(nn.Dense(12)(a))
            s, t = jnp.tanh(nn.Dense(b.shape[-1])(h)), nn.Dense(b.shape[-1])(h)
            b = b * jnp.exp(s) + t
            return jnp.concatenate([b, a] if self.flip else [a, b], -1), s.sum(-1)

    class Flow(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            total = jnp.zeros(x.shape[0])
            for i in range(4):
                x, det = Coupling(i % 2 == 1)(x)
                total += det
            return jax.scipy.stats.norm.logpdf(x).sum(-1) + total

    return initialised(Flow(), normal(5, 6))


# --- graphs, rendering, control -------------------------------------------------------------------


@model
def graph_network() -> Case:
    class GNN(nn.Module):
        @nn.compact
        def __call__(self, nodes: Any, senders: Any, receivers: Any, graph_of: Any) -> Any:
            n = nodes.shape[0]
            for _ in range(2):
                messages = nn.relu(
                    nn.Dense(8)(jnp.concatenate([nodes[senders], nodes[receivers]], -1))
                )
                total = jax.ops.segment_sum(messages, receivers, num_segments=n)
                count = jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, n)
                highest = jax.ops.segment_max(messages, receivers, n)
                highest = jnp.where(jnp.isfinite(highest), highest, 0)
                mean = total / jnp.maximum(count, 1)[:, None]
                nodes = nn.LayerNorm()(nn.Dense(8)(jnp.concatenate([nodes, mean, highest], -1)))
            return nn.Dense(2)(jax.ops.segment_sum(nodes, graph_of, 2))

    senders, receivers = integers(14, below=6), integers(14, below=6, seed=3)
    return initialised(GNN(), normal(6, 4), senders, receivers, jnp.array([0, 0, 0, 1, 1, 1]))


@model
def graph_attention() -> Case:
    class GAT(nn.Module):
        @nn.compact
        def __call__(self, x: Any, adjacency: Any) -> Any:
            h = nn.Dense(8, use_bias=False)(x)
            a1 = self.param("a1", nn.initializers.glorot_normal(), (8, 1))
            a2 = self.param("a2", nn.initializers.glorot_normal(), (8, 1))
            e = nn.leaky_relu(h @ a1 + (h @ a2).T, 0.2)
            weights = nn.softmax(jnp.where(adjacency > 0, e, -9e15), axis=1)
            return nn.elu(weights @ h)

    adjacency = (normal(7, 7, seed=2) > 0.3).astype(jnp.float32) + jnp.eye(7)
    return initialised(GAT(), normal(7, 5), adjacency)


@model
def nerf() -> Case:
    class NeRF(nn.Module):
        @nn.compact
        def __call__(self, points: Any, directions: Any) -> Any:
            def encode(x: Any, degree: int) -> Any:
                scaled = jnp.concatenate([2.0**i * x for i in range(degree)], axis=-1)
                return jnp.concatenate(
                    [x, jnp.sin(jnp.concatenate([scaled, scaled + 0.5 * jnp.pi], -1))], -1
                )

            inputs = x = encode(points, 4)
            for i in range(3):
                x = nn.relu(nn.Dense(16)(x))
                if i == 1:
                    x = jnp.concatenate([x, inputs], axis=-1)
            sigma = nn.relu(nn.Dense(1)(x)[..., 0])
            d = jnp.broadcast_to(encode(directions, 2)[:, None], (*x.shape[:-1], 15))
            rgb = nn.sigmoid(nn.Dense(3)(jnp.concatenate([x, d], -1)))
            z = jnp.linspace(2.0, 6.0, points.shape[1])
            dists = jnp.concatenate([jnp.diff(z), jnp.array([1e10])])
            alpha = 1.0 - jnp.exp(-sigma * dists)
            trans = jnp.concatenate(
                [jnp.ones_like(alpha[..., :1]), jnp.cumprod(1 - alpha[..., :-1] + 1e-10, -1)], -1
            )
            weights = alpha * trans
            return (weights[..., None] * rgb).sum(-2), (weights * z).sum(-1)

    return initialised(NeRF(), normal(4, 6, 3), normal(4, 3, seed=2))


@model
def actor_critic() -> Case:
    """The PPO example of Flax: frames in uint8."""

    class ActorCritic(nn.Module):
        actions: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x.astype(jnp.float32) / 255.0
            x = nn.relu(nn.Conv(8, (8, 8), strides=(4, 4), name="conv1")(x))
            x = nn.relu(nn.Conv(8, (4, 4), strides=(2, 2), name="conv2")(x))
            x = nn.relu(nn.Dense(16, name="hidden")(x.reshape((x.shape[0], -1))))
            policy = nn.log_softmax(nn.Dense(self.actions, name="logits")(x))
            return policy, nn.Dense(1, name="value")(x)

    return initialised(ActorCritic(4), integers(2, 16, 16, 4, below=255).astype(jnp.uint8))


@model
def capsules() -> Case:
    def squash(s: Any) -> Any:
        norm2 = jnp.sum(s**2, -1, keepdims=True)
        return norm2 / (1 + norm2) * s / jnp.sqrt(norm2 + 1e-8)

    class Capsules(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(8, (3, 3), strides=2)(x)
            u = squash(x.reshape(x.shape[0], -1, 4))
            w = self.param("w", nn.initializers.normal(0.3), (u.shape[1], 3, 4, 5))
            hat = jnp.einsum("bid,ijde->bije", u, w)
            b = jnp.zeros(hat.shape[:3])
            for _ in range(3):
                c = nn.softmax(b, axis=2)
                v = squash(jnp.einsum("bij,bije->bje", c, hat))
                b = b + jnp.einsum("bije,bje->bij", hat, v)
            return jnp.linalg.norm(v, axis=-1)

    return initialised(Capsules(), normal(2, 8, 8, 1))


@model
def einsum_layers() -> Case:
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            a = nn.Einsum((2, 6, 4), "bti,hio->btho")(x)
            b = nn.DenseGeneral(features=(3, 2), axis=(1, 3), batch_dims=(0,))(a)
            c = nn.DenseGeneral(5, axis=(-2, -1))(a)
            return b, c

    return initialised(Layers(), normal(2, 5, 6))


@model
def bfloat16_compute() -> Case:
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(16, dtype=jnp.bfloat16)(x)
            x = nn.LayerNorm(dtype=jnp.bfloat16)(nn.gelu(x))
            return nn.Dense(4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x)

    return initialised(Half(), normal(3, 8))


@model
def fp8_dense() -> Case:
    class Fp8(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8, dot_general_cls=nn.fp8_ops.Fp8DotGeneral)(x)

    return initialised(Fp8(), normal(4, 16))


@model
def partitioned_and_bound() -> Case:
    """Annotated parameters, given as a bound module."""

    class Annotated(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.Dense(4, kernel_init=init)(nn.with_logical_constraint(x, ("a", "b")))

    module = Annotated()
    x = normal(3, 5)
    return module.bind(nn.meta.unbox(jax.jit(module.init)(key(0), x))), (x,), {}


@model
def intermediates() -> Case:
    class Probe(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.relu(nn.Dense(8)(x))
            self.sow("intermediates", "hidden", h)
            h = self.perturb("delta", h)
            return nn.Dense(2)(h)

    module = Probe()
    x = normal(3, 5)
    variables = jax.jit(module.init)(key(0), x)
    return (module, variables), (x,), {"mutable": ["intermediates"], "capture_intermediates": True}


@model
def fp8_training() -> Case:
    """Scales and histories of magnitudes are kept beside the parameters."""

    class Fp8(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Dense(16, dot_general_cls=nn.Fp8DotGeneralOp)(x))
            x = nn.Dense(16, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp)(x)
            x = nn.Dense(16, dot_general_cls=nn.fp8_ops.NANOOFp8DotGeneralOp)(x)
            return nn.fp8_ops.Fp8Einsum()(
                "bi,io->bo", x, self.param("w", nn.initializers.normal(), (16, 4))
            )

    return initialised(Fp8(), normal(4, 16))
