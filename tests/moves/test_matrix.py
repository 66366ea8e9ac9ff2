"""Every backend to every backend: each dtype in each layout and size arrives bit for bit, or not.

What cannot arrive is refused by a `FmapperError` that names the leaf; nothing kills the process.
Run as a script, it tries refusals one by one and prints what came of each.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper import to_cpu, to_device, to_jax, to_numpy

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
ml_dtypes = pytest.importorskip("ml_dtypes")

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
    assert_exact,
    bits,
    make,
    sample,
    x64,
)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with made.on_cpu():
        yield


def holds(backend: str, dtype: str, wide: bool) -> bool:
    """Whether a backend holds a dtype as it is."""
    return wide or backend != "jax" or dtype not in WIDE


# --- the matrix ----------------------------------------------------------------------------------

MATRIX = [
    pytest.param(source, target, dtype, wide, id=f"{source}-{target}-{dtype}-x64_{wide}")
    for (source, target), dtype, wide in itertools.product(CELLS, DTYPES, (False, True))
    if holds(source, dtype, wide)
    and holds(target, dtype, wide)
    and ("jax" in (source, target) or not wide)
    # JAX compiles its copy of every shape: what is no wider with x64 is tried once.
    and not (source == target and wide and dtype not in (*WIDE, "float32"))
]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("source", "target", "dtype", "wide"), MATRIX)
def test_every_layout_arrives_bit_for_bit(
    source: str, target: str, dtype: str, wide: bool, tmp_path: Path
) -> None:
    """All at once, each alone, and each copied; the sources are what they were."""
    mover = MOVERS[target]
    with x64(wide):
        given = made.layouts(source, dtype, tmp_path)
        tree = {name: array for name, (array, _) in given.items()}
        moved, copied = mover(tree), mover(tree, copy=True)
        assert list(moved) == list(copied) == list(tree)
        for name, (array, want) in given.items():
            with noting(name):
                for new in (moved[name], copied[name], mover(array)):
                    assert_exact(new, want, target)
                assert_exact(array, want, source)
                if source == target:
                    assert moved[name] is array
                    assert copied[name] is not array or isinstance(array, np.bool_)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", MOVERS)
def test_movers_that_keep_the_backend(source: str, dtype: str, tmp_path: Path) -> None:
    with x64(dtype in WIDE):
        given = made.layouts(source, dtype, tmp_path)
        tree = {name: array for name, (array, _) in given.items()}
        for mover in (to_cpu, to_device("cpu"), MOVERS[source]):
            moved, copied = mover(tree), mover(tree, copy=True)
            for name, (array, want) in given.items():
                with noting(name):
                    assert moved[name] is array
                    assert copied[name] is not array or isinstance(array, np.bool_)
                    assert_exact(copied[name], want, source)


@pytest.mark.nightly_cases("jax-numpy")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_round_trip_changes_no_bit(source: str, target: str, tmp_path: Path) -> None:
    for dtype in DTYPES:
        with x64(dtype in WIDE):
            for name, (array, want) in made.layouts(source, dtype, tmp_path).items():
                with noting(f"{dtype} {name}"):
                    assert_exact(MOVERS[source](MOVERS[target](array)), want, source)


@pytest.mark.parametrize("target", MOVERS)
def test_weak_types_of_jax(target: str) -> None:
    for wide in (False, True):
        with x64(wide):
            for number in (1.5, -3, 2j, True):
                weak = jax.numpy.asarray(number)
                want = np.asarray(weak)
                for copy in (None, True):
                    assert_exact(MOVERS[target]({"x": weak}, copy=copy)["x"], want, target)


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", WIDE)
def test_jax_arrays_that_are_wide_in_spite_of_the_setting(target: str, dtype: str) -> None:
    with x64():
        array = make("jax", sample(dtype))
    with x64(False):
        assert_exact(MOVERS[target](array), sample(dtype), target)
        assert_exact(MOVERS[target](array, copy=True), sample(dtype), target)
        assert to_jax(array) is array
        assert_exact(to_jax(array, copy=True), sample(dtype), "jax")


@pytest.mark.parametrize("name", sorted(set(dir(ml_dtypes)) - set(DTYPES)))
@pytest.mark.parametrize("target", ["torch", "jax"])
def test_other_narrow_dtypes_are_exact_or_refused(name: str, target: str) -> None:
    """int4, float6, other float8 ...: whatever ml_dtypes has."""
    scalar = getattr(ml_dtypes, name)
    if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
        pytest.skip("not a dtype")
    host = np.array([1, 0, 1, 1, 0], scalar)
    try:
        new = MOVERS[target]({"w": host})["w"]
    except fmapper.MoveError as error:
        assert str(error).startswith("model.w: ")  # noqa: PT017
    else:
        back = to_numpy(new)
        assert back.dtype == host.dtype
        assert back.astype(float).tolist() == host.astype(float).tolist()


def test_constants_are_moved_inside_jit() -> None:
    """They are no tracers, though what is made of them there may be."""
    host = np.arange(3, dtype=np.float32)
    for source in MOVERS:
        constant = make(source, host)
        for copy in (None, True):
            with noting(f"{source}, copy={copy}"):
                new = jax.jit(lambda x, c=constant, k=copy: x * to_jax({"w": c}, copy=k)["w"])(2.0)
                assert_exact(new, host * 2, "jax")


# --- sizes and batches ---------------------------------------------------------------------------

SIZES = (1, 1 << 10, 100 << 10, 3 << 20)


def _filled(nbytes: int, dtype: str = "uint8", offset: int = 0) -> Any:
    """A writable array of so many bytes of a pattern without a short period."""
    size = made.host_dtype(dtype).itemsize
    numbers = (np.arange(-(-nbytes // size) * size) * 2654435761 >> 7).astype(np.uint8)
    return made.placed(numbers.view(made.host_dtype(dtype)), offset)


def _tensor_or(backend: str, host: Any) -> Any:
    """The array on the memory of a host array for NumPy and torch; a copy of it for JAX."""
    if backend == "numpy":
        return host
    return made.tensor_on(host) if backend == "torch" else make("jax", host)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("source", "target"), CELLS)
def test_sizes(source: str, target: str) -> None:
    """Alone and in one tree, aligned and not, in C order, transposed, strided; copied or not."""
    tree, want = {}, {}
    for nbytes, dtype, offset in itertools.product(SIZES, ("uint8", "bfloat16", "float32"), (0, 1)):
        host = _filled(nbytes, dtype, offset)
        shapes = {"flat": host}
        if host.size > 64:
            matrix = host[: host.size // 64 * 64].reshape(-1, 64)
            shapes["turned"] = matrix.copy().T
            shapes["columns"] = matrix.copy()[:, 3:50]
        for name, array in shapes.items():
            if source != "jax" or name == "flat":
                key = f"{nbytes}_{dtype}_{offset}_{name}"
                tree[key], want[key] = _tensor_or(source, array), made.native(array)
    for copy in (None, True):
        moved = MOVERS[target](tree, copy=copy)
        for key, array in tree.items():
            with noting(key):
                assert_exact(moved[key], want[key], target)
                assert_exact(MOVERS[target](array, copy=copy), want[key], target)


@pytest.mark.nightly_cases("numpy-numpy")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("source", "target"), CELLS)
def test_forty_megabytes_between_small_ones(source: str, target: str) -> None:
    hosts = [_filled(n, "float32", 4) for n in (4, 40 << 20, 1 << 10, 3 << 20, 4)]
    tree = [_tensor_or(source, host) for host in hosts]
    for copy in (None, True):
        for new, host in zip(MOVERS[target](tree, copy=copy), hosts, strict=True):
            assert_exact(new, host, target)


@functools.cache
def _kinds_of_leaf(wide: bool) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (backend, dtype, name)
        for backend in MOVERS
        for dtype in DTYPES
        for name in made.COMMON_LAYOUTS
        if holds("jax", dtype, wide)
    )


def _forest(count: int, wide: bool) -> list[tuple[Any, Any]]:
    """Small leaves of all backends, dtypes and layouts; each with its number in its bits."""
    kinds = _kinds_of_leaf(wide)
    found = []
    for i in range(count):
        backend, dtype, name = kinds[i * 7919 % len(kinds)]
        if backend == "jax" and i % 5:  # they take long to make
            backend = "torch"
        host = sample(dtype)
        if dtype != "bool":
            host.view(np.uint8)[::2] = i % 256
        want = made.COMMON_LAYOUTS[name](host)
        if backend == "numpy":
            found.append((want, made.native(want)))
        elif backend == "torch":
            found.append((made.COMMON_LAYOUTS[name](make("torch", host)), made.native(want)))
        else:
            found.append((make("jax", want), made.native(want)))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("target", MOVERS)
def test_three_thousand_small_leaves(target: str, wide: bool) -> None:
    """Of all backends, dtypes and layouts, some of them twice: order, ties and bits are kept."""
    with x64(wide):
        forest = _forest(3000, wide)
        leaves = [leaf for leaf, _ in forest]
        tree = {"a": leaves[:1000], "b": tuple(leaves[1000:]), "tied": leaves[::100]}
        before = fmapper.fleaves(tree)
        moved = MOVERS[target](tree)
        flat = [*moved["a"], *moved["b"]]
        for i, (new, (leaf, want)) in enumerate(zip(flat, forest, strict=True)):
            with noting(f"leaf {i}, {made.backend_of(leaf)} {want.dtype}"):
                assert_exact(new, want, target)
                assert (new is leaf) is (made.backend_of(leaf) == target)
        assert all(a is b for a, b in zip(moved["tied"], flat[::100], strict=True))
        assert all(a is b for a, b in zip(before, fmapper.fleaves(tree), strict=True))
        for leaf, want in forest[::50]:
            assert_exact(leaf, want, made.backend_of(leaf))


@pytest.mark.parametrize("target", MOVERS)
def test_ten_arrays_of_all_backends_in_one_list(target: str) -> None:
    backends = ["torch", "numpy", "jax", "jax", "numpy", "torch", "numpy", "jax", "torch", "numpy"]
    sizes = [1, 3 << 20, 1 << 10, 3 << 20, 1, 100 << 10, 1 << 10, 1, 3 << 20, 100 << 10]
    hosts = [_filled(size, offset=1) for size in sizes]
    tree = [_tensor_or(b, h) for b, h in zip(backends, hosts, strict=True)]
    for copy in (None, True):
        moved = MOVERS[target](tree, copy=copy)
        for at, (new, host) in enumerate(zip(moved, hosts, strict=True)):
            with noting(f"[{at}]"):
                assert_exact(new, host, target)
                assert (new is tree[at]) is (copy is None and backends[at] == target)


def test_empty_trees_and_trees_of_empty_arrays() -> None:
    for target, mover in MOVERS.items():
        assert mover([]) == []
        assert mover({}) == {}
        for new in mover([np.empty((0, 2), np.float32), torch.empty(0, 2)] * 3):
            assert_exact(new, np.empty((0, 2), np.float32), target)


# --- 64 bits where JAX holds 32 ------------------------------------------------------------------

NARROW = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}


def _wide_layouts(source: str, values: Any, directory: Path) -> dict[str, tuple[Any, Any]]:
    """The layouts of a source that hold these 120 values in whatever order."""
    found = {}
    if source == "numpy":
        for name, layout in made.NUMPY_LAYOUTS.items():
            array = layout(values.copy())
            found[name] = (array, made.native(array))
    else:
        for name, layout in made.COMMON_LAYOUTS.items():
            found[name] = (layout(make("torch", values)), made.native(layout(values)))
    return found


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_integers_that_fit_are_narrowed_in_silence(source: str, dtype: str, tmp_path: Path) -> None:
    low = np.iinfo(NARROW[dtype])
    values = np.resize(np.array([low.max, low.min, 0, 1, low.max - 1], dtype), 120)
    given = _wide_layouts(source, values, tmp_path)
    with x64(False):
        moved = to_jax({name: array for name, (array, _) in given.items()})
        for name, (array, want) in given.items():
            with noting(name):
                assert_exact(moved[name], want.astype(NARROW[dtype]), "jax")
                assert_exact(to_jax(array, copy=True), want.astype(NARROW[dtype]), "jax")
                assert_exact(array, want, source)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *(("int64", number) for number in (2**31, -(2**31) - 1, 2**40, -(2**63))),
        *(("uint64", number) for number in (2**32, 2**63, 2**64 - 1)),
    ],
)
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_integers_that_do_not_fit_are_refused(
    source: str, dtype: str, number: int, tmp_path: Path
) -> None:
    """One of them, wherever it is, is enough; so is one leaf among many."""
    values = np.full(120, number, dtype)
    ok = np.arange(3)
    with x64(False):
        for name, (array, want) in _wide_layouts(source, values, tmp_path).items():
            with noting(name):
                if not want.size:
                    assert_exact(to_jax(array), want.astype(NARROW[dtype]), "jax")
                    continue
                for dtype_asked in (None, "float32"):
                    with pytest.raises(fmapper.LossyCastError, match=r"^model\.b\[1\]: integers"):
                        to_jax({"a": ok, "b": [ok.copy(), array], "c": ok}, dtype=dtype_asked)
                assert_exact(array, want, source)
        last = np.zeros(1 << 20, dtype)
        last[-1] = number
        with pytest.raises(fmapper.LossyCastError, match=r"^model\.w: "):
            to_jax({"w": make(source, last)})


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_floats_are_narrowed_with_one_warning(source: str, dtype: str, tmp_path: Path) -> None:
    """To the nearest, subnormals, zeros of both signs, infinities and NaNs included."""
    edge = [
        1 / 3,
        -0.0,
        0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        -1.4e-45,
        1e-300,
        3.4028235677973362e38,
    ]
    values = np.resize(np.array(edge), 120).astype(dtype)
    given = _wide_layouts(source, values, tmp_path)
    tree: dict[str, Any] = {name: array for name, (array, _) in given.items()}
    tree |= {"narrow": np.ones(2, np.float32), "count": np.arange(2)}
    with x64(False):
        with pytest.warns(fmapper.FmapperWarning) as caught:
            moved = to_jax(tree)
        (warning,) = caught
        assert warning.category is fmapper.PrecisionWarning
        text = str(warning.message)
        assert f"{dtype} became {NARROW[dtype]}" in text
        assert "model.contiguous" in text
        assert "model.narrow" not in text
        assert "model.count" not in text
        for name, (array, want) in given.items():
            with noting(name):
                with np.errstate(all="ignore"):
                    narrow = want.astype(NARROW[dtype])
                np.testing.assert_array_equal(np.asarray(moved[name]), narrow)
                got = np.asarray(moved[name]).reshape(-1).view(np.float32)
                signs = np.signbit(narrow.reshape(-1).view(np.float32))
                number = ~np.isnan(got)
                assert (np.signbit(got) == signs)[number].all(), "the sign of a zero"
                assert_exact(array, want, source)


def test_the_warning_names_every_path_of_a_few() -> None:
    tree = {"a": np.ones(2), "b": [torch.ones(2, dtype=torch.float64), np.ones(1, np.float32)]}
    tree |= {"c": np.ones(1, np.complex128), "d": np.arange(2), "e": np.float64(2.0)}
    with x64(False), pytest.warns(fmapper.FmapperWarning) as caught:
        to_jax(tree)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1
    for path in ("model.a", "model.b[0]", "model.c", "model.e"):
        assert path in texts[0]
    for path in ("model.b[1]", "model.d"):
        assert path not in texts[0]


INFINITE = {
    ("float64", None): [1e300, -1e300, 3.5e38, 3.4028235677973366e38, np.finfo(np.float64).max],
    ("float64", "float32"): [1e300, 3.4028235677973366e38],
    ("float64", "float16"): [65520.0, -1e5, 1e300],
    ("float64", "bfloat16"): [3.4e38, 1e39],
    ("float32", "float16"): [65520.0, -1e30],
    ("float32", "bfloat16"): [3.4e38],
    ("float32", "float8_e5m2"): [61440.0, -1e6],
    ("float32", "float8_e4m3fn"): [480.0, 1e6, -1e6],
    ("float32", "float8_e4m3fnuz"): [256.0, -1e6],
    ("float32", "float8_e5m2fnuz"): [65536.0, -1e6],
    ("float32", "float8_e8m0fnu"): [-1.0],
    ("complex128", None): [complex(0, 1e300), complex(1e300, 0), complex(np.inf, 1e300)],
    ("complex128", "float32"): [complex(1.0, 1e300)],
    ("complex128", "float16"): [complex(1.0, 1e300)],
}


@pytest.mark.sampled(3)
@pytest.mark.nightly_cases("jax-jax-complex128-float32")
@pytest.mark.parametrize(("dtype", "asked"), INFINITE, ids=str)
@pytest.mark.parametrize(("source", "target"), CELLS)
def test_what_would_become_infinite_is_refused(
    source: str, target: str, dtype: str, asked: str | None
) -> None:
    if asked is None and (source == "jax" or target != "jax"):
        pytest.skip("nothing is narrowed")
    wide = source == "jax" and dtype in WIDE
    for number in INFINITE[dtype, asked]:
        with x64(wide), noting(repr(number)):
            host = np.array([1.0, number, 2.0], dtype)
            array = make(source, host)
            ok = make(source, np.ones(2, np.float32))
            with pytest.raises(fmapper.LossyCastError, match=r"^model\.b\[0\]: finite|values"):
                MOVERS[target]({"a": ok, "b": [array], "c": ok}, dtype=asked)
            assert_exact(array, host, source)


@pytest.mark.nightly_cases("jax-jax-float64")
@pytest.mark.parametrize("asked", ["float64", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("source", "target"), CELLS)
def test_dtype_touches_floating_and_complex_leaves_only(
    source: str, target: str, asked: str
) -> None:
    with x64():
        kept = {d: make(source, sample(d)) for d in DTYPES if d not in FLOATS}
        floats = {
            d: make(source, np.array([1, 2, 4], made.host_dtype(d)))
            for d in FLOATS
            if not d.startswith(("complex", "float8_e8m0fnu"))
        }
        pairs = {d: make(source, np.array([1 + 2j, 4], d)) for d in ("complex64", "complex128")}
        moved = MOVERS[target]({**kept, **floats, **pairs}, dtype=asked)
        for dtype, array in kept.items():
            assert_exact(moved[dtype], sample(dtype), target)
            assert (moved[dtype] is array) is (source == target)
        for dtype in floats:
            assert_exact(moved[dtype], np.array([1, 2, 4], made.host_dtype(asked)), target)
        held = "complex128" if asked == "float64" else "complex64"
        for dtype in pairs:
            assert_exact(moved[dtype], np.array([1 + 2j, 4], held), target)


@pytest.mark.parametrize("source", MOVERS)
def test_casts_between_the_float8_types(source: str) -> None:
    """ml_dtypes knows no way from some to others; by float32 there is one."""
    small = [d for d in ML_DTYPES if d.startswith("float8")]
    for old, new in itertools.permutations(small if source != "jax" else small[::2], 2):
        with noting(f"{old} to {new}"):
            array = make(source, np.array([1, 2, 4], made.host_dtype(old)))
            want = np.array([1, 2, 4], made.host_dtype(new))
            assert_exact(MOVERS[source](array, dtype=new), want, source)


EDGES = [0.0, -0.0, 1.0, -1.0, 1 / 3, -1 / 3, 448.0, 463.9, 464.1, 240.0, 247.0, 57344.0, 65504.0]
EDGES += [61440.1, 65519.0, 2.0**127, 2.0**-126, 2.0**-127, 1e-40, 2.0**-149, 2.0**-24, 2.0**-25]
EDGES += [2.0**-26, 2.0**-10, 2.0**-17, 2.0**-18, 3.389e38, 3.4e38, np.nan, np.inf, -np.inf]
CASTS = [
    (old, new)
    for old in ("float64", "float32", "float16", "bfloat16")
    for new in FLOATS
    if not new.startswith("complex") and old != new and (old, new) != ("bfloat16", "float64")
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (source, old, new)
        for source, (old, new) in itertools.product(MOVERS, CASTS)
        if source != "jax" or old in ("float64", "float32")  # JAX compiles each
    ],
)
def test_casts_are_those_of_ml_dtypes(source: str, old: str, new: str) -> None:
    """The nearest number whoever casts; what becomes infinite or NaN, and was not, is refused.

    Infinities go to an infinity, or to NaN where there is none: never to a number.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        host = np.array(EDGES).astype(made.host_dtype(old))
        want = host.astype(made.host_dtype(new))
        finite, arrives = (np.isfinite(x.astype(np.float64)) for x in (host, want))
    fits = arrives | ~finite
    if new == "float8_e8m0fnu":  # no sign: what -inf is there is nobody's number
        fits &= ~np.signbit(host.astype(np.float64))
    with x64(), noting(f"{host[fits]}"):
        got = bits(MOVERS[source](make(source, host[fits]), dtype=new))
        nan = np.isnan(want[fits].astype(np.float64))
        assert (np.isnan(got.astype(np.float64)) == nan).all(), f"{got}, wanted {want[fits]}"
        same = got[~nan].tobytes() == want[fits][~nan].tobytes()
        assert same, f"{got[~nan]}, wanted {want[fits][~nan]}"
    for number in host[finite & ~arrives][: 2 if source == "jax" else None]:
        with x64(), noting(repr(number)), pytest.raises(fmapper.LossyCastError):
            MOVERS[source]({"w": make(source, np.array([number]))}, dtype=new)


