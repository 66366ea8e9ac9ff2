"""Gradients by `torch.nn.Module`, against `torch.autograd` and `torch.func`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from fmapper import (
    TransformError,
    fleaves,
    fmap,
    functor,
    grad,
    jit,
    load_state,
    no_gradient,
    state,
    to_cpu,
    trainables,
    value_and_grad,
    vmap,
)

torch = pytest.importorskip("torch")
nn = torch.nn


@functor
class Tree:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


class Block(nn.Module):
    """Something of all that modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("mask", torch.ones(4))
        self.table = {"shift": torch.arange(4.0)}
        self.note = "note"

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens) * self.mask + self.table["shift"] * self.fixed
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


TOKENS = torch.tensor([0, 3, 1, 4])


def loss(model: Any, tokens: Any = TOKENS) -> Any:
    return (model(tokens) ** 2).mean()


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    return Block().double()


def wrap(model: Any) -> Any:
    return Tree(model=model, w=torch.ones(1, dtype=torch.float64), n=3)


def reference(model: Any, loss: Callable[..., Any] = loss) -> tuple[Any, dict[str, Any]]:
    twin = copy.deepcopy(model)
    value = loss(twin)
    trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    return value, dict(zip(trained, torch.autograd.grad(value, [*trained.values()]), strict=True))


def same(gradient: Any, want: dict[str, Any]) -> None:
    for name, expected in want.items():
        got = _entry(gradient, name)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def _entry(module: Any, name: str) -> Any:
    *parents, last = name.split(".")
    for parent in parents:
        module = module._modules[parent]
    return module._parameters[last]


def test_of_a_module(block: Any) -> None:
    value, gradient = value_and_grad(loss)(block)
    expected, want = reference(block)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-14, atol=0)
    assert type(gradient) is Block
    same(gradient, want)
    assert not value.requires_grad
    assert not any(leaf.requires_grad for leaf in fleaves(gradient))
    assert all(parameter.grad is None for parameter in block.parameters())
    assert gradient.head.weight is gradient.embed.weight
    assert gradient.fixed is None
    assert gradient.mask is None
    assert gradient.norm.running_mean is None
    assert gradient.table["shift"] is no_gradient
    assert gradient.note == "note"


def test_in_a_functor_among_tensors(block: Any) -> None:
    model = wrap(block)
    _, gradient = value_and_grad(lambda m: loss(m.model) * m.w.sum() * m.n)(model)
    expected, want = reference(block)
    same(gradient.model, {name: 3 * g for name, g in want.items()})
    torch.testing.assert_close(gradient.w, 3 * expected.detach()[None])
    assert gradient.n is no_gradient
    new = fmap(lambda p, g: p - 0.1 * g, model, gradient)
    assert new.model.head.weight is new.model.embed.weight
    assert new.model.fixed is block.fixed


def test_a_step(block: Any) -> None:
    gradient = grad(loss)(block)
    new = fmap(lambda p, g: p - 0.1 * g, block, gradient)
    _, want = reference(block)
    for name, parameter in new.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        old = block.get_parameter(name)
        if name == "fixed":
            assert parameter is old
            continue
        assert parameter.requires_grad
        torch.testing.assert_close(parameter, old - 0.1 * want[name], rtol=1e-13, atol=1e-15)
    assert new.head.weight is new.embed.weight
    assert new.mask is block.mask
    assert new.norm.running_mean is block.norm.running_mean
    assert new.table["shift"] is block.table["shift"]


def test_a_gradient_is_a_module_like_others(block: Any) -> None:
    gradient = grad(loss)(block)
    names = [name for name in state(block) if name not in ("fixed", "mask", "table.shift")]
    names = [name for name in names if "running" not in name and "tracked" not in name]
    assert list(state(gradient)) == names
    for other in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), to_cpu(gradient)):
        assert type(other) is Block
        assert other.head.weight is other.embed.weight
        assert other.fixed is None
        assert list(state(other)) == names
    doubled = fmap(lambda g: 2 * g, gradient)
    assert type(doubled.head.weight) is torch.Tensor
    torch.testing.assert_close(doubled.norm.weight, 2 * gradient.norm.weight)
    summed = fmap(lambda a, b: a + b, gradient, doubled)
    torch.testing.assert_close(summed.norm.weight, 3 * gradient.norm.weight)
    loaded = load_state(gradient, state(doubled))
    assert torch.equal(loaded.norm.weight, doubled.norm.weight)


