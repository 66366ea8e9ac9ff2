"""Trees with shapes but no values: made, moved, refused, and filled from a state."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmapper
from fmapper import (
    StructureMismatchError,
    cast,
    functor,
    get_device,
    materialize,
    plan,
    state,
    to_cpu,
    to_device,
    to_jax,
    to_numpy,
    to_torch,
)

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

ABSTRACT = {"torch": to_torch(device="meta"), "jax": to_jax(device="meta")}
CONCRETE = {"torch": to_torch, "jax": to_jax}
SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


@functor
class Net:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


class Tied(torch.nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.emb.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.emb(x)))


# --- arrays without values ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ABSTRACT)
def test_every_backend_gives_its_shapes(backend: str) -> None:
    w = np.ones((2, 3), np.float32)
    tree = {
        "n": w,
        "t": torch.ones(2),
        "j": jnp.ones(1, jnp.bfloat16),
        "i": np.arange(2, dtype=np.int8),
    }
    tree["tied"] = w
    new = ABSTRACT[backend](tree)
    assert str(get_device(new)) == f"{backend}:meta"
    assert new["n"] is new["tied"]
    adapter = fmapper.backends.get_adapter(backend)
    for key, dtype in {"n": "float32", "t": "float32", "j": "bfloat16", "i": "int8"}.items():
        assert adapter.dtype(new[key]) == dtype
        assert adapter.shape(new[key]) == tuple(tree[key].shape)


@pytest.mark.parametrize("source", [np.ones, torch.ones, jnp.ones])
@pytest.mark.parametrize("backend", ABSTRACT)
def test_shapes_take_no_memory(source: Any, backend: str) -> None:
    tree = {"w": source(1 << 22), "b": source(1 << 22)}
    mover = ABSTRACT[backend](dtype="float16")
    tracemalloc.start()
    try:
        assert str(get_device(mover(tree))) == f"{backend}:meta"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    made = plan(mover, tree)
    assert [(leaf.action, leaf.nbytes, leaf.reason) for leaf in made] == [("cast", 0, "")] * 2


def test_to_device_meta_keeps_backends() -> None:
    new = to_device("meta")({"t": torch.ones(2), "j": jnp.ones(2), "k": jax.random.key(0)})
    assert new["t"].is_meta
    assert new["j"] == SHAPE
    assert new["k"].dtype == jax.random.key(0).dtype
    with pytest.raises(fmapper.DeviceUnavailableError, match=r"to_torch\(device='meta'\)"):
        to_device("meta")(np.ones(2))


def test_shapes_go_to_shapes() -> None:
    other = to_torch(device="meta")([SHAPE, SHAPE])
    assert other[0].is_meta
    assert other[0] is other[1]
    assert to_jax(device="meta")(torch.ones(2, device="meta")) == SHAPE
    assert to_jax(SHAPE) is SHAPE
    assert cast([SHAPE], "float16")[0].dtype == jnp.float16
    empty = torch.ones(2, device="meta")
    assert to_torch(empty) is empty
    copied = to_torch(empty, copy=True)
    assert copied.is_meta
    assert copied is not empty


@pytest.mark.parametrize("leaf", [SHAPE, torch.ones(2, device="meta")], ids=["jax", "torch"])
@pytest.mark.parametrize("mover", [to_cpu, to_numpy, to_torch(device="cpu"), to_jax(device="cpu")])
def test_what_has_no_values_cannot_get_any_by_moving(leaf: Any, mover: Any) -> None:
    with pytest.raises(fmapper.MoveError, match=r"model\.w.*(no values|no data)"):
        mover({"w": leaf})
    (said,) = plan(mover, {"w": leaf})
    assert said.action == "refused"


def test_a_forgotten_functor_with_shapes_is_refused() -> None:
    class Undeclared:
        w = None

    holder = Undeclared()
    holder.w = SHAPE
    with pytest.raises(fmapper.NotAFunctorError):
        to_torch([holder], device="meta")


def test_eval_shape_trees_are_trees() -> None:
    made = jax.eval_shape(lambda: Net(w=jnp.ones(2), layers=[{"b": jnp.zeros((1, 3))}], n=3))
    assert list(state(made)) == ["w", "layers.0.b"]
    assert [leaf.nbytes for leaf in plan(to_torch(device="meta"), made)] == [0, 0]
    full = materialize(made, {"w": np.ones(2, np.float32), "layers.0.b": torch.zeros(1, 3)})
    assert isinstance(full.w, jax.Array)
    assert isinstance(full.layers[0]["b"], jax.Array)


# --- filling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("give", [to_torch, to_numpy, to_jax])
def test_a_module_on_meta(give: Any) -> None:
    torch.manual_seed(0)
    net = Tied().eval()
    with torch.device("meta"):
        empty = Tied().eval()
    new = materialize(empty, give(state(net)))
    assert type(new) is Tied
    assert type(new.emb.weight) is torch.nn.Parameter
    assert new.emb.weight is new.head.weight
    assert not new.head.bias.requires_grad
    assert torch.equal(new(torch.arange(5)), net(torch.arange(5)))
    assert empty.emb.weight.is_meta, "the input is never changed"
    assert list(new.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize("names", [["a"], ["b"], ["a", "b"]])
@pytest.mark.parametrize("backend", ABSTRACT)
def test_a_tied_array_may_have_either_name(backend: str, names: list[str]) -> None:
    w = np.ones(2, np.float32)
    empty = ABSTRACT[backend]({"a": w, "b": w})
    new = materialize(empty, {name: w.copy() for name in names})
    assert new["a"] is new["b"]
    assert new["a"].tolist() == [1, 1]


def test_what_is_not_tied_stays_apart() -> None:
    w = torch.ones(2, 2)
    empty = ABSTRACT["torch"]({"a": np.ones((2, 2), np.float32), "b": np.ones((2, 2), np.float32)})
    for given_b in (w, w.detach(), w.T):
        new = materialize(empty, {"a": w, "b": given_b})
        new["b"][0] = 7
        assert new["a"].tolist() == [[1, 1], [1, 1]]
        w.fill_(1)


def test_what_is_right_is_not_copied() -> None:
    w = torch.ones(2)
    assert materialize([torch.ones(2, device="meta")], {"0": w})[0] is w


def test_all_problems_in_one_error() -> None:
    shared = torch.ones(2, device="meta")
    tree = {
        "missing": torch.ones(2, device="meta"),
        "shape": torch.ones(2, device="meta"),
        "dtype": torch.ones(2, device="meta"),
        "whole": torch.ones(2, device="meta", dtype=torch.int64),
        "none": torch.ones(2, device="meta"),
        "empty": torch.ones(2, device="meta"),
        "a": shared,
        "b": shared,
        "c": [shared_too := torch.ones(3, device="meta"), shared_too],
        "here": torch.ones(1),
        "lazy": torch.nn.LazyLinear(2).weight,
    }
    given_state = {
        "shape": np.ones(3, np.float32),
        "dtype": np.ones(2, np.float16),
        "whole": np.ones(2, np.float32),
        "none": "text",
        "empty": torch.ones(2, device="meta"),
        "a": np.ones(2, np.float32),
        "b": np.zeros(2, np.float32),
        "extra": np.ones(1),
        "lazy": np.ones(1),
    }
    with pytest.raises(StructureMismatchError) as caught:
        materialize(tree, given_state)
    lines = {line.split(":")[0].strip(): line for line in str(caught.value).splitlines()[1:]}
    assert "shape (3,) in the state, (2,) in the tree" in lines["shape"]
    assert "dtype float16 in the state, float32 in the tree; dtype= casts" in lines["dtype"]
    assert lines["whole"].endswith("dtype float32 in the state, int64 in the tree")
    assert "str is not an array" in lines["none"]
    assert "no values there either" in lines["empty"]
    assert "tied to a, but the state has other values" in lines["b"]
    assert "not in the state (nor is c.1, tied to it)" in lines["c.0"]
    assert "not in the state" in lines["missing"]
    assert "in the state, but not in the tree" in lines["extra"]
    assert "no values yet" in lines["lazy"]
    assert "default=" in str(caught.value).splitlines()[-1]
    assert len(lines) == 11


class Rotary(torch.nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("freq", torch.arange(3.0), persistent=False)


def test_buffers_that_no_state_has_come_from_default() -> None:
    values = Rotary().state_dict()
    with torch.device("meta"):
        empty = Rotary()
    with pytest.raises(StructureMismatchError, match=r"freq: not in the state(.|\n)*default="):
        materialize(empty, values)
    real = dict(Rotary().named_buffers())
    asked = []

    def compute(name: str, array: Any) -> Any:
        asked.append((name, tuple(array.shape)))
        return np.arange(3, dtype=np.float32)

    for default in (real, compute):
        new = materialize(empty, values, default=default)
        assert new.freq.tolist() == [0, 1, 2]
        assert list(new.state_dict()) == ["w"]
    assert asked == [("freq", (3,))]
    with pytest.raises(StructureMismatchError, match=r"freq: shape \(2,\)"):
        materialize(empty, values, default=lambda name, array: torch.ones(2))
    assert materialize(empty, values, strict=False).freq.is_meta


def test_a_default_may_have_either_name_of_a_tie() -> None:
    w = torch.ones(2, device="meta")
    new = materialize({"a": w, "b": w}, {}, default={"b": np.ones(2, np.float32)})
    assert new["a"] is new["b"]


def test_arrays_with_values_stay_unless_the_state_has_them() -> None:
    tree = {"x": torch.ones(2, device="meta"), "n": np.ones(2), "j": jnp.ones(2), "k": 3}
    new = materialize(tree, {"x": torch.zeros(2), "j": torch.zeros(2)})
    assert new["n"] is tree["n"]
    assert isinstance(new["j"], jax.Array)
    assert new["j"].tolist() == new["x"].tolist() == [0, 0]


def test_dtype_and_device() -> None:
    tree = {"w": torch.ones(2, device="meta"), "n": torch.ones(2, device="meta", dtype=torch.int64)}
    values = {"w": np.ones(2, np.float64), "n": np.ones(2, np.int64)}
    new = materialize(tree, values, dtype="bfloat16", device="cpu")
    assert (new["w"].dtype, new["n"].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(fmapper.LossyCastError, match=r"model\.w"):
        materialize(tree, values | {"w": np.full(2, 1e300)}, dtype="float16")
    with pytest.raises(fmapper.DeviceUnavailableError):
        materialize(tree, values, dtype="float32", device="cuda:99")
    with pytest.raises(fmapper.DeviceError, match=r"arrays of torch, which cannot be on jax:cpu"):
        materialize(tree, values, dtype="float32", device="jax:cpu")


def test_what_jax_cannot_hold_is_narrowed_as_in_a_move() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = materialize([jax.ShapeDtypeStruct((1,), jnp.int32)], {"0": torch.tensor([5])})
    assert (new[0].dtype, new[0].tolist()) == (jnp.int32, [5])
    with pytest.raises(fmapper.LossyCastError):
        materialize([jax.ShapeDtypeStruct((1,), jnp.int32)], {"0": torch.tensor([2**40])})


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
def test_wide_integers_that_jax_cannot_hold_are_refused(dtype: str, convert: Any) -> None:
    like = {"n": jax.ShapeDtypeStruct((2,), dtype)}  # as `jax.eval_shape` and files may have it
    assert materialize(like, {"n": convert(np.array([5, 3], dtype))})["n"].tolist() == [5, 3]
    with pytest.raises(fmapper.LossyCastError, match=r"model\.n: integers do not fit"):
        materialize(like, {"n": convert(np.array([2**40 + 7, 3], dtype))})


@pytest.mark.gpu("torch")
def test_straight_to_the_gpu() -> None:
    with torch.device("meta"):
        empty = Tied()
    new = materialize(empty, Tied().state_dict(), device="cuda:0")
    assert {p.device.type for p in new.state_dict().values()} == {"cuda"}
    assert new.emb.weight is new.head.weight


# --- there and back -----------------------------------------------------------------------------

DTYPES = ("float32", "float16", "int8", "bool", "complex64", "uint32")


@st.composite
def trees(draw: st.DrawFn) -> Any:
    pool: list[Any] = []

    def grow(depth: int) -> Any:
        if pool and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(pool))
        kind = draw(st.integers(0, 4 if depth else 1))
        new: Any
        if kind == 1:
            return draw(st.sampled_from((3, "x", None)))
        if kind == 0:
            shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
            numbers = draw(st.integers(0, 100))
            new = np.full(shape, numbers).astype(draw(st.sampled_from(DTYPES)))
        elif kind == 2:
            new = [grow(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        else:
            keys = draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True))
            children = {key: grow(depth - 1) for key in keys}
            new = children if kind == 3 else Net(**children)
        pool.append(new)
        return new

    return grow(3)


def flat(tree: Any) -> list[Any]:
    return fmapper.fleaves(tree)


@pytest.mark.parametrize("backend", ABSTRACT)
@given(tree=trees(), data=st.data())
@settings(max_examples=100)
def test_there_and_back(backend: str, tree: Any, data: st.DataObject) -> None:
    want = CONCRETE[backend](tree)
    empty = ABSTRACT[backend](tree)
    named = state(want)
    give = data.draw(st.sampled_from([lambda x: x, to_numpy, to_torch, to_jax]))
    given_state = {name: give(array) for name, array in named.items()}
    seen: dict[int, list[str]] = {}
    for name, array in named.items():
        seen.setdefault(id(array), []).append(name)
    for names in seen.values():  # a tied array needs one of its names only
        keep_one = data.draw(st.sampled_from(names))
        for name in names:
            if name != keep_one and data.draw(st.booleans()):
                del given_state[name]
    new = materialize(empty, given_state)
    got, wanted = flat(new), flat(want)
    assert list(map(type, got)) == list(map(type, wanted))
    for a, b in zip(got, wanted, strict=True):
        if fmapper.backends.holds_arrays(b):
            a_host, b_host = to_numpy(a), to_numpy(b)
            assert (a_host.dtype, a_host.shape) == (b_host.dtype, b_host.shape)
            assert a_host.tobytes() == b_host.tobytes()
        else:
            assert a == b
    arrays = [i for i, leaf in enumerate(wanted) if fmapper.backends.holds_arrays(leaf)]
    ties = [[wanted[i] is wanted[j] for i in arrays] for j in arrays]
    assert [[got[i] is got[j] for i in arrays] for j in arrays] == ties
    assert all(fmapper.get_device(got[i]).kind == "cpu" for i in arrays)  # type: ignore[union-attr]
