"""`fmapper transfer SOURCE TARGET --out FILE`: weights into a model that somebody else wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fmapper.cli.convert import example_args, example_kwargs
from fmapper.cli.output import PATH, check_folders, write_text
from fmapper.progress import step

EXAMPLES = """
\b
Examples:
  fmapper transfer llama/model.safetensors mine.py:make --out mine.safetensors --dry-run
  fmapper transfer theirs.py:Net mine.py:Net --example 'randn(1,3,32,32)' --rules-out net.toml \\
    --out mine.safetensors
"""


@click.command(epilog=EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="FILE:MODEL")
@click.option("--out", type=PATH, help="Save the target with the weights to this file.")
@click.option("--rules-out", type=PATH, help="Write the rules to this file, as TOML.")
@click.option("--rules", type=PATH, help="Rules as TOML; then nothing is searched for.")
@click.option("--keep", multiple=True, help="A pattern for arrays that stay as they are.")
@click.option(
    "--example",
    "examples",
    metavar="INPUTS",
    multiple=True,
    help="Example inputs of both models; see `fmapper convert`.",
)
@click.option(
    "--target-example",
    "target_examples",
    metavar="INPUTS",
    multiple=True,
    help="Example inputs of the target, if they differ.",
)
@click.option("--example-kwargs", "--kwargs", "kwargs", metavar="DICT", help="Inputs by keyword.")
@click.option("--dry-run", is_flag=True, help="Only list the pairs of arrays.")
def transfer(
    source: str,
    target: str,
    out: Path | None,
    rules_out: Path | None,
    rules: Path | None,
    keep: tuple[str, ...],
    examples: tuple[str, ...],
    target_examples: tuple[str, ...],
    kwargs: str | None,
    dry_run: bool,
) -> int:
    """Put the weights of one model into another with other names and layouts.

    SOURCE is a checkpoint, or a model in a Python file as FILE:MODEL. A table lists the pairs of
    arrays, with the evidence; an uncertain pair is an error that lists the candidates.
    """
    import fmapper
    from fmapper.checkpoints import Rules
    from fmapper.cli.target import load_model
    from fmapper.twins.transferring import plan_transfer

    check_folders(out, rules_out)
    with step("loading both models"):
        models: list[Any] = [source, load_model(target)]
        if source.rpartition(":")[0].endswith(".py"):
            models[0] = load_model(source)
    options: dict[str, Any] = {
        "rules": None if rules is None else Rules.from_toml(rules),
        "keep": keep,
        "example_inputs": example_args(examples) if examples else None,
        "target_inputs": example_args(target_examples) if target_examples else None,
        "example_kwargs": None if kwargs is None else example_kwargs(kwargs),
    }
    if dry_run or out is None:
        *_, report = plan_transfer(*models, **options)
    else:
        filled, report = fmapper.transfer(*models, **options)
    print(report)
    if rules_out is not None:
        write_text(rules_out, report.rules.to_toml())
        print(f"rules written to {rules_out}")
    if out is not None and not dry_run:
        fmapper.save(filled, out)
        print(f"saved as {out}")
    return 0
