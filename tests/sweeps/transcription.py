"""Models transcribed to Flax or Equinox, proved, and put beside today's files.

For each model it prints whether its file is proved, the lines of the source's classes and
functions that the file has and of the file's, the functions that are written by their operations,
and the seconds without the proof and with it. Models are those that `models/repositories` has as
repositories write them, or small ones of a library: one of each architecture of transformers that
`sweeps.translate` names.

    PYTHONPATH=tests python -m sweeps.transcription --out FOLDER [--old] [NAME ...]
    PYTHONPATH=tests python -m sweeps.transcription --out FOLDER --library transformers [NAME ...]
    PYTHONPATH=tests python -m sweeps.transcription --out FOLDER --target equinox [NAME ...]

With `--golden`, the files for PyTorch and Equinox that tests compare are written anew, and nothing
is proved:

    PYTHONPATH=tests python -m sweeps.transcription --golden [NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fmapper import ConversionError, source
from fmapper.translation.source import format_code
from fmapper_translate import transcribe
from sweeps import sweeping, translate

GOLDEN = Path(__file__).parents[1] / "data" / "transcribed"
NAMES = (
    "nanogpt", "resnet", "mobilenetv3", "ghostnet", "nbeats", "t5", "xlstm", "unet", "fno",
    "pointnet", "vqvae", "dcgan", "segformer", "tagger", "gnn", "nerf", "dit", "conformer",
    "mamba", "perceiver", "tcn", "mbconv", "gat",
)  # fmt: skip


def build(name: str) -> tuple[ModuleType, Any, tuple[Any, ...], Any]:
    """Returns a module, its model, the model's inputs, and the arguments that made it."""
    torch.manual_seed(0)
    module = importlib.import_module(f"models.repositories.{name}")
    model, inputs, *arguments = module.build()
    return module, model, inputs, arguments[0] if arguments else None


def lines(code: str, names: set[str]) -> int:
    """Counts the lines of the functions and classes with these names, without empty ones."""
    rows = code.splitlines()
    found = [
        row.strip()
        for node in ast.parse(code).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
        for row in rows[node.lineno - 1 : node.end_lineno]
    ]
    return len([row for row in found if row])


def definitions(code: str) -> set[str]:
    """Returns the names of the functions and classes of code."""
    body = ast.parse(code).body
    return {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def case(name: str, library: str, out: Path, *, target: str, old: bool) -> dict[str, Any]:
    """Transcribes one model, proves its file, and writes it."""
    warnings.simplefilter("ignore")
    arguments, options = None, {}
    if library == "repositories":
        _, model, inputs, arguments = build(name)
    else:
        try:
            model, inputs, options = translate.build(name, "base", library)
        except translate.CannotBuild as error:
            return {"class": "not built", "reason": str(error)}
    found: dict[str, Any] = {"model": type(model).__name__}
    began = time.process_time()
    try:
        made = transcribe(model, inputs, arguments, options, target=target)
    except ConversionError as error:
        return {**found, "class": "refused", "reason": str(error)}
    found["transcribed"] = round(time.process_time() - began, 1)
    found["fallen"] = dict(made.fallen)
    (out / f"{name}_new.py").write_text(made.code)
    text = format_code(inspect.getsource(inspect.getmodule(type(model))))  # type: ignore[arg-type]
    names = definitions(text) & definitions(made.code)
    found["lines"] = lines(text, names), lines(made.code, names)
    try:
        proof = made.prove(model, inputs, options)
    except ConversionError as error:
        return {**found, "class": "error", "reason": str(error)}
    found["errors"] = str(proof)
    found |= {"class": "ok"} if proof else {"class": "MISMATCH", "reason": str(proof)}
    found["only_evaluation"] = made.only_evaluation
    if old:
        began = time.process_time()
        code = source(model, target, inputs, **options)
        (out / f"{name}_old.py").write_text(code)
        taken = len([row for row in code.splitlines() if row.strip()])
        found["old"] = taken, round(time.process_time() - began, 1)
    return found


def write_golden(names: Sequence[str]) -> None:
    """Writes the golden files of some models, as `mlp` or `linen/mlp`, or of all."""
    found = (str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.py"))
    for name in names or sorted(found):
        made = transcribe(*golden_case(name), target=golden_target(name))
        (GOLDEN / f"{name}.py").write_text(made.code)


def golden_case(name: str) -> tuple[Any, ...]:
    """Returns the arguments of `transcribe` for a model that has a golden file."""
    source, _, name = name.rpartition("/")
    if source == "to_equinox":
        return build(name)[1:]
    found = importlib.import_module(f"models.{source or 'nnx'}_repositories.{name}").build()
    return (*found[:2], None, *found[2:]) if source == "linen" else found


def golden_target(name: str) -> str | None:
    """Returns the target of a golden file, if it is not PyTorch."""
    return "equinox" if name.startswith("to_equinox/") else None


def main() -> None:
    """Runs the models that are named, or all; each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("transcribed"))
    parser.add_argument("--golden", action="store_true", help="write the golden files anew")
    parser.add_argument("--target", default="flax", choices=("flax", "equinox"))
    parser.add_argument("--library", default="repositories", choices=("repositories", *_OTHERS))
    parser.add_argument("--old", action="store_true", help="write the files of today beside them")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a processor, per model")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="per model")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.golden:
        write_golden(given.names)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names or _OTHERS.get(given.library, NAMES):
        found = sweeping.run_case(
            lambda name=name: case(  # type: ignore[misc]
                name, given.library, given.out, target=given.target, old=given.old
            ),
            seconds=given.seconds,
            gigabytes=given.gigabytes,
        )
        with (given.out / "results.jsonl").open("a") as log:
            log.write(json.dumps({"name": name, **found}) + "\n")
        print(f"{name:14} {_tell(found)}", flush=True)


def _tell(found: dict[str, Any]) -> str:
    """Returns a result on one line."""
    if "lines" not in found:
        return f"{found['class']}: {found.get('reason', '')}"
    theirs, ours = found["lines"]
    words = [
        f"proved{' in evaluation' * bool(found.get('only_evaluation'))}"
        if found["class"] == "ok"
        else f"{found['class']}: {found['reason']}",
        f"{theirs} lines, in the file {ours}",
        f"by operations: {', '.join(found['fallen']) or 'none'}",
        f"{found['transcribed']:.0f} s, {found['seconds']:.0f} s in all",
    ]
    if "old" in found:
        words.append("today's file: {} lines, {} s".format(*found["old"]))
    return "; ".join(words)


_OTHERS = {
    "transformers": translate.ARCHITECTURES.split(),
    "torchvision": [*translate.TORCHVISION],
    "timm": [*translate.TIMM],
}

if __name__ == "__main__":
    main()
