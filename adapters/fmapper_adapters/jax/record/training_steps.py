"""Runs and trains a model, for results that a translation must match."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import to_jax
from fmapper_adapters.jax.record.trace import Source
from fmapper_adapters.jax.verify import double

_STEPS = 5


def training_steps(
    source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., dict[str, Any]]:
    """Returns a function of a rate, a disturbance and a precision that runs and trains the model.

    Dropout is left out.
    """
    args, kwargs = to_jax((tuple(args), dict(kwargs)), strict=False)

    @functools.cache
    def prepare(*, wide: bool) -> Callable[[float, float], dict[str, Any]]:
        widen: Callable[[Any], Any] = double if wide else lambda x: x
        own_args, own_kwargs = jax.tree.map(widen, (args, kwargs))
        return _prepare(source, own_args, own_kwargs, widen)

    def steps(rate: float, off: float, *, double: bool = False) -> dict[str, Any]:
        precision = jax.enable_x64(True) if double else contextlib.nullcontext()
        with _without_dropout(), precision:
            return prepare(wide=double)(rate, off)

    return steps


@contextlib.contextmanager
def _without_dropout() -> Iterator[None]:
    """Makes the dropout layers of libraries identities within the block."""
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


def _prepare(
    source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any], widen: Callable[[Any], Any]
) -> Callable[[float, float], dict[str, Any]]:
    buffers = {name: widen(array) for name, array in source.buffers.items()}
    held = {name: widen(to_jax(array)) for name, array in source.parameters.items()}
    learned = {
        name: array
        for name, array in held.items()
        if jnp.issubdtype(array.dtype, jnp.inexact) and name not in source.frozen
    }
    fixed = {name: array for name, array in held.items() if name not in learned}

    def call(parameters: Any, buffers: Any) -> tuple[list[Any], Any]:
        given, options = jax.tree.map(lambda x: x, (args, kwargs))  # a call may use up a state
        output, changed = source.call({**fixed, **parameters}, buffers, *given, **options)
        leaves = [x for x in jax.tree.leaves(output) if hasattr(x, "dtype")]
        return leaves, {name: changed.get(name, array) for name, array in buffers.items()}

    def loss(parameters: Any, buffers: Any) -> Any:
        leaves, after = call(parameters, buffers)
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.mean(x * _waves(x)) for x in floats), after

    slope = jax.jit(jax.grad(loss, has_aux=True))

    def run(rate: float, off: float) -> dict[str, Any]:
        now = {name: _disturb(x, off) if off else x for name, x in learned.items()}
        outputs, _ = call(now, buffers)
        found = {f"weight.{name}": np.asarray(x) for name, x in now.items()} if off else {}
        found |= {f"output.{i}": np.asarray(x) for i, x in enumerate(outputs)}
        if not now or not any(jnp.issubdtype(x.dtype, jnp.floating) for x in outputs):
            return found
        state = buffers
        for step in range(_STEPS):
            try:
                gradients, state = slope(now, state)
                gradients = jax.tree.map(jnp.conj, gradients)  # the way uphill
            except (ValueError, NotImplementedError) as error:
                known = "Reverse-mode differentiation does not work" in str(error)
                if isinstance(error, ValueError) and not known:
                    raise
                return found  # JAX has no gradients of it
            if step == 0:
                found |= {f"gradient.{name}": np.asarray(one) for name, one in gradients.items()}
            now = {name: x - rate * gradients[name] for name, x in now.items()}
        found |= {f"after.{name}": np.asarray(x) for name, x in now.items()}
        for name, x in state.items():  # such as the statistics of batches
            if not jnp.issubdtype(x.dtype, jnp.floating):  # counts and keys
                continue
            new, old = np.asarray(x), np.asarray(buffers[name])
            if not np.array_equal(new, old):
                found[f"after.{name}"] = new
        return found

    return run


def _disturb(x: Any, off: float) -> Any:
    waves = np.cos(np.arange(x.size)).reshape(x.shape)
    precision = jnp.float64 if x.dtype in (jnp.float64, jnp.complex128) else jnp.float32
    return (x * jnp.asarray(1 + off * waves, precision)).astype(x.dtype)


def _waves(x: Any) -> Any:
    precision = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.cos(jnp.arange(x.size, dtype=precision)).reshape(x.shape)
