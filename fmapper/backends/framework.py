"""The base of all facets of an adapter: its name."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fmapper.checkpoints.formats.format import Format
    from fmapper.checkpoints.recording.record import Recording
    from fmapper.checkpoints.recording.recorder import Recorder


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
