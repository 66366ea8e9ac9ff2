"""`jit`: flattens trees, and lets the backend compile the function of their arrays."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from fmapper.backends.compute import Compute
from fmapper.backends.discovery import adapter_of
from fmapper.errors import NotCompiledWarning
from fmapper.tracebacks import short_traceback
from fmapper.transforms.arguments import (
    backend_of,
    original_of,
    place_of,
    positions,
    refuse_holders,
    refuse_untransformable,
)
from fmapper.transforms.static_key import StaticKey, changes, put_into, structure_of
from fmapper.tree.functor import functor
from fmapper.tree.nodes import node_type_of, sync
from fmapper.warn import warn

F = TypeVar("F", bound=Callable[..., Any])
Program = Callable[[list[Any], StaticKey], "tuple[Sequence[Any], Any] | None"]
_CHECKED = 1024  # static objects that one function remembers as checked


@overload
def jit(fun: F, *, static_argnums: int | Sequence[int] = ...) -> F: ...
@overload
def jit(fun: None = None, *, static_argnums: int | Sequence[int] = ...) -> Callable[[F], F]: ...
def jit(fun: Any = None, *, static_argnums: int | Sequence[int] = ()) -> Any:
    """Returns a function that the backend of its arguments compiles.

    It is recorded once per structure of its trees and shapes and dtypes of its arrays, and then
    replayed, so it should have no side effects. Arrays are inputs; strings, settings and other
    objects are static: other values are compiled again. Numbers that are arguments or items of
    containers are inputs in JAX and static in torch: pass an array for a number that changes with
    every call. Numbers within functors are static. Ties survive.

    JAX compiles with `jax.jit`. torch records what the function does to its tensors and compiles
    that with `torch.compile`; without a compiler, or if the function depends on values, as in `if
    x.sum() > 0`, `x.sum().item()` or `x[x > 0]`, it runs uncompiled and warns once.

    Args:
        fun: A function of trees, a callable model, or a method of a model; the model's arrays are
            inputs, too. Without `fun`, `jit` is a decorator with arguments.
        static_argnums: Arguments whose numbers are static, because they decide shapes or branches.

    Raises:
        TransformError: There are no arrays, or only NumPy's.
        MixedDevicesError: The arrays belong to several backends; NumPy's may be mixed with JAX's.

    Warns:
        NotCompiledWarning: The function runs uncompiled; says why.

    Examples:
        >>> import fmapper, jax.numpy as jnp
        >>> @fmapper.jit
        ... def step(model, gradient, lr):
        ...     return fmapper.fmap(lambda p, g: p - lr * g, model, gradient)
        >>> step({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, 0.5)
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    if fun is None:
        return functools.partial(jit, static_argnums=static_argnums)
    numbers = positions("static_argnums", static_argnums)
    owner, call = _owner_of(fun)
    if owner is not None:  # its arrays are inputs, too
        inner = jit(call, static_argnums=[number + (number >= 0) for number in numbers])
        return functools.wraps(fun, updated=())(functools.partial(_call, inner, owner))
    programs: dict[str, Program] = {}
    checked: dict[int, Any] = {}
    hollowing = threading.RLock()
    reasons = _Reasons()
    noted: list[str] = []

    def program_for(adapter: Compute) -> Program:
        def run(arrays: Sequence[Any], key: Any) -> tuple[list[Any], Any]:
            memo: dict[Any, Any] = {}
            args, kwargs = key.fill(arrays, memo)
            result = fun(*(arg.value if type(arg) is _Fixed else arg for arg in args), **kwargs)
            changed = changes(key.boxes, memo)
            rest = structure_of(result, lambda leaf: adapter_of(leaf) is adapter)
            refuse_holders(rest, rest.tree)
            return [*rest.arrays, *(value for _, value in changed)], (
                rest,
                [change for change, _ in changed],
            )

        return adapter.compile(run, reasons.add)

    def run_eagerly(adapter: Compute, args: Any, kwargs: Any) -> Any:
        try:
            result = fun(*args, **kwargs)
        except BaseException:
            if reasons.found:  # this error may be the reason that nothing could be recorded
                reasons.found.clear()
                programs.pop(adapter.name, None)
            raise
        if reasons.found and not noted:
            noted.append(reasons.found[0])
            name = getattr(fun, "__qualname__", type(fun).__name__)
            warn(f"jit runs {name} uncompiled: {reasons.found[0]}", NotCompiledWarning)
        reasons.found.clear()
        return result

    @short_traceback
    @functools.wraps(fun, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        sync()
        given = list(args)
        for number in numbers:
            place = place_of(number, args)
            given[place] = _Fixed(args[place])
        trees = original_of(args, kwargs)
        key = structure_of((given, kwargs), numbers=True, shown=trees)
        if any(id(leaf) not in checked for leaf in key.opaque):
            refuse_holders(key, trees)
            if len(checked) > _CHECKED:
                checked.clear()
            checked.update((id(leaf), leaf) for leaf in key.opaque)
        adapter = backend_of(key.arrays, "compile", trees)
        if adapter.name not in programs:
            programs[adapter.name] = program_for(adapter)
        boxes = key.boxes
        try:
            outcome = programs[adapter.name](key.arrays, key)
        except Exception as error:
            refuse_untransformable(error, adapter, key.arrays, "compile", trees)
            raise
        finally:
            key.tree, key.arrays, key.boxes = None, [], []  # the compiled program outlives them
        if outcome is None:
            return run_eagerly(adapter, args, kwargs)
        out, (rest, changed) = outcome
        if changed:
            out, effects = out[: -len(changed)], out[-len(changed) :]
            for change, effect in zip(changed, effects, strict=True):
                put_into(boxes, change, effect)
        with hollowing:
            if not rest.hollow:  # it still holds tracers from the recording
                rest.empty(adapter.hollow)
        return rest.fill(out)

    return wrapper


class _Reasons(threading.local):
    """The reasons why the current call of this thread could not be compiled."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, reason: str) -> None:
        self.found.append(reason)


def _owner_of(fun: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the model that a callable is or belongs to, and the function of that model."""
    sync()
    if isinstance(fun, types.MethodType) and node_type_of(fun.__self__) is not None:
        return fun.__self__, fun.__func__
    if node_type_of(fun) is not None:
        return fun, _call
    return None, fun


def _call(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fun(*args, **kwargs)


@functor(children=("value",))
class _Fixed:
    """A wrapper that makes the numbers of an argument static, because functors' numbers are."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
