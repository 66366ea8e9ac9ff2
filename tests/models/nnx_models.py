"""Models of Flax NNX as its users write them, small: name -> a function that builds one.

Each gives the model as `fmapper.convert` takes it, and what it is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {}


def model(function: Callable[[], Case]) -> Callable[[], Case]:
    MODELS[f"nnx/{function.__name__}"] = function
    return function


def normal(*shape: int, seed: int = 7) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(*shape: int, below: int, seed: int = 8) -> Any:
    return jax.random.randint(jax.random.key(seed), shape, 0, below)


def made(cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module, made in one compiled program."""
    return nnx.jit(lambda: cls(*args, **kwargs, rngs=nnx.Rngs(0)))()


class MLP(nnx.Module):
    def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.linear2 = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear2(nnx.gelu(self.linear1(x)))


@model
def mlp() -> Case:
    return made(MLP, 5, 16, 3), (normal(4, 5),), {}


class Regressor(nnx.Module):
    """The first model of NNX's documentation."""

    def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(din, dmid, rngs=rngs)
        self.bn = nnx.BatchNorm(dmid, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear_out = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.gelu(self.dropout(self.bn(self.linear(x))))
        return self.linear_out(x)


@model
def regressor_train() -> Case:
    return made(Regressor, 5, 16, 3), (normal(6, 5),), {}


@model
def regressor_eval() -> Case:
    module = made(Regressor, 5, 16, 3)
    module.eval()
    return module, (normal(6, 5),), {}


class CNN(nnx.Module):
    """The MNIST tutorial of NNX."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(144, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> Any:
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
        return self.linear2(x)


@model
def cnn_train() -> Case:
    return made(CNN), (normal(2, 12, 12, 1),), {}


@model
def cnn_split() -> Case:
    """As a graph and a state."""
    module = made(CNN)
    module.eval()
    return nnx.split(module), (normal(2, 12, 12, 1),), {}


@model
def sequential_layers() -> Case:
    def build(rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Linear(5, 8, rngs=rngs), nnx.relu, nnx.LayerNorm(8, rngs=rngs),
            nnx.Linear(8, 8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs), jnp.tanh,
            nnx.Linear(8, 2, use_bias=False, rngs=rngs),
        )  # fmt: skip

    return made(build), (normal(4, 5),), {}


class Block(nnx.Module):
    def __init__(self, cin: int, cout: int, stride: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(cin, cout, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(cout, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(cout, cout, (3, 3), use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(cout, scale_init=nnx.initializers.ones, rngs=rngs)
        if stride != 1 or cin != cout:
            self.shortcut = nnx.Conv(cin, cout, (1, 1), strides=stride, use_bias=False, rngs=rngs)
        else:
            self.shortcut = None

    def __call__(self, x: Any) -> Any:
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(8, 8, 1, rngs=rngs), Block(8, 16, 2, rngs=rngs)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(self.stem(x), (2, 2), strides=(2, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@model
def resnet_train() -> Case:
    return made(ResNet), (normal(4, 12, 12, 3),), {}


@model
def convolutions() -> Case:
    class Convolutions(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.convs = nnx.Dict(
                a=nnx.Conv(4, 6, (3, 3), padding="VALID", rngs=rngs),
                b=nnx.Conv(4, 8, (3, 3), feature_group_count=4, kernel_dilation=2, rngs=rngs),
                c=nnx.ConvTranspose(4, 5, (3, 3), strides=(2, 2), rngs=rngs),
                d=nnx.Conv(4, 4, (3, 3), padding="REFLECT", rngs=rngs),
                e=nnx.Conv(4, 4, (3, 3), padding=((1, 2), (0, 1)), rngs=rngs),
            )
            self.causal = nnx.Conv(3, 4, (3,), kernel_dilation=2, padding="CAUSAL", rngs=rngs)

        def __call__(self, x: Any, y: Any) -> Any:
            pooled = nnx.min_pool(x, (2, 2), (2, 2)), nnx.avg_pool(x, (3, 3), (2, 2), "SAME")
            return {name: conv(x) for name, conv in self.convs.items()}, self.causal(y), pooled

    return made(Convolutions), (normal(2, 8, 8, 4), normal(2, 9, 3)), {}


@model
def norms() -> Case:
    class Norms(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.layer = nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs)
            self.rms = nnx.RMSNorm(8, rngs=rngs)
            self.group = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
            self.instance = nnx.InstanceNorm(8, rngs=rngs)
            self.batch = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.prelu = nnx.PReLU()

        def __call__(self, x: Any) -> Any:
            found = [n(x) for n in (self.layer, self.rms, self.group, self.instance, self.batch)]
            return found, self.prelu(x)

    return made(Norms), (normal(3, 5, 5, 8),), {}


@model
def spectral_and_weight_norm() -> Case:
    class Critic(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.a = nnx.SpectralNorm(nnx.Linear(5, 8, rngs=rngs), rngs=rngs)
            self.b = nnx.WeightNorm(nnx.Linear(8, 2, rngs=rngs), rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(nnx.tanh(self.a(x, update_stats=True)))

    return made(Critic), (normal(4, 5),), {}


class Attention(nnx.Module):
    def __init__(self, dim: int, heads: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, dim, dropout_rate=dropout, deterministic=False, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.mlp = MLP(dim, 4 * dim, dim, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Any, mask: Any = None) -> Any:
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.mlp(self.norm2(x))


class GPT(nnx.Module):
    def __init__(self, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(30, 16, rngs=rngs)
        self.position = nnx.Param(jax.random.normal(rngs.params(), (12, 16)) * 0.02)
        self.blocks = nnx.List([Attention(16, 2, dropout, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


@model
def gpt() -> Case:
    return made(GPT), (integers(2, 8, below=30),), {}


@model
def gpt_dropout() -> Case:
    return made(GPT, 0.2), (integers(2, 8, below=30),), {}


@model
def vision_transformer() -> Case:
    class ViT(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.patches = nnx.Conv(3, 16, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
            self.cls_token = nnx.Param(jnp.zeros((1, 1, 16)))
            init = nnx.initializers.truncated_normal(stddev=0.02)
            self.position_embeddings = nnx.Param(init(rngs.params(), (1, 10, 16), jnp.float32))
            self.encoder = nnx.Sequential(*[Attention(16, 4, rngs=rngs) for _ in range(2)])
            self.final_norm = nnx.LayerNorm(16, rngs=rngs)
            self.classifier = nnx.Linear(16, 5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            patches = self.patches(x)
            b = patches.shape[0]
            patches = patches.reshape(b, -1, patches.shape[-1])
            cls = jnp.tile(self.cls_token[...], [b, 1, 1])
            x = jnp.concat([cls, patches], axis=1) + self.position_embeddings[...]
            return self.classifier(self.final_norm(self.encoder(x))[:, 0])

    return made(ViT), (normal(2, 12, 12, 3),), {}


@model
def cached_decoding() -> Case:
    class Decoder(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.embed = nnx.Embed(20, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=True, rngs=rngs)
            self.attention.init_cache((2, 6, 16))
            self.head = nnx.Linear(16, 20, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            return self.head(self.attention(self.embed(ids)))

    return made(Decoder), (integers(2, 1, below=20),), {}


@model
def scanned_layers() -> Case:
    """nnx.scan over layers that nnx.vmap has made."""

    class Deep(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=4)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def create(rngs: nnx.Rngs) -> Any:
                return Attention(8, 2, rngs=rngs)

            self.layers = create(rngs)
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x: Any, layer: Any) -> Any:
                return layer(x)

            return self.head(forward(x, self.layers))

    return made(Deep), (normal(2, 5, 8),), {}


@model
def remat_blocks() -> Case:
    class Deep(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.blocks = nnx.List([MLP(6, 12, 6, rngs=rngs) for _ in range(3)])

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = x + nnx.remat(lambda m, x: m(x))(block, x)
            return x

    return made(Deep), (normal(4, 6),), {}


@model
def ensemble() -> Case:
    class Ensemble(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def create(rngs: nnx.Rngs) -> Any:
                return MLP(5, 8, 2, rngs=rngs)

            self.members = create(rngs)

        def __call__(self, x: Any) -> Any:
            y = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x)
            return y.mean(0), y.std(0)

    return made(Ensemble), (normal(4, 5),), {}


@model
def recurrent_cells() -> Case:
    class Cells(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            cells = nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell
            self.layers = nnx.List([nnx.RNN(cell(4, 5, rngs=rngs)) for cell in cells])

        def __call__(self, x: Any) -> Any:
            return [layer(x) for layer in self.layers]

    return made(Cells), (normal(2, 6, 4),), {}


@model
def bidirectional() -> Case:
    class Tagger(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.embed = nnx.Embed(20, 8, rngs=rngs)
            self.rnn = nnx.Bidirectional(
                nnx.RNN(nnx.GRUCell(8, 6, rngs=rngs)), nnx.RNN(nnx.LSTMCell(8, 6, rngs=rngs))
            )
            self.head = nnx.Linear(12, 4, rngs=rngs)

        def __call__(self, ids: Any, lengths: Any) -> Any:
            return self.head(self.rnn(self.embed(ids), seq_lengths=lengths))

    return made(Tagger), (integers(2, 6, below=20), jnp.array([6, 3])), {}


@model
def lora() -> Case:
    class Adapted(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.first = nnx.LoRALinear(5, 8, lora_rank=2, rngs=rngs)
            self.second = nnx.LoRA(8, 2, 3, base_module=nnx.Linear(8, 3, rngs=rngs), rngs=rngs)
            self.first.lora.lora_b[...] = self.first.lora.lora_b[...] + 0.1

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.relu(self.first(x)))

    return made(Adapted), (normal(4, 5),), {}


@model
def general_and_einsum() -> Case:
    class General(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.general = nnx.LinearGeneral((3, 4), (2, 5), axis=(1, 2), rngs=rngs)
            self.einsum = nnx.Einsum("nta,hab->nthb", (2, 5, 3), (2, 3), rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.einsum(self.general(x))

    return made(General), (normal(2, 3, 4),), {}


class Count(nnx.Variable):
    pass


@model
def custom_state() -> Case:
    """Counters, tied weights, a variable of a type of one's own."""

    class Stateful(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.linear = nnx.Linear(5, 5, use_bias=False, rngs=rngs)
            self.tied = nnx.Linear(5, 5, rngs=rngs)
            self.tied.kernel = self.linear.kernel
            self.count = Count(jnp.array(0))
            self.mean = nnx.BatchStat(jnp.zeros(5))

        def __call__(self, x: Any) -> Any:
            self.count[...] += 1
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
            return self.tied(nnx.silu(self.linear(x - self.mean))) / self.count[...]

    return made(Stateful), (normal(4, 5),), {}


@model
def vae() -> Case:
    class Encoder(nnx.Module):
        def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
            self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
            self.linear_mean = nnx.Linear(dmid, dout, rngs=rngs)
            self.linear_std = nnx.Linear(dmid, dout, rngs=rngs)
            self.rngs = rngs

        def __call__(self, x: Any) -> Any:
            x = nnx.relu(self.linear1(x))
            mean = self.linear_mean(x)
            std = jnp.exp(self.linear_std(x))
            kl = jnp.mean(0.5 * jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2, axis=-1))
            return mean + std * jax.random.normal(self.rngs.noise(), mean.shape), kl

    class VAE(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.encoder = Encoder(12, 16, 3, rngs=rngs)
            self.decoder = MLP(3, 16, 12, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            z, kl = self.encoder(x)
            return self.decoder(z), kl

    return made(VAE), (normal(4, 12),), {}


@model
def diffusion_step() -> Case:
    class UNet(nnx.Module):
        """The score model of the documentation's diffusion example, made small."""

        def __init__(self, *, rngs: nnx.Rngs):
            self.time = nnx.Sequential(
                nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 8, rngs=rngs)
            )
            self.down = nnx.Conv(1, 8, (3, 3), rngs=rngs)
            self.mid = nnx.Conv(8, 8, (3, 3), strides=(2, 2), rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.up = nnx.ConvTranspose(8, 8, (2, 2), strides=(2, 2), rngs=rngs)
            self.norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
            self.out = nnx.Conv(16, 1, (3, 3), rngs=rngs)

        def __call__(self, x: Any, t: Any) -> Any:
            angles = t[:, None] * jnp.exp(jnp.linspace(0.0, -4.0, 4))
            emb = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
            a = nnx.silu(self.down(x)) + emb[:, None, None]
            b = self.mid(a)
            n, h, w, c = b.shape
            b = b + self.attention(b.reshape(n, h * w, c)).reshape(b.shape)
            y = jnp.concatenate([self.up(b), a], -1)
            return self.out(nnx.silu(self.norm(y)))

    class Sampler(nnx.Module):
        """Some steps of DDPM by fori_loop."""

        def __init__(self, *, rngs: nnx.Rngs):
            self.model = UNet(rngs=rngs)
            self.betas = nnx.Variable(jnp.linspace(1e-4, 0.02, 5))

        def __call__(self, x: Any, key: Any) -> Any:
            betas = self.betas[...]
            bar = jnp.cumprod(1 - betas)

            def step(i: Any, x: Any) -> Any:
                t = 4 - i
                noise = jax.random.normal(jax.random.fold_in(key, t), x.shape)
                eps = self.model(x, jnp.full((x.shape[0],), t, jnp.float32))
                mean = (x - betas[t] / jnp.sqrt(1 - bar[t]) * eps) / jnp.sqrt(1 - betas[t])
                return mean + jnp.where(t > 0, jnp.sqrt(betas[t]), 0.0) * noise

            return lax.fori_loop(0, 3, step, x)

    return made(Sampler), (normal(2, 6, 6, 1), jax.random.key(3)), {}


@model
def gemma_block() -> Case:
    class GemmaBlock(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", (4, 16, 4), rngs=rngs)
            self.kv_einsum = nnx.Einsum("BSD,CKDH->CBSKH", (2, 1, 16, 4), rngs=rngs)
            self.out = nnx.Einsum("BTNH,NHD->BTD", (4, 4, 16), rngs=rngs)
            self.norm = nnx.RMSNorm(16, rngs=rngs)
            self.gate = nnx.Linear(16, 24, use_bias=False, rngs=rngs)
            self.up = nnx.Linear(16, 24, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(24, 16, use_bias=False, rngs=rngs)

        def __call__(self, x: Any, positions: Any) -> Any:
            y = self.norm(x)
            q = self.rope(self.q_einsum(y), positions) * 4**-0.5
            k, v = self.kv_einsum(y)
            k = self.rope(k, positions)
            logits = jnp.einsum("BTNH,BSKH->BTNS", q, k)
            logits = jnp.tanh(logits / 50.0) * 50.0
            mask = positions[:, :, None] >= positions[:, None]
            probs = jax.nn.softmax(jnp.where(mask[:, :, None], logits, -2.3819763e38), axis=-1)
            x = x + self.out(jnp.einsum("BTNS,BSKH->BTNH", probs, v))
            return x + self.down(nnx.gelu(self.gate(x)) * self.up(x))

        @staticmethod
        def rope(x: Any, positions: Any) -> Any:
            half = x.shape[-1] // 2
            timescale = 10_000 ** (2 * jnp.arange(half) / x.shape[-1])
            angle = positions[..., None, None] / timescale
            sin, cos = jnp.sin(angle), jnp.cos(angle)
            a, b = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    return made(GemmaBlock), (normal(2, 6, 16), jnp.tile(jnp.arange(6), (2, 1))), {}


@model
def mixture_of_experts_sorted() -> Case:
    """Tokens sorted by expert, counted, and computed by ragged products."""

    class MoE(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.router = nnx.Linear(8, 3, use_bias=False, rngs=rngs)
            init = nnx.initializers.lecun_normal()
            self.w = nnx.Param(init(rngs.params(), (3, 8, 8), jnp.float32))

        def __call__(self, x: Any) -> Any:
            probs = jax.nn.softmax(self.router(x))
            weight, expert = lax.top_k(probs, 2)
            order = jnp.argsort(expert.reshape(-1))
            tokens = jnp.take(x, order // 2, axis=0)
            sizes = jnp.bincount(expert.reshape(-1), length=3)
            y = lax.ragged_dot(tokens, self.w[...], sizes)
            y = jnp.zeros((2 * x.shape[0], 8)).at[order].set(y).reshape(x.shape[0], 2, 8)
            return (y * weight[..., None]).sum(1), sizes

    return made(MoE), (normal(7, 8),), {}


@model
def actor_critic_gaussian() -> Case:
    class Policy(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.body = MLP(4, 16, 16, rngs=rngs)
            self.mean = nnx.Linear(16, 2, kernel_init=nnx.initializers.orthogonal(0.1), rngs=rngs)
            self.log_std = nnx.Param(jnp.zeros(2))
            self.value = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, obs: Any, key: Any) -> Any:
            h = nnx.tanh(self.body(obs))
            mean, std = self.mean(h), jnp.exp(jnp.clip(self.log_std[...], -5, 2))
            u = mean + std * jax.random.normal(key, mean.shape)
            logp = jax.scipy.stats.norm.logpdf(u, mean, std).sum(-1)
            logp -= (2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u))).sum(-1)
            return jnp.tanh(u), logp, self.value(h).squeeze(-1)

    return made(Policy), (normal(5, 4), jax.random.key(1)), {}


@model
def nnx_control_flow() -> Case:
    class Net(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.a = nnx.Linear(4, 4, rngs=rngs)
            self.b = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.cond(x.mean() > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), self, x)
            _, x = nnx.while_loop(
                lambda c: jnp.abs(c[1]).max() > 0.05,
                lambda c: (c[0], 0.5 * jnp.tanh(c[0](c[1]))),
                (self.a, x),
            )
            return nnx.fori_loop(0, 3, lambda i, c: (c[0], c[1] + c[0](c[1])), (self.b, x))[1]

    return made(Net), (normal(3, 4),), {}


@model
def mamba() -> Case:
    """A selective state space by associative_scan."""

    class Mamba(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.in_proj = nnx.Linear(6, 24, use_bias=False, rngs=rngs)
            self.conv = nnx.Conv(12, 12, (4,), padding="CAUSAL", feature_group_count=12, rngs=rngs)
            self.x_proj = nnx.Linear(12, 1 + 2 * 4, use_bias=False, rngs=rngs)
            self.dt_proj = nnx.Linear(1, 12, rngs=rngs)
            self.a_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, 5.0), (12, 1))))
            self.d = nnx.Param(jnp.ones(12))
            self.out_proj = nnx.Linear(12, 6, use_bias=False, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            u, gate = jnp.split(self.in_proj(x), 2, -1)
            u = nnx.silu(self.conv(u))
            dt, b, c = jnp.split(self.x_proj(u), [1, 5], -1)
            dt = jax.nn.softplus(self.dt_proj(dt))
            a = jnp.exp(dt[..., None] * -jnp.exp(self.a_log[...]))
            bu = dt[..., None] * b[:, :, None] * u[..., None]

            def combine(left: Any, right: Any) -> Any:
                return left[0] * right[0], right[0] * left[1] + right[1]

            _, h = lax.associative_scan(combine, (a, bu), axis=1)
            y = jnp.einsum("bldn,bln->bld", h, c) + self.d[...] * u
            return self.out_proj(y * nnx.silu(gate))

    return made(Mamba), (normal(2, 9, 6),), {}


@model
def siren() -> Case:
    class Siren(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            def init(scale: float) -> Any:
                return nnx.initializers.uniform(scale)

            self.layers = nnx.List(
                [nnx.Linear(2, 16, kernel_init=init(0.5), rngs=rngs)]
                + [nnx.Linear(16, 16, kernel_init=init(0.02), rngs=rngs) for _ in range(2)]
            )
            self.out = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, xy: Any) -> Any:
            h = xy
            for layer in self.layers:
                h = jnp.sin(30.0 * layer(h))
            return self.out(h)

    grid = jnp.stack(jnp.meshgrid(jnp.linspace(-1, 1, 4), jnp.linspace(-1, 1, 4)), -1)
    return made(Siren), (grid.reshape(-1, 2),), {}


@model
def conformer_convolution() -> Case:
    class ConvModule(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.pointwise = nnx.Linear(8, 16, rngs=rngs)
            self.depthwise = nnx.Conv(8, 8, (5,), feature_group_count=8, rngs=rngs)
            self.bn = nnx.BatchNorm(8, axis_name=None, rngs=rngs)
            self.out = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: Any, lengths: Any) -> Any:
            mask = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
            y = nnx.glu(self.pointwise(self.norm(x))) * mask
            y = self.bn(self.depthwise(y), mask=mask)
            return x + self.out(nnx.swish(y)) * mask

    return made(ConvModule), (normal(2, 7, 8), jnp.array([7, 4])), {}


@model
def linen_bridge() -> Case:
    import flax.linen as nn

    class Hybrid(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.inner = nnx.bridge.ToNNX(nn.Dense(6), rngs=rngs).lazy_init(jnp.ones((1, 5)))
            self.out = nnx.Linear(6, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(nnx.relu(self.inner(x)))

    return made(Hybrid), (normal(3, 5),), {}


@model
def autoencoder_methods() -> Case:
    """A method beside the call, jitted."""

    class Auto(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.encoder = nnx.Linear(6, 2, rngs=rngs)
            self.decoder = nnx.Linear(2, 6, rngs=rngs)

        def encode(self, x: Any) -> Any:
            return nnx.tanh(self.encoder(x))

        def __call__(self, x: Any) -> Any:
            return self.decoder(nnx.jit(lambda m, x: m.encode(x))(self, x))

    return made(Auto), (normal(3, 6),), {}
