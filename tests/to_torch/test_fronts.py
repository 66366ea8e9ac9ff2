"""What can be converted from JAX to torch, and the names that its arrays get."""

import collections
import dataclasses
import functools
import warnings

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
WEIGHT = np.linspace(-0.5, 0.7, 8, dtype=np.float32).reshape(4, 2)
GLOBAL = {"w": jnp.asarray(WEIGHT)}
BARE = jnp.asarray(WEIGHT)
Pair = collections.namedtuple("Pair", "first second")


def tensors(tree):
    return fmapper.to_torch(jax.tree.map(jnp.asarray, tree))


def check(model, *args, want, parameters, buffers=(), kwargs=None):
    """Converts and compares; names are those of the state dict, in its order."""
    converted = fmapper.convert(model, "torch", args, kwargs)
    got = converted.eval()(*tensors(args), **tensors(kwargs or {}))
    assert [name for name, _ in converted.named_parameters()] == list(parameters)
    assert set(converted.state_dict()) == {*parameters, *buffers}
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-6, atol=1e-6)
    return converted


def layer(tree, x):
    return jnp.tanh(x @ tree["w"])


def helper(x):
    return x @ GLOBAL["w"]


class Plain:
    def __init__(self):
        self.w = jnp.asarray(WEIGHT)

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


@fmapper.functor
class Declared(Plain):
    def __init__(self):
        super().__init__()
        self.scales = [jnp.ones(2), np.float32(2.0)]
        self.power = 2

    def __call__(self, x):
        return super().__call__(x) ** self.power * self.scales[0]


# --- functions ------------------------------------------------------------------------------------

WANT = np.tanh(X @ WEIGHT)
TREE = {"w": jnp.asarray(WEIGHT)}


def closed_over():
    w = jnp.asarray(WEIGHT)
    return lambda x: jnp.tanh(x @ w)


def closed_over_tree():
    params = {"w": jnp.asarray(WEIGHT), "b": [jnp.zeros(2)]}
    return jax.jit(lambda x: layer(params, x) + params["b"][0])


def closed_over_function():
    inner = closed_over()
    return lambda x: inner(x)  # noqa: PLW0108


FUNCTIONS = {
    "pair": (lambda: (layer, TREE), ["w"]),
    "pair, jit": (lambda: (jax.jit(layer), TREE), ["w"]),
    "partial": (lambda: functools.partial(layer, TREE), ["args.0.w"]),
    "partial, keyword": (lambda: functools.partial(lambda x, tree: layer(tree, x), tree=TREE),
                         ["tree.w"]),
    "closure": (closed_over, ["w"]),
    "closure, tree": (closed_over_tree, ["params.w", "params.b.0"]),
    "closure, function": (closed_over_function, ["inner.w"]),
    "vmap": (lambda: jax.vmap(closed_over()), ["w"]),
    "global array": (lambda: lambda x: jnp.tanh(x @ BARE), []),
    "global tree": (lambda: lambda x: jnp.tanh(helper(x)), ["GLOBAL.w"]),
    "method": (lambda: Declared().__call__.__func__.__get__(Scaled()), ["w"]),
}  # fmt: skip


@fmapper.functor
class Scaled(Plain):
    def __init__(self):
        super().__init__()
        self.scales = [1.0]
        self.power = 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    make, parameters = FUNCTIONS[name]
    if name == "method":
        make = lambda: Scaled().__call__  # noqa: E731
    check(make(), X, want=WANT, parameters=parameters)


