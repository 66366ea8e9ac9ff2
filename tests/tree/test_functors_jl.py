"""What Functors.jl pins down about its maps, said of ours; where we differ, the test says so.

Cases after the behaviour of https://github.com/FluxML/Functors.jl, as its documentation and tests
describe it. Known differences: a later tree with extra children is an error here, cycles work, the
order of leaves is fixed, and an opaque callable is a leaf until its class is declared.
"""

import dataclasses
import functools
import re
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import pytest

from fmapper import (
    CycleError,
    KeyPath,
    PathError,
    StructureMismatchError,
    children,
    collecting_walk,
    default_walk,
    fcollect,
    fleaves,
    fmap,
    fmap_with_path,
    fmapstructure,
    fmapstructure_with_path,
    functor,
    get_path,
    has_path,
    is_leaf,
    leaf,
    rebuild,
    set_path,
    structural_walk,
)

np = pytest.importorskip("numpy")


@functor
@dataclasses.dataclass
class Two:
    first: Any
    second: Any


@functor
@dataclasses.dataclass
class One:
    inner: Any


@functor(children=("middle",))
@dataclasses.dataclass
class OnlyMiddle:
    left: Any
    middle: Any
    right: Any


@functor(children=("right", "left"))
@dataclasses.dataclass
class Backwards:
    left: Any
    middle: Any
    right: Any


@functor(children=())
@dataclasses.dataclass
class Childless:
    left: Any
    right: Any


@leaf
@dataclasses.dataclass
class Opaque:
    inner: Any


Record = namedtuple("Record", "first second")


class Cell:
    """A mutable box with one number in it."""

    def __init__(self, value: Any) -> None:
        self.value = value


functor(Cell)


def double(x: Any) -> Any:
    return 2 * x


def add(x: Any, y: Any) -> Any:
    return x + y


def to_float(x: Any) -> Any:
    return x.astype(float) if isinstance(x, np.ndarray) else float(x)


def vector(*values: int) -> np.ndarray:
    return np.array(values)


def all_are(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(x is y for x, y in zip(found, wanted, strict=True))


# --- what is a leaf -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [1, 1.0, 1j, Fraction(1, 2), True, np.float32(1), "text", b"bytes", re.compile(r"\d+")],
    ids=repr,
)
def test_numbers_strings_and_patterns_are_leaves(x):
    assert is_leaf(x)
    assert fmap(lambda leaf: (leaf,), x) == (x,)


@pytest.mark.parametrize("x", [int, np.ndarray, Two, list], ids=repr)
def test_classes_are_leaves_even_those_of_nodes(x):
    assert is_leaf(x)
    assert fmap(lambda leaf: leaf, [1, x, 5]) == [1, x, 5]


def test_subclasses_of_str_and_generators_are_leaves():
    class Word(str):
        pass

    lines = (line for line in "ab")
    assert is_leaf(Word("hello"))
    assert is_leaf(lines)
    assert fmap(lambda leaf: leaf, [lines])[0] is lines
    assert list(lines) == ["a", "b"]


def test_an_array_is_a_leaf_and_an_empty_list_a_node():
    assert is_leaf(vector(1, 2))
    assert is_leaf(np.array([vector(1), None], dtype=object))
    assert not is_leaf([])
    assert not is_leaf({})
    assert fmap(double, [[], {}, OrderedDict()]) == [[], {}, OrderedDict()]


def test_nothing_and_the_empty_tuple_are_nodes_without_children():
    assert not is_leaf(None)
    assert not is_leaf(())
    assert children(None) == children(()) == {}
    assert fmap(double, (1, None, (), 2)) == (2, None, (), 4)


def test_without_children_is_not_a_leaf():
    node = Childless(1, 2)
    assert not is_leaf(node)
    assert children(node) == {}
    assert children(Two(1, 2)) == {"first": 1, "second": 2}
    called: list[Any] = []
    new = fmap(called.append, One(node))
    assert called == []
    assert new.inner == node
    assert new.inner is not node
    assert fmapstructure(double, One(node)) == {"inner": {}}


def test_a_declared_leaf_is_given_whole_and_is_its_own_rebuild():
    x = Opaque(1)
    assert children(x) == {}
    assert rebuild(x, {}) is x
    assert fmap(lambda leaf: (leaf,), [x]) == [(x,)]
    assert fleaves(One(x)) == [x]