@pytest.mark.parametrize("inner", [lambda m: m, wrap], ids=["module", "in functor"])
def test_gradient_first_and_model_second(block: Any, inner: Any) -> None:
    model = inner(block)
    gradient = grad(lambda m: loss(getattr(m, "model", m)))(model)
    with torch.no_grad():
        decayed = fmap(lambda g, p: g + 0.5 * p, gradient, model)
    found, first = (getattr(tree, "model", tree) for tree in (decayed, gradient))
    torch.testing.assert_close(found.norm.weight, first.norm.weight + 0.5 * block.norm.weight)
    assert found.fixed is None
    assert found.mask is None


def test_gradient_first_where_a_whole_layer_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    gradient = grad(lambda m: m(torch.ones(2)).sum())(model)
    total = fmap(lambda g, p: g + p.detach(), gradient, model)
    assert total[0].weight is None
    assert torch.equal(total[1].weight, gradient[1].weight + model[1].weight.detach())


def test_nothing_is_trained() -> None:
    model = nn.Linear(2, 1).requires_grad_(requires_grad=False)
    with pytest.raises(TransformError, match="requires_grad"):
        grad(lambda m: m(torch.ones(2)).sum())(model)
    with pytest.raises(TransformError, match="holds no arrays"):
        grad(lambda m: m(torch.ones(2)).sum())(nn.ReLU())


# --- what a forward pass does beside -------------------------------------------------------------


@pytest.mark.parametrize("inner", [lambda m: m, wrap], ids=["module", "in functor"])
def test_buffers_are_updated_once(block: Any, inner: Any) -> None:
    twin = copy.deepcopy(block)
    loss(twin)
    value_and_grad(lambda m: loss(getattr(m, "model", m)))(inner(block))
    assert int(block.norm.num_batches_tracked) == 1
    assert torch.equal(block.norm.running_mean, twin.norm.running_mean)
    assert torch.equal(block.norm.running_var, twin.norm.running_var)


def test_dropout_is_that_of_the_seed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    x = torch.ones(8, 4, dtype=torch.float64)
    torch.manual_seed(3)
    got = grad(lambda m: m(x).sum())(model)
    torch.manual_seed(3)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for one, other in zip(fleaves(got), want, strict=True):
        assert torch.equal(one, other)


def test_hooks_run_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    calls: list[str] = []
    model[1].register_forward_hook(lambda module, args, out: calls.append("forward"))
    model[1].register_full_backward_hook(lambda module, *_: calls.append("backward"))
    grad(lambda m: m(torch.ones(3, 2)).sum())(model)
    assert calls == ["forward", "backward"]


def test_hooks_of_parameters_see_the_gradient() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.register_hook(lambda g: g * 10)
    gradient = grad(lambda m: m(torch.ones(2)).sum())(model)
    assert gradient.weight.tolist() == [[10.0, 10.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).eval(),
        lambda: nn.LSTM(3, 2),
        lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU(), nn.LayerNorm(3)),
    ],
    ids=["weight_norm", "orthogonal", "spectral_norm", "lstm", "transformer", "list", "sequential"],
)
@pytest.mark.parametrize("inner", [lambda m: m, wrap], ids=["module", "in functor"])
def test_of_modules_of_torch(make: Any, inner: Any) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(4, 2, 3, dtype=torch.float64)

    def f(m: Any) -> Any:
        m = getattr(m, "model", m)
        if isinstance(m, nn.ParameterList):
            return (m[0] * m[1] ** 2 * x).sum()
        out = m(x)
        return ((out[0] if isinstance(out, tuple) else out) ** 2).sum()

    _, want = reference(model, f)
    gradient = grad(f)(inner(model))
    same(getattr(gradient, "model", gradient), want)
    new = fmap(lambda p, g: p - 0.01 * g, model, getattr(gradient, "model", gradient))
    assert f(new) < f(model)


