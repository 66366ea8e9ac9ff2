"""Recurrent layers that files for Flax NNX have beside the model's classes; see `layers`."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from flax import nnx

from fmapper_translate.targets.functions import uniform_init


class LSTM(nnx.Module):
    """Layers of long short-term memory over sequences, with PyTorch's order of gates."""

    gates = 4

    def __init__(
        self, input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0,
        bidirectional=False, *, rngs,
    ):  # fmt: skip
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.batch_first = num_layers, batch_first
        self.bidirectional, self.ends = bidirectional, ("", "_reverse")[: 1 + bidirectional]
        self.names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if bias else 2]
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        init, width = uniform_init(-(hidden_size**-0.5), hidden_size**-0.5), input_size
        rows = self.gates * hidden_size
        for layer in range(num_layers):
            for end in self.ends:
                shapes = {"weight_ih": (rows, width), "weight_hh": (rows, hidden_size)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                for name, shape in shapes.items():
                    setattr(self, f"{name}_l{layer}{end}", nnx.Param(init(rngs.params(), shape)))
            width = len(self.ends) * hidden_size

    @property
    def arrays_of_layers(self):
        layers = [f"l{layer}{end}" for layer in range(self.num_layers) for end in self.ends]
        return [[f"{name}_{layer}" for name in self.names] for layer in layers]

    def __call__(self, x, state=None):
        x = x.swapaxes(0, 1) if self.batch_first else x
        if state is None:
            state = self.begin(jnp.zeros((self.num_layers * len(self.ends), *x.shape[1:-1])), x)
        lasts = []
        for layer in range(self.num_layers):
            x = self.dropout(x) if layer else x
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

    def begin(self, zeros, x):
        zeros = jnp.broadcast_to(zeros[..., None], (*zeros.shape, self.hidden_size))
        return zeros.astype(x.dtype), zeros.astype(x.dtype)

    def project(self, name, x):
        x = x @ getattr(self, f"weight_{name}")[...].T
        bias = getattr(self, f"bias_{name}", None)
        return x if bias is None else x + bias[...]

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

    gates = 3

    def begin(self, zeros, x):
        return super().begin(zeros, x)[0]

    def step(self, given, recur, state):
        reset, update, new = jnp.split(given, 3, axis=-1)
        r, z, n = jnp.split(recur(state), 3, axis=-1)
        update = jax.nn.sigmoid(update + z)
        state = (1 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + r) * n) + update * state
        return state, state


class RNN(LSTM):
    """Layers of plain recurrent units over sequences."""

    gates = 1

    def __init__(
        self, input_size, hidden_size, num_layers=1, nonlinearity="tanh", bias=True, *args, rngs,
        **more,
    ):  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, *args, rngs=rngs, **more)
        self.activation = jax.nn.relu if nonlinearity == "relu" else jnp.tanh

    def begin(self, zeros, x):
        return super().begin(zeros, x)[0]

    def step(self, given, recur, state):
        state = self.activation(given + recur(state))
        return state, state


class LSTMCell(LSTM):
    """One step of a layer of long short-term memory."""

    source_arrays = {
        f"{name}_l0": (name, None) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }

    def __init__(self, input_size, hidden_size, bias=True, *, rngs):
        super().__init__(input_size, hidden_size, bias=bias, rngs=rngs)

    def __call__(self, x, state=None):
        state = self.begin(jnp.zeros(x.shape[:-1]), x) if state is None else state
        recur = functools.partial(self.project, "hh_l0")
        return self.step(self.project("ih_l0", x), recur, state)[0]


class GRUCell(LSTMCell, GRU):
    """One step of a layer of gated recurrent units."""