def test_parameters_of_a_closure_are_live():
    converted = fmapper.convert(closed_over(), "torch", (X,))
    with torch.no_grad():
        converted.w.mul_(2)
    got = converted(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(got, np.tanh(2 * X @ WEIGHT), rtol=1e-6, atol=1e-6)


def test_the_model_that_is_converted_is_not_changed():
    function = closed_over()
    before = function.__closure__[0].cell_contents
    fmapper.convert(function, "torch", (X,))
    assert function.__closure__[0].cell_contents is before


def test_a_functor_keeps_its_settings():
    want = np.tanh(X @ WEIGHT) ** 2
    check(Declared(), X, want=want, parameters=["w", "scales.0", "scales.1"])


def test_trainable_says_what_is_a_parameter():
    @fmapper.functor(trainable=("w",))
    class Model:
        def __init__(self):
            self.w = jnp.asarray(WEIGHT)
            self.mean = jnp.ones(2)
            self.steps = jnp.asarray(3)

        def __call__(self, x):
            return x @ self.w - self.mean * self.steps

    check(Model(), X, want=X @ WEIGHT - 3, parameters=["w"], buffers=["mean", "steps"])


def test_state_of_a_functor_is_changed_in_the_module():
    @fmapper.functor
    class Counting:
        def __init__(self):
            self.calls = jnp.zeros((), jnp.int32)

        def __call__(self, x):
            self.calls = self.calls + 1
            return x * self.calls

    model = Counting()
    converted = fmapper.convert(model, "torch", (X,))
    converted(torch.from_numpy(X))
    np.testing.assert_allclose(converted(torch.from_numpy(X)), 2 * X)
    assert int(converted.calls) == 2
    assert int(model.calls) == 0


@pytest.mark.parametrize(
    "make",
    [lambda: Plain(), lambda: (lambda held: lambda x: held(x))(Plain())],  # noqa: PLC3002, PLW0108
)
def test_an_undeclared_holder_is_refused(make):
    with pytest.raises(fmapper.NotAFunctorError, match=r"Plain holds arrays in \.w.*functor"):
        fmapper.convert(make(), "torch", (X,))


# --- inputs and outputs ---------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    a: object
    b: object


@dataclasses.dataclass
class Unregistered:
    a: object


def test_nested_inputs_and_outputs():
    def function(pair, options, scale, *, twice, missing=None):
        assert missing is None
        factor = 2 if twice else 1
        return {"sum": Pair(pair.first + pair.second, factor), "rest": [options["k"][1] * scale]}

    inputs = (Pair(X, X + 1), {"k": [X, X * 2]}, 3.0)
    converted = fmapper.convert(function, "torch", inputs, {"twice": True, "missing": None})
    t = torch.from_numpy(X)
    got = converted(Pair(t, t + 1), {"k": [t, t * 2]}, 3.0, twice=True)
    np.testing.assert_allclose(got["sum"].first, X + X + 1, rtol=1e-6)
    np.testing.assert_allclose(got["rest"][0], X * 6, rtol=1e-6)
    assert got["sum"].second == 2
    with pytest.raises(fmapper.ProgramInputError, match="twice was True"):
        converted(Pair(t, t + 1), {"k": [t, t * 2]}, 3.0, twice=False)
    with pytest.raises(fmapper.ProgramInputError, match=r"keys \['k'\]"):
        converted(Pair(t, t + 1), {}, 3.0, twice=True)


def test_dataclasses():
    converted = fmapper.convert(lambda d: Registered(d.a + d.b, d.b), "torch", (Registered(X, X),))
    t = torch.from_numpy(X)
    got = converted(Registered(t, t))
    np.testing.assert_allclose(got.a, 2 * X)
    with pytest.raises(fmapper.NotAFunctorError, match="the input d is a Unregistered"):
        fmapper.convert(lambda d: d.a, "torch", (Unregistered(jnp.asarray(X)),))
    with pytest.raises(fmapper.NotAFunctorError, match="the output is a Unregistered"):
        fmapper.convert(lambda x: Unregistered(x + 1), "torch", (X,))


def test_inputs_have_the_names_of_the_signature():
    def function(x, mul, lambda_=None, *rest, **named):
        return x * mul + rest[0] + named["shift"]["by"]

    one = np.float32(1.0)
    converted = fmapper.convert(function, "torch", (X, X, None, one), {"shift": {"by": one}})
    names = [node.name for node in converted.graph.nodes if node.op == "placeholder"]
    assert names == ["x", "mul", "rest_0", "shift_by"]
    t = torch.from_numpy(X)
    got = converted(
        t, mul=t, shift={"by": torch.tensor(1.0)}, lambda_=None, **{"rest[0]": torch.tensor(1.0)}
    )
    np.testing.assert_allclose(got, X * X + 2, rtol=1e-6)


def test_no_examples_of_an_array_alone_are_needed_in_a_tuple():
    converted = fmapper.convert(closed_over(), "torch", X)
    np.testing.assert_allclose(converted(torch.from_numpy(X)).detach(), WANT, rtol=1e-6, atol=1e-6)


def test_sixty_four_bits():
    x = np.arange(3)
    with jax.enable_x64(True):
        wide = fmapper.convert(lambda x: x * 2.5, "torch", (jnp.asarray(x),))
    assert wide(torch.arange(3)).dtype is torch.float64
    narrow = fmapper.convert(lambda x: x * 2, "torch", (jnp.asarray(x),))
    assert narrow(torch.arange(3)).dtype is torch.int32
    with pytest.raises(fmapper.ProgramInputError, match="does not fit"):
        narrow(torch.tensor([0, 1, 2**40]))


@pytest.mark.nightly
def test_keys_are_words():
    key = jax.random.key(3)
    converted = fmapper.convert(lambda key: jax.random.normal(key, (4,)), "torch", (key,))
    words = fmapper.to_torch(jax.random.key_data(key))
    assert words.dtype is torch.uint32
    want = jax.random.normal(key, (4,))
    np.testing.assert_allclose(converted(words), want, rtol=2e-6)
    raw = fmapper.convert(lambda key: jax.random.bits(key, (4,)), "torch", (jax.random.PRNGKey(3),))
    got = raw(words)
    assert got.dtype is torch.uint32
    np.testing.assert_array_equal(got.numpy(), jax.random.bits(key, (4,)))
    assert fmapper.verify(lambda key: jax.random.normal(key, (4,)), converted, key)
    with pytest.raises(fmapper.ProgramInputError, match=r"key_data"):
        converted(key)


# --- Equinox --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eqx():
    return pytest.importorskip("equinox")


@pytest.fixture(scope="module")
def small(eqx):
    """A module of Equinox with dropout, in training."""

    class Small(eqx.Module):
        linear: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            self.linear = eqx.nn.Linear(4, 2, key=key)
            self.dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, *, key=None):
            return self.dropout(jnp.tanh(self.linear(x)), key=key)

    return Small(jax.random.key(0))


