"""Layers and parameters of transcribed models: norms, frozen arrays, tables of numbers."""

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.flax.layers import Dropout2d, LayerNorm, MultiheadAttention  # noqa: E402


def model_of(made, source):
    """Returns the model of a file with the weights of its source, in evaluation."""
    space = {}
    exec(made.code, space)
    model = eval(made.example, space | {"rngs": nnx.Rngs(0)})
    space["load_weights"](model, {name: x.numpy() for name, x in source.state_dict().items()})
    model.eval()
    return model


def padding_of(kind, size):
    if kind is None:
        return size // 2
    kind = kind.lower()
    return 0 if kind == "valid" else size


class Standardized(nn.Conv1d):
    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6
        ).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias, self.stride, self.padding)


class Speech(nn.Module):
    def __init__(self, rate):
        super().__init__()
        norm = nn.utils.weight_norm
        if hasattr(nn.utils.parametrizations, "weight_norm"):
            norm = nn.utils.parametrizations.weight_norm
        self.first = norm(nn.Conv1d(2, 4, 3, padding=padding_of(None, 3)), name="weight", dim=2)
        self.second = Standardized(4, 4, 1)
        self.pool = nn.AvgPool1d(2)
        self.rates = [x.tolist() for x in torch.Tensor(np.linspace(0, rate, 4)).split([3, 1])]
        self.scale = nn.Linear(4, 4, bias=False)
        self.scale.bias = nn.Parameter(torch.ones(4))
        self.extra = nn.ModuleList([])
        for _ in range(len(self.rates) - 2):
            self.extra.append(nn.Linear(4, 4))

    def forward(self, x):
        x = self.pool(self.second(self.first(x)))
        return self.scale(x.transpose(1, 2)) * self.rates[1][0]


def test_norms_of_weights_and_functions_without_statistics_are_those_of_the_source():
    torch.manual_seed(0)
    source, x = Speech(0.5).eval(), torch.randn(2, 2, 8)
    made = transcribe(source, (x,), ((0.5,), {}))
    assert not made.fallen
    model = model_of(made, source)
    assert jnp.allclose(model(x.numpy()), source(x).detach().numpy(), atol=1e-5)
    state = made.rules.apply({name: x.numpy() for name, x in source.state_dict().items()})
    assert "first.parametrizations.weight.original0" in state
    assert "raise NotImplementedError" in made.code.split("def padding_of")[1].split("class")[0]


class Frozen(nn.Module):
    def __init__(self, keeps=False):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))
        self.part.requires_grad_(False)
        self.shift = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=keeps)
        self.head = nn.Linear(4, 4)
        for name, array in self.head.named_parameters():
            if "bias" in name:
                array.requires_grad = False

    def forward(self, x):
        return self.head(self.part(x) * self.scale + self.shift)


def test_what_the_source_does_not_train_is_no_parameter_of_the_file():
    source, x = Frozen(), torch.ones(1, 2)
    made = transcribe(source, (x,), ((), {}))
    model = model_of(made, source)
    _, trained, _ = nnx.split(model, nnx.Param, ...)
    assert [".".join(map(str, path)) for path, _ in nnx.to_flat_state(trained)] == ["head.kernel"]
    assert jnp.allclose(model(x.numpy()), source(x).detach().numpy(), atol=1e-6)


class Thawed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.fc.requires_grad_(False)
        self.fc.bias.requires_grad = True

    def forward(self, x):
        return self.fc(x)


def test_training_what_was_frozen_is_refused():
    with pytest.raises(NotTranscribed, match="trained again"):
        transcribe(Thawed(), (torch.ones(1, 2),))


class Words(nn.Module):
    def __init__(self, is_tied=True):
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.head = nn.Module()
        self.head.norm = nn.LayerNorm(8)
        self.head.decoder = nn.Linear(8, 6)
        if is_tied:
            self.head.decoder.weight = self.embed.weight
        nn.init.uniform_(self.head.decoder.weight, -0.5, 0.5)

    def forward(self, ids):
        return self.head.decoder(self.head.norm(self.embed(ids)))


def test_linear_layers_with_a_bias_share_the_matrix_of_an_embedding():
    torch.manual_seed(0)
    source, ids = Words(), torch.randint(0, 6, (2, 4))
    made = transcribe(source, (ids,), ((), {}))
    assert "        tie(self.head.decoder, self.embed)\n" in made.code
    model = model_of(made, source)
    result = source(ids)
    assert jnp.allclose(model(ids.numpy()), result.detach().numpy(), atol=1e-5)
    result.square().sum().backward()
    gradient = nnx.grad(lambda model: (model(ids.numpy()) ** 2).sum())(model)
    ours = gradient["embed"]["embedding"][...]
    assert jnp.allclose(ours, source.embed.weight.grad.numpy(), atol=1e-4)
    state = made.rules.apply({name: x.numpy() for name, x in source.state_dict().items()})
    assert state["head.decoder.embedding"].shape == state["embed.embedding"].shape
    space = {}
    exec(made.code, space)
    apart = space["Words"](is_tied=False, rngs=nnx.Rngs(0))
    assert apart.head.decoder.kernel.shape == (8, 6)


class Reversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 4), nn.Linear(4, 50)
        self.embed.weight = self.head.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_embeddings_that_take_the_matrix_of_a_layer_begin_with_its_values():
    made = transcribe(Reversed().eval(), (torch.tensor([[0, 1]]),), ((), {}))
    space = {}
    exec(made.code, space)
    model = space["Reversed"](rngs=nnx.Rngs(0))
    assert abs(model.embed.embedding[...]).max() <= 0.5


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 3, mode=mode, sparse=mode != "max")
        self.bag.weight.data = torch.tensor(np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3))

    def forward(self, ids, offsets=None):
        return self.bag(ids, offsets)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_vectors_are_rows_or_begin_at_offsets(mode):
    rows, flat = torch.tensor([[0, 2, 2], [4, 1, 0]]), torch.tensor([0, 2, 2, 4, 1])
    offsets = torch.tensor([0, 3, 3])  # of which the second is empty
    source = Bags(mode).eval()
    made = transcribe(source, [(rows,), (flat, offsets)], ((mode,), {}))
    assert not made.fallen
    model = model_of(made, source)
    ours = model(rows.numpy()), model(flat.numpy(), offsets.numpy())
    theirs = source(rows), source(flat, offsets)
    for one, other in zip(ours, theirs, strict=True):
        assert jnp.allclose(one, other.detach().numpy(), atol=1e-6)
    space = {}
    exec(made.code, space)
    new = space["Bags"](mode, rngs=nnx.Rngs(0))
    assert jnp.allclose(new.bag.embedding[...], np.linspace(-1, 1, 15).reshape(5, 3), atol=1e-6)


class Images(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.pad = nn.ReflectionPad2d((1, 1, 1, 1))
        self.conv = nn.Conv2d(3, width, 3, padding=1, padding_mode="replicate")
        self.instance = nn.InstanceNorm2d(width, affine=True)
        self.drop = nn.Dropout2d(0.3)
        self.pool = nn.AdaptiveAvgPool2d((None, 4))
        self.edge = nn.ZeroPad1d((0, 1))
        self.wider = nn.ConvTranspose1d(width, width, 2, stride=2)
        self.norm = nn.LayerNorm((width, 8))
        self.gate = nn.SELU()

    def forward(self, x):
        x = self.drop(self.instance(self.conv(self.pad(x))))
        x = self.wider(self.edge(self.pool(x).mean(-2)))
        return self.gate(self.norm(x[..., :8]))


@pytest.mark.nightly
def test_layers_of_images_are_those_of_the_source():
    torch.manual_seed(0)
    source, x = Images().eval(), torch.randn(2, 3, 6, 6)
    made = transcribe(source, (x,))
    assert not made.fallen
    assert "self.drop = Dropout2d(0.3, rngs=rngs)" in made.code
    with torch.no_grad():
        assert np.allclose(model_of(made, source)(jnp.asarray(x.numpy())), source(x), atol=1e-5)
    assert bool(made.prove(source, (x,)))


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReplicationPad3d(1), nn.Conv3d(2, 3, 3, padding="same", padding_mode="circular"),
            nn.BatchNorm3d(3), nn.ConvTranspose3d(3, 2, 2, stride=2), nn.ConstantPad3d(1, 2.0),
            nn.InstanceNorm3d(2),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


@pytest.mark.nightly
def test_layers_of_volumes_are_those_of_the_source():
    torch.manual_seed(0)
    source, x = Volumes().eval(), torch.randn(2, 2, 3, 4, 5)
    made = transcribe(source, (x,))
    with torch.no_grad():
        assert np.allclose(model_of(made, source)(jnp.asarray(x.numpy())), source(x), atol=1e-4)


class Roots(nn.Module):
    def forward(self, x):
        return torch.sqrt(x)


def test_results_that_are_nan_in_the_source_may_be_nan_in_the_file():
    made = transcribe(Roots(), (torch.tensor([[4.0, -1.0], [1.0, 9.0]]),))
    assert "return jnp.sqrt(x)" in made.code


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_a_norm_of_numbers_that_hardly_vary_is_that_of_the_source(shape):
    torch.manual_seed(0)
    x = 30 + 0.01 * torch.randn(3, *shape)
    norm = LayerNorm(shape, 1e-12, rngs=nnx.Rngs(0))
    expected = F.layer_norm(x.double(), shape, eps=1e-12)
    assert np.allclose(norm(jnp.asarray(x.numpy())), expected, atol=1e-2)


@pytest.mark.parametrize("shape", [(4, 16, 5), (4, 16, 3, 5)])
def test_channels_of_images_and_of_sequences_are_dropped_whole(shape):
    dropped = Dropout2d(0.5, rngs=nnx.Rngs(0))(jnp.ones(shape)) == 0
    channels = dropped.reshape(4, 16, -1)
    assert (channels.all(-1) == channels.any(-1)).all()
    per_example = channels.all(-1).sum(-1)
    assert ((per_example > 0) & (per_example < 16)).all()  # and no example is, as a whole


def test_a_hint_about_a_mask_that_is_absent_is_an_error():
    attention, x = MultiheadAttention(4, 2, rngs=nnx.Rngs(0)), jnp.ones((3, 2, 4))
    with pytest.raises(ValueError, match="needs attn_mask"):
        attention(x, x, x, is_causal=True)
