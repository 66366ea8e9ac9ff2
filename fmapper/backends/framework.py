"""The base of all facets of an adapter: its name, and its files."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from fmapper.backends.arrays import Device
    from fmapper.checkpoints.formats.format import Format
    from fmapper.checkpoints.recording.record import Recording
    from fmapper.checkpoints.recording.recorder import Recorder


class Reader(Protocol):
    """An array in a file: its bytes are in C order, without gaps."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def dtype(self) -> Any:
        """The dtype in NumPy or ml_dtypes."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    @property
    def extent(self) -> tuple[str, int]:
        """The file and the offset in it, by which reads are ordered."""

    def read_bytes(self, out: memoryview, start: int) -> None:
        """Fills a buffer with the bytes from `start` on; several threads may do this at once."""


class Framework(ABC):
    """A framework that fmapper supports.

    Its interface has facets such as `Arrays`, `Nodes`, `Compute` and `Models`. An adapter derives
    from those that its framework has; `Adapter` combines these four.

    Attributes:
        name: The backend's name, as in `torch:cuda:0`.
        framework: The module whose import makes the adapter load; usually the name.
    """

    name: ClassVar[str]
    framework: ClassVar[str] = ""
    lacking: ClassVar[str] = "adapter"  # what an adapter without this facet lacks

    def formats(self) -> Sequence[Format]:
        """Returns the checkpoint formats that the framework itself reads and writes."""
        return ()

    def recorder(self, recording: Recording) -> Recorder | None:
        """Returns a recorder of operations on arrays without data, for `Rules.record`."""
        return None

    def portion(self, arrays: Sequence[Any], target: Device | None) -> int | None:
        """Returns how many bytes to `export` at a time, as memory is allocated for them.

        Args:
            arrays: The arrays.
            target: The device to which they go as they are; None if they are changed before.

        Returns:
            The bytes; None for no limit.
        """
        return None

    def reads(self, device: Device) -> bool:
        """Returns whether `take` reads the files of `Reader`s into the memory of a device."""
        return False
