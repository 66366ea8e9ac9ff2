"""Deltas: the elements of arrays that have changed, in codes and in files."""

import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmapper
from fmapper.checkpoints import LazyArray
from fmapper.checkpoints.formats.safetensors import Safetensors
from fmapper.sync import apply_delta, delta, delta_files, save_delta
from fmapper.sync.delta import Changes, digest

ITEMSIZES = (1, 2, 4, 8)


@pytest.fixture
def small_parts(monkeypatch):
    """Blocks and parts of a few elements, so that small arrays have many."""
    monkeypatch.setattr(delta, "BLOCK", 64)
    monkeypatch.setattr(delta, "PART", 8 * 64)


def encode(base, new):
    return delta.encode(LazyArray.of(base), LazyArray.of(new)).read()


def apply(base, code):
    Changes(LazyArray.of(code), base.size, base.dtype).apply(base)


@st.composite
def pairs(draw):
    """Returns two arrays of bits, of which few or many elements differ."""
    size = draw(st.integers(0, 700))
    dtype = f"u{draw(st.sampled_from(ITEMSIZES))}"
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    base = rng.integers(0, 255, size).astype(dtype)
    new = base.copy()
    density = draw(st.sampled_from((0, 0.002, 0.01, 0.1, 0.5, 1)))
    new[rng.random(size) < density] ^= 1
    return base, new


# --- the codec ------------------------------------------------------------------------------------


@given(pairs(), st.sampled_from((64, 512, 1 << 16)))
@settings(max_examples=60)
def test_bits_come_back(pair, block):
    base, new = pair
    with mock.patch.multiple(delta, BLOCK=block, PART=8 * block):
        code = encode(base, new)
        assert code.size <= new.nbytes
        apply(base, code)
        assert np.array_equal(base, new)


@given(pairs(), st.binary(max_size=80), st.data())
@settings(max_examples=60)
def test_bytes_of_anybody_write_within_the_array_or_nothing(pair, data, draw):
    """Behind a part of a right code; what lies around the array stays."""
    base, new = pair
    with mock.patch.multiple(delta, BLOCK=64, PART=512):
        code = encode(base, new)
        kept = draw.draw(st.integers(0, code.size))
        wrong = np.concatenate([code[:kept], np.frombuffer(data, "u1"), code[kept + len(data) :]])
        room = np.concatenate([base, base, base])
        try:
            apply(room[base.size : 2 * base.size], wrong)
        except fmapper.CheckpointError:
            assert np.array_equal(room[base.size : 2 * base.size], base)
        assert np.array_equal(room[: base.size], base)
        assert np.array_equal(room[2 * base.size :], base)


