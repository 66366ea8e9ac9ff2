"""Recurrent networks: several layers, both directions, padded or packed sequences.

Input products of all steps are one matrix product; only the recurrent one is in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fmapper_adapters.jax.aten.table import lowering
from fmapper_adapters.jax.aten.types import wide

State = tuple[Any, ...]
Step = Callable[[Any, State, Sequence[Any]], State]


# --- one step -----------------------------------------------------------------------------------


def _lstm_step(gates: Any, state: State, weights: Sequence[Any]) -> State:
    """Returns the next hidden and cell state, from the input's gates, `(batch, 4 * hidden)`."""
    hidden, cell = state
    recurrent, bias = weights[0], weights[1]
    i, f, g, o = jnp.split(gates + _affine(hidden, recurrent, bias), 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    if len(weights) > 2:  # a projection of the hidden state
        hidden = _affine(hidden, weights[2], None)
    return hidden, cell


def _gru_step(gates: Any, state: State, weights: Sequence[Any]) -> State:
    (hidden,) = state
    r, z, n = jnp.split(gates, 3, -1)
    hr, hz, hn = jnp.split(_affine(hidden, weights[0], weights[1]), 3, -1)
    n = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
    z = jax.nn.sigmoid(z + hz)
    return ((hidden - n) * z + n,)


def _tanh_step(gates: Any, state: State, weights: Sequence[Any]) -> State:
    return (jnp.tanh(gates + _affine(state[0], weights[0], weights[1])),)


def _relu_step(gates: Any, state: State, weights: Sequence[Any]) -> State:
    x = gates + _affine(state[0], weights[0], weights[1])
    return (jnp.maximum(x, jnp.zeros((), x.dtype)),)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    y = x @ weight.astype(x.dtype).T
    return y if bias is None else y + bias.astype(x.dtype)


# --- layers -------------------------------------------------------------------------------------


def _layer(
    step: Step,
    x: Any,
    start: State,
    params: Sequence[Any],
    has_biases: bool,
    reverse: bool,
    active: Any,
) -> tuple[Any, State]:
    """Runs one layer in one direction over `(time, batch, features)`, in one dtype.

    Args:
        step: The function of one step.
        x: The inputs.
        start: The initial states, each `(batch, features)`.
        params: Weights of the input and of the state, their biases, and perhaps a projection.
        has_biases: Whether there are biases.
        reverse: Whether to run from the last step to the first.
        active: `(time, batch)`, where sequences have elements; None if all have.

    Returns:
        The hidden states of all steps, and the last states.
    """
    biases = params[2:4] if has_biases else (None, None)
    rest = tuple(params[4 if has_biases else 2 :])
    gates = _affine(x, params[0], biases[0])
    weights = (params[1], biases[1], *rest)

    def body(state: State, now: Any) -> tuple[State, Any]:
        gate, alive = now
        new = step(gate, state, weights)
        if alive is not None:
            new = tuple(jnp.where(alive[:, None], a, b) for a, b in zip(new, state, strict=True))
        return new, new[0]

    last, outputs = jax.lax.scan(body, start, (gates, active), reverse=reverse)
    return outputs, last


def _network(
    step: Step,
    x: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    key: Any = None,
    active: Any = None,
) -> tuple[Any, ...]:
    """Runs all layers over `(time, batch, features)`: the outputs, and each kind of last state."""
    dtype, small = wide(x.dtype), x.dtype
    x = x.astype(dtype)
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    lasts: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            y, last = _layer(
                step,
                x,
                tuple(state[at].astype(dtype) for state in states),
                params[at * each : (at + 1) * each],
                has_biases,
                bool(direction),
                active,
            )
            outputs.append(y)
            lasts.append(last)
        x = outputs[0] if directions == 1 else jnp.concatenate(outputs, -1)
        if train and dropout and key is not None and layer < num_layers - 1:
            kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1.0 - dropout, x.shape)
            larger = 0.0 if dropout >= 1 else 1.0 / (1.0 - dropout)
            x = jnp.where(kept, x * larger, jnp.zeros((), dtype))
    if active is not None:
        x = jnp.where(active[:, :, None], x, jnp.zeros((), dtype))
    ends = [jnp.stack(kind).astype(small) for kind in zip(*lasts, strict=True)]
    return x.astype(small), *ends


def _run_padded(
    step: Step, x: Any, states: Sequence[Any], params: Sequence[Any], *options: Any, key: Any = None
) -> tuple[Any, ...]:
    """Runs all layers over padded sequences; the last of `options` is `batch_first`."""
    *options, batch_first = options  # type: ignore[assignment]
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
    x, *ends = _network(step, x, states, params, *options, key=key)
    return (jnp.swapaxes(x, 0, 1) if batch_first else x), *ends


