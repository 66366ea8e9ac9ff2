"""Functions and methods of a model's own code are functions and methods of its files."""

from __future__ import annotations

import ast
import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402


def rope(x, pos):
    size = x.shape[-1]
    angle = pos[:, None] / 100 ** (torch.arange(0, size, 2) / size)
    cos, sin = angle.cos(), angle.sin()
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).flatten(-2)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotate_both(q, k, cos, sin):
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    return q, k


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def drop(x):
    y = torch.tanh(x) * 2 + 1
    return F.dropout(y - y.mean(-1, keepdim=True), 0.5)


def split_windows(x, size):
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, c)


class Attention(nn.Module):
    """Queries with other heads than keys: one function for both."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x):
        b, t, _ = x.shape
        pos = torch.arange(t)
        q = self.q(x).view(b, t, 4, 8).transpose(1, 2)
        k = self.k(x).view(b, t, 2, 8).transpose(1, 2)
        v = self.v(x).view(b, t, 2, 8).transpose(1, 2)
        q, k = rope(q, pos), rope(k, pos)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Rotary(nn.Module):
    """A function that another one calls twice."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(8, 16)

    def forward(self, x, cos, sin):
        q, k = self.qk(x).chunk(2, -1)
        q, k = rotate_both(q, k, cos, sin)
        return q @ k.transpose(-2, -1)


class Modulated(nn.Module):
    """A function in two classes."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.linear = nn.Linear(8, 16)

    def forward(self, x, c):
        shift, scale = self.linear(c).chunk(2, -1)
        return modulate(self.block(x, c), shift, scale)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, c):
        return torch.tanh(modulate(x, self.first(c), self.second(c)))


class Windows(nn.Module):
    """A number that a function is given is its argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        small = split_windows(x, 2).amax((1, 2))
        large = split_windows(self.linear(x), 4).amax((1, 2))
        return small.sum(-1), large


class Square(nn.Module):
    """Of a square whose second window is all of it: `contiguous` then copies nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x.view(2, 8, 8, 3))
        many = split_contiguous(x, 4).amax((1, 2))
        return many, split_contiguous(self.second(x[:, :4, :4]), 4).amax((1, 2))


def split_contiguous(x, size):
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


class Biased(nn.Module):
    """A method that some objects of a class call."""

    def __init__(self, has_bias):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bias = nn.Linear(8, 8) if has_bias else None

    def make_bias(self, x):
        return torch.tanh(self.bias(x)) * 2

    def forward(self, x, bias=None):
        if self.bias is not None:
            bias = self.make_bias(x)
        return torch.relu(self.linear(x) + bias), bias


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Biased(i == 0) for i in range(3)])

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Heads(nn.Module):
    """A method without parameters that it reads."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.heads = 2

    def split_heads(self, x):
        b, t, d = x.shape
        x = x.view(b, t, self.heads, d // self.heads).transpose(1, 2)
        return x / (x.norm(dim=-1, keepdim=True) + 1e-6)

    def forward(self, x):
        q, k = self.split_heads(self.q(x)), self.split_heads(self.k(x))
        return q @ k.transpose(-2, -1)


class Dropped(nn.Module):
    """What draws is part of its caller, with the keys that this has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return drop(x) + drop(self.linear(x))


class Noisy(nn.Module):
    """A function and a method that are pure in evaluation alone, and a method of both modes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def mix(self, x):
        return self.second(torch.tanh(self.first(x)) * 2)

    def spread(self, x):
        y = torch.relu(x) * 2 + x
        return y - y.mean() if self.training else y * torch.exp(-y * y)

    def forward(self, x):
        x = blur(x, self.training) + blur(self.first(x), self.training)
        return self.mix(self.spread(x)) + self.mix(self.spread(self.second(x)))


def blur(x, training):
    y = torch.tanh(x) * 2 + x * x
    return F.dropout(y - y.mean(-1, keepdim=True), 0.5, training)


class Scaled(nn.Module):
    """A function of a layer's arrays alone is not worth one: the layer stays."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return project(project(x, self.first), self.second)


def project(x, layer):
    y = torch.relu(x) * 2
    return layer(y - y.mean(-1, keepdim=True))


class Dynamics(nn.Module):
    """A part that is called by its methods alone."""

    def __init__(self):
        super().__init__()
        self.inner, self.prior, self.post = nn.Linear(7, 6), nn.Linear(6, 4), nn.Linear(11, 4)

    def begin(self, x):
        return torch.zeros(x.shape[0], 6), torch.zeros(x.shape[0], 4)

    def imagine(self, state, action):
        h = torch.tanh(self.inner(torch.cat([state[1], action], -1)) + state[0])
        return h, self.prior(h)

    def observe(self, state, action, x):
        h, prior = self.imagine(state, action)
        return (h, self.post(torch.cat([h, x], -1))), prior


class Autoencoder(nn.Module):
    """Methods that users call, and one that only its caller does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 8)

    def encode(self, x):
        return torch.tanh(self.first(x))

    def _decode(self, z):
        return torch.sigmoid(self.second(z))

    def forward(self, x):
        return self.run(x)

    def run(self, x):
        z = self.encode(x)
        return self._decode(z), z


