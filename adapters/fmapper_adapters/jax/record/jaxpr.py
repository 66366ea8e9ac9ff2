"""Reads a jaxpr as a graph of plain data."""

from __future__ import annotations

import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import numpy as np
from jax.extend import core

from fmapper import ConversionError, FmapperWarning
from fmapper.programs import Call, DType, Graph, Ref, Scalar, Size
from fmapper.programs.reading import keep_results_of_parts
from fmapper_adapters.jax.arrays import few_bits, prng_keys
from fmapper_adapters.jax.record import parts, stacks
from fmapper_adapters.jax.record.equations import (
    checks,
    collectives,
    custom_derivatives,
    linear_solves,
    loops,
    plain,
    primitives,
    sparse,
)

# How many derivatives of functions with custom derivatives are recorded.
_ORDER = 2


if TYPE_CHECKING:
    from fmapper_adapters.jax.record.parts import PartReader
    from fmapper_adapters.jax.record.stacks import Stacks


class _Surroundings(ConversionError):
    """Raised when a function uses an array of a recording that has ended."""


class Reader:
    """Reads the jaxprs of a program, of which the outermost may have constants.

    Args:
        parts: The reader of the calls of submodules; None to ignore them.
        stacks: The stacked arrays to unstack; None to leave them.

    Attributes:
        constants: The arrays in the code, by the names that the reader gives them.
        equations: The equation of each call of the outermost graph.
    """

    def __init__(self, parts: PartReader | None = None, stacks: Stacks | None = None) -> None:
        self.stacks = stacks
        self.constants: dict[str, Any] = {}
        self.parts = parts
        self._arrays: dict[str, Any] = {}
        self.equations: dict[str, Any] = {}
        self._functions: dict[Any, tuple[Graph, Graph | str]] = {}

    def root(self, closed: Any, names: Sequence[str]) -> Graph:
        """Makes the graph of a closed jaxpr, whose inputs are `names`, then the constants."""
        body = _Body(self, self.constant, _ORDER)
        graph = body.graph(closed.jaxpr, names, closed.consts)
        return Graph((*names, *self.constants), graph.calls, graph.outputs)

    def inner(
        self, closed: Any, order: int | None, names: Sequence[str] = ()
    ) -> tuple[Graph, list[Any]]:
        """Returns the graph of a jaxpr within another one, and the arrays that it holds.

        Those arrays are its first inputs.
        """
        jaxpr = getattr(closed, "jaxpr", closed)
        names = names or [f"in_{i}" for i in range(len(jaxpr.invars))]
        held: list[Any] = []

        def constant(array: Any) -> str:
            for i, other in enumerate(held):
                if other is array:
                    return f"held_{i}"
            held.append(array)
            return f"held_{len(held) - 1}"

        body = _Body(self, constant, order)
        graph = body.graph(jaxpr, names, getattr(closed, "consts", ()))
        kinds = (*(plain.kind(a) for a in held), *(plain.kind(v.aval) for v in jaxpr.invars))
        inputs = (*(f"held_{i}" for i in range(len(held))), *names)
        return Graph(inputs, graph.calls, graph.outputs, kinds), held

    def function(
        self, function: custom_derivatives.Function, order: int
    ) -> tuple[Graph, Graph | str, list[Any], list[Any]]:
        """Returns the graphs of a function and of its derivative, and the arrays that they hold.

        If there is no derivative, its place holds the reason: it may never be needed.
        """
        key = (function.name, order, function.taken, str(function.body))
        at = key if function.is_own else None
        if at in self._functions:
            return (*self._functions[at], [], [])
        body, held = self.inner(function.body, None, function.names)
        backward: Graph | str = "it was recorded up to the second derivative"
        more: list[Any] = []
        if order and function.taken and function.given:
            closed = _derivative(function)
            if isinstance(closed, str):
                backward = closed
            else:
                try:
                    backward, more = self.inner(closed, order - 1)
                except _Surroundings as reason:
                    backward = str(reason)
        if at is not None and not held and not more:
            self._functions[at] = body, backward
        return body, backward, held, more

    def constant(self, array: Any) -> str:
        """Returns the name of an array that the code of the outermost graph holds."""
        for name, other in self._arrays.items():
            if other is array:
                return name
        name = f"constant_{len(self.constants)}"
        self._arrays[name] = array
        is_view = isinstance(array, np.ndarray) and array.base is not None
        self.constants[name] = array.copy() if is_view else array  # constants have no ties
        return name


