"""What is trained: said by functors, by torch parameters, by adapters; and who goes by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import fmapper
from fmapper import DeclarationError, destructure, fmap, functor, to_numpy, trainables

np = pytest.importorskip("numpy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@functor(trainable=("w",))
class Dense:
    def __init__(self, w: Any, scale: Any) -> None:
        self.w, self.scale = w, scale


class Derived(Dense):
    pass


@functor
class Own(Dense):
    pass


@functor(trainable=())
class Frozen:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@functor
class Free:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


def a(n: int = 1) -> Any:
    return np.ones(n)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Dense(a(), a()), ["w"]),
        (lambda: Derived(a(), a()), ["w"]),
        (lambda: Own(a(), a()), ["w", "scale"]),
        (lambda: Frozen(a()), []),
        (lambda: Frozen([Dense(a(), a())]), []),
        (lambda: Dense([a(), Dense(a(), a())], a()), ["w.0", "w.1.w"]),
        (lambda: [a(), np.arange(2), np.True_, 3.0, "x", None, np.float32(2)], ["0", "6"]),
        (lambda: {"c": np.ones(1, np.complex64)}, ["c"]),
        (dict, []),
    ],
)
def test_which_arrays_are_trained(make: Callable[[], Any], names: list[str]) -> None:
    tree = make()
    assert list(trainables(tree)) == names
    everything = fmapper.state(tree)
    assert all(array is everything[name] for name, array in trainables(tree).items())


def test_a_tied_array_is_there_once_and_trained_if_one_of_its_places_is() -> None:
    w = a()
    assert list(trainables({"a": w, "b": w})) == ["a"]
    assert list(trainables({"a": Frozen(w), "b": [w]})) == ["b.0"]
    shared = [w]
    assert list(trainables({"a": Frozen(shared), "b": Dense(shared, w)})) == ["b.w.0"]
    assert list(trainables({"b": Dense(shared, w), "a": Frozen(shared)})) == ["b.w.0"]


def test_cycles_and_shared_nodes_end() -> None:
    tree = Free(w=a())
    tree.me = tree
    assert list(trainables(tree)) == ["w"]
    deep: Any = [a()]
    for _ in range(60):  # 2 ** 60 paths
        deep = Free(a=deep, b=deep)
    assert len(trainables(deep)) == 1


def test_names_that_are_no_children_are_refused() -> None:
    with pytest.raises(
        DeclarationError, match=r"trainable of C names 'x', but its children are 'w'"
    ):
        functor(type("C", (), {}), children=("w",), trainable=("x",))
    with pytest.raises(DeclarationError, match=r"write a tuple|Write a tuple: trainable=\('w',\)"):
        functor(type("C", (), {}), trainable="w")
    with pytest.raises(DeclarationError, match="trainable of C repeats a name"):
        functor(type("C", (), {}), trainable=("w", "w"))

    with pytest.raises(DeclarationError, match="Data has no attribute 'x'"):

        @functor(trainable=("x",))
        @dataclasses.dataclass
        class Data:
            w: Any

    @functor(trainable=("x",))
    class Late:
        def __init__(self) -> None:
            self.w = a()

    with pytest.raises(DeclarationError, match=r"model\[0\]: Late declares 'x' trainable.*'w'"):
        trainables([Late()])


def test_together_with_children_and_rebuild() -> None:
    @functor(children=("w", "b"), rebuild=lambda _, new: Made(**new), trainable=["b"])
    class Made:
        def __init__(self, w: Any, b: Any) -> None:
            self.w, self.b = w, b

    made = Made(a(), a(2))
    assert list(trainables(made)) == ["b"]
    vector, back = destructure(made)
    new = back(vector + 1)
    assert (new.b.tolist(), new.w is made.w) == ([2, 2], True)


def test_destructure_takes_what_is_trained_and_carries_the_rest() -> None:
    model = [Dense(a(2), a()), Frozen(a(3)), np.arange(2)]
    vector, back = destructure(model)
    assert vector.shape == (2,)
    new = back(vector * 5)
    assert new[0].w.tolist() == [5, 5]
    assert new[0].scale is model[0].scale
    assert new[1].inner is model[1].inner


def test_moves_and_walks_do_not_care() -> None:
    model = Dense(a(), Frozen(a()))
    new = to_numpy(model, copy=True)
    assert new.scale.inner is not model.scale.inner
    assert fmap(lambda x: x + 1, model).scale.inner.tolist() == [2]


def test_two_places_of_one_name_are_refused() -> None:
    with pytest.raises(fmapper.StructureMismatchError, match=r"both called 'a\.b'"):
        trainables({"a.b": a(), "a": {"b": a()}})


def test_holders_of_arrays_are_refused() -> None:
    class Undeclared:
        w = None

    holder = Undeclared()
    holder.w = a()
    with pytest.raises(fmapper.NotAFunctorError, match=r"model\[0\]"):
        trainables([holder])


def test_torch_modules(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net[0].bias.requires_grad_(False)
    net[0].extra = [torch.ones(3)]
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    assert list(trainables(net)) == names == ["0.weight", "1.weight", "1.bias"]
    vector, back = destructure(net)
    assert vector.shape == (8,)
    new = back(vector.detach() * 0)
    assert new[1].running_var is net[1].running_var
    assert new[0].bias is net[0].bias
    assert not new[0].weight.any()


def test_torch_tensors_outside_of_modules(torch: Any) -> None:
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    tree = [torch.ones(1), frozen, torch.nn.Parameter(torch.ones(1)), torch.arange(2)]
    assert list(trainables(tree)) == ["0", "2"]
    assert list(trainables(Frozen(torch.nn.Linear(1, 1)))) == []
    module = torch.nn.BatchNorm1d(2)
    assert list(trainables(Free(stats=module.running_mean, net=module))) == [
        "stats",
        "net.weight",
        "net.bias",
    ]


def test_an_adapter_says_which_classes_train_what_is_below_them() -> None:
    class Variable(Free):
        pass

    class Param(Variable):
        pass

    class Says(type(fmapper.backends.get_adapter("numpy"))):  # type: ignore[misc]
        name = "says"

        def is_array_type(self, cls: type) -> bool:
            return False

        def training_rule(self, cls: type) -> Callable[[Any], bool] | None:
            if issubclass(cls, Param):
                return lambda leaf: True
            return (lambda leaf: False) if issubclass(cls, Variable) else None

    fmapper.backends.register_adapter(Says())
    try:
        tree = {"stat": Variable(x=[a()], inner=Param(x=[a()])), "plain": a()}
        assert list(trainables(tree)) == ["stat.inner.x.0", "plain"]
    finally:
        fmapper.backends.unregister_adapter("says")


def test_gradients_reach_what_is_trained_and_nothing_else() -> None:
    jax = pytest.importorskip("jax")
    model = fmapper.to_jax(Dense(np.ones(2, np.float32), np.ones(2, np.float32)))
    vector, back = destructure(model)

    def loss(vector: Any) -> Any:
        new = back(vector)
        return (new.w * new.scale * 3).sum()

    assert jax.grad(loss)(vector).tolist() == [3, 3]


def test_trainables_of_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    assert set(fmapper.state(model)) == {"scale", "bias", "mean", "var"}
    assert set(fmapper.trainables(model)) == {"scale", "bias"}


def test_the_state_of_an_optimizer_is_not_trained(torch: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert list(trainables((model, optimizer))) == ["0.weight", "0.bias"]
    assert destructure((model, optimizer))[0].shape == (3,)
    loose = torch.ones(2, requires_grad=True)
    assert list(trainables(([loose], torch.optim.SGD([loose], lr=0.1)))) == ["0.0"]
