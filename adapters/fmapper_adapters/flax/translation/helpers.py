"""Classes that a file for NNX has beside the model's own."""

from __future__ import annotations

from fmapper.translation import Helper

_CHANNELS = '''class {name}(nnx.{name}):
    """{what}, with the channels first, as in PyTorch."""

    def __call__(self, x):
        return jnp.moveaxis(super().__call__(jnp.moveaxis(x, 1, -1)), -1, 1)'''

_CELL = '''class {name}(nnx.Module):
    """{what}, with the biases and the order of gates of PyTorch."""

    def __init__(self, in_features, features, *, use_bias=True, rngs: nnx.Rngs, {more}**options):
        self.features = features{kept}
        options |= {{"use_bias": use_bias, "rngs": rngs}}
        self.ih = nnx.Linear(in_features, {gates}features, **options)
        self.hh = nnx.Linear(features, {gates}features, **options)

    def __call__(self, x, *state):
        """Returns the next state; one of zeros is what it begins with. It may be one tuple."""
        state = state[0] if state and isinstance(state[0], tuple) else state
        return self.step(self.ih(x), state or self.zeros(x))

    def zeros(self, x):
        return {zeros}

    def step(self, given, state):
        {step}'''

RECURRENT = {
    "LSTMCell": Helper(
        _CELL.format(
            name="LSTMCell",
            what="A cell of long short-term memory",
            gates="4 * ",
            more="",
            kept="",
            zeros="(zeros := jnp.zeros((x.shape[0], self.features), x.dtype)), zeros",
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
            more="",
            kept="",
            zeros="(jnp.zeros((x.shape[0], self.features), x.dtype),)",
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
            more="activation=jnp.tanh, ",
            kept="\n        self.activation = activation",
            zeros="(jnp.zeros((x.shape[0], self.features), x.dtype),)",
            step="return (self.activation(given + self.hh(state[0])),)",
        )
    ),
    "Recurrent": Helper('''class Recurrent(nnx.Module):
    """Layers of recurrent cells over sequences, in one direction or both."""

    def __init__(
        self, cell, in_features, features, *, num_layers=1, bidirectional=False, batch_first=False,
        dropout=0.0, rngs: nnx.Rngs, **options
    ):
        self.directions = 2 if bidirectional else 1
        self.batch_first = batch_first
        widths = [in_features] + [features * self.directions] * (num_layers - 1)
        self.cells = nnx.List(
            cell(width, features, rngs=rngs, **options)
            for width in widths for _ in range(self.directions)
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, *states):
        """Returns the outputs and the last states of all cells.

        The first states may be given, also as one tuple.
        """
        states = states[0] if states and isinstance(states[0], tuple) else states
        x = x.swapaxes(0, 1) if self.batch_first else x
        lasts = []
        for at in range(0, len(self.cells), self.directions):
            x = self.dropout(x) if at else x
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

_DEFAULTS = """    def __init__(self, *sizes, {name}={value}, **options):
        super().__init__(*sizes, {name}={name}, **options)

    def __call__("""


def _with_default(helper: str, name: str, value: str) -> str:
    """Returns a class with another default for a keyword, that of PyTorch."""
    return helper.replace("    def __call__(", _DEFAULTS.format(name=name, value=value), 1)


HELPERS = {
    "Conv": Helper(
        _with_default(_CHANNELS.format(name="Conv", what="A convolution"), "padding", "0")
    ),
    "ConvTranspose": Helper(
        _with_default(
            _CHANNELS.format(name="ConvTranspose", what="A transposed convolution"),
            "transpose_kernel",
            "True",
        )
    ),
    "GroupedConvTranspose": Helper('''class GroupedConvTranspose(nnx.ConvTranspose):
    """A transposed convolution of groups of channels, which are the first dimension."""

    def __init__(self, in_features, out_features, kernel_size, *, groups, rngs, **options):
        each = out_features // groups
        options["transpose_kernel"] = True
        super().__init__(in_features, each, kernel_size, rngs=rngs, **options)
        self.groups = groups
        if self.bias is not None:
            self.bias = nnx.Param(jnp.zeros((out_features,), self.bias[...].dtype))

    def __call__(self, x):
        spatial = "DHW"[3 - (x.ndim - 2) :]
        layout = f"NC{spatial}", f"{spatial}IO", f"NC{spatial}"
        parts = jnp.split(x, self.groups, axis=1)
        kernels = jnp.split(self.kernel[...], self.groups, axis=-1)
        options = {
            "strides": np.broadcast_to(self.strides or 1, len(spatial)).tolist(),
            "padding": self.padding,
            "rhs_dilation": np.broadcast_to(self.kernel_dilation or 1, len(spatial)).tolist(),
            "dimension_numbers": layout,
            "transpose_kernel": True,
        }
        pairs = zip(parts, kernels, strict=True)
        y = jnp.concatenate([jax.lax.conv_transpose(*pair, **options) for pair in pairs], axis=1)
        if self.bias is None:
            return y
        return y + self.bias[...].reshape(1, -1, *(1,) * len(spatial))'''),
    "PaddedEmbed": Helper('''class PaddedEmbed(nnx.Embed):
    """The rows of a table; the row `padding_idx` gets no gradient, as in PyTorch."""

    def __init__(self, *sizes, padding_idx, **options):
        super().__init__(*sizes, **options)
        self.padding_idx = padding_idx

    def __call__(self, inputs):
        rows = super().__call__(inputs)
        is_padding = (inputs == self.padding_idx)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)'''),
    "GroupNorm": Helper(_CHANNELS.format(name="GroupNorm", what="Normalisation of groups")),
    "BatchNorm": Helper('''class BatchNorm(nnx.BatchNorm):
    """Normalisation of batches, with the channels first and running statistics as in PyTorch."""

    def __init__(self, *sizes, momentum=0.9, **options):
        super().__init__(*sizes, momentum=momentum, **options)

    def __call__(self, x):
        x = jnp.moveaxis(x, 1, -1)
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            axes = tuple(range(x.ndim - 1))
            mean, var = x.mean(axes), x.var(axes)
            count = x.size / x.shape[-1]
            if count == 1:
                raise ValueError(f"a channel of {x.shape} has one value, and no variance")
            keep = self.momentum
            self.mean[...] = keep * self.mean[...] + (1 - keep) * mean
            unbiased = var * count / (count - 1)
            self.var[...] = keep * self.var[...] + (1 - keep) * unbiased
        scale = jax.lax.rsqrt(var + self.epsilon)
        if self.scale is not None:
            scale = scale * self.scale[...]
        y = (x - mean) * scale
        return jnp.moveaxis(y if self.bias is None else y + self.bias[...], -1, 1)'''),
    "WeightNorm": Helper(
        '''class WeightNorm(nnx.Module):
    """A layer whose kernel has lengths of its own along an axis, as PyTorch's weight_norm."""

    def __init__(self, layer, axis=-1):
        self.layer = layer
        self.axis = axis
        self.scale = nnx.Param(self.lengths())

    def lengths(self):
        kernel = jnp.moveaxis(kernel_of(self.layer)[...], self.axis, -1)
        lengths = jnp.sqrt(jnp.square(kernel).sum(tuple(range(kernel.ndim - 1)), keepdims=True))
        return jnp.moveaxis(lengths, -1, self.axis)

    def __call__(self, x):
        layer = nnx.clone(self.layer)
        kernel_of(layer)[...] *= self.scale[...] / self.lengths()
        return layer(x)''',
        frozenset({"kernel_of"}),
    ),
    "SpectralNorm": Helper(
        '''class SpectralNorm(nnx.Module):
    """A layer whose kernel is divided by its largest singular value, as PyTorch's spectral_norm.

    The two vectors that belong to it are improved in training, in the order of `steps`.
    """

    def __init__(self, layer, axis=-1, *, steps, rngs: nnx.Rngs):
        self.layer = layer
        self.axis = axis
        self.steps = steps
        self.use_running_average = False
        rows, columns = self.matrix().shape
        normal = nnx.initializers.normal()
        self.u = nnx.BatchStat(unit_vector(normal(rngs.params(), (rows,))))
        self.v = nnx.BatchStat(unit_vector(normal(rngs.params(), (columns,))))

    def matrix(self):
        """Returns the kernel with its outputs as rows, and dimensions in PyTorch's order."""
        kernel = jnp.moveaxis(kernel_of(self.layer)[...], (self.axis, -3 - self.axis), (0, 1))
        return kernel.reshape(kernel.shape[0], -1)

    def __call__(self, x):
        matrix = self.matrix()
        u, v = self.u[...], self.v[...]
        if not self.use_running_average:
            fixed = jax.lax.stop_gradient(matrix)
            for name in self.steps:
                u, v = (unit_vector(fixed @ v), v) if name == "u" else (u, unit_vector(u @ fixed))
            self.u[...], self.v[...] = u, v
        layer = nnx.clone(self.layer)
        kernel_of(layer)[...] /= u @ matrix @ v
        return layer(x)''',
        frozenset({"kernel_of", "unit_vector"}),
    ),
    "kernel_of": Helper('''def kernel_of(layer):
    """Returns the kernel of a layer; of an embedding its table."""
    return layer.embedding if isinstance(layer, nnx.Embed) else layer.kernel'''),
    "unit_vector": Helper('''def unit_vector(x):
    """Returns the direction of a vector."""
    return x / jnp.maximum(jnp.sqrt(jnp.square(x).sum()), 1e-12)'''),
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
    **RECURRENT,
    "InOrder": Helper('''class InOrder:
    """Calls its items one after the other."""

    def __call__(self, x):
        for part in self:
            x = part(x)
        return x'''),
    # `nnx.capture` would put what a class's own `__call__` gives among the items of a list.
    "Sequential": Helper(
        '''class Sequential(InOrder, nnx.List):
    """Parts that are called one after the other."""

    def __init__(self, *parts):
        super().__init__(parts)''',
        frozenset({"InOrder"}),
    ),
    "Buffer": Helper('''class Buffer(nnx.Variable):
    """An array that is not trained."""'''),
    "LoadedBuffer": Helper('''class LoadedBuffer(nnx.Variable):
    """An array that is not trained, with the values that `load_weights` gives it."""'''),
    "FrozenParam": Helper('''class FrozenParam(nnx.Variable):
    """A parameter that is not trained."""'''),
    "freeze": Helper('''def freeze(model, paths):
    """Makes the parameters of parts, and single ones, variables that are not trained."""
    for path, layer in list(nnx.iter_modules(model)):
        for key, variable in list(vars(layer).items()):
            name = ".".join(map(str, (*path, key))) + "."
            if isinstance(variable, nnx.Param) and any(name.startswith(f"{p}.") for p in paths):
                setattr(layer, key, FrozenParam(variable[...]))'''),
}
