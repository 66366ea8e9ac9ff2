"""Inputs that two models may take, judged by the shapes of their parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import isqrt
from typing import Any

from fmapper.twins.proof import Inputs
from fmapper.twins.sides import Entry, Side

_MOST = 4  # sizes that are tried for each kind of input
_IMAGE = 32  # pixels


def guesses(a: Side, b: Side) -> Iterator[Inputs]:
    """Yields inputs that both models may take: tokens, images, vectors and sequences, or two of it.

    They are the same for both, but for where images have their channels.
    """
    entries = [
        entry
        for side in (a, b)
        for entry in side.entries.values()
        if not (entry.random or entry.transient)
    ]
    single = [*_arrays(entries)]
    alone = [(x[0], y[0]) for x, y in single if x.ndim > 1]  # as models of Equinox take them
    for mine, theirs in (*single, *alone):
        yield Inputs((mine,), {}, (theirs,), {})
    by_kind = {(x.dtype.kind, x.ndim): (x, y) for x, y in reversed(single)}
    for (x, y), (z, w) in product(by_kind.values(), repeat=2):
        second = (_others(z), _others(w)) if z is x else (z, w)
        yield Inputs((x, second[0]), {}, (y, second[1]), {})


def are_alike(a: Side, b: Side, inputs: Inputs) -> bool:
    """Returns whether two models take guessed inputs in the same order.

    That is not known of inputs of one kind whose arguments have other names.
    """
    kinds = [(x.dtype.kind, x.ndim) for x in inputs.args]
    if len({*kinds}) == len(kinds):
        return True
    mine, theirs = _arguments(a.tree), _arguments(b.tree)
    return mine[: len(kinds)] == theirs[: len(kinds)]


def _arguments(model: Any) -> list[str]:
    """Returns the names of the arguments of a model."""
    skipped = isinstance(model, tuple) and not hasattr(model[0], "apply")
    model = model[0] if isinstance(model, tuple) else model
    call = getattr(model, "forward", model if skipped else model.__call__)
    return [*inspect.signature(call).parameters][skipped:]


def _others(array: Any) -> Any:
    """Returns an array of the same kind with other elements."""
    if array.dtype.kind == "f":
        return array[..., ::-1] * array.dtype.type(0.5)
    return array[..., ::2].repeat(2, -1)


def _arrays(entries: Sequence[Entry]) -> Iterator[tuple[Any, Any]]:
    """Yields an array for the source and one for the target, most likely ones first."""
    import numpy as np

    random = np.random.default_rng(0)
    tables = [e.shape[0] for e in entries if e.layout == "rows" and len(e.shape) == 2]
    if tables:
        least = min([rows for rows in tables if rows > 6] or tables)  # not of types of tokens
        tokens = np.arange(1, 7, dtype=np.int32).reshape(1, 6) * 5 % least
        yield tokens, tokens
    kernels = [e.shape for e in entries if len(e.shape) == 4]
    for channels in _first(n for shape in kernels for n in (shape[1], shape[2])):
        for size in _image_sizes(entries):
            image = random.normal(size=(1, channels, size, size)).astype("f4")
            last = np.ascontiguousarray(image.transpose(0, 2, 3, 1))
            yield from product((image, last), repeat=2)
    rows = [e.shape[-2] for e in entries if len(e.shape) == 2]
    for channels in _first(e.shape[1] for e in entries if len(e.shape) == 3):
        for length in _first(n * stride for n in (*rows, _IMAGE) for stride in (1, 2)):
            signal = random.normal(size=(1, channels, length)).astype("f4")
            last = np.ascontiguousarray(signal.transpose(0, 2, 1))
            yield from product((signal, last), repeat=2)
    shapes = [e.shape for e in entries if len(e.shape) in (2, 3)]
    shapes += [e.shape for e in entries if len(e.shape) == 1]
    sizes = [n for shape in shapes for n in (shape[-1], shape[0])]
    common = [size for size, _ in Counter(sizes).most_common(_MOST)]
    for size in dict.fromkeys([*_first(sizes), *common]):
        for shape in ((1, 5, size), (2, size)):  # also what takes vectors takes sequences, mostly
            vectors = random.normal(size=shape).astype("f4")
            yield vectors, vectors


def _image_sizes(entries: Sequence[Entry]) -> list[int]:
    """Returns sizes of images that fill a table of positions with patches, then a usual one."""
    kernels = [e.shape for e in entries if len(e.shape) == 4]
    patch = max((s[3] if s[2] == s[3] else s[0] for s in kernels), default=1)
    rows = [e.shape[-2] for e in entries if len(e.shape) in (2, 3)]
    roots = ((isqrt(n - more), n - more) for n in rows for more in range(3) if n > more)
    return [*_first(patch * root for root, n in roots if root * root == n)[:2], _IMAGE]


def _first(sizes: Iterable[int]) -> list[int]:
    return [*dict.fromkeys(sizes)][:_MOST]
