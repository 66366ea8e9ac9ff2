"""Files for Equinox that are transcribed from the source of models of PyTorch."""

import pathlib

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from sweeps.transcription import GOLDEN, golden_case  # noqa: E402

CORPUS = sorted(path.stem for path in pathlib.Path(GOLDEN, "to_equinox").glob("*.py"))


class Block(nn.Module):
    """Adds what two layers give."""

    def __init__(self, dim, rate=0.1):
        super().__init__()
        self.dim = dim
        self.norm = nn.LayerNorm(dim)  # first
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        h = self.fc2(F.gelu(self.fc1(self.norm(x))))
        return x + self.drop(h)


class Net(nn.Module):
    def __init__(self, width=8, depth=2, classes=3):
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, width))
        self.register_buffer("shift", torch.ones(width), persistent=False)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.2), nn.Linear(width, classes))
        nn.init.normal_(self.token, std=0.02)
        for name, p in self.named_parameters():
            if name.startswith("head") and p.dim() > 1:
                nn.init.constant_(p, 0.5)

    def forward(self, x):
        x = x * self.scale + self.shift + self.token
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(x.mean(1), 0.1, training=self.training))


@pytest.fixture(scope="module")
def transcribed():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 5, 8)
    made = transcribe(model, (x,), ((), {"depth": 2}), target="equinox")
    space = {}
    exec(made.code, space)
    exec(f"def make(key):\n    return {made.example}", space)
    weights = {name: value.numpy() for name, value in made.weights.items()}
    twin = space["load_weights"](space["make"](jax.random.key(0)), weights)
    return model, x, made, space, twin


def test_the_file_gives_what_its_model_gives(transcribed):
    model, x, *_, twin = transcribed
    for given in (x, torch.randn(3, 7, 8)):
        found = eqx.filter_jit(eqx.nn.inference_mode(twin))(given.numpy())
        assert np.allclose(found, model(given).detach().numpy(), atol=1e-5)


def test_the_file_reads_as_its_source(transcribed):
    for line in (
        "    dim: int = eqx.field(static=True)\n    norm: LayerNorm\n    fc1: Linear\n",
        "    def __init__(self, dim, rate=0.1, *, key):\n        keys = Keys(key)\n",
        "        self.norm = LayerNorm(dim)  # first\n"
        "        self.fc1 = Linear(dim, 2 * dim, key=keys())\n",
        "        return x + self.drop(h, key=keys())\n",
        "    scale: jax.Array = buffer()\n    shift: jax.Array = buffer(saved=False)\n",
        "        self.blocks = [Block(width, key=keys()) for _ in range(depth)]\n",
        "        for block in self.blocks:\n            x = block(x, key=keys())\n",
    ):
        assert line in transcribed[2].code, line


def test_arrays_begin_with_the_values_of_the_source(transcribed):
    *_, space, _ = transcribed
    model = space["Net"](width=64, key=jax.random.key(1))
    assert 0.01 < float(model.token.std()) < 0.03
    assert jnp.all(model.head[2].weight == 0.5)
    assert float(jnp.abs(model.head[2].bias).max()) < 1
    assert jnp.all(model.scale == jnp.linspace(1, 2, 64))


def test_dropout_takes_a_key_and_buffers_get_no_gradient(transcribed):
    *_, twin = transcribed
    x = jnp.ones((2, 5, 8))
    first, second = (twin(x, key=jax.random.key(seed)) for seed in (0, 1))
    assert not jnp.allclose(first, second)
    with pytest.raises(RuntimeError, match="requires a key"):
        twin(x)
    slopes = eqx.filter_grad(lambda net: (net(x, key=jax.random.key(0)) ** 2).sum())(twin)
    assert not jnp.any(slopes.scale)
    assert jnp.any(slopes.blocks[1].fc1.weight)


def test_weights_go_back_by_their_names(transcribed):
    model, _, made, space, twin = transcribed
    state = space["source_state"](twin)
    assert {name: x.shape for name, x in state.items()} == {
        name: x.shape for name, x in model.state_dict().items()
    }
    arrays = {name: x.numpy() for name, x in made.weights.items()}
    assert set(made.rules.apply(arrays)) == set(fmapper.state(twin)) - {"shift"}
    with pytest.raises(ValueError, match=r"missing: \['token'\]"):
        space["load_weights"](twin, {n: x for n, x in arrays.items() if n != "token"})


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_an_array_at_two_places_is_for_evaluation_alone():
    model, x = Twice(), torch.randn(3, 2)
    made = transcribe(model, (x,), ((), {}), target="equinox")
    assert "second.weight is first.weight" in made.only_evaluation
    _, twin = opened(made, model)
    with pytest.raises(NotImplementedError, match="for evaluation alone: second"):
        twin(x.numpy())
    found = eqx.nn.inference_mode(twin)(x.numpy())
    assert np.allclose(found, model(x).detach().numpy(), atol=1e-5)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        if x.ndim == 2:
            self.count = self.count + x[0]
        return x + self.count


