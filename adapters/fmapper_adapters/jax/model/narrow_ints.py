"""Integers of 64 bits where JAX has 32: they are narrowed if they fit, and refused if not.

The limits of int64, which programs use as markers, become the limits of int32. They may be moved,
selected and compared, with the same result; a program that computes with them is refused. What an
operation does with them is declared at its lowering, as `int64`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fmapper import LossyCastError
from fmapper.programs import Call, Graph, Lowering, Program, Ref
from fmapper_adapters.jax.aten import types

_ENDS = (-(2**63), 2**63 - 1)
_SPAN = np.iinfo(np.int32)


def narrow(array: Any, where: str) -> Any:
    """Narrows an array to the dtype that JAX holds without `jax_enable_x64`.

    Raises:
        LossyCastError: An integer does not fit into 32 bits, and is not a limit of int64.
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
    """Describes what an array of 64 bits loses in 32; empty if it loses nothing."""
    values = np.asarray(array).reshape(-1)
    if values.dtype == np.uint64:
        lost = values > np.iinfo(np.uint32).max
    else:
        lost = (values < _SPAN.min) | (values > _SPAN.max)
        lost[lost] = ~np.isin(values[lost], _ENDS)
    return _message(where, str(values[lost][0])) if lost.any() else ""


def _message(where: str, value: str) -> str:
    return (
        f"{where}: {value} does not fit into JAX's 32-bit integers. Set "
        'jax.config.update("jax_enable_x64", True), or use a smaller number.'
    )


def problem(
    program: Program, constants: Mapping[str, Any], lowerings: Mapping[str, Lowering]
) -> str:
    """Describes what a program's 64-bit integers would lose in 32; empty if they lose nothing.

    Args:
        program: The program.
        constants: Its constants, on the host.
        lowerings: The lowerings of its operations.
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
    loss = _Ends(marked, dtypes, lowerings).problem(program.graph)
    return f"{program.name}: {loss}" if loss else ""


class _Ends:
    """Follows the limits of int64 through the calls of a graph.

    Attributes:
        marked: Results that may contain a limit -> the place it comes from.
    """

    def __init__(
        self,
        marked: dict[str, str],
        dtypes: dict[str, str],
        lowerings: Mapping[str, Lowering],
    ) -> None:
        self.marked = marked
        self._dtypes = dtypes
        self._lowerings = lowerings
        self._with_places: set[str] = set()

    def problem(self, graph: Graph) -> str:
        """Describes the first call that loses something; empty for none."""
        for call in graph.calls:
            inner = (self._problem_inside(graph) for graph in call.graphs())
            message = self._problem_of(call) or next(filter(None, inner), "")
            if message:
                return message
        return ""

    def _problem_of(self, call: Call) -> str:
        lowering = self._lowerings[call.op]
        use = _use_of(call, lowering)
        dtype = self._dtypes[call.name] = call.result[0][0] if call.result else ""
        sources = [ref for ref in call.refs() if ref in self.marked]
        if sources and not self._is_place(call) and use != "looks":
            if use == "casts" and dtype == "bool":
                return ""
            if use == "computes" or dtype not in ("int64", ""):
                end = f"the largest or smallest int64 from {self.marked[sources[0]]}"
                return _message(_where(call), end)
            self.marked[call.name] = self.marked[sources[0]]
            if use == "picks":
                self._with_places.add(call.name)
        if dtype == "int64":
            for number in _wide_numbers(call, lowering.elements):
                if number not in _ENDS or use != "moves":
                    return _message(_where(call), str(number))
                self.marked[call.name] = _where(call)
        return ""

    def _is_place(self, call: Call) -> bool:
        """Returns whether a call reads indices from a sort or selection, which are not elements."""
        source = call.args[0] if call.args else None
        has_places = isinstance(source, Ref) and source.name in self._with_places
        return call.op == "sym::getitem" and has_places and call.args[1] == 1

    def _problem_inside(self, graph: Graph) -> str:
        """Describes what is wrong with a function in a call, which must not return a limit."""
        ends = _Ends({}, {}, self._lowerings)
        message = ends.problem(graph)
        outputs = graph.outputs if isinstance(graph.outputs, tuple) else (graph.outputs,)
        marked = [ref.name for ref in outputs if isinstance(ref, Ref) and ref.name in ends.marked]
        if marked and not message:
            return _message(
                ends.marked[marked[0]], "the largest or smallest int64 inside a function"
            )
        return message


def _wide_numbers(call: Call, elements: Sequence[int]) -> list[int]:
    """Returns the elements among a call's arguments that need more than 32 bits."""
    given = [call.args[i] for i in elements if i < len(call.args)]
    numbers = [n for n in given if isinstance(n, int) and not isinstance(n, bool)]
    return [n for n in numbers if not _SPAN.min <= n <= _SPAN.max]


def _use_of(call: Call, lowering: Lowering) -> str:
    """Returns how a call uses 64-bit integers."""
    return lowering.int64(call) if callable(lowering.int64) else lowering.int64


def _where(call: Call) -> str:
    at = f" in {call.module}" if call.module else ""
    source = f" ({call.source})" if call.source else ""
    return f"{call.op}{at}{source}"
