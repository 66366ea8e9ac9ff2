"""Writes a graph of torch as a person would: numbers for filled tensors, no needless broadcasts."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fmapper_adapters.torch.lax.matrices import wide_products
from fmapper_adapters.torch.model import fast_attention, fx_passes
from fmapper_adapters.torch.model.control_flow import loop_begin, loop_end
from fmapper_adapters.torch.translation.loops import write_dimensions, write_fills

_BINARY = {
    *(getattr(operator, name) for name in (
        "add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_",
        "xor", "mod", "floordiv",
    )),
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.lt, torch.le, torch.gt, torch.ge,
    torch.eq, torch.ne, torch.logical_and, torch.logical_or, torch.bitwise_and, torch.bitwise_or,
    torch.true_divide, torch.remainder, torch.fmod,
}  # fmt: skip
_WITH_TENSORS = {torch.maximum, torch.minimum, torch.atan2}  # take no number
_SHAPING = {"expand", "reshape", "view", "unsqueeze", "squeeze", "contiguous", "permute", "t"}
_MOST = 64  # elements of what is computed to see whether it is one number


BORDER = "border"  # of values that submodules take or give


def _is_of_other(value: Any, node: Any) -> bool:
    """Returns whether a value is what the submodule of a node takes from, or gives to, others."""
    places = [one.meta.get("place", ("", ""))[0] for one in (value, node)]
    return bool(value.meta.get(BORDER)) and places[0] != places[1]


def tidy(graph: Any) -> None:
    """Rewrites a graph in place; what one submodule gives another stays as it is."""
    _use_public_names(graph)
    _use_numbers(graph)
    _drop_choices(graph)
    _drop_broadcasts(graph)
    _drop_round_trips(graph)
    fx_passes.compose_permutations(graph, across=False)
    write_fills(graph)
    _share(graph)
    write_dimensions(graph)
    graph.eliminate_dead_code(fx_passes.is_kept)


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if _is_node(node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_tensor(node: Any) -> bool:
    return _is_node(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _is_elementwise(node: Any) -> bool:
    return node.op == "call_function" and (
        node.target in _BINARY or node.target in _WITH_TENSORS or node.target is torch.where
    )


# --- functions of fmapper -------------------------------------------------------------------------


def _use_public_names(graph: Any) -> None:
    """Calls torch's own functions in the places of those of fmapper that choose among them."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and node.args[1] == 0:
            source = node.args[0]
            if source.target is fast_attention.exact_gelu:
                node.target, node.args = F.gelu, tuple(source.args)
            elif source.target is fast_attention.attend:
                _attend(graph, node, source)
        elif node.target is wide_products.matmul_of_halves:
            node.target = torch.matmul
        elif node.target is wide_products.matmul:
            with graph.inserting_before(node):
                node.args = tuple(_in_float32(graph, one) for one in node.args)
            node.target = torch.matmul
        elif node.target is wide_products.dense:
            x, weight, bias = node.args
            with graph.inserting_before(node):
                product = graph.call_function(torch.matmul, (x, weight))
            product.meta.update(node.meta)
            node.target, node.args = operator.add, (product, bias)
    graph.eliminate_dead_code(fx_passes.is_kept)


def _in_float32(graph: Any, node: Any) -> Any:
    made = graph.call_method("to", (node, torch.float32))
    made.meta.update(node.meta)
    made.meta["val"] = node.meta["val"].float()
    return made


def _attend(graph: Any, node: Any, source: Any) -> None:
    """Writes `softmax(where(mask, scale * q @ k.T + bias, fill)) @ v` as torch's attention."""
    mask, bias = source.kwargs.get("mask"), source.kwargs.get("bias")
    fill = source.kwargs.get("fill")
    kwargs: dict[str, Any] = {}
    if mask is not None and bias is None and fill == -math.inf:
        kwargs["attn_mask"] = mask
    elif mask is not None:
        like = source.args[0].meta["val"]
        other = 0.0 if bias is None else bias
        with graph.inserting_before(node):
            added = graph.call_function(torch.where, (mask, other, fill))
        added.meta.update(node.meta)
        with like.fake_mode:
            both = mask.meta["val"] if bias is None else mask.meta["val"] + bias.meta["val"]
            added.meta["val"] = torch.empty_like(both, dtype=like.dtype)
        kwargs["attn_mask"] = added
    elif bias is not None:
        kwargs["attn_mask"] = bias
    size = source.args[0].meta["val"].shape[-1]
    scale = source.kwargs.get("scale")
    if not (isinstance(size, int) and math.isclose(scale, size**-0.5, rel_tol=1e-6)):
        kwargs["scale"] = scale
    node.target, node.args, node.kwargs = (
        F.scaled_dot_product_attention, tuple(source.args[:3]), kwargs,
    )  # fmt: skip


