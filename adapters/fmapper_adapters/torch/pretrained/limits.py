"""Limits the sizes in a configuration by the weights next to it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmapper import CheckpointError, settings
from fmapper.checkpoints import WAY_OUT, LazyArray
from fmapper_adapters.torch._private import TorchDispatchMode, pytree

_WITHOUT_VALUES = {  # memory that is never written takes no space
    torch.ops.aten.empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_like,
    torch.ops.aten.detach,
}

_WEIGHTS = (".safetensors", ".bin")
_SIZE = re.compile(  # names of settings for sizes of arrays or numbers of modules
    r"size|dim|layer|head|width|height|channel|embd|inner|hidden|ffn|expert|label|rank|block|depth"
    r"|state|group|vocab|bins|bands|position|seq|length|window|context|^(n|d|num)_|_(n|d|num)$"
)
_COUNT = re.compile(  # settings whose negative values have no special meaning
    r"^(n|num)_\w*(layers?|heads?|channels|blocks|experts|labels)$|hidden_size$|vocab_size$"
)
_LENGTH = re.compile(r"position|seq|length|window|context")
_MOST_SIZE = 1 << 21  # vocabularies have less than a million tokens
_MOST_LENGTH = 1 << 27
_MOST_ITEMS = 100_000  # items of a list or an object
_MOST_ITEMS_OF_ALL = 200_000
_MOST_FLOAT = 3.5e38  # float32 has 3.4e38
_MOST_PARAMETERS = 1_000
_MOST_OF_AN_ARRAY = 4  # parameters that one stored array may be split into
_MOST_OF_NAME = {"num_labels": _MOST_ITEMS}  # transformers creates a name for each
_FEW_BYTES = 128_000_000  # bytes of tensors computed when a model is created: masks, tables
_MOST_BYTES = 16  # the same per byte of the weights
_MOST_ELEMENTS = 16  # per byte of the weights, which may be packed in few bits
_FEW_ELEMENTS = 1 << 30


class Weights(NamedTuple):
    """Holds the sizes of the weights of a folder.

    Attributes:
        arrays: The number of arrays that have elements.
        nbytes: Their bytes.
        on_disk: The bytes that the files occupy on disk, without holes of sparse files.
    """

    arrays: int
    nbytes: int
    on_disk: int

    @classmethod
    def of(cls, folder: Path, arrays: Mapping[str, LazyArray]) -> Weights:
        """Returns the sizes for a folder with these arrays."""
        sizes = [array.nbytes for array in arrays.values() if array.nbytes]
        nbytes = sum(sizes)
        return cls(len(sizes), nbytes, _bytes_on_disk(folder) or nbytes)


def check_sizes(config: Path, configuration: Any, weights: Weights) -> None:
    """Checks a configuration for sizes that its weights rule out.

    Args:
        config: The configuration file.
        configuration: Its contents.
        weights: The weights next to it.

    Raises:
        CheckpointError: There is such a size; the message names it.
    """
    if not settings.bounds:
        return
    nbytes, count = weights.nbytes, 0
    todo: list[tuple[str, Any]] = [("", configuration)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, list | dict):
            if len(value) > _MOST_ITEMS:
                raise CheckpointError(f"{config}: {name} has {len(value):,} items. {WAY_OUT}")
            count += len(value)
            if count > _MOST_ITEMS_OF_ALL:
                raise CheckpointError(
                    f"{config}: has more than {_MOST_ITEMS_OF_ALL:,} items. {WAY_OUT}"
                )
            pairs = value.items() if isinstance(value, dict) else ((name, item) for item in value)
            todo += [(str(key), child) for key, child in pairs]
        elif isinstance(value, float) and math.isfinite(value) and abs(value) > _MOST_FLOAT:
            raise CheckpointError(f"{config}: {name[:60]} is {value}, which float32 cannot hold")
        elif type(value) is int and value < 0 and _COUNT.search(name):
            raise CheckpointError(f"{config}: {name[:60]} is {value}, which is negative")
        elif isinstance(value, int | float) and not isinstance(value, bool) and _SIZE.search(name):
            most = _MOST_OF_NAME.get(name) or (
                _MOST_LENGTH if _LENGTH.search(name) else max(_MOST_SIZE, nbytes)
            )
            if abs(value) > most:
                raise CheckpointError(
                    f"{config}: {name[:60]} is {value:,}, but the weights next to it have "
                    f"{nbytes:,} bytes. {WAY_OUT}"
                )


class Parameters:
    """Counts the parameters of a model during its creation.

    Args:
        config: The file with its configuration.
        weights: The weights next to it.
    """

    def __init__(self, config: Path, weights: Weights) -> None:
        self._config = config
        self._most = _MOST_PARAMETERS + _MOST_OF_AN_ARRAY * weights.arrays
        self._most_elements = _FEW_ELEMENTS + _MOST_ELEMENTS * weights.nbytes
        self._count = self._elements = 0

    def add(self, elements: int) -> None:
        """Counts a parameter.

        Raises:
            CheckpointError: There are more parameters than the weights of the folder can fill.
        """
        self._count += 1
        self._elements += elements
        is_much = self._count > self._most or self._elements > self._most_elements
        if is_much and settings.bounds:
            raise CheckpointError(
                f"{self._config}: asks for more than {self._count - 1:,} parameters with "
                f"{self._elements:,} elements, which the weights next to it cannot fill. {WAY_OUT}"
            )


class Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that the creation of a model computes, before it does.

    Parameters are created without values, but tables of positions and masks are buffers with the
    sizes of the configuration. Each operation runs without memory first, to find its sizes.

    Args:
        config: The file with the configuration.
        weights: The weights next to it.
    """

    def __init__(self, config: Path, weights: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._config = config
        self._most = _FEW_BYTES + _MOST_BYTES * min(weights.nbytes, weights.on_disk)
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation if its results fit.

        Raises:
            CheckpointError: The results are too large for the weights of the folder.
        """
        kwargs = kwargs or {}
        if settings.bounds and func.overloadpacket not in _WITHOUT_VALUES:
            self._add(func, args, kwargs)
        return func(*args, **kwargs)

    def _add(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return  # without memory
        if given and all(tensor.is_meta for tensor in given):
            return
        if not given:
            kwargs = {**kwargs, "device": torch.device("meta")}
        args, kwargs = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        try:
            made = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # depends on values; small
            return
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count += leaf.numel() * leaf.element_size()
        if self._count > self._most:
            raise CheckpointError(
                f"{self._config}: computes tensors of {self._count:,} bytes as the model is "
                f"created, too many for the weights next to it. {WAY_OUT}"
            )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _bytes_on_disk(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(
            _takes(entry.stat())
            for entry in entries
            if entry.name.endswith(_WEIGHTS) and entry.is_file()
        )


def _takes(about: os.stat_result) -> int:
    blocks = getattr(about, "st_blocks", 0)  # of 512 bytes; not on all file systems
    return min(about.st_size, blocks * 512 or about.st_size)
