"""Recorded operations as code: the printers of JAX, with the source's own expressions in them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fmapper import ConversionError
from fmapper.translation import Call, DType, Printing, Value, expr, literal, text
from fmapper_translate._private import operations_within, parameters_of
from fmapper_translate.recording import Operation
from fmapper_translate.targets.idioms import IDIOMS, VARIED
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_adapters.jax.libraries import JaxDialect

_DROPPED = frozenset({
    "device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "copy",
    "requires_grad",
})  # fmt: skip
_ITSELF = frozenset({
    "aten::contiguous", "aten::clone", "aten::lift_fresh", "aten::alias", "aten::detach_",
    "aten::requires_grad_",
})  # fmt: skip


@dataclass(frozen=True)
class Given:
    """An argument of a call of the source.

    Attributes:
        node: The expression; None where it is an element of what an expression gives.
        value: Its value.
        name: Its keyword; empty for one by position.
        code: Returns the code for it.
        starred: Whether it stands for all elements of its value.
    """

    node: ast.expr
    value: Any
    name: str
    code: Callable[[], ast.expr]
    starred: bool = False


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype."""
    return str(dtype).rpartition(".")[2]


def plain(node: ast.expr) -> Any:
    """Returns the number that an expression is; raises ValueError for another."""
    return ast.literal_eval(node)


