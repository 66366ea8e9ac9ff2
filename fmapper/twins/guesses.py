"""Inputs that two models may take, judged by the shapes of their parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from math import isqrt
from typing import Any

from fmapper.twins.programs import Model
from fmapper.twins.sides import Side

_MOST = 4  # sizes that are tried for each kind of input
_IMAGE = 32  # pixels


def guesses(a: Side, b: Side) -> Iterator[tuple[Model, Model]]:
    """Yields both models with an input that they may take: tokens, images, vectors, sequences.

    It is the same for both, but for where images have their channels.
    """
    arrays = [*_arrays(a, b)]
    alone = [(x[0], y[0]) for x, y in arrays if x.ndim > 1]  # as models of Equinox take them
    for mine, theirs in (*arrays, *alone):
        yield Model(a, (mine,), {}), Model(b, (theirs,), {})


def _arrays(a: Side, b: Side) -> Iterator[tuple[Any, Any]]:
    """Yields an array for the source and one for the target, most likely ones first."""
    import numpy as np

    random = np.random.default_rng(0)
    entries = [e for side in (a, b) for e in side.entries.values() if not (e.random or e.transient)]
    tables = [e.shape[0] for e in entries if e.layout == "rows" and len(e.shape) == 2]
    if tables:
        least = min([rows for rows in tables if rows > 6] or tables)  # not of types of tokens
        tokens = np.arange(1, 7, dtype=np.int32).reshape(1, 6) * 5 % least
        yield tokens, tokens
    for space in (2, 1):
        kernels = [e.shape for e in entries if len(e.shape) == space + 2]
        rows = [e.shape[-2] for e in entries if len(e.shape) in (2, space + 1)]
        patch = max((s[-1] if s[-1] == s[2] else s[0] for s in kernels), default=1)
        for channels in _first(n for shape in kernels for n in shape[1:3]):
            for size in _sizes(rows, patch, space):
                image = random.normal(size=(1, channels, *[size] * space)).astype("f4")
                last = np.ascontiguousarray(np.moveaxis(image, 1, -1))
                yield from product((image, last), repeat=2)
    shapes = sorted((e.shape for e in entries if 0 < len(e.shape) < 4), key=lambda s: len(s) == 1)
    sizes = [n for shape in shapes for n in (shape[-1], shape[0])]
    common = [size for size, _ in Counter(sizes).most_common(_MOST)]
    for size in dict.fromkeys([*_first(sizes), *common]):
        for shape in ((1, 5, size), (2, size)):  # also what takes vectors takes sequences, mostly
            vectors = random.normal(size=shape).astype("f4")
            yield vectors, vectors


def _sizes(rows: Iterable[int], patch: int, space: int) -> list[int]:
    """Returns sizes that fill a table of positions with patches, then a usual one."""
    if space == 1:
        return _first(n * stride for n in (*rows, _IMAGE) for stride in (1, 2))
    roots = ((isqrt(n - more), n - more) for n in rows for more in range(3) if n > more)
    return [*_first(patch * root for root, n in roots if root * root == n)[:2], _IMAGE]


def _first(sizes: Iterable[int]) -> list[int]:
    return [*dict.fromkeys(sizes)][:_MOST]
