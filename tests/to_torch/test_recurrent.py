"""LSTM and GRU cells in a scan are torch's, in any way to write them, and only they are."""

import functools

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

import fmapper  # noqa: E402
from support.from_jax import check, same  # noqa: E402

RNG = np.random.default_rng(0)
STEPS, BATCH, WIDTH, SIZE = 6, 3, 4, 5


def array(*shape):
    return (0.5 * RNG.normal(size=shape)).astype(np.float32)


WEIGHTS = array(WIDTH, 4 * SIZE), array(SIZE, 4 * SIZE), array(4 * SIZE)
X = array(STEPS, BATCH, WIDTH)
STATES = array(BATCH, SIZE), array(BATCH, SIZE)


def update(i, f, g, o, c):
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def in_order(order, *, reverse=False):
    """The gates in any order, the hidden state first."""

    def function(x, w, u, b, h, c):
        def step(carry, x):
            h, c = carry
            parts = dict(zip(order, jnp.split(x @ w + h @ u + b, 4, axis=-1), strict=True))
            c, h = update(*(parts[name] for name in "ifgo"), c)
            return (h, c), h

        return jax.lax.scan(step, (h, c), x, reverse=reverse)

    return function


def joined(x, m, b, h, c):
    """As Haiku: one product, and one more for what is kept."""

    def step(carry, x):
        h, c = carry
        i, g, f, o = jnp.split(jnp.concatenate([x, h], -1) @ m + b, 4, -1)
        c, h = update(i, f + 1.0, g, o, c)
        return (h, c), h

    return jax.lax.scan(step, (h, c), x)


def of_one(x, w, u, b, h, c):
    """As Equinox: no batch, and matrices in front."""

    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(w.T @ x + b + u.T @ h, 4)
        c, h = update(i, f, g, o, c)
        return (h, c), None

    return jax.lax.scan(step, (h, c), x)[0]


def without_biases(x, w, u, h, c):
    def step(carry, x):
        c, h = carry
        i, f, g, o = jnp.split(h @ u + x @ w, 4, axis=1)
        c, h = update(i, f, g, o, c)
        return (c, h), (h, h)

    return jax.lax.scan(step, (c, h), x)


def calls(model):
    return [node.target.__name__ for node in model.graph.nodes if node.op == "call_function"
            and node.target.__name__ in ("lstm", "gru", "scan")]  # fmt: skip


MATRIX = np.concatenate(WEIGHTS[:2])
TURNED = [np.ascontiguousarray(w.T) for w in WEIGHTS[:2]]
WRITTEN = {
    "ifgo": (in_order("ifgo"), (X, *WEIGHTS, *STATES)),
    "ofgi": (in_order("ofgi"), (X, *WEIGHTS, *STATES)),
    "from the end": (in_order("figo", reverse=True), (X, *WEIGHTS, *STATES)),
    "one product": (joined, (X, MATRIX, WEIGHTS[2], *STATES)),
    "no batch": (
        lambda x, w, u, b, h, c: of_one(x, w.T, u.T, b, h, c),
        (X[:, 0], *TURNED, WEIGHTS[2], STATES[0][0], STATES[1][0]),
    ),
    "no batch, matrices as they are": (
        of_one,
        (X[:, 0], *WEIGHTS, STATES[0][0], STATES[1][0]),
    ),
    "no biases": (without_biases, (X, *WEIGHTS[:2], *STATES)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITTEN)
def test_an_lstm_is_one_call(name):
    function, args = WRITTEN[name]
    assert calls(check(function, *args)) == ["lstm"]


def other_activation(x, w, u, b, h, c):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.sin(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (h, c), x)


def old_cell_shown(x, w, u, b, h, c):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        new = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), new), h

    return jax.lax.scan(step, (h, c), x)


def cells_given(x, w, u, b, h, c):
    def step(carry, x):
        h, c = carry
        c, h = update(*jnp.split(x @ w + h @ u + b, 4, axis=-1), c)
        return (h, c), c

    return jax.lax.scan(step, (h, c), x)


