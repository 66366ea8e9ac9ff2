"""What a generator consists of: the programs of a model for a prompt and for a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from fmapper.generation.decoding import Decoding
from fmapper.programs.program import Program


@dataclass(slots=True, eq=False)
class Generation:
    """The programs of a model that generates, and what is to be known of it.

    Both give `{"logits": (batch, vocabulary), "cache": tree}`; the first takes `tokens` and `mask`
    of shape (batch, columns), the second `tokens` of shape (batch,) and the `cache`.

    Attributes:
        prefill: The program of a prompt; None where a prompt goes through steps.
        step: The program of one token more.
        decoding: How the model itself wants tokens to be chosen.
        unsupported: What it asks for and is not done, in sentences.
        max_length: How many tokens the cache holds, those of the prompt among them.
        batch: How many rows.
        vocabulary: How many tokens there are.
        padding: The side on which prompts may be padded further: `left` or `right`.
        start: Where an encoder takes the prompt: the tokens that the answer begins with.
        name: The class of the model.
    """

    prefill: Program | None
    step: Program
    decoding: Decoding
    unsupported: tuple[str, ...]
    max_length: int
    batch: int
    vocabulary: int
    padding: str = "right"
    start: tuple[int, ...] = ()
    name: str = ""
    lengths: tuple[int, ...] = field(default=())

    def bucket(self, columns: int) -> int:
        """Returns to how many columns a prompt is padded: the programs of a length are compiled."""
        return next((size for size in self.buckets() if size >= columns), columns)

    def buckets(self) -> tuple[int, ...]:
        """Returns the lengths to which prompts are padded, ascending."""
        if self.lengths:
            return self.lengths
        sizes = [min(_LEAST, self.max_length)]
        while sizes[-1] < self.max_length:
            sizes.append(min(sizes[-1] * 2, self.max_length))
        return tuple(sizes)


_LEAST = 16