@pytest.mark.parametrize(("source", "target"), CELLS)
def test_every_layout_can_be_cast(source: str, target: str, tmp_path: Path) -> None:
    """float32 to float16 and back; nothing but the dtype changes."""
    for name, (array, want) in made.layouts(source, "float32", tmp_path).items():
        with noting(name), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            small = np.isfinite(want) & (abs(want) < 60000)
        if not small.all() or source == "jax":
            continue
        assert_exact(MOVERS[target](array, dtype="float16"), want.astype(np.float16), target)
    numbers = np.arange(120, dtype=np.float32)
    layouts = made.NUMPY_LAYOUTS if source == "numpy" else made.COMMON_LAYOUTS
    if source == "jax":  # it compiles a cast for every shape
        layouts = {name: layouts[name] for name in ("transposed", "zero_d", "empty")}
    for copy in (None, True):
        given = {}
        for name, layout in layouts.items():
            if source == "jax":
                given[name] = make("jax", layout(numbers))
            else:
                whole = numbers.copy() if source == "numpy" else make("torch", numbers)
                given[name] = layout(whole)
        moved = MOVERS[target](given, dtype="float16", copy=copy)
        for name, layout in layouts.items():
            with noting(name):
                want = made.native(layout(numbers.copy())).astype(np.float16)
                assert_exact(moved[name], want, target)
                assert_exact(given[name], made.native(layout(numbers.copy())), source)


