"""The base of the dialects for JAX and libraries built on it."""

from __future__ import annotations

import ast
import base64
import math
import operator
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import ConversionError, to_numpy
from fmapper.programs import Call, Program
from fmapper.translation import (
    Derived,
    Dialect,
    Embedded,
    Functions,
    Helper,
    Layer,
    Statement,
    elements,
    expr,
    helpers_of,
    literal,
    names_in,
    print_docstring,
    print_imports,
    text,
)
from fmapper_adapters.jax.aten import table as lowerings
from fmapper_adapters.jax.translation import layers, table
from fmapper_adapters.jax.translation.functions import derived
from fmapper_adapters.jax.translation.layers.slices import Slices
from fmapper_adapters.jax.translation.print_numbers import DRAWS

_PLACES = {
    "jnp": jnp,
    "jax.lax": jax.lax,
    "jax.nn": jax.nn,
    "jax.scipy.special": jax.scipy.special,
    "jnp.linalg": jnp.linalg,
    "jax.lax.linalg": jax.lax.linalg,
    "jnp.fft": jnp.fft,
    "math": math,
    "operator": operator,
    "np": np,
}
_OVERRIDES = {
    "default_dtype": 'def _default_dtype():\n    return np.dtype("float32")',
}


_IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "math": "import math",
    "partial": "from functools import partial",
    "NamedTuple": "from typing import NamedTuple",
    "base64": "import base64",
    "zlib": "import zlib",
}
_RESERVED = frozenset(
    {
        "load_weights",
        "take_apart",
        "blocks_of",
        "names_of",
        "renamed",
        "sources_of",
        "freeze",
        "SLICES",
        "RENAMED",
        "ARRAYS",
        "FROZEN",
    }
)
_MOST = 64  # elements of an array that is written out
_FEW = 8  # also where the state dict has it
_NEAR = 1e-7  # how far a frequency in float32 may be from the exact one: a bit of an angle
_SHIFTED = 5e-5  # how far an angle may be where no state dict has the table
_ROUNDED = 2e-7  # how far a sine in float32 may be from the exact one


