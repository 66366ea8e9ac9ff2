"""Shards the arrays of a model over the devices of a mesh, by one set of rules.

For users, besides `fmapper.shard`.

    sharding    `shard`, and `Sharding`, the mover that it creates
    units       modules whose parameters are gathered for each use
    filling     divides arrays while they are loaded
    rules       rules by pattern, class, function or model
    layout      parses and checks the mesh axes of an array
    derivation  rules that follow from a program
    dimensions  finds equal dimensions among the arrays of a program
    effects     rules for the dimensions of operations
    packings    finds arrays that are packed side by side in one
    plan        the effect of a sharding, and its memory
    device_maps plans the device of each part of a model, by bytes
    streaming   runs a model by such a plan, and fetches layers ahead of use
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.meshes.derivation import Derivation, derive, dimension_rule
    from fmapper.meshes.device_maps import DeviceMap, PlacedPart, device_map
    from fmapper.meshes.dimensions import DimensionRule, Dimensions, Dims, follow_rows
    from fmapper.meshes.effects import (
        along,
        argument,
        fresh,
        keep_but,
        permutes,
        pointwise,
        reduces,
        regroups,
    )
    from fmapper.meshes.layout import boxes_at
    from fmapper.meshes.packings import Packing
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
    "Packing",
    "PlacedPart",
    "PlannedShard",
    "ShardPlan",
    "Sharding",
    "along",
    "argument",
    "boxes_at",
    "derive",
    "device_map",
    "dimension_rule",
    "follow_rows",
    "fresh",
    "keep_but",
    "offload",
    "permutes",
    "pointwise",
    "reduces",
    "regroups",
]

_PLACES = {
    "fmapper.meshes.derivation": "Derivation derive dimension_rule",
    "fmapper.meshes.device_maps": "DeviceMap PlacedPart device_map",
    "fmapper.meshes.dimensions": "DimensionRule Dimensions Dims follow_rows",
    "fmapper.meshes.effects": ("along argument keep_but permutes pointwise reduces regroups fresh"),
    "fmapper.meshes.layout": "boxes_at",
    "fmapper.meshes.streaming": "Offload OffloadedModel offload",
    "fmapper.meshes.packings": "Packing",
    "fmapper.meshes.plan": "PlannedShard ShardPlan",
    "fmapper.meshes.sharding": "Sharding",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
