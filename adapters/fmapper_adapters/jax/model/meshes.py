"""Runs programs on meshes whose axes are Explicit, as `jax.make_mesh` gives them since JAX 0.9.

There, JAX asks every operation how its result is sharded, which programs from another framework do
not say. So XLA chooses inside of a program, as on Auto meshes. Outputs are sharded along the batch
like the inputs, and changed arrays as they were before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            results keep, and None.
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
        if like is not None and like.shape == shape.shape:
            return NamedSharding(mesh, _Spec(*_spec(like)))
        first = rows.get(shape.shape[0]) if shape.shape else None
        return NamedSharding(mesh, _Spec(*([first] if first is not None else [])))

    results, structure = _flatten(shapes)
    likes = structure.flatten_up_to(keep(shapes))
    wanted = structure.unflatten(list(map(sharding, results, likes)))
    return _auto_axes(function, axes=mesh.explicit_axes, out_sharding=wanted)(*arrays)


def gather(tree: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Brings arrays of an Explicit mesh to the host, for programs that run without compilation."""
    if explicit_mesh(tree) is None:
        return tree
    found: tuple[Any, Any, Any] = jax.tree.map(np.asarray, tree)
    return found


def _no_mesh() -> Any:
    sharding: Any = jax.sharding
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), ()))


def _unplace(array: Any) -> Any:
    kind = _typeof(array)
    return _Shape(kind.shape, kind.dtype, weak_type=getattr(kind, "weak_type", False))


def _spec(array: Any) -> tuple[Any, ...]:
    return tuple(_typeof(array).sharding.spec)