class JaxDialect(Dialect):
    """The base of the files for JAX, and for libraries on top of it.

    Attributes:
        title: What the files are for.
        own_imports: Names of the library -> the statements that import them.
        own_helpers: Functions and classes of its own that a file may have.

    Args:
        slices: Arrays of the model of which the program has slices.
    """

    title: ClassVar[str] = "JAX"
    ones_like: ClassVar[str] = "jnp.ones_like({0})"
    # Special cases -> their code as it is for other numbers.
    own_imports: ClassVar[Mapping[str, str]] = {}
    own_helpers: ClassVar[Mapping[str, Helper]] = {}

    def __init__(self, slices: Slices | None = None) -> None:
        self.slices = slices or {}
        self._table = table.load()
        self._embedded = Embedded(_PLACES, _OVERRIDES)
        self._derived = Functions(derived.function_name, derived.function_with_rules)

    def reserved_names(self) -> frozenset[str]:
        """Returns the names of imports and helpers."""
        own = {*self.own_imports, *self.own_helpers, *table.helpers()}
        return _RESERVED | _IMPORTS.keys() | own | self._derived.helpers.keys()

    def printer(self, op: str) -> Any:
        """Returns the printer of an operation."""
        return self._table.find(op)

    def helper(self, name: str) -> Helper | None:
        """Returns a function that code may call by its name."""
        if name in self.own_helpers:
            return self.own_helpers[name]
        if name in self._embedded.helpers:
            return self._embedded.helpers[name]
        if name in self._derived.helpers:
            return self._derived.helpers[name]
        source = table.helpers().get(name)
        return None if source is None else Helper(source)

    def layer_of_unit(self, structure: Any, unit: Any) -> Layer | None:
        """Returns a layer, in the terms of NNX."""
        return layers.layer_of_unit(structure, unit)

    def layer_of_call(self, structure: Any, unit: Any, call: Any) -> Layer | None:
        """Returns a layer, in the terms of NNX."""
        return layers.layer_of_call(structure, unit, call)

    def fallback(self, call: Call) -> str:
        """Returns the name of the helper that lowers a call.

        Raises:
            ConversionError: There is none, it draws random numbers, or it cannot be written.
        """
        lowering = lowerings.find(call.op, {})
        if lowering is None:
            raise ConversionError(f"{call.op} has no lowering to JAX")
        if lowering.random is True and not self.draws(call.op):
            raise ConversionError(
                f"{call.module or 'the model'}: {call.op} draws random numbers ({call.source}) "
                "that the file and torch cannot both be given, to compare them. Draw them outside "
                "and give them to the model, or use convert without structure=True"
            )
        return self._embedded.add(lowering.function)

    def call_derived(
        self, function: Derived, given: Sequence[ast.expr], taken: Collection[str]
    ) -> ast.expr:
        """Returns `straight_through(x)`."""
        return self._derived.call(function, given, {*taken, *self.reserved_names()})

    def draws(self, op: str) -> bool:
        """Returns whether an operation draws numbers that the proof gives to both sides."""
        return op.rpartition(".")[0] in DRAWS

    def dtype(self, name: str) -> ast.expr:
        """Returns `jnp.float32` and its like."""
        return table.dtype_code(name)

    def read_array(self, node: ast.expr, order: tuple[int, ...] | None) -> ast.expr:
        """Returns the code that reads an array, with its dimensions permuted."""
        if order is None:
            return node
        return expr("{0}.T", node) if order == (1, 0) else expr("{0}.transpose({1})", node, order)

    def write_array(self, node: ast.expr, value: ast.expr) -> Statement:
        """Raises: what cannot change has no such statement.

        Raises:
            ConversionError: Always.
        """
        raise ConversionError(f"{ast.unparse(node)} changes in a call, which is not possible there")

    def stack(self, node: ast.expr, dim: int) -> ast.expr:
        """Returns `jnp.stack(ys)`."""
        return expr("jnp.stack({0}, {1})", node, dim) if dim else expr("jnp.stack({0})", node)

    def rows(self, node: ast.expr, dim: int, *, reverse: bool) -> ast.expr:
        """Returns the array itself, with a dimension in front, or reversed along that."""
        rows = expr("jnp.moveaxis({0}, {1}, 0)", node, dim) if dim else node
        return expr("jnp.flip({0}, 0)", rows) if reverse else rows

    def constant(self, array: Any, *, saved: bool = False) -> ast.expr:
        """Returns the code for an array: a computation, its elements, or its bytes.

        Args:
            array: The array.
            saved: Whether the state dict has its values: a computation may round otherwise.
        """
        values = np.asarray(to_numpy(array))
        dtype = self.dtype(values.dtype.name)
        known = self.fill(array) or _compute(values, dtype, saved=saved)
        if known is not None:
            return known
        if values.size <= _MOST and values.dtype.kind in "biuf" and np.isfinite(values).all():
            if text(dtype) == "jnp.float32":  # which may be all that JAX has of float64
                values = values.astype(np.float32)
            return expr("jnp.array({0}, dtype={1})", literal(elements(values)), dtype)
        shape = tuple(int(s) for s in values.shape)
        return expr("jnp.array({0}.reshape({1}))", _print_bytes(values), shape)

    def is_loaded(self, array: Any, *, varies: bool) -> bool:
        """Returns whether an array is not computed, and neither small nor alike in all modules."""
        values = np.asarray(to_numpy(array))
        if (values.size <= _FEW and not varies) or values.dtype.kind not in "biufc":
            return False
        dtype = self.dtype(values.dtype.name)
        return self.fill(array) is None and _compute(values, dtype) is None

    def zeros(self, array: Any) -> ast.expr:
        """Returns zeros in the place of an array."""
        shape = tuple(int(size) for size in array.shape)
        return expr("jnp.zeros({0}, {1})", shape, self.dtype(to_numpy(array).dtype.name))

    def fill(self, array: Any) -> ast.expr | None:
        """Returns the code for a constant array; None for another."""
        values = np.asarray(to_numpy(array))
        return _fill(values, self.dtype(values.dtype.name))

    def assemble(self, draft: Any, name: str, blocks: Sequence[str]) -> str:
        """Returns a file: its docstring, imports, helpers, records, and these blocks.

        Args:
            draft: The draft.
            name: The model.
            blocks: Its classes and functions.
        """
        records = [_record(cls, fields) for cls, fields in draft.records.items()]
        body = "\n\n\n".join([*records, *blocks])
        everything = "\n\n\n".join([*helpers_of(body, self.helper), body])
        used = names_in(everything)
        known = {**_IMPORTS, **self.own_imports, **self._embedded.imports}
        imports = print_imports(line for name, line in known.items() if name in used)
        origin = draft.program.types.get("", "")
        origin = origin if re.fullmatch(r"[\w.<>]+", origin) else ""
        beginning = f"{name} for {self.title}{f', from {origin}' if origin else ''}"
        head = print_docstring(f"{beginning}; written by fmapper.", draft.program.lacks_training)
        return f"{head}\n\n{imports}\n\n\n{everything}\n"


def refuse_changes(program: Program, title: str) -> None:
    """Raises for a program that changes arrays, where what is written for it cannot.

    Args:
        program: The program.
        title: What is written for.

    Raises:
        ConversionError: It does; names the arrays.
    """
    names = [str(one.target) for one in program.outputs if one.kind == "buffer"]
    if names:
        several = f" and {len(names) - 2} more" if len(names) > 2 else ""
        raise ConversionError(
            f"a call changes {', '.join(names[:2])}{several}, and the functions of a file for "
            f"{title} change nothing. Translate it for evaluation (train=False, --eval), or to flax"
        )


