"""Operations with effects, which torch records with tokens, and what it says of sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402


def test_prints_come_in_order_when_the_program_runs(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(x: Any) -> Any:
        torch.ops.aten._print("first")
        torch.ops.aten._print("second")
        return x + 1

    model = fmapper.convert(converting.Function(loud), "jax", (torch.ones(2),))
    capfd.readouterr()
    assert np.asarray(model(np.ones(2, "float32"))).tolist() == [2, 2]
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "second"]


@torch.library.custom_op("fmapper_tests::both", mutates_args=())
def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3


@both.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("fmapper_tests::one", mutates_args=())
def one(x: torch.Tensor) -> torch.Tensor:
    return x * 5


@one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_results_behind_tokens() -> None:
    effects = pytest.importorskip("torch._higher_order_ops.effects")
    for name in ("one", "both"):
        effects._register_effectful_op(f"fmapper_tests::{name}", effects._EffectType.ORDERED)
    fmapper.lowering("fmapper_tests::one")(lambda x: x * 5)
    fmapper.lowering("fmapper_tests::both")(lambda x: (x * 2, x * 3))
    converting.check(lambda x: (both(x)[1] + 1, one(x) - 1, both(one(x))), torch.randn(3))


def test_effects_without_a_lowering_are_missing() -> None:
    effects = pytest.importorskip("torch._higher_order_ops.effects")

    @torch.library.custom_op("fmapper_tests::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> None:
        pass

    unknown.register_fake(lambda x: None)
    effects._register_effectful_op("fmapper_tests::unknown", effects._EffectType.ORDERED)

    def forward(x: Any) -> Any:
        unknown(x)
        return x

    with pytest.raises(fmapper.UnsupportedOpsError, match="fmapper_tests::unknown"):
        fmapper.convert(converting.Function(forward), "jax", (torch.randn(3),))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(3,), (), (1, 3)])
def test_masked_select_of_fewer_elements_than_the_mask_has(shape: tuple[int, ...]) -> None:
    mask = torch.tensor([[True, True, True], [True, False, True]])
    converting.check(
        lambda x: (torch.masked_select(x, mask), x.masked_select(mask)), torch.randn(shape)
    )


@pytest.mark.nightly
def test_views_whose_place_in_the_storage_depends_on_values() -> None:
    converting.check(torch.tensor_split, torch.randn(6, 3), torch.tensor([1, 4]))


@pytest.mark.parametrize(("rate", "seeds"), [(0.0, {0}), (0.5, {0, 1})])
def test_what_draws_nothing_runs_with_one_seed(
    monkeypatch: pytest.MonkeyPatch, rate: float, seeds: set[int]
) -> None:
    from fmapper_adapters.torch.from_fx import check

    class Attention(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=rate)
            return torch.nn.functional.dropout(attended, 0.1, self.training)

    used = set()
    run = check.run

    def note(*given: Any, seed: int) -> Any:
        used.add(seed)
        return run(*given, seed=seed)

    monkeypatch.setattr(check, "run", note)
    fmapper.convert(Attention().eval(), "jax", (torch.randn(2, 4, 8),))
    assert used == seeds


def test_a_deep_copy_is_written_without_its_source() -> None:
    def loop(x: Any) -> Any:
        states = [{"sum": x.detach() * 2}]
        states += copy.deepcopy([states[0], states[0]])
        states[1]["sum"].add_(x)
        assert states[1] is states[2]
        return states[0]["sum"], states[2]["sum"]

    model = fmapper.convert(converting.Function(loop), "jax", (torch.ones(2),))
    kept, written = model(np.full(2, 3.0, "float32"))
    assert np.asarray(kept).tolist() == [6, 6]
    assert np.asarray(written).tolist() == [9, 9]
