"""Gradients go through the casts and copies of a model within the function."""

from __future__ import annotations

import pytest

import fmapper
from fmapper import cast, fmap, grad, jit, load_state, state, to_cpu, to_torch, value_and_grad

torch = pytest.importorskip("torch")


@pytest.mark.nightly_cases("load_state", "copy", "cast", "rules", "dtype")
@pytest.mark.parametrize(
    "through",
    [
        lambda m: cast(m, "float32"),
        lambda m: cast(m, {"*": "float32", "w": "float64"}),
        to_torch(dtype="float32"),
        to_cpu(copy=True),
        lambda m: load_state(fmap(lambda a: 0 * a, m), state(m)),
        lambda m: load_state(fmap(lambda a: torch.zeros(a.shape), m), state(m)),
    ],
    ids=["cast", "rules", "dtype", "copy", "load_state", "load_state_cast"],
)
def test_a_gradient_goes_through_what_makes_a_new_model(through) -> None:
    model = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.ones(2).double()}

    def loss(m):
        new = through(m)
        return (new["w"] ** 2).sum() + (3 * new["b"]).sum()

    for take in (grad(loss), jit(grad(loss))):
        gradient = take(model)
        assert gradient["w"].tolist() == [2.0, 4.0]
        assert gradient["b"].tolist() == [3.0, 3.0]
        assert gradient["w"].dtype == torch.float64


@pytest.mark.parametrize("through", [lambda m: cast(m, "bfloat16"), to_cpu(copy=True)])
def test_mixed_precision_of_a_module_has_the_gradient_of_a_cast_by_hand(through) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    dtype = through(torch.ones(1)).dtype
    x = torch.randn(5, 3)

    def loss(m):
        return through(m)(x.to(dtype)).float().square().mean()

    value, gradient = value_and_grad(loss)(net)
    names = dict(net.named_parameters())
    by_hand = torch.func.functional_call(
        net, {name: p.to(dtype) for name, p in names.items()}, (x.to(dtype),)
    )
    expected = by_hand.float().square().mean()
    expected.backward()
    assert value.item() == expected.item()
    assert value.item() > 0
    for name, p in names.items():
        assert torch.equal(state(gradient)[name], p.grad), name


def test_the_new_model_outside_a_gradient_has_leaves_of_its_own() -> None:
    net = cast(torch.nn.Linear(2, 1), "float64")
    assert isinstance(net.weight, torch.nn.Parameter)
    assert net.weight.is_leaf
    assert fmapper.grad(lambda w: (w**2).sum())(cast(torch.ones(1), "float64")).item() == 2
