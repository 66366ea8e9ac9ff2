"""The table of lowerings of a target framework: registration and lookup."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from fmapper.errors import DeclarationError, UnsupportedOpsError
from fmapper.programs.program import Call

Int64 = Literal["computes", "moves", "picks", "casts", "looks"]
"""How an operation uses the elements of integer arrays.

`computes`: its results have new integers. `moves`: its results have elements of its arguments, or a
selection of them. `picks`: it moves, and its second result has their positions. `casts`: it moves
if the dtype is unchanged. `looks`: its result has none of them, and depends only on their order.
"""


@dataclass(frozen=True, slots=True)
class Lowering:
    """The function that computes an operation in a target framework, and facts about it.

    Attributes:
        function: Takes the arguments of the operation's schema, with arrays of the target, and
            returns the results.
        random: It takes a keyword `key`, the source of its random numbers; `optional` if that may
            be None, for operations that draw numbers only in training.
        data_dependent_shape: The shape of its result depends on values, so it cannot be compiled.
        returns_number: It returns a number instead of an array, which counts as one in dtype
            promotion.
        takes_numbers: It takes a `Scalar` beside an array as a Python number.
        takes_avals: It takes a keyword `avals`, with the dtypes and shapes of operands and results
            in the source framework.
        whole: A recorder leaves the operation as it is. False if it may decompose it, like
            operations without a lowering.
        int64: How it uses integers of 64 bits, for targets with 32: `Int64`, or a function of the
            call that returns it. The limits of int64, used as markers, become those of int32 if no
            operation computes with them.
        elements: The positions of numbers that become elements, or with which elements are
            computed; those that do not fit into 32 bits are lost. All others are sizes and
            positions.
        dims: The rule for its dimensions, from which `fmapper.meshes` derives sharding. An
            operation without one needs its operands whole.
    """

    function: Callable[..., Any]
    random: bool | Literal["optional"] = False
    data_dependent_shape: bool = False
    returns_number: bool = False
    takes_numbers: bool = False
    takes_avals: bool = False
    whole: bool = True
    int64: Int64 | Callable[[Call], Int64] = "computes"
    elements: tuple[int, ...] = ()
    dims: Callable[..., None] | None = None


class Facts(TypedDict, total=False):
    """The attributes of a `Lowering` besides its function."""

    random: bool | Literal["optional"]
    data_dependent_shape: bool
    returns_number: bool
    takes_numbers: bool
    takes_avals: bool
    whole: bool
    int64: Int64 | Callable[[Call], Int64]
    elements: tuple[int, ...]
    dims: Callable[..., None] | None


F = TypeVar("F", bound=Callable[..., Any])


class LoweringTable:
    """Functions of one framework by the operation that they compute.

    Args:
        target: The framework's name in errors and `fmapper.lowering(to=...)`.
        package: The package whose files fill the table; imported on first use.
        arrays: The name of the framework's arrays in errors.
        title: The name of the framework in errors, if it differs from `target`.

    Examples:
        >>> table = LoweringTable("torch", "fmapper", "tensors")
        >>> @table.lowering("mylib::twice")
        ... def twice(x):
        ...     return 2 * x
        >>> table.entries["mylib::twice"].function(3)
        6
    """

    def __init__(self, target: str, package: str, arrays: str, title: str = "") -> None:
        self.entries: dict[str, Lowering] = {}
        self._target = target
        self._package = package
        self._arrays = arrays
        self._title = title or target
        self._loaded = False

    def lowering(self, *ops: str, **facts: Unpack[Facts]) -> Callable[[F], F]:
        """Registers a function for operations; the flags are those of `Lowering`.

        `aten::relu` applies to all overloads, `aten::add.Tensor` to one.

        Raises:
            ValueError: This name already has a lowering.
        """

        def add(function: F) -> F:
            for op in ops:
                if op in self.entries:
                    raise ValueError(f"two lowerings for {op}")
                self.entries[op] = Lowering(function, **facts)
            return function

        return add

    def load(self) -> None:
        """Imports every file below the package, which fills the table."""
        if not self._loaded:
            package = importlib.import_module(self._package)
            for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._loaded = True

    def find(self, op: str, added: Mapping[str, Lowering]) -> Lowering | None:
        """Finds the lowering of an operation: the user's first, overloads before names."""
        self.load()
        name = op.rpartition(".")[0] or op
        for table in (added, self.entries):
            for key in (op, name):
                if key in table:
                    return table[key]
        return None

    def dims(self, op: str) -> Callable[..., None] | None:
        """Returns the dimension rule of an operation; None if it has none."""
        entry = self.find(op, {})
        return None if entry is None else entry.dims

    def find_all(
        self, ops: Mapping[str, Iterable[str]], added: Mapping[str, Lowering]
    ) -> dict[str, Lowering]:
        """Returns the lowerings of all operations of a program.

        Args:
            ops: Each operation -> the paths of the modules that use it.
            added: The user's lowerings.

        Raises:
            UnsupportedOpsError: Some operations have none; lists all of them.
        """
        lowerings = {op: self.find(op, added) for op in ops}
        missing = {op: list(ops[op]) for op, lowering in lowerings.items() if lowering is None}
        if missing:
            raise UnsupportedOpsError(self._complaint(missing), missing)
        return {op: lowering for op, lowering in lowerings.items() if lowering is not None}

    def lowers_whole(self, added: Mapping[str, Lowering]) -> frozenset[str]:
        """Returns the operations that a recorder keeps whole, the user's included."""
        self.load()
        tables = (self.entries, added)
        return frozenset(op for table in tables for op, entry in table.items() if entry.whole)

    def _complaint(self, missing: Mapping[str, list[str]]) -> str:
        lines = []
        for op, modules in sorted(missing.items()):
            named = [module or "the root" for module in modules]
            more = f" and {len(named) - 5} more" if len(named) > 5 else ""
            lines.append(f"  {op.removesuffix('.default')}: used in {', '.join(named[:5])}{more}")
        example = min(missing).rpartition(".")[0] or min(missing)
        return (
            f"no lowering to {self._title} for {len(missing)} "
            "operation(s):\n"
            + "\n".join(lines)
            + f'\nAdd one with @fmapper.lowering("{example}", to="{self._target}") on a function '
            f"of {self._arrays} that takes the arguments of the operation's schema."
        )


