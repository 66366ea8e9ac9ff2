"""Layers that files for PyTorch have in the place of Flax's, beside Flax's own."""

import itertools

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.torch import layers, norms, recurrent, tables, weights  # noqa: E402

RNGS = nnx.Rngs(0)


def filled(ours, theirs):
    """One of our layers with other arrays than zeros and ones, which one of Flax's gets too."""
    numbers = np.random.default_rng(0)
    arrays = {
        ".".join(map(str, path)): (variable, numbers.normal(size=variable.shape).astype("float32"))
        for path, variable in nnx.iter_graph(theirs)
        if isinstance(variable, nnx.Variable) and not tables.is_random(variable)
    }
    for variable, array in arrays.values():
        variable.set_value(jnp.asarray(array))
    return weights.load_weights(ours, {name: array for name, (_, array) in arrays.items()})


def same(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.allclose(x.detach().numpy(), y, atol=1e-5) for x, y in pairs)


CELLS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_gives_what_flax_gives(name):
    theirs = getattr(nnx, name)(3, 5, rngs=RNGS)
    ours = filled(getattr(recurrent, name)(3, 5), theirs)
    x = np.random.default_rng(1).normal(size=(2, 3)).astype("float32")
    first = theirs.initialize_carry(x.shape, nnx.Rngs(0))
    assert same(ours.initialize_carry(x.shape), first)
    there, here = theirs(first, x), ours(ours.initialize_carry(x.shape), torch.tensor(x))
    assert same(here, there)
    assert same(ours(here[0], torch.tensor(x)), theirs(there[0], x))


@pytest.mark.parametrize(
    ("time_major", "reverse", "keep_order", "lengths"),
    [*itertools.product((False, True), (False, True), (False, True), (None, [4, 1, 2]))],
)
def test_sequences_are_read_as_flax_reads_them(time_major, reverse, keep_order, lengths):
    theirs = nnx.RNN(nnx.GRUCell(3, 5, rngs=RNGS), time_major=time_major, reverse=reverse)
    ours = filled(recurrent.RNN(recurrent.GRUCell(3, 5), time_major, reverse=reverse), theirs)
    x = np.random.default_rng(1).normal(size=(4, 3, 3) if time_major else (3, 4, 3))
    x = x.astype("float32")
    options = {"keep_order": keep_order, "return_carry": True}
    given = {} if lengths is None else {"seq_lengths": torch.tensor(lengths)}
    there = theirs(x, **options, **{name: np.asarray(y) for name, y in given.items()})
    assert same(ours(torch.tensor(x), **options, **given), there)


@pytest.mark.parametrize("lengths", [None, [4, 1, 2]])
def test_both_directions_are_merged(lengths):
    theirs = nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(3, 5, rngs=RNGS)), nnx.RNN(nnx.LSTMCell(3, 4, rngs=RNGS)),
        return_carry=True,
    )  # fmt: skip
    ahead, back = recurrent.RNN(recurrent.GRUCell(3, 5)), recurrent.RNN(recurrent.LSTMCell(3, 4))
    ours = filled(recurrent.Bidirectional(ahead, back, return_carry=True), theirs)
    x = np.random.default_rng(1).normal(size=(3, 4, 3)).astype("float32")
    given = {} if lengths is None else {"seq_lengths": torch.tensor(lengths)}
    there = theirs(x, **{name: np.asarray(y) for name, y in given.items()})
    assert same(ours(torch.tensor(x), **given), there)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (norms.InstanceNorm(4, epsilon=1e-3), nnx.InstanceNorm(4, epsilon=1e-3, rngs=RNGS)),
        (norms.GroupNorm(4, 2), nnx.GroupNorm(4, num_groups=2, rngs=RNGS)),
        (norms.InstanceNorm(4, use_bias=False), nnx.InstanceNorm(4, use_bias=False, rngs=RNGS)),
        (layers.PReLU(0.25), nnx.PReLU(0.25)),
        (layers.LoRALinear(4, 3, lora_rank=2), nnx.LoRALinear(4, 3, lora_rank=2, rngs=RNGS)),
        (
            layers.LoRA(4, 2, 3, base_module=layers.Linear(4, 3)),
            nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=RNGS), rngs=RNGS),
        ),
    ],
)
def test_a_layer_gives_what_flax_gives(ours, theirs):
    x = np.random.default_rng(1).normal(size=(2, 5, 3, 4)).astype("float32")
    y = filled(ours, theirs)(torch.tensor(x))
    assert same(y, theirs(x))
    y.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in ours.parameters())


def test_a_batch_norm_counts_what_its_mask_shows():
    theirs, x = nnx.BatchNorm(4, rngs=RNGS), np.arange(24, dtype="float32").reshape(2, 3, 4)
    ours = filled(norms.BatchNorm(4), theirs)
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)[..., None]
    assert same(ours(torch.tensor(x), mask=torch.tensor(mask)), theirs(x, mask=mask))
    assert same([ours.running_mean, ours.running_var], [theirs.mean[...], theirs.var[...]])


@pytest.mark.parametrize(
    ("kind", "name"), [(nnx.Conv, "Conv"), (nnx.ConvTranspose, "ConvTranspose")]
)
def test_kernels_are_read_in_flaxs_layout(kind, name):
    theirs = kind(3, 5, (2, 4), rngs=RNGS)
    ours = filled(getattr(layers, name)(3, 5, (2, 4)), theirs)
    code = tables.LAYERS[kind].read("kernel").format("ours")
    assert same(eval(code, {"ours": ours}), theirs.kernel[...])


class Tagger(nnx.Module):
    def __init__(self, width, *, rngs):
        self.rnn = nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(width, 3, rngs=rngs)), nnx.RNN(nnx.GRUCell(width, 3, rngs=rngs))
        )
        self.head = nnx.LoRALinear(6, 2, lora_rank=1, rngs=rngs)

    def __call__(self, x, lengths):
        return self.head(self.rnn(x, seq_lengths=lengths))


@pytest.mark.nightly
def test_a_model_with_such_layers_is_proved():
    model, x = Tagger(4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, 5, 4))
    inputs = (x, jnp.array([5, 2]))
    made = transcribe(model, inputs, ((4,), {}))
    assert made.prove(model, inputs)
    assert not made.fallen


def test_a_key_among_the_inputs_is_named():
    model, x = Tagger(4, rngs=nnx.Rngs(0)), jnp.ones((2, 5, 4))
    with pytest.raises(NotTranscribed, match="Tagger is called with a key of random numbers"):
        transcribe(model, (x, jax.random.key(0)), ((4,), {}))


class Pair(linen.Module):
    @linen.compact
    def __call__(self, x):
        cells = (linen.RNN(linen.LSTMCell(3, name=None)), linen.RNN(linen.GRUCell(3)))
        return linen.PReLU()(linen.InstanceNorm()(linen.Bidirectional(*cells)(x)))


@pytest.mark.nightly
def test_a_model_of_linen_with_such_layers_is_proved():
    module, x = Pair(), jax.random.normal(jax.random.key(1), (2, 5, 4))
    model = module, module.init(jax.random.key(0), x)
    made = transcribe(model, (x,))
    assert made.prove(model, (x,))
    assert not made.fallen