class _Body:
    """Reads one graph and the functions called in it.

    Args:
        reader: The reader of the program.
        constant: Names an array in the code.
        order: How many custom derivatives of inner functions to record; None for none.
    """

    def __init__(self, reader: Reader, constant: Callable[[Any], str], order: int | None) -> None:
        self._reader = reader
        self._constant = constant
        self._order = order
        self._calls: list[Call] = []
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()  # names of inputs, which no call may have
        self._differentiable: set[str] = set()  # results that may have derivatives
        is_root = constant == reader.constant
        self._parts = reader.parts if is_root else None

    def graph(self, jaxpr: Any, names: Sequence[str], consts: Sequence[Any]) -> Graph:
        env: dict[Any, Any] = {}
        self._taken.update(names)
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._array(array)
        for var, name in zip(jaxpr.invars, names, strict=True):
            env[var] = Ref(name)
            if plain.has_derivatives(plain.kind(var.aval)):
                self._differentiable.add(name)
        outputs = self._read(jaxpr, env, "", "")
        graph = Graph(tuple(names), self._calls, outputs)
        return keep_results_of_parts(graph, [] if self._parts is None else self._parts.parts())

    def _read(self, jaxpr: Any, env: dict[Any, Any], path: str, source: str) -> tuple[Any, ...]:
        for eqn in jaxpr.eqns:
            self._equation(eqn, env, path, source)
        return tuple(self._value(var, env) for var in jaxpr.outvars)

    def _read_closed(self, closed: Any, args: list[Any], path: str, source: str) -> tuple[Any, ...]:
        jaxpr = getattr(closed, "jaxpr", closed)
        env = dict(zip(jaxpr.invars, args, strict=True))
        consts = getattr(closed, "consts", ())
        env.update((v, self._array(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        return self._read(jaxpr, env, path, source)

    def _value(self, var: Any, env: Mapping[Any, Any]) -> Any:
        if not isinstance(var, core.Literal):
            return env[var]
        if getattr(var.aval, "dtype", None) == jax.dtypes.float0:
            return Scalar(False, "bool")  # an unused derivative of an integer
        if np.ndim(var.val):
            return self._array(var.val)
        return Scalar(plain.number(var.val), few_bits.holder(str(getattr(var.aval, "dtype", None))))

    def _array(self, array: Any) -> Any:
        """Returns the argument for an array in the code: a number for a scalar."""
        if isinstance(array, jax.core.Tracer):
            raise _Surroundings(
                "a function uses an array of an enclosing scope; pass it to the function as an "
                "argument"
            )
        if prng_keys.is_key(array):
            array = jax.random.key_data(array)
        if not np.ndim(array):
            return Scalar(plain.number(array), few_bits.holder(str(array.dtype)))
        return Ref(self._constant(array))

    def _equation(self, eqn: Any, env: dict[Any, Any], path: str, outer: str) -> None:
        name = eqn.primitive.name
        args = [self._value(var, env) for var in eqn.invars]
        if name == parts.mark.name:
            if self._parts is not None:
                self._parts.see(eqn.params["part"], eqn.params["ends"], args)
            env.update(zip(eqn.outvars, args, strict=True))
            return
        path = plain.path(eqn, path) if self._parts is None else self._parts.name
        within = self._parts.lines if self._parts is not None else None
        source = plain.source(eqn, within) or outer
        why = primitives.HOST.get(name)
        if why is not None:
            where = f" ({source})" if source else ""
            raise ConversionError(f"{name} in {path or 'the root'}{where}: {why}")
        if name in primitives.SHOWN:
            warnings.warn(
                f"{source or path or 'the root'}: output of jax.debug is dropped",
                FmapperWarning,
                stacklevel=2,
            )
            return
        for var, result in zip(eqn.outvars, self._results(eqn, args, path, source), strict=True):
            env[var] = result

    def _results(self, eqn: Any, args: list[Any], path: str, source: str) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan" and self._parts is not None and self._reader.stacks is not None:
            rows = self._reader.stacks.find(eqn, args, self._name, self._parts.own_names)
            if rows is not None:
                names = [row.name for stack in rows if stack for row in stack]
                self._taken.update(names)
                self._differentiable.update(names)

                def read(closed: Any, given: list[Any]) -> Sequence[Any]:
                    return self._read_closed(closed, given, path, source)

                return stacks.unroll(eqn, args, rows, read)
        if self._parts is not None and loops.calls_parts(eqn, parts.mark.name):
            return self._read_step(eqn, args, path, source)
        if name in primitives.INLINED:
            closed = params.get("jaxpr", params.get("call_jaxpr", params.get("call")))
            return self._read_closed(closed, args, path, source)
        if name in primitives.OPAQUE:
            shapes = [jax.core.ShapedArray(*_shape_of(var.aval)) for var in eqn.invars]
            run: Any = functools.partial(eqn.primitive.impl, **params)
            opened = jax.make_jaxpr(run)(*shapes)
            return self._read_closed(opened, args, path, source)
        dense = sparse.on_dense_arrays(eqn)
        if dense is not None:
            return self._read_closed(dense, args, path, source)
        if name == "optimization_barrier":  # affects the order of operations only
            return args
        if name == "platform_index":
            return (Scalar(_cpu(params["platforms"]), "int32"),)
        if name == "cond" and isinstance(args[0], Scalar):
            last = len(params["branches"]) - 1
            branch = params["branches"][min(max(int(args[0].value), 0), last)]
            return self._read_closed(branch, args[1:], path, source)
        if prng_keys.is_identity(eqn):
            return args
        check = checks.find_check(eqn)
        if check is not None:
            return self._read_check(check, eqn, args, path, source)
        if checks.holds_one(eqn):  # its derivative is that of its body
            return self._read_closed(eqn.params["call_jaxpr"], args, path, source)
        system = linear_solves.system_of(eqn, args, self._calls)
        if system is not None:
            return self._emit("linalg_solve", eqn, *system, path, source, False)
        function = custom_derivatives.function_of(eqn)
        if function is not None:
            if self._order is None:
                return self._read_closed(function.body, args, path, source)
            return self._function(function, eqn, args, path, source)
        raw = prng_keys.on_raw_keys(eqn) or collectives.on_dimensions(eqn) or few_bits.on_bytes(eqn)
        if raw is not None:  # keys are arrays of words here
            return self._read_closed(raw, args, path, source)
        return self._call(eqn, args, path, source)

    def _read_step(self, eqn: Any, args: list[Any], path: str, source: str) -> Sequence[Any]:
        varies = any(map(self._varies, args))

        def emit(name: str, given: Any, kwargs: Any, kinds: Sequence[Any]) -> Sequence[Any]:
            at = self._name(name)
            self._calls.append(Call(at, f"lax::{name}", given, kwargs, path, source, (*kinds,)))
            if varies:
                self._differentiable.add(at)
            return tuple(self._item(at, i, kind, path, source) for i, kind in enumerate(kinds))

        def read(closed: Any, given: list[Any]) -> Sequence[Any]:
            return self._read_closed(closed, given, path, source)

        length = self._plain(eqn.params["length"], [])
        return loops.read_step(eqn, args, stacks.operands(eqn), length, emit, read)

    def _read_check(
        self, check: checks.Check, eqn: Any, args: list[Any], path: str, source: str
    ) -> Sequence[Any]:
        """Reads a check, and returns the checked values."""
        values = list(self._read_closed(check.branch, args[1:], path, source))
        if isinstance(args[0], Scalar):
            return values
        kwargs = {"message": check.message, "wrong": check.wrong}
        return self._emit("error_if", eqn, (args[0], *values), kwargs, path, source, True)

    def _function(
        self,
        function: custom_derivatives.Function,
        eqn: Any,
        args: list[Any],
        path: str,
        source: str,
    ) -> Sequence[Any]:
        varying = tuple(i for i in function.taken if self._varies(args[i]))
        if self._order and not varying:  # its derivative is never needed
            return self._read_closed(function.body, args, path, source)
        function = dataclasses.replace(function, taken=varying)
        body, backward, held, more = self._reader.function(function, self._order or 0)
        kwargs: dict[str, Any] = {
            "call_jaxpr": body,
            "function": function.name,
            "differentiable": function.taken,
            "cotangents": function.given,
            "backward": backward,
        }
        if held or more:
            kwargs["constants"] = len(held), len(more)
        if isinstance(backward, Graph) and function.opens_rule():
            kwargs["once"] = True
        operands = (*map(self._array, (*held, *more)), *args)
        before = set(self._differentiable)
        results = self._emit(eqn.primitive.name, eqn, operands, kwargs, path, source, True)
        if isinstance(backward, str) and self._order:  # JAX would raise
            self._differentiable = before
        return results

    def _varies(self, operand: Any) -> bool:
        """Returns whether an operand may depend on differentiable inputs."""
        return isinstance(operand, Ref) and operand.name in self._differentiable

    def _call(self, eqn: Any, args: list[Any], path: str, source: str) -> Sequence[Any]:
        name = eqn.primitive.name
        if few_bits.is_refused(eqn):
            where = f" ({source})" if source else ""
            raise ConversionError(
                f"{name} in {path or 'the root'}{where}: torch has no integers of fewer than 8 "
                f"bits, and bytes cannot represent them here; use int8 instead"
            )
        params = {**eqn.params, **prng_keys.params(eqn), **_counts(eqn)}
        held: list[tuple[Graph, list[Any]]] = []
        kwargs = {
            key: self._plain(value, held)
            for key, value in params.items()
            if value is not None and key not in primitives.DROPPED and not _is_function(value)
        }
        if any(arrays for _, arrays in held):
            args, kwargs = self._with_constants(name, args, kwargs, held)
        several = eqn.primitive.multiple_results
        return self._emit(name, eqn, tuple(args), kwargs, path, source, several)

    def _emit(
        self,
        name: str,
        eqn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        path: str,
        source: str,
        several: bool,
    ) -> Sequence[Any]:
        at = self._name(name)
        if self._constant == self._reader.constant:
            self._reader.equations[at] = eqn
        result = tuple(plain.kind(var.aval) for var in eqn.outvars)
        self._calls.append(Call(at, f"lax::{name}", args, kwargs, path, source, result))
        if name not in primitives.STOPPING and any(map(self._varies, args)):
            self._differentiable.add(at)
        if not several:
            return (Ref(at),)
        return tuple(self._item(at, i, kind, path, source) for i, kind in enumerate(result))

    def _item(self, call: str, i: int, kind: Any, path: str, source: str) -> Ref:
        at = self._name(call)
        args = (Ref(call), i)
        self._calls.append(Call(at, "sym::getitem", args, {}, path, source, (kind,)))
        if call in self._differentiable and plain.has_derivatives(kind):
            self._differentiable.add(at)
        return Ref(at)

    def _with_constants(
        self,
        name: str,
        args: list[Any],
        kwargs: dict[str, Any],
        held: list[tuple[Graph, list[Any]]],
    ) -> tuple[list[Any], dict[str, Any]]:
        """Makes the arrays of inner functions operands of the call.

        Raises:
            ConversionError: The operation does not accept them.
        """
        arrays = {id(graph): [self._array(a) for a in given] for graph, given in held}
        if name == "scan":
            consts = arrays[id(kwargs["jaxpr"])]
            return [*consts, *args], {**kwargs, "num_consts": kwargs["num_consts"] + len(consts)}
        if name == "while":
            split = kwargs["cond_nconsts"]
            cond = arrays[id(kwargs["cond_jaxpr"])]
            body = arrays[id(kwargs["body_jaxpr"])]
            counts = {
                "cond_nconsts": split + len(cond),
                "body_nconsts": kwargs["body_nconsts"] + len(body),
            }
            return [*cond, *args[:split], *body, *args[split:]], {**kwargs, **counts}
        if name == "cond":
            every = [a for branch in kwargs["branches"] for a in arrays[id(branch)]]
            branches = loops.with_all(kwargs["branches"], [len(given) for _, given in held])
            return [args[0], *every, *args[1:]], {**kwargs, "branches": branches}
        raise ConversionError(f"{name}: an inner function captures arrays; pass them as arguments")

    def _name(self, base: str) -> str:
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
        while True:
            number = self._counts.get(base, 0)
            self._counts[base] = number + 1
            name = f"{base}_{number}" if number or base[-1:].isdigit() else base
            if name not in self._taken:
                return name

    def _plain(self, value: Any, held: list[tuple[Graph, list[Any]]]) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, enum.Enum):  # some are ints, too
            return value.name.lower()
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value)
        if isinstance(value, complex | np.complexfloating):
            return complex(value)
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, np.dtype) or (
            isinstance(value, type) and issubclass(value, np.generic)
        ):
            return DType(str(np.dtype(value)))
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            graph, arrays = self._reader.inner(value, self._order)
            held.append((graph, arrays))
            return graph
        if jax.export.is_symbolic_dim(value):
            return Size(str(value))
        fields = getattr(value, "_fields", None)
        if fields is None and dataclasses.is_dataclass(value):
            fields = tuple(field.name for field in dataclasses.fields(value))
        if fields is not None:
            return {key: self._plain(getattr(value, key), held) for key in fields}
        if isinstance(value, tuple | list):
            return tuple(self._plain(inner, held) for inner in value)
        if isinstance(value, Mapping):
            return {str(key): self._plain(inner, held) for key, inner in value.items()}
        if isinstance(value, np.ndarray):
            return tuple(self._plain(inner, held) for inner in value.tolist())
        return str(value)


def _counts(eqn: Any) -> dict[str, int]:
    """Returns how many operands of a loop are constants, and how many carry."""
    if eqn.primitive.name != "scan":
        return {}
    return dict(zip(("num_consts", "num_carry"), stacks.operands(eqn), strict=True))


def _cpu(platforms: Any) -> int:
    """Returns the index of the branch for the CPU, or of the default branch.

    Raises:
        ConversionError: There is no such branch.
    """
    for i, names in enumerate(platforms):
        if names is None or "cpu" in names:
            return i
    raise ConversionError(f"platform_dependent has no version for cpu, only for {platforms}")


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | np.dtype)


def _derivative(function: custom_derivatives.Function) -> Any | str:
    """Returns the derivative of a function, or why JAX has none."""
    try:
        return function.differentiate(function.taken)
    except Exception as reason:  # JAX and libraries raise many classes if there is none
        return f"JAX: {reason}"


def _shape_of(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype
