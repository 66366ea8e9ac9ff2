"""Gradients that a module has of its own, and what is changed behind their back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from models import extremes  # noqa: E402
from support import converting  # noqa: E402

Autograd: Any = torch.autograd.Function


class Reversed(Autograd):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -ctx.factor * gradient, None


reverse = Reversed.apply


class Spike(Autograd):
    """As spiking networks: a step forwards, a smooth slope backwards."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        slope = gradient.clone()
        slope[x.abs() > 1] = 0.0
        return slope / (1 + x.abs()) ** 2


class Scaled(Autograd):
    """Two inputs, one of which is stretched, and two outputs, one of which has no gradient."""

    @staticmethod
    def forward(x: Any, w: Any) -> Any:
        return x * w, (x + w).argmax(-1), (x - w).relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        x, w = ctx.saved_tensors
        given = gradient * w * 3 if ctx.needs_input_grad[0] else None
        return given, (gradient * x.tanh()).sum(0)


class Outer(Autograd):
    """Calls others in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return Reversed.apply(x, 2.0).sin()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return Reversed.apply(gradient, 1.0) * ctx.saved_tensors[0]


def used(x: Any) -> Any:
    y, at, rest = Scaled.apply(x, x.mean(0))
    return Spike.apply(y), reverse(y, 0.5), Outer.apply(x), at, x + rest


@pytest.mark.nightly
def test_functions_with_gradients_of_their_own() -> None:
    x = torch.randn(4, 3)
    converting.check(used, x)
    converting.check_gradients(used, x)


@pytest.mark.nightly
def test_gradients_of_their_own_in_transforms_and_files(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(3, 3)
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return Spike.apply(self.drop(self.dense(x)))

    module = Net()
    x = torch.randn(4, 3)
    model = fmapper.convert(module, "jax", (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    model.save(tmp_path / "model.safetensors")
    model = type(model).load(tmp_path / "model.safetensors")
    module.eval()(x[:2]).sum().backward()

    def loss(params: Any, x: Any) -> Any:
        return model.replace(params=params)(x).sum()

    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(model.params, x[:2, None].numpy())
    want = module.dense.weight.grad
    np.testing.assert_allclose(each["dense.weight"].sum(0), want, rtol=1e-4, atol=1e-6)

    trained = fmapper.convert(module, "jax", (x,), train=True)

    @jax.jit
    def value(params: Any, key: Any) -> Any:
        return trained.replace(params=params)(x.numpy(), key=key).sum()

    jax.grad(value)(trained.params, jax.random.key(0))


@pytest.mark.nightly
def test_gradients_of_complex_numbers_of_their_own() -> None:
    class Turned(Autograd):
        @staticmethod
        def forward(ctx: Any, z: Any) -> Any:
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * (2 * ctx.saved_tensors[0]).conj() * (1 + 2j)

    def turned(x: Any) -> Any:
        return torch.view_as_real(Turned.apply(torch.complex(x, x * 2) * (2 - 1j)))

    converting.check_gradients(turned, torch.randn(5))


@pytest.mark.nightly
def test_gradients_of_gradients_of_their_own() -> None:
    class Cube(Autograd):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * ctx.saved_tensors[0] ** 2

    model = fmapper.convert(converting.Function(Cube.apply), "jax", (torch.ones(()),))
    first = jax.grad(model)
    assert float(first(2.0)) == 4.0
    assert float(jax.grad(first)(2.0)) == 4.0


class Halved(Autograd):
    """Keeps nothing, so that its gradient is differentiated through the result alone."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / 2


class Result(Autograd):
    """Keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y * 3


class Same(Autograd):
    """Gives its argument, and keeps it: it is an argument then, and not a result."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x * 3


