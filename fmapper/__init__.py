"""Any model on any device and in any framework: say once which fields are children.

These are the names for users. Authors of adapters find theirs in `fmapper.backends`, authors of
lowerings and targets in `fmapper.programs`.
"""

from typing import TYPE_CHECKING

from fmapper import backends as _backends
from fmapper import programs as _programs
from fmapper.backends import registries as _registries  # noqa: F401  (listens to `functor`)
from fmapper.backends.arrays import Device, DeviceInfo
from fmapper.errors import (
    AmbiguousTransferError,
    BackendUnavailableError,
    BatchError,
    CheckpointError,
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
    GoldensError,
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
    SyncError,
    TargetError,
    TieWarning,
    TransferError,
    TransformError,
    UnsupportedLeafError,
    UnsupportedOpsError,
)
from fmapper.lazy import show_as_public as _show_as_public
from fmapper.lazy import surface as _surface
from fmapper.switches import settings
from fmapper.tree.children import children, is_leaf, rebuild
from fmapper.tree.fmap import (
    fcollect,
    fleaves,
    fmap,
    fmap_with_path,
    fmapstructure,
    fmapstructure_with_path,
)
from fmapper.tree.functor import functor, leaf
from fmapper.tree.keypath import KeyPath
from fmapper.tree.nodes import NoGradient, no_gradient
from fmapper.tree.paths import get_path, has_path, set_path
from fmapper.tree.tree_map import collecting_walk, default_walk, structural_walk

if TYPE_CHECKING:  # imported when first asked for, see below
    from fmapper import random as random
    from fmapper.backends.device import device_info, devices, get_device
    from fmapper.backends.namespace import array_namespace
    from fmapper.checkpoints.load import load
    from fmapper.checkpoints.pretrained import from_pretrained, save_pretrained
    from fmapper.checkpoints.save import save
    from fmapper.generation.generator import generator
    from fmapper.meshes.sharding import shard
    from fmapper.moves.inplace import move_
    from fmapper.moves.loader import DeviceLoader
    from fmapper.moves.mover import Mover, to_cpu, to_device, to_gpu, to_jax, to_numpy, to_torch
    from fmapper.moves.place import Placement, cast, keep, place
    from fmapper.moves.plan import Plan, plan
    from fmapper.moves.route import use_backend
    from fmapper.profiles.accelerator import Accelerator
    from fmapper.profiles.profile import profile
    from fmapper.profiles.result import Profile
    from fmapper.programs.convert import convert
    from fmapper.programs.file import load_program, save_program
    from fmapper.programs.lowering import lowering
    from fmapper.states.materialize import materialize
    from fmapper.states.state import load_state, state
    from fmapper.states.summary import Summary, summary
    from fmapper.states.vector import destructure
    from fmapper.sync.sync import Sync
    from fmapper.training.convert import convert_training
    from fmapper.training.peft_files import load_adapter, save_adapter
    from fmapper.transforms.grad import grad, value_and_grad
    from fmapper.transforms.jit import jit
    from fmapper.transforms.trainable import trainables
    from fmapper.transforms.vmap import vmap
    from fmapper.translation.source import source
    from fmapper.twins.report import TransferReport
    from fmapper.twins.transferring import transfer
    from fmapper.verification.comparison import verify
    from fmapper.verification.goldens.recording import record_goldens
    from fmapper.verification.report import Report

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AmbiguousTransferError",
    "BackendUnavailableError",
    "BatchError",
    "CheckpointError",
    "ConversionError",
    "ConversionWarning",
    "CopyNeededError",
    "CycleError",
    "DeclarationError",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DeviceLoader",
    "DeviceUnavailableError",
    "FixedSizeWarning",
    "FmapperError",
    "FmapperWarning",
    "GoldensError",
    "KeyPath",
    "LossyCastError",
    "MixedDevicesError",
    "MoveError",
    "Mover",
    "NoGPUWarning",
    "NoGradient",
    "NotAFunctorError",
    "NotCompiledWarning",
    "PathError",
    "Placement",
    "PlacementError",
    "Plan",
    "PrecisionWarning",
    "Profile",
    "ProfileError",
    "ProgramFileError",
    "ProgramInputError",
    "RebuildError",
    "Report",
    "StructureMismatchError",
    "Summary",
    "Sync",
    "SyncError",
    "TargetError",
    "TieWarning",
    "TransferError",
    "TransferReport",
    "TransformError",
    "UnsupportedLeafError",
    "UnsupportedOpsError",
    "array_namespace",
    "cast",
    "children",
    "collecting_walk",
    "convert",
    "convert_training",
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
    "from_pretrained",
    "functor",
    "generator",
    "get_device",
    "get_path",
    "grad",
    "has_path",
    "is_leaf",
    "jit",
    "keep",
    "leaf",
    "load",
    "load_adapter",
    "load_program",
    "load_state",
    "lowering",
    "materialize",
    "move_",
    "no_gradient",
    "place",
    "plan",
    "profile",
    "rebuild",
    "record_goldens",
    "save",
    "save_adapter",
    "save_pretrained",
    "save_program",
    "set_path",
    "settings",
    "shard",
    "source",
    "state",
    "structural_walk",
    "summary",
    "to_cpu",
    "to_device",
    "to_gpu",
    "to_jax",
    "to_numpy",
    "to_torch",
    "trainables",
    "transfer",
    "use_backend",
    "value_and_grad",
    "verify",
    "vmap",
]

