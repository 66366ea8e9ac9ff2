"""Views, shapes, slices and padding: converted and compared with torch."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support.converting import Function, check, check_gradients, compare  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.nightly
def test_views():
    def views(x, y, scalar):
        return {
            "view": x.view(6, -1),
            "of nothing": x[:0].reshape(0, 6),
            "transposed": x.transpose(0, -1),
            "movedim": x.movedim((0, 2), (-1, 0)),
            "squeeze": x[:, :1].squeeze(),
            "squeeze one": x[:, :1].squeeze(1),
            "squeeze nothing": x.squeeze(1),
            "expand": y.expand(2, -1, 3),
            "expand scalar": scalar.expand(2, 0),
            "repeat": y.repeat(2, 1, 3),
            "repeat no times": y.repeat(0, 1),
            "tile": x.tile(2),
            "unflatten": x.unflatten(2, (2, -1)),
            "flip": x.flip(0, -1),
            "flip scalar": scalar.flip(0),
            "fliplr": x.fliplr(),
            "t": y.t(),
            "mT": x.mT,
            "stack": torch.stack([x, x], -1),
            "stack scalars": torch.stack([scalar, scalar]),
            "cat": torch.cat([x, x[:, :1], x[:, :0]], 1),
            "cat with nothing": torch.cat([x.new_zeros(0), y.flatten()]),
            "cat of two dtypes": torch.cat([y, y.long()]),
            "rot90": [x.rot90(k, (0, 2)) for k in range(-1, 4)],
            "ravel": x.mT.ravel(),
            "repeat_interleave": x.repeat_interleave(2, 1),
            "repeat_interleave row": y.repeat_interleave(3),
        }

    check(views, torch.randn(2, 3, 4), torch.randn(3, 1), torch.tensor(2.0))


def test_rotations_of_elements():
    def rolls(x, scalar, nothing):
        return [
            x.roll(1),
            x.roll(-9),
            x.roll((1, 2), (0, 2)),
            x.roll((1, 2), (0, 0)),
            x.roll(100, 1),
            scalar.roll(3),
            nothing.roll(1, 0),
        ]

    check(rolls, torch.randn(2, 3, 4), torch.tensor(2.0), torch.zeros(0, 2))


@pytest.mark.nightly
def test_diagonals_and_windows():
    def function(x, square, scalar):
        return {
            "diagonal": x.diagonal(),
            "others": [x.diagonal(k, 1, 2) for k in (-3, -2, -1, 1, 3, 4)],
            "swapped": x.diagonal(1, -1, 0),
            "embedded": [torch.diag_embed(x, k, 0, 2) for k in (-2, 0, 1)],
            "diag": [square.diag(k) for k in (-1, 0, 2)],
            "diagflat": square[0].diagflat(-1),
            "trace": square.trace(),
            "windows": x.unfold(2, 2, 1),
            "apart": x.unfold(-1, 2, 3),
            "scalar": scalar.unfold(0, 1, 1),
            "scattered": x.diagonal_scatter(torch.ones(4, 2), -1, 1, 0),
        }

    check(function, torch.randn(2, 3, 4), torch.randn(3, 3), torch.tensor(1.0))


@pytest.mark.nightly
def test_slices():
    def slices(x, nothing):
        return {
            "negative": x[-2:, :-1],
            "beyond": x[1:100, -100:2],
            "empty": x[3:1],
            "steps": x[:, 1::2, ::3],
            "select": x.select(1, -1),
            "narrow": x.narrow(2, -3, 2),
            "split": x.split(3, 1),
            "split nothing": nothing.split(3),
            "sizes": x.split([1, 0, 4], 1),
            "chunk": x.chunk(3, 1),
            "tensor_split": x.tensor_split(3, 1),
            "tensor_split at": x.tensor_split((1, 4), 1),
            "unbind": x.unbind(-1),
            "select_scatter": x.select_scatter(torch.zeros(4, 6), 1, -2),
            "slice_scatter": x.slice_scatter(torch.zeros(4, 2, 6), 1, -4, 100, 2),
            "hsplit": x.hsplit([1, 3]),
        }

    check(slices, torch.randn(4, 5, 6), torch.zeros(0, 2))


@pytest.mark.nightly
def test_strided_views():
    def function(x):
        return {
            "overlapping": x.as_strided((3, 2), (1, 1)),
            "offset": x.as_strided((2, 2), (5, 2), 3),
            "transposed": x.t().as_strided((2, 3), (1, 4)),
            "part": x[1:].as_strided((2, 2), (1, 2)),
            "part, absolute": x[1:].as_strided((2, 2), (1, 2), 5),
            "scattered": x.as_strided_scatter(torch.zeros(2), (2,), (6,), 1),
            "stft": torch.stft(x.reshape(-1), 8, 4, window=torch.ones(8), return_complex=True),
        }

    check(function, torch.randn(4, 5))


@pytest.mark.nightly
def test_strided_views_of_what_is_outside_of_the_tensor_are_refused():
    with pytest.raises(fmapper.ConversionError, match="shows elements of the storage"):
        check(lambda x: x[1:].as_strided((2,), (1,), 0), torch.randn(3, 3))
    with pytest.raises(fmapper.ConversionError, match="not all of its storage"):
        check(lambda x: x[:, :2].as_strided((2,), (1,)), torch.randn(3, 3))


@pytest.mark.nightly
def test_bits_as_another_dtype():
    def function(x, i, z, b):
        return {
            "int32": x.view(torch.int32),
            "smaller": x.view(torch.int16),
            "uint8": i.view(torch.uint8),
            "larger": x.view(torch.int16).view(torch.float32),
            "complex": x.view(torch.complex64),
            "real": torch.view_as_real(z),
            "from real": torch.view_as_complex(x.reshape(3, 2, 2)),
            "of complex": z.view(torch.float32),
            "bool": b.view(torch.uint8),
        }

    x = torch.randn(3, 4)
    check(
        function, x, torch.arange(4, dtype=torch.int32), torch.randn(2, dtype=torch.cfloat), x > 0
    )


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding(dims):
    widths = [1, 2, 3, 0, 2, 1][: 2 * dims]

    def function(x):
        padded = {mode: F.pad(x, widths, mode) for mode in ("reflect", "replicate", "circular")}
        return padded | {
            "constant": F.pad(x, widths, value=-1.5),
            "cropped": F.pad(x, [-1, 2, *widths[2:]]),
            "replicated, cropped": F.pad(x, [-1, 2, *widths[2:]], "replicate"),
            "without batch": F.pad(x[0], widths, "reflect"),
            "integers": F.pad(x.long(), widths, value=2),
        }

    check(function, torch.randn(2, 3, *(5, 4, 6)[:dims]) * 5)
    check_gradients(
        lambda x: function(x) | {"integers": x.sum()}, torch.randn(2, 3, *(5, 4, 6)[:dims])
    )


@pytest.mark.nightly
def test_pixels_and_channels():
    def function(x):
        return [
            F.pixel_shuffle(x, 2),
            F.pixel_unshuffle(x, 3),
            F.channel_shuffle(x, 4),
            F.unfold(x, (2, 3), dilation=(2, 1), padding=(1, 0), stride=(1, 2)),
            F.fold(x.reshape(2, 8, 36), (7, 7), 2, padding=0, stride=1),
            F.fold(x.reshape(2, 16, 18), (5, 5), 2, (2, 1), (0, 1), (1, 1)),
        ]

    check(function, torch.randn(2, 8, 6, 6))
    check_gradients(function, torch.randn(2, 8, 6, 6))


@pytest.mark.nightly
def test_gradients_of_views():
    def function(x):
        return [
            x.unfold(1, 2, 1),
            x.as_strided((3, 2), (1, 1)),
            x.diagonal(-1),
            x.roll(1, 0).flip(1),
            x.expand(2, 3, 4),
            x.select_scatter(x[0] * 2, 0, 1),
            x.slice_scatter(x[:, :2] * 3, 1, 0, 4, 2),
            torch.cat([x, x]).repeat(1, 2),
        ]

    check_gradients(function, torch.randn(3, 4))


@pytest.mark.nightly
def test_one_conversion_serves_sizes_that_vary():
    def function(x):
        return {
            "slice": x[1:, :-1],
            "last": x[:, -1],
            "chunks": x.chunk(2, -1),
            "pad": F.pad(x, (1, 1), "circular"),
            "roll": x.roll(1, 0),
            "unfold": x.unfold(1, 2, 2),
            "repeat": x.repeat(2, 1),
            "gather": x.gather(1, x.argsort(1)),
        }

    n, m = torch.export.Dim("n", min=2), torch.export.Dim("m", min=4)
    module = Function(function)
    sizes = (({0: n, 1: 2 * m},),)
    converted = fmapper.convert(module, "jax", (torch.randn(5, 12),), dynamic_shapes=sizes)
    for shape in [(3, 10), (7, 16)]:
        x = torch.randn(shape)
        compare(converted(fmapper.to_jax(x)), function(x))


@pytest.mark.nightly
def test_sizes_that_the_code_fixes_are_explained() -> None:
    def counted(x):
        return x / len(x)

    x = torch.ones(3, 2)
    with pytest.warns(fmapper.FixedSizeWarning, match=r"shape\[0\] is 3: .*return x / len\(x\)"):
        model = fmapper.convert(Function(counted), "jax", (x,), dynamic_shapes="auto")
    with pytest.raises(fmapper.ProgramInputError, match=r"len\(x\) .* fix x\.shape\[0\]"):
        model(np.ones((4, 2), "float32"))


class Windows(torch.nn.Module):
    """Pads to whole windows again and again, so that sizes become long expressions."""

    def forward(self, x):
        for _ in range(4):
            x = torch.nn.functional.pad(x, (0, (4 - x.shape[-1] % 4) % 4))
            x = x[..., : x.shape[-1] * 3 // 4]
        return x.tanh()


@pytest.mark.nightly
def test_sizes_that_are_long_expressions_vary_where_they_are_named_alone():
    x = torch.randn(2, 37)
    net = torch.nn.Sequential(Windows())
    with pytest.warns(fmapper.FixedSizeWarning, match=r"Sequential: 0: a size has \d+ operations"):
        model = fmapper.convert(net, "jax", (x,), dynamic_shapes="auto", check=False)
    assert model(np.ones((5, 37), np.float32)).shape == Windows()(torch.ones(5, 37)).shape
    with pytest.raises(fmapper.ProgramInputError):
        model(np.ones((2, 41), np.float32))
    model = fmapper.convert(Windows(), "jax", (x,), dynamic_shapes=["_, n"], check=False)
    other = torch.randn(2, 41)
    np.testing.assert_allclose(model(other.numpy()), Windows()(other), rtol=1e-6, atol=1e-6)