# --- numbers --------------------------------------------------------------------------------------


def _use_numbers(graph: Any) -> None:
    """Puts numbers in the places of tensors that are filled with one, where an operation can."""
    filled: dict[Any, Any] = {}
    for node in list(graph.nodes):
        number = _fill_value(node, filled)
        if number is not None:
            filled[node] = number
            if _shape(node) == () and node.target is not torch.full:
                with graph.inserting_before(node):
                    made = graph.call_function(
                        torch.full, ((), number.item()), {"dtype": number.dtype}
                    )
                made.meta.update(node.meta)
                node.replace_all_uses_with(made)
                filled[made] = number
            continue
        if _is_elementwise(node):
            node.args = tuple(_as_number(node, i, filled) for i in range(len(node.args)))


def _fill_value(node: Any, filled: Mapping[Any, Any]) -> Any:
    """Returns the element of a tensor whose elements are all one known number; else None."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.op not in ("call_function", "call_method"):
        return None
    inputs = [one for one in node.all_input_nodes if _is_tensor(one)]
    if node.target in (torch.full, torch.zeros, torch.ones):
        number = {torch.zeros: 0, torch.ones: 1}.get(node.target)
        number = node.args[1] if number is None else number
        if _is_node(number):
            return None
        return torch.full((), number, dtype=value.dtype)
    if not inputs or any(one not in filled or _is_of_other(one, node) for one in inputs):
        return None
    if node.op == "call_method" and node.target in _SHAPING:
        return filled[inputs[0]]
    if node.target is torch.clamp and node.args[1] == 0 and filled[inputs[0]] == 0:
        return filled[inputs[0]]  # from 0 to what is left: a slice that begins at 0
    if fx_passes.draws(node) or getattr(node.target, "is_control_flow", False):
        return None
    if any(_shape(one) != () for one in inputs) and not _is_elementwise(node):
        return None
    if node.op == "call_method" and node.target not in ("to", "sqrt", "exp", "neg", "float", "int"):
        return None
    if len(inputs) != len(node.all_input_nodes):
        return None

    def real(one: Any) -> Any:
        return filled[one]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), real)
    kwargs = {key: one for key, one in kwargs.items() if key != "device"}
    try:
        target: Any = node.target
        found = (
            getattr(args[0], target)(*args[1:], **kwargs)
            if node.op == "call_method"
            else target(*args, **kwargs)
        )
    except Exception:  # whatever it needs that is not here
        return None
    is_one = isinstance(found, torch.Tensor) and found.shape == () and found.dtype is value.dtype
    return found if is_one else None


def _as_number(node: Any, at: int, filled: Mapping[Any, Any]) -> Any:
    arg = node.args[at]
    if not _is_node(arg) or arg not in filled or node.target in _WITH_TENSORS:
        return arg
    if _is_of_other(arg, node):
        return arg
    number, result = filled[arg], node.meta["val"]
    if number.dtype.is_complex:
        return arg
    others = [one for i, one in enumerate(node.args) if i != at and _is_tensor(one)]
    if node.target is torch.where:
        if at == 0:
            return arg
        same = [one for one in others if one is not node.args[0]]
        known = [filled[one].dtype for one in same if one in filled]
        is_mask = result.dtype is torch.bool and known == [torch.bool]
        both = {number.dtype, result.dtype, torch.get_default_dtype(), *known} == {torch.float32}
        if (
            not is_mask
            and not both
            and not any(one.meta["val"].dtype is result.dtype for one in same if one not in filled)
        ):
            return arg
    elif not any(one.meta["val"].dtype is number.dtype and one not in filled for one in others):
        return arg
    shapes = [_shape(one) for one in others]
    return number.item() if _broadcast(shapes) == tuple(result.shape) else arg


def _broadcast(shapes: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Returns what shapes become together; None where that is not certain."""
    found: list[Any] = []
    for sizes in itertools.zip_longest(*[shape[::-1] for shape in shapes], fillvalue=1):
        larger = [size for size in sizes if not (isinstance(size, int) and size == 1)]
        if len({str(size) for size in larger}) > 1:
            return None
        found.append(larger[0] if larger else 1)
    return tuple(found[::-1])


