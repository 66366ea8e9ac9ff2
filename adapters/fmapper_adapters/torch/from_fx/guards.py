"""Records Python's questions about sizes that vary, and the sizes that they fix.

torch answers `n % 2 == 0` for the examples and continues. Its recording holds for sizes with the
same answers, so the answers become guards of the program. Sizes of 0 and 1 among the examples are
not symbols, and torch silently assumes that symbols are at least 2; here `n == 1` is a question as
well. A size for which only one value remains is fixed, and users are told the line that fixed it.

The questions are in torch's symbols while it records; a program gets them as text.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.printing.str import StrPrinter  # type: ignore[import-untyped]
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fmapper.programs import Guard, Input
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import TracingContext, pytree

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_END = os.path.join(_OWN, "record", "export.py")  # beyond is who called convert
_MADE = "<string>"  # functions that torch makes
_DYNAMO = _TORCH + "_dynamo" + os.sep
_OF_SYMBOLS = (os.path.join(_TORCH, "__init__.py"), os.path.join(_TORCH, "fx", ""), _DYNAMO, _OWN)
# Code that decides for a model; elsewhere torch asks for shapes, strides and broadcasting.
_MODELS = tuple(_TORCH + name + os.sep for name in ("nn", "distributions", "utils", "func"))
_ASKS_FOR = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_FLIPPED = {"==": "==", "!=": "!=", ">=": "<=", "<=": ">="}
_RELATIONS: dict[Any, str] = {
    sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">=",
}  # fmt: skip
_LONGEST = 500
_MOST_PARTS = 1024  # of a number that a quotient of sizes is compared with


@dataclass(frozen=True)
class _Question:
    """A question: a condition, its answer, and the line that asked."""

    condition: Any
    answer: bool
    place: str


@dataclass
class _Notes:
    """The questions about the sizes of one recording.

    Attributes:
        questions: In order.
        places: Each symbol that got a value, and each condition of torch's own -> the line.
        wanted: A tensor of the examples, its dimension that was requested to vary, and its symbol;
            None if torch has made none.
    """

    questions: list[_Question] = field(default_factory=list)
    places: dict[Any, str] = field(default_factory=dict)
    wanted: list[tuple[Any, int, Any]] = field(default_factory=list)


_notes: weakref.WeakKeyDictionary[Any, _Notes] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def note_questions(dynamic_shapes: Any) -> Iterator[None]:
    """Records questions about varying sizes within the block."""
    if dynamic_shapes is None:
        yield
        return
    names = [name for name in _ASKS_FOR if hasattr(SymNode, name)]
    before = {name: getattr(SymNode, name) for name in names}
    ask: Any = SymNode.guard_bool
    evaluate: Any = ShapeEnv.evaluate_sym_node
    replace: Any = _private.get_replace_symbol()
    own = threading.get_ident()

    def guard_bool(self: Any, file: str, line: int) -> Any:
        condition = getattr(self, "fmapper_condition", self.expr)
        answer = ask(self, file, line)
        # C++ names its file; what is known without asking has no symbols
        if not file and threading.get_ident() == own and condition.free_symbols:
            place = _line_asking(sys._getframe(1))
            if place is not None and self.shape_env is not None:
                notes = _notes.setdefault(self.shape_env, _Notes())
                notes.questions.append(_Question(condition, answer, place))
        return answer

    def evaluate_sym_node(self: Any, *args: Any, **options: Any) -> Any:
        known = len(self.guards)
        answer = evaluate(self, *args, **options)
        if threading.get_ident() == own and len(self.guards) > known:
            places = _notes.setdefault(self, _Notes()).places
            for guard in self.guards[known:]:
                places.setdefault(guard.expr, _line_of(sys._getframe(1)))
        return answer

    def wrap(name: str, original: Any, relation: Any) -> Any:
        def compare(self: Any, other: Any) -> Any:
            result = original(self, other)
            # torch takes symbols for positive, so that n == 0 is False at once
            if _private.expression_of(result) in (sympy.true, sympy.false):
                asked = relation(
                    _private.expression_of(self), _private.expression_of(other), evaluate=False
                )
                if asked.free_symbols:
                    result.fmapper_condition = asked
            return result

        compare.__name__ = name
        return compare

    def set_replacement(self: Any, a: Any, tgt: Any, *rest: Any, **options: Any) -> Any:
        if threading.get_ident() == own and not tgt.free_symbols:
            places = _notes.setdefault(self, _Notes()).places
            places.setdefault(a, _line_of(sys._getframe(1)))
        return replace(self, a, tgt, *rest, **options)

    relations = {sign: relation for relation, sign in _RELATIONS.items()}
    try:
        SymNode.guard_bool = guard_bool  # type: ignore[method-assign]
        ShapeEnv.evaluate_sym_node = evaluate_sym_node  # type: ignore[method-assign]
        _private.set_replace_symbol(set_replacement)
        for name in names:
            setattr(SymNode, name, wrap(name, before[name], relations[_ASKS_FOR[name]]))
        yield
    finally:
        SymNode.guard_bool = ask  # type: ignore[method-assign]
        ShapeEnv.evaluate_sym_node = evaluate  # type: ignore[method-assign]
        _private.set_replace_symbol(replace)
        for name in names:
            setattr(SymNode, name, before[name])


def ask(env: Any, condition: Any, answer: bool, line: str) -> None:
    """Adds a question about the sizes of a recording."""
    _notes.setdefault(env, _Notes()).questions.append(_Question(condition, answer, line))


def want(
    exported: torch.export.ExportedProgram,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> None:
    """Records which sizes of the examples are to vary."""
    env = env_of(exported)
    if env is None or dynamic_shapes is None:
        return
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        collected: Any = dynamic_shapes  # untyped in torch
        dynamic_shapes = collected.dynamic_shapes(module, args, kwargs)
    combined = _private.combine_args(module, args, kwargs)
    if isinstance(dynamic_shapes, tuple | list):
        dynamic_shapes = dict(zip(combined, dynamic_shapes, strict=True))
    sources = {
        id(leaf): "".join(_step(key) for key in path)
        for path, leaf in pytree.tree_flatten_with_path(combined)[0]
    }
    wanted: list[tuple[Any, int, Any]] = []

    def look(path: Any, leaf: Any, shape: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            source = sources[id(leaf)]
            for d, one in shape.items() if isinstance(shape, dict) else enumerate(shape or ()):
                if one is not None and type(one) is not int and one != torch.export.Dim.STATIC:
                    name = f"L{source}.size()[{d}]"
                    wanted.append((leaf, d, env.source_to_var.get(name)))

    _private.walk_shapes(look, combined, dynamic_shapes)
    _notes.setdefault(env, _Notes()).wanted = wanted


def _step(key: Any) -> str:
    """Returns torch's spelling of one step into an input."""
    if isinstance(key, pytree.GetAttrKey):
        return f".{key.name}"
    return f"[{key.idx if isinstance(key, pytree.SequenceKey) else key.key!r}]"


