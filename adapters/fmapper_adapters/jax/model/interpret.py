"""Runs the calls of a graph with JAX arrays, one lowering after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fmapper.programs import Call, DType, Graph, Lowering, Ref
from fmapper_adapters.jax.aten import types

Observer = Callable[[Call, Any], None]

_Space: Any = getattr(getattr(jax, "memory", None), "Space", None)  # since JAX 0.8
_typeof: Any = getattr(jax, "typeof", None)


@dataclass(slots=True)
class Run:
    """One evaluation of a program.

    Attributes:
        lowerings: The lowerings by operation.
        key: The key of all random numbers; each operation that draws gets its own key from it.
        observe: Called with each call and its result.
        checks: The conditions that the program asserts, in the order of its calls.
        drawn: The number of keys that were handed out.
        problems: A list to collect results of other dtypes than recorded; None to ignore them.
    """

    lowerings: Mapping[str, Lowering]
    key: Any = None
    observe: Observer | None = None
    checks: list[Any] = field(default_factory=list)
    drawn: int = 0
    problems: list[str] | None = None

    def next_key(self) -> Any:
        """Returns a fresh key for one operation of this run."""
        self.drawn += 1
        return jax.random.fold_in(self.key, self.drawn)


def evaluate(graph: Graph, inputs: Sequence[Any], run: Run) -> Any:
    """Evaluates a graph; returns its outputs in their structure.

    Raises:
        Exception: Any error of a lowering, with a note that names the call and the module.
    """
    env = dict(zip(graph.inputs, inputs, strict=True))
    dead = graph.last_uses()
    away = {name for name, value in env.items() if _is_on_host(value)}

    def resolve(value: Any) -> Any:
        if isinstance(value, Ref):
            return env[value.name]
        if isinstance(value, tuple):
            return tuple([resolve(inner) for inner in value])
        if isinstance(value, DType):
            return types.dtype_of(value.name)
        if isinstance(value, Graph):
            return _function(value, run)
        if isinstance(value, Mapping):
            return {key: resolve(inner) for key, inner in value.items()}
        return value

    for call in graph.calls:
        lowering = run.lowerings[call.op]
        for name in away.intersection(call.refs()) if away else ():
            env[name] = jax.device_put(env[name], _Space.Device)
            away.remove(name)
        try:
            kwargs = {key: resolve(value) for key, value in call.kwargs.items()}
            if lowering.random:
                kwargs["key"] = None if run.key is None else run.next_key()
            result = lowering.function(*[resolve(value) for value in call.args], **kwargs)
        except Exception as error:
            error.add_note(_where(call))
            raise
        env[call.name] = result if lowering.returns_number else _strong(result)
        if is_check(call):
            run.checks.append(env[call.name])
        if run.problems is not None:
            run.problems.extend(_problems(call, env[call.name]))
        if run.observe is not None:
            run.observe(call, env[call.name])
        for name in dead.get(call.name, ()):
            del env[name]
    return resolve(graph.outputs)


def is_check(call: Call) -> bool:
    """Returns whether a call is an assertion."""
    return call.op.startswith("aten::_assert")


def _problems(call: Call, result: Any) -> Iterator[str]:
    """Describes how the dtypes of results differ from those that were recorded.

    Shapes are not compared: torch's recording sometimes differs from its kernels in them.
    """
    arrays = jax.tree.leaves(result)
    if len(arrays) != 1 or len(call.result) != 1:  # several are checked when they are read
        return
    for array, (name, _) in zip(arrays, call.result, strict=True):
        dtype = np.result_type(array) if np.isscalar(array) else array.dtype
        if dtype != types.dtype_of(name):
            yield f"{_at(call)} gives {dtype} for {name}"


def _is_on_host(value: Any) -> bool:
    """Returns whether an array is in `pinned_host`, memory of the host that operations refuse.

    It is copied to the device at its first use, or by XLA ahead of that.
    """
    if _Space is None or not isinstance(value, jax.Array):
        return False
    return getattr(_typeof(value), "memory_space", None) is _Space.Host


def _function(graph: Graph, run: Run) -> Callable[..., Any]:
    """Returns an inner graph as a function, for operations that take one.

    Its assertions are ignored: it may be traced, and then they cannot be checked outside of it.
    """
    # A function that is differentiated may run when the trace that made the key has ended.
    draws = run.key is not None and any(run.lowerings[c.op].random for c in graph.walk())

    def inner(*args: Any) -> Any:
        key = run.next_key() if draws else None
        inner_run = Run(run.lowerings, key, run.observe, problems=run.problems)
        return evaluate(graph, args, inner_run)

    return inner


def _strong(result: Any) -> Any:
    """Makes results strongly typed: a weak one would count as a Python number later."""
    if isinstance(result, tuple | list):
        return tuple([_strong(inner) for inner in result])
    if types.is_weak(result):
        return jax.lax.convert_element_type(result, result.dtype)
    return result


def _where(call: Call) -> str:
    return f"while running {_at(call)}, as {call.name}"


def _at(call: Call) -> str:
    at = f" in {call.module}" if call.module else ""
    source = f" ({call.source})" if call.source else ""
    return f"{call.op}{at}{source}"
