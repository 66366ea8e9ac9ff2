"""The functions of a model's source: which of them ran, their syntax trees, and their code."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fmapper_translate.libraries import infrastructure as library
from fmapper_translate.walk.errors import NotTranscribed

_LIBRARIES = (
    "torch",
    "jax",
    "flax",
    "equinox",
    "jaxtyping",
    "optax",
    "einops",
    "packaging",
    "numpy",
    "scipy",
    "huggingface_hub",
    "fmapper",
    "fmapper_adapters",
    "fmapper_translate",
)
_LAYERS = str(Path("torch", "nn", "modules"))
_STANDARD = Path(sysconfig.get_path("stdlib"))


@dataclass(eq=False)
class Function:
    """A function or method of the source.

    Attributes:
        target: The function.
        owner: The class that defines it; None for a function of a module.
        tree: Its definition.
        lines: The text of its definition, by line.
        makes_modules: Whether a layer with random numbers was made while it ran.
    """

    target: types.FunctionType
    owner: type | None
    tree: ast.FunctionDef
    lines: list[str]
    makes_modules: bool = False
    nodes: list[ast.AST] = field(default_factory=list)

    @functools.cached_property
    def returns(self) -> frozenset[ast.AST]:
        """The expressions that it returns."""
        return frozenset(
            node.value for node in self.nodes if isinstance(node, ast.Return) and node.value
        )

    @property
    def is_static(self) -> bool:
        """Whether it is a method that is not given its object."""
        kept = self.owner and inspect.getattr_static(self.owner, self.name, None)
        return isinstance(kept, staticmethod)

    @property
    def is_method(self) -> bool:
        """Whether it is a method that is given its object or class."""
        return self.owner is not None and not self.is_static

    @property
    def name(self) -> str:
        """Its name in the source."""
        return self.tree.name

    @property
    def module(self) -> str:
        """The module that defines it; empty for code that was run without one."""
        return self.target.__module__ or ""

    @property
    def label(self) -> str:
        """Its qualified name, for messages."""
        return self.target.__qualname__


@functools.cache
def source_of_class(cls: type) -> tuple[str, int]:
    """Returns the text of a class, without the indentation of its first line, and its first line.

    One of a notebook has no file, but `linecache` has the lines of its methods.

    Raises:
        NotTranscribed: It is not known.
    """
    try:
        lines, first = inspect.getsourcelines(cls)
        return textwrap.dedent("".join(lines)), first
    except (OSError, TypeError) as error:
        heads = f"class {cls.__name__}(", f"class {cls.__name__}:"
        for method in filter(inspect.isfunction, vars(cls).values()):
            lines = linecache.getlines(method.__code__.co_filename)
            before = range(min(method.__code__.co_firstlineno, len(lines)))
            starts = [at for at in before if lines[at].lstrip().startswith(heads)]
            if starts:
                start = starts[-1]
                while start and lines[start - 1].lstrip().startswith("@"):  # its decorators
                    start -= 1
                return textwrap.dedent("".join(inspect.getblock(lines[start:]))), start + 1
        raise NotTranscribed(
            f"the text of the class {cls.__name__} is not known: define it in a file"
        ) from error


def definition_of(cls: type) -> ast.ClassDef:
    """Returns the definition of a class."""
    tree = ast.parse(source_of_class(cls)[0]).body[0]
    assert isinstance(tree, ast.ClassDef)
    return tree


@functools.cache
def is_of_model(file: str) -> bool:
    """Returns whether code of a file is a model's: of no library that models are written with."""
    path = Path(file)
    if file.startswith("<"):
        return False
    if "site-packages" not in path.parts:
        return not path.is_relative_to(_STANDARD)
    if library.is_file_of_library(path):
        return False
    return path.parts[path.parts.index("site-packages") + 1] not in _LIBRARIES


def is_standard(module: str) -> bool:
    """Returns whether a module is of Python, or one that files import as they are."""
    return module.partition(".")[0] in (*sys.stdlib_module_names, "numpy", "scipy", "einops")


def functions_that_run(
    run: Callable[[], object], classes: Callable[[], list[type]]
) -> list[Function]:
    """Runs something, and returns the functions of the model that it called.

    Args:
        run: What is run.
        classes: Returns the classes of the model's parts, and their bases; called afterwards. Of
            those of a framework a model has only these.
    """
    codes: set[types.CodeType] = set()

    def watch(frame: types.FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and (is_of_model(file) or _LAYERS in file):
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    functions: dict[types.CodeType, Function] = {}
    owners = classes()
    spaces: dict[int, dict[str, Any]] = {}

    def look(values: Iterable[Any], owner: type | None) -> None:
        for target in (item for value in values for item in _functions_in(value)):
            code = target.__code__
            if _LAYERS in code.co_filename and owner not in owners:
                continue
            own = owner if "." in target.__qualname__ else None  # a class may be given a function
            if code in codes and code not in functions and (read := _read(target, own)):
                functions[code] = read
                spaces.setdefault(id(target.__globals__), target.__globals__)

    for owner in owners:
        look(vars(owner).values(), owner)
        for value in vars(owner).values():  # a decorator may call other functions of its module
            is_function = isinstance(value, types.FunctionType)
            if is_function and is_of_model(value.__code__.co_filename):
                spaces.setdefault(id(value.__globals__), value.__globals__)
    seen, files = 0, {code.co_filename for code in codes}
    while seen < len(spaces):  # the modules of these functions, and those that their names are from
        space = list(spaces.values())[seen]
        for value in list(space.values()):
            if isinstance(value, types.ModuleType) and getattr(value, "__file__", "") in files:
                spaces.setdefault(id(vars(value)), vars(value))
            for cls in value.__mro__ if isinstance(value, type) else ():
                look(vars(cls).values(), cls)
        look(list(space.values()), None)
        seen += 1
    return list(functions.values())


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, types.FunctionType):
        yield value