# --- taking apart and rebuilding ----------------------------------------------------------------


def test_nested_structs_keep_their_classes():
    model = One(Two(1, vector(1, 2, 3)))
    new = fmap(to_float, model)
    assert type(new) is One
    assert type(new.inner) is Two
    assert new.inner.second.dtype == float
    assert model.inner.second.dtype == int
    assert np.array_equal(new.inner.second, model.inner.second)


def test_only_listed_children_change_whatever_the_order_of_the_list():
    assert fmap(double, OnlyMiddle(1, 2, 3)) == OnlyMiddle(1, 4, 3)
    assert fmap(double, Backwards(1, 2, 3)) == Backwards(2, 2, 6)
    assert list(children(Backwards(1, 2, 3))) == ["right", "left"]


def test_a_rebuild_by_position_follows_the_listed_order():
    assert rebuild(Backwards(1, 2, 3), [30, 10]) == Backwards(10, 2, 30)
    assert rebuild(Backwards(1, 2, 3), {"left": 10, "right": 30}) == Backwards(10, 2, 30)
    assert rebuild(OnlyMiddle(1, 2, 3), {"middle": 20}) == OnlyMiddle(1, 20, 3)
    assert rebuild(Record(1, 2), {"second": 20, "first": 10}) == Record(10, 20)


def test_what_is_not_a_child_is_the_same_object():
    left = [1]
    assert fmap(double, OnlyMiddle(left, 2, 3)).left is left


def test_a_field_may_change_its_type():
    assert fmap(lambda x: x / 2, One(1)) == One(0.5)
    assert fmap(str, One([1, 2])) == One(["1", "2"])


def test_dicts_are_their_own_children_and_keep_their_class():
    nested = {"a": 1, "b": {"x": 5, "y": 6}}
    assert children(nested) == nested
    assert fmap(lambda x: x + 1, nested) == {"a": 2, "b": {"x": 6, "y": 7}}
    ordered = fmap(double, OrderedDict([(2, 1), (1, 2)]))
    assert type(ordered) is OrderedDict
    assert list(ordered.items()) == [(2, 2), (1, 4)]


def test_a_class_that_somebody_else_wrote():
    class ThirdParty:
        def __init__(self) -> None:
            self.weight, self.name = vector(1, 2), "third"

    thing = ThirdParty()
    assert is_leaf(thing)
    functor(ThirdParty, children=("weight",))
    assert not is_leaf(thing)
    new = fmap(double, thing)
    assert (new.weight.tolist(), new.name) == ([2, 4], "third")
    assert thing.weight.tolist() == [1, 2]


def test_a_class_of_the_standard_library():
    class Wrapped(functools.partial):
        pass

    functor(
        Wrapped,
        children=("func", "args", "keywords"),
        rebuild=lambda self, new: Wrapped(new["func"], *new["args"], **new["keywords"]),
    )
    call = Wrapped(max, 3, key=abs)
    new = fmap(lambda x: -20 if x == 3 else x, call)
    assert new(5) == -20
    assert call(-2) == 3


def test_children_chosen_by_each_instance():
    class Flexible:
        def __init__(self, trainable: tuple[str, ...], **fields: Any) -> None:
            self.trainable = trainable
            vars(self).update(fields)

        @property
        def chosen(self) -> dict[str, Any]:
            return {name: vars(self)[name] for name in self.trainable}

    def rebuilt(self: Flexible, new: Any) -> Flexible:
        made = Flexible(self.trainable, **{k: v for k, v in vars(self).items() if k != "trainable"})
        vars(made).update(new["chosen"])
        return made

    functor(Flexible, children=("chosen",), rebuild=rebuilt)
    node = Flexible(("x", "z"), x=1, y=2, z=3)
    new = fmap(double, node)
    assert (new.x, new.y, new.z) == (2, 2, 6)
    assert fleaves(Flexible(("y",), x=1, y=[2], z=3)) == [2]
    assert fleaves(Flexible((), x=1)) == []


def test_attribute_access_of_the_class_is_bypassed():
    @functor
    class Proxy:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    new = fmap(double, Proxy(Cell(2)))
    assert new.value == 4
    assert children(new) == {"inner": new.inner}


