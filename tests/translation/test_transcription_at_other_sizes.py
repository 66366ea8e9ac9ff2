"""Transcribed files hold for other sizes than those of their example, as their sources do."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.sources.sizes import of_given_sizes, of_other_sizes  # noqa: E402


def check(model, x, other):
    """Compares the file with its source on inputs of another size."""
    made = transcribe(model, (x,), ((), {}))
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    expected = model(other).detach().numpy()
    assert jnp.allclose(twin(jnp.array(other.numpy())), expected, atol=1e-5)
    return made.whole


class Spectrum(nn.Module):
    def forward(self, x):
        size = 2 * x.shape[-1]
        y = torch.fft.irfft(torch.fft.rfft(x, n=size).square(), n=size, dim=-1, norm="forward")
        return y + torch.fft.fftn(x, dim=(0, 1)).real.sum()


def test_fourier_transforms_have_the_lengths_of_the_source():
    code = check(Spectrum().eval(), torch.randn(2, 5), torch.randn(3, 8))
    assert "jnp.fft.rfft(x, n=size)" in code


class Places(nn.Module):
    def forward(self, x):
        axes = [torch.arange(float(size)) for size in x.shape]
        rows, columns = torch.meshgrid(*axes, indexing="ij")
        return x + rows * torch.meshgrid(axes)[1] - columns


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
def test_grids_are_those_of_the_axes():
    code = check(Places().eval(), torch.randn(2, 3), torch.randn(4, 6))
    assert 'jnp.meshgrid(*axes, indexing="ij")' in code


class Shrunk(nn.Module):
    """What an operation is given depends on a size, and its source does not say how."""

    def forward(self, x):
        return nn.functional.interpolate(x[None, None], scale_factor=1.7)[0, 0]


def test_what_holds_for_one_size_alone_is_not_written():
    x = torch.randn(3, 4)
    try:
        check(Shrunk().eval(), x, torch.randn(5, 9))
    except NotTranscribed:
        return
    check(Shrunk().eval(), x, torch.randn(7, 6))


def test_every_size_that_may_is_another_one():
    x, ids = torch.randn(2, 3, 4), torch.tensor([[0, 1, 9], [1, 2, 3]])

    def runs(inputs):
        (x, _), options = inputs
        return x.shape[2] == 4 and options["scale"] == 2 and x.shape[0] % 2 == 0

    (other, numbers), options = of_other_sizes(((x, ids), {"scale": 2}), runs)
    assert other.shape == (4, 4, 4)
    assert numbers.tolist() == [[0, 1, 9, 0], [1, 2, 3, 1], [0, 1, 9, 0], [1, 2, 3, 1]]
    assert options == {"scale": 2}
    assert of_other_sizes((x, {}), lambda _: False) is None


def test_a_batch_of_one_is_another_one_in_all_inputs():
    images, mask = torch.randn(1, 1, 4), torch.ones(1, 4)

    def runs(inputs):
        images, mask = inputs
        return images.shape[1] == 1 and len(images) == len(mask)

    images, mask = of_other_sizes((images, mask), runs)
    assert images.shape == (2, 1, 5)
    assert mask.shape == (2, 5)


def test_sizes_that_are_to_vary_are_others_within_their_bounds():
    b = torch.export.Dim("b", min=2, max=5)
    x, mask = torch.ones(5, 3), torch.ones(5)

    def runs(inputs):
        (x,), options = inputs
        return len(x) == len(options["mask"]) and x.shape[1] != 4

    forms = {4: {"x": (b, None), "mask": {0: b}}, 6: {"x": "b, _", "mask": "b"}}
    for size, shapes in forms.items():
        (other,), options = of_given_sizes(((x,), {"mask": mask}), ["x", "mask"], shapes, runs)
        assert other.shape == (size, 3)
        assert options["mask"].shape == (size,)
    with pytest.raises(NotTranscribed, match="lets width vary, which is 3"):
        of_given_sizes(((x,), {}), ["x"], ["_, width"], lambda inputs: inputs[0][0].shape[1] == 3)
    with pytest.raises(fmapper.ConversionError, match="heights is not an input"):
        of_given_sizes(((x,), {}), ["x"], {"heights": "b"}, runs)


def test_a_size_that_the_model_does_not_take_may_not_vary():
    class Fixed(nn.Module):
        def forward(self, x):
            assert x.shape[0] == 2
            return x + 1

    x = torch.ones(2, 3)
    with pytest.raises(NotTranscribed, match="takes none of 3, 4, 1"):
        transcribe(Fixed(), (x,), ((), {}), dynamic_shapes=["batch, _"])


def test_sizes_that_are_to_stay_are_those_of_the_examples():
    asked = []

    class Watched(nn.Module):
        def forward(self, x):
            asked.append(tuple(x.shape))
            return x * 2

    transcribe(Watched(), (torch.ones(2, 3),), ((), {}), dynamic_shapes=None)
    assert {*asked} == {(2, 3)}
    transcribe(Watched(), (torch.ones(2, 3),), ((), {}), dynamic_shapes=["_, n"])
    assert {*asked} == {(2, 3), (2, 4)}
