"""Where a walk could break: depth, size, cycles, short-lived objects, changes, threads."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import traceback
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import pytest

import fmapper
from fmapper import (
    CycleError,
    DeclarationError,
    KeyPath,
    RebuildError,
    StructureMismatchError,
    children,
    default_walk,
    destructure,
    fcollect,
    fleaves,
    fmap,
    fmap_with_path,
    fmapstructure,
    fmapstructure_with_path,
    functor,
    get_path,
    has_path,
    load_state,
    rebuild,
    set_path,
    state,
)

np = pytest.importorskip("numpy")

DEPTH = 100_000
MILLION = 1_000_000


@functor
class Node:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@functor(children=("inner",))
class Named:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@functor
class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@functor(children=("inner",), rebuild=lambda self, new: Custom(new["inner"]))
class Custom:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Names(list):
    pass


Single = namedtuple("Single", "inner")


def add_one(x: Any) -> Any:
    return x + 1


def same(x: Any) -> Any:
    return x


# --- depth --------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {  # how a level is made, and its child's key
    "list": (lambda inner: [inner], 0),
    "dict": (lambda inner: {"inner": inner}, "inner"),
    "tuple": (lambda inner: (inner,), 0),
    "functor": (Node, "inner"),
    "namedtuple": (Single, "inner"),
    "functor, named": (Named, "inner"),
    "functor, slots": (Slotted, "inner"),
    "functor, rebuild": (Custom, "inner"),
    "list subclass": (lambda inner: Names([inner]), 0),
    "OrderedDict": (lambda inner: OrderedDict(inner=inner), "inner"),
}
KEYS = [key for _, key in KINDS.values()]


def deep(bottom: Any, *kinds: str) -> Any:
    """A chain of 100 000 nodes, of the given kinds in turn or of all of them."""
    makers = [KINDS[kind][0] for kind in kinds or KINDS]
    tree = bottom
    for level in reversed(range(DEPTH)):
        tree = makers[level % len(makers)](tree)
    return tree


def levels(tree: Any) -> tuple[list[type], Any]:
    """The classes along a chain, and what is at its end."""
    classes = []
    while isinstance(tree, list | tuple | dict | Node | Named | Slotted | Custom):
        classes.append(type(tree))
        if isinstance(tree, dict):
            tree = tree["inner"]
        else:
            tree = tree.inner if hasattr(tree, "inner") else tree[0]
    return classes, tree


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_deep_chains_of_one_kind(kind):
    tree = deep(1, kind)
    classes, end = levels(fmap(add_one, tree))
    assert len(classes) == DEPTH
    assert set(classes) == {type(tree)}
    assert end == 2


def doubled(vector: Any, back: Callable[[Any], Any]) -> Any:
    return back(2 * vector)


DEEP_MAPS: dict[str, Callable[[Any], Any]] = {
    "fmap": lambda tree: fmap(add_one, tree),
    "no cache": lambda tree: fmap(add_one, tree, cache=None),
    "cache": lambda tree: fmap(add_one, tree, cache={}),
    "prune": lambda tree: fmap(add_one, tree, prune=0),
    "is_leaf": lambda tree: fmap(add_one, tree, is_leaf=lambda x: False),
    "default_walk": lambda tree: fmap(add_one, tree, walk=default_walk),
    "two trees": lambda tree: fmap(lambda x, y: x + y / y, tree, tree),
    "with path": lambda tree: fmap_with_path(lambda path, x: x + len(path) / DEPTH, tree),
    "two trees with path": lambda tree: fmap_with_path(lambda path, x, y: x + 1, tree, tree),
    "load_state": lambda tree: load_state(tree, {n: 2 * x for n, x in state(tree).items()}),
    "destructure": lambda tree: doubled(*destructure(tree)),
    "set_path": lambda tree: set_path(tree, DEEP_PATH, np.array([2.0])),
    "to_numpy": lambda tree: fmapper.to_numpy(fmap(add_one, tree), copy=True),
}
DEEP_PATH = KeyPath(*(KEYS[level % len(KEYS)] for level in range(DEPTH)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEEP_MAPS)
def test_deep_maps(name):
    array = np.array([1.0])
    tree = deep(array)
    before = levels(tree)[0]
    classes, end = levels(DEEP_MAPS[name](tree))
    assert classes == before
    assert end.tolist() == [2]
    after, end = levels(tree)
    assert after == before
    assert end is array
    assert array.tolist() == [1]


@pytest.mark.nightly
def test_deep_structures():
    tree = deep(1)
    plain = [{"list": list, "tuple": tuple}.get(kind, dict) for kind in KINDS]
    plain[list(KINDS).index("list subclass")] = list
    for new in (
        fmapstructure(add_one, tree),
        fmapstructure(lambda x, y: x + y, tree, tree),
        fmapstructure_with_path(lambda path, x: x + len(path) // DEPTH, tree),
    ):
        classes, end = levels(new)
        assert classes == plain * (DEPTH // len(plain))
        assert end == 2


@pytest.mark.nightly
def test_deep_lists_of_leaves_and_nodes():
    array = np.array([1.0])
    tree = deep(array)
    assert [x is array for x in fleaves(tree)] == [True]
    collected = fcollect(tree)
    assert len(collected) == DEPTH + 1
    assert collected[0] is tree
    assert collected[-1] is array
    assert list(state(tree)) == [".".join(map(str, DEEP_PATH))]
    assert str(fmapper.get_device(tree)) == "numpy:cpu"


@pytest.mark.nightly
def test_deep_paths():
    tree = deep(1)
    told: list[KeyPath] = []
    fmap_with_path(lambda path, x: told.append(path), tree)
    assert told == [DEEP_PATH]
    assert get_path(tree, DEEP_PATH) == 1
    assert get_path(tree, str(DEEP_PATH)) == 1
    assert has_path(tree, DEEP_PATH)
    assert not has_path(tree, DEEP_PATH + DEEP_PATH)


@pytest.mark.nightly
def test_deep_failures_name_the_whole_path():
    tree = deep("text")
    with pytest.raises(TypeError) as caught:
        fmap(add_one, tree)
    assert KeyPath.parse(caught.value.__notes__[0].removeprefix("at model")) == DEEP_PATH
    nodes = deep([1])
    with pytest.raises(StructureMismatchError) as mismatch:
        fmap(lambda x, y: x, nodes, tree)
    where = str(mismatch.value).partition(": ")[0]
    assert KeyPath.parse(where.removeprefix("model")) == DEEP_PATH
    nodes = deep(through_list())
    with pytest.raises(CycleError) as cycle:
        fleaves(nodes)
    where = str(cycle.value).partition(": ")[0]
    assert KeyPath.parse(where.removeprefix("model")) == DEEP_PATH + KeyPath(1)


@pytest.mark.nightly
def test_a_walk_of_ones_own_is_as_deep_as_the_stack():
    def walk(recurse: Any, node: Any) -> Any:
        return default_walk(recurse, node)

    tree: Any = 1
    for _ in range(50):
        tree = [Node({"a": tree})]
    assert len(fcollect(fmap(add_one, tree, walk=walk))) == 151
    too_deep = deep(1)
    cache: dict[Any, Any] = {}
    with pytest.raises(RecursionError):
        fmap(add_one, too_deep, walk=walk, cache=cache)
    assert levels(too_deep)[1] == 1
    assert levels(fmap(add_one, too_deep, cache=cache))[1] == 2


# --- size ---------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_million_leaves():
    tree = {i: [float(j) for j in range(i, i + 1000)] for i in range(1000)}
    total = sum(map(sum, tree.values()))
    assert sum(map(sum, fmap(add_one, tree).values())) == total + MILLION
    assert sum(map(sum, fmapstructure(add_one, tree).values())) == total + MILLION
    assert sum(map(sum, fmap(lambda x, y: x + y, tree, tree).values())) == 2 * total
    assert len(fleaves(tree)) == MILLION
    assert len(fcollect(tree)) == MILLION + 1001


@pytest.mark.nightly
def test_a_million_leaves_with_paths():
    tree = [[float(j) for j in range(i, i + 1000)] for i in range(1000)]
    new = fmap_with_path(lambda path, x: path, tree)
    assert sum(map(len, new)) == MILLION
    assert new[123][456] == KeyPath(123, 456)


def test_a_million_tied_leaves():
    w = np.ones(1)
    called: list[Any] = []
    new = fmap(lambda x: called.append(x) or x + 1, [[w] * 1000 for _ in range(1000)])
    assert len(called) == 1
    assert len({id(x) for row in new for x in row}) == 1


@pytest.mark.nightly
def test_a_hundred_thousand_arrays():
    tree = [[np.zeros(1) for _ in range(1000)] for _ in range(100)]
    vector, back = destructure(tree)
    assert vector.shape == (100_000,)
    assert back(vector + 1)[99][999].tolist() == [1]
    named = state(tree)
    assert len(named) == 100_000
    loaded = load_state(tree, {name: x + 2 for name, x in named.items()})
    assert loaded[5][7].tolist() == [2]
    assert tree[5][7].tolist() == [0]


# --- cycles -------------------------------------------------------------------------------------


def through_list() -> Any:
    tree: list[Any] = [1]
    tree.append(tree)
    return tree


def through_dict() -> Any:
    tree: dict[str, Any] = {"w": 1}
    tree["self"] = tree
    return tree


def through_defaultdict() -> Any:
    tree: defaultdict[str, Any] = defaultdict(list, w=1)
    tree["self"] = tree
    return tree


def through_ordered_dict() -> Any:
    tree: OrderedDict[str, Any] = OrderedDict(w=1)
    tree["self"] = tree
    tree["after"] = 3
    return tree


def through_deque() -> Any:
    tree: deque[Any] = deque([1], maxlen=5)
    tree.append([tree])
    return tree


def through_list_subclass() -> Any:
    tree = Names([1])
    tree.append({"again": tree})
    return tree


def through_functor() -> Any:
    tree = Node([1])
    tree.inner.append(tree)
    return tree


def through_slots() -> Any:
    tree = Slotted([1])
    tree.inner.append(tree)
    return tree


def through_a_tuple_below() -> Any:
    tree: list[Any] = [1]
    tree.append((tree, 2))
    return tree


CYCLES = [value for name, value in sorted(globals().items()) if name.startswith("through_")]


def edges(tree: Any) -> list[tuple[str, list[int]]]:
    """The shape of a graph: type of every object, and the numbers of its children."""
    objects = [x for x in fcollect(tree) if not isinstance(x, int)]
    number = {id(x): i for i, x in enumerate(objects)}
    return [
        (type(x).__name__, [number.get(id(child), -1) for child in children(x).values()])
        for x in objects
    ]


@pytest.mark.parametrize("make", CYCLES, ids=lambda make: make.__name__)
def test_cycles_are_kept(make):
    tree = make()
    shape = edges(tree)
    for new in (
        fmap(add_one, tree),
        fmap(add_one, tree, cache=None),
        fmap_with_path(lambda path, x: x + 1, tree),
        fmap(lambda x, y: x + y // y, tree, tree),
    ):
        assert new is not tree
        assert edges(new) == shape
        assert [x for x in fcollect(new) if isinstance(x, int)] == [
            x + 1 for x in fcollect(tree) if isinstance(x, int)
        ]
        assert not {id(x) for x in fcollect(new)} & {
            id(x) for x in fcollect(tree) if not isinstance(x, int)
        }
    plain = fmapstructure(add_one, tree)
    assert [links for _, links in edges(plain)] == [links for _, links in shape]
    assert edges(tree) == shape


def test_a_cycle_has_maxlen_and_factory_as_before():
    assert fmap(add_one, through_deque()).maxlen == 5
    assert fmap(add_one, through_defaultdict()).default_factory is list


def cyclic_tuple() -> tuple[Any, str, str]:
    inner: list[Any] = [1]
    again = (0, inner)
    inner.append(again)
    return {"w": [again]}, "model.w[0][1][1]", "model.w[0]"


def cyclic_namedtuple() -> tuple[Any, str, str]:
    inner: dict[str, Any] = {}
    again = Single(inner)
    inner["my key"] = again
    return again, "model.inner['my key']", "model"


def cyclic_rebuild() -> tuple[Any, str, str]:
    again = Custom([])
    again.inner.append({"back": again})
    return [again], "model[0].inner[0].back", "model[0]"


@pytest.mark.parametrize(
    "make", [cyclic_tuple, cyclic_namedtuple, cyclic_rebuild], ids=lambda make: make.__name__
)
def test_a_cycle_through_what_is_built_last_names_both_paths(make):
    tree, again, first = make()
    for walk in (
        lambda: fmap(add_one, tree),
        lambda: fmap(add_one, tree, cache=None),
        lambda: fmap(lambda x, y: x, tree, tree),
        lambda: fmap_with_path(lambda path, x: x, tree),
        lambda: fleaves(tree),
        lambda: state(tree),
    ):
        with pytest.raises(CycleError) as caught:
            walk()
        message = str(caught.value)
        assert message.startswith(f"{again}: this is the ")
        assert f" at {first} again." in message
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("make", CYCLES, ids=lambda make: make.__name__)
def test_a_list_of_leaves_with_no_end_is_an_error(make):
    for walk in (fleaves, state):
        with pytest.raises(CycleError, match=r" at model again\."):
            walk(make())


def test_a_cycle_that_is_longer_in_a_later_tree():
    first = through_list()
    second: list[Any] = [10]
    third = [20, second]
    second.append(third)
    new = fmap(lambda x, y: x + y, first, second)
    assert (new[0], new[1][0]) == (11, 21)
    assert new[1][1] is new


def test_a_cycle_against_a_tree_that_ends():
    with pytest.raises(StructureMismatchError, match=r"^model\[1\]\[1\]: "):
        fmap(lambda x, y: x, through_list(), [1, [2, 3]])


# --- objects that live for a moment -------------------------------------------------------------

COUNT = 8


class OnTheFly:
    """Eight children that are made when they are asked for, and freed when nobody holds them."""

    def __init__(self, values: Iterable[float] = range(COUNT)) -> None:
        self.values = list(map(float, values))


def _made(i: int) -> property:
    def read(self: OnTheFly) -> Any:
        return np.full(1, self.values[i])

    def write(self: OnTheFly, new: Any) -> None:
        self.values = [*self.values[:i], float(np.sum(new)), *self.values[i + 1 :]]

    return property(read, write)


for _i in range(COUNT):
    setattr(OnTheFly, f"child_{_i}", _made(_i))
functor(OnTheFly, children=[f"child_{i}" for i in range(COUNT)])


class Countless(tuple):
    """A tuple that makes its items anew each time it is iterated over."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return (np.full(1, float(np.sum(x))) for x in tuple.__iter__(self))


