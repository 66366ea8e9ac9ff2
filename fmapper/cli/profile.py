"""`python -m fmapper profile FILE:MODEL`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmapper.profiles.result import Profile


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "model",
        metavar="FILE:MODEL",
        help="a model in a Python file: an instance, a class, or a function that makes one",
    )
    parser.add_argument(
        "--inputs",
        required=True,
        help="what goes in, at any batch size: 'randn(1,3,32,32)', 'randint(0,99,(1,8)), 2.0', or "
        "FILE:INPUTS for an array, a tuple, or a function of the batch size",
    )
    parser.add_argument(
        "--batch-sizes",
        type=_sizes,
        default=(1, 8, 64, 512),
        metavar="N,N,...",
        help="default: 1,8,64,512",
    )
    parser.add_argument(
        "--devices",
        type=_words,
        metavar="DEVICE,...",
        help="such as torch:cpu,jax:cpu,torch:cuda; default: the first of each kind everywhere",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for each device and batch size; default: 0.5"
    )
    parser.add_argument(
        "--train", action="store_true", help="with the gradient of what the model returns"
    )
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument(
        "--no-predict", action="store_true", help="leave out accelerators that are not here"
    )
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="what to predict for: H200 (default), H100, A100, L4, V100, T4",
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="write everything there")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="draw it (needs fmapper[plot])")


def run(options: argparse.Namespace) -> int:
    """Profiles, prints the table, writes the files."""
    from rich.console import Console

    for path in (options.json, options.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.resolve().parent} for {path.name}.")
    made = _profile(options)
    # A file or a pipe is as wide as it is to be; rich would take it for 80 columns.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(highlight=False, width=120 if piped else None).print(made)
    if options.json is not None:
        options.json.write_text(made.to_json() + "\n", encoding="utf-8")
    if options.plot is not None:
        made.plot(options.plot)
    return 0


def _profile(options: argparse.Namespace) -> Profile:
    from fmapper.cli.target import load_model
    from fmapper.profiles.profile import profile

    return profile(
        load_model(options.model),
        inputs_of(options.inputs),
        options.devices,
        options.batch_sizes,
        train=options.train,
        compile=True if options.compile else None,
        seconds=options.seconds,
        predict=not options.no_predict,
        accelerator=options.accelerator,
    )


def inputs_of(text: str) -> Any:
    """Inputs from `FILE:INPUTS` or an expression: which of them it is shows in the text.

    Raises:
        TargetError: It is neither.
    """
    from fmapper.cli.target import load_target
    from fmapper.profiles.example_inputs import read_inputs

    file, _, name = text.rpartition(":")
    if file.endswith(".py") and name.replace(".", "_").isidentifier():
        return load_target(text)
    return read_inputs(text)


def _sizes(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: write positive integers, such as 1,8,64")
    return tuple(map(int, words))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
