"""Copies on the host: exact, apart, laid out as asked, on as many threads as pay."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmapper.moves import host_copy

np = pytest.importorskip("numpy")

DTYPES = ("bool", "int8", "uint16", "float16", "float32", "complex128", "bfloat16", "float8_e5m2")
VIEWS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.T,
    "fortran": np.asfortranarray,
    "strided": lambda a: a[::2, 1::3],
    "negative": lambda a: a[::-1, ::-2],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "column": lambda a: a[:, 3],
    "three axes": lambda a: a.reshape(-1, 4, a.shape[1]).transpose(2, 0, 1),
    "empty": lambda a: a[:0],
}


@pytest.fixture(params=["small pieces", "as it is"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with limits so small that every array is in a block, split, and copied by threads."""
    if request.param == "small pieces":
        for name, value in {"_SMALL": 64, "_SLAB": 4096, "_PIECE": 512, "_PARALLEL": 0}.items():
            monkeypatch.setattr(host_copy, name, value)


def matrix(dtype: str, rows: int = 40, columns: int = 36) -> Any:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(0).integers(0, 256, rows * columns * real.itemsize, np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(real).reshape(rows, columns)


@pytest.mark.parametrize("order", ["K", "C"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_exact_and_apart(dtype: str, order: Any, sizes: None) -> None:
    sources = [view(matrix(dtype)) for view in VIEWS.values()]
    want = [source.tobytes() for source in sources]
    copies = host_copy.host_copies(sources, order=order)
    for name, source, new, values in zip(VIEWS, sources, copies, want, strict=True):
        assert (new.shape, new.dtype) == (source.shape, source.dtype), name
        assert new.tobytes() == values, name
        assert new.flags.writeable, name
        assert not np.shares_memory(new, source), name
        wanted = source.copy(order)
        assert [s for s, n in zip(new.strides, new.shape, strict=True) if n > 1] == [
            s for s, n in zip(wanted.strides, wanted.shape, strict=True) if n > 1
        ], name
    filled = [new for new in copies if new.size]
    for at, new in enumerate(filled):
        new.view(np.uint8 if new.flags.c_contiguous else new.dtype)[...] = 0
        assert not any(np.shares_memory(new, other) for other in filled[at + 1 :])


@given(sizes=st.lists(st.integers(0, 3000), max_size=30), slab=st.sampled_from([256, 1024, 8192]))
@settings(deadline=None)
def test_any_mix_of_sizes(sizes: list[int], slab: int) -> None:
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_SMALL": 100, "_SLAB": slab, "_PIECE": 300, "_PARALLEL": 0}.items():
            patch.setattr(host_copy, name, value)
        copies = host_copy.host_copies(sources)
    for source, new in zip(sources, copies, strict=True):
        assert np.array_equal(source, new)
        new[...] = 7  # if two of them met, the next comparison would show it


def test_large_copies_are_aligned() -> None:
    """XLA takes over memory without a copy only where it starts at a multiple of 64 bytes."""
    copies = host_copy.host_copies([np.ones(n, np.uint8) for n in (40_001, 100_003, 33_000)])
    assert [new.ctypes.data % 64 for new in copies] == [0, 0, 0]


def test_blocks_are_no_larger_than_what_is_in_them() -> None:
    (new,) = host_copy.host_copies([np.ones(100_000, np.uint8)])
    assert new.base.nbytes <= 100_000 + 128


def test_several_threads_copy_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    copy = host_copy._copy

    def spy(pairs: Any) -> None:
        seen.add(threading.get_ident())
        gate.wait(timeout=30)
        copy(pairs)

    gate = threading.Barrier(2)
    monkeypatch.setattr(host_copy, "_copy", spy)
    monkeypatch.setattr(host_copy, "threads_for_memory", lambda: 2)
    (new,) = host_copy.host_copies([np.ones(2 * host_copy._PIECE, np.uint8)])
    assert new.all()
    assert len(seen) == 2
    assert threading.get_ident() not in seen


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pairs: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(host_copy, "_copy", fail)
    monkeypatch.setattr(host_copy, "threads_for_memory", lambda: 2)
    with pytest.raises(MemoryError, match="no more"):
        host_copy.host_copies([np.ones(3 * host_copy._PIECE, np.uint8)])
