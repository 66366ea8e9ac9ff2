"""What a transformation says of arguments, results and indices that it cannot take."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper
from fmapper import NotAFunctorError, TransformError, grad, jit, to_jax, to_torch, vmap
from fmapper.nn import functional as F

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

MOVERS = pytest.mark.parametrize("mover", [to_torch, to_jax], ids=["torch", "jax"])


class Undeclared:
    def __init__(self, w: Any) -> None:
        self.w = w


@pytest.mark.parametrize("argnums", ["m", 1.0, None, [None]])
def test_arguments_are_numbered(argnums: Any) -> None:
    with pytest.raises(TransformError, match="argnums="):
        grad(lambda m: m, argnums=argnums)
    with pytest.raises(TransformError, match="static_argnums="):
        jit(lambda m: m, static_argnums=argnums)


def test_no_argument_to_differentiate_by() -> None:
    with pytest.raises(TransformError, match="argnums is empty"):
        grad(lambda m: m, argnums=())


def test_a_loss_of_another_backend_has_lost_its_gradient() -> None:
    with pytest.raises(TransformError, match=r"array of torch.*one of jax.*loses the gradient"):
        grad(lambda w: to_jax(w).sum())(torch.ones(2))


@MOVERS
def test_an_error_names_arrays_of_another_backend(mover: Any) -> None:
    other = to_jax if mover is to_torch else to_torch
    w, x = mover(np.ones((3, 1), np.float32)), other(np.ones((2, 3), np.float32))
    with pytest.raises(TypeError) as caught:
        grad(lambda m, batch: (batch["x"] @ m["w"]).sum())({"w": w}, {"x": x})
    note = "".join(caught.value.__notes__)
    assert "torch at model[" in note
    assert "jax at model[" in note
    assert "model[1].x" in note


@MOVERS
def test_an_undeclared_object_cannot_carry_arrays_out(mover: Any) -> None:
    x = mover(np.ones((2, 3), np.float32))
    with pytest.raises(NotAFunctorError, match="Undeclared"):
        vmap(lambda a: Undeclared(2 * a))(x)
    for _ in range(2):
        with pytest.raises(NotAFunctorError, match="Undeclared"):
            grad(lambda a: (a.sum(), [Undeclared(2 * a)]), has_aux=True)(x)


def test_a_program_does_not_give_fake_arrays_away() -> None:
    with pytest.raises(NotAFunctorError, match="Undeclared"):
        jit(lambda a: Undeclared(2 * a))(jax.numpy.ones(2))
    run = jit(lambda a: Undeclared(2 * a))
    with pytest.warns(fmapper.NotCompiledWarning, match="NotAFunctorError"):
        assert run(torch.ones(2)).w.tolist() == [2, 2]
    assert run(torch.ones(2)).w.tolist() == [2, 2]


@MOVERS
@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: F.embedding(i, x),
        lambda x, i: F.one_hot(i, 3),
        F.cross_entropy,
    ],
    ids=["embedding", "one_hot", "cross_entropy"],
)
def test_indices_are_integers_on_every_backend(mover: Any, call: Any) -> None:
    x, i = np.ones((2, 3), np.float32), np.ones(2, np.float32)
    with pytest.raises(TypeError, match="indices"):
        call(x, i)
    with pytest.raises(TypeError, match="indices"):
        call(mover(x), mover(i))


CALLS = {
    "grad": (lambda x: grad(lambda m: m["w"].sum())({"w": x}), "differentiate"),
    "jit": (lambda x: jit(lambda m: m["w"] * 2)({"w": x}), "compile"),
    "vmap": (lambda x: vmap(lambda m: m["w"] * 2)({"w": x}), "vectorise"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_lazy_parameter_has_no_values(name: str) -> None:
    call, verb = CALLS[name]
    weight = torch.nn.LazyLinear(3).weight
    with pytest.raises(TransformError, match=rf"cannot {verb}.*model\.w: .*run the module once"):
        call(weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_torch_cannot_record() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    with pytest.raises(TransformError, match=r"cannot compile.*model\.w: .*layout=torch.jagged"):
        CALLS["jit"][0](nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_errors_stay_as_they_are() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    with pytest.raises(KeyError, match="nothing"):
        grad(lambda m: m["nothing"])({"w": nested})
