"""Files for PyTorch that are transcribed from the source of models of NNX."""

import pathlib
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fmapper import state  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from models.nnx_repositories.compiled import Compiled  # noqa: E402
from sweeps.transcription import golden_case  # noqa: E402

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "transcribed"


@dataclass
class Config:
    """The sizes of the model below."""

    width: int = 4
    depth: int = 2


class Block(nnx.Module):
    """Adds what a layer gives."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(config.width, config.width, dtype=None, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.scale = nnx.Param(jnp.full((config.width,), 0.5))  # of what is added
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1.0
        # the mean is over all but the features
        y = jnp.tanh(self.linear(x)) - jnp.mean(x, axis=(0, 1), keepdims=True)
        x += self.dropout(y) * self.scale
        return x.at[:, 0].set(1.0)


class Model(nnx.Module):
    def __init__(self, config, classes=3, *, rngs: nnx.Rngs):
        self.config = config
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, classes, rngs=rngs)

    def __call__(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x) * (i + 1)
        if x.shape[1] > 9:
            raise ValueError("it is too long")
        return self.head(self.norm(x))


def run(made):
    """The names of a file, and the model that it makes as its source was made."""
    space = {}
    exec(made.code, space)
    model = eval(made.example, space)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in made.weights.items()}
    return space, space["load_weights"](model, weights).eval()


@pytest.fixture(scope="module")
def transcribed():
    model = Model(Config(), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 4))
    made = transcribe(model, (x,), ((Config(),), {}))
    model.eval()
    return model, x, made, *run(made)


def test_the_file_gives_what_its_model_gives_and_leaves_its_input_alone(transcribed):
    model, x, _, _, twin = transcribed
    given = torch.from_numpy(np.array(x))
    assert np.allclose(twin(given).detach().numpy(), model(x), atol=1e-6)
    assert np.array_equal(given.numpy(), x)


def test_the_statements_are_those_of_the_source(transcribed):
    for line in (
        "    def __init__(self, config: Config):\n        super().__init__()\n"
        "        self.linear = Linear(config.width, config.width)",
        "nn.Parameter(torch.full((config.width,), 0.5))  # of what is added",
        "        # the mean is over all but the features\n        y = torch.tanh(self.linear(x))",
        "        x = x + self.dropout(y) * self.scale\n",
        "    def __init__(self, config, classes=3):",
        "nn.ModuleList([Block(config) for _ in range(config.depth)])",
        "        for i, block in enumerate(self.blocks):\n            x = block(x) * (i + 1)\n",
        "        if x.shape[1] > 9:\n            raise ValueError('it is too long')",
    ):
        assert line.replace("'", '"') in transcribed[2].code


def test_the_top_class_takes_the_sources_arguments_and_trains(transcribed):
    *_, space, _ = transcribed
    model = space["Model"](space["Config"](width=6, depth=3), classes=2)
    assert model(torch.ones(3, 7, 6)).shape == (3, 7, 2)
    model(torch.randn(3, 7, 6)).square().sum().backward()
    assert float(model.blocks[2].linear.weight.grad.abs().max()) > 0
    assert float(model.blocks[2].calls) == 2


def test_weights_go_to_the_file_and_back_by_rules(transcribed):
    *_, made, _, twin = transcribed
    arrays = {name: np.array(x) for name, x in made.weights.items()}
    there = made.rules.apply(arrays)
    assert there.keys() == twin.state_dict().keys()
    assert all(np.array_equal(there[n], x.numpy()) for n, x in twin.state_dict().items()
               if "calls" not in n)  # fmt: skip
    back = made.rules.inverse().apply(there)
    assert all(np.array_equal(back[name], x) for name, x in arrays.items())


def test_the_state_of_a_file_has_the_names_of_the_source(transcribed):
    model, _, _, space, twin = transcribed
    names = {name for name in state(model) if ".rngs." not in name}
    assert space["source_state"](twin).keys() == names


def test_compiled_functions_are_those_of_the_source_even_if_they_ran_before():
    model, x = Compiled(), jnp.ones((2, 3))
    model(x)
    made = transcribe(model, (x,))
    assert "def double(x):\n    return x * 2.0\n" in made.code
    assert "        return double(x) + double(x[:1])\n" in made.code


class Outer(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


class Shuffled(nnx.Module):
    def __init__(self):
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        return x + jax.random.permutation(self.rngs(), 3)


class Counting(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        with jax.named_scope("norm"):
            return self.norm(x)


class Half(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Shuffled(), r"Shuffled.__call__: .*jax.random.permutation has no counterpart"),
        (Counting(), r"Counting.__call__: .*with has no counterpart; and .* changes arrays"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(model, reason):
    with pytest.raises(NotTranscribed, match=reason):
        transcribe(model, (jnp.ones((4, 3)),), ((), {}))


class Loops(nnx.Module):
    """Has loops and maps of JAX, and a method with a statement that files do not have."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.cell = nnx.Linear(6, 3, rngs=rngs)
        self.unused = nnx.Linear(3, 3, rngs=rngs)
        self.mix = nnx.Einsum("bi,ij->bj", (3, 3), (3,), rngs=rngs)

    def step(self, carry, row):
        new = jnp.tanh(self.cell(jnp.concatenate([carry, row])))
        return new, {"new": new, "old": carry}

    def scope(self, x):
        with jax.named_scope("product"):
            return x @ self.cell.kernel[:3]

    def __call__(self, x):
        last, rows = jax.lax.scan(self.step, jnp.zeros(3), x)
        lengths = jax.vmap(lambda row: jnp.dot(row, row))(x)
        x = jax.lax.cond(lengths.sum() > 1.0, lambda a: a + 1.0, lambda a: a - 1.0, x)
        x = jax.lax.fori_loop(0, 3, lambda i, a: a * i + a, self.mix(x))
        return self.scope(x) + last + rows["old"] + jnp.unwrap(x) + lengths[:, None]


