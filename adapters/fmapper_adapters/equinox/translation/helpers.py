"""Classes that a file for Equinox has beside the model's own."""

from __future__ import annotations

from fmapper.translation import Helper

_CONV = '''class {name}(eqx.nn.{name}):
    """{what} of batches."""

    def __call__(self, x, *, key=None):
        return jax.vmap(super().__call__)(x)'''
_NORM = '''class {name}(eqx.nn.{name}):
    """{what} over the last dimension."""

    def __call__(self, x, *, key=None):
        call = super().__call__
        for _ in range(x.ndim - 1):
            call = jax.vmap(call)
        return call(x)'''
_CELL = '''class {name}(eqx.Module):
    """{what}, with the biases and the order of gates of PyTorch."""

    ih: Linear
    hh: Linear{fields}

    def __init__(self, in_features, features, *, use_bias=True, {more}dtype=None, key):
        options = {{"use_bias": use_bias, "dtype": dtype}}
        first, second = jax.random.split(key)
        self.ih = Linear(in_features, {gates}features, **options, key=first)
        self.hh = Linear(features, {gates}features, **options, key=second){kept}

    def __call__(self, x, *state, key=None):
        """Returns the next state; one of zeros is what it begins with."""
        state = state[0] if state and isinstance(state[0], tuple) else state
        return self.step(self.ih(x), state or self.zeros(x))

    def zeros(self, x):
        zeros = jnp.zeros((x.shape[0], self.hh.in_features), x.dtype)
        return {zeros}

    def step(self, given, state):
        {step}'''

_CONVS = {
    f"{kind}{dims}d": Helper(_CONV.format(name=f"{kind}{dims}d", what=what))
    for kind, what in (("Conv", "A convolution"), ("ConvTranspose", "A transposed convolution"))
    for dims in (1, 2, 3)
}