class Mixed(nn.Module):
    """A method with a parameter, and a function in a loop."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(8))

    def _mix(self, x, y):
        s = (x * y).sum(-1, keepdim=True) * self.w
        return torch.tanh(s) * x + torch.sigmoid(s) * y

    def forward(self, x):
        y = self._mix(x, self.linear(x))
        for _ in range(3):
            y = gate(y, self.linear(y))
        return self._mix(y, x)


def gate(x, y):
    g = torch.sigmoid(x * 0.5)
    return x * g + y * (1 - g)


class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.dynamics = Dynamics()

    def forward(self, x, action):
        state = self.dynamics.begin(x)
        total = 0.0
        for t in range(2):
            state, prior = self.dynamics.observe(state, action[:, t], x[:, t])
            total = total + ((state[1] - prior) ** 2).mean(-1)
        h, y = self.dynamics.imagine(state, action[:, 0])
        return h, y, total


def functions_of(code):
    return {one.name for one in ast.parse(code).body if isinstance(one, ast.FunctionDef)}


def agree(model, code, *inputs):
    """Runs a file on inputs and compares with the model."""
    names: dict[str, object] = {}
    exec(compile(code, "file", "exec"), names)
    from flax import nnx

    net = names[type(model).__name__](rngs=nnx.Rngs(0))
    names["load_weights"](net, {key: value.numpy() for key, value in model.state_dict().items()})
    if hasattr(net, "eval"):
        net.eval()
    found = jax.tree.leaves(net(*(x.numpy() for x in inputs)))
    with torch.no_grad():
        wanted = [*jax.tree.leaves(model(*inputs))]
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_calls_with_other_heads_are_calls_of_one_function():
    model = Attention().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 5, 32),))
    assert code.count("def rope(x, pos)") == 1
    assert "q = rope(q, pos)" in code
    assert "k = rope(k, pos)" in code
    agree(model, code, torch.randn(3, 7, 32))


@pytest.mark.nightly
def test_functions_that_functions_call_are_functions_too():
    model = Rotary().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 5, 8), torch.rand(5, 8), torch.rand(5, 8)))
    assert "rotate_half" in functions_of(code)
    assert "q, k = rotate_both(q, k, cos, sin)" in code  # it is called once, and long
    assert "q = q * cos + rotate_half(q) * sin" in code
    agree(model, code, torch.randn(3, 4, 8), torch.rand(4, 8), torch.rand(4, 8))


@pytest.mark.nightly
def test_two_classes_call_one_function():
    model = Modulated().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 5, 8), torch.randn(2, 8)))
    assert code.count("def modulate(x, shift, scale)") == 1
    assert "modulate(self.block(x, c), shift, scale)" in code
    agree(model, code, torch.randn(3, 4, 8), torch.randn(3, 8))


@pytest.mark.nightly
def test_numbers_of_calls_are_arguments():
    model = Windows().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8, 8, 3),))
    assert code.count("def split_windows(x, size)") == 1
    assert "split_windows(x, 2)" in code
    assert "split_windows(self.linear(x), 4)" in code
    agree(model, code, torch.randn(3, 8, 16, 3))


@pytest.mark.nightly
def test_sides_of_a_square_are_sizes_of_their_own():
    model = Square().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 192),))
    assert code.count("def split_contiguous(x") == 1
    assert "x.shape[1] // 4, 4, x.shape[2] // 4" in code
    agree(model, code, torch.randn(2, 192))


@pytest.mark.nightly
def test_objects_of_one_class_stay_one_class():
    model = Stack().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8),))
    assert code.count("(nnx.Module)") == 2
    assert "def make_bias" not in code
    agree(model, code, torch.randn(3, 8))


@pytest.mark.nightly
def test_methods_without_parameters_are_functions():
    model = Heads().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 5, 8),))
    assert code.count("def split_heads(x)") == 1
    assert "q = split_heads(self.q(x))" in code
    agree(model, code, torch.randn(3, 4, 8))


@pytest.mark.nightly_cases("draws")
@pytest.mark.parametrize(
    ("make", "name"), [(Dropped, "drop"), (Scaled, "project")], ids=["draws", "calls_parts"]
)
def test_what_needs_an_object_is_part_of_the_caller(make, name):
    code = fmapper.source(make().eval(), "flax", (torch.randn(2, 8),))
    assert name not in functions_of(code)


@pytest.mark.nightly
def test_both_modes_have_the_same_functions():
    x = torch.randn(4, 8)
    code = fmapper.source(Noisy(), "flax", (x,), train=True)
    assert "blur" not in functions_of(code)  # it draws in training
    assert code.count("def mix(self, x)") == 1
    called = [line for line in code.splitlines() if "self.mix(" in line and "#" not in line]
    assert len(called) == 1 + code.count("if self.deterministic:")
    agree(Noisy().eval(), code, torch.randn(3, 8))


@pytest.mark.nightly
def test_methods_of_parts_are_methods():
    model = World().eval()
    x, action = torch.randn(2, 3, 5), torch.randn(2, 3, 3)
    code = fmapper.source(model, "flax", (x, action))
    assert "def observe(self, state, action, x)" in code
    assert "h, prior = self.imagine(state, action)" in code
    assert "self.dynamics.begin(x)" in code
    assert "h, y = self.dynamics.imagine(state, action[:, 0])" in code
    agree(model, code, torch.randn(4, 3, 5), torch.randn(4, 3, 3))


@pytest.mark.nightly
def test_methods_that_users_call_stay():
    model = Autoencoder().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8),))
    assert "def encode(self, x)" in code
    assert "z = self.encode(x)" in code
    assert "def _decode" not in code  # one call
    assert "def run" not in code  # all that forward does
    agree(model, code, torch.randn(3, 8))


@pytest.mark.nightly
def test_methods_that_repeat_are_methods_with_their_parameters():
    model = Mixed().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8),))
    assert code.count("def _mix(self, x, y)") == 1
    assert "y = self._mix(x, self.linear(x))" in code
    assert "for _ in range(3):\n            y = gate(y, self.linear(y))\n" in code
    agree(model, code, torch.randn(3, 8))


def bend_or_not(x):
    if x.shape[-1] > 4:
        return torch.tanh(x) * 2 + x * x
    return torch.sigmoid(x) * 3 - x * x


def around(x):
    return torch.exp(-bend_or_not(x)) + torch.relu(x) * 2


class Choosing(nn.Module):
    """A function that computes something else for other sizes, within one that does not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x)
        wide = around(x) + around(y) + bend_or_not(y)
        z = self.second(wide)
        narrow = around(z) + around(z * 2) + bend_or_not(z)
        return wide.sum(-1) + narrow.sum(-1)


