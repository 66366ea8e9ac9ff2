"""The exception tree.

FmapperError
├── DeclarationError (TypeError)          a class declaration is invalid or conflicting
├── NotAFunctorError (TypeError)          an undeclared object holds arrays
├── RebuildError (TypeError)              a node could not be rebuilt
├── CycleError (ValueError)               a cycle that cannot be rebuilt or listed
├── StructureMismatchError (ValueError)   trees differ in structure
├── PathError (KeyError)                  a key path does not exist
├── PlacementError (ValueError)           rules that cannot be applied
├── DeviceError (ValueError)              an invalid device or backend name
│   └── MixedDevicesError                 one device was expected, but several were found
├── DeviceUnavailableError (RuntimeError) a valid device that this machine does not have
├── BackendUnavailableError (ImportError) a framework is not installed
├── TransformError (TypeError)            a function cannot be differentiated, compiled or batched
├── ConversionError (RuntimeError)        a program could not be recorded or lowered
│   ├── UnsupportedOpsError               operations without a lowering in the target
│   └── ProgramFileError (ValueError)     a file contains no program, or is damaged
├── CheckpointError (ValueError)          a checkpoint or its rules are damaged or do not fit
├── TransferError (ValueError)            weights of one model do not fit another
│   └── AmbiguousTransferError            which weights belong where cannot be settled
├── SyncError (RuntimeError)              weights could not be brought to a running model
├── GoldensError (ValueError)             a file holds no goldens, or cannot hold a model's outputs
├── ProgramInputError (TypeError)         a converted program does not accept the inputs
├── LossyCastError (ValueError)           the target dtype cannot hold a value
├── ProfileError (RuntimeError)           a model could not be profiled
├── TargetError (ValueError)              FILE:NAME or example inputs cannot be read
├── BatchError (RuntimeError)             raised by adapters: one array of a batch failed
└── MoveError (RuntimeError)              a leaf could not be moved, so none was
    ├── UnsupportedLeafError (TypeError)  its dtype or layout has no counterpart in the target
    └── CopyNeededError (ValueError)      copy=False, but a copy is needed

FmapperWarning (UserWarning)
├── NoGPUWarning                          `to_gpu` left the model on the CPU
├── PrecisionWarning                      floats were narrowed
├── NotCompiledWarning                    `jit` runs a function uncompiled
├── FixedSizeWarning                      a size that was meant to vary is fixed
├── ConversionWarning                     a program does not do all that its model does
└── TieWarning                            the target cannot express a tie
"""

from __future__ import annotations

from typing import Any


class FmapperError(Exception):
    """Base class of every error that fmapper raises.

    Attributes:
        placed: For walks: True if the message names the key path, False if the walk must add it,
            None if no walk raised the error.
    """

    placed: bool | None = None

    def __reduce__(self) -> Any:
        """Pickles the message as it is, without calling the constructor again."""
        return _copy, (type(self), self.args, self.__dict__.copy())


def _copy(cls: type[FmapperError], args: tuple[Any, ...], state: dict[str, Any]) -> FmapperError:
    error = cls.__new__(cls, *args)
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)
    error.__dict__.update(state)
    return error


class DeclarationError(FmapperError, TypeError):
    """A class was declared wrongly, or twice."""

    placed = False


class NotAFunctorError(FmapperError, TypeError):
    """An object that nobody declared as a functor or leaf holds arrays."""


class RebuildError(FmapperError, TypeError):
    """A node could not be rebuilt from its new children, or its rebuild dropped some of them."""

    placed = False


class CycleError(FmapperError, ValueError):
    """A cycle runs through a node that exists only once its children do."""


class StructureMismatchError(FmapperError, ValueError):
    """A later tree does not have the structure of the first."""


class PathError(FmapperError, KeyError):
    """A key path does not exist."""

    def __str__(self) -> str:
        """Returns the message itself; `KeyError` would show its repr."""
        return str(self.args[0]) if self.args else ""


class PlacementError(FmapperError, ValueError):
    """A rule that matches nothing, or two that send a tied array to two places."""


