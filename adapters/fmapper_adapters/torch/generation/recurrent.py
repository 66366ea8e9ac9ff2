"""Models of transformers whose cache is their own recurrent state, with `prefill` and `step`.

A prompt is processed in steps, because their own code loops over it. They have no mask: padding in
a batch of prompts counts as tokens, as in their own `generate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from fmapper import ConversionError
from fmapper_adapters.torch.generation.cache_layers import State, name_of_cache


class Recurrent(torch.nn.Module, ABC):
    """A model with a state, which is zeros before the first token.

    Args:
        model: The model.
        batch: The number of prompts.
    """

    by_steps = True
    counts_padding = True

    def __init__(self, model: Any, batch: int) -> None:
        super().__init__()
        self.model = model

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Returns the logits after a prompt, and the cache.

        Args:
            tokens: The tokens of the prompts, shape (batch, columns).
            mask: Ignored.
        """
        return self.run(tokens, None)

    def step(self, tokens: torch.Tensor, cache: State) -> tuple[torch.Tensor, State]:
        """Returns the logits after one more token, and the cache.

        Args:
            tokens: One token per row, shape (batch,).
            cache: The cache that `prefill` or `step` returned.
        """
        copies = {name: state.clone() for name, state in cache.items()}  # models write to it
        return self.run(tokens[:, None], copies)

    @abstractmethod
    def run(self, tokens: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Calls the model: returns the logits of the last token, and the state after it."""


class Rwkv(Recurrent):
    """RWKV, whose five states have the shape (batch, width, layers).

    Raises:
        ConversionError: The batch has several prompts.
    """

    _MAXIMUM = 4  # the state with the largest exponent so far
    _LEAST = -1e30  # its initial value

    def __init__(self, model: Any, batch: int) -> None:
        super().__init__(model, batch)
        if batch > 1:
            raise ConversionError(
                f"{type(model).__name__}: a step of transformers mixes the rows of a batch (it "
                f"adds states of shape (batch, width) to tokens of shape (batch, 1, width)), so "
                f"that answers would depend on the other prompts. Create the generator with "
                f"batch=1 and num_beams=1."
            )

    def run(self, tokens: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Calls the model: returns the logits of the last token, and the state after it."""
        given = None
        if state is not None:
            begun = state.pop("begun")[:, None, None] > 0
            given = list(state.values())
            given[self._MAXIMUM] = torch.where(begun, given[self._MAXIMUM], self._LEAST)
        outputs = self.model(input_ids=tokens, state=given, use_cache=True, return_dict=True)
        after = {f"state.{i}": tensor for i, tensor in enumerate(outputs.state)}
        begun = torch.ones(len(tokens), dtype=torch.int64)
        return outputs.logits[:, -1].float(), after | {"begun": begun}


class XLSTM(Recurrent):
    """xLSTM, which has three states for each layer."""

    def run(self, tokens: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Calls the model: returns the logits of the last token, and the state after it."""
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        given = None
        if state is not None:
            given = xLSTMCache(self.model.config, len(tokens), dtype=self.model.dtype)
            for layer, old in given.rnn_state.items():
                states: Any = tuple(state[f"{layer}.{i}"] for i in range(len(old)))
                given.rnn_state[layer] = states
        name = name_of_cache(self.model)
        outputs = self.model(input_ids=tokens, **{name: given}, use_cache=True, return_dict=True)
        after = {
            f"{layer}.{i}": tensor
            for layer, states in outputs[name].rnn_state.items()
            for i, tensor in enumerate(states)
        }
        return outputs.logits[:, -1].float(), after


# Model type of a configuration -> class.
KINDS: dict[str, type[Recurrent]] = {"rwkv": Rwkv, "xlstm": XLSTM}
