"""Files for PyTorch that are transcribed from the source of models of Equinox."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from fmapper import state  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from models.equinox_repositories import mlp  # noqa: E402


@pytest.fixture(scope="module")
def transcribed():
    model, inputs, arguments, options = mlp.build()
    made = transcribe(model, inputs, arguments, options)
    space = {}
    exec(made.code, space)
    twin = eval(made.example, space)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in made.weights.items()}
    return model, inputs[0], made, space, space["load_weights"](twin, weights).eval()


def test_the_file_gives_what_its_model_gives(transcribed):
    model, x, _, _, twin = transcribed
    there = eqx.nn.inference_mode(model)(x)
    assert np.allclose(twin(torch.from_numpy(np.array(x))).detach().numpy(), there, atol=1e-5)


def test_the_statements_are_those_of_the_source_without_keys(transcribed):
    for line in (
        "    def __init__(self, in_size, out_size, width=8, depth=2):\n        super().__init__()\n"
        "        (ekey, hkey, *keys) = range(depth + 2)\n",
        "        self.linear = nn.Linear(size, size, bias=False)\n",
        '        self.blocks = Parts([Residual(width, partial(F.gelu, approximate="tanh")) for',
        "        self.extra_bias = nn.Parameter(torch.ones(out_size))\n",
        "        x = self.embed(x)\n",
        "            x = vmap(block)(x)  # over the batch\n",
        "        x = self.dropout(x)\n",
    ):
        assert line in transcribed[2].code, line


def test_the_class_is_made_at_another_width_and_trains(transcribed):
    model = transcribed[3]["Net"](2, 1, width=4, depth=3)
    model(torch.randn(6, 2)).square().sum().backward()
    assert float(model.blocks[2].linear.weight.grad.abs().max()) > 0


def test_weights_go_to_the_file_and_back_by_rules(transcribed):
    model, _, made, space, twin = transcribed
    arrays = {name: np.array(x) for name, x in made.weights.items()}
    assert arrays.keys() == state(model).keys() == space["source_state"](twin).keys()
    there = made.rules.apply(arrays)
    assert there.keys() == twin.state_dict().keys()
    back = made.rules.inverse().apply(there)
    assert all(np.array_equal(back[name], x) for name, x in arrays.items())


class Normal(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")

    def __call__(self, x):
        return x


class Weightless(eqx.Module):
    norm: eqx.nn.LayerNorm

    def __init__(self):
        self.norm = eqx.nn.LayerNorm(3, use_weight=False)

    def __call__(self, x):
        return self.norm(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Normal, "BatchNorm is not in the table of layers"),
        (Weightless, "LayerNorm with use_weight=False has no counterpart"),
        (lambda: eqx.nn.Linear(3, 3, key=jax.random.key(0)), "Linear is Equinox's own"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(model, reason):
    with pytest.raises(NotTranscribed, match=reason):
        transcribe(model(), (jnp.ones(3),), ((), {}))