def peephole(x, w, u, b, h, c):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        c, h = update(i + c, f, g, o, c)
        return (h, c), h

    return jax.lax.scan(step, (h, c), x)


def masked(x, w, u, b, h, c):
    """What is past the end of a text leaves the states as they are."""

    def step(carry, given):
        x, seen = given
        h, c = carry
        new_c, new_h = update(*jnp.split(x @ w + h @ u + b, 4, axis=-1), c)
        h, c = jnp.where(seen, new_h, h), jnp.where(seen, new_c, c)
        return (h, c), h

    return jax.lax.scan(step, (h, c), (x, jnp.arange(STEPS) < 4))


def twice_the_input(x, w, u, b, h, c):
    def step(carry, x):
        h, c = carry
        c, h = update(*jnp.split(x @ w + x @ w + h @ u + b, 4, axis=-1), c)
        return (h, c), h

    return jax.lax.scan(step, (h, c), x)


NEARLY = [other_activation, old_cell_shown, cells_given, peephole, masked, twice_the_input]


@pytest.mark.nightly
@pytest.mark.parametrize("function", NEARLY, ids=lambda f: f.__name__)
def test_what_is_nearly_an_lstm_is_a_loop(function):
    assert calls(check(function, X, *WEIGHTS, *STATES)) == ["scan"]