def test_a_model_that_its_calls_change_is_refused():
    with pytest.raises(NotTranscribed, match="count changes when the model is called"):
        transcribe(Counting(), (torch.ones(3, 2),), ((), {}), target="equinox")


class Named(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth
        for i in range(depth):
            self.add_module(f"layer{i}", nn.Linear(2, 2))
            setattr(self, f"norm{i}", nn.LayerNorm(2))
            self.register_buffer(f"scale{i}", torch.full((2,), i + 1.0))

    def forward(self, x):
        for i in range(self.depth):
            x = getattr(self, f"norm{i}")(getattr(self, f"layer{i}")(x))
            x = x * getattr(self, f"scale{i}")
        return x


def test_attributes_that_are_named_while_a_model_is_made_are_fields():
    model, x = Named(2).eval(), torch.randn(3, 2)
    space, twin = opened(transcribe(model, (x,), ((2,), {}), target="equinox"), model)
    assert np.allclose(twin(x.numpy()), model(x).detach(), atol=1e-6)
    assert space["source_state"](twin).keys() == model.state_dict().keys()
    assert space["Named"](1, key=jax.random.key(0)).layer1 is None
    with pytest.raises(AttributeError, match="layer2"):
        space["Named"](3, key=jax.random.key(0))


def test_the_source_is_asked_first(transcribed):
    model, x, *_ = transcribed
    code = fmapper.source(model, "equinox", (x,))
    assert "transcribed from" in code
    assert "make_model" in run_file_names(code)


def run_file_names(code):
    space = {}
    exec(code, space)
    return space


def opened(made, model):
    """The names of a file, and its model with the weights of the source."""
    space = run_file_names(made.whole)
    weights = {name: model.state_dict()[name].numpy().copy() for name in made.weights}
    return space, space["load_weights"](space["make_model"](key=jax.random.key(0)), weights)


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.nightly
def test_files_of_the_corpus_are_their_golden_ones_and_are_proved(name):
    model, inputs, arguments = golden_case(f"to_equinox/{name}")
    made = transcribe(model.eval(), inputs, arguments, target="equinox")
    assert made.code == pathlib.Path(GOLDEN, "to_equinox", f"{name}.py").read_text()
    proof = made.prove(model, inputs)
    assert proof, proof


class Scaled(nn.Module):
    """Keeps what one method computes for another one, and calls modules and functions alike."""

    def __init__(self, width=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def down(self, x):
        self.scale = x.abs().mean(-1, keepdim=True)
        return x / self.scale

    def around(self, x, inner):
        return x + inner(self.norm(x))

    def forward(self, keys):
        x = self.around(self.down(keys), self.linear)
        x = self.around(x, lambda y: self.drop(self.linear(y)))
        return self.around(x, self.drop) * self.scale


def test_values_that_methods_share_within_a_call_are_in_slots():
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(4, 3)
    made = transcribe(model, (x,), target="equinox")
    assert not made.only_evaluation
    assert "scale: Slot = eqx.field(static=True)" in made.code
    assert "call_part(inner, self.norm(x), key=keys())" in made.code
    space, twin = opened(made, model)
    still = eqx.nn.inference_mode(twin)
    found = eqx.filter_jit(still)(x.numpy())
    assert np.allclose(found, model(x).detach(), atol=1e-5)
    other = space["make_model"](key=jax.random.key(1))
    assert jax.tree.structure(other) == jax.tree.structure(twin)
    first, second = (eqx.filter_jit(twin)(x.numpy(), key=jax.random.key(i)) for i in range(2))
    assert not np.allclose(first, second)


class Around(nn.Module):
    def __init__(self, net, last):
        super().__init__()
        self.net = net
        self.last = last

    def forward(self, x):
        return self.last(self.net(x))


def test_modules_that_a_model_is_given_get_keys_of_their_own():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model, x = Around(net, Around(nn.Linear(3, 3), nn.Tanh())).eval(), torch.randn(2, 3)
    made = transcribe(model, (x,), target="equinox")
    space, twin = opened(made, model)
    assert np.allclose(twin(x.numpy()), model(x).detach(), atol=1e-6)
    first = space["make_model"](key=jax.random.key(0))
    arrays = [first.net[0].weight, first.net[2].weight, first.last.net.weight]
    assert len({float(array[0, 0]) for array in arrays}) == 3


class Optional(nn.Module):
    """Has a part in one of two places."""

    def __init__(self, merged):
        super().__init__()
        if merged:
            self.merged = nn.Linear(3, 3)
        else:
            self.norm = nn.LayerNorm(3)

    def forward(self, x):
        if hasattr(self, "merged"):
            return self.merged(x)
        return self.norm(x)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Optional(False), Optional(True)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_an_attribute_that_some_objects_lack_is_none():
    model, x = Both().eval(), torch.randn(2, 3)
    made = transcribe(model, (x,), target="equinox")
    assert 'if getattr(self, "merged", None) is not None:' in made.code
    _, twin = opened(made, model)
    assert np.allclose(twin(x.numpy()), model(x).detach(), atol=1e-6)