EIGHT = [float(i) for i in range(COUNT)]


@pytest.mark.parametrize("make", [OnTheFly, Countless], ids=["property", "iterator"])
def test_short_lived_leaves_are_not_taken_for_each_other(make):
    wanted = [
        float(i) for i in range(4 * COUNT)
    ]  # the leaves of one node are freed before the next
    tree = [make(wanted[i : i + COUNT]) for i in range(0, len(wanted), COUNT)]
    for seen in (
        fmap(lambda x: np.array(float(np.sum(x))), {"a": tree}),
        fmapstructure(lambda x: float(np.sum(x)), tree),
        fmapstructure(lambda x, y: float(np.sum(x)), tree, tree),
        fmapstructure(lambda x, y: float(np.sum(y)), tree, tree),
        fmapstructure_with_path(lambda path, x: float(np.sum(x)), tree),
        fmapstructure(lambda x: float(np.sum(x)), tree, cache={}),
        tree,
    ):
        assert [float(np.sum(x)) for x in fleaves(seen)] == wanted
    collected = [x for x in fcollect(tree) if fmapper.is_leaf(x)]
    assert [float(np.sum(x)) for x in collected] == wanted


def test_short_lived_leaves_in_later_trees():
    wanted = [float(i) for i in range(4 * COUNT)]
    w = np.zeros(1)  # tied at all places of the first tree, but not in the second
    first = [{f"child_{i}": w for i in range(COUNT)} for _ in range(4)]
    second = [OnTheFly(wanted[i : i + COUNT]) for i in range(0, len(wanted), COUNT)]
    assert fleaves(fmap(lambda x, y: float(y[0]), first, second)) == wanted
    assert fleaves(fmap_with_path(lambda path, x, y: float(y[0]), first, second)) == wanted


