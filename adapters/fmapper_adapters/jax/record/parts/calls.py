"""Records the calls of submodules while a model is traced, with their arguments and results.

Each call puts two marks into the jaxpr: an identity of its arguments, and one of its results. The
marks pass through `vmap`, `grad` and inner functions like any operation, and are removed when the
jaxpr is read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fmapper.programs import Other, Ref
from fmapper.programs.reading import arguments_of
from fmapper_adapters.jax.record import closure, frames
from fmapper_adapters.jax.record.states import split_output

mark: Any = Primitive("fmapper_part")
mark.multiple_results = True
mark.def_impl(lambda *xs, **_: list(xs))
mark.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(mark, lambda ctx, *xs, **_: xs)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return mark.bind(*primals, **params), list(tangents)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    """Moves batch dimensions of `vmap` to the front of the arguments and results of parts."""
    moved = [jnp.moveaxis(x, dim, 0) if dim else x for x, dim in zip(args, dims, strict=True)]
    return mark.bind(*moved, **params), [0 if dim else dim for dim in dims]


ad.primitive_jvps[mark] = _jvp
batching.primitive_batchers[mark] = _batch


class PartCalls:
    """The calls of submodules in one recording.

    Attributes:
        types: The paths of the submodules -> their classes.
        first_paths: Their paths -> the first path of the same submodule.
    """

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.first_paths: dict[str, str] = {}
        self.noted: list[dict[str, Any]] = []
        self._open: list[int] = []  # ids of the objects whose methods run
        self._lines: list[tuple[str, int, int, str] | None] = []  # lines of these methods

    def call(
        self, path: str, owner: Any, function: Callable[..., Any], args: Any, kwargs: Any,
        run: Callable[..., Any], held: Mapping[str, Any] | None = None,
        within: tuple[int, str] | None = None, kind: str = "",
    ) -> Any:  # fmt: skip
        """Calls a part between two marks.

        Args:
            path: The path of the part; empty if its arrays identify it.
            owner: The part.
            function: The function with its signature, without `self`.
            args: The positional arguments.
            kwargs: The keyword arguments.
            run: The function to call.
            held: The part's arrays by name, if these determine its path.
            within: The call of the enclosing part, and the path within that part, if `path` is
                empty.
            kind: The name of its class, for functions of containers.
        """
        if self._open and self._open[-1] == id(owner):  # a method calls another one
            return run(*args, **kwargs)
        at = len(self.noted)
        noted: dict[str, Any] = {
            "path": path,
            "held": [*(held or {})],
            "within": within,
            "type": kind or f"{type(owner).__module__}.{type(owner).__qualname__}",
            "is_function": bool(kind),
            "source": _caller(self._lines[-1] if self._lines else None),
            "lines": _lines(_code_of(function)),
            "gives_state": False,
        }
        self.noted.append(noted)
        arrays = _Arrays()
        arrays.see((args, kwargs))
        given = mark.bind(*arrays.values, *(held or {}).values(), part=at, ends=False)
        arrays.put(given[: len(arrays.values)])
        by_name = arguments_of(function, args, kwargs)
        noted["arguments"] = {
            name: arrays.argument(value) for name, value in by_name.values.items()
        }
        noted["prefix"], noted["positional"] = by_name.prefix, by_name.positional
        args, kwargs = arrays.rebuilt((args, kwargs))
        self._open.append(id(owner))
        self._lines.append(noted["lines"])
        try:
            result = run(*args, **kwargs)
        finally:
            self._open.pop()
            self._lines.pop()
        arrays = _Arrays()
        arrays.see(result)
        arrays.put(mark.bind(*arrays.values, part=at, ends=True))
        plain, state = split_output(result)
        noted["result"] = arrays.structure(plain)
        noted["gives_state"] = state is not None
        return arrays.rebuilt(result)


class PartScopes(PartCalls):
    """Names the part that each operation belongs to, without changing the program."""

    def call(
        self, path: str, owner: Any, function: Callable[..., Any], args: Any, kwargs: Any,
        run: Callable[..., Any], held: Mapping[str, Any] | None = None,
        within: tuple[int, str] | None = None, kind: str = "",
    ) -> Any:  # fmt: skip
        """Calls a part within a scope of its path."""
        self.noted.append({"arguments": {}})
        scope = jax.named_scope(f"@{path}") if path else contextlib.nullcontext()
        with scope:
            return run(*args, **kwargs)


def part_in(scopes: str) -> str:
    """Returns the path of the innermost part in the names of scopes; the names if there is none."""
    paths: list[str] = re.findall(r"@([^/()]+)", scopes)
    return paths[-1] if paths else scopes


def scope_in(scopes: str) -> str:
    """Returns the names of scopes without the parts, as they are where those are not recorded."""
    return re.sub(r"@[^/()]+/?", "", scopes).strip("/")


class _Arrays:
    """The arrays in arguments or results, and their replacements."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._at: dict[int, int] = {}
        self._new: list[Any] = []

    def see(self, value: Any) -> None:
        """Finds the arrays in tuples, lists and dicts."""
        if isinstance(value, jax.core.Tracer):
            if id(value) not in self._at:
                self._at[id(value)] = len(self.values)
                self.values.append(value)
        elif isinstance(value, tuple | list):
            for inner in value:
                self.see(inner)
        elif type(value) is dict:
            for inner in value.values():
                self.see(inner)

    def put(self, new: Any) -> None:
        """Replaces arrays by the results of the marks."""
        self._new = list(new)

    def rebuilt(self, value: Any) -> Any:
        """Returns a structure with the new arrays in it."""
        if isinstance(value, jax.core.Tracer):
            return self._new[self._at[id(value)]]
        if isinstance(value, tuple | list):
            inner = [self.rebuilt(item) for item in value]
            return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
        if type(value) is dict:
            return {key: self.rebuilt(item) for key, item in value.items()}
        return value

    def structure(self, value: Any) -> Any:
        """Returns a structure as plain data, with a `Ref` for each array."""
        if isinstance(value, jax.core.Tracer):
            return Ref(str(self._at[id(value)]))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple(map(self.structure, value))
        if type(value) is dict:
            return {str(key): self.structure(inner) for key, inner in value.items()}
        return None

    def argument(self, value: Any) -> Any:
        """Returns an argument as plain data."""
        data = self.structure(value)
        return Other() if data is None and value is not None else data


