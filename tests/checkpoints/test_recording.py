"""`Rules.record`: what a function does with arrays is what the rules do, to the last bit."""

import random
import re

import pytest

import fmapper
from fmapper import CheckpointError

np = pytest.importorskip("numpy")

from fmapper.checkpoints import (  # noqa: E402
    LazyArray,
    Rules,
    Storage,
    StorageView,
    put,
    take,
)
from support.recording import array, layers, restores, same  # noqa: E402

# memory


@pytest.mark.parametrize("seed", range(20))
def test_views_of_memory(seed):
    rng = random.Random(seed)
    for _ in range(5):
        shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4)))
        base = np.arange(np.prod(shape)).reshape(shape)
        memory = Storage(LazyArray.of(base.copy()))
        for turn in range(3):
            seen = _random_view(base, rng)
            place = _place(seen, base)
            assert (memory.read(place).read() == seen).all()
            new = np.arange(1000 * turn, 1000 * turn + seen.size).reshape(seen.shape)
            memory.write(place, LazyArray.of(new))
            seen[...] = new
            assert (memory.content.read().reshape(shape) == base).all()
            at = np.random.default_rng(seed).permutation(base.size)[: rng.randint(1, 24)]
            assert (take(memory.content, at).read() == base.ravel()[at]).all()
            put(memory, at, LazyArray.of(at * 2))
            base.ravel()[at] = at * 2
            assert (memory.content.read().reshape(shape) == base).all()


