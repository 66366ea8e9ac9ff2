"""Recurrent layers and loops that files for PyTorch have, with Flax's arguments and names."""

from __future__ import annotations

import torch
from torch import nn

from fmapper_translate.torch.layers import Linear
from fmapper_translate.torch.weights import lecun_normal, orthogonal_init


def map_tree(function, tree):
    """Calls a function with each array of a tree of tuples, lists and dicts."""
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tree(function, item) for key, item in tree.items()}
    return None if tree is None else function(tree)


def element(tree, at):
    """Returns an element of each array of a tree."""
    return map_tree(lambda x: x[at], tree)


def stack(trees):
    """Stacks the arrays of trees of one structure."""
    first = trees[0]
    if isinstance(first, tuple | list):
        return type(first)(map(stack, zip(*trees, strict=True)))
    if isinstance(first, dict):
        return {key: stack([tree[key] for tree in trees]) for key in first}
    return None if first is None else torch.stack([*map(torch.as_tensor, trees)])


def first_array(tree):
    """Returns the first array of a tree."""
    if isinstance(tree, dict):
        tree = [*tree.values()]
    while isinstance(tree, tuple | list):
        tree = next(item for item in map(first_array, tree) if item is not None)
    return tree


def scan(f, init, xs=None, length=None, reverse=False):
    """Calls a function with a carry and each element; returns the carry and stacked results."""
    count = length if xs is None else len(first_array(xs))
    ys = [None] * count
    for at in reversed(range(count)) if reverse else range(count):
        init, ys[at] = f(init, element(xs, at))
    return init, stack(ys)


def fori_loop(lower, upper, body_fun, init_val):
    """Calls a function with each number of a range, and what it returned before."""
    for at in range(lower, upper):
        init_val = body_fun(at, init_val)
    return init_val


def while_loop(cond_fun, body_fun, init_val):
    """Calls a function with what it returned before, as long as another one says so."""
    while cond_fun(init_val):
        init_val = body_fun(init_val)
    return init_val


def switch(index, branches, *operands):
    """Calls one of several functions, the first or the last for an index that is none of theirs."""
    return branches[min(max(int(index), 0), len(branches) - 1)](*operands)


def map_over(f, xs):
    """Calls a function with each element; returns the stacked results."""
    return stack([f(element(xs, at)) for at in range(len(first_array(xs)))])


def associative_scan(fn, elems, reverse=False, axis=0):
    """Combines the elements along a dimension with all before them, one after the other."""
    steps = range(first_array(elems).shape[axis])
    done = []
    for at in reversed(steps) if reverse else steps:
        item = map_tree(lambda x, at=at: x.narrow(axis, at, 1), elems)
        done.append(fn(done[-1], item) if done else item)
    rows = stack(done[::-1] if reverse else done)
    dim = axis if axis >= 0 else axis + first_array(elems).ndim
    return map_tree(lambda x: x.squeeze(dim + 1).movedim(0, dim), rows)


def cond(pred, true_fun, false_fun, *operands):
    """Calls the one or the other of two functions."""
    return true_fun(*operands) if pred else false_fun(*operands)


def vmap(fun, in_axes=0, out_axes=0):
    """Maps a function over a dimension of its arguments, with random numbers for each element."""
    return torch.vmap(fun, in_axes, out_axes, randomness="different")


class Cell(nn.Module):
    """A step of a recurrent layer, of which the state is an array or several."""

    states = 1

    def __init__(self, hidden_features, gate_fn=torch.sigmoid, activation_fn=torch.tanh):
        super().__init__()
        self.hidden_features = hidden_features
        self.gate_fn, self.activation_fn = gate_fn, activation_fn

    def initialize_carry(self, input_shape):
        weight = next(self.parameters(), torch.zeros(()))
        zeros = [weight.new_zeros(*input_shape[:-1], self.hidden_features)] * self.states
        return zeros[0] if self.states == 1 else tuple(zeros)


class LSTMCell(Cell):
    """A step of an LSTM with a layer for each gate."""

    states = 2

    def __init__(
        self, in_features, hidden_features, *, gate_fn=torch.sigmoid, activation_fn=torch.tanh,
        kernel_init=None, recurrent_kernel_init=None, bias_init=None,
    ):  # fmt: skip
        super().__init__(hidden_features, gate_fn, activation_fn)
        self.ii, self.if_, self.ig, self.io = (
            Linear(in_features, hidden_features, False, kernel_init) for _ in range(4)
        )
        drawn = recurrent_kernel_init or orthogonal_init()
        self.hi, self.hf, self.hg, self.ho = (
            Linear(hidden_features, hidden_features, True, drawn, bias_init) for _ in range(4)
        )

    def forward(self, carry, inputs):
        c, h = carry
        i = self.gate_fn(self.ii(inputs) + self.hi(h))
        f = self.gate_fn(self.if_(inputs) + self.hf(h))
        g = self.activation_fn(self.ig(inputs) + self.hg(h))
        o = self.gate_fn(self.io(inputs) + self.ho(h))
        c = f * c + i * g
        h = o * self.activation_fn(c)
        return (c, h), h


class OptimizedLSTMCell(Cell):
    """A step of an LSTM with one layer for all gates."""

    states = 2

    def __init__(
        self, in_features, hidden_features, *, gate_fn=torch.sigmoid, activation_fn=torch.tanh,
        kernel_init=None, recurrent_kernel_init=None, bias_init=None,
    ):  # fmt: skip
        super().__init__(hidden_features, gate_fn, activation_fn)
        width, drawn = 4 * hidden_features, recurrent_kernel_init or orthogonal_init()
        self.dense_i = Linear(in_features, width, False, kernel_init)
        self.dense_h = Linear(hidden_features, width, True, drawn, bias_init)

    def forward(self, carry, inputs):
        c, h = carry
        i, f, g, o = (self.dense_i(inputs) + self.dense_h(h)).chunk(4, -1)
        c = self.gate_fn(f) * c + self.gate_fn(i) * self.activation_fn(g)
        h = self.gate_fn(o) * self.activation_fn(c)
        return (c, h), h


