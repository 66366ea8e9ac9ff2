"""Trees of the libraries around JAX: optax, Equinox, flax.struct, penzai-like classes, outputs."""

import copy
import dataclasses
from typing import Any

import pytest

np = pytest.importorskip("numpy")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fmapper  # noqa: E402
from fmapper import fmap, state, to_jax, to_numpy  # noqa: E402

X = jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(4, 6)
PARAMS = {"w": jnp.linspace(0, 1, 12, dtype=jnp.float32).reshape(6, 2), "b": jnp.ones(2)}


def copied(leaf):
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def bits(tree):
    """The structure of a tree of JAX, and every leaf of it as bytes or as it is."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
        if hasattr(leaf, "dtype")
        else leaf
        for leaf in leaves
    ]


def moved(tree):
    """There and back: all arrays are NumPy's in between, and new ones at the end."""
    there = to_numpy(tree)
    arrays = state(there).values()
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in arrays)
    return to_jax(there)


# --- optax ----------------------------------------------------------------------------------------

OPTAX = (
    "adam",
    "adamw with a schedule",
    "sgd with momentum",
    "chain",
    "injected",
    "injected numbers",
    "masked",
    "several steps",
    "partitioned",
    "schedule free",
    "flattened",
    "apply if finite",
)


def transformations():
    optax = pytest.importorskip("optax")
    schedule = optax.cosine_decay_schedule(1e-2, 20)
    mask = {"w": True, "b": False}
    return {
        "adam": optax.adam(1e-2),
        "adamw with a schedule": optax.adamw(schedule),
        "sgd with momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
        "chain": optax.chain(optax.clip_by_global_norm(0.5), optax.lion(1e-2), optax.ema(0.9)),
        "injected": optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
        "injected numbers": optax.inject_hyperparams(optax.rmsprop)(learning_rate=1e-2),
        "masked": optax.masked(optax.adam(1e-2), mask),
        "several steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3),
        "partitioned": optax.partition(
            {"a": optax.adam(1e-2), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
        ),
        "schedule free": optax.contrib.schedule_free_adamw(1e-2),
        "flattened": optax.flatten(optax.adafactor(1e-2)),
        "apply if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTAX)
def test_ten_steps_of_a_moved_optax_state_equal_those_of_the_unmoved_twin(name):
    optax = pytest.importorskip("optax")
    transformation = transformations()[name]

    @jax.jit
    def step(params, opt_state):
        grads = jax.grad(lambda p: ((X @ p["w"] + p["b"]) ** 2).mean())(params)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run(params, opt_state, steps):
        for _ in range(steps):
            params, opt_state = step(params, opt_state)
        return params, opt_state

    start = run(PARAMS, transformation.init(PARAMS), 2)
    before = bits(start)
    new = moved(start)
    assert bits(new) == before
    assert type(new[1]) is type(start[1])
    assert bits(run(*new, 10)) == bits(run(*start, 10))
    assert bits(start) == before


def test_masked_nodes_and_empty_states_stay_what_they_are():
    optax = pytest.importorskip("optax")
    masked = optax.masked(optax.trace(0.9), {"w": True, "b": False}).init(PARAMS)
    new = fmap(copied, masked)
    assert isinstance(new, optax.MaskedState)
    assert isinstance(new.inner_state.trace["b"], optax.MaskedNode)
    assert isinstance(fmap(copied, optax.EmptyState()), optax.EmptyState)


# --- Equinox --------------------------------------------------------------------------------------

EQUINOX = (
    "linear",
    "mlp",
    "sequential",
    "shared",
    "filter_jit",
    "bound method",
    "partial",
    "inference",
)


def equinox_models():
    eqx = pytest.importorskip("equinox")
    key = jax.random.key(0)

    class Tied(eqx.Module):
        shared: Any

        def __init__(self):
            embed = eqx.nn.Embedding(5, 6, key=key)
            head = eqx.nn.Linear(6, 5, use_bias=False, key=key)
            self.shared = eqx.nn.Shared(
                (embed, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight
            )

        def __call__(self, x):
            embed, head = self.shared()
            return head(x + embed(jnp.array(1)))

    class Partial(eqx.Module):
        call: Any
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return self.call(x)

    class Net(eqx.Module):
        mlp: Any

        def run(self, x):
            return self.mlp(x)

    linear = eqx.nn.Linear(6, 6, key=key)
    return {
        "linear": linear,
        "mlp": eqx.nn.MLP(6, 3, 4, 2, key=key),
        "sequential": eqx.nn.Sequential(
            [
                linear,
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.LayerNorm(6),
                eqx.nn.Dropout(inference=True),
            ]
        ),
        "shared": Tied(),
        "filter_jit": eqx.filter_jit(linear),
        "bound method": Partial(Net(eqx.nn.MLP(6, 3, 4, 1, key=key)).run, "bound"),
        "partial": eqx.Partial(lambda w, x: w @ x, jnp.ones((2, 6))),
        "inference": eqx.nn.inference_mode(eqx.nn.Sequential([linear, eqx.nn.Dropout(0.5)])),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", EQUINOX)
def test_equinox_modules_compute_the_same(name):
    model = equinox_models()[name]
    before = bits(model)
    # functions are leaves of Equinox's modules, and no arrays
    new = fmap(copied, model)
    assert bits(new) == before
    assert type(new) is type(model)
    assert new is not model
    again = moved(model)
    assert bits(again) == before
    assert bits(again(X[0])) == bits(new(X[0])) == bits(model(X[0]))
    assert bits(model) == before


@pytest.mark.nightly
def test_equinox_state_goes_along():
    eqx = pytest.importorskip("equinox")

    def make():
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, axis_name="batch", mode="batch")
        return norm, state

    def run(norm, state):
        for scale in (1.0, 2.0):
            out, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                scale * X, state
            )
        return bits(out), bits(state)

    norm, own = make()
    expected = run(norm, own)
    assert run(*fmap(copied, (norm, own))) == expected
    assert run(*moved((norm, own))) == expected


def test_equinox_ties_survive_where_jax_unties():
    eqx = pytest.importorskip("equinox")
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model = eqx.nn.Sequential([linear, linear])
    assert jax.tree.map(copied, model)[0].weight is not jax.tree.map(copied, model)[1].weight
    new = fmap(copied, model)
    assert new[0] is new[1]
    assert new[0].weight is not linear.weight


# --- classes in JAX's registry --------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Parameter:
    """As penzai's structs: frozen, fields named by keys, some of them static."""

    value: Any
    label: str = "w"

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("value"), self.value)], (self.label,)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Layer:
    weight: Parameter
    sublayers: list
    bias: Any = None

    def tree_flatten_with_keys(self):
        names = [field.name for field in dataclasses.fields(self)]
        pairs = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return pairs, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_penzai_like_structs():
    tied = Parameter(jnp.ones(2), "tied")
    model = Layer(tied, [Layer(tied, []), Layer(Parameter(jnp.zeros(2)), [], bias=jnp.ones(1))])
    new = fmap(copied, model)
    assert new.weight is new.sublayers[0].weight
    assert new.weight.label == "tied"
    assert new.sublayers[0].bias is None
    assert bits(new) == bits(model) == bits(moved(model))
    assert list(state(model)) == [
        "weight.value",
        "sublayers.0.weight.value",
        "sublayers.1.weight.value",
        "sublayers.1.bias",
    ]


