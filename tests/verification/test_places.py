"""Where two models part: in loops, among constants, in shapes, in what is drawn."""

from __future__ import annotations

import linecache

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import fmapper  # noqa: E402
from fmapper.verification import align  # noqa: E402
from fmapper.verification.models.side import make_sides  # noqa: E402

nn = torch.nn


def filled(cls, *args, **kwargs):
    """A module with weights that do not depend on its arguments."""
    module = cls(*args, **kwargs)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return module.eval()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def rows(p, x, *, fault=False):
    def step(carry, row):
        h, number = carry
        h = jnp.tanh(row + h @ p)
        if fault:
            h = jnp.where(number == 2, 2 * h, h)
        return (h, number + 1), h

    return jax.lax.scan(step, (jnp.zeros(4), 0), x)[1]


def powers(p, x, *, fault=False):
    def step(y):
        return 0.3 * y if fault else 0.25 * y

    y = jax.lax.while_loop(lambda y: y.sum() > 1, step, x @ p)
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, y)


@pytest.mark.parametrize(("model", "loop"), [(rows, "scan[2]"), (powers, "while[0]")])
def test_the_step_of_a_loop_is_named(model, loop):
    p, x = jnp.full((4, 4), 0.3), jnp.ones((4, 4))
    report = fmapper.verify((model, p), (lambda p, x: model(p, x, fault=True), p), x)
    assert not report
    assert report.first.b.loop == loop
    assert f"in {loop}: lax::" in str(report.first)


def count_down(p, x, *, fault=False):
    """Halves each element until it is small, one of a batch later than another."""

    def halve(y):
        return jax.lax.while_loop(lambda y: y > 1, lambda y: y * (0.4 if fault else 0.5), y)

    return jax.vmap(halve)(x * p)


def test_loops_of_a_batch_end_one_by_one():
    p, x = jnp.ones(3), jnp.array([1.5, 3.0, 9.0])
    (side, other) = make_sides((count_down, p), (count_down, p), (x,), {}, None)
    last = [one for one in side.watch(other.adapter) if one.op == "lax::mul" and one.loop]
    assert [one.loop for one in last] == [f"while[{step}]" for step in range(4)]
    report = fmapper.verify((count_down, p), (lambda p, x: count_down(p, x, fault=True), p), x)
    assert report.first.b.loop == "while[0]"
    same = fmapper.verify((count_down, p), (count_down, p), x)
    assert same


def test_the_layer_of_a_converted_model_is_named():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.relu, nnx.Linear(3, 2, rngs=rngs))
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    wrong = fmapper.convert(net, "torch", (x,))
    with torch.no_grad():
        wrong.get_parameter("layers.2.kernel").mul_(1.5)
    first = fmapper.verify(net, wrong, x).first
    assert first.a.module == "layers.2"


def test_a_loop_that_is_too_long_stays_whole(monkeypatch):
    monkeypatch.setattr("fmapper_adapters.jax.loops._MOST", 5)
    (side, other) = make_sides(
        (rows, jnp.eye(4)), (rows, jnp.eye(4)), (jnp.ones((3, 4)),), {}, None
    )
    seen = side.watch(other.adapter)
    assert not any(one.loop for one in seen)
    assert "lax::scan" in [one.op for one in seen]


def test_results_of_a_loop_have_partners_only_if_all_of_them_have():
    def run(fault):
        pair = (lambda p, x: rows(p, x, fault=fault)), jnp.eye(4)
        return make_sides(pair, pair, (jnp.ones((3, 4)),), {}, None)[0].watch(None)

    a, b = run(False), run(True)
    scan = next(i for i, one in enumerate(b) if one.op == "lax::scan" and len(one.values) > 1)
    assert align(a, b, 1e-6).sources[scan] == []  # though both have counted as far


