"""Tables of printers, which write operations as code of a target."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from fmapper.programs.program import Call
from fmapper.translation.code import Value, expr

Shape = tuple[int | str, ...]
Printer = Callable[..., ast.expr | Value | None]
F = TypeVar("F", bound=Printer)


@dataclass(frozen=True, slots=True)
class Printing:
    """The context of a printed call, besides its arguments.

    Attributes:
        call: The call.
        size: Returns the code for a size: a number, or an expression of symbols.
        picked: Which of several results are used; None where the whole is.
        key: Returns the code for a key for random numbers, a new one each time.
    """

    call: Call
    size: Callable[[int | str], ast.expr]
    picked: frozenset[int] | None = None
    key: Callable[[], ast.expr] = lambda: expr("keys()")

    @property
    def dtype(self) -> str:
        """The dtype of the first result, by name."""
        return self.call.result[0][0] if self.call.result else ""

    @property
    def shape(self) -> Shape:
        """The shape of the first result; a size that may vary is an expression of symbols."""
        return self.call.result[0][1] if self.call.result else ()


class PrinterTable:
    """Printers by the operation that they print."""

    def __init__(self) -> None:
        self._printers: dict[str, Printer] = {}

    def prints(self, *ops: str) -> Callable[[F], F]:
        """Registers a printer for operations: `aten::relu` for all overloads, or one overload.

        It takes a `Printing` and the arguments of the operation as its schema has them: a `Value`
        for an array, an `ast.expr` for a size that is worked out, `DType`, numbers, texts, None and
        tuples of those. It returns an expression, or None where it has no code for these: then
        the lowering of the operation is written as a function.

        Raises:
            ValueError: There is one for this name already.
        """

        def add(function: F) -> F:
            for op in ops:
                if op in self._printers:
                    raise ValueError(f"two printers for {op}")
                self._printers[op] = function
            return function

        return add

    def find(self, op: str) -> Printer | None:
        """Finds an operation's printer, the overload's before the name's."""
        return self._printers.get(op) or self._printers.get(op.rpartition(".")[0])

    def ops(self) -> Iterable[str]:
        """Returns the operations with a printer."""
        return self._printers.keys()