# --- through maps of modules ----------------------------------------------------------------------


def test_through_a_map_of_the_module(block: Any) -> None:
    """A parameter made of an intermediate result would cut the gradient off."""
    block.eval()
    _, want = reference(
        block,
        lambda m: (
            torch.func.functional_call(
                m, {name: 2 * p for name, p in m.named_parameters() if p.requires_grad}, (TOKENS,)
            )
            .square()
            .mean()
        ),
    )
    same(
        grad(
            lambda m: loss(
                fmap(lambda p: p * 2 if p.is_floating_point() and p.requires_grad else p, m)
            )
        )(block),
        want,
    )


def test_through_a_new_state() -> None:
    model = nn.Linear(2, 1).double()
    x = torch.ones(2, dtype=torch.float64)
    gradient = grad(lambda m: load_state(m, {k: v**2 for k, v in state(m).items()})(x).sum())(model)
    torch.testing.assert_close(gradient.weight, 2 * model.weight.detach())


def inner_step(model: Any, rate: float = 0.1) -> Any:
    return fmap(lambda p, g: p - rate * g, model, grad(loss)(model))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("inner", [lambda m: m, wrap], ids=["module", "in functor"])
def test_through_steps(block: Any, steps: int, inner: Any) -> None:
    """Meta-learning, against `torch.func`."""
    block.eval()
    block.fixed.requires_grad_()
    parameters = dict(block.named_parameters())

    def flat(parameters: Any) -> Any:
        return torch.func.functional_call(block, parameters, (TOKENS,)).square().mean()

    def flat_meta(parameters: Any) -> Any:
        for _ in range(steps):
            gradients = torch.func.grad(flat)(parameters)
            parameters = {k: p - 0.1 * gradients[k] for k, p in parameters.items()}
        return flat(parameters)

    def meta(m: Any) -> Any:
        model = getattr(m, "model", m)
        for _ in range(steps):
            model = inner_step(model)
        assert model.head.weight is model.embed.weight
        return loss(model)

    want, value = torch.func.grad_and_value(flat_meta)(parameters)
    got, gradient = value_and_grad(meta)(inner(block))
    torch.testing.assert_close(got, value.detach(), rtol=1e-13, atol=0)
    for name, g in want.items():
        torch.testing.assert_close(
            _entry(getattr(gradient, "model", gradient), name), g.detach(), rtol=1e-11, atol=1e-14
        )
    assert all(p.is_leaf and type(p) is nn.Parameter for p in block.parameters())


def test_what_comes_out_of_steps_has_parameters_again(block: Any) -> None:
    block.eval()

    def meta(model: Any) -> Any:
        new = inner_step(model)
        return loss(new), new

    (_, new), _ = value_and_grad(meta, has_aux=True)(block)
    want = inner_step(block)
    assert [name for name, _ in new.named_parameters()] == [n for n, _ in want.named_parameters()]
    assert list(trainables(new)) == list(trainables(block))
    for name, parameter in new.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.requires_grad == block.get_parameter(name).requires_grad
        torch.testing.assert_close(parameter, want.get_parameter(name))
    assert new.head.weight is new.embed.weight


def test_gradients_of_single_samples() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model[0].bias.requires_grad_(requires_grad=False)
    x = torch.randn(5, 3, dtype=torch.float64)
    each = vmap(grad(lambda m, x: m(x).square().sum()), in_axes=(None, 0))(model, x)
    for i in range(5):
        _, want = reference(model, lambda m, i=i: m(x[i]).square().sum())
        for name, g in want.items():
            torch.testing.assert_close(_entry(each, name)[i], g)
    assert each[0].bias is None


