"""Pooling, interpolation and sampling: converted and compared with torch."""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from fmapper import ConversionError  # noqa: E402
from support.converting import check, check_gradients  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def image(dims, *more):
    torch.manual_seed(0)
    return torch.randn(2, 3, *(9, 7, 8)[:dims], *more)


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_largest_elements(dims):
    pool = getattr(F, f"max_pool{dims}d")

    def function(x):
        rounded = x.round()  # has ties
        return {
            "plain": pool(x, 2),
            "overlapping": pool(x, 3, 2, 1),
            "ceil": pool(x, 3, 2, 1, ceil_mode=True),
            "ceil, wide strides": pool(x, 2, 4, 1, ceil_mode=True),
            "dilation": pool(x, 2, 1, 1, dilation=2),
            "indices": pool(rounded, 3, 2, 1, return_indices=True),
            "indices, dilation": pool(rounded, 2, 2, 0, 2, True, return_indices=True),
            "without batch": pool(x[0], 2),
            "NaN": pool(torch.where(x > 1, torch.nan, x), 3, 1, return_indices=True),
            "lowest": pool(torch.full_like(x, -torch.inf), 3, 2, 1, return_indices=True),
        }

    check(function, image(dims))


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_means(dims):
    pool = getattr(F, f"avg_pool{dims}d")
    adaptive = getattr(F, f"adaptive_avg_pool{dims}d")

    def function(x):
        found = {
            "plain": pool(x, 2),
            "padding": pool(x, 3, 2, 1),
            "without padding": pool(x, 3, 2, 1, count_include_pad=False),
            "ceil": pool(x, 3, 2, 1, ceil_mode=True),
            "ceil, wide strides": pool(x, 2, 4, 1, True),
            "ceil, without padding": pool(x, 3, 2, 1, True, False),
            "without batch": pool(x[0], 2),
            "adaptive": [adaptive(x, n) for n in (1, 3, 5)],
            "Lp": F.lp_pool1d(x[0].abs(), 3, 2) if dims == 1 else x.amax(),
        }
        if dims > 1:
            found["divisor"] = pool(x, 2, divisor_override=3)
        return found

    check(function, image(dims))


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_largest_elements_of_bins(dims):
    pool = getattr(F, f"adaptive_max_pool{dims}d")
    check(lambda x: [pool(x.round(), n, return_indices=True) for n in (1, 3, 5)], image(dims))
    check_gradients(lambda x: pool(x, 4), image(dims))


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [2, 3])
def test_largest_elements_of_random_windows(dims):
    pool = getattr(F, f"fractional_max_pool{dims}d")

    def function(x, samples):
        return [
            pool(x, 2, output_size=n, return_indices=True, _random_samples=samples)
            for n in (1, 3, 4)
        ]

    check(function, image(dims), torch.rand(2, 3, dims))


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_largest_elements_go_back(dims):
    pool, back = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")

    def function(x):
        y, at = pool(x, 2, return_indices=True)
        return back(y, at, 2, output_size=x.shape[2:])

    check(function, image(dims))
    check_gradients(function, image(dims))


@pytest.mark.nightly
def test_gradients_of_pooling():
    def function(x):
        return [
            F.max_pool2d(x.round() + x * 0, 3, 2, 1),
            F.max_pool2d(x, 2, 1, 1, dilation=2),
            F.avg_pool2d(x, 3, 2, 1, True, False),
            F.adaptive_avg_pool2d(x, 4),
            F.lp_pool2d(x, 2, 2),
        ]

    check_gradients(lambda x: function(x)[1:], image(2))
    # ties go to the first
    check_gradients(lambda x: function(x)[0], image(2).round())


def test_the_backward_of_pooling_as_an_operation():
    x = image(2)
    y, at = F.max_pool2d(x, 3, 1, return_indices=True)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    check(lambda g, x, i: backward(g, x, [3], [1], [0], [1], False, i), torch.randn_like(y), x, at)


