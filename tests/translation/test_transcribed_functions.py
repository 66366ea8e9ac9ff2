"""Functions in files that are transcribed: derivatives of their own, and masks of libraries."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.libraries import infrastructure as library  # noqa: E402


def make(made):
    """The model of a file, with the weights of the source."""
    space = {}
    exec(made.code, space)
    exec(f"def make(rngs):\n    return {made.example}", space)
    twin = space["make"](nnx.Rngs(0))
    return space["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})


def rounded(x):
    return torch.round(x)


class Rounded(torch.autograd.Function):
    """Rounds, with three times the gradient of the identity within a width."""

    @staticmethod
    def forward(ctx, x, width, scale):
        ctx.save_for_backward(x)
        ctx.width = width
        return rounded(x.clamp(-width, width)) * scale

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        return gradient * (x.abs() < ctx.width) * 3, None, (gradient * rounded(x)).sum()


class Net(nn.Module):
    def __init__(self, width=2.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.width = width

    def forward(self, x):
        return Rounded.apply(3 * self.layer(x), self.width, self.scale)


def test_a_derivative_of_the_sources_own_is_that_of_the_file():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 4)
    made = transcribe(model, (x,))
    assert "class Rounded(Function):" in made.code
    assert "        (x,) = ctx.saved_tensors" in made.code
    twin, x_jax = make(made), jnp.array(x)
    assert jnp.allclose(twin(x_jax), model(x).detach().numpy(), atol=1e-5)
    model(x).square().sum().backward()
    slopes = nnx.grad(lambda twin: (twin(x_jax) ** 2).sum())(twin)
    np.testing.assert_allclose(slopes.layer.kernel[...].T, model.layer.weight.grad, rtol=1e-4)
    np.testing.assert_allclose(slopes.scale[...], model.scale.grad, rtol=1e-4)


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Dirty(nn.Module):
    def forward(self, x):
        return Marked.apply(x * 1)


def test_what_a_context_has_beyond_tensors_is_refused():
    with pytest.raises(NotTranscribed, match="mark_dirty of the context"):
        transcribe(Dirty(), (torch.ones(2),))


@pytest.mark.nightly
def test_no_mask_of_a_library_is_left_out_for_its_values():
    masks = pytest.importorskip("transformers.masking_utils")
    x, ones = torch.ones(2, 3, 4), torch.ones(2, 3)
    assert masks.create_recurrent_attention_mask(None, x, ones) is None
    with library.masks_traced():
        assert masks.create_recurrent_attention_mask(None, x, ones).shape == (2, 3)
    assert masks.create_recurrent_attention_mask(None, x, ones) is None


@pytest.mark.nightly
def test_a_mask_that_may_not_be_left_out_is_made():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    model, ids = transformers.FalconModel(config).eval(), torch.arange(6)[None]
    made = transcribe(model, (ids,))
    expected = model(ids).last_hidden_state.detach().numpy()
    assert jnp.allclose(make(made)(jnp.array(ids)).last_hidden_state, expected, atol=1e-5)
    assert not made.fallen
