"""What the tests of files for torch share: a model's file, run, with the model's arrays."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import fmapper
from fmapper.translation import whole_arrays
from fmapper.translation.source import translate

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")


def normal(*shape: int, seed: int = 0) -> Any:
    """Returns random numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def initialised(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns a module of Linen with variables of which none are zeros."""
    variables = module.init(jax.random.key(0), *args, **kwargs)
    noise = jax.random.key(5)
    return module, jax.tree.map(lambda x: x + jax.random.normal(noise, x.shape) * 0.2, variables)


def run(model: Any, *args: Any) -> Any:
    """Returns what a model gives; one of Linen comes with its variables."""
    return model[0].apply(model[1], *args) if isinstance(model, tuple) else model(*args)


def written(model: Any, *args: Any, shapes: Any = "auto") -> tuple[Any, Any, Any]:
    """Translates a model to torch.

    Returns:
        The source, the module that its file makes, with the arrays of the model, and the program.
    """
    source, program, _ = translate(model, "torch", args, {}, shapes)
    module = types.ModuleType("written")
    sys.modules["written"] = module
    exec(compile(source.code, "written.py", "exec"), module.__dict__)
    net = getattr(module, source.name)()
    module.load_weights(net, whole_arrays(program, fmapper.to_torch, torch.stack))
    return source, net, program


def written_code(function: Any, *args: Any, shapes: Any = None) -> tuple[str, Any]:
    """Returns the code of a file for a function, and the module that it makes."""
    source, net, _ = written(function, *args, shapes=shapes)
    return source.code, net
