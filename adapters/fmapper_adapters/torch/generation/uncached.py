"""A causal model of transformers without a cache, with `prefill` and `step`."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.generation.cache_layers import State
from fmapper_adapters.torch.generation.causal_lm import CausalLM, Result
from fmapper_adapters.torch.record.modes import mode

_PLACES = 8  # length of the text that tests whether a model is causal


class Uncached(CausalLM):
    """A model that recomputes the whole text for each token: the cache is the text.

    The cache has `tokens` and `mask`, of shape (batch, positions), and `length`, the next position.
    Positions from there on are masked, and a causal model does not attend to them anyway.
    """

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> Result:
        """Returns the logits after a prompt, and the cache.

        Args:
            tokens: The tokens of the prompts, shape (batch, columns).
            mask: 1 for tokens, 0 for padding.
        """
        columns = tokens.shape[1]
        length = torch.where(mask.amax(0) > 0, torch.arange(columns) + 1, 0).amax()
        slots = torch.arange(self.max_length)
        taken = slots.clamp(max=columns - 1)
        kept = mask.index_select(1, taken) * (slots < length)
        state = {"tokens": tokens.index_select(1, taken), "mask": kept, "length": length}
        return self.logits_at(tokens, mask, length - 1), state

    def step(self, tokens: torch.Tensor, cache: State) -> Result:
        """Returns the logits after one more token, and the cache.

        Args:
            tokens: One token per row, shape (batch,).
            cache: The cache that `prefill` or `step` returned.
        """
        length = cache["length"]
        at = length.reshape(1)
        text = cache["tokens"].index_copy(1, at, tokens[:, None])
        mask = cache["mask"].index_copy(1, at, torch.ones_like(tokens[:, None]))
        state = {"tokens": text, "mask": mask, "length": length + 1}
        return self.logits_at(text, mask, length), state

    def logits_at(self, tokens: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Returns the logits after one position of a text."""
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        return self._call(tokens, mask, positions, None, at.reshape(1), first=True)


def without_cache(model: Any, max_length: int) -> Uncached:
    """Returns a model with `prefill` and `step`.

    Raises:
        ConversionError: The model is not causal, since its logits depend on later tokens; or it has
            fewer positions.
    """
    name = type(model).__name__
    uncached, other = Uncached(model, max_length), Uncached(model, _PLACES)
    tokens = torch.ones((1, _PLACES // 2), dtype=torch.int64)
    with mode(uncached, train=False), torch.no_grad():
        try:
            expected, cache = other.prefill(tokens, torch.ones_like(tokens))
            actual = other.logits_at(cache["tokens"], cache["mask"], cache["length"] - 1)
            is_causal = torch.allclose(expected, actual, rtol=1e-3, atol=1e-4)
        except (IndexError, RuntimeError):  # no logits for each token
            is_causal = False
        if not is_causal:
            raise ConversionError(
                f"{name} keeps no cache, and is not causal: its logits depend on what follows. "
                f"Wrap it in a module with prefill and step; see fmapper.generator."
            )
        text = torch.ones((1, max_length), dtype=torch.int64)
        try:
            uncached.logits_at(text, text, torch.tensor(0))
        except (IndexError, RuntimeError) as error:
            raise ConversionError(
                f"{name}: max_length={max_length} exceeds the positions of the model ({error}). "
                f"Create the generator with a smaller max_length."
            ) from error
    return uncached
