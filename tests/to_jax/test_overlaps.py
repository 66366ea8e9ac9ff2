"""Operations that change what they read: refused where torch's result depends on the processor."""

import numpy as np
import pytest

import fmapper

torch = pytest.importorskip("torch")
pytest.importorskip("jax")


class Changing(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = x.clone()
        self.change(y)
        return y


def first_column(y):
    y *= y[..., :1]


def behind(y):
    y[:, 1:] += y[:, :-1]


def copied_behind(y):
    y[:, 1:] = y[:, :-1]


def transposed(y):
    y[1:, :] -= y.t()[1:, :]


def without_gradients(y):
    with torch.no_grad():
        y.div_(y[:, :1])


def product(y):
    torch.mm(y, y, out=y)


def compared(y):
    y.eq_(y[:, :1])


def in_words(y):
    torch.add(y[:, :1], 1.0, out=y[:, :1])
    torch.sub(y, y[:, :1], out=y)


REFUSED = [first_column, behind, copied_behind, transposed, without_gradients, product, compared]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("change", [*REFUSED, in_words])
def test_what_depends_on_the_order_of_elements_is_refused(change, check):
    module, x = Changing(change), torch.arange(2.0, 18.0).reshape(4, 4)
    with pytest.raises(fmapper.ConversionError, match="reads other elements of it"):
        fmapper.convert(module, "jax", (x,), check=check)


def ahead(y):
    y[:, :-1] = y[:, 1:]


def from_the_last(y):
    y -= y[:, -1:]


def same(y):
    y *= y
    y[1] += y[1]


def other_columns(y):
    y[:, ::2] *= y[:, 1::2]


def other_rows(y):
    y[2:] -= y[:2]


def a_copy(y):
    y *= y[..., :1].clone()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [ahead, from_the_last, same, other_columns, other_rows, a_copy])
def test_what_does_not_is_converted(change):
    module, x = Changing(change), torch.arange(2.0, 18.0).reshape(4, 4)
    model = fmapper.convert(module, "jax", (x,))
    np.testing.assert_allclose(np.asarray(model(x.numpy())), module(x).numpy(), rtol=1e-6)


def test_sizes_that_vary_are_looked_at_with_those_of_the_examples():
    x = torch.ones(4, 6)
    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    with pytest.raises(fmapper.ConversionError, match="reads other elements of it"):
        fmapper.convert(Changing(first_column), "jax", (x,), dynamic_shapes=shapes)
    model = fmapper.convert(Changing(ahead), "jax", (x,), dynamic_shapes=shapes)
    assert model(np.ones((3, 5), np.float32)).shape == (3, 5)


def filled(y):
    y[:, :1].expand(4, 4).fill_(5)


def zeroed(y):
    y[0].expand(2, 4).zero_()


def masked(y):
    y[:, :1].expand(4, 4).masked_fill_(y > 4, 1)


def by_places(y):
    y[:, :1].expand(4, 4)[torch.tensor([0, 2])] = 5.0


def broadcast(y):
    torch.broadcast_tensors(y[:1], y)[0].index_fill_(0, torch.tensor([0]), 4.0)


def one_copy(y):
    y[0, 0].expand(3)[-1].mul_(2)


@pytest.mark.parametrize("change", [filled, zeroed, masked, by_places, broadcast, one_copy])
@pytest.mark.filterwarnings("ignore:Use of:UserWarning")  # torch's own: it will refuse these
def test_writing_to_elements_that_share_memory_is_refused(change):
    x = torch.arange(2.0, 18.0).reshape(4, 4)
    with pytest.raises(fmapper.ConversionError, match="elements share memory"):
        fmapper.convert(Changing(change), "jax", (x,), check=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4)])
