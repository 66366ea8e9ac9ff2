"""Experts that take rows by counts are compiled, and right for counts other than the examples'."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

COUNT, WIDTH = 4, 6


class Experts(torch.nn.Module):
    """Rows in the order of their experts, split by how many each gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(WIDTH, COUNT)
        self.weight = torch.nn.Parameter(torch.randn(COUNT, 5, WIDTH))

    def forward(self, x: Any) -> Any:
        which = self.router(x).argmax(-1)
        counts = torch.nn.functional.one_hot(which, COUNT).sum(0).tolist()
        order = which.argsort(stable=True)
        out = self.take(x[order].split(counts, dim=0))
        return torch.zeros_like(out).index_copy(0, order, out)

    def take(self, parts: Any) -> Any:
        linear = torch.nn.functional.linear
        return torch.cat(
            [torch.relu(linear(parts[i], self.weight[i])) for i in range(COUNT)], dim=0
        )


class Scaled(Experts):
    """By the largest of the rows, which are not the same where they are all there."""

    def take(self, parts: Any) -> Any:
        return super().take([part / part.abs().sum() for part in parts])


class Backwards(Experts):
    def take(self, parts: Any) -> Any:
        return super().take(parts[::-1])


class Counted(Experts):
    """A count is a number beside the split."""

    def take(self, parts: Any) -> Any:
        return super().take(parts) * parts[0].shape[0]


class Decided(Experts):
    """It counts the experts without rows."""

    def forward(self, x: Any) -> Any:
        which = self.router(x).argmax(-1)
        counts = torch.nn.functional.one_hot(which, COUNT).sum(0).tolist()
        order = which.argsort(stable=True)
        idle = [i for i in range(COUNT) if counts[i] == 0]
        out = self.take(x[order].split(counts, dim=0))
        return torch.zeros_like(out).index_copy(0, order, out) + len(idle)


def rows(seed: int) -> Any:
    return 3 * torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.nightly
def test_rows_go_to_their_experts_under_jit() -> None:
    module = Experts()
    converted = fmapper.convert(module, "jax", (rows(0),))
    run = jax.jit(converted)
    counts = set()
    for seed in range(4):
        x = rows(seed)
        np.testing.assert_allclose(run(x.numpy()), module(x).detach(), rtol=1e-5, atol=1e-5)
        counts.add(tuple(np.bincount(module.router(x).argmax(-1), minlength=COUNT)))
    assert len(counts) > 1
    assert any(0 in one for one in counts)


@pytest.mark.nightly
def test_gradients_are_those_of_torch() -> None:
    module = Experts()
    converted = fmapper.convert(module, "jax", (rows(0),))
    x = rows(1)

    def loss(params: Any) -> Any:
        return (converted.replace(params=params)(x.numpy()) ** 2).sum()

    found = jax.jit(jax.grad(loss))(converted.params)
    (module(x) ** 2).sum().backward()
    np.testing.assert_allclose(found["weight"], module.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Scaled, Backwards, Counted])
def test_what_needs_the_parts_themselves_is_not_compiled(kind: Any) -> None:
    module = kind()
    with pytest.warns(fmapper.NotCompiledWarning, match="depend on the values"):
        converted = fmapper.convert(module, "jax", (rows(0),))
    if kind is not Backwards:  # whose parts have other sizes than their places
        x = rows(1)
        np.testing.assert_allclose(converted(x.numpy()), module(x).detach(), rtol=1e-5, atol=1e-5)


class Wrapped(torch.nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(x)


def test_code_that_compares_a_count_is_not_recorded_for_all_counts() -> None:
    """`== 0` would be false of what stands for a count, and nobody would know."""
    from fmapper_adapters.torch.record.values import loop_proof, split_rows

    run = split_rows.keep_rows_together(Decided().forward)
    with pytest.raises(loop_proof.NotProved, match="compares a count"):
        torch.export.export(Wrapped(run), (rows(0),), strict=False)
