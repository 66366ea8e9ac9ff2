"""Integers of 64 bits where JAX has 32: what fits is narrowed, what would be lost is refused.

The two ends of int64, which programs fill arrays with to mark a place, become the ends of int32.
They may be moved, selected and compared, which comes to the same; a program that computes with
them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fmapper import LossyCastError
from fmapper.programs import Call, Graph, Program, Ref
from fmapper_adapters.jax.aten import types

_ENDS = (-(2**63), 2**63 - 1)
_SPAN = np.iinfo(np.int32)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Where a call takes a number that becomes an element, by position; all others are sizes and places.
_FILLS = {
    "full": (1,), "full_like": (1,), "new_full": (2,), "scalar_tensor": (0,), "fill": (1,),
    "masked_fill": (2,), "index_fill": (3,), "scatter": (3,), "where": (1, 2),
    "constant_pad_nd": (2,),
}  # fmt: skip
_ARITHMETIC = _words("""
add sub rsub mul div floor_divide remainder fmod pow bitwise_and bitwise_or bitwise_xor __and__
__or__ __xor__
""")
# What gives elements of its arguments, or a choice between them.
_MOVES = _words("""
full full_like new_full scalar_tensor fill masked_fill index_fill where constant_pad_nd scatter
view _unsafe_view reshape expand permute transpose t unsqueeze squeeze select slice narrow split
split_with_sizes chunk unbind cat stack clone alias lift_fresh_copy detach copy index index_select
gather take take_along_dim repeat repeat_interleave flip roll rot90 unfold diagonal tril triu sort
topk kthvalue max min amax amin aminmax maximum minimum clamp clamp_min clamp_max cummax cummin
index_put index_copy masked_scatter masked_select select_scatter slice_scatter diagonal_scatter
contiguous as_strided getitem stop_gradient
""")
# What does not give elements of its first argument, and is the same for both kinds of ends.
_LOOKS = _words("""
eq ne lt le gt ge argmax argmin argsort isin searchsorted bucketize any all logical_not
logical_and logical_or logical_xor zeros_like ones_like empty_like new_zeros new_ones new_empty
sym_size sym_numel size numel equal sign isnan isinf isfinite nonzero
""")
_CASTS = ("_to_copy", "to")  # moves, where the dtype stays
_WITH_PLACES = ("sort", "topk", "kthvalue", "max", "min", "cummax", "cummin")


def narrowed(array: Any, where: str) -> Any:
    """An array that JAX holds as it is, unless `jax_enable_x64` is set.

    Raises:
        LossyCastError: An integer does not fit into 32 bits, and is no end of int64.
    """
    if not _is_wide(array) or types.dtype_of("int64").itemsize == 8:
        return array
    message = _loss(array, where)
    if message:
        raise LossyCastError(message)
    if array.dtype == np.uint64:
        return np.asarray(array, np.uint32)
    return np.clip(array, _SPAN.min, _SPAN.max).astype(np.int32)


def _is_wide(array: Any) -> bool:
    return isinstance(array, np.ndarray | np.generic) and array.dtype.name in ("int64", "uint64")


def _loss(array: Any, where: str) -> str:
    """What 32 bits would lose of an array of 64; empty for nothing."""
    values = np.asarray(array).reshape(-1)
    if values.dtype == np.uint64:
        lost = values > np.iinfo(np.uint32).max
    else:
        lost = (values < _SPAN.min) | (values > _SPAN.max)
        lost[lost] = ~np.isin(values[lost], _ENDS)
    return _message(where, str(values[lost][0])) if lost.any() else ""


def _message(where: str, what: str) -> str:
    return (
        f"{where}: {what} does not fit into the 32 bits that JAX has for an integer. Set "
        'jax.config.update("jax_enable_x64", True), or use a smaller number.'
    )


def problem(program: Program, constants: Mapping[str, Any]) -> str:
    """What would be lost of a program's 64-bit integers; empty where nothing is.

    Args:
        program: The program.
        constants: Its constants, on the host.
    """
    marked: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for name, spec in zip(program.graph.inputs, program.inputs, strict=True):
        dtypes[name] = spec.dtype
        array: Any = constants[str(spec.target)] if spec.kind == "constant" else None
        if _is_wide(array):
            message = _loss(array, f"{program.name}: constant {spec.target}")
            if message:
                return message
            if np.isin(array, _ENDS).any():
                marked[name] = f"constant {spec.target}"
    found = _Ends(marked, dtypes).problem(program.graph)
    return f"{program.name}: {found}" if found else ""


class _Ends:
    """Follows the ends of int64 through the calls of a graph.

    Attributes:
        marked: Results that may hold one -> where it comes from.
    """

    def __init__(self, marked: dict[str, str], dtypes: dict[str, str]) -> None:
        self.marked = marked
        self._dtypes = dtypes
        self._with_places: set[str] = set()

    def problem(self, graph: Graph) -> str:
        """What is wrong with the first call that loses something."""
        for call in graph.calls:
            found = self._problem_of(call) or next(filter(None, map(_inside, call.graphs())), "")
            if found:
                return found
        return ""

    def _problem_of(self, call: Call) -> str:
        name = call.op.split("::")[1].split(".")[0]
        dtype = self._dtypes[call.name] = call.result[0][0] if call.result else ""
        sources = [ref for ref in call.refs() if ref in self.marked]
        if sources and not self._is_place(call, name) and name not in _LOOKS:
            if name in _CASTS and dtype == "bool":
                return ""
            moved = (name in _MOVES and not _adds(call, name)) or name in _CASTS
            if not moved or dtype not in ("int64", ""):
                end = f"the end of int64 that comes from {self.marked[sources[0]]}"
                return _message(_where(call), end)
            self.marked[call.name] = self.marked[sources[0]]
            if name in _WITH_PLACES:
                self._with_places.add(call.name)
        if dtype == "int64":
            for number in _wide_numbers(call, name):
                if number not in _ENDS or name not in _FILLS:
                    return _message(_where(call), str(number))
                self.marked[call.name] = _where(call)
        return ""

    def _is_place(self, call: Call, name: str) -> bool:
        """Whether a call reads the places from what sorts or selects, which are no elements."""
        source = call.args[0] if call.args else None
        known = isinstance(source, Ref) and source.name in self._with_places
        return name == "getitem" and known and call.args[1] == 1


def _inside(graph: Graph) -> str:
    """What is wrong with a function that a call takes; no end may come out of it."""
    ends = _Ends({}, {})
    found = ends.problem(graph)
    outputs = graph.outputs if isinstance(graph.outputs, tuple) else (graph.outputs,)
    coming_out = [ref.name for ref in outputs if isinstance(ref, Ref) and ref.name in ends.marked]
    if coming_out and not found:
        return _message(ends.marked[coming_out[0]], "the end of int64 inside a function")
    return found


def _wide_numbers(call: Call, name: str) -> list[int]:
    """The numbers among the elements that a call takes that need more than 32 bits."""
    at = (0, 1) if name in _ARITHMETIC else _FILLS.get(name, ())
    given = [call.args[i] for i in at if i < len(call.args)]
    numbers = [n for n in given if isinstance(n, int) and not isinstance(n, bool)]
    return [n for n in numbers if not _SPAN.min <= n <= _SPAN.max]


def _adds(call: Call, name: str) -> bool:
    """Whether a call that puts elements somewhere computes with those that are there."""
    accumulates = name == "index_put" and len(call.args) > 3 and call.args[3]
    return bool(accumulates) or "reduce" in call.op or "reduce" in call.kwargs


def _where(call: Call) -> str:
    at = f" in {call.module}" if call.module else ""
    source = f" ({call.source})" if call.source else ""
    return f"{call.op}{at}{source}"
