"""What models hold in plain attributes, compared and put back."""

import collections
import types

import numpy as np

from fmapper.programs import PlainState


class Slotted:
    __slots__ = ("count", "later")

    def __init__(self):
        self.count = 0


class Model:
    def __init__(self):
        self.number, self.text, self.pair = 1, "a", (1, [2])
        self.list, self.dict, self.set = [1], {"a": 1}, {1}
        self.deque, self.ordered = collections.deque([1], 3), collections.OrderedDict(a=1, b=2)
        self.space, self.slotted = types.SimpleNamespace(n=1), Slotted()
        self.array, self.me = np.zeros(2), self


def read(model, **options):
    return PlainState(model, libraries=("numpy",), opens=lambda cls: False, **options)


def change(model):
    model.number += 1
    model.text = "b"
    model.pair[1].append(3)
    model.list[0] = 2
    model.dict["b"] = 2
    model.set.add(2)
    model.deque.append(2)
    model.ordered.move_to_end("a")
    model.ordered["a"] = 3
    model.space.n += 1
    model.slotted.count += 1
    model.slotted.later = 1
    model.array = np.ones(2)
    model.new = 1


def test_changes_are_named_in_order_and_put_back():
    model = Model()
    before, contents = dict(vars(model)), repr({**vars(model), "slotted": 0, "me": 0})
    state = read(model)
    assert state.changes() == []
    change(model)
    assert state.changes() == [
        *("number", "text", "array", "new"),
        *("pair.1", "list", "dict", "set", "deque", "ordered", "space.n"),
        *("slotted.count", "slotted.later"),
    ]
    state.restore()
    assert state.changes() == []
    assert vars(model) == before
    assert repr({**vars(model), "slotted": 0, "me": 0}) == contents
    assert (model.slotted.count, hasattr(model.slotted, "later")) == (0, False)
    assert list(model.ordered) == ["a", "b"]


def test_equal_values_and_chosen_names_are_not_changes():
    model = Model()
    state = read(model)
    model.list, model.pair, model.array = [1], (1, [2]), np.ones(2)
    assert state.changes() == ["array"]
    assert state.changes(besides={"array"}) == []


def test_attributes_of_the_framework_are_hidden_or_not_named():
    model = Model()
    state = read(model, hides=lambda name: name == "number", unnamed=("dict",))
    model.number, model.dict["a"] = 5, 5
    assert state.changes() == ["a"]


def test_cells_of_functions_and_what_methods_are_bound_to_are_read():
    calls, model = 0, Model()

    def count():
        nonlocal calls
        calls += 1

    for callee, expected in ((count, ["calls"]), (types.MethodType(change, model), ["number"])):
        state = read(callee)
        callee()
        assert state.changes()[:1] == expected
        state.restore()
    assert (calls, model.number) == (0, 1)


def test_objects_of_python_and_of_libraries_are_not_read():
    import logging

    model = types.SimpleNamespace(log=logging.getLogger("fmapper.test"), array=np.zeros(2))
    state = read(model)
    model.log.level = 10
    try:
        assert state.changes() == []
        assert [*state.arrays] == ["array"]
    finally:
        model.log.level = 0
