"""`python -m fmapper`: what this machine has, where a model spends its time, and conversion."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from fmapper.backends.adapter import Device, DeviceInfo
from fmapper.backends.device import device_info, devices, missing
from fmapper.cli import convert, profile
from fmapper.errors import FmapperError

Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
"""What it is good for, what adds its options, and what runs it and gives the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 1 where it failed."""
    parser = argparse.ArgumentParser(prog="python -m fmapper", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (purpose, add_options, _) in COMMANDS.items():
        add_options(commands.add_parser(name, help=purpose, description=purpose))
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command][2](options)
    except (FmapperError, OSError, ValueError) as error:
        print(f"fmapper {options.command}: {error}", file=sys.stderr)
        return 1


def run_devices(options: argparse.Namespace) -> int:
    """Prints the table of devices."""
    print_devices()
    return 0


def print_devices() -> None:
    """Prints every device of every installed backend, and why there are not more."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    found = devices()
    if found:
        table = Table("device", "name")
        for heading in ("total", "free"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.columns[0].no_wrap = True
        for device in found:
            info = _ask(device)
            row = (str(device), info.name or "", _size(info.total), _size(info.free))
            table.add_row(*map(Text, row))
        console.print(table)
    else:
        console.print("No backend is installed.")
    for backend, reason in missing().items():
        # One line each, however narrow: the commands in it are there to be copied.
        console.print(Text(f"{backend}: {reason}"), soft_wrap=True)


def _ask(device: Device) -> DeviceInfo:
    """What a device says of itself, or what kept it from answering."""
    try:
        return device_info(device)
    except RuntimeError as error:  # in use by somebody else alone, out of memory, gone
        return DeviceInfo(device, f"does not answer: {str(error).splitlines()[0]}")


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.1f} GiB"


def _no_options(parser: argparse.ArgumentParser) -> None:
    """For a command that takes none."""


COMMANDS: dict[str, Command] = {
    "devices": ("every device, its memory, and what is missing", _no_options, run_devices),
    "convert": (
        "make a JAX or Flax model of a torch module, and say how exact and how fast it is",
        convert.add_options,
        convert.run,
    ),
    "profile": (
        "where the time of a model goes, and from which batch size an accelerator pays",
        profile.add_options,
        profile.run,
    ),
}
