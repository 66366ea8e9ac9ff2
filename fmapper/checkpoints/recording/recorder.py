"""The interface of a framework for recording operations on arrays without data."""

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
    """Creates a framework's arrays that stand for lazy ones, and records operations on them.

    Args:
        recording: The recording, which has the recorders of all frameworks.
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
        """Runs a function while recording operations on arrays of this framework."""

    @abstractmethod
    def stand_in(self, array: LazyArray) -> Any:
        """Returns an array of the framework that stands for a lazy one."""

    @abstractmethod
    def lazy(self, array: Any) -> LazyArray | None:
        """Returns the lazy array that an array currently stands for; None for one with values."""

    def explain(self, error: Exception) -> str | None:
        """Says which values the framework lacks if that caused an error; otherwise returns None."""
        return None
