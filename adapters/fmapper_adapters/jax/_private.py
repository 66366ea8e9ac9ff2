"""All private names of JAX that fmapper uses, where no public one exists.

They are known to work in JAX 0.10 to 0.12; `tests/house/test_private_apis.py` tests the behaviour
that fmapper relies on.
"""

from __future__ import annotations

from typing import Any

from jax._src import core, xla_bridge


def has_started() -> bool:
    """Returns whether JAX has initialised its devices, and so reserved their memory."""
    return bool(xla_bridge.backends_are_initialized())


def key_kind(dtype: Any) -> Any:
    """Returns the generator of a dtype of PRNG keys, with its `name` and its `key_shape`."""
    return dtype._impl


def size_of_axis(name: Any) -> Any:
    """Returns the size of an axis that `vmap` names, which may be a symbol."""
    sizes: Any = core.get_axis_env
    return sizes().axis_size(name)
