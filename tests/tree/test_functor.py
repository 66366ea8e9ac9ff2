"""How classes are declared, what their children are, and what a wrong declaration gets."""

import dataclasses
import functools
from collections import namedtuple
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import attrs
import pytest

import fmapper
from fmapper import DeclarationError, RebuildError, children, fmap, functor, is_leaf, rebuild


def add_one(x):
    return x + 1


@functor
class Plain:
    def __init__(self, w, b):
        self.w, self.b = w, b


def test_all_attributes_of_a_plain_class_are_children():
    node = Plain(1, [2, 3])
    node.later = 4
    assert children(node) == {"w": 1, "b": [2, 3], "later": 4}
    new = fmap(add_one, node)
    assert type(new) is Plain
    assert vars(new) == {"w": 2, "b": [3, 4], "later": 5}
    assert vars(node) == {"w": 1, "b": [2, 3], "later": 4}


def test_named_children_and_the_rest_carried_over_by_reference():
    @functor(children=("actor",))
    class ActorCritic:
        def __init__(self, actor, critic):
            self.actor, self.critic = actor, critic

    node = ActorCritic([1], [2])
    new = fmap(add_one, node)
    assert (new.actor, new.critic) == ([2], [2])
    assert new.critic is node.critic
    assert list(children(node)) == ["actor"]


def test_children_are_walked_in_the_order_in_which_they_are_listed():
    @functor(children=("b", "a"))
    class Swapped:
        def __init__(self):
            self.a, self.b = "a", "b"

    seen = []
    fmap(seen.append, Swapped())
    assert seen == ["b", "a"]


def test_no_children_is_a_node_and_f_never_sees_it():
    @functor(children=())
    class Sealed:
        def __init__(self):
            self.w = 1

    node = Sealed()
    assert not is_leaf(node)
    assert children(node) == {}
    new = fmap(pytest.fail, node)
    assert type(new) is Sealed
    assert new.w == 1


def test_leaf_is_given_whole():
    @fmapper.leaf
    class Opaque:
        w = 1

    node = Opaque()
    assert is_leaf(node)
    assert fmap(lambda x: x, [node])[0] is node


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}], ids=str)
def test_dataclasses(options):
    @functor
    @dataclasses.dataclass(**options)
    class Data:
        w: Any
        n: int = dataclasses.field(default=5)

    new = fmap(add_one, Data([1], 2))
    assert type(new) is Data
    assert new == Data([2], 3)


@pytest.mark.parametrize("slots", [False, True])
def test_a_declaration_below_dataclass_survives_the_new_class_that_slots_make(slots):
    @dataclasses.dataclass(slots=slots)
    @functor
    class Data:
        w: Any

    assert fmap(add_one, Data(1)) == Data(2)


def test_init_false_fields_are_children_and_unset_ones_stay_unset():
    @functor
    @dataclasses.dataclass
    class Data:
        w: Any
        made: Any = dataclasses.field(init=False)
        unset: Any = dataclasses.field(init=False, repr=False, compare=False)

        def __post_init__(self):
            self.made = 10 * self.w

    new = fmap(add_one, Data(1))
    assert (new.w, new.made) == (2, 11)
    assert not hasattr(new, "unset")


def test_init_and_post_init_do_not_run_again():
    calls = []

    @functor
    @dataclasses.dataclass
    class Data:
        w: Any
        scale: dataclasses.InitVar[int] = 1

        def __post_init__(self, scale):
            calls.append(scale)
            self.cached_elsewhere = scale

    new = fmap(add_one, Data(1, 7))
    assert calls == [7]
    assert new.w == 2
    assert new.cached_elsewhere == 7


def test_class_variables_are_no_children():
    @functor
    @dataclasses.dataclass
    class Data:
        w: Any
        count: ClassVar[int] = 3

    assert list(children(Data(1))) == ["w"]


@pytest.mark.parametrize("define", [attrs.define, attrs.frozen, attrs.mutable])
def test_attrs_classes(define):
    @functor
    @define
    class Layer:
        w: Any
        _private: Any = 2

    new = fmap(add_one, Layer([1]))
    assert new == Layer([2], 3)
    assert list(children(new)) == ["w", "_private"]


def test_attrs_above_the_declaration():
    @attrs.define
    @functor
    class Layer:
        w: Any

    assert fmap(add_one, Layer(1)) == Layer(2)


