"""Plots: memory by part of a model, difference by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fmapper.backends.discovery import install_command
from fmapper.errors import BackendUnavailableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_BAR = 0.3  # inches


def axes_for(what: str, bars: int, axes: Axes | None = None) -> Axes:
    """Returns axes for horizontal bars: the given ones, or those of a new figure.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise BackendUnavailableError(
            f"{what} needs matplotlib, which is not installed ({error}). "
            f"Install it: {install_command('matplotlib')}"
        ) from error

    _, new = pyplot.subplots(figsize=(8, 1.6 + _BAR * max(bars, 2)), layout="constrained")
    return new


class Bar(NamedTuple):
    """A layer in a plot of differences: its name, relative difference, limit, and verdict."""

    name: str
    share: float
    allowed: float
    ok: bool


def draw_memory(mover: str, sizes: Mapping[str, Mapping[str, int]], axes: Axes | None) -> Axes:
    """Plots the bytes that a mover allocates by part of the model, one colour per device."""
    axes = axes_for("a plan", len(sizes), axes)
    total = {part: sum(by_device.values()) for part, by_device in sizes.items()}
    scale, unit = next(
        (pair for pair in _UNITS if max(total.values(), default=0) >= pair[0]), _UNITS[-1]
    )
    ends = dict.fromkeys(sizes, 0.0)
    for to in dict.fromkeys(device for by_device in sizes.values() for device in by_device):
        widths = [by_device.get(to, 0) / scale for by_device in sizes.values()]
        axes.barh([*sizes], widths, left=[*ends.values()], label=to)
        for name, width in zip(sizes, widths, strict=True):
            ends[name] += width
    axes.invert_yaxis()  # the first part on top
    axes.set(xlabel=f"new memory in {unit}", title=f"Memory of {mover}")
    if sizes:
        axes.legend(title="on")
    shares = ", ".join(f"{part} {size / scale:.3g} {unit}" for part, size in total.items())
    axes.set_label(f"New memory of {mover} by part: {shares or 'none'}.")
    return axes


def draw_differences(layers: Sequence[Bar], axes: Axes | None) -> Axes:
    """Plots the difference of each layer, relative to its largest element."""
    axes = axes_for("a report", len(layers), axes)
    names = [layer.name for layer in layers]
    shares = [layer.share for layer in layers]
    limits = [layer.allowed for layer in layers]
    finite = [share for share in shares if math.isfinite(share)]
    top = 10 * max((*finite, *limits))
    low = min((value for value in (*finite, *limits) if value), default=top) / 10
    shown = [min(max(share, low), top) for share in shares]
    colors = ["C0" if layer.ok else "C3" for layer in layers]
    axes.barh(names, shown, color=colors)
    axes.plot([limit or math.nan for limit in limits], names, "k|", markersize=12, label="allowed")
    axes.invert_yaxis()  # the first layer on top
    axes.set(
        xscale="log",
        xlim=(low, 2 * top),
        xlabel="largest difference / largest element",
        title="Difference by layer",
    )
    axes.legend()
    worst = max(layers, key=lambda layer: layer.share)
    wrong = [layer.name for layer in layers if not layer.ok]
    axes.set_label(
        f"Difference by layer: {len(layers) - len(wrong)} of {len(layers)} agree, "
        f"{worst.name} differs most, by {worst.share:.1e} of its largest element"
        + (f"; beyond what is allowed are {', '.join(wrong)}." if wrong else ".")
    )
    return axes
