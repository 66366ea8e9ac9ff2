"""Who shares memory with whom after a move, and what is left after one that failed.

`copy=None` shares only what neither side can write to, `True` nothing, `False` all or it raises.
"""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper import Device, to_cpu, to_device, to_jax, to_numpy, to_torch

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("ml_dtypes")

from fmapper_adapters.jax import _private  # noqa: E402
from support import layouts as made  # noqa: E402
from support.conformance import noting  # noqa: E402
from support.layouts import (  # noqa: E402
    CELLS,
    DTYPES,
    FLOATS,
    ML_DTYPES,
    MOVERS,
    PAIRS,
    WIDE,
    address,
    assert_exact,
    bits,
    make,
    placed,
    sample,
    x64,
)

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """What was there before these tests is no concern of the collector: it has much to do here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with made.on_cpu():
        yield


def invert(array: Any) -> None:
    """Flips every bit of a NumPy array or a tensor in place, whatever its dtype and strides."""
    host = bits(array).view(np.ndarray)
    for part in (host.real, host.imag) if host.dtype.kind == "c" else (host,):
        words = part if part.dtype == bool else part.view(f"u{part.itemsize}")
        np.logical_not(words, out=words) if part.dtype == bool else np.invert(words, out=words)


def writable(array: Any) -> bool:
    """Whether one can write to an array."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable)
    return isinstance(array, torch.Tensor)


# --- copy=None and copy=True: nobody sees the writes of another ----------------------------------

# What one can write through, and what is moved: a view of the first, or the same.
Sources = dict[str, tuple[Any, Any]]