@pytest.mark.nightly
@pytest.mark.parametrize("cell", ["LSTMCell", "OptimizedLSTMCell"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_cells_of_flax(cell, reverse):
    nnx = pytest.importorskip("flax.nnx")
    made = getattr(nnx, cell)(WIDTH, SIZE, rngs=nnx.Rngs(0))
    net = nnx.RNN(made, reverse=reverse)
    x = X.transpose(1, 0, 2)
    model = fmapper.convert(net, "torch", (x,)).eval()
    assert calls(model) == ["lstm"]
    assert fmapper.verify(net, model, x)
    model(torch.tensor(x)).square().sum().backward()

    gradients = nnx.grad(lambda net: jnp.square(net(x)).sum())(net)
    for path, want in nnx.to_flat_state(gradients):
        same(functools.reduce(getattr, path, model).grad, want[...])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in forward mode
def test_odd_numbers_and_other_uses():
    function, args = WRITTEN["ifgo"]
    model = fmapper.convert(function, "torch", args)
    inputs = [torch.tensor(a) for a in args]
    for value in (np.nan, np.inf, -np.inf, 1e30, 300.0):
        x = X.copy()
        x[2, 1, 0] = value
        got = model(torch.tensor(x), *inputs[1:])[1].numpy()
        want = np.asarray(function(x, *args[1:])[1])
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    want = model(*inputs)[1]
    mapped = torch.func.vmap(lambda x: model(x, *inputs[1:])[1])(torch.stack([inputs[0]] * 2))
    torch.testing.assert_close(mapped[1], want)
    tangent = torch.func.jvp(lambda x: model(x, *inputs[1:])[1], (inputs[0],), (inputs[0],))[1]
    assert torch.isfinite(tangent).all()
    plain = fmapper.convert(function, "torch", args, fused=False)
    assert calls(plain) == ["scan"]
    torch.testing.assert_close(plain(*inputs)[1], want)


# --- GRU ------------------------------------------------------------------------------------------

GRU = array(WIDTH, 3 * SIZE), array(SIZE, 3 * SIZE), array(3 * SIZE), array(SIZE)


def gru(mix, order="rzn"):
    """The state after a step by one of several formulas, the gates in any order."""

    def function(x, w, u, b, d, h):
        def step(h, x):
            given = dict(zip(order, jnp.split(x @ w + b, 3, -1), strict=True))
            kept = dict(zip(order, jnp.split(h @ u, 3, -1), strict=True))
            r, z = (jax.nn.sigmoid(given[name] + kept[name]) for name in "rz")
            n = jnp.tanh(given["n"] + r * (kept["n"] + d))
            h = mix(z, h, n)
            return h, h

        return jax.lax.scan(step, h, x)

    return function


def kept_and_new(z, h, n):
    return (1 - z) * n + z * h


GRUS = {
    "as Flax": gru(kept_and_new),
    "another order": gru(kept_and_new, "zrn"),
    "the new one first": gru(kept_and_new, "nzr"),
    "the other way round": gru(lambda z, h, n: h * z + n * (1.0 - z)),
    "as Equinox": gru(lambda z, h, n: n + z * (h - n)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", GRUS)
def test_a_gru_is_one_call(name):
    assert calls(check(GRUS[name], X, *GRU, STATES[0])) == ["gru"]


@pytest.mark.nightly
def test_a_gru_without_a_batch_from_the_end():
    def function(x, w, u, h):
        def step(h, x):
            i, k = jnp.split(w.T @ x, 3), jnp.split(u.T @ h, 3)
            r, z = jax.nn.sigmoid(i[0] + k[0] + 1.0), jax.nn.sigmoid(k[1] + i[1])
            return kept_and_new(z, h, jnp.tanh(r * k[2] + i[2])), None

        return jax.lax.scan(step, h, x, reverse=True)[0]

    assert calls(check(function, X[:, 0], *GRU[:2], STATES[0][0])) == ["gru"]


def reset_first(x, w, u, b, d, h):
    """As Haiku: what is reset is the state, not its product."""

    def step(h, x):
        i, m = jnp.split(x @ w + b, 3, -1), jnp.split(u, 3, -1)
        r, z = jax.nn.sigmoid(i[0] + h @ m[0]), jax.nn.sigmoid(i[1] + h @ m[1])
        h = (1 - z) * h + z * jnp.tanh(i[2] + (r * h) @ m[2])
        return h, h

    return jax.lax.scan(step, h, x)


def more_is_shown(x, *weights):
    def step(h, x):
        h, _ = gru(kept_and_new)(x[None], *weights[:4], h)
        return h, 2 * h

    return jax.lax.scan(step, weights[4], x)


ALMOST = {
    "reset first": reset_first,
    "what is kept is new": gru(lambda z, h, n: (1 - z) * h + z * n),
    "another one": gru(lambda z, h, n: (2 - z) * n + z * h),
    "the wrong difference": gru(lambda z, h, n: n + z * (n - h)),
    "nothing new": gru(lambda z, h, n: z * h + (1 - z) * h),
    "more is shown": more_is_shown,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALMOST)
def test_what_is_nearly_a_gru_is_a_loop(name):
    assert "gru" not in calls(check(ALMOST[name], X, *GRU, STATES[0]))


@pytest.mark.nightly
def test_products_of_what_is_given_are_taken_out_of_a_loop():
    model = check(reset_first, X, *GRU, STATES[0])
    assert [n.target for n in model.graph.nodes].count(torch.matmul) == 1
    (loop,) = (m for name, m in model.named_modules() if name.endswith("_scan_0"))
    shapes = [tuple(n.meta["val"].shape) for n in loop.graph.nodes if n.op == "call_function"
              and torch.is_tensor(n.meta["val"])]  # fmt: skip
    assert shapes.count((BATCH, 3 * SIZE)) == 1  # with the bias


@pytest.mark.nightly
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_the_gru_of_flax(library, reverse):
    nnx = pytest.importorskip("flax.nnx")
    linen = pytest.importorskip("flax.linen")
    x = X.transpose(1, 0, 2)
    if library == "nnx":
        net = nnx.RNN(nnx.GRUCell(WIDTH, SIZE, rngs=nnx.Rngs(0)), reverse=reverse)
    else:
        rnn = linen.RNN(linen.GRUCell(SIZE), reverse=reverse)
        net = rnn, rnn.init(jax.random.key(0), x)
    model = fmapper.convert(net, "torch", (x,)).eval()
    assert calls(model) == ["gru"]
    assert fmapper.verify(net, model, x)
    model(torch.tensor(x)).square().sum().backward()
    if library == "nnx":
        gradients = nnx.grad(lambda net: jnp.square(net(x)).sum())(net)
        for path, want in nnx.to_flat_state(gradients):
            same(functools.reduce(getattr, path, model).grad, want[...])