def _drop_choices(graph: Any) -> None:
    """Writes `torch.where(mask, True, False)` and `mask.to(torch.float32) != 0` as the mask."""
    for node in list(graph.nodes):
        mask = _mask_behind(node)
        if mask is not None:
            node.replace_all_uses_with(mask)
            graph.erase_node(node)
            continue
        if node.target is torch.where and len(node.args) == 3:
            mask, yes, no = node.args
            if (yes, no) == (True, False) and yes is True and no is False:
                node.replace_all_uses_with(mask)
                graph.erase_node(node)


def _mask_behind(node: Any) -> Any:
    """Returns the mask that a node compares with 0 after it was made numbers; None for others."""
    if node.target not in (torch.ne, operator.ne) or len(node.args) != 2 or node.args[1] != 0:
        return None
    numbers = node.args[0]
    if not _is_node(numbers) or (numbers.op, numbers.target) != ("call_method", "to"):
        return None
    mask = numbers.args[0]
    is_mask = _is_tensor(mask) and mask.meta["val"].dtype is torch.bool
    return mask if is_mask and not _is_of_other(numbers, node) else None


# --- broadcasts -----------------------------------------------------------------------------------


def _drop_broadcasts(graph: Any) -> None:
    """Leaves out an `expand` where the operation that uses it does the same."""
    for node in reversed(list(graph.nodes)):
        if not _is_elementwise(node):
            continue
        for at, arg in enumerate(node.args):
            if not _is_node(arg) or (arg.op, arg.target) != ("call_method", "expand"):
                continue
            if _is_of_other(arg, node):
                continue
            source = arg.args[0]
            others = [one for i, one in enumerate(node.args) if i != at and _is_tensor(one)]
            shapes = [_shape(source), *map(_shape, others)]
            if _broadcast(shapes) == tuple(node.meta["val"].shape):
                node.args = (*node.args[:at], source, *node.args[at + 1 :])


def _drop_round_trips(graph: Any) -> None:
    """Leaves out what changes nothing: an `expand` to the same shape, a `squeeze` of a new axis."""
    for node in list(graph.nodes):
        if node.op != "call_method" or not node.args or not _is_node(node.args[0]):
            continue
        source = node.args[0]
        same = [str(size) for size in _shape(node)] == [str(size) for size in _shape(source)]
        if node.target in ("expand", "reshape") and same and _is_tensor(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        if _is_of_other(source, node) or not all(isinstance(one, int) for one in node.args[1:]):
            continue
        if (
            node.target == "squeeze"
            and source.op == "call_method"
            and source.target == "unsqueeze"
            and len(node.args) == 2
            and node.args[1] % len(_shape(source)) == source.args[1] % len(_shape(source))
        ):
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(fx_passes.is_kept)


# --- products -------------------------------------------------------------------------------------


def _share(graph: Any) -> None:
    """Computes once what a submodule computes several times from the same values."""
    seen: dict[Any, Any] = {}
    loops: tuple[Any, ...] = ()  # those that a node is in: what they compute is theirs
    for node in list(graph.nodes):
        loops = loops[: -1 if node.target is loop_end else None]
        loops = (*loops, node) if node.target is loop_begin else loops
        if node.op not in ("call_function", "call_method") or fx_passes.draws(node):
            continue
        if fx_passes.is_kept(node) or getattr(node.target, "is_control_flow", False):
            continue
        place = node.meta.get("place", ("", ""))[0]
        key = (
            (place, loops),
            node.op,
            node.target,
            fx_passes._freeze(node.args),
            fx_passes._freeze(node.kwargs),
        )
        try:
            first = seen.setdefault(key, node)
        except TypeError:
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
