"""Meshes: how the arrays of a model are divided among many devices, by one set of rules.

For users beside `fmapper.shard`.

    sharding    `shard`, and `Sharding`, which is what it does, with a name
    rules       what patterns, classes, functions and models say of arrays
    layout      the axes of a mesh that divide an array, read and checked
    derivation  rules that follow from a program
    dimensions  which dimensions of the arrays of a program are one
    plan        what sharding would do, and what it takes
    device_maps whole parts on one device each, planned by bytes
    streaming   runs a model so, with layers that are fetched ahead of use
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.meshes.derivation import Derivation, derive
    from fmapper.meshes.device_maps import DeviceMap, PlacedPart, device_map
    from fmapper.meshes.dimensions import DimensionRule, Dimensions, Dims
    from fmapper.meshes.layout import box_at
    from fmapper.meshes.plan import PlannedShard, ShardPlan
    from fmapper.meshes.sharding import Sharding
    from fmapper.meshes.streaming import Offload, OffloadedModel, offload

__all__ = [
    "Derivation",
    "DeviceMap",
    "DimensionRule",
    "Dimensions",
    "Dims",
    "Offload",
    "OffloadedModel",
    "PlacedPart",
    "PlannedShard",
    "ShardPlan",
    "Sharding",
    "box_at",
    "derive",
    "device_map",
    "offload",
]

_PLACES = {
    "fmapper.meshes.derivation": "Derivation derive",
    "fmapper.meshes.device_maps": "DeviceMap PlacedPart device_map",
    "fmapper.meshes.dimensions": "DimensionRule Dimensions Dims",
    "fmapper.meshes.layout": "box_at",
    "fmapper.meshes.streaming": "Offload OffloadedModel offload",
    "fmapper.meshes.plan": "PlannedShard ShardPlan",
    "fmapper.meshes.sharding": "Sharding",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
