"""The contract between fmapper and a framework, for authors of adapters.

An adapter derives from the facets that its framework has, `Arrays`, `Nodes`, `Compute`, `Models`
and `Optimizers`, or from `Adapter`, which combines the first four; it is found through the entry
point group `fmapper.adapters` or `register_adapter`. Docs: "Add a framework".

    arrays      what arrays are, and how they move
    framework   the base of the facets; arrays that are read from files
    nodes       which classes are nodes
    node_type   how nodes are flattened, and what moves and transforms need to know of them
    compute     kernels, transformations, compiled calls; optimizers
    meshes      arrays that are divided among many devices
    models      models as programs, and back; an adapter with all four facets
    discovery   finds adapters
    device      names of devices, and which this machine has
    dtypes      dtypes by name
    namespace   the array API namespace of a tree
    undeclared  objects that hold arrays and were never declared
    registries  functors in the pytree registries of frameworks
    equality    equality of constants
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.backends.arrays import DEVICE_KINDS, USUAL_GPU, Arrays, Exchange, Memory
    from fmapper.backends.compute import Compute, Counts, Observation, Optimizers, is_gradient
    from fmapper.backends.discovery import get_adapter, register_adapter, unregister_adapter
    from fmapper.backends.equality import equals
    from fmapper.backends.framework import Reader
    from fmapper.backends.meshes import Box, Meshes, Packed, PackedAxes, Spec
    from fmapper.backends.models import Adapter, Models
    from fmapper.backends.node_type import Aside, NodeType
    from fmapper.backends.nodes import Nodes
    from fmapper.backends.registries import (
        Constant,
        PyTreeRules,
        Static,
        flatten,
        is_dynamic,
        unflatten,
    )
    from fmapper.backends.undeclared import holds_arrays
    from fmapper.machine import populate_range, threads_for_memory
    from fmapper.progress import step
    from fmapper.tracebacks import shorten_traceback
    from fmapper.tree.keypath import BoxKey
    from fmapper.tree.nodes import at_end, like
    from fmapper.warn import warn

__all__ = [
    "DEVICE_KINDS",
    "USUAL_GPU",
    "Adapter",
    "Arrays",
    "Aside",
    "Box",
    "BoxKey",
    "Compute",
    "Constant",
    "Counts",
    "Exchange",
    "Memory",
    "Meshes",
    "Models",
    "NodeType",
    "Nodes",
    "Observation",
    "Optimizers",
    "Packed",
    "PackedAxes",
    "PyTreeRules",
    "Reader",
    "Spec",
    "Static",
    "at_end",
    "equals",
    "flatten",
    "get_adapter",
    "holds_arrays",
    "is_dynamic",
    "is_gradient",
    "like",
    "populate_range",
    "register_adapter",
    "shorten_traceback",
    "step",
    "threads_for_memory",
    "unflatten",
    "unregister_adapter",
    "warn",
]

_PLACES = {
    "fmapper.backends.arrays": "Arrays DEVICE_KINDS Exchange Memory USUAL_GPU",
    "fmapper.backends.compute": "Compute Counts Optimizers is_gradient",
    "fmapper.backends.meshes": "Box Meshes Packed PackedAxes Spec",
    "fmapper.backends.models": "Adapter Models Observation",
    "fmapper.backends.node_type": "Aside NodeType",
    "fmapper.backends.nodes": "Nodes",
    "fmapper.backends.discovery": "get_adapter register_adapter unregister_adapter",
    "fmapper.backends.equality": "equals",
    "fmapper.backends.framework": "Reader",
    "fmapper.backends.registries": "Constant PyTreeRules Static is_dynamic unflatten flatten",
    "fmapper.backends.undeclared": "holds_arrays",
    "fmapper.machine": "populate_range threads_for_memory",
    "fmapper.progress": "step",
    "fmapper.tracebacks": "shorten_traceback",
    "fmapper.tree.keypath": "BoxKey",
    "fmapper.tree.nodes": "at_end like",
    "fmapper.warn": "warn",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