def _fill(values: Any, dtype: ast.expr) -> ast.expr | None:
    """Returns the code for a constant array."""
    if values.size == 0 or values.dtype.kind not in "biuf":
        return None
    first = values.reshape(-1)[0]
    if not (values == first).all():
        return None
    shape = tuple(int(size) for size in values.shape)
    if values.ndim == 0:
        return expr("jnp.array({0}, dtype={1})", _number(first), dtype)
    if first == 0 and not np.signbit(np.asarray(values, np.float64)).any():
        return expr("jnp.zeros({0}, {1})", shape, dtype)
    if first == 1:
        return expr("jnp.ones({0}, {1})", shape, dtype)
    return expr("jnp.full({0}, {1}, {2})", shape, _number(first), dtype)


def _number(value: Any) -> ast.expr:
    """Returns the code for a number of NumPy."""
    if value.dtype.kind == "f" and not np.isfinite(value):
        return expr("jnp.nan" if np.isnan(value) else "jnp.inf" if value > 0 else "-jnp.inf")
    return literal(_shortest(value))


def _shortest(value: Any) -> Any:
    """Returns a number of NumPy with the fewest digits that give it: `1e-06` of a float32."""
    if value.dtype.name not in ("float16", "float32"):
        return value.item()
    short = float(str(value))
    return short if value.dtype.type(short) == value else value.item()


def _compute(values: Any, dtype: ast.expr, *, saved: bool = True) -> ast.expr | None:
    """Returns the code that computes an array: positions, a triangle, or rotary frequencies."""
    flat = values.reshape(-1)
    if values.dtype.kind in "iu" and values.size > 2:
        step = int(flat[1]) - int(flat[0])
        if step and (np.diff(flat.astype(np.int64)) == step).all():
            start, stop = int(flat[0]), int(flat[-1]) + step
            given = (start, stop, step) if step != 1 else (start, stop) if start else (stop,)
            node = expr(f"jnp.arange({', '.join(map(repr, given))}, dtype={{0}})", dtype)
            return node if values.ndim == 1 else expr("{0}.reshape({1})", node, tuple(values.shape))
    if values.ndim >= 2 and values.shape[-1] > 2 and values.dtype.kind in "biuf":
        square = np.broadcast_to(np.tri(*values.shape[-2:]), values.shape)
        if (values == square).all():
            return expr("jnp.tril(jnp.ones({0}, {1}))", tuple(values.shape), dtype)
        width = int(np.count_nonzero(flat[-values.shape[-1] :]))  # of a band below the diagonal
        if (values == np.triu(square, 1 - width)).all():
            ones = expr("jnp.ones({0}, {1})", tuple(values.shape), dtype)
            return expr("jnp.tril(jnp.triu({0}, {1}))", ones, 1 - width)
        triangle = _compute_triangle(values, dtype) if values.shape[-2] > 1 else None
        if triangle is not None:
            return triangle
        if values.dtype == np.float32 and values.size > _MOST:
            found = _compute_sinusoids(values, saved=saved)
            if found is not None:
                return found
    if values.dtype == np.float32 and values.ndim == 1 and values.size > 2 and flat[0] == 1:
        size = values.size
        if flat[-1] > 0:
            base = float(np.float64(flat[1]) ** -size)
            for guess in (round(base), round(base, 2), round(base / 100) * 100):
                if guess > 1:
                    wanted = 1.0 / guess ** (np.arange(0, 2 * size, 2) / (2 * size))
                    if np.allclose(values, wanted.astype(np.float32), rtol=3e-7, atol=0):
                        power = f"jnp.arange(0, {2 * size}, 2) / {2 * size}"
                        return expr(f"1.0 / {float(guess)!r} ** ({power})")
    return None


def _compute_triangle(values: Any, dtype: ast.expr) -> ast.expr | None:
    """Returns the code for an array of one number up to a diagonal and another beyond it."""
    shape = tuple(int(size) for size in values.shape)
    first = values.reshape(-1, *shape[-2:])[0]
    low, high = first[-1, 0], first[0, -1]
    for diagonal in (0, -1, 1):
        is_low = np.tri(shape[-2], shape[-1], diagonal, dtype=bool)
        if np.broadcast_to(np.where(is_low, low, high), shape).tobytes() != values.tobytes():
            continue
        for function, zero, number, begin in (
            ("triu", low, high, diagonal + 1),
            ("tril", high, low, diagonal),
        ):
            if not any(zero.tobytes()):
                full = _fill(np.broadcast_to(number, shape), dtype)
                return expr(f"jnp.{function}({{0}}{f', {begin}' if begin else ''})", full)
        at = f", {diagonal}" if diagonal else ""
        numbers = (_fill(np.broadcast_to(one, shape), dtype) for one in (low, high))
        is_low_code = expr(f"jnp.tri({{0}}, {{1}}{at}, dtype=bool)", *shape[-2:])
        return expr("jnp.where({0}, {1}, {2})", is_low_code, *numbers)
    return None