def test_one_percent_takes_two():
    """Two bytes for a value, and two for its place."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 6_000_000, dtype=np.uint16)
    new = base.copy()
    new[rng.choice(base.size, base.size // 100, replace=False)] ^= 1
    code = encode(base, new)
    assert code.size <= 0.0201 * new.nbytes
    apply(base, code)
    assert np.array_equal(base, new)


def test_what_has_changed_everywhere_is_whole():
    base = np.arange(1000, dtype=np.uint32)
    assert encode(base, base + 1).tobytes() == (base + 1).tobytes()
    assert encode(base, base.copy()).size == 4


def sparse():
    base = np.zeros(2000, np.uint16)
    new = base.copy()
    new[[0, 7, 600, 1999]] = 1, 2, 3, 4
    return base, new, encode(base, new)


def test_every_truncated_code_is_refused():
    base, _, code = sparse()
    for size in range(code.size):
        with pytest.raises(fmapper.CheckpointError):
            apply(base, code[:size])
    with pytest.raises(fmapper.CheckpointError):
        apply(base, np.append(code, np.uint8(0)))
    assert not base.any()


@pytest.mark.usefixtures("small_parts")
def test_a_code_with_other_bytes_writes_within_the_array_or_nothing():
    """For each byte of the code: what lies around the array stays, and an error changes nothing."""
    base, new, _ = (array[:640] for array in sparse())
    code = encode(base, new)
    for at in range(code.size):
        for value in (0, 1, 2, 127, 254, 255):
            room = np.zeros(base.size + 200, base.dtype)
            inner = room[100:-100]
            wrong = code.copy()
            wrong[at] = value
            try:
                apply(inner, wrong)
            except fmapper.CheckpointError:
                assert not room.any()
            assert not room[:100].any()
            assert not room[-100:].any()


@pytest.mark.parametrize("places", [[0, 7, 600, 2000], [0, 7, 600, 600], [7, 0, 600, 1999]])
def test_places_that_are_none_are_refused_before_anything_is_written(places):
    base, _, code = sparse()
    code = code.copy()
    code[-8:] = np.array(places, "<u2").view("u1")
    with pytest.raises(fmapper.CheckpointError, match="not there"):
        apply(base, code)
    assert not base.any()


@pytest.mark.parametrize(("size", "dtype"), [(70_000, "u2"), (2000, "u1"), (1000, "u4")])
def test_a_code_of_another_array_is_refused(size, dtype):
    _, _, code = sparse()
    with pytest.raises(fmapper.CheckpointError, match="another size"):
        apply(np.zeros(size, dtype), code)


def test_digests_tell_arrays_apart():
    a = np.arange(1, 5)
    arrays = [a, -a, a[:3], np.append(a, 0), a[::-1], a[:0], 0.0 * a, -0.0 * a]
    found = [digest(delta.bits_of(LazyArray.of(array))) for array in arrays]
    assert len({*found}) == len(arrays)
    assert digest(LazyArray.of(a.copy().view("u8"))) == found[0]


def test_a_digest_does_not_depend_on_threads(monkeypatch):
    bits = LazyArray.of(np.arange(200_000, dtype=np.uint64))
    monkeypatch.setattr(delta, "PART", 1 << 18)
    found = set()
    for workers in (1, 3):
        monkeypatch.setattr(delta, "threads_for_memory", lambda workers=workers: workers)
        found.add(digest(bits))
    assert len(found) == 1


# --- models, states and files ---------------------------------------------------------------------


def values(seed, dtype="bfloat16"):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(60, 50)).astype(getattr(ml_dtypes, dtype, None) or dtype)


def bits(array):
    array = np.ascontiguousarray(fmapper.to_numpy(array))
    return array.shape, array.dtype.name, array.tobytes()


def same(one, other):
    a, b = fmapper.state(one), fmapper.state(other)
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


def steps(count=3):
    """Returns states of NumPy arrays, each a little different from the one before."""
    rng = np.random.default_rng(1)
    states = [{"w": values(0), "v": values(1, "float32"), "n": np.arange(7), "step": 0}]
    for number in range(1, count):
        new = {name: np.array(x) for name, x in states[-1].items() if name != "step"}
        new["w"].reshape(-1)[rng.choice(3000, 30)] += 1
        new["v"][number] = -0.0
        states.append({**new, "step": number})
    return states


@pytest.fixture
def path(tmp_path):
    return tmp_path / "delta.safetensors"


def test_one_percent_of_a_state_takes_less_than_three(path):
    """With the header and the table of digests."""
    rng = np.random.default_rng(0)
    base = {f"{n}.w": rng.normal(size=(512, 512)).astype(ml_dtypes.bfloat16) for n in range(4)}
    new = {name: array.copy() for name, array in base.items()}
    for array in new.values():
        array.reshape(-1).view("u2")[rng.choice(array.size, array.size // 100, False)] ^= 1
    save_delta(path, base, new)
    assert path.stat().st_size <= 0.03 * sum(array.nbytes for array in base.values())
    assert same(apply_delta(base, path), new)


@pytest.mark.parametrize("to", [fmapper.to_numpy, fmapper.to_torch, fmapper.to_jax])
def test_states_of_any_framework(path, to):
    base, new = (fmapper.fmap(to, state) for state in steps(2))
    before = {name: bits(x) for name, x in fmapper.state(base).items()}
    save_delta(path, base, new)
    found = apply_delta(base, path)
    assert same(found, new)
    assert {type(x) for x in fmapper.state(found).values()} == {
        type(x) for x in fmapper.state(new).values()
    }
    assert found["step"] == 1
    assert {name: bits(x) for name, x in fmapper.state(base).items()} == before


def test_a_delta_is_of_bits_in_any_framework(path):
    """What a trainer in torch has written is applied to a state in JAX."""
    base, new = steps(2)
    save_delta(path, fmapper.to_torch(base), fmapper.to_torch(new))
    del base["n"], new["n"]  # int64, which JAX narrows
    save_delta(path, fmapper.to_torch(base), fmapper.to_torch(new))
    assert same(apply_delta(fmapper.to_jax(base), path), new)


def net(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    model[1].weight = model[0].weight
    return model.to(torch.bfloat16)


def test_a_model_of_torch(path):
    base, new = net(0), net(0)
    with torch.no_grad():
        new[0].weight[3, 4] = float("nan")
        new[2].bias[0] = -0.0
    save_delta(path, base, new)
    found = apply_delta(base, path)
    assert same(found, new)
    assert isinstance(found, torch.nn.Sequential)
    assert found[0].weight is found[1].weight
    assert not base[0].weight.isnan().any()


@pytest.mark.nightly
def test_a_converted_model_takes_the_deltas_of_its_source(path):
    base, new = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    model = fmapper.convert(base, "jax", (torch.zeros(1, 3),))
    save_delta(path, base, new)
    found = apply_delta(model, path)
    assert same(found, new)


def test_models_of_equinox(path):
    eqx = pytest.importorskip("equinox")

    class Line(eqx.Module):
        w: jax.Array
        name: str = eqx.field(static=True)

    base, new = (Line(jnp.asarray(values(seed)), "line") for seed in (0, 1))
    save_delta(path, base, new)
    found = apply_delta(base, path)
    assert isinstance(found, Line)
    assert same(found, new)


@fmapper.functor
class Counted:
    def __init__(self, w, step):
        self.w, self.step = w, step


def test_numbers_of_a_model_go_along(path):
    save_delta(path, Counted(np.ones(2), 1), Counted(np.zeros(2), 2))
    found = apply_delta(Counted(np.ones(2), 1), path)
    assert (found.w.tolist(), found.step) == ([0, 0], 2)
    with pytest.raises(fmapper.CheckpointError, match="step: 2 in the delta, 'one' in the tree"):
        apply_delta(Counted(np.ones(2), "one"), path)


NARROW = ["float8_e4m3fn", "float8_e5m2", "float16", "float64", "complex64", "complex128", "bool"]


@pytest.mark.parametrize("dtype", [*NARROW, "int8", "uint16", "int32"])
def test_bits_of_any_dtype(path, dtype):
    """Also NaN with a payload, and the negative zero."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    rng = np.random.default_rng(0)
    high = 2 if dtype.kind == "b" else 256
    base, new = (
        {"x": rng.integers(0, high, 96 * dtype.itemsize).astype("u1").view(dtype).reshape(8, 12)}
        for _ in range(2)
    )
    new |= {"empty": np.zeros((0, 3), dtype), "scalar": np.ones((), dtype)}
    base |= {"empty": np.zeros((0, 3), dtype), "scalar": np.zeros((), dtype)}
    save_delta(path, base, new)
    assert same(apply_delta(base, path), new)