@pytest.mark.nightly
def test_functions_are_one_only_if_those_in_them_are():
    model = Choosing().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8),))
    assert {"around", "around_2", "bend_or_not", "bend_or_not_2"} <= functions_of(code)
    agree(model, code, torch.randn(3, 8))


def join_windows(windows, size, h, w):
    b = windows.shape[0] // ((h // size) * (w // size))
    x = windows.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)


def smooth(x, size):
    _, h, w, _ = x.shape
    windows = split_windows(x, size)
    windows = windows - windows.mean((1, 2), keepdim=True)
    return join_windows(windows, size, h, w) * 2 + x


class Smooth(nn.Module):
    """Functions within a function, which are given other numbers and sizes by its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = smooth(x, 2) + smooth(self.linear(x), 2)
        z = smooth(y[:, ::2, ::2], 4)
        return y.sum((1, 2)) + join_windows(split_windows(z, 2), 2, z.shape[1], z.shape[2]).amax()


class TwoRotaries(nn.Module):
    """A function in a function that two modules call."""

    def __init__(self):
        super().__init__()
        self.first, self.linear = Rotary(), nn.Linear(8, 16)

    def forward(self, x, cos, sin):
        q, k = self.linear(x).chunk(2, -1)
        q, k = rotate_both(q, k, cos, sin)
        return self.first(x, cos, sin) + q @ k.transpose(-2, -1)


@pytest.mark.nightly
def test_functions_within_functions():
    model = TwoRotaries().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 5, 8), torch.rand(5, 8), torch.rand(5, 8)))
    assert {"rotate_half", "rotate_both"} <= functions_of(code)
    assert "q * cos + rotate_half(q) * sin" in code
    agree(model, code, torch.randn(3, 4, 8), torch.rand(4, 8), torch.rand(4, 8))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")  # by the sizes of images
def test_functions_that_give_their_numbers_on():
    model = Smooth().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8, 16, 3),))
    assert {"split_windows", "join_windows"} <= functions_of(code)
    agree(model, code, torch.randn(3, 8, 16, 3))


class Ranks(nn.Module):
    """A method of arrays with two and with three dimensions, after another method."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def begin(self, x):
        return torch.tanh(self.first(x))

    def mix(self, x):
        y = self.second(x)
        return y - y.mean(dim=tuple(range(1, x.ndim)), keepdim=True)


