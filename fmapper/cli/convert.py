"""`python -m fmapper convert FILE:MODEL --to FRAMEWORK`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.cli.profile import inputs_of
from fmapper.errors import TargetError

if TYPE_CHECKING:
    from fmapper.cli.conversion import Conversion


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "model",
        metavar="FILE:MODEL",
        help="a model in a Python file: a torch module, or one of Flax, Equinox or JAX for torch; "
        "an instance, a class, a function that makes one, a function with its parameters",
    )
    parser.add_argument("--to", required=True, metavar="FRAMEWORK", help="jax, flax or torch")
    parser.add_argument(
        "--example",
        metavar="INPUTS",
        help="what it is called with: 'randn(1,3,224,224)', 'randint(0,99,(1,8)), 2.0', or "
        "FILE:INPUTS for an array, a tuple, or a function without arguments",
    )
    parser.add_argument(
        "--kwargs",
        metavar="DICT",
        help="what it is called with by keyword: \"{'input_ids': randint(0,99,(1,8))}\", or "
        "FILE:KWARGS",
    )
    parser.add_argument(
        "--dynamic",
        choices=("auto",),
        help="auto: all sizes that the code does not fix may vary; give examples of two or more",
    )
    parser.add_argument(
        "--train", action="store_true", help="record what it does in training; not run then"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare the outputs")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="for timing calls of both; 0: time none; default: 0.5",
    )
    parser.add_argument(
        "--out", metavar="PATH", type=Path, help="save program and arrays there, as safetensors"
    )
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the report there")


def run(options: argparse.Namespace) -> int:
    """Converts, prints the report, writes the files; 1 if the outputs differ."""
    from rich.console import Console

    for path in (options.out, options.json):
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.resolve().parent} for {path.name}.")
    report, converted = _measured(options)
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(highlight=False, width=120 if piped else None).print(report)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n", encoding="utf-8")
    if not report.ok:
        print(f"fmapper convert: {report.model} was not saved: its outputs differ", file=sys.stderr)
        return 1
    if options.out is not None:
        converted.save(options.out)
        print(f"saved as {options.out}")
    return 0


def _measured(options: argparse.Namespace) -> tuple[Conversion, Any]:
    from fmapper.cli.conversion import measured
    from fmapper.cli.target import load_model

    return measured(
        load_model(options.model),
        options.to,
        _args(options.example),
        _kwargs(options.kwargs),
        dynamic_shapes=options.dynamic,
        train=options.train,
        compare=not options.no_verify,
        seconds=options.seconds,
    )


def _args(text: str | None) -> tuple[Any, ...]:
    if text is None:
        return ()
    found = _made(text)
    return found if isinstance(found, tuple) else (found,)


def _kwargs(text: str | None) -> dict[str, Any]:
    """The inputs by keyword.

    Raises:
        TargetError: It is no dict by name.
    """
    if text is None:
        return {}
    found = _made(text)
    if isinstance(found, tuple) and len(found) == 1:  # as expressions are read
        found = found[0]
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise TargetError(f"--kwargs {text}: a dict by name is wanted, as \"{{'x': randn(1, 3)}}\"")
    return found


def _made(text: str) -> Any:
    found = inputs_of(text)
    return found() if callable(found) else found
