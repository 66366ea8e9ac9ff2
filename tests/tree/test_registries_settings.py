"""Settings of functors in the registries of JAX, torch and optree: numbers and strings stay so."""

import dataclasses
import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest

import fmapper
from fmapper import functor

np = pytest.importorskip("numpy")
jax = pytest.importorskip("jax")
optree = pytest.importorskip("optree")
jnp = jax.numpy

Sizes = namedtuple("Sizes", "rows columns")


@functor
class Model:
    def __init__(self, w, config):
        self.w, self.config = w, config

    def __call__(self, x):
        return x @ self.w


def model(config, xp=jnp):
    return Model(xp.ones((2, 2)), config)


class Shelf(dict):
    pass


SETTINGS = [
    {"d": 8},
    {"d": 8, "rate": 0.5, "name": "relu", "on": True, "none": None, "z": 1j, "raw": b"x"},
    {"deep": {"sizes": [1, 2, (3, "x")], "f": math.tanh}},
    [1, "a"],
    (1, "a"),
    Sizes(2, "c"),
    OrderedDict(b=1, a=2),
    defaultdict(list, {"b": [1]}),
    deque([1, 2], maxlen=3),
    Shelf(d=8),
    {1: "keys of two types cannot be sorted", "a": 1},
    {"sets": {1, 2}, "frozen": frozenset({3})},
    {"type": int, "dtype": jnp.float32, "slice": slice(1, 2)},
    {"nan": float("nan")},
]


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: type(config).__name__)
def test_a_container_of_settings_is_static(config):
    m = model(config)
    assert len(jax.tree.leaves(m)) == 1
    stepped = jax.jit(lambda m: jax.tree.map(lambda x: x - 0.5, m))(m)
    assert fmapper.backends.equals(stepped.config, config)
    assert type(stepped.config) is type(config)
    grads = jax.grad(lambda m: m(m.w).sum())(m)
    assert fmapper.backends.equals(grads.config, config)
    stepped = jax.tree.map(lambda p, g: p - g, m, grads)
    assert fmapper.backends.equals(stepped.config, config)
    assert jax.tree.structure(m) == jax.tree.structure(stepped)
    assert hash(jax.tree.structure(m)) == hash(jax.tree.structure(stepped))


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: type(config).__name__)
def test_nothing_is_compiled_anew_for_the_same_settings(config):
    import copy

    traces = []

    @jax.jit
    def run(m):
        traces.append(m.config)
        return m

    out = run(model(config))
    out = run(out)
    run(model(copy.deepcopy(config)))
    assert len(traces) == 1


def _cyclic():
    config = [1, {"a": "b"}]
    config.append(config)
    return config


def _torch_flatten(tree):
    return pytest.importorskip("torch.utils._pytree").tree_flatten(tree)


@pytest.mark.parametrize("flatten", [jax.tree.flatten, _torch_flatten])
@pytest.mark.parametrize("config", [_cyclic(), {"deep": [{1: "x", "a": _cyclic()}]}])
def test_settings_that_a_registry_cannot_flatten_are_static(flatten, config):
    leaves, _ = flatten(model(config))
    assert len(leaves) == 1


@pytest.mark.parametrize("flatten", [jax.tree.flatten, _torch_flatten])
@pytest.mark.parametrize("part", [np.ones(2), {"w": np.ones(2), "n": 1}])
def test_arrays_in_a_cycle_are_refused(flatten, part):
    config = [part]
    config.append(config)
    with pytest.raises(fmapper.CycleError, match=r"model\[1\]: this is the list at model again"):
        flatten(model(config))


def test_parts_that_are_replaced_by_containers_stay_parts():
    m = model({"n": 8, "all": [jnp.ones(2), "name", jnp.ones(2)]})
    twice = jax.tree.map(lambda x: [x, {"again": x}], m)
    assert len(jax.tree.leaves(twice)) == 6
    assert twice.config["all"][1] == "name"
    outer = jax.tree.structure(m)
    inner = jax.tree.structure([0, {"again": 0}])
    first, second = jax.tree.transpose(outer, inner, twice)
    assert jax.tree.structure(first) == outer
    assert second["again"].config["n"] == 8


