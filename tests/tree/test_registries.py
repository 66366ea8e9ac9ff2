"""Functors as pytrees of JAX, torch and optree, and registered classes of others as nodes."""

import dataclasses
import subprocess
import sys
import textwrap
from collections import OrderedDict
from typing import Any

import pytest

import fmapper
from fmapper import fmap, functor

np = pytest.importorskip("numpy")
jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
optree = pytest.importorskip("optree")
jnp = jax.numpy


@functor
class Layer:
    def __init__(self, w, b=None, name="layer"):
        self.w, self.b, self.name = w, b, name

    def __call__(self, x):
        return x @ self.w


def layer(xp=jnp):
    return Layer(xp.ones((2, 2)), {"inner": Layer(xp.zeros(2), name="inner")})


def test_jax_sees_arrays_nodes_and_containers_and_nothing_else():
    paths, _ = jax.tree_util.tree_flatten_with_path(layer())
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".w", ".b['inner'].w"]


@pytest.mark.nightly
def test_jit_grad_and_vmap_take_a_functor_and_give_one_back():
    model = layer()
    doubled = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(model)
    assert type(doubled) is Layer
    assert (doubled.name, doubled.b["inner"].name) == ("layer", "inner")
    assert jnp.array_equal(doubled.w, 2 * model.w)
    grads = jax.grad(lambda m: (m(m.w) ** 2).sum())(model)
    assert type(grads) is Layer
    stepped = fmap(lambda p, g: p - g if hasattr(p, "shape") else p, model, grads)
    assert jnp.array_equal(stepped.w, model.w - grads.w)
    batched = jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, jnp.ones((5, 2)))
    assert batched.shape == (5, 2)


def test_static_children_are_part_of_what_jit_compiles_for():
    traces = []

    @jax.jit
    def named(m):
        traces.append(m.name)
        return m.w.sum()

    for name in ("a", "b", "a"):
        named(Layer(jnp.ones(2), name=name))
    assert traces == ["a", "b"]


def test_the_structure_holds_no_array_of_the_functor():
    leaves, treedef = jax.tree.flatten(layer())
    assert len(leaves) == 2
    held = fmapper.backends.holds_arrays(treedef.node_data()[1].static)
    carried = fmapper.backends.holds_arrays(treedef.node_data()[1].carried)
    assert not held
    assert not carried


def test_trees_of_other_things_keep_the_structure_in_jax():
    model = layer()
    numbers = jax.tree.map(lambda x: 0, model)
    assert jax.tree.structure(numbers) == jax.tree.structure(model)
    summed = jax.tree.map(lambda x, n: x.sum() + n, model, numbers)
    assert float(summed.w) == 4
    axes = jax.tree.map(lambda _: None, model)
    assert axes.w is None


def test_attributes_that_are_no_children_reach_the_other_side():
    @functor(children=("w",))
    class Partly:
        def __init__(self, w, note):
            self.w, self.note = w, note

    out = jax.jit(lambda m: m)(Partly(jnp.ones(2), "kept"))
    assert out.note == "kept"


def test_custom_rebuild_in_jax():
    @functor(children=("w",), rebuild=lambda self, new: Scaled(new["w"], self.factor))
    class Scaled:
        def __init__(self, w, factor):
            self.w, self.factor = w, factor

    out = jax.jit(lambda m: jax.tree.map(lambda x: x * m.factor, m))(Scaled(jnp.ones(2), 3))
    assert out.factor == 3
    assert out.w.tolist() == [3, 3]


@pytest.mark.parametrize("slots", [False, True])
def test_dataclasses_in_jax(slots):
    @functor
    @dataclasses.dataclass(frozen=True, slots=slots)
    class Data:
        w: Any
        n: int

    out = jax.jit(lambda m: jax.tree.map(lambda x: x + m.n, m))(Data(jnp.zeros(2), 3))
    assert out.w.tolist() == [3, 3]
    assert out.n == 3


def test_subclasses_are_known_to_jax_at_once():
    class Sub(Layer):
        pass

    assert type(jax.jit(lambda m: m)(Sub(jnp.ones(2)))) is Sub


def test_a_subclass_that_is_a_leaf_is_one_whole_in_jax():
    @fmapper.leaf
    class Whole(Layer):
        pass

    whole = Whole(jnp.ones(1))
    leaves, treedef = jax.tree.flatten([whole])
    assert leaves == []
    assert jax.tree.unflatten(treedef, leaves)[0] is whole


def test_a_class_that_slots_made_anew_is_known_after_a_call():
    @dataclasses.dataclass(slots=True)
    @functor
    class Data:
        w: Any
        b: Any

    model = Data(jnp.ones((4, 2)), jnp.ones((4, 2)))
    assert not fmapper.is_leaf(model)
    assert jax.jit(lambda m: m.w.sum())(model) == 8
    axes = jax.tree.map(lambda _: 0, model)
    assert jax.vmap(lambda m: m.w.sum(), in_axes=(axes,))(model).shape == (4,)
    shapes = jax.eval_shape(lambda m: m, model)
    assert jax.tree.structure(shapes) == jax.tree.structure(model)


def test_classes_derived_before_the_declaration_are_known_too():
    class Theirs:
        def __init__(self, w):
            self.w = w

    class Derived(Theirs):
        pass

    functor(Theirs)
    assert len(jax.tree.leaves(Derived(jnp.ones(1)))) == 1
    assert jax.tree.leaves(Derived(jnp.ones(1)))[0].shape == (1,)


