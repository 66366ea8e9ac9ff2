"""The data of a generator: the programs of a model for a prompt and for a step."""

from __future__ import annotations

from dataclasses import dataclass

from fmapper.generation.decoding import Decoding
from fmapper.programs.program import Program


@dataclass(slots=True, eq=False)
class Generation:
    """The programs and settings of a model that generates text.

    Both return `{"logits": (batch, vocabulary), "cache": tree}`; the first takes `tokens` and
    `mask` of shape (batch, columns), the second `tokens` of shape (batch,) and the `cache`.

    Attributes:
        prefill: The program of a prompt; None if prompts are processed by steps.
        step: The program of one more token.
        decoding: The model's own decoding options.
        unsupported: Unsupported settings of the model, in sentences.
        max_length: The number of tokens that the cache holds, including the prompt.
        batch: The number of rows.
        vocabulary: The size of the vocabulary.
        columns: The maximal length of a prompt.
        padding: The side on which prompts may be padded further: `left` or `right`.
        start: If an encoder takes the prompt: the tokens with which the answer begins.
        counts_padding: Whether the model has no mask, so that padding in an array of prompts counts
            as tokens, as in its own `generate`; in lists of unequal lengths it does not.
        lengths: The widths to which prompts are padded, ascending; powers of two, if empty.
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
        """Returns the padded width of a prompt; one program is compiled for each width."""
        if self.lengths:
            return next((size for size in self.lengths if size >= columns), columns)
        size = max(_LEAST, 1 << (columns - 1).bit_length())
        return max(columns, min(size, self.columns))


_LEAST = 16
