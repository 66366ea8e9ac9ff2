"""What compares converted models with their sources can fail."""

import pytest

np = pytest.importorskip("numpy")

from support import comparing  # noqa: E402


def compare(got, want):
    def leaf(a, b, path):
        comparing.compare_numbers(a, b, 1e-5, path)

    comparing.compare_trees(got, want, leaf)


def test_outputs_that_are_the_same_but_for_rounding():
    x = np.array([1.0, np.nan, np.inf, -3.0])
    compare({"a": [x, 1], "b": (np.ones(1, np.int8),)}, {"a": [x + 1e-6, 1], "b": (np.ones(1),)})


@pytest.mark.parametrize("want", [{}, [], (), {"a": []}, [(), {}]])
def test_a_comparison_of_nothing_fails(want):
    with pytest.raises(AssertionError, match="output: nothing was compared"):
        compare(want, want)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, 2.0], [1.0, 2.1]),
        ([np.nan, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [np.nan, 2.0]),
        ([np.inf, 2.0], [-np.inf, 2.0]),
        ([1.0], [1.0, 2.0]),
        ([1e-9, 0.0], [0.0, 0.0]),
        ([True, False], [True, True]),
    ],
)
def test_a_difference_is_seen(got, want):
    with pytest.raises(AssertionError):
        compare({"x": np.array(got)}, {"x": np.array(want)})


def test_a_missing_output_is_seen():
    with pytest.raises(AssertionError):
        compare([np.ones(1)], [np.ones(1), np.ones(1)])
