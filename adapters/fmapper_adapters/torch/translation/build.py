"""A model made of the source code that was written for it."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from typing import Any

import torch

from fmapper import to_torch
from fmapper.programs import Program
from fmapper.translation import Source, whole_arrays

_numbers = itertools.count(1)


def build(program: Program, source: Source) -> Any:
    """Returns the module that a file makes, with the arrays of its program.

    The file is a module of Python's from then on, so that its classes are found by name, and its
    lines are shown in tracebacks.
    """
    name = f"fmapper_translated.{source.name}_{next(_numbers)}"
    file = f"<{name}>"
    linecache.cache[file] = (len(source.code), None, source.code.splitlines(keepends=True), file)
    module = types.ModuleType(name, f"The source of {source.name}.")
    module.__dict__["__fmapper_source__"] = source
    sys.modules[name] = module
    exec(compile(source.code, file, "exec"), module.__dict__)
    model: Any = module.__dict__[source.name]()
    module.__dict__["load_weights"](model, whole_arrays(program, to_torch, torch.stack))
    model.train(program.starts_in_training)
    return model
