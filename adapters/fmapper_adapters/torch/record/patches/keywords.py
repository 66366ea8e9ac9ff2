"""Spells out `**kwargs` of forward as parameters, which torch.export would lose."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch


@contextlib.contextmanager
def name_keywords(
    module: torch.nn.Module, kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> Iterator[Any]:
    """Adds keyword arguments to the signature of `forward`.

    If sizes may vary, torch.export looks for keywords both by their names and under the name of
    `**kwargs`, and finds that the two differ.

    Args:
        module: The module; its forward is restored afterwards.
        kwargs: The example inputs by keyword.
        dynamic_shapes: The sizes that may vary, by keyword or under the name of `**kwargs`.

    Yields:
        The sizes that may vary, with all keywords by name.
    """
    forward = module.forward
    signature = inspect.signature(forward)
    parameters = [*signature.parameters.values()]
    rest = parameters[-1].name if parameters and parameters[-1].kind == _REST else None
    extra = [name for name in kwargs if name == rest or name not in signature.parameters]
    if rest is None or not extra or dynamic_shapes is None:
        yield dynamic_shapes
        return
    if isinstance(dynamic_shapes, dict) and rest not in extra:
        inner = dynamic_shapes.get(rest) or {}
        dynamic_shapes = {n: s for n, s in dynamic_shapes.items() if n != rest} | inner

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters[:-1], *added]
    )
    before = vars(module).get("forward")
    try:
        module.forward = call
        yield dynamic_shapes
    finally:
        if before is None:
            vars(module).pop("forward", None)
        else:
            module.forward = before


_REST = inspect.Parameter.VAR_KEYWORD