def _sources(backend: str, dtype: str, size: int, directory: Path) -> Sources:
    """Arrays of a backend on memory that the test can write to, by layout."""
    host = np.resize(sample(dtype), size)
    found: Sources = {}

    def add(name: str, base: Any, view: Callable[[Any], Any]) -> None:
        if backend == "torch":
            found[name] = (base, view(made.tensor_on(base)))
        else:
            found[name] = (base, view(base))

    for offset in (0, 1, 4, 16, 32):
        add(f"offset_{offset}", placed(host, offset), lambda a: a)
    add("strided", placed(host), lambda a: a[::2])
    add("tail", placed(host), lambda a: a[1:])
    matrix = host[: size // 4 * 4].reshape(4, -1)
    add("transposed", placed(matrix), lambda a: a.T)
    add("columns", placed(matrix), lambda a: a[:, 1:])
    add("row", placed(matrix), lambda a: a[1])
    add("element", placed(host), lambda a: a.reshape(-1)[2:3].reshape(()))
    if backend == "numpy":
        add("negative", placed(host), lambda a: a[::-1])
        add("broadcast", placed(host), lambda a: np.broadcast_to(a, (2, a.size)))
        add("locked", placed(host), made._locked)
        add("locked_misaligned", placed(host, 1), made._locked)
        add("locked_strided", placed(host), lambda a: made._locked(a[::2]))
        add("subclass", placed(host), lambda a: a.view(made.Subarray))
        path = directory / f"{dtype}_{size}.bin"
        path.write_bytes(host.tobytes())
        both = np.memmap(path, host.dtype, "r+")
        found["memmap"] = (both, both)
        found["memmap_read_only"] = (both, np.memmap(path, host.dtype, "r"))
        if host.itemsize > 1 and dtype not in ML_DTYPES:
            add("big_endian", placed(host), lambda a: a.view(a.dtype.newbyteorder(">")))
    else:
        add("expanded", placed(host), lambda t: t.expand(2, -1))
        add("parameter", placed(host), lambda t: torch.nn.Parameter(t, requires_grad=False))
        if dtype in FLOATS:
            add("requires_grad", placed(host), lambda t: t.requires_grad_())
            add("not_a_leaf", placed(host), lambda t: t.requires_grad_().view(-1)[1:])
        if dtype.startswith("complex"):
            add("conj", placed(host), lambda t: t.conj())
        if dtype == "float32":
            add("neg", placed(host), lambda t: torch.view_as_complex(t.view(-1, 2)).conj().imag)
    return found


WRITTEN = [(s, t) for s, t in CELLS if s != "jax"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "target"), WRITTEN)
def test_writing_to_the_source_does_not_show(
    source: str, target: str, dtype: str, tmp_path: Path
) -> None:
    """Right after the call; and writing to the result does not show in the source."""
    with x64(dtype in WIDE):
        for copy in (None, True) if source != target else (True,):
            given = _sources(source, dtype, 240, tmp_path)
            tree = {name: view for name, (_, view) in given.items()}
            want = {name: made.native(bits(view)) for name, view in tree.items()}
            moved = MOVERS[target](tree, copy=copy)
            for base, _ in given.values():
                invert(base)
            for name, new in moved.items():
                with noting(f"{name}, copy={copy}"):
                    got = made.native(bits(new))
                    assert got.tobytes() == want[name].tobytes(), "the result has changed"
            after = {name: bits(base).tobytes() for name, (base, _) in given.items()}
            for name, new in moved.items():
                with noting(f"{name}, copy={copy}"):
                    if copy and target == "numpy":
                        assert new.flags.writeable, "a copy that was asked for is one's own"
                    if writable(new) and not (source == target and name in ("expanded", "conj")):
                        invert(new)
                    assert bits(given[name][0]).tobytes() == after[name], "the source has changed"


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize(("source", "target"), [(s, t) for s, t in WRITTEN if s != t])
def test_large_arrays_are_read_before_the_call_returns(
    source: str, target: str, copy: bool | None
) -> None:
    """JAX copies memory of a mebibyte and more behind one's back if it is not aligned."""
    for _, nbytes, offset in itertools.product(range(3), (MIB, 3 * MIB), (0, 1, 4, 16, 32)):
        host = placed(np.full(nbytes, 7, np.uint8), offset)
        given = host if source == "numpy" else made.tensor_on(host)
        small = np.full(3, 7, np.uint8)
        alone = MOVERS[target](given, copy=copy)
        host[:] = 9
        assert (bits(alone) == 7).all(), f"alone, {nbytes} bytes, offset {offset}"
        host[:] = 7
        among = MOVERS[target]({"a": small, "w": given, "b": small.copy()}, copy=copy)
        host[:] = 9
        small[:] = 9
        assert (bits(among["w"]) == 7).all(), f"in a tree, {nbytes} bytes, offset {offset}"
        assert (bits(among["a"]) == 7).all() or among["a"] is small


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_large_strided_arrays_are_read_before_the_call_returns(source: str) -> None:
    for _ in range(3):
        host = np.full((2048, 2048), 7, np.uint8)
        views = {"turned": host.T, "columns": host[:, 3:1500], "rows": host[::2], "whole": host}
        for name, view in views.items():
            given = (
                view
                if source == "numpy"
                else torch.from_numpy(host).as_strided(
                    view.shape, view.strides, view.ctypes.data - host.ctypes.data
                )
            )
            host[:] = 7
            new = to_jax({"w": given})["w"]
            host[:] = 9
            assert (np.asarray(new) == 7).all(), name


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_many_small_leaves_are_read_before_the_call_returns(source: str, copy: bool | None) -> None:
    """A batch is no excuse: none of 1000 leaves changes, in any target."""
    for target in MOVERS:
        if target == source:
            continue
        hosts = [np.full(100 + i % 7, i % 251, np.uint8) for i in range(1000)]
        given = hosts if source == "numpy" else [torch.from_numpy(host) for host in hosts]
        moved = MOVERS[target](given, copy=copy)
        for host in hosts:
            host[:] = 255
        for i, new in enumerate(moved):
            assert (bits(new) == i % 251).all(), f"leaf {i} in {target}"
        for new in moved:
            if writable(new):
                bits(new)[...] = 254
                break
        assert all((host == 255).all() for host in hosts)


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_results_of_one_batch_do_not_share(target: str) -> None:
    """Each is written to alone, resized alone, and does not keep the others alive."""
    source = "torch" if target == "numpy" else "numpy"
    moved = MOVERS[target]([make(source, np.full(64, i, np.uint8)) for i in range(100)])
    for i, new in enumerate(moved):
        bits(new)[...] = 100 + i
    for i, new in enumerate(moved):
        assert (bits(new) == 100 + i).all()
    if target == "torch":
        assert all(t.untyped_storage().nbytes() == 64 for t in moved)
        assert all(t.storage_offset() == 0 for t in moved)
    else:
        assert all(a.base is None or a.base.nbytes <= 64 + 64 for a in moved)


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("copy", [None, True])
def test_jax_never_changes(target: str, copy: bool | None) -> None:
    for dtype in DTYPES:
        with x64(dtype in WIDE):
            for shape in ((120,), (4, 30), (1,), ()):
                host = sample(dtype)[: int(np.prod(shape, dtype=int))].reshape(shape)
                array = make("jax", host)
                new = MOVERS[target](array, copy=copy)
                if writable(new):
                    invert(new)
                    assert address(new) != address(array)
                with noting(f"{dtype} {shape}"):
                    assert_exact(array, host, "jax")


