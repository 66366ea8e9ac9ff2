"""Reads from constructors the names of the numbers that they pass to submodules."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fmapper.programs.reading.arithmetic import Number, number_of
from fmapper.programs.reading.constructor_calls import (
    bind,
    defaults_of,
    find_function,
    last_name,
    resolve,
)

_MOST = 8  # the maximal number of parts of a sequence
_DEEPEST = 4  # nesting of lists in variables, and of calls of functions


@dataclass(slots=True)
class Settings:
    """A constructor's names for the numbers of a submodule and its parts.

    Attributes:
        numbers: Its parameters and variables, and attributes of the submodule -> their values.
        code: Arguments of parts -> their code, `conv.in_channels` -> `channels`; and parts with
            `if` -> the variable that decides on them, `act.if` -> `use_relu`.
        words: Attributes that are None, True, False, texts or functions -> these as text; and the
            variables of the constructor that decide which parts are created, if known.
        makers: Parts -> the functions and methods of the model that created them.
        defaults: Parameters -> their defaults that are numbers or flags.
    """

    numbers: dict[str, Number] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Number] = field(default_factory=dict)


@dataclass(slots=True)
class _Constructor:
    """The code of a constructor.

    Attributes:
        parameters: Its parameters.
        space: The values of names in it, besides its variables.
        loops: The variables of its comprehensions.
        attributes: The code of attributes, several if it depends on arguments.
        variables: The code of variables that are assigned once.
        lists: Variables that are lists -> their items, and whether each is always present.
        parts: The arguments of the base constructor, such as the parts of a sequence.
        defaults: Its parameters -> their defaults that are numbers or flags.
        tests: By identity of code on which a variable decides: the variable, and its value.
    """

    parameters: tuple[str, ...]
    space: Mapping[str, Any]
    loops: frozenset[str] = frozenset()
    attributes: dict[str, list[ast.expr]] = field(default_factory=dict)
    variables: dict[str, ast.expr | None] = field(default_factory=dict)
    lists: dict[str, list[tuple[ast.expr, bool]] | None] = field(default_factory=dict)
    parts: tuple[ast.expr, ...] = ()
    defaults: Mapping[str, Number] = field(default_factory=dict)
    tests: Mapping[int, tuple[str, bool]] = field(default_factory=dict)

    def read(self, body: list[ast.stmt], *, always: bool = True) -> None:
        """Reads statements; in loops only for their effect on lists."""
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    self.variables[name] = None if name in self.variables else value
                    self._begin_list(name, value)
                case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)], value=value):
                    self.attributes.setdefault(name, []).append(value)
                case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)):
                    pairs = zip(names, values, strict=False)
                    self.read(
                        [ast.Assign([target], value) for target, value in pairs], always=always
                    )
                case ast.AugAssign(target=ast.Name(name), value=ast.List(items)):
                    self._add(name, items, always=always)
                case ast.Expr(ast.Call() as call):
                    self._read_call(call, always=always)
                case ast.Return(ast.Call(args=args)):
                    self.parts = tuple(args)
                case ast.If(body=then, orelse=other):
                    self.read(then, always=False)
                    self.read(other, always=False)
                case ast.With(body=then):
                    self.read(then, always=always)
                case ast.For() | ast.While() | ast.Try():
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Name):
                            self.lists[inner.id] = self.variables[inner.id] = None

    def _begin_list(self, name: str, value: ast.expr) -> None:
        self.lists.pop(name, None)
        if isinstance(value, ast.List):
            self._add(name, value.elts, always=True)

    def _add(self, name: str, items: list[ast.expr], *, always: bool) -> None:
        entries = self.lists.setdefault(name, [])
        if entries is not None:
            entries += [(item, always) for item in items]

    def _read_call(self, call: ast.Call, *, always: bool) -> None:
        match call:
            case ast.Call(func=ast.Attribute(ast.Name(name), "append"), args=[item]):
                self._add(name, [item], always=always)
            case ast.Call(func=ast.Attribute(ast.Name(name), "extend"), args=[ast.List(items)]):
                self._add(name, items, always=always)
            case ast.Call(
                func=ast.Attribute(ast.Name("self"), "add_module"),
                args=[ast.Constant(str(name)), value],
            ):
                self.attributes.setdefault(name, []).append(value)
            case ast.Call(func=ast.Attribute(ast.Call(func=ast.Name("super")), "__init__")):
                self.parts = tuple(call.args)

    def items_in(self, name: str, node: ast.expr, depth: int = 0) -> list[tuple[ast.expr, bool]]:
        """Returns the items in the code of a list or sequence; empty if unknown.

        Code that creates every item, as in a comprehension, is marked by a star.
        """
        match node:
            case ast.Name(id=other) if depth < _DEEPEST:
                value = self.variables.get(other)
                entries = self.lists.get(other)
                if isinstance(value, ast.Call):
                    return self.items_in(name, value, depth + 1)
                return entries or []
            case ast.List(elts) | ast.Tuple(elts):
                return [(item, True) for item in elts]
            case ast.ListComp(item) | ast.GeneratorExp(item):
                return [(ast.Starred(item), True)]
            case ast.Call(args=[ast.Starred(value)]):
                return self.items_in(name, value, depth + 1)
            case ast.Call(args=[ast.List() | ast.Name() | ast.ListComp() as value]):
                return self.items_in(name, value, depth + 1)
            case ast.Call(args=args):
                return [(item, True) for item in args]
        return []

    def value(self, node: ast.expr) -> ast.expr:
        """Replaces a variable by the call that it holds; other code stays as it is."""
        variable = self.variables.get(node.id) if isinstance(node, ast.Name) else None
        return variable if isinstance(variable, ast.Call | ast.IfExp) else node

    def side(self, node: ast.expr, kind: str) -> ast.expr:
        """Returns the branch of a condition that creates parts of a class, or the code itself."""
        code = self.value(node)
        if not isinstance(code, ast.IfExp):
            return code
        sides = [self.side(branch, kind) for branch in (code.body, code.orelse)]
        calls = [
            branch for branch in sides if isinstance(branch, ast.Call) and _may_be(branch, kind)
        ]
        fits = [branch for branch in calls if last_name(branch.func) == kind] or calls
        return fits[0] if len(fits) == 1 else code


def _constructor_of(cls: type) -> _Constructor | None:
    return _code_of(cls.__init__)  # type: ignore[misc]


@functools.lru_cache(maxsize=1024)
def _code_of(function: Any) -> _Constructor | None:
    """Reads the code of a constructor, or of a function that returns a new object."""
    try:
        function = inspect.unwrap(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    named = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    parameters = tuple(arg.arg for arg in named if arg.arg != "self")
    loops = (node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension))
    variables = (node.id for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Name))
    space = getattr(function, "__globals__", {})
    defaults, tests = defaults_of(function), _tests_in(tree)
    constructor = _Constructor(
        parameters, space, frozenset(variables), defaults=defaults, tests=tests
    )
    constructor.read(tree.body)
    return constructor


def _tests_in(tree: ast.AST) -> dict[int, tuple[str, bool]]:
    """Maps code on which a variable decides to the variable, and its value."""
    tests: dict[int, tuple[str, bool]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        test, wanted = node.test, True
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, wanted = test.operand, not wanted
        if isinstance(test, ast.Name | ast.Attribute):
            for side, is_true in ((node.body, wanted), (node.orelse, not wanted)):
                for statement in side if isinstance(side, list) else [side]:
                    value = statement.value if isinstance(statement, ast.Assign) else statement
                    tests[id(value)] = last_name(test), is_true
    return tests


def settings_of(module: Any, memo: dict[int, Settings] | None = None) -> Settings:
    """Reads the names of a module's numbers from the code of its constructor.

    The values of its variables are those of the parts that receive them.

    Args:
        module: The module; its parts are attributes or numbered items.
        memo: The settings of other modules, by their identity; it is added to.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    settings = memo[id(module)] = Settings(_attributes(module))
    with contextlib.suppress(Exception):  # a user's object may raise anything
        settings.words = _words(module)
    code = _constructor_of(type(module))
    if code is not None:
        try:
            settings.makers = _makers(module, code, memo)
            settings.numbers, settings.code = _read(module, code, memo)
            settings.defaults = code.defaults
            for name, value in _decisions(module, code, settings.numbers).items():
                if settings.words.get(name, "None") in ("None", "True", "False"):
                    settings.words[name] = value
        except Exception:  # a user's module may raise anything
            settings.code = {}
    return settings


