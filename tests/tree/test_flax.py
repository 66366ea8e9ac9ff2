"""Flax: NNX modules, variables and states, Linen modules and variables, as nodes."""

import subprocess
import sys

import pytest

np = pytest.importorskip("numpy")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import core, linen, nnx  # noqa: E402

import fmapper  # noqa: E402
from fmapper import (  # noqa: E402
    KeyPath,
    fmap,
    fmap_with_path,
    get_path,
    load_state,
    set_path,
    state,
    to_cpu,
    to_device,
    to_jax,
    to_numpy,
)

X = jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(4, 6)


def copied(leaf):
    """A leaf that is another object with the same bits."""
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def bits(leaf):
    """An array as bytes, with its dtype and shape; PRNG keys by their data."""
    leaf = leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def content(model):
    """What Flax knows of a model: its graph, which has all ties and settings, and its bits."""
    graph, values = nnx.split(model)
    return graph, [bits(leaf) for leaf in jax.tree.leaves(values)]


def without_keys(model):
    """Whether a model can leave JAX: PRNG keys cannot."""
    return not jax.tree.leaves(nnx.state(model, nnx.RngState))


# --- the models -----------------------------------------------------------------------------------


class Tied(nnx.Module):
    """Two modules with one variable, one module at two places, one embedding used twice."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.one = nnx.Linear(6, 6, rngs=rngs)
        self.two = nnx.Linear(6, 6, rngs=rngs)
        self.two.kernel = self.one.kernel
        self.again = self.one

    def __call__(self, x):
        x = self.again(self.two(self.one(x)))
        return self.embed.attend(x + self.embed(jnp.arange(4)))


class Nested(nnx.Module):
    """Modules in lists and dicts, numbers marked as data, settings of many kinds."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.relu, nnx.List([])])
        self.heads = nnx.Dict({"a": nnx.Linear(6, 2, rngs=rngs), "act": jnp.tanh})
        self.plain = nnx.data([{"w": jnp.ones(6)}, (jnp.zeros(6),)])
        self.scale = jnp.float32(2.0)
        self.factor = nnx.data(3)
        self.size, self.name, self.epsilon = (3, 3), "nested", np.float32(1e-5)

    def __call__(self, x):
        x = self.layers[1](self.layers[0](x)) * self.plain[0]["w"] + self.plain[1][0]
        return self.heads.act(self.heads["a"](x)) * self.scale * self.factor


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(6, 5, rngs=rngs))

    def __call__(self, x):
        return self.rnn(x[None], initial_carry=(jnp.zeros((1, 5)), jnp.zeros((1, 5))))


class Cycle(nnx.Module):
    """A child that knows its parent."""

    def __init__(self, rngs):
        self.child = nnx.Dict(layer=nnx.Linear(6, 3, rngs=rngs))
        self.child.parent = self

    def __call__(self, x):
        return self.child.parent.child.layer(x)


class Bound(nnx.Module):
    """An array in an attribute, a variable with metadata."""

    def __init__(self, rngs):
        self.table = jnp.arange(6.0)
        self.w = nnx.Param(jnp.ones((6, 2)), sharding_hint="model", collection="mine")

    def __call__(self, x):
        return (x + self.table) @ self.w[...]


MODELS = {
    "linear": lambda rngs: nnx.Linear(6, 3, rngs=rngs),
    "no bias": lambda rngs: nnx.Linear(6, 3, use_bias=False, rngs=rngs),
    "batch norm": lambda rngs: nnx.BatchNorm(6, rngs=rngs),
    "dropout": lambda rngs: nnx.Sequential(
        nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    ),
    "attention": lambda rngs: nnx.MultiHeadAttention(
        num_heads=2, in_features=6, decode=False, rngs=rngs
    ),
    "sequential": lambda rngs: nnx.Sequential(
        nnx.Linear(6, 4, rngs=rngs), nnx.relu, nnx.LayerNorm(4, rngs=rngs)
    ),
    "einsum": lambda rngs: nnx.Einsum("ab,bc->ac", (6, 4), (4,), rngs=rngs),
    "lora": lambda rngs: nnx.LoRA(6, 2, 4, base_module=nnx.Linear(6, 4, rngs=rngs), rngs=rngs),
    "tied": Tied,
    "nested": Nested,
    "recurrent": Recurrent,
    "cycle": Cycle,
    "bound": Bound,
}


