"""Finds the meaning of a missing mask for a submodule: all positions, or the previous ones."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

from fmapper import fleaves
from fmapper_adapters.torch.record.patches.restore import restore_after


def find_meanings(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """Returns path of a submodule -> name of a mask that may be None -> `ones` or `causal`.

    The submodules are called with None and with each of these masks, and with the other arguments
    from a call with the examples. If the result with None differs from both, or equals both, the
    mask is left out. Buffers, modes and the state of random numbers are restored.
    """
    calls: dict[str, tuple[torch.nn.Module, Any]] = {}
    handles = []
    for path, part in module.named_modules():
        if path and any(map(_is_mask, inspect.signature(part.forward).parameters)):

            def note(part: torch.nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                with contextlib.suppress(Exception):
                    calls.setdefault(path, (part, copy.deepcopy((args, kwargs))))

            handles.append(part.register_forward_pre_hook(note, with_kwargs=True))
    meanings: dict[str, dict[str, str]] = {}
    if not handles:
        return meanings
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.no_grad(), restore_after(module), torch.random.fork_rng(devices=[]):
            with contextlib.suppress(Exception):
                module(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
            for handle in handles:
                handle.remove()
            by_kind: dict[Any, dict[str, str]] = {}
            for path, (part, given) in calls.items():
                key = (re.sub(r"\d+", "#", path), type(part), _settings(part))
                if key not in by_kind:
                    by_kind[key] = _meanings(part, *given)
                meanings[path] = by_kind[key]
    finally:
        for handle in handles:
            handle.remove()
        for part, training in modes:
            part.training = training
    return meanings


def _is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")


def _settings(part: torch.nn.Module) -> frozenset[tuple[str, str, Any]]:
    """Returns the plain attributes of a submodule and its submodules, except numbers."""
    return frozenset(
        (path, key, value)
        for path, inner in part.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, bool | int | float | str | None) and not key.endswith("idx")
    )


def _meanings(part: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, str]:
    meanings = {}
    for name in filter(_is_mask, inspect.signature(part.forward).parameters):
        try:
            none = _call(part, args, kwargs, name, None)
            every = _call(part, args, kwargs, name, torch.ones(1, 1, 1, 1, dtype=torch.bool))
        except Exception:  # the user's code may raise anything
            continue
        length = max((output.shape[1] for output in none if output.ndim == 3), default=0)
        causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        before: list[torch.Tensor] = []
        with contextlib.suppress(Exception):
            before = _call(part, args, kwargs, name, causal)
        sees_all, sees_before = _is_same(none, every), _is_same(none, before)
        if sees_all != sees_before:
            meanings[name] = "ones" if sees_all else "causal"
    return meanings


def _call(
    part: torch.nn.Module, args: Any, kwargs: Any, name: str, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    args, kwargs = copy.deepcopy((args, kwargs))
    bound = inspect.signature(part.forward).bind(*args, **kwargs)
    device = next((leaf.device for leaf in fleaves(args) if isinstance(leaf, torch.Tensor)), None)
    bound.arguments[name] = mask if mask is None else mask.to(device)
    given = part.forward(*bound.args, **bound.kwargs)
    return [leaf for leaf in fleaves(given) if isinstance(leaf, torch.Tensor)]


def _is_same(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(outputs) == len(others) > 0 and all(
        output.shape == other.shape
        and torch.allclose(output.float(), other.float(), rtol=1e-4, atol=1e-6)
        for output, other in zip(outputs, others, strict=True)
    )
