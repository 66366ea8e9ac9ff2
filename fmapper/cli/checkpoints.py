"""`fmapper inspect PATH`, `fmapper diff A B`, and `fmapper convert IN OUT`."""

from __future__ import annotations

from pathlib import Path

import click

from fmapper.render import readable_bytes, readable_seconds

INSPECT = """
\b
Examples:
  fmapper inspect model.safetensors
  fmapper inspect ~/models/llama          # a folder of shards
  fmapper inspect s3://bucket/llama       # through fsspec; of safetensors
"""
DIFF = """
\b
Examples:
  fmapper diff before.safetensors after.safetensors
  fmapper diff checkpoints/100 model.pt --headers
"""


@click.command(epilog=INSPECT)
@click.argument("path")
def inspect(path: str) -> int:
    """List the arrays of a checkpoint: names, shapes, dtypes, bytes, ties; from headers alone."""
    from fmapper.checkpoints import inspect as inspect_checkpoint

    print(inspect_checkpoint(path))
    return 0


@click.command(epilog=DIFF)
@click.argument("first")
@click.argument("second")
@click.option("--headers", is_flag=True, help="Compare only names, shapes and dtypes.")
def diff(first: str, second: str, headers: bool) -> int:
    """Compare two checkpoints. The exit status is 1 if anything differs."""
    from fmapper.checkpoints import diff as diff_checkpoints

    found = diff_checkpoints(first, second, values=not headers)
    print(found)
    return int(bool(found))


def convert_files(
    source: str,
    target: str,
    to: str | None,
    dtype: str | None,
    rules: Path | None,
    check: bool,
) -> int:
    """Converts a checkpoint and prints a line about it."""
    from fmapper.checkpoints import convert_checkpoint

    found = None
    if rules is not None:
        from fmapper.checkpoints import Rules

        found = Rules.from_toml(rules)
    done = convert_checkpoint(
        source,
        target,
        to,
        dtype=dtype,
        rules=found,
        check=check,
    )
    rate = readable_bytes(int(done.nbytes / max(done.seconds, 1e-6)))
    print(
        f"{done.path}: {done.format}, {done.arrays} arrays, {readable_bytes(done.nbytes)} "
        f"in {readable_seconds(done.seconds)}, {rate}/s{', compared' * check}"
    )
    return 0
