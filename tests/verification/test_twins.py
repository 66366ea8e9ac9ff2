"""Two models written by hand: what is the same, and where they first part."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import fmapper  # noqa: E402
from fmapper.checkpoints import Offset, Rename, Rules, Scale, Transpose  # noqa: E402

RULES = Rules(
    [
        Rename("norm.weight", "ln.scale"),
        Rename("norm.bias", "ln.bias"),
        Rename("up.weight", "fc.kernel"),
        Rename("up.bias", "fc.bias"),
        Transpose("fc.kernel"),
    ]
)


class Net(torch.nn.Module):
    def __init__(self, eps=1e-5, approximate="none"):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = torch.nn.LayerNorm(6, eps=eps), torch.nn.Linear(6, 8)
        self.approximate = approximate

    def forward(self, x):
        y = torch.nn.functional.gelu(self.up(self.norm(x)), approximate=self.approximate)
        return {"logits": y}


class Twin(nnx.Module):
    def __init__(self, dtype=None, stops=False):
        rngs = nnx.Rngs(0)
        self.ln = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)
        self.fc = nnx.Linear(6, 8, dtype=dtype, rngs=rngs)
        self.stops = stops

    def __call__(self, x):
        y = self.ln(x)
        y = jax.lax.stop_gradient(y) if self.stops else y
        return {"logits": nnx.gelu(self.fc(y), approximate=False).astype(x.dtype)}


X = torch.linspace(-1, 2, 24).reshape(4, 6)


def twin_of(net, **options):
    state = fmapper.to_numpy(fmapper.state(net))
    return fmapper.load_state(
        Twin(**options), {name: array.read() for name, array in RULES.apply(state).items()}
    )


@pytest.mark.nightly
def test_a_twin_in_another_framework_is_the_same_in_training_too():
    net = Net().eval()
    report = fmapper.verify(net, twin_of(net), X, rules=RULES, gradients=True, steps=2)
    assert report
    assert [one.path for one in report.gradients] == [*dict(net.named_parameters())]
    assert len(report.steps) == 2
    assert report.divergence < 1e-9
    assert not report.undecided


@pytest.mark.nightly
def test_the_operation_is_named_on_both_sides():
    report = fmapper.verify(Net(approximate="tanh").eval(), twin_of(Net().eval()), X)
    assert not report
    assert "gelu" in str(report.first.a)
    assert "test_twins.py" in report.first.b.source
    assert report.first.stage == "forward"


@pytest.mark.nightly
def test_what_a_layer_in_bfloat16_rounds_is_a_difference():
    net = Net().eval()
    report = fmapper.verify(net, twin_of(net, dtype=jnp.bfloat16), X)
    assert not report
    assert "in up: aten::linear" in str(report.first)
    assert "convert_element_type" in str(report.first.b)


def test_a_constant_that_is_a_little_different_shows_in_float64():
    report = fmapper.verify(Net(1e-5).eval(), Net(1.1e-5).eval(), X)
    assert not report
    assert "float64" in str(report.outputs[0])
    assert "norm" in str(report.first)


@pytest.mark.nightly
def test_the_parameter_of_the_backward_pass_is_named():
    net = Net().eval()
    report = fmapper.verify(net, twin_of(net, stops=True), X, rules=RULES, gradients=True)
    assert not report
    assert all(one.ok for one in report.outputs)
    assert report.first.stage == "backward"
    assert report.first.name == "norm.bias"


class Mean(torch.nn.Module):
    """Keeps a mean of its inputs."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, momentum=momentum)

    def forward(self, x):
        return self.norm(x)


def test_buffers_after_the_call_are_compared():
    report = fmapper.verify(Mean(0.1), Mean(0.9), X, gradients=True)
    assert not report
    assert all(one.ok for one in report.outputs)
    assert report.first.stage == "buffers"
    assert "norm.running_mean" in str(report.first)
    assert fmapper.verify(Mean(0.1), Mean(0.1), X, gradients=True, steps=2)


def test_a_step_and_the_parameter_that_it_moves_are_named():
    def adamw(net, decay):
        return torch.optim.SGD(
            [
                {"params": [net.up.weight, net.norm.weight], "weight_decay": 0.1},
                {"params": [net.up.bias, net.norm.bias], "weight_decay": decay},
            ],
            lr=0.1,
        )

    a, b = Net().eval(), Net().eval()
    optimizer = adamw(a, 0.0), adamw(b, 0.1)
    report = fmapper.verify(a, b, X, steps=2, optimizer=optimizer)
    assert not report
    assert all(one.ok for one in report.gradients)
    assert (report.first.stage, report.first.step) == ("steps", 1)
    assert report.first.name == "up.bias"
    same = adamw(a, 0.1), adamw(b, 0.1)
    assert fmapper.verify(a, b, X, steps=2, optimizer=same)