def test_short_lived_leaves_are_written_back():
    new = fmap(lambda x: x + 10, OnTheFly())
    assert new.values == [x + 10 for x in EIGHT]


def test_short_lived_arrays_take_part_in_state_and_destructure():
    tree = OnTheFly()
    vector, back = destructure(tree)
    assert vector.tolist() == EIGHT
    assert back(vector + 10).values == [x + 10 for x in EIGHT]
    named = {name: x + 20 for name, x in state(tree).items()}
    assert load_state(tree, named).values == [x + 20 for x in EIGHT]


def test_a_cache_keeps_alive_what_it_knows():
    cache: dict[Any, Any] = {}
    assert [fmap(same, [i], cache=cache) for i in range(50)] == [[i] for i in range(50)]
    sums = [fmap(lambda x: int(x.sum()), np.full(3, i), cache=cache) for i in range(50)]
    assert sums == [3 * i for i in range(50)]
    pairs = [fmap(lambda x: x.tolist(), (np.full(1, i),), cache=cache) for i in range(50)]
    assert pairs == [([i],) for i in range(50)]


def test_one_numpy_bool_at_two_places_is_no_tie_in_a_state():
    tree = {"a": np.True_, "b": np.True_}
    named = {"a": np.False_, "b": np.True_}
    assert load_state(tree, named) == named


