"""A call among those of a submodule, as a layer is looked for in it."""

from __future__ import annotations

from typing import Any

from fmapper.translation import Call, Ref, Structure, Unit, local_array


class Site:
    """A call with what is known of its arguments.

    Args:
        structure: The program.
        unit: The submodule.
        call: One of its calls.
    """

    def __init__(self, structure: Structure, unit: Unit, call: Call) -> None:
        self.structure = structure
        self.unit = unit
        self.call = call

    def arg(self, at: int, default: Any = None) -> Any:
        """Returns an argument of the call."""
        return self.call.args[at] if at < len(self.call.args) else default

    def array(self, at: int) -> tuple[str, str] | None:
        """Returns the name of an array of the module's own and its local name."""
        given = self.arg(at)
        if not isinstance(given, Ref):
            return None
        local = local_array(self.structure, self.unit, given.name)
        return None if local is None else (given.name, local)

    def shape(self, name: str) -> tuple[Any, ...]:
        """Returns the shape of a value."""
        return self.structure.values[name][1]

    def dtype(self, name: str) -> str:
        """Returns the dtype of a value, by name."""
        return self.structure.values[name][0]

    def result_of(self, index: int) -> str:
        """Returns the value that is a result of the call among several."""
        for call in self.unit.calls():
            if call.op == "sym::getitem" and call.args == (Ref(self.call.name), index):
                return call.name
        return self.call.name

    def results(self) -> frozenset[str]:
        """Returns the values that are results of the call among several."""
        return frozenset(
            call.name
            for call in self.unit.calls()
            if call.op == "sym::getitem" and call.args[0] == Ref(self.call.name)
        )


def keywords(dtype: str) -> str:
    """Returns the keywords for a dtype other than float32."""
    return "" if dtype == "float32" else f"dtype=jnp.{dtype}, param_dtype=jnp.{dtype}, "


def stem_of(local: str, default: str) -> str:
    """Names a layer after its weight."""
    *path, last = local.split(".")
    stem = last.removesuffix("weight").rstrip("_")
    return stem or (path[-1] if path else default)