def find_guards(
    exported: torch.export.ExportedProgram, inputs: Sequence[Input], paths: Sequence[str]
) -> tuple[tuple[Guard, ...], tuple[str, ...]]:
    """Returns the guards of a program, and the sizes that have become fixed.

    Args:
        exported: The recording, after decomposition.
        inputs: The users' inputs, flattened.
        paths: The name of each in errors.
    """
    env = env_of(exported)
    notes = _notes.get(env) if env is not None else None
    if env is None or notes is None:
        return (), ()
    names: dict[str, str] = {}  # what a size is called -> by users
    for given, path in zip(inputs, paths, strict=True):
        if given.dtype == "int":
            names.setdefault(str(given.value), path)
        for d, size in enumerate(given.shape):
            names.setdefault(str(size), f"{path}.shape[{d}]")
    for size in [size for size in names if not size.isidentifier()]:
        expression = sympy.sympify(size)
        symbols = expression.free_symbols
        if len(symbols) == 1 and sympy.diff(expression, *symbols).is_Integer:
            names.setdefault(str(*symbols), str(*symbols))  # which is worked out from that
    reader = _Reader(env, names, notes.questions)
    for question in (*notes.questions, *_questions_of_torch(env, notes)):
        reader.read(question)
    fixed = dict.fromkeys([*_fixed_sizes(exported, env, notes, inputs, paths), *reader.fixed])
    return tuple(reader.guards.values()), tuple(fixed)


