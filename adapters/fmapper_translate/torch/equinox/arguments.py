"""The arguments of the constructors of models of Equinox."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from fmapper_translate.constructors.arguments import Modules
from fmapper_translate.torch.nnx.arguments import same_settings
from fmapper_translate.torch.tables import is_library_module

_MODES = frozenset({"inference"})


def _make(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    takes_key = "key" in inspect.signature(cls).parameters
    return cls(*args, **kwargs, **({"key": jax.random.key(0)} if takes_key else {}))


def _is_alike(twin: Any, model: Any) -> bool:
    shapes = [[x.shape for x in jax.tree.leaves(tree) if eqx.is_array(x)] for tree in (twin, model)]
    ours, theirs = [*_modules(twin)], [*_modules(model)]
    return (
        shapes[0] == shapes[1]
        and len(ours) == len(theirs)
        and all(map(same_settings, ours, theirs, [_MODES] * len(ours)))
    )


def _modules(tree: Any) -> Iterator[eqx.Module]:
    """Yields the modules in a module, or a container, by the names of its fields or keys."""
    if isinstance(tree, eqx.Module):
        yield tree
        tree = vars(tree)
    if isinstance(tree, dict):
        tree = [tree[name] for name in sorted(tree, key=str)]
    for part in tree if isinstance(tree, list | tuple) else ():
        yield from _modules(part)


EQUINOX = Modules(
    lambda value: isinstance(value, eqx.Module), is_library_module, _make, _is_alike,
    frozenset({"key"}),
)  # fmt: skip
