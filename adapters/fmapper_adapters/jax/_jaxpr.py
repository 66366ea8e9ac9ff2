"""From a jaxpr to a graph as plain data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend import core

from fmapper import Call, ConversionError, DType, Graph, Ref, Scalar, Size
from fmapper_adapters.jax import _custom, _keys

# Functions that are called where they stand: what they compute is part of the caller.
_INLINED = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"}
_INLINED |= {"custom_vmap_call", "run_state"}
# What says nothing about the values: layouts over devices, hints to compilers, names.
_DROPPED = {
    "sharding",
    "out_sharding",
    "accuracy",
    "debug",
    "debug_info",
    "name",
    "mesh",
    "ctx_mesh",
}
_DROPPED |= {
    "jvp_jaxpr_fun",
    "jvp_jaxpr_thunk",
    "fwd_jaxpr_thunk",
    "bwd",
    "out_trees",
    "_split_transpose",
}
_DROPPED |= {"const_lengths", "linear", "unroll", "update_consts", "symbolic_zeros", "accuracy"}
_CUSTOM = {"custom_jvp_call", "custom_vjp_call"}
_HOST = {
    "pure_callback": "it calls back into Python on the host",
    "io_callback": "it calls back into Python on the host",
    "debug_callback": "it calls back into Python on the host",
    "pallas_call": "it is a Pallas kernel, written for the compiler of JAX",
    "xla_pmap": "it is spread over devices by pmap",
    "shard_map": "it is spread over devices by shard_map",
    "infeed": "it reads from the host",
    "outfeed": "it writes to the host",
    "ffi_call": "it calls a foreign function that XLA knows",
}


class Reader:
    """Reads jaxprs of one program, of which the outermost may have constants.

    Attributes:
        constants: The arrays that the code holds, by the names that they are given here.
        equations: The equation that each call of the outermost graph comes from.
    """

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self.equations: dict[str, Any] = {}

    def root(self, closed: Any, names: Sequence[str]) -> Graph:
        """The graph of a closed jaxpr; its inputs are those names, and after them the constants."""
        own = [self._constant(array) for array in closed.consts]
        found = self._graph(closed.jaxpr, names, own)
        return Graph((*names, *self.constants), found.calls, found.outputs)

    def inner(self, closed: Any, *, natural: bool = False) -> Graph:
        """The graph of a jaxpr within another one; its constants come first among its inputs.

        Args:
            closed: The jaxpr.
            natural: Functions in it have no derivative of their own: it is one itself.
        """
        jaxpr = getattr(closed, "jaxpr", closed)
        count = len(jaxpr.constvars) + len(jaxpr.invars)
        names = [f"in_{i}" for i in range(count)]
        split = len(jaxpr.constvars)
        found = _Body(self, None, natural).graph(jaxpr, names[split:], names[:split])
        kinds = tuple(_kind(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
        return Graph(tuple(names), found.calls, found.outputs, kinds)

    def _graph(self, jaxpr: Any, names: Sequence[str], consts: Sequence[str]) -> Graph:
        return _Body(self, self._constant, natural=False).graph(jaxpr, names, consts)

    def _constant(self, array: Any) -> str:
        for name, known in self.constants.items():
            if known is array:
                return name
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name


class _Body:
    """Reads one graph, with the functions that are called in it."""

    def __init__(
        self, reader: Reader, constant: Callable[[Any], str] | None, natural: bool
    ) -> None:
        self._reader = reader
        self._constant = constant
        self._natural = natural
        self._calls: list[Call] = []
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()  # names of inputs, which no call may have

    def graph(self, jaxpr: Any, names: Sequence[str], consts: Sequence[str]) -> Graph:
        env: dict[Any, Any] = {}
        self._taken.update(consts, names)
        for var, name in zip(jaxpr.constvars, consts, strict=True):
            env[var] = Ref(name)
        for var, name in zip(jaxpr.invars, names, strict=True):
            env[var] = Ref(name)
        outputs = self._read(jaxpr, env, "", "")
        found = Graph((*consts, *names), self._calls, outputs)
        return found.without_dead_calls(lambda call: False)

    def _read(self, jaxpr: Any, env: dict[Any, Any], path: str, source: str) -> tuple[Any, ...]:
        for eqn in jaxpr.eqns:
            self._equation(eqn, env, path, source)
        return tuple(self._value(var, env) for var in jaxpr.outvars)

    def _value(self, var: Any, env: Mapping[Any, Any]) -> Any:
        if not isinstance(var, core.Literal):
            return env[var]
        value, dtype = var.val, getattr(var.aval, "dtype", None)
        if np.ndim(value):
            if self._constant is None:
                raise ConversionError(
                    "an array that the code of an inner function holds; give it to that function "
                    "as an argument"
                )
            return Ref(self._constant(value))
        return Scalar(_number(value), str(dtype))

    def _equation(self, eqn: Any, env: dict[Any, Any], path: str, outer: str) -> None:
        name = eqn.primitive.name
        args = [self._value(var, env) for var in eqn.invars]
        path = _path(eqn, path)
        source = _source(eqn) or outer
        if name in _HOST:
            where = f" ({source})" if source else ""
            raise ConversionError(f"{name} in {path or 'the root'}{where}: {_HOST[name]}")
        if name in _INLINED or (self._natural and name in _CUSTOM):
            results = self._inline(eqn, args, path, source)
        else:
            results = self._call(eqn, args, path, source)
        for var, result in zip(eqn.outvars, results, strict=True):
            env[var] = result

    def _inline(self, eqn: Any, args: list[Any], path: str, source: str) -> tuple[Any, ...]:
        closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("call")))
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = list(getattr(closed, "consts", ()))
        env = dict(zip(jaxpr.invars, args, strict=True))
        if consts:
            if self._constant is None:
                raise ConversionError(
                    f"{eqn.primitive.name}: holds arrays inside an inner function"
                )
            env.update(
                (var, Ref(self._constant(c)))
                for var, c in zip(jaxpr.constvars, consts, strict=True)
            )
        return self._read(jaxpr, env, path, source)

    def _call(self, eqn: Any, args: list[Any], path: str, source: str) -> tuple[Any, ...]:
        name = eqn.primitive.name
        raw = _keys.on_raw_keys(eqn)
        if raw is not None:  # keys are arrays of words here
            jaxpr = raw.jaxpr
            env = dict(zip(jaxpr.invars, args, strict=True))
            env.update(
                (var, self._hoisted(c)) for var, c in zip(jaxpr.constvars, raw.consts, strict=True)
            )
            return self._read(jaxpr, env, path, source)
        params = {**eqn.params, **_custom.derivative(eqn), **_keys.params(eqn)}
        args, params = self._with_constants(name, args, params)
        kwargs = {
            key: self._plain(value, natural=self._natural or key == "backward")
            for key, value in params.items()
            if value is not None and key not in _DROPPED and not _is_function(value)
        }
        at = self._name(name)
        if self._constant is not None:
            self._reader.equations[at] = eqn
        result = tuple(_kind(var.aval) for var in eqn.outvars)
        self._calls.append(Call(at, f"lax::{name}", tuple(args), kwargs, path, source, result))
        if not eqn.primitive.multiple_results:
            return (Ref(at),)
        return tuple(self._item(at, i, kind, path, source) for i, kind in enumerate(result))

    def _item(self, call: str, i: int, kind: Any, path: str, source: str) -> Ref:
        at = self._name(call)
        args = (Ref(call), i)
        self._calls.append(Call(at, "sym::getitem", args, {}, path, source, (kind,)))
        return Ref(at)

    def _hoisted(self, array: Any) -> Any:
        if not np.ndim(array):
            return Scalar(_number(array), str(array.dtype))
        if self._constant is None:
            raise ConversionError("keys with arrays of constants in an inner function")
        return Ref(self._constant(array))

    def _with_constants(
        self, name: str, args: list[Any], params: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arrays that inner functions hold, as operands of the call.

        Raises:
            ConversionError: The operation has no place for them.
        """
        closed = [
            value
            for param in params.values()
            for value in (param if isinstance(param, tuple) else (param,))
            if isinstance(value, core.ClosedJaxpr) and value.consts
        ]
        if not closed:
            return args, params
        if name in _CUSTOM:
            return [*(self._hoisted(c) for c in closed[0].consts), *args], params
        if name == "scan":
            own = [self._hoisted(c) for c in closed[0].consts]
            return [*own, *args], {**params, "num_consts": params["num_consts"] + len(own)}
        if name == "while":
            split = params["cond_nconsts"]
            cond = [self._hoisted(c) for c in params["cond_jaxpr"].consts]
            body = [self._hoisted(c) for c in params["body_jaxpr"].consts]
            counts = {
                "cond_nconsts": split + len(cond),
                "body_nconsts": params["body_nconsts"] + len(body),
            }
            return [*cond, *args[:split], *body, *args[split:]], {**params, **counts}
        raise ConversionError(f"{name}: an inner function holds arrays; give it those as arguments")

    def _name(self, base: str) -> str:
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
        while True:
            number = self._counts.get(base, 0)
            self._counts[base] = number + 1
            name = f"{base}_{number}" if number or base[-1:].isdigit() else base
            if name not in self._taken:
                return name

    def _plain(self, value: Any, *, natural: bool) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
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
        if isinstance(value, enum.Enum):
            return value.name.lower()
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            return self._reader.inner(value, natural=natural)
        if jax.export.is_symbolic_dim(value):
            return Size(str(value))
        fields = getattr(value, "_fields", None)
        if fields is None and dataclasses.is_dataclass(value):
            fields = tuple(field.name for field in dataclasses.fields(value))
        if fields is not None:
            return {key: self._plain(getattr(value, key), natural=natural) for key in fields}
        if isinstance(value, tuple | list):
            return tuple(self._plain(inner, natural=natural) for inner in value)
        if isinstance(value, Mapping):
            return {str(key): self._plain(inner, natural=natural) for key, inner in value.items()}
        if isinstance(value, np.ndarray):
            return tuple(self._plain(inner, natural=natural) for inner in value.tolist())
        return str(value)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | np.dtype)