def _questions_of_torch(env: Any, notes: _Notes) -> Iterator[_Question]:
    """Yields torch's own questions; those of the model are recorded already.

    Its questions whether sizes differ are about strides and broadcasting, and are left out.
    """
    for guard in env.guards:
        if not isinstance(guard.expr, sympy.Ne):
            yield _Question(guard.expr, True, notes.places.get(guard.expr, ""))


class _Reader:
    """Turns questions into guards.

    Attributes:
        guards: The guards by their condition.
        fixed: The sizes that are fixed by a question that cannot be a guard.
    """

    def __init__(self, env: Any, names: Mapping[str, str], asked: Sequence[_Question]) -> None:
        self._env = env
        self._asked = frozenset(asked)
        name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
        self._examples = getattr(env, name)  # by another name before torch 2.10
        self._names = names
        self.guards: dict[Any, Guard] = {}
        self.fixed: list[str] = []

    def read(self, question: _Question) -> None:
        condition = self._env.replace(question.condition)
        symbols = condition.free_symbols
        # Those that are read from arrays are asserted in the graph.
        if not symbols or any(str(symbol) not in self._names for symbol in symbols):
            return
        called = {symbol: sympy.Symbol(self._names[str(symbol)]) for symbol in symbols}
        text = _show(condition.xreplace(called), question.answer)
        if question.place:
            text += f" at {question.place}"
        found = _conditions(condition, question.answer)
        if found is not None:
            for key in found:
                self.guards.setdefault(key, Guard(*key, text[:_LONGEST]))
        elif question in self._asked or _is_of_a_model(condition):
            for symbol in sorted(symbols, key=str):
                size = int(self._examples[symbol])
                self.guards.setdefault((str(symbol), "==", size),
                                       Guard(str(symbol), "==", size, text[:_LONGEST]))  # fmt: skip
                why = f"{text[:_LONGEST]}, which cannot be checked for other sizes"
                self.fixed.append(f"{self._names[str(symbol)]} is {size}: {why}")


def _conditions(condition: Any, answer: bool) -> list[tuple[str, str, int]] | None:
    """Rewrites a condition as comparisons of sizes with numbers; None for others."""
    if isinstance(condition, sympy.Not):
        return _conditions(condition.args[0], not answer)
    if isinstance(condition, sympy.And if answer else sympy.Or):
        parts = [_conditions(part, answer) for part in condition.args]
        return None if None in parts else [one for part in parts for one in part or ()]
    relation = _RELATIONS.get(type(condition))
    sides = () if relation is None else _whole_sides(*condition.args)
    if relation is None or not sides:
        return None
    relation = relation if answer else _OPPOSITE[relation]
    constant, rest = sympy.expand(sides[0] - sides[1]).as_coeff_Add()
    value = -int(constant)
    if relation in ("<", ">"):  # of integers
        value += 1 if relation == ">" else -1
        relation += "="
    if rest.could_extract_minus_sign():
        rest, value, relation = -rest, -value, _FLIPPED[relation]
    if not rest.free_symbols:
        return []
    expression = _write(rest)
    return None if expression is None else [(expression, relation, value)]


