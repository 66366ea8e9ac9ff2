"""Copies weights, again and again, from a model in training to a running one.

sync         `Sync`, which users call
ends         which arrays a model has, and which parts of them are here
reader       the arrays of a tree, read and replaced again and again
pairing      the rules between both ends
planning     which bytes go from which process to which
inputs       arrays of the source as operands of lazy arrays
memory       parts of arrays as those of NumPy, and memory that is used again
here         a call in one process
on_device    arrays that are computed where they lie
exchange     what processes say and send to one another
transports   how
delta        the elements that differ between two arrays, in few bytes
delta_files  deltas of whole states, in files
"""

from typing import TYPE_CHECKING

from fmapper.lazy import surface as _surface

if TYPE_CHECKING:
    from fmapper.sync.delta_files import apply_delta, save_delta
    from fmapper.sync.planning import SyncedArray, SyncPlan
    from fmapper.sync.sync import Sync, SyncStats
    from fmapper.sync.transports import Folder, Transport

__all__ = [
    "Folder",
    "Sync",
    "SyncPlan",
    "SyncStats",
    "SyncedArray",
    "Transport",
    "apply_delta",
    "save_delta",
]

_PLACES = {
    "fmapper.sync.delta_files": "apply_delta save_delta",
    "fmapper.sync.planning": "SyncPlan SyncedArray",
    "fmapper.sync.sync": "Sync SyncStats",
    "fmapper.sync.transports": "Folder Transport",
}
__getattr__, __dir__ = _surface(__name__, _PLACES.items())
