"""Idioms of forecasters, vision models and agents in files for Flax NNX, beside PyTorch."""

from __future__ import annotations

import argparse
import copy
import functools
from typing import Optional

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import torch.nn.functional as F  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributions import Categorical, Normal  # noqa: E402

from fmapper.translation.source import note_arguments  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.walk import witness  # noqa: E402

ALIGN = None
WIDTH = 4


def transcribed(model, *inputs):
    """Returns the code of a file whose model in evaluation gives what PyTorch gives."""
    model.eval()
    made = transcribe(model, inputs)
    assert not made.fallen
    assert not made.only_evaluation
    space: dict = {}
    exec(made.whole, space)
    net = space["make_model"](rngs=nnx.Rngs(0))
    space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
    net.eval()
    with torch.no_grad():
        expected = model(*inputs)
    given = (jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x for x in inputs)
    np.testing.assert_allclose(net(*given), expected.numpy(), rtol=1e-5, atol=1e-5)
    return made.whole


class Scaled(nn.Module):
    def forward(self, x):
        return F.relu(x) * 1.7


ACTIVATIONS = {"relu": Scaled(), "tanh": nn.Tanh()}


class Options(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Head(nn.Module):
    def __init__(self, width, act: type[nn.Module] = nn.ReLU):
        super().__init__()
        self.act = act()
        self.extra: Optional[nn.Module] = None  # noqa: UP045
        if width > 1:
            self.extra = nn.Linear(width, width)

    def forward(self, x):
        return self.act(self.extra(x))


class Made(nn.Module):
    def __init__(self, options, head, names, device=torch.device("cpu")):  # noqa: B008
        super().__init__()
        global ALIGN  # noqa: PLW0603
        ALIGN = True
        torch.manual_seed(3)
        self.conv = nn.Conv1d(1, options.width, 3, padding=1, bias=False)
        self.act = ACTIVATIONS[options.act]
        self.head = head
        table = torch.zeros(5, WIDTH)
        table.require_grad = False
        table[:, 0] = 1.0
        self.kind = nn.Embedding(5, WIDTH)
        self.kind.weight = nn.Parameter(table, requires_grad=False)
        self.count = self.conv.weight.shape[1:].numel()
        self.register_buffer("mask", self.build_mask(6), persistent=False)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names}).to(device)
        self.device = device
        self.reset()
        self.to(self.device)

    def build_mask(self, length):
        mask = torch.empty(length, length)
        mask.fill_(2.0)
        mask.triu_(1)
        ones = torch.empty(length, length)
        nn.init.constant_(ones, 3.0)
        return mask + ones

    def reset(self):
        self.conv.reset_parameters()

    def forward(self, x, kind):
        x = self.act(F.conv1d(input=x, weight=self.conv.weight, padding=1, stride=(2,)))
        x = F.interpolate(x, size=6, mode="linear", align_corners=ALIGN)
        x = self.mask @ self.head(x.transpose(1, 2)) * self.count + self.kind(kind)[:, None]
        for i, part in enumerate(self.parts.values()):
            x = part(x) * (i + 1)
        return x


def test_what_constructors_of_repositories_do():
    with note_arguments():
        head = Head(WIDTH)
        model = Made(Options(width=WIDTH, act="relu"), head, ("zeta", "alpha"))
    code = transcribed(model, torch.randn(2, 1, 8), torch.tensor([0, 3]))
    assert 'Options({"width": 4, "act": "relu"})' in code
    assert 'ACTIVATIONS = {"relu": Scaled()}' in code
    assert "self.kind.embedding = Buffer(table)" in code
    assert "self.count = math.prod(self.conv.kernel" in code
    assert "global ALIGN" in code
    assert "manual_seed" not in code


class Mask:
    def __init__(self, length, device="cpu"):
        with torch.no_grad():
            self._mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1).to(device)

    @property
    def mask(self):
        return self._mask


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v) + k


