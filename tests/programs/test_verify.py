"""Comparing models: what counts as equal, and where the first difference is found."""

import math
from typing import Any, NamedTuple

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x, *, scale=None):
        y = self.body(x)
        y = y if scale is None else y * scale
        return {"logits": self.head(y), "all": [y, None, 3]}


def test_a_converted_model_agrees_and_the_module_is_as_it_was():
    model = Model().eval()
    x, scale = torch.randn(5, 3), torch.tensor(2.0)
    converted = fmapper.convert(model, "jax", (x,), {"scale": scale})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fmapper.verify(model, converted, x.numpy(), example_kwargs={"scale": scale})
    assert report
    assert [output.path for output in report.outputs] == ["output.logits", "output.all[0]"]
    assert "2 of 2 outputs agree" in str(report)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert fmapper.verify(converted, model, x, example_kwargs={"scale": scale})


@pytest.mark.nightly
def test_models_are_compared_in_the_modes_in_which_they_are_handed_in():
    model = Model()
    x = torch.randn(5, 3)
    converted = fmapper.convert(model, "jax", (x,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fmapper.verify(model, converted, x)
    assert not report
    assert "a was called in training mode, and b in evaluation mode" in str(report)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert fmapper.verify(model.eval(), converted, x)
    trained = fmapper.convert(model.train(), "flax", (x,), train=True)
    assert fmapper.verify(model, trained, x)
    assert not fmapper.verify(model.eval(), trained, x)


@pytest.mark.nightly
def test_the_first_operation_that_differs_is_named_with_its_module():
    model = Model().eval()
    x = torch.randn(5, 3)
    converted = fmapper.convert(model, "jax", (x,))
    wrong = dict(converted.params)
    wrong["body.3.bias"] = wrong["body.3.bias"].at[1].add(0.5)
    report = fmapper.verify(model, converted.replace(params=wrong), x)
    assert not report
    assert report.first.path.startswith("in body.3: aten::linear.default")
    assert report.first.error == pytest.approx(0.5, rel=1e-5)
    a, b = report.exact
    assert a < 1e-6
    assert b > 0.1
    text = str(report)
    assert "0 of 2 outputs agree" in text
    assert "first difference: in body.3" in text
    assert "against float64" in text


@pytest.mark.nightly
def test_the_first_operation_is_found_where_only_an_operation_is_wrong():
    @fmapper.lowering("aten::relu")
    def relu(x):
        return jnp.maximum(x, 0.01)

    model = Model().eval()
    x = torch.randn(5, 3)
    try:
        converted = fmapper.convert(model, "jax", (x,), check=False)
    finally:
        fmapper.programs.lowering.added[None].pop("aten::relu")
    report = fmapper.verify(model, converted, x)
    assert report.first.path.startswith("in body.2: aten::relu.default")


@pytest.mark.nightly
def test_code_that_takes_no_float64_is_no_obstacle():
    class Strict(torch.nn.Module):
        def forward(self, x):
            assert x.dtype is torch.float32
            return x + 1

    x = torch.randn(3)
    report = fmapper.verify(Strict(), torch.nn.ReLU(), x)
    assert not report
    assert report.exact is None


@pytest.mark.nightly
def test_convert_says_where_a_lowering_differs():
    @fmapper.lowering("aten::relu")
    def relu(x):
        return jnp.maximum(x, 0.01)

    x = torch.randn(5, 3)
    try:
        with pytest.raises(fmapper.ConversionError, match=r"(?s)differs.*in body\.2: aten::relu"):
            fmapper.convert(Model(), "jax", (x,))
    finally:
        fmapper.programs.lowering.added[None].pop("aten::relu")
    assert fmapper.convert(Model(), "jax", (x,))


@pytest.mark.parametrize(
    ("a", "b", "note"),
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0], r"shape \(2,\) and \(3,\)"),
        ([1.0, np.nan], [1.0, 2.0], "NaN at other places"),
        ([1.0, np.inf], [1.0, -np.inf], "infinite at other places"),
        ([1.0, 2.0], [1.0, np.inf], "infinite at other places"),
        ([1, 2], [1, 3], "1 of 2 elements are not equal"),
        ([True], [False], "1 of 1 elements are not equal"),
    ],
)
def test_what_is_never_rounding(a, b, note):
    report = fmapper.verify(lambda: np.array(a), lambda: np.array(b))
    assert not report
    with pytest.raises(AssertionError, match=note):
        raise AssertionError(str(report))


def test_structures_and_plain_values_are_compared():
    assert fmapper.verify(lambda: {"a": [np.ones(2)], "b": 3}, lambda: {"b": 3, "a": (np.ones(2),)})
    assert not fmapper.verify(lambda: [np.ones(1)], lambda: [np.ones(1), np.ones(1)])
    assert not fmapper.verify(lambda: 3, lambda: 4)
    assert not fmapper.verify(lambda: np.ones(1), lambda: None)


def test_dicts_with_other_keys_differ():
    report = fmapper.verify(lambda x: {"a": x}, lambda x: {"b": x}, jnp.ones(2))
    assert not report
    assert "the keys ['a'] and ['b']" in str(report)
    assert fmapper.verify(lambda x: {"a": x}, lambda x: [x], jnp.ones(2))


