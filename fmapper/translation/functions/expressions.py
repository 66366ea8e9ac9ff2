"""The expressions of a function: calls, arrays of the submodule, structures of values."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fmapper.errors import ConversionError
from fmapper.programs.program import Call, Graph, refs_in
from fmapper.programs.treespec import DType, Ref, Size
from fmapper.translation.code import Value, attribute, expr, identifier, literal, name, text
from fmapper.translation.functions.forms import Argument, Body, Made, is_plain
from fmapper.translation.printing import Printing
from fmapper.translation.units import Structure, Unit, local_array

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect
    from fmapper.translation.functions.bodies import BodyWriter

_LONG = 40  # the code of a constant that has a variable where several operations read it


class Expressions:
    """Writes the expressions of one function.

    Attributes:
        owners: The arrays of the program that layers hold -> their attribute there, and the order
            of its dimensions.
    """

    _structure: Structure
    _unit: Unit
    _dialect: Dialect
    _writer: BodyWriter
    _body: Body
    _env: dict[str, Value]
    _left: Counter[str]
    _users: dict[str, list[Any]]
    _inlined: dict[str, int]
    _wholes: list[tuple[Any, ast.expr]]
    _objects: list[tuple[Made, ast.expr]]  # those that parts have made, with the code for them
    owners: Mapping[str, tuple[str, tuple[int, ...] | None]]
    keys: int
    _arguments: tuple[Argument, ...]
    _size: Callable[[str], ast.expr]
    _size_code: Callable[[int | str], ast.expr]
    _picks: Callable[[Call], list[Call]]

    def _print(self, call: Call) -> ast.expr:
        if call.op == "call::derivative":
            given = [literal(self._argument(one)) for one in call.args[2]]
            names = {one.name for one in self._arguments}
            return self._writer.call_derived(call, given, names)
        args = [self._argument(one) for one in call.args]
        kwargs = {key: self._argument(one) for key, one in call.kwargs.items()}
        if call.graphs():
            raise ConversionError(
                f"{self._unit.path or 'the model'}: {call.op} calls inner functions "
                f"({call.source}), which cannot be translated yet"
            )
        printer = self._dialect.printer(call.op)
        if printer is not None:
            picks = self._picks(call)
            picked = frozenset(int(pick.args[1]) for pick in picks) if picks else None
            found = printer(Printing(call, self._size_code, picked, self._key), *args, **kwargs)
            if found is not None:
                return literal(found)
        helper, draws = self._dialect.fallback(call), self._dialect.draws(call.op)
        given = [self._plain(one) for one in args]
        keywords = [ast.keyword(key, self._plain(one)) for key, one in kwargs.items()]
        if draws:
            keywords.append(ast.keyword("key", self._key()))
        return ast.Call(name(helper), given, keywords)

    def _key(self) -> ast.expr:
        """Returns the code for a key, which the function is given or its object has."""
        if self._dialect.passes_keys:
            self.keys += 1
            return expr("keys()")
        self._body.holds |= self._dialect.random_state
        return expr(self._dialect.own_key)

    def _plain(self, value: Any) -> ast.expr:
        """Returns an argument for a lowering."""
        if isinstance(value, DType):
            return self._dialect.dtype_argument(value.name)
        if isinstance(value, tuple):
            return ast.Tuple([self._plain(one) for one in value], ast.Load())
        return literal(value)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            if value.name in self._structure.sizes:
                return self._size(self._structure.sizes[value.name])
            given = self._structure.inputs.get(value.name)
            if given is not None and given.kind == "static":
                return given.value
            return self._use_value(value.name)
        if isinstance(value, Size):
            return self._size(value.expression)
        if isinstance(value, tuple):
            return tuple(self._argument(inner) for inner in value)
        if isinstance(value, Mapping):
            return {key: self._argument(inner) for key, inner in value.items()}
        if isinstance(value, Graph):
            return value
        return value

    def _use(self, value: str) -> ast.expr:
        return copy.deepcopy(self._use_value(value).node)

    def _use_value(self, value: str) -> Value:
        self._left[value] -= 1
        if self._left[value] <= 0:
            self._inlined.pop(value, None)
        if value in self._env:
            return self._env[value]
        found = self._array(value)
        if found is not None:
            return found
        raise self._unavailable(value)

    def _unavailable(self, value: str) -> ConversionError:
        """Returns the error for a value that the code of a unit needs and is not given."""
        where = self._unit.path or "the model"
        given = self._structure.inputs.get(value)
        if given is None or given.kind != "user":
            return ConversionError(f"{where}: {value} is not available there")
        return ConversionError(
            f"{where}: it needs {value}, which the whole model alone is given, such as a key with "
            "which all steps of a loop draw the same numbers. Draw others in each step, with a key "
            "that is split for them, or translate what the model does in evaluation"
        )

    def _array(self, value: str) -> Value | None:
        """Returns an array that the model holds."""
        given = self._structure.inputs.get(value)
        if given is None:
            return None
        if given.kind == "constant":
            return Value(self._constant(value, str(given.target)), given.dtype, given.shape)
        local = local_array(self._structure, self._unit, value)
        if local is None:
            return None
        held = self.owners.get(str(given.target))
        if held is None:
            self._body.arrays[local] = str(given.target)
            node = self._dialect.read_array(expr(attribute("self", local)), None)
        else:
            owner, order = held
            start = len(self._unit.path) + bool(self._unit.path)
            inner = owner[start:]
            if start and not owner.startswith(f"{self._unit.path}."):  # under its other path
                inner = f"{local.rpartition('.')[0]}.{owner.rpartition('.')[2]}"
            back = None if order is None else _invert(order)
            node = self._dialect.read_array(expr(attribute("self", inner)), back)
        return Value(node, given.dtype, given.shape)

    def _constants(self) -> Iterator[tuple[str, str, ast.expr]]:
        """Yields long constants that several operations read, with names and code for them."""
        for value, given in self._structure.inputs.items():
            users = [one for one in self._users.get(value, ()) if isinstance(one, Call)]
            if given.kind == "constant" and len(users) > 1:
                node = self._constant(value, str(given.target))
                wanted = str(given.target).rpartition(".")[2].strip("_")
                wanted = "table" if "tensor" in wanted else identifier(wanted)
                if len(text(node)) > _LONG:
                    yield value, wanted, node

    def _constant(self, value: str, target: str) -> ast.expr:
        array = self._structure.program.constants[target]
        if not self._dialect.holds_constants or not array.shape:
            return self._dialect.constant(array)
        attr = identifier(target)
        self._body.holds[attr] = text(self._dialect.frozen_array(array, kind="Constant"))
        return expr(attribute("self", attr))

    def _print_structure(self, structure: Any) -> ast.expr:
        """Returns the code for a structure of values."""
        if isinstance(structure, Ref):
            known = structure.name in self._env or self._array(structure.name) is not None
            if structure.name in self._structure.sizes:
                return self._size(self._structure.sizes[structure.name])
            return self._use(structure.name) if known else literal(None)
        if isinstance(structure, Size):
            return self._size(structure.expression)
        whole = next((node for one, node in self._wholes if one == structure), None)
        if is_plain(structure) and structure and whole is not None:
            for value in refs_in((structure,)):
                self._left[value] -= 1
            return copy.deepcopy(whole)
        if isinstance(structure, tuple):
            return ast.Tuple([self._print_structure(one) for one in structure], ast.Load())
        held = next((node for made, node in self._objects if made == structure), None)
        if isinstance(structure, Made) and held is not None:
            for value in refs_in((structure,)):
                self._left[value] -= 1
            return copy.deepcopy(held)
        if isinstance(structure, Made):
            fields = [
                ast.keyword(key, self._print_structure(one)) for key, one in structure.items()
            ]
            return ast.Call(name(structure.cls), [], fields)
        if isinstance(structure, Mapping):
            keys: list[ast.expr | None] = [literal(key) for key in structure]
            return ast.Dict(keys, [self._print_structure(one) for one in structure.values()])
        return literal(structure)


def _invert(order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the inverse of an order; `~i` is dimension i backwards.

    Examples:
        >>> _invert((2, 0, ~1))
        (1, -3, 0)
    """
    return tuple(order.index(i) if i in order else ~order.index(~i) for i in range(len(order)))