# --- what the user has set -----------------------------------------------------------------------


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "torch_default_device_meta": lambda: torch.device("meta"),
    "torch_default_dtype": _default_dtype,
    "torch_one_thread": _one_thread,
    "torch_no_grad": torch.no_grad,
    "torch_inference_mode": torch.inference_mode,
    "torch_autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "numpy_errors_raise": lambda: np.errstate(all="raise"),
    "jax_strict_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "jax_no_jit": jax.disable_jit,
    "jax_no_implicit_transfers": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("source", "target"), CELLS)
def test_settings_of_the_frameworks_change_nothing(source: str, target: str, setting: str) -> None:
    special = np.array([1.5, -0.0, np.nan, np.inf], np.float32)
    hosts = [special, np.arange(3, dtype=np.int32), _filled(3 << 20, offset=1)]
    given = [_tensor_or(source, host.copy()) for host in hosts]
    for copy in (None, True):
        with SETTINGS[setting]():
            moved = MOVERS[target](given, copy=copy)
        for new, host in zip(moved, hosts, strict=True):
            assert_exact(new, host, target)
            if target == "torch" and source != "torch":
                assert not new.requires_grad
    with SETTINGS[setting]():
        (cast,) = MOVERS[target](given[:1], dtype="float16")
    assert bits(cast).dtype == np.float16
    np.testing.assert_array_equal(bits(cast), special.astype(np.float16))