def test_a_closure_is_a_leaf_and_its_variables_are_not_entered():
    w = vector(1, 2)

    def model(x: Any) -> Any:
        return w * x

    assert is_leaf(model)
    assert fmap(lambda leaf: leaf, [model])[0] is model
    assert all_are(fleaves([model]), [model])


# --- which leaves -------------------------------------------------------------------------------


def test_is_leaf_stops_at_a_node_and_gives_it_to_f():
    words = (["a", "b"], ["c"])

    def upper_or_same(x: Any) -> Any:
        return x.upper() if isinstance(x, str) else x

    assert fmap(upper_or_same, words) == (["A", "B"], ["C"])
    assert fmap(upper_or_same, words, is_leaf=lambda x: isinstance(x, list)) == words
    kept = fmap(upper_or_same, words, is_leaf=lambda x: isinstance(x, list))
    assert kept[0] is words[0]


def test_is_leaf_adds_to_the_rule_and_does_not_replace_it():
    # Differs from Functors.jl, where a predicate that forgets the leaves leaves them unmapped.
    assert fmap(str, [One(4), 5], is_leaf=lambda x: isinstance(x, One)) == ["One(inner=4)", "5"]


# --- sharing ------------------------------------------------------------------------------------

BY_PATH = {
    "fmap": fmap,
    "fmap_with_path": lambda f, *trees, **options: fmap_with_path(
        lambda path, *leaves: f(*leaves), *trees, **options
    ),
}
PLAINLY = {
    "fmapstructure": fmapstructure,
    "fmapstructure_with_path": lambda f, *trees, **options: fmapstructure_with_path(
        lambda path, *leaves: f(*leaves), *trees, **options
    ),
}
maps = pytest.mark.parametrize("map_", BY_PATH.values(), ids=BY_PATH)
plain_maps = pytest.mark.parametrize("map_", PLAINLY.values(), ids=PLAINLY)


@maps
def test_a_shared_array_stays_shared_and_an_equal_one_stays_apart(map_):
    shared = vector(1, 2, 3)
    model = Two(shared, Two(vector(1, 2, 3), Two(shared, vector(1, 2, 3))))
    new = map_(to_float, model)
    assert new.first is new.second.second.first
    assert new.first is not new.second.first
    apart = map_(to_float, model, cache=None)
    assert apart.first is not apart.second.second.first
    assert np.array_equal(apart.first, apart.second.second.first)


@plain_maps
def test_prune_marks_the_later_occurrences_of_arrays_and_nodes(map_):
    shared = vector(1, 2, 3)
    model = Two(shared, Two([4], Two(shared, [4])))
    new = map_(lambda x: x, model, prune=None)
    assert new["first"] is shared
    assert new["second"] == {"first": [4], "second": {"first": None, "second": [4]}}

    inner = Two(shared, 4)
    pruned = map_(lambda x: x, Two(inner, inner), prune="again")
    assert pruned["first"]["first"] is shared
    assert pruned["first"]["second"] == 4
    assert pruned["second"] == "again"


@plain_maps
@pytest.mark.parametrize("x", [4, 4.0, 1j, True, "a", b"a", None, (), np.bool_(True)], ids=repr)
def test_one_number_at_two_places_is_a_coincidence(map_, x):
    called = []
    tree = Two(One(x), [x, {"key": x}])
    new = map_(lambda leaf: called.append(leaf) or leaf, tree, prune="pruned")
    assert new == {"first": {"inner": x}, "second": [x, {"key": x}]}
    assert len(called) == (3 if is_leaf(x) else 0)


@maps
def test_a_shared_node_stays_shared_even_if_it_holds_but_a_number(map_):
    cell = Cell(1)
    new = map_(lambda x: x / 2, {"x": cell, "y": cell, "z": Cell(1)})
    assert new["x"] is new["y"]
    assert new["x"] is not new["z"]
    assert new["x"] is not cell
    assert [new[key].value for key in "xyz"] == [0.5, 0.5, 0.5]


def test_sharing_survives_plain_structures_at_two_levels():
    cell = Cell(13)
    box = Cell(vector(3))
    plain = fmapstructure(lambda x: x, [Two(box, cell), box, cell])
    again = fmapstructure(lambda x: x, plain)
    for tree in (plain, again):
        assert tree[0]["first"] is tree[1]
        assert tree[0]["second"] is tree[2]
        assert tree[0]["first"]["value"] is tree[1]["value"]


