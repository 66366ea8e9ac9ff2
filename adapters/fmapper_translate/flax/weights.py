"""Arrays in files for Flax NNX: kinds, initial values, and names in the source's state dict.

A file takes the source of what it names; `TIED` is a table of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

TIED: dict[str, str] = {}


class Buffer(nnx.Variable):  # type: ignore[type-arg]
    """An array that is not trained."""


class Constant(nnx.Variable):  # type: ignore[type-arg]
    """An array that is not trained, and that a state dict does not have."""


def initialize(variable, init, rngs):
    """Gives an array the values of an initializer."""
    variable[...] = init(rngs.params(), variable.shape, variable.dtype)


def add_weight_norm(layer, name="weight", dim=0):
    """Has the array of a layer be a length for each row times a direction; returns the layer."""
    return norm_weights(layer, name, dim, lambda owner: owner, (f"{name}_g", f"{name}_v"))


def add_parametrized_weight_norm(layer, name="weight", dim=0):
    """Does what `add_weight_norm` does, with the names of a parametrization."""
    layer.parametrizations = nnx.Module()
    setattr(layer.parametrizations, name, nnx.Module())
    places = ("original0", "original1")
    return norm_weights(
        layer, name, dim, lambda owner: getattr(owner.parametrizations, name), places
    )


def norm_weights(layer, name, dim, find, places):
    """Keeps lengths and directions of an array in a part of a layer; returns the layer."""
    array = array_of(layer, name)[...]
    key, axes = {n: (k, axes) for k, (n, axes) in names_of(layer).items()}.get(name, (name, None))
    array = array if axes is None else array.transpose([axes.index(i) for i in range(array.ndim)])
    rest = [axis for axis in range(array.ndim) if axis != dim]

    def compute(self):
        lengths, directions = (getattr(find(self), place)[...] for place in places)
        return directions * (lengths / jnp.sqrt((directions**2).sum(rest, keepdims=True)))

    setattr(find(layer), places[0], nnx.Param(jnp.sqrt((array**2).sum(rest, keepdims=True))))
    setattr(find(layer), places[1], nnx.Param(array))
    return with_computed(layer, key, axes, compute)


def with_computed(layer, key, axes, compute, **more):
    """Has an array of a layer be computed, in the source's layout; returns the layer."""

    def read(self):
        array = compute(self)
        return nnx.Param(array if axes is None else array.transpose(axes))

    kind = type(layer)
    delattr(layer, key)
    made = type(kind.__name__, (kind,), {key: property(read), **more})
    object.__setattr__(layer, "__class__", made)
    return layer


def names_of(layer):
    """Returns the arrays of a layer -> their names in the source, and their axes there."""
    return getattr(layer, "source_arrays", {})


def add_spectral_norm(layer, name="weight", n_power_iterations=1, eps=1e-12, dim=None):
    """Has the array of a layer be divided by its largest singular value; returns the layer.

    Each call in training brings two vectors closer to those of that value.
    """
    key, axes = {n: (k, axes) for k, (n, axes) in names_of(layer).items()}.get(name, (name, None))
    array = array_of(layer, name)[...]
    array = array if axes is None else array.transpose([axes.index(i) for i in range(array.ndim)])
    if dim is None:
        dim = 1 if isinstance(layer, nnx.ConvTranspose) else 0
    places = (f"{name}_orig", f"{name}_u", f"{name}_v")

    def matrix_of(array):
        return jnp.moveaxis(array, dim, 0).reshape(array.shape[dim], -1)

    def unit(vector):
        return vector / jnp.maximum(jnp.sqrt((vector**2).sum()), eps)

    def improve(matrix, u, v):
        for _ in range(n_power_iterations):
            v = unit(matrix.T @ u)
            u = unit(matrix @ v)
        return u, v

    def compute(self):
        array, u, v = (getattr(self, place)[...] for place in places)
        u, v = map(jax.lax.stop_gradient, (u, v))
        return array / (u @ (matrix_of(array) @ v))

    def call(self, *args, **options):
        if not self.deterministic:
            array, u, v = (getattr(self, place) for place in places)
            u[...], v[...] = improve(jax.lax.stop_gradient(matrix_of(array[...])), u[...], v[...])
        return super(made, self).__call__(*args, **options)

    rows, columns = matrix_of(array).shape
    setattr(layer, places[0], nnx.Param(array))
    setattr(layer, places[1], Buffer(unit(jnp.ones(rows))))
    setattr(layer, places[2], Buffer(unit(jnp.ones(columns))))
    layer.deterministic = False
    made = type(with_computed(layer, key, axes, compute, __call__=call))
    return layer


def array_of(layer, name, *default):
    """Returns the array of a layer that has a name in the source; a default if none has it."""
    keys = {theirs: key for key, (theirs, _) in getattr(layer, "source_arrays", {}).items()}
    return getattr(layer, keys.get(name, name), *default)


def named_arrays(module, path=()):
    """Yields the name of each array in the source, its variable, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, value in vars(module).items():
        if isinstance(value, nnx.Module) and not getattr(value, "is_plain", False):
            yield from named_arrays(value, (*path, key))
        elif isinstance(value, nnx.Param | nnx.BatchStat | Buffer):
            name, axes = names.get(key, (key, None))
            yield ".".join((*path, name)), value, axes


def named_parameters(model):
    """Yields the name of each parameter in the source, and its variable."""
    for name, variable, _ in named_arrays(model):
        if isinstance(variable, nnx.Param):
            yield name, variable


def named_children(module):
    """Returns the name of each part of a module in the source, and the part."""
    parts = {name: part for name, part in vars(module).items() if isinstance(part, nnx.Module)}
    return [(name, part) for name, part in parts.items() if not getattr(part, "is_plain", False)]


def modules_in(module):
    """Returns a module and all in it, each before its parts, in the order of the source."""
    found = {id(module): module}
    for _, part in named_children(module):
        found |= {id(inner): inner for inner in modules_in(part) if id(inner) not in found}
    return list(found.values())


def freeze(part):
    """Has a parameter, or those of a module, not be trained."""
    arrays = [part] if isinstance(part, nnx.Variable) else [x for _, x in named_parameters(part)]
    for array in arrays:
        object.__setattr__(array, "__class__", Buffer)


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


def with_dtype(model, dtype):
    """Casts the floating-point arrays of a model; returns it."""
    for _, part in nnx.iter_graph(model):
        if isinstance(part, nnx.Embed):
            part.dtype = dtype  # that it computes in
        elif isinstance(part, nnx.Variable) and jnp.issubdtype(part.dtype, jnp.floating):
            part.set_value(part.astype(dtype))
    return model
