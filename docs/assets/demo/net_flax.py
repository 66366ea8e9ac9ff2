"""Net for Flax NNX, from net.Net; written by fmapper."""

import jax
import jax.numpy as jnp
from flax import nnx


def check_shapes(*expected):
    """Raises where arrays have other shapes than those that the code is written for.

    A size is a number or a name, which may say what divides it, and how small and large it may be:
    `batch 3 height%16 width>=17<=64`.
    """
    sizes = {}
    for array, shape in expected:
        for size, word in zip(array.shape, shape.split(), strict=True):
            word, _, most = word.partition("<=")
            word, _, least = word.partition(">=")
            name, _, divisor = word.partition("%")
            known = int(name) if name.isdigit() else sizes.setdefault(name, size)
            fits = size >= int(least or 0) and size % int(divisor or 1) == 0
            fits = fits and (not most or size <= int(most))
            if not fits or size != known and name != "_":
                known = "" if name.isdigit() else f", with {name} = {known}"
                raise ValueError(f"{tuple(array.shape)} is not ({shape}){known}")


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        # x: (batch, length, 16) -> (batch, length, 16)
        return x + self.down(jax.nn.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(8, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        # -> (batch, 10)
        check_shapes((x, "batch length 8"))
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean(axis=1)))


ARRAYS = {
    nnx.Linear: {"kernel": ("weight", (1, 0))},
}


def load_weights(model: nnx.Module, state, strict=True) -> nnx.Module:
    """Fills the model with the arrays of the source's state dict, by name; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    known, missing = set(), []
    for path, layer in nnx.iter_modules(model):
        names = next((found for cls, found in ARRAYS.items() if isinstance(layer, cls)), {})
        for key, variable in vars(layer).items():
            if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.RngState):
                continue
            source, order = names.get(key, (key, None))
            name = ".".join(map(str, (*path, source)))
            known.add(name)
            if name in state:
                array = jnp.asarray(state[name], variable.dtype)
                if order is not None and array.ndim == len(order):
                    array = array.transpose(order)
                if array.shape != variable.shape:
                    raise ValueError(f"{name}: {array.shape} instead of {variable.shape}")
                variable.set_value(array)
            else:
                missing.append(name)
    left = [name for name in state if name not in known]
    if strict and (missing or left):
        raise ValueError(f"the state lacks {missing}; {left} are not in the model")
    return model

# Written by fmapper, which does not overwrite it once it is edited: 8911e5750fa38925
