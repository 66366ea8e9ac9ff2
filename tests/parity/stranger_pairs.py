"""Pairs whose mistakes were planted by somebody who had not looked at how `verify` works."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

from parity import torch_models
from parity.pairs import KEY, Twins, normal, pair, source, to_equinox, to_plain

# --- attention ----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        batch, length, dim = x.shape
        if self.fault is None:
            q, k, v = self.qkv(x).reshape(batch, length, 3, 4, dim // 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(batch, length, dim))
        q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q / math.sqrt(dim if self.fault == "scale" else dim // 4)) @ k.mT
        at = torch.arange(length)
        seen = at[:, None] >= at
        if self.fault == "late mask":
            seen = seen & ~((at[:, None] >= 6) & (at[:, None] == at))
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-2 if self.fault == "axis" else -1)
        weights = weights.nan_to_num(0.0) if self.fault == "axis" else weights
        return self.out(torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2))


class Block(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        inner = fault if fault in ("scale", "late mask", "axis") else ""
        self.norm1, self.att = nn.LayerNorm(16), Attention(None if fault is None else inner)
        self.norm2 = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        if self.fault == "residual":
            x = self.att(self.norm1(x))
        elif self.fault == "post norm":
            x = self.norm1(x + self.att(x))
        else:
            x = x + self.att(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        sound = None if fault is None else ""
        self.blocks = nn.ModuleList([Block(sound), Block(fault), Block(sound)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def alike(a: Any, b: Any, *inputs: Any, **options: Any) -> Twins:
    """Twins with the same names."""
    b.load_state_dict(a.state_dict())
    return Twins(a, b, inputs, None, options)  # type: ignore[arg-type]


@pair(
    scale=r"in blocks\.1\.att: aten::(div|mul).*(math\.sqrt|scaled_dot)",
    axis=r"in blocks\.1\.att: aten::_softmax",
    late_mask=r"in blocks\.1\.att: .*(seen|masked_fill)",
    residual=r"in blocks\.1: aten::add.*x \+ self\.att",
    post_norm=r"in blocks\.1\.norm1: ",
)
def transformer_torch_torch(fault):
    return alike(source(Transformer), Transformer(fault), normal(2, 9, 16))


class Decoder(nn.Module):
    """A step of decoding, with a cache and rotary positions."""

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.o = nn.Linear(16, 11)
        self.fault = fault

    def rotate(self, x: Any, at: Any) -> Any:
        rates = (500_000.0 if self.fault == "base" else 10_000.0) ** (-torch.arange(8) / 8)
        angles = at[:, None] * rates
        first, second = x.chunk(2, -1)
        if self.fault is None:
            turned = first * angles.cos() - second * angles.sin()
            return torch.cat((turned, first * angles.sin() + second * angles.cos()), -1)
        z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag), -1)

    def forward(self, ids: Any, keys: Any, values: Any) -> Any:
        x, past = self.embed(ids), keys.shape[1]
        at = torch.arange(ids.shape[1]) + (past - 1 if self.fault == "position" else past)
        k = torch.cat((keys, self.rotate(self.k(x), at)), 1)
        v = torch.cat((values, self.v(x)), 1)
        scores = self.rotate(self.q(x), at) @ k.mT / 4
        scores = scores.masked_fill(torch.ones_like(scores, dtype=bool).triu(past + 1), -torch.inf)
        return self.o(scores.softmax(-1) @ v), k


@pair(position=r"at = torch\.arange|past", base=r"\*\* \(-torch\.arange")
def decoder_torch_torch(fault):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return alike(source(Decoder), Decoder(fault), ids, normal(2, 4, 16), -normal(2, 4, 16))


# --- losses, pooling, gradients -----------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 5)
        self.fault = fault

    def forward(self, x: Any, y: Any) -> Any:
        logits = self.fc2(torch.tanh(self.fc1(x)))
        if self.fault is None:
            return F.cross_entropy(logits, y, ignore_index=-100)
        each = F.cross_entropy(
            logits, y, reduction="none", label_smoothing=0.1 if self.fault == "smoothing" else 0.0
        )
        return each.mean() if self.fault == "mean of all" else each.sum() / (y >= 0).sum()


@pair(smoothing="cross_entropy", mean_of_all=r"each\.mean\(\)|cross_entropy")
def classifier_torch_torch(fault):
    labels = torch.tensor([0, -100, 2, 4, 1])
    return alike(source(Classifier), Classifier(fault), normal(5, 6), labels)


class Pools(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        x = self.conv1(x)
        if self.fault is None:
            y = F.max_pool2d(x, 3, 2, 1)
        else:
            edge = 0.0 if self.fault == "zeros" else -torch.inf
            y = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=edge), 3, 2)
        z = F.avg_pool2d(x, 3, 2, 1, count_include_pad=self.fault == "count")
        y = F.interpolate(
            self.conv2(y + z),
            scale_factor=2,
            mode="bilinear",
            align_corners=self.fault == "corners",
        )
        return torch.tanh(y)


@pair(zeros=r"max_pool2d|value=edge", count="avg_pool2d", corners="upsample_bilinear")
def pools_torch_torch(fault):
    return alike(source(Pools), Pools(fault), normal(2, 3, 8, 8))


class Kinks(nn.Module):
    """Operations whose derivatives are a choice."""

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        x = self.fc1(x)
        is_up = x > 0
        root = torch.where(is_up, x, 1.0).sqrt() if self.fault != "nan" else x.sqrt()
        x = self.fc2(torch.where(is_up, root, 0.0))
        y = x.clamp(0, 1)
        if self.fault == "straight through":
            y = x + (y - x).detach()
        sign = torch.sign(y - 0.5)
        return self.fc3(sign if self.fault == "no estimate" else y + (sign - y).detach())


@pair(
    nan=r"^backward: fc1\.", straight_through=r"^backward: fc2\.", no_estimate=r"^backward: fc2\."
)
def kinks_torch_torch(fault):
    return alike(source(Kinks), Kinks(fault), normal(9, 6))


class Tied(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, padding_idx=None if fault == "padding" else 0)
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        if fault != "untied":
            self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.tanh(self.fc(self.embed(ids).mean(1))))


@pair(padding=r"^backward: embed\.weight", untied=r"^steps: step 1: (embed|head)\.weight")
def tied_torch_torch(fault):
    return alike(source(Tied), Tied(fault), torch.tensor([[0, 1, 2], [3, 0, 5]]))


# --- optimizers ---------------------------------------------------------------------------------


class Dropping(torch.optim.SGD):
    """Lowers its rate at a step."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters, lr=0.01)
        self.number, self.at = 0, at

    def step(self) -> None:
        self.number += 1
        for group in self.param_groups:
            group["lr"] = 0.01 if self.number < self.at else 0.001
        super().step()


