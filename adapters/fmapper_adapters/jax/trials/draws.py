"""The functions of `jax.random` that give numbers of `Draws`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from fmapper.verification import Draws


def functions_of(draws: Draws) -> dict[str, Callable[..., Any]]:
    """Returns functions by their names in `jax.random`, which take their numbers from `draws`."""

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

    return {
        "uniform": uniform, "bernoulli": bernoulli, "randint": randint, "normal": normal,
        "exponential": exponential, "permutation": permutation,
    }  # fmt: skip
