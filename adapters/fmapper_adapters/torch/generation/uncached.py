"""A causal model of transformers that keeps no cache, with `prefill` and `step`."""

from __future__ import annotations

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.generation.cache_layers import State
from fmapper_adapters.torch.generation.causal_lm import CausalLM, Result


class Uncached(CausalLM):
    """A model that computes the whole text for each token: the cache is the text.

    It has `tokens` and `mask`, of shape (batch, places), and `length`, the next place. What is
    behind it is masked, which a causal model does not see in any case.
    """

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> Result:
        """Returns the logits after a prompt, and the cache.

        Args:
            tokens: Of the prompts, shape (batch, columns).
            mask: 1 where there is one.
        """
        columns = tokens.shape[1]
        length = torch.where(mask.amax(0) > 0, torch.arange(columns) + 1, 0).amax()
        slots = torch.arange(self.max_length)
        taken = slots.clamp(max=columns - 1)
        kept = mask.index_select(1, taken) * (slots < length)
        state = {"tokens": tokens.index_select(1, taken), "mask": kept, "length": length}
        return self._at(tokens, mask, length - 1), state

    def step(self, tokens: torch.Tensor, cache: State) -> Result:
        """Returns the logits after one more token, and the cache.

        Args:
            tokens: One per row, shape (batch,).
            cache: As `prefill` and `step` return it.
        """
        length = cache["length"]
        at = length.reshape(1)
        text = cache["tokens"].index_copy(1, at, tokens[:, None])
        mask = cache["mask"].index_copy(1, at, torch.ones_like(tokens[:, None]))
        return self._at(text, mask, length), {"tokens": text, "mask": mask, "length": length + 1}

    def _at(self, tokens: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        return self._call(tokens, mask, positions, None, at.reshape(1), first=True)

    def refuse_not_causal(self) -> None:
        """Raises for a model whose logits depend on what follows in the text.

        Raises:
            ConversionError: It has other logits where masked tokens follow.
        """
        tokens = torch.ones((1, 4), dtype=torch.int64)
        mask = torch.ones_like(tokens)
        try:
            with torch.no_grad():
                want, cache = self.prefill(tokens, mask)
                found = self._at(cache["tokens"], cache["mask"], cache["length"] - 1)
            is_causal = torch.allclose(want, found, rtol=1e-3, atol=1e-4)
        except (IndexError, RuntimeError):  # its logits are not those of the tokens
            is_causal = False
        if not is_causal:
            raise ConversionError(
                f"{type(self.model).__name__} keeps no cache, and is not causal: its logits depend "
                f"on what follows. Wrap it in a module with prefill and step; see "
                f"fmapper.generator."
            )
