"""The paths of submodules that have more than one."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmapper.programs.program import Program


def find_first_paths(program: Program) -> dict[str, str]:
    """Returns the paths of submodules -> the first path of the same one.

    One whose arrays are all those of another one of its class is that one: an embedding that an
    encoder and a decoder share.
    """
    found = dict(program.first_paths)
    holders = {name.rpartition(".")[0] for name in (*program.parameters, *program.buffers)}
    inner = {path.rpartition(".")[0] for path in program.types}
    tied: dict[str, set[str | None]] = {}
    for name, kept in program.aliases.items():
        path, _, last = name.rpartition(".")
        other, _, other_last = kept.rpartition(".")
        is_same = last == other_last and program.types.get(path) == program.types.get(other)
        tied.setdefault(path, set()).add(other if is_same else None)
    for path, owners in tied.items():
        owner = next(iter(owners))
        if len(owners) == 1 and owner and path not in holders and not {path, owner} & inner:
            found[path] = found.get(owner, owner)
    return found


def owners(program: Program) -> set[str]:
    """Returns the paths of the submodules that have arrays in them."""
    found: set[str] = set()
    for name in (*program.parameters, *program.buffers):
        while name := name.rpartition(".")[0]:
            found.add(name)
    return found


def path_below(
    caller: str, path: str, first_paths: Mapping[str, str], owners: Container[str]
) -> str:
    """Returns the path of a submodule; that below its caller, if it has one and no arrays.

    An activation that many blocks share is one of its own in each of them.
    """
    above = f"{caller}." if caller else ""
    if path in owners or path.startswith(above):
        return path
    others = (other for other, first in first_paths.items() if first == path)
    return next((other for other in others if other.startswith(above)), path)
