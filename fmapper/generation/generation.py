"""The data of a generator: the programs of a model for a prompt and for a step."""

from __future__ import annotations

from dataclasses import dataclass

from fmapper.generation.decoding import Decoding
from fmapper.programs.program import Program


@dataclass(slots=True, eq=False)
class Generation:
    """The programs and settings of a model that generates text.

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
        columns: How many tokens a prompt may have.
        padding: The side on which prompts may be padded further: `left` or `right`.
        start: Where an encoder takes the prompt: the tokens that the answer begins with.
        counts_padding: Whether the model has no mask, so that padding in a table of prompts counts
            as tokens, as in its own `generate`; in lists of unequal lengths it does not.
        lengths: To how many columns prompts are padded, ascending; powers of two, if it is empty.
        name: The class of the model.
    """

    prefill: Program | None
    step: Program
    decoding: Decoding
    unsupported: tuple[str, ...]
    max_length: int
    batch: int
    vocabulary: int
    columns: int
    padding: str = "right"
    start: tuple[int, ...] = ()
    counts_padding: bool = False
    lengths: tuple[int, ...] = ()
    name: str = ""

    def bucket(self, columns: int) -> int:
        """Returns the padded width of a prompt: a program is compiled for each."""
        if self.lengths:
            return next((size for size in self.lengths if size >= columns), columns)
        size = max(_LEAST, 1 << (columns - 1).bit_length())
        return max(columns, min(size, self.columns))


_LEAST = 16