# --- changes under way --------------------------------------------------------------------------


def test_f_may_change_the_tree_that_is_walked():
    inner = [1, 2, 3]
    tree = {"a": 1, "b": inner, "c": Node([4]), "d": deque([5]), "e": Named([6])}

    def vandal(x: Any) -> Any:
        inner.append(x)
        tree.pop("a", None)
        tree[f"new {x}"] = x
        if "d" in tree:
            tree["d"].append(x)
        return -x

    new = fmap(vandal, tree)
    assert list(new) == ["a", "b", "c", "d", "e"]
    assert new["a"] == -1
    # A node is read when the walk comes to it.
    assert new["b"] == [-1, -2, -3, -1]
    assert list(new["d"]) == [-5, -1, -1, -2, -3, -1, -4]
    assert new["c"].inner == [-4]
    assert new["e"].inner == [-6]


def test_what_f_frees_is_not_taken_for_something_else():
    tree = [np.full(1, float(i)) for i in range(100)]
    places = iter(range(100))

    def consume(x: Any) -> float:
        tree[next(places)] = None
        return float(x[0])

    assert fmap(consume, tree) == [float(i) for i in range(100)]


def test_f_may_map_the_tree_itself():
    tree = {"a": 1, "b": [2]}
    assert fmap(lambda x: [x, fmap(add_one, tree)], tree)["b"] == [[2, {"a": 2, "b": [3]}]]


