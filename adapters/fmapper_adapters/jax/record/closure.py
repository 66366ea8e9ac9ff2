"""Finds the arrays that a callable closes over, and replaces them."""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import (
    ConversionError,
    CycleError,
    NotAFunctorError,
    StructureMismatchError,
    fcollect,
    fmap_with_path,
    trainables,
)
from fmapper.backends import BoxKey, holds_arrays
from fmapper_adapters.jax.record import frames

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_NUMBERS = (bool, int, float, complex)
_JITTED = ("PjitFunction", "JitWrapped", "_JitWrapper")
_MODE = "inference"  # a field in which the layers of Equinox keep their mode
_LIBRARIES = ("jax", "flax", "equinox")  # the cells of their functions have no meaningful names
_MODES = ("deterministic", "use_running_average")  # such attributes in Flax


class Lifted:
    """The arrays of a callable tree or a function.

    The arrays of a function are those in its closure, its `partial` or its object, and in the
    models and trees among the globals that it uses; bare arrays among the globals do not count.

    Args:
        roots: The callable, or a function and its parameters.

    Attributes:
        arrays: The arrays by name, each once.
        trained: The names of the trained arrays.
        aliases: Other names of tied arrays -> the name in `arrays`.
        modes: Fields that hold the mode of a part, with their values -> whether it trains.
        refusal: The error that names an undeclared object with arrays.
        suspects: The arrays in that object, which become constants of a program that uses them.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = tuple(map(_with_arrays, roots))
        self.arrays: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.trained: set[str] = set()
        self.modes: dict[str, bool] = {}
        self._names: dict[int, str] = {}
        self.refusal: NotAFunctorError | None = None
        self.suspects: list[Any] = []
        trained: set[int] = set()
        for part in _trees(self._roots):
            try:
                trained |= _trained_ids(part)
            except NotAFunctorError as error:
                self.refusal = self.refusal or error
                leaves = [leaf for _, leaf in _leaves(part)]
                trained |= {id(x) for x in leaves if _is_inexact(x)}
                undeclared = [x for x in leaves if not isinstance(x, _ARRAYS) and holds_arrays(x)]
                self.suspects += _arrays_within(undeclared)
        for name, leaf in _find_arrays(self._roots, self.modes):
            if name in self.arrays or name in self.aliases:
                raise StructureMismatchError(
                    f"two arrays are both called {name!r} when keys are joined with dots. Rename "
                    "one of the keys."
                )
            first = self._names.setdefault(id(leaf), name)
            if first != name:
                self.aliases[name] = first
                continue
            self.arrays[name] = leaf
            if id(leaf) in trained:
                self.trained.add(name)

    def fill(self, arrays: Mapping[str, Any], *, train: bool | None = None) -> tuple[Any, ...]:
        """Returns the roots with other arrays, by their names; ties are kept.

        Args:
            arrays: The arrays.
            train: The mode to set in the fields called `inference`; None leaves them unchanged.
        """
        filling = _Filling(self._names, arrays, train)
        return tuple(map(filling.tree, self._roots))

    def changes(self, filled: tuple[Any, ...], before: Mapping[str, Any]) -> dict[str, Any]:
        """Finds the arrays that a call has changed in filled roots: counters, running averages.

        Raises:
            ConversionError: The call created or removed arrays, or separated tied ones.
        """
        after = dict(_find_arrays(tuple(map(_with_arrays, filled)), {}))
        new = [n for n in after if n not in self.arrays and n not in self.aliases]
        gone = [n for n in (*self.arrays, *self.aliases) if n not in after]
        if new or gone:
            action = f"makes {', '.join(new)}" if new else f"removes {', '.join(gone)}"
            raise ConversionError(
                f"a call {action}, but the variables of a model must exist before it is converted. "
                f"Call the model once first, create them in the constructor, or return the values"
            )
        for name, first in self.aliases.items():
            if after[name] is not after[first]:
                raise ConversionError(
                    f"{name} and {first} are the same array, but a call makes them two"
                )
        return {name: after[name] for name in self.arrays if after[name] is not before[name]}


def classes_at(tree: Any, wanted: Callable[[Any], bool]) -> dict[str, type]:
    """Returns the classes of nodes, by dotted name."""
    classes: dict[str, type] = {}

    def see(path: Any, node: Any) -> bool:
        if wanted(node):
            classes.setdefault(".".join(_keys_of(path)), type(node))
        return is_function(node)

    fmap_with_path(lambda path, leaf: leaf, tree, is_leaf=see)
    return classes


def objects_at(*roots: Any) -> list[tuple[str, Any]]:
    """Returns nodes with methods by dotted name, also those in closures; ties under each name."""
    objects: list[tuple[str, Any]] = []
    seen: set[int] = set()

    def collect(tree: Any, prefix: tuple[str, ...]) -> None:
        functions: list[tuple[tuple[str, ...], Any]] = []

        def see(path: Any, node: Any) -> bool:
            if isinstance(node, type) or is_function(node):
                return is_function(node)
            if callable(node) or frames.methods_of(type(node)):
                objects.append((".".join((*prefix, *_keys_of(path))), node))
            return False

        def see_leaf(path: Any, leaf: Any) -> Any:
            if is_function(leaf) and id(leaf) not in seen:
                seen.add(id(leaf))
                functions.append(((*prefix, *_keys_of(path)), leaf))
            return leaf

        fmap_with_path(see_leaf, tree, cache=None, is_leaf=see)
        for at, function in functions:
            for name, part in _parts(function):
                collect(part, (*at, name) if name else at)

    for root in roots:
        collect(root, ())
    return objects


def traced_arrays(tree: Any) -> dict[str, Any]:
    """Returns the arrays in a tree that are being traced, by name."""
    pairs = _find_arrays((tree,), {})
    return {name: leaf for name, leaf in pairs if isinstance(leaf, jax.core.Tracer)}


def is_function(x: Any) -> bool:
    """Returns whether an object is a function rather than a callable tree."""
    if isinstance(x, types.FunctionType | types.MethodType | functools.partial):
        return True
    return unwrap(x) is not None


def callee_of(model: Any) -> Any:
    """Returns a model, or its `__call__` if that closes over arrays itself."""
    method = getattr(type(model), "__call__", None)  # noqa: B004 - it is wanted, not asked for
    if is_function(model) or not isinstance(method, types.FunctionType) or not _parts(method):
        return model
    return types.MethodType(method, model)


def unwrap(x: Any) -> Any | None:
    """Unwraps the function inside `jax.jit` and the like; None for others."""
    cls = type(x)
    is_jitted = cls.__name__ in _JITTED and cls.__module__.startswith(("jax", "flax", "equinox"))
    return getattr(x, "__wrapped__", None) if is_jitted else None


def _with_arrays(root: Any) -> Any:
    """Returns a tree whose boxes, such as variables of NNX, hold arrays instead of numbers."""
    if is_function(root) or not _has_numbers(root):
        return root

    def convert(path: Any, leaf: Any) -> Any:
        return jnp.asarray(leaf) if _is_boxed_number(path, leaf) else leaf

    return fmap_with_path(convert, root)


def _has_numbers(root: Any) -> bool:
    flags = []
    fmap_with_path(lambda path, leaf: flags.append(_is_boxed_number(path, leaf)), root)
    return any(flags)


def _is_boxed_number(path: Any, leaf: Any) -> bool:
    return isinstance(leaf, _NUMBERS) and bool(len(path)) and isinstance(path[-1], BoxKey)


def _leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Lists the leaves of a tree with their key paths, tied ones under each of their paths."""
    leaves: list[tuple[tuple[str, ...], Any]] = []

    def see(path: Any, leaf: Any) -> Any:
        leaves.append((_keys_of(path), leaf))
        return leaf

    try:
        fmap_with_path(see, tree, cache=None, is_leaf=_is_function_at)
    except (CycleError, RecursionError):  # submodules with a reference to their parent
        leaves.clear()
        fmap_with_path(see, tree, is_leaf=_is_function_at)
    return leaves


