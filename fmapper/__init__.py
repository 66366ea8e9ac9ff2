"""Any model on any device and in any framework: say once which fields are children."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from fmapper.backends import registries as _pytrees
from fmapper.backends.adapter import (
    Adapter,
    Device,
    DeviceInfo,
    Exchange,
    Memory,
    NodeAdapter,
    Observation,
)
from fmapper.backends.device import device_info, devices, get_device
from fmapper.backends.discovery import get_adapter, register_adapter, unregister_adapter
from fmapper.backends.equality import equals
from fmapper.errors import (
    BackendUnavailableError,
    BatchError,
    ConversionError,
    ConversionWarning,
    CopyNeededError,
    CycleError,
    DeclarationError,
    DeviceError,
    DeviceUnavailableError,
    FixedSizeWarning,
    FmapperError,
    FmapperWarning,
    LossyCastError,
    MixedDevicesError,
    MoveError,
    NoGPUWarning,
    NotAFunctorError,
    NotCompiledWarning,
    PathError,
    PlacementError,
    PrecisionWarning,
    ProfileError,
    ProgramFileError,
    ProgramInputError,
    RebuildError,
    StructureMismatchError,
    TargetError,
    TieWarning,
    TransformError,
    UnsupportedLeafError,
    UnsupportedOpsError,
)
from fmapper.tree.fmap import (
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
from fmapper.tree.functor import functor, leaf
from fmapper.tree.no_gradient import NoGradient, is_gradient, no_gradient
from fmapper.backends.undeclared import holds_arrays
from fmapper.tree.keypath import BoxKey, KeyPath
from fmapper.moves.mover import Mover, to_cpu, to_device, to_gpu, to_jax, to_numpy, to_torch
from fmapper.backends.namespace import array_namespace
from fmapper.tree.nodes import Aside, Fitting, NodeType, at_end, refitted
from fmapper.tree.paths import get_path, has_path, set_path
from fmapper.backends.registries import (
    Constant,
    PyTreeRules,
    Static,
    is_dynamic,
    put_together,
    take_apart,
)
from fmapper.states.state import destructure, load_state, state
from fmapper.moves.route import use_backend
from fmapper.backends.trainable import trainables

if TYPE_CHECKING:  # imported when first asked for, see below
    from fmapper import random as random
    from fmapper.profiles.accelerator import Accelerator
    from fmapper.transforms.jit import jit
    from fmapper.programs.convert import convert, lowering
    from fmapper.backends.counts import Counts
    from fmapper.transforms.grad import grad, value_and_grad
    from fmapper.moves.inplace import move_
    from fmapper.states.inventory import SummaryRow
    from fmapper.moves.loader import DeviceLoader
    from fmapper.programs.lowering import LoweringTable
    from fmapper.states.materialize import materialize
    from fmapper.moves.place import Placement, cast, keep, place
    from fmapper.moves.plan import Plan, PlannedLeaf, plan
    from fmapper.profiles.profile import profile
    from fmapper.profiles.result import Profile, ProfileCell, Verdict
    from fmapper.programs.program import (
        Call,
        DType,
        Graph,
        Guard,
        Input,
        Lowering,
        Output,
        Parameter,
        Program,
        Ref,
        Scalar,
        Size,
        substituted,
    )
    from fmapper.programs.file import load_program, save_program
    from fmapper.programs.sizes import size_of
    from fmapper.states.summary import Summary, summary
    from fmapper.profiles.timing import Timing
    from fmapper.programs.treespec import Record, TreeSpec, record_type
    from fmapper.transforms.vmap import vmap
    from fmapper.programs.verify import Difference, Report, verify

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "Adapter",
    "Aside",
    "BackendUnavailableError",
    "BatchError",
    "BoxKey",
    "Call",
    "Constant",
    "ConversionError",
    "ConversionWarning",
    "CopyNeededError",
    "Counts",
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
    "FixedSizeWarning",
    "FmapperError",
    "FmapperWarning",
    "Graph",
    "Guard",
    "Input",
    "KeyPath",
    "LossyCastError",
    "Lowering",
    "LoweringTable",
    "Memory",
    "MixedDevicesError",
    "MoveError",
    "Mover",
    "NoGPUWarning",
    "NoGradient",
    "NodeAdapter",
    "NodeType",
    "NotAFunctorError",
    "NotCompiledWarning",
    "Observation",
    "Output",
    "Parameter",
    "PathError",
    "Placement",
    "PlacementError",
    "Plan",
    "PlannedLeaf",
    "PrecisionWarning",
    "Profile",
    "ProfileCell",
    "ProfileError",
    "Program",
    "ProgramFileError",
    "ProgramInputError",
    "PyTreeRules",
    "RebuildError",
    "Record",
    "Ref",
    "Report",
    "Scalar",
    "Size",
    "Static",
    "StructureMismatchError",
    "Summary",
    "SummaryRow",
    "TargetError",
    "TieWarning",
    "Timing",
    "TransformError",
    "TreeSpec",
    "UnsupportedLeafError",
    "UnsupportedOpsError",
    "Verdict",
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
    "equals",
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
    "grad",
    "has_path",
    "holds_arrays",
    "is_dynamic",
    "is_gradient",
    "is_leaf",
    "jit",
    "keep",
    "leaf",
    "load_program",
    "load_state",
    "lowering",
    "materialize",
    "move_",
    "no_gradient",
    "place",
    "plan",
    "profile",
    "put_together",
    "rebuild",
    "record_type",
    "refitted",
    "register_adapter",
    "save_program",
    "set_path",
    "size_of",
    "state",
    "structural_walk",
    "substituted",
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
    "value_and_grad",
    "verify",
    "vmap",
]

# What many programs never use, by the module that has it: importing fmapper is to be quick.
_LATE = {
    "Accelerator": "_accelerator",
    "Call": "_program",
    "Counts": "_counts",
    "DType": "_program",
    "DeviceLoader": "_loader",
    "Difference": "_verify",
    "Graph": "_program",
    "Guard": "_program",
    "Input": "_program",
    "Lowering": "_program",
    "LoweringTable": "_lowerings",
    "Output": "_program",
    "Parameter": "_program",
    "Placement": "_place",
    "Plan": "_plan",
    "PlannedLeaf": "_plan",
    "Profile": "_profile_result",
    "ProfileCell": "_profile_result",
    "Program": "_program",
    "Record": "_trees",
    "Ref": "_program",
    "Report": "_verify",
    "Scalar": "_program",
    "Size": "_program",
    "Summary": "_summary",
    "SummaryRow": "_inventory",
    "Timing": "_timing",
    "TreeSpec": "_trees",
    "Verdict": "_profile_result",
    "cast": "_place",
    "convert": "_convert",
    "grad": "_differentiate",
    "jit": "_compile",
    "keep": "_place",
    "load_program": "_program_file",
    "lowering": "_convert",
    "materialize": "_materialize",
    "move_": "_inplace",
    "place": "_place",
    "plan": "_plan",
    "profile": "_profile",
    "record_type": "_trees",
    "save_program": "_program_file",
    "size_of": "_sizes",
    "substituted": "_program",
    "summary": "_summary",
    "value_and_grad": "_differentiate",
    "verify": "_verify",
    "vmap": "_vectorize",
}

_MODULES = ("nn", "random")


def __getattr__(name: str) -> object:
    """Imports what is asked for the first time."""
    if name in _MODULES:
        return _import_module(f"fmapper.{name}")
    if name not in _LATE:
        raise AttributeError(f"module 'fmapper' has no attribute {name!r}")
    found = getattr(_import_module(f"fmapper.{_LATE[name]}"), name)
    globals()[name] = _as_public(found)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


def _as_public(found: object) -> object:
    if hasattr(found, "__qualname__"):  # classes and functions; movers are instances
        found.__module__ = "fmapper"
    return found


for _name in __all__:
    if _name not in _LATE:
        _as_public(globals()[_name])
del _name