def test_a_predicate_may_change_the_tree():
    tree: list[Any] = [[1], [2]]

    def growing(node: Any) -> bool:
        if len(tree) < 10:
            tree.append([0])
        return False

    assert fmap(add_one, tree, is_leaf=growing)[:2] == [[2], [3]]
    assert len(tree) <= 10


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.nightly
@pytest.mark.usefixtures("hasty")
def test_threads_map_while_another_declares_classes():
    failures: list[str] = []
    stop = threading.Event()

    class Later:
        def __init__(self, w: int) -> None:
            self.w = w

    tree = {"a": Node([1, (2, Named(3))]), "b": deque([4]), "c": Single(5)}
    wanted = fmapstructure(add_one, tree)

    def work() -> None:
        try:
            while not stop.is_set():
                assert fmapstructure(same, fmap(add_one, tree)) == wanted
                assert len(fleaves([tree, tree])) == 10
                fmap(same, [Later(1)])
        except BaseException:
            failures.append(traceback.format_exc())

    def declare() -> None:
        try:
            for i in range(150):
                cls = functor(type(f"Declared{i}", (), {}))
                node = cls()
                node.w = 1
                assert fmap(add_one, node).w == 2
            functor(Later)
        except BaseException:
            failures.append(traceback.format_exc())
        finally:
            stop.set()

    threads = [threading.Thread(target=work) for _ in range(8)]
    threads.append(threading.Thread(target=declare))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert fmap(add_one, Later(1)).w == 2


# --- what f raises ------------------------------------------------------------------------------


def test_an_error_of_a_map_inside_f_keeps_its_own_path_and_gets_the_outer_one_as_a_note():
    def inner(x: Any) -> Any:
        return fmap(lambda a, b: a, {"inner": [x]}, {"inner": []})

    with pytest.raises(StructureMismatchError) as caught:
        fmap(inner, {"outer": [1]})
    assert str(caught.value).startswith("model.inner: ")
    assert caught.value.__notes__ == ["at model.outer[0]"]


def test_errors_of_every_relative_inside_f_are_placed_once():
    loop = through_list()
    broken = functor(type("Broken", (), {}), children=("w",), rebuild=lambda self, new: None)()
    broken.w = 1
    lacking = functor(type("Lacking", (), {}), children=("nothing",))()
    cases: list[tuple[Callable[[], Any], type, str]] = [
        (lambda: fleaves([loop]), CycleError, "model[0][1]: "),
        (lambda: fmap(same, {"x": broken}), RebuildError, "model.x: "),
        (lambda: fmap(same, {"x": lacking}), DeclarationError, "model.x: "),
        (lambda: fleaves({"x": lacking}), DeclarationError, "model.x: "),
        (lambda: get_path([1], "[3]"), fmapper.PathError, "model: "),
    ]
    for call, cls, start in cases:
        with pytest.raises(cls) as caught:
            fmap(lambda x, call=call: call(), {"outer": 1})
        assert str(caught.value).startswith(start)
        assert str(caught.value).count("model") == 1 + (cls is CycleError)
        assert caught.value.__notes__ == ["at model.outer"]