def test_a_declared_leaf_is_shared_like_any_other():
    opaque = Opaque([1])
    new = fmap(lambda x: Opaque(x.inner * 2), [opaque, opaque, Opaque([1])])
    assert new[0] is new[1]
    assert new[0] is not new[2]
    assert new[0].inner == [1, 1]


@maps
def test_a_model_that_contains_itself(map_):
    # Functors.jl recurses until the stack is full.
    cell = Cell([1])
    cell.value.append(cell)
    new = map_(double, cell)
    assert new.value[1] is new
    assert new.value[0] == 2
    assert len(fcollect(cell)) == 3
    with pytest.raises(CycleError):
        fleaves(cell)


# --- collecting ---------------------------------------------------------------------------------


def test_collect_is_depth_first_parents_first():
    array, childless = vector(1, 2, 3), Childless("a", "b")
    inner = One(array)
    middle = Two(inner, childless)
    outer = One(middle)
    assert all_are(fcollect(outer), [outer, middle, inner, array, childless])


def test_collect_lists_each_object_once_and_equal_ones_apart():
    array, other = vector(1, 2, 3), vector(1, 2, 3)
    tied, apart = Two(array, array), Two(array, other)
    assert all_are(fcollect(tied), [tied, array])
    assert all_are(fcollect(apart), [apart, array, other])
    assert fcollect([4, 4]) == [[4, 4], 4, 4]


def test_collect_stops_at_leaves_that_the_caller_names():
    # Functors.jl leaves the excluded nodes out; here they are leaves, and leaves are listed.
    inner = Two(vector(1), 2)
    outer = One(inner)
    assert all_are(fcollect(outer, is_leaf=lambda x: x is inner), [outer, inner])


def test_leaves_in_order_one_per_occurrence():
    shared = vector(1)
    assert fleaves((1, (2, 3), {"a": 4, "b": (5, 6), "c": 7})) == [1, 2, 3, 4, 5, 6, 7]
    assert all_are(fleaves({"b": shared, "a": [shared]}), [shared, shared])
    assert fleaves({}) == []
    assert fleaves({"a": 1, "b": 2, "c": {}}) == [1, 2]
    record = Record(4, (5, 6))
    assert fleaves((1, record), is_leaf=lambda x: isinstance(x, Record)) == [1, record]


# --- several trees ------------------------------------------------------------------------------


@maps
def test_the_first_tree_decides_what_is_built(map_):
    node, mapping = Two(7, 9), {"first": 4, "second": 6}
    assert map_(add, node, mapping) == Two(11, 15)
    assert map_(add, mapping, node) == {"first": 11, "second": 15}
    assert map_(add, Record(7, 9), mapping) == Record(11, 15)
    assert map_(lambda *xs: sum(xs), node, mapping, Record(1, 1), node) == Two(19, 25)


@plain_maps
def test_plain_structures_of_several_trees(map_):
    assert map_(add, Two(7, [9]), {"first": 4, "second": [6]}) == {"first": 11, "second": [15]}


@maps
def test_trees_that_do_not_match(map_):
    deep, flat = {"x": 1, "y": {"a": 3, "b": 5}}, {"x": 6, "y": 8}
    with pytest.raises(StructureMismatchError, match=r"^model\.y: "):
        map_(lambda x, y: x, deep, flat)
    with pytest.raises(StructureMismatchError, match=r"^model: .*'y'"):
        map_(lambda x, y: x, flat, {"x": 6})


@maps
def test_a_later_tree_may_be_deeper_where_the_first_has_a_leaf(map_):
    assert map_(lambda x, y: (x, y), {"x": 1}, {"x": {"a": [3]}}) == {"x": (1, {"a": [3]})}


@maps
def test_extra_children_of_a_later_tree_are_not_ignored(map_):
    # Differs from Functors.jl, which drops them without a word.
    with pytest.raises(StructureMismatchError, match="'z' besides"):
        map_(add, {"x": 1}, {"x": 4, "z": 6})
    with pytest.raises(StructureMismatchError, match="2 children"):
        map_(add, [1], [4, 6])


