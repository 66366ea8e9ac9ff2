"""`fmapper devices`."""

from __future__ import annotations

import click

from fmapper.backends.arrays import Device, DeviceInfo
from fmapper.backends.device import device_info, missing_devices
from fmapper.backends.device import devices as every_device
from fmapper.backends.discovery import memory_advice


@click.command()
def devices() -> None:
    """Print every device of every installed backend, its memory, and what is missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    listed = every_device()
    if listed:
        table = Table("device", "name")
        for heading in ("total", "free"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.columns[0].no_wrap = True
        for device in listed:
            info = _ask(device)
            row = (str(device), info.name or "", _size(info.total), _size(info.free))
            table.add_row(*map(Text, row))
        console.print(table)
    else:
        console.print("No backend is installed.")
    for advice in memory_advice():
        console.print(Text(advice), soft_wrap=True)
    for backend, reason in missing_devices().items():
        # One line each at any width of the terminal, so that commands can be copied.
        console.print(Text(f"{backend}: {reason}"), soft_wrap=True)


def _ask(device: Device) -> DeviceInfo:
    """Returns the description of a device, or the error that it raised."""
    try:
        return device_info(device)
    except RuntimeError as error:  # in exclusive use, out of memory, or gone
        return DeviceInfo(device, f"does not answer: {str(error).splitlines()[0]}")


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.1f} GiB"
