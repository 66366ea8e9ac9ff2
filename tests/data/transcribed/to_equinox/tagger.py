"""BiLSTMTagger for Equinox, transcribed from models.repositories.tagger"""

from __future__ import annotations

import math
import operator
from typing import Any
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp


def ntuple(size: Any, count: int) -> tuple[Any, ...]:
    """Returns a size for each dimension, where one may stand for all."""
    return (size,) * count if isinstance(size, int | float) else tuple(size)


def uniform_init(low, high):
    """Returns an initializer that draws uniformly from an interval."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


class Conv1d(eqx.Module):
    """A convolution of sequences with the channels first."""

    rank: ClassVar[int] = 1
    weight: jax.Array
    bias: jax.Array | None
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    kernel_size: tuple[int, ...] = eqx.field(static=True)
    stride: tuple[int, ...] = eqx.field(static=True)
    padding: Any = eqx.field(static=True)
    dilation: tuple[int, ...] = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    padding_mode: str = eqx.field(static=True)

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        padding_mode="zeros",
        *,
        key,
    ):
        if padding_mode != "zeros" and isinstance(padding, str):
            raise ValueError(f"{padding_mode} padding of a size that is called {padding!r}")
        self.padding_mode = padding_mode
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = ntuple(kernel_size, self.rank), ntuple(stride, self.rank)
        self.dilation = ntuple(dilation, self.rank)
        self.padding = padding if isinstance(padding, str) else ntuple(padding, self.rank)
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        bound, (first, second) = math.prod(shape[1:]) ** -0.5, jax.random.split(key)
        self.weight = uniform_init(-bound, bound)(first, shape)
        self.bias = uniform_init(-bound, bound)(second, (out_channels,)) if bias else None

    def __call__(self, x):
        is_named = isinstance(self.padding, str)
        pads = self.padding.upper() if is_named else [(size, size) for size in self.padding]
        if self.padding_mode != "zeros":
            modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
            x, pads = jnp.pad(x, [(0, 0), (0, 0), *pads], modes[self.padding_mode]), "VALID"
        y = jax.lax.conv_general_dilated(
            x,
            self.weight,
            self.stride,
            pads,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * self.rank)


class Embedding(eqx.nn.Embedding):
    """A table of vectors, of which that of padding is not trained."""

    padding_idx: int | None = eqx.field(static=True)

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *, key):
        super().__init__(num_embeddings, embedding_dim, key=key)
        self.padding_idx = padding_idx
        if padding_idx is not None:
            self.weight = self.weight.at[padding_idx].set(0.0)

    def __call__(self, ids):
        x = self.weight[ids]
        if self.padding_idx is None:
            return x
        is_padding = (ids == self.padding_idx % self.num_embeddings)[..., None]
        return jnp.where(is_padding, jax.lax.stop_gradient(x), x)

    def attend(self, x):
        return x @ self.weight.T


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


class LSTM(eqx.Module):
    """Layers of long short-term memory over sequences, with PyTorch's order of gates."""

    gates: ClassVar[int] = 4
    inside: ClassVar[str] = "arrays"
    arrays: dict[str, jax.Array]
    dropout: eqx.nn.Dropout
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    batch_first: bool = eqx.field(static=True)
    ends: tuple[str, ...] = eqx.field(static=True)

    def __init__(
        self,
        input_size,
        hidden_size,
        num_layers=1,
        bias=True,
        batch_first=False,
        dropout=0.0,
        bidirectional=False,
        *,
        key,
    ):
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.batch_first = num_layers, batch_first
        self.ends = ("", "_reverse") if bidirectional else ("",)
        self.dropout = eqx.nn.Dropout(dropout)
        init, width = uniform_init(-(hidden_size**-0.5), hidden_size**-0.5), input_size
        rows, keys = self.gates * hidden_size, Keys(key)
        self.arrays = {}
        for layer in range(num_layers):
            for end in self.ends:
                shapes = {"weight_ih": (rows, width), "weight_hh": (rows, hidden_size)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                for name, shape in shapes.items():
                    self.arrays[self.name(f"{name}_l{layer}{end}")] = init(keys(), shape)
            width = len(self.ends) * hidden_size

    def __call__(self, x, state=None, *, key=None):
        x, keys = x.swapaxes(0, 1) if self.batch_first else x, Keys(key)
        if state is None:
            state = self.begin(jnp.zeros((self.num_layers * len(self.ends), *x.shape[1:-1])), x)
        lasts = []
        for layer in range(self.num_layers):
            x = self.dropout(x, key=keys()) if layer else x
            outputs = []
            for at, end in enumerate(self.ends):
                row = layer * len(self.ends) + at
                first = jax.tree.map(operator.itemgetter(row), state)
                last, y = self.run(x, first, f"_l{layer}{end}", reverse=bool(end))
                lasts.append(last)
                outputs.append(y)
            x = jnp.concatenate(outputs, axis=-1)
        last = jax.tree.map(lambda *all: jnp.stack(all), *lasts)
        return x.swapaxes(0, 1) if self.batch_first else x, last

    def name(self, name):
        return name

    def begin(self, zeros, x):
        zeros = jnp.broadcast_to(zeros[..., None], (*zeros.shape, self.hidden_size))
        return zeros.astype(x.dtype), zeros.astype(x.dtype)

    def project(self, name, x):
        x = x @ self.arrays[self.name(f"weight_{name}")].T
        bias = self.arrays.get(self.name(f"bias_{name}"))
        return x if bias is None else x + bias

    def run(self, x, first, end, *, reverse):
        def step(state, given):
            return self.step(given, lambda hidden: self.project(f"hh{end}", hidden), state)

        return jax.lax.scan(step, first, self.project(f"ih{end}", x), reverse=reverse)

    def step(self, given, recur, state):
        hidden, cell = state
        i, f, g, o = jnp.split(given + recur(hidden), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolves x (batch, in, ...) with weight (out, in / groups, ...)."""
    count = weight.ndim - 2
    stride, padding, dilation = (
        v * count if len(v) == 1 else v
        for v in (v if isinstance(v, tuple) else (v,) for v in (stride, padding, dilation))
    )
    axes = ("NCDHW"[:2] + "DHW"[3 - count :], "OI" + "DHW"[3 - count :])
    y = jax.lax.conv_general_dilated(
        x,
        weight,
        stride,
        [(p, p) for p in padding],
        rhs_dilation=dilation,
        dimension_numbers=(*axes, axes[0]),
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *(1,) * count)


def initialize(owner, name, init, key):
    """Gives an array of a model that is still being made the values of an initializer."""
    array = Place(owner, name)
    set_part(owner, name, init(key, array.shape, array.dtype))


def max_with_index(x, axis, keepdims=False):
    """Returns the largest elements along an axis and where they are."""
    return largest(x, axis, keepdims), x.argmax(axis=axis, keepdims=keepdims)


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


def named_parameters(model):
    """Yields the name of each array that is trained in the source, and its place."""
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        steps = [*steps_to(model, path)]
        is_trained = all(settings_of(*step).get("trained", True) for step in steps)
        if eqx.is_inexact_array(array) and is_trained:
            yield name_in_source(model, path), Place(*steps[-1])


def set_part(owner, name, value):
    """Gives a part of a model that is still being made another array or module."""
    if isinstance(owner, eqx.Module):
        object.__setattr__(owner, name, value)
    else:
        owner[name] = value


def settings_of(owner, name):
    """Returns how a field of a module is declared."""
    return type(owner).__dataclass_fields__[name].metadata if isinstance(owner, eqx.Module) else {}


def steps_to(model, path):
    """Yields the parts on a key path, and the name or number of the next one in each."""
    owner = model
    for step in path:
        name = next(getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind))
        yield owner, name
        owner = getattr(owner, name) if isinstance(owner, eqx.Module) else owner[name]


class Place:
    """An array in a part of a model that is still being made."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __iter__(self):
        return iter((self.owner, self.name))

    def __jax_array__(self):
        return self.array

    @property
    def array(self):
        is_module = isinstance(self.owner, eqx.Module)
        return getattr(self.owner, self.name) if is_module else self.owner[self.name]

    def __getattr__(self, name):
        return getattr(self.array, name)


def largest(x, axis=None, keepdims=False, shared=False):
    """Returns the largest elements; the first of equal ones has the gradient, or all share it.

    That of `x.max` is zero where XLA computes `x` once more to compare it, and rounds otherwise.
    """
    axes = axis if isinstance(axis, tuple) else range(x.ndim) if axis is None else (axis,)

    def rows_of(y):
        y = jnp.moveaxis(y, axes, range(-len(axes), 0))
        return y.reshape(*y.shape[: y.ndim - len(axes)], -1)

    @jax.custom_jvp
    def compute(x):
        return x.max(axis=axis, keepdims=keepdims)

    @compute.defjvp
    def differentiate(given, slopes):
        rows, slope = rows_of(given[0]), rows_of(slopes[0])
        is_one = jax.nn.one_hot(rows.argmax(axis=-1), rows.shape[-1], dtype=bool)
        if shared:
            is_one = is_one | (rows == rows.max(axis=-1, keepdims=True))
        slope = jnp.where(is_one, slope, 0).sum(axis=-1) / is_one.sum(axis=-1)
        return compute(*given), jnp.expand_dims(slope, axes) if keepdims else slope

    return compute(x)


class CharCNN(eqx.Module):
    embedding: Embedding
    convs: list[Conv1d]

    def __init__(self, n_chars, char_dim, n_filters, kernel_sizes=(2, 3), *, key):
        keys = Keys(key)
        self.embedding = Embedding(n_chars, char_dim, padding_idx=0, key=keys())
        self.convs = [
            Conv1d(char_dim, n_filters, k, padding=k - 1, key=keys()) for k in kernel_sizes
        ]

    def __call__(self, chars):
        b, t, c = chars.shape
        x = self.embedding(chars.reshape(b * t, c)).swapaxes(1, 2)
        x = [max_with_index(jax.nn.relu(conv(x)), -1)[0] for conv in self.convs]
        return jnp.concatenate(x, axis=-1).reshape(b, t, -1)


class BiLSTMTagger(eqx.Module):
    hidden_dim: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    word_embeds: Embedding
    char_cnn: CharCNN
    lstm: LSTM
    dropout: eqx.nn.Dropout
    hidden2tag: Linear

    def __init__(
        self,
        vocab_size,
        n_chars,
        tagset_size,
        embedding_dim=16,
        hidden_dim=24,
        num_layers=2,
        dropout=0.3,
        *,
        key,
    ):
        keys = Keys(key)
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.word_embeds = Embedding(vocab_size, embedding_dim, padding_idx=0, key=keys())
        self.char_cnn = CharCNN(n_chars, 6, 4, key=keys())
        self.lstm = LSTM(
            embedding_dim + 8,
            hidden_dim // 2,
            num_layers=num_layers,
            bidirectional=True,
            batch_first=True,
            dropout=dropout,
            key=keys(),
        )
        self.dropout = eqx.nn.Dropout(dropout)
        self.hidden2tag = Linear(hidden_dim, tagset_size, key=keys())
        self.init_weights(key=keys())

    def init_weights(self, *, key):
        keys = Keys(key)
        for name, param in named_parameters(self.lstm):
            if "weight_ih" in name:
                initialize(
                    *param,
                    jax.nn.initializers.variance_scaling(
                        1.0, "fan_avg", "uniform", in_axis=1, out_axis=0
                    ),
                    keys(),
                )
            elif "weight_hh" in name:
                initialize(*param, jax.nn.initializers.orthogonal(), keys())
            elif "bias" in name:
                set_part(*param, jnp.full_like(param, 0))
                # Set forget-gate bias to 1
                n = param.shape[0]
                set_part(*param, param.at[n // 4 : n // 2].set(1))
        initialize(
            self.hidden2tag,
            "weight",
            jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", in_axis=1, out_axis=0),
            keys(),
        )
        set_part(self.hidden2tag, "bias", jnp.zeros_like(self.hidden2tag.bias))

    def init_hidden(self, batch_size):
        shape = 2 * self.num_layers, batch_size, self.hidden_dim // 2
        return jnp.zeros((*shape,)), jnp.zeros((*shape,))

    def __call__(self, sentence, chars, *, key=None):
        keys = Keys(key)
        mask = (sentence != 0).astype(jnp.float32)[..., None]
        embeds = jnp.concatenate([self.word_embeds(sentence), self.char_cnn(chars)], axis=-1)
        hidden = self.init_hidden(sentence.shape[0])
        lstm_out, _ = self.lstm(self.dropout(embeds, key=keys()), hidden, key=keys())
        tag_space = self.hidden2tag(lstm_out * mask)
        return jax.nn.log_softmax(tag_space, axis=2)


TIED = {}  # names in the source's state -> those here


def load_weights(model, state, strict=True):
    """Returns a model with the arrays of the source's state dict.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = {TIED.get(name, name): array for name, array in state.items()}
    known, missing = set(), []

    def load(path, array):
        name = name_in_source(model, path)
        name = TIED.get(name, name)
        known.add(name)
        if name not in given:
            missing.extend([] if name is None else [name])
            return array
        if jnp.shape(given[name]) != array.shape:
            raise ValueError(f"{name}: {jnp.shape(given[name])} instead of {array.shape}")
        return jnp.asarray(given[name], array.dtype)

    arrays, rest = eqx.partition(model, eqx.is_array)
    filled = eqx.combine(jax.tree_util.tree_map_with_path(load, arrays), rest)
    left = [x for x in given if x not in known and not x.endswith("num_batches_tracked")]
    if strict and (missing or left):
        raise ValueError(f"missing: {missing}; left over: {left}")
    return filled


def source_state(model):
    """Returns the arrays of a model by their names in the source."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    named = [(name_in_source(model, path), array) for path, array in leaves]
    state = {name: array for name, array in named if name is not None}
    return state | {second: state[first] for second, first in TIED.items()}
