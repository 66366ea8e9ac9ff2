"""Plots of a profile: time and share of transfers over the batch size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fmapper.backends.discovery import install_command
from fmapper.errors import BackendUnavailableError

if TYPE_CHECKING:
    from fmapper.profiles.result import Profile


def plot(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Plots a profile into a file.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which has windows and global state
    except ImportError as error:
        raise BackendUnavailableError(
            f"a profile needs matplotlib, which is not installed ({error}). "
            f"Install it: {install_command('matplotlib')}"
        ) from error

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time, share = figure.subplots(1, 2)
    for number, device in enumerate(profile.devices):
        cells = [cell for cell in profile.cells if cell.device == device]
        cells.sort(key=lambda cell: cell.batch_size)
        sizes = [cell.batch_size for cell in cells]
        predicted = any(cell.predicted for cell in cells)
        label = f"{device} (predicted)" if predicted else device
        look = {"color": f"C{number}", "linestyle": "--" if predicted else "-", "marker": "o"}
        time.plot(sizes, [1e3 * cell.total.median for cell in cells], label=label, **look)
        time.fill_between(
            sizes,
            [1e3 * cell.total.lower for cell in cells],
            [1e3 * cell.total.upper for cell in cells],
            color=look["color"],
            alpha=0.2,
        )
        share.plot(sizes, [100 * cell.share_moving.median for cell in cells], **look)
    for verdict in profile.verdicts:
        if verdict.batch_size is not None and verdict.batch_size > 1:
            color = f"C{profile.devices.index(verdict.device)}"
            time.axvline(verdict.batch_size, color=color, linestyle=":")
    time.set(xscale="log", yscale="log", xlabel="batch size", ylabel="ms per run")
    time.set_title("total, with quartiles or range; dotted: break-even", fontsize="medium")
    share.set(xscale="log", ylim=(0, 100), xlabel="batch size", ylabel="% of the time")
    share.set_title("share of moving data", fontsize="medium")
    for axes in (time, share):
        axes.set_xticks(profile.batch_sizes, [f"{size:,}" for size in profile.batch_sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    time.legend()
    figure.suptitle(f"Where the time of {profile.model} goes")
    figure.savefig(path, dpi=150)
