"""Finds the sizes that may vary, and traces shapes with symbols for them."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import export

from fmapper import ConversionError
from fmapper.programs import Guard, names_in, size_of
from fmapper_adapters.jax import _private
from fmapper_adapters.jax.record import guards as _guards
from fmapper_adapters.jax.record import treespec

_MADE = re.compile(r"s\d+")  # names that this module gives to sizes
Trace = Callable[[list[Any]], Any]
Symbols = dict[str, tuple[int | None, int | None]]
# The examples: their structure, their arrays, which leaves are not arrays, and the names of the
# parameters of the signature.
Examples = tuple[Any, list[Any], list[bool], list[str]]


@dataclass
class Traced:
    """A traced function.

    Attributes:
        jaxpr: The jaxpr.
        symbols: The sizes in it that may vary, with bounds.
        guards: The conditions on them.
        fixed: Sizes that were requested to vary but do not: the array, the dimension, the reason.
    """

    jaxpr: Any
    symbols: Symbols = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    fixed: list[tuple[int, int, str]] = field(default_factory=list)


Places = Mapping[tuple[int, int], str]  # why the dimension of an array does not vary


def trace_sizes(trace: Trace, examples: Examples, dynamic_shapes: Any) -> Traced:
    """Returns the jaxpr for the shapes of the examples, and the sizes in it that may vary.

    Python's questions about such a size are answered for the examples; see `guards`. A size for
    which only one value remains is fixed.

    Args:
        trace: Returns the jaxpr for shapes.
        examples: The examples and their names.
        dynamic_shapes: None; `auto` for all sizes that the code does not fix, found by trying; or
            for each input, in the structure of the inputs or by name, a value that `torch.export`
            accepts (a dict or a tuple of sizes, None for a fixed one) or `jax.export` (`"b, _"`).

    Raises:
        ConversionError: The function cannot be recorded, or the sizes do not fit the examples.
    """
    arrays = examples[1]
    shapes = [_struct(x.shape, x.dtype) for x in arrays]
    if dynamic_shapes is None:
        return Traced(trace(shapes))
    if isinstance(dynamic_shapes, str) and dynamic_shapes == "auto":
        options = (getattr(dynamic_shapes, attribute, {}) for attribute in ("fixed", "names"))
        return _auto(trace, shapes, *options)
    bounds: Symbols = {}
    texts = _Texts(bounds).of(examples, dynamic_shapes)
    try:
        return _trace_with_guards(trace, shapes, texts, bounds)
    except ConversionError:
        if not any(texts):
            raise
    return _trace_with_guards(trace, shapes, texts, bounds, deep=True)


def read_sizes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: list[str], dynamic_shapes: Any
) -> tuple[list[tuple[int | str, ...]], Symbols]:
    """Returns the shapes of the arrays in inputs with symbols, and the bounds of these.

    Args:
        args: The inputs by position.
        kwargs: The inputs by keyword.
        names: The names of the former.
        dynamic_shapes: See `trace_sizes`.

    Raises:
        ConversionError: The sizes do not fit the inputs.
    """
    leaves, tree = jax.tree.flatten((args, dict(kwargs)), is_leaf=lambda x: x is None)
    arrays = [x for x in leaves if hasattr(x, "shape")]
    static = [not hasattr(x, "shape") for x in leaves]
    bounds: Symbols = {}
    texts = _Texts(bounds).of((treespec.tree_spec(tree), arrays, static, names), dynamic_shapes)
    shapes = [_struct(tuple(x.shape), "float32") for x in arrays]
    symbolic, _ = _symbolic(shapes, texts, bounds)
    _check(symbolic, shapes, bounds)
    sized = [[str(x) if _is_symbol(x) else x for x in struct.shape] for struct in symbolic]
    return [*map(tuple, sized)], bounds


def _trace_with_guards(
    trace: Trace,
    shapes: list[Any],
    texts: list[str | None],
    bounds: Symbols,
    *,
    deep: bool = False,
) -> Traced:
    """Traces with symbolic shapes, with guards for Python's questions about sizes.

    Raises:
        ConversionError: The function cannot be recorded, or the sizes do not fit the examples.
    """
    traced = Traced(None)
    while True:
        symbols = dict(bounds)
        symbolic, scope = _symbolic(shapes, texts, symbols)
        sizes = _check(symbolic, shapes, symbols)
        questions = _guards.Questions(scope, sizes, deep=deep)
        try:
            with questions, _functions_take_sizes():
                traced.jaxpr = trace(symbolic)
        except ConversionError:
            # with fixed sizes the answers so far have been inconsistent with it
            if not questions.fixed_sizes():
                raise
        fixed = questions.fixed_sizes()
        if not fixed:
            traced.symbols, traced.guards = symbols, questions.guards()
            return traced
        for name, (value, question) in fixed.items():
            bounds.pop(name, None)
            why = re.sub(rf"\b{name}\b", "it", question) if _MADE.fullmatch(name) else question
            for i, struct in enumerate(symbolic):
                traced.fixed += [
                    (i, d, why if isinstance(value, int) else f"it is {value}: {why}")
                    for d, size in enumerate(struct.shape) if str(size) == name
                ]  # fmt: skip
            texts = [text and re.sub(rf"\b{name}\b", str(value), text) for text in texts]


@contextlib.contextmanager
def _functions_take_sizes() -> Iterator[None]:
    """Lets functions of JAX that need numbers accept symbols within the block."""
    changed = {"scan": _scan_of_sizes(jax.lax.scan), "pmean": _mean_of_sizes(jax.lax.pmean)}
    before = {name: getattr(jax.lax, name) for name in changed}
    for name, function in changed.items():
        setattr(jax.lax, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(jax.lax, name, function)


def _scan_of_sizes(scan: Any) -> Any:
    """Wraps `scan` to take its length from `xs` if `length` is a symbol, as in Haiku."""

    @functools.wraps(scan)
    def without_symbol(
        f: Any, init: Any, xs: Any = None, length: Any = None, *rest: Any, **options: Any
    ) -> Any:
        lengths = [size for x in jax.tree.leaves(xs) for size in getattr(x, "shape", ())[:1]]
        if _is_symbol(length) and any(_is_symbol(size) and size == length for size in lengths):
            length = None
        return scan(f, init, xs, length, *rest, **options)

    return without_symbol


def _mean_of_sizes(pmean: Any) -> Any:
    """Wraps `pmean` to accept an axis of `vmap` whose size is a symbol."""

    @functools.wraps(pmean)
    def mean(x: Any, axis_name: Any, **options: Any) -> Any:
        axes = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
        if options or any(isinstance(axis, int) for axis in axes):
            return pmean(x, axis_name, **options)
        size = math.prod(_private.size_of_axis(axis) for axis in axes)
        if not _is_symbol(size):
            return pmean(x, axis_name)
        psum: Any = jax.lax.psum
        return jax.tree.map(lambda total: total / size, psum(x, axis_name))

    return mean


def _is_symbol(size: Any) -> bool:
    return export.is_symbolic_dim(size)


def _check(symbolic: list[Any], shapes: list[Any], bounds: Symbols) -> dict[str, int]:
    """Checks that the examples have these shapes.

    Returns:
        The sizes of the examples.

    Raises:
        ConversionError: A shape differs, or a size occurs only within expressions.
    """
    sizes: dict[str, int] = {}
    pairs = [
        (size, n)
        for struct, shape in zip(symbolic, shapes, strict=True)
        for size, n in zip(struct.shape, shape.shape, strict=True)
        if export.is_symbolic_dim(size)
    ]
    for size, n in pairs:
        if str(size) in bounds:
            sizes.setdefault(str(size), n)
    for name in bounds:
        if name not in sizes:
            raise ConversionError(
                f"dynamic_shapes: {name} occurs only in expressions; one dimension must be {name} "
                f"itself"
            )
    for size, n in pairs:
        if size_of(str(size), sizes) != n:
            assumed = ", ".join(f"{name} is {value}" for name, value in sizes.items())
            raise ConversionError(
                f"dynamic_shapes: a size of the examples is {n}, but it should be {size}, and "
                f"{assumed}"
            )
    return sizes


def _symbolic(shapes: list[Any], texts: list[str | None], bounds: Symbols) -> tuple[list[Any], Any]:
    """Returns the shapes with symbols, and the scope of the symbols."""
    limits = [f"{name} >= {low}" for name, (low, _) in bounds.items() if low is not None]
    limits += [f"{name} <= {high}" for name, (_, high) in bounds.items() if high is not None]
    try:
        scope = export.SymbolicScope(limits)
        structs = [
            shape if text is None else export.symbolic_args_specs(shape, text, scope=scope)
            for shape, text in zip(shapes, texts, strict=True)
        ]
    except ValueError as error:
        raise ConversionError(f"dynamic_shapes: {_first_line(error)}") from error
    for struct in structs:
        for size in struct.shape:
            for name in names_in(size) if export.is_symbolic_dim(size) else ():
                bounds.setdefault(name, (None, None))
    return structs, scope


class _Texts:
    """The shapes of the inputs as texts, from the user's `dynamic_shapes`."""

    def __init__(self, bounds: Symbols) -> None:
        self._bounds = bounds
        self._fresh = 0

    def of(self, examples: Examples, given: Any) -> list[str | None]:
        spec, arrays, static, names = examples
        rest = iter(arrays)
        self._arrays = [None if fixed else next(rest) for fixed in static]
        self._next = 0
        positional, named = spec.children
        texts: list[str | None] = []
        taken = set()
        for i, child in enumerate(positional.children):
            inner = None
            if isinstance(given, Mapping):
                key = names[i] if i < len(names) else i
                taken.add(key)
                inner = given.get(key)
            elif isinstance(given, str):
                inner = given
            elif i < len(given):
                inner = given[i]
            texts += self._below(child, inner)
        for key, child in zip(named.keys, named.children, strict=True):
            taken.add(key)
            texts += self._below(child, given.get(key) if isinstance(given, Mapping) else None)
        if isinstance(given, Mapping) and set(given) - taken:
            unknown = ", ".join(map(str, sorted(set(given) - taken, key=str)))
            raise ConversionError(
                f"dynamic_shapes: {unknown} is not an input; there are {', '.join(map(str, taken))}"
            )
        return [text for text, fixed in zip(texts, static, strict=True) if not fixed]

    def _below(self, spec: Any, given: Any) -> list[str | None]:
        if spec.kind == "leaf":
            array = self._arrays[self._next]
            self._next += 1
            return [None if array is None else self._text(given, array)]
        texts: list[str | None] = []
        for i, child in enumerate(spec.children):
            inner = given
            if isinstance(given, Mapping):
                inner = given.get(spec.keys[i] if spec.keys else i)
            elif isinstance(given, tuple | list):
                inner = given[i]
            texts += self._below(child, inner)
        return texts

    def _text(self, given: Any, array: Any) -> str | None:
        if given is None or isinstance(given, str):
            return given
        if isinstance(given, Mapping):
            sizes = [given.get(i, given.get(i - array.ndim)) for i in range(array.ndim)]
        elif isinstance(given, tuple | list):
            sizes = list(given)
        else:
            raise ConversionError(f"dynamic_shapes: {given!r} is not a dict, a tuple or a string")
        if len(sizes) != array.ndim:
            raise ConversionError(
                f"dynamic_shapes: {given!r} has {len(sizes)} dimensions, but an input of shape "
                f"{tuple(array.shape)} has {array.ndim}"
            )
        return ", ".join(map(self._size, sizes)) + ("," if len(sizes) == 1 else "")

    def _size(self, size: Any) -> str:
        if size is None or isinstance(size, int):
            return "_"
        if isinstance(size, str):
            return size
        kind = getattr(getattr(size, "type", None), "name", "")  # hints of torch, such as Dim.AUTO
        if kind in ("AUTO", "DYNAMIC"):
            self._fresh += 1
            return f"d{self._fresh}"
        if kind == "STATIC":
            return "_"
        name = getattr(size, "__name__", None)  # a Dim of torch
        if name is None:
            raise ConversionError(f"dynamic_shapes: {size!r} is not a size")
        if str(name).isidentifier():
            low, high = getattr(size, "min", None), getattr(size, "max", None)
            self._bounds.setdefault(
                name,
                (low if isinstance(low, int) and low > 1 else None, _finite(high)),
            )
        return str(name)


