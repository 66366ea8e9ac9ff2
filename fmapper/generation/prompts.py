"""Reads and checks prompts, which may have unequal lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fmapper.errors import ProgramInputError
from fmapper.generation.decoding import Decoding
from fmapper.generation.generation import Generation
from fmapper.moves.mover import to_numpy


class Prompts(NamedTuple):
    """Prompts in the form that a program takes.

    Attributes:
        tokens: The tokens of shape (rows, width), with a row for each copy of a prompt.
        mask: Of the same shape: True for tokens.
        columns: The tokens for the program, padded in both dimensions: (batch, bucket).
        column_mask: Their mask, of int32.
    """

    tokens: Any
    mask: Any
    columns: Any
    column_mask: Any


def read(
    generation: Generation, decoding: Decoding, input_ids: Any, attention_mask: Any
) -> Prompts:
    """Reads prompts into the shape that a program takes.

    Args:
        generation: The data of the generator.
        decoding: The decoding options, with the padding token.
        input_ids: An array of any backend of shape (rows, width) or (width,), or lists of unequal
            lengths, which are padded on the left.
        attention_mask: 1 for tokens, 0 for padding; None to infer it from padding tokens.

    Raises:
        ProgramInputError: The generator does not accept the prompts; says why.
    """
    import numpy as np

    name = generation.name
    encodes = bool(generation.start)
    tokens, mask = _arrays(name, input_ids, attention_mask, decoding, left=not encodes)
    if generation.counts_padding and not _is_lists(input_ids):
        mask = np.ones_like(mask)
    rows, width = tokens.shape
    copies = decoding.copies
    if rows * copies > generation.batch:
        each = f", of which each takes {copies} rows," if copies > 1 else ""
        raise ProgramInputError(
            f"{name}: {rows} prompts{each} were passed to a generator with "
            f"batch={generation.batch}. Create one with batch={rows * copies}, or pass them in "
            f"several calls."
        )
    tokens, mask = np.repeat(tokens, copies, 0), np.repeat(mask, copies, 0)
    rows = len(tokens)
    if width == 0 or rows == 0:
        raise ProgramInputError(f"{name}: the prompts are empty: {tokens.shape}")
    if width > generation.columns:
        raise ProgramInputError(
            f"{name}: a prompt of {width} tokens is longer than the {generation.columns} tokens "
            f"that the encoder accepts."
            if encodes
            else f"{name}: a prompt of {width} tokens is longer than the cache, which holds "
            f"{generation.max_length}. Create the generator"
            f" with a larger max_length."
        )
    if tokens.min() < 0 or tokens.max() >= generation.vocabulary:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ProgramInputError(
            f"{name}: input_ids contains the token {wrong}, but the vocabulary has "
            f"{generation.vocabulary} tokens"
        )
    if not mask.any(1).all():
        raise ProgramInputError(f"{name}: attention_mask masks out an entire row")
    if not encodes and not mask[:, -1].all():
        raise ProgramInputError(
            f"{name}: prompts are padded on the right, so that new tokens would not follow them. "
            "Pad them on the left (padding_side='left' of a tokenizer), or pass lists."
        )
    size = generation.bucket(width)
    left = size - width if generation.padding == "left" else 0
    columns = np.zeros((generation.batch, size), np.int32)
    column_mask = np.zeros((generation.batch, size), np.int32)
    columns[:rows, left : left + width] = tokens
    column_mask[:rows, left : left + width] = mask
    columns[rows:], column_mask[rows:] = columns[0], column_mask[0]
    return Prompts(tokens, mask, columns, column_mask)


def _arrays(
    name: str, input_ids: Any, attention_mask: Any, decoding: Decoding, *, left: bool
) -> tuple[Any, Any]:
    import numpy as np

    if isinstance(input_ids, Mapping):
        raise ProgramInputError(
            f"{name}: the prompts are a {type(input_ids).__name__}. Pass its entries as arguments: "
            "generator(**prompts)"
        )
    if _is_lists(input_ids):
        rows = _rows(name, "input_ids", input_ids)
        masks = [np.ones(len(row), bool) for row in rows]
        if attention_mask is not None:  # tokenizers return the mask as lists, too
            masks = [row != 0 for row in _rows(name, "attention_mask", attention_mask)]
            lengths = [[len(row) for row in each] for each in (masks, rows)]
            if lengths[0] != lengths[1]:
                raise ProgramInputError(
                    f"{name}: attention_mask has rows of {lengths[0]} numbers, input_ids of "
                    f"{lengths[1]}"
                )
        width = max(map(len, rows))
        tokens = np.full((len(rows), width), max(decoding.pad_token_id or 0, 0), np.int64)
        mask = np.zeros((len(rows), width), bool)
        for at, row in enumerate(rows):
            span = slice(width - len(row), None) if left else slice(len(row))
            tokens[at, span], mask[at, span] = row, masks[at]
        return tokens, mask
    tokens = np.atleast_2d(np.asarray(to_numpy(input_ids)))
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ProgramInputError(
            f"{name}: expected input_ids as integers of shape (rows, width), got {tokens.dtype} "
            f"of shape {tokens.shape}"
        )
    if attention_mask is None:
        pad = decoding.pad_token_id
        tells = pad is not None and pad not in decoding.eos_token_id
        return tokens, tokens != pad if tells else np.ones(tokens.shape, bool)
    mask = np.atleast_2d(np.asarray(to_numpy(attention_mask))) != 0
    if mask.shape != tokens.shape:
        raise ProgramInputError(
            f"{name}: attention_mask has the shape {mask.shape}, input_ids {tokens.shape}"
        )
    return tokens, mask


def _is_lists(input_ids: Any) -> bool:
    return isinstance(input_ids, list | tuple)


def _rows(name: str, what: str, given: Any) -> list[Any]:
    """Reads rows of unequal lengths: lists of numbers, or arrays of any backend.

    Raises:
        ProgramInputError: They contain something else, or nothing.
    """
    import numpy as np

    if not _is_lists(given):
        given = list(np.atleast_2d(np.asarray(to_numpy(given))))
    elif not any(_is_lists(row) or getattr(row, "ndim", 0) for row in given):
        given = [given]
    rows = []
    for at, row in enumerate(given):
        try:
            numbers = np.asarray(row if _is_lists(row) else to_numpy(row))
        except ValueError:  # nested lists of unequal lengths
            numbers = np.asarray(row, object)
        if numbers.size == 0 and numbers.ndim == 1:
            raise ProgramInputError(f"{name}: the prompts are empty: row {at} of {what} has none")
        if numbers.ndim != 1 or numbers.dtype.kind not in ("iu" if what == "input_ids" else "iub"):
            raise ProgramInputError(
                f"{name}: expected {what} as lists of integers, one per row, but row {at} is "
                f"{row!r:.60}"
            )
        rows.append(numbers)
    return rows