class DeviceError(FmapperError, ValueError):
    """An invalid device: a malformed string, or a device of another backend."""


class MixedDevicesError(DeviceError):
    """The arrays of a tree are on several devices where one was asked for."""


class DeviceUnavailableError(FmapperError, RuntimeError):
    """A device that exists elsewhere, but not on this machine."""


class BackendUnavailableError(FmapperError, ImportError):
    """A framework that was asked for by name is not installed, or has no adapter."""

    def __str__(self) -> str:
        """Returns the message with the path that a walk added; `ImportError` keeps the first."""
        return str(self.args[0]) if self.args else ""


class TransformError(FmapperError, TypeError):
    """A function or its arguments cannot be differentiated, compiled or vectorised."""


class LossyCastError(FmapperError, ValueError):
    """A value would be lost in the target dtype."""


class ProfileError(FmapperError, RuntimeError):
    """A model could not be run for a profile; the message says on which device."""


class TargetError(FmapperError, ValueError):
    """A `FILE:NAME` that does not exist, or an invalid expression for example inputs."""


class ConversionError(FmapperError, RuntimeError):
    """A program could not be recorded in its source framework or lowered to the target."""


class UnsupportedOpsError(ConversionError):
    """A program has operations that the target has no lowering for.

    Attributes:
        ops: Each such operation -> the paths of the modules that use it.
    """

    def __init__(self, message: str, ops: dict[str, list[str]]) -> None:
        super().__init__(message)
        self.ops = ops


class ProgramFileError(ConversionError, ValueError):
    """A file holds no program, or a damaged one; the message says where in the file."""


class CheckpointError(FmapperError, ValueError):
    """A checkpoint, or the rules for one, is damaged, hostile, or does not fit; says where."""


class TransferError(FmapperError, ValueError):
    """The weights of a model cannot become those of another; says which, and what to do."""


class AmbiguousTransferError(TransferError):
    """The available evidence does not determine which weights belong where.

    Attributes:
        candidates: Each name of the target, as a pattern -> the candidates of the source, each with
            its evidence and the rule that would settle it.
        rules: The rules for everything that is settled.
    """

    def __init__(
        self,
        message: str,
        candidates: dict[str, list[tuple[str, str, str]]] | None = None,
        rules: Any = None,
    ) -> None:
        super().__init__(message)
        self.candidates = candidates or {}
        self.rules = rules


class SyncError(FmapperError, RuntimeError):
    """Weights could not be brought to a running model, which keeps its old ones."""


class GoldensError(FmapperError, ValueError):
    """A file holds no goldens, holds damaged ones, or cannot hold a model's outputs; says where."""


class ProgramInputError(FmapperError, TypeError):
    """A converted program was called with inputs that it was not recorded for."""


class BatchError(FmapperError, RuntimeError):
    """Raised by an adapter from the error of one array of a batch; movers make a `MoveError` of it.

    Attributes:
        index: The index of that array in the batch.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"array {index} of the batch failed")
        self.index = index


class MoveError(FmapperError, RuntimeError):
    """A leaf could not be moved; the tree that was given is untouched."""


class UnsupportedLeafError(MoveError, TypeError):
    """The dtype or layout of a leaf has no counterpart in the target."""


class CopyNeededError(MoveError, ValueError):
    """`copy=False` asked to share memory, but the move needs a copy."""


class FmapperWarning(UserWarning):
    """Base class of every warning that fmapper gives."""


class NoGPUWarning(FmapperWarning):
    """`to_gpu` found no GPU and left the model on the CPU."""


class PrecisionWarning(FmapperWarning):
    """Floating values were narrowed because the target has no wider dtype."""


class NotCompiledWarning(FmapperWarning):
    """`jit` found no compiler, or a function that cannot be compiled, and runs it as it is."""


class FixedSizeWarning(FmapperWarning):
    """A size that was to vary is fixed to that of the examples; says which and why."""


class ConversionWarning(FmapperWarning):
    """A program does not do all that its model does: both results, or changes of attributes."""


class TieWarning(FmapperWarning):
    """A tie was lost because the target cannot express it."""