@pytest.fixture(params=MODELS)
def make(request):
    """A function that makes the same model every time."""
    return lambda: MODELS[request.param](nnx.Rngs(params=0, dropout=1))


# --- modules --------------------------------------------------------------------------------------


@pytest.mark.nightly_cases("tied", "attention", "sequential", "nested", "recurrent")
@pytest.mark.sampled(2)
def test_fmap_makes_an_equal_model_and_leaves_the_original_alone(make):
    model, twin = make(), make()
    before = content(model)
    new = fmap(copied, model)
    assert new is not model
    assert content(model) == before
    assert content(new) == before
    expected = twin(X)
    assert bits(jnp.asarray(new(X))) == bits(expected) or isinstance(new, nnx.RNN)
    assert bits(model(X)) == bits(expected)  # its counts and statistics did not move on with new
    assert vars(new).keys() == vars(model).keys()


@pytest.mark.sampled(2)
@pytest.mark.nightly_cases("recurrent")
def test_nothing_mutable_is_shared(make):
    model = make()
    new = fmap(lambda leaf: leaf, model)
    mine = {id(value) for _, value in nnx.iter_graph(model) if isinstance(value, nnx.Pytree)}
    mine |= {id(value) for _, value in nnx.iter_graph(model) if isinstance(value, nnx.Variable)}
    assert mine
    assert not mine & {id(value) for _, value in nnx.iter_graph(new)}


@pytest.mark.sampled(2)
@pytest.mark.nightly_cases("recurrent", "attention", "sequential")
def test_a_round_trip_over_numpy_gives_the_bits_back(make):
    model = make()
    if not without_keys(model):
        with pytest.raises(fmapper.UnsupportedLeafError, match=r"rngs\.key\.value"):
            to_numpy(model)
        return
    if not isinstance(model, Cycle):
        there = to_numpy(model)
        assert all(type(leaf) is not jax.Array for leaf in state(there).values())
        assert {type(leaf) for leaf in state(there).values()} <= {np.ndarray, np.float32}
    back = to_jax(to_numpy(model))
    assert content(back) == content(model)
    assert bits(back(X)) == bits(model(X))


@pytest.mark.sampled(6)
@pytest.mark.nightly_cases("attention", "recurrent")
def test_ten_steps_of_an_optimizer_in_the_same_tree_equal_those_of_the_unmoved_twin(make):
    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: (model(X) ** 2).mean())(model)
        optimizer.update(model, grads)

    def train(model, optimizer):
        for _ in range(10):
            step(model, optimizer)

    transformation = optax.adam(1e-2)

    def start():
        model = make()
        if isinstance(model, nnx.BatchNorm):
            model.train()
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    model, optimizer = fmap(copied, start())
    twin, its_optimizer = start()
    train(model, optimizer)
    train(twin, its_optimizer)
    assert content(model) == content(twin)
    assert content(optimizer) == content(its_optimizer)
    assert int(optimizer.step[...]) == 10


@pytest.mark.nightly_cases("einsum", "nested")
@pytest.mark.sampled(3)
def test_the_new_model_works_in_transformations(make):
    model, twin = fmap(copied, make()), make()
    run = nnx.jit(lambda model, x: model(x))
    assert bits(run(model, X)) == bits(run(twin, X))
    assert content(model) == content(twin)
    graph, values = nnx.split(model)
    assert content(nnx.merge(graph, values)) == content(twin)
    assert content(nnx.clone(model)) == content(twin)


@pytest.mark.nightly_cases("dropout", "tied", "recurrent")
@pytest.mark.sampled(3)
def test_fmap_inside_jit_makes_a_model_that_can_be_assigned_to_there(make):
    model, twin = make(), make()

    @nnx.jit
    def run(model, x):
        new = fmap(lambda leaf: leaf, model)
        out = new(x)
        for _, value in nnx.iter_graph(new):
            if isinstance(value, nnx.Param):
                value[...] = value[...] + 1
        new.extra = nnx.Param(x)
        return out, new

    out, new = run(model, X)
    assert bits(out) == bits(nnx.jit(lambda model, x: model(x))(twin, X))
    assert bits(new.extra[...]) == bits(X)
    assert content(model) == content(make())  # what happened to the new model is its own business