def test_slots_of_all_bases_and_mangled_names():
    class Base:
        __slots__ = ("__hidden", "w")

        def __init__(self):
            self.w, self.__hidden = 1, 2

        def hidden(self):
            return self.__hidden

    @functor
    class Layer(Base):
        __slots__ = ("b", "unset")

        def __init__(self):
            super().__init__()
            self.b = 3

    new = fmap(add_one, Layer())
    assert (new.w, new.b, new.hidden()) == (2, 4, 3)
    assert not hasattr(new, "unset")


def test_slots_and_a_dict_together():
    class Slotted:
        __slots__ = ("w",)

    @functor
    class Layer(Slotted):
        pass

    node = Layer()
    node.w, node.b = 1, 2
    new = fmap(add_one, node)
    assert (new.w, new.b) == (2, 3)


def test_namedtuples_are_nodes_and_can_be_declared():
    @functor(children=("w",))
    class Point(NamedTuple):
        w: Any
        name: Any

    assert fmap(add_one, Point(1, "n")) == Point(2, "n")
    plain = namedtuple("plain", "x y")
    assert fmap(add_one, plain(1, 2)) == plain(2, 3)


def test_generic_classes():
    T = TypeVar("T")

    @functor
    class Box(Generic[T]):
        def __init__(self, w: T):
            self.w = w

    assert fmap(add_one, Box[int](1)).w == 2


def test_cached_properties_are_computed_again_from_the_new_children():
    @functor
    class Layer:
        def __init__(self, w):
            self.w = w

        @functools.cached_property
        def doubled(self):
            return 2 * self.w

    node = Layer(1)
    assert node.doubled == 2
    assert list(children(node)) == ["w"]
    assert fmap(add_one, node).doubled == 4


def test_cached_properties_of_a_dataclass_with_fields():
    @functor
    @dataclasses.dataclass
    class Layer:
        w: Any

        @functools.cached_property
        def doubled(self):
            return 2 * self.w

    node = Layer(1)
    assert node.doubled == 2
    assert fmap(add_one, node).doubled == 4


def test_setattr_and_getattr_of_the_class_are_bypassed():
    @functor
    class Guarded:
        def __init__(self, w):
            object.__setattr__(self, "w", w)

        def __setattr__(self, name, value):
            raise AssertionError("the walk called __setattr__")

    assert fmap(add_one, Guarded(1)).w == 2


# --- subclasses ---------------------------------------------------------------------------------


def test_subclasses_inherit_and_all_attributes_means_all_of_theirs():
    class Sub(Plain):
        def __init__(self, w, b, extra):
            super().__init__(w, b)
            self.extra = extra

    new = fmap(add_one, Sub(1, 2, 3))
    assert type(new) is Sub
    assert vars(new) == {"w": 2, "b": 3, "extra": 4}


def test_a_plain_subclass_of_a_declared_dataclass_keeps_its_own_attributes():
    @functor
    @dataclasses.dataclass
    class Base:
        w: Any

    class Sub(Base):
        def __init__(self):
            super().__init__(1)
            self.v = 2

    new = fmap(add_one, Sub())
    assert (new.w, new.v) == (2, 3)


def test_subclasses_may_declare_their_own():
    @functor(children=("w",))
    class OnlyW(Plain):
        pass

    @fmapper.leaf
    class Closed(Plain):
        pass

    new = fmap(add_one, OnlyW(1, 2))
    assert (new.w, new.b) == (2, 2)
    assert is_leaf(Closed(1, 2))
    assert not is_leaf(Plain(1, 2))


def test_init_subclass_of_the_class_still_runs():
    seen = []

    @functor
    class Base:
        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, tag))

    class Sub(Base, tag="t"):
        pass

    assert seen == [("Sub", "t")]


@pytest.mark.parametrize("slots", [False, True])
def test_subclasses_of_a_class_that_dataclass_made_anew(slots):
    @dataclasses.dataclass(slots=slots)
    @functor
    class Base:
        w: Any

    class Sub(Base):
        pass

    new = fmap(add_one, Sub(1))
    assert type(new) is Sub
    assert new.w == 2


# --- classes of others --------------------------------------------------------------------------


def test_a_class_that_is_not_yours():
    class Theirs:
        def __init__(self):
            self.weight, self.name = 1, "n"

    assert is_leaf(Theirs())
    assert functor(Theirs, children=("weight",)) is Theirs
    new = fmap(add_one, Theirs())
    assert (new.weight, new.name) == (2, "n")