class _Recording:
    calls: PartCalls | None = None


@contextlib.contextmanager
def record_calls(calls: PartCalls | None) -> Iterator[None]:
    """Records the calls of parts within the block; `None` records nothing."""
    before, _Recording.calls = _Recording.calls, calls
    try:
        yield
    finally:
        _Recording.calls = before


def call_and_note(
    function: Any, skipped: int, args: Any, kwargs: Any, run: Any, options: Iterable[str] = ()
) -> Any:
    """Calls the whole model, and records the call if calls are recorded.

    Args:
        function: The function with the model's signature.
        skipped: The number of its first parameters that are not arguments of the model.
        args: The positional arguments.
        kwargs: The keyword arguments.
        run: The function to call.
        options: Keywords that are not arguments of the model, such as Linen's `rngs`.
    """
    calls = _Recording.calls
    if calls is None:
        return run(*args, **kwargs)
    callee = inspect.unwrap(function) if callable(function) else function
    if not hasattr(callee, "__qualname__"):  # such as `jax.vmap(model)`
        callee = type(callee)
    name = callee.__qualname__.removesuffix(".__call__")
    calls.types.setdefault("", f"{callee.__module__}.{name}")
    calls.first_paths.setdefault("", "")
    bound = functools.partial(function, *[None] * skipped) if function else run
    at = len(calls.noted)
    output = calls.call("", None, bound, args, kwargs, run)
    for key in options:
        calls.noted[at]["arguments"].pop(key, None)
    return output


def is_noting() -> bool:
    """Returns whether calls of parts are being recorded."""
    return _Recording.calls is not None


