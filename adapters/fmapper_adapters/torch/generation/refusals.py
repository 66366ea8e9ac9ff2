"""Refuses models that would generate other tokens with a cache of fixed size."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch._private import pytree


def prefill(own: Any, tokens: Any, mask: Any, max_length: int | None) -> tuple[Any, Any]:
    """Returns the logits and the cache of a prompt, of a model with which a step can go on.

    Args:
        own: A module with `prefill` and `step`.
        tokens: Prompts of shape (batch, columns).
        mask: Their mask.
        max_length: The places of the cache; None for a user's module, whose cache is its own.

    Raises:
        ConversionError: It has fewer positions, reads places which no token has taken, or keeps
            something outside of its cache.
    """
    before = _Attributes(own)
    logits, cache = own.prefill(tokens, mask)
    after = _Attributes(own)
    if changed := after.other_than(before):
        try:
            _refuse_state_outside(own, (tokens, mask), (logits, cache), changed)
        except ConversionError:
            before.restore(own)
            raise
        before.restore(own, numbers=False)  # a flag may go with parameters that changed, as in RWKV
    if max_length is not None and isinstance(cache, dict) and "length" in cache:
        _refuse_too_long(own, logits, cache, max_length)
        _refuse_without_mask(own, logits, cache)
    return logits, cache


_Place = tuple[torch.nn.Module, str]


class _Attributes:
    """The values of a module beside parameters, buffers and modules; containers are copied.

    Attributes:
        values: The value at each place.
        leaves: Its tensors, each with a copy, and its other leaves.
    """

    def __init__(self, own: torch.nn.Module) -> None:
        of_any = vars(torch.nn.Module())
        self.values: dict[_Place, Any] = {}
        self.leaves: dict[_Place, list[Any]] = {}
        for module in own.modules():
            for name, value in vars(module).items():
                if name not in of_any:
                    leaves, spec = pytree.tree_flatten(value)
                    self.values[module, name] = pytree.tree_unflatten(leaves, spec)
                    self.leaves[module, name] = [
                        (one, one.clone()) if isinstance(one, torch.Tensor) else one
                        for one in leaves
                    ]

    def other_than(self, old: _Attributes) -> list[_Place]:
        """Returns the places whose tensors or numbers differ."""
        return [
            place
            for place, leaves in self.leaves.items()
            if _differ(leaves, old.leaves.get(place, []))
        ]

    def restore(self, own: torch.nn.Module, *, numbers: bool = True) -> None:
        """Gives places that have other tensors, or other numbers, what they had."""
        now = _Attributes(own)
        for module, name in now.other_than(self):
            tensors = any(isinstance(one, tuple) for one in now.leaves[module, name])
            if not (numbers or tensors):
                continue
            if (module, name) not in self.values:
                delattr(module, name)
                continue
            setattr(module, name, self.values[module, name])
            for one in self.leaves[module, name]:
                if isinstance(one, tuple):
                    tensor, copy = one
                    tensor.copy_(copy)


def _differ(new: list[Any], old: list[Any]) -> bool:
    """Returns whether leaves differ; those that are neither tensors nor numbers do not."""
    if len(new) != len(old):
        return any(isinstance(one, tuple | int | float) for one in (*new, *old))
    for one, other in zip(new, old, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple):
            if one[0] is not other[0] or not torch.equal(one[1], other[1]):
                return True
        elif isinstance(one, tuple | int | float) and (
            type(one) is not type(other) or one != other
        ):
            return True
    return False


def _refuse_state_outside(
    own: torch.nn.Module, prompts: tuple[Any, Any], first: tuple[Any, Any], places: list[_Place]
) -> None:
    """Raises for a model whose step depends on what a prompt has left in its modules.

    Args:
        own: The model, after the prompts.
        prompts: The prompts and their mask.
        first: Their logits and cache.
        places: What they have changed in the model.

    Raises:
        ConversionError: After other prompts, a step with the same cache gives other logits.
    """
    logits, cache = first
    after = _Attributes(own)
    own_step: Any = own.step
    want = own_step(logits.argmax(-1), pytree.tree_map(_copy, cache))[0]
    _prefill_otherwise(own, *prompts)
    places = [place for place in places if place in _Attributes(own).other_than(after)]
    try:
        found = own_step(logits.argmax(-1), pytree.tree_map(_copy, cache))[0]
    except (IndexError, RuntimeError):
        found = None
    if places and (
        found is None or not torch.allclose(want, found, rtol=1e-3, atol=1e-4, equal_nan=True)
    ):
        module, name = places[0]
        path = next(path for path, one in own.named_modules() if one is module)
        where = f"{path}.{name}".removeprefix("model.").removeprefix(".")
        raise ConversionError(
            f"{type(getattr(own, 'model', own)).__name__} keeps {where} in the module "
            f"from token to token, where a program has no access. Wrap it in a module with prefill "
            f"and step that return it as part of the cache; see fmapper.generator."
        )


def _prefill_otherwise(own: Any, tokens: Any, mask: Any) -> None:
    """Runs other prompts of another width; of the same width where the model takes no other."""
    try:
        own.prefill(tokens[:, 1:] + 1, mask[:, 1:])
    except (IndexError, RuntimeError, TypeError, ValueError):
        own.prefill(tokens + 1, mask)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


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