def _keys_of(path: Any) -> tuple[str, ...]:
    keys = (key for key in path if not isinstance(key, BoxKey))
    return tuple(map(str, keys))


def _is_function_at(path: Any, node: Any) -> bool:
    return is_function(node)


def _find_arrays(roots: tuple[Any, ...], modes: dict[str, bool]) -> list[tuple[str, Any]]:
    """Finds the arrays in all roots by name, in order; tied ones under each of their names."""
    arrays: list[tuple[str, Any]] = []
    seen: set[int] = set()

    def collect(tree: Any, prefix: tuple[str, ...]) -> None:
        for keys, leaf in _leaves(tree):
            at = (*prefix, *keys)
            if isinstance(leaf, _ARRAYS):
                arrays.append((".".join(at) or "value", leaf))
            elif isinstance(leaf, bool) and keys and keys[-1] == _MODE:
                modes[f"{'.'.join(at)}={leaf}"] = not leaf
            elif is_function(leaf) and id(leaf) not in seen:
                seen.add(id(leaf))
                for name, part in _parts(leaf):
                    collect(part, (*at, name) if name else at)
        if not is_function(tree):
            for node, name, mode in _modes_in(tree):
                modes[f"{type(node).__name__}.{name}={mode}"] = not mode

    for root in roots:
        collect(root, ())
    return arrays