def test_an_exception_of_a_map_inside_f_gets_both_paths_inner_first():
    with pytest.raises(ZeroDivisionError) as caught:
        fmap(lambda x: fmap(lambda y: 1 / y, {"inner": x - 1}), [2, 1])
    assert caught.value.__notes__ == ["at model.inner", "at model[1]"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_passes_through_as_it_is(kind):
    tree = {"a": [1, 2], "b": Node(3)}
    cache: dict[Any, Any] = {}
    fmap(same, [Node([0])], cache=cache)
    known = set(cache)

    def stop(x: Any) -> Any:
        if x == 3:
            raise kind
        return x

    with pytest.raises(kind) as caught:
        fmap(stop, tree, cache=cache)
    assert not hasattr(caught.value, "__notes__")
    assert set(cache) == known
    assert tree["a"] == [1, 2]
    assert tree["b"].inner == 3
    assert fmap(add_one, tree, cache=cache)["b"].inner == 4


def test_stop_iteration_of_f_is_an_exception_like_any_other():
    for walk in (
        lambda f: fmap(f, [1]),
        lambda f: fmap(lambda x, y: f(x), [1], [1]),
        lambda f: fmap_with_path(lambda path, x: f(x), [1]),
    ):
        with pytest.raises(StopIteration) as caught:
            walk(lambda x: next(iter(())))
        assert caught.value.__notes__ == ["at model[0]"]


def test_an_exception_of_is_leaf_names_the_node():
    with pytest.raises(ZeroDivisionError) as caught:
        fmap(same, {"a": [1]}, is_leaf=lambda x: isinstance(x, list) and 1 / 0)
    assert caught.value.__notes__ == ["at model.a"]


class Moody:
    """Its only child cannot be read."""

    @property
    def w(self) -> Any:
        raise ZeroDivisionError("moody")


functor(Moody, children=("w",))


def test_a_child_that_cannot_be_read_is_named_by_its_node():
    with pytest.raises(ZeroDivisionError) as caught:
        fmap(same, {"a": [Moody()]})
    assert caught.value.__notes__ == ["at model.a[0]"]


def test_a_child_that_cannot_be_read_in_a_later_tree_is_named_by_its_node():
    with pytest.raises(ZeroDivisionError) as caught:
        fmap(lambda x, y: x, {"a": {"w": 1}}, {"a": Moody()})
    assert caught.value.__notes__ == ["at model.a"]
    lacking = functor(type("Lacking", (), {}), children=("w", "b"))()
    lacking.w = 1
    with pytest.raises(DeclarationError, match=r"^model\.a: "):
        fmap(lambda x, y: x, {"a": {"w": 1, "b": 2}}, {"a": lacking})


# --- walks of one's own -------------------------------------------------------------------------


def by_hand(recurse: Any, node: Any, *rest: Any) -> Any:
    return default_walk(recurse, node, *rest)


def test_a_mismatch_below_a_walk_of_ones_own_names_the_path():
    with pytest.raises(StructureMismatchError, match=r"^model\.a: "):
        fmap(lambda x, y: x, {"a": [1]}, {"a": [1, 2]}, walk=by_hand)


def test_a_rebuild_that_fails_below_a_walk_of_ones_own_names_the_path():
    broken = functor(type("Broken", (), {}), children=("w",), rebuild=lambda self, new: None)()
    broken.w = 1
    with pytest.raises(RebuildError, match=r"^model\.a: "):
        fmap(same, {"a": broken}, walk=by_hand)


def test_a_walk_may_catch_what_f_raises():
    def forgiving(recurse: Any, node: Any) -> Any:
        try:
            return default_walk(recurse, node)
        except ZeroDivisionError:
            return "failed"

    def careless(recurse: Any, node: Any) -> Any:
        new = []
        for child in node:
            try:
                new.append(recurse(child))
            except ZeroDivisionError:
                new.append("failed")
        return new

    bad = [0]
    assert fmap(lambda x: 1 / x, [bad, [1], bad], walk=forgiving) == ["failed", [1], "failed"]
    assert fmap(lambda x: 1 / x, [bad, [1], bad], walk=careless) == [["failed"], [1], ["failed"]]

    def whole(recurse: Any, node: Any) -> Any:
        return careless(recurse, node) if len(node) > 1 else default_walk(recurse, node)

    assert fmap(lambda x: 1 / x, [bad, [1], bad], walk=whole) == ["failed", [1], "failed"]


def test_a_cycle_through_a_walk_of_ones_own():
    with pytest.raises(CycleError, match=r"^model"):
        fmap(same, through_list(), walk=by_hand)
    new = fmap(add_one, through_list(), walk=by_hand, prune=None)
    assert new == [2, None]


def test_the_collecting_walk_with_paths():
    walk = fmapper.collecting_walk
    tree = {"a": [1, 2], "b": 3}
    try:
        found = fmap_with_path(lambda path, x: str(path), tree, walk=walk, cache=None)
    except TypeError as error:  # a walk that takes no path may be refused, in words that say so
        assert "path" in str(error)  # noqa: PT017
    else:
        assert found == ["a[0]", "a[1]", "b"]


# --- leaves and nodes that are easily mistaken ---------------------------------------------------


def test_iterators_are_leaves_and_are_not_consumed():
    several = [iter([1, 2]), (i for i in range(2)), map(str, [1, 2]), zip([1], [2], strict=True)]
    assert all(x is y for x, y in zip(fmap(same, several), several, strict=True))
    assert all(x is y for x, y in zip(fleaves(several), several, strict=True))
    assert [len(list(x)) for x in several] == [2, 2, 2, 1]


def test_other_views_of_a_dict_are_leaves():
    views = [{1: 2}.keys(), {1: 2}.values(), {1: 2}.items(), range(3), {1}, frozenset({2})]
    assert all(map(fmapper.is_leaf, views))


@pytest.mark.parametrize("empty", [None, ()], ids=repr)
def test_what_has_no_children_is_a_leaf_where_is_leaf_says_so(empty):
    def stop(x: Any) -> bool:
        return x is empty

    tree = {"a": empty, "b": [empty, 1]}
    for map_ in (fmap, fmapstructure):
        called: list[Any] = []
        map_(called.append, tree)
        assert called == [1]
        called.clear()
        new = map_(lambda x, called=called: called.append(x) or "leaf", tree, is_leaf=stop)
        assert called == [empty, empty, 1]
        assert new == {"a": "leaf", "b": ["leaf", "leaf"]}
        pruned = map_(lambda x: "leaf", tree, is_leaf=stop, prune="pruned")
        assert pruned == new
    with_path = fmap_with_path(lambda path, x: str(path), tree, is_leaf=lambda path, x: stop(x))
    assert with_path == {"a": "a", "b": ["b[0]", "b[1]"]}
    assert fleaves(tree, is_leaf=stop) == [empty, empty, 1]
    assert fmap(lambda x, y: y, tree, {"a": 5, "b": [[6], 7]}, is_leaf=stop) == {
        "a": 5,
        "b": [[6], 7],
    }
    assert fmap(lambda x: "leaf", tree, is_leaf=stop, walk=by_hand) == new


def test_rebuilding_what_has_no_children():
    for x in (None, (), 5, "text"):
        assert rebuild(x, {}) is x
        assert rebuild(x, []) is x
    assert set_path([()], "[0]", 1) == [1]


def test_is_leaf_is_asked_about_nodes_only():
    asked: list[Any] = []
    array = np.ones(1)
    tree = {"a": [1, array], "b": None, "c": ((), "text", len, Node(1))}
    fmap(same, tree, is_leaf=asked.append)
    kinds = [type(x).__name__ for x in asked]
    assert kinds == ["dict", "list", "NoneType", "tuple", "tuple", "Node"]


def test_a_dict_whose_attributes_are_its_items():
    class AttrDict(dict):
        def __init__(self, *args: Any, **items: Any) -> None:
            super().__init__(*args, **items)
            self.__dict__ = self

    old = AttrDict(w=1, inner=AttrDict(b=2))
    new = fmap(add_one, old)
    assert new == {"w": 2, "inner": {"b": 3}}
    assert (new.w, new.inner.b) == (2, 3)
    assert (old.w, old.inner.b) == (1, 2)


def test_a_cached_property_of_an_attrs_class_with_slots_is_computed_again():
    @functor
    @attrs.define
    class Scaled:
        x: Any

        @functools.cached_property
        def double(self) -> Any:
            return 2 * self.x

    old = Scaled(1)
    assert old.double == 2
    assert fmap(lambda x: x + 10, old).double == 22


# --- trees that do not match --------------------------------------------------------------------

MISMATCHES: dict[str, tuple[Any, Any, str, list[str]]] = {
    "shorter list": ({"a": [1, 2]}, {"a": [1]}, "model.a", ["2 children", "1 child"]),
    "longer list": ([[1]], [[1, 2]], "model[0]", ["1 child", "2 children"]),
    "empty list": ([[1]], [[]], "model[0]", ["1 child", "0 children"]),
    "tuple against list": ([(1, 2)], [[1]], "model[0]", ["tuple", "list"]),
    "missing key": ({"a": {"w": 1, "b": 2}}, {"a": {"w": 1}}, "model.a", ["lacks 'b'"]),
    "extra key": ({"a": {"w": 1}}, {"a": {"w": 1, "b": 2}}, "model.a", ["has 'b' besides"]),
    "other key": ({"w": 1}, {"v": 1}, "model", ["lacks 'w'", "has 'v' besides"]),
    "dict against list": ({"w": [1]}, {"w": {"x": 1}}, "model.w", ["list", "dict", "'x'"]),
    "other integer keys": ([{0: 1, 1: 2}], [{0: 1, 7: 2}], "model[0]", ["1", "7"]),
    "functor": (Node(1), {"outer": 1}, "model", ["Node", "'inner'", "dict", "'outer'"]),
    "node against leaf": ([Node(1)], [5], "model[0]", ["Node", "leaf", "int"]),
    "list against array": ({"w": [1]}, {"w": np.ones(1)}, "model.w", ["list", "ndarray"]),
    "node against None": ({"w": [1]}, {"w": None}, "model.w", ["list with 1 child", "None"]),
    "None against array": ({"w": None}, {"w": np.ones(1)}, "model.w", ["None", "ndarray"]),
    "None against node": ([None], [[1]], "model[0]", ["None", "list"]),
    "() against node": ([()], [[1]], "model[0]", ["tuple", "list", "1 child"]),
    "root": ([1], 5, "model", ["list", "int"]),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_says_where_and_what_each_side_has(case):
    first, second, where, says = MISMATCHES[case]
    for map_ in (
        lambda: fmap(lambda x, y: x, first, second),
        lambda: fmap(lambda x, y: x, first, second, cache=None),
        lambda: fmap(lambda x, y, z: x, first, first, second),
        lambda: fmap_with_path(lambda path, x, y: x, first, second),
        lambda: fmapstructure(lambda x, y: x, first, second),
    ):
        with pytest.raises(StructureMismatchError) as caught:
            map_()
        start, _, rest = str(caught.value).partition(": ")
        assert start == where
        assert [word for word in says if word not in rest] == []
        assert not hasattr(caught.value, "__notes__")


def test_nothing_matches_nothing():
    for first in (None, (), [], {}):
        for second in (None, (), [], {}):
            assert fmap(lambda x, y: x, [first], [second]) == [first]


def test_a_leaf_of_the_first_tree_takes_whatever_the_others_have():
    tree = {"w": 1}
    for other in (None, (), [1, [2]], Node(3), np.ones(2), "text"):
        assert fmap(lambda x, y: [y], tree, {"w": other})["w"][0] is other


def test_a_rebuild_with_other_children_says_which():
    with pytest.raises(StructureMismatchError, match=r"2 children, but 1 "):
        rebuild([1, 2], [1])
    with pytest.raises(StructureMismatchError, match=r"dict has the children 'a', but got 'b'"):
        rebuild({"a": 1}, {"b": 1})


def test_the_function_comes_first() -> None:
    """A model can be called too, so the other order would run it."""
    with pytest.raises(
        TypeError,
        match=r"fmap takes the function as its first argument: "
        r"fmap\(to_cpu\(\), tree\)",
    ):
        fmapper.fmap(lambda x: x, fmapper.to_cpu)


# --- functions that see the whole tree first ----------------------------------------------------


class Doubling:
    """Doubles lists' leaves, all at once; what it was not told of it makes negative."""

    def __init__(self, *leaves: Any) -> None:
        self.leaves = leaves
        self.asked: list[Any] = []

    def __fmap__(self, tree: Any, is_leaf: Any, cache: Any) -> Any:
        self.asked.append((tree, is_leaf, cache))
        return {id(x): x + x for x in self.leaves}, lambda x: -x


def test_a_function_may_see_the_tree_before_its_leaves():
    w = np.ones(1)
    tree = {"a": w, "b": [w, 3], "c": np.ones(1)}
    f = Doubling(w)
    new = fmap(f, tree)
    assert new["a"] is new["b"][0]
    assert (new["a"][0], new["b"][1], new["c"][0]) == (2, -3, -1)
    stop = callable
    for options in ({"is_leaf": stop}, {"cache": {}}, {"cache": None}, {"prune": None}):
        assert fmap(f, tree, **options)["a"][0] == 2
    assert [asked[0] is tree for asked in f.asked] == [True] * 5
    assert f.asked[1][1] is stop
    assert [asked[2] is None for asked in f.asked] == [False, False, False, True, False]
    assert fmap(f, tree, prune=None)["b"] == [None, -3]


def test_the_hook_is_looked_for_on_the_class():
    f = lambda x: x  # noqa: E731
    f.__fmap__ = None
    assert fmap(f, [1]) == [1]
    with pytest.raises(TypeError, match="function as its first"):
        fmap([1], Doubling())
    with pytest.raises(TypeError, match="takes one tree"):
        fmap(Doubling(), [1], [1])


@pytest.mark.parametrize("name", ["plain", "path", "trees", "structure", "walk", "is_leaf"])
def test_a_map_leaves_nothing_for_the_garbage_collector(name):
    """Arrays are gone with the last reference: memory of a GPU cannot wait for a collection."""
    maps = {
        "plain": lambda tree: fmap(same, tree),
        "path": lambda tree: fmap_with_path(lambda path, x: x, tree),
        "trees": lambda tree: fmap(lambda x, y: x, tree, tree),
        "structure": lambda tree: fmapstructure(same, tree),
        "walk": lambda tree: fmap(same, tree, walk=by_hand),
        "is_leaf": lambda tree: fmap_with_path(
            lambda path, x: x, tree, is_leaf=lambda path, node: False
        ),
    }
    tree = {"a": np.ones(1), "b": [np.ones(1)]}
    alive = weakref.ref(tree["a"])
    gc.collect()
    gc.disable()
    try:
        maps[name](tree)
        del tree
        assert alive() is None
    finally:
        gc.enable()