def _whole_sides(left: Any, right: Any) -> tuple[Any, ...]:
    """Returns the sides of a comparison as whole numbers, `2*a` and `3*b` for `a / b` and 1.5.

    Nothing where they are others, or where rounding could give another answer.
    """
    if type(right).__name__ == "IntTrueDiv":
        return _whole_sides(right, left)[::-1]
    if type(left).__name__ == "IntTrueDiv" and right.is_number:
        over, under = left.args
        by, times = float(right).as_integer_ratio()
        is_exact = times <= _MOST_PARTS and under.is_positive
        return (times * over, by * under) if is_exact else ()
    return (left, right) if left.is_integer and right.is_integer else ()


def _is_of_a_model(condition: Any) -> bool:
    """Returns whether a model compares floats, or takes one for a whole number: `int(0.3 * n)`.

    torch does not ask that for itself, but notes the answer for the examples.
    """
    inner = condition.args[0] if isinstance(condition, sympy.Not) else condition
    if type(inner) not in _RELATIONS:
        return False
    parts = (x for x in sympy.preorder_traversal(inner) if isinstance(x, sympy.Expr))
    is_taken = isinstance(inner, sympy.Eq) and any(side.is_number for side in inner.args)
    compared = parts if is_taken else inner.args
    return not all(x.is_integer for x in compared)


def _show(condition: Any, answer: bool) -> str:
    relation = _RELATIONS.get(type(condition))
    if relation is None:
        shown = _Speller().doprint(condition)
        return shown if answer else f"not ({shown})"
    sign = relation if answer else _OPPOSITE[relation]
    return f"{_Speller().doprint(condition.lhs)} {sign} {_Speller().doprint(condition.rhs)}"


class _Speller(StrPrinter):  # type: ignore[misc]
    """Spells conditions of sizes as Python does."""

    def _print_Relational(self, expr: Any) -> str:
        return f"{self._print(expr.lhs)} {_RELATIONS[type(expr)]} {self._print(expr.rhs)}"

    def _print_And(self, expr: Any) -> str:
        return " and ".join(f"({self._print(part)})" for part in expr.args)

    def _print_Or(self, expr: Any) -> str:
        return " or ".join(f"({self._print(part)})" for part in expr.args)

    def _print_Not(self, expr: Any) -> str:
        return f"not ({self._print(expr.args[0])})"

    def _print_Function(self, expr: Any) -> str:
        name = type(expr).__name__
        if name in _SIGNS:
            return f"({f' {_SIGNS[name]} '.join(map(self._print, expr.args))})"
        return f"{_CALLS.get(name, name)}({', '.join(map(self._print, expr.args))})"

    _print_Max = _print_Min = _print_Function


_SIGNS = {
    "Mod": "%",
    "PythonMod": "%",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "PowByNatural": "**",
}
_CALLS = {"Max": "max", "Min": "min", "TruncToInt": "int", "FloorToInt": "math.floor"}
_CALLS |= {"CeilToInt": "math.ceil", "ToFloat": "float", "RoundToInt": "round", "Abs": "abs"}


def _write(expression: Any) -> str | None:
    """Spells an expression for `fmapper.size_of`; None where that cannot read it."""
    if isinstance(expression, sympy.Integer | sympy.Symbol):
        return str(expression)
    name = type(expression).__name__
    if name in ("CeilToInt", "FloorToInt", "TruncToInt"):
        over, under = _quotient(*expression.args)
        if name == "CeilToInt":
            found = _write_call("floordiv", (-over, under))
            return None if found is None else f"(-{found})"
        return _write_call("floordiv", (over, under))
    if name in _FUNCTIONS:
        return _write_call(_FUNCTIONS[name], expression.args)
    if name == "CeilDiv":
        found = _write_call("floordiv", (-expression.args[0], expression.args[1]))
        return None if found is None else f"(-{found})"
    parts = [_write(one) for one in expression.args]
    if any(part is None for part in parts):
        return None
    if isinstance(expression, sympy.Add):
        return f"({' + '.join(map(str, parts))})"
    if isinstance(expression, sympy.Mul):
        return f"({' * '.join(map(str, parts))})"
    if isinstance(expression, sympy.Pow) or name == "PowByNatural":
        return f"({parts[0]} ** {parts[1]})"
    return None