added: dict[str | None, dict[str, Lowering]] = {}  # by target; None if it was not named


def lowering(
    *ops: str,
    to: str | None = None,
    random: bool | Literal["optional"] = False,
    data_dependent_shape: bool = False,
    returns_number: bool = False,
    takes_numbers: bool = False,
    takes_avals: bool = False,
    whole: bool = True,
    int64: Int64 = "computes",
    elements: tuple[int, ...] = (),
) -> Callable[[F], F]:
    """Declares how operations, such as your custom ones, are computed in a target framework.

    The function takes the arguments of the operation's schema, with arrays of the target in place
    of tensors, and returns arrays. A name without an overload applies to all overloads that have no
    lowering of their own; a lowering added here overrides a built-in one, and the operation is
    recorded whole, so that the function is called.

    Args:
        ops: The names of the operations, such as `mylib::op` or `aten::add.Tensor`.
        to: The target framework; by default `torch` for JAX primitives, `lax::...`, and `jax` for
            others.
        random: The function takes a keyword `key`, the source of its random numbers. `optional`:
            the key may be None, so that a model can be called without one.
        data_dependent_shape: The shape of the result depends on values, so a program with it is not
            compiled.
        returns_number: The result counts as a Python number when dtypes are promoted.
        takes_numbers: The function takes a scalar beside an array as a Python number.
        takes_avals: The function takes a keyword `avals`, with the dtypes and shapes of operands
            and results in the source framework.
        whole: The operation is recorded as it is. False if the recorder may decompose it, like
            operations without a lowering.
        int64: How it uses integers of 64 bits if the target has 32. `computes`: a program that
            passes it one that does not fit is refused. It may receive the limits of int64 as
            markers if it `moves` elements or selects them; `picks` them, with their positions as
            its second result; `casts` them; or `looks` at them, for example to compare.
        elements: The positions of arguments that are numbers which become elements, or with which
            elements are computed.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        DeclarationError: A name has no namespace.

    Examples:
        >>> import fmapper
        >>> @fmapper.lowering("mylib::twice")
        ... def twice(x):
        ...     return 2 * x
    """
    for op in ops:
        if "::" not in op:
            raise DeclarationError(
                f"{op!r} is not the name of an operation: write it with its namespace, as "
                f"'aten::{op}' or 'mylib::{op}'."
            )

    def add(function: F) -> F:
        for op in ops:
            added.setdefault(to, {})[op] = Lowering(
                function,
                random=random,
                data_dependent_shape=data_dependent_shape,
                returns_number=returns_number,
                takes_numbers=takes_numbers,
                takes_avals=takes_avals,
                whole=whole,
                int64=int64,
                elements=elements,
            )
        return function

    return add
