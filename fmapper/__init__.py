"""Any model on any device and in any framework: say once which fields are children."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from fmapper import _pytrees as _pytrees
from fmapper._adapter import Adapter, Device, DeviceInfo, Exchange, Memory, NodeAdapter, Observation
from fmapper._device import device_info, devices, get_device
from fmapper._discovery import get_adapter, register_adapter, unregister_adapter
from fmapper._errors import (
    BackendUnavailableError,
    BatchError,
    ConversionError,
    CopyNeededError,
    CycleError,
    DeclarationError,
    DeviceError,
    DeviceUnavailableError,
    FmapperError,
    FmapperWarning,
    LossyCastError,
    MixedDevicesError,
    MoveError,
    NoGPUWarning,
    NotAFunctorError,
    PathError,
    PlacementError,
    PrecisionWarning,
    ProgramInputError,
    RebuildError,
    StructureMismatchError,
    TieWarning,
    UnsupportedLeafError,
    UnsupportedOpsError,
)
from fmapper._fmap import (
    children,
    collecting_walk,
    default_walk,
    fcollect,
    fleaves,
    fmap,
    fmap_with_path,
    fmapstructure,
    fmapstructure_with_path,
    is_leaf,
    rebuild,
    structural_walk,
)
from fmapper._functor import functor, leaf
from fmapper._holders import holds_arrays
from fmapper._keypath import BoxKey, KeyPath
from fmapper._move import (
    Mover,
    to_cpu,
    to_device,
    to_gpu,
    to_jax,
    to_numpy,
    to_torch,
)
from fmapper._namespace import array_namespace
from fmapper._nodes import Aside, Fitting, NodeType, at_end, refitted
from fmapper._paths import get_path, has_path, set_path
from fmapper._pytrees import Static, is_dynamic, put_together, take_apart
from fmapper._state import destructure, load_state, state
from fmapper._target import use_backend
from fmapper._trainable import trainables

if TYPE_CHECKING:  # imported when first asked for, see below
    from fmapper._convert import convert, lowering
    from fmapper._inplace import move_
    from fmapper._inventory import SummaryRow
    from fmapper._loader import DeviceLoader
    from fmapper._materialize import materialize
    from fmapper._place import Placement, cast, keep, place
    from fmapper._plan import Plan, PlannedLeaf, plan
    from fmapper._program import (
        Call,
        DType,
        Graph,
        Input,
        Lowering,
        Output,
        Parameter,
        Program,
        Ref,
    )
    from fmapper._program_file import load_program, save_program
    from fmapper._summary import Summary, summary
    from fmapper._trees import Record, TreeSpec, record_type
    from fmapper._verify import Difference, Report, verify

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Aside",
    "BackendUnavailableError",
    "BatchError",
    "BoxKey",
    "Call",
    "ConversionError",
    "CopyNeededError",
    "CycleError",
    "DType",
    "DeclarationError",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DeviceLoader",
    "DeviceUnavailableError",
    "Difference",
    "Exchange",
    "Fitting",
    "FmapperError",
    "FmapperWarning",
    "Graph",
    "Input",
    "KeyPath",
    "LossyCastError",
    "Lowering",
    "Memory",
    "MixedDevicesError",
    "MoveError",
    "Mover",
    "NoGPUWarning",
    "NodeAdapter",
    "NodeType",
    "NotAFunctorError",
    "Observation",
    "Output",
    "Parameter",
    "PathError",
    "Placement",
    "PlacementError",
    "Plan",
    "PlannedLeaf",
    "PrecisionWarning",
    "Program",
    "ProgramInputError",
    "RebuildError",
    "Record",
    "Ref",
    "Report",
    "Static",
    "StructureMismatchError",
    "Summary",
    "SummaryRow",
    "TieWarning",
    "TreeSpec",
    "UnsupportedLeafError",
    "UnsupportedOpsError",
    "array_namespace",
    "at_end",
    "cast",
    "children",
    "collecting_walk",
    "convert",
    "default_walk",
    "destructure",
    "device_info",
    "devices",
    "fcollect",
    "fleaves",
    "fmap",
    "fmap_with_path",
    "fmapstructure",
    "fmapstructure_with_path",
    "functor",
    "get_adapter",
    "get_device",
    "get_path",
    "has_path",
    "holds_arrays",
    "is_dynamic",
    "is_leaf",
    "keep",
    "leaf",
    "load_program",
    "load_state",
    "lowering",
    "materialize",
    "move_",
    "place",
    "plan",
    "put_together",
    "rebuild",
    "record_type",
    "refitted",
    "register_adapter",
    "save_program",
    "set_path",
    "state",
    "structural_walk",
    "summary",
    "take_apart",
    "to_cpu",
    "to_device",
    "to_gpu",
    "to_jax",
    "to_numpy",
    "to_torch",
    "trainables",
    "unregister_adapter",
    "use_backend",
    "verify",
]

# What many programs never use, by the module that has it: importing fmapper is to be quick.
_LATE = {
    "Call": "_program",
    "DType": "_program",
    "DeviceLoader": "_loader",
    "Difference": "_verify",
    "Graph": "_program",
    "Input": "_program",
    "Lowering": "_program",
    "Output": "_program",
    "Parameter": "_program",
    "Placement": "_place",
    "Plan": "_plan",
    "PlannedLeaf": "_plan",
    "Program": "_program",
    "Record": "_trees",
    "Ref": "_program",
    "Report": "_verify",
    "Summary": "_summary",
    "SummaryRow": "_inventory",
    "TreeSpec": "_trees",
    "cast": "_place",
    "convert": "_convert",
    "keep": "_place",
    "load_program": "_program_file",
    "lowering": "_convert",
    "materialize": "_materialize",
    "move_": "_inplace",
    "place": "_place",
    "plan": "_plan",
    "record_type": "_trees",
    "save_program": "_program_file",
    "summary": "_summary",
    "verify": "_verify",
}


def __getattr__(name: str) -> object:
    """Imports what is asked for the first time."""
    if name not in _LATE:
        raise AttributeError(f"module 'fmapper' has no attribute {name!r}")
    found = getattr(_import_module(f"fmapper.{_LATE[name]}"), name)
    globals()[name] = _as_public(found)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _as_public(found: object) -> object:
    if hasattr(found, "__qualname__"):  # classes and functions; movers are instances
        found.__module__ = "fmapper"
    return found


for _name in __all__:
    if _name not in _LATE:
        _as_public(globals()[_name])
del _name
