"""Arrays that a library ties when a model is complete."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from fmapper_translate.libraries import infrastructure as library

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions


def tie_arrays(expressions: Expressions, call: ast.Call) -> Iterator[str]:
    """Prints the sharing of arrays between parts of a module, as its `post_init` has tied them."""
    assert isinstance(call.func, ast.Attribute)
    owner = expressions.values(call.func.value)[-1]
    models = [f"{path}." for path, part in owner.named_modules() if path and library.ties(part)]
    first: dict[int, str] = {}
    for name, array in owner.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(array), name)
        has_tied = any(name.startswith(path) and other.startswith(path) for path in models)
        if name != other and not has_tied:  # which a model within has
            yield from _share(expressions, owner, name, other)


def _share(expressions: Expressions, owner: nn.Module, name: str, other: str) -> Iterator[str]:
    (path, _, key), (source, _, source_key) = name.rpartition("."), other.rpartition(".")
    target, origin = owner.get_submodule(path), owner.get_submodule(source)
    if target is origin:
        return
    kinds = [expressions.file.layers.base_of(type(item)) for item in (target, origin)]
    variables = [
        layer.variable(item) if layer is not None else (item, None)
        for layer, item in zip(kinds, (key, source_key), strict=True)
    ]
    is_tree = expressions.file.target.is_tree
    if not is_tree and variables[0][1] == variables[1][1]:
        yield f"{_place(path)}.{variables[0][0]} = {_place(source)}.{variables[1][0]}"
    elif isinstance(target, nn.Linear) and isinstance(origin, nn.Embedding):
        if target.bias is None and "." not in path:
            expressions.file.tie(target, expressions.function, _place(source))
            return
        if is_tree:
            return  # both have it
        expressions.file.tie(target)
        yield f"tie({_place(path)}, {_place(source)})"


def _place(path: str) -> str:
    """Returns the code for a part of a module: `self.blocks[0].norm`."""
    steps = path.split(".") if path else []
    return "self" + "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in steps)