class Held:
    """As penzai's variables: no pytree, but with a state that is one."""

    def __init__(self, value, label):
        self.label = label
        self.set(value)

    def set(self, value):
        self.held = jax.tree.map(jnp.asarray, value)

    def __get_state_as_jax_pytree__(self):
        return HeldState(self.held, self.label)

    def __set_state_from_jax_pytree__(self, state):
        self.set(state.value)


class Computed(Held):
    """One of which no attribute is what the state has."""

    def set(self, value):
        self.halves = list(value)

    def __get_state_as_jax_pytree__(self):
        return ComputedState(jnp.stack(self.halves), self.label)


class HeldState(Parameter):
    def __jax_pytree_state_to_new_variable__(self):
        return Held(self.value, self.label)


class ComputedState(Parameter):
    def __jax_pytree_state_to_new_variable__(self):
        return Computed(self.value, self.label)


jax.tree_util.register_pytree_with_keys_class(HeldState)
jax.tree_util.register_pytree_with_keys_class(ComputedState)


def test_variables_with_a_state():
    tied = Held({"w": jnp.ones(2)}, "tied")
    model = [tied, tied, Held(jnp.zeros(3), "other"), Computed(jnp.ones((2, 2)), "computed")]
    new = fmap(lambda x: x + 1 if isinstance(x, jax.Array) else x, model)
    assert new[0] is new[1]
    assert [type(one) for one in new] == [Held, Held, Held, Computed]
    assert [one.label for one in new] == ["tied", "tied", "other", "computed"]
    assert [float(x) for one in new[3].halves for x in one] == [2.0] * 4
    assert float(new[2].held[0]) == 1.0
    assert float(tied.held["w"][0]) == 1.0
    assert list(state(model)) == ["0.w", "1.w", "2", "3"]
    there = fmapper.to_numpy(model[:3])
    assert type(there[0].held["w"]) is type(there[2].held) is np.ndarray