@pytest.mark.parametrize("fill", [1.0, 7.0])
def test_an_expansion_that_repeats_nothing_is_changed_in_place_exactly(shape, fill):
    """By the sum of differences, infinity and NaN stay, and 1e20 swallows what is written."""

    def change(y):
        wider = y.expand(shape) if len(shape) < 3 else torch.broadcast_to(y, shape)
        wider.masked_fill_(wider != 2, fill)

    module = Changing(change)
    x = torch.tensor([float("nan"), float("inf"), 1e20, 2.0])
    model = fmapper.convert(module, "jax", (x,), check=False)
    np.testing.assert_array_equal(np.asarray(model(x.numpy())), module(x.clone()).numpy())


@pytest.mark.parametrize(
    "expand",
    [
        lambda y: torch.meshgrid(y, y[:1], indexing="ij")[0],
        lambda y: torch.meshgrid(y[:1], y, indexing="xy")[1],
        lambda y: torch.broadcast_tensors(y, y[:1, None][:1])[0],
    ],
)
def test_tensors_that_are_expanded_together_are_changed_in_place_exactly(expand):
    module = Changing(lambda y: expand(y).zero_())
    x = torch.tensor([float("nan"), float("inf"), 1e20, 2.0])
    model = fmapper.convert(module, "jax", (x,), check=False)
    np.testing.assert_array_equal(np.asarray(model(x.numpy())), module(x.clone()).numpy())


def test_an_expansion_of_no_elements_keeps_its_shape():
    class Module(torch.nn.Module):
        def forward(self, x):
            x.clone().mul_(2)
            return x.expand(3, 0)

    x = torch.empty(0)
    assert fmapper.convert(Module(), "jax", (x,))(x.numpy()).shape == (3, 0)


def windows(y):
    y.unfold(1, 2, 2).mul_(3)


def windows_in_steps(y):
    y.unfold(1, 2, 3)[0].add_(1).mul_(2)


def windows_of_parts(y):
    y.split(3, 1)[0].unfold(1, 3, 3).unsqueeze(0).copy_(torch.ones(1, 4, 1, 3))


@pytest.mark.parametrize(("change", "columns"), [(windows, 5), (windows_in_steps, 5),
                                                 (windows_in_steps, 6)])  # fmt: skip
def test_writing_to_windows_that_leave_out_elements_is_refused(change, columns):
    with pytest.raises(fmapper.ConversionError, match="do not cover the whole"):
        fmapper.convert(Changing(change), "jax", (torch.ones(4, columns),), check=False)


@pytest.mark.parametrize("change", [windows, windows_of_parts])
def test_writing_to_windows_that_cover_the_tensor_is_converted(change):
    module, x = Changing(change), torch.arange(2.0, 26.0).reshape(4, 6)
    model = fmapper.convert(module, "jax", (x,))
    np.testing.assert_array_equal(np.asarray(model(x.numpy())), module(x).numpy())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "stride", "is_taken"),
    [((2, 2), (1, 1), False), ((3, 2), (2, 3), True), ((3, 3), (2, 3), True),
     ((4, 3), (2, 3), False), ((2, 2), (3, 1), True), ((3, 2), (0, 1), False)],
)  # fmt: skip
def test_writing_to_elements_that_lie_at_one_place_is_refused(size, stride, is_taken):
    module = Changing(lambda y: y.as_strided(size, stride).add_(1))
    x = torch.arange(12.0)
    if is_taken:
        model = fmapper.convert(module, "jax", (x,))
        np.testing.assert_array_equal(np.asarray(model(x.numpy())), module(x).numpy())
    else:
        with pytest.raises(fmapper.ConversionError, match="elements share memory"):
            fmapper.convert(module, "jax", (x,), check=False)


def test_a_model_that_does_not_run_itself_is_refused_as_such():
    module = Changing(lambda y: y[:-1].copy_(y[1:]))  # torch records it, and does not compute it
    with pytest.raises(fmapper.ConversionError, match="does not run on the examples itself"):
        fmapper.convert(module, "jax", (torch.ones(3),))