def _run_packed(
    step: Step,
    data: Any,
    batch_sizes: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    *options: Any,
    key: Any = None,
) -> tuple[Any, ...]:
    """Pads packed sequences, and packs the results again, which is a gather each."""
    batch = states[0].shape[1]
    sizes = jnp.asarray(batch_sizes)
    steps = sizes.shape[0]
    active = jnp.arange(batch)[None, :] < sizes[:, None]
    first = jnp.cumsum(sizes) - sizes
    places = jnp.clip(first[:, None] + jnp.arange(batch)[None, :], 0, data.shape[0] - 1)
    x = jnp.where(active[:, :, None], data[places], jnp.zeros((), data.dtype))
    x, *ends = _network(step, x, states, params, *options, key=key, active=active)
    row = jnp.arange(data.shape[0])
    time = jnp.searchsorted(first, row, side="right") - 1
    # Steps without elements begin where the next step does; the last such step wins.
    return x[jnp.clip(time, 0, steps - 1), row - first[time]], *ends


# --- operations ---------------------------------------------------------------------------------


Network = Callable[..., tuple[Any, ...]]


def _register(
    name: str, step: Step, states: Callable[[Any], Sequence[Any]]
) -> tuple[Network, Network]:
    """Registers a network, padded and packed, each with dropout between the layers or without.

    Args:
        name: The name of torch's operation.
        step: One step of it.
        states: Splits torch's argument for states into its kinds of states.
    """

    def run(x: Any, hx: Any, params: Any, *options: Any, key: Any = None) -> tuple[Any, ...]:
        return _run_padded(step, x, states(hx), params, *options, key=key)

    def run_packed(
        data: Any, sizes: Any, hx: Any, params: Any, *options: Any, key: Any = None
    ) -> tuple[Any, ...]:
        return _run_packed(step, data, sizes, states(hx), params, *options, key=key)

    for variant, function in (("input", run), ("data", run_packed)):
        lowering(f"aten::{name}.{variant}")(function)
        lowering(f"fmapper::{name}_with_dropout.{variant}", random=True)(function)
    return run, run_packed


lstm, lstm_packed = _register("lstm", _lstm_step, tuple)
gru, gru_packed = _register("gru", _gru_step, lambda state: (state,))
rnn_tanh, rnn_tanh_packed = _register("rnn_tanh", _tanh_step, lambda state: (state,))
rnn_relu, rnn_relu_packed = _register("rnn_relu", _relu_step, lambda state: (state,))
_STEPS = {"lstm": _lstm_step, "gru": _gru_step, "rnn_tanh": _tanh_step, "rnn_relu": _relu_step}


@lowering("fmapper::packed_network")
def packed_network(
    name: str,
    data: Any,
    lengths: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    *options: Any,
    key: Any = None,
) -> tuple[Any, ...]:
    """Runs a network over sequences of these lengths, which are padded to one length."""
    batch = lengths.shape[0]
    steps = data.shape[0] // batch
    active = jnp.arange(steps)[:, None] < lengths
    x = data.reshape(steps, batch, -1)
    x = jnp.where(active[:, :, None], x, jnp.zeros((), x.dtype))
    x, *ends = _network(_STEPS[name], x, states, params, *options, key=key, active=active)
    return x.reshape(data.shape[0], -1), *ends


lowering("fmapper::packed_network_with_dropout", random=True)(packed_network)


def _cell(
    step: Step, x: Any, states: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any
) -> State:
    dtype = wide(x.dtype)
    gates = _affine(x.astype(dtype), w_ih, b_ih)
    new = step(gates, tuple(state.astype(dtype) for state in states), (w_hh, b_hh))
    return tuple(state.astype(x.dtype) for state in new)


@lowering("aten::lstm_cell")
def lstm_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> State:
    """Returns the next hidden and cell state."""
    return _cell(_lstm_step, x, hx, w_ih, w_hh, b_ih, b_hh)


@lowering("aten::gru_cell")
def gru_cell(
    x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> jax.Array:
    """Returns the next hidden state."""
    return _cell(_gru_step, x, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@lowering("aten::rnn_tanh_cell")
def rnn_tanh_cell(
    x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> jax.Array:
    """Returns the next hidden state."""
    return _cell(_tanh_step, x, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@lowering("aten::rnn_relu_cell")
def rnn_relu_cell(
    x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> jax.Array:
    """Returns the next hidden state."""
    return _cell(_relu_step, x, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@lowering("aten::_thnn_fused_lstm_cell")
def fused_lstm_cell(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, ...]:
    """Returns the next hidden and cell state, and the gates."""
    dtype = wide(cx.dtype)
    gates = input_gates.astype(dtype) + hidden_gates.astype(dtype)
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias.astype(dtype)
    i, f, g, o = jnp.split(gates, 4, -1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cell = f * cx.astype(dtype) + i * g
    hidden = o * jnp.tanh(cell)
    small = cx.dtype
    workspace = jnp.concatenate([i, f, g, o], -1).astype(small)
    return hidden.astype(small), cell.astype(small), workspace


@lowering("aten::_pack_padded_sequence", data_dependent_shape=True)
def pack_padded_sequence(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """Returns the elements of padded sequences step by step, and the number in each step."""
    sizes = np.asarray(lengths)
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
    steps = np.arange(int(sizes.max(initial=0)))
    alive = steps[:, None] < sizes[None, :]
    time, row = np.nonzero(alive)
    return x[time, row], jnp.asarray(alive.sum(1))