def test_variables_with_a_state_are_converted():
    torch = pytest.importorskip("torch")
    weight, count = Held(jnp.ones((3, 2)), "weight"), Held(jnp.zeros((), jnp.int32), "count")

    def function(x):
        count.set(count.held + 1)
        return x @ weight.held + count.held

    converted = fmapper.convert(function, "torch", (jnp.ones((4, 3)),))
    assert [name for name, _ in converted.named_parameters()] == ["weight"]
    assert int(count.held) == 0
    outputs = [converted(torch.ones(4, 3))[0, 0].item() for _ in range(2)]
    assert outputs == [4.0, 5.0]


@pytest.mark.nightly
def test_penzai():
    variables = pytest.importorskip("penzai.core.variables")
    pz = pytest.importorskip("penzai.pz")
    mlp = pytest.importorskip("penzai.models.simple_mlp")
    net = mlp.MLP.from_config(name="net", init_base_rng=jax.random.key(0), feature_sizes=[3, 2])
    new = fmap(copied, net)
    before, after = (one.sublayers[0].sublayers[0].weights for one in (net, new))
    assert type(after) is variables.Parameter
    assert after is not before
    assert after.label == before.label
    arrays = state(net)
    for other in (new, moved(net)):
        assert [*state(other)] == [*arrays]
        assert all(bits(x) == bits(arrays[name]) for name, x in state(other).items())

    def call(x):
        return net(pz.nx.wrap(x).tag("b", "features")).untag("b", "features").unwrap()

    torch = pytest.importorskip("torch")
    x = np.ones((4, 3), np.float32)
    converted = fmapper.convert(call, "torch", (x,))
    np.testing.assert_allclose(
        converted(torch.from_numpy(x)).detach(), call(jnp.asarray(x)), rtol=1e-5, atol=1e-6
    )


def test_flax_struct_dataclasses():
    struct = pytest.importorskip("flax").struct

    @struct.dataclass
    class Inner:
        w: Any
        act: Any = struct.field(pytree_node=False, default=jnp.tanh)

    class Node(struct.PyTreeNode):
        a: Inner
        b: Inner
        n: int = struct.field(pytree_node=False, default=3)

    inner = Inner(jnp.ones(2))
    model = Node(inner, inner)
    new = moved(model)
    assert type(new) is Node
    assert new.a is new.b
    assert (new.n, new.a.act) == (3, jnp.tanh)
    assert bits(new) == bits(model)
    assert bits(new.replace(n=4).a) == bits(inner)


def test_register_dataclass():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Data:
        x: jax.Array
        kind: str = dataclasses.field(default="k", metadata={"static": True})

    data = Data(jnp.ones(2), "mine")
    new = moved({"a": data, "b": data})
    assert new["a"] is new["b"]
    assert new["a"].kind == "mine"


# --- outputs of Hugging Face models ---------------------------------------------------------------


def test_model_outputs_with_nested_ones_and_none():
    torch = pytest.importorskip("torch")
    generic = pytest.importorskip("transformers.utils.generic")

    @dataclasses.dataclass
    class Inner(generic.ModelOutput):
        hidden: Any = None
        attentions: Any = None

    @dataclasses.dataclass
    class Output(generic.ModelOutput):
        loss: Any = None
        logits: Any = None
        inner: Any = None
        cache: Any = None

    logits = torch.ones(2, 3)
    output = Output(logits=logits, inner=Inner(hidden=(logits, torch.zeros(1))), cache=None)
    before = copy.deepcopy(output)
    new = to_jax(output)
    assert type(new) is Output
    assert type(new.inner) is Inner
    assert list(new.keys()) == list(output.keys()) == ["logits", "inner"]
    assert new.loss is None
    assert new.cache is None
    assert new.logits is new["logits"]
    assert new.logits is new.inner.hidden[0]
    assert isinstance(new.inner.hidden[1], jax.Array)
    back = fmapper.to_torch(new)
    assert torch.equal(back.logits, before.logits)
    assert torch.equal(output.logits, before.logits)
    assert output.logits is logits
    assert list(state(output)) == ["logits", "inner.hidden.0", "inner.hidden.1"]
    assert back.to_tuple()[0] is back.logits


def test_tied_weights_in_a_state_dict_of_torch_are_one_array():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    moved = fmapper.to_jax(model.state_dict())  # each entry is a tensor of its own on one memory
    assert moved["0.weight"] is moved["1.weight"]
    assert moved["0.bias"] is not moved["1.bias"]
