"""Tracebacks show the frames of the user and the function that was called, or all of them."""

import traceback
from pathlib import Path

import pytest

import fmapper
from fmapper.tracebacks import frameworks

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(fmapper.settings, "full_tracebacks", False)


class Undeclared:
    def __init__(self):
        self.w = np.ones(2)


def frames(call):
    """The functions in the traceback of what a call raises, below this one, and the error."""
    try:
        call()
    except Exception as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:], error
    raise AssertionError("nothing was raised")


def test_an_error_of_fmapper_shows_the_function_that_was_called_and_nothing_below():
    def move():
        fmapper.to_numpy({"a": Undeclared()})

    def walk():
        fmapper.fmap(fmapper.to_numpy, {"a": Undeclared()})

    def place():
        fmapper.place({"a": np.ones(2)}, {"b": "cpu"})

    def states():
        fmapper.load_state({"a": np.ones(2)}, {})

    assert frames(move)[0] == ["move", "__call__"]
    assert frames(walk)[0] == ["walk", "fmap"]
    assert frames(place)[0] == ["place", "place"]
    assert frames(states)[0] == ["states", "load_state"]


def test_an_error_whose_cause_has_no_frame_of_the_user():
    """A target that is misspelt: what it comes from was raised and caught within fmapper."""
    with pytest.raises(fmapper.BackendUnavailableError, match="'jaxx' is not a target"):
        fmapper.convert(abs, "jaxx", (np.ones(2),))


def test_functions_that_call_back_show_the_frames_of_the_user_in_between():
    def inner(x):
        return fmapper.to_numpy(Undeclared())

    def outer():
        fmapper.fmap(inner, [1])

    assert frames(outer)[0] == ["outer", "fmap", "inner", "__call__"]


def test_an_error_of_the_users_function_shows_where_it_was_raised():
    def inverse(x):
        return 1 / x

    def walk():
        fmapper.fmap(inverse, [1, 0])

    names, error = frames(walk)
    assert names == ["walk", "fmap", "inverse"]
    assert error.__notes__ == ["at model[1]"]


def test_an_error_inside_of_fmapper_that_is_not_its_own_shows_where_it_was_raised():
    def move():
        fmapper.to_numpy({}, devise=1)

    assert frames(move)[0] == ["move", "__call__", "_with"]


def test_a_switch_shows_all_frames(monkeypatch):
    monkeypatch.setattr(fmapper.settings, "full_tracebacks", True)

    def move():
        fmapper.to_numpy({"a": Undeclared()})

    assert len(frames(move)[0]) > 4


def test_what_was_caught_before_stays_as_it_is():
    def fails():
        return np.reshape(np.ones(3), (2, 2))

    def handles():
        try:
            fails()
        except ValueError:
            fmapper.to_numpy(Undeclared())

    _, error = frames(handles)
    names = [frame.name for frame in traceback.extract_tb(error.__context__.__traceback__)]
    assert names[:2] == ["handles", "fails"]
    assert len(names) > 2, "a frame of NumPy"


def test_frames_of_frameworks_are_internal_to_a_conversion():
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")

    class Branches(torch.nn.Module):
        def forward(self, x):
            return x.numpy().tolist() if x.sum() > 0 else x

    def convert():
        fmapper.convert(Branches(), "jax", (torch.ones(2),))

    names, error = frames(convert)
    assert names == ["convert", "convert"]
    assert "torch" in frameworks
    assert error.__cause__ is None, "its message says what torch said"
    assert len("".join(traceback.format_exception(error)).splitlines()) < 40


@pytest.mark.parametrize("target", ["jax", "flax"])
def test_a_call_of_a_converted_model_shows_no_frames_of_fmapper_below(target):
    torch = pytest.importorskip("torch")
    for framework in ("jax", "flax"):
        pytest.importorskip(framework)
    model = fmapper.convert(torch.nn.Linear(2, 3), target, (torch.ones(4, 2),))

    def call():
        model(np.ones((5, 5), np.float32))

    names, error = frames(call)
    assert names == ["call", "__call__"]
    assert isinstance(error, fmapper.ProgramInputError)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "value_and_grad"])
def test_functions_that_are_transformed_have_short_tracebacks(transform):
    torch = pytest.importorskip("torch")

    def bad(x):
        return x.nothing_of_this_name

    def call():
        getattr(fmapper, transform)(bad)(torch.ones(2))

    names, error = frames(call)
    assert names[0] == "call"
    assert names[-1] == "bad"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = Path(fmapper.__file__).parent  # not the clone, which may have that name, too
    assert len([file for file in files if Path(file).is_relative_to(ours)]) == 1, files