def test_numpy_borrows_from_jax_for_reading() -> None:
    """Neither side can write, so nothing is copied, and no way leads to writing."""
    for dtype in DTYPES:
        with x64(dtype in WIDE):
            array = make("jax", sample(dtype))
            new = to_numpy({"w": array})["w"]
            assert address(new) == address(array)
            assert not new.flags.writeable
            with pytest.raises(ValueError, match=r"WRITEABLE|read-only"):
                new.flags.writeable = True
            copied = to_numpy(array, copy=True)
            assert address(copied) != address(array)
            assert copied.flags.writeable


@pytest.mark.parametrize("end", ["delete", "donate", "forget"])
def test_what_numpy_borrows_outlives_the_jax_array(end: str) -> None:
    host = np.arange(MIB, dtype=np.float32)
    array = jax.jit(lambda x: x + 0)(make("jax", host))
    array.block_until_ready()
    view = to_numpy(array)
    if end == "delete":
        array.delete()
    elif end == "donate":
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array).block_until_ready()
    del array
    gc.collect()
    others = [jax.numpy.full(MIB, float(i)).block_until_ready() for i in range(4)]
    assert (view == host).all()
    del others


def test_what_is_borrowed_is_copied_on_the_way_on() -> None:
    """jax -> numpy -> torch: torch could write where NumPy could not."""
    array = make("jax", np.arange(64, dtype=np.float32))
    view = to_numpy(array)
    tensor = to_torch(view)
    tensor.zero_()
    assert_exact(array, np.arange(64, dtype=np.float32), "jax")
    with pytest.raises(fmapper.CopyNeededError, match=r"^model\.w: "):
        to_torch({"w": view}, copy=False)


def test_tensors_on_memory_of_jax_are_copied_on_the_way_back() -> None:
    array = make("jax", np.arange(64, dtype=np.float32))
    tensor = torch.from_dlpack(array)
    new, host = to_jax(tensor), to_numpy(tensor)
    assert address(new) != address(array)
    assert address(host) != address(array)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_cast_that_changes_nothing_is_no_licence_to_share(source: str, target: str) -> None:
    """dtype= is met already, or the cast made a copy: either way the result is one's own."""
    for asked in ("float32", "float16"):
        base = placed(np.arange(64, dtype=np.float32))
        given = base if source == "numpy" else made.tensor_on(base)
        given = make("jax", base) if source == "jax" else given
        for copy in (None, True):
            new = MOVERS[target]({"w": given}, dtype=asked, copy=copy)["w"]
            want = bits(new).copy()
            base[:] = -1
            assert (bits(new) == want).all()
            base[:] = np.arange(64)
            if writable(new):
                bits(new)[...] = 5
            assert (bits(given) == np.arange(64)).all()


