"""The interface of a framework whose arrays without data scripts run on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.recording import arithmetic

if TYPE_CHECKING:
    from fmapper.checkpoints.recording.record import Recording

T = TypeVar("T")


class Recorder(ABC):
    """Makes arrays of a framework that stand for lazy ones, and follows what is done to them.

    Args:
        recording: The recording, which knows the recorders of all frameworks.
    """

    add: ClassVar[Callable[..., LazyArray]] = staticmethod(arithmetic.add)
    subtract: ClassVar[Callable[..., LazyArray]] = staticmethod(arithmetic.subtract)
    multiply: ClassVar[Callable[..., LazyArray]] = staticmethod(arithmetic.multiply)
    divide: ClassVar[Callable[..., LazyArray]] = staticmethod(arithmetic.divide)
    total = staticmethod(arithmetic.total)
    number = staticmethod(arithmetic.operand)
    cast = staticmethod(arithmetic.cast)
    broadcast = staticmethod(arithmetic.broadcast)
    refusal = staticmethod(arithmetic.refusal)
    is_library = staticmethod(arithmetic.is_library)

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @abstractmethod
    def run(self, body: Callable[[], T]) -> T:
        """Runs a function while operations on arrays of this framework are followed."""

    @abstractmethod
    def stand_in(self, array: LazyArray) -> Any:
        """Returns an array of the framework that stands for a lazy one."""

    @abstractmethod
    def lazy(self, array: Any) -> LazyArray | None:
        """Returns what an array stands for now; None for one with values of its own."""

    def explain(self, error: Exception) -> str | None:
        """Says which values the framework lacks, where an error is for that reason."""
        return None
