"""`load_weights` of files takes what the state of the source has, and refuses anything else."""

from __future__ import annotations

import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen, nnx  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402

IMAGES = np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32)


class OfTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.unused = nn.BatchNorm2d(3), nn.Linear(3, 5), nn.Linear(2, 2)
        self.head, self.tied = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("table", torch.arange(20.0))
        self.register_buffer("rates", torch.arange(12.0), persistent=False)

    def forward(self, x):
        x = self.fc(self.norm(x).mean((2, 3)))
        return self.tied(self.head(x)) + self.table.sum() * self.rates.sum()


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.fc = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 5, rngs=rngs)

    def __call__(self, x):
        return self.fc(self.norm(x).mean((1, 2)))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=True, name="norm")(x)
        return linen.Dense(5, name="fc")(x.mean((1, 2)))


def of_torch():
    model = OfTorch().eval()
    x = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    state = {name: array.numpy() for name, array in model.state_dict().items()}
    return model, (x,), state, model(x).detach(), "running_mean", (1, 3)


def of_nnx():
    model = OfNNX(nnx.Rngs(0))
    model.eval()
    state = {name: np.array(array) for name, array in fmapper.state(model).items()}
    return model, (jnp.asarray(IMAGES),), state, model(IMAGES), "mean", (3, 1)


def of_linen():
    module = OfLinen()
    variables = module.init(jax.random.key(0), IMAGES)
    state = {name: np.array(array) for name, array in fmapper.state(variables).items()}
    given = (jnp.asarray(IMAGES),)
    return (module, variables), given, state, module.apply(variables, IMAGES), "mean", (3, 1)


slow = pytest.mark.nightly
CASES = [
    (of_torch, "flax"),
    pytest.param((of_torch, "equinox"), marks=slow),
    pytest.param((of_torch, "jax"), marks=slow),
    pytest.param((of_nnx, "torch"), marks=slow),
    (of_linen, "torch"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def case(request):
    make, to = request.param
    model, inputs, state, expected, mean, shape = make()
    module = types.ModuleType(f"written_for_{to}")
    sys.modules[module.__name__] = module
    exec(fmapper.source(model, to, inputs), vars(module))

    def run(state, **options):
        name = next(n for n in ("OfTorch", "OfNNX", "OfLinen", "of_torch") if hasattr(module, n))
        if to == "torch":
            net = module.load_weights(getattr(module, name)(), state, **options).eval()
            return net(torch.from_numpy(IMAGES)).detach()
        x = jnp.asarray(inputs[0].numpy())
        if to == "jax":
            trees = getattr(module, f"init_{name}")(jax.random.key(0))
            trees = module.load_weights(trees, state, **options)
            return getattr(module, name)(*trees, x)
        if to == "equinox":
            net = getattr(module, name)(key=jax.random.key(0))
            return module.eqx.nn.inference_mode(module.load_weights(net, state, **options))(x)
        net = module.load_weights(getattr(module, name)(rngs=nnx.Rngs(0)), state, **options)
        net.eval()
        return net(x)

    full = {name.rpartition("norm.")[2]: name for name in state if "norm." in name}[mean]
    weight = next(name for name in state if name.endswith(("fc.weight", "fc.kernel")))
    run(state)  # which compiles
    yield run, state, expected, full, weight, shape
    del sys.modules[module.__name__]


@pytest.mark.nightly
def test_the_state_of_the_source_is_taken(case):
    run, state, expected, *_ = case
    np.testing.assert_allclose(run(state), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.nightly
def test_anything_else_is_refused_by_name(case):
    run, state, _, mean, weight, shape = case
    for name in (mean, weight, *(name for name in state if name == "table")):
        short = name.removeprefix("params.").removeprefix("batch_stats.")
        with pytest.raises(ValueError, match=rf"the state lacks \['{short}'\]"):
            run({key: array for key, array in state.items() if key != name})
        with pytest.raises(ValueError, match=rf"{short}.*\(1,\)"):
            run({**state, name: np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=r"\['more.weight'\] are not in the model"):
        run({**state, "more.weight": np.ones(2)})
    with pytest.raises(ValueError, match="instead of"):
        run({**state, weight: np.ones(shape, np.float32)})


def test_what_is_missing_stays_where_that_is_wanted(case):
    run, state, _, mean, *_ = case
    lacking = {key: array for key, array in state.items() if key != mean}
    assert run({**lacking, "more.weight": np.ones(2)}, strict=False) is not None