class Rotating(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.out = nn.Linear(4, 2)

    def waves(self, length):
        rates = self.base ** -torch.arange(0.0, 1.0, 0.25)
        return (torch.arange(length)[:, None] * rates).cos()

    def forward(self, x):
        return self.out(x * self.waves(len(x)))


def test_constants_are_followed_to_the_first_that_differs():
    report = fmapper.verify(filled(Rotating, 100.0), filled(Rotating, 200.0), X)
    assert report.first.a.op == report.first.b.op == "aten::pow.Scalar"
    line = Rotating.waves.__code__.co_firstlineno + 1
    assert report.first.a.source == f"{__file__}:{line}"  # not that of `forward`


class Table(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x):
        return self.out(x + self.table)


def test_a_table_that_differs_is_named():
    report = fmapper.verify(filled(Table, torch.ones(4)), filled(Table, torch.full((4,), 3.0)), X)
    assert (report.first.stage, report.first.name) == ("weights", "table")


def test_a_table_that_rounds_otherwise_is_no_difference():
    table = torch.linspace(1, 2, 4)
    models = filled(Table, table), filled(Table, table * (1 + 1e-6))
    report = fmapper.verify(*models, X, gradients=True)
    assert report, report
    assert any(one.startswith("table differs") for one in report.undecided)


class Squeezed(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.out, self.axis = nn.Linear(4, 1), axis

    def forward(self, x):
        y = self.out(x)
        return y.squeeze() if self.axis is None else y.squeeze(self.axis)


def test_the_operation_that_gives_another_shape_is_named():
    report = fmapper.verify(filled(Squeezed, -1), filled(Squeezed, None), X[:1])
    assert "shape (1,) and ()" in str(report.first)
    assert report.first.a.op.startswith("aten::squeeze")
    assert report.first.b.op.startswith("aten::squeeze")


class Dropping(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.up, self.drop, self.out = nn.Linear(4, 16), nn.Dropout(rate), nn.Linear(16, 2)

    def forward(self, x):
        return self.out(self.drop(self.up(x)))


def test_dropout_that_differs_alone_is_the_place():
    report = fmapper.verify(filled(Dropping, 0.1), filled(Dropping, 0.2), X, train=True)
    assert report.first.stage == "draws"
    assert report.first.note == "a has dropout of 0.1, b dropout of 0.2"


class Warming(torch.optim.SGD):
    def __init__(self, parameters, first):
        super().__init__(parameters, lr=0.1)
        self.number = first

    def step(self):
        self.number += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.number
        super().step()


def test_an_optimizer_keeps_what_it_counts():
    a, b = filled(Dropping, 0.0), filled(Dropping, 0.0)
    for first in (0, 1):
        both = Warming(a.parameters(), 0), Warming(b.parameters(), first)
        report = fmapper.verify(a, b, X, steps=2, optimizer=both)
        assert bool(report) == (first == 0)
        assert both[1].number == first
    assert (report.first.stage, report.first.step) == ("steps", 1)


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.out, self.scale = nn.Linear(4, 2), scale

    def forward(self, x):
        return self.scale * self.out(x)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return torch.where(x[:, :2] > 2, (0 * self.out(x)).sqrt(), 1.0)


def test_nan_on_both_sides_is_not_the_same():
    a, b = filled(Scaled, float("nan")), filled(Scaled, float("nan"))
    report = fmapper.verify(a, b, X)
    assert not report
    assert "nothing was compared: the outputs are all empty or NaN" in str(report)
    report = fmapper.verify(filled(Root), filled(Root), X, gradients=True)
    assert not report
    assert "nothing was compared of 2 gradients: they are NaN in both" in str(report)


class Detached(nn.Module):
    def __init__(self, *, detach):
        super().__init__()
        self.up, self.out, self.detach = nn.Linear(4, 4), nn.Linear(4, 2), detach

    def forward(self, x):
        y = self.up(x)
        return self.out(F.relu(y.detach() if self.detach else y))


def test_a_parameter_that_the_loss_does_not_reach_is_called_so():
    models = filled(Detached, detach=False), filled(Detached, detach=True)
    first = fmapper.verify(*models, X, gradients=True).first
    assert (first.stage, first.name) == ("backward", "up.bias")
    assert first.note == "the loss of b does not depend on it"


def test_what_cannot_be_compared_is_refused_with_the_side():
    net = filled(Scaled, 1.0)
    with pytest.raises(fmapper.ConversionError, match="a is 3, which is neither a model nor"):
        fmapper.verify(3, net, X)
    with pytest.raises(fmapper.ConversionError, match="steps=-1"):
        fmapper.verify(net, net, X, steps=-1)
    with pytest.raises(RuntimeError) as caught:
        fmapper.verify(net, nn.Linear(5, 2), X)
    assert caught.value.__notes__[0] == "in the call of b, a Linear"


def test_parts_of_flax_nnx_are_named():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return x * self.scale

    class Net(nnx.Module):
        def __init__(self, *scales):
            self.blocks = nnx.List([Block(scale) for scale in scales])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    report = fmapper.verify(Net(2.0, 3.0), Net(2.0, 4.0), jnp.ones(3))
    assert report.first.a.module == report.first.b.module == "blocks.1"


class Masking(nn.Module):
    def __init__(self, scale, ahead=0):
        super().__init__()
        self.q, self.scale, self.ahead = nn.Linear(4, 4), scale, ahead

    def seen(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril(self.ahead)

    def forward(self, x):
        scores = self.q(x) @ x.T * self.scale
        scores = scores.masked_fill(~self.seen(len(x)), torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ x


def test_what_is_masked_does_not_hide_the_other_numbers():
    report = fmapper.verify(filled(Masking, 1.0), filled(Masking, 2.0), X)
    assert report.first.b.op == "aten::mul.Tensor"
    report = fmapper.verify(filled(Masking, 1.0), filled(Masking, 1.0, 1), X)
    line = Masking.seen.__code__.co_firstlineno + 1
    assert report.first.a.source == f"{__file__}:{line}"


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4, eps=eps), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.out(self.norm(x)))


def test_a_small_difference_is_followed_to_where_it_begins():
    report = fmapper.verify(filled(Norm, 1e-6), filled(Norm, 2e-6), X)
    assert report.first.a.module == "norm"


class Biased(nn.Module):
    """Adds a constant that is made of a parameter alone."""

    def __init__(self, times=1, missing=0):
        super().__init__()
        self.times, self.missing = times, missing
        self.table = nn.Parameter(torch.zeros(5, 4))
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        bias = self.table[:3]
        if self.times > 1:
            bias = bias * self.times
        keep = torch.ones(3, 3, dtype=torch.bool).tril()
        if self.missing:
            keep = keep | torch.eye(3, dtype=torch.bool)[2:]
        y = self.proj(x) + bias[None]
        return (y @ y.mT).masked_fill(~keep, -9.0)


@pytest.mark.parametrize("fault", ["times", "missing"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_constant_that_one_side_changes_is_named(fault, swap):
    pair = filled(Biased), filled(Biased, **{fault: 3})
    report = fmapper.verify(*(reversed(pair) if swap else pair), X[None].expand(2, 3, 4))
    place = report.first.a if swap else report.first.b
    assert place.op == {"times": "aten::mul.Tensor", "missing": "aten::bitwise_or.Tensor"}[fault]


def cosines(x):
    return torch.softmax(2.0 * torch.tanh(x @ x.mT), -1)


def test_places_in_bare_functions_are_named():
    def of_jax(x, scale=2.1):
        return jax.nn.softmax(scale * jnp.tanh(x @ x.mT), -1)

    x = jnp.asarray(X.numpy())
    for pair, inputs in [((cosines, of_jax), X), ((of_jax, lambda x: of_jax(x, 2.0)), x)]:
        report = fmapper.verify(*pair, inputs)
        assert not report
        assert report.first.a.op in ("aten::mul.Tensor", "lax::mul")
    report = fmapper.verify(cosines, lambda x: cosines(x + 0.1), X)
    assert report.first.b.op == "aten::add.Tensor"


def test_a_function_that_no_framework_records_is_called_as_it_is():
    def of_numpy(x, scale=2.0):
        assert isinstance(x, np.ndarray)
        y = np.exp(scale * np.tanh(x @ x.T))
        return y / y.sum(-1, keepdims=True)

    class Called(nn.Module):
        def forward(self, x):
            return cosines(x)

    for model in (cosines, Called()):
        assert fmapper.verify(model, of_numpy, X, inputs_of_b=(X.numpy(),))
        assert not fmapper.verify(
            model, lambda x: of_numpy(x, 2.1), X, inputs_of_b=lambda x: x.numpy()
        )


def test_a_loss_that_is_no_scalar_is_refused():
    linear = filled(nn.Linear, 4, 2)
    with pytest.raises(
        fmapper.ConversionError, match=r"loss of a returns an array of shape \(3, 2\)"
    ):
        fmapper.verify(linear, linear, X, gradients=True, loss=lambda y: y**2)


class Grouped(nn.Module):
    """Repeats heads of keys, and joins heads; each may be in another order."""

    def __init__(self, *, tiled=False, turned=False):
        super().__init__()
        self.tiled, self.turned = tiled, turned
        self.kv, self.out = nn.Linear(4, 8), nn.Linear(16, 2)

    def forward(self, x):
        k = self.kv(x).unflatten(-1, (2, 4))
        k = k.tile(1, 2, 1) if self.tiled else k.repeat_interleave(2, 1)
        y = torch.tanh(k * torch.arange(4.0)[:, None])
        return self.out((y.mT if self.turned else y).flatten(1))


@pytest.mark.parametrize(("fault", "code"), [("tiled", "k.tile(1"), ("turned", "y.mT if")])
def test_elements_in_another_order_are_named_where_they_come_into_it(fault, code):
    report = fmapper.verify(filled(Grouped), filled(Grouped, **{fault: True}), X)
    for place in (report.first.a, report.first.b):
        file, _, line = place.source.rpartition(":")
        assert code in linecache.getline(file, int(line))


def test_chunks_that_are_taken_in_another_order_are_named_where_they_are_used():
    def gated(p, x, *, swapped=False):
        rest, gate, up = jnp.split(x @ p, 3, -1)
        gate, up = (up, gate) if swapped else (gate, up)
        return jax.nn.sigmoid(gate) * up + rest

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 6, bias=False)

        def forward(self, x):
            rest, gate, up = self.inner(x).chunk(3, -1)
            return gate.sigmoid() * up + rest

    model = filled(Gated)
    p = jnp.asarray(model.inner.weight.detach().numpy().T)
    report = fmapper.verify(model, (lambda p, x: gated(p, x, swapped=True), p), X)
    assert report.first.a.op == "aten::sigmoid.default"
    assert report.first.b.op == "lax::logistic"
