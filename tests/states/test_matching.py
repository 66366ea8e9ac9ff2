"""The parts of two structures, paired by name."""

from collections import namedtuple
from types import SimpleNamespace

import pytest

import fmapper
from fmapper.states.matching import match, parts_of

np = pytest.importorskip("numpy")


def test_the_order_of_names_does_not_matter():
    ones, twos = np.ones(2), np.full(2, 2.0)
    pairs = match({"a": ones, "b": twos}, SimpleNamespace(b=twos, a=ones, c=None))
    assert [(key, x is y) for key, x, y in pairs] == [("a", True), ("b", True)]
    assert match({"a": ones}, {"b": ones}) == "the keys ['a'] and ['b']"
    assert match([ones], (ones, twos)) == "1 and 2 parts"
    assert match(ones, {"a": ones}) is None


def test_an_object_may_hold_itself():
    node = SimpleNamespace(x=np.ones(2), size=3)
    node.inner = SimpleNamespace(outer=node)
    assert list(parts_of(node)) == ["x", "inner"]
    empty = SimpleNamespace(size=3)
    empty.itself = [empty]
    assert parts_of(empty) is None


def test_a_functor_without_arrays_matches_an_empty_record():
    @fmapper.functor(children=("keys",))
    class Empty:
        keys = None

    assert parts_of(Empty()) == {}
    assert match(Empty(), namedtuple("Empty", "")()) == []
    assert match(3, ()) is None