class Norm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x, mode):
        if mode == "norm":
            self._measure(x)
            return (x - self.mean) / self.spread
        return x * self.spread + self.mean

    def _measure(self, x):
        self.mean = x.mean(1, keepdim=True).detach()
        self.spread = (x.var(1, keepdim=True, unbiased=False) + self.eps).sqrt()


class Parts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.count = count
        self.fc = nn.Linear(width, width * count)

    def forward(self, x):
        return self.fc(x).chunk(self.count, dim=-1)


class Forecaster(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.norm = Norm()
        self.two, self.three = Parts(width, 2), Parts(width, 3)

    def weigh(self, x):
        return x.softmax(-1).unsqueeze(-2)

    def forward(self, x):
        x = self.norm(x, "norm")
        scores = (x @ x.transpose(1, 2)).masked_fill(Mask(x.shape[1], x.device).mask, -np.inf)
        y = attention(*self.three(scores.softmax(-1) @ x))
        y, z = self.two(y + self.weigh(x)[..., 0, :] + self.weigh(x[:, 0]))
        x = y + z
        return self.norm(x, "back")


def test_what_methods_share_within_a_call():
    code = transcribed(Forecaster(3), torch.randn(2, 5, 3))
    assert "self.mean = Slot()" in code
    assert "self.mean.value = jax.lax.stop_gradient(x.mean(axis=1, keepdims=True))" in code
    assert "chunk(self.fc(x), self.count, -1)" in code
    assert "jnp.expand_dims(" in code
    assert "Torchattention(q, k, v)" in code
    assert "torch." not in code


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        x = self.fc(x)
        if not hasattr(self, "mean"):
            self.mean = x.mean((0, 1))
        return x - self.mean


def test_what_outlives_a_call_has_no_slot():
    code = transcribe(Keeps(), (torch.randn(2, 5, 3),)).whole
    assert "self.mean = Slot()" not in code


def clones(module, count):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])


class Stack(nn.Module):
    def __init__(self, layer, count):
        super().__init__()
        self.layers = clones(layer, count)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Body(nn.Sequential):
    def __init__(self, first):
        super().__init__(first, nn.ReLU())


