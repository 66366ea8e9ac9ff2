"""Recurrent nets before a dense layer, in torch, for batches and lengths that vary."""

import functools

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")

WIDE, HIDDEN, OUT = 3, 4, 2


def array(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(np.float32)


WEIGHTS = {
    "w": jnp.asarray(array(WIDE, HIDDEN)),
    "u": jnp.asarray(array(HIDDEN, HIDDEN)) / 2,
    "out": jnp.asarray(array(HIDDEN, OUT)),
}


def scanned(weights, x):
    def step(h, at):
        h = jnp.tanh(at @ weights["w"] + h @ weights["u"])
        return h, h

    start = jnp.zeros((x.shape[0], HIDDEN))
    return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1) @ weights["out"]


def with_length(weights, x):
    """As Haiku's `dynamic_unroll`, which tells JAX's scan how many steps there are."""

    def step(h, at):
        h = jnp.tanh(at @ weights["w"] + h @ weights["u"])
        return h, h

    start = jnp.zeros((x.shape[0], HIDDEN))
    x = x.swapaxes(0, 1)
    return jax.lax.scan(step, start, x, x.shape[0], False)[1].swapaxes(0, 1) @ weights["out"]


def backwards(weights, x):
    def step(h, at):
        h = jnp.tanh(at @ weights["w"] + h @ weights["u"])
        return h, h

    start = jnp.zeros((x.shape[0], HIDDEN))
    last, _ = jax.lax.scan(step, start, x.swapaxes(0, 1), reverse=True)
    return last @ weights["out"]


def looped(weights, x):
    def step(i, h):
        return jnp.tanh(x[:, i] @ weights["w"] + h @ weights["u"])

    return jax.lax.fori_loop(0, x.shape[1], step, jnp.zeros((x.shape[0], HIDDEN))) @ weights["out"]


class Recurrent(nnx.Module):
    def __init__(self, cell):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(cell(WIDE, HIDDEN, rngs=rngs))
        self.dense = nnx.Linear(HIDDEN, OUT, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.rnn(x))


class LinenRecurrent(linen.Module):
    cell: type
    both: bool = False

    @linen.compact
    def __call__(self, x):
        rnn = linen.RNN(self.cell(HIDDEN))
        if self.both:
            rnn = linen.Bidirectional(rnn, linen.RNN(self.cell(HIDDEN)))
        return linen.Dense(OUT)(rnn(x))


def bound(cell, both=False):
    module = LinenRecurrent(cell, both)
    return module.bind(module.init(jax.random.key(0), jnp.ones((2, 5, WIDE))))


SLOW = pytest.mark.nightly
MODELS = [
    pytest.param(lambda: functools.partial(scanned, WEIGHTS), id="scan"),
    pytest.param(lambda: functools.partial(with_length, WEIGHTS), id="scan, length"),
    pytest.param(lambda: functools.partial(backwards, WEIGHTS), id="scan, backwards"),
    pytest.param(lambda: functools.partial(looped, WEIGHTS), id="fori_loop"),
    pytest.param(lambda: Recurrent(nnx.SimpleCell), id="nnx"),
    pytest.param(lambda: bound(linen.SimpleCell), id="linen"),
    pytest.param(lambda: Recurrent(nnx.GRUCell), id="nnx, GRU", marks=SLOW),
    pytest.param(lambda: Recurrent(nnx.OptimizedLSTMCell), id="nnx, LSTM", marks=SLOW),
    pytest.param(lambda: bound(linen.GRUCell), id="linen, GRU", marks=SLOW),
    pytest.param(lambda: bound(linen.OptimizedLSTMCell), id="linen, LSTM", marks=SLOW),
    pytest.param(lambda: bound(linen.SimpleCell, both=True), id="linen, both ways", marks=SLOW),
]


@pytest.mark.daily_cases("nnx, GRU", "nnx, LSTM", "linen, GRU", "linen, LSTM", "linen, both ways")
@pytest.mark.parametrize("make", MODELS)
def test_batches_and_lengths_vary(make):
    model = make()
    x = array(2, 5, WIDE)
    converted = fmapper.convert(model, "torch", (x,), dynamic_shapes=["b, t, _"])
    assert set(converted.program.symbols) >= {"b", "t"}
    for sizes in ((2, 5), (3, 9), (1, 2)):
        x = array(*sizes, WIDE)
        got = converted(torch.from_numpy(x)).detach().numpy()
        want = np.asarray(model(jnp.asarray(x)))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