def note_call(
    path: str, owner: Any, method: Any, args: Any, kwargs: Any, run: Any, held: Mapping[str, Any]
) -> Any:
    """Calls a method of a part, and records the call.

    Args:
        path: The path of the part, unless its arrays determine another one.
        owner: The part.
        method: The function of its class.
        args: The positional arguments.
        kwargs: The keyword arguments.
        run: The function to call.
        held: Its arrays by their names in it.
    """
    calls = _Recording.calls
    assert calls is not None
    if path:
        calls.types.setdefault(path, f"{type(owner).__module__}.{type(owner).__qualname__}")
        calls.first_paths.setdefault(path, path)
    bound = functools.partial(inspect.unwrap(method), owner)
    held = {name: x for name, x in held.items() if isinstance(x, jax.core.Tracer)}
    return calls.call(path, owner, bound, args, kwargs, run, held)


def note_function(
    owner: Any, function: Any, args: Any, kwargs: Any, run: Any, held: Mapping[str, Any], kind: str
) -> Any:
    """Calls a function of a container of arrays, and records it as the call of a part."""
    calls = _Recording.calls
    assert calls is not None
    return calls.call("", owner, function, args, kwargs, run, held, kind=kind)


@contextlib.contextmanager
def watch(parts: Callable[[], Iterable[tuple[str, Any]]]) -> Iterator[None]:
    """Records the calls of objects' methods.

    Args:
        parts: Returns the objects to watch, each with its path; tied ones once per path.
    """
    calls = _Recording.calls
    if calls is None:
        yield
        return
    paths: dict[int, str] = {}
    kept = []  # keeps objects alive, so that ids stay valid
    for path, part in parts():
        kept.append(part)
        first = paths.setdefault(id(part), path)
        calls.first_paths.setdefault(path, first)
        cls = type(part)
        calls.types.setdefault(path, f"{cls.__module__}.{cls.__qualname__}")
    changed: list[tuple[type, str, Any]] = []
    others: dict[int, tuple[Any, int, str]] = {}
    try:
        for cls in {type(part) for part in kept}:
            for owner, name in frames.methods_of(cls):
                if not any(entry[:2] == (owner, name) for entry in changed):
                    original = vars(owner)[name]
                    changed.append((owner, name, original))
                    type.__setattr__(owner, name, _wrap_call(original, paths, others))
        yield
    finally:
        for owner, name, original in changed:
            type.__setattr__(owner, name, original)


def _wrap_call(
    original: Any, paths: Mapping[int, str], others: dict[int, tuple[Any, int, str]]
) -> Any:
    """Returns a method that records its calls.

    Args:
        original: The method.
        paths: The objects of the model, by their ids -> their paths.
        others: The copies that a transformation such as `nnx.scan` or `nnx.remat` makes, by id ->
            the object, the call of the enclosing part, and the path within that part.
    """
    function = inspect.unwrap(original)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(self, type(self))
        path, calls = paths.get(id(self)), _Recording.calls
        if path == "" or calls is None:
            return run(*args, **kwargs)
        bound = functools.partial(function, self)
        if path is not None:
            return calls.call(path, self, bound, args, kwargs, run)
        held = closure.traced_arrays(self)
        outer = others.get(id(self))
        if not held and outer is None:
            return run(*args, **kwargs)
        for inner, part in closure.objects_at(self):
            others.setdefault(id(part), (part, len(calls.noted), inner))
        within = None if outer is None else outer[1:]
        return calls.call("", self, bound, args, kwargs, run, held, within)

    return method


def _code_of(function: Any) -> Any:
    """Returns the Python function behind a callable; None if unknown."""
    inner = inspect.unwrap(getattr(function, "func", function))
    inner = getattr(inner, "__func__", inner)
    return inner if isinstance(inner, types.FunctionType) else None


def _lines(function: Any) -> tuple[str, int, int, str] | None:
    """Returns the file of a function, its first and last line there, and its name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    lines = [line for _, _, line in code.co_lines() if line]
    return code.co_filename, min(lines), max(lines), code.co_name


def _caller(within: tuple[str, int, int, str] | None) -> str:
    """Returns the line from which a part is called, as `file:line`.

    Args:
        within: The lines of the function that calls it; None for a caller that is not a part.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if within is not None:
            if file == within[0] and within[1] <= frame.f_lineno <= within[2]:
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back
            continue
        is_library = (
            frames.is_of_jax(file) or frames.is_of_library(file) or frames.is_of_python(file)
        )
        if not is_library:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