def test_arrays_and_settings_in_one_container():
    config = {
        "d": 8,
        "w": jnp.ones(2),
        "rest": ["a", jnp.zeros(3), {"n": 1}, None, (2, jnp.ones(1))],
    }
    m = model(config)
    paths, _ = jax.tree_util.tree_flatten_with_path(m)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        ".w",
        ".config['rest'][1]",
        ".config['rest'][4][1]",
        ".config['w']",
    ]
    out = jax.jit(lambda m: jax.tree.map(lambda x: x + m.config["d"], m))(m)
    assert out.config["d"] == 8
    assert type(out.config["d"]) is int
    assert out.config["w"].tolist() == [9, 9]
    assert out.config["rest"][0] == "a"
    assert out.config["rest"][2:4] == [{"n": 1}, None]
    assert out.config["rest"][4][0] == 2
    grads = jax.grad(lambda m: (m.config["w"] * m.config["d"]).sum())(m)
    assert grads.config["w"].tolist() == [8, 8]
    assert grads.config["d"] == 8
    assert m.config is config
    assert sorted(config) == ["d", "rest", "w"]


@pytest.mark.parametrize("value", [0, None, True, "label", 0.5, object(), jnp.float32])
def test_trees_of_other_things_keep_the_structure(value):
    m = model({"d": 8, "w": jnp.ones(2), "all": [jnp.ones(2), jnp.ones(2)], "tag": {"a": "b"}})
    other = jax.tree.map(lambda _: value, m)
    assert other.config["d"] == 8
    assert other.config["tag"] == {"a": "b"}
    assert other.config["all"] == [value, value]
    if value is not None:
        assert jax.tree.structure(other) == jax.tree.structure(m)
        assert jax.tree.leaves(other) == [value] * 4
        both = jax.tree.map(lambda _, v: v, m, other)
        assert jax.tree.leaves(jax.tree.map(lambda _, v: v, m, both)) == [value] * 4
    back = jax.tree.map(lambda x: x, jax.tree.structure(m).unflatten(jax.tree.leaves(m)))
    assert jax.tree.structure(back) == jax.tree.structure(m)


def test_vmap_with_axes_made_of_the_model():
    m = model({"d": 2, "w": jnp.ones((5, 3)), "b": [jnp.ones(3), 7]})
    axes = jax.tree.map(lambda _: None, m)
    axes.config["w"] = 0
    out = jax.vmap(lambda m: m.config["w"] * m.config["d"] + m.config["b"][0], in_axes=(axes,))(m)
    assert out.shape == (5, 3)
    batched = jax.vmap(lambda m: m, in_axes=(axes,), out_axes=axes)(m)
    assert batched.config["w"].shape == (5, 3)
    assert batched.config["d"] == 2
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), m)
    assert jax.vmap(lambda m: m.config["w"].sum())(stacked).shape == (2,)


def test_scan_and_cond_and_checkpoint_carry_settings():
    m = model({"d": 2, "w": jnp.ones(3)})
    out, _ = jax.lax.scan(
        lambda m, _: (jax.tree.map(lambda x: x * m.config["d"], m), 0), m, None, 3
    )
    assert out.config["w"].tolist() == [8, 8, 8]
    assert out.config["d"] == 2
    out = jax.lax.cond(True, lambda m: m, lambda m: jax.tree.map(jnp.zeros_like, m), m)
    assert out.config["d"] == 2
    assert jax.grad(jax.checkpoint(lambda m: (m.config["w"] ** m.config["d"]).sum()))(m)
    shapes = jax.eval_shape(lambda m: m, m)
    assert jax.tree.structure(shapes) == jax.tree.structure(m)