def _finite(high: Any) -> int | None:
    return high if isinstance(high, int) and high < 2**31 else None


# --- auto -----------------------------------------------------------------------------------------


def _auto(trace: Trace, shapes: list[Any], decided: Places, given: Places) -> Traced:
    """Makes every size vary that can: all at once, else one by one, first dimensions first.

    If the code requires it, a size that two inputs have in common is one size.

    Args:
        trace: Returns the jaxpr for shapes.
        shapes: The shapes of the examples.
        decided: Dimensions that cannot vary -> the reason; empty if it was reported before.
        given: Names of dimensions to try first, from another recording.
    """
    fixed = trace(shapes)  # first reports what is wrong with the examples themselves
    reasons = [(i, d, why) for (i, d), why in decided.items() if why]
    places = [(i, d) for i, s in enumerate(shapes) for d, n in enumerate(s.shape)
              if n > 1 and (i, d) not in decided]  # fmt: skip
    places.sort(key=lambda place: place[1])
    if not places:
        return Traced(fixed, fixed=reasons)
    distinct = {place: _letter(i) for i, place in enumerate(places)}
    sizes = {n: _letter(i) for i, n in enumerate(dict.fromkeys(
        shapes[i].shape[d] for i, d in places))}  # fmt: skip
    shared = {place: sizes[shapes[place[0]].shape[place[1]]] for place in places}
    for names in (given, distinct, shared):
        if not names:
            continue
        try:
            traced = _try_dims(trace, shapes, names, deep=names is given)
        except ConversionError:  # the code fixes one of them
            continue
        traced.fixed += reasons
        return traced
    best = Traced(fixed)
    kept: dict[tuple[int, int], str] = {}
    for place in places:
        if place in kept:
            continue
        alone = {place: distinct[place]}
        group = {p: distinct[place] for p in places if shared[p] == shared[place] and p not in kept}
        first = {p: name for p, name in group.items() if p[1] == place[1]}
        reason = ""
        for added, deep in ((alone, False), (first, False), (group, False), (alone, True)):
            try:
                best = _try_dims(trace, shapes, {**kept, **added}, deep=deep)
            except ConversionError as error:
                reason = reason or _reason(error)
            else:
                kept = {**kept, **added}
                break
        else:
            reasons.append((*place, reason))
    best.fixed += reasons
    return best


def _try_dims(trace: Trace, shapes: list[Any], names: Places, *, deep: bool = False) -> Traced:
    """Returns the jaxpr where some dimensions have names.

    Raises:
        ConversionError: The code fixes one of them.
    """
    texts: list[str | None] = []
    for i, shape in enumerate(shapes):
        words = [names.get((i, d), "_") for d in range(len(shape.shape))]
        texts.append(", ".join(words) + ("," if len(words) == 1 else "") if words else None)
    return _trace_with_guards(trace, shapes, texts, {}, deep=deep)


def _letter(i: int) -> str:
    return f"s{i}"


def _struct(shape: Any, dtype: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(shape, dtype)


def _reason(error: BaseException) -> str:
    """Returns the first line of an error, without the name of the model."""
    line = _first_line(error)
    return line.partition(" cannot be recorded")[2].removeprefix(":").strip() or line


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
