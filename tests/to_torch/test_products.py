"""Products and convolutions of JAX in torch: dimensions, layouts, dilations, groups and dtypes."""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

from support.from_jax import check, normal, operations  # noqa: E402


def dot(left, right, batch_left=(), batch_right=(), **options):
    numbers = ((left, right), (batch_left, batch_right))
    return lambda x, y: lax.dot_general(x, y, numbers, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (dot((1,), (0,)), (3, 4), (4, 5)),
        (dot((1,), (1,)), (3, 4), (5, 4)),
        (dot((0,), (0,)), (4,), (4,)),
        (dot((2,), (0,)), (3, 4, 5), (5, 2, 6)),
        (dot((1, 2), (0, 1)), (3, 4, 5), (4, 5, 6)),
        (dot((2, 1), (0, 1)), (3, 4, 5), (5, 4, 6)),
        (dot((1, 3), (2, 0), (0,), (3,)), (2, 3, 4, 5, 6), (5, 7, 3, 2, 8)),
        (dot((1,), (1,), (0,), (0,)), (2, 5), (2, 5)),
        (dot((3,), (3,), (0, 2), (0, 2)), (2, 3, 4, 5), (2, 6, 4, 5)),
        (dot((), ()), (2, 3), (4,)),
        (dot((), (), (0,), (1,)), (2, 3), (4, 2, 5)),
        (dot((), (), (0,), (0,)), (2, 5), (2,)),
    ],
)
def test_products(function, left, right):
    check(function, normal(*left), normal(*right, seed=1))


def test_common_products_are_one_function():
    assert operations(check(jnp.matmul, normal(3, 4), normal(4, 5))) == ["matmul"]
    attention = check(
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), normal(2, 3, 4, 5), normal(2, 6, 4, 5)
    )
    assert operations(attention) == ["permute", "permute", "matmul"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wide", [None, "int32", "uint32", "float32"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"])
def test_integers_wrap_around(dtype, wide):
    rng = np.random.default_rng(0)
    x, y = (
        jnp.asarray(rng.integers(-(2**31), 2**31, shape).astype(dtype))
        for shape in ((3, 40), (40, 5))
    )
    if wide == "float32" and dtype in ("int32", "uint32"):
        pytest.skip("sums of such floats depend on their order")
    if (wide or "").startswith("u") != dtype.startswith("u") and wide != "float32":
        wide = None
    if dtype == "bool":
        wide = None
    check(dot((1,), (0,), preferred_element_type=wide), x, y)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("float32", "complex64"),
        ("int8", "float32"),
    ],
)
def test_operands_of_two_dtypes(dtypes):
    x, y = normal(3, 4) * 9, normal(4, 5, seed=1) * 9
    x, y = x.astype(dtypes[0]), y.astype(dtypes[1])
    check(
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.promote_types(x.dtype, y.dtype)),
        x,
        y,
        gradients=False,
    )


@pytest.mark.nightly
def test_halves_are_added_as_floats():
    x, y = normal(3, 999).astype("bfloat16"), normal(999, 5, seed=1).astype("bfloat16")
    check(dot((1,), (0,), preferred_element_type="float32"), x, y)
    check(dot((1,), (0,)), x, y, gradients=False)


def test_an_unknown_algorithm_is_refused():
    import fmapper

    function = dot((1,), (0,), precision=lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32)
    with pytest.raises(fmapper.ConversionError, match="any_f8"):
        fmapper.convert(function, "torch", (normal(3, 4), normal(4, 5)))


def test_ragged_products():
    sizes = np.array([2, 0, 5], np.int32)
    check(lax.ragged_dot, normal(10, 4), normal(3, 4, 5, seed=1), sizes)


NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def conv(strides, padding, base=None, dilation=None, layout=NHWC, groups=1, batches=1, **options):
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, base, dilation, layout, groups, batches, **options
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "shape", "kernel"),
    [
        (conv((1, 1), "SAME"), (2, 8, 9, 3), (3, 3, 3, 4)),
        (conv((2, 2), "SAME"), (2, 8, 9, 3), (3, 3, 3, 4)),
        (conv((2, 1), ((1, 2), (-1, 3)), None, (2, 1)), (2, 8, 9, 3), (3, 2, 3, 4)),
        (conv((1, 1), "SAME", groups=3), (2, 8, 9, 6), (3, 3, 2, 9)),
        (conv((1, 1), "SAME", batches=2), (4, 8, 9, 3), (3, 3, 3, 6)),
        (conv((1,), "VALID", layout=("NWC", "WIO", "NWC")), (2, 8, 3), (3, 3, 4)),
        (conv((), (), (), (), ("NC", "OI", "NC")), (2, 3), (4, 3)),
        (conv((1, 1, 1), "SAME", layout=None), (2, 3, 4, 5, 6), (4, 3, 2, 3, 2)),
        (conv((1, 1), ((0, 0), (0, 0)), None, (2, 2), ("CHWN", "IHWO", "HWNC")),
         (3, 8, 9, 2), (3, 3, 3, 4)),
        (conv((1, 1), "VALID"), (2, 2, 2, 3), (3, 3, 3, 4)),
    ],
)  # fmt: skip
def test_convolutions(function, shape, kernel):
    check(function, normal(*shape), normal(*kernel, seed=1))


def test_channels_last_is_a_view():
    found = check(conv((1, 1), "SAME"), normal(2, 8, 9, 3), normal(3, 3, 3, 4))
    assert operations(found) == ["permute", "permute", "conv2d", "permute"]


@pytest.mark.nightly_cases("1-dilation0-strides0-padding2")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((2, 1), (2, 3)), ((-1, 2), (0, -1))])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(padding, strides, dilation, groups):
    function = conv(strides, padding, (2, 3), dilation, NCHW, groups)
    check(function, normal(2, 4, 5, 6), normal(6, 4 // groups, 3, 2, seed=1))


def test_transposed_convolutions_by_name():
    check(
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        normal(2, 5, 6, 3),
        normal(3, 3, 3, 4),
    )
    check(
        lambda x, w: lax.conv_transpose(x, w, (2, 3), "VALID", transpose_kernel=True),
        normal(2, 5, 6, 3),
        normal(4, 2, 4, 3),
    )


@pytest.mark.sampled(2)
@pytest.mark.nightly_cases("complex64")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "complex64", "bfloat16"])
def test_convolutions_of_other_numbers(dtype):
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.integers(-(2**31), 2**31, shape)).astype(dtype)
        if "int" in dtype
        else normal(*shape).astype(dtype)
        for shape in ((2, 8, 9, 3), (3, 3, 3, 4))
    )
    check(conv((1, 1), "SAME"), x, w, gradients=dtype == "complex64")


def test_the_program_of_a_gradient():
    def loss(w, x):
        return jnp.sum(conv((2, 2), "SAME")(x, w) ** 2)

    check(jax.grad(loss, (0, 1)), normal(3, 3, 3, 4), normal(2, 8, 9, 3), gradients=False)
