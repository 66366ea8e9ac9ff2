"""Arrays of stacked blocks by their names in the source; files that scan take them along."""

from __future__ import annotations

import jax.numpy as jnp


def stack_arrays(names, state):
    """Returns a state dict with the arrays of blocks stacked, for names such as `blocks.*.bias`."""
    rest = dict(state)

    def take(name):
        if "*" not in name:
            return rest.pop(name, None)
        parts = []
        while (part := take(name.replace("*", str(len(parts)), 1))) is not None:
            parts.append(jnp.asarray(part))
        return jnp.stack(parts) if parts else None

    stacked = {name: take(name) for name in names if name is not None and "*" in name}
    return rest | {name: array for name, array in stacked.items() if array is not None}


def unstack_arrays(state):
    """Returns a state dict with one array for each block: `blocks.0.bias` and so on."""
    while any("*" in name for name in state):
        split = {}
        for name, array in state.items():
            rows = enumerate(array) if "*" in name else [(0, array)]
            split |= {name.replace("*", str(at), 1): row for at, row in rows}
        state = split
    return state