def test_a_declaration_wins_over_the_rule_for_containers():
    @fmapper.leaf
    class Settings(dict):
        pass

    assert is_leaf(Settings(a=1))
    assert not is_leaf({})


def test_a_class_seen_before_its_declaration_is_a_node_after_it():
    class Late:
        def __init__(self):
            self.w = 1

    node = Late()
    assert fmap(lambda x: x, [node])[0] is node
    functor(Late)
    assert fmap(add_one, [node])[0].w == 2


# --- custom rebuild -----------------------------------------------------------------------------


class Scaled:
    def __init__(self, w, factor=1, other=None):
        self.w, self.factor, self.other = w, factor, other


def declared(children, rebuild):
    """A fresh subclass of Scaled, declared with this rebuild."""
    cls = type("Fresh", (Scaled,), {})
    return functor(cls, children=children, rebuild=lambda self, new: rebuild(cls, self, new))


def test_rebuild_gets_the_node_and_the_new_children_by_name():
    seen = []

    def make(cls, self, new):
        seen.append(dict(new))
        return cls(new["w"], self.factor)

    cls = declared(("w",), make)
    new = fmap(add_one, cls([1], 3))
    assert (new.w, new.factor) == ([2], 3)
    assert seen == [{"w": [2]}]


def test_rebuild_may_copy_the_containers_it_is_given():
    cls = declared(("w",), lambda cls, self, new: cls(list(new["w"])))
    assert fmap(add_one, cls([1, 2])).w == [2, 3]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda cls, self, new: None, "returned None, not a Fresh"),
        (lambda cls, self, new: Scaled(**new), "of type Scaled, not a Fresh"),
        (lambda cls, self, new: self, "returned its argument"),
        (lambda cls, self, new: vars(self).update(new) or self, "returned its argument"),
        (lambda cls, self, new: cls(new["w"]), "forgot the child 'other'"),
        (lambda cls, self, new: cls(str(new["w"]), other=new["other"]), "forgot the child 'w'"),
    ],
    ids=["nothing", "another class", "itself", "itself changed", "one forgotten", "one converted"],
)
def test_a_rebuild_that_breaks_its_promise(make, says):
    cls = declared(("w", "other"), make)
    node = cls([1], other=[5])
    with pytest.raises(RebuildError, match=says) as caught:
        fmap(add_one, {"layers": [node]})
    assert str(caught.value).startswith("model.layers[0]: ")


def test_children_made_anew_at_each_reading_are_no_forgotten_ones():
    class Copying:
        def __init__(self, w):
            self._w = w

        @property
        def w(self):
            return list(self._w)

    functor(Copying, children=("w",), rebuild=lambda self, new: Copying(new["w"]))
    assert fmap(add_one, Copying([1, 2])).w == [2, 3]


def test_a_child_that_cannot_be_set_asks_for_a_rebuild():
    @functor(children=("w",))
    class Fixed:
        @property
        def w(self):
            return 1

    with pytest.raises(RebuildError, match=r"model\[0\]: the child 'w' of Fixed cannot be set"):
        fmap(add_one, [Fixed()])


def test_an_exception_in_a_rebuild_gets_the_path():
    def fail(cls, self, new):
        raise ZeroDivisionError("rebuild")

    cls = declared(("w",), fail)
    with pytest.raises(ZeroDivisionError) as caught:
        fmap(add_one, {"layers": [0, cls(1)]})
    assert caught.value.__notes__ == ["at model.layers[1]"]


def test_a_class_that_cannot_be_made_empty_is_told_to_give_a_rebuild():
    @functor
    class Failure(Exception):
        def __init__(self, w):
            super().__init__(w)
            self.w = w

    with pytest.raises(RebuildError, match=r"model\[0\]: Failure cannot be created empty.*rebuild"):
        fmap(add_one, [Failure(1)])


# --- wrong declarations -------------------------------------------------------------------------


def test_declaring_a_class_twice():
    cls = type("Once", (), {})
    functor(cls)
    for declare in (fmapper.leaf, functor(children=())):
        with pytest.raises(DeclarationError, match="Once is already declared as @functor, and"):
            declare(cls)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"children": ("w",)},
        {"children": ["w", "b"], "trainable": ("w",), "static": ["b"]},
        {"children": ("w",), "rebuild": add_one},
    ],
)
def test_the_same_declaration_again_is_no_error(arguments):
    cls = type("Again", (), {})
    for _ in range(2):
        assert functor(cls, **arguments) is cls
        assert functor(**arguments)(cls) is cls
    with pytest.raises(DeclarationError, match=r"(?s)already declared.*now as @functor\("):
        functor(cls, **{**arguments, "children": ("w", "b", "c")})