@pytest.mark.nightly
def test_loops_and_maps_are_those_of_the_source_and_what_is_unknown_is_its_operations():
    model, x = Loops(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (4, 3))
    made = transcribe(model, (x,), ((), {}))
    for line in (
        "scan(self.step, torch.zeros(3, device=x.device), x)",
        "vmap(lambda row: row @ row)(x)",
        "cond(lengths.sum() > 1.0, lambda a: a + 1.0, lambda a: a - 1.0, x)",
        "fori_loop(0, 3, lambda i, a: a * i + a, self.mix(x))",
        "# written by its operations: `with jax.named_scope('product'):`: with has no counterpart",
        "        return Loops_scope(x, self.cell.weight.T)\n",
        "+ unwrap(x) + lengths[:, None]\n",
    ):
        assert line in made.code
    *_, twin = run(made)
    longer = jax.random.normal(jax.random.key(2), (6, 3))
    there = twin(torch.from_numpy(np.array(longer))).detach().numpy()
    assert np.allclose(there, model(longer), atol=1e-5)
    proof = made.prove(model, (x,))
    assert proof, proof


class Sorting(nnx.Module):
    def __init__(self, axis):
        self.axis = axis

    def scale(self, x):
        with jax.named_scope("scale"):
            return x * (self.axis + 2)

    def __call__(self, x):
        return self.scale(jnp.sort(x, axis=self.axis, descending=True))


def test_a_call_that_has_no_counterpart_is_written_by_its_operations():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    made = transcribe(Sorting(1), (x,))
    assert "        return self.scale(sort(x, axis=self.axis))\n" in made.code
    space, twin = run(made)
    given = torch.from_numpy(np.array(x))
    assert np.array_equal(twin(given).numpy(), 3 * np.sort(x)[:, ::-1])
    for called in (space["Sorting"](0), space["Sorting"](0).scale):
        with pytest.raises(AssertionError, match="another value has other operations"):
            called(given)


class Positions(nnx.Module):
    def __call__(self, x):
        return x + self.numbers(x)

    def numbers(self, x):
        with jax.named_scope("numbers"):
            return jnp.sort(-jnp.arange(x.shape[0]), descending=True)[:, None]


def test_a_function_of_the_sizes_of_an_array_alone_is_not_written_for_one_size():
    with pytest.raises(NotTranscribed, match="depends on the sizes of an array alone"):
        transcribe(Positions(), (jnp.ones((4, 3)),))


class Chosen(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, broadcast_dims=(1,), rngs=rngs)

    def __call__(self, x, mask):
        return self.drop(jnp.where(mask, x, 0.0))


def test_numbers_choose_elements_and_masks_of_dropout_are_shared():
    model = Chosen(nnx.Rngs(0))
    x, mask = jnp.ones((40, 3)), jnp.array([0.0, 1.0, 2.0])
    made = transcribe(model, (x, mask))
    *_, twin = run(made)
    given = torch.ones(40, 3), torch.tensor([0.0, 1.0, 2.0])
    assert twin(*given)[0].tolist() == [0, 1, 1]
    rows = twin.train()(*given)
    assert torch.equal(rows[:, 1], rows[:, 2])
    assert set(rows[:, 1].tolist()) == {0.0, 2.0}


def test_layers_in_another_precision_are_refused():
    with pytest.raises(NotTranscribed, match=r"Half.__init__: .*dtype=jnp.bfloat16"):
        transcribe(Half(rngs=nnx.Rngs(0)), (jnp.ones((4, 3)),), ((), {}))


def test_a_target_without_a_transcriber_is_refused():
    with pytest.raises(NotTranscribed, match="is not a model that is transcribed for equinox"):
        transcribe(Outer(jnp.tanh), (jnp.ones(3),), target="equinox")


def test_models_that_are_flaxs_own_are_refused():
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(NotTranscribed, match="Sequential is Flax's own"):
        transcribe(model, (jnp.ones((2, 3)),))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*access is now deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    sorted(
        str(path.relative_to(GOLDEN).with_suffix(""))
        for path in GOLDEN.rglob("*.py")
        if path.parent.name != "to_equinox"
    ),
)
def test_files_of_the_corpus_are_their_golden_ones_and_are_proved(name):
    model, inputs, arguments, *options = golden_case(name)
    made = transcribe(model, inputs, arguments, *options)
    assert made.code == (GOLDEN / f"{name}.py").read_text()
    first = inputs[0] if isinstance(inputs, list) else inputs
    proof = made.prove(model, first, *options)
    assert proof, proof
