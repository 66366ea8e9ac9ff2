"""Tagger for PyTorch, transcribed from models.linen_repositories.lstm"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Dropout(nn.Dropout):
    """Dropout with Flax's arguments."""

    def __init__(self, rate, broadcast_dims=(), deterministic=False):
        super().__init__(rate)
        self.broadcast_dims, self.training = tuple(broadcast_dims), not deterministic

    def forward(self, x, deterministic=None):
        is_still = not self.training if deterministic is None else deterministic
        if is_still or not self.broadcast_dims:
            return F.dropout(x, self.p, not is_still)
        dims = {dim % x.ndim for dim in self.broadcast_dims}
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        ones = x.new_ones(1, math.prod(shape), 1)  # channels, of which whole ones are left out
        return x * F.dropout1d(ones, self.p).reshape(shape)


def fill(layer, name, init):
    """Gives an array of a layer the values of an initializer, if the layer has it."""
    array = getattr(layer, name)
    if array is None:
        return
    _, axes = getattr(layer, "source_arrays", {}).get(name, (name, None))
    axes = axes or tuple(range(array.ndim))
    shape = [array.shape[axes.index(axis)] for axis in range(array.ndim)]
    with torch.no_grad():
        array.copy_(init(shape).permute(axes))


def variance_scaling(scale, mode, distribution, in_axis=-2, out_axis=-1):
    """Returns an initializer whose variance depends on how many inputs and outputs there are."""

    def init(shape):
        fan_in, fan_out = (math.prod(shape) / shape[axis] for axis in (out_axis, in_axis))
        fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
        std = math.sqrt(scale / max(1.0, fans[mode]))
        if distribution == "uniform":
            return (torch.rand(shape) * 2 - 1) * math.sqrt(3) * std
        if distribution == "normal":
            return torch.randn(shape) * std
        return trunc_normal_init(std / 0.87962566103423978)(shape)

    return init


class Embed(nn.Embedding):
    """A table of vectors with Flax's arguments and initial values."""

    source_arrays = {"weight": ("embedding", None)}

    def __init__(self, num_embeddings, features, embedding_init=None):
        super().__init__(num_embeddings, features)
        self.features = features
        scaling = variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)
        fill(self, "weight", embedding_init or scaling)

    def attend(self, query):
        return query @ self.weight.T


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


class Lazy(nn.Module):
    """A layer of another class, which it becomes when its first input tells how many features."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        if "features" in kwargs:
            kwargs["out_features"] = kwargs.pop("features")
        self.given = args, kwargs

    def arguments_for(self, x):
        args, kwargs = self.given
        return (x.shape[-1], *args), kwargs

    def forward(self, x, *args, **kwargs):
        (sizes, options), training = self.arguments_for(x), self.training
        self.__class__ = self.kind
        self.__init__(*sizes, **options)
        self.to(x.device).train(training)
        return self(x, *args, **kwargs)


def lecun_normal(in_axis=-2, out_axis=-1):
    """Returns an initializer for layers that keep variances."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis)


def zeros_init():
    """Returns an initializer that gives zeros."""
    return torch.zeros


class Linear(nn.Linear):
    """A linear layer with Flax's arguments and initial values."""

    source_arrays = {"weight": ("kernel", (1, 0))}

    def __init__(self, in_features, out_features, use_bias=True, kernel_init=None, bias_init=None):
        super().__init__(in_features, out_features, bias=use_bias)
        fill(self, "weight", kernel_init or lecun_normal())
        fill(self, "bias", bias_init or zeros_init())


class LazyLinear(Lazy):
    """See `Linear`."""

    kind = Linear


def orthogonal_init(scale=1.0):
    """Returns an initializer that gives orthogonal columns, or rows."""
    return lambda shape: (
        nn.init.orthogonal_(torch.empty(math.prod(shape[:-1]), shape[-1])).reshape(shape) * scale
    )


class GRUCell(Cell):
    """A step of a GRU with Flax's arguments and names."""

    def __init__(self, features):
        super().__init__(features)
        for gate in "rzn":
            self.add_module(f"i{gate}", LazyLinear(features))
            kernel = orthogonal_init()
            self.add_module(
                f"h{gate}", LazyLinear(features, use_bias=gate == "n", kernel_init=kernel)
            )

    def forward(self, h, x):
        parts = self._modules
        r, z = (torch.sigmoid(parts[f"i{gate}"](x) + parts[f"h{gate}"](h)) for gate in "rz")
        n = torch.tanh(parts["in"](x) + r * parts["hn"](h))
        h = (1 - z) * n + z * h
        return h, h


class LSTMCell(Cell):
    """A step of an LSTM with Flax's arguments and names."""

    states = 2

    def __init__(self, features):
        super().__init__(features)
        for gate in "ifgo":
            self.add_module(f"i{gate}", LazyLinear(features, use_bias=False))
            self.add_module(f"h{gate}", LazyLinear(features, kernel_init=orthogonal_init()))

    def forward(self, carry, x):
        c, h = carry
        parts = self._modules
        i, f, g, o = (parts[f"i{gate}"](x) + parts[f"h{gate}"](h) for gate in "ifgo")
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (c, h), h