def test_ties_and_cycles():
    model = Tied(nnx.Rngs(0))
    new = fmap(copied, model)
    assert new.one is new.again
    assert new.one is not new.two
    assert new.one.kernel is new.two.kernel
    assert new.one.kernel is not model.one.kernel
    assert new.one.bias is not new.two.bias
    cycle = fmap(copied, Cycle(nnx.Rngs(0)))
    assert cycle.child.parent is cycle


def test_the_new_module_can_be_changed_and_its_marks_are_right():
    new = to_cpu(Nested(nnx.Rngs(0)))
    new.scale = jnp.float32(5.0)
    new.layers.append(nnx.Param(jnp.ones(2)))
    new.added = nnx.Param(jnp.zeros(1))
    new.heads["b"] = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    assert len(new.layers) == 4
    nnx.split(new)
    new.eval()
    with pytest.raises(ValueError, match="static"):
        new.name = jnp.ones(1)  # still a static attribute


def test_settings_are_carried_over_and_data_is_mapped():
    model = Nested(nnx.Rngs(0))
    seen = []
    new = fmap(lambda leaf: seen.append(leaf) or leaf, model)
    assert new.size is model.size
    assert new.layers[1] is model.layers[1]
    assert new.heads.act is model.heads.act
    assert new.epsilon is model.epsilon
    assert [leaf for leaf in seen if not isinstance(leaf, jax.Array)] == [3]
    assert fmap(lambda leaf: leaf * 2, model).factor == 6


def test_assignments_in_any_order_leave_a_list_in_order():
    layers = nnx.List([nnx.Param(jnp.full(1, i)) for i in range(4)])
    first = layers[0]
    delattr(layers, "0")
    setattr(layers, "0", first)
    assert list(vars(layers))[-1] == "0"
    assert list(fmapper.children(layers)) == [0, 1, 2, 3]
    assert list(state(layers)) == ["0", "1", "2", "3"]
    assert [int(v[0]) for v in fmap(copied, layers)] == [0, 1, 2, 3]


# --- variables ------------------------------------------------------------------------------------


def test_metadata_and_class_are_kept():
    class Mine(nnx.Param):
        pass

    variable = Mine(jnp.ones(2), sharding_hint=("a", None), mine=3)
    new = fmap(copied, variable)
    assert type(new) is Mine
    assert new.get_metadata() == variable.get_metadata()
    new.set_metadata("mine", 4)
    assert variable.mine == 3


def test_a_variable_may_hold_a_tree_or_nothing():
    tree = nnx.Variable({"a": jnp.ones(2), "b": [jnp.zeros(1), None]})
    new = fmap(lambda x: x + 1, tree)
    assert new.get_value()["b"][0].tolist() == [1]
    assert tree.get_value()["b"][0].tolist() == [0]
    assert list(state({"cache": tree})) == ["cache.a", "cache.b.0"]
    assert fmap(copied, nnx.Variable(None)).get_value() is None


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references")
def test_a_variable_that_is_a_reference_gets_one_of_its_own():
    variable = nnx.Param(jnp.ones(2), ref=True)
    new = fmap(lambda x: x + 1, variable)
    new[...] = new[...] * 10
    assert new[...].tolist() == [20, 20]
    assert variable[...].tolist() == [1, 1]
    there = to_numpy(variable)
    assert type(there.get_raw_value()) is np.ndarray
    back = to_jax(there)
    assert type(back.get_raw_value()) is type(variable.get_raw_value())
    assert back[...].tolist() == [1, 1]


@pytest.mark.skipif(not hasattr(nnx.variablelib, "HijaxVariable"), reason="an older Flax")
def test_hijax_variables_are_boxes_too():
    variable = nnx.Param(jnp.ones(2), hijax=True, mine=3)
    new = fmap(lambda x: x + 1, {"a": variable, "b": variable})
    assert new["a"] is new["b"]
    assert type(new["a"]) is type(variable)
    assert new["a"].get_metadata() == variable.get_metadata()
    assert new["a"][...].tolist() == [2, 2]
    assert variable[...].tolist() == [1, 1]
    assert list(state({"w": variable})) == ["w"]


