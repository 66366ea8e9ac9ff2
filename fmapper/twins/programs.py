"""The operations of recorded programs that use parameters, and the names of these."""

from __future__ import annotations

from collections import defaultdict

from fmapper.twins.sides import Side

_OPERATIONS = {
    "product": "mm addmm bmm baddbmm matmul linear dot_general mv dot addmv",
    "convolution": "convolution _convolution conv_general_dilated",
    "lookup": "embedding gather index index_select take",
    "factor": "mul div",
    "term": "add sub",
    "part": "cat concatenate",
}
KINDS = {op: kind for kind, ops in _OPERATIONS.items() for op in ops.split()}


def is_product(op: str) -> bool:
    """Returns whether an operation is a matrix product or a convolution."""
    return KINDS.get(plain(op)) in ("product", "convolution")


def plain(op: str) -> str:
    """Returns the name of an operation without its framework and overload."""
    return op.rpartition("::")[2].partition(".")[0]


class Names:
    """The names of parameters in programs, as those of a side and the rows of these."""

    def __init__(self, side: Side) -> None:
        self._entries = side.entries
        self._ends: dict[str, list[str]] = defaultdict(list)
        for name in side.entries:
            parts = name.split(".")
            for at in range(len(parts)):
                self._ends[".".join(parts[at:])].append(name)

    def find(self, name: str) -> str:
        """Returns the name of a parameter, `layers.weight#0` for a row; empty for no weight."""
        parts = name.split(".")
        first = self._find(name)
        for at, part in enumerate(parts):
            if not first and part.isdigit():
                stacked = self._find(".".join((*parts[:at], *parts[at + 1 :])))
                first = f"{stacked}#{part}" if stacked else ""
        return first

    def _find(self, name: str) -> str:
        names = [name] if name in self._entries else self._ends.get(name, [])
        if len(names) != 1 or self._entries[names[0]].random or self._entries[names[0]].transient:
            return ""
        return self._entries[names[0]].tied_to or names[0]
