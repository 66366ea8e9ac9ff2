"""Lazy arrays against NumPy, bit for bit, and what they read meanwhile."""

import json
import subprocess
import sys
import tracemalloc
import warnings
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmapper
from fmapper.backends.discovery import adapter_of
from fmapper.checkpoints import (
    ByteRun,
    LazyArray,
    StridedArray,
    concatenate,
    lazy_operations,
    stack,
)
from fmapper.checkpoints.dense import copy_into, dense, scratch

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Stored(LazyArray):
    """An array that notes what is read of it."""

    stored = True

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.boxes = []

    def _read(self, box):
        self.boxes.append(box)
        return self.array[tuple(slice(*bound) for bound in box)]

    @property
    def elements_read(self):
        return sum(np.prod([stop - start for start, stop in box]) for box in self.boxes)


def count(*shape, dtype=np.int32):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


@st.composite
def boxes(draw, shape):
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(map(tuple, bounds))


def factors(n):
    return [(d, n // d) for d in range(1, n + 1) if n % d == 0]


@st.composite
def expressions(draw):
    """A lazy array, and the NumPy array that it describes."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    array = count(*shape, dtype=draw(st.sampled_from([np.int16, np.float32, BFLOAT16])))
    lazy = Stored(array)
    for _ in range(draw(st.integers(0, 6))):
        operation = draw(
            st.sampled_from(["transpose", "split", "merge", "part", "concatenate", "stack"])
            | st.sampled_from(["interleave", "view", "unstack"])
        )
        if operation == "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            lazy, array = lazy.transpose(axes), array.transpose(axes)
        elif operation == "stack":
            axis = draw(st.integers(0, array.ndim))
            lazy, array = stack([lazy] * 2, axis), np.stack([array] * 2, axis)
        elif array.ndim == 0 or array.size > 2000:
            continue
        elif operation == "split":
            axis = draw(st.integers(0, array.ndim - 1))
            sizes = draw(st.sampled_from(factors(array.shape[axis]) or [(0, 1)]))
            shape = (*array.shape[:axis], *sizes, *array.shape[axis + 1 :])
            lazy, array = lazy.reshape(shape), array.reshape(shape)
        elif operation == "merge":
            axis = draw(st.integers(0, array.ndim - 1))
            shape = (*array.shape[:axis], int(np.prod(array.shape[axis:])))
            lazy, array = lazy.reshape(shape), array.reshape(shape)
        elif operation == "part":
            box = draw(boxes(array.shape))
            lazy, array = lazy.part(box), array[tuple(slice(*bound) for bound in box)]
        elif operation == "concatenate":
            axis = draw(st.integers(0, array.ndim - 1))
            other = np.zeros_like(array)
            lazy = concatenate([lazy, LazyArray.of(other), lazy], axis)
            array = np.concatenate([array, other, array], axis)
        elif operation == "interleave":
            axis = draw(st.integers(0, array.ndim - 1))
            groups = draw(st.sampled_from(factors(array.shape[axis]) or [(1, 1)]))[0]
            lazy = lazy.interleave(groups, axis)
            split = np.stack(np.split(array, groups, axis), axis + 1)
            array = split.reshape(array.shape)
        elif operation == "view":
            is_even = array.shape[-1] * array.itemsize % 2 == 0
            dtype = draw(st.sampled_from([np.uint8, np.uint16] if is_even else [np.uint8]))
            lazy, array = lazy.view(dtype), np.ascontiguousarray(array).view(dtype)
        elif array.shape[0]:
            at = draw(st.integers(0, array.shape[0] - 1))
            lazy, array = lazy.unstack()[at], array[at]
    return lazy, array


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.nightly
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_an_expression_is_what_numpy_computes(data):
    lazy, array = data.draw(expressions())
    assert (lazy.shape, lazy.dtype, lazy.nbytes) == (array.shape, array.dtype, array.nbytes)
    least = data.draw(st.sampled_from([1, 4096]))
    with mock.patch.object(lazy_operations, "_LEAST_PIECE", least):
        is_as_numpy_has_it(data, lazy, array)


def is_as_numpy_has_it(data, lazy, array):
    assert same(lazy.read(), np.ascontiguousarray(array).reshape(array.shape))
    box = data.draw(boxes(array.shape))
    part = array[tuple(slice(*bound) for bound in box)]
    assert same(lazy.read(box), part)
    out = np.empty(part.shape[::-1], part.dtype).T  # of another order
    assert lazy.read(box, out=out) is out
    assert same(out, part)
    panels = list(lazy.panels(data.draw(st.integers(1, 200))))
    assert b"".join(panel.tobytes() for _, panel in panels) == array.tobytes()
    assert all(panel.flags.c_contiguous for _, panel in panels)
    runs = lazy.byte_runs()
    if runs is not None:
        found = [run.array.array.tobytes()[run.start : run.stop] for run in runs]
        assert b"".join(found) == array.tobytes()


def test_a_box_reads_what_it_needs():
    stored = Stored(count(64, 32))
    stored.transpose().read([(3, 5), (10, 20)])
    assert stored.boxes == [((10, 20), (3, 5))]
    stored.boxes.clear()
    stored.reshape((8, 8, 4, 8)).read([(1, 3), (0, 8), (0, 4), (0, 8)])
    assert stored.boxes == [((8, 24), (0, 32))]
    stored.boxes.clear()
    stored.reshape((8, 8, 32)).transpose((2, 0, 1)).read([(4, 6), (2, 3), (1, 2)])
    assert stored.boxes == [((17, 18), (4, 6))]
    stored.boxes.clear()
    stored.reshape((-1,)).read([(70, 90)])  # the rows that cover it
    assert stored.boxes == [((2, 3), (6, 26))]
    many = [Stored(count(4, 8)) for _ in range(10)]
    stack(many).slice(3, 5).slice(1, 2, axis=2).read()
    assert [array.elements_read for array in many] == [0, 0, 0, 4, 4, 0, 0, 0, 0, 0]


def test_a_stack_reads_one_array_after_the_other_into_its_place():
    class Filled(Stored):
        def _read(self, box):
            raise AssertionError("read, and copied afterwards")

        def _fill(self, box, out):
            out[...] = self.array[tuple(slice(*bound) for bound in box)]

    arrays = [count(4, 8) + i for i in range(3)]
    for axis in range(3):
        found = stack([Filled(array) for array in arrays], axis).read()
        assert same(found, np.stack(arrays, axis))
        found = stack([Filled(array) for array in arrays], axis).transpose((2, 0, 1)).read()
        assert same(found, np.ascontiguousarray(np.stack(arrays, axis).transpose(2, 0, 1)))


class Made(LazyArray):
    """An array that is made when it is read, as if from a file."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def _read(self, box):
        return np.ones([stop - start for start, stop in box], self.dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda a: stack([a] * 64),
        lambda a: stack([a.transpose()] * 64),
        lambda a: concatenate([a] * 64, axis=1),
        lambda a: concatenate([a] * 64).interleave(2),
        lambda a: stack([a] * 64).astype("float16"),
        lambda a: concatenate([a] * 64, axis=1).transpose().view(np.uint16),
    ],
)
def test_the_memory_is_that_of_some_panels(make):
    """64 MiB go through in panels of 1 MiB."""
    lazy = make(Made((512, 512), np.float32))
    list(lazy.slice(0, 2).panels(1 << 20))  # what is imported late is there
    tracemalloc.start()
    try:
        size = sum(panel.nbytes for _, panel in lazy.panels(1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == lazy.nbytes > 30 << 20
    assert peak < 7 << 20


def test_byte_runs_name_the_bytes_that_can_be_copied():
    a, b = Stored(count(4, 8)), Stored(count(2, 8))
    assert a.byte_runs() == [ByteRun(a, 0, 128)]
    assert a.slice(1, 3).reshape((16,)).byte_runs() == [ByteRun(a, 32, 96)]
    assert concatenate([b, a.slice(1, 3)]).byte_runs() == [ByteRun(b, 0, 64), ByteRun(a, 32, 96)]
    assert concatenate(a.unstack()).byte_runs() == [ByteRun(a, 0, 128)]
    assert stack([a, a]).slice(1, 2).byte_runs() == [ByteRun(a, 0, 128)]
    assert a.view(np.uint8).byte_runs() == [ByteRun(a, 0, 128)]
    assert a.reshape((4, 1, 8)).transpose((1, 0, 2)).byte_runs() == [ByteRun(a, 0, 128)]
    for changed in (
        a.transpose(),
        a.slice(0, 4, axis=1),
        concatenate([a, a], axis=1),
        concatenate([a, LazyArray.of(count(1, 8))]),
        a.view(np.float32).astype("float16"),
    ):
        assert changed.byte_runs() is None


def test_what_changes_nothing_is_no_operation():
    a = Stored(count(4, 8))
    assert a.reshape((4, -1)) is a
    assert a.transpose((0, 1)) is a
    assert a.transpose().transpose() is a
    assert a.slice(0, 4) is a
    assert concatenate([a]) is a
    assert a.view(np.int32) is a
    assert a.astype("bfloat16") is a  # an integer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float64"])
def test_a_cast_is_that_of_a_mover(dtype):
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    found = Stored(values).astype(dtype).read([(1, 4), (2, 7)])
    assert same(found, fmapper.to_numpy(values[1:4, 2:7], dtype=dtype))
    assert Stored(values.astype(np.complex64)).astype("float64").dtype == np.complex128


def test_a_cast_that_loses_a_value_says_so():
    values = np.array([1.0, np.inf, 70000.0], np.float32)
    lazy = Stored(values).astype("float16")
    assert lazy.read([(0, 2)]).tolist() == [1.0, np.inf]
    with pytest.raises(fmapper.LossyCastError, match="from float32 to float16"):
        lazy.read()
    with pytest.raises(fmapper.CheckpointError, match="not a floating or complex dtype"):
        Stored(values).astype("int8")


def test_a_constant_takes_no_memory():
    lazy = LazyArray.full((1 << 20, 1 << 20), 2.5, BFLOAT16)
    assert lazy.read([(5, 7), (0, 3)]).tolist() == [[2.5] * 3] * 2
    with pytest.raises(fmapper.CheckpointError, match="a single value"):
        LazyArray.full((2,), [1, 2], np.int32)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            lambda a: a.transpose((0, 0)),
            r"axes \[0, 0\] are not a permutation of the axes of int32\[4, 8\]",
        ),
        (lambda a: a.transpose((0, 2)), "has no axis 2"),
        (lambda a: a.reshape((5, -1)), r"int32\[4, 8\] cannot be reshaped to \[5, -1\]"),
        (lambda a: a.reshape((0, -1)), "cannot be reshaped"),
        (lambda a: a.reshape((-2, -16)), "not a shape"),
        (lambda a: a.slice(2, 5), r"the range \(2, 5\) is not within a dimension of 4"),
        (lambda a: a.split(3), "cannot be split into 3 along axis 0"),
        (lambda a: a.split([1, 2]), r"cannot be split into parts of \[1, 2\]"),
        (lambda a: a.interleave(3), "cannot be split into 3 equal parts"),
        (lambda a: a.slice(0, 3, axis=1).view(np.int64), "whole elements of int64"),
        (lambda a: a.reshape((32,)).unstack()[0].view(np.int8), "whole elements"),
        (lambda a: concatenate([]), "nothing to concatenate"),
        (lambda a: concatenate([a, a.transpose()]), r"int32\[4, 8\] and int32\[8, 4\]"),
        (lambda a: concatenate([a, a.view(np.float32)]), "cannot be concatenated"),
        (lambda a: stack([]), "nothing to stack"),
        (lambda a: stack([a, a.slice(0, 1)]), "cannot be stacked"),
        (lambda a: stack([a], 3), "has no axis 3"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_read(operation, message):
    stored = Stored(count(4, 8))
    with pytest.raises(fmapper.CheckpointError, match=message):
        operation(stored)
    assert not stored.boxes


def test_a_box_outside_is_an_index_error():
    a = Stored(count(4, 8))
    for box in ([(0, 5), (0, 8)], [(0, 4)], [slice(None, None, 2), slice(None)], [(3, 2), (0, 1)]):
        with pytest.raises(IndexError):
            a.read(box)
    with pytest.raises(ValueError, match="out has"):
        a.read(out=np.empty((4, 8), np.int64))


def test_operations_are_not_nested_without_end():
    def nest(a):
        for _ in range(1000):
            a = a.reshape((8, 4)).transpose().reshape((4, 8))

    with pytest.raises(fmapper.CheckpointError, match="nested operations"):
        nest(Stored(count(4, 8)))


@pytest.mark.parametrize("dtype", [np.int8, BFLOAT16, np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(300, 200), (3, 70, 90), (70, 3, 90), (130, 5, 3, 3), (6, 5)])
def test_copies_of_another_order_are_exact(dtype, shape):
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    for axes in (tuple(range(len(shape)))[::-1], (1, 0, *range(2, len(shape)))):
        turned = array.transpose(axes)
        assert same(dense(turned), np.ascontiguousarray(turned))
        out = np.empty(array.shape, array.dtype).transpose(axes)
        copy_into(out, np.ascontiguousarray(turned))
        assert same(out, turned)
        copy_into(out[..., ::-1], turned)
        assert same(out[..., ::-1], turned)


def test_numpy_reads_a_lazy_array():
    assert same(np.asarray(Stored(count(2, 3)).transpose()), np.ascontiguousarray(count(2, 3).T))
    assert repr(LazyArray.of(count(2, 3)).transpose()) == "<Transpose int32[3, 2]>"


def test_a_lazy_array_moves_though_nothing_was_loaded():
    code = (
        "import numpy as np, fmapper\n"
        "from fmapper.checkpoints import LazyArray\n"
        "print(fmapper.to_numpy(LazyArray.of(np.ones(2))).sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2.0\n", done.stderr


@pytest.fixture
def wide(tmp_path):
    """A stored matrix of 16 MiB, whose rows have 4 KiB."""
    values = np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)
    fmapper.save({"w": values}, tmp_path / "wide.safetensors")
    return values, fmapper.load(tmp_path / "wide.safetensors")["w"]


def peak_of(lazy, out):
    lazy.slice(0, 16).read(out=out[:16])  # what is imported late is there
    tracemalloc.start()
    try:
        lazy.read(out=out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_transposed_and_cast_goes_through_memory_in_blocks(wide):
    values, stored = wide
    turned, half = np.empty((1024, 4096), np.float32), np.empty((1024, 4096), np.float16)
    assert peak_of(stored.transpose(), turned) < 4 << 20
    assert np.array_equal(turned, values.T)
    cast = stored.transpose().astype("bfloat16")
    assert peak_of(cast, half.view(BFLOAT16)) < 8 << 20
    assert np.array_equal(half.view(BFLOAT16), values.T.astype(BFLOAT16))


def test_columns_are_read_with_what_lies_between_them(wide, monkeypatch):
    values, stored = wide
    reads = []
    read_into = type(stored.file).read_into
    monkeypatch.setattr(
        type(stored.file),
        "read_into",
        lambda *args: reads.append(len(args[2])) or read_into(*args),
    )
    assert np.array_equal(stored.read(((0, 4096), (8, 72))), values[:, 8:72])
    assert reads == [1 << 20] * 16
    assert np.array_equal(stored.read(((0, 2), (0, 1024))), values[:2])
    assert reads[16:] == [8192]
    shard = adapter_of(stored).read_box(stored, ((0, 4096), (8, 72)))  # others read those beside it
    assert np.array_equal(shard, values[:, 8:72])
    assert reads[17:] == [256] * 4096


def test_a_thread_has_its_scratch_memory_again():
    with scratch((4, 5), np.dtype("f4")) as first, scratch((3,), "u1") as inner:
        place = first.ctypes.data
        assert not np.shares_memory(first, inner)
    with scratch((20,), np.dtype("f4")) as again:
        assert again.ctypes.data == place


def _with_safetensors(path):
    entries = {
        "a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [2, 10]},
    }
    text = json.dumps(entries).encode()
    data = b"\x12\x34" + np.ones(2, np.float32).tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _with_msgpack(path):
    serialization = pytest.importorskip("flax.serialization")
    state = {"a": np.zeros(4, ml_dtypes.int4), "w": np.ones(2, np.float32)}
    path.write_bytes(serialization.to_bytes(state))


def _with_pt(path):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings(action="ignore"):  # the dtype is experimental
        torch.save({"a": torch.zeros(4, dtype=torch.complex32), "w": torch.ones(2)}, path)


def _with_dcp(path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):
        tree = {"a": torch.zeros(4, dtype=torch.complex32), "w": torch.ones(2)}
        dcp.save(tree, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("write", [_with_safetensors, _with_msgpack, _with_pt, _with_dcp])
def test_an_array_of_an_unknown_dtype_is_refused_alone(tmp_path, write):
    path = tmp_path / f"x.{write.__name__.rpartition('_')[2]}"
    write(path)
    loaded = fmapper.load(path)
    assert loaded["a"].shape == (4,)
    np.testing.assert_array_equal(loaded["w"].read(), [1, 1])
    with pytest.raises(fmapper.CheckpointError, match="'a': has the unknown dtype"):
        loaded["a"].astype("float32").read()
    like = {"w": np.zeros(2, np.float32)}
    filled = fmapper.load(path, like=like, strict=False)
    np.testing.assert_array_equal(filled["w"], [1, 1])


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "bfloat16", "complex128"])
def test_arrays_of_any_dtype_are_reshaped_and_read_in_strides(dtype):
    array = count(4, 6).astype(getattr(ml_dtypes, dtype, None) or dtype)
    lazy = LazyArray.of(array)
    assert lazy.reshape((3, 8)).read().tobytes() == array.tobytes()
    assert lazy.reshape((24,)).slice(5, 9).read().tobytes() == array.reshape(-1)[5:9].tobytes()
    strided = StridedArray(lazy.reshape((24,)), (2, 3), (1, 7))
    assert strided.read().tobytes() == array.reshape(-1)[[0, 7, 14, 1, 8, 15]].tobytes()
