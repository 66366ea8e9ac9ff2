"""Functions that a file for plain JAX has beside those of the model."""

from __future__ import annotations

from fmapper.translation import Helper

_SPREAD = '''def spread(value, count):
    """Returns a number for each of several dimensions."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values'''

HELPERS = {
    "spread": Helper(_SPREAD),
    "uniform": Helper('''def uniform(key, shape, fan_in, dtype=None):
    """Draws weights, the smaller the more inputs they are for."""
    bound = fan_in**-0.5
    return jax.random.uniform(key, shape, dtype or jnp.float32, -bound, bound)'''),
    "linear": Helper('''def linear(x, weight, bias=None):
    """Multiplies the last dimension with a weight (out, in)."""
    y = x @ weight.T
    return y if bias is None else y + bias'''),
    "init_linear": Helper("""def init_linear(
    key, in_features, out_features, use_bias=True, dtype=None
):
    weight = uniform(key, (out_features, in_features), in_features, dtype)
    return {"weight": weight} | ({"bias": jnp.zeros(out_features, dtype)} if use_bias else {})"""),
    "embedding": Helper('''def embedding(indices, weight):
    """Returns the rows of a table."""
    return weight[indices]'''),
    "padded_embedding": Helper('''def padded_embedding(indices, weight, padding_idx):
    """Returns the rows of a table; the row `padding_idx` gets no gradient."""
    rows = weight[indices]
    is_padding = (indices == padding_idx)[..., None]
    return jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)'''),
    "init_embedding": Helper("""def init_embedding(key, num_embeddings, features, dtype=None):
    return {"weight": jax.random.normal(key, (num_embeddings, features), dtype or jnp.float32)}"""),
    "init_norm": Helper("""def init_norm(features, use_weight=True, use_bias=True, dtype=None):
    weight, bias = jnp.ones(features, dtype), jnp.zeros(features, dtype)
    return ({"weight": weight} if use_weight else {}) | ({"bias": bias} if use_bias else {})"""),
    "batch_norm": Helper('''def batch_norm(
    x, running_mean, running_var, weight=None, bias=None, eps=1e-05
):
    """Normalises channels by statistics that were learned before."""
    shape = (-1, *(1,) * (x.ndim - 2))
    scale = jax.lax.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    y = (x - running_mean.reshape(shape)) * scale.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)'''),
    "init_batch_norm": Helper("""def init_batch_norm(
    features, use_weight=True, use_bias=True, dtype=None
):
    learned = {"running_mean": jnp.zeros(features, dtype), "running_var": jnp.ones(features, dtype)}
    return init_norm(features, use_weight, use_bias, dtype) | learned"""),
    "conv": Helper('''def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolves x (batch, in, ...) with a weight (out, in / groups, ...)."""
    count = weight.ndim - 2
    pads = padding if isinstance(padding, str) else [(p, p) for p in spread(padding, count)]
    y = jax.lax.conv_general_dilated(
        x, weight, spread(stride, count), pads, rhs_dilation=spread(dilation, count),
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * count)'''),
    "init_conv": Helper("""def init_conv(
    key, in_channels, out_channels, kernel_size, groups=1, use_bias=True, dtype=None
):
    shape = (out_channels, in_channels // groups, *kernel_size)
    weight = uniform(key, shape, math.prod(shape[1:]), dtype)
    return {"weight": weight} | ({"bias": jnp.zeros(out_channels, dtype)} if use_bias else {})"""),
    "conv_transpose": Helper('''def conv_transpose(
    x, weight, bias=None, stride=1, padding=0, output_padding=0, dilation=1, groups=1
):
    """Convolves x (batch, in, ...), transposed, with a weight (in, out / groups, ...)."""
    count = weight.ndim - 2
    sizes = weight.shape[2:]
    each = [spread(one, count) for one in (stride, padding, output_padding, dilation)]
    stride, padding, extra, dilation = each
    reach = [d * (k - 1) - p for d, k, p in zip(dilation, sizes, padding, strict=True)]
    kernel = weight.reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
    kernel = jnp.flip(kernel.reshape(-1, kernel.shape[2], *sizes), range(2, count + 2))
    y = jax.lax.conv_general_dilated(
        x, kernel, (1,) * count, [(r, r + e) for r, e in zip(reach, extra, strict=True)],
        lhs_dilation=stride, rhs_dilation=dilation, feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * count)'''),
    "init_conv_transpose": Helper("""def init_conv_transpose(
    key, in_channels, out_channels, kernel_size, groups=1, use_bias=True, dtype=None
):
    shape = (in_channels, out_channels // groups, *kernel_size)
    weight = uniform(key, shape, math.prod(shape[1:]), dtype)
    return {"weight": weight} | ({"bias": jnp.zeros(out_channels, dtype)} if use_bias else {})"""),
    "dropout": Helper('''def dropout(x, rate, broadcast_dims=(), key=None):
    """Leaves elements out where there is a key, with one mask along some dimensions."""
    if key is None or rate == 0:
        return x
    shape = [1 if i in broadcast_dims else size for i, size in enumerate(x.shape)]
    return jnp.where(jax.random.bernoulli(key, 1 - rate, shape), x / (1 - rate), 0)'''),
    "attention_with_dropout": Helper('''def attention_with_dropout(
    query, key_, value, mask=None, *, rate, scale=None, is_causal=False, key=None
):
    """Computes attention whose weights have dropout; fully masked rows give zeros."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = (query * scale) @ key_.swapaxes(-1, -2)
    if is_causal:
        mask = jnp.tri(*logits.shape[-2:], dtype=bool)
    if mask is not None:
        masked = jnp.where(mask, logits, -jnp.inf) if mask.dtype == bool else logits + mask
        logits = masked.astype(logits.dtype)
    empty = jnp.all(jnp.isneginf(logits), axis=-1, keepdims=True)
    weights = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, logits), axis=-1))
    return dropout(weights, rate, key=key) @ value'''),
    "init_cell": Helper("""def init_cell(
    key, gates, in_features, features, use_bias=True, dtype=None
):
    keys = Keys(key)
    return {
        "ih": init_linear(keys(), in_features, gates * features, use_bias, dtype),
        "hh": init_linear(keys(), features, gates * features, use_bias, dtype),
    }"""),
    "init_recurrent": Helper("""def init_recurrent(
    key, gates, in_features, features, num_layers=1, bidirectional=False, use_bias=True, dtype=None
):
    keys = Keys(key)
    directions = 2 if bidirectional else 1
    widths = [in_features] + [features * directions] * (num_layers - 1)
    cells = [
        init_cell(keys(), gates, width, features, use_bias, dtype)
        for width in widths for _ in range(directions)
    ]
    return {"cells": cells}"""),
    "lstm_cell": Helper('''def lstm_cell(x, *state, ih, hh, is_projected=False):
    """Returns the next state of long short-term memory; one of zeros is what it begins with."""
    given = x if is_projected else linear(x, **ih)
    zeros = jnp.zeros((x.shape[0], hh["weight"].shape[1]), x.dtype)
    hidden, cell = state or (zeros, zeros)
    i, f, g, o = jnp.split(given + linear(hidden, **hh), 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell'''),
    "gru_cell": Helper('''def gru_cell(x, *state, ih, hh, is_projected=False):
    """Returns the next state of a gated cell; one of zeros is what it begins with."""
    given = x if is_projected else linear(x, **ih)
    (hidden,) = state or (jnp.zeros((x.shape[0], hh["weight"].shape[1]), x.dtype),)
    reset, update, new = jnp.split(given, 3, axis=-1)
    r, z, n = jnp.split(linear(hidden, **hh), 3, axis=-1)
    update = jax.nn.sigmoid(update + z)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + r) * n)
    return ((1 - update) * new + update * hidden,)'''),
    "rnn_cell": Helper('''def rnn_cell(x, *state, ih, hh, activation=jnp.tanh, is_projected=False):
    """Returns the next state of a cell; one of zeros is what it begins with."""
    given = x if is_projected else linear(x, **ih)
    (hidden,) = state or (jnp.zeros((x.shape[0], hh["weight"].shape[1]), x.dtype),)
    return (activation(given + linear(hidden, **hh)),)'''),
    "recurrent": Helper(
        '''def recurrent(
    x, *states, cell, cells, bidirectional=False, batch_first=False, rate=0.0, key=None, **options
):
    """Runs layers of cells over sequences; returns the outputs and the last states of all."""
    keys = Keys(key)
    directions = 2 if bidirectional else 1
    x = x.swapaxes(0, 1) if batch_first else x
    lasts = []
    for at in range(0, len(cells), directions):
        x = dropout(x, rate, key=keys()) if at else x
        outputs = []
        for direction in range(directions):
            params = cells[at + direction]
            given = linear(x, **params["ih"])
            zeros = jnp.zeros((x.shape[1], params["hh"]["weight"].shape[1]), x.dtype)
            state = tuple(one[at + direction] for one in states)
            state = state or ((zeros, zeros) if cell is lstm_cell else (zeros,))

            def step(state, given, params=params):
                state = cell(given, *state, **params, is_projected=True, **options)
                return state, state[0]

            last, output = jax.lax.scan(step, state, given, reverse=direction == 1)
            outputs.append(output)
            lasts.append(last)
        x = jnp.concatenate(outputs, axis=-1)
    x = x.swapaxes(0, 1) if batch_first else x
    return x, *map(jnp.stack, zip(*lasts, strict=True))''',
        frozenset({"lstm_cell"}),
    ),
    "merge": Helper('''def merge(params, buffers):
    """Returns the tree that `split` has split."""
    join = lambda one, other: other if one is None else one
    return jax.tree.map(join, params, buffers, is_leaf=lambda x: x is None)'''),
    "split": Helper('''def split(tree):
    """Returns the parameters and the arrays that are not trained, with None for the others."""

    def pick(path, array, is_buffer):
        name = "." + jax.tree_util.keystr(path, simple=True, separator=".")
        return array if is_buffer == name.endswith(BUFFERS) else None

    both = [jax.tree_util.tree_map_with_path(partial(pick, is_buffer=one), tree) for one in
            (False, True)]
    return tuple(both)'''),
}
