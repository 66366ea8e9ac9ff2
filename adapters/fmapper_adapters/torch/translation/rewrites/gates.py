"""Writes products with joined arrays that are then split as one product for each array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def split_products(graph: Any) -> None:
    """Rewrites `(x @ torch.cat((a, b), 1)).split(...)` as `x @ a` and `x @ b`, in place.

    Cells with several gates, as `OptimizedLSTMCell`, join the arrays of their gates; each is a
    layer of its own where it is not joined.
    """
    for node in list(graph.nodes):
        if node.target is not torch.split or len(node.args) < 2:
            continue
        product, sizes = node.args[:2]
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        factors = _factors(product) if len(getattr(product, "users", ())) == 1 else None
        picks = list(node.users)
        if factors is None or any(one.target is not operator.getitem for one in picks):
            continue
        if dim % len(_shape(product)) != len(_shape(product)) - 1:
            continue
        x, weights, biases = factors
        if not _fits(sizes, weights, 1) or not (biases is None or _fits(sizes, biases, 0)):
            continue
        for pick in picks:
            at = pick.args[1]
            with graph.inserting_before(pick):
                if biases is None:
                    made = graph.call_function(torch.matmul, (x, weights[at]))
                else:
                    made = graph.call_function(torch.addmm, (biases[at], x, weights[at]))
            made.meta.update(pick.meta)
            made.meta["place"] = _place(pick, product)
            pick.replace_all_uses_with(made)
            graph.erase_node(pick)


def _place(pick: fx.Node, product: fx.Node) -> Any:
    """Returns the submodule and line of a product: those of the only one that uses it."""
    found: tuple[str, str] = product.meta["place"]
    users = [one.meta.get("place", ("", "")) for one in pick.users]
    return users[0] if len(users) == 1 and users[0][0] == found[0] else found


def _factors(product: Any) -> tuple[Any, Any, Any] | None:
    """Returns what a product is of: the input, the joined arrays, and those of the bias."""
    if product.target is torch.addmm and not product.kwargs:
        bias, x, weight = product.args
        found = _parts_of(bias, 0), _parts_of(weight, 1)
        return None if None in found else (x, found[1], found[0])
    if product.target in (torch.matmul, operator.matmul):
        x, weight = product.args
        weights = _parts_of(weight, 1)
        return None if weights is None else (x, weights, None)
    return None


def _parts_of(value: Any, dim: int) -> Sequence[fx.Node] | None:
    """Returns the arrays of the model that a value joins along a dimension."""
    if getattr(value, "target", None) is not torch.cat:
        return None
    parts, *rest = value.args
    along = value.kwargs.get("dim", rest[0] if rest else 0)
    is_own = all(isinstance(one, fx.Node) and one.op == "get_attr" for one in parts)
    return parts if is_own and along == dim else None


def _fits(sizes: Any, arrays: Sequence[fx.Node], dim: int) -> bool:
    shapes = [_shape(one) for one in arrays]
    is_flat = all(len(shape) == dim + 1 for shape in shapes)
    return is_flat and list(sizes) == [shape[dim] for shape in shapes]


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)
