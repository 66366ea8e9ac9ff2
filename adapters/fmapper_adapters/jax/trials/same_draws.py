"""Gives a model of JAX the random numbers that its twin is given while they are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from fmapper.verification import Draws
from fmapper_adapters.jax.trials.draws import functions_of
from fmapper_adapters.jax.trials.precision import traced_apart


@contextlib.contextmanager
def same_draws(draws: Draws) -> Iterator[None]:
    """Puts numbers of `draws` in place of those that functions of `jax.random` give."""
    new = functions_of(draws)
    before = {name: getattr(jax.random, name) for name in new}
    vars(jax.random).update(new)
    try:
        with traced_apart("draws"):
            yield
    finally:
        vars(jax.random).update(before)
