"""`fmapper profile FILE:MODEL --example INPUTS`."""

from __future__ import annotations

from pathlib import Path

import click

from fmapper.cli.output import PATH, check_folders, print_report, whole_file, write_text
from fmapper.cli.target import inputs_of, load_model

EXAMPLES = """
\b
Examples:
  fmapper profile net.py:model --example 'randn(1,3,32,32)'
  fmapper profile net.py:make --example net.py:batch --devices torch:cpu,jax:cpu --train
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", metavar="FILE:MODEL")
@click.option(
    "--example",
    "example",
    metavar="INPUTS",
    required=True,
    help="Example inputs at any batch size: 'randn(1,3,32,32)', 'randint(0,99,(1,8)), 2.0', or "
    "FILE:INPUTS for an array, a tuple, or a function of the batch size.",
)
@click.option("--batch-sizes", metavar="N,N,...", default="1,8,64,512", show_default=True)
@click.option(
    "--devices",
    metavar="DEVICE,...",
    help="Devices such as torch:cpu,jax:cpu,torch:cuda (default: the first of each kind).",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=0.5,
    show_default=True,
    help="Seconds to spend on each device and batch size.",
)
@click.option("--train", is_flag=True, help="Include the gradient of the result.")
@click.option("--compile", is_flag=True, help="Use torch.compile.")
@click.option(
    "--predict/--no-predict",
    default=True,
    help="Predict accelerators that are not here (default).",
)
@click.option(
    "--accelerator",
    metavar="NAME",
    help="The accelerator to predict: H200 (default), H100, A100, L4, V100, T4.",
)
@click.option("--json", type=PATH, help="Write all results to this file.")
@click.option("--plot", type=PATH, help="Draw the results to this file (needs matplotlib).")
def profile(
    model: str,
    example: str,
    batch_sizes: str,
    devices: str | None,
    seconds: float,
    train: bool,
    compile: bool,
    predict: bool,
    accelerator: str | None,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Measure where the time of a model goes, and from which batch size an accelerator pays.

    FILE:MODEL is a model in a Python file: an instance, a class, or a function that makes one.
    """
    from fmapper.profiles.profile import profile as measure

    check_folders(json, plot)
    result = measure(
        load_model(model),
        inputs_of(example),
        None if devices is None else _words(devices),
        _sizes(batch_sizes),
        train=train,
        compile=True if compile else None,
        seconds=seconds,
        predict=predict,
        accelerator=accelerator,
    )
    print_report(result)
    if json is not None:
        write_text(json, result.to_json() + "\n")
    if plot is not None:
        with whole_file(plot) as beside:
            result.plot(beside)


def _sizes(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(
            f"{text!r}: write positive integers, such as 1,8,64", param_hint="--batch-sizes"
        )
    return tuple(map(int, words))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
