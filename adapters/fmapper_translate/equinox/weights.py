"""Arrays in files for Equinox: random keys, first values, and names in the source's state dict.

A file takes the source of what it names; `TIED` is a table of its own.
"""

from __future__ import annotations

import copy

import equinox as eqx
import jax
import jax.numpy as jnp

TIED: dict[str, str] = {}


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


def buffer(*, saved=True, **options):
    """Declares an array that is not trained, and whether the source's state dict has it."""
    return eqx.field(metadata={"trained": False, "saved": saved}, **options)


class Statistics:
    """The statistics of batches that the layers of a model collect in calls in training.

    Make it of the model, inside of the function that is differentiated or compiled, pass it to the
    call, and go on with what `update` returns:

        statistics = Statistics(model)
        y = model(x, statistics=statistics)
        model = statistics.update()
    """

    def __init__(self, model):
        self.model, self.layers = model, {id(part): part for _, part in iter_modules(model)}

    def __getitem__(self, layer):
        if id(layer) not in self.layers:
            raise ValueError(
                "a layer is not one of the model that the statistics were made of, but a copy: "
                "make them inside of the function that is differentiated or compiled"
            )
        return self.layers[id(layer)]

    def __setitem__(self, layer, new):
        self.layers[id(layer)] = new

    def update(self):
        """Returns the model with the new statistics."""
        new = {at: layer for at, layer in self.layers.items() if id(layer) != at}
        return jax.tree.map(lambda x: new.get(id(x), x), self.model, is_leaf=lambda x: id(x) in new)


def set_part(owner, name, value):
    """Gives a part of a model that is still being made another array or module."""
    if isinstance(owner, eqx.Module):
        object.__setattr__(owner, name, value)
    else:
        owner[name] = value


def hide_shared(model):
    """Removes parts of a new model from all places but the first; returns those places.

    A tree would have copies there, which training changes apart.
    """
    first, hidden = {}, []

    def walk(owner, path):
        held = vars(owner) if isinstance(owner, eqx.Module) else owner
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        for step, part in list(pairs):
            at = (*path, step)
            if not isinstance(part, eqx.Module | list | tuple | dict):
                continue
            if isinstance(part, eqx.Module):
                if id(part) in first:
                    hidden.append((at, first[id(part)]))
                    set_part(owner, step, None)
                    continue
                first[id(part)] = at
            walk(part, at)

    walk(model, ())
    return tuple(hidden)


def show_shared(model):
    """Returns a model with its shared parts in all their places, for one call."""
    for path, first in model.shared_parts:
        part = model
        for step in first:
            part = getattr(part, step) if isinstance(part, eqx.Module) else part[step]
        model = with_part(model, path, part)
    return model


def with_part(owner, path, part):
    """Returns a copy of a module or container with another part, which has the other ones."""
    if not path:
        return part
    new, (step, *rest) = copy.copy(owner), path
    inner = getattr(owner, step) if isinstance(owner, eqx.Module) else owner[step]
    set_part(new, step, with_part(inner, rest, part))
    return new


def initialize(owner, name, init, key):
    """Gives an array of a model that is still being made the values of an initializer."""
    array = Place(owner, name)
    set_part(owner, name, init(key, array.shape, array.dtype))


class Place:
    """An array in a part of a model that is still being made."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __iter__(self):
        return iter((self.owner, self.name))

    def __jax_array__(self):
        return self.array

    @property
    def array(self):
        is_module = isinstance(self.owner, eqx.Module)
        return getattr(self.owner, self.name) if is_module else self.owner[self.name]

    def __getattr__(self, name):
        return getattr(self.array, name)


def named_parameters(model):
    """Yields the name of each array that is trained in the source, and its place."""
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        steps = [*steps_to(model, path)]
        is_trained = all(settings_of(*step).get("trained", True) for step in steps)
        if eqx.is_inexact_array(array) and is_trained:
            yield name_in_source(model, path), Place(*steps[-1])


def iter_modules(module):
    """Yields the modules in a module with their paths, itself last."""
    is_part = lambda x: isinstance(x, eqx.Module) and x is not module  # noqa: E731
    for path, part in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_part):
        if isinstance(part, eqx.Module):
            yield from ((path + inner, x) for inner, x in iter_modules(part))
    yield (), module


def steps_to(model, path):
    """Yields the parts on a key path, and the name or number of the next one in each."""
    owner = model
    for step in path:
        name = next(getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind))
        yield owner, name
        owner = getattr(owner, name) if isinstance(owner, eqx.Module) else owner[name]


def settings_of(owner, name):
    """Returns how a field of a module is declared."""
    return type(owner).__dataclass_fields__[name].metadata if isinstance(owner, eqx.Module) else {}


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


def load_weights(model, state, strict=True):
    """Returns a model with the arrays of the source's state dict.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = {TIED.get(name, name): array for name, array in state.items()}
    known, missing = set(), []

    def load(path, array):
        name = name_in_source(model, path)
        name = TIED.get(name, name)
        known.add(name)
        if name not in given:
            missing.extend([] if name is None else [name])
            return array
        if jnp.shape(given[name]) != array.shape:
            raise ValueError(f"{name}: {jnp.shape(given[name])} instead of {array.shape}")
        return jnp.asarray(given[name], array.dtype)

    arrays, rest = eqx.partition(model, eqx.is_array)
    filled = eqx.combine(jax.tree_util.tree_map_with_path(load, arrays), rest)
    left = [x for x in given if x not in known and not x.endswith("num_batches_tracked")]
    if strict and (missing or left):
        raise ValueError(f"missing: {missing}; left over: {left}")
    return filled


def source_state(model):
    """Returns the arrays of a model by their names in the source."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    named = [(name_in_source(model, path), array) for path, array in leaves]
    state = {name: array for name, array in named if name is not None}
    return state | {second: state[first] for second, first in TIED.items()}


def with_dtype(model, dtype):
    """Returns a model with its floating-point arrays cast."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
