"""Layers whose arrays are computed from others in files for Equinox.

A file takes the source of what it names.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fmapper_translate.equinox.weights import buffer


def add_weight_norm(layer, name="weight", dim=0):
    """Has the array of a layer be a length for each row times a direction; returns the layer."""
    lengths, directions = norm_weights(getattr(layer, name), dim)
    parts = {f"{name}_g": lengths, f"{name}_v": directions}
    return with_computed(layer, weight_norm_of(type(layer), name, dim, tuple(parts)), name, parts)


def add_parametrized_weight_norm(layer, name="weight", dim=0):
    """Does what `add_weight_norm` does, with the names of a parametrization."""
    lengths, directions = norm_weights(getattr(layer, name), dim)
    parts = {"parametrizations": {name: {"original0": lengths, "original1": directions}}}
    return with_computed(layer, weight_norm_of(type(layer), name, dim, tuple(parts)), name, parts)


def norm_weights(array, dim):
    """Returns the length of each row of an array, or of the whole one; and the array."""
    rest = tuple(axis for axis in range(array.ndim) if axis != dim)
    return jnp.sqrt((array**2).sum(rest, keepdims=dim is not None)), array


@functools.cache
def weight_norm_of(kind, name, dim, places):
    """Returns the class of layers with a length and a direction in the place of an array."""

    def compute(self):
        held = [getattr(self, place) for place in places]
        lengths, directions = held if len(held) == 2 else held[0][name].values()
        return directions * (lengths / norm_weights(directions, dim)[0])

    return subclass_of(kind, name, compute, dict.fromkeys(places, Any))


def subclass_of(kind, name, compute, fields, **members):
    """Returns a class of layers one of whose arrays is not a field; a value that is set is lost."""
    members |= {name: property(compute, lambda self, value: None), "__module__": kind.__module__}
    members["__annotations__"] = {name: ClassVar, **fields}
    return type(kind)(kind.__name__, (kind,), members)


def with_computed(layer, kind, name, parts):
    """Gives a layer that is being made other arrays in the place of one; returns the layer."""
    del vars(layer)[name]
    vars(layer).update(parts)
    object.__setattr__(layer, "__class__", kind)
    return layer


def add_spectral_norm(layer, name="weight", n_power_iterations=1, eps=1e-12, dim=None):
    """Has the array of a layer be divided by its largest singular value; returns the layer.

    Calls in training bring two vectors closer to those of that value; see `Statistics`.
    """
    if dim is None:
        dim = 1 if type(layer).__name__.startswith("ConvTranspose") else 0
    array = getattr(layer, name)
    rows = array.shape[dim]
    vectors = [jnp.full(size, size**-0.5) for size in (rows, array.size // rows)]
    places = (f"{name}_orig", f"{name}_u", f"{name}_v")
    parts = {**dict(zip(places, (array, *vectors), strict=True)), "inference": False}
    kind = spectral_norm_of(type(layer), name, n_power_iterations, eps, dim, places)
    return with_computed(layer, kind, name, parts)


@functools.cache
def spectral_norm_of(kind, name, n_power_iterations, eps, dim, places):
    """Returns the class of layers whose array is divided by its largest singular value."""

    def matrix_of(array):
        return jnp.moveaxis(array, dim, 0).reshape(array.shape[dim], -1)

    def unit(vector):
        return vector / jnp.maximum(jnp.sqrt((vector**2).sum()), eps)

    def compute(self):
        array, u, v = (getattr(self, place) for place in places)
        u, v = map(jax.lax.stop_gradient, (u, v))
        return array / (u @ (matrix_of(array) @ v))

    def call(self, *args, statistics=None, **options):
        if self.inference:
            return kind.__call__(self, *args, **options)
        if statistics is None:
            raise ValueError("in training, pass statistics=Statistics(model) to the call")
        array, u, v = (jax.lax.stop_gradient(getattr(statistics[self], x)) for x in places)
        for _ in range(n_power_iterations):
            v = unit(matrix_of(array).T @ u)
            u = unit(matrix_of(array) @ v)
        where = lambda layer: [getattr(layer, place) for place in places[1:]]  # noqa: E731
        statistics[self] = eqx.tree_at(where, statistics[self], [u, v])
        return kind.__call__(statistics[self], *args, **options)

    vectors = dict.fromkeys(places[1:], jax.Array)
    fields = {places[0]: jax.Array, **vectors, "inference": bool}
    members = {place: buffer() for place in vectors}
    return subclass_of(kind, name, compute, fields, __call__=call, **members)
