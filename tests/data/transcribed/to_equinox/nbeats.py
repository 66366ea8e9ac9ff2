"""NBeatsNet for Equinox, transcribed from models.repositories.nbeats"""

from __future__ import annotations

import copy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Keys:
    """Gives a new random key at each call; None where it was made with None."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        if self.key is None:
            return None
        self.key, new = jax.random.split(self.key)
        return new


class Linear(eqx.nn.Linear):
    """A linear layer over the last dimension."""

    def __init__(self, in_features, out_features, bias=True, *, key):
        super().__init__(in_features, out_features, use_bias=bias, key=key)

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def hide_shared(model):
    """Removes parts of a new model from all places but the first; returns those places.

    A tree would have copies there, which training changes apart.
    """
    first, hidden = {}, []

    def walk(owner, path):
        held = vars(owner) if isinstance(owner, eqx.Module) else owner
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        for step, part in list(pairs):
            at = (*path, step)
            if not isinstance(part, eqx.Module | list | tuple | dict):
                continue
            if isinstance(part, eqx.Module):
                if id(part) in first:
                    hidden.append((at, first[id(part)]))
                    set_part(owner, step, None)
                    continue
                first[id(part)] = at
            walk(part, at)

    walk(model, ())
    return tuple(hidden)


def name_in_source(model, path):
    """Returns the name of an array in the source's state dict; None if it is not there."""
    steps = [*steps_to(model, path)]
    if not all(settings_of(*step).get("saved", True) for step in steps):
        return None
    return ".".join(str(name) for owner, name in steps if name != getattr(owner, "inside", None))


def nested_tuple(array):
    """Returns an array of NumPy as tuples, which a module can keep as a setting."""
    return tuple(map(nested_tuple, array)) if array.ndim else array.item()


def settings_of(owner, name):
    """Returns how a field of a module is declared."""
    return type(owner).__dataclass_fields__[name].metadata if isinstance(owner, eqx.Module) else {}


def show_shared(model):
    """Returns a model with its shared parts in all their places, for one call."""
    for path, first in model.shared_parts:
        part = model
        for step in first:
            part = getattr(part, step) if isinstance(part, eqx.Module) else part[step]
        model = with_part(model, path, part)
    return model


def steps_to(model, path):
    """Yields the parts on a key path, and the name or number of the next one in each."""
    owner = model
    for step in path:
        name = next(getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind))
        yield owner, name
        owner = getattr(owner, name) if isinstance(owner, eqx.Module) else owner[name]


def set_part(owner, name, value):
    """Gives a part of a model that is still being made another array or module."""
    if isinstance(owner, eqx.Module):
        object.__setattr__(owner, name, value)
    else:
        owner[name] = value


def with_part(owner, path, part):
    """Returns a copy of a module or container with another part, which has the other ones."""
    if not path:
        return part
    new, (step, *rest) = copy.copy(owner), path
    inner = getattr(owner, step) if isinstance(owner, eqx.Module) else owner[step]
    set_part(new, step, with_part(inner, rest, part))
    return new


