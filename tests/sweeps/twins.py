"""Weights between twins: pairs of models written by different people, with and without inputs.

`nox -s twins` runs all pairs, `nox -s twins -- llama '^trap'` those whose names have one of these.
A pair is complete if `transfer` needs no rule, and asked for if it says what is not sure. It is
wrong if the twin gives other outputs than the source on inputs that were not among the examples:
there must be none.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fmapper
from fmapper.checkpoints import Offset, Sum
from fmapper.twins.transferring import plan_transfer
from models import twin_pairs

COMPLETE, ASKED, REFUSED, WRONG, ERROR = "complete", "asked", "refused", "WRONG", "ERROR"
WITH, WITHOUT = "with inputs", "without"
BARS = {WITH: 0.95, WITHOUT: 0.85}


class Outcome(NamedTuple):
    """What became of a pair.

    Attributes:
        kind: How it ended.
        seconds: What that took.
        back: Whether the inverse gives the bits of the source; None where nothing was transferred.
        message: The error.
    """

    kind: str
    seconds: float
    back: bool | None = None
    message: str = ""


def outcome(twins: twin_pairs.Twins, with_inputs: bool) -> Outcome:
    """Transfers the weights of a pair, and judges the result."""
    options: dict[str, Any] = {}
    if with_inputs and twins.inputs is not None:
        options["example_inputs"] = twin_pairs.for_source(twins.source, twins.inputs)
        options["target_inputs"] = twin_pairs.for_source(twins.target, twins.inputs)
    began = time.perf_counter()
    try:
        filled, report = fmapper.transfer(twins.source, twins.target, **options)
    except fmapper.AmbiguousTransferError as error:
        return Outcome(ASKED, time.perf_counter() - began, message=str(error))
    except fmapper.TransferError as error:
        return Outcome(REFUSED, time.perf_counter() - began, message=str(error))
    except Exception as error:
        seconds = time.perf_counter() - began
        return Outcome(ERROR, seconds, message=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    lost = [name for name in report.unused if _is_weight(twins.source, name)]
    if lost or not twins.is_right(filled):
        return Outcome(WRONG, seconds, message=f"{report}\nweights that were dropped: {lost}")
    return Outcome(COMPLETE, seconds, _goes_back(twins.source, filled, report))


def _is_weight(source: Any, name: str) -> bool:
    """Returns whether an array is trained, which no target may leave out."""
    if isinstance(source, torch.nn.Module):
        return name in dict(source.named_parameters(remove_duplicate=False))
    return not re.search("rngs|num_batches_tracked|inv_freq", name)


def _goes_back(source: Any, filled: Any, report: fmapper.TransferReport) -> bool | None:
    """Returns whether the inverse rules give the bits of the source, but for what is not used.

    None if the report names rules that are not exactly invertible: sums, whose inverse must be
    refused, and additions of a number, whose inverse must be right up to rounding.
    """
    given = fmapper.to_numpy(fmapper.state(source))
    there = fmapper.to_numpy(fmapper.state(filled))
    made = report.rules.apply(given, strict=False)
    try:
        inverse = report.rules.inverse()
    except fmapper.CheckpointError:
        return None if any(isinstance(rule, Sum) for rule in report.rules) else False
    back = inverse.apply({n: x for n, x in there.items() if n in made}, strict=False)
    used = {name: x for name, x in given.items() if name not in report.unused}
    if any(isinstance(rule, Offset) for rule in report.rules):
        close = all(np.allclose(back[n].read(), x, rtol=0, atol=1e-6) for n, x in used.items())
        return None if close else False
    return all(
        name in back and back[name].read().tobytes() == np.ascontiguousarray(x).tobytes()
        for name, x in used.items()
    )


def seconds_to_plan(arrays: int) -> float:
    """Returns the processor seconds of planning a transfer, for which headers are read."""
    names = {"self_attn.v_proj": "attn.value", "self_attn.o_proj": "attn.out"}
    names |= {"mlp.fc1": "ffn.linear_1", "mlp.fc2": "ffn.linear_2"}
    layers = arrays // 8
    state, target = {}, {}
    for i in range(layers):
        for at, kind in enumerate(names):
            shape = (4 + at, 3)
            state[f"model.layers.{i}.{kind}.weight"] = np.zeros(shape, np.float32)
            state[f"model.layers.{i}.{kind}.bias"] = np.zeros(shape[0], np.float32)
            target[f"blocks.{i}.{names[kind]}.weight"] = torch.empty(shape, device="meta")
            target[f"blocks.{i}.{names[kind]}.bias"] = torch.empty(shape[0], device="meta")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        fmapper.save(state, path)
        began = time.process_time()
        plan_transfer(path, target)
        return time.process_time() - began


def main() -> int:
    """Runs the pairs, prints a table, and returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*")
    patterns = parser.parse_args().patterns
    warnings.simplefilter("ignore")
    chosen = [
        name
        for name in twin_pairs.PAIRS
        if not patterns or any(re.search(pattern, name) for pattern in patterns)
    ]
    kinds: dict[str, Counter[str]] = {WITH: Counter(), WITHOUT: Counter()}
    wrong_back, messages = [], []
    print(f"{'pair':40} {'with inputs':>12} {'s':>6} {'without':>10} {'s':>6} back", flush=True)
    for name in chosen:
        row = {}
        for mode in (WITH, WITHOUT):
            twins = twin_pairs.PAIRS[name]()
            if mode == WITH and twins.inputs is None:  # arrays alone
                row[mode] = Outcome("", 0)
                continue
            found = outcome(twins, mode == WITH)
            kinds[mode][found.kind] += 1
            row[mode] = found
            if found.message:
                messages.append(f"{name}, {mode}: {found.kind}: {found.message}")
            if found.back is False:
                wrong_back.append(f"{name}, {mode}")
        a, b = row[WITH], row[WITHOUT]
        back = "no" if False in (a.back, b.back) else "yes" if True in (a.back, b.back) else ""
        print(
            f"{name:40} {a.kind:>12} {a.seconds:6.1f} {b.kind:>10} {b.seconds:6.1f} {back}",
            flush=True,
        )
    for message in messages:
        print("\n".join(message.splitlines()[:6]))
    missed = [f"the inverse of {name} gives other bits" for name in wrong_back]
    for mode, found in kinds.items():
        share = found[COMPLETE] / max(1, found.total())
        print(f"{mode}: {share:.0%} complete of {found.total()}, {found[WRONG]} wrong")
        if found[WRONG] or found[ERROR] or (not patterns and share < BARS[mode]):
            missed.append(f"{mode}: {dict(found)}")
    if not patterns:
        seconds = statistics.median(seconds_to_plan(10_000) for _ in range(3))
        print(f"10,000 arrays planned from headers in {seconds:.1f} s")
        missed += ["planning takes more than 2 s"] * (seconds > 2)
    print("\n".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
