"""The laws of the walk, on random nested models with ties and cycles through every kind of node."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import fmapper
from fmapper import (
    CycleError,
    KeyPath,
    children,
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
    leaf,
    load_state,
    rebuild,
    set_path,
    state,
)

np = pytest.importorskip("numpy")

law = settings(max_examples=250)

# --- the classes of the models ------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Names(list):
    """A list with an attribute, which is not a child."""

    tag = "none"


class Table(dict):
    """A dict with an attribute, which is not a child."""

    tag = "none"


class Shape(tuple):
    """A tuple that is not `tuple`, and no namedtuple."""


@functor
class Plain:
    """Every attribute is a child, in the order in which it was set."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@functor(children=("second", "first"))
class Partial:
    """Two children, in another order than that of the attributes; `kept` is carried over."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.kept, self.second = first, MARK, second


@functor
class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


@functor
@dataclasses.dataclass
class Data:
    a: Any
    b: Any


@functor
@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@functor
@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any


@functor
@dataclasses.dataclass
class Derived:
    """`b` is not an argument; a rebuild that went through `__init__` would put None there."""

    a: Any
    b: Any = dataclasses.field(init=False, default=None)
    made: dataclasses.InitVar[str] = "by hand"


@functor
@attrs.define
class Attrs:
    a: Any
    b: Any


@functor
@attrs.frozen(slots=False)
class AttrsFrozen:
    a: Any
    b: Any


@functor(
    children=("a", "b"),
    rebuild=lambda self, new: Custom(a=new["a"], b=new["b"], note=self.note),
)
class Custom:
    def __init__(self, *, a: Any, b: Any, note: str) -> None:
        self.b, self.a, self.note = b, a, note


@leaf
@dataclasses.dataclass(eq=False)
class Sealed:
    """A leaf that has fields."""

    n: int


class Undeclared:
    """A leaf because nobody said anything."""

    def __init__(self, n: int) -> None:
        self.n = n


class Mark:
    """What is carried over must be the very same object, in `copy.deepcopy` too."""

    def __deepcopy__(self, memo: Any) -> Mark:
        return self


class Image:
    """What `f` makes of a leaf: a new object each time, a leaf again."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"Image{self.what}"


MARK = Mark()
EMPTY = ()
ATOMS = (int, float, complex, bool, str, bytes, np.bool_)  # np.True_ is one object, as True is
TWO_FIELDS = (Slotted, Data, Frozen, FrozenSlots, Derived, Attrs, AttrsFrozen, Custom)


def derived(a: Any, b: Any) -> Derived:
    made = Derived(a)
    made.b = b
    return made


def tagged(container: Any, tag: str) -> Any:
    container.tag = tag
    return container


# --- what the tests know of a tree: independent of fmapper --------------------------------------


def parts(x: Any) -> list[tuple[Any, Any]] | None:
    """The children of a node with their keys, in order; None for a leaf."""
    if x is None:
        return []
    if isinstance(x, Pair):
        return [("left", x.left), ("right", x.right)]
    if isinstance(x, list | tuple | deque):
        return list(enumerate(x))
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, Plain):
        return list(vars(x).items())
    if isinstance(x, Partial):
        return [("second", x.second), ("first", x.first)]
    if isinstance(x, TWO_FIELDS):
        return [("a", x.a), ("b", x.b)]
    return None


def extras(x: Any) -> list[Any]:
    """What a node has besides its type and its children."""
    return [
        getattr(x, name, None)
        for name in ("default_factory", "maxlen", "tag", "kept", "note")
        if type(x).__module__ != "numpy"
    ]


def has_identity(x: Any) -> bool:
    return type(x) not in ATOMS and x is not None and x is not EMPTY


def describe(x: Any) -> Any:
    """The value of a leaf, so that it can be compared."""
    if isinstance(x, np.ndarray | np.generic):
        return type(x).__name__, str(x.dtype), x.shape, x.tobytes()
    if isinstance(x, Image):
        return "Image", *x.what
    if isinstance(x, Sealed | Undeclared):
        return type(x).__name__, x.n
    if callable(x):
        return "function", x(0)
    return type(x).__name__, x


def occurrences(tree: Any) -> list[tuple[tuple[Any, ...], Any, bool]]:
    """(keys, object, whether it is a leaf) at every place, parents first."""
    found = []
    stack: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while stack:
        keys, x = stack.pop()
        items = parts(x)
        found.append((keys, x, items is None))
        stack.extend(((*keys, key), child) for key, child in reversed(items or []))
    return found