HELPERS = {
    **_CONVS,
    "LayerNorm": Helper(_NORM.format(name="LayerNorm", what="Normalisation")),
    "Sequential": Helper('''class Sequential(eqx.nn.Sequential):
    """Parts that are called one after the other, and functions."""

    def __init__(self, *parts):
        super().__init__([x if isinstance(x, eqx.Module) else eqx.nn.Lambda(x) for x in parts])'''),
    "Linear": Helper('''class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __call__(self, x, *, key=None):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias'''),
    "Embedding": Helper('''class Embedding(eqx.nn.Embedding):
    """The rows of a table at indices."""

    def __call__(self, x, *, key=None):
        return self.weight[x]'''),
    "PaddedEmbedding": Helper('''class PaddedEmbedding(eqx.nn.Embedding):
    """The rows of a table at indices; the row `padding_idx` gets no gradient."""

    padding_idx: int = eqx.field(static=True)

    def __init__(self, *sizes, padding_idx, **options):
        super().__init__(*sizes, **options)
        self.padding_idx = padding_idx

    def __call__(self, x, *, key=None):
        rows = self.weight[x]
        is_padding = (x == self.padding_idx)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)'''),
    "GroupNorm": Helper('''class GroupNorm(eqx.nn.GroupNorm):
    """Normalisation of groups of channels, of batches."""

    def __call__(self, x, *, key=None):
        return jax.vmap(super().__call__)(x)'''),
    "BatchNorm": Helper('''class BatchNorm(eqx.Module):
    """Normalisation of channels by statistics that were learned before."""

    weight: jax.Array | None
    bias: jax.Array | None
    running_mean: jax.Array
    running_var: jax.Array
    eps: float = eqx.field(static=True)

    def __init__(self, channels, *, eps=1e-05, use_weight=True, use_bias=True, dtype=None):
        self.weight = jnp.ones(channels, dtype) if use_weight else None
        self.bias = jnp.zeros(channels, dtype) if use_bias else None
        self.running_mean = jnp.zeros(channels, dtype)
        self.running_var = jnp.ones(channels, dtype)
        self.eps = eps

    def __call__(self, x, *, key=None):
        shape = (-1, *(1,) * (x.ndim - 2))
        mean, var = jax.lax.stop_gradient((self.running_mean, self.running_var))
        scale = jax.lax.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        y = (x - mean.reshape(shape)) * scale.reshape(shape)
        return y if self.bias is None else y + self.bias.reshape(shape)'''),
    "Dropout": Helper('''class Dropout(eqx.nn.Dropout):
    """Dropout where there is a key; without one it is left out."""

    def __call__(self, x, *, key=None):
        return x if key is None else super().__call__(x, key=key)'''),
    "DropPath": Helper('''class DropPath(eqx.nn.Dropout):
    """Dropout whose mask is shared along dimensions; without a key it is left out."""

    broadcast_dims: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, rate, *, broadcast_dims):
        super().__init__(rate)
        self.broadcast_dims = broadcast_dims

    def __call__(self, x, *, key=None):
        is_off = isinstance(self.p, float) and self.p == 0
        if key is None or self.inference or is_off:
            return x
        shape = [1 if i in self.broadcast_dims else size for i, size in enumerate(x.shape)]
        keep = 1 - jax.lax.stop_gradient(self.p)
        return jnp.where(jax.random.bernoulli(key, keep, shape), x / keep, 0)'''),
    "DotProductAttention": Helper('''class DotProductAttention(eqx.Module):
    """Attention whose weights have dropout; fully masked rows give zeros."""

    dropout: Dropout
    scale: float | None = eqx.field(static=True)
    is_causal: bool = eqx.field(static=True)

    def __init__(self, rate, *, scale=None, is_causal=False):
        self.dropout = Dropout(rate)
        self.scale = scale
        self.is_causal = is_causal

    def __call__(self, query, key_, value, mask=None, *, key=None):
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits = (query * scale) @ key_.swapaxes(-1, -2)
        if self.is_causal:
            mask = jnp.tri(*logits.shape[-2:], dtype=bool)
        if mask is not None:
            masked = jnp.where(mask, logits, -jnp.inf) if mask.dtype == bool else logits + mask
            logits = masked.astype(logits.dtype)
        empty = jnp.all(jnp.isneginf(logits), axis=-1, keepdims=True)
        weights = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, logits), axis=-1))
        return self.dropout(weights, key=key) @ value'''),
    "LSTMCell": Helper(
        _CELL.format(
            name="LSTMCell",
            what="A cell of long short-term memory",
            gates="4 * ",
            fields="",
            more="",
            kept="",
            zeros="zeros, zeros",
            step="""hidden, cell = state
        i, f, g, o = jnp.split(given + self.hh(hidden), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell""",
        )
    ),
    "GRUCell": Helper(
        _CELL.format(
            name="GRUCell",
            what="A gated recurrent cell",
            gates="3 * ",
            fields="",
            more="",
            kept="",
            zeros="(zeros,)",
            step="""(hidden,) = state
        reset, update, new = jnp.split(given, 3, axis=-1)
        r, z, n = jnp.split(self.hh(hidden), 3, axis=-1)
        update = jax.nn.sigmoid(update + z)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + r) * n)
        return ((1 - update) * new + update * hidden,)""",
        )
    ),
    "RNNCell": Helper(
        _CELL.format(
            name="RNNCell",
            what="A recurrent cell",
            gates="",
            fields="\n    activation: Callable = eqx.field(static=True)",
            more="activation=jnp.tanh, ",
            kept="\n        self.activation = activation",
            zeros="(zeros,)",
            step="return (self.activation(given + self.hh(state[0])),)",
        )
    ),
    "Recurrent": Helper('''class Recurrent(eqx.Module):
    """Layers of recurrent cells over sequences, in one direction or both."""

    cells: list
    dropout: Dropout
    directions: int = eqx.field(static=True)
    batch_first: bool = eqx.field(static=True)

    def __init__(
        self, cell, in_features, features, *, num_layers=1, bidirectional=False, batch_first=False,
        dropout=0.0, key, **options
    ):
        keys = Keys(key)
        self.directions = 2 if bidirectional else 1
        self.batch_first = batch_first
        widths = [in_features] + [features * self.directions] * (num_layers - 1)
        self.cells = [
            cell(width, features, **options, key=keys())
            for width in widths for _ in range(self.directions)
        ]
        self.dropout = Dropout(dropout)

    def __call__(self, x, *states, key=None):
        """Returns the outputs and the last states of all cells.

        The first states may be given, also as one tuple.
        """
        states = states[0] if states and isinstance(states[0], tuple) else states
        keys = Keys(key)
        x = x.swapaxes(0, 1) if self.batch_first else x
        lasts = []
        for at in range(0, len(self.cells), self.directions):
            x = self.dropout(x, key=keys()) if at else x
            outputs = []
            for direction in range(self.directions):
                cell = self.cells[at + direction]
                state = tuple(one[at + direction] for one in states) or cell.zeros(x[0])
                last, output = self.run(cell, x, state, reverse=direction == 1)
                outputs.append(output)
                lasts.append(last)
            x = jnp.concatenate(outputs, axis=-1)
        x = x.swapaxes(0, 1) if self.batch_first else x
        return x, *map(jnp.stack, zip(*lasts, strict=True))

    def run(self, cell, x, state, *, reverse):
        def step(state, given):
            state = cell.step(given, state)
            return state, state[0]

        return jax.lax.scan(step, state, cell.ih(x), reverse=reverse)'''),
}
