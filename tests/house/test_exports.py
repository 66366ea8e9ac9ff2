"""The public surface is exactly `__all__`, and says that it is fmapper's."""

import importlib
import subprocess
import sys
import types
import typing
import warnings
from pathlib import Path

import pytest

import fmapper

FACES = (
    fmapper,
    fmapper.backends,
    fmapper.checkpoints,
    fmapper.generation,
    fmapper.meshes,
    fmapper.programs,
)


def public_names(face):
    found = {name: getattr(face, name) for names in face._PLACES.values() for name in names.split()}
    if face is fmapper:  # beside parts of results, which earlier tests may have asked for
        found |= {name: value for name, value in vars(fmapper).items() if name not in _parts()}
    return {
        name
        for name, value in found.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    } - {"TYPE_CHECKING"}


def _parts():
    return {name for names in fmapper._PARTS.values() for name in names.split()}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_all_is_the_public_surface_sorted(face):
    assert set(face.__all__) == public_names(face)
    assert len(face.__all__) == len(set(face.__all__))


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_name_says_which_face_it_is_imported_from(face):
    for name in face.__all__:
        value = getattr(face, name)
        assert value.__doc__ or typing.get_origin(value) is typing.Literal, name
        if hasattr(value, "__qualname__"):
            assert value.__module__ == face.__name__, name


def test_no_public_name_is_that_of_a_file_beside_it():
    # Once such a file is imported its package has the module under that name, and no function.
    for folder in (Path(fmapper.__file__).parent, *Path(fmapper.__file__).parent.glob("*/")):
        name = "fmapper" if folder.name == "fmapper" else f"fmapper.{folder.name}"
        if not (folder / "__init__.py").exists():
            continue
        package = importlib.import_module(name)
        files = {path.stem for path in folder.glob("*.py")} | {
            path.name for path in folder.iterdir() if path.is_dir()
        }
        places = getattr(package, "_PLACES", {})
        public = {one for names in places.values() for one in names.split()}
        assert not files & public, name


def test_names_that_have_moved_to_another_face_are_found_where_they_were():
    """Pickles of before say `fmapper` for every public class."""
    assert fmapper.programs.TreeSpec is fmapper.programs.TreeSpec
    assert fmapper.backends.NodeType is fmapper.backends.NodeType
    assert not {"TreeSpec", "NodeType"} & {*fmapper.__all__, *dir(fmapper)}


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


@pytest.mark.parametrize(
    ("face", "name", "meant"),
    [
        (fmapper, "from_pretrain", "from_pretrained"),
        (fmapper, "to_jaxx", "to_jax"),
        (fmapper, "functer", "functor"),
        (fmapper.checkpoints, "convert_chekpoint", "convert_checkpoint"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest(face, name, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Did you mean '{meant}'?"):
        getattr(face, name)


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


@pytest.mark.parametrize(
    "name", ["jax.JaxModel", "flax.FlaxModel", "flax.LinenModel", "torch.TorchModel"]
)
def test_converted_models_have_a_public_class(name):
    framework, name = name.split(".")
    pytest.importorskip(framework)
    package = importlib.import_module(f"fmapper_adapters.{framework}")
    cls = getattr(package, name)
    assert cls.__module__ == package.__name__
    assert name in package.__all__
    assert cls.__doc__
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = package.nothing_of_this_name
