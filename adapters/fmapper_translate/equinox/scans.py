"""Blocks as one block with stacked arrays in files for Equinox.

A file takes the source of what it names.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fmapper_translate.equinox.layers import call_part
from fmapper_translate.equinox.weights import (
    Statistics,
    iter_modules,
    set_part,
    settings_of,
    steps_to,
)
from fmapper_translate.equinox.weights import load_weights as load_stacked
from fmapper_translate.equinox.weights import source_state as stacked_state
from fmapper_translate.targets.scans import stack_arrays, unstack_arrays


class Stack(eqx.Module):
    """Blocks as one block with stacked arrays; settings in which they differ are None."""

    block: Any

    def __init__(self, blocks):
        blocks = list(blocks)
        for parts in zip(*([part for _, part in iter_modules(x)] for x in blocks), strict=True):
            for name, value in list(vars(parts[0]).items()):
                is_setting = isinstance(value, bool | int | float | str | tuple)
                if is_setting and any(getattr(part, name) != value for part in parts):
                    for part in parts:
                        set_part(part, name, None)
        arrays, rest = zip(*(eqx.partition(x, eqx.is_array) for x in blocks), strict=True)
        leaves = zip(*map(jax.tree.leaves, arrays), strict=True)
        tree = jax.tree.structure(arrays[0])
        self.block = eqx.combine(jax.tree.unflatten(tree, map(jnp.stack, leaves)), rest[0])

    def scan(self, body, carry, key=None, length=None, statistics=None):
        """Calls a body with what is carried, each block, a key and statistics of its own.

        Returns what it carries in the end, and what it gave each time, stacked.
        """
        stack = self if statistics is None else statistics[self]
        arrays, rest = eqx.partition(stack.block, eqx.is_array)
        keys = None if key is None else jax.random.split(key, len(self))

        def call(carry, given):
            block, key = given
            part = eqx.combine(block, rest)
            if statistics is None:
                carry, out = body(carry, part, key)
                return carry, (out, None)
            own = Statistics(part)
            carry, out = body(carry, part, key, own)
            new = eqx.filter(own.update(), eqx.is_array)
            return carry, (out, jax.tree.map(lambda x, old: None if x is old else x, new, block))

        carry, (out, new) = jax.lax.scan(call, carry, (arrays, keys), length)
        if statistics is not None:
            block = eqx.combine(new, stack.block)
            statistics[self] = eqx.tree_at(lambda stack: stack.block, stack, block)
        return carry, out

    def __len__(self):
        return len(jax.tree.leaves(eqx.filter(self.block, eqx.is_array))[0])

    def __call__(self, x, *, key=None, statistics=None):
        def body(x, block, key, statistics=None):
            return call_part(block, x, key=key, statistics=statistics), None

        return self.scan(body, x, key, statistics=statistics)[0]


def stack_blocks(model):
    """Makes stacks of the lists that classes name in `scanned_lists`, the inner ones first."""
    for _, module in list(iter_modules(model)):
        for name in getattr(module, "scanned_lists", ()):
            blocks = getattr(module, name)
            if not isinstance(blocks, Stack):
                set_part(module, name, Stack(blocks))


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there.

    In names of stacked arrays `*` stands for the number of a block.
    """
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(
        "*" if isinstance(owner, Stack) else str(name)
        for owner, name in steps
        if name != getattr(owner, "inside", None)
    )


def load_weights(model, state, strict=True):
    """Returns a model with the arrays of the source's state dict; see `load_stacked`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    names = [name_in_source(model, path) for path, _ in leaves]
    return load_stacked(model, stack_arrays(names, state), strict)


def source_state(model):
    """Returns the arrays of a model by their names in the source."""
    return unstack_arrays(stacked_state(model))
