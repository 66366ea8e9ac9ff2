"""Arrays as they are where `jax.vmap` moves, adds and slices dimensions: in poolings and rows."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_SPACE: dict[Any, int] = {
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3,
    F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
}  # fmt: skip
_SHAPING = {
    "contiguous", "flatten", "permute", "reshape", "squeeze", "t", "transpose", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip
_WHOLE = slice(None)
# Which dimension of the source each dimension is that is longer than one.
Dims = tuple[int, ...]


def pool_in_place(graph: fx.Graph, border: str) -> None:
    """Pools arrays as they are where dimensions are moved, or ones added, and back behind.

    Args:
        graph: Is changed in place.
        border: The mark of values that submodules take or give, behind which nothing is moved.
    """
    for node in list(graph.nodes):
        count = _SPACE.get(node.target, 0)
        for source in _sources(node, border) if count else ():
            result = _result(node, source, count, border)
            if result is None:
                continue
            with graph.inserting_after(node):
                pooled = graph.call_function(node.target, (source, *node.args[1:]), node.kwargs)
            pooled.meta.update({**node.meta, **result.meta})
            result.replace_all_uses_with(pooled)
            break


def _sources(node: fx.Node, border: str) -> list[fx.Node]:
    """Returns the values that what a pooling is given is made of by moves alone, first ones first.

    They are of as many dimensions as a pooling takes.
    """
    found: list[fx.Node] = []
    value = node.args[0]
    while isinstance(value, fx.Node):
        found.insert(0, value)
        if value.meta.get(border) or not _is_shaping(value):
            break
        value = value.args[0]
    ranks = (_SPACE[node.target] + 1, _SPACE[node.target] + 2)
    return [one for one in found if one is not node.args[0] and len(_sizes(one)) in ranks]


def _is_shaping(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _SHAPING


def _sizes(node: fx.Node) -> tuple[str, ...]:
    value = node.meta.get("val")
    return tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else ()


def _result(node: fx.Node, source: fx.Node, count: int, border: str) -> fx.Node | None:
    """Returns the last value behind a pooling that is the pooling of a source; None if none is."""
    given: Any = node.args[0]
    chain = [given]
    while chain[0] is not source:
        chain.insert(0, chain[0].args[0])
    dims: Dims | None = tuple(at for at, size in enumerate(_sizes(source)) if size != "1")
    for before, after in itertools.pairwise(chain):
        dims = dims and _move(dims, before, after)
    space = tuple(range(len(_sizes(source)) - count, len(_sizes(source))))
    if not dims or dims[-count:] != space or "1" in _sizes(given)[-count:]:
        return None
    wanted = (*_sizes(source)[:-count], *_sizes(node)[-count:])
    whole = [at for at, size in enumerate(_sizes(given)) if size != "1"]
    dims = tuple(
        dim for at, dim in zip(whole, dims, strict=True) if _sizes(node)[at] != "1"
    )  # those that are still longer than one
    order = tuple(at for at, size in enumerate(wanted) if size != "1")
    value, found = node, None
    while dims is not None:
        if _sizes(value) == wanted and dims == order:
            found = value
        users = [*value.users]
        if value.meta.get(border) or len(users) != 1 or not _is_shaping(users[0]):
            break
        dims = _move(dims, value, users[0])
        value = users[0]
    return found


def _move(dims: Dims, before: fx.Node, after: fx.Node) -> Dims | None:
    """Returns the dimensions after a move; None where some are joined or taken apart."""
    old, new = _sizes(before), _sizes(after)
    whole = [at for at, size in enumerate(old) if size != "1"]
    order = _order(after, len(old))
    if order is not None:
        known = dict(zip(whole, dims, strict=True))
        return tuple(known[at] for at in order if at in known)
    is_same = [old[at] for at in whole] == [size for size in new if size != "1"]
    return dims if is_same else None


def _order(node: fx.Node, rank: int) -> list[int] | None:
    """Returns the order in which a move puts dimensions; None for what puts none elsewhere."""
    order = [*range(rank)]
    if node.target == "permute":
        given: Any = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        return [int(at) % rank for at in given]
    if node.target in ("transpose", "t"):
        one, other = (int(at) % rank for at in (node.args[1:] or (0, 1)))  # type: ignore[arg-type]
        order[one], order[other] = other, one
        return order
    return None


# --- rows -----------------------------------------------------------------------------------------


def write_rows(graph: fx.Graph) -> None:
    """Writes slices of all as `:`, and one place in each row of a batch as an index."""
    for node in list(graph.nodes):
        index: Any = node.args[1] if node.target is operator.getitem else None
        source: Any = node.args[0] if index is not None else None
        if not isinstance(index, tuple) or not isinstance(source, fx.Node):
            continue
        sizes = _sizes(source)
        if len(index) > len(sizes):
            continue
        if all(isinstance(one, slice) for one in index):
            pairs = zip(index, sizes, strict=False)
            index = tuple(_WHOLE if _is_all(one, size) else one for one, size in pairs)
        elif len(index) == 2 and _are_all_rows(index[0], sizes[0]):
            place = _place(index[1], sizes[1])
            index = index if place is None else (_WHOLE, place)
        node.args = (source, index)


def with_place(index: Any, at: int) -> Any:
    """Returns slices with a number in the place of one of a single element; None if it is none."""
    if not isinstance(index, tuple) or at >= len(index):
        return None
    if not all(isinstance(one, slice) and one.step in (None, 1) for one in index):
        return None
    first, last = index[at].start or 0, index[at].stop
    if not isinstance(first, int) or first < 0 or last != first + 1:
        return None
    return (*index[:at], first, *index[at + 1 :])


def _number(value: Any) -> str:
    return str(value.meta.get("val")) if isinstance(value, fx.Node) else str(value)


def _is_all(one: slice, size: str) -> bool:
    return one.start in (None, 0) and one.step in (None, 1) and _number(one.stop) == size


def _are_all_rows(index: Any, size: str) -> bool:
    """Returns whether an index is `0 + arange(size)`."""
    if not isinstance(index, fx.Node) or index.target is not operator.add or index.args[0] != 0:
        return False
    given: Any = index.args[1]
    is_range = isinstance(given, fx.Node) and given.target is torch.arange
    return is_range and len(given.args) == 1 and _number(given.args[0]) == size


def _place(index: Any, size: str) -> int | None:
    """Returns the number that an index is, which is kept below a size; None for another index."""
    if not isinstance(index, fx.Node) or (index.target, index.args[1:]) != ("unsqueeze", (-1,)):
        return None
    value: Any = index.args[0]
    while isinstance(value, fx.Node) and (value.target is torch.clamp or value.target == "to"):
        value = value.args[0]
    after: Any = 0
    if isinstance(value, fx.Node) and value.target is operator.add:
        value, after = value.args
        if not isinstance(after, int) or after >= 0:
            return None
    if not isinstance(value, fx.Node) or value.target is not torch.full or value.args[0] != ():
        return None
    given: Any = value.args[1]
    if after:  # from the end
        return after if _number(given) == size else None
    return given if type(given) is int and given >= 0 else None
