"""The grammar of programs: the values that each field allows, checked when a file is read.

A program is turned into code, attribute names and array shapes. Therefore a name must be an
identifier, a source line must be text on one line, a size must be an expression of sizes, a dtype
must exist, and every reference must resolve. Code generated from a program still quotes its text.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import Any

from fmapper.files.untrusted import Misfit, show, within
from fmapper.programs.program import (
    FEW_BITS,
    RELATIONS,
    VARIABLE_TYPES,
    Call,
    Graph,
    Guard,
    Input,
    Output,
    Parameter,
    Program,
)
from fmapper.programs.treespec import DType, Ref, Scalar, Size, TreeSpec

MOST_ELEMENTS = 1 << 40  # of any array in a program
_MOST_DIMENSIONS = 64
_MOST_SYMBOLS = 512
_MOST_PARTS = 100  # keys of an array name, which is as deep as the modules are nested

_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
_LINE = re.compile(rf"[^{_CONTROL}]{{0,4096}}")
_ARRAY = re.compile(rf"[^{_CONTROL}\"'\\]{{0,2000}}")
_SOURCE = re.compile(rf"(?:[^{_CONTROL}]{{1,4096}}:[0-9]{{1,9}})?")
_OP = re.compile(r"[A-Za-z_][\w.-]{0,200}::[\w.<>+-]{1,200}")
_SIZE = re.compile(r"(?!.*[0-9]{20})[\w +*/%^().,<>=&|~!:\[\]-]{1,4096}", re.ASCII)
_DTYPE = re.compile(
    r"bool|u?int(?:1|2|4|8|16|32|64)|float(?:16|32|64)|bfloat16|complex(?:64|128)|float0"
    r"|float(?:4|6|8)_e[0-9]m[0-9][a-z0-9]{0,8}|key<\w{1,40}>"
)
_NUMBERS = ("int", "float", "boolean")  # dtypes of inputs that are not arrays
_ARRAYS = ("parameter", "buffer", "constant")
_DUNDER = re.compile(r"__.*__")


def check_program(program: Program) -> None:
    """Checks every field of a program, and of the one for evaluation.

    Raises:
        Misfit: A field is invalid; the message names it.
    """
    _check_one(program, program)
    if program.evaluation is not None:
        with within("evaluation"):
            _check_one(program.evaluation, program)


def check_array_name(name: Any) -> None:
    """Checks the name of an array.

    Raises:
        Misfit: It is not a valid name.
    """
    _check_class(str, name)
    if not _ARRAY.fullmatch(name) or name.count(".") >= _MOST_PARTS:
        raise Misfit(f"{show(name)} is not an array name")


def check_shape(shape: Any, *, fixed: bool = False) -> None:
    """Checks the shape of an array.

    Raises:
        Misfit: It is not a valid shape.
    """
    if type(shape) is not tuple or len(shape) > _MOST_DIMENSIONS:
        raise Misfit(f"{show(shape)} is not a shape")
    count = 1
    for i, size in enumerate(shape):
        if type(size) is int and size >= 0:
            if size > MOST_ELEMENTS:
                raise Misfit(f"{size} is too large for an array", i)
            count *= max(size, 1)
        elif fixed or type(size) is not str or not _SIZE.fullmatch(size):
            raise Misfit(f"{show(size)} is not a size", i)
    if count > MOST_ELEMENTS:
        raise Misfit(f"an array of {count} elements is too large")


def _check_class(kind: type | tuple[type, ...], value: Any, name: str | None = None) -> None:
    """Checks the exact class of a value: True is not a number here."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        wanted = " or ".join(
            "None" if k is type(None) else _with_article(k.__name__) for k in kinds
        )
        place = () if name is None else (name,)
        raise Misfit(f"{show(value)} is not {wanted}", *place)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _check_text(pattern: re.Pattern[str], value: Any, name: str, noun: str) -> None:
    if type(value) is not str or not pattern.fullmatch(value):
        raise Misfit(f"{show(value)} is not {_with_article(noun)}", name)


def _check_identifier(value: Any, name: str | int, *, word: bool = False) -> None:
    """Checks an identifier; a `word` may be a keyword of Python, such as `while`."""
    if (
        type(value) is not str
        or not value.isidentifier()
        or (not word and keyword.iskeyword(value))
        or len(value) > 512
    ):
        raise Misfit(f"{show(value)} is not a name", name)


def _check_choice(allowed: Collection[str], value: Any, name: str) -> None:
    if type(value) is not str or value not in allowed:
        raise Misfit(f"{show(value)} is none of {', '.join(allowed)}", name)


