"""Records the calls of submodules while a module is recorded, with their arguments and results."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from fmapper.programs import Other, Part, Program, Ref, Size, map_arguments
from fmapper.programs.reading import (
    arguments_of,
)
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.record import forwards, marks
from fmapper_adapters.torch.record.lines import line_of_method, lines_in
from fmapper_adapters.torch.record.patches import dead_results, foreign_classes, methods

_METHODS = "fmapper_methods"


class PartCalls:
    """The calls of submodules in one recording, in order.

    Args:
        module: The module being recorded.

    Attributes:
        types: The paths of all submodules -> their classes.
        first_paths: Their paths -> the first path of the same submodule.
        left_out: The effects of training that a recording for evaluation lacks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.types: dict[str, str] = {}
        self.first_paths: dict[str, str] = {}
        self.left_out = ""
        paths = self._paths = dict[int, str]()
        for path, inner in module.named_modules(remove_duplicate=False):
            cls = type(inner)
            self.types[path] = f"{cls.__module__}.{cls.__qualname__}"
            self.first_paths[path] = paths.setdefault(id(inner), path)
        self._module = module
        self._open: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []
        self._placeholders: list[str] = []
        self._same: dict[str, str] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Records the calls within the block, after forgetting earlier ones."""
        self._open, self._noted, self._placeholders, self._same = [], [], [], {}
        handles = []
        try:
            for inner in self._module.modules():
                handles.append(
                    inner.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                )
                handles.append(
                    inner.register_forward_hook(self._leave, with_kwargs=True, always_call=False)
                )
            with (
                methods.watch(self._module, self._begin, self._end),
                forwards.watch(self._module, self._call_forward),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        at = _private.place_in_recording()
        if at is None:  # a run without recording
            return
        name, path, self._placeholders = at
        if not path:  # the whole module: torch may have started over
            self._open, self._noted = [], []
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            _private.note_lines(code, self._describe)
        self._note(name, path, module.forward, args, kwargs, owner=id(module))

    def _note(
        self, name: str, path: str, called: Any, args: Any, kwargs: Any, **facts: Any
    ) -> dict[str, Any]:
        """Notes that a call begins."""
        given = arguments_of(called, args, kwargs)
        noted = {
            "name": name,
            "path": path,
            "parent": self._open[-1]["name"] if self._open else "",
            "arguments": {key: _argument(value, self._same) for key, value in given.values.items()},
            "prefix": given.prefix,
            "positional": given.positional,
            "source": _caller(),
            **facts,
        }
        self._open.append(noted)
        self._noted.append(noted)
        return noted

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        at = _private.place_in_recording()
        if at is None or not self._open:
            return
        while self._open and self._open[-1]["name"] != at[0]:
            self._open.pop()  # ended by an exception that the caller caught
        if self._open:
            dead_results.mark(result)
            self._open.pop()["result"] = _with_refs(result, self._same, _DEEPEST)

    def _call_forward(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls a module's `forward`, and notes the call unless `__call__` has done so."""
        caller = self._open[-1] if self._open else None
        is_noted = caller is None or (caller["owner"] == id(module) and "method" not in caller)
        if is_noted or _private.place_in_recording() is None:
            return forward(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args, kwargs)
            result = forward(*args, **kwargs)
            self._leave(module, args, kwargs, result)
            return result

        return forwards.call_as_part(module, call, args, kwargs)

    def _begin(
        self,
        owner: torch.nn.Module,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> dict[str, Any] | None:
        """Notes the call of a method of another part."""
        if not self._open or _private.place_in_recording() is None:
            return None
        path = self._paths.get(id(owner), "")
        if not path or id(owner) == self._open[-1]["owner"]:
            return None
        facts = {"code": inspect.unwrap(function).__code__, "method": name, "owner": id(owner)}
        full = f"{path}:{name}@{len(self._noted)}"
        return self._note(full, path, functools.partial(function, owner), args[1:], kwargs, **facts)

    def _end(self, noted: dict[str, Any], result: Any) -> None:
        """Notes the result of a method."""
        while self._open and self._open.pop() is not noted:
            pass  # calls that ended with an exception
        leaves = _private.pytree.tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            noted["result"] = _with_refs(result, self._same, _DEEPEST)

    def _describe(self, frame: FrameType | None) -> dict[str, Any]:
        """Returns the notes for an operation: its line, and the methods around it."""
        method = line_of_method(frame)
        facts: dict[str, Any] = {"fmapper_method": method} if method else {}
        inner = [*itertools.takewhile(lambda entry: "code" in entry, reversed(self._open))][::-1]
        if inner:
            lines = lines_in(frame, [entry["code"] for entry in inner])
            names = [entry["name"] for entry in inner]
            facts[_METHODS] = tuple(zip(names, lines, strict=True))
        return facts

    def parts(self, inputs: list[str], graph: torch.fx.Graph) -> tuple[Part, ...]:
        """Returns the calls.

        Args:
            inputs: The names of the graph's inputs, without those that torch created for constants.
            graph: The final graph; values that it no longer contains have a name with `?`.
        """
        names = marks.marks_of_recording(graph)
        if len(inputs) == len(self._placeholders):
            names |= dict(zip(self._placeholders, inputs, strict=True))

        def rename(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            name = value.name
            while name not in names and name in self._same:
                name = self._same[name]
            return Ref(names.get(name, f"?{value.name}"))

        lost = {one["name"]: one["parent"] for one in self._noted if "result" not in one}

        def parent_of(noted: Mapping[str, Any]) -> str:
            name: str = noted["parent"]
            while name in lost:
                name = lost[name]
            return name

        return tuple(
            Part(
                noted["name"],
                noted["path"],
                parent_of(noted),
                map_arguments(noted["arguments"], rename),
                map_arguments(noted["result"], rename),
                noted["source"],
                noted["prefix"],
                noted["positional"],
                noted.get("method", ""),
            )
            for noted in self._noted
            if "result" in noted
        )


def with_methods(program: Program, graph: torch.fx.Graph) -> Program:
    """Returns a program whose calls are those of the methods of parts in which they were made."""
    known = {part.name for part in program.parts if part.method}
    inner = {
        node.name: [
            one for one in (node.meta.get("custom") or {}).get(_METHODS, ()) if one[0] in known
        ]
        for node in graph.nodes
    }
    calls = [
        replace(call, module=inner[call.name][-1][0], source=inner[call.name][-1][1] or call.source)
        if inner.get(call.name)
        else call
        for call in program.graph.calls
    ]
    return replace(program, graph=replace(program.graph, calls=calls))


def _caller() -> str:
    """Returns the line from which a module is called, as `file:line`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        is_own = name == "torch.nn.modules.transformer"  # as in `line_of_stack`
        if (is_own and frame.f_code.co_name == "forward") or not name.startswith(
            ("torch.", "fmapper_adapters.", "contextlib")
        ):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _argument(value: Any, same: dict[str, str]) -> Any:
    """Returns an argument as plain data."""
    data = _with_refs(value, same)
    return Other() if data is None and value is not None else data


_DEEPEST = 8  # depth of nested objects, which may contain themselves


def _with_refs(value: Any, same: dict[str, str], objects: int = 0) -> Any:
    """Returns arguments or results as plain data, with references for tensors.

    Args:
        value: The argument or result.
        same: Names of values -> names of equal values; extended.
        objects: The depth to which objects with tensors become dicts of their fields. 0 for
            arguments: a cache would hold results that the module has yet to compute.
    """
    if isinstance(value, torch.Tensor):
        name = marks.name_in_recording(value, same)
        return Ref(name) if name else None
    if isinstance(value, torch.SymInt):
        return Size(str(value.node.expr))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_with_refs(inner, same, objects) for inner in value)
    if isinstance(value, Mapping):
        return {str(key): _with_refs(item, same, objects) for key, item in value.items()}
    if not objects:
        return None
    fields = foreign_classes.fields_of(value)
    return None if fields is None else _with_refs(fields, same, objects - 1)