def seasonality_model(thetas, t):
    p = thetas.shape[-1]
    assert p <= thetas.shape[1], "thetas_dim is too big."
    p1, p2 = (p // 2, p // 2) if p % 2 == 0 else (p // 2, p // 2 + 1)
    # H/2-1
    s1 = jnp.array(np.array([np.cos(2 * np.pi * i * t) for i in range(p1)]), jnp.float32)
    s2 = jnp.array(np.array([np.sin(2 * np.pi * i * t) for i in range(p2)]), jnp.float32)
    S = jnp.concatenate([s1, s2])
    return thetas @ S


def trend_model(thetas, t):
    p = thetas.shape[-1]
    assert p <= 4, "thetas_dim is too big."
    T = jnp.array(np.array([t**i for i in range(p)]), jnp.float32)
    return thetas @ T


def linear_space(backcast_length, forecast_length, is_forecast=True):
    horizon = forecast_length if is_forecast else backcast_length
    return np.arange(0, horizon) / horizon


class Block(eqx.Module):
    units: int = eqx.field(static=True)
    thetas_dim: int = eqx.field(static=True)
    backcast_length: int = eqx.field(static=True)
    forecast_length: int = eqx.field(static=True)
    share_thetas: bool = eqx.field(static=True)
    fc1: Linear
    fc2: Linear
    fc3: Linear
    fc4: Linear
    backcast_linspace: Any
    forecast_linspace: Any
    theta_f_fc: Linear = None
    theta_b_fc: Linear = None

    def __init__(
        self,
        units,
        thetas_dim,
        backcast_length=10,
        forecast_length=5,
        share_thetas=False,
        nb_harmonics=None,
        *,
        key,
    ):
        keys = Keys(key)
        self.units = units
        self.thetas_dim = thetas_dim
        self.backcast_length = backcast_length
        self.forecast_length = forecast_length
        self.share_thetas = share_thetas
        self.fc1 = Linear(backcast_length, units, key=keys())
        self.fc2 = Linear(units, units, key=keys())
        self.fc3 = Linear(units, units, key=keys())
        self.fc4 = Linear(units, units, key=keys())
        self.backcast_linspace = nested_tuple(
            linear_space(backcast_length, forecast_length, is_forecast=False)
        )
        self.forecast_linspace = nested_tuple(
            linear_space(backcast_length, forecast_length, is_forecast=True)
        )
        if share_thetas:
            self.theta_f_fc = self.theta_b_fc = Linear(units, thetas_dim, bias=False, key=keys())
        else:
            self.theta_b_fc = Linear(units, thetas_dim, bias=False, key=keys())
            self.theta_f_fc = Linear(units, thetas_dim, bias=False, key=keys())

    def __call__(self, x):
        x = squeeze_last_dim(x)
        x = jax.nn.relu(self.fc1(x))
        x = jax.nn.relu(self.fc2(x))
        x = jax.nn.relu(self.fc3(x))
        x = jax.nn.relu(self.fc4(x))
        return x


class SeasonalityBlock(Block):
    def __init__(
        self, units, thetas_dim, backcast_length=10, forecast_length=5, nb_harmonics=None, *, key
    ):
        keys = Keys(key)
        if nb_harmonics:
            super().__init__(
                units, nb_harmonics, backcast_length, forecast_length, share_thetas=True, key=keys()
            )
        else:
            super().__init__(
                units,
                forecast_length,
                backcast_length,
                forecast_length,
                share_thetas=True,
                key=keys(),
            )

    def __call__(self, x):
        x = super().__call__(x)
        backcast = seasonality_model(self.theta_b_fc(x), np.array(self.backcast_linspace))
        forecast = seasonality_model(self.theta_f_fc(x), np.array(self.forecast_linspace))
        return backcast, forecast


class TrendBlock(Block):
    def __init__(
        self, units, thetas_dim, backcast_length=10, forecast_length=5, nb_harmonics=None, *, key
    ):
        keys = Keys(key)
        super().__init__(
            units, thetas_dim, backcast_length, forecast_length, share_thetas=True, key=keys()
        )

    def __call__(self, x):
        x = super().__call__(x)
        backcast = trend_model(self.theta_b_fc(x), np.array(self.backcast_linspace))
        forecast = trend_model(self.theta_f_fc(x), np.array(self.forecast_linspace))
        return backcast, forecast


class GenericBlock(Block):
    backcast_fc: Linear
    forecast_fc: Linear

    def __init__(
        self, units, thetas_dim, backcast_length=10, forecast_length=5, nb_harmonics=None, *, key
    ):
        keys = Keys(key)
        super().__init__(units, thetas_dim, backcast_length, forecast_length, key=keys())

        self.backcast_fc = Linear(thetas_dim, backcast_length, key=keys())
        self.forecast_fc = Linear(thetas_dim, forecast_length, key=keys())

    def __call__(self, x):
        # no constraint for generic arch.
        x = super().__call__(x)

        theta_b = self.theta_b_fc(x)
        theta_f = self.theta_f_fc(x)

        backcast = self.backcast_fc(theta_b)  # generic. 3.3.
        forecast = self.forecast_fc(theta_f)  # generic. 3.3.

        return backcast, forecast


class NBeatsNet(eqx.Module):
    SEASONALITY_BLOCK = "seasonality"
    TREND_BLOCK = "trend"
    GENERIC_BLOCK = "generic"

    forecast_length: int = eqx.field(static=True)
    backcast_length: int = eqx.field(static=True)
    hidden_layer_units: int = eqx.field(static=True)
    nb_blocks_per_stack: int = eqx.field(static=True)
    share_weights_in_stack: bool = eqx.field(static=True)
    nb_harmonics: Any
    stack_types: tuple = eqx.field(static=True)
    stacks: list
    thetas_dim: tuple = eqx.field(static=True)
    shared_parts: tuple = eqx.field(static=True)

    def __init__(
        self,
        stack_types=("trend", "seasonality"),
        nb_blocks_per_stack=3,
        forecast_length=5,
        backcast_length=10,
        thetas_dim=(4, 8),
        share_weights_in_stack=False,
        hidden_layer_units=256,
        nb_harmonics=None,
        *,
        key,
    ):
        keys = Keys(key)
        self.forecast_length = forecast_length
        self.backcast_length = backcast_length
        self.hidden_layer_units = hidden_layer_units
        self.nb_blocks_per_stack = nb_blocks_per_stack
        self.share_weights_in_stack = share_weights_in_stack
        self.nb_harmonics = nb_harmonics
        self.stack_types = stack_types
        self.stacks = []
        self.thetas_dim = thetas_dim
        for stack_id in range(len(self.stack_types)):
            self.stacks.append(self.create_stack(stack_id, key=keys()))
        self.shared_parts = hide_shared(self)

    def create_stack(self, stack_id, *, key):
        keys = Keys(key)
        stack_type = self.stack_types[stack_id]
        blocks = []
        for block_id in range(self.nb_blocks_per_stack):
            block_init = NBeatsNet.select_block(stack_type)
            if self.share_weights_in_stack and block_id != 0:
                block = blocks[-1]  # pick up the last one when we share weights.
            else:
                block = block_init(
                    self.hidden_layer_units,
                    self.thetas_dim[stack_id],
                    self.backcast_length,
                    self.forecast_length,
                    self.nb_harmonics,
                    key=keys(),
                )
            blocks.append(block)
        return blocks

    @staticmethod
    def select_block(block_type):
        if block_type == NBeatsNet.SEASONALITY_BLOCK:
            return SeasonalityBlock
        elif block_type == NBeatsNet.TREND_BLOCK:
            return TrendBlock
        else:
            return GenericBlock

    def __call__(self, backcast):
        self = show_shared(self)
        backcast = squeeze_last_dim(backcast)
        forecast = jnp.zeros((backcast.shape[0], self.forecast_length))  # maybe batch size
        for stack_id in range(len(self.stacks)):
            for block_id in range(len(self.stacks[stack_id])):
                b, f = self.stacks[stack_id][block_id](backcast)
                backcast = backcast - b
                forecast = forecast + f
        return backcast, forecast


def squeeze_last_dim(tensor):
    if len(tensor.shape) == 3 and tensor.shape[-1] == 1:  # (128, 10, 1) => (128, 10).
        return tensor[..., 0]
    return tensor


TIED = {
    "stacks.0.0.theta_b_fc.weight": "stacks.0.0.theta_f_fc.weight",
    "stacks.0.1.theta_b_fc.weight": "stacks.0.1.theta_f_fc.weight",
    "stacks.1.0.theta_b_fc.weight": "stacks.1.0.theta_f_fc.weight",
    "stacks.1.1.theta_b_fc.weight": "stacks.1.1.theta_f_fc.weight",
}  # names in the source's state -> those here


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
