"""What fmapper asks of a framework, for authors of adapters.

An adapter derives from `Adapter` (or `NodeAdapter`, where the arrays are those of another
framework), and is found through the entry point group `fmapper.adapters` or `register_adapter`.
Docs: "Add a framework".

    adapter     the questions that an adapter answers
    discovery   how adapters are found
    device      names of devices, and what is here
    dtypes      dtypes by name
    namespace   the array API namespace of a tree
    trainable   which arrays are trained
    undeclared  objects that hold arrays and were never declared
    registries  functors in the pytree registries of others
    equality    when two constants are the same
    counts      what a run asks of an accelerator
    machine     processor and memory of the host
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.backends.adapter import Adapter, Exchange, Memory, NodeAdapter, Observation
    from fmapper.backends.counts import Counts
    from fmapper.backends.discovery import get_adapter, register_adapter, unregister_adapter
    from fmapper.backends.equality import equals
    from fmapper.backends.registries import (
        Constant,
        PyTreeRules,
        Static,
        is_dynamic,
        put_together,
        take_apart,
    )
    from fmapper.backends.undeclared import holds_arrays
    from fmapper.tree.keypath import BoxKey
    from fmapper.tree.no_gradient import is_gradient
    from fmapper.tree.nodes import Aside, Fitting, NodeType, at_end, refitted

__all__ = [
    "Adapter",
    "Aside",
    "BoxKey",
    "Constant",
    "Counts",
    "Exchange",
    "Fitting",
    "Memory",
    "NodeAdapter",
    "NodeType",
    "Observation",
    "PyTreeRules",
    "Static",
    "at_end",
    "equals",
    "get_adapter",
    "holds_arrays",
    "is_dynamic",
    "is_gradient",
    "put_together",
    "refitted",
    "register_adapter",
    "take_apart",
    "unregister_adapter",
]

_PLACES = {
    "fmapper.backends.adapter": "Adapter Exchange Memory NodeAdapter Observation",
    "fmapper.backends.counts": "Counts",
    "fmapper.backends.discovery": "get_adapter register_adapter unregister_adapter",
    "fmapper.backends.equality": "equals",
    "fmapper.backends.registries": "Constant PyTreeRules Static is_dynamic put_together take_apart",
    "fmapper.backends.undeclared": "holds_arrays",
    "fmapper.tree.keypath": "BoxKey",
    "fmapper.tree.no_gradient": "is_gradient",
    "fmapper.tree.nodes": "Aside Fitting NodeType at_end refitted",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