def _read(
    module: Any, code: _Constructor, memo: dict[int, Settings]
) -> tuple[dict[str, Number], dict[str, str]]:
    """Returns the numbers of a module by name, and the code for the arguments of its parts."""
    written: dict[str, str] = {}
    numbers: dict[str, set[Number]] = {}
    for path, part, node in _parts_of(module, code):
        if id(node) in code.tests:
            written[f"{path}.if"] = code.tests[id(node)][0]
        if not isinstance(node, ast.Call):
            if isinstance(node, ast.Name) and number_of(part) is not None:
                numbers.setdefault(node.id, set()).add(number_of(part))  # type: ignore[arg-type]
            continue
        arguments = _numbers_given(part, node, code, memo)
        loop = {
            x.id: n for x, n in arguments.values() if isinstance(x, ast.Name) and x.id in code.loops
        }
        written |= {f"{path}.{name}": _print(x, module, loop) for name, (x, _) in arguments.items()}
        for given, value in arguments.values():
            name = _print(given, module, loop)
            if name.isidentifier():
                numbers.setdefault(name, set()).add(value)
    single = {name: values.pop() for name, values in numbers.items() if len(values) == 1}
    attributes = {key: x for key, x in _attributes(module).items() if key not in numbers}
    order = [name for name in code.parameters if name in single or name in attributes]
    every = {**attributes, **single}
    return {name: every[name] for name in [*order, *single, *attributes]}, written