def test_torch_func_takes_a_functor():
    model = layer(torch)
    grads = torch.func.grad(lambda m: (m(m.w) ** 2).sum())(model)
    assert type(grads) is Layer
    assert grads.name == "layer"
    # the second-order reference: d/dw sum((w w)^2) of a matrix of ones
    w = torch.ones(2, 2, requires_grad=True)
    ((w @ w) ** 2).sum().backward()
    assert torch.equal(grads.w, w.grad)
    out = torch.func.vmap(lambda m, x: m(x), in_dims=(None, 0))(model, torch.ones(5, 2))
    assert out.shape == (5, 2)


def test_a_class_that_a_notebook_defines_again_is_a_pytree_each_time():
    cell = "@functor\nclass Cell:\n    def __init__(self, w):\n        self.w = w\n"
    scope = {"functor": functor, "__name__": "__main__"}
    made = []
    for _ in range(3):
        exec(cell, scope)
        made.append(scope["Cell"](jnp.ones(2)))
        for model in made:
            assert type(jax.jit(lambda m: m)(model)) is type(model)
            assert len(torch.utils._pytree.tree_leaves(model)) == 1
            assert len(optree.tree_leaves(model, namespace="fmapper")) == 1
    assert jax.tree.structure(made[0]) != jax.tree.structure(made[1])


def test_torch_pytree_keys():
    paths, _ = torch.utils._pytree.tree_flatten_with_path(layer(torch))
    assert [torch.utils._pytree.keystr(path) for path, _ in paths] == [".w", ".b['inner'].w"]


def test_optree_maps_a_functor_in_the_namespace_fmapper():
    model = Layer(1, [2, 3], name=4)
    new = optree.tree_map(lambda x: x + 1, model, namespace="fmapper")
    assert type(new) is Layer
    assert (new.w, new.b, new.name) == (2, [3, 4], 5)
    paths = optree.tree_paths(model, namespace="fmapper")
    assert paths == [("w",), ("b", 0), ("b", 1), ("name",)]
    assert optree.tree_leaves(model) == [model]


@pytest.mark.nightly
def test_registration_is_late_imports_nothing_and_happens_once():
    code = """
        import sys
        from fmapper import fmap, functor

        @functor
        class Late:
            def __init__(self, w):
                self.w = w

        assert not {"jax", "torch", "optree", "numpy"} & sys.modules.keys()
        import jax, torch, optree
        for _ in range(2):
            fmap(lambda x: x, Late(1))
        assert jax.jit(lambda m: m)(Late(jax.numpy.ones(2))).w.shape == (2,)
        assert torch.utils._pytree.tree_leaves(Late(torch.ones(2)))[0].shape == (2,)
        assert optree.tree_leaves(Late(1), namespace="fmapper") == [1]
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_class_that_its_owner_registered_with_jax_is_left_alone():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Owned:
        w: Any

    functor(Owned)
    assert jax.tree.leaves(Owned(1)) == [1]  # as its owner said, where fmapper's rule says static


# --- the other way: registered classes are nodes -------------------------------------------------


@pytest.mark.nightly
def test_equinox_modules_are_nodes_with_nothing_declared():
    eqx = pytest.importorskip("equinox")
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert list(fmapper.children(linear)) == ["weight", "bias"]
    new = fmap(lambda x: 2 * x, {"a": linear, "b": linear})
    assert new["a"] is new["b"]
    assert type(new["a"]) is eqx.nn.Linear
    assert jnp.array_equal(new["a"].weight, 2 * linear.weight)
    assert new["a"].in_features == 2
    moved = fmapper.to_numpy(linear)
    assert type(moved.weight) is np.ndarray


def test_flax_struct_and_optax_states_are_nodes():
    flax = pytest.importorskip("flax")
    optax = pytest.importorskip("optax")

    @flax.struct.dataclass
    class State:
        params: Any
        step: int = flax.struct.field(pytree_node=False, default=0)

    new = fmap(lambda x: x + 1, State({"w": jnp.zeros(2)}, step=7))
    assert new.step == 7
    assert new.params["w"].tolist() == [1, 1]
    state = optax.adam(1e-3).init({"w": jnp.zeros(2)})
    moved = fmapper.to_numpy(state)
    assert jax.tree.structure(moved) == jax.tree.structure(state)


def test_a_registered_subclass_of_a_container_follows_its_registry():
    class Output(OrderedDict):
        """Like the outputs of Hugging Face models: rebuilt through its own constructor."""

    torch.utils._pytree.register_pytree_node(
        Output,
        lambda out: (list(out.values()), list(out)),
        lambda values, keys: Output([*zip(keys, values, strict=True), ("rebuilt", True)]),
    )
    new = fmap(lambda x: x + 1, Output(a=1))
    assert type(new) is Output
    assert new == Output(a=2, rebuilt=True)


def test_a_class_registered_with_optree_after_it_was_seen_as_a_leaf():
    class Box:
        def __init__(self, w):
            self.w = w

    assert fmapper.is_leaf(Box(1))
    optree.register_pytree_node(
        Box, lambda box: ((box.w,), None, ("w",)), lambda _, c: Box(*c), namespace="fmapper"
    )
    assert fmap(lambda x: x + 1, Box(1)).w == 2


def test_ties_survive_in_registered_nodes():
    eqx = pytest.importorskip("equinox")
    w = jnp.ones(2)

    class Pair(eqx.Module):
        a: Any
        b: Any

    new = fmap(lambda x: 2 * x, Pair(w, [w]))
    assert new.a is new.b[0]
