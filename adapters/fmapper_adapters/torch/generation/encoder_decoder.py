"""A model of transformers with an encoder and the methods of a generator, `prefill` and `step`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from fmapper_adapters.torch.generation import cache_layers
from fmapper_adapters.torch.generation.cache_layers import Places, State
from fmapper_adapters.torch.generation.ranges import FromLength

Result = tuple[torch.Tensor, State]
_CROSS = "cross."


@dataclass
class _Encoded(BaseModelOutput):
    """The output of an encoder, with an unused field that models with experts read."""

    router_logits: Any = None
    router_probs: Any = None


class EncoderDecoder(torch.nn.Module):
    """A model whose encoder takes the prompt, and whose decoder continues a few start tokens.

    In addition to the states of the decoder's layers its cache has the encoder's output, its keys
    and values, its `mask`, which is 0 for padding, and `length`, the next slot.

    Args:
        model: The model.
        max_length: The number of the decoder's tokens in the cache.
        start: The tokens that the decoder begins with.
    """

    padding = "right"

    def __init__(self, model: Any, max_length: int, start: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        self.start = start
        self.config = model.config
        self.cache_name = cache_layers.name_of_cache(model)
        # The decoder may be any causal model; some look up positions by the length of the cache.
        self.gives_positions = model.config.model_type == "encoder-decoder"

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> Result:
        """Returns the logits of the first token of the answer, and the cache.

        Args:
            tokens: The tokens of the prompts, shape (batch, columns).
            mask: 1 for tokens, 0 for padding.
        """
        encoder = self.model.get_encoder()
        hidden = encoder(input_ids=tokens, attention_mask=mask, return_dict=True)[0]
        self_cache, cross = cache_layers.for_prompt(self.config), DynamicCache()
        begin = torch.tensor(self.start).expand(len(tokens), -1)
        cache = EncoderDecoderCache(self_cache, cross)
        positions = torch.arange(len(self.start))[None]
        logits = self._call(begin, mask, hidden, cache, positions, first=True)
        length = torch.full((), len(self.start), dtype=torch.int64)
        places = Places(0, length, len(self.start), self.max_length)
        state = cache_layers.states(self_cache, cache_layers.windows(self.config), places)
        for at, layer in enumerate(cross.layers):
            for name in ("keys", "values"):
                if getattr(layer, name, None) is not None:
                    state[f"{_CROSS}{at}.{name}"] = getattr(layer, name)
        return logits, state | {"mask": mask, "hidden": hidden, "length": length}

    def step(self, tokens: torch.Tensor, cache: State) -> Result:
        """Returns the logits after one more token, and the cache.

        Args:
            tokens: One token per row, shape (batch,).
            cache: The cache that `prefill` or `step` returned.
        """
        state = dict(cache)
        mask, hidden, length = (state.pop(name) for name in ("mask", "hidden", "length"))
        cross = {n: state.pop(n) for n in list(state) if n.startswith(_CROSS)}
        self_cache = cache_layers.for_step(self.config, state, length, self.max_length)
        encoder_states = {name.removeprefix(_CROSS): tensor for name, tensor in cross.items()}
        both = cache_layers.with_encoder_states(encoder_states, self_cache)
        at = length.reshape(1, 1)
        with FromLength(length, self.max_length):
            logits = self._call(tokens[:, None], mask, hidden, both, at, first=False)
        new = cache_layers.after_step(self_cache, state) | cross
        return logits, new | {"mask": mask, "hidden": hidden, "length": length + 1}

    def sizes(self, cache: Mapping[str, Any], columns: Any) -> dict[str, Any]:
        """Returns the sizes of the cache's dimensions that depend on the length of the prompt."""
        sizes: dict[str, Any] = {}
        for name in cache:
            axis = 2 if name.startswith(_CROSS) else 1
            sizes[name] = {axis: columns} if axis == 2 or name in ("mask", "hidden") else None
        return sizes

    def _call(
        self, tokens: Any, mask: Any, hidden: Any, cache: Any, positions: Any, *, first: bool
    ) -> Any:
        """Calls the model as `generate` does, and returns the logits of the last token."""
        given = {self.cache_name: cache}
        if self.gives_positions:
            given["decoder_position_ids"] = positions
        inputs = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None,
            is_first_iteration=first,
            attention_mask=mask,
            encoder_outputs=_Encoded(last_hidden_state=hidden),
            use_cache=True,
            **given,
        )
        return self.model(**inputs, return_dict=True).logits[:, -1].float()