def _decisions(module: Any, code: _Constructor, numbers: Mapping[str, Number]) -> dict[str, str]:
    """Maps the variables that decide which parts are created to their values."""
    flags: dict[str, set[str]] = {}
    for _, _, node in _parts_of(module, code):
        name, is_true = code.tests.get(id(node), ("", False))
        if name and name not in numbers:
            flags.setdefault(name, set()).add(str(is_true))
    return {name: values.pop() for name, values in flags.items() if len(values) == 1}


def _makers(module: Any, code: _Constructor, memo: dict[int, Settings]) -> dict[str, str]:
    """Maps parts of a module to the functions, and its own methods, that created them.

    Also records the names of those functions for the numbers of parts.
    """
    makers = {}
    for path, part, node in _parts_of(module, code):
        function = node.func if isinstance(node, ast.Call) else None
        name = last_name(function)
        is_own = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self"
        maker = getattr(type(module), name, None) if is_own else code.space.get(name)
        if inspect.isfunction(maker):
            makers[path] = name
            inner = _code_of(maker)
            if inner is not None and inner.parts and id(part) not in memo:
                read = _read(part, inner, memo)
                memo[id(part)] = Settings(*read, defaults=inner.defaults)
    return makers


def _numbers_given(
    part: Any, call: ast.Call, code: _Constructor, memo: dict[int, Settings]
) -> dict[str, tuple[ast.expr, Number]]:
    """Returns the numbers that a part's constructor gets as variables, with their code."""
    numbers = {}
    for name, given in _arguments(part, call, code):
        value = settings_of(part, memo).numbers.get(name, number_of(_own(part).get(name)))
        items = {ast.unparse(item): item for item in getattr(given, "elts", [given])}
        written = items.popitem()[1] if len(items) == 1 else None
        if value is not None and written and not isinstance(written, ast.Constant):
            numbers[name] = written, value
    return numbers


def _own(module: Any) -> Mapping[str, Any]:
    """Returns the attributes of an object that are not computed."""
    attributes: Mapping[str, Any] = getattr(module, "__dict__", {})
    return attributes


def _attributes(module: Any) -> dict[str, Number]:
    return {
        key: value
        for key, value in _own(module).items()
        if type(value) in (int, float) and key.isidentifier() and key[0] != "_"
    }


def _words(module: Any) -> dict[str, str]:
    words = {}
    for key, value in _own(module).items():
        if key.isidentifier() and key[0] != "_" and key != "training":
            if value is None or type(value) in (bool, str):
                words[key] = str(value)
            elif inspect.isroutine(value):
                words[key] = value.__name__
    named = getattr(type(module), "named_children", None)  # an object may define any name
    for key, part in named(module) if named else ():
        is_plain = not any(True for _ in part.children())
        if is_plain and key.isidentifier() and "activation" not in type(part).__module__:
            words[key] = "None" if type(part).__name__ == "Identity" else "True"
    return words