def test_the_same_leaf_again_is_no_error():
    cls = fmapper.leaf(fmapper.leaf(type("Once", (), {})))
    with pytest.raises(DeclarationError, match="as @leaf, and now as @functor"):
        functor(cls)


def test_a_cell_that_is_run_again_declares_the_same():
    """The second run makes new functions of the same code; the class may be another's, or new."""
    theirs = type("Theirs", (), {})
    cell = compile(
        "functor(Theirs, children=('w',), rebuild=lambda old, new: make(old, new['w']))\n"
        "@functor\n"
        "class Own:\n"
        "    def __init__(self, w):\n"
        "        self.w = w\n",
        "<cell>",
        "exec",
    )
    scope = {"Theirs": theirs, "functor": functor, "make": None, "__name__": "__main__"}
    owns = []
    for _ in range(2):
        exec(cell, scope)
        owns.append(scope["Own"])
        assert fmap(add_one, scope["Own"](1)).w == 2
    assert owns[0] is not owns[1]
    assert fmap(add_one, [owns[0](1), owns[1](2)])[0].w == 2

    def rebuild_with(n):
        return lambda old, new: n

    other = functor(type("Other", (), {}), rebuild=rebuild_with(theirs))
    functor(other, rebuild=rebuild_with(theirs))
    with pytest.raises(DeclarationError, match="already declared"):
        functor(other, rebuild=rebuild_with(owns))


def test_a_child_that_the_class_cannot_have_is_found_at_declaration():
    with pytest.raises(DeclarationError, match=r"Data has no attribute 'nope'\. It has: w"):

        @functor(children=("w", "nope"))
        @dataclasses.dataclass
        class Data:
            w: Any

    with pytest.raises(DeclarationError, match="'nope'"):

        @functor(children=("nope",))
        class Slotted:
            __slots__ = ("w",)


def test_a_child_that_an_instance_lacks_is_found_at_the_first_walk():
    @functor(children=("w", "nope"))
    class Layer:
        def __init__(self):
            self.w = 1

    with pytest.raises(DeclarationError, match=r"model\.a: Layer declares the child 'nope'"):
        fmap(add_one, {"a": Layer()})
    with pytest.raises(DeclarationError, match="Layer declares the child 'nope'"):
        children(Layer())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"children": "w"}, r"children=\('w',\)"),
        ({"children": (1,)}, "must be attribute names, not 1"),
        ({"children": ("w", "w")}, "repeats a name"),
        ({"rebuild": 3}, "not callable"),
    ],
)
def test_options_that_make_no_sense(options, says):
    cls = type("Wrong", (), {})
    with pytest.raises(DeclarationError, match=says):
        functor(cls, **options)
    assert is_leaf(cls())


def test_builtins_are_what_they_are():
    for cls in (int, str, list, dict):
        with pytest.raises(DeclarationError, match=f"{cls.__name__} is a builtin"):
            functor(cls)


def test_only_classes_can_be_declared():
    for declare in (functor, fmapper.leaf):
        with pytest.raises(DeclarationError, match="is not a class"):
            declare(Plain(1, 2))


def test_a_container_subclass_needs_no_declaration_and_says_so():
    with pytest.raises(DeclarationError, match="already a node"):

        @functor
        class Layers(list):
            pass


# --- children and rebuild -----------------------------------------------------------------------


def test_rebuild_takes_a_mapping_in_any_order_or_a_sequence_in_order():
    node = Plain(1, 2)
    assert vars(rebuild(node, {"b": 20, "w": 10})) == {"w": 10, "b": 20}
    assert vars(rebuild(node, (10, 20))) == {"w": 10, "b": 20}
    assert vars(node) == {"w": 1, "b": 2}


def test_rebuild_refuses_other_keys_and_lengths():
    for wrong in ({"w": 1}, {"w": 1, "b": 2, "c": 3}, (1,)):
        with pytest.raises(fmapper.StructureMismatchError):
            rebuild(Plain(1, 2), wrong)


def test_a_leaf_has_no_children_and_is_its_own_rebuild():
    assert children(5) == {}
    assert rebuild(5, {}) == 5
