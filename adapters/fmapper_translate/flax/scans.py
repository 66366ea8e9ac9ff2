"""Blocks as one block with stacked arrays in files for Flax NNX.

A file takes the source of what it names.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fmapper_translate.flax.weights import Buffer
from fmapper_translate.flax.weights import load_weights as load_stacked
from fmapper_translate.flax.weights import source_state as stacked_state
from fmapper_translate.targets.scans import stack_arrays, unstack_arrays


class Stack(nnx.Module):
    """Blocks as one block with stacked arrays; settings in which they differ are left out."""

    def __init__(self, blocks):
        blocks = [nnx.clone(block) for block in blocks]
        for parts in zip(*([part for _, part in nnx.iter_modules(x)] for x in blocks), strict=True):
            for name, value in list(vars(parts[0]).items()):
                is_setting = isinstance(value, bool | int | float | str | tuple)
                if is_setting and any(getattr(part, name) != value for part in parts):
                    for part in parts:
                        delattr(part, name)
        for at, block in enumerate(blocks):
            for _, variable in nnx.iter_graph(block):
                if isinstance(variable, nnx.RngKey):
                    keys = variable.get_value()
                    new = jax.vmap(lambda key, at=at: jax.random.fold_in(key, at))(keys.reshape(-1))
                    variable.set_value(new.reshape(keys.shape))
        graphs, states = zip(*map(nnx.split, blocks), strict=True)
        leaves = zip(*map(jax.tree.leaves, states), strict=True)
        tree = jax.tree.structure(states[0])
        self.block = nnx.merge(graphs[0], jax.tree.unflatten(tree, map(jnp.stack, leaves)))

    def scan(self, body, carry, length=None):
        """Calls a body with what is carried and each block; returns what it carries and gives."""
        return nnx.scan(
            body, length=length, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
        )(carry, self.block)  # fmt: skip

    def __len__(self):
        return len(jax.tree.leaves(nnx.state(self.block))[0])

    def __call__(self, x):
        return self.scan(lambda x, block: (block(x), None), x)[0]


def stack_blocks(model):
    """Makes stacks of the lists that classes name in `scanned_lists`, the inner ones first."""
    for _, module in list(nnx.iter_modules(model)):
        for name in getattr(module, "scanned_lists", ()):
            blocks = getattr(module, name)
            if not isinstance(blocks, Stack):
                setattr(module, name, Stack(blocks))


def named_arrays(module, path=()):
    """Yields the name of each array in the source, its variable, and its axes there.

    In names of stacked arrays `*` stands for the number of a block.
    """
    names = getattr(module, "source_arrays", {})
    for key, value in vars(module).items():
        if isinstance(value, Stack):
            for name, variable, axes in named_arrays(value.block, (*path, key, "*")):
                yield name, variable, axes and (0, *(axis + 1 for axis in axes))
        elif isinstance(value, nnx.Module) and not getattr(value, "is_plain", False):
            yield from named_arrays(value, (*path, key))
        elif isinstance(value, nnx.Param | nnx.BatchStat | Buffer):
            name, axes = names.get(key, (key, None))
            yield ".".join((*path, name)), value, axes


def load_weights(model, state, strict=True):
    """Fills a model with the arrays of the source's state dict; see `load_stacked`."""
    names = [name for name, _, _ in named_arrays(model)]
    return load_stacked(model, stack_arrays(names, state), strict)


def source_state(model):
    """Returns the arrays of a model by their names in the source, in its layouts."""
    return unstack_arrays(stacked_state(model))