def _read(target: types.FunctionType, owner: type | None) -> Function | None:
    """Reads a function; None for a lambda that is not the value of a name."""
    source = textwrap.dedent(inspect.getsource(target))
    try:
        tree = ast.parse(source).body[0]
    except SyntaxError:
        return None
    match tree:
        case ast.Assign([ast.Name(name)], ast.Lambda(args, body)):
            source = f"def {name}({ast.unparse(args)}):\n    return {ast.unparse(body)}"
            tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        return None
    return Function(target, owner, tree, source.splitlines(), nodes=list(ast.walk(tree)))


# --- code that tells what its expressions give ----------------------------------------------------

_INNER = "__recorded_function__"
VALUE, STATEMENT, CHOICE = "__recorded_value__", "__recorded_statement__", "__recorded_choice__"


def instrument(function: Function, number: Callable[[ast.AST], int]) -> types.CodeType:
    """Compiles a function so that it tells the value of each expression, and where statements end.

    Args:
        function: The function.
        number: Returns the number of a node, by which the code names it.
    """
    source = "\n".join(function.lines)
    copy = ast.parse(source).body[0]
    assert isinstance(copy, ast.FunctionDef)
    numbers = {
        id(twin): number(node) for node, twin in zip(function.nodes, ast.walk(copy), strict=True)
    }
    copy.decorator_list = []
    copy.name = _INNER  # not its own, by which it may call another function
    copy.body = _Instrument(numbers).block(copy.body)
    copy.args.defaults = [ast.Constant(None) for _ in copy.args.defaults]
    copy.args.kw_defaults = [item and ast.Constant(None) for item in copy.args.kw_defaults]
    for argument in ast.walk(copy.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    copy.returns = None
    original = function.target.__code__
    free = ", ".join(original.co_freevars)
    outer = ast.parse(f"def _outer({free}):\n    pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    owner = function.owner  # within a class, private names are those of the class
    outer.body = [copy] if owner is None else [_class(owner.__name__, copy)]
    if owner is not None and owner.__name__ not in original.co_freevars:
        outer.body.insert(0, ast.Global([owner.__name__]))
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, original.co_filename, "exec", dont_inherit=True)
    while code.co_name != _INNER:
        (code,) = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return code.replace(co_name=function.name, co_qualname=original.co_qualname)


def _class(name: str, method: ast.stmt) -> ast.stmt:
    made = ast.parse(f"class {name}:\n    pass").body[0]
    assert isinstance(made, ast.ClassDef)
    made.body = [method]
    return made


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Returns code and that of the functions and comprehensions in it."""
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from codes_in(item)


class _Instrument(ast.NodeTransformer):
    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers = numbers

    def block(self, body: list[ast.stmt], *first: ast.stmt) -> list[ast.stmt]:
        statements = list(first)
        for statement in body:
            number = self._numbers[id(statement)]
            statements.append(self.visit(statement))
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
                statements.append(_mark(number))
        return statements

    def visit(self, node: ast.AST) -> Any:
        number = self._numbers.get(id(node), -1)
        match node:
            case ast.If() | ast.While():
                node.test = self.visit(node.test)
                node.body = self.block(node.body, _mark(number))
                node.orelse = self.block(node.orelse)
                return node
            case ast.For():
                node.iter = self.visit(node.iter)
                node.body = self.block(node.body, _mark(number))
                node.orelse = self.block(node.orelse)
                return node
            case ast.With():
                for item in node.items:
                    item.context_expr = self.visit(item.context_expr)
                node.body = self.block(node.body)
                return node
            case ast.FunctionDef() | ast.ExceptHandler():
                node.body = self.block(node.body)
                return node
            case ast.Try():
                node.handlers = [*map(self.visit, node.handlers)]
                node.body, node.orelse, node.finalbody = map(
                    self.block, (node.body, node.orelse, node.finalbody)
                )
                return node
            case ast.AnnAssign():
                node.annotation = ast.Constant(None)
                return self.generic_visit(node)
            case ast.Constant() | ast.JoinedStr() | ast.FormattedValue():
                return node
            case ast.Starred() | ast.Slice():
                return self.generic_visit(node)
            case ast.IfExp(test, then, other):
                sides = [_call(CHOICE, number, self.visit(test), *map(self._later, (then, other)))]
                return ast.copy_location(_call(VALUE, number, *sides), node)
            case ast.Tuple(elts) if any(isinstance(element, ast.Slice) for element in elts):
                return self.generic_visit(node)
            case ast.expr() if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                inner: Any = self.generic_visit(node)
                return ast.copy_location(_call(VALUE, number, inner), node)
        return self.generic_visit(node)

    def _later(self, node: ast.expr) -> ast.expr:
        nothing = ast.arguments([], [], None, [], [], None, [])
        return ast.Lambda(nothing, self.visit(node))


def _call(name: str, number: int, *rest: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *rest], [])


def _mark(number: int) -> ast.stmt:
    return ast.Expr(_call(STATEMENT, number))