def _print_bytes(values: Any) -> ast.expr:
    """Returns the code for the elements of an array, from its bytes."""
    data = base64.b85encode(zlib.compress(values.tobytes(), 9)).decode()
    return expr("from_text({0}, {1})", data, values.dtype.name)


def _compute_sinusoids(values: Any, *, saved: bool) -> ast.expr | None:
    """Returns the code for a table of the sines and cosines of positions."""
    rows = values.reshape(-1, values.shape[-1])
    count, width = rows.shape
    if count != values.shape[-2] or count < 4 or width % 2 or np.abs(rows).max() > 1:
        return None
    empty = np.flatnonzero(~rows.any(axis=1))  # that for padding
    if len(empty) > 1 or 0 in empty:
        return None
    for interleaved in (False, True):
        half = width // 2
        sines = rows[:, ::2] if interleaved else rows[:, :half]
        cosines = rows[:, 1::2] if interleaved else rows[:, half:]
        options = ", interleaved=True" if interleaved else ""
        frequencies = _find_frequencies(sines, cosines, np.delete(np.arange(count), empty))
        base = None if len(empty) else _find_base(sines, cosines)
        if frequencies is not None:
            given = _print_frequencies(frequencies, _NEAR if saved else _SHIFTED / count)
            node = expr(f"sinusoids({{0}}, {{1}}{options})", count, given)
        elif base is not None:
            node = expr(f"exact_sinusoids({{0}}, {{1}}, {{2}}{options})", count, width, base)
        else:
            continue
        if len(empty):
            node = expr("{0}.at[{1}].set(0.0)", node, int(empty[0]))
        return node if values.ndim == 2 else expr("{0}.reshape({1})", node, tuple(values.shape))
    return None


def _find_frequencies(sines: Any, cosines: Any, kept: Any) -> Any:
    """Returns the frequencies in float32 that give a table, to the bit; None if there are none."""
    at = int(kept[1])
    near = np.arctan2(sines[at].astype(np.float64), cosines[at].astype(np.float64)) / at
    near = near.astype(np.float32)
    if sines[0].any() or (cosines[0] != 1).any() or (near <= 0).any():
        return None
    found, least = near, np.full(near.shape, np.inf)
    positions = kept.astype(np.float32)[:, None]
    for step in (0, 1, -1, 2, -2, 3, -3):  # the last bits are in doubt after one row
        tried = (near.view(np.int32) + step).view(np.float32)
        angles = (positions * tried).astype(np.float64)
        apart = np.maximum(
            np.abs(np.sin(angles) - sines[kept]), np.abs(np.cos(angles) - cosines[kept])
        ).max(axis=0)
        found, least = np.where(apart < least, tried, found), np.minimum(apart, least)
    return found if (least < _ROUNDED).all() else None


def _find_base(sines: Any, cosines: Any) -> float | None:
    """Returns the base of a table that is computed in float64, if that gives the same bits."""
    count, half = sines.shape
    near = np.arctan2(sines[1].astype(np.float64), cosines[1].astype(np.float64))
    if half < 2 or near[1] <= 0:
        return None
    base = float(round(near[1] ** -half))
    if base <= 1:
        return None
    angles = np.arange(count)[:, None] / base ** (np.arange(half) / half)
    is_same = (np.sin(angles).astype(np.float32) == sines).all()
    return base if is_same and (np.cos(angles).astype(np.float32) == cosines).all() else None


def _print_frequencies(frequencies: Any, near: float) -> ast.expr:
    """Returns the code for frequencies: their progression if that is as near as this."""
    size = len(frequencies)
    for count in (size, size - 1):
        if size > 1 and count and frequencies[0] == 1:
            base = round(float(np.float64(frequencies[-1]) ** (-count / (size - 1))), -1)
            if np.abs(base ** -(np.arange(size) / count) - frequencies).max() <= near:
                return expr(f"{float(base)!r} ** -(np.arange({size}) / {count})")
    if size <= _FEW:
        return literal([float(str(one)) for one in frequencies])
    return _print_bytes(frequencies)


def _record(cls: str, fields: Mapping[str, str]) -> str:
    lines = [
        f"class {cls}(NamedTuple):",
        *(f"    {field}: {kind or 'jax.Array'}" for field, kind in fields.items()),
    ]
    return "\n".join(lines if fields else [*lines, "    pass"])
