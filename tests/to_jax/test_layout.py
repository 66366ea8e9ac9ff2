"""Images have the channels last between convolutions on the CPU, and nobody sees it."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import fmapper  # noqa: E402
from fmapper_adapters.jax.model import channels_last  # noqa: E402
from support import converting  # noqa: E402

jnp, lax, nn = jax.numpy, jax.lax, torch.nn

FILTERS = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
AGAIN = np.random.default_rng(1).normal(size=(5, 8, 3, 3)).astype(np.float32)
IMAGES = np.random.default_rng(2).normal(size=(2, 3, 9, 7)).astype(np.float32)
SCALES = np.arange(1, 9, dtype=np.float32)


def same(x: Any, filters: Any) -> Any:
    return lax.conv(x, filters, (1,) * (x.ndim - 2), "SAME")


def regrouped(x: Any) -> Any:
    n, c, *places = x.shape
    y = x.reshape(n, 2, c // 2, *places)
    return (y - y.mean((2, 3, 4), keepdims=True)).reshape(x.shape)


def pooled(x: Any) -> Any:
    window = (1, 1, 2, 3), (1, 1, 1, 2), ((0, 0), (0, 0), (1, 0), (0, 2))
    return lax.reduce_window(x, -np.inf, lax.max, *window)


# What lies between two convolutions: the images keep their four dimensions.
BETWEEN: dict[str, Any] = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + lax.integer_pow(x, 2),
    "by channel": lambda x: (x - SCALES[:, None, None]) * lax.rsqrt(SCALES)[None, :, None, None],
    "by row": lambda x: x + jnp.arange(9.0)[:, None],
    "chosen": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "jitted": jax.jit(lambda x: x.clip(0, 6)),
    "another image": lambda x: x + jnp.ones((2, 8, 9, 7)),
    "a larger image": lambda x: x[:, :, :1, :1] + jnp.ones((2, 8, 9, 7)) * x,
    "squeezed": lambda x: x * lax.logistic(x.mean((2, 3)))[:, :, None, None],
    "statistics": lambda x: (
        (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True)
    ),
    "groups": regrouped,
    "pooled": pooled,
    "averaged": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),
    "padded": lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 2), (0, 3))),
    "cut": lambda x: x[:, :, 1::2, :-1],
    "side by side": lambda x: jnp.concatenate([x[:, :4], 2 * x[:, 4:]], 1),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
    "mirrored": lambda x: jnp.flip(x, 3) + x[:, ::-1],
    "merged and back": lambda x: (x.reshape(2, 8, 63) * 3).reshape(x.shape),
}
# What gets torch's order. Two turns on end are left to XLA, which drops them.
OTHERS: dict[str, Any] = {
    "sorted": lambda x: jnp.sort(x, 1),
    "sums so far": lambda x: jnp.cumsum(x, 2),
    "flattened": lambda x: jnp.sin(x.reshape(2, -1)).reshape(x.shape),
    "swapped": lambda x: x.transpose(0, 1, 3, 2),
    "its own derivative": jax.nn.relu,
    "a loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y * 0.5 + i, x),
    "indices": lambda x: x[:, jnp.array([3, 0, 1, 1, 7, 2, 5, 6])],
    "argmax": lambda x: x * jnp.argmax(x, 1, keepdims=True),
    "turned and back": lambda x: jnp.moveaxis(jnp.moveaxis(x, 1, -1) * SCALES, -1, 1),
    "as tokens": lambda x: x.reshape(2, 8, 63).swapaxes(1, 2).swapaxes(1, 2).reshape(x.shape),
    "matrices": lambda x: jnp.einsum("nchw,cd->ndhw", x, jnp.eye(8) * SCALES),
}


def network(between: Any, filters: Any, again: Any, x: Any) -> tuple[Any, Any]:
    y = between(same(x, filters))
    return same(y, again), y


def turns(function: Any, *args: Any) -> int:
    """How often images are turned around; the ends of a program must be."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return sum(
        eqn.primitive.name == "transpose" and np.prod(eqn.outvars[0].aval.shape) > 2 * 8 * 9
        for eqn in jaxpr.eqns
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*BETWEEN, *OTHERS])
def test_values_and_gradients_are_the_same(name: str) -> None:
    between = {**BETWEEN, **OTHERS}[name]

    def function(*args: Any) -> Any:
        return network(between, *args)

    def loss(run: Any) -> Any:
        return jax.grad(lambda *args: sum(jnp.sin(y).sum() for y in run(*args)), (0, 1, 2))

    args = FILTERS, AGAIN, IMAGES
    turned = channels_last.channels_last(function)
    for want, found in zip(function(*args), turned(*args), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)
    for want, found in zip(loss(function)(*args), loss(turned)(*args), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", BETWEEN)
def test_nothing_is_turned_between_two_convolutions(name: str) -> None:
    def function(*args: Any) -> Any:
        return network(BETWEEN[name], *args)[0]

    allowed = 2 + (name in ("another image", "a larger image"))  # which come from elsewhere
    assert turns(channels_last.channels_last(function), FILTERS, AGAIN, IMAGES) <= allowed


@pytest.mark.nightly
def test_vmap_jit_and_sizes_that_vary() -> None:
    def function(x: Any) -> Any:
        return network(BETWEEN["groups"], FILTERS, AGAIN, x)[0]

    turned = channels_last.channels_last(function)
    many = np.stack([IMAGES, 2 * IMAGES, IMAGES - 1])
    found = jax.vmap(jax.jit(turned))(many)
    np.testing.assert_allclose(found, jax.vmap(function)(many), rtol=1e-5, atol=1e-4)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3, h, w"), jnp.float32)
    exported = jax.export.export(jax.jit(turned))(shape)
    np.testing.assert_allclose(exported.call(IMAGES), function(IMAGES), rtol=1e-5, atol=1e-4)


@pytest.mark.nightly
def test_convolutions_in_one_and_three_dimensions() -> None:
    rng = np.random.default_rng(3)
    for places in ((9,), (5, 4, 3)):
        x = rng.normal(size=(2, 3, *places)).astype(np.float32)
        filters = rng.normal(size=(4, 3, *(2,) * len(places))).astype(np.float32)
        found = channels_last.channels_last(lambda *args: jnp.tanh(same(*args)))(x, filters)
        np.testing.assert_allclose(found, np.tanh(same(x, filters)), rtol=1e-5, atol=1e-5)


def test_convolutions_of_another_order_are_left_alone() -> None:
    def function(x: Any, filters: Any) -> Any:
        return lax.conv_general_dilated(
            x, filters, (1, 1), "SAME", dimension_numbers=("HWNC", "HWIO", "NHWC")
        )

    args = IMAGES.transpose(2, 3, 0, 1), FILTERS.transpose(2, 3, 1, 0)
    turned = channels_last.channels_last(function)
    assert str(jax.make_jaxpr(turned)(*args)) == str(jax.make_jaxpr(function)(*args))


class Network(nn.Module):
    """A bit of everything that stands between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, padding="same"), nn.GroupNorm(2, 8))
        self.gate = nn.Sequential(
            nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1), nn.Hardsigmoid()
        )
        self.down = nn.Conv2d(16, 6, (2, 3), stride=2, padding=1, dilation=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        y = nn.functional.gelu(self.deep(x))
        y = y * self.gate(y.mean((2, 3), keepdim=True))
        x = torch.cat([x, nn.functional.max_pool2d(y, 3, 1, 1)], 1)
        x = nn.functional.interpolate(self.up(self.down(x)), scale_factor=2)
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
        return self.head(x.flatten(2).transpose(1, 2)), nn.functional.avg_pool2d(x, 2)


@pytest.mark.nightly
def test_a_model_is_what_it_is_in_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 14)
    model = Network()
    converted = converting.check(model, x)
    converting.check_gradients(model, x)
    jaxpr = str(jax.make_jaxpr(converted.call)((x.numpy(),)))
    assert "lhs_spec=(0, 3, 1, 2)" in jaxpr
    with torch.no_grad():
        trained = fmapper.convert(model.train(), "jax", (x,), train=True)
        want = model(x)
    found, after = trained(x.numpy(), mutable=True)
    converting.compare(found, want)
    converting.compare(after.buffers["stem.1.running_var"], model.stem[1].running_var)
