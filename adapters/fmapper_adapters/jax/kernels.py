"""Estimates the kernels of a compiled program, from the fusions that XLA finds in its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fmapper.backends import Counts

# They only reinterpret memory, or do nothing.
_FREE = {
    "bitcast_convert_type",
    "expand_dims",
    "optimization_barrier",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "stop_gradient",
    "transpose",  # products and convolutions take any layout, loops read any
}
# They take one or several kernels: a library's, or one that nothing is fused into.
_ALONE = {
    "all_gather", "all_to_all", "approx_top_k", "cholesky", "conv_general_dilated", "cumlogsumexp",
    "cummax", "cummin", "cumprod", "cumsum", "custom_call", "dot_general", "eig", "eigh", "fft",
    "geqrf", "householder_product", "lu", "pallas_call", "psum", "pure_callback", "qr",
    "ragged_dot_general", "random_bits", "random_gamma", "random_seed", "random_split",
    "random_wrap", "rng_bit_generator", "scatter", "scatter-add", "scatter_add", "scatter_max",
    "scatter_min", "scatter_mul", "schur", "select_and_scatter_add", "sort", "svd", "threefry2x32",
    "top_k", "triangular_solve", "tridiagonal", "tridiagonal_solve",
}  # fmt: skip
# Operations before them are fused into them, operations after them are not.
_REDUCING = {
    "argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_precision", "reduce_prod", "reduce_sum", "reduce_window", "reduce_window_max",
    "reduce_window_min", "reduce_window_sum", "reduce_xor",
}  # fmt: skip
_ARITHMETIC_FREE = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice",
    "dynamic_update_slice", "gather", "iota", "pad", "rev", "select_n", "slice", "split",
}  # fmt: skip
_CALLBACKS = {"pure_callback", "io_callback", "debug_callback"}
_LOOP = "a while loop without a known number of iterations is counted as one iteration"


@dataclass(slots=True)
class _Operation:
    """An operation of a flat program: its operands and results by number."""

    name: str
    inputs: list[int]
    outputs: list[int]
    params: dict[str, Any]
    results: list[Any]
    operands: list[Any]
    fuses: bool


@dataclass(slots=True)
class _Tally:
    launches: float = 0
    flops: float = 0
    nbytes: float = 0
    syncs: float = 0
    unseen: set[str] = field(default_factory=set)

    def add(self, other: _Tally, times: float) -> None:
        self.launches += times * other.launches
        self.flops += times * other.flops
        self.nbytes += times * other.nbytes
        self.syncs += times * other.syncs
        self.unseen |= other.unseen


def count(traced: Any) -> Counts:
    """Counts the kernels of a closed jaxpr.

    Elementwise operations, slices, gathers and similar ones are fused into the elementwise
    operation or reduction that uses them, so that there is one kernel for each value that a
    product, a convolution, a loop or the caller reads; products and convolutions are a kernel each.
    See https://openxla.org/xla/gpu_architecture for the fusions of XLA on GPUs.
    """
    tally = _program(_inner(traced))
    return Counts(
        launches=tally.launches,
        flops=tally.flops,
        nbytes=tally.nbytes,
        syncs=tally.syncs,
        compiled=True,
        unseen=tuple(sorted(tally.unseen)),
    )


def _program(jaxpr: Any) -> _Tally:
    """Returns the counts of one run of a jaxpr, with calls inlined and loops multiplied."""
    flat = _Flat()
    tally = _Tally()
    outs = flat.inline(jaxpr, [flat.number(var) for var in (*jaxpr.constvars, *jaxpr.invars)])
    makers = {out: operation for operation in flat.operations for out in operation.outputs}
    read = set(outs)  # values that must be in memory
    for operation in flat.operations:
        if not operation.fuses and operation.name not in _REDUCING:
            read.update(operation.inputs)
    for operation in flat.operations:
        tally.flops += _flops(operation)
        if operation.name in ("scan", "while", "cond"):
            _control(operation, tally)
        elif not operation.fuses or any(out in read for out in operation.outputs):
            tally.launches += 1
            tally.syncs += operation.name in _CALLBACKS
            tally.nbytes += sum(map(_nbytes, operation.results))
            tally.nbytes += sum(_nbytes(flat.avals[at]) for at in _sources(operation, makers, read))
    return tally


def _sources(operation: _Operation, makers: dict[int, _Operation], read: set[int]) -> Iterator[int]:
    """Yields the operands of a kernel, through everything that is fused into it."""
    fuses_before = operation.fuses or operation.name in _REDUCING
    seen: set[int] = set()
    todo = list(operation.inputs)
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        maker = makers.get(at)
        if fuses_before and maker is not None and maker.fuses and at not in read:
            todo += maker.inputs
        else:
            yield at


def _control(operation: _Operation, tally: _Tally) -> None:
    params = operation.params
    if operation.name == "scan":
        tally.add(_program(_inner(params["jaxpr"])), params["length"])
    elif operation.name == "while":
        tally.add(_program(_inner(params["body_jaxpr"])), 1)
        tally.add(_program(_inner(params["cond_jaxpr"])), 1)
        tally.unseen.add(_LOOP)
    else:
        branches = [_program(_inner(branch)) for branch in params["branches"]]
        tally.add(max(branches, key=lambda branch: branch.launches), 1)


class _Flat:
    """A program without calls: every value has a number, every operation names those it reads."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.avals: list[Any] = []

    def number(self, var: Any) -> int:
        self.avals.append(var.aval)
        return len(self.avals) - 1

    def inline(self, jaxpr: Any, given: list[int]) -> list[int]:
        """Adds the operations of a jaxpr for the given values, and returns its outputs."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        for equation in jaxpr.eqns:
            inputs = [env[var] for var in equation.invars if not _is_literal(var)]
            name = equation.primitive.name
            body = _callee_jaxpr(equation)
            if name in _FREE and len(inputs) == len(equation.outvars):
                outputs = inputs
            elif body is not None and len(body.constvars) + len(body.invars) == len(
                equation.invars
            ):
                outputs = self.inline(
                    body,
                    [self.number(var) if _is_literal(var) else env[var] for var in equation.invars],
                )
            else:
                outputs = [self.number(var) for var in equation.outvars]
                fuses = not (name in _ALONE or name in _REDUCING or name in _CALLBACKS)
                self.operations.append(
                    _Operation(
                        name,
                        inputs,
                        outputs,
                        equation.params,
                        [var.aval for var in equation.outvars],
                        [var.aval for var in equation.invars],
                        fuses and name not in ("scan", "while", "cond"),
                    )
                )
            env.update(zip(equation.outvars, outputs, strict=True))
        return [self.number(var) if _is_literal(var) else env[var] for var in jaxpr.outvars]


def _callee_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr of a call (`jit`, `custom_jvp_call`, `checkpoint` ...), or None."""
    if equation.primitive.name in ("scan", "while", "cond", "pallas_call", *_ALONE, *_REDUCING):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in equation.params:
            return _inner(equation.params[key])
    return None


def _inner(jaxpr: Any) -> Any:
    """Returns a jaxpr without its closure over constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_literal(var: Any) -> bool:
    return hasattr(var, "val")


def _product(lengths: Iterable[int]) -> int:
    return math.prod(lengths)


def _size(aval: Any) -> int:
    return _product(getattr(aval, "shape", ()))


def _nbytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return _size(aval) * int(getattr(dtype, "itemsize", 0))


def _sum_of_sizes(avals: Iterable[Any]) -> int:
    return sum(map(_size, avals))


def _flops(operation: _Operation) -> float:
    name, params = operation.name, operation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = operation.operands[0].shape
        return 2.0 * _size(operation.results[0]) * _product(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = operation.operands[1].shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(operation.results[0]) * _product(kernel) / int(features)
    if name in _REDUCING:
        return float(_sum_of_sizes(operation.operands))
    if name in _ARITHMETIC_FREE or name in ("scan", "while", "cond"):
        return 0.0
    return float(_sum_of_sizes(operation.results))