def _check_distinct(values: Iterable[Any], name: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise Misfit(f"{show(value)} occurs twice", name)
        seen.add(value)


def _check_each(values: Any, kind: type, check: Callable[[Any], None], name: str) -> None:
    """Checks a tuple of values of one class."""
    _check_class(tuple, values, name)
    i = 0
    try:
        for i, value in enumerate(values):  # noqa: B007 - `except` names it
            _check_class(kind, value)
            check(value)
    except Misfit as error:
        error.place += [i, name]
        raise


# --- programs -------------------------------------------------------------------------------------


def _check_one(program: Program, whole: Program) -> None:
    """Checks a program that shares the parameters and buffers of the whole one."""
    _check_text(_LINE, program.name, "name", "name of a model")
    _check_class(str, program.lacks_training, "lacks_training")
    _check_class(bool, program.train, "train")
    _check_class(bool, program.starts_in_training, "starts_in_training")
    _check_text(_DTYPE, program.default_dtype, "default_dtype", "dtype")
    _check_symbols(program.symbols)
    _check_each(program.guards, Guard, _check_guard, "guards")
    _check_each(program.fixed, str, _check_line, "fixed")
    _check_class(Graph, program.graph, "graph")
    with within("graph"):
        _check_graph(program.graph)
    named = {
        "parameter": whole.parameters,
        "buffer": whole.buffers,
        "constant": program.constants,
    }
    _check_each(program.inputs, Input, lambda entry: _check_input(entry, named), "inputs")
    if len(program.inputs) != len(program.graph.inputs):
        raise Misfit("the graph has another number of inputs", "inputs")
    users = sum(given.kind in ("user", "static") for given in program.inputs)
    _check_each(
        program.outputs, Output, lambda entry: _check_output(entry, named, users), "outputs"
    )
    if type(program.graph.outputs) is not tuple or (
        len(program.outputs) != len(program.graph.outputs)
    ):
        raise Misfit("the graph has another number of outputs", "outputs")
    if any(given.kind in ("user", "static") and given.target >= users  # type: ignore[operator]
           for given in program.inputs):  # fmt: skip
        raise Misfit("the position of an input is out of range", "inputs")
    _check_specs(program, users)
    _check_each(program.signature, Parameter, _check_parameter, "signature")
    _check_distinct((p.name for p in program.signature), "signature")
    _check_class(dict, program.ones_like, "ones_like")
    for names in program.ones_like.items():
        _check_each(names, str, lambda name: _check_identifier(name, "ones_like"), "ones_like")
    _check_names(program, whole)


def _check_symbols(symbols: Any) -> None:
    _check_class(dict, symbols, "symbols")
    if len(symbols) > _MOST_SYMBOLS:
        raise Misfit("there are too many symbols", "symbols")
    for symbol, bounds in symbols.items():
        _check_text(_SIZE, symbol, "symbols", "size")  # such as 2*s0
        with within("symbols", symbol):
            _check_class(tuple, bounds)
            if len(bounds) != 2:
                raise Misfit("is not a pair")
            for bound in bounds:
                _check_class((int, type(None)), bound)


def _check_guard(guard: Guard) -> None:
    _check_text(_SIZE, guard.expression, "expression", "size")
    _check_choice(RELATIONS, guard.relation, "relation")
    _check_class(int, guard.value, "value")
    _check_text(_LINE, guard.question, "question", "line")


def _check_line(text: str) -> None:
    if not _LINE.fullmatch(text):
        raise Misfit(f"{show(text)} is not a line")


def _check_input(given: Input, named: Mapping[str, Mapping[str, Any]]) -> None:
    _check_choice((*_ARRAYS, "user", "static"), given.kind, "kind")
    with within("shape"):
        check_shape(given.shape)
    if given.kind in _ARRAYS:
        _check_target(given.target, named[given.kind], given.kind)
    else:
        _check_position(given.target)
    is_number = given.kind == "user" and given.dtype in _NUMBERS
    if given.kind != "static" and not is_number:
        _check_text(_DTYPE, given.dtype, "dtype", "dtype")
    elif type(given.dtype) is not str:
        raise Misfit(f"{show(given.dtype)} is not a dtype", "dtype")
    if is_number:
        _check_text(_SIZE, given.value, "value", "size")
    else:
        with within("value"):
            _check_constant(given.value)


def _check_output(out: Output, named: Mapping[str, Mapping[str, Any]], users: int) -> None:
    _check_choice(("user", "parameter", "buffer", "input"), out.kind, "kind")
    if out.kind in named:
        _check_target(out.target, named[out.kind], out.kind)
        return
    _check_position(out.target)
    if out.kind == "input" and out.target >= users:  # type: ignore[operator]
        raise Misfit(f"there is no input {out.target}", "target")


def _check_target(target: Any, arrays: Mapping[str, Any], kind: str) -> None:
    if type(target) is not str or target not in arrays:
        raise Misfit(f"there is no {kind} {show(target)}", "target")


def _check_position(target: Any) -> None:
    if type(target) is not int or target < 0:
        raise Misfit(f"{show(target)} is not a position", "target")


def _check_specs(program: Program, users: int) -> None:
    results = sum(out.kind == "user" for out in program.outputs)
    for name, count in (("in_spec", users), ("out_spec", results)):
        spec = getattr(program, name)
        with within(name):
            leaves = _check_spec(spec)
        if leaves != count:
            raise Misfit(f"has {leaves} leaves for {count} values", name)
    spec = program.in_spec
    if (
        spec.kind != "tuple"
        or [child.kind for child in spec.children] != ["tuple", "dict"]
        or not all(type(key) is str for key in spec.children[1].keys)
    ):
        raise Misfit("is not a tuple of positional and a dict of keyword arguments", "in_spec")


def _check_spec(spec: Any) -> int:
    """Checks a structure.

    Returns:
        The number of its leaves.
    """
    _check_class(TreeSpec, spec)
    _check_choice(("leaf", "tuple", "list", "dict", "record"), spec.kind, "kind")
    _check_text(_LINE, spec.name, "name", "name of a class")
    _check_class(tuple, spec.keys, "keys")
    _check_class(tuple, spec.children, "children")
    _check_each(spec.absent, str, _check_field, "absent")
    _check_each(spec.fixed, tuple, _check_fixed, "fixed")
    if spec.kind == "leaf":
        if spec.children:
            raise Misfit("a leaf has no children", "children")
        return 1
    if spec.kind == "record":
        _check_each(spec.keys, str, _check_field, "keys")
    if spec.kind in ("dict", "record"):
        if len(spec.keys) != len(spec.children):
            raise Misfit("the numbers of keys and children differ", "keys")
        for i, key in enumerate(spec.keys):
            with within("keys", i):
                _check_key(key)
        _check_distinct(spec.keys, "keys")
    count = 0
    for i, child in enumerate(spec.children):
        with within("children", i):
            count += _check_spec(child)
    return count


def _check_key(key: Any) -> None:
    if type(key) is tuple:
        for inner in key:
            _check_key(inner)
    else:
        _check_class((str, int, bool, float, type(None)), key)


def _check_field(name: str) -> None:
    if not _LINE.fullmatch(name) or _DUNDER.fullmatch(name):
        raise Misfit(f"{show(name)} is not a field")


def _check_fixed(pair: Any) -> None:
    if len(pair) != 2 or type(pair[0]) is not str:
        raise Misfit(f"{show(pair)} is not a field and its value")
    _check_field(pair[0])
    if type(pair[1]) not in (bool, int, float, str, NoneType):
        raise Misfit(f"{show(pair[1])} is not a number, a string or None")


def _check_parameter(parameter: Parameter) -> None:
    _check_identifier(parameter.name, "name")
    _check_choice(("positional", "keyword", "args", "kwargs"), parameter.kind, "kind")
    _check_class(bool, parameter.required, "required")
    with within("default"):
        _check_constant(parameter.default)


def _check_names(program: Program, whole: Program) -> None:
    arrays = {**whole.parameters, **whole.buffers}
    _check_class(dict, program.aliases, "aliases")
    for alias, name in program.aliases.items():
        with within("aliases"):
            check_array_name(alias)
            if alias in arrays or type(name) is not str or name not in arrays:
                raise Misfit(f"{show(alias)} is not an alias of {show(name)}")
    for field, held in (("frozen", whole.parameters), ("transient", whole.buffers)):
        _check_each(getattr(program, field), str, check_array_name, field)
        for name in getattr(program, field):
            if name not in held:
                raise Misfit(f"there is no {show(name)}", field)
    _check_class(dict, program.variable_types, "variable_types")
    for name, kind in program.variable_types.items():
        if type(name) is not str or name not in arrays:
            raise Misfit(f"there is no {show(name)}", "variable_types")
        _check_choice(sorted(VARIABLE_TYPES), kind, "variable_types")
    _check_class(dict, program.few_bits, "few_bits")
    for name, dtype in program.few_bits.items():
        if type(name) is not str or name not in arrays:
            raise Misfit(f"there is no {show(name)}", "few_bits")
        _check_choice(FEW_BITS, dtype, "few_bits")
        if arrays[name].dtype.name != FEW_BITS[dtype]:
            raise Misfit(f"{show(name)} does not hold {dtype}", "few_bits")
    _check_class(dict, program.axes, "axes")
    for name, axes in program.axes.items():
        if type(name) is not str or name not in arrays:
            raise Misfit(f"there is no {show(name)}", "axes")
        _check_class(tuple, axes, "axes")
        if len(axes) > len(arrays[name].shape):
            raise Misfit(f"{show(name)} has fewer dimensions", "axes")
        for axis in axes:
            for label in axis if type(axis) is tuple else (axis,):
                _check_class((str, type(None)), label, "axes")


# --- graphs ---------------------------------------------------------------------------------------


def _check_graph(graph: Graph) -> None:
    _check_class(tuple, graph.inputs, "inputs")
    names: set[str] = set()
    for i, name in enumerate(graph.inputs):
        with within("inputs"):
            _check_identifier(name, i)
            if name in names:
                raise Misfit(f"{show(name)} occurs twice", i)
        names.add(name)
    if graph.kinds != ():
        _check_kinds(graph.kinds, "kinds")
        if len(graph.kinds) != len(graph.inputs):
            raise Misfit("the numbers of kinds and inputs differ", "kinds")
    i = 0
    try:
        for i, call in enumerate(graph.calls):  # noqa: B007 - `except` names it
            _check_class(Call, call)
            _check_call(call, names)
            if call.name in names:
                raise Misfit(f"{show(call.name)} occurs twice", "name")
            names.add(call.name)
    except Misfit as error:
        error.place += [i, "calls"]
        raise
    with within("outputs"):
        _check_argument(graph.outputs, names)


def _check_call(call: Call, names: set[str]) -> None:
    _check_identifier(call.name, "name", word=True)
    _check_text(_OP, call.op, "op", "operation")
    _check_text(_LINE, call.module, "module", "path of a module")
    _check_text(_SOURCE, call.source, "source", "file and line")
    _check_class(tuple, call.args, "args")
    _check_class(dict, call.kwargs, "kwargs")
    with within("args"):
        _check_argument(call.args, names)
    for key, value in call.kwargs.items():
        _check_identifier(key, "kwargs", word=True)
        with within("kwargs", key):
            _check_argument(value, names)
    if call.result != ():
        _check_kinds(call.result, "result")


def _check_kinds(kinds: Any, name: str) -> None:
    _check_class(tuple, kinds, name)
    for i, kind in enumerate(kinds):
        with within(name, i):
            _check_class(tuple, kind)
            if len(kind) != 2:
                raise Misfit("is not a pair of a dtype and a shape")
            _check_text(_DTYPE, kind[0], "dtype", "dtype")
            check_shape(kind[1])


def _check_argument(value: Any, names: set[str]) -> None:
    kind = type(value)
    if kind is Ref:
        if value.name not in names:
            raise Misfit(f"{show(value.name)} is used before it is defined")
    elif kind is tuple:
        i = 0
        try:
            for i, inner in enumerate(value):  # noqa: B007 - `except` names it
                _check_argument(inner, names)
        except Misfit as error:
            error.place.append(i)
            raise
    elif kind is dict:
        for key, inner in value.items():
            _check_class((str, int, bool), key)
            with within(key):
                _check_argument(inner, names)
    elif kind is Graph:
        _check_graph(value)
    elif kind is Size:
        if type(value.expression) is not str or not _SIZE.fullmatch(value.expression):
            raise Misfit(f"{show(value.expression)} is not a size")
    elif kind is DType:
        if not _DTYPE.fullmatch(value.name):
            raise Misfit(f"{show(value.name)} is not a dtype")
    elif kind is Scalar:
        _check_class((bool, int, float, complex), value.value, "value")
        _check_text(_DTYPE, value.dtype, "dtype", "dtype")
    elif kind not in _SIMPLE:
        raise Misfit(f"an object of type {kind.__name__} cannot be an argument")


_SIMPLE = {type(None), bool, int, float, complex, str}


def _check_constant(value: Any) -> None:
    """Checks a constant: numbers, strings, and tuples and dicts of them."""
    if type(value) is tuple:
        for i, inner in enumerate(value):
            with within(i):
                _check_constant(inner)
    elif type(value) is dict:
        for key, inner in value.items():
            _check_class((str, int, bool), key)
            _check_constant(inner)
    elif type(value) not in _SIMPLE:
        raise Misfit(f"a {type(value).__name__} is not a constant")