class Between(Autograd):
    """Keeps what has no gradient, as it is computed inside, and an argument as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.x, ctx.sine = x, x.sin()
        return x * ctx.sine

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.sine * ctx.x


@pytest.mark.nightly
@pytest.mark.parametrize("function", [Halved, Result, Same, Between])
def test_second_derivatives_go_through_what_is_kept_as_in_torch(function: Any) -> None:
    x = torch.tensor([0.3, -1.2, 0.8], requires_grad=True)
    module = converting.Function(lambda x: (function.apply(x) ** 2).sum())
    (first,) = torch.autograd.grad(module(x), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    model = fmapper.convert(module, "jax", (x.detach(),))
    again = fmapper.convert(model, "torch", (x.detach(),))
    slope = jax.grad(model)
    given = x.detach().numpy()
    np.testing.assert_allclose(slope(given), first.detach(), rtol=1e-6)
    found = jax.grad(lambda x: (slope(x) ** 2).sum())(given)
    np.testing.assert_allclose(found, second, rtol=1e-5)
    (first,) = torch.autograd.grad(again(x), x, create_graph=True)
    np.testing.assert_allclose(torch.autograd.grad((first**2).sum(), x)[0], second, rtol=1e-5)


@pytest.mark.nightly
def test_what_torch_differentiates_once_is_differentiated_once() -> None:
    x = torch.tensor([0.3, -1.2, 0.8], requires_grad=True)
    model = fmapper.convert(converting.Function(Spike.apply), "jax", (x.detach(),))
    slope = jax.grad(lambda x: model(x).sum())
    with pytest.raises(NotImplementedError, match=r"Spike .*once_differentiable"):
        jax.grad(lambda x: slope(x).sum())(x.detach().numpy())
    (first,) = torch.autograd.grad(
        fmapper.convert(model, "torch", (x.detach(),))(x).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"Spike .*once_differentiable"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.nightly
def test_a_backward_that_cannot_be_recorded_is_refused_when_it_is_needed() -> None:
    class Unknown(Autograd):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return torch.from_numpy(gradient.numpy() * 2)

    model = fmapper.convert(converting.Function(Unknown.apply), "jax", (torch.ones(2),))
    assert model(np.ones(2, "float32")).tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match=r"Unknown.* whose backward cannot be recorded"):
        jax.grad(lambda x: model(x).sum())(np.ones(2, "float32"))


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["grad", "backward"])
def test_a_backward_that_differentiates_is_refused_when_it_is_needed(way: str) -> None:
    """torch.export fails where it meets the results, and records the module without them."""

    class Recomputed(Autograd):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = x.tanh()
            if way == "grad":
                return torch.autograd.grad(y, x, gradient)[0]
            torch.autograd.backward(y, gradient)
            return x.grad

    x = torch.randn(3)
    model = converting.check(Recomputed.apply, x)
    with pytest.raises(NotImplementedError, match=r"Recomputed.* cannot be recorded"):
        jax.grad(lambda x: model(x).sum())(x.numpy())


@pytest.mark.nightly
def test_what_a_function_switches_off_inside_stays_inside() -> None:
    class Quiet(Autograd):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            with torch.no_grad():
                ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with torch.no_grad():
                return gradient * ctx.saved_tensors[0]

    def both(x: Any) -> Any:
        with torch.no_grad():
            fixed = Quiet.apply(x)
        return Quiet.apply(x).sin() + fixed * x

    converting.check_gradients(both, torch.tensor([0.5, -1.25, 0.25, 0.75]))


@pytest.mark.nightly
def test_gradients_of_functions_that_change_their_input() -> None:
    class Doubled(Autograd):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 3

    def used(x: Any) -> Any:
        y = x * 1.5
        z = Doubled.apply(y)
        Doubled.apply(y)
        return z.sin(), y.cos()

    x = torch.randn(3, 4)
    converting.check(used, x)
    converting.check_gradients(used, x)


class Averaged(torch.nn.Module):
    """Buffers that change behind `data`, as the code books of many quantisers do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)
        self.register_buffer("book", torch.randn(5, 4))
        self.register_buffer("steps", torch.tensor(0))
        self.way = way

    def forward(self, x: Any) -> Any:
        x = self.dense(x)
        mean = x.detach().mean(0)
        if self.way == "data":
            self.book.data.mul_(0.9).add_(0.1 * mean)
            self.steps.data.add_(1)
        elif self.way == "no_grad":
            with torch.no_grad():
                self.book.data.copy_(0.9 * self.book + 0.1 * mean)
        elif self.way == "index":
            self.book.data[1:3] = mean
        else:
            self.book.data = 0.9 * self.book + 0.1 * mean
        return x * self.dense.weight.data.sum()


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["data", "no_grad", "index", "assign"])
def test_what_changes_behind_data(way: str) -> None:
    module = Averaged(way)
    x = torch.randn(3, 4)
    model = fmapper.convert(copy.deepcopy(module), "jax", (x,))
    _, model = model(x.numpy(), mutable=True)
    y, model = model(x.numpy(), mutable=True)
    module(x)
    converting.compare(y, module(x))
    converting.compare(model.buffers["book"], module.book)
    assert int(model.buffers["steps"]) == int(module.steps)


