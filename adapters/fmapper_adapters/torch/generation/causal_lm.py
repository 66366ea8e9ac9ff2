"""A causal language model of transformers with the methods of a generator: `prefill` and `step`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.generation import cache_layers
from fmapper_adapters.torch.generation.cache_layers import Places, State
from fmapper_adapters.torch.generation.ranges import FromLength

Result = tuple[torch.Tensor, State]


class CausalLM(torch.nn.Module):
    """A model whose cache is a dict of tensors of fixed sizes.

    In addition to the states of the layers it has `mask`, the positions that are not padding,
    `position`, the next position of each row without padding, and `length`, the next slot.

    Args:
        model: The model.
        max_length: The number of positions in the cache.
    """

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        self.config = model.config
        self.accepts = set(inspect.signature(model.forward).parameters)
        cache_layers.for_prompt(model.config)  # raises for unknown layers
        self.is_recurrent = cache_layers.is_recurrent(model.config)
        self.cache_name = cache_layers.name_of_cache(model)

    @property
    def padding(self) -> str:
        """The side on which a prompt may be padded: a recurrent state sees padding at the right."""
        return "left" if self.is_recurrent else "right"

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> Result:
        """Returns the logits after a prompt, and the cache.

        Args:
            tokens: The tokens of the prompts, shape (batch, columns).
            mask: 1 for tokens, 0 for padding.
        """
        columns = tokens.shape[1]
        at = torch.arange(columns)
        used = mask.amax(0) > 0
        if self.is_recurrent:
            begin = torch.where(used, at, columns).amin()
            length = columns - begin
        else:
            begin = torch.zeros((), dtype=torch.int64)
            length = torch.where(used, at + 1, 0).amax()
        cache = cache_layers.for_prompt(self.config)
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        last = (begin + length - 1).reshape(1)
        logits = self._call(tokens, mask, positions, cache, last, first=True)
        places = Places(begin, length, columns, self.max_length)
        state = cache_layers.states(cache, cache_layers.windows(self.config), places)
        if not state:
            raise ConversionError(
                f"{type(self.model).__name__}: a prompt of {columns} tokens leaves nothing in the "
                f"cache. Models that recompute it beyond a certain length, such as those with "
                f"longrope, need a smaller max_length."
            )
        slots = places.of(self.max_length)
        kept = mask.index_select(1, slots) * (torch.arange(self.max_length) < length)
        state |= {"mask": kept, "position": mask.sum(1, keepdim=True), "length": length}
        return logits, state

    def step(self, tokens: torch.Tensor, cache: State) -> Result:
        """Returns the logits after one more token, and the cache.

        Args:
            tokens: One token per row, shape (batch,).
            cache: The cache that `prefill` or `step` returned.
        """
        state = dict(cache)
        mask, position, length = (state.pop(name) for name in ("mask", "position", "length"))
        mask = mask.index_copy(1, length.reshape(1), torch.ones_like(mask[:, :1]))
        step_cache = cache_layers.for_step(self.config, state, length, self.max_length)
        with FromLength(length, self.max_length):
            logits = self._call(tokens[:, None], mask, position, step_cache, None, first=False)
        new = cache_layers.after_step(step_cache, state)
        return logits, new | {"mask": mask, "position": position + 1, "length": length + 1}

    def _call(
        self, tokens: Any, mask: Any, positions: Any, cache: Any, last: Any, *, first: bool
    ) -> torch.Tensor:
        """Calls the model as `generate` does, and returns the logits of one column."""
        given: dict[str, Any] = {"attention_mask": mask}
        if cache is not None:
            given |= {"use_cache": True, self.cache_name: cache}
        if "position_ids" in self.accepts:
            given["position_ids"] = positions
        if last is not None and "logits_to_keep" in self.accepts:
            given["logits_to_keep"] = last
        inputs = self.model.prepare_inputs_for_generation(
            tokens, next_sequence_length=None, is_first_iteration=first, **given
        )
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        if last is not None and "logits_to_keep" not in self.accepts:
            logits = logits.index_select(1, last)
        return logits[:, -1].float()