def test_gradients_of_an_ensemble() -> None:
    models = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double() for _ in range(4)]
    for model in models:
        model[0].bias.requires_grad_(requires_grad=False)
    x = torch.randn(5, 3, dtype=torch.float64)
    stacked = fmap(lambda *ps: torch.stack(ps), *models)
    assert not stacked[0].bias.requires_grad

    def f(m: Any) -> Any:
        return m(x).square().sum()

    each = vmap(grad(f))(stacked)
    for i, model in enumerate(models):
        _, want = reference(model, f)
        for name, g in want.items():
            torch.testing.assert_close(_entry(each, name)[i], g)
    assert each[0].bias is None
    # ... and through steps of each of them
    meta = vmap(grad(lambda m: f(fmap(lambda p, g: p - 0.01 * g, m, grad(f)(m)))))(stacked)
    for i, model in enumerate(models):
        one = grad(lambda m: f(fmap(lambda p, g: p - 0.01 * g, m, grad(f)(m))))(model)
        torch.testing.assert_close(meta[1].weight[i], one[1].weight)


# --- where torch is told otherwise ----------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_whatever_is_switched_off(context: Any) -> None:
    model = nn.Linear(2, 1)
    w = torch.tensor([1.0, 2.0])
    with context():
        gradient = grad(lambda m: m(torch.ones(2)).sum())(model)
        other = grad(lambda m: (m["w"] ** 2).sum())({"w": w})
        assert torch.is_grad_enabled() is False
    assert gradient.weight.tolist() == [[1.0, 1.0]]
    assert other["w"].tolist() == [2.0, 4.0]


def test_by_tensors_that_were_made_for_inference() -> None:
    with torch.inference_mode():
        w, model = torch.tensor([1.0, 2.0]), nn.Linear(2, 1)
        inside = grad(lambda m: (m["w"] ** 2).sum())({"w": w})
        of_model = grad(lambda m: m(torch.ones(2)).sum())(model)
    assert inside["w"].tolist() == [2.0, 4.0]
    assert of_model.weight.tolist() == [[1.0, 1.0]]
    assert grad(lambda m: (m["w"] ** 2).sum())({"w": w})["w"].tolist() == [2.0, 4.0]


def test_a_tensor_of_a_graph_is_where_the_gradient_ends() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    value, gradient = value_and_grad(lambda m: (m["w"] ** 2).sum())({"w": w * 3})
    assert gradient["w"].tolist() == [6.0, 12.0]
    assert not value.requires_grad
    assert w.grad is None


def test_a_loss_that_has_left_torch_is_refused() -> None:
    """Its gradient would be zero, in silence."""
    with pytest.raises(
        TransformError, match="not one of numpy: that conversion loses the gradient"
    ):
        grad(lambda w: (w**2).sum().detach().numpy())(torch.ones(2))


def test_the_grad_of_parameters_is_left_alone() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.full((1, 2), 7.0)
    gradient = grad(lambda m: m(torch.ones(2)).sum())(model)
    assert model.weight.grad.tolist() == [[7.0, 7.0]]
    assert gradient.weight.grad is None


def test_torch_optim_takes_the_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    twin = copy.deepcopy(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, twin)]
    for _ in range(5):
        gradient = grad(lambda m: m(x).square().sum())(model)
        for parameter, g in zip(model.parameters(), fleaves(gradient), strict=True):
            parameter.grad = g
        optimizers[0].step()
        optimizers[1].zero_grad()
        twin(x).square().sum().backward()
        optimizers[1].step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept() -> None:
    model = nn.Linear(2, 1)
    x = torch.ones(3, 2)
    of_x = weakref.ref(x)
    value, gradient = value_and_grad(lambda m, x: m(x).sum())(model, x)
    of_gradient = weakref.ref(gradient.weight)
    of_value = weakref.ref(value)
    del x, value, gradient
    gc.collect()
    assert of_x() is of_gradient() is of_value() is None


class Counting(torch.nn.Module):
    """A module that binds its buffer anew instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n = self.n + 1
        return (self.w * x).sum()


@pytest.mark.nightly_cases("jit")
@pytest.mark.parametrize("transform", [lambda f: f, jit], ids=["eager", "jit"])
def test_a_buffer_that_is_bound_anew_reaches_the_model(transform):
    model = {"counting": Counting(), "w": torch.ones(2)}  # not all are parameters: it is rebuilt
    take = transform(value_and_grad(lambda m: m["counting"](m["w"])))
    for count in (1, 2, 3):
        _, gradient = take(model)
        assert model["counting"].n.item() == count
    assert torch.equal(gradient["counting"].w, torch.ones(2))