def _modes_in(tree: Any) -> Iterator[tuple[Any, str, bool]]:
    """Yields the submodules of a tree that have mode attributes, as in NNX, with name and value."""
    for node in fcollect(tree, is_leaf=is_function):
        held = getattr(node, "__dict__", {})
        for name in _MODES:
            if isinstance(held.get(name), bool) and not dataclasses.is_dataclass(node):
                yield node, name, held[name]


def _trees(roots: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the trees among the roots, without the functions in them."""
    todo, seen = [*roots], set()
    while todo:
        tree = todo.pop()
        functions = [leaf for _, leaf in _leaves(tree) if is_function(leaf)]
        for function in functions:
            if id(function) not in seen:
                seen.add(id(function))
                todo += [{name: part} if name else part for name, part in _parts(function)]
        if not is_function(tree):
            strip = bool(functions)
            yield (
                fmap_with_path(
                    lambda _, x: None if is_function(x) else x, tree, is_leaf=_is_function_at
                )
                if strip
                else tree
            )


def _trained_ids(tree: Any) -> set[int]:
    """Returns the ids of the arrays of a tree that are trained."""
    ids = {id(array) for array in trainables(tree).values()}
    for variables in _variables(tree):  # the other collections of Linen are not trained
        beside = [leaf for name, part in variables.items() if name != "params"
                  for _, leaf in _leaves(part)]  # fmt: skip
        ids -= {id(leaf) for leaf in beside}
    return ids


def _variables(tree: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(tree, Mapping):
        if "params" in tree:
            yield tree
        else:
            for part in tree.values():
                if isinstance(part, Mapping):
                    yield from _variables(part)


def _parts(function: Any) -> list[tuple[str, Any]]:
    """Returns the arrays and objects that a function closes over, by name."""
    inner = unwrap(function)
    if inner is not None:
        return [("", inner)]
    if isinstance(function, types.MethodType):
        return [("", function.__self__), ("", function.__func__)]
    if isinstance(function, functools.partial):
        args = [(f"args.{i}", value) for i, value in enumerate(function.args)]
        parts = [("", function.func), *args, *function.keywords.items()]
    else:
        wrapped = getattr(function, "__wrapped__", None)
        of_library = frames.is_of(function.__code__.co_filename, _LIBRARIES)
        parts = [
            ("" if of_library or value is wrapped else name, value)
            for name, value in _cells(function)
        ]
        parts += [("" if is_function(value) else name, value) for name, value in _globals(function)]
    return [(name, value) for name, value in parts if _holds(value)]


def _holds(value: Any) -> bool:
    if is_function(value):
        return holds_arrays(value) or any(True for _ in _globals(value)) or bool(_parts(value))
    return holds_arrays(value)


def _cells(function: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        # a number stays a number: JAX identifies a reduction by its initial value
        if value is not function and not isinstance(value, np.generic):
            yield name, value


def _globals(function: Any, seen: set[int] | None = None) -> list[tuple[str, Any]]:
    """Returns the models and trees among the globals that a function uses."""
    if not isinstance(function, types.FunctionType):
        return []
    seen = set() if seen is None else seen
    seen.add(id(function))
    space = function.__globals__
    parts = []
    for name in _global_names(function.__code__):
        value = space.get(name)
        if value is None or isinstance(value, (type, types.ModuleType, *_ARRAYS)):
            continue
        if isinstance(value, types.FunctionType):
            is_near = value.__globals__ is space and id(value) not in seen
            if is_near and (_globals(value, seen) or holds_arrays(value)):
                parts.append((name, value))
        elif is_function(value):
            inner = unwrap(value)
            if inner is not None and id(inner) not in seen and (
                holds_arrays(inner) or _globals(inner, seen)
            ):  # fmt: skip
                parts.append((name, value))
        elif holds_arrays(value):
            parts.append((name, value))
    return parts


def _global_names(code: types.CodeType) -> Iterator[str]:
    read = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for name in code.co_names:  # also contains names of attributes
        if name in read and not hasattr(builtins, name):
            yield name
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)


def _is_inexact(x: Any) -> bool:
    return isinstance(x, _ARRAYS) and jnp.issubdtype(x.dtype, jnp.inexact)


def _arrays_within(objects: list[Any]) -> list[Any]:
    """Finds the arrays in attributes of objects, recursively and through containers."""
    arrays: list[Any] = []
    todo, seen = list(objects), set()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | str | bytes):
            continue
        seen.add(id(item))
        if isinstance(item, _ARRAYS):
            arrays.append(item)
        elif isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        elif is_function(item):
            todo += [part for _, part in _parts(item)]
        else:
            todo += getattr(item, "__dict__", {}).values()
            todo += [getattr(item, name, None) for name in getattr(type(item), "__slots__", ())]
    return arrays


class _Filling:
    """Rebuilds objects that hold arrays around other arrays."""

    def __init__(
        self, names: Mapping[int, str], arrays: Mapping[str, Any], train: bool | None
    ) -> None:
        self._names = names
        self._train = train
        self._arrays = arrays
        self._cache: dict[Any, Any] = {}
        self._functions: dict[int, Any] = {}
        self._spaces: dict[int, dict[str, Any]] = {}

    def tree(self, tree: Any) -> Any:
        made = fmap_with_path(self._leaf, tree, cache=self._cache, is_leaf=_is_function_at)
        if self._train is not None and not is_function(tree):
            for node, name, _ in _modes_in(made):
                object.__setattr__(node, name, not self._train)
        return made

    def _leaf(self, path: Any, leaf: Any) -> Any:
        if id(leaf) in self._names:
            return self._arrays[self._names[id(leaf)]]
        if isinstance(leaf, bool):
            is_mode = self._train is not None and len(path) and str(path[-1]) == _MODE
            return not self._train if is_mode else leaf
        return self._function(leaf) if is_function(leaf) else leaf

    def _function(self, function: Any) -> Any:
        filled = self._functions.get(id(function))
        if filled is None:
            self._functions[id(function)] = function  # if it refers to itself
            filled = self._make(function) if _parts(function) else function
            self._functions[id(function)] = filled
        return filled

    def _make(self, function: Any) -> Any:
        inner = unwrap(function)
        if inner is not None:
            return self.tree(inner)
        if isinstance(function, types.MethodType):
            return types.MethodType(self.tree(function.__func__), self.tree(function.__self__))
        if isinstance(function, functools.partial):
            args = [self.tree(x) if _holds(x) else x for x in function.args]
            keywords = {k: self.tree(x) if _holds(x) else x for k, x in function.keywords.items()}
            return functools.partial(self.tree(function.func), *args, **keywords)
        cells = tuple(self._cell(cell, function) for cell in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__, self._space(function), function.__name__, function.__defaults__,
            cells,
        )  # fmt: skip
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        return made

    def _cell(self, cell: Any, function: Any) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            return cell
        if value is function or not _holds(value):
            return cell
        return types.CellType(self.tree(value))

    def _space(self, function: Any) -> dict[str, Any]:
        """Returns the globals of a function with some of them replaced."""
        original: dict[str, Any] = function.__globals__
        parts = _globals(function)
        if not parts:
            return original
        if id(original) not in self._spaces:
            self._spaces[id(original)] = dict(original)
        space = self._spaces[id(original)]
        for name, value in parts:
            if space[name] is value:
                space[name] = self.tree(value)
        return space
