"""Sizes that depend on values: programs that compile all the same, for any values."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402


def check(module: Any, *examples: tuple[Any, ...]) -> Any:
    """Converts for the first inputs; is right for all under `jax.jit`, with parameters given."""
    if not isinstance(module, torch.nn.Module):
        module = converting.Function(module)
    model = fmapper.convert(module, "jax", examples[0])
    compiled = jax.jit(lambda params, *args: model.replace(params=params)(*args))
    for args in examples:
        converting.compare(compiled(model.params, *[x.numpy() for x in args]), module(*args))
    return model


X = torch.randn(6, 4)
MASKS = (
    torch.tensor([True, False, True, True, False, False]),
    torch.tensor([False, False, False, False, True, True]),
    torch.zeros(6, dtype=torch.bool),
    torch.ones(6, dtype=torch.bool),
)


def replaced(x: Any, mask: Any) -> Any:
    y = x.clone()
    y[mask] = torch.nn.functional.layer_norm(x[mask] * 2, (4,)).tanh()
    return y


def moved(x: Any, mask: Any) -> Any:
    """Rows of one mask to the places of another that has as many."""
    y = x.clone()
    y[mask.flip(0)] = x[mask].exp()
    return y


def scattered(x: Any, mask: Any) -> Any:
    rows = (x[mask] @ torch.arange(16.0).reshape(4, 4)).reshape(-1, 2, 2).transpose(1, 2)
    return x.masked_scatter(mask[:, None].expand_as(x), rows.reshape(-1, 4) + 1)


def added(x: Any, mask: Any) -> Any:
    (places,) = torch.where(mask)
    rows = torch.nn.functional.silu(x[places]).softmax(-1)
    return torch.ones(7, 4).index_add(0, places + 1, rows)


def put(x: Any, mask: Any) -> Any:
    rows, columns = torch.nonzero(mask[:, None] & (x > 0), as_tuple=True)
    y = torch.zeros(6, 4)
    y[rows, columns] = x[rows, columns] * 3
    return y.index_put((rows, columns), x.flatten()[rows * 4 + columns], accumulate=True)


def summed(x: Any, mask: Any) -> Any:
    kept = x[mask]
    return kept.sum(0), (kept > 1).any(), kept.sum() / mask.sum(), x.masked_select(x > 0).sum()


def counted(x: Any, mask: Any) -> Any:
    kept = x[mask]
    return x * kept.shape[0], x * x.masked_select(mask[:, None]).numel()


def looked_up(x: Any, mask: Any) -> Any:
    """Kept rows, and each place among them."""
    kept = torch.cat([x[mask], x[mask] + 1], -1)
    order = mask.cumsum(0) - 1
    return torch.where(mask[:, None], kept[order.clamp(min=0)], 0)


CASES = [replaced, scattered, added, put, summed, counted]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_rows_that_a_mask_keeps(case: Any) -> None:
    model = check(case, *[(X, mask) for mask in MASKS])
    assert not model._code.concrete


@pytest.mark.nightly
def test_rows_that_a_mask_keeps_in_other_places() -> None:
    check(moved, *[(X, mask) for mask in MASKS])


@pytest.mark.nightly
def test_too_few_rows_are_an_error_as_in_torch() -> None:
    def forward(x: Any, mask: Any, where: Any) -> Any:
        return x.masked_scatter(where[:, None].expand_as(x), x[mask] * 2)

    few, many = MASKS[1], MASKS[3]
    model = check(forward, (X, MASKS[0], few), (X, many, many))
    with pytest.raises(fmapper.ProgramInputError, match="masked_scatter"):
        model(X.numpy(), few.numpy(), many.numpy())


class Experts(torch.nn.Module):
    """Routes each token to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        hits = torch.nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rank, token = torch.where(hits[i])
            found.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        return found


@pytest.mark.nightly
def test_experts_that_get_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    module = Experts()
    x = torch.randn(5, 4)
    same = x[:1].expand(5, 4).contiguous()
    model = check(module, (x,), (-x,), (same,), (torch.randn(5, 4) * 9,))
    module(x).square().sum().backward()
    gradients = jax.jit(jax.grad(lambda p: (model.replace(params=p)(x.numpy()) ** 2).sum()))(
        model.params
    )
    for name, parameter in module.named_parameters():
        converting.compare(gradients[name], parameter.grad)


