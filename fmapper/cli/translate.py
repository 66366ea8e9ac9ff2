"""`fmapper translate FILE:MODEL --to FRAMEWORK --out FILE`: a model as source code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fmapper.cli.convert import example_args, example_kwargs
from fmapper.cli.output import PATH, check_folders, write_text
from fmapper.errors import ConversionError, TargetError
from fmapper.files.stamp import is_edited, with_stamp
from fmapper.progress import step

if TYPE_CHECKING:
    from fmapper.verification.files.proof import Proof

EXAMPLES = """
\b
Examples:
  fmapper translate net.py:Net --to flax --example 'randn(2,3,32,32)' --out net_flax.py
  fmapper translate net.py:make --to flax --example 'randn(8,16)' --eval --tests --out net_flax.py
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", metavar="FILE:MODEL")
@click.option(
    "--to",
    required=True,
    metavar="FRAMEWORK",
    help="The target: flax (or nnx), equinox, jax or torch.",
)
@click.option(
    "--example",
    "examples",
    metavar="INPUTS",
    multiple=True,
    help="Example inputs; see `fmapper convert`.",
)
@click.option("--example-kwargs", "--kwargs", "kwargs", metavar="DICT", help="Inputs by keyword.")
@click.option(
    "--fixed",
    is_flag=True,
    help="Compare at the sizes of the examples alone (default: at others, too). A file that is "
    "written by operations takes no others then.",
)
@click.option(
    "--train/--eval",
    default=None,
    help="Require training, or prove evaluation alone (default: prove both where possible).",
)
@click.option(
    "--scan",
    is_flag=True,
    help="Write blocks that repeat as one with stacked arrays, called by a scan: it compiles "
    "one block instead of all (not for torch). Says which lists stay lists, and why.",
)
@click.option("--tests", is_flag=True, help="Write a test of the file, and its data, beside it.")
@click.option("--out", type=PATH, required=True, help="The file to write.")
@click.option(
    "--force", is_flag=True, help="Overwrite files that were edited or not written by this command."
)
def translate(
    model: str,
    to: str,
    examples: tuple[str, ...],
    kwargs: str | None,
    fixed: bool,
    train: bool | None,
    scan: bool,
    tests: bool,
    out: Path,
    force: bool,
) -> int:
    """Write a model as source code of another framework, and prove that it computes the same.

    The file is run in a process of its own. Its outputs, gradients and five training steps must
    agree with those of the model; otherwise nothing is written. A file that was edited since it was
    written is not overwritten without --force.
    """
    from fmapper.cli.target import load_model
    from fmapper.translation.source import format_code, note_arguments, transcribe_proved
    from fmapper.verification.files.written_test import file_of_test, write_test

    check_folders(out)
    edited = [path for path in (out, *((file_of_test(out),) if tests else ())) if is_edited(path)]
    if edited and not force:
        raise TargetError(
            f"{', '.join(map(str, edited))} would be overwritten, but was edited or not written by "
            "fmapper translate. Choose another --out, or pass --force."
        )
    with step(f"loading {model}"), note_arguments():
        loaded = load_model(model)
    args, given = example_args(examples), example_kwargs(kwargs)
    code, proof = "", None
    shapes = None if fixed else "auto"
    try:
        with step(f"transcribing {type(loaded).__name__} for {to}"):
            found, proof = transcribe_proved(
                loaded, to, args, given, dynamic_shapes=shapes, train=train, scan=scan
            )
    except ConversionError as error:
        if scan:
            raise
        print(f"written by its operations, not in the words of its source: {error}")
    else:
        code, title = found.whole, found.name
        print(f"{title}: {proof}")
        if found.only_evaluation:
            print(f"for evaluation only: {found.only_evaluation}")
        for function, reason in found.fallen.items():
            print(f"{function} is written by its operations: {reason}")
        for path, count in found.scans.items():
            print(f"{path}: {count} blocks are one, called by a scan")
        for path, reason in found.not_scanned.items():
            print(f"{path} is not scanned: {reason}")
    if proof is None:
        code, proof, title = _write_operations(loaded, to, args, given, shapes, train)
    if not proof:
        print(f"fmapper translate: {out} was not written: {title} differs", file=sys.stderr)
        return 1
    write_text(out, with_stamp(format_code(code)))
    print(f"written to {out}")
    if tests:
        print(f"its test is {write_test(out, proof)}")
    return 0


def _write_operations(
    model: Any,
    to: str,
    args: Any,
    kwargs: Any,
    shapes: Any,
    train: bool | None,
) -> tuple[str, Proof, str]:
    """Returns the file from the recorded operations of a model, its proof, and its class."""
    from fmapper.translation.source import check_trains, translate_for_evaluation, translate_proved
    from fmapper.translation.source import translate as run

    reason = ""
    proof: Proof | None
    if train is None:
        source, proof, reason = translate_proved(model, to, args, kwargs, shapes)
    elif train:
        source, _, proof = run(model, to, args, kwargs, shapes, True, proved=True)
        check_trains(source)
    else:
        source, proof = translate_for_evaluation(model, to, args, kwargs, shapes)
    assert proof is not None
    held, whole = source.layers
    print(f"{source.name}: {proof}")
    if reason:
        print(f"for evaluation only, since training failed: {reason}")
    print(f"{held:,} of {whole:,} parameters are in layers of {to}")
    if shapes is None:
        print("the sizes of inputs are those of the examples, and the file takes no others")
    for sentence in source.fixed:
        print(f"a size does not vary: {sentence}")
    for part, reason in source.dissolved.items():
        print(f"{part} has no code of its own: {reason}")
    return source.code, proof, source.name
