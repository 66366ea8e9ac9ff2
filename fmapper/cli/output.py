"""Output of commands: reports, and files that are written atomically."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)


def check_folders(*paths: Path | None) -> None:
    """Checks that files can be written, before anything is computed.

    Raises:
        FileNotFoundError: The folder of a path does not exist.
    """
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(
                f"the folder {path.resolve().parent} for {path.name} does not exist."
            )


def print_report(report: Any) -> None:
    """Prints a report in the width of the terminal, or 120 columns wide to a file or a pipe."""
    from rich.console import Console

    # rich would take a pipe for a terminal of 80 columns
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(highlight=False, width=120 if piped else None).print(report)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path whose file replaces `path` when the block ends.

    After an error, or Ctrl-C, it is deleted and `path` is unchanged.
    """
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