def _place(view, base):
    start = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 8
    return StorageView(start, view.shape, tuple(step // 8 for step in view.strides))


def _random_view(view, rng):
    for _ in range(rng.randint(0, 4)):
        axis = rng.randrange(view.ndim) if view.ndim else 0
        before, kind = (slice(None),) * axis, rng.randint(0, 4)
        if kind == 0:
            view = view.transpose(rng.sample(range(view.ndim), view.ndim))
        elif kind == 1 and view.ndim:
            start = rng.randrange(view.shape[axis])
            view = view[(*before, slice(start, rng.randint(start + 1, view.shape[axis])))]
        elif kind == 2 and view.ndim:
            view = view[(*before, rng.randrange(view.shape[axis]), ...)]
        elif kind == 3 and view.ndim:
            view = view[(*before, slice(None, None, rng.choice([-1, 2])))]
        elif kind == 4 and view.flags.c_contiguous:
            view = view.reshape(*view.shape[:1], 1, -1)
    return view


# functions on arrays of NumPy


def test_layers_become_one_rule():
    def convert(state):
        return {re.sub(r"h\.(\d+)\.w", r"blocks.\1.kernel", name): w.T for name, w in state.items()}

    rules = same(convert, layers(w=(3, 2)))
    assert len(rules) == 2
    assert str(rules.rules[0]) == "Transpose('h.{i}.w')"
    restores(rules, layers(w=(3, 2)))


def test_patterns_match_no_other_name_on_the_way_back():
    given = {name: np.float32([at]) for at, name in enumerate(["down1.b", "down2.b", "norm.b"])}
    names = {"down1.b": "encode_1.b", "down2.b": "encode_2.b", "norm.b": "encode_norm.b"}
    rules = Rules.record(lambda state: {names[name]: x for name, x in state.items()}, given)
    back = rules.inverse().apply(rules.apply(given))
    assert {name: x.read() for name, x in back.items()} == given


def test_fused_projections():
    def convert(state):
        out = {}
        for i in range(3):
            fused = state[f"h.{i}.qkv"].reshape(3, 4, 2, 8)
            for name, part in zip("qkv", fused, strict=True):
                out[f"b.{i}.{name}"] = np.ascontiguousarray(part.transpose(2, 0, 1))
            q, k = np.split(state[f"h.{i}.qk"], [5])
            out[f"b.{i}.joined"] = np.concatenate([k, q], axis=-2)
        return out

    state = layers(qkv=(24, 8), qk=(7, 2))
    rules = same(convert, state)
    restores(rules, state)
    assert len(rules) <= 9


def test_arrays_that_the_function_makes():
    def convert(state):
        kernels = np.empty((3, 5, 6), np.float32)
        for i in range(3):
            kernels[i] = state[f"h.{i}.w"].T
        embedding = np.zeros((10, 4), np.float32)
        embedding[:7] = state["emb"]
        rows = np.zeros((6, 4), np.float32)
        rows[[4, 1, 0]] = state["emb"][:3]
        view = np.full_like(embedding, 2.0)[2:9].T
        view[:, ::-1] = state["emb"].T
        return {
            "kernels": kernels,
            "embedding": embedding,
            "rows": rows,
            "base": view.T,
            "zeros": np.zeros(3),
            "padded": np.pad(state["emb"], ((0, 1), (2, 0))),
            "stack": np.array([state["h.0.v"], state["h.1.v"], state["h.2.v"]]),
        }

    rules = same(convert, {**layers(w=(6, 5), v=(2,)), "emb": array(7, 4)})
    assert "Stack('h.{n}.w', 'kernels', over='n')" in str(rules)


def test_arithmetic():
    def convert(state):
        state["h.0.a"] *= 3
        state["h.2.a"][1] = 0
        return {
            "sum": state["h.0.a"] + state["h.0.b"],
            "one": 1 + state["h.1.a"],
            "less": 0.5 - state["h.1.b"],
            "third": state["h.2.a"] / 3.0,
            "half": state["h.2.b"].astype(np.float16) * np.float16(0.1),
            "wide": state["h.2.b"].astype("float64"),
            "minus": -state["h.1.b"],
            "total": np.sum(np.stack([state["h.0.b"], state["h.1.b"]]), axis=0),
        }

    rules = same(
        lambda state: convert({n: x.copy() for n, x in state.items()}), layers(a=(5,), b=(5,))
    )
    assert "Sum(['h.0.a'" in str(rules)
    with pytest.raises(CheckpointError, match="the terms of a sum cannot be told apart"):
        Rules.record(lambda s: {"x": s["h.0.a"] + s["h.0.b"]}, layers(a=(5,), b=(5,))).inverse()


def test_a_wider_dtype_is_inverted_exactly():
    state = {"w": array(4, dtype="f2")}
    restores(same(lambda s: {"k": s["w"].astype(np.float32)}, state), state)


def test_moves_of_elements():
    def convert(state):
        w = state["w"]
        return {
            "flip": w[::-1],
            "columns": w[:, [2, 0, 1]],
            "every": w[::2],
            "roll": np.roll(w, 1, axis=1),
            "repeat": np.repeat(w, 2, axis=0),
            "tile": np.tile(w, (1, 2)),
            "mask": w[np.array([True, False, True, False, True])],
            "swap": np.moveaxis(w.reshape(5, 2, 3), 1, 0),
            "fortran": w.reshape(10, 3, order="F"),
            "flat": w.T.ravel(),
            "one": w[1, 2],
            "taken": np.take(w, [3, 1], axis=1),
            "v": np.vstack([w[0], w[1]]),
            "h": np.hstack([w, w]),
            "d": np.dstack([w, w]),
            "c": np.column_stack([w[0], w[1]]),
            "block": np.block([[w, w], [w, w]]),
            "einsum": np.einsum("ij->ji", w),
        }

    same(convert, {"w": array(5, 6)})


def test_what_the_function_does_with_a_state_in_place():
    def hook(state):
        for name in list(state):
            if name.endswith("ln"):
                state[f"{name}.weight"] = state.pop(name)

    rules = Rules.record(hook, layers(ln=(2,)))
    assert str(rules.rules[0]) == "Rename(['h.{i}.ln'], ['h.{i}.ln.weight'])"


def test_a_stack_that_is_made_in_steps():
    def convert(state):
        halves = [np.stack([state[f"h.{i}.w"] for i in pair]) for pair in ((0, 1), (2,))]
        return {"w": np.concatenate(halves)}

    assert str(same(convert, layers(w=(3, 2))).rules[0]) == "Stack('h.{n}.w', 'w', over='n')"


def test_unused_and_tied_arrays_are_named():
    shared = array(2)
    state = {"a": shared, "b": shared, "c": array(3)}
    rules = Rules.record(lambda s: {"x": s["a"], "y": s["b"]}, state)
    assert [*map(str, rules)] == [
        "Drop('b', tied_to='a')",
        "Drop(['c'])",
        "Rename(['a'], ['x'])",
        "Tie('x', 'y')",
    ]
    with pytest.raises(CheckpointError, match=r"Drop\(\['c'\]\) has no inverse"):
        rules.inverse()


def test_a_checkpoint_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    fmapper.save({"w": array(2, 3)}, path)
    rules = Rules.record(lambda state: {"kernel": state["w"].T * 2 + 1}, path)
    kernel = fmapper.load(path, rules=rules)["kernel"]
    assert (kernel.read() == fmapper.load(path)["w"].read().T * 2 + 1).all()


BAD = {
    "np.argsort": lambda s: {"a": s["w"][np.argsort(s["w"][0])]},
    "ndarray.max": lambda s: {} if s["w"].max() > 1 else s,
    "a number or truth value": lambda s: {"a": float(s["w"][0, 0])},
    "np.matmul": lambda s: {"a": s["w"] @ s["w"].T},
    "a product of arrays": lambda s: {"a": s["w"] * s["w"]},
    "np.greater": lambda s: {"a": s["w"] > 0},
    "the cast of float32 to int8": lambda s: {"a": s["w"].astype(np.int8)},
    "ndarray.tobytes": lambda s: {"a": s["w"].tobytes()},
    "an index": lambda s: {"a": s["w"][s["w"]]},
    "writing to an element twice": lambda s: np.zeros((3, 3)).__setitem__([1, 1], s["w"][:2]),
    "a library that takes a NumPy array": lambda s: (
        np.arange(6.0).reshape(2, 3).__setitem__(0, s["w"][0])
    ),
    "ndarray.item": lambda s: {"a": s["w"][0, 0].item()},
}


@pytest.mark.parametrize("operation", BAD)
def test_values_are_refused_at_the_line(operation):
    with pytest.raises(CheckpointError) as error:
        Rules.record(BAD[operation], {"w": array(3, 3)})
    assert re.search(r"test_recording\.py:\d+: ", str(error.value))
    assert f"{operation} needs the values" in str(error.value)


def test_outputs_that_depend_on_no_input():
    state = {"w": array(3)}
    with pytest.raises(CheckpointError, match="positions: it has values that depend on no array"):
        Rules.record(lambda s: {"w": s["w"], "positions": np.arange(4)}, state)

    def half(state):
        out = np.empty(6, np.float32)
        out[:3] = state["w"]
        return {"w": out}

    with pytest.raises(CheckpointError, match="w: it has elements that are never written"):
        Rules.record(half, state)


def test_numpy_is_as_before():
    kept = np.asarray, np.empty, np.full
    with pytest.raises(ZeroDivisionError):
        Rules.record(lambda state: 1 / 0, {"w": array(3)})
    assert (np.asarray, np.empty, np.full) == kept


def test_many_layers_take_few_rules():
    one = LazyArray.full((2, 3), 0, "f4")
    state = {f"layers.{at // 50}.w{at % 50}": one.transpose() for at in range(1000)}
    rules = Rules.record(lambda s: {n.replace("layers", "l"): w.T for n, w in s.items()}, state)
    assert len(rules) == 2
    assert len(rules.apply(state)) == 1000
