"""Signs of zeros, which lowerings keep as JAX has them, where nothing reads them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fmapper_adapters.torch.model import fx_passes

_SUMS = {operator.add, torch.add}
_NEGATIONS = {operator.neg, torch.neg, "neg"}
_EXTREMES = {torch.maximum, torch.minimum}
_HANDED_ON = {
    operator.add, operator.sub, operator.mul, operator.getitem, operator.matmul,
    torch.add, torch.sub, torch.mul, torch.matmul, torch.sum, torch.mean, torch.where, torch.cat,
    torch.stack, torch.tanh, torch.nn.functional.linear, *_EXTREMES, *_NEGATIONS,
    "expand", "reshape", "view", "unsqueeze", "squeeze", "permute", "transpose", "flatten",
    "unflatten", "detach", "contiguous", "movedim", "sum", "mean",
}  # fmt: skip
_NOT_SEEN = {
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
    torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne,
    torch.exp, torch.sigmoid, torch.cos, torch.square, torch.abs, torch.softmax,
    "exp", "sigmoid", "cos", "square", "abs", "softmax",
}  # fmt: skip
_DIVISIONS = {operator.truediv, torch.div, torch.true_divide}


def drop_signs(graph: Any) -> None:
    """Writes the larger and smaller of floats without the sign of a zero, where nothing reads it.

    Behind `torch.maximum(x, y)` a lowering adds `x + y` where both are zero, and -0.0 elsewhere,
    since torch gives either zero. That makes a difference to what divides by it, say.
    """
    for node in list(graph.nodes):
        found = _without_sign(node)
        if found is not None and not _is_seen(node):
            node.replace_all_uses_with(found)
    for node in list(graph.nodes):
        if _is(node, _NEGATIONS) and _is(node.args[0], _NEGATIONS):
            node.replace_all_uses_with(node.args[0].args[0])
    graph.eliminate_dead_code(fx_passes.is_kept)


def _is(node: Any, targets: set[Any]) -> bool:
    return isinstance(node, fx.Node) and node.target in targets


def _without_sign(node: Any) -> Any:
    """Returns what a node adds the zero of the right sign to; None for other nodes."""
    if not _is(node, _SUMS) or len(node.args) != 2:
        return None
    found, zero = node.args
    if not isinstance(found, fx.Node) or not _is(zero, {"detach"}):
        return None
    extreme = found.args[0] if _is(found, _NEGATIONS) else found
    chosen = zero.args[0]
    if not _is(extreme, _EXTREMES) or not _is(chosen, {torch.where}):
        return None
    _, _, other = chosen.args
    is_negative_zero = isinstance(other, float) and other == 0 and math.copysign(1, other) < 0
    return found if is_negative_zero else None


def _is_seen(node: Any) -> bool:
    """Returns whether the sign of a zero makes a difference to more than signs of zeros."""
    seen, todo = {node}, [node]
    while todo:
        one = todo.pop()
        for user in one.users:
            if user in seen or user.op == "output" or user.target in _NOT_SEEN:
                continue
            is_divided = user.target in _DIVISIONS and user.args[1] is not one
            if not is_divided and user.target not in _HANDED_ON:
                return True
            seen.add(user)
            todo.append(user)
    return False
