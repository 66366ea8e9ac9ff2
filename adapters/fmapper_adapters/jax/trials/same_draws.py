"""Gives a model of JAX the random numbers that its twin is given while they are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper.verification import Draws
from fmapper_adapters.jax.trials.precision import traced_apart


@contextlib.contextmanager
def same_draws(draws: Draws) -> Iterator[None]:
    """Puts numbers of `draws` in place of those that functions of `jax.random` give."""

    def uniform(
        key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0,
        **options: Any,
    ) -> Any:  # fmt: skip
        drawn = draws.take("uniform", shape) * (np.float32(maxval) - np.float32(minval))
        return jnp.asarray(drawn + np.float32(minval), dtype)

    def bernoulli(key: Any, p: Any = 0.5, shape: Any = None, **options: Any) -> Any:
        return uniform(key, jnp.shape(p) if shape is None else shape) < p

    def randint(
        key: Any, shape: Any, minval: Any, maxval: Any, dtype: Any = int, **options: Any
    ) -> Any:
        drawn = jnp.floor(uniform(key, shape) * (maxval - minval)) + minval
        return drawn.astype(dtype)

    def normal(key: Any, shape: Any = (), dtype: Any = float, **options: Any) -> Any:
        return jnp.asarray(draws.take("normal", shape), dtype)

    def exponential(key: Any, shape: Any = (), dtype: Any = float, **options: Any) -> Any:
        return -jnp.log1p(-uniform(key, shape, dtype))

    def permutation(key: Any, x: Any, *args: Any, **options: Any) -> Any:
        return jnp.argsort(uniform(key, (x,)))

    new: dict[str, Callable[..., Any]] = {
        "uniform": uniform, "bernoulli": bernoulli, "randint": randint, "normal": normal,
        "exponential": exponential, "permutation": permutation,
    }  # fmt: skip
    before = {name: getattr(jax.random, name) for name in new}
    vars(jax.random).update(new)
    try:
        with traced_apart("draws"):
            yield
    finally:
        vars(jax.random).update(before)
