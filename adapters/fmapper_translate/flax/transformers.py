"""Counterparts of the infrastructure of transformers in files for Flax NNX.

A file takes the source of those that it names.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from fmapper_translate.flax.weights import array_of, initialize, named_parameters


class PreTrainedModel(nnx.Module):
    """A model with its configuration."""

    def __init__(self, config):
        self.config = config

    def post_init(self, rngs):
        """Gives arrays their first values: each part once, by the innermost model of it."""
        parts = dict(nnx.iter_modules(self))
        for path, module in parts.items():
            above = (parts.get(path[:size]) for size in range(len(path), -1, -1))
            model = next(part for part in above if isinstance(part, PreTrainedModel))
            if not getattr(module, "is_initialized", False):
                model._init_weights(module, rngs=rngs)
                module.is_initialized = True

    def _init_weights(self, module, *, rngs):
        """Gives the arrays of a layer their first values."""
        fields = ("initializer_range", "init_std", "initializer_factor")
        std = next((getattr(self.config, name) for name in fields if hasattr(self.config, name)), 0)
        names = " ".join(kind.__name__ for kind in type(module).__mro__)
        if isinstance(module, nnx.Linear | nnx.Conv | nnx.ConvTranspose):
            initialize(array_of(module, "weight"), nnx.initializers.normal(std or 0.02), rngs)
            if module.bias is not None:
                module.bias[...] = jnp.zeros_like(module.bias)
        elif isinstance(module, nnx.Embed):
            initialize(module.embedding, nnx.initializers.normal(std or 0.02), rngs)
            if module.padding_idx is not None:
                module.embedding[...] = module.embedding[...].at[module.padding_idx].set(0.0)
        elif "LSTM" in names:
            for name, array in named_parameters(module):
                init = (
                    nnx.initializers.zeros if "bias" in name else nnx.initializers.xavier_uniform()
                )
                initialize(array, init, rngs)
        elif any(kind in names for kind in ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm")):
            for name, value in (("weight", 1.0), ("bias", 0.0)):
                if (array := array_of(module, name, None)) is not None:
                    array[...] = jnp.full_like(array, value)