def each_once(tree: Any) -> Iterator[Any]:
    """Every object at its first place, parents first; what has no identity at every place."""
    seen: set[int] = set()
    stack = [tree]
    while stack:
        x = stack.pop()
        if has_identity(x):
            if id(x) in seen:
                continue
            seen.add(id(x))
        yield x
        stack.extend(child for _, child in reversed(parts(x) or []))


def assert_alike(a: Any, b: Any) -> None:
    """The same types, keys, order and values, and the same objects at the same places."""
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    stack: list[tuple[str, Any, Any]] = [("tree", a, b)]
    while stack:
        where, x, y = stack.pop()
        assert type(x) is type(y), where
        assert has_identity(x) == has_identity(y), where
        if has_identity(x):
            known = id(x) in there
            assert there.setdefault(id(x), id(y)) == id(y), f"{where}: tied only on the left"
            assert back.setdefault(id(y), id(x)) == id(x), f"{where}: tied only on the right"
            if known:
                continue
        left, right = parts(x), parts(y)
        if left is None or right is None:
            assert describe(x) == describe(y), where
            continue
        assert extras(x) == extras(y), where
        assert [key for key, _ in left] == [key for key, _ in right], where
        pairs = zip(left, right, strict=True)
        stack.extend((f"{where}[{key!r}]", child, other) for (key, child), (_, other) in pairs)


def snapshot(tree: Any) -> list[tuple[Any, Any, Any]]:
    """All there is to see of a tree, and the objects themselves."""
    return [
        (x, parts(x), extras(x) if parts(x) is not None else describe(x)) for x in each_once(tree)
    ]


def assert_untouched(before: list[tuple[Any, Any, Any]], tree: Any) -> None:
    after = snapshot(tree)
    assert len(after) == len(before)
    for (old, old_parts, old_rest), (new, new_parts, new_rest) in zip(before, after, strict=True):
        assert new is old
        assert new_rest == old_rest
        if old_parts is None:
            continue
        assert [key for key, _ in new_parts] == [key for key, _ in old_parts]
        pairs = zip(new_parts, old_parts, strict=True)
        assert all(child is was for (_, child), (_, was) in pairs)


def mapped_plainly(
    tree: Any,
    f: Callable[[Any], Any],
    *,
    stop: Callable[[Any], bool] = lambda x: False,
    prune: Any = MARK,
) -> Any:
    """`fmapstructure`, said once more in a few lines of recursion."""
    memo: dict[int, Any] = {}

    def recurse(x: Any) -> Any:
        if id(x) in memo:
            return memo[id(x)] if prune is MARK else prune
        items = parts(x)
        if items is None or stop(x):
            new = f(x)
        elif not has_identity(x):
            return x
        else:
            mapped = {key: recurse(child) for key, child in items}
            if isinstance(x, list | deque):
                new = list(mapped.values())
            elif isinstance(x, tuple) and not isinstance(x, Pair):
                new = tuple(mapped.values())
            else:
                new = mapped
        if has_identity(x):
            memo[id(x)] = new
        return new

    return recurse(tree)


