"""Associative scans, which JAX unrolls for one length, as loops over any length."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST = 3  # arrays in an element for which an identity is searched
_DRAWS = 16  # samples of all signs and sizes: zero is an identity of `max` for negative numbers


@contextlib.contextmanager
def record_loops(*, wanted: bool) -> Iterator[None]:
    """Makes `jax.lax.associative_scan` sequential within the block, if wanted."""
    if not wanted:
        yield
        return
    original: Any = jax.lax.associative_scan
    setattr(jax.lax, "associative_scan", _in_order(original))  # noqa: B010
    try:
        yield
    finally:
        setattr(jax.lax, "associative_scan", original)  # noqa: B010


def _in_order(original: Any) -> Callable[..., Any]:
    """Returns a function that computes `associative_scan` one element at a time."""

    @functools.wraps(original)
    def scan(fn: Any, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
        leaves, tree = jax.tree.flatten(elems)
        axis = axis % leaves[0].ndim

        def combine(before: list[Any], now: list[Any]) -> list[Any]:
            if is_plain:
                return rows_of(before, now)
            whole = ([jnp.expand_dims(x, axis) for x in xs] for xs in (before, now))
            return [jnp.squeeze(x, axis) for x in rows_of(*whole)]

        def rows_of(*pair: list[Any]) -> list[Any]:
            return jax.tree.leaves(fn(*(jax.tree.unflatten(tree, xs) for xs in pair)))

        def step(before: list[Any], now: list[Any]) -> tuple[list[Any], list[Any]]:
            after = combine(before, now)
            return after, after

        is_plain = False
        examples = _examples(leaves, axis)
        numbers = _identity(combine, examples)
        if numbers is None:
            return original(fn, elems, reverse, axis)
        is_plain = _are_same(combine, rows_of, examples)
        rows = [jnp.moveaxis(x, axis, 0) for x in leaves]
        first = [jnp.full(x.shape[1:], k, x.dtype) for x, k in zip(rows, numbers, strict=True)]
        _, made = jax.lax.scan(step, first, rows, reverse=reverse)
        return jax.tree.unflatten(tree, [jnp.moveaxis(x, 0, axis) for x in made])

    return scan


def _examples(leaves: list[Any], axis: int) -> list[list[Any]]:
    """Returns elements of random numbers, with other sizes for those that may vary."""
    draw = np.random.default_rng(0)
    shapes = [[n for i, n in enumerate(x.shape) if i != axis] for x in leaves]
    sizes = [[n if isinstance(n, int) else 2 for n in shape] for shape in shapes]

    def example(size: list[int], dtype: Any) -> Any:
        return jnp.asarray(draw.normal(size=size) * 10 ** draw.uniform(-2, 2), dtype)

    pairs = [*zip(sizes, leaves, strict=True)]
    with jax.ensure_compile_time_eval():
        return [[example(size, x.dtype) for size, x in pairs] for _ in range(_DRAWS)]


def _identity(
    combine: Callable[..., list[Any]], examples: list[list[Any]]
) -> tuple[int, ...] | None:
    """Returns the fill values of an identity element of `combine`; None if none is found.

    It tries all combinations of zeros and ones; combining the identity with each example must
    return the example exactly.
    """
    given = examples[0]
    if len(given) > _MOST or any(not jnp.issubdtype(x.dtype, jnp.inexact) for x in given):
        return None
    for numbers in itertools.product((0, 1), repeat=len(given)):
        first = [np.full(x.shape, k, x.dtype) for x, k in zip(given, numbers, strict=True)]
        if all(_is_equal(_run(combine, first, example), example) for example in examples):
            return numbers
    return None


def _is_equal(made: list[Any] | None, given: list[Any]) -> bool:
    if made is None:
        return False
    return all(np.array_equal(a, b) for a, b in zip(made, given, strict=True))


def _are_same(
    combine: Callable[..., list[Any]], rows_of: Callable[..., list[Any]],
    examples: list[list[Any]],
) -> bool:  # fmt: skip
    """Returns whether a function combines elements in the same way without their axis."""
    first, second = _run(combine, *examples[:2]), _run(rows_of, *examples[:2])
    return second is not None and _is_equal(first, second)


def _run(function: Callable[..., list[Any]], *given: list[Any]) -> list[Any] | None:
    """Returns a function's results for numbers; None if it uses a traced array."""
    try:
        with jax.ensure_compile_time_eval():
            return [np.asarray(x) for x in function(*given)]
    except Exception:  # a user's function may raise anything
        return None
