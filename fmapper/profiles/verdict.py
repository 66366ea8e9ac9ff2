"""Decides whether an accelerator pays, from which batch size, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fmapper.profiles.accelerator import Accelerator
from fmapper.profiles.predict import BEYOND, Curve, Traffic, break_even, counts_between, predict
from fmapper.profiles.result import Pays, ProfileCell, Verdict
from fmapper.profiles.timing import Timing
from fmapper.render import readable_batch, readable_bytes, readable_seconds

if TYPE_CHECKING:
    from fmapper.backends.compute import Counts

_Cost = Callable[[float], float]

_LARGE = 1 << 20  # bytes whose transfer takes longer than starting the copy


def measured_bounds(cells: Sequence[ProfileCell]) -> list[ProfileCell]:
    """Returns the cells with the dominant part of their measured times.

    The fixed cost of a run is the part that does not grow with the batch size: launches, dispatch,
    Python, and the fixed part of a copy.
    """
    return [dataclasses.replace(cell, bound=_measured_bound(cell, cells)) for cell in cells]


def _measured_bound(cell: ProfileCell, cells: Sequence[ProfileCell]) -> str | None:
    moves = cell.share_moving.median > 0.5
    if moves and cell.bytes_in + cell.bytes_out >= _LARGE:
        return "transfer"
    seconds = {c.batch_size: c.total.median for c in cells if c.device == cell.device}
    small, large = min(seconds), max(seconds)
    if small == large:
        return None
    per_sample = max((seconds[large] - seconds[small]) / (large - small), 0.0)
    if per_sample * cell.batch_size < cell.total.median / 2:
        return "launch"
    return "transfer" if moves else "compute"


def verdicts(
    cells: Sequence[ProfileCell], cards: Mapping[str, Accelerator], dtype: str = "float32"
) -> tuple[Verdict, ...]:
    """Returns one verdict per accelerator, against the CPUs.

    Args:
        cells: The measured and the predicted cells.
        cards: The accelerators of predicted devices.
        dtype: The dtype in which the model computes.
    """
    cpus = [cell for cell in cells if _is_cpu(cell)]
    names = dict.fromkeys(cell.device for cell in cells if not _is_cpu(cell))
    if not cpus:
        return ()
    results: list[Verdict] = []
    for name in names:
        measured = [cell for cell in cells if cell.device == name]
        common = sorted({c.batch_size for c in cpus} & {c.batch_size for c in measured})
        if common:
            results.append(_verdict(measured, cpus, common, cards.get(name), dtype))
    return tuple(results)


def _is_cpu(cell: ProfileCell) -> bool:
    return cell.device.split(":")[1] == "cpu"


def _verdict(
    cells: list[ProfileCell],
    cpus: list[ProfileCell],
    sizes: list[int],
    card: Accelerator | None,
    dtype: str,
) -> Verdict:
    fastest = {
        size: min((c for c in cpus if c.batch_size == size), key=lambda c: c.total.median)
        for size in sizes
    }
    by_size = {cell.batch_size: cell for cell in cells}
    likely, best, worst = _costs(cells, card, dtype)
    host = [
        Curve({size: getattr(cell.total, name) for size, cell in fastest.items()})
        for name in ("median", "upper", "lower")
    ]
    edges: list[int | None] = [None, None, None]
    if len(sizes) > 1:
        edges = [
            break_even(cost, other, sizes[0], sizes[-1])
            for cost, other in zip((likely, best, worst), host, strict=True)
        ]
    pays = {size: _pays(by_size[size].total, fastest[size].total) for size in sizes}
    always = edges[0] == sizes[0]
    looked_at = by_size[sizes[-1] if always else sizes[0]]
    return Verdict(
        cells[0].device,
        fastest[sizes[0]].device,
        edges[0],
        edges[1],
        edges[2],
        pays,
        looked_at.bound,
        _reason(looked_at, edges, sizes, pays, fastest),
        _advice(looked_at, edges[0], sizes, fastest),
        cells[0].predicted,
    )


def _costs(
    cells: list[ProfileCell], card: Accelerator | None, dtype: str
) -> tuple[_Cost, _Cost, _Cost]:
    """Returns the seconds at any batch size: the likely, the best and the worst case."""
    if cells[0].predicted and card is not None:
        by_size: dict[int, Counts] = {c.batch_size: c.counts for c in cells if c.counts is not None}
        counts = counts_between(by_size)
        bytes_in = Curve({c.batch_size: float(c.bytes_in) for c in cells})
        bytes_out = Curve({c.batch_size: float(c.bytes_out) for c in cells})
        first = cells[0]

        def total(size: float) -> Timing:
            traffic = Traffic(
                bytes_in(size),
                bytes_out(size),
                first.arrays_in,
                first.arrays_out,
                first.host_in,
                first.host_out,
            )
            return predict(counts(size), traffic, card, dtype).total

        return (
            lambda size: total(size).median,
            lambda size: total(size).lower,
            lambda size: total(size).upper,
        )
    return (
        Curve({c.batch_size: c.total.median for c in cells}),
        Curve({c.batch_size: c.total.lower for c in cells}),
        Curve({c.batch_size: c.total.upper for c in cells}),
    )


def _pays(timing: Timing, other: Timing) -> Pays:
    if timing.upper < other.lower:
        return "yes"
    return "no" if timing.lower > other.upper else "grey"


def _reason(
    cell: ProfileCell,
    edges: Sequence[int | None],
    sizes: Sequence[int],
    pays: Mapping[int, Pays],
    fastest: Mapping[int, ProfileCell],
) -> str:
    edge, low, high = edges
    host = fastest[cell.batch_size]
    words = {"yes": "pays", "no": "does not pay", "grey": "may or may not pay"}
    if len(sizes) == 1:
        start = f"{words[pays[sizes[0]]]} at batch {sizes[0]:,}, the only one that was measured"
    elif edge is None:
        start = f"does not pay up to batch {readable_batch(sizes[-1] * BEYOND)}"
        if low is not None:
            start += f", at best from {readable_batch(low)}"
    elif edge == sizes[0] and high == edge:
        start = f"pays at every batch size from {edge:,}"
    else:
        ends = [readable_batch(end) if end is not None else "never" for end in (low, high)]
        between = f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else ""
        beyond = ", beyond what was measured" if edge > sizes[-1] else ""
        start = f"pays from batch {readable_batch(edge)}{between}{beyond}"
    why = f"at {cell.batch_size:,} it is {cell.bound}-bound, " if cell.bound else ""
    return (
        f"{start}; {why}{_what_it_does(cell)}; {host.device} takes "
        f"{readable_seconds(host.total.median)} in all."
    )


def _what_it_does(cell: ProfileCell) -> str:
    compute = readable_seconds(cell.compute.median)
    about = "about " if cell.predicted else ""
    if cell.bound == "transfer":
        size = readable_bytes(cell.bytes_in + cell.bytes_out)
        return f"{about}{cell.share_moving.median:.0%} of its time moves {size}"
    if cell.bound == "launch" and cell.counts is not None:
        parts = [
            _several(cell.counts.launches, "kernel"),
            _several(cell.arrays_in + cell.arrays_out, "copy"),
        ]
        if cell.counts.syncs:
            parts.insert(1, _several(cell.counts.syncs, "wait"))
        total = readable_seconds(cell.total.median)
        return f"{', '.join(parts[:-1])} and {parts[-1]} take {about}{total}, however small"

    if cell.bound == "launch":
        return f"a run takes {readable_seconds(cell.total.median)}, however small"
    return f"computing takes {about}{compute}"


def _several(n: float, what: str) -> str:
    many = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{n:,.0f} {what if n == 1 else many}"


def _advice(
    cell: ProfileCell,
    edge: int | None,
    sizes: Sequence[int],
    fastest: Mapping[int, ProfileCell],
) -> str:
    hints: list[str] = []
    counts = cell.counts
    if cell.bound == "transfer":
        hints.append(
            "keep the data on the device between runs, or move it ahead of its use with "
            "fmapper.DeviceLoader"
        )
    elif cell.bound == "launch":
        if counts is not None and counts.syncs:
            hints.append("take .item(), bool() and .cpu() out of the forward pass")
        hints.append("larger batches cost little more")
        if counts is None or not counts.compiled:
            hints.append("torch.compile or a CUDA graph launch fewer kernels")
    else:
        hints.append("a lower precision, such as bfloat16, computes faster there")
    if edge is None and len(sizes) > 1:
        hints.insert(0, f"stay on {fastest[sizes[-1]].device}")
    elif edge is not None and edge > sizes[0]:
        hints.append(f"below batch {readable_batch(edge)} stay on {fastest[sizes[0]].device}")
    text = "; ".join(hints) + "."
    return text[0].upper() + text[1:]
