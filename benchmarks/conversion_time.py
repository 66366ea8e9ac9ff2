"""How long does it take until a converted model has answered for the first time?

    python benchmarks/conversion_time.py [--case ARCHITECTURE/Class ...] [--rounds 3]
                                         [--clock wall|cpu] [--json FILE]

Classes of transformers in a small size with random weights, made by `tests/models/tiny_models.py`.
Each sample is taken in a process of its own, forked from one in which everything is imported and
the model is built; before the clock starts, it converts a `torch.nn.Linear` in the same way, so
that neither side pays for what a process does once. The sides take turns, in an order of its own
each round.

* fmapper: `export_program` (torch.export, its decompositions, the comparison of what was recorded
  with the module), lowering, first call of the result, compilation included.
* torchax.export: `torch.export.export`, `torchax.export.exported_program_to_jax`, first call of its
  function under `jax.jit`: as here, a program that is independent of torch from then on.
* torchax: `torchax.extract_jax`, first call of its function under `jax.jit`. Nothing is recorded:
  torch runs the module whenever JAX traces it.

Both take a pytree of JAX only, so that a small module around the model gives the tensors of its
output.

A ratio is the median, over the rounds, of our total by theirs; the bar is 1.0 for the median of all
classes that both convert, for each peer. Classes that a side does not convert are listed, and so
are those whose first output is not torch's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

from _interleave import paired
from _report import machine, plain

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from sweeps import sweeping
from sweeps import zoo as sweep_zoo

BAR: Final = 1.0
OURS: Final = "fmapper"
PEERS: Final = ("torchax.export", "torchax")
PACKAGES: Final = ("fmapper", "torch", "jax", "torchax", "transformers", "numpy")
LIKE: Final = 1e-4  # of the largest element, as in the sweep
CASES: Final = (
    "albert/AlbertModel",
    "bart/BartModel",
    "bert/BertForMaskedLM",
    "bloom/BloomForCausalLM",
    "clip/CLIPModel",
    "convnext/ConvNextForImageClassification",
    "deberta-v2/DebertaV2Model",
    "deit/DeiTModel",
    "distilbert/DistilBertModel",
    "electra/ElectraModel",
    "gemma3_text/Gemma3ForCausalLM",
    "gpt2/GPT2LMHeadModel",
    "gpt_neox/GPTNeoXForCausalLM",
    "llama/LlamaForCausalLM",
    "mamba/MambaForCausalLM",
    "mixtral/MixtralForCausalLM",
    "mobilenet_v2/MobileNetV2Model",
    "opt/OPTForCausalLM",
    "phi3/Phi3ForCausalLM",
    "qwen3/Qwen3ForCausalLM",
    "resnet/ResNetModel",
    "segformer/SegformerModel",
    "swin/SwinModel",
    "t5/T5ForConditionalGeneration",
    "vit/ViTModel",
    "wav2vec2/Wav2Vec2Model",
    "whisper/WhisperModel",
    "xlnet/XLNetModel",
)
Clock = Callable[[], float]
Found = dict[str, Any]


def ours(model: Any, inputs: Found, clock: Clock) -> tuple[Found, Any]:
    """The seconds of each part, and the first output."""
    import jax
    import torch

    import fmapper

    given = {
        name: fmapper.to_jax(value) if torch.is_tensor(value) else value
        for name, value in inputs.items()
    }
    times = [clock()]
    whole = fmapper.backends.get_adapter("jax").lowers_whole({})
    options = {"dynamic_shapes": None, "train": False, "check": True, "strict": None}
    program = fmapper.backends.get_adapter("torch").export_program(
        model, (), inputs, **options, whole=whole
    )
    times.append(clock())
    converted = fmapper.convert(program, "jax")
    times.append(clock())
    key = {"key": jax.random.key(0)} if converted.is_random else {}
    output = converted.call((), given, **key).output
    jax.block_until_ready([x for x in sweep_zoo.parts(output) if isinstance(x, jax.Array)])
    times.append(clock())
    return _between(times, "export", "lowering", "first call"), output


def recorded(model: Any, inputs: Found, clock: Clock) -> tuple[Found, Any]:
    """torchax from a program of torch.export; its placeholders are of all inputs, in order."""
    import jax
    import torch
    from torchax.export import exported_program_to_jax

    tensors, fixed = _of_torchax(inputs)
    times = [clock()]
    program = torch.export.export(_with_parts(model), (), {"kwargs": inputs})
    times.append(clock())
    state, function = exported_program_to_jax(program)
    times.append(clock())
    run = jax.jit(
        lambda state, tensors: function(
            state, [tensors[name] if name in tensors else fixed[name] for name in inputs]
        )
    )
    output = jax.block_until_ready(run(state, tensors))
    times.append(clock())
    return _between(times, "export", "lowering", "first call"), output


def extracted(model: Any, inputs: Found, clock: Clock) -> tuple[Found, Any]:
    """torchax as it is used: the seconds of each part, and the tensors of the first output."""
    import jax
    import torchax

    tensors, fixed = _of_torchax(inputs)
    times = [clock()]
    state, function = torchax.extract_jax(_with_parts(model))
    times.append(clock())
    run = jax.jit(lambda state, tensors: function(state, ({**tensors, **fixed},)))
    output = jax.block_until_ready(run(state, tensors))
    times.append(clock())
    return _between(times, "extract", "first call"), output


def _with_parts(model: Any) -> Any:
    """A module that gives the tensors of a model's output, and nothing else."""
    import torch

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, kwargs: Found) -> list[Any]:
            return sweep_zoo.parts(self.model(**kwargs))

    return Parts().eval()


