"""Lookup and assignment by indices and masks: converted and compared with torch."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support.converting import Function, check, check_gradients  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@pytest.mark.nightly
def test_lookup_by_index_arrays():
    def function(x, i, j, scalar):
        return {
            "one": x[i],
            "middle": x[:, i],
            "apart": x[i, :, j],
            "neighbours": x[:, i, j],
            "broadcast": x[i[:, None], j],
            "negative": x[-i - 1, -1],
            "none": x[:, None, i],
            "last": x[..., i],
            "nothing": x[i[:0]],
            "list": x[[0, 1]],
            "take": x.take(i - 3),
            "index_select": x.index_select(1, i),
            "index_select of one": x[0, 0].index_select(0, scalar),
            "take_along_dim": x.take_along_dim(x.argsort(2), 2),
            "take_along_dim broadcast": x.take_along_dim(i.reshape(1, -1, 1), 1),
            "gather": x.gather(1, i.reshape(1, -1, 1)),
            "gather of scalar": scalar.gather(0, scalar),
            "gather nothing": x.gather(0, i[:0].reshape(0, 1, 1)),
        }

    i, j = torch.tensor([0, 2, 1, 0]), torch.tensor([1, 0, 2, 2])
    check(function, torch.randn(3, 3, 3), i, j, torch.tensor(0))


@pytest.mark.nightly
def test_lookup_by_masks():
    def function(x, mask, row):
        return {
            "elements": x[mask],
            "rows": x[row],
            "columns": x[:, row[:3]],
            "masked_select": x.masked_select(row[:3]),
            "nonzero": x.nonzero(),
            "where": torch.where(mask),
            "argwhere": mask.argwhere(),
            "nothing": x[x > 100],
        }

    x = torch.randn(4, 3)
    check(function, x, x > 0, torch.tensor([True, False, True, True]))


@pytest.mark.nightly
def test_lookup_by_masks_has_gradients():
    check_gradients(lambda x: x[x > 0] * 2, torch.randn(4, 3))
    check_gradients(lambda x, m: x.masked_select(m) ** 2, torch.randn(4, 3), torch.randn(4, 1) > 0)


@pytest.mark.nightly
def test_assignment():
    def put(x, *where_and_value):
        y = x.clone()
        y[where_and_value[:-1]] = where_and_value[-1]
        return y

    every = slice(None)

    def function(x, i, j, mask, row, v):
        return {
            "rows": put(x, i, v[:2]),
            "apart": put(x, i, every, j, 5.0),
            "negative": put(x, -1, every, -i - 1, v[0, :, :2]),
            "mask": put(x, mask, -1.0),
            "masked rows": put(x, row, 2.0),
            "masked columns": put(x, every, row, 3.0),
            "mask, each": put(x, row, v[:2]),
            "mask, broadcast": put(x, row, v[0]),
            "mask and index": put(x, row, every, 1, 0.0),
            "integers": put(x.long(), i, v[:2].long()),
            "slice": put(x, slice(1, 3), every, slice(0, None, 2), v[1:, :, :2]),
            "accumulate": x.index_put((i[[0, 0, 1]],), v, accumulate=True),
            "accumulate elements": x.index_put(
                (i[[0, 0, 1]], j[[0, 0, 1]]), v[:, 0], accumulate=True
            ),
            "accumulate mask": x.index_put((mask,), torch.tensor(1.0), accumulate=True),
            "put": x.put(i - 3, v[0, 0, :2]),
            "put, accumulate": x.put(i[[0, 0, 1]], v[0, 0], accumulate=True),
            "masked_fill": x.masked_fill(mask, 7),
            "masked_fill integers": x.long().masked_fill(mask, 7.9),
            "masked_fill broadcast": x[0, :, :1].masked_fill(mask[0], 1.0),
            "masked_scatter": x.masked_scatter(mask, v.flatten()),
            "masked_scatter row": x.masked_scatter(row, v.flatten()),
            "index_fill": x.index_fill(1, i, -2),
            "index_copy": x.index_copy(0, i, v[:2]),
            "index_add": x.index_add(2, i[[0, 1, 0]], v, alpha=-2),
            "scalar": x[0, 0, 0].index_add(0, i[:1] * 0, v[0, 0, 0]),
        }

    x = torch.randn(3, 3, 3)
    i, j = torch.tensor([2, 0]), torch.tensor([1, 1])
    row = torch.tensor([True, False, True])
    check(function, x, i, j, x > 0, row, torch.arange(27.0).reshape(3, 3, 3))


@pytest.mark.nightly_cases("dtype0-False", "dtype1-False", "dtype2-True", "dtype2-False")
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_scatter_with_duplicates(include_self, dtype):
    def function(x, index, source):
        found = {
            name: x.scatter_reduce(1, index, source, name, include_self=include_self)
            for name in REDUCTIONS
        }
        rows = {
            f"index {name}": x.index_reduce(
                0, index[0, :2], source[:, :4], name, include_self=include_self
            )
            for name in REDUCTIONS[1:]
        }
        return found | rows

    x = torch.tensor([[1, -2, 3, 4], [5, 0, -7, 8], [2, 2, 2, 2]]).to(dtype)
    index = torch.tensor([[0, 0, 3], [1, 2, 1]])
    source = torch.tensor([[3, -5, 4, 0], [2, 3, -3, 9]]).to(dtype)
    check(function, x, index, source)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_scatter_at_its_corners():
    def function(x, index, source, scalar):
        return {
            "source": x.scatter(1, index, source),
            "number": x.scatter(0, index[:1, 2:], 2.5),
            "add": x.scatter_add(1, index, source),
            "reduce": x.scatter(1, index, source, reduce="add"),
            "multiply": x.scatter(1, index, 3.0, reduce="multiply"),
            "nothing": x.scatter_add(1, index[:0], source),
            "scalar": scalar.scatter_add(0, index[0, 0] * 0, scalar),
            "NaN": x.scatter_reduce(1, index, source / 0 * 0, "amax"),
            "inf": x.scatter_reduce(1, index, source / 0, "amin", include_self=False),
            "bool": (x > 0).scatter(1, index, True),
        }

    index = torch.tensor([[0, 3, 1], [1, 2, 0]])
    check(function, torch.randn(3, 4), index, torch.randn(2, 4), torch.tensor(2.0))


@pytest.mark.nightly_cases(
    "mean-True",
    "prod-False",
    "mean-False",
    "amax-False",
    "sum-True",
    "sum-False",
    "prod-True",
    "amin-True",
    "amin-False",
)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_of_scatter(name, include_self):
    def function(x, source, index):
        return x.scatter_reduce(1, index, source, name, include_self=include_self)

    # with ties, and with one and two zeros among the factors
    x = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 2.0, 5.0, -1.0]])
    source = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 5.0, 3.0]])
    check_gradients(function, x, source, torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]]))


@pytest.mark.nightly
def test_gradients_of_assignment():
    def function(x, v, i, mask):
        y = x.clone()
        y[i] = v * 2
        return [
            y,
            x.index_put((i[[0, 0]],), v, accumulate=True),
            x.masked_scatter(mask, v.flatten()),
            x.masked_fill(mask, 0.0),
            x.index_add(0, i, v),
            x.gather(1, i.reshape(1, 2)),
        ]

    check_gradients(
        function, torch.randn(3, 3), torch.randn(2, 3), torch.tensor([2, 0]), torch.eye(3) > 0
    )


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode):
    weight = torch.randn(6, 4)
    weight[2] = weight[1]  # a tie
    indices = torch.tensor([1, 2, 2, 5, 0, 1, 3])
    offsets = torch.tensor([0, 3, 3, 5])

    def function(weight, indices, offsets):
        return [
            F.embedding_bag(indices, weight, offsets, mode=mode),
            F.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=-5),
            F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=True),
            F.embedding_bag(indices[:6].reshape(2, 3), weight, mode=mode),
        ]

    check(function, weight, indices, offsets)
    check_gradients(lambda w, i, o: function(w, i, o)[:2], weight, indices, offsets)


@pytest.mark.nightly
def test_weighted_bags_of_embeddings():
    def function(weight, factors):
        indices = torch.tensor([1, 2, 2, 5])
        return F.embedding_bag(
            indices, weight, torch.tensor([0, 3]), mode="sum", per_sample_weights=factors
        )

    check_gradients(function, torch.randn(6, 4), torch.randn(4))


@pytest.mark.nightly
def test_gradients_of_bags_that_torch_scales_are_refused():
    def function(w, i):
        offsets = torch.tensor([0, 3])
        return F.embedding_bag(i, w, offsets, mode="sum", scale_grad_by_freq=True)

    inputs = torch.randn(3, 2), torch.tensor([0, 1, 1, 0, 1])
    check(function, *inputs)
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        check_gradients(function, *inputs)


def test_indices_that_are_out_of_range_are_nan():
    module = Function(lambda x, i: x[i])
    converted = fmapper.convert(module, "jax", (torch.randn(3), torch.tensor([0])))
    assert np.isnan(converted(jax.numpy.ones(3), jax.numpy.asarray([7]))).all()


@pytest.mark.nightly
def test_the_least_float_masks_in_16_bits_too():
    """As infinity, rows that are masked as a whole would be NaN."""

    class Masked(torch.nn.Module):
        def forward(self, x, keep):
            return x.masked_fill(~keep, torch.finfo(x.dtype).min).softmax(-1)

    x, keep = torch.randn(3, 4), torch.tensor([[False] * 4, [True] * 4, [True, False] * 2])
    model = fmapper.convert(Masked(), "jax", (x, keep))
    for dtype in (torch.bfloat16, torch.float16):
        found = model(fmapper.to_jax(x.to(dtype)), keep.numpy())
        want = Masked()(x.to(dtype), keep).float()
        np.testing.assert_allclose(np.asarray(found, np.float32), want, atol=1e-2)
    check(lambda x: x.masked_fill(x > 0, -torch.inf), x)