def test_paths_are_those_of_python_and_names_those_of_flax():
    model = Nested(nnx.Rngs(0))
    paths = {}
    fmap_with_path(lambda path, leaf: paths.setdefault(str(path), leaf), model)
    assert "layers[0].kernel.value" in paths
    kernel = model.layers[0].kernel
    assert get_path(model, "layers[0].kernel") is kernel
    assert get_path(model, "layers[0].kernel.value") is kernel.get_raw_value()
    assert get_path(model, KeyPath("layers", 0, "kernel", "value")) is kernel.get_raw_value()
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert names - {"factor"} == set(state(model))  # a state has arrays only


def test_set_path_changes_a_value_or_the_variable():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    new = set_path(model, "kernel.value", jnp.zeros((2, 2)))
    assert isinstance(new.kernel, nnx.Param)
    assert new(jnp.ones((1, 2))).tolist() == [[0, 0]]
    assert new.bias is not None
    other = nnx.Param(jnp.zeros((2, 2)))
    assert set_path(model, "kernel", other).kernel is other


def test_load_state_fills_and_ties():
    model = Tied(nnx.Rngs(0))
    twin = Tied(nnx.Rngs(5))
    filled = load_state(twin, to_numpy(state(model)))
    assert content(filled) == content(model)
    assert filled.one.kernel is filled.two.kernel


def test_states_and_graphs_are_nodes():
    graph, values = nnx.split(Nested(nnx.Rngs(0)))
    new = fmap(copied, values)
    assert type(new) is type(values)
    assert list(new) == list(values)
    assert content(nnx.merge(fmap(copied, graph), new)) == content(Nested(nnx.Rngs(0)))
    held = nnx.State({"b": nnx.Param(jnp.ones(1)), "a": {"c": jnp.zeros(1)}})
    assert list(state(held)) == ["b", "a.c"]
    assert list(fmap(copied, held)) == ["b", "a"]


# --- random numbers, dtypes, devices --------------------------------------------------------------


