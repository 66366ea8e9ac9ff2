"""`fmapper checkpoint convert IN OUT`, `inspect PATH` and `diff A B`."""

from __future__ import annotations

from pathlib import Path

import click

from fmapper.cli.output import PATH
from fmapper.render import readable_bytes, readable_seconds

CONVERT = """
\b
Examples:
  fmapper checkpoint convert llama/ llama-bf16/ --to safetensors --dtype bfloat16
  fmapper checkpoint convert llama-fp8/ llama-bf16/ --to safetensors --dequantize
  fmapper checkpoint convert model.pt model.orbax --rules rename.toml
"""
INSPECT = """
\b
Examples:
  fmapper checkpoint inspect model.safetensors
  fmapper checkpoint inspect ~/models/llama       # a folder of shards
  fmapper checkpoint inspect s3://bucket/llama    # through fsspec; of safetensors
"""
DIFF = """
\b
Examples:
  fmapper checkpoint diff before.safetensors after.safetensors
  fmapper checkpoint diff checkpoints/100 model.pt --headers
"""


@click.group()
def checkpoint() -> None:
    """Convert, list or compare checkpoints: arrays in files, of any format."""


@checkpoint.command(epilog=CONVERT)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option(
    "--to",
    metavar="FORMAT",
    help="safetensors, orbax, flax, npz, torch or dcp (default: by the ending of OUT, else that of "
    "a folder IN).",
)
@click.option("--dtype", help="The dtype of the floating arrays.")
@click.option("--dequantize", is_flag=True, help="Make quantised arrays dense.")
@click.option("--rules", type=PATH, help="Rules for names and shapes of the arrays, as TOML.")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="The bytes in each file of a folder of safetensors, such as 2GB (default: 5GB).",
)
@click.option("--check/--no-check", default=True, help="Compare what was written (default).")
def convert(
    source: str,
    target: str,
    to: str | None,
    dtype: str | None,
    dequantize: bool,
    rules: Path | None,
    max_shard_size: str | None,
    check: bool,
) -> int:
    """Convert a checkpoint to another format, piece by piece, and compare what was written.

    The same command continues a conversion that was interrupted. A complete one is only compared.
    """
    from fmapper.checkpoints import Rules, convert_checkpoint

    done = convert_checkpoint(
        source,
        target,
        to,
        dtype=dtype,
        rules=None if rules is None else Rules.from_toml(rules),
        dequantize=dequantize,
        max_shard_size=max_shard_size,
        check=check,
    )
    rate = readable_bytes(int(done.nbytes / max(done.seconds, 1e-6)))
    print(
        f"{done.path}: {done.format}, {done.arrays} arrays, {readable_bytes(done.nbytes)} "
        f"in {readable_seconds(done.seconds)}, {rate}/s{', compared' * check}"
    )
    return 0


@checkpoint.command(epilog=INSPECT)
@click.argument("path")
def inspect(path: str) -> int:
    """List the arrays of a checkpoint: names, shapes, dtypes, bytes, ties; from headers alone."""
    from fmapper.checkpoints import inspect as inspect_checkpoint

    print(inspect_checkpoint(path))
    return 0


@checkpoint.command(epilog=DIFF)
@click.argument("first")
@click.argument("second")
@click.option("--headers", is_flag=True, help="Compare only names, shapes and dtypes.")
def diff(first: str, second: str, headers: bool) -> int:
    """Compare two checkpoints. The exit status is 1 if anything differs."""
    from fmapper.checkpoints import diff as diff_checkpoints

    differences = diff_checkpoints(first, second, values=not headers)
    print(differences)
    return int(bool(differences))