def _quotient(number: Any) -> tuple[Any, Any]:
    """Returns whole numbers whose quotient a number is, `3*n` and 2 for `1.5 * n`, or the number.

    Floats have no other value than those where the divisor is a small power of two.
    """
    if type(number).__name__ == "IntTrueDiv":
        return number.args[0], number.args[1]
    factor, rest = number.as_coeff_Mul()
    if factor.is_Float and type(rest).__name__ == "ToFloat":
        by, times = float(factor).as_integer_ratio()
        if by > 0 and times <= _MOST_PARTS:
            return by * rest.args[0], sympy.Integer(times)
    return number, sympy.Integer(1)


_FUNCTIONS = {"Mod": "mod", "PythonMod": "mod", "FloorDiv": "floordiv", "CleanDiv": "floordiv"}
_FUNCTIONS |= {"Max": "max", "Min": "min"}


def _write_call(name: str, args: Sequence[Any]) -> str | None:
    parts = [_write(one) for one in args]
    if any(part is None for part in parts):
        return None
    found = str(parts[0])
    for part in parts[1:]:  # `Max` takes any number
        found = f"{name}({found}, {part})"
    return found


def _fixed_sizes(
    exported: torch.export.ExportedProgram,
    env: Any,
    notes: _Notes,
    inputs: Sequence[Input],
    paths: Sequence[str],
) -> Iterator[str]:
    """Yields a sentence for each varying size that was fixed, with the reason."""
    leaves = pytree.tree_leaves(exported.example_inputs)
    for leaf, given, path in zip(leaves, inputs, paths, strict=True):
        found = {d: symbol for one, d, symbol in notes.wanted if one is leaf}
        for d, size in enumerate(given.shape):
            if d in found and isinstance(size, int):
                yield f"{path}.shape[{d}] is {size}: {_why(env, notes, found[d], size)}"


def _why(env: Any, notes: _Notes, symbol: Any, size: int) -> str:
    while symbol is not None:
        if place := notes.places.get(symbol):
            file, _, line = place.rpartition(":")
            text = linecache.getline(file, int(line)).strip()
            return f"the code fixes it at {place}" + (f": {text}"[:_LONGEST] if text else "")
        symbol = env.replacements.get(symbol)  # to one that is the same, and fixed
        symbol = symbol if isinstance(symbol, sympy.Symbol) else None
    if size in (0, 1):
        return f"torch fixes sizes that are {size} in the examples; use a larger one"
    return "the code fixes it"


def _line_asking(frame: FrameType | None) -> str | None:
    """Returns the line of the model that asks about a size; None if torch itself asks."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_DYNAMO):
            if stack := TracingContext.extract_stack():
                return f"{stack[-1].filename}:{stack[-1].lineno}"
        elif name.startswith(_MODELS) or not name.startswith((*_OF_SYMBOLS, _TORCH)):
            return f"{name}:{frame.f_lineno}"
        if not name.startswith(_OF_SYMBOLS):
            return None
        frame = frame.f_back
    return None


def _line_of(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's code, else of a layer of torch, or nothing."""
    layer = ""
    while frame is not None and frame.f_code.co_filename != _END:
        name = frame.f_code.co_filename
        if name.startswith(_DYNAMO):
            if found := TracingContext.extract_stack():
                return f"{found[-1].filename}:{found[-1].lineno}"
        elif not name.startswith((_TORCH, _OWN, _MADE)):
            return f"{name}:{frame.f_lineno}"
        elif name.startswith(_MODELS[0]) and not name.endswith("module.py"):
            layer = layer or f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return layer


def env_of(exported: torch.export.ExportedProgram) -> Any:
    """Returns torch's symbols of a recording; None without any."""
    for node in exported.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.shape_env
    return None