def _print(node: ast.expr, module: Any, loop: Mapping[str, Number]) -> str:
    """Formats code with names for attributes of objects and numbers for loop variables."""

    class Name(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
            value = getattr(type(module), node.attr, None)
            if isinstance(node.value, ast.Name) and node.value.id == "self" and number_of(value):
                return ast.Constant(number_of(value))
            return ast.Name(node.attr, ast.Load())

        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(loop[node.id]) if node.id in loop else node

    return ast.unparse(Name().visit(copy.deepcopy(node)))


def _parts_of(module: Any, code: _Constructor) -> Iterator[tuple[str, Any, ast.expr]]:
    """Yields the parts and numbers that a module's constructor creates, with the code of each."""
    parts = {name: _part_at(module, name) for name in code.attributes}
    queue = [(name, part, _choose(part, name, code)) for name, part in parts.items()]
    if code.parts:
        call = ast.Call(ast.Name("", ast.Load()), [*code.parts], [])
        queue.append(("", module, call))
    while queue:
        path, part, node = queue.pop(0)
        if part is None:
            continue
        if path:
            yield path, part, node
        for at, (key, inner) in enumerate(_match(part, _find_items(path, node, code))):
            below = f"{path}.{key}" if path else key
            item = _part_at(part, key)
            maker = code.side(inner, type(item).__name__)
            if isinstance(maker, ast.Call) and below.count(".") < _DEEPEST:
                queue.insert(at, (below, item, maker))


def _choose(part: Any, name: str, code: _Constructor) -> ast.expr:
    """Returns the code that created an attribute; the first candidate if ambiguous."""
    candidates: list[ast.expr] = []
    for node in code.attributes[name]:
        candidates += [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    values = [code.value(node) for node in candidates]
    kind = type(part).__name__
    fits = [value for value in values if isinstance(value, ast.Call) and _may_be(value, kind)]
    if len(fits) > 1:  # `nn.Sequential()`, and one with parts
        fits = [value for value in fits if _match(part, _find_items(name, value, code))] or fits
    return fits[0] if fits else values[0]


def _find_items(path: str, node: ast.expr, code: _Constructor) -> list[tuple[ast.expr, bool]]:
    whole = resolve(node, code.space) if isinstance(node, ast.Call) else node
    return code.items_in(path, whole)


def _part_at(module: Any, key: str) -> Any:
    """Returns an attribute of a module that is not a property, or a numbered item."""
    if not key.isdigit():
        is_own = key in _own(module) or not hasattr(type(module), key)
        return getattr(module, key, None) if is_own else None
    try:
        return module[int(key)]
    except (TypeError, IndexError, KeyError):
        return None


def _match(part: Any, items: list[tuple[ast.expr, bool]]) -> list[tuple[str, ast.expr]]:
    """Matches the numbered parts of a sequence with the code of each, in order.

    Conditional code is skipped if the rest matches the classes of the parts.
    """
    are_made = any(isinstance(node, ast.Call | ast.Starred) for node, _ in items)
    are_made = are_made and not hasattr(type(part), "__array__")  # it has rows instead of parts
    try:
        count = len(part) if are_made else 0
    except TypeError:
        return []
    if len(items) == 1 and isinstance(items[0][0], ast.Starred):
        items = [(items[0][0].value, True)] * count
    if not len(items) - _optional(items) <= count <= len(items):
        return []  # do not read its items, which are rows if a variable holds an array
    kinds = [type(_part_at(part, str(at))).__name__ for at in range(count)]
    for left_out in itertools.product((False, True), repeat=min(_MOST, _optional(items))):
        left = iter(left_out)
        kept = [node for node, always in items if always or not next(left, False)]
        if len(kept) == count and all(map(_may_be, kept, kinds)):
            return [(str(at), node) for at, node in enumerate(kept)]
    return []


def _optional(items: list[tuple[ast.expr, bool]]) -> int:
    return sum(not always for _, always in items)


def _may_be(node: ast.expr, kind: str) -> bool:
    """Returns whether code may create a part of a class, as functions and variables may."""
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    return name == kind or name[:1].islower() or not name


def _arguments(part: Any, call: ast.Call, code: _Constructor) -> Iterator[tuple[str, ast.expr]]:
    """Yields the arguments of the constructor of a part, with the code for each.

    Arguments of the function that creates it come first.
    """
    function = find_function(call, code.space)
    if function is not None:
        yield from bind(function, call)
    resolved = resolve(call, code.space, type(part))
    if function is None or find_function(resolved, code.space) is None:
        yield from bind(type(part), resolved)