class Function(nn.Module):
    """A function in the place of a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Sequential(nn.ModuleList):
    """Layers and functions that are called one after the other."""

    source_path = ("layers",)

    def __init__(self, *parts):
        super().__init__(item if isinstance(item, nn.Module) else Function(item) for item in parts)

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


class Layers(Sequential):
    """Layers and functions in a list that are called one after the other."""

    def __init__(self, layers):
        super().__init__(*layers)


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


def stack(trees):
    """Stacks the arrays of trees of one structure."""
    first = trees[0]
    if isinstance(first, tuple | list):
        return type(first)(map(stack, zip(*trees, strict=True)))
    if isinstance(first, dict):
        return {key: stack([tree[key] for tree in trees]) for key in first}
    return None if first is None else torch.stack([*map(torch.as_tensor, trees)])


class RNN(nn.Module):
    """Calls a cell with each element of sequences, whose features are last."""

    def __init__(self, cell, time_major=False, return_carry=False, reverse=False, keep_order=False):
        super().__init__()
        self.cell, self.time_major, self.return_carry = cell, time_major, return_carry
        self.reverse, self.keep_order = reverse, keep_order

    def forward(
        self,
        inputs,
        *,
        initial_carry=None,
        seq_lengths=None,
        return_carry=None,
        time_major=None,
        reverse=None,
        keep_order=None,
    ):
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


def initialize(model, *inputs, **options):
    """Calls a model once, so that its layers have their sizes; returns it."""
    training = model.training
    with torch.no_grad():
        model.eval()(*inputs, **options)
    return model.train(training)


def named_arrays(module, path=()):
    """Yields the name of each array in the source, the tensor, and its axes there."""
    names = getattr(module, "source_arrays", {})
    for key, tensor in module.state_dict(keep_vars=True).items():
        if "." not in key:
            is_parameter = isinstance(tensor, nn.Parameter)
            name, axes, *kind = names.get(key, (key, None))
            kind = kind or ["params" if is_parameter else "batch_stats"]
            yield ".".join((*kind, *path, name)), tensor, axes
    inner = (*path, *getattr(module, "source_path", ()))
    for key, part in module.named_children():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        yield from named_arrays(
            part, (*inner[:-1], f"{inner[-1]}_{key}") if is_list else (*inner, key)
        )


def trunc_normal_init(stddev=1e-2, lower=-2.0, upper=2.0):
    """Returns an initializer that draws from a normal distribution between two deviations."""
    return lambda shape: nn.init.trunc_normal_(torch.empty(shape), a=lower, b=upper) * stddev


class Tagger(nn.Module):
    """Gives each token a class, and counts its calls."""

    source_arrays = {"calls": ("calls", None, "counters")}

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        classes: int,
        word_dropout: float = 0.1,
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.hidden_size = hidden_size
        self.classes = classes
        self.word_dropout = word_dropout
        self.calls = nn.Buffer(torch.zeros(()))
        self.embedder = Embed(self.vocab_size, self.embedding_size)
        self.Dropout_0 = Dropout(self.word_dropout)
        self.OptimizedLSTMCell_0 = LSTMCell(self.hidden_size)
        self.forward_rnn = RNN(self.OptimizedLSTMCell_0)
        self.GRUCell_0 = GRUCell(self.hidden_size)
        self.backward_rnn = RNN(self.GRUCell_0, reverse=True, keep_order=True)
        self.Dense_0 = LazyLinear(self.hidden_size)
        self.Sequential_0 = Layers([self.Dense_0, torch.tanh])
        self.Dense_1 = LazyLinear(self.classes)

    def forward(self, tokens, deterministic: bool = True):
        calls = self.calls
        calls.copy_((calls + 1.0).detach())
        x = self.embedder(tokens)
        x = self.Dropout_0(x, deterministic=deterministic)
        forward = self.forward_rnn(x)
        backward = self.backward_rnn(x)
        x = torch.cat([forward, backward], dim=-1)
        x = self.Sequential_0(x)
        return self.Dense_1(x)


def load_weights(model, state, strict=True):
    """Fills a model with the arrays of the source's state, by name; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    arrays, filled = dict(state), set()
    for name, tensor, axes in named_arrays(model):
        if name in arrays:
            array = arrays.pop(name)
            array = array if isinstance(array, torch.Tensor) else torch.tensor(array)
            array = array if axes is None else array.permute(axes)
            if array.shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(array.shape)} instead of {tuple(tensor.shape)}")
            with torch.no_grad():
                tensor.copy_(array)
            filled.add(id(tensor))
    missing = [name for name, tensor, _ in named_arrays(model) if id(tensor) not in filled]
    if strict and (missing or arrays):
        raise ValueError(f"missing: {missing}; left over: {[*arrays]}")
    return model


def source_state(model):
    """Returns the arrays of a model by their names in the source, in its layouts."""
    state = {}
    for name, tensor, axes in named_arrays(model):
        back = axes and [axes.index(axis) for axis in range(tensor.ndim)]
        state[name] = tensor.detach().permute(back) if back else tensor.detach()
    return state
