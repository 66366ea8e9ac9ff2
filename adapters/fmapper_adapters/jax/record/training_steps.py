"""Runs and trains a model, for results that a translation must match."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    Dropout is left out, unless it is given seeds.
    """
    args, kwargs = to_jax((tuple(args), dict(kwargs)), strict=False)

    @functools.cache
    def prepare(*, wide: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        widen: Callable[[Any], Any] = double if wide else lambda x: x
        own_args, own_kwargs = jax.tree.map(widen, (args, kwargs))
        return _prepare(source, own_args, own_kwargs, widen)

    def steps(rate: float, off: float, *, double: bool = False, seeds: Sequence[int] = ()) -> Any:
        with jax.enable_x64(True) if double else contextlib.nullcontext():
            train, draw = prepare(wide=double)
            if seeds:
                return draw(off, seeds)
            with _without_dropout():
                return train(rate, off)

    return steps


@contextlib.contextmanager
def _without_dropout(but: float | None = None) -> Iterator[set[float]]:
    """Makes the dropout layers of libraries identities within the block.

    Args:
        but: The rate of layers that stay, drawn at one half at least, and with them those that
            share masks along dimensions; None if there is none.

    Yields:
        The rates of the other layers that are called.
    """
    rates: set[float] = set()
    changed = []

    def choose(original: Any) -> Any:
        def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            rate = getattr(self, "rate", getattr(self, "p", 0.0))
            if but is not None and bool(getattr(self, "broadcast_dims", False)):
                return original(self, x, *args, **kwargs)
            rates.add(float(rate))
            if rate != but:
                return x
            name = "rate" if hasattr(self, "rate") else "p"
            object.__setattr__(self, name, max(rate, 0.5))  # modules of libraries are frozen
            try:
                return original(self, x, *args, **kwargs)
            finally:
                object.__setattr__(self, name, rate)

        return call

    try:
        for library in ("flax.nnx", "flax.linen", "equinox.nn"):
            cls = getattr(sys.modules.get(library), "Dropout", None)
            if cls is not None:
                changed.append((cls, vars(cls)["__call__"]))
                type.__setattr__(cls, "__call__", choose(vars(cls)["__call__"]))
        yield rates
    finally:
        for cls, original in changed:
            type.__setattr__(cls, "__call__", original)


def _prepare(
    source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any], widen: Callable[[Any], Any]
) -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[float, list[list[Any]]]]]:
    """Returns the function that trains a model, and the one that draws with dropout."""
    buffers = {name: widen(array) for name, array in source.buffers.items()}
    held = {name: widen(to_jax(array)) for name, array in source.parameters.items()}
    learned = {
        name: array
        for name, array in held.items()
        if jnp.issubdtype(array.dtype, jnp.inexact) and name not in source.frozen
    }
    fixed = {name: array for name, array in held.items() if name not in learned}

    def call(
        parameters: Any, buffers: Any, args: Any = args, kwargs: Any = kwargs
    ) -> tuple[list[Any], Any]:
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

    names = [parameter.name for parameter in source.parameters_of_call()]
    names += [""] * (len(args) - len(names))  # of those in `*args`

    def outputs_of_seed(parameters: Any, buffers: Any, seed: Any) -> list[Any]:
        moved = {name: _move_keys(x, "", seed) for name, x in buffers.items()}
        given = [_move_keys(x, name, seed) for name, x in zip(names, args, strict=False)]
        named = {name: _move_keys(x, name, seed) for name, x in kwargs.items()}
        return call(parameters, moved, tuple(given), named)[0]

    def draw(off: float, seeds: Sequence[int]) -> dict[float, list[list[Any]]]:
        """Returns the outputs for each seed, with the dropout of one rate at a time."""
        named = [*(("", x) for x in buffers.values()), *zip(names, args, strict=False)]
        named += kwargs.items()
        if not any(_is_key(x, name) for name, tree in named for x in jax.tree.leaves(tree)):
            return {}
        now = {name: _disturb(x, off) if off else x for name, x in learned.items()}
        found: dict[float, list[list[Any]]] = {}
        rates = [math.nan]
        for rate in rates:
            with _without_dropout(but=rate) as others:
                one = jax.jit(functools.partial(outputs_of_seed))  # traced anew for each rate
                found[rate] = [[*map(np.asarray, one(now, buffers, seed))] for seed in seeds]
            rates += sorted(r for r in others if r > 0 and r not in rates)
        return found

    return run, draw


def _move_keys(tree: Any, name: str, seed: Any) -> Any:
    """Returns a tree with other random keys for each seed.

    Arrays of words are keys in arguments that are called so.
    """

    def move(x: Any) -> Any:
        if not _is_key(x, name):
            return x
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(move(jax.random.wrap_key_data(x)))
        return jax.vmap(move)(x) if x.ndim else jax.random.fold_in(x, seed)

    return jax.tree.map(move, tree)


def _is_key(x: Any, name: str) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype is not None
    return dtype == jnp.uint32 and x.ndim > 0 and any(word in name for word in ("key", "rng"))


def _disturb(x: Any, off: float) -> Any:
    waves = np.cos(np.arange(x.size)).reshape(x.shape)
    precision = jnp.float64 if x.dtype in (jnp.float64, jnp.complex128) else jnp.float32
    return (x * jnp.asarray(1 + off * waves, precision)).astype(x.dtype)


def _waves(x: Any) -> Any:
    precision = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.cos(jnp.arange(x.size, dtype=precision)).reshape(x.shape)
