"""PyTorch's own transformer in files for Flax NNX."""

import math

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from fmapper.translation.source import note_arguments  # noqa: E402
from fmapper_translate import transcribe  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


class Language(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 16, 0.5)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding = nn.Embedding(words, width)
        self.width = width
        self.linear = nn.Linear(width, words)

    def forward(self, x, mask=None):
        x = self.embedding(x) * math.sqrt(self.width)
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.linear(self.encoder(x, mask))


class Translation(nn.Module):
    def __init__(self, words=17, width=8):
        super().__init__()
        self.source = nn.Embedding(words, width, padding_idx=0)
        self.target = nn.Embedding(words, width)
        self.transformer = nn.Transformer(
            width, 2, 1, 2, 16, 0.2, activation="gelu", batch_first=True, norm_first=True
        )
        layer = nn.TransformerDecoderLayer(
            width, 2, 16, batch_first=True, activation=nn.functional.gelu
        )
        self.more = nn.TransformerDecoder(layer, num_layers=1, norm=nn.LayerNorm(width))

    def forward(self, source, target):
        mask = self.transformer.generate_square_subsequent_mask(target.size(1))
        unseen = source == 0
        x = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, memory_key_padding_mask=unseen
        )
        return self.more(x, x, mask)


def example(kind):
    torch.manual_seed(0)
    if kind is Language:
        return Language(20, 8), (torch.randint(0, 20, (7, 3)),)
    source = torch.randint(1, 17, (2, 6))
    source[1, 4:] = 0
    return Translation(), (source, torch.randint(0, 17, (2, 5)))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Language, Translation])
def test_a_transformer_of_pytorch_is_one_of_the_file(kind):
    with note_arguments():
        model, inputs = example(kind)
    made = transcribe(model.eval(), inputs)
    assert not made.fallen
    assert bool(made.prove(model, inputs))


@pytest.mark.nightly
def test_first_values_of_a_transformer_have_the_spread_of_those_in_the_source():
    from flax import nnx

    with note_arguments():
        model, inputs = example(Translation)
    made = transcribe(model.eval(), inputs)
    space = {}
    exec(made.whole, space)
    net = space["make_model"](rngs=nnx.Rngs(0))
    ours = net.transformer.encoder.layers[0].self_attn.in_proj_weight[...]
    theirs = model.transformer.encoder.layers[0].self_attn.in_proj_weight
    bound = (6 / sum(theirs.shape)) ** 0.5  # Glorot's, of which PyTorch draws
    for array in (np.asarray(ours), theirs.detach().numpy()):
        assert 0.9 * bound < np.abs(array).max() <= bound