# Imported lazily, because many programs never use them and importing fmapper must be quick.
_PLACES = {
    "fmapper.backends.device": "device_info devices get_device",
    "fmapper.backends.namespace": "array_namespace",
    "fmapper.checkpoints.load": "load",
    "fmapper.checkpoints.pretrained": "from_pretrained save_pretrained",
    "fmapper.checkpoints.save": "save",
    "fmapper.generation.generator": "generator",
    "fmapper.meshes.sharding": "shard",
    "fmapper.moves.inplace": "move_",
    "fmapper.moves.loader": "DeviceLoader",
    "fmapper.moves.mover": "Mover to_cpu to_device to_gpu to_jax to_numpy to_torch",
    "fmapper.moves.place": "Placement cast keep place",
    "fmapper.moves.plan": "Plan plan",
    "fmapper.moves.route": "use_backend",
    "fmapper.profiles.accelerator": "Accelerator",
    "fmapper.profiles.profile": "profile",
    "fmapper.profiles.result": "Profile",
    "fmapper.programs.convert": "convert",
    "fmapper.programs.file": "load_program save_program",
    "fmapper.programs.lowering": "lowering",
    "fmapper.verification.report": "Report",
    "fmapper.verification.comparison": "verify",
    "fmapper.verification.goldens.recording": "record_goldens",
    "fmapper.states.materialize": "materialize",
    "fmapper.states.state": "load_state state",
    "fmapper.states.summary": "Summary summary",
    "fmapper.states.vector": "destructure",
    "fmapper.sync.sync": "Sync",
    "fmapper.training.peft_files": "load_adapter save_adapter",
    "fmapper.training.convert": "convert_training",
    "fmapper.twins.report": "TransferReport",
    "fmapper.twins.transferring": "transfer",
    "fmapper.transforms.grad": "grad value_and_grad",
    "fmapper.transforms.jit": "jit",
    "fmapper.transforms.trainable": "trainables",
    "fmapper.transforms.vmap": "vmap",
    "fmapper.translation.source": "source",
}
# Parts of results: users do not create them, but pickles look them up here.
_PARTS = {
    "fmapper.moves.plan": "PlannedLeaf",
    "fmapper.profiles.result": "ProfileCell Verdict",
    "fmapper.profiles.timing": "Timing",
    "fmapper.verification.differences": "Difference",
    "fmapper.states.inventory": "SummaryRow",
    "fmapper.training.convert": "Training",
    "fmapper.twins.report": "TransferredArrays",
}
_MODULES = (
    "checkpoints", "generation", "meshes", "nn", "random", "training", "translation",
    "verification",
)  # fmt: skip
_find, __dir__ = _surface(__name__, (*_PLACES.items(), *_PARTS.items()), modules=_MODULES)


def __getattr__(name: str) -> object:
    """Imports a public name on first access, also from the surfaces for authors."""
    for face in (_backends, _programs):
        if name in face.__all__:
            return getattr(face, name)
    return _find(name)


for _name in __all__:
    if _name in globals():
        _show_as_public(globals()[_name], __name__)
del _name