def test_optax_takes_a_model_with_settings():
    optax = pytest.importorskip("optax")
    m = model({"d": 2, "w": jnp.ones(3), "name": "x"})
    optimizer = optax.adam(0.1)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: "config" in str(path), m)
    for chosen in (optimizer, optax.masked(optimizer, mask)):
        state = chosen.init(m)

        @jax.jit
        def step(m, state, chosen=chosen):
            grads = jax.grad(lambda m: (m.config["w"] ** m.config["d"]).sum() + m.w.sum())(m)
            updates, state = chosen.update(grads, state, m)
            return optax.apply_updates(m, updates), state

        new, state = step(m, state)
        new, state = step(new, state)
        assert new.config["d"] == 2
        assert new.config["name"] == "x"
        assert float(new.config["w"][0]) < 0.9
    labels = jax.tree.map(lambda _: "slow", m)
    optax.multi_transform({"slow": optimizer}, lambda _: labels).init(m)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), ([1], (1,)), ({1}, {True}), (None, 0)],
)
def test_settings_that_differ_make_another_program(one, other):
    traces = []

    @jax.jit
    def run(m):
        traces.append(m.config)
        return m

    for config in (one, other, [one], [other], {"a": one, "w": jnp.ones(1)}):
        run(model(config))
    run(model({"a": other, "w": jnp.ones(1)}))
    assert len(traces) == 6


@pytest.mark.parametrize("extra", [{}, {"w": jnp.ones(1)}])
def test_a_setting_that_is_changed_in_place_makes_another_program(extra):
    run = jax.jit(lambda m: m.w.sum() * m.config["d"])
    m = model({"d": 1, **extra})
    assert float(run(m)) == 4
    m.config["d"] = 2
    assert float(run(m)) == 8
    same = jax.jit(lambda m: m)
    out = same(m)
    out.config["d"] = 5
    assert same(m).config["d"] == 2
    m.config["d"] = 7
    assert same(model({"d": 2, **extra})).config["d"] == 2


def test_what_is_carried_over_counts_as_it_is_at_the_call():
    @functor(children=("w",))
    class Partly:
        def __init__(self, w, config):
            self.w, self.config = w, config

    m = Partly(jnp.ones(2), {"d": 1})
    for jit in (jax.jit, fmapper.jit):
        m.config["d"] = 1
        run = jit(lambda m: m.w.sum() * m.config["d"])
        assert float(run(m)) == 2
        m.config["d"] = 2
        assert float(run(m)) == 4


def test_children_that_are_declared_static():
    @functor(static=("config", "table"))
    class Named(Model):
        def __init__(self, w, config, table=None):
            super().__init__(w, config)
            self.table = table

    class Derived(Named):
        pass

    for cls in (Named, Derived):
        m = cls(jnp.ones((2, 2)), {"a": 1}, np.array([1.0, np.nan]))
        assert len(jax.tree.leaves(m)) == 1
        traces = []

        @jax.jit
        def run(m, traces=traces):
            traces.append(1)
            return m

        assert isinstance(run(m).table, np.ndarray)
        run(cls(m.w, {"a": 1}, np.array([1.0, np.nan])))
        assert len(traces) == 1
        run(cls(m.w, {"a": 1}, np.array([2.0, np.nan])))
        assert len(traces) == 2
        assert len(optree.tree_leaves(m, namespace="fmapper")) == 1
        assert fmapper.fmap(lambda x: x, m).table is m.table  # a child to walks and moves
        assert len(fmapper.fleaves(m)) == 3

    @functor
    class Again(Named):
        pass

    assert len(jax.tree.leaves(Again(jnp.ones(1), {}, np.ones(1)))) == 2  # a declaration of its own


def test_a_static_child_must_not_be_traced():
    @functor(static=("table",))
    class Named:
        def __init__(self, w, table):
            self.w, self.table = w, table

    def f(m):
        return Named(m.w, {"x": m.w * 2})

    with pytest.raises(fmapper.TransformError, match=r"Named\.table\.x.*being traced.*static="):
        jax.jit(f)(Named(jnp.ones(2), None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"static": "config"}, r"static=\('config',\)"),
        ({"children": ("w",), "static": ("config",)}, "Only a child can be static"),
        ({"static": ("w",), "trainable": ("w",)}, "cannot be trained"),
        ({"static": ("w", "w")}, "repeats a name"),
    ],
)
def test_static_names_children(arguments, message):
    with pytest.raises(fmapper.DeclarationError, match=message):
        functor(type("Some", (), {"w": 1, "config": 2}), **arguments)