EQUINOX = {
    "module": (lambda eqx, m: m, False, ""),
    "filter_jit": (lambda eqx, m: eqx.filter_jit(m), False, ""),
    "filter_jit, closure": (lambda eqx, m: eqx.filter_jit(lambda x: m(x)), False, "m."),  # noqa: PLW0108
    "vmap": (lambda eqx, m: jax.vmap(m), True, ""),
    "filter_vmap": (lambda eqx, m: eqx.filter_vmap(m), True, ""),
    "closure": (lambda eqx, m: lambda x: jax.vmap(m)(x), True, "m."),  # noqa: PLW0108
}


@pytest.mark.nightly_cases("filter_jit, closure", "module")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EQUINOX)
def test_equinox(name, eqx, small):
    make, batched, prefix = EQUINOX[name]
    x = X if batched else X[0]
    inference = eqx.nn.inference_mode(small)
    want = jax.vmap(inference)(X) if batched else inference(x)
    model = make(eqx, small)
    check(model, x, want=want, parameters=[f"{prefix}linear.weight", f"{prefix}linear.bias"])


def test_equinox_in_training(eqx, small):
    key = jax.random.key(5)
    converted = fmapper.convert(small, "torch", (X[0],), {"key": key})
    assert converted.training
    words = fmapper.to_torch(jax.random.key_data(key))
    x = torch.from_numpy(X[0])
    got = converted(x, key=words).detach()
    np.testing.assert_allclose(got, small(X[0], key=key), rtol=1e-6, atol=1e-6)
    want = eqx.nn.inference_mode(small)(X[0])
    np.testing.assert_allclose(converted.eval()(x).detach(), want, rtol=1e-6, atol=1e-6)


def test_equinox_without_a_key_is_for_evaluation(small):
    converted = fmapper.convert(small, "torch", (X[0],))
    assert not converted.training
    converted.train()
    with pytest.raises(fmapper.ProgramInputError, match=r"evaluation only.*key"):
        converted(torch.from_numpy(X[0]))


