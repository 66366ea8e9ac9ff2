"""Errors survive copies and pickles as they are, and so do the objects that are one of a kind."""

import copy
import pickle

import pytest

import fmapper

ERRORS = [
    cls
    for cls in map(fmapper.__getattribute__, fmapper.__all__)
    if isinstance(cls, type) and issubclass(cls, Exception)
]
WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "protocol 0": lambda x: pickle.loads(pickle.dumps(x, 0)),
}


class OfOnesOwn(fmapper.MoveError):
    def __init__(self, device, size):
        super().__init__(f"no {size} bytes on {device}")
        self.size = size


def error_of(cls):
    if cls is fmapper.BatchError:
        return cls(3)
    if cls is fmapper.UnsupportedOpsError:
        return cls("no such operation", {"aten::x": ["head"]})
    return OfOnesOwn("cuda", 3) if cls is OfOnesOwn else cls("model.w: a message")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("cls", [*ERRORS, OfOnesOwn])
def test_a_copy_of_an_error_is_that_error(cls, way):
    error = error_of(cls)
    error.add_note("at model.w")
    if issubclass(cls, fmapper.FmapperError):
        error.placed = True
        error.args = (f"model.w: {error.args[0]}", *error.args[1:])  # as a walk adds the path
    new = way(way(error))
    assert type(new) is cls
    assert str(new) == str(error)
    assert new.args == error.args
    assert vars(new) == vars(error)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_keep_and_placements_are_themselves_again(way):
    np = pytest.importorskip("numpy")
    assert way(fmapper.keep) is fmapper.keep
    assert way({"head": fmapper.keep})["head"] is fmapper.keep
    placement = fmapper.Placement({"head": fmapper.keep, dict: "float32"}, strict=False)
    new = way(placement)
    assert new == placement
    assert hash(new) == hash(placement)
    assert repr(new) == repr(placement)
    assert new != fmapper.Placement({"head": fmapper.keep, dict: "float32"})
    model = {"head": np.ones(1), "body": [np.ones(1)]}
    moved = new(model)
    assert moved["head"] is model["head"]
    assert moved["body"][0].dtype == np.float32
    assert way(fmapper.no_gradient) is fmapper.no_gradient
    assert way(fmapper.to_cpu(dtype="float16")) == fmapper.to_cpu(dtype="float16")
