"""Files for PyTorch that are transcribed from the source of models of Linen."""

import functools

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fmapper import state  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402


class Block(nn.Module):
    """Adds what layers give."""

    width: int
    norm: object = nn.LayerNorm

    @nn.compact
    def __call__(self, x):
        y = self.norm()(nn.Dense(self.width, use_bias=False)(x))
        if x.shape != y.shape:
            x = nn.Dense(self.width, name="projection")(x)  # only where sizes differ
        return x + y


class Model(nn.Module):
    widths: tuple[int, ...]
    classes: int = 3
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train: bool):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.5)
        for width in self.widths:
            for _ in range(2):
                x = Block(width, norm)(x)
            x = nn.relu(x)
        calls = self.variable("counters", "calls", lambda: jnp.zeros(()))
        calls.value += 1.0
        drop = nn.Dropout(self.rate, deterministic=not train)
        size = self.classes + 1
        gain = self.param("gain", nn.initializers.normal(), (1, x.shape[1], 1))
        return nn.Dense(size)(drop(x * gain))


def run(made):
    """The names of a file, and the model that it makes as its source was made."""
    space = {}
    exec(made.code, space)
    model = eval(made.example, space)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in made.weights.items()}
    return space, space["load_weights"](model, weights).eval()


@pytest.fixture(scope="module")
def transcribed():
    module, x = Model((4, 6)), jax.random.normal(jax.random.key(1), (2, 5, 4))
    variables = module.init(jax.random.key(0), x, train=False)
    made = transcribe((module, variables), (x,), options={"train": False})
    return module, variables, x, made, *run(made)


def test_the_file_gives_what_its_model_gives_in_both_modes(transcribed):
    module, variables, x, made, space, _ = transcribed
    twin, given = run(made)[1], torch.from_numpy(np.array(x))
    there, _ = module.apply(variables, x, train=False, mutable=["counters"])
    assert np.allclose(twin(given, train=False).detach().numpy(), there, atol=1e-5)
    still = Model((4, 6), rate=0.0)  # so that nothing is drawn
    there, new = still.apply(variables, x, train=True, mutable=["counters", "batch_stats"])
    for part in twin.modules():
        part.p = 0.0
    assert np.allclose(twin(given, train=True).detach().numpy(), there, atol=1e-5)
    after = state({"params": variables["params"], **new})
    for name, array in space["source_state"](twin).items():
        wanted = after[name] + 1 if name == "counters.calls" else after[name]
        assert np.allclose(array.numpy(), wanted, atol=1e-5), name


def test_layers_of_a_call_are_made_in_the_constructor_under_their_own_names(transcribed):
    code = transcribed[3].code
    for line in (
        "    def __init__(self, width: int, norm: object = LazyLayerNorm):\n"
        "        super().__init__()\n        self.width = width\n        self.norm = norm\n",
        "        self.Dense_0 = LazyLinear(self.width, use_bias=False)\n",
        "        y = self.BatchNorm_0(self.Dense_0(x))\n",
        'late(self, "projection", lambda: LazyLinear(self.width))(',
        "        norm = partial(LazyBatchNorm, momentum=0.5)\n",
        '{next(block_numbers)}", Block(width, norm))\n',
        '                x = getattr(self, f"Block_{next(block_numbers)}").train(train)(x)\n',
        "        size = self.classes + 1\n        self.Dense_0 = LazyLinear(size)\n",
        "        drop = self.Dropout_0\n",
        "        return self.Dense_0(drop(x * gain, deterministic=not train))\n",
        '    source_arrays = {"calls": ("calls", None, "counters")}\n',
    ):
        assert line in code, line


def test_the_class_is_made_at_another_width_and_trains(transcribed):
    space = transcribed[-2]
    model = space["initialize"](space["Model"]((3, 3, 8), classes=1), torch.ones(3, 5, 3), False)
    assert {name for name, _ in model.named_children()} == {
        *(f"Block_{at}" for at in range(6)), "Dense_0", "Dropout_0",
    }  # fmt: skip
    assert float(model.calls) == 1
    before = model.Block_0.BatchNorm_0.running_mean.clone()
    model(torch.randn(3, 5, 3), True).square().sum().backward()
    assert float(model.Block_5.Dense_0.weight.grad.abs().max()) > 0
    assert not torch.equal(before, model.Block_0.BatchNorm_0.running_mean)


def test_weights_go_to_the_file_and_back_by_rules(transcribed):
    _, variables, _, made, space, twin = transcribed
    arrays = {name: np.array(x) for name, x in made.weights.items()}
    assert arrays.keys() == state(variables).keys() == space["source_state"](twin).keys()
    there = made.rules.apply(arrays)
    assert there.keys() == twin.state_dict().keys()
    back = made.rules.inverse().apply(there)
    assert all(np.array_equal(back[name], x) for name, x in arrays.items())


class Widened(nn.Module):
    @nn.compact
    def __call__(self, x, width: int = 4):
        return nn.Dense(width)(x)


class Normal(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(3))(x)


class Base(nn.Module):
    width: int = 3


class Heir(Base):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, dtype=jnp.bfloat16)(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Widened(), r"Dense\(width\)` depends on the argument width of the call"),
        (Normal(), "WeightNorm is not in the table of layers"),
        (Heir(), "Heir inherits the fields width: name them in its own class"),
        (Half(), "a layer with dtype=jnp.bfloat16 has no counterpart"),
        (nn.Dense(3), "Dense is Flax's own"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(module, reason):
    x = jnp.ones((2, 3))
    with pytest.raises(NotTranscribed, match=reason):
        transcribe((module, module.init(jax.random.key(0), x)), (x,))


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(x))


@pytest.mark.nightly
def test_draws_are_compared_though_the_call_has_no_keys():
    x = jnp.ones((2, 3))
    model = Drops(), Drops().init(jax.random.key(0), x)
    proof = transcribe(model, (x,)).prove(model, (x,))
    assert proof, proof
    assert proof.errors["train dropout"] > 0


class Counted(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        self.sow("losses", "size", jnp.sum(x**2))
        return x


def test_what_a_call_collects_is_not_lost():
    module, x = Counted(), jnp.ones((2, 4))
    model = module, {"params": module.init(jax.random.key(0), x)["params"]}
    with pytest.raises(NotTranscribed, match="collects losses, which a file does not give"):
        transcribe(model, (x,), options={"mutable": ["losses"]})
    assert "sow" not in transcribe(model, (x,)).code