# --- random models ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A leaf or node of a blueprint; its children are entries before it."""

    kind: str
    value: Any = None
    children: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Entries, of which the last is the root, and edges that are bent back when all are built."""

    entries: tuple[Entry, ...]
    bent: tuple[tuple[int, int, int], ...] = ()

    def build(self, f: Callable[[Any], Any] = lambda x: x) -> Any:
        """The model, with `f` of every leaf in its place: what `fmap(f, ...)` must make of it."""
        built: list[Callable[[], Any]] = []
        for entry in self.entries:
            new = [built[i]() for i in entry.children]
            built.append(_make(entry, new, f))
        for parent, position, target in self.bent:
            node, child = built[parent](), built[target]()
            if isinstance(node, list | deque):
                node[position] = child
            elif isinstance(node, dict):
                node[list(node)[position]] = child
            else:
                object.__setattr__(node, parts(node)[position][0], child)
        return built[-1]()


def _make(entry: Entry, new: list[Any], f: Callable[[Any], Any]) -> Callable[[], Any]:
    """What stands at every place where the entry is used."""
    if entry.kind in LEAVES:
        value = LEAVES[entry.kind](entry.value)
        if not has_identity(value):
            return lambda: f(value)
        made = f(value)
    elif entry.kind in CHILDLESS:
        made = CHILDLESS[entry.kind]
    else:
        made = NODES[entry.kind][1](new, entry.value)
    return lambda: made


def _array(value: tuple[str, int]) -> np.ndarray:
    dtype, n = value
    return np.arange(n).astype(dtype)


def _number(value: tuple[str, int]) -> np.generic:
    dtype, n = value
    return np.dtype(dtype).type(n)


LEAVES: dict[str, Callable[[Any], Any]] = {
    "atom": lambda value: value,
    "array": _array,
    "NumPy scalar": _number,
    "sealed": Sealed,
    "undeclared": Undeclared,
    "function": lambda value: lambda x: value + x,
}
CHILDLESS: dict[str, Any] = {"None": None, "()": EMPTY}

# kind -> (how many children, or what their keys are; how it is made)
NODES: dict[str, tuple[Any, Callable[[list[Any], Any], Any]]] = {
    "list": ("any", lambda new, _: new),
    "tuple": ("any", lambda new, _: tuple(new)),
    "dict": ("keys", lambda new, keys: dict(zip(keys, new, strict=True))),
    "OrderedDict": ("keys", lambda new, keys: OrderedDict(zip(keys, new, strict=True))),
    "defaultdict": ("keys", lambda new, keys: defaultdict(list, zip(keys, new, strict=True))),
    "deque": ("any", lambda new, _: deque(new, maxlen=len(new) + 2)),
    "endless deque": ("any", lambda new, _: deque(new)),
    "Names": ("any", lambda new, _: tagged(Names(new), "names")),
    "Table": ("keys", lambda new, keys: tagged(Table(zip(keys, new, strict=True)), "table")),
    "Shape": ("any", lambda new, _: Shape(new)),
    "Pair": (2, lambda new, _: Pair(*new)),
    "Plain": ("names", lambda new, names: Plain(**dict(zip(names, new, strict=True)))),
    "Partial": (2, lambda new, _: Partial(*new)),
    "Slotted": (2, lambda new, _: Slotted(*new)),
    "Data": (2, lambda new, _: Data(*new)),
    "Frozen": (2, lambda new, _: Frozen(*new)),
    "FrozenSlots": (2, lambda new, _: FrozenSlots(*new)),
    "Derived": (2, lambda new, _: derived(*new)),
    "Attrs": (2, lambda new, _: Attrs(*new)),
    "AttrsFrozen": (2, lambda new, _: AttrsFrozen(*new)),
    "Custom": (2, lambda new, _: Custom(a=new[0], b=new[1], note="carried")),
}
BUILT_LAST = {"tuple", "Shape", "Pair", "Custom"}

DTYPES = ["float16", "float32", "float64", "complex64", "int8", "int64", "bool"]
sizes = st.tuples(st.sampled_from(DTYPES), st.integers(0, 3))
atoms = st.one_of(
    st.integers(-3, 300),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.just(1j),
)
leaves = st.one_of(
    st.builds(Entry, st.just("array"), sizes),
    st.builds(Entry, st.just("atom"), atoms),
    st.builds(Entry, st.just("NumPy scalar"), st.tuples(st.sampled_from(DTYPES), st.just(1))),
    st.builds(Entry, st.sampled_from(["sealed", "undeclared"]), st.integers(0, 9)),
    st.builds(Entry, st.just("function"), st.integers(0, 2)),
    st.builds(Entry, st.sampled_from(sorted(CHILDLESS))),
)
words = st.sampled_from(["w", "b", "layer_1", "Zeta", "a", "_x"])
odd_words = st.sampled_from(["my key", "0", "a.b", "it's", 'say "x"', "", "tab\t", "class", "[0]"])
keys = st.one_of(words, st.integers(-2, 5), odd_words)


@st.composite
def blueprints(
    draw: st.DrawFn, *, cyclic: bool = False, keys: st.SearchStrategy[Any] = keys
) -> Blueprint:
    entries = draw(st.lists(leaves, min_size=1, max_size=5))
    kinds = st.sampled_from([kind for kind in NODES if not cyclic or kind not in BUILT_LAST])
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(kinds)
        arity = NODES[kind][0]
        value = None
        if arity == "keys":
            value = tuple(draw(st.lists(keys, unique=True, max_size=3)))
        elif arity == "names":
            value = tuple(draw(st.lists(words, unique=True, max_size=3)))
        size = len(value) if value is not None else arity
        at_least, at_most = (0, 3) if size == "any" else (size, size)
        chosen = draw(
            st.lists(
                st.integers(0, len(entries) - 1),
                min_size=at_least,
                max_size=at_most,
            )
        )
        entries.append(Entry(kind, value, tuple(len(entries) - 1 - back for back in chosen)))
    used = {child for entry in entries for child in entry.children}
    roots = [i for i in range(len(entries)) if i not in used]
    extra = draw(st.lists(st.integers(0, len(entries) - 1), max_size=2))
    entries.append(Entry("list", None, (*roots, *extra)))
    bent = []
    if cyclic:
        parents = [i for i, entry in enumerate(entries) if entry.children]
        for _ in range(draw(st.integers(1, 3))):
            parent = draw(st.sampled_from(parents))
            position = draw(st.integers(0, len(entries[parent].children) - 1))
            above = draw(st.integers(parent, len(entries) - 1))
            bent.append((parent, position, above))
        bent = list({edge[:2]: edge for edge in bent}.values())
    return Blueprint(tuple(entries), tuple(bent))


def has_cycle(tree: Any) -> bool:
    done: set[int] = set()
    on_path: set[int] = set()

    def visit(x: Any) -> bool:
        if not has_identity(x) or id(x) in done:
            return False
        if id(x) in on_path:
            return True
        on_path.add(id(x))
        found = any(visit(child) for _, child in parts(x) or [])
        on_path.discard(id(x))
        done.add(id(x))
        return found

    return visit(tree)


any_blueprints = st.one_of(blueprints(), blueprints(cyclic=True))
models = blueprints().map(Blueprint.build)
any_models = any_blueprints.map(Blueprint.build)
cyclic_models = blueprints(cyclic=True).map(Blueprint.build).filter(has_cycle)


def drawn_from(data: st.DataObject, several: list[Any]) -> Any:
    """One of several objects; `sampled_from` would hash them, which a cycle does not survive."""
    return several[data.draw(st.integers(0, len(several) - 1))]


def f(x: Any) -> Image:
    return Image("f", describe(x))


def g(x: Any) -> Image:
    return Image("g", describe(x))


def same(x: Any) -> Any:
    return x


# --- functor laws -------------------------------------------------------------------------------


@pytest.mark.nightly
@law
@given(any_models)
def test_identity(tree: Any) -> None:
    new = fmap(same, tree)
    assert_alike(new, tree)
    for old, copied in zip(each_once(tree), each_once(new), strict=True):
        is_node = parts(old) is not None and has_identity(old)
        assert (copied is not old) == is_node


@pytest.mark.nightly
@law
@given(any_models)
def test_composition(tree: Any) -> None:
    assert_alike(fmap(f, fmap(g, tree)), fmap(lambda x: f(g(x)), tree))


@pytest.mark.nightly
@law
@given(any_blueprints)
def test_the_result_is_what_is_built_from_mapped_leaves(blueprint: Blueprint) -> None:
    assert_alike(fmap(f, blueprint.build()), blueprint.build(f))


@pytest.mark.nightly
@law
@given(any_models)
def test_ties_are_those_of_deepcopy(tree: Any) -> None:
    # Newer Pythons copy numbers and strings without a look at the memo, so f leaves them alone.
    def change(x: Any) -> Any:
        return f(x) if has_identity(x) else x

    memo = {id(x): change(x) for x in each_once(tree) if parts(x) is None and has_identity(x)}
    oracle = copy.deepcopy(tree, memo)
    assert_alike(fmap(change, tree), oracle)


@pytest.mark.nightly
@law
@given(any_models)
def test_f_is_called_once_per_leaf_in_order(tree: Any) -> None:
    called: list[Any] = []
    fmap(called.append, tree)
    wanted = [x for x in each_once(tree) if parts(x) is None]
    assert len(called) == len(wanted)
    assert all(x is y for x, y in zip(called, wanted, strict=True))


@pytest.mark.nightly
@law
@given(any_models)
def test_the_input_is_untouched(tree: Any) -> None:
    before = snapshot(tree)
    fmap(f, tree)
    fmap_with_path(lambda path, x: f(x), tree)
    fmapstructure(f, tree)
    fmap(lambda x, y: f(x), tree, tree)
    fcollect(tree)
    for node in (x for x in each_once(tree) if parts(x)):
        rebuild(node, [f(child) for child in children(node).values()])
    assert_untouched(before, tree)


# --- the relatives ------------------------------------------------------------------------------


@pytest.mark.nightly
@law
@given(any_models)
def test_with_path_is_fmap_that_also_says_where(tree: Any) -> None:
    assert_alike(fmap_with_path(lambda path, x: f(x), tree), fmap(f, tree))
    assert_alike(fmapstructure_with_path(lambda path, x: f(x), tree), fmapstructure(f, tree))


@pytest.mark.nightly
@law
@given(models)
def test_structure_is_plain(tree: Any) -> None:
    new = fmapstructure(f, tree)
    assert_alike(new, mapped_plainly(tree, f))
    assert {type(x) for x in each_once(new)} <= {dict, list, tuple, type(None), Image}


@pytest.mark.nightly
@law
@given(cyclic_models)
def test_structure_of_a_cyclic_tree_is_plain_and_as_cyclic(tree: Any) -> None:
    new = fmapstructure(f, tree)
    assert {type(x) for x in each_once(new)} <= {dict, list, tuple, type(None), Image}
    assert_alike(fmapstructure(g, new), fmapstructure(lambda x: g(f(x)), tree))
    assert [x.what for x in each_once(new) if isinstance(x, Image)] == [
        x.what for x in each_once(fmap(f, tree)) if isinstance(x, Image)
    ]


@pytest.mark.nightly
@law
@given(models)
def test_leaves_one_per_occurrence_in_order(tree: Any) -> None:
    wanted = [x for _, x, is_leaf in occurrences(tree) if is_leaf]
    found = fleaves(tree)
    assert len(found) == len(wanted)
    assert all(x is y for x, y in zip(found, wanted, strict=True))


@pytest.mark.nightly
@law
@given(any_models)
def test_collect_gives_each_object_once_parents_first(tree: Any) -> None:
    # None and () are left out: whether an object without identity is listed again is another test.
    wanted = [x for x in each_once(tree) if x is not None and x is not EMPTY]
    found = [x for x in fcollect(tree) if x is not None and x is not EMPTY]
    assert len(found) == len(wanted)
    assert all(x is y for x, y in zip(found, wanted, strict=True))


@pytest.mark.nightly
@law
@given(any_models)
def test_children_and_rebuild_are_inverse(tree: Any) -> None:
    for x in each_once(tree):
        have = children(x)
        wanted = parts(x) or []
        assert [key for key, _ in wanted] == list(have)
        assert all(have[key] is child for key, child in wanted)
        for given_children in (have, list(have.values()), dict(reversed(have.items()))):
            new = rebuild(x, given_children)
            assert type(new) is type(x)
            assert (new is x) == (parts(x) is None or not has_identity(x))
            if parts(x) is None:
                continue
            assert extras(new) == extras(x)
            assert [key for key, _ in parts(new)] == list(have)
            assert all(child is have[key] for key, child in parts(new))


@pytest.mark.nightly
@law
@given(any_models)
def test_what_is_a_leaf(tree: Any) -> None:
    for x in each_once(tree):
        assert fmapper.is_leaf(x) == (parts(x) is None)


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.nightly
@law
@given(models)
def test_every_path_leads_back(tree: Any) -> None:
    told: list[tuple[KeyPath, Any]] = []
    fmap_with_path(lambda path, x: told.append((path, x)), tree, cache=None)
    wanted = [(keys, x) for keys, x, is_leaf in occurrences(tree) if is_leaf]
    assert [path.keys for path, _ in told] == [keys for keys, _ in wanted]
    for path, x in told:
        assert get_path(tree, path) is x
        assert has_path(tree, path)
        assert get_path(tree, str(path)) is x
        assert get_path(tree, list(path)) is x
        assert not has_path(tree, path + KeyPath("deeper"))


@pytest.mark.nightly
@law
@given(st.lists(st.one_of(st.integers(), st.text()), max_size=4))
@example(["e\N{COMBINING ACUTE ACCENT}", 0, "a\N{MIDDLE DOT}", "\N{SCRIPT CAPITAL P}"])
def test_a_printed_path_reads_back(keys: list[Any]) -> None:
    path = KeyPath(*keys)
    assert KeyPath.parse(str(path)) == path


@pytest.mark.nightly
@law
@given(any_models)
def test_the_path_of_a_tie_is_its_first(tree: Any) -> None:
    told: dict[int, tuple[KeyPath, Any]] = {}

    def once(path: KeyPath, x: Any) -> Any:
        if has_identity(x):
            assert id(x) not in told
            told[id(x)] = path, x
        return x

    fmap_with_path(once, tree)
    assert all(get_path(tree, path) is x for path, x in told.values())
    assume(not has_cycle(tree))
    first: dict[int, tuple[Any, ...]] = {}
    for keys, x, is_leaf in occurrences(tree):
        if is_leaf and has_identity(x):
            first.setdefault(id(x), keys)
    assert {i: path.keys for i, (path, _) in told.items()} == first


@pytest.mark.nightly
@law
@given(models, st.data())
def test_set_path_changes_that_path_alone(tree: Any, data: st.DataObject) -> None:
    before = snapshot(tree)
    places = occurrences(tree)
    at, old, _ = drawn_from(data, places)
    value = Image("set")
    new = set_path(tree, at, value)
    assert_untouched(before, tree)
    assert get_path(new, at) is value
    assert type(new) is (Image if at == () else type(tree))
    outside = [(keys, x, is_leaf) for keys, x, is_leaf in places if keys[: len(at)] != at]
    for keys, x, is_leaf in outside:
        now = get_path(new, keys)
        on_the_way = at[: len(keys)] == keys
        assert (now is x) != on_the_way
        assert type(now) is type(x)
        assert is_leaf or [key for key, _ in parts(now)] == [key for key, _ in parts(x)]
    assert len(occurrences(new)) == len(outside) + 1
    back = occurrences(set_path(new, at, old))
    assert [(keys, type(x)) for keys, x, _ in back] == [(keys, type(x)) for keys, x, _ in places]
    leaves = zip(back, places, strict=True)
    assert all(x is y for (_, x, is_leaf), (_, y, _) in leaves if is_leaf)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.nightly
@law
@given(models, st.sampled_from([dict, list, tuple, Plain, Custom, type(None), deque, Pair]))
def test_is_leaf_adds_to_the_leaves(tree: Any, cls: type) -> None:
    def stop(x: Any) -> bool:
        return isinstance(x, cls)

    def whole(x: Any) -> Image:
        return Image(type(x).__name__, id(x))

    wanted = mapped_plainly(tree, whole, stop=stop)
    assert_alike(fmapstructure(whole, tree, is_leaf=stop), wanted)
    assert_alike(mapped_plainly(fmap(whole, tree, is_leaf=stop), same), wanted)
    with_path = fmap_with_path(
        lambda path, x: whole(x), tree, is_leaf=lambda path, x: stop(get_path(tree, path))
    )
    assert_alike(mapped_plainly(with_path, same), wanted)
    found = fleaves(tree, is_leaf=stop)
    assert [whole(x).what for x in found] == [
        x.what for _, x, is_leaf in occurrences(wanted) if is_leaf
    ]


@pytest.mark.nightly
@law
@given(models)
def test_prune_stands_at_every_later_occurrence(tree: Any) -> None:
    wanted = mapped_plainly(tree, f, prune="pruned")
    assert_alike(fmapstructure(f, tree, prune="pruned"), wanted)
    assert_alike(mapped_plainly(fmap(f, tree, prune="pruned"), same), wanted)


@pytest.mark.nightly
@law
@given(cyclic_models)
def test_pruning_ends_every_cycle(tree: Any) -> None:
    new = fmap(f, tree, prune=None)
    assert not has_cycle(new)
    ids = [id(x) for x in fleaves(new)]
    assert len(ids) == len(set(ids))


@pytest.mark.nightly
@law
@given(models)
def test_without_a_cache_nothing_is_tied(tree: Any) -> None:
    new = fmap(f, tree, cache=None)
    loose = [x for _, x, _ in occurrences(new) if has_identity(x)]
    assert len({id(x) for x in loose}) == len(loose)
    wanted = [(keys, describe(x)) for keys, x, is_leaf in occurrences(tree) if is_leaf]
    found = [(keys, x.what[1]) for keys, x, is_leaf in occurrences(new) if is_leaf]
    assert found == wanted


@pytest.mark.nightly
@law
@given(cyclic_models)
def test_a_cycle_is_kept_even_without_a_cache(tree: Any) -> None:
    new = fmap(f, tree, cache=None)
    assert has_cycle(new)
    seen = {id(x) for x in each_once(tree)}
    assert not any(id(x) in seen for x in each_once(new) if has_identity(x))


@pytest.mark.nightly
@law
@given(any_models, st.data())
def test_a_cache_of_ones_own_ties_several_calls(tree: Any, data: st.DataObject) -> None:
    part = drawn_from(data, [x for x in each_once(tree) if has_identity(x)])
    cache: dict[Any, Any] = {}
    together = fmap(f, [tree, part])
    first, second = fmap(f, tree, cache=cache), fmap(f, part, cache=cache)
    assert_alike([first, second], together)
    assert fmap(f, tree, cache=cache) is first


@pytest.mark.nightly
@law
@given(st.lists(blueprints(), min_size=2, max_size=4))
def test_a_cache_outlives_the_trees_that_it_has_seen(several: list[Blueprint]) -> None:
    cache: dict[Any, Any] = {}
    results = [fmap(f, blueprint.build(), cache=cache) for blueprint in several]
    assert_alike(results, [blueprint.build(f) for blueprint in several])


@pytest.mark.nightly
@law
@given(models)
def test_a_walk_of_ones_own_can_say_the_default(tree: Any) -> None:
    def walk_with_path(recurse: Callable[..., Any], path: KeyPath, node: Any) -> Any:
        new = {key: recurse(KeyPath(path, key), child) for key, child in children(node).items()}
        return rebuild(node, new)

    assert_alike(fmap(f, tree, walk=as_by_default), fmap(f, tree))
    assert_alike(fmap(f, tree, walk=fmapper.default_walk), fmap(f, tree))
    assert_alike(fmap(f, tree, walk=fmapper.structural_walk), fmapstructure(f, tree))
    with_path = fmap_with_path(lambda path, x: Image(path), tree, walk=walk_with_path)
    assert_alike(with_path, fmap_with_path(lambda path, x: Image(path), tree))


@law
@given(models)
def test_the_collecting_walk_makes_one_flat_list(tree: Any) -> None:
    found = fmap(f, tree, walk=fmapper.collecting_walk, cache=None)
    assert [x.what for x in found] == [f(x).what for x in fleaves(tree)]


# --- several trees ------------------------------------------------------------------------------


def both(x: Any, y: Any) -> Image:
    return Image(describe(x), describe(y))


@pytest.mark.nightly
@law
@given(any_models)
def test_a_tree_with_itself(tree: Any) -> None:
    wanted = fmap(lambda x: both(x, x), tree)
    assert_alike(fmap(both, tree, tree), wanted)
    assert_alike(fmap_with_path(lambda path, x, y: both(x, y), tree, tree), wanted)
    three = fmap(lambda x, y, z: both(x, z), tree, fmap(same, tree), tree)
    assert_alike(three, wanted)


@pytest.mark.nightly
@law
@given(any_models)
def test_a_tree_with_its_plain_structure(tree: Any) -> None:
    plain = fmapstructure(same, tree)
    assert_alike(fmap(both, tree, plain), fmap(lambda x: both(x, x), tree))
    assert_alike(fmap(both, plain, tree), fmapstructure(lambda x: both(x, x), tree))
    assert_alike(fmapstructure(both, tree, plain), fmapstructure(lambda x: both(x, x), tree))


@pytest.mark.nightly
@law
@given(models)
def test_a_tie_survives_only_where_every_tree_is_tied(tree: Any) -> None:
    loose = fmap(f, tree, cache=None)
    wanted = fmap(lambda x: both(x, f(x)), tree, cache=None)
    assert_alike(fmap(both, tree, loose), wanted)


@pytest.mark.nightly
@law
@given(models, st.data())
def test_a_lost_child_is_a_mismatch(tree: Any, data: st.DataObject) -> None:
    plain = fmapstructure(same, tree, cache=None)
    inner = [(keys, x) for keys, x, _ in occurrences(plain) if parts(x)]
    assume(inner)
    keys, node = drawn_from(data, inner)
    short = type(node)(list(node.items())[:-1]) if isinstance(node, dict) else node[:-1]
    other = set_path(plain, keys, short)
    with pytest.raises(fmapper.StructureMismatchError) as caught:
        fmap(both, tree, other, cache=None)
    assert str(caught.value).startswith(f"{_printed(keys)}: ")
    assert not hasattr(caught.value, "__notes__")


def _printed(keys: tuple[Any, ...]) -> str:
    path = str(KeyPath(*keys))
    return "model" + ("." if path and not path.startswith("[") else "") + path


# --- arrays -------------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def twist(x: Any) -> Any:
    """Another array of the same type, dtype and shape."""
    new = ~x if x.dtype == bool else x.dtype.type(2) * x + x.dtype.type(1)
    return np.asarray(new) if isinstance(x, np.ndarray) else new


def without_numpy_scalars(tree: Any) -> Any:
    return fmap(lambda x: np.asarray(x) if isinstance(x, np.generic) else x, tree)


@pytest.mark.nightly
@law
@given(models)
def test_destructure_round_trip(tree: Any) -> None:
    tree = without_numpy_scalars(tree)
    before = snapshot(tree)
    arrays = [x for x in each_once(tree) if is_array(x) and x.dtype.kind in "fc"]
    vector, back = destructure(tree)
    assert vector.shape == (sum(x.size for x in arrays),)
    assert not arrays or vector.dtype == np.result_type(*arrays)
    new = back(vector)
    assert_alike(new, tree)
    assert not any(np.shares_memory(x, vector) for x in fleaves(new) if is_array(x))
    assert_untouched(before, tree)
    with pytest.raises(fmapper.StructureMismatchError):
        back(np.zeros(vector.size + 1))


@pytest.mark.nightly
@law
@given(models)
def test_destructure_gives_new_values_their_place(tree: Any) -> None:
    tree = without_numpy_scalars(tree)

    def changed(x: Any) -> bool:
        return is_array(x) and x.dtype.kind in "fc"

    vector, back = destructure(tree)
    wanted = fmap(lambda x: twist(x) if changed(x) else x, tree)
    assert_alike(back(2 * vector + 1), wanted)


def state_names(tree: Any) -> list[str]:
    places = [(keys, x) for keys, x, is_leaf in occurrences(tree) if is_leaf and is_array(x)]
    names = [".".join(map(str, keys)) for keys, _ in places]
    assume(len(set(names)) == len(names))
    return names


@pytest.mark.nightly
@law
@given(models)
def test_state_has_every_array_under_each_of_its_paths(tree: Any) -> None:
    names = state_names(tree)
    named = state(tree)
    assert list(named) == names
    arrays = [x for x in fleaves(tree) if is_array(x)]
    assert all(x is y for x, y in zip(named.values(), arrays, strict=True))
    assert_alike(load_state(tree, named), tree)


@pytest.mark.nightly
@law
@given(models)
def test_load_state_puts_new_values_in_and_ties_them(tree: Any) -> None:
    state_names(tree)
    before = snapshot(tree)
    named = {name: twist(x) for name, x in state(tree).items()}
    wanted = fmap(lambda x: twist(x) if is_array(x) else x, tree)
    assert_alike(load_state(tree, named), wanted)
    assert_alike(load_state(tree, dict(reversed(named.items()))), wanted)
    assert_untouched(before, tree)


@pytest.mark.nightly
@law
@given(models, st.data())
def test_a_state_that_lacks_a_name_or_has_one_too_many(tree: Any, data: st.DataObject) -> None:
    names = state_names(tree)
    assume(names)
    named = {name: twist(x) for name, x in state(tree).items()}
    gone = data.draw(st.sampled_from(names))
    wrong = {("not there" if name == gone else name): x for name, x in named.items()}
    with pytest.raises(fmapper.StructureMismatchError) as caught:
        load_state(tree, wrong)
    assert "\n  not there: in the state" in str(caught.value)
    paths = dict(zip(names, [p for p, x, _ in occurrences(tree) if is_array(x)], strict=True))
    lenient = load_state(tree, wrong, strict=False)
    ties = [name for name in names if get_path(tree, paths[name]) is state(tree)[gone]]
    if ties == [gone]:  # a tied array may have any of its names
        assert f"\n  {gone}: missing" in str(caught.value)
        assert get_path(lenient, paths[gone]) is state(tree)[gone]


# --- cycles -------------------------------------------------------------------------------------


@pytest.mark.nightly
@law
@given(blueprints(cyclic=True, keys=words).map(Blueprint.build).filter(has_cycle))
def test_what_has_no_end_says_so(tree: Any) -> None:
    for walk in (fleaves, state):
        with pytest.raises(CycleError) as caught:
            walk(tree)
        again, _, first = str(caught.value).split(". ")[0].partition(": this is the ")
        names = [again, first.split(" at ", 1)[1].removesuffix(" again")]
        found = [get_path(tree, KeyPath.parse(_without_root(name))) for name in names]
        assert found[0] is found[1]
        assert names[0] != names[1]


def _without_root(printed: str) -> str:
    return printed.removeprefix("model").removeprefix(".")


# --- failure ------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def as_by_default(recurse: Callable[..., Any], node: Any) -> Any:
    return rebuild(node, {key: recurse(child) for key, child in children(node).items()})


MAPS: dict[str, Callable[..., Any]] = {
    "fmap": fmap,
    "fmap_with_path": lambda f, *a, **k: fmap_with_path(lambda path, *x: f(*x), *a, **k),
    "fmapstructure": fmapstructure,
    "two trees": lambda f, tree, **k: fmap(lambda x, y: f(x), tree, tree, **k),
    "own walk": lambda f, *a, **k: fmap(f, *a, walk=as_by_default, **k),
}


@pytest.mark.nightly
@pytest.mark.parametrize("map_", MAPS.values(), ids=MAPS)
@law
@given(st.data())
def test_failure_leaves_no_trace_but_a_note(map_: Callable[..., Any], data: st.DataObject) -> None:
    tree = data.draw(models if map_ is MAPS["own walk"] else any_models)
    before = snapshot(tree)
    calls = [x for x in each_once(tree) if parts(x) is None]
    assume(calls)
    n = data.draw(st.integers(0, len(calls) - 1))
    culprit: list[Any] = []

    def fail_at_n(x: Any) -> Any:
        culprit.append(x)
        if len(culprit) > n:
            raise Boom
        return x

    cache: dict[Any, Any] = {}
    cached = data.draw(st.sampled_from(["none", "new", "used"]))
    if cached == "used":
        map_(f, [[MARK]], cache=cache)
    known = {key: list(x) if key == id(cache) else x for key, x in cache.items()}
    with pytest.raises(Boom) as caught:
        map_(fail_at_n, tree, **({} if cached == "none" else {"cache": cache}))
    assert cache == known
    assert_untouched(before, tree)
    assert len(caught.value.__notes__) == 1
    note = caught.value.__notes__[0]
    assert note.startswith("at model")
    at = KeyPath.parse(_without_root(note.removeprefix("at ")))
    assert get_path(tree, at) is culprit[-1]
    assert_alike(map_(f, tree, cache=cache), map_(f, tree))
