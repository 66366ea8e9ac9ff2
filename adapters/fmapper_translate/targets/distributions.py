"""Distributions of random numbers, as `torch.distributions` has them.

A file takes the source of those that it names.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


class Categorical:
    """One of several choices, by probabilities or their logarithms along the last dimension."""

    def __init__(self, probs=None, logits=None, validate_args=None):
        self.logits = jax.nn.log_softmax(jnp.log(probs) if logits is None else logits)

    @property
    def probs(self):
        return jnp.exp(self.logits)

    @property
    def mode(self):
        return self.logits.argmax(-1)

    def sample(self, key, sample_shape=()):
        shape = (*sample_shape, *self.logits.shape[:-1])
        return jax.random.categorical(key, self.logits, shape=shape)

    def log_prob(self, value):
        shape = jnp.broadcast_shapes(value.shape, self.logits.shape[:-1])
        logits = jnp.broadcast_to(self.logits, (*shape, self.logits.shape[-1]))
        at = jnp.broadcast_to(value, shape).astype(int)[..., None]
        return jnp.take_along_axis(logits, at, axis=-1)[..., 0]

    def entropy(self):
        least = jnp.finfo(self.logits.dtype).min
        return -(self.probs * jnp.maximum(self.logits, least)).sum(-1)


class Normal:
    """A normal distribution for each element of a mean and a standard deviation."""

    def __init__(self, loc, scale, validate_args=None):
        self.loc, self.scale = jnp.broadcast_arrays(jnp.asarray(loc), jnp.asarray(scale))

    @property
    def mean(self):
        return self.loc

    mode = mean

    @property
    def stddev(self):
        return self.scale

    @property
    def variance(self):
        return self.scale**2

    def rsample(self, key, sample_shape=()):
        shape = (*sample_shape, *self.loc.shape)
        return self.loc + self.scale * jax.random.normal(key, shape)

    def sample(self, key, sample_shape=()):
        return jax.lax.stop_gradient(self.rsample(key, sample_shape))

    def log_prob(self, value):
        distance = (value - self.loc) ** 2 / (2 * self.variance)
        return -distance - jnp.log(self.scale) - math.log(math.sqrt(2 * math.pi))

    def entropy(self):
        return 0.5 + 0.5 * math.log(2 * math.pi) + jnp.log(self.scale)
