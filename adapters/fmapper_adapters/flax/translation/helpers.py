"""Classes that a file for NNX has beside the model's own."""

from __future__ import annotations

from fmapper.translation import Helper

_CHANNELS = '''class {name}(nnx.{name}):
    """{what}, with the channels first, as in PyTorch."""

    def __call__(self, x):
        return jnp.moveaxis(super().__call__(jnp.moveaxis(x, 1, -1)), -1, 1)'''

HELPERS = {
    "Conv": Helper(_CHANNELS.format(name="Conv", what="A convolution")),
    "ConvTranspose": Helper(
        _CHANNELS.format(name="ConvTranspose", what="A transposed convolution")
    ),
    "GroupNorm": Helper(_CHANNELS.format(name="GroupNorm", what="Normalisation of groups")),
    "BatchNorm": Helper('''class BatchNorm(nnx.BatchNorm):
    """Normalisation of batches, with the channels first and running statistics as in PyTorch."""

    def __call__(self, x):
        shape = (1, -1) + (1,) * (x.ndim - 2)
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            axes = (0, *range(2, x.ndim))
            mean, var = x.mean(axes), x.var(axes)
            count = x.size / x.shape[1]
            keep = self.momentum
            self.mean[...] = keep * self.mean[...] + (1 - keep) * mean
            unbiased = var * count / max(count - 1, 1)
            self.var[...] = keep * self.var[...] + (1 - keep) * unbiased
        scale = jax.lax.rsqrt(var + self.epsilon)
        if self.scale is not None:
            scale = scale * self.scale[...]
        y = (x - mean.reshape(shape)) * scale.reshape(shape)
        return y if self.bias is None else y + self.bias[...].reshape(shape)'''),
    "DotProductAttention": Helper('''class DotProductAttention(nnx.Module):
    """Attention whose weights have dropout; fully masked rows give zeros."""

    def __init__(self, rate, *, scale=None, is_causal=False, rngs: nnx.Rngs):
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.scale = scale
        self.is_causal = is_causal

    def __call__(self, query, key, value, mask=None):
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits = (query * scale) @ key.swapaxes(-1, -2)
        if self.is_causal:
            mask = jnp.tri(*logits.shape[-2:], dtype=bool)
        if mask is not None:
            masked = jnp.where(mask, logits, -jnp.inf) if mask.dtype == bool else logits + mask
            logits = masked.astype(logits.dtype)
        empty = jnp.all(jnp.isneginf(logits), axis=-1, keepdims=True)
        weights = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, logits), axis=-1))
        return self.dropout(weights) @ value'''),
    "Sequential": Helper('''class Sequential(nnx.List):
    """Parts that are called one after the other."""

    def __call__(self, x):
        for part in self:
            x = part(x)
        return x'''),
    "Buffer": Helper('''class Buffer(nnx.Variable):
    """An array that is not trained."""'''),
    "FrozenParam": Helper('''class FrozenParam(nnx.Variable):
    """A parameter that is not trained."""'''),
}
