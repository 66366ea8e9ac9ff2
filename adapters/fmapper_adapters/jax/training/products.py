"""Products with a matrix and with its low-rank update, in place of products with their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fmapper_adapters.jax.equations import bind, evaluate, trace

# Ids of values that are made of weights alone -> themselves, the names of the primitives that made
# them, with their operands. Matrix products without further dimensions are `matmul`.
_Origins = dict[int, tuple[Any, str, Sequence[Any]]]
_MATMUL = (((1,), (0,)), ((), ()))


def call_apart(function: Callable[..., Any], weights: Any, *args: Any) -> Any:
    """Calls a function, and multiplies with `matrix + left @ right` as with each of these.

    So a compiled function needs neither the sum nor its gradient. The sum is made of weights alone,
    and may be transposed, cast, and reshaped where all of its rows or columns are summed over.
    """
    closed, tree = trace(function, weights, *args)
    leaves = jax.tree.leaves((weights, args))
    origins: _Origins = {id(x): (x, "", ()) for x in jax.tree.leaves(weights)}

    def rule(eqn: Any, given: Sequence[Any]) -> Sequence[Any]:
        outputs = _product(eqn, given, origins) or bind(eqn, given)
        if all(id(x) in origins for x in given if isinstance(x, jax.Array)) and given:
            is_matmul = eqn.params.get("dimension_numbers") == _MATMUL
            name = "matmul" if is_matmul else eqn.primitive.name
            origins[id(outputs[0])] = outputs[0], name, given
        return outputs

    return jax.tree.unflatten(tree, evaluate(closed, leaves, rule, inlined=object))


def _product(eqn: Any, given: Sequence[Any], origins: _Origins) -> list[Any] | None:
    """Evaluates the product of an array and such a sum; returns None for other equations."""
    at = next((at for at, x in enumerate(given) if id(x) in origins), None)
    if at is None or eqn.primitive.name != "dot_general":
        return None
    over, batch = eqn.params["dimension_numbers"]
    turns, (whole, name, parts) = 0, origins[id(given[at])]
    for change in ("reshape", "transpose"):
        while name in (change, "convert_element_type"):
            turns += name == "transpose"
            _, name, parts = origins[id(parts[0])]
    update = origins.get(id(parts[-1])) if name == "add" else None
    if update is None or update[1] != "matmul" or batch != ((), ()) or id(parts[0]) not in origins:
        return None
    weight, (left, right) = parts[0], update[2]
    pairs = sorted(zip(over[at], over[1 - at], strict=True))
    x, axes, summed = given[1 - at], [i for i, _ in pairs], [i for _, i in pairs]
    by_rows = axes == [*range(len(axes))]
    if by_rows == bool(turns % 2):
        weight, left, right = weight.T, right.T, left.T
    is_last = axes == [*range(whole.ndim - len(axes), whole.ndim)]
    if not (by_rows or is_last) or math.prod(whole.shape[i] for i in axes) != len(left):
        return None
    rest = [axis for axis in range(x.ndim) if axis not in summed]
    x = x.transpose(*rest, *summed).reshape(*[x.shape[axis] for axis in rest], len(left))
    how = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    product = jnp.matmul(x, weight.astype(whole.dtype), **how)
    product += (x.astype(left.dtype) @ left @ right).astype(product.dtype)
    product = product if at else jnp.moveaxis(product, -1, 0)
    return [product.reshape(eqn.outvars[0].aval.shape)]