@pytest.mark.parametrize("frozen", [False, True])
def test_dataclasses_with_settings(frozen):
    @functor
    @dataclasses.dataclass(frozen=frozen, slots=True)
    class Data:
        w: Any
        config: Any

    m = Data(jnp.ones(2), {"n": 3, "w": jnp.zeros(1)})
    out = jax.jit(lambda m: jax.tree.map(lambda x: x + m.config["n"], m))(m)
    assert out.w.tolist() == [4, 4]
    assert out.config["n"] == 3
    axes = jax.tree.map(lambda _: 0, m)
    assert jax.tree.structure(axes) == jax.tree.structure(m)


def test_layers_in_lists_are_as_they_were():
    layers = [Model(jnp.ones((2, 2)), {"act": "relu"}), jnp.tanh, Model(jnp.ones((2, 2)), {})]
    m = model({"layers": layers, "names": ["a"]})
    assert len(jax.tree.leaves(m)) == 3
    grads = jax.grad(lambda m: m.config["layers"][0].w.sum())(m)
    assert grads.config["layers"][1] is jnp.tanh
    assert grads.config["layers"][0].config == {"act": "relu"}


@pytest.mark.nightly
def test_equinox_beside_settings():
    eqx = pytest.importorskip("equinox")
    m = model({"net": eqx.nn.Linear(2, 3, key=jax.random.key(0)), "d": 8, "act": jax.nn.relu})
    _, grads = eqx.filter_value_and_grad(lambda m: m.config["net"](m.w[0]).sum())(m)
    assert grads.config["d"] == 8
    assert grads.config["net"].weight.shape == (3, 2)
    arrays, rest = eqx.partition(m, eqx.is_array)
    assert eqx.combine(arrays, rest).config["act"] is jax.nn.relu


def test_no_gradient_and_ties_between_containers():
    w = jnp.ones(2)
    m = model({"a": w, "b": fmapper.no_gradient, "n": 1})
    out = jax.jit(lambda m: m)(m)
    assert out.config["b"] is fmapper.no_gradient


# --- torch ----------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    fmapper.backends.get_adapter("torch")  # functors are registered at the next call into fmapper
    return found


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: type(config).__name__)
def test_torch_takes_a_model_with_settings(config, torch):
    m = model(config, torch)
    assert len(torch.utils._pytree.tree_leaves(m)) == 1
    grads = torch.func.grad(lambda m: m(m.w).sum())(m)
    assert fmapper.backends.equals(grads.config, config)
    out = torch.func.vmap(lambda m, x: m(x), in_dims=(None, 0))(m, torch.ones(5, 2))
    assert out.shape == (5, 2)


def test_arrays_and_settings_in_one_container_of_torch(torch):
    pytree = torch.utils._pytree
    m = model({"d": 8, "w": torch.ones(2), "rest": deque(["a", torch.zeros(3), None])}, torch)
    paths, _ = pytree.tree_flatten_with_path(m)
    assert [pytree.keystr(path) for path, _ in paths] == [
        ".w",
        ".config['w']",
        ".config['rest'][1]",
    ]
    grads = torch.func.grad(lambda m: (m.config["w"] * m.config["d"]).sum())(m)
    assert grads.config["w"].tolist() == [8, 8]
    assert grads.config["d"] == 8
    assert grads.config["rest"][2] is None
    numbers = pytree.tree_map(lambda _: 0, m)
    assert pytree.tree_structure(numbers) == pytree.tree_structure(m)
    stacked = pytree.tree_map(lambda x: torch.stack([x, x]), m)
    assert torch.func.vmap(lambda m: m.config["w"] * m.config["d"])(stacked).shape == (2, 2)


def test_optree_sees_all_that_a_walk_sees():
    m = Model(1, {"d": 8, "name": "x"})
    assert optree.tree_leaves(m, namespace="fmapper") == [1, 8, "x"]
