"""Idioms of repositories of JAX, in files for PyTorch."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
pytest.importorskip("flax")

import flax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax import lax  # noqa: E402

from fmapper_translate import NotTranscribed, transcribe  # noqa: E402


def check(made, there, *inputs):
    """A file gives what its model has given."""
    space = {}
    exec(made.code, space)
    model = eval(made.example, space)
    weights = {name: torch.from_numpy(np.array(x)) for name, x in made.weights.items()}
    model = space["load_weights"](model, weights).eval()
    given = jax.tree.map(
        lambda x: torch.from_numpy(np.array(x)) if hasattr(x, "dtype") else x, inputs
    )
    here = jax.tree.leaves(model(*given))
    for ours, theirs in zip(here, jax.tree.leaves(there), strict=True):
        assert np.allclose(ours.detach().numpy(), theirs, atol=1e-5)
    return made.code


# --- Equinox --------------------------------------------------------------------------------------


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    stages: list
    heads: dict
    dropout: eqx.nn.Dropout
    low: jax.Array
    high: jax.Array

    def __init__(self, width, key):
        self.low, self.high = jnp.array([[0.1], [0.2]]) * jnp.ones((2, width))
        ckey, skey, hkey = jax.random.split(key, 3)
        self.cell = eqx.nn.GRUCell(3, width, key=ckey)
        self.stages = []
        keys = jax.random.split(skey, 3)
        for stage in keys[1:]:
            self.stages.append([eqx.nn.Linear(width, width, key=stage), jnp.tanh])
        self.heads = {"mean": eqx.nn.Linear(width, 2, key=hkey)}
        self.dropout = eqx.nn.Dropout(0.5)

    def step(self, hidden, x):
        return self.cell(x, hidden), None

    def __call__(self, xs, enable_dropout, key):
        def run(hidden, x):
            return self.step(hidden, x)

        key, _ = (None, None) if key is None else jax.random.split(key)
        first = jnp.maximum(*[low * xs[0, 0] for low in (self.low, self.high)])
        hidden, _ = lax.scan(eqx.filter_checkpoint(run), first, xs)
        for stage in self.stages:
            for layer in stage:
                hidden = layer(hidden)
        hidden = self.dropout(hidden, inference=not enable_dropout, key=key)
        return self.heads["mean"](hidden)


def test_methods_lists_of_lists_dicts_and_keys_by_position():
    model = Recurrent(4, jax.random.PRNGKey(0))
    xs = jax.random.normal(jax.random.key(1), (5, 3))
    inputs = xs, False, jax.random.PRNGKey(2)
    made = transcribe(model, inputs, ((), {"width": 4}))
    assert "return self.step(hidden, x)" in made.code
    assert "as_part({" in made.code
    check(made, model(*inputs), xs, False)


# --- Linen ----------------------------------------------------------------------------------------


@flax.struct.dataclass
class Config:
    """What the model below is made of."""

    width: int
    heads: int = 2
    dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.xavier_uniform()
    activations: tuple = ("gelu", "linear")

    @property
    def inner(self):
        return 2 * self.width


def activation(name):
    if name == "linear":
        return lambda x: x
    return getattr(nn, name)


def positions(self, shape, width):
    return self.param("positions", nn.initializers.normal(stddev=1 / np.sqrt(width)), (1, *shape))


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, mask=None):
        config = self.config
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        x = x + nn.MultiHeadDotProductAttention(
            config.heads,
            kernel_init=nn.with_logical_partitioning(config.kernel_init, ("embed", "kv")),
        )(x, x, mask=mask)
        parts = [activation(name)(nn.Dense(config.inner, name=f"wi_{i}")(x))
                 for i, name in enumerate(config.activations)]  # fmt: skip
        return nn.Dense(config.width)(functools.reduce(operator.mul, parts))


class Scanned(nn.Module):
    @functools.partial(nn.scan, variable_broadcast="params", split_rngs={"params": False},
                       in_axes=1, out_axes=1)  # fmt: skip
    @nn.compact
    def __call__(self, carry, x):
        return nn.GRUCell(features=x.shape[-1])(carry, x)

    @staticmethod
    def begin(batch, size):
        return nn.GRUCell(features=size, parent=None).initialize_carry(
            jax.random.PRNGKey(0), (batch, size))  # fmt: skip


class Model(nn.Module):
    config: Config

    def setup(self):
        self.heads = {"mean": nn.Dense(1), "std": nn.Dense(1)}
        self.block = nn.remat(Block)(self.config)
        self.embed = nn.Embed(11, self.config.width)

    def __call__(self, inputs):
        tokens = inputs["tokens"]
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0),
                                nn.make_causal_mask(tokens), None)  # fmt: skip
        x = self.block(self.embed(tokens), mask)
        return self.heads["mean"](x), self.heads["std"](x)


class Outer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs):
        out = {}
        height, width = 2, self.config.width
        mean, out["std"] = Model(self.config, name="model")(inputs)
        x = nn.Dense(width * height)(mean)
        x = x + positions(self, x.shape[1:], width)
        _, out["rnn"] = Scanned()(Scanned.begin(x.shape[0], x.shape[-1]), x)
        return out


def test_configs_masks_lifted_transforms_and_functions_that_are_given_a_module():
    inputs = {"tokens": jax.random.randint(jax.random.key(1), (2, 5), 0, 11)}
    model = Outer(Config(4))
    variables = model.init(jax.random.key(0), inputs)
    made = transcribe((model, variables), (inputs,))
    code = check(made, model.apply(variables, inputs), inputs)
    for line in (
        "@dataclass(frozen=True)\nclass Config:\n",
        "    kernel_init: Callable = xavier_uniform()\n",
        '{"gelu": partial(F.gelu, approximate="tanh")}[name]',
        "    @scan_method(in_axes=1, out_axes=1)\n    def forward(self, carry, x):\n",
        'nn.ModuleDict({"mean": LazyLinear(1), "std": LazyLinear(1)})',
        "height, width = 2, self.config.width\n",
    ):
        assert line in code, line


class Mapped(nn.Module):
    @functools.partial(nn.vmap, variable_axes={"params": None}, split_rngs={"params": False})
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def test_other_lifted_transforms_of_methods_are_refused():
    x = jnp.ones((3, 2))
    with pytest.raises(NotTranscribed, match="vmap of a method has no counterpart"):
        transcribe((Mapped(), Mapped().init(jax.random.key(0), x)), (x,))


# --- NNX ------------------------------------------------------------------------------------------


class Functions(nnx.Module):
    def __init__(self, width, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (width, width)))
        self.filter = nnx.Param(jax.random.normal(rngs.params(), (3, width, width)))

    def drop(self, x):
        return 0.0 if x.ndim > 9 else x[..., :1] > 0

    def __call__(self, x):
        x = x * jnp.sqrt(x.shape[-1]).astype(x.dtype) / jnp.log(10000.0)
        x = lax.dot_general(x, self.kernel[...], (((2,), (0,)), ((), ())))
        x = x * (1.0 - self.drop(x))
        rows = lax.broadcasted_iota(jnp.int32, (4, 4), 0)
        x = jnp.where(rows >= lax.broadcasted_iota(jnp.int32, (4, 4), 1), x, 0.0)
        x = lax.conv_general_dilated(x, self.filter[...], (1,), "SAME",
                                     dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
        _, x = lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]),
                                    (jnp.full_like(x, 0.5), x), axis=1)  # fmt: skip
        start = lax.dynamic_slice(x, (0, 2, 0), (x.shape[0], 3, x.shape[2]))
        x = lax.dynamic_update_slice(x, 2 * start, (0, 0, 0))
        return jnp.pad(x, [(0, 0)] * 2 + [(1, 0)])


class Control(nnx.Module):
    def __call__(self, x):
        x = jnp.fft.irfft(jnp.fft.rfft(x, axis=1), n=4, axis=1)
        count, x = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))
        x = lax.switch(1, [jnp.sin, jnp.cos], x) / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
        return {"z": x, "y": x * count}


def test_functions_of_lax_and_numbers():
    model = Functions(4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 4))
    code = check(transcribe(model, (x,), ((4,), {})), model(x), x)
    assert "x * math.sqrt(x.shape[-1]) / math.log(10000.0)" in code
    assert "written by its operations" not in code


def test_control_flow_and_transforms():
    model, x = Control(), jax.random.normal(jax.random.key(1), (2, 4, 4))
    made = transcribe(model, (x,), ((), {}))
    assert "written by its operations" not in made.code
    check(made, model(x), x)