def test_arrays_on_bytes_are_not_written_to() -> None:
    text = bytes(range(128)) * 2
    for start in (0, 1):
        array = np.frombuffer(text, np.uint8, offset=start)
        tensor = to_torch(array)
        tensor.zero_()
        assert text == bytes(range(128)) * 2
        assert_exact(to_jax(array), array, "jax")


def test_numpy_scalars_stay_constants() -> None:
    for scalar in (np.float32(1.5), np.True_, np.int8(3)):
        tensor = to_torch(scalar)
        tensor.zero_()
        again = to_torch(scalar)
        assert again.item() == scalar.item()


# --- already there -------------------------------------------------------------------------------


@pytest.mark.nightly_cases("jax")
@pytest.mark.parametrize("backend", MOVERS)
def test_already_there_is_the_very_same_object(backend: str, tmp_path: Path) -> None:
    movers = [MOVERS[backend], to_cpu, to_device("cpu"), MOVERS[backend](device="cpu")]
    for dtype in DTYPES:
        with x64(dtype in WIDE):
            given = made.layouts(backend, dtype, tmp_path)
            tree = {name: array for name, (array, _) in given.items()}
            for mover, copy in itertools.product(movers, (None, False)):
                moved = mover(tree, copy=copy)
                for name, array in tree.items():
                    assert moved[name] is array, f"{dtype} {name} {mover} copy={copy}"
                    assert mover(array, copy=copy) is array


@pytest.mark.nightly_cases("jax")
@pytest.mark.parametrize("backend", MOVERS)
def test_copy_true_is_always_other_memory(backend: str, tmp_path: Path) -> None:
    # JAX compiles a copy for every dtype and shape.
    dtypes = DTYPES if backend != "jax" else ("float32", "bfloat16", "int8")
    for dtype, target in itertools.product(dtypes, MOVERS):
        with x64(dtype in WIDE):
            given = made.layouts(backend, dtype, tmp_path)
            tree = {name: array for name, (array, _) in given.items()}
            moved = MOVERS[target](tree, copy=True)
            for name, (array, want) in given.items():
                if want.size and not isinstance(array, np.generic):
                    with noting(f"{dtype} {name} to {target}"):
                        assert address(moved[name]) != address(array)
                        if not (backend == target == "torch" and name.startswith(("conj", "neg"))):
                            assert not np.may_share_memory(
                                bits(moved[name]).view(np.ndarray), bits(array).view(np.ndarray)
                            )


# --- copy=False: shared, or an error -------------------------------------------------------------