def _of_torchax(inputs: Found) -> tuple[Found, Found]:
    """The tensors of the inputs as JAX's arrays, and what is fixed."""
    import torch

    import fmapper

    tensors = {
        name: fmapper.to_jax(value) for name, value in inputs.items() if torch.is_tensor(value)
    }
    return tensors, {name: value for name, value in inputs.items() if name not in tensors}


def _between(times: list[float], *names: str) -> Found:
    found = {name: b - a for name, a, b in zip(names, times, times[1:], strict=False)}
    return {**found, "total": times[-1] - times[0]}


SIDES: Final = {OURS: ours, PEERS[0]: recorded, PEERS[1]: extracted}


def sample(side: str, tiny: Any, clock: Clock) -> Found:
    """One sample: the seconds of each part, and whether the first output is torch's."""
    import torch

    SIDES[side](torch.nn.Linear(2, 2).eval(), {"input": torch.ones(1, 2)}, clock)
    gc.collect()
    times, output = SIDES[side](tiny.model, tiny.inputs, clock)
    want = sweep_zoo.parts(tiny.outputs)
    got = sweep_zoo.parts(output)
    if len(got) != len(want):
        return {"class": "wrong", "reason": f"{len(got)} outputs, not {len(want)}", "times": times}
    worst = max(sweep_zoo.difference(*pair)[0] for pair in zip(got, want, strict=True))
    return {"class": "ok" if worst <= LIKE else "wrong", "worst": worst, "times": times}


def case(name: str, rounds: int, seconds: float, clock: Clock) -> Found:
    """All samples of a class; runs in a process of its own, where the model is built once."""
    from models import tiny_models

    warnings.simplefilter("ignore")
    kind, _, cls = name.rpartition("/")
    tiny = tiny_models.build(cls, kind)
    gc.freeze()  # or each process would copy all of it
    found: Found = {"class": "ok", "samples": {side: [] for side in SIDES}}
    shuffle = random.Random(name).shuffle
    order = list(SIDES)
    for _ in range(rounds):
        shuffle(order)
        for side in order:
            rows = found["samples"][side]
            if rows and "times" not in rows[-1]:
                continue  # it will not do better
            run = functools.partial(sample, side, tiny, clock)
            rows.append(sweeping.run_case(run, seconds=seconds, gigabytes=12))
    return found


