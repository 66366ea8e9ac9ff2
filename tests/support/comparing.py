"""One comparer for converted models of both directions; a comparison of nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

np = pytest.importorskip("numpy")


def compare_trees(
    got: Any, want: Any, leaf: Callable[[Any, Any, str], None], path: str = "output"
) -> None:
    """Compares outputs of one structure: arrays by `leaf(got, want, path)`, the rest by `==`."""
    count = _compare(got, want, leaf, path)
    assert count, f"{path}: nothing was compared"


def _compare(got: Any, want: Any, leaf: Callable[[Any, Any, str], None], path: str) -> int:
    """Returns how many arrays and other values were compared."""
    if isinstance(want, dict):
        pairs = [(got[key], inner, f"{path}[{key!r}]") for key, inner in want.items()]
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        pairs = [(got[i], inner, f"{path}[{i}]") for i, inner in enumerate(want)]
    else:
        if hasattr(want, "dtype"):
            leaf(got, want, path)
        else:
            assert got == want, path
        return 1
    return sum(_compare(a, b, leaf, where) for a, b, where in pairs)


def compare_numbers(got: Any, want: Any, tolerance: float, path: str, least: float = 0.0) -> None:
    """Asserts that two NumPy arrays are the same but for rounding.

    They are NaN and infinite at the same places. Other floats differ by no more than `tolerance` of
    the largest element, which counts as `least` at least; integers and bools are equal.
    """
    assert got.shape == want.shape, path
    if not np.issubdtype(want.dtype, np.inexact):
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=path)
        return
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    a, b = got.astype(wide), want.astype(wide)
    finite = np.isfinite(b)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=path)
    np.testing.assert_array_equal(a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)], path)
    size = np.abs(b[finite]).max(initial=least)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    assert error <= tolerance * size, f"{path}: off by {error:.2e}, where {size:.2e} is the largest"
