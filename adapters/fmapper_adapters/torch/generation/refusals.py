"""Refuses models that would generate other tokens with a cache of fixed size."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch._private import pytree


def prefill(protocol: Any, tokens: Any, mask: Any, max_length: int | None) -> tuple[Any, Any]:
    """Returns the logits and the cache of a prompt, once it is clear that steps can use the cache.

    Args:
        protocol: A module with `prefill` and `step`.
        tokens: Prompts of shape (batch, columns).
        mask: Their mask.
        max_length: The slots of the cache; None for a user's module, which defines its cache
            itself.

    Raises:
        ConversionError: The model has fewer positions, reads slots without a token, or keeps state
            outside of its cache.
    """
    before = _Attributes(protocol)
    logits, cache = protocol.prefill(tokens, mask)
    after = _Attributes(protocol)
    if changed := after.other_than(before):
        try:
            _refuse_state_outside(protocol, (tokens, mask), (logits, cache), changed)
        except ConversionError:
            before.restore(protocol)
            raise
        # A flag may go with parameters that changed, as in RWKV.
        before.restore(protocol, numbers=False)
    if max_length is not None and isinstance(cache, dict) and "length" in cache:
        _refuse_too_long(protocol, logits, cache, max_length)
        _refuse_without_mask(protocol, logits, cache)
    return logits, cache


_Place = tuple[torch.nn.Module, str]


class _Attributes:
    """The attributes of modules other than parameters, buffers and modules; containers are copied.

    Attributes:
        values: Module and attribute name -> value.
        leaves: The tensors of each value, with copies, and its other leaves.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        of_any = vars(torch.nn.Module())
        self.values: dict[_Place, Any] = {}
        self.leaves: dict[_Place, list[Any]] = {}
        for module in root.modules():
            for name, value in vars(module).items():
                if name not in of_any:
                    leaves, spec = pytree.tree_flatten(value)
                    self.values[module, name] = pytree.tree_unflatten(leaves, spec)
                    self.leaves[module, name] = [
                        (leaf, leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf
                        for leaf in leaves
                    ]

    def other_than(self, old: _Attributes) -> list[_Place]:
        """Returns the attributes whose tensors or numbers differ."""
        return [
            place
            for place, leaves in self.leaves.items()
            if _differ(leaves, old.leaves.get(place, []))
        ]

    def restore(self, root: torch.nn.Module, *, numbers: bool = True) -> None:
        """Restores attributes with other tensors or other numbers."""
        now = _Attributes(root)
        for module, name in now.other_than(self):
            tensors = any(isinstance(leaf, tuple) for leaf in now.leaves[module, name])
            if not (numbers or tensors):
                continue
            if (module, name) not in self.values:
                delattr(module, name)
                continue
            setattr(module, name, self.values[module, name])
            for leaf in self.leaves[module, name]:
                if isinstance(leaf, tuple):
                    tensor, copy = leaf
                    tensor.copy_(copy)


def _differ(new: list[Any], old: list[Any]) -> bool:
    """Returns whether tensors or numbers among leaves differ."""
    if len(new) != len(old):
        return any(isinstance(leaf, tuple | int | float) for leaf in (*new, *old))
    for leaf, other in zip(new, old, strict=True):
        if isinstance(leaf, tuple) and isinstance(other, tuple):
            if leaf[0] is not other[0] or not torch.equal(leaf[1], other[1]):
                return True
        elif isinstance(leaf, tuple | int | float) and (
            type(leaf) is not type(other) or leaf != other
        ):
            return True
    return False


def _refuse_state_outside(
    protocol: torch.nn.Module,
    prompts: tuple[Any, Any],
    first: tuple[Any, Any],
    places: list[_Place],
) -> None:
    """Raises for a model whose step depends on state that a prompt has left in its modules.

    Args:
        protocol: The model, after the prompts.
        prompts: The prompts and their mask.
        first: Their logits and cache.
        places: The attributes that they have changed.

    Raises:
        ConversionError: After other prompts, a step with the same cache gives other logits.
    """
    logits, cache = first
    after = _Attributes(protocol)
    step: Any = protocol.step
    expected = step(logits.argmax(-1), pytree.tree_map(_copy, cache))[0]
    _prefill_otherwise(protocol, *prompts)
    places = [place for place in places if place in _Attributes(protocol).other_than(after)]
    try:
        actual = step(logits.argmax(-1), pytree.tree_map(_copy, cache))[0]
    except (IndexError, RuntimeError):
        actual = None
    if places and (
        actual is None or not torch.allclose(expected, actual, rtol=1e-3, atol=1e-4, equal_nan=True)
    ):
        module, name = places[0]
        path = next(path for path, child in protocol.named_modules() if child is module)
        where = f"{path}.{name}".removeprefix("model.").removeprefix(".")
        raise ConversionError(
            f"{type(getattr(protocol, 'model', protocol)).__name__} keeps {where} in the module "
            f"from token to token, where a program has no access. Wrap it in a module with prefill "
            f"and step that return it as part of the cache; see fmapper.generator."
        )


def _prefill_otherwise(protocol: Any, tokens: Any, mask: Any) -> None:
    """Runs other prompts of another width, or of the same width if the model accepts no other."""
    try:
        protocol.prefill(tokens[:, 1:] + 1, mask[:, 1:])
    except (IndexError, RuntimeError, TypeError, ValueError):
        protocol.prefill(tokens + 1, mask)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _refuse_too_long(protocol: Any, logits: Any, cache: Any, max_length: int) -> None:
    """Raises for a cache with more slots than the model has positions.

    Raises:
        ConversionError: The model has no such position, or does not accept a cache of a fixed size.
    """
    full = torch.full((), max_length - 1, dtype=torch.int64)
    last = {"length": full}
    if "position" in cache:
        last["position"] = torch.full_like(cache["position"], max_length - 1)
    error = _error_of_step(protocol, logits, {**cache, **last})
    if error is None:
        return
    name, why = type(protocol.model).__name__, str(error).splitlines()[0]
    if _error_of_step(protocol, logits, cache) is None:
        raise ConversionError(
            f"{name}: max_length={max_length} exceeds the positions of the model ({why}). Create "
            f"the generator with a smaller max_length."
        ) from error
    raise ConversionError(
        f"{name} cannot compute a token with a cache of fixed size: {type(error).__name__}: {why}. "
        f"Wrap it in a module with prefill and step; see fmapper.generator."
    ) from error


def _refuse_without_mask(protocol: Any, logits: Any, cache: Any) -> None:
    """Raises for a model that reads slots of the cache without a token.

    Raises:
        ConversionError: Its logits depend on these slots.
    """
    length = int(cache["length"])
    other = {name: _fill_from(length, name, state) for name, state in cache.items()}
    tokens = logits.argmax(-1)
    expected, actual = protocol.step(tokens, cache)[0], protocol.step(tokens, other)[0]
    if not torch.allclose(expected, actual, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ConversionError(
            f"{type(protocol.model).__name__} applies no mask to its cache in a step: in a cache "
            f"of fixed size it would attend to places that no token has taken yet. Wrap it in a "
            f"module with prefill and step; see fmapper.generator."
        )


def _fill_from(length: int, name: str, state: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values of a cache with other numbers in the slots without tokens."""
    where, _, kind = name.rpartition(".")
    if kind not in ("keys", "values") or not where.isdigit():
        return state
    filled = state.clone()
    filled[..., length:, :] = 3.0
    return filled


def _error_of_step(protocol: Any, logits: Any, cache: Any) -> Exception | None:
    try:
        protocol.step(logits.argmax(-1), cache)
    except (IndexError, RuntimeError) as error:
        return error
    return None