def test_files_are_compared_and_written_in_parts(small_parts, tmp_path, path):
    base, new = steps(2)
    fmapper.save(base, tmp_path / "base.safetensors")
    fmapper.save(new, tmp_path / "new.safetensors")
    save_delta(path, tmp_path / "base.safetensors", str(tmp_path / "new.safetensors"))
    out = tmp_path / "out.safetensors"
    fmapper.save(apply_delta(tmp_path / "base.safetensors", path), out)
    assert out.read_bytes() == (tmp_path / "new.safetensors").read_bytes()
    # in the place of the base, and from a checkpoint that is open
    opened = fmapper.load(tmp_path / "base.safetensors")
    fmapper.save(apply_delta(opened, path), tmp_path / "base.safetensors")
    assert (tmp_path / "base.safetensors").read_bytes() == out.read_bytes()
    assert {one.name for one in tmp_path.iterdir()} == {
        "base.safetensors", "new.safetensors", "out.safetensors", "delta.safetensors",
    }  # fmt: skip


def test_memory_is_bounded(tmp_path, path, monkeypatch):
    """No array is read whole: what is read at a time is a part."""
    from fmapper.checkpoints.stored import StoredArray

    read, sizes = StoredArray._read_part, []

    def count(self, handle, out, box):
        sizes.append(out.nbytes)
        read(self, handle, out, box)

    monkeypatch.setattr(delta, "PART", 1 << 20)
    monkeypatch.setattr(StoredArray, "_read_part", count)
    base = {"w": np.zeros((1500, 1001), np.float32)}
    fmapper.save(base, tmp_path / "base.safetensors")
    fmapper.save({"w": base["w"] + np.eye(1500, 1001, dtype="f")}, tmp_path / "new.safetensors")
    save_delta(path, tmp_path / "base.safetensors", tmp_path / "new.safetensors")
    assert max(sizes) < 1.1 * (1 << 20)
    assert len(sizes) >= 12


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "complex128"])
def test_parts_of_a_patched_array(small_parts, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 99, 7 * 20 * 5 * dtype.itemsize, "u1").view(dtype).reshape(7, 20, 5)
    new = base.copy()
    new[rng.random(base.shape) < 0.05] = 3
    flat = [array.reshape(-1).view(f"u{min(8, dtype.itemsize)}") for array in (base, new)]
    codes = [LazyArray.of(encode(*flat)), LazyArray.of(encode(flat[1], flat[1]))]
    patched = delta_files._Patched(LazyArray.of(base), codes)
    for box in [
        None,
        ((2, 4), (0, 20), (0, 5)),
        ((3, 4), (2, 9), (0, 5)),
        ((1, 6), (3, 9), (2, 3)),
    ]:
        part = slice(None) if box is None else tuple(slice(*ends) for ends in box)
        assert patched.read(box).tobytes() == new[part].tobytes()