@pytest.mark.nightly
def test_pooling_of_other_dtypes():
    def function(x):
        half = x.bfloat16()
        return [
            F.max_pool2d((x * 9).long(), 2, return_indices=True),
            F.avg_pool2d((x * 9).long(), 2, 2, 1),
            F.avg_pool2d(half, 3, 1),
            F.max_pool2d(half, 2),
            F.adaptive_avg_pool2d(half, 3),
        ]

    check(function, image(2))


MODES = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_interpolation(dims):
    def function(x):
        found = {}
        for mode in ["nearest", "nearest-exact"]:
            for scale in (0.5, 1.7, 3.0):
                found[f"{mode} {scale}"] = F.interpolate(x, scale_factor=scale, mode=mode)
            found[mode] = F.interpolate(x, (5, 11, 8)[:dims], mode=mode)
        for mode in MODES[dims]:
            for align in (False, True):
                how = {"mode": mode, "align_corners": align}
                for scale in (0.6, 2.5):
                    found[f"{mode} {align} {scale}"] = F.interpolate(x, scale_factor=scale, **how)
                found[f"{mode} {align}"] = F.interpolate(x, (5, 11, 8)[:dims], **how)
                found[f"{mode} {align} one"] = F.interpolate(x, 1, **how)
            found[f"{mode} again"] = F.interpolate(
                x, scale_factor=1.3, mode=mode, recompute_scale_factor=True
            )
        return found

    check(function, image(dims))


def test_interpolation_without_aliasing():
    def function(x):
        return [
            F.interpolate(x, size, mode=mode, antialias=True, align_corners=align)
            for mode in ("bilinear", "bicubic")
            for size in ((4, 3), (12, 5))
            for align in (False, True)
        ]

    check(function, image(2))


@pytest.mark.nightly
def test_gradients_of_interpolation():
    def function(x):
        return [
            F.interpolate(x, scale_factor=2.0, mode="bilinear"),
            F.interpolate(x, (4, 5), mode="bicubic", align_corners=True),
            F.interpolate(x, (4, 5), mode="nearest"),
            F.interpolate(x, (4, 5), mode="bilinear", antialias=True),
        ]

    check_gradients(function, image(2))


@pytest.mark.nightly
def test_interpolation_of_bytes_is_refused():
    with pytest.raises(ConversionError, match="cast to float32"):
        check(
            lambda x: F.interpolate(x, (3, 3), mode="bilinear"),
            torch.zeros(1, 1, 4, 4, dtype=torch.uint8),
        )


@pytest.mark.nightly
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_sampling_at_a_grid(dims, align):
    modes = ["bilinear", "nearest"] + ["bicubic"] * (dims == 2)

    def function(x, grid):
        return {
            f"{mode} {padding}": F.grid_sample(x, grid, mode, padding, align)
            for mode in modes
            for padding in ("zeros", "border", "reflection")
        }

    grid = torch.rand(2, *(4, 5, 6)[:dims], dims) * 5 - 2.5
    check(function, image(dims), grid)
    check_gradients(function, image(dims), grid, scale=3)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
def test_grids_of_affine_maps():
    def function(flat, deep):
        return [
            F.affine_grid(theta, size, align)
            for align in (False, True)
            for theta, size in [
                (flat, [2, 3, 4, 5]),
                (flat, [2, 3, 1, 4]),
                (deep, [2, 3, 4, 5, 2]),
            ]
        ]

    check(function, torch.randn(2, 2, 3), torch.randn(2, 3, 4))


