"""The functions of a file that have a derivative of their own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Sequence

from fmapper.translation.code import expr, identifier
from fmapper.translation.dialect import Helper
from fmapper.translation.scans.derivatives import ITSELF, Derived


class Functions:
    """The functions with a derivative of their own that one file has.

    Args:
        name: Names what the file has of a function, by its title.
        write: Writes that.
        call: What calls it, of its name.

    Attributes:
        helpers: What the file has, by name.
    """

    def __init__(
        self,
        name: Callable[[str], str],
        write: Callable[[str, Derived], Iterable[str]],
        call: str = "{0}",
    ) -> None:
        self.helpers: dict[str, Helper] = {}
        self._name, self._write, self._call = name, write, call
        self._known: dict[Derived, str] = {}

    def call(
        self, function: Derived, given: Sequence[ast.expr], taken: Collection[str]
    ) -> ast.expr:
        """Returns the call of a function, which the file then has; of equal ones once.

        Args:
            function: The function.
            given: What it is given.
            taken: The names that others have.
        """
        if function not in self._known:
            taken = {*taken, *self.helpers, *_variables_of(function)}
            name = self._known[function] = identifier(self._name(function.title), taken)
            lines = "\n".join(self._write(name, function))
            self.helpers[name] = Helper(lines.replace(ITSELF, self._call.format(name)))
        return ast.Call(expr(self._call.format(self._known[function])), [*given], [])


def _variables_of(function: Derived) -> set[str]:
    """Returns the names that mean something else within a function."""
    backward = () if isinstance(function.backward, str) else function.backward
    nodes = ast.walk(ast.parse("\n".join((*function.lines, *backward))))
    made = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return {*made, *function.parameters, *function.gradients}
