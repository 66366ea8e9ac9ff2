"""Key paths: what they are, how they print and parse, and what they reach in a tree."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fmapper
from fmapper import KeyPath, functor, get_path, has_path, set_path

KEYS = st.one_of(st.text(), st.integers(-5, 1000))


@functor
class Layer:
    def __init__(self, **fields):
        vars(self).update(fields)


def test_a_path_prints_as_python_would_reach_it():
    assert str(KeyPath("layers", 0, "weight")) == "layers[0].weight"
    assert str(KeyPath("a", "my key", -1)) == "a['my key'][-1]"
    assert str(KeyPath(0, "w")) == "[0].w"
    assert str(KeyPath()) == ""
    assert repr(KeyPath("a", 0)) == "KeyPath('a', 0)"


@pytest.mark.nightly
@given(st.lists(KEYS))
def test_the_printed_form_can_be_parsed(keys):
    path = KeyPath(*keys)
    assert KeyPath.parse(str(path)) == path


@pytest.mark.parametrize("text", [".a", "a..b", "a[", "a]", "a[x]", "[0]a", "a b", "a['"])
def test_what_is_no_path_is_refused(text):
    with pytest.raises(ValueError, match="is not a key path"):
        KeyPath.parse(text)


def test_paths_are_immutable_sequences():
    path = KeyPath("a", KeyPath(0, "b"), "c")
    assert path.keys == ("a", 0, "b", "c")
    assert (len(path), list(path), path[1], path[-1]) == (4, ["a", 0, "b", "c"], 0, "c")
    assert path[:2] == path.parent.parent == KeyPath("a", 0)
    assert KeyPath().parent == KeyPath()
    assert path + KeyPath("d") == path + list("d") == KeyPath("a", 0, "b", "c", "d")
    assert {path: 1}[KeyPath("a", 0, "b", "c")] == 1
    assert path != KeyPath("a", "0", "b", "c")
    assert pickle.loads(pickle.dumps(path)) == path
    with pytest.raises(AttributeError, match="immutable"):
        path.keys_ = ()


def test_get_path_takes_paths_strings_and_sequences():
    tree = {"layers": [Layer(w=1), Layer(w=2)]}
    for path in (KeyPath("layers", 1, "w"), "layers[1].w", ["layers", 1, "w"], "layers[-1].w"):
        assert get_path(tree, path) == 2
        assert has_path(tree, path)
    assert get_path(tree, "") is tree


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("layers[2].w", r"model\.layers: there is no child 2. This list has 0, 1\."),
        ("layers[0].b", r"model\.layers\[0\]: there is no child 'b'. This Layer has 'w'\."),
        (
            "layers[0].w.x",
            r"model\.layers\[0\]\.w: there is no child 'x'. This int has no children",
        ),
        ("nope", r"model: there is no child 'nope'"),
    ],
)
def test_a_path_that_leads_nowhere(path, says):
    tree = {"layers": [Layer(w=1), Layer(w=2)]}
    assert not has_path(tree, path)
    for reach in (get_path, lambda tree, path: set_path(tree, path, 0)):
        with pytest.raises(fmapper.PathError, match=says):
            reach(tree, path)
        with pytest.raises(KeyError):
            reach(tree, path)


def test_set_path_makes_a_new_tree_and_shares_the_rest():
    shared = Layer(w=[1], b=[2])
    tree = {"a": shared, "b": shared, "c": (3, [4])}
    new = set_path(tree, "a.w", 10)
    assert (new["a"].w, new["b"].w) == (10, [1])
    assert new["a"].b is shared.b
    assert new["b"] is shared
    assert new["c"] is tree["c"]
    assert tree["a"] is shared
    assert shared.w == [1]
    assert set_path(tree, "c[1][0]", 5)["c"] == (3, [5])
    assert set_path(tree, "", 6) == 6


def test_paths_of_ties_are_the_first_ones():
    w = [1]
    seen = []
    fmapper.fmap_with_path(lambda path, x: seen.append(str(path)), {"a": w, "b": {"c": w, "d": 2}})
    assert seen == ["a[0]", "b.d"]


def test_a_path_as_errors_print_it():
    tree = {"a": [1, {"model": 2}]}
    assert fmapper.get_path(tree, "model.a[0]") == 1
    assert fmapper.get_path([5], "model[0]") == 5
    assert fmapper.get_path(tree, "model") is tree
    assert fmapper.set_path(tree, "model.a[1].model", 3) == {"a": [1, {"model": 3}]}
    own = {"model": {"a": 7}, "a": 8}
    assert fmapper.get_path(own, "model.a") == 7
    assert not fmapper.has_path(tree, "model.b")
    with pytest.raises(fmapper.PathError, match="no child 'model'"):
        fmapper.get_path(tree, ["model", "a"])
