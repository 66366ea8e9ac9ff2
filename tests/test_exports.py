"""The public surface is exactly `__all__`, and says that it is fmapper's."""

import subprocess
import sys
import types
import warnings

import fmapper


def public_names():
    found = {**vars(fmapper), **{name: getattr(fmapper, name) for name in fmapper._LATE}}
    return {
        name
        for name, value in found.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    } - {"TYPE_CHECKING"}


def test_all_is_the_public_surface_sorted():
    assert set(fmapper.__all__) == public_names()
    assert len(fmapper.__all__) == len(set(fmapper.__all__))


def test_what_is_imported_late_is_there_like_the_rest():
    """In an interpreter of its own: here another test may have asked for it."""
    script = """
import sys, fmapper
assert "fmapper.moves.plan" not in sys.modules and "fmapper.moves.loader" not in sys.modules
assert {"plan", "DeviceLoader"} <= set(dir(fmapper))
from fmapper import DeviceLoader, plan
assert plan is fmapper.plan and plan.__module__ == DeviceLoader.__module__ == "fmapper"
try:
    fmapper.nothing_of_this_name
except AttributeError as error:
    assert "nothing_of_this_name" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_modules_are_imported_when_they_are_asked_for():
    script = """
import sys, fmapper
assert not {"fmapper.nn", "fmapper.random"} & set(sys.modules)
assert {"nn", "random"} <= set(dir(fmapper))
assert fmapper.nn.functional.relu and fmapper.random.key
import fmapper.nn.functional as F
from fmapper import nn, random
assert F is nn.functional and random is fmapper.random
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_public_names_report_the_public_module():
    for name in fmapper.__all__:
        assert getattr(fmapper, name).__module__.partition(".")[0] == "fmapper"
        if hasattr(getattr(fmapper, name), "__qualname__"):
            assert getattr(fmapper, name).__module__ == "fmapper", name


def test_every_public_name_is_documented():
    undocumented = [name for name in fmapper.__all__ if not getattr(fmapper, name).__doc__]
    assert undocumented == []


def test_every_error_derives_from_the_base_and_from_a_builtin_that_callers_expect():
    errors = [
        value
        for value in (getattr(fmapper, name) for name in fmapper.__all__)
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    expected = (TypeError, ValueError, RuntimeError, KeyError, ImportError, UserWarning)
    for error in errors:
        if error not in (fmapper.FmapperError, fmapper.FmapperWarning):
            assert issubclass(error, fmapper.FmapperError | fmapper.FmapperWarning)
            assert issubclass(error, expected)


def test_warnings_can_be_filtered_by_their_base():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fmapper.FmapperWarning)
        for kind in (fmapper.TieWarning, fmapper.PrecisionWarning, fmapper.NoGPUWarning):
            assert issubclass(kind, fmapper.FmapperWarning)
