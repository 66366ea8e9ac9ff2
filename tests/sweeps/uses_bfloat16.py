"""Converted models in bfloat16, against torch's own in bfloat16 and in float32."""

from __future__ import annotations

import copy
from typing import Any

from sweeps.using import (
    TIMES,
    Arrays,
    Found,
    arrays,
    distance,
    floating,
    in_torch,
    jitted,
    largest,
    paired,
)

HALF = 2.0**-8  # the last bit of bfloat16


def bfloat16(model: Any, inputs: Arrays) -> Found:
    """A converted model that is cast, against torch's own model in bfloat16."""
    import fmapper

    converted = fmapper.convert(model, "jax", (), inputs)
    given = floating(inputs, lambda x: x.bfloat16())
    half = copy.deepcopy(model).bfloat16()
    return compared_halves(half, fmapper.cast(converted, "bfloat16"), given)


def bfloat16_module(model: Any, inputs: Arrays) -> Found:
    """torch's model in bfloat16, converted, against itself."""
    import fmapper

    given = floating(inputs, lambda x: x.bfloat16())
    half = copy.deepcopy(model).bfloat16()
    in_torch(half, given)
    return compared_halves(half, fmapper.convert(half, "jax", (), given), given)


def compared_halves(half: Any, converted: Any, given: Arrays) -> Found:
    """Both against float32 with the same rounded parameters: how much farther ours is."""
    want = in_torch(half, given)
    exact = in_torch(copy.deepcopy(half).float(), floating(given, lambda x: x.float()))
    got = jitted(converted, arrays(given))[0]
    worst, own, reason, dtypes = 0.0, 0.0, "", []
    pairs = zip(paired(got, want), paired(want, exact), strict=True)
    for i, ((ours, theirs), (_, right)) in enumerate(pairs):
        size = max(largest(right), 1e-6)
        error, least = distance(theirs, right) / size, distance(ours, right) / size
        ratio = least / max(error, HALF / TIMES)
        own = max(own, error)
        if ratio > worst:
            worst = ratio
            reason = f"output {i}: {least:.2e} from float32, torch's is {error:.2e}"
        if str(ours.dtype) != str(theirs.dtype).removeprefix("torch."):
            dtypes.append(f"output {i} is {ours.dtype}, torch's {theirs.dtype}")
    found = {"worst": worst, "torch": own, "dtypes": dtypes}
    if worst > TIMES:
        return found | {"class": "MISMATCH", "reason": reason}
    return found | {"class": "ok"}
