"""Arrays that hold several side by side, such as gate and up of a perceptron."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import fmapper  # noqa: E402
from support import many_devices  # noqa: E402

nn = torch.nn


@pytest.fixture(scope="module")
def on_eight_devices():
    return many_devices.run("jax", "packed")


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("jax", "packed"))
def test_jax(on_eight_devices, check):
    assert on_eight_devices.get(check, "did not run") == "", on_eight_devices.get("")


class Gated(nn.Module):
    def __init__(self, between=lambda y: y, after=lambda gate, up: gate * up):
        super().__init__()
        self.both, self.between, self.after = nn.Linear(4, 16), between, after

    def forward(self, x):
        return self.after(*self.between(self.both(x)).chunk(2, -1))


def packed(module):
    return fmapper.convert(module, "jax", (torch.ones(3, 4),), check=False).packed


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y,
        lambda y: torch.relu(y) * 2,
        lambda y: y.unflatten(-1, (8, 2)).flatten(-2),
        lambda y: y.clone().clamp(0, 1),
    ],
)
def test_gate_and_up_in_one_array(between):
    found = packed(Gated(between))
    assert {name: own.sizes for name, own in found.items()} == {
        "both.weight": (8, 8),
        "both.bias": (8, 8),
    }


def test_numbers_of_parts_that_cannot_be():
    assert packed(Gated())["both.weight"].limit == 8
    assert packed(Gated(lambda y: y.unflatten(-1, (8, 2)).flatten(-2)))["both.weight"].limit == 4


class Order(nn.Module):
    """Models whose products are needed in their order, before they are taken apart."""

    def __init__(self, how):
        super().__init__()
        self.how, self.both = how, nn.Linear(4, 16)
        self.table = nn.Buffer(torch.arange(16.0))

    def forward(self, x):
        y = self.both(x)
        gate, up = y.chunk(2, -1)
        if self.how == "output":
            return gate * up, y
        if self.how == "buffer":
            gate, up = (y + self.table).chunk(2, -1)
        if self.how == "made":
            gate, up = (y + torch.arange(16)).chunk(2, -1)
        if self.how == "softmax":
            return gate * up, y.softmax(-1).sum()
        if self.how == "otherwise":
            return gate * up, y[..., :4].sum(), y[..., 4:].sum()
        if self.how == "inside":
            y = y.cumsum(-1)
            gate, up = y.chunk(2, -1)
        return gate * up


@pytest.mark.parametrize("how", ["output", "buffer", "made", "softmax", "otherwise", "inside"])
def test_products_that_are_needed_in_their_order(how):
    assert packed(Order(how)) == {}


def test_parts_that_are_cut_again_are_not_packed_twice():
    module = Gated(after=lambda gate, up: gate[..., :4] * gate[..., 4:] * up[..., :4])
    assert packed(module)["both.weight"].sizes == (8, 8)