def _number(value: Any) -> Any:
    found = np.asarray(value)
    if found.dtype.kind == "V" or found.dtype.name.startswith(("bfloat", "float8")):
        found = found.astype(np.float64)
    return found.item()


def _kind(aval: Any) -> tuple[str, tuple[int | str, ...]]:
    """Dtype and shape; keys of threefry are two words of 32 bits, in a last dimension."""
    dtype, shape = _keys.physical(aval)
    return dtype, tuple(n if isinstance(n, int) else str(n) for n in shape)


def _path(eqn: Any, outer: str) -> str:
    """The names of the scopes that an equation stands in, as Flax names its modules."""
    own = str(eqn.source_info.name_stack)
    return "/".join(part for part in (outer, own) if part)


def _source(eqn: Any) -> str:
    """The innermost line that is not of JAX or Flax, else the innermost."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    frames = [f for f in traceback.frames if not _is_of_jax(f.file_name)]
    own = [f for f in frames if not _is_of_library(f.file_name)] or frames
    return f"{own[0].file_name}:{own[0].line_num}" if own else ""


def _is_of_jax(file: str) -> bool:
    return "/jax/_src/" in file or "/jax/" in file or "/fmapper" in file or file.startswith("<")


def _is_of_library(file: str) -> bool:
    return any(f"/{name}/" in file for name in ("flax", "equinox", "haiku", "optax"))
