"""Converts the cache of a transformers model to named tensors of fixed sizes, and back.

A prompt is recorded with the dynamic cache of the model, in which windows keep all positions: it
    attends only to the prompt. Afterwards the states are moved to the slots of a cache of fixed
    size:
slot `s` of a full layer holds position `s`; a window has as many slots as it is wide, and position
`p` is in slot `p % width`, so that a step writes one slot and moves none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from fmapper import ConversionError

State = dict[str, torch.Tensor]

_NAMES = ("past_key_values", "cache_params", "cache")  # Mamba's; all models' from transformers 5.24
_NO_WINDOW = 1 << 30
_OWN_CLASS = "minimax"  # accepts only its own class; its linear layers keep one state each
_LINEAR = "linear"


def name_of_cache(model: torch.nn.Module) -> str:
    """Returns the name of a model's argument for a cache; empty if it takes none."""
    accepts = inspect.signature(model.forward).parameters
    for name in _NAMES:
        if name in accepts and (name != "cache" or "Cache" in str(accepts[name].annotation)):
            return name
    return ""


class Places(NamedTuple):
    """The columns of a prompt's positions.

    Attributes:
        begin: The column of position 0.
        length: The number of positions.
        columns: The number of columns.
        slots: The positions that a full layer holds.
    """

    begin: Any
    length: torch.Tensor
    columns: Any
    slots: int

    def of(self, width: int) -> torch.Tensor:
        """Returns the column for each slot of a layer.

        Slots of later positions get any column: they are masked until they are written.
        """
        slot = torch.arange(width, device=self.length.device)
        positions = slot if width == self.slots else _positions_in_ring(self.length - 1, slot)
        columns: torch.Tensor = (positions + self.begin).clamp(0, self.columns - 1)
        return columns


def _positions_in_ring(last: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Returns the position in each slot of a ring; negative for empty slots."""
    positions: torch.Tensor = last - (last - slot).remainder(len(slot))
    return positions


# --- the prompt -----------------------------------------------------------------------------------


def empty(config: Any) -> Any:
    """Returns an empty cache of the class that the model takes."""
    if config.model_type != _OWN_CLASS:
        return DynamicCache(config=config)
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    new_cache: Any = MiniMaxCache
    new_layer: Any = cache_utils.DynamicLayer
    cache = new_cache()
    cache.layers = [new_layer() for _ in range(config.num_hidden_layers)]
    cache.linear_cache = [None] * config.num_hidden_layers
    return cache


def is_recurrent(config: Any) -> bool:
    """Returns whether layers keep a state that padding at the right would change."""
    linear = cache_utils.LinearAttentionCacheLayerMixin
    layers = empty(config).layers
    return config.model_type == _OWN_CLASS or any(isinstance(layer, linear) for layer in layers)


def for_prompt(config: Any) -> Any:
    """Returns an empty cache for a prompt."""
    cache = empty(config)
    for layer in cache.layers:
        _refuse_unknown(layer)
        if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            layer.sliding_window = _NO_WINDOW
    return cache


def _refuse_unknown(layer: Any) -> None:
    if not type(layer).__module__ == cache_utils.__name__:
        raise ConversionError(
            f"the model has a cache layer of its own, {type(layer).__name__}, whose final size is "
            "unknown. Wrap the model in a module with prefill and step; see fmapper.generator."
        )


def windows(config: Any) -> list[int | None]:
    """Returns the width of the window of each layer; None for those without."""
    return [
        getattr(layer, "sliding_window", None)
        if isinstance(layer, cache_utils.DynamicSlidingWindowLayer)
        else None
        for layer in empty(config).layers
    ]


def states(cache: Any, widths: Iterable[int | None], places: Places) -> State:
    """Returns the states in a cache after a prompt, by slot."""
    result: State = {}
    for at, (layer, width) in enumerate(zip(cache.layers, widths, strict=True)):
        slots = places.of(places.slots if width is None else min(width, places.slots))
        for name, dim in (("keys", -2), ("values", -2), ("indexer_keys", 1)):
            states = getattr(layer, name, None)
            if states is not None:
                result[f"{at}.{name}"] = states.index_select(dim, slots)
        result |= _recurrent_states(layer, at)
    for at, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, torch.Tensor):
            result[f"{at}.{_LINEAR}"] = state
    return result


def _recurrent_states(layer: Any, at: int) -> State:
    if not isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        return {}
    kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {
        f"{at}.{kind}.{i}": state
        for kind, held in kinds.items()
        for i, state in held.items()
        if state is not None
    }


# --- a step ---------------------------------------------------------------------------------------


class _Full:
    """A layer of fixed size with a slot for each position."""

    is_compileable = True
    keys: torch.Tensor
    values: torch.Tensor
    indexer_keys: torch.Tensor

    def start(self, length: torch.Tensor, slots: int) -> None:
        """Sets the number of positions taken, and the number of slots."""
        self.length, self.slots = length, slots
        self.taken = length

    def slot(self) -> torch.Tensor:
        """Returns the slot of the next position."""
        return self.length.reshape(1)

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
        """Writes the states of one position, and returns all."""
        self.keys = self.keys.index_copy(-2, self.slot(), keys)
        self.values = self.values.index_copy(-2, self.slot(), values)
        self.taken = self.length + 1
        return self.keys, self.values

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Writes the key of one position, and returns all."""
        self.indexer_keys = self.indexer_keys.index_copy(1, self.slot(), keys)
        return self.indexer_keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Returns the number of slots, and the position in the first slot."""
        return self.slots, 0

    def get_seq_length(self) -> torch.Tensor:
        """Returns the number of positions taken, including the new one once it is written."""
        return self.taken


class _Ring(_Full):
    """A window, which reuses the slots of positions that it has left behind."""

    def start(self, length: torch.Tensor, slots: int) -> None:
        """Sets the number of positions taken, and the number of slots of full layers."""
        super().start(length, slots)
        self.width = min(self.sliding_window, slots)  # type: ignore[attr-defined]

    def slot(self) -> torch.Tensor:
        """Returns the slot of the next position."""
        return self.length.remainder(self.width).reshape(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Returns the width of the window, and the position in each slot."""
        positions = _positions_in_ring(self.length, torch.arange(self.width))
        later = torch.full_like(positions, self.slots - 1)  # before the first query
        return self.width, _Positions(torch.where(positions < 0, later, positions))


class _Positions:
    """The offsets that masks add to slots to get positions."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def __radd__(self, slots: Any) -> Any:
        return self.positions if isinstance(slots, torch.Tensor) else slots


def for_step(config: Any, state: Mapping[str, torch.Tensor], length: Any, slots: int) -> Any:
    """Returns a cache with the given states."""
    cache = empty(config)
    for at in range(len(cache.layers)):
        layer: Any = cache.layers[at]
        if isinstance(layer, cache_utils.DynamicLayer):
            is_window = isinstance(layer, cache_utils.DynamicSlidingWindowLayer)
            kind = _Ring if is_window else _Full
            layer = cache.layers[at] = _as(kind, layer)
            layer.start(length, slots)
            layer.is_initialized = True
        layer_states = {name: tensor for name, tensor in state.items() if name.startswith(f"{at}.")}
        for name, tensor in layer_states.items():
            if name.endswith(_LINEAR):
                cache.set_linear_cache(at, tensor)
            else:
                _put(layer, name.split(".")[1:], tensor)
    return cache


def _as(kind: type, layer: Any) -> Any:
    """Returns a layer of another class with the same states."""
    made: Any = object.__new__(type(kind.__name__, (kind, type(layer)), {}))
    vars(made).update(vars(layer))
    return made


def _put(layer: Any, name: list[str], state: torch.Tensor) -> None:
    if len(name) == 1:
        setattr(layer, name[0], state)
        layer.dtype, layer.device = state.dtype, state.device
        return
    kind, at = name[0], int(name[1])
    getattr(layer, f"{kind}_states")[at] = state.clone()  # it is changed in place
    getattr(layer, f"is_{kind}_states_initialized")[at] = True
    layer.has_previous_state[at] = True
    layer.dtype, layer.device = state.dtype, state.device
    if kind == "conv":
        layer.conv_kernel_size[at] = state.shape[-1]


def after_step(cache: Any, state: Mapping[str, torch.Tensor]) -> State:
    """Returns the states in a cache after a step."""
    new: State = {}
    for name in state:
        at, kind, *rest = name.split(".")
        layer = cache.layers[int(at)]
        if rest:
            new[name] = getattr(layer, f"{kind}_states")[int(rest[0])]
        elif kind == _LINEAR:
            new[name] = cache.get_linear_cache(int(at))
        else:
            new[name] = getattr(layer, kind)
    return new


# --- cross attention ------------------------------------------------------------------------------


def with_encoder_states(state: Mapping[str, torch.Tensor], cache: Any) -> EncoderDecoderCache:
    """Returns a decoder's cache with the keys and values of the encoder, which have no window."""
    cross = DynamicCache()
    new_layer: Any = cache_utils.DynamicLayer
    cross.layers = [new_layer() for _ in cache.layers]
    for name, tensor in state.items():
        at, kind = name.split(".")
        layer: Any = cross.layers[int(at)]
        setattr(layer, kind, tensor)
        layer.is_initialized = True
        layer.dtype, layer.device = tensor.dtype, tensor.device
    return EncoderDecoderCache(cache, cross)