def test_folders_and_other_formats_are_bases(tmp_path, path):
    base, new = ({n: x for n, x in state.items() if n != "w"} for state in steps(2))
    fmapper.save(base, tmp_path / "folder", format="safetensors", max_shard_size="8kB")
    fmapper.save(new, tmp_path / "new.npz")
    save_delta(path, tmp_path / "folder", tmp_path / "new.npz")
    assert same(apply_delta(tmp_path / "folder", path), new)


def test_a_chain(tmp_path):
    states = steps(4)
    paths = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for at, path in enumerate(paths):
        save_delta(path, states[at], states[at + 1])
    assert same(apply_delta(states[0], *paths), states[3])
    assert same(apply_delta(states[1], *paths[1:]), states[3])
    with pytest.raises(fmapper.CheckpointError, match=r"2.safetensors does not follow .*0.safete"):
        apply_delta(states[0], paths[0], paths[2])


def test_another_base_is_refused_before_anything_is_made(tmp_path, path):
    base, new = steps(2)
    save_delta(path, base, new)
    other = {**base, "v": base["v"] * np.float32(2)}
    fmapper.save(other, tmp_path / "other.safetensors")
    with pytest.raises(fmapper.CheckpointError, match="'v' has other values"):
        apply_delta(tmp_path / "other.safetensors", path)
    for wrong, words in [
        (new, "'w' has other values"),
        ({n: x for n, x in base.items() if n != "v"}, "'v' is missing"),
        ({**base, "z": base["v"]}, "'z' is left over"),
        ({**base, "n": np.arange(8)}, r"'n' is 'int64\[8\]', not 'int64\[7\]'"),
        ({**base, "v": base["v"].astype("f8")}, r"is 'float64\[60, 50\]', not 'float32"),
    ]:
        with pytest.raises(fmapper.CheckpointError, match=f"of another base: .*{words}"):
            apply_delta(wrong, path)


