"""Activations, sums of exponentials and variances by the names that torch has for them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fmapper_adapters.torch.model import fx_passes

_SELU = 1.6732632423543772, 1.0507009873554805
_SHAPING = {"reshape", "view", "unsqueeze", "expand"}
_FLOATS = {torch.float32, torch.float64}
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv}
_TIMES = (operator.mul, torch.mul)
_PLUS = (operator.add, torch.add)
_MINUS = (operator.sub, torch.sub)
_MINUS_OF = (operator.neg, torch.neg)


def write_functions(graph: fx.Graph) -> None:
    """Calls functions of torch in the places of what they compute, in place.

    These have the same derivatives everywhere, at bends as well.
    """
    for node in list(graph.nodes):
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if node.op != "call_function" or dtype not in _FLOATS:
            continue
        for find in _FINDERS:
            found = find(node)
            if found is not None:
                node.target, node.args, node.kwargs = found
                break
        else:
            if _is_of_some(node):
                node.replace_all_uses_with(node.args[1])
    graph.eliminate_dead_code(fx_passes.is_kept)


def _is_call(node: Any, root: Any, *targets: Any) -> bool:
    """Returns whether a node calls one of some functions in the part in which the root is."""
    if not isinstance(node, fx.Node) or node.target not in targets:
        return False
    place, own = (one.meta.get("place", ("", ""))[0] for one in (node, root))
    return bool(place == own)


def _factors(node: Any, root: Any) -> tuple[Any, float] | None:
    """Returns what a node multiplies with a number, and the number."""
    if not _is_call(node, root, *_TIMES) or len(node.args) != 2:
        return None
    for value, number in (node.args, node.args[::-1]):
        if isinstance(number, float) and isinstance(value, fx.Node):
            return value, number
    return None


def _compares(node: Any, root: Any, sign: str, x: Any) -> Any:
    """Returns the number that x is compared with; None for other nodes."""
    if not _is_call(node, root, getattr(operator, sign), getattr(torch, sign)):
        return None
    return node.args[1] if node.args[0] is x and isinstance(node.args[1], float) else None


def _elu(node: Any) -> Any:
    """Finds `where(x > 0, x, alpha * expm1(where(x > 0, 0, x)))`."""
    if node.target is not torch.where or len(node.args) != 3:
        return None
    mask, x, bent = node.args
    inner, alpha = _factors(bent, node) or (bent, 1.0)
    if _compares(mask, node, "gt", x) != 0.0 or not _is_call(inner, node, torch.expm1):
        return None
    safe: Any = inner.args[0]
    if not _is_call(safe, node, torch.where) or tuple(safe.args[1:]) != (0.0, x):
        return None
    if _compares(safe.args[0], node, "gt", x) != 0.0 or alpha <= 0:
        return None
    return F.elu, (x,) if alpha == 1.0 else (x, alpha), {}


def _selu(node: Any) -> Any:
    """Finds a multiple of ELU that is SELU."""
    inner: Any
    inner, scale = _factors(node, node) or (None, 0.0)
    if not _is_call(inner, node, F.elu) or len(inner.args) != 2:
        return None
    pairs = zip((inner.args[1], scale), _SELU, strict=True)
    is_known = all(math.isclose(one, other, rel_tol=1e-6) for one, other in pairs)
    return (F.selu, (inner.args[0],), {}) if is_known else None


def _relu6(node: Any) -> Any:
    """Finds `hardtanh(relu(x), 0, 6)`."""
    ends = node.kwargs.get("min_val"), node.kwargs.get("max_val")
    if node.target is not F.hardtanh or ends != (0.0, 6.0):
        return None
    inner: Any = node.args[0]
    if _is_call(inner, node, F.threshold) and tuple(inner.args[1:3]) == (0.0, 0.0):
        return F.relu6, (inner.args[0],), {}
    return None


def _log_sigmoid(node: Any) -> Any:
    """Finds `-softplus(-x)`."""
    if node.target not in _MINUS_OF:
        return None
    softplus: Any = node.args[0]
    if not _is_call(softplus, node, F.softplus) or len(softplus.args) != 1 or softplus.kwargs:
        return None
    negated: Any = softplus.args[0]
    if not _is_call(negated, node, *_MINUS_OF):
        return None
    return F.logsigmoid, (negated.args[0],), {}


def _mish(node: Any) -> Any:
    """Finds `x * tanh(softplus(x))`."""
    if node.target not in _TIMES:
        return None
    for x, tanh in (node.args, node.args[::-1]):
        softplus: Any = tanh.args[0] if _is_call(tanh, node, torch.tanh) else None
        if not _is_call(softplus, node, F.softplus) or softplus.kwargs:
            continue
        if softplus.args == (x,):
            return F.mish, (x,), {}
    return None


def _logsumexp(node: Any) -> Any:
    """Finds `log(abs(sum(exp(x - largest)))) + largest`, the largest 0 where it is not finite."""
    if node.target not in _PLUS or len(node.args) != 2:
        return None
    log, shift = node.args
    if not _is_call(log, node, torch.log) or not _is_call(shift, node, "detach"):
        return None
    total = _unshape(_nonnegative(_unshape(log.args[0]), node))
    finite: Any = shift.args[0]
    if not _is_call(total, node, torch.sum) or not _is_call(finite, node, torch.where):
        return None
    exp: Any = total.args[0]
    mask, largest, zero = finite.args
    if not _is_call(exp, node, torch.exp) or not _is_call(exp.args[0], node, *_MINUS):
        return None
    x, shifted = exp.args[0].args
    most = _unshape(largest)
    if not _is_call(mask, node, torch.isfinite) or _unshape(mask.args[0]) is not most or zero != 0:
        return None
    dims = total.args[1] if len(total.args) == 2 else None
    if not _is_call(most, node, torch.amax) or tuple(most.args) != (x, dims) or total.kwargs:
        return None
    keeps = len(_sizes(node)) == len(_sizes(x))
    if most.kwargs or _unshape(shifted) is not shift:
        return None
    if _sizes(node) != _reduce(x, dims, keeps) or not _broadcasts(shifted, x, dims):
        return None
    return torch.logsumexp, (x, dims), {"keepdim": True} if keeps else {}


def _nonnegative(node: Any, root: Any) -> Any:
    """Returns the x of `where(signbit(x), -x, x)`, without the 0 that is added to it."""
    if not _is_call(node, root, torch.where):
        return node
    sign, negated, x = node.args
    if not _is_call(sign, root, torch.signbit) or not _is_call(negated, root, operator.neg):
        return node
    if sign.args[0] is not x or negated.args[0] is not x:
        return node
    is_sum = _is_call(x, root, *_PLUS) and x.args[1] == 0.0
    return x.args[0] if is_sum else x


def _variance(node: Any) -> Any:
    """Finds `mean(square(x - mean(x)))`, where nothing else reads the difference."""
    if node.target is not torch.mean or len(node.args) != 2:
        return None
    square: Any
    square, dims = node.args
    if not _is_call(square, node, torch.square) or len(square.users) != 1:
        return None
    apart: Any = square.args[0]
    if not _is_call(apart, node, *_MINUS) or len(apart.users) != 1:
        return None
    x, mean = apart.args
    if not _is_call(mean, node, torch.mean) or mean.kwargs != {"keepdim": True}:
        return None
    if tuple(mean.args) != (x, dims):
        return None
    return torch.var, (x, dims), {"correction": 0, **node.kwargs}


_FINDERS = (_elu, _selu, _relu6, _log_sigmoid, _mish, _logsumexp, _variance)


def _is_of_some(node: Any) -> bool:
    """Returns whether a node is the variance of some elements, or else NaN, as that of none is."""
    if node.target is not torch.where or len(node.args) != 3:
        return False
    mask, variance, other = node.args
    is_nan = isinstance(other, float) and math.isnan(other)
    if not is_nan or not _is_call(variance, node, torch.var):
        return False
    if not _is_call(mask, node, torch.gt, operator.gt) or mask.args[1] != 0.0:
        return False
    number: Any = mask.args[0]
    full: Any = number.args[0] if _is_call(number, node, "to") else None
    if not _is_call(full, node, torch.full) or full.args[0] != ():
        return False
    x, dims = variance.args[:2]
    count = math.prod(x.meta["val"].shape[dim] for dim in dims)
    size = full.args[1]
    size = size.meta["val"] if isinstance(size, fx.Node) else size
    return str(size) == str(count)


def _unshape(node: Any) -> Any:
    """Returns what a node gives another shape."""
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in _SHAPING:
        node = node.args[0]
    return node


def _sizes(node: Any) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _reduce(x: Any, dims: Any, keeps: bool) -> list[str]:
    sizes = _sizes(x)
    at = {dim % len(sizes) for dim in dims}
    if keeps:
        return ["1" if i in at else size for i, size in enumerate(sizes)]
    return [size for i, size in enumerate(sizes) if i not in at]


def _broadcasts(node: Any, x: Any, dims: Any) -> bool:
    """Returns whether a node has one element for each sum along some dimensions."""
    found = _sizes(node)
    return not found if len(dims) == len(_sizes(x)) else found == _reduce(x, dims, True)


def write_promotions(graph: fx.Graph) -> None:
    """Leaves out conversions to complex numbers that torch's arithmetic makes itself, in place."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        dtype = getattr(value, "dtype", None)
        if node.target not in _ARITHMETIC or dtype not in _COMPLEX:
            continue
        for at in (0, 1):
            node.args = tuple(
                _as_real(arg, node.args[1 - i], node) if i == at else arg
                for i, arg in enumerate(node.args)
            )
    graph.eliminate_dead_code(fx_passes.is_kept)


def _as_real(arg: Any, other: Any, node: Any) -> Any:
    """Returns an operand as it was before it became complex, where the other one is."""
    dtype = node.meta["val"].dtype
    kind = getattr(other.meta.get("val"), "dtype", None) if isinstance(other, fx.Node) else dtype
    if kind is not dtype or not isinstance(other, fx.Node | complex):
        return arg
    if isinstance(arg, complex) and isinstance(other, fx.Node):
        return arg.real if arg.imag == 0 and math.copysign(1, arg.imag) > 0 else arg
    if not _is_call(arg, node, "to") or len(arg.args) != 2 or arg.args[1] is not dtype:
        return arg
    source = arg.args[0].meta["val"]
    return arg.args[0] if source.dtype is _COMPLEX[dtype] else arg
