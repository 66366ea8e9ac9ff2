"""All private names of Flax that fmapper uses, where no public one exists.

They are known to work in Flax 0.12.6 to 0.12.12; `tests/house/test_private_apis.py` tests the
behaviour that fmapper relies on. Names of slots are constants, because they are read for every
module that is moved.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

FLAGS_MAPPING = "_mapping"  # the plain mapping inside the flags of an NNX module's attributes
TRACE_STATE = "_trace_state"  # the trace to which an NNX module or variable belongs
VARIABLE_METADATA = "_var_metadata"

FROZEN_SLOTS = "_dict"  # the dict inside a FrozenDict
FROZEN_HASH = "_hash"
frozen_slots: Any = attrgetter(FROZEN_SLOTS)


def value_slot(variable: type) -> str:
    """Returns the slot in which variables store their values."""
    return "_raw_value" if hasattr(variable, "_raw_value") else "raw_value"


def has_int_keys(cls: type) -> bool:
    """Returns whether a class of NNX modules numbers its attributes, like a list."""
    return bool(getattr(cls, "_pytree__has_int_keys", False))


def is_pytree(cls: type) -> bool:
    """Returns whether Flax registers a class of NNX modules as a pytree."""
    return bool(getattr(cls, "_pytree__is_pytree", True))
