"""Adapters of frameworks that have classes to take apart, and no arrays of their own."""

import pytest

import fmapper
from fmapper import fmap, fmap_with_path, get_path, state
from fmapper.backends import Arrays, BoxKey, Nodes, NodeType, discovery


class Cell:
    """What the framework has: a box around one value."""

    def __init__(self, content, label):
        self.content, self.label = content, label


class CellAdapter(Nodes):
    name = "cells"
    framework = "cells"

    def node_type(self, cls):
        if not issubclass(cls, Cell):
            return None
        return NodeType(
            lambda cell: {BoxKey("content"): cell.content},
            lambda cell, new: type(cell)(new["content"], cell.label),
        )


@pytest.fixture
def adapter():
    yield fmapper.backends.register_adapter(CellAdapter())
    fmapper.backends.unregister_adapter("cells")


def test_its_classes_are_nodes(adapter):
    cell = Cell([1, 2], "mine")
    new = fmap(lambda x: 10 * x, {"a": cell, "b": cell})
    assert new["a"] is new["b"]
    assert (new["a"].content, new["a"].label) == ([10, 20], "mine")


def test_the_key_of_a_box_is_in_paths_and_not_in_names(adapter):
    np = pytest.importorskip("numpy")
    w = np.ones(2)
    tree = {"layer": Cell({"w": w}, "a"), "b": [Cell(w, "b")]}
    assert list(state(tree)) == ["layer.w", "b.0"]
    assert get_path(tree, "b[0].content") is w
    paths = []
    fmap_with_path(lambda path, _: paths.append(str(path)), tree, cache=None)
    assert paths == ["layer.content.w", "b[0].content"]
    filled = fmapper.load_state(tree, {"layer.w": w + 1, "b.0": w + 1})
    assert filled["b"][0].content.tolist() == [2, 2]
    assert filled["b"][0].content is filled["layer"].content["w"]


def test_it_is_no_backend(adapter):
    assert not [device for device in fmapper.devices() if device.backend == "cells"]
    with pytest.raises(fmapper.DeviceError, match="is not a device"):
        fmapper.to_device("cells:cpu")
    assert not isinstance(adapter, Arrays)
    with pytest.raises(fmapper.BackendUnavailableError, match="cells has no arrays of its own"):
        discovery.get_adapter("cells", Arrays)


def test_a_node_type_takes_no_option_that_nobody_asks_for() -> None:
    with pytest.raises(TypeError, match=r"no option 'carred'; .* carried"):
        NodeType(dict, lambda node, new: new, carred=None)  # type: ignore[call-arg]