class Dropping(torch.nn.Module):
    def __init__(self, rate, always=False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.rate, self.always = torch.nn.Linear(6, 8), rate, always

    def forward(self, x):
        train = self.training or self.always
        return torch.nn.functional.dropout(self.up(x), self.rate, train)


@pytest.mark.nightly
def test_dropout_in_training_is_no_false_alarm_and_another_rate_is_found():
    report = fmapper.verify(Dropping(0.3), Dropping(0.3), X + 0.1)
    assert report
    assert not fmapper.verify(Dropping(0.3), Dropping(0.5), X)


def test_random_numbers_in_evaluation_on_one_side_are_a_difference():
    report = fmapper.verify(Dropping(0.5).eval(), Dropping(0.5, always=True).eval(), X)
    assert not report
    assert "a draws nothing, b draws dropout of 0.5" in str(report)


def test_parameters_that_cannot_be_paired_are_named_with_the_way_out():
    with pytest.raises(fmapper.StructureMismatchError, match=r"(?s)norm\.weight.*rules="):
        fmapper.verify(Net(), torch.nn.Sequential(torch.nn.Linear(6, 8)), X, gradients=True)


def test_an_assertion_prints_the_report():
    report = fmapper.verify(Net().eval(), Net(approximate="tanh").eval(), X)
    assert repr(report).startswith("<Report: not the same\n0 of 1 outputs agree")
    assert "first difference: " in repr(report)


def test_casts_to_less_do_nothing_in_float64():
    class Casting(torch.nn.Module):
        def forward(self, x):
            return x.to(torch.bfloat16).float() * torch.zeros((), dtype=torch.float32).add(1 / 3)

    from fmapper_adapters.torch.verify import call_in_float64

    found = call_in_float64(Casting(), (X,), {})
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, X.double() / 3)


def test_functions_traced_in_float64_do_not_stay_so():
    from fmapper_adapters.jax.trials.precision import double_precision

    @jax.jit
    def half(x):
        return x.astype(jnp.float16)

    x = jnp.ones(2)
    with double_precision():
        assert half(jnp.ones(2, jnp.float64)).dtype == jnp.float64
    with jax.enable_x64(True):
        assert half(jnp.ones(2, jnp.float64)).dtype == jnp.float16
    assert half(x).dtype == jnp.float16


def test_a_mask_of_the_largest_numbers_is_no_overflow():
    class Masked(torch.nn.Module):
        def forward(self, x):
            low = torch.full((6, 6), torch.finfo(x.dtype).min).triu(1)
            return (x @ x.T)[:4, :4] + low[:4, :4].exp(), low

    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        fmapper.verify(Masked(), torch.nn.Identity(), X)


class Noisy(torch.nn.Module):
    def __init__(self, rate):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop = torch.nn.Linear(6, 8), torch.nn.Dropout(rate)

    def forward(self, x):
        return self.drop(self.up(x))


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["jax", "flax"])
def test_dropout_of_a_converted_model_is_compared_over_seeds(target):
    converted = fmapper.convert(Noisy(0.3), target, (X,), train=True)
    report = fmapper.verify(Noisy(0.3), converted, X, train=True, gradients=True)
    assert report, report
    assert "means and spreads" in str(report)
    assert report.undecided
    assert not fmapper.verify(Noisy(0.5), converted, X, train=True)


@pytest.mark.nightly
def test_a_structured_model_with_dropout_trains_as_its_source():
    source = Noisy(0.3)
    converted = fmapper.convert(source, "flax", (X,), train=True, structure=True)
    report = fmapper.verify(source, converted, X, train=True, gradients=True, steps=2)
    assert report, report
    assert len(report.gradients) == 2
    assert not fmapper.verify(Noisy(0.5), converted, X, train=True)


class Sampling(torch.nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.scale = torch.nn.Linear(6, 8), scale

    def forward(self, x):
        mean = self.up(x)
        return mean + self.scale * torch.randn_like(mean)


@pytest.mark.nightly
def test_random_numbers_in_evaluation_are_the_same_for_both():
    source = Sampling().eval()
    assert fmapper.verify(source, Sampling().eval(), X)
    assert not fmapper.verify(source, Sampling(1.2).eval(), X)
    near = fmapper.verify(source, Sampling(1.001).eval(), X)
    assert "although both were given the same random numbers" in str(near)
    converted = fmapper.convert(source, "jax", (X,))
    report = fmapper.verify(source, converted, X)
    assert report, report
    assert not fmapper.verify(Sampling(1.5).eval(), converted, X)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * self.weight


def test_a_weight_with_a_constant_added_is_trained_alike():
    source = Scaled()
    weight = jnp.asarray(source.weight.detach().numpy())
    twin = (lambda params, x: x * (1 + params["weight"])), {"weight": weight - 1}
    to_twin = Rules([Offset("weight", -1.0), Rename("weight", "1.weight")])
    report = fmapper.verify(source, twin, X, rules=to_twin, gradients=True, steps=1)
    assert report, report
    assert len(report.gradients) == len(report.steps[0]) == 1
    doubled = (lambda params, x: x * params["weight"] / 2), {"weight": 2 * weight}
    to_doubled = Rules([Scale("weight", 2.0), Rename("weight", "1.weight")])
    with pytest.raises(fmapper.StructureMismatchError, match="a multiple of arrays of a"):
        fmapper.verify(source, doubled, X, rules=to_doubled, gradients=True)