@pytest.mark.parametrize(("source", "target"), CELLS)
def test_several_threads_at_once(source: str, target: str) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            hosts = [np.full(n, number + n, np.int32) for n in (1, 300, 1 << 18, 5)]
            given = [_tensor_or(source, host.copy()) for host in hosts]
            start.wait()
            for _ in range(3):
                moved = MOVERS[target](given, copy=True)
                for new, host in zip(moved, hosts, strict=True):
                    assert_exact(new, host, target)
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _python(code: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_can_move_too() -> None:
    """As the workers of a torch DataLoader do: the parent's threads are gone in there."""
    done = _python(
        """
        import os, signal, numpy as np, torch, fmapper

        tree = [np.full(1 << 21, i, np.float32)[k:] for i, k in enumerate([0, 1, 0, 1])]
        tree += [np.full(10, i, np.float32) for i in range(100)]

        def work():
            fmapper.to_numpy(tree, copy=True)
            new = fmapper.to_torch(tree)
            assert [float(t[-1]) for t in new[:4]] == [0, 1, 2, 3]
            back = fmapper.to_numpy(new)
            assert all((a == b).all() for a, b in zip(back, tree))

        work()
        child = os.fork()
        if not child:
            signal.alarm(20)  # a child that hangs ends by it
            torch.set_num_threads(1)
            work()
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        """
    )
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stdout + done.stderr


@pytest.mark.nightly
def test_a_move_at_exit() -> None:
    """Saving a model in an `atexit` handler: no new threads can be had by then."""
    done = _python(
        """
        import atexit, numpy as np, torch, jax, fmapper

        tree = [np.full(1 << 21, i, np.float32) for i in range(4)]
        tree += [np.full(10, i, np.float32) for i in range(100)]

        def work():
            for mover in (fmapper.to_torch, fmapper.to_numpy, fmapper.to_jax):
                new = mover(tree, copy=True)
                assert [float(t[-1]) for t in new[:4]] == [0, 1, 2, 3]
            print("moved")

        atexit.register(work)
        work()
        """
    )
    assert done.stdout.split() == ["moved", "moved"], done.stdout + done.stderr
    assert done.returncode == 0


# --- refusals ------------------------------------------------------------------------------------

Attempt = Callable[[Any], None]


def _structured(attempt: Attempt) -> None:
    attempt(np.zeros(2, [("x", "f4"), ("y", "i4")]))


def _float0(attempt: Attempt) -> None:
    def square(x: Any) -> Any:
        return (x * x).sum() * 1.0

    attempt(jax.grad(square, allow_int=True)(jax.numpy.arange(2)))


def _fake(attempt: Attempt) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1000)
    attempt(fake)