class GRUCell(Cell):
    """A step of a GRU."""

    def __init__(
        self, in_features, hidden_features, *, gate_fn=torch.sigmoid, activation_fn=torch.tanh,
        kernel_init=None, recurrent_kernel_init=None, bias_init=None,
    ):  # fmt: skip
        super().__init__(hidden_features, gate_fn, activation_fn)
        width, drawn = 3 * hidden_features, recurrent_kernel_init or orthogonal_init()
        self.dense_i = Linear(in_features, width, True, kernel_init, bias_init)
        self.dense_h = Linear(hidden_features, width, False, drawn)

    def forward(self, carry, inputs):
        xi_r, xi_z, xi_n = self.dense_i(inputs).chunk(3, -1)
        hh_r, hh_z, hh_n = self.dense_h(carry).chunk(3, -1)
        r, z = self.gate_fn(xi_r + hh_r), self.gate_fn(xi_z + hh_z)
        n = self.activation_fn(xi_n + r * hh_n)
        h = (1 - z) * n + z * carry
        return h, h


class SimpleCell(Cell):
    """A step of a recurrent layer without gates."""

    def __init__(
        self, in_features, hidden_features, *, residual=False, activation_fn=torch.tanh,
        kernel_init=None, recurrent_kernel_init=None, bias_init=None,
    ):  # fmt: skip
        super().__init__(hidden_features, None, activation_fn)
        self.residual = residual
        drawn = recurrent_kernel_init or orthogonal_init()
        self.dense_h = Linear(hidden_features, hidden_features, False, drawn)
        self.dense_i = Linear(
            in_features, hidden_features, True, kernel_init or lecun_normal(), bias_init
        )

    def forward(self, carry, inputs):
        h = self.dense_i(inputs) + self.dense_h(carry)
        h = self.activation_fn(h + carry if self.residual else h)
        return h, h


def flip_sequences(x, lengths, axis):
    """Returns sequences from the end, of which each may have a length of its own."""
    if lengths is None:
        return x.flip(axis)
    length = x.shape[axis]
    steps = torch.arange(length - 1, -1, -1, device=x.device)
    steps = steps.reshape(-1, *[1] * lengths.ndim) if axis == 0 else steps
    steps = (steps + lengths.unsqueeze(axis)) % length
    return x.take_along_dim(steps.reshape(*steps.shape, *[1] * (x.ndim - steps.ndim)), axis)


def last_steps(x, lengths):
    """Returns what each sequence of a batch ends with; the steps of an array are first."""
    if isinstance(x, tuple):
        return tuple(last_steps(item, lengths) for item in x)
    return x[lengths - 1, torch.arange(x.shape[1], device=x.device)]


class RNN(nn.Module):
    """Calls a cell with each element of sequences, whose features are last."""

    def __init__(self, cell, time_major=False, return_carry=False, reverse=False, keep_order=False):
        super().__init__()
        self.cell, self.time_major, self.return_carry = cell, time_major, return_carry
        self.reverse, self.keep_order = reverse, keep_order

    def forward(
        self, inputs, *, initial_carry=None, seq_lengths=None, return_carry=None, time_major=None,
        reverse=None, keep_order=None,
    ):  # fmt: skip
        is_first = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        has_carry = self.return_carry if return_carry is None else return_carry
        axis = 0 if is_first else inputs.ndim - 2
        inputs = flip_sequences(inputs, seq_lengths, axis) if reverse else inputs
        carry, carries, outputs = initial_carry, [], []
        for x in inputs.unbind(axis):
            carry = self.cell.initialize_carry(x.shape) if carry is None else carry
            carry, y = self.cell(carry, x)
            outputs.append(y)
            carries.append(carry)
        y = torch.stack(outputs, axis)
        y = flip_sequences(y, seq_lengths, axis) if reverse and keep_order else y
        if has_carry and seq_lengths is not None:
            carry = last_steps(stack(carries), seq_lengths)
        return (carry, y) if has_carry else y


class Bidirectional(nn.Module):
    """Calls one layer from the start and another from the end of sequences."""

    def __init__(
        self, forward_rnn, backward_rnn, *, merge_fn=None, time_major=False, return_carry=False
    ):
        super().__init__()
        self.forward_rnn, self.backward_rnn = forward_rnn, backward_rnn
        self.merge_fn = merge_fn or (lambda x, y: torch.cat([x, y], -1))
        self.time_major, self.return_carry = time_major, return_carry

    def forward(
        self, inputs, *, initial_carry=None, seq_lengths=None, return_carry=None, time_major=None
    ):
        time_major = self.time_major if time_major is None else time_major
        options = {"seq_lengths": seq_lengths, "return_carry": True, "time_major": time_major}
        first, second = (None, None) if initial_carry is None else initial_carry
        ahead, x = self.forward_rnn(inputs, initial_carry=first, reverse=False, **options)
        back, y = self.backward_rnn(
            inputs, initial_carry=second, reverse=True, keep_order=True, **options
        )
        merged = self.merge_fn(x, y)
        has_carry = self.return_carry if return_carry is None else return_carry
        return ((ahead, back), merged) if has_carry else merged
