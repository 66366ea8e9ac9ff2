"""`fmapper convert FILE:MODEL --to FRAMEWORK`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from fmapper.cli.output import PATH, check_folders, print_report, write_text
from fmapper.cli.target import inputs_of
from fmapper.errors import TargetError
from fmapper.progress import step

_KEYWORDS = 1000  # the seed of keyword inputs, which differ from positional ones

EXAMPLES = """
\b
Examples:
  fmapper convert net.py:model --to jax --example 'randn(1,3,224,224)'
  fmapper convert net.py:Net --to flax --example-kwargs "{'x': randn(2,4)}" --out net.safetensors
  fmapper convert encoder.py:make --to torch --example 'randint(0,99,(2,8))' --dynamic auto
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", metavar="FILE:MODEL")
@click.option(
    "--to",
    required=True,
    metavar="FRAMEWORK",
    help="The target: jax, flax (or nnx) or torch.",
)
@click.option(
    "--example",
    "examples",
    metavar="INPUTS",
    multiple=True,
    help="Example inputs: 'randn(1,3,224,224)', 'randint(0,99,(1,8)), 2.0', or "
    "FILE:INPUTS for an array, a tuple, or a function without arguments; may be repeated.",
)
@click.option(
    "--example-kwargs",
    "--kwargs",
    "kwargs",
    metavar="DICT",
    help="Example inputs by keyword: \"{'input_ids': randint(0,99,(1,8))}\", or FILE:KWARGS.",
)
@click.option(
    "--dynamic",
    type=click.Choice(["auto"]),
    help="Let sizes vary where the code does not fix them; give examples of two or more.",
)
@click.option("--train", is_flag=True, help="Record the training mode, without running the result.")
@click.option("--check/--no-check", default=True, help="Compare the outputs (default).")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=0.5,
    show_default=True,
    help="Seconds to spend on timing both; 0 times nothing.",
)
@click.option("--out", type=PATH, help="Save program and arrays to this file, as safetensors.")
@click.option("--json", type=PATH, help="Write the report to this file.")
def convert(
    model: str,
    to: str,
    examples: tuple[str, ...],
    kwargs: str | None,
    dynamic: str | None,
    train: bool,
    check: bool,
    seconds: float,
    out: Path | None,
    json: Path | None,
) -> int:
    """Convert a model to another framework, and report how exact and how fast the result is.

    FILE:MODEL is a model in a Python file: a torch module, or one of Flax, Equinox or JAX; an
    instance, a class, a function that makes one, or a function with its parameters.

    To convert a checkpoint to another format, use `fmapper checkpoint convert`.
    """
    from fmapper.cli.conversion import measure
    from fmapper.cli.target import load_model

    check_folders(out, json)
    with step(f"loading {model}") as say:
        report, converted = measure(
            load_model(model),
            to,
            example_args(examples),
            example_kwargs(kwargs),
            dynamic_shapes=dynamic,
            train=train,
            compare=check,
            seconds=seconds,
            say=say,
        )
    print_report(report)
    if json is not None:
        write_text(json, report.to_json() + "\n")
    if not report.ok:
        print(f"fmapper convert: {report.model} was not saved: its outputs differ", file=sys.stderr)
        return 1
    if out is not None:
        converted.save(out)
        print(f"saved as {out}")
    return 0


def example_args(texts: Iterable[str], seed: int = 0) -> tuple[Any, ...]:
    """Returns the positional inputs of all options in order, with seeds counted from `seed`."""
    several = [_make_inputs(text, number) for number, text in enumerate(texts, seed)]
    return tuple(x for group in several for x in (group if isinstance(group, tuple) else (group,)))


def example_kwargs(text: str | None) -> dict[str, Any]:
    """Returns the keyword inputs.

    Raises:
        TargetError: The text is not a dict with names as keys.
    """
    if text is None:
        return {}
    inputs = _make_inputs(text, _KEYWORDS)
    if isinstance(inputs, tuple) and len(inputs) == 1:  # the form in which expressions are read
        inputs = inputs[0]
    if not isinstance(inputs, dict) or not all(isinstance(key, str) for key in inputs):
        raise TargetError(
            f"--example-kwargs {text}: expected a dict by name, such as \"{{'x': randn(1, 3)}}\""
        )
    return inputs


def _make_inputs(text: str, seed: int) -> Any:
    inputs = inputs_of(text, seed)
    return inputs() if callable(inputs) else inputs
