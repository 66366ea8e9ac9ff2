"""Functions of torch with a gradient of their own in files for JAX: under `jax.custom_vjp`."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402

Function = torch.autograd.Function


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Spike(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (1 + 10 * x.abs()) ** 2


class Exponential(Function):
    """Keeps its result, which has the gradient of the function where that is differentiated."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y * 3


class Same(Function):
    """Gives its argument, and keeps it: it is an argument then, and not a result."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 3


class Between(Function):
    """Keeps what it computes, a constant where its gradient is differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.sine = x, x.sin()
        return x * ctx.sine

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.sine * ctx.x


class StepSize(Function):
    """A learned step size: two arguments with gradients, and two numbers."""

    @staticmethod
    def forward(ctx, x, scale, low, high):
        ctx.save_for_backward(x, scale)
        ctx.low, ctx.high = low, high
        return torch.clamp(torch.round(x / scale), low, high) * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        steps = x / scale
        inside = (steps >= ctx.low) & (steps <= ctx.high)
        slope = torch.where(inside, torch.round(steps) - steps, steps.clamp(ctx.low, ctx.high))
        return gradient * inside, (gradient * slope).sum().reshape(1), None, None


class Pair(Function):
    """Two results, and arguments that may be one tensor."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, (x + w).relu()

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        return first * w * 3 + second, first * x.tanh()


class Masked(Function):
    """Is given integers, which have no gradient."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(x, mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        x, mask = ctx.saved_tensors
        return gradient * mask * x.cos(), None


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor([0.3]))
        self.function = function

    def forward(self, x):
        y = self.up(x)
        return self.down(self.function(y, self.scale)) * self.scale


FUNCTIONS = {
    "rounded": lambda y, scale: Round.apply(y * 3),
    "reversed": lambda y, scale: Reverse.apply(y, 0.5),
    "spikes": lambda y, scale: Spike.apply(y),
    "a result that is kept": lambda y, scale: Exponential.apply(y),
    "its argument": lambda y, scale: Same.apply(y),
    "a value that is kept": lambda y, scale: Between.apply(y),
    "a step size": lambda y, scale: StepSize.apply(y, scale, -4, 3),
    "a mask": lambda y, scale: Masked.apply(y, torch.arange(6) % 2),
    "two results": lambda y, scale: sum(Pair.apply(y, y.tanh())),
    "one tensor twice": lambda y, scale: sum(Pair.apply(y, y)),
    "calls of each other": lambda y, scale: Spike.apply(Round.apply(y * 2) - Exponential.apply(y)),
}
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def space_of(net, *inputs, to="flax", shapes="auto"):
    source, program, _ = translate(net, to, inputs, dynamic_shapes=shapes)
    space = {"__name__": "translated"}
    exec(compile(source.code, "translated.py", "exec"), space)
    return source, program, space


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox", "jax"])
@pytest.mark.parametrize("name", ["reversed", "a step size"])
def test_files_are_proved(name, to):
    pytest.importorskip(to)
    torch.manual_seed(1)
    _source, proof, reason = translate_proved(Net(FUNCTIONS[name]), to, (X,))
    assert proof, proof
    assert not reason


class Variables(nn.Module):
    """Calls what it computes as the function is called in the file."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x):
        spike = Spike.apply(self.up(x))
        reverse = Reverse.apply(spike * 2, 1.0)
        return reverse + Reverse.apply(spike + reverse, 1.0)


class Scale(Function):
    @staticmethod
    def forward(ctx, scale):
        y = scale.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 2


@pytest.mark.nightly
def test_parameters_do_not_hide_the_function_that_is_called_again():
    _source, proof, reason = translate_proved(Net(lambda y, _: Scale.apply(y)), "flax", (X,))
    assert proof, proof
    assert not reason


@pytest.mark.nightly
def test_variables_do_not_hide_functions():
    _source, proof, reason = translate_proved(Variables(), "flax", (X,))
    assert proof, proof
    assert not reason


class Domains(nn.Module):
    """Reverses a gradient by a view, whose sizes are those of the images far before it."""

    def __init__(self):
        super().__init__()
        pool = nn.AdaptiveAvgPool2d(1)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), pool)
        self.label, self.domain = nn.Linear(8, 5), nn.Linear(8, 2)

    def forward(self, x):
        z = self.features(x).flatten(1)
        return self.label(z), self.domain(Reverse.apply(z, 0.7))


@pytest.mark.nightly
def test_a_function_reads_sizes_of_what_it_is_given():
    _source, proof, reason = translate_proved(Domains(), "flax", (torch.randn(2, 3, 12, 12),))
    assert proof, proof
    assert not reason


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return x + Spike.apply(self.linear(x))


@pytest.mark.nightly
def test_blocks_that_call_a_function_are_one_class():
    _source, proof, reason = translate_proved(Blocks(), "flax", (X,))
    assert proof, proof
    assert not reason


class Once(Spike):
    backward = staticmethod(torch.autograd.function.once_differentiable(Spike.backward))


@pytest.mark.nightly
def test_what_is_differentiable_once_raises_where_it_is_differentiated_twice():
    source, _, space = space_of(Net(lambda y, scale: Once.apply(y)).eval(), X)
    model = space[source.name](rngs=nnx.Rngs(0))

    def slope(x):
        return jax.grad(lambda x: (model(x) ** 2).sum())(x)

    assert np.isfinite(slope(X.numpy())).all()
    with pytest.raises(NotImplementedError, match="Once is once_differentiable"):
        jax.grad(lambda x: slope(x).sum())(X.numpy())


class Spread(Function):
    """Gives a gradient of more elements than the argument, which torch adds up."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x * 2


@pytest.mark.nightly
def test_what_files_cannot_say_is_refused():
    net = Net(Spread.apply).eval()
    with pytest.raises(fmapper.ConversionError, match=r"Spread, .* same shape"):
        fmapper.source(net, "flax", (X,))


class Unknown(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * float(x.detach().sum())


@pytest.mark.nightly
def test_a_backward_that_cannot_be_recorded_raises_in_the_file():
    net = Net(lambda y, scale: Unknown.apply(y)).eval()
    source, _, space = space_of(net, X, shapes=None)
    model = space[source.name](rngs=nnx.Rngs(0))
    assert model(X.numpy()).shape == (5, 3)
    with pytest.raises(NotImplementedError, match="Unknown has no gradient"):
        jax.grad(lambda x: model(x).sum())(X.numpy())