def row_of(name: str, samples: dict[str, list[Found]]) -> Found:
    """What is reported of a class: medians, the ratio, and what went wrong."""
    row: Found = {"case": name, "problems": {}}
    for side, rows in samples.items():
        bad = next((one for one in rows if one["class"] != "ok"), None)
        if bad is not None:
            why = bad.get("reason") or f"off by {bad['worst']:.1e} of the largest element"
            row["problems"][side] = f"{bad['class']}: {why}"
        if all("times" in one for one in rows):
            names = rows[0]["times"]
            row[side] = {part: median(one["times"][part] for one in rows) for part in names}
    row["ratio"] = {
        peer: paired(*([one["times"]["total"] for one in samples[side]] for side in (OURS, peer)))
        for peer in PEERS
        if OURS in row and peer in row
    }
    return row


def print_row(row: Found) -> None:
    """Print a line of the table."""
    cells = []
    for side in SIDES:
        parts = row.get(side, {})
        text = " + ".join(f"{value:.2f}" for part, value in parts.items() if part != "total")
        cells.append(f"{parts.get('total', float('nan')):6.2f} = {text:<20}")
    ratios = "  ".join(
        f"{row['ratio'][peer][0]:5.2f}x" if peer in row["ratio"] else "     -" for peer in PEERS
    )
    problems = "; ".join(f"{side} {text[:90]}" for side, text in row["problems"].items())
    print(f"{row['case']:<42}{'  '.join(cells)}  {ratios}  {problems}", flush=True)


def prepare() -> None:
    """Import everything before processes are forked; JAX must not compute before that."""
    import jax
    import torch
    import torchax
    import transformers

    import fmapper_adapters.jax.aten.table
    import fmapper_adapters.jax.model.jax_model
    import fmapper_adapters.torch.record.export
    from models import tiny_models

    assert all((jax, torch, torchax, transformers))
    fmapper_adapters.jax.aten.table.load()
    torch.set_num_threads(1)
    tiny_models.build("LlamaForCausalLM", "llama")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, and say by the exit status whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", default=CASES, metavar="NAME",
                        help="ARCHITECTURE/Class of transformers")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="of a processor, per sample")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not find_spec("torchax"):
        parser.error("torchax is not installed: there is nothing to compare with")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    clock = process_time if options.clock == "cpu" else perf_counter
    report: Found = {"machine": machine(PACKAGES), "clock": options.clock, "rows": []}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print("seconds: fmapper and torchax.export = export + lowering + first call; "
          "torchax = extract + first call")  # fmt: skip
    prepare()
    for name in options.case:
        run = functools.partial(case, name, options.rounds, options.seconds, clock)
        limit = 2 * options.seconds * options.rounds + 300
        found = sweeping.run_case(run, seconds=limit, gigabytes=16)
        if found["class"] != "ok":
            print(f"{name}: {found['class']}: {found['reason'][:200]}", flush=True)
            report["rows"].append(
                {"case": name, "ratio": {}, "problems": {"model": found["reason"]}}
            )
            continue
        row = row_of(name, found["samples"])
        report["rows"].append(row)
        print_row(row)
    met = summary(report)
    if options.json:
        options.json.write_text(json.dumps(plain(report), indent=1, allow_nan=False))
    return 0 if met else 1


def summary(report: Found) -> bool:
    """Print, for each peer, the medians over the classes that both convert; say if bars hold."""
    report["medians"] = {}
    for peer in PEERS:
        rows = [row for row in report["rows"] if peer in row["ratio"]]
        if not rows:
            return False
        of_peer = report["medians"][peer] = {"classes": len(rows)}
        for side in (OURS, peer):
            of_peer[side] = {
                part: median(row[side][part] for row in rows) for part in rows[0][side]
            }
            parts = ", ".join(f"{part} {value:.2f} s" for part, value in of_peer[side].items())
            print(f"{side}: {parts}")
        ratio = of_peer["ratio"] = median(row["ratio"][peer][0] for row in rows)
        slower = sum(row["ratio"][peer][0] > BAR for row in rows)
        print(f"{len(rows)} classes, ratio to {peer} {ratio:.2f} "
              f"({'met' if ratio <= BAR else 'MISSED'}), slower in {slower}")  # fmt: skip
    return all(of_peer["ratio"] <= BAR for of_peer in report["medians"].values())


if __name__ == "__main__":
    sys.exit(main())
