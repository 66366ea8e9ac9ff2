"""Arrays by name, arrays as one vector, and the way back."""

import pytest

import fmapper
from fmapper import (
    LossyCastError,
    StructureMismatchError,
    destructure,
    functor,
    load_state,
    state,
)

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")


@functor
class Layer:
    def __init__(self, w, b, name="layer"):
        self.w, self.b, self.name = w, b, name


def model():
    w = np.arange(4, dtype=np.float32).reshape(2, 2)
    return {"layers": [Layer(w, np.zeros(2)), Layer(w, np.ones(2))], "step": 3, "n": np.int64(5)}


def test_state_names_every_array_by_path_and_ties_under_each():
    tree = model()
    named = state(tree)
    assert list(named) == ["layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b", "n"]
    assert named["layers.0.w"] is named["layers.1.w"] is tree["layers"][0].w


def test_state_of_a_torch_module_has_the_names_of_its_state_dict():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ModuleList([])
    )
    assert list(state(module)) == list(module.state_dict())


def test_a_forgotten_declaration_is_no_hole_in_a_state():
    class Forgotten:
        def __init__(self):
            self.w = np.ones(2)

    for take in (state, destructure, lambda tree: load_state(tree, {})):
        with pytest.raises(fmapper.NotAFunctorError, match=r"model\.net: Forgotten holds arrays"):
            take({"net": Forgotten()})


def test_a_number_in_the_tree_where_the_state_has_an_array_is_named():
    with pytest.raises(StructureMismatchError, match=r"step: an array in the state, but .* has 0"):
        load_state({"step": 0}, {"step": np.array(5)})
    with pytest.raises(StructureMismatchError, match=r"step: an array in the state, but .* has 0"):
        load_state({"step": 0}, {"step": np.array(5)}, strict=False)
    with pytest.raises(StructureMismatchError, match=r"step: not an array in the state, but"):
        load_state({"step": 0}, {"step": 5})


def test_floats_of_8_bits_are_not_cast_without_what_may_be_their_scales():
    given = {"w": torch.ones(2, dtype=torch.float8_e4m3fn), "w_scale": torch.ones(1)}
    for fill in (load_state, lambda *x, **y: fmapper.materialize(*x, **y, dtype="float32")):
        with pytest.raises(StructureMismatchError, match=r"w: .* if w_scale has some"):
            fill({"w": torch.zeros(2)}, given, strict=False)
        assert fill({"w": torch.zeros(2)}, {"w": given["w"]})["w"].tolist() == [1, 1]


def test_a_tree_without_memory_is_not_filled_in_silence():
    hollow = torch.nn.Linear(2, 1, device="meta")
    with pytest.raises(StructureMismatchError, match=r"weight: the tree has no memory there"):
        load_state(hollow, state(torch.nn.Linear(2, 1)))
    assert load_state(hollow, state(hollow)).weight.is_meta


def test_names_that_would_clash_are_an_error():
    with pytest.raises(StructureMismatchError, match=r"both called 'a\.b'"):
        state({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})


def test_load_state_gives_a_new_tree_with_the_ties_of_the_old():
    tree = model()
    new = load_state(tree, {name: np.asarray(x) + 1 for name, x in state(tree).items()})
    assert new["layers"][0].w is new["layers"][1].w
    assert new["layers"][0].w.tolist() == [[1, 2], [3, 4]]
    assert tree["layers"][0].w.tolist() == [[0, 1], [2, 3]]
    assert (new["step"], new["n"], new["layers"][0].name) == (3, 6, "layer")


def test_load_state_keeps_backend_dtype_and_device_of_the_tree():
    tree = fmapper.to_jax(Layer(np.ones(2, np.float32), np.zeros(2, np.float32)))
    new = load_state(tree, {"w": torch.tensor([1.5, 2.5], dtype=torch.float64), "b": tree.b})
    assert isinstance(new.w, jax.Array)
    assert new.w.dtype == np.float32
    assert new.w.tolist() == [1.5, 2.5]
    assert new.b is tree.b


