"""Refuses models that would generate other tokens with a cache of fixed size."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError


def prefill(own: Any, tokens: Any, mask: Any, max_length: int) -> tuple[Any, Any]:
    """Returns the logits and the cache of a prompt, of a model with which a step can go on.

    Raises:
        ConversionError: It has fewer positions, reads places which no token has taken, or keeps
            something outside of its cache.
    """
    before = _attributes(own)
    logits, cache = own.prefill(tokens, mask)
    _refuse_state_outside(own, logits, cache, before)
    if isinstance(cache, dict) and "length" in cache:
        _refuse_too_long(own, logits, cache, max_length)
        _refuse_without_mask(own, logits, cache)
    return logits, cache


_Place = tuple[torch.nn.Module, str]


def _attributes(own: torch.nn.Module) -> dict[_Place, Any]:
    """Returns the tensors that modules hold beside parameters and buffers, and what is None."""
    return {
        (module, name): value
        for module in own.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, torch.Tensor)
    }


def _refuse_state_outside(
    own: torch.nn.Module, logits: Any, cache: Any, before: dict[_Place, Any]
) -> None:
    """Raises for a model whose step depends on what a prompt has left in its modules.

    Raises:
        ConversionError: It does; says where.
    """
    after = {
        place: value
        for place, value in _attributes(own).items()
        if isinstance(value, torch.Tensor) and before.get(place) is not value
    }
    if not after:
        return
    step: Any = own.step
    results = []
    try:
        for change in (torch.clone, _other_numbers):
            for (module, name), value in after.items():
                setattr(module, name, change(value))
            results.append(step(logits.argmax(-1), cache)[0])
    finally:
        for module, name in after:
            if (module, name) in before:
                setattr(module, name, before[module, name])
            else:
                delattr(module, name)
    if not torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-4, equal_nan=True):
        (module, name), *_ = after
        path = next(path for path, one in own.named_modules() if one is module)
        raise ConversionError(
            f"{type(own.model).__name__} keeps {path.removeprefix('model.')}.{name} in the module "
            f"from token to token, where a program has no access. Wrap it in a module with prefill "
            f"and step that return it as part of the cache; see fmapper.generator."
        )


def _other_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor if tensor.dtype is torch.bool else tensor + 1


def _refuse_too_long(own: Any, logits: Any, cache: Any, max_length: int) -> None:
    """Raises for a cache with more places than the model has positions.

    Raises:
        ConversionError: The model has no such position; or it takes no cache of a fixed size.
    """
    full = torch.full((), max_length - 1, dtype=torch.int64)
    last = {"length": full}
    if "position" in cache:
        last["position"] = torch.full_like(cache["position"], max_length - 1)
    error = _error_of_step(own, logits, {**cache, **last})
    if error is None:
        return
    name, why = type(own.model).__name__, str(error).splitlines()[0]
    if _error_of_step(own, logits, cache) is None:
        raise ConversionError(
            f"{name}: max_length={max_length} exceeds the positions of the model ({why}). Create "
            f"the generator with a smaller max_length."
        ) from error
    raise ConversionError(
        f"{name} cannot compute a token with a cache of fixed size: {type(error).__name__}: {why}. "
        f"Wrap it in a module with prefill and step; see fmapper.generator."
    ) from error


def _refuse_without_mask(own: Any, logits: Any, cache: Any) -> None:
    """Raises for a model that reads places of the cache which no token has taken.

    Raises:
        ConversionError: Its logits depend on them.
    """
    length = int(cache["length"])
    other = {name: _fill_from(length, name, state) for name, state in cache.items()}
    tokens = logits.argmax(-1)
    want, found = own.step(tokens, cache)[0], own.step(tokens, other)[0]
    if not torch.allclose(want, found, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ConversionError(
            f"{type(own.model).__name__} applies no mask to its cache in a step: in a cache of "
            f"fixed size it would attend to places that no token has taken yet. Wrap it in a "
            f"module with prefill and step; see fmapper.generator."
        )


def _fill_from(length: int, name: str, state: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values of a cache with other numbers in the places that are not taken."""
    where, _, kind = name.rpartition(".")
    if kind not in ("keys", "values") or not where.isdigit():
        return state
    found = state.clone()
    found[..., length:, :] = 3.0
    return found


def _error_of_step(own: Any, logits: Any, cache: Any) -> Exception | None:
    try:
        own.step(logits.argmax(-1), cache)
    except (IndexError, RuntimeError) as error:
        return error
    return None