# What NumPy and torch can always share with each other, in both directions.
SHARED = ("contiguous", "transposed", "row_slice", "column_slice", "column", "strided", "offset")
SHARED += ("zero_d", "size_one", "misaligned", "subclass", "parameter", "requires_grad")
SHARED += ("memmap_r+", "fortran", "not_a_leaf", "channels_last", "inference", "permuted")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_copy_false_shares_or_raises(source: str, target: str, dtype: str, tmp_path: Path) -> None:
    with x64(dtype in WIDE):
        for name, (array, want) in made.layouts(source, dtype, tmp_path).items():
            if (source, target, name) == ("jax", "numpy", "fortran"):
                continue  # has a test of its own, the next one
            with noting(name):
                try:
                    new = MOVERS[target]({"w": array}, copy=False)["w"]
                except fmapper.CopyNeededError as error:
                    assert str(error).startswith("model.w: ")  # noqa: PT017
                    if "jax" not in (source, target):
                        assert name not in SHARED, "it can be shared"
                    continue
                assert_exact(new, want, target)
                if not want.size:
                    continue
                assert address(new) == address(array)
                if source != "jax":  # NumPy copies what JAX holds in another order than C
                    assert made.shares_bytes(new, array)
                read_only = source == "numpy" and not getattr(array.flags, "writeable", False)
                if read_only or source == "jax":
                    assert target == "jax" or source == "jax" or not writable(new)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copy_false_of_a_jax_array_in_another_order_than_c(dtype: str) -> None:
    """NumPy gets a copy of such a one from JAX, and JAX does not say so."""
    turned = made.tensor_on(placed(sample(dtype)[:24].reshape(4, 6))).T
    array = jax.dlpack.from_dlpack(turned)
    assert address(array) == address(turned), "JAX has made a copy, so this tests nothing"
    try:
        new = to_numpy({"w": array}, copy=False)["w"]
    except fmapper.CopyNeededError as error:
        assert str(error).startswith("model.w: ")  # noqa: PT017
    else:
        assert address(new) == address(array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_copy_false_shares_aligned_memory(source: str, target: str, dtype: str) -> None:
    """Bytes for bytes at the same address, whatever the dtype, however many there are."""
    with x64(dtype in WIDE):
        hosts = [placed(np.resize(sample(dtype), size)) for size in (1, 120, 1 << 18)]
        hosts.append(placed(sample(dtype).reshape(4, 30)))
        given = hosts
        if source == "torch":
            given = [made.tensor_on(host) for host in hosts]
        elif source == "jax":
            given = [jax.device_put(host).block_until_ready() for host in hosts]
        moved = MOVERS[target](given, copy=False)
        for new, old, host in zip(moved, given, hosts, strict=True):
            assert address(new) == address(old)
            assert_exact(new, host, target)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
@pytest.mark.parametrize(("source", "target"), [("numpy", "torch"), ("torch", "numpy")])
def test_copy_false_writes_through(source: str, target: str, dtype: str) -> None:
    """Both ways, for every stride that both sides know."""
    for name, layout in made.COMMON_LAYOUTS.items():
        with noting(name):
            old = layout(make(source, sample(dtype)))
            if isinstance(old, np.generic):
                continue
            new = MOVERS[target](old, copy=False)
            before = made.native(bits(old))
            invert(new)
            assert bits(old).tobytes() == bits(new).tobytes()
            if before.size:
                assert bits(old).tobytes() != before.tobytes()
            invert(old)
            assert bits(new).tobytes() == before.tobytes()


REFUSED_WITHOUT_COPY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "torch_locked": ("torch", made._locked),
    "torch_negative": ("torch", lambda a: a[::-1]),
    "torch_broadcast": ("torch", lambda a: np.broadcast_to(a, (2, *a.shape))),
    "torch_big_endian": ("torch", lambda a: a.astype(">f4")),
    "torch_scalar": ("torch", lambda a: a[0]),
    "jax_offset_1": ("jax", lambda a: placed(a, 1)),
    "jax_offset_4": ("jax", lambda a: placed(a, 4)),
    "jax_offset_16": ("jax", lambda a: placed(a, 16)),
    "jax_offset_32": ("jax", lambda a: placed(a, 32)),
    "jax_strided": ("jax", lambda a: a[::2]),
    "jax_negative": ("jax", lambda a: a[::-1]),
    "jax_wide": ("jax", lambda a: a.astype(np.float64)),
    "jax_long": ("jax", lambda a: a.astype(np.int64)),
    "jax_big_endian": ("jax", lambda a: a.astype(">f4")),
    "jax_tensor_offset_4": ("jax", lambda a: torch.from_numpy(placed(a, 4))),
    "jax_tensor_strided": ("jax", lambda a: torch.from_numpy(a)[::2]),
    "jax_tensor_expanded": ("jax", lambda a: torch.from_numpy(a).expand(2, -1)),
    "jax_tensor_conj": ("jax", lambda a: torch.from_numpy(a).view(torch.complex64).conj()),
    "numpy_tensor_conj": ("numpy", lambda a: torch.from_numpy(a).view(torch.complex64).conj()),
    "numpy_tensor_neg": (
        "numpy",
        lambda a: torch.from_numpy(a).view(torch.complex64).conj().imag,
    ),
}


