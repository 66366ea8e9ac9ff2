"""Example inputs: parsed from a short expression, and resized to any batch size."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from fmapper.backends.discovery import adapter_of
from fmapper.errors import ProfileError, TargetError
from fmapper.files.dtypes import itemsize
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import KeyPath, format_keys
from fmapper.tree.walk import visit

_SUFFIX = re.compile(r"\)\s*:\s*([a-z]+\d*)")
_GRAMMAR = (
    "randn(1, 3, 32, 32), rand(...), zeros(...), ones(...), arange(n), randint(low, high, shape), "
    "with dtype=float16 or the suffix :float16, and tuples of those"
)


def read_inputs(text: str, *, seed: int = 0) -> tuple[Any, ...]:
    """Reads NumPy arrays from an expression like `randn(1, 3, 32, 32), zeros(1, 6)`.

    The expression is not evaluated as Python: it may only call the functions below with literals.
    Floating arrays are float32 and integers int64 unless a dtype is given.

    Args:
        text: `randn`, `rand` (uniform from 0 to 1), `zeros`, `ones` and `arange` take the shape as
            numbers or as a tuple, `randint` takes low, high and the shape. `dtype=float16` or the
            suffix `:float16` sets the dtype. Numbers, strings, True, False and None are literals.
        seed: The seed of the random numbers.

    Returns:
        The inputs as a tuple, also if there is only one.

    Raises:
        TargetError: The expression is invalid; names the part.

    Examples:
        >>> x, n = read_inputs("zeros(2, 3):float16, 4")
        >>> x.shape, x.dtype.name, n
        ((2, 3), 'float16', 4)
    """
    try:
        body = ast.parse(_SUFFIX.sub(r", dtype=\1)", text.strip()), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise TargetError(
            f"{text!r} cannot be read as inputs: {error}. Write {_GRAMMAR}."
        ) from None
    reader = _Reader(text, seed)
    if isinstance(body, ast.Tuple):
        return tuple(reader.value(part) for part in body.elts)
    return (reader.value(body),)


class _Reader:
    """Converts the syntax tree of an expression to values."""

    def __init__(self, text: str, seed: int) -> None:
        import numpy as np  # the core does not require NumPy

        self.text = text
        self.np: Any = np
        self.random: Any = np.random.default_rng(seed)

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            return self._array(node)
        if isinstance(node, ast.Tuple | ast.List):
            parts = [self.value(part) for part in node.elts]
            return tuple(parts) if isinstance(node, ast.Tuple) else parts
        if isinstance(node, ast.Dict):
            keys = [self._literal(key) for key in node.keys]
            return dict(zip(keys, map(self.value, node.values), strict=True))
        return self._literal(node)

    def _literal(self, node: ast.expr | None) -> Any:
        if node is None:
            raise self._wrong("** is not known")
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self._wrong(f"{ast.unparse(node)!r} is not known") from None

    def _array(self, call: ast.Call) -> Any:
        name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
        makers: dict[str, Callable[..., Any]] = {
            "randn": lambda *shape: self.random.standard_normal(_flat(shape)).astype("float32"),
            "rand": lambda *shape: self.random.random(_flat(shape)).astype("float32"),
            "zeros": lambda *shape: self.np.zeros(_flat(shape), "float32"),
            "ones": lambda *shape: self.np.ones(_flat(shape), "float32"),
            "arange": self.np.arange,
            "randint": lambda low, high, *shape: self.random.integers(low, high, _flat(shape)),
        }
        if name not in makers:
            raise self._wrong(f"{name!r} is not known")
        arguments = [self._literal(argument) for argument in call.args]
        dtype = None
        for keyword in call.keywords:
            if keyword.arg != "dtype" or dtype is not None:
                raise self._wrong(f"{name} takes only dtype= by name, and once")
            value = keyword.value
            dtype = value.id if isinstance(value, ast.Name) else self._literal(value)
        try:
            array = makers[name](*arguments)
            return array if dtype is None else array.astype(self._dtype(dtype))
        except (TypeError, ValueError, MemoryError) as error:
            raise self._wrong(f"{ast.unparse(call)}: {error}") from error

    def _dtype(self, name: Any) -> Any:
        if not isinstance(name, str) or not itemsize(name):
            raise TypeError(f"{name!r} is not a dtype")
        if name == "bfloat16":  # NumPy has no dtype of this name
            import ml_dtypes

            return ml_dtypes.bfloat16
        return self.np.dtype(name)

    def _wrong(self, what: str) -> TargetError:
        return TargetError(f"{self.text!r} cannot be read as inputs: {what}. Write {_GRAMMAR}.")


def _flat(shape: Sequence[Any]) -> tuple[Any, ...]:
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        return tuple(shape[0])
    return tuple(shape)


def at_batch_size(inputs: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Returns inputs with the arrays cut, or repeated, along their first axis to a batch size.

    Args:
        inputs: NumPy arrays (n, ...) in any tree; arrays without dimensions and other leaves are
            left unchanged.
        size: The new length of the first axes.

    Returns:
        The same tree with new arrays (size, ...).

    Raises:
        ProfileError: The first axes of the arrays differ, or are empty.

    Examples:
        >>> import numpy as np
        >>> at_batch_size((np.arange(3),), 5)
        (array([0, 1, 2, 0, 1]),)
    """
    import numpy as np

    lengths: dict[int, str] = {}
    for link, leaf, kind in visit(inputs, once=True):
        if kind is None and adapter_of(leaf) is not None and leaf.ndim:
            lengths.setdefault(
                leaf.shape[0], format_keys(KeyPath.from_link(link).keys, root="inputs")
            )
    if len(lengths) > 1:
        places = ", ".join(f"{length} at {path}" for length, path in lengths.items())
        raise ProfileError(
            f"the inputs do not agree in the first axis: {places}. Which of them is the batch? "
            f"Pass a function batch_size -> inputs."
        )
    if not next(iter(lengths), 1):
        raise ProfileError("the inputs are empty along the first axis: there is nothing to repeat.")

    def resize(leaf: Any) -> Any:
        if adapter_of(leaf) is None or not leaf.ndim:
            return leaf
        return np.take(leaf, np.arange(size) % leaf.shape[0], axis=0)

    return tuple(fmap(resize, inputs))
