"""Modules under the names that pickles of version 0.1 have for them.

Without the base classes of `importlib.abc`, whose import would cost a quarter of fmapper's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RENAMES = {
    "fmapper._accelerator": "fmapper.profiles.accelerator",
    "fmapper._counts": "fmapper.backends.compute",
    "fmapper._device": "fmapper.backends.device",
    "fmapper._errors": "fmapper.errors",
    "fmapper._inventory": "fmapper.states.inventory",
    "fmapper._place": "fmapper.moves.place",
    "fmapper._plan": "fmapper.moves.plan",
    "fmapper._profile_result": "fmapper.profiles.result",
    "fmapper._program": "fmapper.programs.program",
    "fmapper._summary": "fmapper.states.summary",
    "fmapper._timing": "fmapper.profiles.timing",
    "fmapper._trainable": "fmapper.transforms.trainable",
    "fmapper._trees": "fmapper.programs.treespec",
    "fmapper._verify": "fmapper.programs.verify",
    "fmapper_adapters.flax._linen_model": "fmapper_adapters.flax.linen_model",
    "fmapper_adapters.flax._model": "fmapper_adapters.flax.flax_model",
    "fmapper_adapters.flax._programs": "fmapper_adapters.flax.programs",
    "fmapper_adapters.jax._model": "fmapper_adapters.jax.model.jax_model",
    "fmapper_adapters.torch._code": "fmapper_adapters.torch.model.compiled",
    "fmapper_adapters.torch._converted": "fmapper_adapters.torch.model.torch_model",
}

# Functions that pickles call by another name than they have now.
FUNCTIONS = {
    "fmapper.errors._copied": "_copy",
    "fmapper.programs.treespec._made": "_make_record",
    "fmapper_adapters.jax.model.jax_model._unpickled": "_unpickle",
}


class _Alias:
    """Makes a module whose names are those of another one."""

    def __init__(self, place: str) -> None:
        self._place = place

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None: the import system creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module with names from their new homes."""
        module.__getattr__ = self._look_up  # type: ignore[method-assign]

    def _look_up(self, name: str) -> Any:
        name = FUNCTIONS.get(f"{self._place}.{name}", name)
        return getattr(import_module(self._place), name)


class Finder:
    """Finds renamed modules; it comes last, so that no other import pays for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of an alias, or None for any other module."""
        place = RENAMES.get(name)
        alias: Any = None if place is None else _Alias(place)
        return alias and ModuleSpec(name, alias)


def install() -> None:
    """Installs the import hook for renamed modules; once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