def test_other_names_shapes_and_dtypes_are_listed(path):
    base = {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2), "d": np.zeros(2)}
    new = {"b": np.zeros(3), "c": np.zeros(2, "f4"), "d": np.zeros(2), "e": np.zeros(2)}
    with pytest.raises(fmapper.StructureMismatchError) as caught:
        save_delta(path, base, new)
    assert [line.split("'")[1] for line in str(caught.value).splitlines()[1:]] == [*"abce"]
    assert not [*path.parent.iterdir()]


def test_what_has_several_names_is_stored_once(tmp_path, path):
    base, new = (values(n) for n in (0, 1))
    save_delta(path, {"a": base, "b": base}, {"a": new, "b": new})
    assert len(Safetensors().read(path).arrays) == 1
    found = apply_delta({"a": base, "b": base}, path)
    assert found["a"] is found["b"]
    # also where they are equal and two objects, as in the state dict of a tied model
    save_delta(path, net(0).state_dict(), net(1).state_dict())
    assert [*Safetensors().read(path).ties] == ["1.weight"]
    assert same(apply_delta(net(0).state_dict(), path), net(1))
    fmapper.save(net(0), tmp_path / "net.safetensors")
    out = tmp_path / "out.safetensors"
    fmapper.save(apply_delta(tmp_path / "net.safetensors", path), out)
    assert [*Safetensors().read(out).ties] == ["1.weight"]


def test_what_is_no_longer_tied(path):
    base, new = values(0), values(1)
    save_delta(path, {"a": base, "b": base}, {"a": new, "b": base})
    found = apply_delta({"a": base, "b": base.copy()}, path)
    assert same(found, {"a": new, "b": base})
    with pytest.raises(fmapper.StructureMismatchError, match="tied"):
        apply_delta({"a": base, "b": base}, path)


class Rotary(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4,), scale))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def test_buffers_that_checkpoints_leave_out_may_be_missing(tmp_path, path):
    fmapper.save({"w": torch.ones(4)}, tmp_path / "base.safetensors")
    save_delta(path, tmp_path / "base.safetensors", Rotary(2.0))
    found = apply_delta(Rotary(1.0), path)
    assert found.w.tolist() == [2.0] * 4
    assert found.angles.tolist() == [0, 1, 2]


def test_nothing_has_changed(path):
    base = steps(1)[0]
    save_delta(path, base, base)
    assert not Safetensors().read(path).arrays
    assert same(apply_delta(base, path), base)


def test_what_is_asked_for_must_be_clear(tmp_path, path):
    base = steps(1)[0]
    save_delta(path, base, base)
    fmapper.save(base, tmp_path / "base.safetensors")
    with pytest.raises(TypeError, match="at least one"):
        apply_delta(base)
    with pytest.raises(fmapper.CheckpointError, match="not a delta"):
        apply_delta(base, tmp_path / "base.safetensors")


# --- files of others ------------------------------------------------------------------------------


def rewrite(path: Path, change) -> None:
    """Writes a delta with other contents: `change(arrays, about)`."""
    loaded = fmapper.load(path)
    about = json.loads(loaded.metadata["fmapper.delta"])
    arrays = {n: x.read().copy() for n, x in loaded.items() if hasattr(x, "read")}
    changed = change(arrays, about)
    text = changed if isinstance(changed, str) else json.dumps(about)
    fmapper.save(arrays, path, metadata={"fmapper.delta": text})


