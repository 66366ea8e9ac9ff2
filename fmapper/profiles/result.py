"""The results of a profile: times by device and batch size, and verdicts on accelerators."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fmapper.backends.compute import Counts
from fmapper.errors import ProfileError
from fmapper.profiles.timing import Timing
from fmapper.render import as_html, as_text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

_FORMAT = "fmapper-profile-1"
Pays = Literal["yes", "no", "grey"]


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """The times of one device at one batch size, in seconds per run.

    Attributes:
        device: The device, or the device that was predicted.
        batch_size: The number of samples in a run.
        transfer_in: To transfer the inputs from NumPy arrays on the host; on a CPU, to convert them
            to arrays of the backend.
        compute: To run the model until its results are computed.
        transfer_out: To transfer the results back to NumPy arrays on the host.
        total: The sum of the three.
        share_moving: The share of the transfers in the total, from 0 to 1.
        first_call: The very first run, in which JAX and `compile=True` compile; a single value.
            None for a prediction.
        bytes_in: Bytes of the inputs.
        bytes_out: Bytes of the results.
        arrays_in: The number of input arrays.
        arrays_out: The number of result arrays.
        host_in: For a prediction, the part of `transfer_in` that the backend spends on the host,
            which was measured on the CPU.
        host_out: For a prediction, the part of `transfer_out` that it spends on the host.
        bound: The part that takes most of the time: `launch`, the fixed cost of a run, `transfer`
            or `compute`. None if a single batch size cannot determine it.
        predicted: Whether the cell is predicted for `Profile.accelerator`, not measured.
        counts: The operations and bytes of a run, if they were counted.
    """

    device: str
    batch_size: int
    transfer_in: Timing
    compute: Timing
    transfer_out: Timing
    total: Timing
    share_moving: Timing
    first_call: float | None
    bytes_in: int
    bytes_out: int
    arrays_in: int = 1
    arrays_out: int = 1
    host_in: float = 0.0
    host_out: float = 0.0
    bound: str | None = None
    predicted: bool = False
    counts: Counts | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an accelerator: from which batch size it pays, and why.

    Attributes:
        device: The accelerator.
        against: The fastest CPU at small batches; each batch size is compared with its fastest.
        batch_size: The break-even: from this batch size on, the accelerator is faster. None if it
            never is, or if fewer than two batch sizes were measured.
        low: The break-even in the best case of the ranges.
        high: The break-even in the worst case; None if the accelerator does not pay then.
        pays: Batch size -> `yes`, `no`, or `grey` if the times are too close to tell.
        bound: What limits it at the smallest batch size.
        reason: A summary in one line.
        advice: What would help, cheapest first.
        predicted: Whether the verdict rests on a prediction.
    """

    device: str
    against: str
    batch_size: int | None
    low: int | None
    high: int | None
    pays: dict[int, Pays]
    bound: str | None
    reason: str
    advice: str
    predicted: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a model, made by `profile`. It prints as a table.

    Attributes:
        model: The class of the model.
        cells: The measurements and predictions, by device and batch size.
        verdicts: For each accelerator, from which batch size it pays.
        notes: Measurements that failed, and why.
        accelerator: The accelerator of the predictions; None if there are none.
    """

    model: str
    cells: tuple[ProfileCell, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    accelerator: str | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, each once."""
        return tuple(dict.fromkeys(cell.device for cell in self.cells))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes, each once, in order."""
        return tuple(sorted({cell.batch_size for cell in self.cells}))

    @property
    def fastest(self) -> dict[int, str]:
        """The fastest device that was measured, by batch size."""
        fastest: dict[int, str] = {}
        for size in self.batch_sizes:
            cells = [c for c in self.cells if c.batch_size == size and not c.predicted]
            if cells:
                fastest[size] = min(cells, key=lambda cell: cell.total.median).device
        return fastest

    def cell(self, device: str, batch_size: int) -> ProfileCell:
        """Returns the cell of one device at one batch size.

        Raises:
            KeyError: There is no such cell.
        """
        for cell in self.cells:
            if (cell.device, cell.batch_size) == (device, batch_size):
                return cell
        raise KeyError(
            f"{device} at batch size {batch_size} is not in this profile. It has "
            f"{', '.join(self.devices)} at {', '.join(map(str, self.batch_sizes))}."
        )

    def to_json(self) -> str:
        """Returns the profile as JSON, for `from_json`."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads a profile that `to_json` has written.

        Raises:
            ValueError: The text is not the JSON of a profile.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"this is not the JSON of a profile: its format is not {_FORMAT!r}.")
        return cls(
            data["model"],
            tuple(map(_cell, data["cells"])),
            tuple(map(_verdict, data["verdicts"])),
            tuple(data["notes"]),
            data["accelerator"],
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots time and share of transfers over the batch size, into a file.

        Needs matplotlib, as in the extra `plot`.

        Args:
            path: The file; its suffix, such as `.png` or `.svg`, chooses the format.

        Raises:
            BackendUnavailableError: matplotlib is not installed.
        """
        from fmapper.profiles.plot import plot

        if not self.cells:
            raise ProfileError("there is nothing to plot: no cell was measured.")
        plot(self, path)

    def __str__(self) -> str:
        """Returns the table, as plain text."""
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Profile of {self.model}: {', '.join(self.devices)}>"

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from fmapper.profiles.table import render

        return render(self, options.max_width)


def _cell(data: dict[str, Any]) -> ProfileCell:
    timings = ("transfer_in", "compute", "transfer_out", "total", "share_moving")
    fields = {**data, **{name: Timing(**data[name]) for name in timings}}
    if data["counts"] is not None:
        fields["counts"] = Counts(**{**data["counts"], "unseen": tuple(data["counts"]["unseen"])})
    return ProfileCell(**fields)


def _verdict(data: dict[str, Any]) -> Verdict:
    return Verdict(**{**data, "pays": {int(size): word for size, word in data["pays"].items()}})
