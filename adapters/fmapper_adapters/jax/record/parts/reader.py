"""Finds the calls of submodules in a jaxpr, by the marks that were left there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fmapper.programs import Part, Ref, map_arguments
from fmapper_adapters.jax.record.parts.calls import PartCalls


class PartReader:
    """Finds the calls of parts while a jaxpr is read.

    Args:
        calls: The calls noted while it was traced.
        targets: Inputs that are arrays of the model -> their names.

    Attributes:
        types: The paths of submodules that are known by their arrays -> their classes.
    """

    def __init__(self, calls: PartCalls, targets: Mapping[str, str]) -> None:
        self._calls = calls
        self._targets = targets
        self.types: dict[str, str] = {}
        self._functions: dict[str, list[str]] = {}  # functions of containers, by path
        self._open: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}
        self.done: list[dict[str, Any]] = []

    @property
    def lines(self) -> tuple[str, int, int, str] | None:
        """The file of the function being read, its first and last line, and its name."""
        return self._calls.noted[self._open[-1]["at"]]["lines"] if self._open else None

    @property
    def name(self) -> str:
        """The name of the call being read."""
        return self._open[-1]["name"] if self._open else ""

    def own_names(self, at: int) -> Sequence[str]:
        """Returns the names of the arrays of a called part whose path is not known."""
        names: Sequence[str] = self._calls.noted[at]["held"]
        return names

    def see(self, at: int, ends: bool, values: list[Any]) -> None:
        """Reads a mark: a call begins or ends."""
        noted = self._calls.noted[at]

        def value(ref: Any) -> Any:
            if not isinstance(ref, Ref):
                return ref
            result = values[int(ref.name)]
            return getattr(result, "value", result) if not isinstance(result, Ref) else result

        if not ends:
            path = self._path(noted, values)
            if path is None:
                self._open.append({"name": self.name, "at": at})
                return
            number = self._counts.get(path, 0)
            self._counts[path] = number + 1
            made = {
                "name": f"{path}@{number}" if number else path,
                "at": at,
                "path": path,
                "parent": self.name,
                "arguments": map_arguments(noted["arguments"], value),
            }
            self._open.append(made)
            self.done.append(made)
            return
        if all(entry["at"] != at for entry in self._open):
            return  # it began in code that JAX eliminated
        while self._open[-1]["at"] != at:
            self._open.pop()
        if "result" in noted:
            self._open.pop()["result"] = map_arguments(noted["result"], value)

    def _path(self, noted: Mapping[str, Any], values: Sequence[Any]) -> str | None:
        """Returns the noted path of a submodule, or finds it by its arrays; None if unknown."""
        path: str = noted["path"]
        names = noted["held"]
        if not names and noted["within"] is None:
            return path
        paths = Counter(
            target.removesuffix(f".{name}")
            for name, value in zip(names, values[len(values) - len(names) :], strict=True)
            for target in [self._targets.get(value.name, "") if isinstance(value, Ref) else ""]
            if target.endswith(f".{name}")
        )
        if noted["is_function"]:
            return self._container(noted, paths)
        if paths:
            path = paths.most_common(1)[0][0]
        elif noted["within"] is not None:
            at, inner = noted["within"]
            outer = next((entry.get("path") for entry in self._open if entry["at"] == at), None)
            path = f"{outer}.{inner}" if outer else ""
        elif not any(target.startswith(f"{path}.") for target in self._targets.values()):
            path = ""
        if path:
            self.types[path] = noted["type"]
        return path or None

    def _container(self, noted: Mapping[str, Any], paths: Counter[str]) -> str | None:
        """Returns the path of the container that a function takes, if it is one of the model's."""
        if len(paths) != 1 or paths.total() != len(noted["held"]):
            return None  # not a container of the model, or a changed one
        (path,) = paths
        functions = self._functions.setdefault(path, [])
        if noted["lines"][-1] not in functions:
            functions.append(noted["lines"][-1])
        self.types[path] = noted["type"] if len(functions) == 1 else ""
        return path

    def parts(self) -> tuple[Part, ...]:
        """Returns the calls."""
        parts = []
        for entry in self.done:
            if "result" not in entry:
                continue
            noted = self._calls.noted[entry["at"]]
            given = (
                entry["name"],
                entry["path"],
                entry["parent"],
                entry["arguments"],
                entry["result"],
            )
            name = noted["lines"][-1] if noted["lines"] and entry["path"] else ""
            method = name if name.isidentifier() and name != "__call__" else ""
            if noted["is_function"] and len(self._functions[entry["path"]]) == 1:
                method = ""
            beside = noted["source"], noted["prefix"], noted["positional"], method
            parts.append(Part(*given, *beside))
        return tuple(parts)
