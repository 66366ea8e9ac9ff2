"""One conversion for many sizes: batches, and texts of several lengths."""

from __future__ import annotations

import copy
from typing import Any

from sweeps import zoo
from sweeps.using import TIMES, TOLERANCE, Arrays, CannotError, Found, arrays, in_torch

TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "bbox")
TEXTS = (*TEXT, "decoder_input_ids", "decoder_attention_mask")


def resized(inputs: Arrays, batch: int | None, more: int) -> Arrays:
    """Inputs of another batch, and texts that are longer or shorter by some ordinary tokens."""
    import torch

    found = {}
    for name, value in inputs.items():
        x = value
        if torch.is_tensor(x) and batch is not None:
            x = torch.cat([x] * (batch // len(x) + 1))[:batch]
        if torch.is_tensor(x) and name in TEXTS and x.ndim >= 2:
            # The last token stays: some models look for the end. Pictures are at the beginning.
            extra = x[:, -1 - more : -1] if more > 0 else x[:, :0]
            x = torch.cat([x[:, : x.shape[1] - 1 + min(more, 0)], extra, x[:, -1:]], 1)
        found[name] = x
    return found


def dynamic(model: Any, inputs: Arrays) -> Found:
    """One conversion for many batches and lengths of texts."""
    import torch

    import fmapper

    tensors = {name: x for name, x in inputs.items() if torch.is_tensor(x)}
    whole = len({len(x) for x in tensors.values()}) == 1  # or rows are no batch
    has_text = any(name in TEXTS for name in tensors)
    if not whole and not has_text:
        raise CannotError("its inputs have neither a batch nor a text")
    if whole and len(next(iter(tensors.values()))) < 2:
        inputs = resized(inputs, 2, 0)  # sizes of 1 stay as they are
        in_torch(model, inputs)
    auto = torch.export.Dim.AUTO
    shapes = {}
    for name, x in inputs.items():
        dims = {0: auto} if whole else {}
        if name in TEXTS and x.ndim >= 2:
            dims[1] = auto
        shapes[name] = dims if torch.is_tensor(x) else None
    converted = fmapper.convert(model, "jax", (), inputs, dynamic_shapes=shapes)
    sizes = [(3, 5), (5, -3), (1, 2)] if has_text else [(3, 0), (5, 0), (1, 0)]
    worst, done, notes = 0.0, [], []
    for batch, more in sizes:
        one = resized(inputs, batch if whole else None, more)
        try:
            want = in_torch(model, one)
        except CannotError as error:
            notes.append(f"torch at {batch}, {more}: {error}")
            continue
        try:
            got = converted.call((), arrays(one)).output
        except fmapper.ProgramInputError as error:
            fixed = fixed_by_torch(model, inputs, shapes)
            if not fixed:
                raise
            return {"class": "torch.export", "reason": f"it fixes {', '.join(fixed)}: {error}"}
        off, where = zoo.difference(got, want)
        worst = max(worst, off)
        done.append((batch, more))
        if off > TOLERANCE:
            reason = f"batch {batch}, {more} tokens more: {where}: off by {off:.2e}"
            own = zoo.rounding(model, (), one)
            kind = "rounding" if off <= TIMES * own else "MISMATCH"
            return {"class": kind, "reason": f"{reason}; torch is {own:.2e} from itself"}
    if not done:
        raise CannotError("; ".join(notes))
    return {"class": "ok", "worst": worst, "sizes": done, "notes": notes}


def fixed_by_torch(model: Any, inputs: Arrays, shapes: Any) -> list[str]:
    """The sizes that may vary and that torch.export fixes nevertheless."""
    import torch

    from fmapper_adapters.torch.record.patches import foreign_classes

    given = copy.deepcopy(inputs)
    with foreign_classes.register(model, given):
        exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False)
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    return [
        f"dimension {dim} of {name}"
        for name, dims in shapes.items()
        for dim in dims or ()
        if name in nodes and isinstance(nodes[name].meta["val"].shape[dim], int)
    ]
