"""Models of written classes keep the names and layouts of their source at hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402


class Norms(nn.Module):
    """A little ResNet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)) + x.mean())
        return self.head(self.up(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)

    def forward(self, ids):
        x, _ = self.rnn(self.embed(ids))
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.down(x) * self.scale)


def norms():
    return Norms(), torch.randn(4, 3, 4, 4)


def recurrent():
    return Recurrent(), torch.arange(12).reshape(2, 6) % 11


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.arange(12).reshape(2, 6) % 11


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config), torch.arange(12).reshape(2, 6) % 11


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=8, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), torch.arange(12).reshape(2, 6) % 11


def arrays_of(module):
    """Returns the state dict, without counts of batches, which JAX does not keep."""
    return {
        name: x.detach().numpy()
        for name, x in module.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def source_state(model):
    found = fmapper.state(model, source=True)
    return {
        name: np.asarray(x)
        for name, x in found.items()
        if not name.endswith(("num_batches_tracked", "inv_freq", "scale", "_ids"))
    }


def near(found, wanted, rtol=1e-4):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=2e-5, err_msg=name)


def loss_of(output):
    leaves = [x for x in fmapper.fleaves(output) if hasattr(x, "mean")]
    return (leaves[0] ** 2).mean()


def step_in_torch(module, x):
    loss_of(module.train()(x)).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)


def step_in_flax(model, x):
    grads = nnx.grad(lambda m: loss_of(m(x)))(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    return model


def step_in_equinox(model, x):
    equinox = pytest.importorskip("equinox")
    grads = equinox.filter_grad(lambda m: loss_of(m(x)))(model)
    return equinox.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))


@pytest.mark.nightly
@pytest.mark.parametrize("make", [norms, recurrent, llama, bert, gpt2])
def test_a_module_gets_back_what_its_translation_has_learned(make):
    torch.manual_seed(0)
    module, x = make()
    before = copy.deepcopy(module)
    model = fmapper.convert(module, "flax", (x,), structure=True, train=True)
    near(source_state(model), arrays_of(module))
    model.train()
    model = step_in_flax(model, x.numpy())
    step_in_torch(module, x)
    learned = fmapper.load_state(before, fmapper.state(model, source=True))
    assert type(learned) is type(module)
    near(arrays_of(learned), arrays_of(module), rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("make", [norms, recurrent, gpt2])
def test_equinox_gives_back_what_it_has_learned(make):
    pytest.importorskip("equinox")
    torch.manual_seed(0)
    module, x = make()
    before = copy.deepcopy(module)
    model = fmapper.convert(module.eval(), "equinox", (x,), structure=True)
    near(source_state(model), arrays_of(module))
    model = step_in_equinox(model, x.numpy())
    module.train = lambda mode=True: module
    step_in_torch(module, x)
    learned = fmapper.load_state(before, fmapper.state(model, source=True))
    near(arrays_of(learned), arrays_of(module), rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_checkpoints_of_both_namings_are_loaded(to, tmp_path):
    pytest.importorskip(to)
    torch.manual_seed(0)
    module, x = norms()
    model = fmapper.convert(module.eval(), to, (x,), structure=True)
    other = Norms().eval()
    other.norm.running_mean += 1
    torch.save(other.state_dict(), tmp_path / "source.pt")
    loaded = fmapper.load(tmp_path / "source.pt", like=model)
    assert type(loaded) is type(model)
    np.testing.assert_allclose(loaded(x.numpy()), other(x).detach(), atol=1e-5)
    fmapper.save(loaded, tmp_path / "own.safetensors")
    own = fmapper.load(tmp_path / "own.safetensors", like=model)
    np.testing.assert_array_equal(own(x.numpy()), loaded(x.numpy()))
    fmapper.save(fmapper.state(own, source=True), tmp_path / "back.safetensors")
    back = fmapper.load(tmp_path / "back.safetensors", like=module)
    np.testing.assert_allclose(back(x).detach(), own(x.numpy()), atol=1e-5)
    del other.head
    torch.save(other.state_dict(), tmp_path / "source.pt")
    with pytest.raises(fmapper.StructureMismatchError, match=r"head\.1\.weight: missing"):
        fmapper.load(tmp_path / "source.pt", like=model)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.turned = nnx.ConvTranspose(8, 8, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.layers = nnx.vmap(Layer, in_axes=0)(rngs.split(2))

    def __call__(self, x):
        x = self.norm(self.turned(self.conv(x)))
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


@pytest.mark.nightly
def test_a_model_of_flax_gets_back_what_torch_has_learned():
    model = Deep(nnx.Rngs(0))
    model.eval()
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    module = fmapper.convert(model, "torch", (x,), structure=True)
    there = fmapper.state(module, source=True)
    own = {name: x for name, x in fmapper.state(model).items() if name in there}
    assert len(own) == len(there) == 18
    near({name: array.detach().numpy() for name, array in there.items()}, own)
    loss_of(module(torch.tensor(x))).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(0.1 * parameter.grad)
    learned = fmapper.load_state(model, fmapper.state(module, source=True), strict=False)
    wanted = fmapper.state(step_in_flax(model, x))
    for name in own:
        np.testing.assert_allclose(fmapper.state(learned)[name], wanted[name], rtol=1e-3, atol=1e-5)
    filled = fmapper.load_state(module, {name: 0 * x for name, x in own.items()}, source=True)
    assert not any(array.any() for array in filled.state_dict().values())
    assert isinstance(filled.conv.weight, nn.Parameter)


@pytest.mark.nightly
def test_a_folder_is_saved_as_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, x = llama()
    module.save_pretrained(tmp_path / "a")
    model = fmapper.from_pretrained(tmp_path / "a", "flax", structure=True, example_inputs=(x,))
    model = step_in_flax(model, x.numpy())
    fmapper.save_pretrained(model, tmp_path / "b")
    step_in_torch(module.eval(), x)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    near(arrays_of(found), arrays_of(module), rtol=1e-3)


def test_other_models_have_one_naming():
    linear = nn.Linear(2, 2)
    with pytest.raises(fmapper.ConversionError, match="source=True"):
        fmapper.state(linear, source=True)
    flat = fmapper.convert(linear, "flax", (torch.ones(1, 2),))
    near(fmapper.state(flat, source=True), arrays_of(linear))
    filled = fmapper.load_state(flat, {"weight": np.ones((2, 2)), "bias": np.ones(2)}, source=True)
    assert fmapper.state(filled)["bias"].tolist() == [1, 1]


class Up(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(4, 4, 2, bias=False)

    def forward(self, x):
        return self.up(x)


@pytest.mark.nightly
def test_a_checkpoint_that_fits_both_namings_is_said_to(tmp_path):
    pytest.importorskip("equinox")
    module = Up()
    x = torch.randn(1, 4, 5, 5)
    model = fmapper.convert(module.eval(), "equinox", (x,), structure=True)
    path = tmp_path / "source.safetensors"
    fmapper.save(dict(module.state_dict()), path)
    with pytest.warns(fmapper.ConversionWarning, match=r"weight: the checkpoint may be of"):
        fmapper.load(path, like=model)
    loaded = fmapper.load_state(model, fmapper.load(path), source=True)
    near({"": loaded(x.numpy())}, {"": module(x).detach().numpy()})
