"""Recurrent layers that files for Equinox have beside the model's classes; see `layers`."""

from __future__ import annotations

import functools
import operator
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fmapper_translate.equinox.weights import Keys
from fmapper_translate.targets.functions import uniform_init


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
        self, input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0,
        bidirectional=False, *, key,
    ):  # fmt: skip
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


class GRU(LSTM):
    """Layers of gated recurrent units over sequences, with PyTorch's order of gates."""

    gates: ClassVar[int] = 3

    def begin(self, zeros, x):
        return super().begin(zeros, x)[0]

    def step(self, given, recur, state):
        reset, update, new = jnp.split(given, 3, axis=-1)
        r, z, n = jnp.split(recur(state), 3, axis=-1)
        update = jax.nn.sigmoid(update + z)
        state = (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + r) * n) + update * state
        return state, state


class LSTMCell(LSTM):
    """One step of a layer of long short-term memory."""

    def __init__(self, input_size, hidden_size, bias=True, *, key):
        super().__init__(input_size, hidden_size, bias=bias, key=key)

    def __call__(self, x, state=None):
        state = self.begin(jnp.zeros(x.shape[:-1]), x) if state is None else state
        recur = functools.partial(self.project, "hh_l0")
        return self.step(self.project("ih_l0", x), recur, state)[0]

    def name(self, name):
        return name.removesuffix("_l0")


class GRUCell(LSTMCell, GRU):
    """One step of a layer of gated recurrent units."""