def test_what_may_differ_is_relative_to_the_largest_element_and_by_dtype():
    big = np.array([1000.0, 1.0], np.float32)
    near = np.array([1000.0, 1.05], np.float32)
    assert fmapper.verify(lambda: big, lambda: near)
    assert not fmapper.verify(lambda: big, lambda: near, rtol=1e-5)
    assert fmapper.verify(lambda: big, lambda: near, rtol=0, atol=0.1)
    assert not fmapper.verify(lambda: big.astype(float), lambda: near.astype(float))
    half = jnp.asarray([1.0], "bfloat16")
    assert fmapper.verify(lambda: torch.tensor([1.01]), lambda: half)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda: None, "hold no arrays"),
        (lambda: {"a": [None, ()]}, "hold no arrays"),
        (lambda: np.ones((0, 3)), "are all empty"),
        (lambda: [torch.ones(0), None], "are all empty"),
    ],
)
def test_a_comparison_of_nothing_fails(output, words):
    report = fmapper.verify(output, output)
    assert not report
    assert not report.ok
    assert str(report).startswith(f"nothing was compared: the outputs {words}")


def test_numbers_and_empty_arrays_beside_others_are_compared():
    assert fmapper.verify(lambda: 3, lambda: 3)
    assert fmapper.verify(lambda: {"n": [float("nan"), "x"]}, lambda: {"n": [float("nan"), "x"]})
    assert not fmapper.verify(lambda: [float("nan")], lambda: [1.0])
    assert fmapper.verify(lambda: [np.ones(0), np.ones(1)], lambda: [np.ones(0), np.ones(1)])
    assert not fmapper.verify(lambda: [np.ones((0, 2)), 1], lambda: [np.ones(0), 1])


class Scaled(nn.Module):
    def forward(self, x, fill=float("nan"), zero=0.0):
        return torch.where(x.isnan(), torch.full_like(x, fill), x) * math.copysign(1.0, zero)


@pytest.mark.parametrize("saved", [False, True])
def test_a_program_whose_constant_is_nan_takes_that_and_no_other(saved, tmp_path):
    x = torch.tensor([1.0, float("nan")])
    model = fmapper.convert(Scaled(), "jax", (x, float("nan"), -0.0))
    if saved:
        model.save(tmp_path / "model.safetensors")
        model = fmapper.convert(fmapper.load_program(tmp_path / "model.safetensors"), "jax")
    for nan in (float("nan"), -float("nan"), np.nan):
        assert fmapper.verify(Scaled(), model, x, nan, -0.0)
    for fill, zero in ((1.0, -0.0), (float("nan"), 0.0), (0, -0.0)):
        with pytest.raises(fmapper.ProgramInputError):
            model(x.numpy(), fill, zero)
    defaults = fmapper.convert(Scaled(), "jax", (x, float("nan"), 0.0))
    assert fmapper.verify(Scaled(), defaults, x)
    left_out = fmapper.convert(Scaled(), "jax", (x,))
    assert fmapper.verify(Scaled(), left_out, x, float("nan"), 0.0)


def test_a_constant_is_told_from_that_with_another_sign():
    class Net(torch.nn.Module):
        def forward(self, x, fill=0.0):
            return torch.full_like(x, fill)

    x = torch.ones(2)
    model = fmapper.convert(Net(), "jax", (x, 0.0))
    model(np.ones(2, np.float32), 0.0)
    with pytest.raises(fmapper.ProgramInputError, match=r"fill is -0\.0"):
        model(np.ones(2, np.float32), -0.0)


def test_parts_are_compared_by_name_and_not_by_position():
    class AB(NamedTuple):
        a: Any
        b: Any

    class BA(NamedTuple):
        b: Any
        a: Any

    one, two = np.ones(2), np.full(2, 2.0)
    right = [AB(one, two), BA(two, one), {"b": two, "a": one}, (one, two), [one, two]]
    right += [{"b": two, "c": None, "a": one}]
    for other in right:
        assert fmapper.verify(lambda: AB(one, two), lambda other=other: other), other
    for other in [BA(one, two), {"a": one, "c": two}, {"a": two, "b": one}, {"a": one}]:
        assert not fmapper.verify(lambda: AB(one, two), lambda other=other: other), other
    report = fmapper.verify(lambda: AB(one, two), lambda: {"a": one, "c": two})
    assert "output: the keys ['a', 'b'] and ['a', 'c']" in str(report)


class HoldsItself(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(2, 2), kind

    def forward(self, x):
        found = self.kind()
        if isinstance(found, list):
            found += [self.linear(x), found]
        elif isinstance(found, dict):
            found |= {"y": self.linear(x), "whole": found}
        else:
            found.y, found.whole = self.linear(x), found
        return found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [list, dict, type("Plain", (), {})])
def test_outputs_may_hold_themselves(kind):
    a, b, x = HoldsItself(kind), HoldsItself(kind), torch.ones(1, 2)
    assert fmapper.verify(a, a, x)
    report = fmapper.verify(a, b, x)
    assert not report
    assert len(report.outputs) == 1
