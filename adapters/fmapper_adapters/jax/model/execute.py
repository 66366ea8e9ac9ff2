"""Runs a program on arrays, compiled or not, and raises an error if an assertion fails."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import FmapperError, ProgramInputError
from fmapper.programs import Call, Input, Program
from fmapper_adapters.jax.arrays import few_bits
from fmapper_adapters.jax.arrays.packed import PackedArray, blocks_of, in_order
from fmapper_adapters.jax.arrays.sharding import count_devices
from fmapper_adapters.jax.aten import types
from fmapper_adapters.jax.model import channels_last, interpret, meshes, narrow_ints, packing
from fmapper_adapters.jax.model.static_program import Arrays, StaticProgram

Results = tuple[list[Any], Arrays, dict[int, Any], Any]  # as run_program returns them


def run_program(  # static_argnums goes by position
    code: StaticProgram,
    numbers: tuple[Any, ...],
    precision: str | None,
    params: tuple[Any, ...],
    buffers: tuple[Any, ...],
    arrays: list[Any],
    key: Any,
    observe: interpret.Observer | None = None,
) -> Results:
    """Runs the program on arrays.

    Returns:
        The outputs that are not constant, the changed arrays by name, the changed inputs by
        position, and whether the assertions hold, as one array; None if there are none.
    """
    program = code.program
    code.check_width()
    given, static = iter(arrays), iter(numbers)
    is_plain = observe is not None or code.concrete
    params, counts = _arrange(code, params, is_plain=is_plain)
    named = {"parameter": iter(params), "buffer": iter(buffers)}
    inputs = []
    for spec in program.inputs:
        if spec.kind == "static":
            inputs.append(spec.value)
        elif spec.kind == "user":
            inputs.append(_strong(next(given)) if spec.is_array() else next(static))
        elif spec.kind == "constant":
            array = code.constants[str(spec.target)]
            inputs.append(jnp.asarray(narrow_ints.narrow(array, f"{program.name}: {spec.target}")))
        else:
            held = few_bits.in_bytes(next(named[spec.kind]))
            array = narrow_ints.narrow(held, f"{program.name}: {spec.target}")
            inputs.append(jnp.asarray(array))
    graph, lowerings = program.graph, code.lowerings
    in_parts = not is_plain and count_devices(inputs) > 1
    if counts:
        graph, lowerings = code.graph_with_blocks(counts, in_parts=in_parts)
    elif in_parts:
        graph, lowerings = code.row_blocks
    run = interpret.Run(lowerings, key, observe, problems=code.problems)
    with _settings(program, precision):
        try:
            values = interpret.evaluate(graph, inputs, run)
        except _UNFIT as error:
            if not code.concrete or isinstance(error, FmapperError):
                raise
            if isinstance(error, jax.errors.JAXTypeError) or _TRACED.search(str(error)):
                error.add_note(_not_compiled(program))
                raise
            raise _unfit(code, run, error) from error
    users: list[Any] = []
    changed: Arrays = {}
    changed_inputs: dict[int, Any] = {}
    fixed = iter(code.fixed_outputs)
    for value, output in zip(values, program.outputs, strict=True):
        if output.kind == "user":
            if next(fixed) is None:
                users.append(value)
        elif output.kind == "input":
            changed_inputs[int(output.target)] = value
        else:
            dtype = program.few_bits.get(str(output.target))
            changed[str(output.target)] = value if dtype is None else value.astype(dtype)
    checks = [jnp.asarray(check).reshape(()).astype(bool) for check in run.checks]
    return users, changed, changed_inputs, jnp.stack(checks) if checks else None


def _arrange(
    code: StaticProgram, params: tuple[Any, ...], *, is_plain: bool
) -> tuple[tuple[Any, ...], packing.Counts]:
    """Returns the parameters as arrays, and how many blocks packed ones have; () for plain ones."""
    if not any(isinstance(array, PackedArray) for array in params):
        return params, ()
    if is_plain:
        return tuple(map(in_order, params)), ()
    names = code.names["parameter"]  # tied ones more than once
    named = dict(zip(names, params, strict=True))
    counts = packing.counts(code.packings, named)
    new = packing.arrange(code.packings, counts, named)
    return tuple([new[name] for name in names]), counts


_UNFIT = (
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
)  # raised for values that an operation refuses
_TRACED = re.compile(r"Tracer|concrete value")  # in messages of JAX about traced values


def _not_compiled(program: Program) -> str:
    return (
        f"The sizes in {program.name} depend on the values of arrays, so it can be called, and "
        "differentiated with respect to parameters on which no size depends, but not compiled: "
        "call it outside of jax.jit, jax.vmap and jax.export, or convert the model with "
        "specialize=True, which fixes the sizes of the examples."
    )


def _unfit(code: StaticProgram, run: interpret.Run, error: Exception) -> Exception:
    """Returns the error for values that an operation of a program without fixed sizes refuses.

    If an assertion of the program failed before, that is the reason.
    """
    for check, call in zip(run.checks, code.checks, strict=False):
        if not isinstance(check, jax.core.Tracer) and not np.asarray(check).all():
            return ProgramInputError(_problem(code, call))
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("while running ")]
    at = notes[0].removeprefix("while running ").rpartition(", as ")[0] if notes else "an operation"
    return ProgramInputError(
        f"{code.program.name}: {at} cannot be computed for the values of these inputs: "
        f"{type(error).__name__}: {error}. Sizes in this program depend on values. If the model "
        "itself takes such inputs, convert it with examples of this kind."
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def run_compiled(
    code: StaticProgram, numbers: tuple[Any, ...], precision: str | None, *arrays: Any
) -> Results:
    """Runs the compiled program on arrays."""
    run: Callable[..., Results] = partial(run_program, code, numbers, precision)
    if code.convolves and jax.default_backend() == "cpu":
        run = channels_last.channels_last(run)
    params, buffers, users, _ = arrays

    def keep(results: Results) -> Results:
        """Keeps the sharding of arrays that the program changes, and of outputs like weights."""
        names = code.names["parameter"] + code.names["buffer"]
        state = dict(zip(names, map(blocks_of, (*params, *buffers)), strict=True))
        places = {int(i.target): at for at, i in enumerate(_array_inputs(code))}
        changed = {name: state.get(name) for name in results[1]}
        inputs = {place: users[places[place]] for place in results[2]}
        weights = dict(zip(code.names["parameter"], map(blocks_of, params), strict=True))
        outputs = meshes.output_axes(code.output_dimensions, weights)
        return outputs, changed, inputs, None

    result: Results = meshes.run(run, arrays, batch=users, keep=keep)
    return result


def _array_inputs(code: StaticProgram) -> list[Input]:
    return [spec for spec in code.users if spec.kind == "user" and spec.is_array()]


def check_assertions(code: StaticProgram, checks: Any) -> None:
    """Raises an error if an assertion fails; inside a transformation, when the program runs."""
    if isinstance(checks, jax.core.Tracer):
        jax.debug.callback(partial(_raise_unless, code), checks)
    elif checks is not None:
        _raise_unless(code, checks)


def _raise_unless(code: StaticProgram, checks: Any) -> None:
    checks = np.asarray(checks)
    if checks.all():
        return
    rows = checks.reshape(-1, len(code.checks))  # one per element under jax.vmap
    for i, call in enumerate(code.checks):
        if not rows[:, i].all():
            raise ProgramInputError(_problem(code, call))


def _problem(code: StaticProgram, call: Call) -> str:
    message = str(call.args[1]) if len(call.args) > 1 else "a condition does not hold"
    where = f" in {call.module}" if call.module else ""
    line = f", at {call.source}" if call.source else ""
    return (
        f"{code.program.name}: the model asserts{where} a condition that these inputs violate"
        f"{line}: {message}. If the program depends on values of the examples, convert the model "
        f"with inputs of this kind."
    )


@contextlib.contextmanager
def _settings(program: Program, precision: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(types.default_dtype_is(program.default_dtype))
        if precision is not None:
            stack.enter_context(jax.default_matmul_precision(precision))
        yield


def _strong(array: Any) -> Any:
    array = jnp.asarray(array)
    return array.astype(array.dtype) if types.is_weak(array) else array