@pytest.mark.parametrize("nbytes", [256, 4 * MIB])
@pytest.mark.parametrize("case", REFUSED_WITHOUT_COPY)
def test_what_takes_a_copy_is_refused_without_one(case: str, nbytes: int) -> None:
    target, layout = REFUSED_WITHOUT_COPY[case]
    host = placed(np.arange(nbytes // 4, dtype=np.float32))
    given = layout(host)
    sound = placed(np.ones(16, np.float32))
    with x64(False):
        with pytest.raises(fmapper.CopyNeededError, match=r"^model\.b\[0\]: .*copy=False"):
            MOVERS[target]({"a": sound, "b": [given], "c": sound}, copy=False)
        for asked in ("float16", "bfloat16"):
            with pytest.raises(fmapper.CopyNeededError, match=r"^model\.w: "):
                MOVERS[target]({"w": host}, copy=False, dtype=asked)
    assert (host == np.arange(nbytes // 4, dtype=np.float32)).all()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_is_shared_outlives_its_source(source: str, target: str) -> None:
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        host = np.resize(sample(dtype), 3 * MIB // 2)
        base = placed(host)
        given = base if source == "numpy" else made.tensor_on(base)
        if source == "jax":
            given = jax.device_put(base).block_until_ready()
        new = MOVERS[target](given, copy=False)
        del base, given
        gc.collect()
        others = [np.full(3 * MIB, i, np.uint8) for i in range(4)]
        assert_exact(new, host, target)
        del others


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_sharing_allocates_nothing(source: str, target: str) -> None:
    base = placed(np.arange(4 * MIB, dtype=np.float32))
    given = base if source == "numpy" else made.tensor_on(base)
    if source == "jax":
        given = jax.device_put(base).block_until_ready()
    MOVERS[target](given, copy=False)  # what is loaded once is no part of this
    tracemalloc.start()
    new = MOVERS[target]({"w": given}, copy=False)["w"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert address(new) == address(given)
    assert peak < MIB


# --- all or nothing ------------------------------------------------------------------------------

NBYTES = MIB
ABSURD = 1 << 50  # bytes


def _leaf(backend: str, number: int) -> Any:
    return make(backend, np.full(NBYTES // 4, number, np.float32))


def _too_large(backend: str) -> Any:
    """An array of 64 PiB on a few bytes: no machine has the memory for a copy."""
    if backend == "numpy":
        return np.broadcast_to(np.float32(1), (1 << 27, 1 << 27))
    return torch.ones(()).expand(1 << 27, 1 << 27)


def _unsupported(backend: str) -> Any:
    if backend == "numpy":
        return np.array([None, 1], object)
    return torch.eye(2).to_sparse() if backend == "torch" else jax.random.key(0)


def _lossy(backend: str) -> Any:
    return make(backend, np.full(NBYTES // 4, 1e30, np.float32))


# kind -> the bad leaf, the options of the mover, the error
FAILURES: dict[str, tuple[Callable[[str], Any], dict[str, Any], type[Exception]]] = {
    "unsupported": (_unsupported, {}, fmapper.UnsupportedLeafError),
    "lossy": (_lossy, {"dtype": "float16"}, fmapper.LossyCastError),
    "too_large": (_too_large, {}, fmapper.MoveError),
    "too_large_to_copy": (_too_large, {"copy": True}, fmapper.MoveError),
    "too_large_to_cast": (_too_large, {"dtype": "float16"}, fmapper.MoveError),
}
FAILING = [
    pytest.param(source, target, kind, id=f"{source}-{target}-{kind}")
    for (source, target), kind in itertools.product(CELLS, FAILURES)
    if not (source == "jax" and kind.startswith("too_large"))
    and not (source == target and kind in ("unsupported", "too_large"))
]


class Left:
    """What a block leaves behind: tensors, JAX arrays, and bytes that Python and NumPy hold."""

    def __enter__(self) -> Left:
        gc.collect()
        self.before = self._alive()
        tracemalloc.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for _attempt in range(20):  # JAX copies in a thread, which lets go of the source at its end
            gc.collect()
            self.nbytes = self._held()
            if self.nbytes < NBYTES // 2:
                break
            time.sleep(0.05)
        tracemalloc.stop()
        self.tensors, self.arrays = (
            now - then for now, then in zip(self._alive(), self.before, strict=True)
        )

    @staticmethod
    def _held() -> int:
        held, _peak = tracemalloc.get_traced_memory()
        if held > ABSURD:  # NumPy books also what it was refused
            traces = tracemalloc.take_snapshot().traces
            held = sum(trace.size for trace in traces if trace.size < ABSURD)
        return held

    @staticmethod
    def _alive() -> tuple[int, int]:
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return tensors, len(jax.live_arrays())

    def nothing(self) -> None:
        """Fails if there is anything, or as much as half of one leaf."""
        assert (self.tensors, self.arrays) == (0, 0)
        assert self.nbytes < NBYTES // 2, f"{self.nbytes} bytes are still held"


def _failing(tree: Any, move: Callable[[Any], Any]) -> Exception | None:
    try:
        move(tree)
    except Exception as error:
        return error.with_traceback(None)
    return None


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("source", "target", "kind"), FAILING)
def test_the_nth_leaf_fails(source: str, target: str, kind: str) -> None:
    bad, options, expected = FAILURES[kind]
    mover = MOVERS[target](**options) if options else MOVERS[target]
    good = [_leaf(source, i) for i in range(4)]
    _failing({"w": [good[0], bad(source)]}, mover)  # what is loaded once is no part of this
    for nth in range(5):
        broken = bad(source)
        leaves = [*good[:nth], broken, *good[nth:]]
        tree = {"layers": leaves}
        with noting(f"n = {nth}"), Left() as left:
            error = _failing(tree, mover)
            text = str(error)
            assert isinstance(error, expected), repr(error)
            assert text.startswith(f"model.layers[{nth}]: "), text
            del error
        with noting(f"n = {nth}"):
            left.nothing()
            assert tree["layers"] is leaves
            now = [*good[:nth], broken, *good[nth:]]
            assert all(a is b for a, b in zip(leaves, now, strict=True))
            for i, leaf in enumerate(good):
                assert (bits(leaf) == i).all()
    again = MOVERS[target](good)
    assert all((bits(leaf) == i).all() for i, leaf in enumerate(again))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("target", MOVERS)
@pytest.mark.parametrize("kind", ["unsupported", "lossy", "too_large"])
@pytest.mark.parametrize("culprit", MOVERS)
def test_one_of_several_backends_fails(culprit: str, kind: str, target: str) -> None:
    """What came from the others, before it and behind it, is given up too."""
    if culprit == "jax" and kind == "too_large":
        pytest.skip("JAX has no such array")
    if culprit == target and kind != "lossy":
        pytest.skip("it stays where it is")
    bad, options, expected = FAILURES[kind]
    sound = [_leaf(backend, 3) for backend in MOVERS]
    for at in range(4):
        broken = bad(culprit)
        tree = {"a": sound[:at], "x": {"y": broken}, "b": sound[at:]}
        mover = MOVERS[target](**options) if options else MOVERS[target]
        _failing(tree, mover)
        with Left() as left:
            error = _failing(tree, mover)
            assert isinstance(error, expected), repr(error)
            assert str(error).startswith("model.x.y: "), str(error)
            del error
        left.nothing()
        assert tree["x"]["y"] is broken
        assert all((bits(leaf) == 3).all() for leaf in sound)


def _marked(value: Any, nbytes: int) -> bool:
    return any(getattr(leaf, "nbytes", 0) == nbytes for leaf in jax.tree.leaves(value))


@pytest.mark.parametrize(
    "failure", [MemoryError, RuntimeError], ids=["MemoryError", "RuntimeError"]
)
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_a_device_of_jax_runs_full(
    source: str, failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the leaves are put there, all at once or one by one."""
    put = jax.device_put
    sizes = [NBYTES // 4 + i for i in range(5)]
    leaves = [make(source, np.full(size, i, np.float32)) for i, size in enumerate(sizes)]
    for nth, size in enumerate(sizes):

        def full(x: Any, *args: Any, nbytes: int = 4 * size, **kwargs: Any) -> Any:
            if _marked(x, nbytes):
                raise failure("RESOURCE_EXHAUSTED: out of memory")
            return put(x, *args, **kwargs)

        def many(arrays: Any, device: Any, *, full: Any = full, **kwargs: Any) -> Any:
            return [full(array, device) for array in arrays]

        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", full)
            patch.setattr(_private, "put", many)
            _failing({"w": leaves}, to_jax)
            with Left() as left:
                error = _failing({"w": leaves}, to_jax)
                assert isinstance(error, fmapper.MoveError), repr(error)
                assert str(error).startswith(f"model.w[{nth}]: "), str(error)
                assert "out of memory" in str(error)
                del error
            left.nothing()
        assert all((bits(leaf) == i).all() for i, leaf in enumerate(leaves))


@pytest.mark.parametrize("source", ["numpy", "jax"])
def test_torch_runs_full(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch takes over memory of NumPy's one leaf at a time."""
    take = torch.from_numpy
    sizes = [NBYTES // 4 + i for i in range(5)]
    leaves = [make(source, np.full(size, i, np.float32)) for i, size in enumerate(sizes)]
    for nth, size in enumerate(sizes):
        seen = []

        def full(array: Any, nbytes: int = 4 * size, seen: list[int] = seen) -> Any:
            if array.nbytes == nbytes:
                seen.append(nbytes)
                raise MemoryError("out of memory")
            return take(array)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "from_numpy", full)
            with Left() as left:
                error = _failing({"w": leaves}, to_torch)
                if not seen:
                    pytest.skip("these leaves do not go through torch.from_numpy")
                assert isinstance(error, fmapper.MoveError), repr(error)
                assert str(error).startswith(f"model.w[{nth}]: "), str(error)
                del error
            left.nothing()
        assert all((bits(leaf) == i).all() for i, leaf in enumerate(leaves))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_an_adapter_fails_while_it_gives(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = type(fmapper.backends.get_adapter(source))
    export = cls.export
    leaves = [_leaf(source, i) for i in range(5)]
    for nth in range(5):

        def broken(self: Any, arrays: Any, device: Device, bad: Any = leaves[nth]) -> Any:
            if any(array is bad for array in arrays):
                raise MemoryError("out of memory")
            return export(self, arrays, device)

        with monkeypatch.context() as patch:
            patch.setattr(cls, "export", broken)
            with Left() as left:
                error = _failing({"w": leaves}, MOVERS[target])
                assert isinstance(error, fmapper.MoveError), repr(error)
                assert str(error).startswith(f"model.w[{nth}]: "), str(error)
                del error
            left.nothing()
        assert all((bits(leaf) == i).all() for i, leaf in enumerate(leaves))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_move_keeps_nothing_of_its_source(source: str, target: str) -> None:
    """Converted leaves do not keep the old ones alive, and go themselves when forgotten."""
    old = _leaf(source, 1)
    gone = weakref.ref(old)
    new = MOVERS[target]({"w": [old]}, copy=True)["w"][0]
    del old
    gc.collect()
    assert gone() is None
    assert (bits(new) == 1).all()
    gone = weakref.ref(new)
    del new
    gc.collect()
    assert gone() is None


@pytest.mark.nightly_cases("jax-torch")
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_moving_again_and_again_leaves_nothing(source: str, target: str) -> None:
    given = [_leaf(source, i) for i in range(4)]
    MOVERS[target](given)
    with Left() as left:
        for _ in range(3):
            MOVERS[target](given)
    left.nothing()