def edit(**fields):
    return lambda arrays, about: about.update(fields)


HOSTILE = {
    "no JSON": (lambda arrays, about: "{", "not JSON"),
    "a list": (lambda arrays, about: "[]", "version"),
    "a later version": (edit(version=2), "version"),
    "no table": (edit(arrays=[]), "table"),
    "a row that is a text": (edit(arrays={"w": "x"}), "table"),
    "a negative size": (edit(arrays={"w": ["float32", [-1], "0" * 32, "1" * 32]}), "table"),
    "a long digest": (edit(arrays={"w": ["float32", [1], "0" * 32, "1" * 9999]}), "table"),
    "a digest for terminals": (edit(arrays={"w": ["float32", [1], "\x1b[31m" * 5, "1"]}), "table"),
    "a row of one side": (edit(arrays={"w": ["float32", [1], "0"]}), "table"),
    "too few codes": (lambda arrays, about: arrays.pop("w") is None, "codes"),
    "too many codes": (lambda arrays, about: arrays.update(n=arrays["w"]), "codes"),
    "codes of floats": (lambda arrays, about: arrays.update(w=np.ones(9)), "not a code"),
    "an empty code": (lambda arrays, about: arrays.update(w=arrays["w"][:0]), "'w': .*damaged"),
    "half of a code": (lambda arrays, about: arrays.update(w=arrays["w"][:40]), "'w': .*damaged"),
    "another code": (lambda arrays, about: arrays.update(w=arrays["v"]), "'w': .*another size"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_files_are_refused(tmp_path, path, case):
    change, words = HOSTILE[case]
    base, new = steps(2)
    save_delta(path, base, new)
    fmapper.save(base, tmp_path / "base.safetensors")
    rewrite(path, change)
    with pytest.raises(fmapper.CheckpointError, match=words):
        apply_delta(base, path)
    with pytest.raises(fmapper.CheckpointError, match=words):
        apply_delta(tmp_path / "base.safetensors", path)


def test_another_value_in_a_code_is_noticed_in_the_result(tmp_path, path):
    base, new = steps(2)
    save_delta(path, base, new)
    fmapper.save(base, tmp_path / "base.safetensors")

    def flip(arrays, about):
        arrays["w"][4] ^= 1  # behind the count of its only block

    rewrite(path, flip)
    with pytest.raises(fmapper.CheckpointError, match=r"the result is not .*'w' has other values"):
        apply_delta(base, path)
    with pytest.raises(fmapper.CheckpointError, match=r"the result is not .*'w' has other values"):
        apply_delta(tmp_path / "base.safetensors", path)


def test_every_truncated_file_is_refused(path):
    base = {"w": np.zeros(3, "f4")}
    save_delta(path, base, {"w": np.array([0, 1, 0], "f4")})
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(fmapper.CheckpointError):
            apply_delta(base, path)


def test_a_file_appears_when_it_is_complete(path, monkeypatch):
    base, new = steps(2)
    save_delta(path, base, base)
    before = path.read_bytes()
    monkeypatch.setattr(delta_files, "check_contents", lambda contents: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_delta(path, base, new)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


def test_random_keys_go_along(path):
    base, new = ({"key": jax.random.key(n), "w": jnp.ones(2)} for n in (0, 1))
    save_delta(path, base, new)
    found = apply_delta(base, path)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(new["key"])).all()


def test_arrays_that_several_processes_hold_are_refused(path, monkeypatch):
    from fmapper.checkpoints.formats import together

    monkeypatch.setattr(together, "spread_arrays", lambda contents: {"w": ...})
    with pytest.raises(fmapper.CheckpointError, match=r"w: several processes .*fmapper\.save"):
        save_delta(path, {"w": values(0)}, {"w": values(1)})
    assert not [*path.parent.iterdir()]
