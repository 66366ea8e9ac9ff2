"""Models as repositories write them, transcribed to Flax, proved, and put beside today's files.

For each model it prints whether its file is proved, the lines of the source's classes and of the
file's, and the seconds without the proof and with it.

    PYTHONPATH=tests python -m sweeps.transcription --out FOLDER [--old] [NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fmapper import ConversionError, source
from fmapper_translate import transcribe

NAMES = (
    "nanogpt", "resnet", "mobilenetv3", "ghostnet", "nbeats", "t5", "xlstm", "unet", "fno",
    "pointnet", "vqvae", "dcgan", "segformer", "tagger", "gnn", "nerf", "dit", "conformer",
    "mamba", "perceiver",
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


def case(name: str, out: Path, *, old: bool) -> None:
    """Transcribes one model, proves its file, and writes it."""
    module, model, inputs, arguments = build(name)
    text = inspect.getsource(module)
    began = time.monotonic()
    try:
        made = transcribe(model, inputs, arguments)
    except ConversionError as error:
        print(f"{name:12} not transcribed: {error}", flush=True)
        return
    seconds = time.monotonic() - began
    (out / f"{name}_new.py").write_text(made.code)
    names = definitions(text) & definitions(made.code)
    counts = f"{lines(text, names)} lines, in the file {lines(made.code, names)}"
    try:
        proof = made.prove(model, inputs)
        verdict = f"proved: {'yes' if proof else f'no, {proof}'}"
    except ConversionError as error:
        verdict = f"proved: no, {error}"
    whole = time.monotonic() - began
    print(f"{name:12} {verdict}; {counts}; {seconds:.0f} s, {whole:.0f} s in all", flush=True)
    if old:
        began = time.monotonic()
        code = source(model, "flax", inputs)
        (out / f"{name}_old.py").write_text(code)
        taken = len([row for row in code.splitlines() if row.strip()])
        print(f"{'':12} today's file: {taken} lines, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    """Runs the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--old", action="store_true", help="write the files of today beside them")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in given.names:
        case(name, given.out, old=given.old)


if __name__ == "__main__":
    main()
