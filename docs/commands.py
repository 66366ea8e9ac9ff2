"""Writes the reference of the command line from the commands themselves: `python docs/commands.py`.

Everything below the marker in `docs/reference/command-line.md` is written; the rest is kept.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from fmapper.cli.main import NAME, command

PAGE = Path(__file__).parent / "reference" / "command-line.md"
MARKER = "<!-- written by docs/commands.py -->\n"
WIDTH = 78  # of a block of code


def page() -> str:
    """Returns the text that the page should have."""
    kept, marker, _ = PAGE.read_text().partition(MARKER)
    return kept + marker + "\n" + "\n".join(_sections(command, NAME))


def _sections(of: click.Command, name: str) -> Iterator[str]:
    if isinstance(of, click.Group):
        for word, inner in of.commands.items():
            yield from _sections(inner, f"{name} {word}")
        return
    arguments = [p for p in of.params if isinstance(p, click.Argument)]
    options = [p for p in of.params if isinstance(p, click.Option)]
    usage = [name, *(p.make_metavar(click.Context(of)) for p in arguments)]
    yield f"## `{name}`\n"
    yield "```text"
    yield " ".join([*usage, *["[OPTIONS]"] * bool(options)])
    yield "```\n"
    yield (
        inspect.cleandoc(of.help or "").replace("FILE:MODEL", "`FILE:MODEL`")
        + "\n"
    )
    if options:
        yield "| option | meaning |"
        yield "|---|---|"
        yield from map(_row, options)
        yield ""
    if of.epilog:
        lines = inspect.cleandoc(of.epilog.replace("\b\n", "")).splitlines()[
            1:
        ]
        yield "```console"
        yield from map(
            _broken, inspect.cleandoc("\n".join(lines)).splitlines()
        )
        yield "```\n"


def _broken(line: str) -> str:
    """Breaks a command that is too wide for a page before its first option."""
    line = re.sub(r"  +#", "  #", line)
    start, space, options = line.partition(" --")
    return f"{start} \\\n   {space}{options}" if len(line) > WIDTH else line


def _row(option: click.Option) -> str:
    names = ", ".join(
        f"`{name}`" for name in [*option.opts, *option.secondary_opts]
    )
    value = (
        ""
        if option.is_flag
        else f" `{option.make_metavar(click.Context(command))}`"
    )
    notes = ["required"] * option.required
    if option.show_default:
        notes.append(f"default: {option.default}")
    text = (option.help or "").replace("|", r"\|")
    return f"| {names}{value} | {text}{' (' * bool(notes)}{'; '.join(notes)}{')' * bool(notes)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