def _freed(attempt: Attempt) -> None:
    """As sharded training does with parameters that it does not need now."""
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    attempt(tensor)


class _Wrapper(torch.Tensor):
    """A tensor without memory of its own: all that it does goes to another one."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        new = func(*bare, **(kwargs or {}))
        return cls(new) if isinstance(new, torch.Tensor) else new


def _masked_tensor(attempt: Attempt) -> None:
    from torch.masked import masked_tensor

    attempt(masked_tensor(torch.ones(2), torch.tensor([True, False])))


def _func_grad(attempt: Attempt) -> None:
    def inside(x: Any) -> Any:
        attempt(x)
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))


def _func_vmap(attempt: Attempt) -> None:
    def inside(x: Any) -> Any:
        attempt(x)
        return x

    torch.func.vmap(inside)(torch.ones(2, 2))


def _functional(attempt: Attempt) -> None:
    def inside(x: Any) -> Any:
        attempt(x)
        return x + 1

    torch.func.functionalize(inside)(torch.ones(2))


def _traced(transform: Any) -> Callable[[Attempt], None]:
    def kind(attempt: Attempt) -> None:
        def inside(x: Any) -> Any:
            attempt(x)
            return x.sum()

        transform(inside)(jax.numpy.ones((2, 2)))

    return kind


def _leaked(attempt: Attempt) -> None:
    kept: list[Any] = []
    jax.jit(lambda x: (kept.append(x), x)[1])(jax.numpy.ones(2))
    attempt(kept[0])


def _deleted(attempt: Attempt) -> None:
    gone = jax.numpy.ones(2)
    gone.delete()
    attempt(gone)


def _donated(attempt: Attempt) -> None:
    gone = jax.numpy.ones(2) + 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(gone).block_until_ready()
    if not gone.is_deleted():
        gone.delete()
    attempt(gone)


def _of(build: Callable[[], Any]) -> Callable[[Attempt], None]:
    def kind(attempt: Attempt) -> None:
        attempt(build())

    return kind


def _quantized_per_channel() -> Any:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.quint8)


ONE, TWO = np.float32(1), np.float32(2)

# kind -> whose it is, and what hands it to an attempt
REFUSED: dict[str, tuple[str, Callable[[Attempt], None]]] = {
    "object": ("numpy", _of(lambda: np.array([None, 1], object))),
    "object_of_arrays": ("numpy", _of(lambda: np.array([np.ones(2), None], object))),
    "text": ("numpy", _of(lambda: np.array(["a", "bc"]))),
    "bytes": ("numpy", _of(lambda: np.array([b"a", b"bc"]))),
    "string_dtype": ("numpy", _of(lambda: np.array(["a", "b"], np.dtypes.StringDType()))),
    "void": ("numpy", _of(lambda: np.zeros(2, "V4"))),
    "void_like_bfloat16": ("numpy", _of(lambda: np.zeros(2, "V2"))),
    "datetime": ("numpy", _of(lambda: np.array(["2020-01-01"], "datetime64[D]"))),
    "timedelta": ("numpy", _of(lambda: np.array([1], "timedelta64[s]"))),
    "structured": ("numpy", _structured),
    "records": ("numpy", _of(lambda: np.rec.array([(1.0, 2)], dtype=[("x", "f4"), ("y", "i4")]))),
    "masked": ("numpy", _of(lambda: np.ma.masked_array([ONE, TWO], mask=[True, False]))),
    "masked_nowhere": ("numpy", _of(lambda: np.ma.masked_array([ONE, TWO]))),
    "masked_constant": ("numpy", _of(lambda: np.ma.masked)),
    "float0": ("numpy", _float0),
    "empty_object": ("numpy", _of(lambda: np.empty(0, object))),
    "sparse_coo": ("torch", _of(lambda: torch.eye(3).to_sparse())),
    "sparse_csr": ("torch", _of(lambda: torch.eye(3).to_sparse_csr())),
    "sparse_csc": ("torch", _of(lambda: torch.eye(3).to_sparse_csc())),
    "sparse_bsr": ("torch", _of(lambda: torch.eye(4).to_sparse_bsr((2, 2)))),
    "sparse_bsc": ("torch", _of(lambda: torch.eye(4).to_sparse_bsc((2, 2)))),
    "quantized": (
        "torch",
        _of(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    ),
    "quantized_32": (
        "torch",
        _of(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint32)),
    ),
    "quantized_per_channel": ("torch", _of(_quantized_per_channel)),
    "nested": ("torch", _of(lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))),
    "jagged": (
        "torch",
        _of(
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        ),
    ),
    "meta": ("torch", _of(lambda: torch.zeros(1000, device="meta"))),
    "meta_parameter": ("torch", _of(lambda: torch.nn.Linear(2, 2, device="meta").weight)),
    "fake": ("torch", _fake),
    "freed": ("torch", _freed),
    "lazy": ("torch", _of(lambda: torch.nn.LazyLinear(2).weight)),
    "complex32": ("torch", _of(lambda: torch.ones(2, dtype=torch.complex32))),
    "bits8": ("torch", _of(lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8))),
    "wrapper": ("torch", _of(lambda: _Wrapper(torch.full((1000,), 3.0)))),
    "masked_tensor": ("torch", _masked_tensor),
    "func_grad": ("torch", _func_grad),
    "func_vmap": ("torch", _func_vmap),
    "functional": ("torch", _functional),
    "jit": ("jax", _traced(jax.jit)),
    "grad": ("jax", _traced(jax.grad)),
    "vmap": ("jax", _traced(jax.vmap)),
    "eval_shape": ("jax", _traced(lambda f: lambda x: jax.eval_shape(f, x))),
    "leaked": ("jax", _leaked),
    "deleted": ("jax", _deleted),
    "donated": ("jax", _donated),
    "key": ("jax", _of(lambda: jax.random.key(0))),
    "keys": ("jax", _of(lambda: jax.random.split(jax.random.key(0), 3))),
}
if torch.backends.mkldnn.is_available():
    REFUSED["mkldnn"] = ("torch", _of(lambda: torch.ones(3, 3).to_mkldnn()))
if np.dtype(np.longdouble).itemsize > 8:
    REFUSED["longdouble"] = ("numpy", _of(lambda: np.ones(2, np.longdouble)))
    REFUSED["longdouble_scalar"] = ("numpy", _of(lambda: np.longdouble(1)))
    REFUSED["clongdouble"] = ("numpy", _of(lambda: np.ones(2, np.clongdouble)))

COPIES = {"None": None, "False": False, "True": True}


# Inside these, an array that is made is one of theirs.
INSIDE = ("func_grad", "func_vmap", "functional", "jit", "grad", "vmap", "eval_shape")


def _try_one(leaf: Any, sound: list[Any], target: str, copy: bool | None) -> dict[str, Any]:
    """What comes of one leaf between sound ones, and whether the tree is what it was."""
    tree = {"ok": list(sound), "x": [leaf], "more": list(sound)}
    try:
        new = MOVERS[target](tree, copy=copy)
    except fmapper.FmapperError as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
    except Exception as error:
        outcome = {"foreign": f"{type(error).__name__}: {error}"}
    else:
        outcome = {"same": new["x"][0] is leaf, "type": str(type(new["x"][0]))}
    now = tree["ok"] + tree["x"] + tree["more"]
    whole = all(a is b for a, b in zip(now, [*sound, leaf, *sound], strict=True))
    return {**outcome, "whole": whole}


def _report(kinds: list[str]) -> None:
    """Prints a line before and after each attempt, so that a death tells its cause."""
    for kind in kinds:
        for target, (name, copy) in itertools.product(MOVERS, COPIES.items()):
            where = {"kind": kind, "target": target, "copy": name}
            print(json.dumps(where), flush=True)
            sound: list[Any] = [] if copy is False else [np.ones(2, np.float32)]
            if sound and kind not in INSIDE:
                sound += [torch.ones(2), make("jax", np.ones(2, np.int8))]
            tried: dict[str, Any] = {}

            def attempt(
                leaf: Any,
                tried: dict[str, Any] = tried,
                sound: list[Any] = sound,
                target: str = target,
                copy: bool | None = copy,
            ) -> None:
                tried |= _try_one(leaf, sound, target, copy)

            REFUSED[kind][1](attempt)
            tried["whole"] = tried["whole"] and all((bits(array) == 1).all() for array in sound)
            print(json.dumps({**where, **tried}), flush=True)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str, str], dict[str, Any]]:
    """What came of every refusal, each tried in a process that it may kill."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    kinds = list(REFUSED)
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    host = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    while kinds:
        done = subprocess.run(
            [sys.executable, __file__, *kinds],
            env={**os.environ, **host},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stderr
        for line in lines:
            found[line["kind"], line["target"], line["copy"]] = line
        if done.returncode == 0:
            break
        last = lines[-1]
        ending = f"rc {done.returncode}: {done.stderr[-300:]}"
        found[last["kind"], last["target"], last["copy"]]["died"] = ending
        kinds = kinds[kinds.index(last["kind"]) + 1 :]
    return found


@pytest.mark.nightly_cases(
    "object_of_arrays-torch", "object_of_arrays-numpy", "object-jax", "object-numpy", "object-torch"
)
@pytest.mark.parametrize("target", MOVERS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_go_is_refused(
    kind: str, target: str, outcomes: dict[tuple[str, str, str], dict[str, Any]]
) -> None:
    """By an error of fmapper's that names the leaf; in its own backend it may stay as it is."""
    own = REFUSED[kind][0] == target
    for copy in COPIES:
        with noting(f"copy={copy}"):
            outcome = outcomes.get((kind, target, copy))
            assert outcome is not None, "the process died before it came to this"
            assert "died" not in outcome, f"the process died: {outcome['died']}"
            assert "foreign" not in outcome, f"not an error of fmapper's: {outcome['foreign']}"
            assert outcome.get("whole"), f"the tree has changed: {outcome}"
            if "error" in outcome:
                assert outcome["text"].startswith("model.x[0]: "), outcome["text"]
                assert not own or copy == "True" or kind in ("deleted", "donated"), outcome["text"]
            else:
                assert own, f"it went: {outcome}"
                assert outcome["same"] or copy == "True"


@pytest.mark.parametrize("target", MOVERS)
def test_python_objects_are_no_arrays(target: str) -> None:
    """Strings and dates of NumPy, dtypes: what is not an array is carried over."""
    things = [np.str_("a"), np.bytes_(b"a"), np.datetime64("2020-01-01"), "text", b"bytes", None]
    things += [torch.float32, np.dtype("int8"), slice(2)]
    moved = MOVERS[target]({"x": things, "w": np.ones(1, np.float32)})
    assert all(a is b for a, b in zip(moved["x"], things, strict=True))


@pytest.mark.parametrize("target", MOVERS)
def test_random_generators_go_along(target: str) -> None:
    """The result draws what the source would have drawn."""
    of_torch, of_numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
    tree = {"t": of_torch, "n": of_numpy, "w": np.ones(1, np.float32)}
    moved = MOVERS[target](tree)
    want = torch.rand(3, generator=torch.Generator().manual_seed(3))
    assert torch.rand(3, generator=moved["t"]).tolist() == want.tolist()
    assert moved["n"].random(3).tolist() == np.random.default_rng(3).random(3).tolist()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with made.on_cpu():
        _report(sys.argv[1:])
