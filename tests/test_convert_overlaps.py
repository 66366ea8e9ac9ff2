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
    with pytest.raises(fmapper.ConversionError, match="reads it at other places"):
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


@pytest.mark.parametrize("change", [ahead, from_the_last, same, other_columns, other_rows, a_copy])
def test_what_does_not_is_converted(change):
    module, x = Changing(change), torch.arange(2.0, 18.0).reshape(4, 4)
    model = fmapper.convert(module, "jax", (x,))
    np.testing.assert_allclose(np.asarray(model(x.numpy())), module(x).numpy(), rtol=1e-6)


def test_sizes_that_vary_are_looked_at_with_those_of_the_examples():
    x = torch.ones(4, 6)
    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    with pytest.raises(fmapper.ConversionError, match="reads it at other places"):
        fmapper.convert(Changing(first_column), "jax", (x,), dynamic_shapes=shapes)
    model = fmapper.convert(Changing(ahead), "jax", (x,), dynamic_shapes=shapes)
    assert model(np.ones((3, 5), np.float32)).shape == (3, 5)
