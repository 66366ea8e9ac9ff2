"""The table of lowerings: how one is added, and how one is found."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from fmapper import Lowering, UnsupportedOpsError

F = TypeVar("F", bound=Callable[..., Any])

LOWERINGS: dict[str, Lowering] = {}


def lowering(
    *ops: str,
    random: bool | Literal["optional"] = False,
    concrete: bool = False,
    scalar: bool = False,
) -> Callable[[F], F]:
    """Enters a function for operations: `aten::relu` for all overloads, `aten::add.Tensor` for one.

    Raises:
        ValueError: There is one for this name already.
    """

    def add(function: F) -> F:
        for op in ops:
            if op in LOWERINGS:
                raise ValueError(f"two lowerings for {op}")
            LOWERINGS[op] = Lowering(function, random, concrete, scalar)
        return function

    return add


@functools.cache
def load() -> None:
    """Imports every file of this package, which fills the table."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def find(op: str, added: Mapping[str, Lowering]) -> Lowering | None:
    """The lowering of an operation: the user's first, the overload's before the name's."""
    load()
    name = op.rpartition(".")[0] or op
    for table in (added, LOWERINGS):
        for key in (op, name):
            if key in table:
                return table[key]
    return None


def find_all(
    ops: Mapping[str, Iterable[str]], added: Mapping[str, Lowering]
) -> dict[str, Lowering]:
    """The lowerings of all operations of a program.

    Args:
        ops: Each operation -> the paths of the modules that use it.
        added: The user's own.

    Raises:
        UnsupportedOpsError: Some have none; lists all of them.
    """
    found = {op: find(op, added) for op in ops}
    missing = {op: list(ops[op]) for op, lowering in found.items() if lowering is None}
    if missing:
        raise UnsupportedOpsError(_complaint(missing), missing)
    return {op: lowering for op, lowering in found.items() if lowering is not None}


def _complaint(missing: Mapping[str, list[str]]) -> str:
    lines = []
    for op, modules in sorted(missing.items()):
        named = [module or "the root" for module in modules]
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        lines.append(f"  {op.removesuffix('.default')}: used in {', '.join(named[:5])}{more}")
    example = min(missing).rpartition(".")[0] or min(missing)
    return (
        f"no lowering to JAX for {len(missing)} operation(s):\n"
        + "\n".join(lines)
        + f'\nAdd one with @fmapper.lowering("{example}", to="jax") on a function of JAX arrays '
        "that takes the arguments of the operation's schema."
    )