class Whole(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.stack = Stack(nn.Linear(body.width, body.width), 2)
        self.body = body

    def forward(self, x):
        return self.stack(self.body(x))


def test_attributes_that_parts_get_later_and_copies_of_parts():
    with note_arguments():
        body = Body(nn.Linear(3, 3))
        body.width = 3
        model = Whole(body)
    code = transcribed(model, torch.randn(2, 3))
    assert "body=with_attributes(Body(" in code


class Pool(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.width, self.heads = width, heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        y, weights = F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=x.shape[-1], num_heads=self.heads,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight,
            v_proj_weight=self.v.weight, in_proj_weight=None,
            in_proj_bias=torch.cat([self.q.bias, self.k.bias, self.v.bias]), bias_k=None,
            bias_v=None, add_zero_attn=False, dropout_p=0, out_proj_weight=self.out.weight,
            out_proj_bias=self.out.bias, use_separate_proj_weight=True, training=self.training,
            key_padding_mask=mask,
        )  # fmt: skip
        return y + weights.sum()


def test_attention_by_the_weights_of_layers():
    mask = torch.tensor([[False, True, False, False], [False, False, False, True]])
    transcribed(Pool(6, 2), torch.randn(4, 2, 6), mask)


class Agent(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.lstm = nn.LSTM(width, width)
        self.actor = nn.Linear(width, 3)

    def forward(self, x, action):
        hidden = self.lstm(x.reshape(-1, 2, self.lstm.input_size))[0]
        logits = self.actor(hidden)
        choice = Categorical(logits=logits)
        step = Normal(logits, logits.exp())
        chosen = choice.log_prob(action) + choice.entropy() + choice.probs[..., 0]
        return chosen + (step.log_prob(x[..., :3]) + step.entropy()).sum(-1)


class Drops(Agent):
    def forward(self, x):
        y = F.dropout(x, 0.0, self.training) + F.dropout(x, 0.5, self.training)
        return self.lstm(y)[0]


def test_what_draws_at_no_rate_is_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(witness, "agree", lambda *_, **__: compared.append(1) or True)
    transcribed(Drops(), torch.randn(4, 2, 5))
    assert compared


def test_distributions():
    code = transcribed(Agent(), torch.randn(4, 2, 5), torch.randint(0, 3, (4, 2)))
    assert "choice = Categorical(logits=logits)" in code


class Samples(Agent):
    def forward(self, x):
        return Normal(x, x.exp()).rsample() + Categorical(logits=x).sample()[..., None]


def test_samples_of_distributions():
    code = transcribe(Samples(), (torch.randn(4, 2, 5),)).code
    assert "Normal(x, jnp.exp(x)).rsample(self.rngs.noise())" in code
    space: dict = {}
    exec(code, space)
    net = space["Samples"](rngs=nnx.Rngs(0))
    x = jnp.zeros((2000, 2, 5))
    drawn = np.asarray(net(x)).mean(axis=(0, 1))
    np.testing.assert_allclose(drawn, 2.0, atol=0.2)  # of the mean of 0 to 4, and of 0


class Grid:
    def __init__(self):
        self.low, self.size = np.array([-1.0, 0.5], np.float32), 2


class Losses(nn.Module):
    def __init__(self, grid, norm, args):
        super().__init__()
        self.last = None
        self.rnns = []
        self.norm = norm(grid.size)
        self.low = torch.tensor(grid.low + args.shift)
        self.rank = nn.ParameterList(
            [nn.Parameter(nn.init.xavier_normal_(torch.empty(2, grid.size, 3))) for _ in range(2)]
        )
        self.rnn = nn.GRU(grid.size, 3, batch_first=True)
        self.rnns.append(self.rnn)
        self._flatten()

    def _flatten(self):
        [rnn.flatten_parameters() for rnn in self.rnns]

    def forward(self, x):
        self._flatten()
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * self.low
        y = self.rnn(x)[0] + x @ self.rank[0][1] @ self.rank[1][0].t() @ self.rank[1][1]
        self.last = F.mse_loss(y, torch.ones_like(y))
        return y


def test_objects_of_settings_and_what_callers_read_afterwards():
    with note_arguments():
        norm = functools.partial(nn.InstanceNorm1d, affine=True, track_running_stats=False)
        model = Losses(Grid(), norm, argparse.Namespace(shift=0.5))
    code = transcribed(model, torch.randn(2, 5, 2))
    assert "grid=with_attributes(object.__new__(Grid), low=np.array([-1.0, 0.5]," in code
    assert "norm=partial(InstanceNorm2d, affine=True)" in code
    assert "args=Namespace(shift=0.5)" in code
    assert "self.last = Slot()" in code
    assert "xavier" not in code
    assert "variance_scaling" in code


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.BatchNorm1d(3, track_running_stats=False), "without running statistics"),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "with running statistics"),
        (lambda: nn.AvgPool1d(2, padding=1, ceil_mode=True), "counts its padding"),
    ],
)
def test_layers_without_counterpart_are_refused_by_name(layer, reason):
    with note_arguments():
        model = Body(layer())
    with pytest.raises(NotTranscribed, match=f"0: .* {reason}.* has no counterpart"):
        transcribe(model, (torch.randn(2, 3, 4),))


class Causal(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.fc = nn.Linear(size, size)
        self.mask = torch.full((size, size), float("-inf")).triu(1)

    def forward(self, x):
        self.mask = self.mask.to(x.dtype) if self.mask is not None else None
        return torch.softmax(self.fc(x) + self.mask, -1)


@pytest.mark.nightly
def test_a_mask_that_is_infinite_is_proved():
    x = torch.randn(2, 4, 4)
    model = Causal(4)
    made = transcribe(model, (x,))
    assert "self.mask = " not in made.code.partition("def __call__")[2]
    assert made.prove(model, (x,))