def test_data_of_what_is_computed_is_read_and_not_changed() -> None:
    def read(x: Any) -> Any:
        return x.exp() * x.exp().data

    def rounded(x: Any) -> Any:
        y = x.exp()
        y.data.round_()
        return y

    def assigned(x: Any) -> Any:
        y = x.exp()
        y.data = y.round()
        return y

    class Net(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.inner = converting.Function(function)
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return self.inner(x * self.w)

    converting.check_gradients(read, torch.randn(3))
    for function in rounded, assigned:
        with pytest.raises(fmapper.ConversionError, match=r"Net: inner: .*detach\(\)"):
            fmapper.convert(Net(function), "jax", (torch.randn(3),))


def test_buffers_that_a_recorded_module_leaves_alone_are_noticed() -> None:
    class Aware(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            if self.training and not torch.compiler.is_compiling():
                self.steps += 1
            return x * 2

    model = fmapper.convert(Aware(), "jax", (torch.ones(2),), train=True)
    _, after = model(np.ones(2, "float32"), mutable=True)
    assert float(after.buffers["steps"]) == 1


class Follower(torch.nn.Module):
    """One half follows the other, as in momentum contrast and BYOL."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.online = torch.nn.Linear(4, 4)
        self.target = torch.nn.Linear(4, 4).requires_grad_(False)
        self.way = way

    def forward(self, x: Any) -> Any:
        for a, b in zip(self.online.parameters(), self.target.parameters(), strict=True):
            if self.way == "data":
                b.data.mul_(0.9).add_(a.data, alpha=0.1)
            elif self.way == "assign":
                b.data = b.data * 0.9 + a.data * 0.1
            else:
                with torch.no_grad():
                    b.mul_(0.9).add_(a, alpha=0.1)
        return self.online(x) - self.target(x)


@pytest.mark.nightly_cases("data")
@pytest.mark.parametrize("way", ["data", "assign", "no_grad"])
def test_parameters_that_forward_changes(way: str) -> None:
    module = Follower(way)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(3, 4)
    model = fmapper.convert(module, "jax", (x,))
    for name, array in module.state_dict().items():
        assert torch.equal(array, before[name]), f"{name} was changed by the conversion"
    _, model = model(x.numpy(), mutable=True)
    y, model = model(x.numpy(), mutable=True)
    module(x)
    converting.compare(y, module(x))
    converting.compare(model.params["target.weight"], module.target.weight.detach())


@pytest.mark.nightly
def test_rows_that_are_looked_up_often_get_smaller_gradients() -> None:
    indices = torch.tensor([[1, 2, 2], [2, 0, 5]])
    module = torch.nn.Embedding(6, 3, padding_idx=0, scale_grad_by_freq=True)
    factors = torch.rand(2, 3, 3)
    (module(indices) * factors).sum().backward()
    model = fmapper.convert(module, "jax", (indices,))

    def loss(params: Any) -> Any:
        return (model.replace(params=params)(indices.numpy()) * factors.numpy()).sum()

    got = jax.grad(loss)(model.params)["weight"]
    np.testing.assert_allclose(got, module.weight.grad, rtol=1e-5)


@pytest.mark.nightly
def test_what_is_drawn_has_no_gradient() -> None:
    def drawn(x: Any) -> Any:
        return torch.normal(x, x.exp()) + torch.normal(x, 2.0) + x * 3

    model = fmapper.convert(converting.Function(drawn), "jax", (torch.zeros(2),))
    key = jax.random.key(0)
    got = jax.grad(lambda x: model(x, key=key).sum())(np.zeros(2, "float32"))
    assert got.tolist() == [3, 3]


class Strict(torch.nn.Module):
    """Torch can record it only when it reads the bytecode."""

    def forward(self, x: Any) -> Any:
        y = Reversed.apply(x * 2, 3.0)
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            raise ValueError("cannot be called so")
        return y


class WithoutGradients(torch.nn.Module):
    """Torch can record it only where gradients are switched off."""

    def forward(self, x: Any) -> Any:
        y = Reversed.apply(x * 2, 3.0)
        if torch.is_grad_enabled() and torch.compiler.is_compiling():
            raise ValueError("cannot be called so")
        return y


@pytest.mark.nightly_cases("module0")
@pytest.mark.parametrize("module", [Strict(), WithoutGradients()])
def test_gradients_that_a_way_forgets_are_not_lost_in_silence(module: Any) -> None:
    x = torch.ones(3)
    with pytest.raises(
        fmapper.ConversionError, match=r"Reversed has a custom gradient .* be called so"
    ):
        fmapper.convert(module, "jax", (x,))
    model = fmapper.convert(module, "jax", (x,), check=False)
    np.testing.assert_array_equal(model(x.numpy()), module(x))
    fmapper.convert(torch.nn.Linear(3, 2), "jax", (x,))


def test_a_conversion_inside_of_a_recording_leaves_torch_as_it_was() -> None:
    from fmapper_adapters.torch.record.patches import operations

    own: Any = Reversed
    before = torch.nn.Module.to, torch.nn.BatchNorm1d.forward, own.forward
    x = torch.ones(3)
    with operations.stand_ins():
        inside = torch.nn.Module.to
        fmapper.convert(converting.Function(lambda x: reverse(x, 2.0)), "jax", (x,))
        assert torch.nn.Module.to is inside
        assert own.forward != before[2]
    assert (torch.nn.Module.to, torch.nn.BatchNorm1d.forward, own.forward) == before


def _detached(x: Any) -> Any:
    y = x.detach()
    y.mul_(2.0)
    return x * y


def _views(x: Any) -> Any:
    y = x.view(2, 2).detach()
    x.add_(1.0)
    y[0] = 5.0
    return x * y.reshape(-1)


def _nested(x: Any) -> Any:
    y = x.detach()[1:]
    z = y.detach()
    z.mul_(2.0)
    y.add_(1.0)
    x.mul_(3.0)
    return x * 2 + torch.nn.functional.pad(y * z, (1, 0))


def _data(x: Any) -> Any:
    x.data.clamp_(-1.0, 2.0)
    return x * 3


def _written(x: Any) -> Any:
    y = x.detach()
    y.add_(x.flip(0))
    return y * 2


def _quiet(x: Any) -> Any:
    with torch.no_grad():
        part = x[1:]
        part.mul_(2.0)
        norm = part.norm()
        x.div_(norm)
        with torch.enable_grad():
            square = x * x
    return x * norm + square.detach()


def _repeated(x: Any) -> Any:
    y = x
    for i in range(3):
        with torch.no_grad():
            x.add_(i)
        y = x.detach()
        y.mul_(2.0)
    return x * y


def _parts(x: Any) -> Any:
    y = x.detach()
    z = y.detach()
    y.chunk(2)[0].mul_(3.0)
    return x * y + z


def _in_place(x: Any) -> Any:
    x.detach_()
    x.mul_(2.0)
    return x * 3


@pytest.mark.nightly_cases("detached", "repeated")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "function",
    [_detached, _views, _nested, _data, _written, _quiet, _repeated, _parts, _in_place],
    ids=lambda function: function.__name__.strip("_"),
)
def test_writes_that_gradients_do_not_see(function: Any) -> None:
    converting.check_gradients(lambda x, y: function(x * y) + y, torch.randn(4), torch.randn(4))


class Bounded(torch.nn.Module):
    """Weights are cut to a ball whenever they are used, and trained as if they were not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([-3.0, 1.0, 2.0, 3.0]))

    def forward(self, x: Any) -> Any:
        weight = self.weight * 1
        with torch.no_grad():
            weight.clamp_(-1.0, 1.5)
        return x * weight


@pytest.mark.nightly
def test_a_program_with_silent_writes_is_saved_and_runs_in_both(tmp_path: Path) -> None:
    module, x = Bounded(), torch.randn(4)
    model = fmapper.convert(module, "jax", (x,))
    want = torch.autograd.grad(module(x).sum(), module.weight)[0]
    path = tmp_path / "bounded.safetensors"
    model.save(path)
    for one in model, fmapper.convert(fmapper.load_program(path), "jax"):
        got = jax.grad(lambda model: model(x.numpy()).sum())(one).params["weight"]
        converting.compare(got, want)
    back = fmapper.convert(fmapper.load_program(path), "torch")
    converting.compare(fmapper.to_jax(back(x)), module(x))
    converting.compare(torch.autograd.grad(back(x).sum(), back.weight)[0].numpy(), want)


def _entropy(x: Any) -> Any:
    share = x + (x.clamp(0, 1) - x).detach()  # `clamp` has a slope at 0 and 1 up to torch 2.13
    return torch.nn.functional.binary_cross_entropy(
        share, torch.full_like(x, 0.3), reduction="none"
    )


@pytest.mark.nightly_cases("i0")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "function",
    [
        torch.special.i0,
        torch.logit,
        lambda x: torch.copysign(x, torch.tensor(2.0)),
        lambda x: torch.logaddexp(x, x),
        lambda x: torch.logaddexp2(x, x),
        lambda x: torch.hypot(x, x),
        lambda x: torch.angle(torch.complex(x, x)),
        lambda x: x**-2,
        _entropy,
    ],
    ids=["i0", "logit", "copysign", "logaddexp", "logaddexp2", "hypot", "angle", "squared", "bce"],
)
def test_slopes_at_zero_and_of_large_numbers(function: Any) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 0.5, 1e20, 1e10], requires_grad=True)
    function(x).sum().backward()
    model = fmapper.convert(converting.Function(function), "jax", (x.detach(),))
    got = jax.grad(lambda x: model(x).sum())(jax.numpy.asarray(x.detach().numpy()))
    np.testing.assert_allclose(got, x.grad, rtol=1e-5)