@pair(
    l2=r"^steps: step 1: ",
    schedule=r"^steps: step 1: ",
    nesterov=r"^steps: step 1: ",
    dampening=r"^steps: step 2: ",
)
def optimizers_torch_torch(fault):
    a = source(torch_models.MLP)
    twins = alike(a, torch_models.MLP(), normal(4, 12))
    ours, theirs = a.parameters(), twins.b.parameters()
    if fault == "l2":
        made = torch.optim.AdamW(ours, 1e-3), torch.optim.Adam(theirs, 1e-3, weight_decay=0.01)
    elif fault == "schedule":
        made = Dropping(ours, 2), Dropping(theirs, 1)
    else:
        changed = {"nesterov": {"nesterov": True}, "dampening": {"dampening": 0.1}}.get(fault, {})
        made = (
            torch.optim.SGD(ours, 0.01, momentum=0.9),
            torch.optim.SGD(theirs, 0.01, momentum=0.9, **changed),
        )
    twins.options["optimizer"] = made
    return twins


@pair(eps_in_root=r"^steps: step 1: ", clipping=r"^steps: step 1: ")
def optimizers_torch_plain(fault):
    from parity import plain_twins

    a = source(torch_models.MLP)
    root = fault == "eps in root"
    adam = optax.adam(1e-3, eps=0.0 if root else 1e-8, eps_root=1e-8 if root else 0.0)
    if fault == "clipping":  # of each element, and not of the norm
        adam = optax.chain(optax.clip(0.01), adam)
    torch_adam = torch.optim.Adam(a.parameters(), 1e-3)
    return to_plain(a, plain_twins.mlp, (normal(4, 12),), optimizer=(torch_adam, adam))