@maps
def test_a_tie_of_the_first_tree_needs_the_others_to_be_tied_too(map_):
    # Differs from Functors.jl, where the first tree alone decides and the later values are lost.
    shared = vector(1, 2, 3)
    first = {"x": shared, "y": vector(4, 5, 6), "z": shared}
    tied = map_(add, first, {"x": shared, "y": shared, "z": shared})
    assert tied["x"] is tied["z"]
    assert {key: x.tolist() for key, x in tied.items()} == {
        "x": [2, 4, 6],
        "y": [5, 7, 9],
        "z": [2, 4, 6],
    }
    untied = map_(add, first, {"x": shared, "y": shared, "z": vector(7, 8, 9)})
    assert untied["x"] is not untied["z"]
    assert untied["z"].tolist() == [8, 10, 12]


@maps
def test_pruning_several_trees(map_):
    shared, other = vector(1), vector(2)
    pruned = map_(add, [shared, shared], [other, other], prune=None)
    assert pruned[0].tolist() == [3]
    assert pruned[1] is None


def test_a_step_down_the_gradient():
    model = Two(np.ones((3, 4), np.float32), Two(np.zeros(3, np.float32), None))
    gradients = {
        "first": np.full((3, 4), 2, np.float32),
        "second": {"first": np.full(3, 2, np.float32), "second": None},
    }
    new = fmap(lambda p, g: p - np.float32(0.1) * g, model, gradients)
    assert type(new) is Two
    assert np.allclose(new.first, 0.8)
    assert np.allclose(new.second.first, -0.2)
    assert new.second.second is None


# --- paths --------------------------------------------------------------------------------------


def test_f_and_is_leaf_get_the_path():
    model = One(Two({"a": 1, "b": Record(2, 20)}, [3, 4, (5, 6)]))
    squares = One(Two({"a": 1, "b": Record(4, 400)}, [9, 16, (25, 36)]))
    assert fmap_with_path(lambda path, x: x**2, model) == squares
    stops = {KeyPath("inner", "first", "b"), KeyPath("inner", "second", 2)}
    new = fmap_with_path(
        lambda path, x: None if path in stops else x**2,
        model,
        is_leaf=lambda path, x: path in stops,
    )
    assert new == One(Two({"a": 1, "b": None}, [9, 16, None]))
    plain = fmapstructure_with_path(
        lambda path, x: None if path in stops else x**2,
        model,
        is_leaf=lambda path, x: path in stops,
    )
    assert plain == {"inner": {"first": {"a": 1, "b": None}, "second": [9, 16, None]}}
    assert fmapstructure_with_path(lambda path, x: str(path), One([1])) == {"inner": ["inner[0]"]}


def test_a_tie_is_mapped_once_with_its_first_path():
    shared = vector(1)
    seen: list[str] = []
    fmap_with_path(lambda path, x: seen.append(str(path)), Two([shared], {"k": shared}))
    assert seen == ["first[0]"]
    seen.clear()
    fmap_with_path(lambda path, x: seen.append(str(path)), Two([shared], {"k": shared}), cache=None)
    assert seen == ["first[0]", "second.k"]


def test_a_path_is_a_sequence_of_keys_and_splices_paths():
    path = KeyPath("a", 3, "b", 4)
    assert tuple(path) == ("a", 3, "b", 4)
    assert len(path) == 4
    assert (path[0], path[1], path[-1]) == ("a", 3, 4)
    other = KeyPath("a", path, "c", 5)
    assert tuple(other) == ("a", "a", 3, "b", 4, "c", 5)
    assert tuple(KeyPath(path, other)) == (*path, *other)
    assert tuple(KeyPath()) == ()
    assert KeyPath() == KeyPath(KeyPath(), KeyPath())


def test_getting_by_path():
    tree = {"a": 3, "b": {"c": 4, "d": [5, 6, 7]}}
    assert get_path(tree, KeyPath()) is tree
    assert get_path(tree, KeyPath("a")) == 3
    assert get_path(tree, KeyPath("b", "c")) == 4
    assert get_path(tree, KeyPath("b", "d", 1)) == 6
    assert get_path(Two(3, Two(4, (6, 7))), KeyPath("second", "second", 1)) == 7
    assert get_path([{"a": 1}, Record(2, 3)], "[1].second") == 3


