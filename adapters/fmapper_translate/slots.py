"""Attributes that methods of a module share within a call: `self.mean = x.mean(1)`.

They do not outlive the call, so that they are not part of a model's state.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fmapper_translate.functions import Function
from fmapper_translate.printing.folding import is_constant
from fmapper_translate.recording import Recording


class Slots:
    """Attributes that calls give arrays, and that constructors do not make or begin as None.

    Args:
        recording: What the source did.
        model: The model.
        constructs: Returns whether a function runs only when a model is made.

    Attributes:
        are_kept: Whether a later call reads what one has left, as a table of a size; in a file each
            call of the model computes it.
    """

    def __init__(
        self, recording: Recording, model: nn.Module, constructs: Callable[[Function], bool]
    ) -> None:
        self._recording = recording
        self._constructs = constructs
        self.are_kept = False
        self._names = dict(self._find(model))

    def has(self, owner: object, name: str) -> bool:
        """Returns whether an attribute of an object is one."""
        return name in self._names.get(type(owner), ())

    def names(self, maker: type | None, maker_of: Callable[[type], type | None]) -> list[str]:
        """Returns those that the constructor of a class makes."""
        found = [names for cls, names in self._names.items() if maker_of(cls) is maker]
        return [*dict.fromkeys(name for names in found for name in names)]

    def _find(self, model: nn.Module) -> Iterator[tuple[type, list[str]]]:
        functions = self._recording.functions
        nodes = [(item, node) for item in functions for node in item.nodes]
        reads = {
            node.attr
            for _, node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
        made: set[tuple[type | None, str]] = set()
        nothing: set[tuple[type | None, str]] = set()
        given: dict[tuple[type | None, str], None] = {}
        for function, node in nodes:
            match node:
                case ast.Assign(targets, value):
                    values = [event.value for event in self._recording.events.get(value, ())]
                    for name, results in _attributes(targets, values):
                        if is_constant(value, None) and name not in reads:
                            continue  # it is for the caller
                        if self._constructs(function):
                            is_none = is_constant(value, None)
                            (nothing if is_none else made).add((function.owner, name))
                        elif any(isinstance(item, torch.Tensor) for item in results):
                            given[function.owner, name] = None
                case ast.Call(ast.Name("hasattr" | "getattr"), [_, ast.Constant(str(name)), *_]):
                    made.add((None, name))
        self.are_kept = bool(nothing & given.keys() - made)
        makers = {item.owner for item in functions if item.name == "__init__"}
        for cls in {type(part): None for part in model.modules()}:
            parts = [part for part in model.modules() if type(part) is cls]
            kept = {name for part in parts for name in (*part._buffers, *part._parameters)}
            kept |= {name for owner, name in made if owner is None or owner in cls.__mro__}
            kept |= vars(cls).keys()
            names = [name for owner, name in given if owner in cls.__mro__ and name not in kept]
            if names and makers & {*cls.__mro__}:
                yield cls, names


def _attributes(targets: list[ast.expr], values: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Returns the attributes of `self` that are given values, and these."""
    for target in targets:
        match target:
            case ast.Attribute(ast.Name("self"), name):
                yield name, values
            case ast.Tuple(parts):
                for at, part in enumerate(parts):
                    rows = [x for x in values if isinstance(x, tuple | list) and at < len(x)]
                    yield from _attributes([part], [x[at] for x in rows])