@pytest.mark.nightly
def test_equinox_state(eqx):
    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self):
            self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(x, state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, state = eqx.nn.make_with_state(Normed)()
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    converted = fmapper.convert(batched, "torch", (X, state))
    held = fmapper.to_torch(state)
    want, after = batched(X, state)
    got, new = converted(torch.from_numpy(X), held)
    np.testing.assert_allclose(got.detach(), want, rtol=1e-5, atol=1e-5)
    want, _ = batched(X, after)
    got, _ = converted(torch.from_numpy(X), new)
    np.testing.assert_allclose(got.detach(), want, rtol=1e-5, atol=1e-5)
    inference = jax.vmap(
        eqx.nn.inference_mode(model), axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    want, _ = inference(X, after)
    got, _ = converted.eval()(torch.from_numpy(X), new)
    np.testing.assert_allclose(got.detach(), want, rtol=1e-5, atol=1e-5)


def test_an_object_whose_method_holds_the_model():
    tree = {"w": jnp.asarray(WEIGHT)}

    class Called:
        def __call__(self, x):
            return layer(tree, x)

    check(Called(), X, want=WANT, parameters=["tree.w"])


def test_keys_as_outputs():
    key = jax.random.key(3)
    converted = fmapper.convert(jax.random.split, "torch", (key,))
    assert fmapper.verify(jax.random.split, converted, key)
    want = jax.random.key_data(jax.random.split(key))
    np.testing.assert_array_equal(converted(fmapper.to_torch(jax.random.key_data(key))), want)


def test_empty_structures_and_words_of_python():
    class Empty(collections.namedtuple("Empty", "")):
        pass

    def function(params, empty, x):
        return x * params["in"], empty

    converted = fmapper.convert((function, {"in": np.float32(2.0)}), "torch", ((), X))
    assert list(converted.state_dict()) == ["in_"]
    got, rest = converted((), torch.from_numpy(X))
    np.testing.assert_allclose(got.detach(), 2 * X)
    assert rest == ()


class Toolbox:
    """Nobody declared it: an object with a function that is not a model."""

    def __init__(self):
        self.weight = jnp.arange(3.0)
        self.beside = np.ones(5)

    def plain(self, x):
        return x + 1

    def weighted(self, x):
        return x * self.weight


THREE = np.ones(3, np.float32)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_function_of_an_undeclared_object_whose_arrays_it_does_not_use(wrapped):
    method = Toolbox().plain

    def function(x):
        return method(x)

    model = fmapper.convert(function if wrapped else method, "torch", (THREE,))
    assert model(torch.ones(3)).tolist() == [2, 2, 2]


def test_arrays_of_an_undeclared_object_are_constants_where_that_is_asked_for():
    function = Toolbox().weighted
    with pytest.raises(fmapper.NotAFunctorError, match=r"Toolbox holds arrays in \.weight"):
        fmapper.convert(function, "torch", (THREE,))
    model = fmapper.convert(function, "torch", (THREE,), strict=False)
    assert model(torch.ones(3)).tolist() == [0, 1, 2]
    assert not list(model.parameters())


normal = fmapper.functor(type("Held", (), {"__init__": lambda self: None}))()
normal.w = jnp.ones(2)


def test_attributes_that_are_called_like_globals_are_no_globals():
    model = fmapper.convert(lambda key: jax.random.normal(key, (2,)), "torch", (jax.random.key(0),))
    assert not list(model.parameters())


def test_loops_of_equinox_that_write_in_place():
    loop = pytest.importorskip("equinox.internal").while_loop

    def function(x):
        return loop(
            lambda c: c[0] < 4,
            lambda c: (c[0] + 1, c[1] * 1.5),
            (0, x),
            kind="bounded",
            max_steps=8,
        )[1]

    model = fmapper.convert(function, "torch", (THREE,))
    np.testing.assert_allclose(model(torch.ones(3)), function(THREE))


def test_a_model_can_be_had_as_the_program_spells_it_out():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    whole = fmapper.convert(jax.nn.softmax, "torch", (x,))
    spelt = fmapper.convert(jax.nn.softmax, "torch", (x,), fused=False)
    assert "softmax" in whole.code
    assert "softmax" not in spelt.code
    torch.testing.assert_close(whole(torch.tensor(x)), spelt(torch.tensor(x)))
    assert "softmax" not in spelt.double().code