def test_load_state_into_a_torch_module_keeps_parameters():
    module = torch.nn.Linear(2, 2)
    new = load_state(
        module, {"weight": np.eye(2, dtype=np.float32), "bias": np.ones(2, np.float32)}
    )
    assert isinstance(new.weight, torch.nn.Parameter)
    assert new.weight.requires_grad
    assert torch.equal(new.weight, torch.eye(2))
    assert not torch.equal(module.weight, new.weight)


def test_load_state_lists_everything_that_does_not_fit():
    tree = model()
    given = state(tree) | {"extra": np.ones(1), "layers.0.b": np.ones(3), "n": "five"}
    given["layers.1.w"] = given["layers.1.w"] + 1
    del given["layers.1.b"]
    with pytest.raises(StructureMismatchError) as caught:
        load_state(tree, given)
    for line in (
        "layers.1.b: missing from the state",
        "extra: in the state, but not in the tree",
        "layers.0.b: shape (3,) in the state, (2,) in the tree",
        "n: str is not an array",
        "layers.1.w: tied to layers.0.w, but the state has other values",
    ):
        assert line in str(caught.value)


def test_load_state_without_strict_leaves_the_rest_alone():
    tree = model()
    new = load_state(tree, {"layers.0.b": np.full(2, 7.0), "extra": np.ones(1)}, strict=False)
    assert new["layers"][0].b.tolist() == [7, 7]
    assert new["layers"][1].b is tree["layers"][1].b
    with pytest.raises(StructureMismatchError, match="shape"):
        load_state(tree, {"layers.0.b": np.ones(3)}, strict=False)


def test_load_state_refuses_values_that_do_not_fit():
    with pytest.raises(LossyCastError, match=r"model\.w"):
        load_state({"w": np.zeros(1, np.float32)}, {"w": np.array([1e300])})


def test_a_value_under_the_second_name_of_a_tie_counts():
    w = np.zeros(2)
    new = load_state({"a": w, "b": w}, {"b": np.ones(2)}, strict=False)
    assert new["a"] is new["b"]
    assert new["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (np.zeros(1, int), np.array([np.nan]), "values do not fit"),
        (np.zeros(1, np.float32), np.array([1 + 2j]), "imaginary parts are lost"),
        (np.zeros(1, bool), np.array([2.0]), "values do not fit"),
        (np.zeros(1, np.int32), np.array([1.5]), "values do not fit"),
    ],
)
def test_values_that_another_kind_of_dtype_cannot_hold_are_refused(old, new, says):
    for move in (lambda x: x, fmapper.to_torch, fmapper.to_jax):
        tree = {"w": move(np.asarray(old, old.dtype)) if old.dtype != int else old}
        with pytest.raises(LossyCastError, match=rf"model\.w: {says}"):
            load_state(tree, {"w": new})


def test_a_parameter_and_its_tie_outside_the_module_stay_one():
    @functor
    class Holder:
        def __init__(self):
            self.net = torch.nn.Linear(2, 2)
            self.w = self.net.weight

    holder = Holder()
    new = load_state(holder, {name: x.detach().numpy() for name, x in state(holder).items()})
    assert new.w is new.net.weight
    assert isinstance(new.w, torch.nn.Parameter)
    vector, rebuild = destructure(holder)
    assert vector.shape == (6,)
    again = rebuild(vector.detach())
    assert again.w is again.net.weight


def test_gradients_of_a_module_through_its_vector():
    module = torch.nn.Linear(2, 2)
    vector, rebuild = destructure(module)
    gradient = torch.func.grad(lambda v: (rebuild(v).weight ** 2).sum())(vector.detach())
    assert torch.equal(gradient[:4], 2 * module.weight.detach().flatten())


