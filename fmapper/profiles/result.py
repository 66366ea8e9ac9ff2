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
    """One device at one batch size. All times are seconds of one run.

    Attributes:
        device: The device; of a prediction, where it would run.
        batch_size: How many samples go in at once.
        transfer_in: To bring the inputs there from NumPy arrays on the host; on a CPU, to make
            arrays of the backend from them.
        compute: To run the model on what is there, until its results are.
        transfer_out: To bring the results back to the host as NumPy arrays.
        total: All three.
        share_moving: Share of the total that the transfers take, from 0 to 1.
        first_call: The first run of all, in which JAX and `compile=True` compile; one value, since
            there is only one first run. None for a prediction.
        bytes_in: Bytes of the inputs.
        bytes_out: Bytes of the results.
        arrays_in: How many arrays the inputs are.
        arrays_out: How many arrays the results are.
        host_in: Of a prediction, the part of `transfer_in` that the backend takes on the host,
            which was measured with the CPU as its target.
        host_out: The same for `transfer_out`.
        bound: What most of the time goes to: `launch` for what each run costs whatever its size,
            `transfer`, or `compute`. None where one batch size alone cannot tell.
        predicted: Not measured, see `Profile.accelerator`.
        counts: What a run asks for, where that was counted.
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
        against: The fastest CPU at small batches; at every batch size the fastest is compared.
        batch_size: The break-even: from here on the accelerator is faster. None if it never is, or
            if fewer than two batch sizes were measured.
        low: The same if everything goes as well as it can.
        high: The same if nothing does; None if it does not pay then.
        pays: Batch size -> `yes`, `no`, or `grey` where the times are too close to tell.
        bound: What keeps it from being faster at the smallest batch size.
        reason: All of that in one line.
        advice: What would help, cheapest first.
        predicted: It is not a measurement.
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
        model: What was profiled.
        cells: The measurements and predictions, by device and batch size.
        verdicts: For each accelerator, from which batch size it pays.
        notes: What could not be seen, and why.
        accelerator: What the predictions are for; None if there are none.
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
        found: dict[int, str] = {}
        for size in self.batch_sizes:
            cells = [c for c in self.cells if c.batch_size == size and not c.predicted]
            if cells:
                found[size] = min(cells, key=lambda cell: cell.total.median).device
        return found

    def cell(self, device: str, batch_size: int) -> ProfileCell:
        """Returns the cell of one device at one batch size.

        Raises:
            KeyError: There is no such cell.
        """
        for found in self.cells:
            if (found.device, found.batch_size) == (device, batch_size):
                return found
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
            ValueError: It is no such JSON.
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
            path: The file; its suffix says what kind, `.png` or `.svg` for example.

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
    known = {**data, **{name: Timing(**data[name]) for name in timings}}
    if data["counts"] is not None:
        known["counts"] = Counts(**{**data["counts"], "unseen": tuple(data["counts"]["unseen"])})
    return ProfileCell(**known)


def _verdict(data: dict[str, Any]) -> Verdict:
    return Verdict(**{**data, "pays": {int(size): word for size, word in data["pays"].items()}})
