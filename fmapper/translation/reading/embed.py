"""The lowering of an operation as source of its own, for operations that have no printer."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fmapper.errors import ConversionError
from fmapper.translation.dialect import Helper

_OWN = ("fmapper.", "fmapper_adapters.")


class Embedded:
    """Functions of fmapper as helpers of a file, with all that they call.

    Args:
        places: The modules whose functions are called by their own names, by the name that each has
            in the file.
        overrides: Functions that are written otherwise than they stand here.
        instead: Functions -> those that are written in their places.

    Attributes:
        helpers: By the names that they have there.
        imports: Names that they use -> the lines that import them.
    """

    def __init__(
        self,
        places: Mapping[str, Any],
        overrides: Mapping[str, str] = MappingProxyType({}),
        instead: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        self._places = places
        self._instead = instead
        self._overrides = overrides
        self.helpers: dict[str, Helper] = {}
        self.imports: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}

    def add(self, function: Any) -> str:
        """Adds a function; returns its name.

        Raises:
            ConversionError: It calls what cannot be written.
        """
        if isinstance(function, functools.partial):
            return self._partial(function)
        function = self._instead.get(function, function)
        known = self._name_of(function)
        if known:
            return known
        is_inner = "<locals>" in function.__qualname__ or function.__name__ == "<lambda>"
        if is_inner or getattr(function, "__closure__", None):
            return self._closure(function)
        function = inspect.unwrap(function)
        return self._add(function.__module__, function.__name__)

    def _partial(self, function: Any) -> str:
        """Adds a function with some of its arguments."""
        inner = self.add(function.func)
        given = [inner, *map(self._constant, function.args)]
        given += [f"{key}={self._constant(value)}" for key, value in function.keywords.items()]
        own = self._free(f"{inner}_{len(self.helpers)}")
        self.imports.setdefault("functools", "import functools")
        code = f"{own} = functools.partial({', '.join(given)})"
        self.helpers[own] = Helper(code, frozenset({inner}))
        return own

    def _closure(self, function: Any) -> str:
        """Adds a function that was made inside another one, with the values it holds."""
        key = (function.__module__, f"{function.__qualname__}:{id(function)}")
        if key in self._names:
            return self._names[key]
        node = _definition_of(function)
        own = self._free(f"_{function.__qualname__.split('.')[0].strip('_<>') or 'function'}")
        self._names[key] = own
        rename = _Rename(self, function.__module__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        rename.held = {name: cell.cell_contents for name, cell in cells}
        _strip(node)
        node.name = own
        source = ast.unparse(ast.fix_missing_locations(rename.visit(node)))
        self.helpers[own] = Helper(source, frozenset(rename.needs))
        return own

    def _free(self, wanted: str) -> str:
        while wanted in self._names.values() or wanted in self.helpers:
            wanted += "_"
        return wanted

    def _name_of(self, value: Any) -> str:
        """Returns the name of a function of JAX, NumPy or Python; empty for others."""
        name = getattr(value, "__name__", None)
        for place, module in self._places.items():
            if name and getattr(module, name, None) is value:
                if place in ("math", "operator"):
                    self.imports.setdefault(place, f"import {place}")
                return f"{place}.{name}"
        return ""

    def _constant(self, value: Any, needs: set[str] | None = None) -> str:
        """Returns the code of a value in a closure."""
        known = self._name_of(value)
        if known:
            return known
        if callable(value) and not isinstance(value, type):
            found = self.add(value)
            if needs is not None:
                needs.add(found)
            return found
        if isinstance(value, bool | int | float | str | tuple) or value is None:
            return repr(value)
        if isinstance(value, type) and value.__module__ == "builtins":
            return value.__name__
        raise ConversionError(f"{value!r} cannot be written to a file")

    def _add(self, module: str, name: str) -> str:
        key = (module, name)
        if key in self._names:
            return self._names[key]
        own = self._free(f"_{name.strip('_')}")
        self._names[key] = own
        try:
            return self._define(module, name, own)
        except ConversionError:
            del self._names[key]
            raise

    def _define(self, module: str, name: str, own: str) -> str:
        if name in self._overrides:
            self.helpers[own] = Helper(self._overrides[name])
            return own
        node = _definitions(module).get(name)
        if node is None:
            raise ConversionError(f"{module}.{name} cannot be written to a file")
        node = ast.parse(ast.unparse(node)).body[0]
        rename = _Rename(self, module)
        rules: list[ast.stmt] = []
        if isinstance(node, ast.FunctionDef):
            rules = _rules_of(module, name)
            kept = [one for one in node.decorator_list if rules and self._is_foreign(one, module)]
            _strip(node)
            node.name = own
            node.decorator_list = [rename.visit(one) for one in kept]
        elif isinstance(node, ast.Assign):
            node.targets = [ast.Name(own, ast.Store())]
        elif isinstance(node, ast.ClassDef):
            node.name = own
            node.body = [one for one in node.body if not _is_docstring(one)] or [ast.Pass()]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            node = ast.Assign([ast.Name(own, ast.Store())], node.value)
        else:
            raise ConversionError(f"{module}.{name} cannot be written to a file")
        written = [rename.visit(node)]
        for rule in rules:
            if isinstance(rule, ast.FunctionDef):
                decorators = [rename.visit(one) for one in rule.decorator_list]
                _strip(rule)
                rule.name, rule.decorator_list = f"{own}_rule", decorators
            written.append(rename.visit(rule))
        sources = [ast.unparse(ast.fix_missing_locations(one)) for one in written]
        self.helpers[own] = Helper("\n\n\n".join(sources), frozenset(rename.needs - {own}))
        return own

    def _is_foreign(self, decorator: ast.expr, module: str) -> bool:
        """Returns whether a decorator is of a framework, as that of a derivative of its own."""
        root = next(one for one in ast.walk(decorator) if isinstance(one, ast.Name))
        value = vars(sys.modules.get(module) or importlib.import_module(module)).get(root.id)
        return not (getattr(value, "__module__", None) or "").startswith(_OWN)

    def resolve(self, module: str, name: str, rename: _Rename) -> str:
        """Resolves a global name of a module to one of the file."""
        scope = vars(sys.modules.get(module) or importlib.import_module(module))
        if name not in scope:
            return name  # a builtin
        value = scope[name]
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith(_OWN):
                raise ConversionError(f"{module}: {name} cannot be written to a file")
            self.imports.setdefault(name, _import_of(module, name))
            return name
        origin = getattr(value, "__module__", None) or ""
        if isinstance(value, type) and issubclass(value, Exception) and origin[:7] == "fmapper":
            return "ValueError"
        if origin.startswith(_OWN) and callable(value):
            found = self.add(value)
        elif name in _definitions(module):
            found = self._add(module, name)
        else:
            imported = _imports(module).get(name, "")
            if not imported:
                raise ConversionError(f"{module}: {name} cannot be written to a file")
            if any(f"from {own}" in imported for own in _OWN):
                found = self._add(imported.split()[1], name)
            else:
                self.imports.setdefault(name, imported)
                return name
        rename.needs.add(found)
        return found


class _Rename(ast.NodeTransformer):
    """Gives global names those that they have in the file."""

    def __init__(self, owner: Embedded, module: str) -> None:
        self.needs: set[str] = set()
        self._owner = owner
        self._module = module
        self._local: list[set[str]] = []
        self.held: dict[str, Any] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        inner = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                inner.add(part.id)
            elif isinstance(part, ast.FunctionDef) and part is not node:
                inner.add(part.name)
        node.args.defaults = [self.visit(one) for one in node.args.defaults]
        self._local.append(inner)
        node.body = [self.visit(one) for one in node.body]
        self._local.pop()
        if self._local:
            _strip(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [self.visit(one) for one in node.bases]
        node.decorator_list = [self.visit(one) for one in node.decorator_list]
        body: list[ast.stmt] = []
        for one in node.body:
            if isinstance(one, ast.AnnAssign):  # a field: its type is not needed
                one.annotation = ast.Name("object", ast.Load())
            elif isinstance(one, ast.FunctionDef):
                one.body = [inner for inner in one.body if not _is_docstring(inner)]
                one.returns = None
                for argument in ast.walk(one.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                self.visit(one)
            body.append(one)
        node.body = body
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._local.append({a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)})
        node.body = self.visit(node.body)
        self._local.pop()
        return node

    def _comprehension(self, node: Any) -> ast.AST:
        names = {
            n.id for one in node.generators for n in ast.walk(one.target) if isinstance(n, ast.Name)
        }
        self._local.append(names)
        self.generic_visit(node)
        self._local.pop()
        return node  # type: ignore[no-any-return]

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.held:
            found = self._owner._constant(self.held[node.id], self.needs)
            return ast.parse(found, mode="eval").body
        if any(node.id in names for names in self._local):
            return node
        return ast.Name(self._owner.resolve(self._module, node.id, self), node.ctx)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        self.generic_visit(node)
        return ast.Assign([node.target], node.value)


def _definition_of(function: Any) -> ast.FunctionDef:
    """Returns the code of a function that was made inside another one, or of a lambda.

    Raises:
        ConversionError: It is not found, or several lambdas of its line may be it.
    """
    code, lambdas = function.__code__, set()
    for node in ast.walk(_tree(function.__module__)):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return ast.parse(ast.unparse(node)).body[0]  # type: ignore[return-value]
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno:
            names = [one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)]
            if names == list(code.co_varnames[: len(names)]):
                head = f"def f({ast.unparse(node.args)}):"
                lambdas.add(f"{head}\n    return {ast.unparse(node.body)}")
    if len(lambdas) == 1:
        return ast.parse(lambdas.pop()).body[0]  # type: ignore[return-value]
    raise ConversionError(f"{function.__qualname__} cannot be written to a file")


def _rules_of(module: str, name: str) -> list[ast.stmt]:
    """Returns copies of the statements of a module that give a function its derivatives."""

    def completes(one: ast.expr) -> bool:
        is_method = isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
        return is_method and one.value.id == name  # type: ignore[attr-defined]

    found = []
    for node in _tree(module).body:
        called = node.value.func if _is_call(node) else None  # type: ignore[attr-defined]
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if any(completes(one) for one in (*decorators, *filter(None, [called]))):
            found.append(ast.parse(ast.unparse(node)).body[0])
    return found


def _is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _strip(node: ast.FunctionDef) -> None:
    """Removes decorators, types and docstrings."""
    node.decorator_list = []
    node.returns = None
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and node.body[1:]:
        node.body = node.body[1:]


@functools.lru_cache(maxsize=256)
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


@functools.lru_cache(maxsize=256)
def _definitions(module: str) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            scope = vars(importlib.import_module(module))
            for one in node.targets[0].elts:
                if isinstance(one, ast.Name) and isinstance(scope[one.id], int | float):
                    found[one.id] = ast.parse(f"{one.id} = {scope[one.id]!r}").body[0]
    return found


@functools.lru_cache(maxsize=256)
def _imports(module: str) -> dict[str, str]:
    """Maps the names that a module imports to import lines."""
    found = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name] = ast.unparse(ast.Import([one]))
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                line = ast.ImportFrom(node.module, [one], node.level)
                found[one.asname or one.name] = ast.unparse(line)
    return found


def _import_of(module: str, name: str) -> str:
    return _imports(module).get(name, f"import {name}")
