"""Runs programs on meshes whose axes are Explicit, as `jax.make_mesh` gives them since JAX 0.9.

There, JAX asks every operation how its result is sharded, which programs from another framework do
not say. So XLA chooses shardings inside a program, as on Auto meshes. Outputs are sharded along the
batch like the inputs, and along dimensions that they have from weights like those; changed arrays
as they were before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

_typeof: Any = getattr(jax, "typeof", None)  # before JAX 0.6 no mesh has Explicit axes
_flatten: Any = jax.tree.flatten
_Shape: Any = jax.ShapeDtypeStruct
_Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
_auto_axes: Any = getattr(jax.sharding, "auto_axes", None)


def explicit_mesh(tree: Any) -> Any:
    """Returns the abstract mesh of arrays if it has Explicit axes, else None."""
    if _typeof is None or _auto_axes is None:
        return None
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(_typeof(leaf), "sharding", None), "mesh", None)
        if mesh is not None and getattr(mesh, "explicit_axes", None):
            return mesh
    return None


def run(
    function: Callable[..., Any],
    arrays: tuple[Any, ...],
    *,
    batch: Sequence[Any],
    keep: Callable[[Any], Any],
) -> Any:
    """Calls a function of arrays, inside of which XLA chooses all shardings.

    Args:
        function: Called with the arrays.
        arrays: Trees of arrays; without an Explicit mesh, the function is simply called.
        batch: The arrays among them whose first axis is the batch.
        keep: Takes the results and returns a tree of that structure: the arrays whose sharding the
            results keep, tuples of the axes that divide each dimension of others, and None.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(*arrays)
    with _no_mesh():  # where one is set JAX asks each operation how its result is sharded
        shapes = jax.eval_shape(function, *jax.tree.map(_unplace, arrays))
    rows: dict[int, Any] = {}
    for array in batch:
        spec = _spec(array)
        if spec and spec[0] is not None:
            rows.setdefault(array.shape[0], spec[0])

    def sharding(shape: Any, like: Any) -> Any:
        if like is not None and not isinstance(like, tuple) and like.shape == shape.shape:
            return NamedSharding(mesh, _Spec(*_spec(like)))
        first = rows.get(shape.shape[0]) if shape.shape else None
        wanted = [*(like if isinstance(like, tuple) else [None] * len(shape.shape))]
        if first is not None:
            wanted[0] = first
        return NamedSharding(mesh, _Spec(*_valid(wanted, shape.shape, mesh)))

    results, structure = _flatten(shapes)
    likes = structure.flatten_up_to(keep(shapes))
    wanted = structure.unflatten(list(map(sharding, results, likes)))
    return _auto_axes(function, axes=mesh.explicit_axes, out_sharding=wanted)(*arrays)


def output_axes(
    dimensions: Iterable[Sequence[Mapping[str, int]]], params: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """Returns the axes along which the weights divide each dimension of each output.

    So the logits of a head whose rows are divided stay divided; bringing them together would cost
    more than a layer sends. Where matrices that share a dimension differ, it is not divided.

    Args:
        dimensions: For each output and dimension, the parameters that have that dimension, and
            where, as `Dimensions.of_outputs` gives them.
        params: The parameters by name.
    """

    def entry(shared: Mapping[str, int]) -> Any:
        matrices = {n: at for n, at in shared.items() if len(params[n].shape) > 1} or shared
        specs = ((_spec(params[name]), at) for name, at in matrices.items())
        axes = {spec[at] if at < len(spec) else None for spec, at in specs}
        return axes.pop() if len(axes) == 1 else None

    return [tuple(map(entry, dims)) for dims in dimensions]


def gather(tree: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Brings arrays of an Explicit mesh to the host, for programs that run without compilation."""
    if explicit_mesh(tree) is None:
        return tree
    gathered: tuple[Any, Any, Any] = jax.tree.map(np.asarray, tree)
    return gathered


def _valid(entries: list[Any], shape: tuple[int, ...], mesh: Any) -> Iterator[Any]:
    """Yields the entries that divide sizes evenly, each axis once."""
    used: set[str] = set()
    for entry, size in zip(entries, shape, strict=True):
        axes = {entry} if isinstance(entry, str) else set(entry or ())
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if axes & used or size % parts:
            yield None
        else:
            used |= axes
            yield entry


def _no_mesh() -> Any:
    sharding: Any = jax.sharding
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), ()))


def _unplace(array: Any) -> Any:
    kind = _typeof(array)
    return _Shape(kind.shape, kind.dtype, weak_type=getattr(kind, "weak_type", False))


def _spec(array: Any) -> tuple[Any, ...]:
    return tuple(_typeof(array).sharding.spec)