def test_attention_with_scores_beyond_the_last_digit_of_an_exponent() -> None:
    x = torch.tensor([[1.0, 300.0, 1.0], [300.0, 90000.0, 300.0]], requires_grad=True)
    attend = converting.Function(
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)
    )
    attend(x).sum().backward()
    model = fmapper.convert(attend, "jax", (x.detach(),))
    got = jax.grad(lambda x: model(x).sum())(jax.numpy.asarray(x.detach().numpy()))
    np.testing.assert_allclose(got, x.grad, rtol=1e-5)


@pytest.mark.parametrize("function", [torch.var, torch.std], ids=["var", "std"])
def test_spreads_whose_squares_overflow_when_they_are_added_up(function: Any) -> None:
    x = torch.tensor([1.0, 2.5e19, 1.0, 2.0])
    converting.check_gradients(converting.Function(function), x if function is torch.var else 4 * x)


@pytest.mark.nightly
@pytest.mark.parametrize("name", extremes.REDUCTIONS)
def test_gradients_of_extremes_are_those_of_torch_where_xla_computes_twice(name: str) -> None:
    """Those of `jnp.max` are zero there: it compares what was rounded in two ways."""
    torch.manual_seed(0)
    module, x = extremes.Extremes(extremes.REDUCTIONS[name]).train(), extremes.inputs()
    model = fmapper.convert(copy.deepcopy(module), "jax", (x,), train=True)
    found = module(x)
    waves = np.cos(np.arange(found.numel(), dtype="float32"))
    (found.flatten() * torch.tensor(waves)).sum().backward()

    def loss(params: Any) -> Any:
        return (model.replace(params=params)(x.numpy()).reshape(-1) * waves).sum()

    slopes = jax.jit(jax.grad(loss))(model.params)
    for path, parameter in module.named_parameters():
        wanted = parameter.grad.numpy()
        scale = max(np.abs(wanted).max(), 0.05)  # those of the biases of layers are zero
        np.testing.assert_allclose(slopes[path] / scale, wanted / scale, atol=1e-3)


@pytest.mark.nightly
def test_elements_that_are_equal_share_the_gradient_of_amax_alone() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, float("-inf"), 2.0]])
    converting.check_gradients(lambda x: (x.amax(1), x.max(1)[0], (-x).amin(1), x.max()), x)
