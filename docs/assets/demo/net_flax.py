"""Net for Flax NNX, transcribed from net"""

import jax
import jax.numpy as jnp
from flax import nnx


class Buffer(nnx.Variable):
    """An array that is not trained."""


def uniform_init(low, high):
    """Returns an initializer that draws uniformly from an interval."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


class Linear(nnx.Linear):
    """A linear layer with PyTorch's arguments and initial values."""

    source_arrays = {"kernel": ("weight", (1, 0))}

    def __init__(self, in_features, out_features, bias=True, *, rngs):
        bound = in_features**-0.5
        init = uniform_init(-bound, bound)
        super().__init__(
            in_features, out_features, use_bias=bias, kernel_init=init, bias_init=init, rngs=rngs
        )


def named_arrays(module, path=()):
    """Yields the name of each array in the source, its variable, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, value in vars(module).items():
        if isinstance(value, nnx.Module) and not getattr(value, "is_plain", False):
            yield from named_arrays(value, (*path, key))
        elif isinstance(value, nnx.Param | nnx.BatchStat | Buffer):
            name, axes = names.get(key, (key, None))
            yield ".".join((*path, name)), value, axes


class Block(nnx.Module):
    def __init__(self, width, *, rngs: nnx.Rngs):
        self.up = Linear(width, 4 * width, rngs=rngs)
        self.down = Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, width=16, depth=2, *, rngs: nnx.Rngs):
        self.embed = Linear(8, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean(axis=1)))


TIED = {}  # names in the source's state -> those here


def load_weights(model, state, strict=True):
    """Fills a model with the arrays of the source's state dict; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    arrays = {TIED.get(name, name): jnp.asarray(array) for name, array in state.items()}
    filled = set()
    for name, variable, axes in named_arrays(model):
        if name in arrays:
            array = arrays.pop(name)
            array = array if axes is None else array.transpose(axes)
            if array.shape != variable.shape:
                raise ValueError(f"{name}: {array.shape} instead of {variable.shape}")
            variable.set_value(array.astype(variable.dtype))
            filled.add(id(variable))
    missing = [name for name, variable, _ in named_arrays(model) if id(variable) not in filled]
    left = [name for name in arrays if not name.endswith("num_batches_tracked")]
    if strict and (missing or left):
        raise ValueError(f"missing: {missing}; left over: {left}")
    return model


def source_state(model):
    """Returns the arrays of a model by their names in the source, in its layouts."""
    state = {}
    for name, variable, axes in named_arrays(model):
        array = variable[...]
        back = axes and [axes.index(axis) for axis in range(array.ndim)]
        state[name] = array.transpose(back) if back else array
    return state | {second: state[first] for second, first in TIED.items()}


def make_model(*, rngs):
    """Makes the model that this file was written for."""
    return Net(width=16, depth=2, rngs=rngs)

# Written by fmapper, which does not overwrite it once it is edited: c4deca7b971e4127
