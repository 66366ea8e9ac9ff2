"""Which operations are recorded as they are: those that the target lowers, and the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import fmapper
from fmapper.programs.lowering import added as known

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support.converting import Function  # noqa: E402

jnp = jax.numpy
X = torch.linspace(-2, 2, 6).reshape(2, 3)


def ops(function: Any, *args: Any, **options: Any) -> set[str]:
    """The operations of the program that is recorded without a target, or for one."""
    settings = {"dynamic_shapes": None, "train": False, "check": True, "strict": None, **options}
    adapter = fmapper.backends.get_adapter("torch")
    program = adapter.export_program(Function(function).eval(), args, {}, **settings)
    assert fmapper.convert(program, "jax") is not None
    return {call.op for call in program.graph.walk()}


@pytest.fixture
def added() -> Iterator[dict[str, Any]]:
    """The user's lowerings, which are forgotten afterwards."""
    before = {target: dict(found) for target, found in known.items()}
    yield known
    known.clear()
    known.update(before)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("aten::nanmean", lambda x: x.nanmean()),  # a composite, that nothing else lowers
        ("aten::transpose", lambda x: x.transpose(0, 1)),  # written otherwise, without it
        ("aten::transpose.int", lambda x: x.relu().transpose(0, 1)),
        ("aten::gelu", torch.nn.functional.gelu),
        ("aten::expm1", torch.expm1),
    ],
)
def test_a_lowering_of_the_users_is_called(op: str, function: Any, added: Any) -> None:
    fmapper.lowering(op)(lambda x, *_: jnp.full((), 7.0))
    model = fmapper.convert(Function(function), "jax", (X,), check=False)
    assert model(jnp.asarray(X.numpy())) == 7


def test_one_that_need_not_be_whole_is_taken_apart(added: Any) -> None:
    fmapper.lowering("aten::nanmean", whole=False)(lambda x, *_: jnp.full((), 7.0))
    model = fmapper.convert(Function(lambda x: x.nanmean()), "jax", (X,))
    assert abs(float(model(jnp.asarray(X.numpy()))) - X.nanmean().item()) < 1e-6


def test_a_lowering_of_the_users_says_what_it_does_with_the_ends_of_int64(added: Any) -> None:
    last = torch.iinfo(torch.int64).max
    mask, x = torch.tensor([True, False]), torch.tensor([5, 6])
    module = Function(lambda x: x.masked_fill(mask, last).flip(0) == last)
    fmapper.lowering("aten::flip", int64="moves")(jnp.flip)
    assert fmapper.convert(module, "jax", (x,))(jnp.asarray([5, 6])).tolist() == [False, True]
    fmapper.lowering("aten::flip")(jnp.flip)
    with pytest.raises(fmapper.LossyCastError, match="32-bit"):
        fmapper.convert(module, "jax", (x,))


def test_a_recorder_without_a_target_takes_apart_what_torch_does() -> None:
    module, whole = torch.nn.functional.layer_norm, {"aten::layer_norm"}
    assert "aten::layer_norm.default" not in ops(lambda x: module(x, (3,)), X)
    assert ops(lambda x: module(x, (3,)), X, whole=whole) == {"aten::layer_norm.default"}


def test_dropout_inside_has_a_name_where_the_target_lowers_that() -> None:
    def attend(x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = torch.ones(1, 1, 4, 8)
    name = "scaled_dot_product_attention"
    whole = {f"aten::{name}", f"fmapper::{name}_with_dropout"}
    assert ops(attend, x, whole=whole, check=False) == {f"fmapper::{name}_with_dropout.default"}
    assert not any(name in op for op in ops(attend, x, check=False))