class OfRanks(nn.Module):
    def __init__(self):
        super().__init__()
        self.ranks = Ranks()

    def forward(self, x):
        x = self.ranks.begin(x)
        return self.ranks.mix(x) + self.ranks.mix(torch.stack([x, -x], 1)).sum(1)


@pytest.mark.nightly
def test_a_method_that_differs_has_the_next_number():
    model = OfRanks().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8),))
    assert "def mix(self, x)" in code
    assert "def mix_2(self, x)" in code
    agree(model, code, torch.randn(3, 8))


def traced(function):
    def wrapper(*args):
        return function(*args)

    return wrapper


class Called:
    """A callable that a function says it wraps."""

    def __call__(self, x):
        return torch.tanh(x)


@functools.wraps(Called())
def squash(x):
    return torch.tanh(x) * 2


@traced
def swell(x):
    return torch.relu(x) * 2 + x * x


bend = lambda x: torch.sigmoid(x) * x + torch.exp(-x * x)  # noqa: E731


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = squash(swell(x)) + swell(self.linear(x))
        return bend(y) + bend(x)


@pytest.mark.nightly
def test_functions_have_the_names_that_code_calls_them_by():
    model = Decorated().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 8),))
    assert {"swell", "bend"} <= functions_of(code)
    agree(model, code, torch.randn(3, 8))


class Shift(nn.Module):
    """A step of a flow, whose odd ones begin at the other end."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.net = nn.Linear(3, 3)

    def run(self, x):
        a, b = (x.flip(-1) if self.odd else x).chunk(2, -1)
        return torch.cat([a, b * torch.exp(torch.tanh(self.net(a)))], -1)

    def invert(self, y):
        a, b = y.chunk(2, -1)
        x = torch.cat([a, b * torch.exp(-torch.tanh(self.net(a)))], -1)
        return x.flip(-1) if self.odd else x


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([Shift(bool(i % 2)) for i in range(4)])

    def forward(self, x):
        for step in self.steps:
            x = step.run(x)
        y = x
        for step in reversed(self.steps):
            y = step.invert(y)
        return x, y


@pytest.mark.nightly
def test_parts_without_forward_have_their_methods():
    model = Flow().eval()
    code = fmapper.source(model, "flax", (torch.randn(2, 6),))
    assert code.count("def run(self, x)") == code.count("def invert(self, y)") <= 2
    agree(model, code, torch.randn(3, 6))


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["equinox", "jax"])
def test_methods_of_a_model_are_so_for_other_targets(target):
    code = fmapper.source(Mixed().eval(), target, (torch.randn(2, 8),))
    name = "_mix(self, x, y)" if target == "equinox" else "mixed__mix(params, x, y)"
    assert code.count(f"def {name}") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["equinox", "jax"])
def test_other_targets_have_them_too(target):
    code = fmapper.source(Modulated().eval(), target, (torch.randn(2, 5, 8), torch.randn(2, 8)))
    assert code.count("def modulate(x, shift, scale)") == 1


@pytest.mark.nightly
def test_functions_and_methods_are_as_they_were_after_a_recording():
    before = rope, Heads.split_heads, Dynamics.observe
    fmapper.source(Attention().eval(), "flax", (torch.randn(2, 5, 32),))
    fmapper.source(Heads().eval(), "flax", (torch.randn(2, 5, 8),))
    fmapper.source(World().eval(), "flax", (torch.randn(2, 3, 5), torch.randn(2, 3, 3)))
    assert before == (rope, Heads.split_heads, Dynamics.observe)