def test_having_a_path():
    tree = {"a": 3, "b": {"c": 4, "d": [5, 6, 7]}}
    for path in ("", "a", "b.c", "b.d[1]", "b.d[-1]"):
        assert has_path(tree, path)
    for path in ("b.d[3]", "b.d[-4]", "b.e", "a.b", "[0]"):
        assert not has_path(tree, path)
        with pytest.raises(PathError):
            get_path(tree, path)


def test_setting_by_path_makes_a_new_tree():
    # Functors.jl assigns in place and cannot go through what is immutable.
    tree = {"a": 3, "b": {"c": 4, "d": [5, 6, 7]}}
    assert set_path(tree, "a", 4) == {"a": 4, "b": {"c": 4, "d": [5, 6, 7]}}
    assert set_path(tree, "b.d[0]", 17)["b"]["d"] == [17, 6, 7]
    assert set_path(tree, "b.d", [0])["b"] == {"c": 4, "d": [0]}
    assert set_path(tree, "b.d[0]", 17)["b"] is not tree["b"]
    assert tree == {"a": 3, "b": {"c": 4, "d": [5, 6, 7]}}
    assert set_path(Two(4, (5, Record(6, 7))), "second[1].first", 17) == Two(4, (5, Record(17, 7)))
    assert set_path(tree, "", 1) == 1
    with pytest.raises(PathError):
        set_path(tree, "b.e", 1)


# --- walks --------------------------------------------------------------------------------------


def test_the_structural_walk_makes_plain_containers():
    model = Two((0, One([1, 2, 3])), Record(4, 5))
    wanted = {"first": (0, {"inner": [1, 2, 3]}), "second": {"first": 4, "second": 5}}
    assert fmapstructure(lambda x: x, model) == wanted
    assert fmap(lambda x: x, model, walk=structural_walk) == wanted


def test_a_walk_of_ones_own_recurses_where_it_likes():
    def skip_second(recurse: Any, node: Any, *rest: Any) -> Any:
        if isinstance(node, Two):
            return Two(recurse(node.first, *(x.first for x in rest)), node.second)
        return default_walk(recurse, node, *rest)

    model = One(Two([1, 2], [3]))
    assert fmap(double, model, walk=skip_second) == One(Two([2, 4], [3]))
    assert fmap(add, model, model, walk=skip_second) == One(Two([2, 4], [3]))


def test_a_walk_of_ones_own_keeps_ties_and_stops_at_leaves():
    shared = vector(1)
    seen: list[str] = []

    def noting(recurse: Any, node: Any) -> Any:
        seen.append(type(node).__name__)
        return default_walk(recurse, node)

    inner = One(shared)
    new = fmap(double, Two(inner, [inner, shared]), walk=noting)
    assert new.first is new.second[0]
    assert new.first.inner is new.second[1]
    assert seen == ["Two", "One", "list"]
    seen.clear()
    fmap(lambda x: x, [inner, One(1)], walk=noting, is_leaf=lambda x: isinstance(x, One))
    assert seen == ["list"]


def test_the_collecting_walk_concatenates():
    tree = (1, 4, (5, Two(7, [8])))
    squares = [1, 16, 25, 49, 64]
    assert fmap(lambda x: x**2, tree, walk=collecting_walk, cache=None) == squares
    pairs = fmap(lambda x, y: (x, y), [1, [2]], [3, [4]], walk=collecting_walk, cache=None)
    assert pairs == [(1, 3), (2, 4)]


def test_the_collecting_walk_passes_over_nodes_without_children():
    assert fmap(str, [None, 1, (), [], Childless(1, 2)], walk=collecting_walk, cache=None) == ["1"]


def test_the_collecting_walk_keeps_what_the_caller_calls_a_leaf():
    def name(x: Any) -> str:
        return "pair" if isinstance(x, list) else str(x)

    def stop(x: Any) -> bool:
        return isinstance(x, list)

    found = fmap(name, {"a": [1, 2], "b": 3}, walk=collecting_walk, cache=None, is_leaf=stop)
    assert found == ["pair", "3"]
    pair = [1, 2]
    kept = fmap(lambda x: x, {"a": pair, "b": 3}, walk=collecting_walk, cache=None, is_leaf=stop)
    assert all_are(kept, [pair, 3])


def test_nothing_is_returned_as_it_is():
    assert fmap(double, None) is None
    assert fmapstructure(double, None) is None
    assert fleaves(None) == []
    assert fmap(double, 4) == 8