@pytest.mark.nightly
def test_a_size_is_computed_from_its_symbols_alone(monkeypatch) -> None:
    """There may be hundreds of others, one for each expert."""
    sympy = pytest.importorskip("sympy")
    counts, subs = [], sympy.Basic.subs

    def count(self: Any, *given: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.endswith(os.path.join("static_sizes", "writer.py")):
            counts.append(len(given[0]))
        return subs(self, *given, **options)

    def several(x: Any, mask: Any) -> Any:
        return sum((x[mask & (x[:, at] > 0)] * at).sum(0) for at in range(4))

    monkeypatch.setattr(sympy.Basic, "subs", count)
    with torch.no_grad():
        fmapper.convert(converting.Function(several), "jax", (X, MASKS[0]), check=False)
    assert counts
    assert max(counts) == 1


@pytest.mark.nightly
def test_a_result_whose_size_depends_on_values_stays_eager() -> None:
    with pytest.warns(fmapper.NotCompiledWarning, match="specialize=True"):
        model = fmapper.convert(converting.Function(lambda x, m: x[m] * 2), "jax", (X, MASKS[0]))
    assert model._code.concrete
    for mask in MASKS:
        converting.compare(model(X.numpy(), mask.numpy()), X[mask] * 2)


@pytest.mark.nightly
def test_what_runs_eagerly_only_is_said_with_its_lines_and_can_be_specialised() -> None:
    def forward(x: Any, m: Any) -> Any:
        return x[m].flip(0) * 2, x.unique_consecutive()

    x = torch.tensor([1.0, 1.0, 2.0, 0.0, 0.0, 3.0])
    with pytest.warns(
        fmapper.NotCompiledWarning, match=r"specialize=True(.|\n)*aten::index"
    ) as seen:
        fmapper.convert(converting.Function(forward), "jax", (x, MASKS[0]))
    assert seen[0].filename == __file__
    model = fmapper.convert(converting.Function(forward), "jax", (x, MASKS[0]), specialize=True)
    assert not model._code.concrete
    other = torch.tensor([5.0, 5.0, 2.0, 4.0, 4.0, 3.0])
    for given, mask in ((x, MASKS[0]), (other, MASKS[0].flip(0))):
        converting.compare(jax.jit(model)(given.numpy(), mask.numpy()), forward(given, mask))
    for given, mask in ((x, MASKS[1]), (torch.arange(6.0), MASKS[0]), (x * 0, MASKS[0])):
        with pytest.raises(fmapper.ProgramInputError, match="asserts"):
            model(given.numpy(), mask.numpy())


def test_bins_whose_number_is_asserted_compile() -> None:
    def forward(x: Any) -> Any:
        bins = torch.bincount(x)
        torch._check(bins.shape[0] == 4)
        return bins

    x = torch.tensor([3, 1, 1, 0])
    model = fmapper.convert(converting.Function(forward), "jax", (x,), check=False)
    assert not model._code.concrete
    for given in (x, torch.tensor([3, 3, 0, 3])):
        converting.compare(jax.jit(model)(given.numpy()), torch.bincount(given))
    for given in (x - 1, x + 1):
        with pytest.raises(fmapper.ProgramInputError, match="asserts"):
            model(given.numpy())


@pytest.mark.nightly
def test_known_sizes_of_repeated_rows_and_sorted_values() -> None:
    def forward(x: Any, n: Any) -> Any:
        values, inverse, counts = n.unique(return_inverse=True, return_counts=True)
        return x.repeat_interleave(n, 0), values, inverse, counts, n.nonzero()

    n = torch.tensor([3, 0, 1, 3, 0, 1])
    model = fmapper.convert(converting.Function(forward), "jax", (X, n), specialize=True)
    for given in (n, n.flip(0)):
        converting.compare(jax.jit(model)(X.numpy(), given.numpy()), forward(X, given))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        model(X.numpy(), np.array([4, 0, 2, 2, 0, 0]))


@pytest.mark.nightly
def test_known_numbers_of_counts() -> None:
    def forward(x: Any, n: Any) -> Any:
        return torch.bincount(n), n.bincount(x[:, 0]), torch.bincount(n, minlength=9)

    n = torch.tensor([3, 0, 1, 3, 0, 1])
    model = fmapper.convert(converting.Function(forward), "jax", (X, n), specialize=True)
    assert not model._code.concrete
    for given in (n, n.flip(0), (n > 1) * 3):
        converting.compare(jax.jit(model)(X.numpy(), given.numpy()), forward(X, given))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        model(X.numpy(), np.array([4, 0, 2, 2, 0, 0]))


REFUSED = {
    "first": (lambda x, m: x[m][0], r"asserts .* a size >= 1"),
    "a place": (lambda x, m: x[m.nonzero()[0, 0]], r"asserts .* a size >= 1"),
    "a reduction": (
        lambda x, m: x[m].max(0).values,
        r"aten::max.* for the values of these inputs.* with examples of this kind",
    ),
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::fmapper.NotCompiledWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_an_operation_refuses_are_one_error(name: str) -> None:
    forward, told = REFUSED[name]
    module = converting.Function(forward)
    model = fmapper.convert(module, "jax", (X, MASKS[0]))
    converting.compare(model(X.numpy(), MASKS[1].numpy()), module(X, MASKS[1]))
    with pytest.raises(fmapper.ProgramInputError, match=told):
        model(X.numpy(), MASKS[2].numpy())
    with pytest.raises(TypeError) as caught:  # as are those of JAX
        jax.jit(model)(X.numpy(), MASKS[0].numpy())
    assert "specialize=True" in "".join(caught.value.__notes__)


@pytest.mark.nightly
def test_an_assertion_speaks_before_an_operation_that_fails_for_it() -> None:
    def forward(x: Any, m: Any) -> Any:
        torch._check(m.sum().item() > 0, lambda: "no row")
        return x[m][0]

    model = fmapper.convert(converting.Function(forward), "jax", (X, MASKS[0]))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        model(X.numpy(), MASKS[2].numpy())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "forward",
    [
        lambda x, n: torch.nn.functional.one_hot(n),
        lambda x, n: torch.nn.functional.one_hot(input=n, num_classes=-1),
        lambda x, n: torch.tensor_split(x, n.unique()[1:])[0],
        lambda x, n: torch.tensor_split(x, n.max(), 1)[0],
        lambda x, n: x.tensor_split(n.bincount().cumsum(0)[:-1])[1],
    ],
)
@pytest.mark.filterwarnings("ignore::fmapper.NotCompiledWarning")
def test_known_classes_and_places(forward: Any) -> None:
    n = torch.tensor([2, 0, 1, 2, 0, 1])
    module = converting.Function(forward)
    converting.compare(fmapper.convert(module, "jax", (X, n))(X.numpy(), n.numpy()), forward(X, n))
    model = fmapper.convert(module, "jax", (X, n), specialize=True)
    for given in (n, n.flip(0)):
        converting.compare(jax.jit(model)(X.numpy(), given.numpy()), forward(X, given))
    with pytest.raises(fmapper.ProgramInputError, match="asserts"):
        model(X.numpy(), np.array([4, 0, 2, 2, 0, 0]))


class PadsByBuffers(torch.nn.Module):
    """Pads as causal convolutions of codecs do, whose sizes are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stride", torch.tensor(2))
        self.register_buffer("kernel", torch.tensor(5))

    def forward(self, x: Any) -> Any:
        frames = torch.ceil((x.shape[-1] - self.kernel) / self.stride).to(torch.int64)
        extra = frames * self.stride + self.kernel - x.shape[-1]
        return torch.nn.functional.pad(x, (self.kernel - self.stride, extra)) * 2


class PadsByACounter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(2))

    def forward(self, x: Any) -> Any:
        found = torch.nn.functional.pad(x, (self.calls, 0))
        self.calls.add_(1)
        return found


@pytest.mark.nightly
def test_numbers_of_buffers_that_decide_sizes_are_asserted():
    module, x = PadsByBuffers(), torch.arange(6.0)[None]
    model = fmapper.convert(module, "jax", (x,))
    converting.compare(jax.jit(lambda model, x: model(x))(model, x.numpy()), module(x))
    other = model.replace(buffers={**model.buffers, "kernel": model.buffers["kernel"] + 1})
    with pytest.raises(fmapper.ProgramInputError, match="buffers"):
        other(x.numpy())


def test_numbers_of_buffers_that_change_are_not_asserted():
    with pytest.warns(fmapper.NotCompiledWarning):
        model = fmapper.convert(PadsByACounter(), "jax", (torch.ones(1, 3),))
    assert model(np.ones((1, 3), "float32")).shape == (1, 5)


class Pictures(torch.nn.Module):
    """Puts the features of all pictures that are not empty in the places of a token."""

    def __init__(self, *, returns_parts: bool = False) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(1, 3, 2, 2)
        self.returns_parts = returns_parts

    def forward(self, ids: Any, pixels: Any) -> Any:
        x = ids.unsqueeze(-1).float().expand(-1, -1, 3)
        flat = pixels.flatten(0, 1)
        real = (flat == 0).sum((-1, -2, -3)) != flat.shape[1:].numel()
        real[0] |= ~torch.any(real)
        counts = real.view(pixels.shape[:2]).sum(1)
        rows = flat[real].contiguous()
        seen = (rows[:, 0] > -1).unfold(1, 2, 2).unfold(2, 2, 2).sum((-1, -2)) > 0
        features = self.patches(rows).flatten(2).transpose(1, 2)
        features = features * seen.view(rows.shape[0], -1, 1)
        features = features + torch.bucketize(features, torch.arange(3.0))
        parts = [part.reshape(-1, part.shape[-1]) for part in features.split(counts.tolist())]
        places = (ids == 7).unsqueeze(-1)
        torch._check_tensor_all(places.sum() * 3 == torch.cat(parts).numel())
        found = x.masked_scatter(places, torch.cat(parts))
        return (found, parts) if self.returns_parts else found


def pictures(*counts: int) -> tuple[Any, Any]:
    pixels = torch.randn(len(counts), 3, 1, 4, 4)
    ids = torch.zeros(len(counts), 14, dtype=torch.int64)
    for at, count in enumerate(counts):
        pixels[at, count:] = 0
        ids[at, 1 : 1 + 4 * count] = 7
    return ids, pixels


@pytest.mark.nightly
def test_features_of_any_number_of_pictures_are_put_in_their_places():
    model = check(Pictures(), pictures(2, 1), pictures(3, 3), pictures(0, 1), pictures(1, 0))
    ids, pixels = pictures(2, 1)
    ids[1, 9] = 7  # one more place than there are features
    with pytest.raises(fmapper.ProgramInputError):
        model(ids.numpy(), pixels.numpy())


@pytest.mark.nightly
def test_parts_of_rows_that_are_results_keep_their_sizes():
    module, given = Pictures(returns_parts=True), pictures(2, 1)
    with pytest.warns(fmapper.NotCompiledWarning):
        model = fmapper.convert(module, "jax", given, check=False)
    for inputs in (given, pictures(1, 3)):
        converting.compare(model(*[x.numpy() for x in inputs]), module(*inputs))


@pytest.mark.nightly
def test_rows_that_are_counted_from_the_end_are_valid_ones():
    def forward(x: Any, mask: Any, at: Any) -> Any:
        return x[mask][at]

    x, mask = (
        torch.arange(12.0).reshape(6, 2),
        torch.tensor([True, False, True, False, True, False]),
    )
    model = check(forward, *[(x, mask, torch.tensor(at)) for at in ([0, 1], [2, -1], [-3, -2])])
    for at in ([0, 3], [-4, 0]):  # torch raises an IndexError
        found = np.asarray(model(x.numpy(), mask.numpy(), np.array(at, "int32")))
        assert np.isnan(found).any()


def by_rows(x: Any, mask: Any) -> Any:
    """Looks up each kept row by its number, as attention of transformers does with its mask."""
    kept = x[mask].log()
    rows = torch.arange(kept.shape[0])[:, None, None]
    found = kept[rows, torch.arange(4)[None, None]]
    last = kept[-1 - rows[:, 0, 0]].exp()
    return x.masked_scatter(mask[:, None].expand_as(x), found[:, 0] + last * 2)


@pytest.mark.nightly
def test_rows_that_are_kept_are_looked_up_by_indices_of_as_many():
    rows = X.abs() + 1
    model = check(by_rows, *[(rows, mask) for mask in MASKS])
    assert not model._code.concrete

    def loss(x: Any, mask: Any) -> Any:
        return (model(x, mask) ** 2).sum()

    for mask in MASKS:
        wanted = rows.clone().requires_grad_()
        (by_rows(wanted, mask) ** 2).sum().backward()
        found = jax.jit(jax.grad(loss))(rows.numpy(), mask.numpy())
        np.testing.assert_allclose(found, wanted.grad, rtol=1e-4, atol=1e-5)