def test_destructure_takes_tied_arrays_once_and_restores_ties_and_dtypes():
    w = np.arange(3, dtype=np.float32)
    tree = {"a": w, "b": [w, np.ones(2, np.float64)], "n": np.arange(2), "name": "x"}
    vector, rebuild = destructure(tree)
    assert vector.dtype == np.float64
    assert vector.tolist() == [0, 1, 2, 1, 1]
    new = rebuild(vector + 1)
    assert new["a"] is new["b"][0]
    assert (new["a"].dtype, new["b"][1].dtype) == (np.float32, np.float64)
    assert new["a"].tolist() == [1, 2, 3]
    assert new["n"] is tree["n"]
    assert new["name"] == "x"


def test_destructure_of_complex_arrays():
    tree = [np.array([1 + 2j]), np.array([3.0])]
    vector, rebuild = destructure(tree)
    assert vector.tolist() == [1 + 2j, 3]
    new = rebuild(2 * vector)
    assert new[0].tolist() == [2 + 4j]
    assert new[1].dtype == np.float64
    assert new[1].tolist() == [6]


def test_destructure_refuses_another_length_and_mixed_devices():
    _, rebuild = destructure({"w": np.ones(2)})
    for wrong in (np.ones(3), np.ones((2, 1)), [1.0, 2.0]):
        with pytest.raises(StructureMismatchError, match=r"expected a vector of shape \(2,\)"):
            rebuild(wrong)
    with pytest.raises(fmapper.MixedDevicesError, match=r"model\[1\]"):
        destructure([np.ones(1), torch.ones(1)])


def test_destructure_of_nothing():
    vector, rebuild = destructure({"name": "x"})
    assert vector.shape == (0,)
    assert rebuild(vector) == {"name": "x"}


def test_destructure_can_be_differentiated_and_jitted():
    tree = fmapper.to_jax({"w": np.arange(3, dtype=np.float32), "b": np.ones(1, np.float32)})
    vector, rebuild = destructure(tree)

    def loss(v):
        new = rebuild(v)
        return (new["w"] ** 2).sum() + 3 * new["b"].sum()

    assert jax.jit(jax.grad(loss))(vector).tolist() == [0, 2, 4, 3]
    tensors = fmapper.to_torch(tree)
    vector, rebuild = destructure(tensors)
    assert torch.func.grad(loss)(vector).tolist() == [0, 2, 4, 3]


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_the_loaded_arrays_are_apart_from_the_state(backend):
    """And from each other, where the tree has no tie; what was there stays as it was."""
    pytest.importorskip(backend)
    move = {"numpy": fmapper.to_numpy, "torch": fmapper.to_torch, "jax": fmapper.to_jax}[backend]
    w = move(np.ones(3, np.float32))
    base = move(np.ones(4, np.float32))
    tree = move({"a": np.zeros(3, "f"), "b": np.zeros(3, "f"), "c": np.zeros(4, "f")})
    tree["d"] = tree["a"]
    new = load_state(tree, {"a": w, "b": w, "c": base, "d": w})
    assert new["d"] is new["a"]
    if backend != "jax":  # nobody can write to an array of JAX
        new["a"][0] = 7
        new["c"][0] = 7
        assert [float(x[0]) for x in (w, new["b"], base, tree["a"])] == [1, 1, 1, 0]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_view_stays_a_view(backend):
    move = {"numpy": fmapper.to_numpy, "torch": fmapper.to_torch}[backend]
    w = np.arange(6.0).reshape(2, 3)
    tree = move({"w": w, "t": w.T, "row": w[1]})
    new = load_state(tree, {"w": w + 1, "t": (w + 1).T, "row": w[1] + 1})
    new["w"][1, 0] = 42
    assert float(new["t"][0, 1]) == float(new["row"][0]) == 42
    assert float(tree["w"][1, 0]) == 3
    with pytest.raises(StructureMismatchError, match="t: a view of w, but the state has other"):
        load_state(tree, {"w": w, "t": w.T + 1, "row": w[1]})
    alone = load_state(tree, {"t": w.T * 2}, strict=False)
    assert np.array_equal(np.asarray(alone["t"]), w.T * 2)