class Operations:
    """Prints what one expression ran, from what its parts are.

    Args:
        dialect: The table of printers.
        given: The arguments of the expression, what a method belongs to in front.
        tensors: Tensors by identity -> their code, as far as the expression's parts have them.
        key: Returns the code for a random key.
        has_numbers: Whether dimensions are numbers, which printers compute with.
        optional: The expressions that are None another time.
    """

    def __init__(
        self,
        dialect: JaxDialect,
        given: Sequence[Given],
        tensors: Mapping[int, Callable[[], ast.expr]],
        key: Callable[[], ast.expr],
        *,
        has_numbers: bool = True,
        optional: Collection[ast.AST] = (),
    ) -> None:
        self._optional = optional
        self._has_numbers = has_numbers
        self._key = key
        self._is_literal = False
        self._dialect = dialect
        self._given = given
        self._has_integers = False  # with which a fraction counts as an array
        self._known: dict[int, Callable[[], ast.expr]] = dict(tensors)
        self._results: list[torch.Tensor] = []
        self._absent: set[str] = set()  # arguments that are None here

    def print(self, operations: Sequence[Operation], value: Any) -> ast.expr:
        """Returns the code for the value that operations give.

        Raises:
            NotTranscribed: It is not among their results, or one has no code.
        """
        for at, operation in enumerate(operations):
            if not isinstance(operation.result, torch.Tensor | tuple | list):
                continue  # as of a dtype
            last = at == len(operations) - 1
            printed = self._one(operation, value if last else None)
            self._hold(operation.result, printed)
            if isinstance(operation.result, tuple | list) and _is_same(operation.result, value):
                return printed
            if last and _is_view_of_all(operation.result, value):
                return printed
            first = operation.result[0] if isinstance(operation.result, tuple) else None
            if last and _is_view_of_all(first, value):
                return self._known[id(first)]()
        if isinstance(value, torch.Tensor) and id(value) in self._known:
            return self._known[id(value)]()
        if isinstance(value, tuple | list) and value and all(id(x) in self._known for x in value):
            elements = [self._known[id(x)]() for x in value]
            return ast.Tuple(elements, ast.Load())
        names = ", ".join(operation.name for operation in operations)
        raise NotTranscribed(f"its value is none of the results of {names or 'any operation'}")

    def _hold(self, result: Any, printed: ast.expr) -> None:
        if isinstance(result, torch.Tensor):
            self._known[id(result)] = lambda: printed
            self._results.append(result)
        elif isinstance(result, tuple | list):
            for i, item in enumerate(result):
                is_tuple = isinstance(printed, ast.Tuple)
                made = printed.elts[i] if isinstance(printed, ast.Tuple) else None
                picked = made if is_tuple and made is not None else expr(f"{{0}}[{i}]", printed)
                self._known[id(item)] = lambda picked=picked: picked  # type: ignore[misc]

    def _one(self, operation: Operation, value: Any) -> ast.expr:
        base, _, overload = operation.name.partition(".")
        if base.endswith("_") and not base.endswith("__"):
            base = base[:-1]
        args, kwargs = self._arguments(operation)
        if base in _ITSELF:
            return literal(args[0])
        results = (
            operation.result if isinstance(operation.result, tuple | list) else [operation.result]
        )
        kinds = tuple(
            (dtype_name(x.dtype), tuple(x.shape)) for x in results if isinstance(x, torch.Tensor)
        )
        call = Call("y", f"{base}.{overload}", result=kinds)
        whole = isinstance(value, tuple | list) and _is_same(results, value)
        is_several = isinstance(operation.result, tuple | list) and base not in _LISTS
        picked = None if whole or not is_several else frozenset({0})
        p = Printing(call, literal, picked, self._key)
        idiom = IDIOMS.get(base) if self._has_numbers else VARIED.get(base, IDIOMS.get(base))
        printers = filter(None, (idiom, self._dialect.printer(call.op)))
        tries = (self._print(printer, p, operation) for printer in printers)
        printed = next((code for code in tries if code is not None), None)
        if printed is not None:
            made: ast.expr = _Shapes().visit(literal(printed))
            return self._without_absent(made)
        try:
            helper = self._dialect.fallback(call)
        except ConversionError:
            return self._parts(operation)
        if self._dialect.draws(call.op):
            raise NotTranscribed(f"{call.op} draws random numbers")
        keywords = [ast.keyword(key, self._plain(item)) for key, item in kwargs.items()]
        return ast.Call(
            ast.Name(helper, ast.Load()), [self._plain(item) for item in args], keywords
        )

    def _without_absent(self, made: ast.expr) -> ast.expr:
        """Returns the code for a sum without its second part where that may be None."""
        match made:
            case ast.BinOp(product, ast.Add(), bias) if text(bias) in self._absent:
                return expr("{0} if {1} is None else {2}", product, bias, made)
        return made

    def _print(self, printer: Callable[..., Any], p: Printing, operation: Operation) -> Any:
        args, kwargs = self._arguments(operation)
        try:
            return printer(p, *args, **kwargs)
        except (TypeError, AttributeError, SyntaxError):  # of a printer that needs a number
            self._is_literal = True
            args, kwargs = self._arguments(operation)
            self._is_literal = False
            return printer(p, *args, **kwargs)

    def _parts(self, operation: Operation) -> ast.expr:
        """Returns the code for an operation that is composed of others."""
        within, result = operations_within(operation.overload, operation.args, operation.kwargs)
        if not within or result is NotImplemented:
            raise NotTranscribed(f"{operation.name} has no lowering to JAX")
        return self.print([Operation(*item) for item in within], result)

    def _plain(self, value: Any) -> ast.expr:
        if isinstance(value, DType):
            return self._dialect.dtype_argument(value.name)
        if isinstance(value, tuple | list):
            return ast.Tuple([self._plain(item) for item in value], ast.Load())
        return literal(value)

    def _arguments(self, operation: Operation) -> tuple[list[Any], dict[str, Any]]:
        parameters = parameters_of(operation.overload)
        tensors = [item for item in operation.args if isinstance(item, torch.Tensor)]
        self._has_integers = any(not item.is_floating_point() for item in tensors)
        args = [
            self._argument(operation, name, kind, at, value)
            for at, ((name, (kind, _)), value) in enumerate(
                zip(parameters.items(), operation.args, strict=False)
            )
        ]
        named = {item.name: item for item in self._given if item.name}
        by_place = dict(
            zip(parameters, (item for item in self._given if not item.name), strict=False)
        )
        given = {**by_place, **named}
        left_out = {
            name: default
            for name, (_, default) in list(parameters.items())[len(args) :]
            if name in given and not isinstance(given[name].node, ast.Constant)
            and _is_number(given[name].value, default)
        }  # fmt: skip
        kwargs = {
            name: self._argument(
                operation, name, parameters[name][0], [*parameters].index(name), value
            )
            for name, value in {**left_out, **operation.kwargs}.items()
            if name not in _DROPPED and (value is not None or name in left_out)
        }
        return args, kwargs

    def _argument(self, operation: Operation, name: str, kind: str, at: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            same = (item for item in self._given if item.value is value)
            self._absent |= {text(item.code()) for item in same if item.node in self._optional}
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            codes = (item.code() for item in self._given if item.value is value)
            code = next(codes, None) if operation.name.startswith("aten::to.") else None
            is_dtype = isinstance(code, ast.Name) or getattr(code, "attr", "") == "dtype"
            return code if is_dtype else DType(dtype_name(value))
        if isinstance(value, tuple | list) and value and isinstance(value[0], torch.Tensor):
            return self._sequence(value)
        if name == "equation" and not self._is_literal:
            equal = [item for item in self._given if item.value == value]
            return (
                equal[0].code() if equal and not isinstance(equal[0].node, ast.Constant) else value
            )
        has_sizes = "SymInt" in kind or not self._has_numbers
        if isinstance(value, tuple | list) and has_sizes and not self._is_literal:
            return self._sizes(name, at, list(value))
        if value is None and not self._is_literal:  # may be something else another time
            given = [item for item in self._given[at : at + 1] if not item.name]
            given += [item for item in self._given if item.name == name]
            absent = [
                item
                for item in given
                if item.value is None and not isinstance(item.node, ast.Constant)
            ]
            if absent and "Tensor" in kind:  # of the dtype of the others
                tensors = (item for item in operation.args if isinstance(item, torch.Tensor))
                self._absent.add(text(absent[0].code()))
                return Value(absent[0].code(), dtype_name(next(tensors).dtype))
            return absent[0].code() if absent else None
        if isinstance(value, tuple | list):
            return tuple(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_size = kind == "SymInt" or "dim" not in name or not self._has_numbers
        if is_number and is_size and not self._is_literal:
            return self._number(name, at, value)
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        return value

    def _tensor(self, value: torch.Tensor) -> Any:
        code = self._known.get(id(value))
        if code is None:  # PyTorch wraps some of its results anew, as that of `zeros_like`
            twins = (x for x in reversed(self._results) if _is_view_of_all(x, value))
            code = self._known.get(id(next(twins, None)))
        if code is None:
            raise NotTranscribed(
                f"a tensor of {tuple(value.shape)} that none of the expression's parts is"
            )
        return Value(code(), dtype_name(value.dtype), tuple(value.shape))

    def _sequence(self, values: Sequence[Any]) -> Any:
        for given in self._given:
            is_list = isinstance(given.value, tuple | list) and _is_same(given.value, values)
            parts = given.node.elts if isinstance(given.node, ast.Tuple | ast.List) else []
            is_written = bool(parts) and not any(isinstance(x, ast.Starred) for x in parts)
            if is_list and not is_written:
                return ast.Starred(given.code(), ast.Load())
        return [self._tensor(item) for item in values]

    def _number(self, name: str, at: int, value: Any) -> Any:
        by_name = [item for item in self._given if item.name == name]
        by_place = [self._given[at]] if 0 <= at < len(self._given) else []
        others = sorted(self._given, key=lambda item: bool(item.name))
        for given in [*by_name, *by_place, *others]:
            is_number = type(given.value) is type(value) or isinstance(given.value, np.number)
            if is_number and given.value == value:
                try:
                    return plain(given.node)
                except ValueError:
                    code = given.code()
                    is_fraction = isinstance(value, float) and self._has_integers
                    return Value(code, "float32") if is_fraction else code
        return value

    def _sizes(self, name: str, at: int, values: list[Any]) -> Any:
        row = [item for item in self._given if not item.name]
        by_name = [item for item in self._given if item.name == name]
        for given in [*by_name, *row[at : at + 1], *self._given]:
            if _are_sizes(given.value) and list(given.value) == values:
                if isinstance(given.node, ast.Tuple | ast.List):
                    return tuple(self._elements(given.node, given, values))
                if name in ("size", "shape", "dims"):
                    return (ast.Starred(given.code(), ast.Load()),)
                return tuple(expr(f"{{0}}[{i}]", given.code()) for i in range(len(values)))
            if given.name == name and values == [given.value] * len(values):
                return (self._size(given),) * len(values)
        for start in range(len(row)):
            sizes: list[Any] = []
            flat: list[Any] = []
            for given in row[start:]:
                if given.starred:
                    sizes.append(ast.Starred(given.code(), ast.Load()))
                    flat += list(given.value)
                elif isinstance(given.value, int):
                    sizes.append(self._size(given))
                    flat.append(given.value)
                else:
                    break
            if _are_sizes(flat) and flat == values:
                return tuple(sizes)
        for given in row[at : at + 1]:  # one for all dimensions
            if type(given.value) is int and values == [given.value] * len(values):
                return (self._size(given),) * len(values)
        return tuple(values)

    def _elements(
        self, node: ast.Tuple | ast.List, given: Given, values: list[Any]
    ) -> Iterator[Any]:
        code = given.code()
        parts = code.elts if isinstance(code, ast.Tuple | ast.List) else []
        if len(parts) != len(node.elts):
            yield from values
            return
        for part in parts:
            try:
                yield plain(part)
            except ValueError:
                yield part

    def _size(self, given: Given) -> Any:
        try:
            return plain(given.node)
        except ValueError:
            return given.code()


_LISTS = frozenset({
    "aten::split", "aten::chunk", "aten::unbind", "aten::split_with_sizes", "aten::tensor_split",
})  # fmt: skip


class _Shapes(ast.NodeTransformer):
    """Takes shapes as they are: `x.shape` in place of `(*x.shape,)`."""

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        self.generic_visit(node)
        match node.elts:
            case [ast.Starred(ast.Attribute(attr="shape") as shape)]:
                return shape
        return node


def _are_sizes(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(item, int) for item in value)


def _is_number(value: Any, other: Any) -> bool:
    if isinstance(other, list):
        return [*value] == other if isinstance(value, tuple | list) else {*other} == {value}
    return type(value) is type(other) and bool(value == other)


def _is_same(one: Sequence[Any], other: Any) -> bool:
    if not isinstance(other, tuple | list) or len(one) != len(other):
        return False
    return all(a is b for a, b in zip(one, other, strict=True))


def _is_view_of_all(result: Any, value: Any) -> bool:
    """Returns whether a tensor is another one: functions that make one return it anew."""
    if not isinstance(result, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return (result.data_ptr(), result.shape, result.stride(), result.dtype) == (
        value.data_ptr(), value.shape, value.stride(), value.dtype
    )  # fmt: skip


_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip


def negate(node: ast.expr) -> ast.expr:
    """Returns the opposite of a condition on Python's values."""
    match node:
        case ast.UnaryOp(ast.Not(), inner):
            return inner
        case ast.Compare(left, [op], [right]):
            return ast.Compare(left, [_OPPOSITES[type(op)]()], [right])
    return ast.UnaryOp(ast.Not(), node)