@pytest.mark.nightly
def test_a_cast_leaves_keys_and_counts_alone():
    model = nnx.Sequential(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    twin = fmap(copied, model)
    half = to_jax(dtype="bfloat16")(model)
    assert half.layers[0].kernel.dtype == jnp.bfloat16
    assert bits(half.layers[1].rngs.key[...]) == bits(twin.layers[1].rngs.key[...])
    assert half.layers[1].rngs.count.dtype == jnp.uint32
    assert bits(half.layers[1](X)) == bits(twin.layers[1](X))


def test_rngs_go_on_where_they_were():
    rngs = nnx.Rngs(0, dropout=1)
    rngs.params()
    rngs.dropout()
    new = fmap(copied, rngs)
    assert type(new) is nnx.Rngs
    assert bits(new.dropout()) == bits(rngs.dropout())
    assert bits(new()) == bits(rngs())
    assert int(new.dropout.count[...]) == 2


def test_what_is_there_already_stays():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    new = to_device("jax:cpu:0")(model)
    assert new.kernel.get_raw_value() is model.kernel.get_raw_value()


def test_flax_computes_with_numpy_in_variables():
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    there = to_numpy(model)
    assert type(there.kernel.get_raw_value()) is np.ndarray
    assert bits(there(X)) == bits(model(X))
    assert bits(nnx.jit(lambda m, x: m(x))(there, X)) == bits(nnx.jit(lambda m, x: m(x))(model, X))


def test_torch_tensors_in_attributes_and_variables_do_not_vanish():
    torch = pytest.importorskip("torch")

    class Mixed(nnx.Module):
        def __init__(self):
            self.table = torch.arange(3.0)
            self.tables = (torch.ones(2), "name")
            self.host = np.arange(2.0, dtype=np.float32)
            self.w = nnx.Param(torch.full((2,), 5.0))

    model = Mixed()
    assert len(jax.tree.leaves(nnx.state(model))) == 2  # to Flax the tensors are settings
    new = to_jax(model)
    assert {name: leaf.tolist() for name, leaf in state(new).items()} == {
        "table": [0, 1, 2],
        "tables.0": [1, 1],
        "host": [0, 1],
        "w": [5, 5],
    }
    assert all(isinstance(leaf, jax.Array) for leaf in state(new).values())
    assert isinstance(model.table, torch.Tensor)
    assert len(jax.tree.leaves(nnx.state(new))) == 4  # now they are data
    assert new.tables[1] == "name"
    back = fmapper.to_torch(new)
    assert torch.equal(back.table, model.table)


def test_arrays_that_no_walk_can_reach_are_refused():
    class Holder:
        def __init__(self):
            self.w = jnp.ones(2)

    class Forgot(nnx.Module):
        def __init__(self, holder):
            self.holder = holder

    with pytest.raises(
        fmapper.NotAFunctorError, match=r"model\.a: Forgot holds arrays in \.holder"
    ):
        to_cpu({"a": Forgot(Holder())})
    w = jnp.ones(2)
    with pytest.raises(fmapper.NotAFunctorError, match=r"\.holder"):
        to_cpu(Forgot(lambda x: x + w))
    same = to_cpu(strict=False)(Forgot(Holder()))
    assert same.holder.w.tolist() == [1, 1]


def test_arrays_that_a_transformation_of_optax_closes_over_are_constants():
    schedule = optax.linear_onecycle_schedule(10, 1e-2)  # it keeps NumPy arrays
    model = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    assert to_cpu((model, optimizer))[1].tx is optimizer.tx


def test_a_class_that_becomes_a_functor_later_is_a_child_from_then_on():
    class Later:
        def __init__(self):
            self.w = jnp.ones(2)

    class Owner(nnx.Module):
        def __init__(self):
            self.inner = Later()

    model = Owner()
    assert fmap(copied, model).inner is model.inner
    fmapper.functor(Later)
    assert fmap(copied, model).inner is not model.inner


@pytest.mark.nightly
def test_several_trees():
    model = Tied(nnx.Rngs(0))
    grads = nnx.grad(lambda model: (model(X) ** 2).mean())(model)
    stepped = fmap(lambda p, q: p - q, nnx.state(model, nnx.Param), grads)
    assert list(stepped) == list(nnx.state(model, nnx.Param))
    doubled = fmap(lambda a, b: a + b, model, fmap(copied, model))
    assert doubled.one.kernel is doubled.two.kernel
    assert bits(doubled.one.kernel[...]) == bits(2 * model.one.kernel[...])


def test_flax_is_no_backend():
    assert not [device for device in fmapper.devices() if device.backend == "flax"]
    with pytest.raises(fmapper.DeviceError, match="not a device"):
        fmapper.to_device("flax:cpu")
    assert not isinstance(fmapper.backends.get_adapter("flax"), fmapper.backends.Arrays)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "code",
    [
        "import fmapper; fmapper.devices()",
        "import fmapper, numpy; fmapper.to_gpu(strict=False)(numpy.ones(2))",
    ],
)
def test_asking_for_devices_imports_no_flax(code):
    code += "\nimport sys; assert 'flax' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# --- Linen ----------------------------------------------------------------------------------------


