"""What a model gives, its gradients, and a few steps of descent: what a translation must match."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import to_jax
from fmapper_adapters.jax.record.trace import Source

_STEPS = 5
_RATES = (0.1, 0.01, 0.001)  # of descent: the first at which a rounding of the weights stays small
_SMALL = 1e-4


def training_steps(
    source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns outputs, gradients, and the parameters after five steps, as NumPy arrays by name.

    Dropout is left out. The `rate` is that of the steps: small enough that weights which are off by
    a rounding end as near to these, as after steps that are too large nobody can tell a wrong
    program from a rounding.
    """
    with _without_dropout():
        return _run(source, args, kwargs)


@contextlib.contextmanager
def _without_dropout() -> Iterator[None]:
    """Has the layers of libraries that draw leave what they are given as it is."""
    changed = []
    try:
        for library in ("flax.nnx", "flax.linen", "equinox.nn"):
            cls = getattr(sys.modules.get(library), "Dropout", None)
            if cls is not None:
                changed.append((cls, vars(cls)["__call__"]))
                type.__setattr__(cls, "__call__", lambda self, x, *args, **kwargs: x)
        yield
    finally:
        for cls, original in changed:
            type.__setattr__(cls, "__call__", original)


def _run(source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    args, kwargs = to_jax((tuple(args), dict(kwargs)), strict=False)
    buffers = dict(source.buffers)
    held = {name: to_jax(array) for name, array in source.parameters.items()}
    learned = {
        name: array
        for name, array in held.items()
        if jnp.issubdtype(array.dtype, jnp.floating) and name not in source.frozen
    }
    fixed = {name: array for name, array in held.items() if name not in learned}

    def call(parameters: Any, buffers: Any) -> tuple[list[Any], Any]:
        output, changed = source.call({**fixed, **parameters}, buffers, *args, **kwargs)
        leaves = [x for x in jax.tree.leaves(output) if hasattr(x, "dtype")]
        return leaves, {name: changed.get(name, array) for name, array in buffers.items()}

    def loss(parameters: Any, buffers: Any) -> Any:
        leaves, after = call(parameters, buffers)
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        total = sum(
            jnp.mean(x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape))
            for x in floats
        )
        return total, after

    outputs, _ = call(learned, buffers)
    found: dict[str, Any] = {f"output.{i}": np.asarray(x) for i, x in enumerate(outputs)}
    if not learned or not any(jnp.issubdtype(x.dtype, jnp.floating) for x in outputs):
        return found
    slope = jax.jit(jax.grad(loss, has_aux=True))
    try:
        gradients, _ = slope(learned, buffers)
    except (ValueError, NotImplementedError) as error:
        known = "Reverse-mode differentiation does not work" in str(error)
        if isinstance(error, ValueError) and not known:
            raise
        return found  # JAX has no gradients of it

    def descend(learned: Any, rate: float) -> Any:
        state = buffers
        for _ in range(_STEPS):
            gradients, state = slope(learned, state)
            learned = {name: x - rate * gradients[name] for name, x in learned.items()}
        return learned

    off = {name: _off_by_a_rounding(x) for name, x in learned.items()}
    for rate in _RATES:
        after = descend(learned, rate)
        if _distance(descend(off, rate), after) <= _SMALL:
            break
    found |= {f"gradient.{name}": np.asarray(one) for name, one in gradients.items()}
    found |= {f"after.{name}": np.asarray(x) for name, x in after.items()}
    return found | {"rate": np.array(rate)}


def _off_by_a_rounding(x: Any) -> Any:
    waves = np.cos(np.arange(x.size)).reshape(x.shape)
    return (x * jnp.asarray(1 + 2.0**-22 * waves, jnp.float32)).astype(x.dtype)


def _distance(found: Any, wanted: Any) -> float:
    """Returns how far parameters are apart, relative to the largest; infinite where one is not."""
    apart = [0.0]
    for name, one in wanted.items():
        a, b = np.asarray(found[name], np.float64), np.asarray(one, np.float64)
        off = float(np.abs(a - b).max(initial=0.0) / max(np.abs(b).max(initial=0.0), 1e-3))
        apart.append(off if math.isfinite(off) else math.inf)
    return max(apart)