# --- loops --------------------------------------------------------------------------------------


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again, self.out = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Any) -> Any:
        u, h, states = self.inner(x), torch.zeros(len(x), 7), []
        for t in range(x.shape[1]):
            h = torch.tanh(u[:, t] + self.again(h))
            states.append(h)
        return self.out(torch.stack(states, 1))


def scanned(p, x, fault=""):
    def dense(q, v):
        return v @ q["w"] + q["b"]

    def step(carry, z):
        h, t = carry
        r = dense(p["again"], h)
        if fault == "late":
            r = jnp.where(t == 3, r * 0.5, r)
        if fault == "bias twice":
            r = r + p["again"]["b"]
        h = jax.nn.hard_tanh(z + r) if fault == "activation" else jnp.tanh(z + r)
        return (h, t + 1), h

    start = jnp.zeros((len(x), 7)), 0
    _, states = jax.lax.scan(step, start, dense(p["inner"], x).swapaxes(0, 1))
    return dense(p["out"], states.swapaxes(0, 1))


@pair(
    late=r"in scan\[3\]: lax::.*t == 3",
    bias_twice=r"in scan\[0\]: lax::add \((r = r \+|h = jax)",
    activation=r"in scan\[0\]: lax::.*hard_tanh",
)
def steps_torch_plain(fault):
    return to_plain(source(Steps), scanned, (normal(2, 6, 5),), fault)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


@pair(gelu=r"in scan\[0\]: lax::.*approximate=")
def layers_torch_scanned(fault):
    a = source(Deep)
    kernels = np.stack([layer.weight.detach().numpy().T for layer in a.layers])
    biases = np.stack([layer.bias.detach().numpy() for layer in a.layers])

    def model(p, x):
        def body(x, layer):
            w, b = layer
            return x + jax.nn.gelu(x @ w + b, approximate=fault == "gelu"), None

        return jax.lax.scan(body, x, p)[0]

    stacked = jnp.asarray(kernels), jnp.asarray(biases)
    options = {"gradients": False, "steps": 0}  # no rules stack layers
    return Twins(a, (model, stacked), (normal(3, 6),), None, options)  # type: ignore[arg-type]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0])


class GRU(eqx.Module):
    w_ih: jax.Array
    w_hh: jax.Array
    b_ih: jax.Array
    b_hh: jax.Array
    head: eqx.nn.Linear
    fault: str = eqx.field(static=True)

    def __init__(self, fault: str) -> None:
        self.w_ih, self.w_hh = jnp.zeros((18, 5)), jnp.zeros((18, 6))
        self.b_ih, self.b_hh = jnp.zeros((2, 18))
        self.head, self.fault = eqx.nn.Linear(6, 2, key=KEY), fault

    def step(self, h, x):
        ir, iz, new = jnp.split(self.w_ih @ x + self.b_ih, 3)
        hr, hz, hn = jnp.split(self.w_hh @ h + self.b_hh, 3)
        r = jax.nn.sigmoid(ir + hr)
        hn = self.w_hh[12:] @ (r * h) + self.b_hh[12:] if self.fault else r * hn
        new, z = jnp.tanh(new + hn), jax.nn.sigmoid(iz + hz)
        h = (1 - z) * new + z * h
        return h, h

    def __call__(self, x):
        def one(x):
            return jax.vmap(self.head)(jax.lax.scan(partial(GRU.step, self), jnp.zeros(6), x)[1])

        return jax.vmap(one)(x)


@pair(reset_before=r"scan\[0\]: lax::.*(hn = self|new \+ hn)")
def gru_cell_torch_equinox(fault):
    renames = ((r"rnn\.weight_(..)_l0", r"w_\1"), (r"rnn\.bias_(..)_l0", r"b_\1"))
    return to_equinox(source(Recurrent), GRU(fault), (normal(2, 4, 5),), *renames)


# --- dropout ------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 32), nn.Linear(32, 4)
        self.drop, self.fault = nn.Dropout(0.2 if fault == "rate" else 0.1), fault

    def forward(self, x: Any) -> Any:
        if self.fault == "order":
            return self.fc2(torch.sigmoid(self.drop(self.fc1(x))))
        return self.fc2(self.drop(torch.sigmoid(self.fc1(x))))


@pair(modes=(False, True), rate="^draws: dropout", order=r"^draws: dropout of 0\.1")
def noisy_torch_torch(fault):
    return alike(source(Noisy), Noisy(fault), normal(5, 6))