class Net(linen.Module):
    """A dense layer in setup, one in a list, one made on the way, statistics and dropout."""

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(5, name="first")(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dropout(0.5, deterministic=not train)(x)


class SetUp(linen.Module):
    inner: linen.Module

    def setup(self):
        self.layers = [linen.Dense(4), linen.Dense(3)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.inner(x)


@pytest.fixture(params=["compact", "setup"])
def bound(request):
    module = Net() if request.param == "compact" else SetUp(linen.Dense(2, name="named"))
    variables = module.init(jax.random.key(0), X)
    return module, variables


@pytest.mark.nightly
def test_variables_and_frozen_dicts():
    variables = Net().init(jax.random.key(0), X)
    frozen = core.freeze({"z": variables, "a": {"w": jnp.ones(1)}})
    new = fmap(copied, frozen)
    assert type(new) is core.FrozenDict
    assert list(new) == list(frozen) == ["z", "a"]
    assert new["a"]["w"] is not frozen["a"]["w"]
    assert bits(Net().apply(new["z"], X)) == bits(Net().apply(variables, X))
    assert type(new.unfreeze()) is dict
    assert jax.tree.structure(new) == jax.tree.structure(frozen)


def test_unbound_modules_are_their_own_copies():
    module = SetUp(linen.Dense(2))
    seen = []
    new = fmap(seen.append, {"module": module})
    assert new["module"] is module
    assert seen == []
    assert to_numpy((module, {"w": jnp.ones(1)}))[0] is module


def test_fields_with_arrays_are_children():
    class Shifted(linen.Module):
        by: jax.Array
        factor: int = 2

        def __call__(self, x):
            return self.factor * x + self.by

    class Outer(linen.Module):
        inner: linen.Module

        def __call__(self, x):
            return self.inner(x)

    model = Outer(Shifted(jnp.ones(6)))
    new = to_numpy(model)
    assert type(new.inner.by) is np.ndarray
    assert new.inner.factor == 2
    assert bits(new.apply({}, X)) == bits(model.apply({}, X))
    assert list(state(model)) == ["inner.by"]


@pytest.mark.nightly_cases("setup")
def test_bound_modules_have_their_variables_as_children(bound):
    module, variables = bound
    model = module.bind(variables)
    assert list(state(model)) == list(state(variables))
    expected = bits(module.apply(variables, X))
    new = fmap(copied, model)
    assert bits(new(X)) == expected
    assert bits(model(X)) == expected
    assert bits(fmap(copied, model)(X)) == expected  # after a call too: setup has run
    first = next(iter(state(model)))
    assert state(new)[first] is not state(model)[first]
    back = to_jax(to_numpy(model))
    assert bits(back(X)) == expected
    path = KeyPath("variables", *first.split("."))
    assert get_path(model, path) is state(model)[first]


@pytest.mark.nightly
def test_bound_modules_keep_random_numbers_and_what_is_mutable():
    module = Net()
    variables = module.init(jax.random.key(0), X)

    def bind():
        model = module.bind(variables, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])
        model(X, train=True)
        return model

    model, twin = fmap(copied, bind()), bind()
    assert bits(model(X, train=True)) == bits(twin(X, train=True))
    ours, theirs = model.variables["batch_stats"], twin.variables["batch_stats"]
    assert jax.tree.map(bits, ours) == jax.tree.map(bits, theirs)


@pytest.mark.parametrize("box", [linen.Partitioned, linen.LogicallyPartitioned])
def test_boxes_of_linen(box):
    boxed = box(jnp.ones((2, 3)), names=("in", None))
    new = fmap(copied, {"kernel": boxed})["kernel"]
    assert type(new) is box
    assert new.names == boxed.names
    assert new.value is not boxed.value
    assert list(state({"kernel": boxed})) == ["kernel"]
    init = linen.with_partitioning(linen.initializers.ones, ("in", "out"))
    variables = linen.Dense(3, kernel_init=init).init(jax.random.key(0), X)
    moved = to_jax(to_numpy(variables))
    assert jax.tree.structure(moved) == jax.tree.structure(variables)
    assert linen.get_partition_spec(moved) == linen.get_partition_spec(variables)


@pytest.mark.nightly
def test_linen_train_states_take_ten_equal_steps():
    from flax.training.train_state import TrainState

    def start():
        module = Net()
        variables = module.init(jax.random.key(0), X)
        state = TrainState.create(
            apply_fn=module.apply, params=variables["params"], tx=optax.adamw(1e-2)
        )
        return state, variables["batch_stats"]

    def train(state, stats):
        def loss(params):
            return (state.apply_fn({"params": params, "batch_stats": stats}, X) ** 2).mean()

        for _ in range(10):
            state = state.apply_gradients(grads=jax.grad(loss)(state.params))
        return [bits(jnp.asarray(leaf)) for leaf in jax.tree.leaves(state)]

    assert train(*to_jax(to_numpy(start()))) == train(*start())


def test_linen_in_nnx():
    model = nnx.bridge.ToNNX(linen.Dense(3), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(model, X)
    new = fmap(copied, model)
    assert bits(new(X)) == bits(model(X))
    assert list(state(new)) == list(state(model))


@pytest.mark.nightly
def test_move_in_place_keeps_modules_and_variables():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
            self.layers[1].kernel = self.layers[0].kernel
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.layers[1](self.layers[0](x)))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    twin = fmap(to_cpu(copy=True), (model, optimizer))
    kernel, array = model.layers[0].kernel, model.layers[0].kernel.get_value()
    pair = fmapper.move_((model, optimizer), to_cpu(copy=True))
    assert pair[0] is model
    assert pair[1] is optimizer
    assert model.layers[1].kernel is kernel
    assert kernel.get_value() is not array
    for net, updater in (pair, twin):
        grads = nnx.grad(lambda m: m(X).sum())(net)
        updater.update(net, grads)
    assert content(pair) == content(twin)
