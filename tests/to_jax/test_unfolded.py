"""Convolutions that are computed as products of matrices on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402

jnp = jax.numpy

# What the layer is, the input, and whether it is a product.
CASES: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "one place": (lambda: torch.nn.Conv2d(6, 5, 1), (3, 6, 7, 4), True),
    "one place, no batch": (lambda: torch.nn.Conv2d(6, 5, 1), (6, 7, 4), True),
    "one place, padded": (lambda: torch.nn.Conv2d(6, 5, 1, padding=(1, 2)), (2, 6, 7, 4), True),
    "one place, strided": (lambda: torch.nn.Conv2d(6, 5, 1, (2, 3)), (2, 6, 7, 5), True),
    "one place, 1d": (lambda: torch.nn.Conv1d(6, 5, 1, 2, bias=False), (2, 6, 8), True),
    "one place, empty batch": (lambda: torch.nn.Conv2d(6, 5, 1), (0, 6, 7, 4), True),
    "few places": (lambda: torch.nn.Conv2d(3, 40, 3, padding=1), (2, 3, 4, 4), True),
    "few places, strided": (lambda: torch.nn.Conv2d(3, 40, (3, 2), (2, 1)), (2, 3, 6, 4), True),
    "few places, dilated": (
        lambda: torch.nn.Conv2d(3, 40, (3, 2), (2, 1), (2, 1), dilation=(2, 3)),
        (1, 3, 6, 5),
        True,
    ),
    "few places, same": (lambda: torch.nn.Conv1d(3, 40, 4, padding="same"), (2, 3, 9), True),
    "few places, 3d": (lambda: torch.nn.Conv3d(2, 70, (2, 3, 1), padding=1), (1, 2, 3, 3, 2), True),
    "many places": (lambda: torch.nn.Conv2d(3, 8, 3), (2, 3, 9, 9), False),
    "groups": (lambda: torch.nn.Conv2d(6, 40, 1, groups=2), (1, 6, 3, 3), False),
    "transposed": (lambda: torch.nn.ConvTranspose2d(6, 90, 1, 2), (1, 6, 3, 3), False),
}


@pytest.mark.daily_cases("one place, empty batch")
@pytest.mark.parametrize("name", CASES)
def test_products_are_convolutions(name: str) -> None:
    make, shape, is_product = CASES[name]
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(shape)
    model = converting.check(layer, x)
    array = jnp.asarray(x.numpy())
    is_convolved = "conv_general_dilated" in str(jax.make_jaxpr(model)(array))
    assert is_convolved != (is_product and jax.default_backend() == "cpu")
    if not x.numel():
        return
    want = torch.randn(layer(x).shape)
    x.requires_grad_()
    (layer(x) * want).sum().backward()

    def loss(params: Any, array: Any) -> Any:
        return (model.replace(params=params)(array) * want.numpy()).sum()

    params, inputs = jax.grad(loss, (0, 1))(model.params, array)
    converting.compare(inputs, x.grad)
    for key, parameter in layer.named_parameters():
        converting.compare(params[key], parameter.grad)


BATCH = ({0: torch.export.Dim.AUTO},)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_varying_batch(kernel: int) -> None:
    layer = torch.nn.Conv2d(3, 40, kernel)
    model = converting.check(layer, torch.randn(2, 3, 4, 4), options={"dynamic_shapes": BATCH})
    for size in (1, 5):
        x = torch.randn(size, 3, 4, 4)
        converting.compare(model(jnp.asarray(x.numpy())), layer(x))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3, 4, 4"), jnp.float32)
    exported = jax.export.export(jax.jit(model))(shape)
    converting.compare(exported.call(jnp.asarray(x.numpy())), layer(x))


def test_in_halves_it_is_a_convolution() -> None:
    layer = torch.nn.Conv2d(3, 4, 1).bfloat16()
    x = torch.randn(2, 3, 4, 4).bfloat16()
    converting.check(layer, x)
