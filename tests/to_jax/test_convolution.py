"""Convolutions: converted and compared with torch."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

from support.converting import check, check_gradients  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


CASES = {
    "plain": {},
    "strides": {"stride": 2},
    "padding": {"padding": 2},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "all": {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
    "same": {"padding": "same", "dilation": 3},
    "valid": {"padding": "valid", "stride": 2},
}
TRANSPOSED = {
    "plain": {},
    "strides": {"stride": 3, "padding": 1, "output_padding": 2},
    "groups": {"groups": 2},
    "dilation": {"dilation": 2, "padding": 1},
    "all": {"stride": 2, "padding": 1, "dilation": 2, "groups": 2, "output_padding": 1},
}


def convolution(dims, transposed):
    return getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")


@pytest.mark.nightly_cases("3")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims):
    conv = convolution(dims, False)

    def function(x, half, full, bias):
        found = {
            name: conv(x, half if "groups" in case else full, bias, **case)
            for name, case in CASES.items()
        }
        found["without batch"] = conv(x[0], full)
        found["empty batch"] = conv(x[:0], full, bias)
        return found

    size = (9, 8, 7)[:dims]
    kernel = (4, 3, 2)[:dims]
    inputs = torch.randn(2, 4, *size), torch.randn(6, 2, *kernel), torch.randn(6, 4, *kernel)
    check(function, *inputs, torch.randn(6))


@pytest.mark.nightly_cases("2", "3")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions(dims):
    conv = convolution(dims, True)

    def function(x, half, full, bias):
        found = {
            name: conv(x, half if "groups" in case else full, bias, **case)
            for name, case in TRANSPOSED.items()
        }
        found["without batch"] = conv(x[0], full)
        found["empty batch"] = conv(x[:0], full, bias)
        return found

    size = (5, 4, 3)[:dims]
    kernel = (4, 3, 2)[:dims]
    inputs = torch.randn(2, 4, *size), torch.randn(4, 3, *kernel), torch.randn(4, 6, *kernel)
    check(function, *inputs, torch.randn(6))


@pytest.mark.nightly
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_convolutions(transposed):
    conv = convolution(2, transposed)
    case = (TRANSPOSED if transposed else CASES)["all"]
    weight = torch.randn(4, 3, 3, 2) if transposed else torch.randn(6, 2, 3, 2)
    check_gradients(
        lambda x, w, b: conv(x, w, b, **case), torch.randn(2, 4, 7, 6), weight, torch.randn(6)
    )


@pytest.mark.nightly
def test_convolutions_of_other_kinds():
    def function(x, weight, z, w):
        return {
            "depthwise": F.conv2d(x, weight[:4, :1], groups=4),
            "two for each": F.conv2d(x, weight[:, :1], groups=4),
            "integers": F.conv2d((x * 9).long(), (weight * 9).long()[:, :4]),
            "complex": F.conv1d(z, w, padding=1),
            "half": F.conv2d(x.bfloat16(), weight.bfloat16()),
            "kernel of one": F.conv2d(x, weight[:, :, :1, :1], stride=2),
        }

    complex_ = {"dtype": torch.complex64}
    check(
        function,
        torch.randn(2, 4, 6, 6),
        torch.randn(8, 4, 3, 3),
        torch.randn(2, 3, 5, **complex_),
        torch.randn(4, 3, 2, **complex_),
    )


def test_time_batch_channels():
    check(
        lambda x, w, b: torch.conv_tbc(x, w, b, 1),
        torch.randn(7, 2, 3),
        torch.randn(2, 3, 4),
        torch.randn(4),
    )


@pytest.mark.nightly
def test_transposed_ones_that_cut_off_at_the_borders():
    """Padding that is larger than the kernel leaves out what it would give there."""
    x = torch.randn(2, 4, 5, 6)
    for kernel, options in (1, {}), (1, {"stride": 2, "output_padding": 1}), (2, {"groups": 2}):
        model = torch.nn.ConvTranspose2d(4, 6, kernel, padding=2, **options)
        check(model, x)
        check_gradients(model, x)


def test_in_whole_modules():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding="same", padding_mode="circular"),
        torch.nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, dilation=2, output_padding=1),
        torch.nn.Conv2d(4, 4, 3, padding=2, padding_mode="reflect", groups=4),
        torch.nn.MaxPool2d(3, 2, 1),
    )
    check(model, torch.randn(2, 3, 8, 8))


GROUPED = [
    (lambda: torch.nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), (2, 4, 5, 6)),
    (lambda: torch.nn.Conv2d(4, 4, (3, 2), padding="same", groups=4, dilation=2), (2, 4, 5, 6)),
    (lambda: torch.nn.Conv1d(4, 8, 3, groups=4, bias=False), (2, 4, 7)),
    (lambda: torch.nn.Conv3d(4, 4, 2, padding=(1, 0, 1), groups=2), (2, 4, 3, 4, 3)),
    (
        lambda: torch.nn.ConvTranspose2d(
            4, 4, 3, stride=2, padding=1, output_padding=1, groups=2
        ),
        (2, 4, 3, 4),
    ),
]  # fmt: skip


@pytest.mark.nightly_cases("<lambda>-shape0", "<lambda>-shape4")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "shape"), GROUPED)
def test_gradients_of_groups_where_there_are_several_devices(make, shape, monkeypatch):
    """There the derivative by the weight is computed in another way, as in `support/meshes.py`."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape, requires_grad=True)
    model = fmapper.convert(module, "jax", (x.detach(),), check=False)
    module(x).square().sum().backward()
    given = jnp.asarray(x.detach().numpy())

    def loss(params, x):
        return (model.replace(params=params)(x) ** 2).sum()

    weights, inputs = jax.jit(jax.grad(loss, (0, 1)))(model.params, given)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(weights[name], parameter.grad, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(inputs, x.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_other_derivatives_of_groups_where_there_are_several_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5)
    model = fmapper.convert(torch.nn.Conv1d(4, 4, 2, groups=2), "jax", (x,), check=False)
    given, params = jnp.asarray(x.numpy()), dict(model.params)
    along = jax.tree.map(jnp.ones_like, params)

    def gradient(params, x=given):
        return jax.grad(lambda p: (model.replace(params=p)(x) ** 3).sum())(params)

    both = jax.vmap(gradient, (None, 0))(params, jnp.stack([given, 2 * given]))
    for name, one in gradient(params).items():
        np.testing.assert_allclose(both[name][0], one, rtol=1e-5, atol=1e-5)
    _, forward = jax.jvp(gradient, (params,), (along,))
    backward = jax.grad(lambda p: sum(g.sum() for g in gradient(p).values()))(params)
    for name in params:
        np.testing.assert_allclose(forward[name], backward[name], rtol=1e-4, atol=1e-4)