@pytest.mark.nightly
@pytest.mark.parametrize("padding", [0, 1])
def test_the_largest_element_of_whole_planes(padding):
    """Among equal ones and NaN the one that torch takes, and it has the gradient."""
    x = torch.randn(4, 3, 5, 6).round()
    x[0, 0, 1, 2] = x[0, 0, 3, 1] = x[1, 2, 0, 0] = torch.nan
    x[2] = -torch.inf
    pool = torch.nn.MaxPool2d((40, 9), padding=padding, ceil_mode=True, return_indices=True)
    check(pool, x)
    check(pool, x.to(torch.bfloat16))
    check(lambda x: F.max_pool2d(x, (5, 6)), x.nan_to_num().clamp(-9, 9).long())
    check_gradients(lambda x: pool(x)[0], x.nan_to_num().clamp(-9, 9))
    model = check(torch.nn.MaxPool3d(20), torch.randn(2, 20, 20, 20))
    assert len(str(jax.make_jaxpr(model.call)((np.ones((2, 20, 20, 20), "float32"),)))) < 20_000


@pytest.mark.sampled(4)
@pytest.mark.nightly_cases(
    "kernel1-0-AvgPool2d", "kernel0-0-MaxPool2d", "kernel0-1-MaxPool2d", "kernel2-0-MaxPool2d"
)
@pytest.mark.parametrize("pool", [torch.nn.AvgPool2d, torch.nn.MaxPool2d])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kernel", [(900, 1000), (900, 3), (4, 1000)])
def test_a_window_that_is_larger_than_the_image_is_no_window(pool, padding, kernel):
    """Models end with such ones in ceil_mode; XLA took minutes for them, and all memory."""
    module = pool(kernel, kernel, padding=padding, ceil_mode=True)
    x = torch.randn(2, 3, 4, 5)
    model = check(module, x)
    check_gradients(module, x)
    for eqn in jax.make_jaxpr(model.call)((x.numpy(),)).jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns:
        assert max(eqn.params.get("window_dimensions", [0])) < 10
        assert all(size < 1000 for y in eqn.outvars for size in y.aval.shape)


@pytest.mark.nightly_cases("4")
@pytest.mark.parametrize("kernel", [4, (4, 2), (2, 4), (900, 1)])
def test_the_first_of_several_largest_elements_has_the_gradient(kernel):
    x = torch.tensor([2.0, 1, 0, 2, 2, 2, 1, 1, 0, 2, 1, 2, 0, 0, 0, 0]).reshape(1, 1, 4, 4)
    check_gradients(torch.nn.MaxPool2d(kernel, ceil_mode=True), x)


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [2, 3])
def test_global_max_pooling_takes_a_step_a_dimension(dims):
    size = (21, 24) if dims == 2 else (7, 8, 9)
    x = torch.randint(0, 4, (2, 3, *size)).float()  # with equal maxima
    pool = getattr(torch.nn, f"AdaptiveMaxPool{dims}d")
    model = check(pool(1, return_indices=True), x)
    calls = jax.make_jaxpr(model)(x.numpy()).jaxpr
    assert len(str(calls).splitlines()) < 1000  # not some for each of 504 elements
    check_gradients(pool(1), x)
    x[0, 0].view(-1)[[3, 200]] = torch.nan
    check(pool(1, return_indices=True), x)


@pytest.mark.nightly
@pytest.mark.parametrize("output", [2, (5, 1), (2, 30)])
def test_adaptive_max_pooling_with_large_bins(output):
    x = torch.randint(0, 4, (2, 3, 40, 37)).float()
    check(torch.nn.AdaptiveMaxPool2d(output, return_indices=True), x)
    check_gradients(torch.nn.AdaptiveMaxPool2d(output), x)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [
    {"kernel_size": 18, "stride": 3, "padding": 2, "dilation": 2, "ceil_mode": True},
    {"kernel_size": 20, "stride": 1, "padding": 5}, {"kernel_size": (21, 40), "stride": 1},
])  # fmt: skip
def test_large_windows_find_the_first_of_equal_maxima(options):
    x = torch.randint(0, 4, (1, 2, 36, 41)).float()
    check(torch.nn.MaxPool2d(**options, return_indices=True), x)
    check_gradients(torch.nn.MaxPool2d(**options), x)
