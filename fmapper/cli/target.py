"""`FILE:NAME` and `MODULE:NAME` on the command line: runs Python and returns an object from it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from fmapper.errors import TargetError

_SUFFIX = ".py"


def load_target(target: str) -> Any:
    """Returns the object that `FILE:NAME` or `MODULE:NAME` names.

    The file is run as a module named after it, with its folder on `sys.path`, so that it can import
    its neighbours; `if __name__ == "__main__"` is false in it. A file is run only once.

    Args:
        target: A path to a Python file, or the dotted name of a module, which is imported with the
            current folder on `sys.path`; a colon; and a name in it, dotted for attributes.

    Raises:
        TargetError: The file or the name does not exist, or the file does not run.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file or not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{target!r} is not FILE:NAME. Write, for example, model.py:model.")
    is_module = all(map(str.isidentifier, file.split("."))) and not Path(file).exists()
    holder: Any = _import(file) if is_module and not file.endswith(_SUFFIX) else _run(file)
    for part in name.split("."):
        try:
            holder = getattr(holder, part)
        except AttributeError:
            raise TargetError(f"{target}: {_no_such_name(holder, part, file)}") from None
    return holder


def load_model(target: str) -> Any:
    """Returns the model that `FILE:NAME` names, or that the named class or factory creates.

    A class, or a function that needs no arguments, is called; a function that needs arguments is
    itself the model.

    Raises:
        TargetError: The model cannot be loaded, or its creation failed.
    """
    loaded = load_target(target)
    if not isinstance(loaded, type) and not inspect.isroutine(loaded):
        return loaded
    needed = _required_parameters(loaded)
    if needed and not isinstance(loaded, type):
        return loaded
    if needed:
        raise TargetError(
            f"{target} is a class that needs {', '.join(needed)}. Name an instance, or a function "
            f"without arguments that creates one."
        )
    try:
        return loaded()
    except Exception as error:  # anything that the user's code raises
        raise TargetError(f"{target}: creating the model failed: {_short(error)}") from error


def inputs_of(text: str, seed: int = 0) -> Any:
    """Returns inputs from `FILE:INPUTS` or `MODULE:INPUTS`, or from an expression.

    Args:
        text: The place of the inputs, or an expression.
        seed: The seed of the random numbers of an expression.

    Raises:
        TargetError: The text is invalid.
    """
    from fmapper.profiles.example_inputs import read_inputs

    file, _, name = text.rpartition(":")
    is_place = file.endswith(_SUFFIX) or all(map(str.isidentifier, file.split(".")))
    if is_place and name.replace(".", "_").isidentifier():
        return load_target(text)
    return read_inputs(text, seed=seed)


def _import(name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:  # anything that the user's code raises
        raise TargetError(f"the module {name} cannot be imported: {_short(error)}") from error


def _run(file: str) -> Any:
    path = Path(file).resolve()
    if not path.is_file():
        raise TargetError(f"there is no file {file}.")
    if path.suffix != _SUFFIX:
        raise TargetError(f"{file} is not a Python file: its name does not end in {_SUFFIX}.")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    # A file called torch.py must not become the module torch.
    name = path.stem if path.stem not in sys.modules else f"_fmapper_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TargetError(f"{file} does not run: {_short(error, path)}") from error
    return module


def _required_parameters(function: Any) -> list[str]:
    """Returns the parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # implemented in C, for example a ufunc
        return ["its arguments"]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _no_such_name(holder: Any, name: str, file: str) -> str:
    public = (
        sorted(attribute for attribute in vars(holder) if not attribute.startswith("_"))
        if (hasattr(holder, "__dict__"))
        else []
    )
    where = file if inspect.ismodule(holder) else type(holder).__name__
    examples = ", ".join(public[:20])
    return f"there is no {name} in {where}." + (f" There is {examples}." if examples else "")


def _short(error: BaseException, path: Path | None = None) -> str:
    """Returns the class and text of an error, and the line of the user's file that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    return f"{text} (line {lines[-1]})" if lines else text
