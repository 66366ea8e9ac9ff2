"""Bounds what a configuration may ask for by the weights beside it in a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from fmapper import CheckpointError, settings
from fmapper.checkpoints import WAY_OUT

_WEIGHTS = (".safetensors", ".bin")
_SIZE = re.compile(  # names of settings that give a size of an array, or how many modules there are
    r"size|dim|layer|head|width|height|channel|embd|inner|hidden|ffn|expert|label|rank|block|depth"
    r"|state|group|vocab|bins|bands|position|seq|length|window|context|^(n|d|num)_|_(n|d|num)$"
)
_LENGTH = re.compile(r"position|seq|length|window|context")
_MOST_SIZE = 1 << 21  # vocabularies have less than a million
_MOST_LENGTH = 1 << 27
_MOST_ITEMS = 100_000  # of a list or an object
_MOST_PARAMETERS = 10_000
_LEAST_BYTES = 64  # of an array of a file, with its header
_MOST_ELEMENTS = 16  # for each byte of the weights, which may be packed in few bits
_FEW_ELEMENTS = 1 << 30


def check_sizes(config: Path, found: Any) -> None:
    """Raises for a configuration with sizes that its weights cannot have.

    Args:
        config: The file.
        found: What it says.

    Raises:
        CheckpointError: It has one; says which.
    """
    if not settings.bounds:
        return
    nbytes = _bytes_of_weights(config.parent)
    todo: list[tuple[str, Any]] = [("", found)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, list | dict):
            if len(value) > _MOST_ITEMS:
                raise CheckpointError(f"{config}: {name} has {len(value):,} items. {WAY_OUT}")
            pairs = value.items() if isinstance(value, dict) else ((name, one) for one in value)
            todo += [(str(key), child) for key, child in pairs]
        elif isinstance(value, int | float) and not isinstance(value, bool) and _SIZE.search(name):
            most = _MOST_LENGTH if _LENGTH.search(name) else max(_MOST_SIZE, nbytes)
            if abs(value) > most:
                raise CheckpointError(
                    f"{config}: {name[:60]} is {value:,}, but the weights next to it have "
                    f"{nbytes:,} bytes. {WAY_OUT}"
                )


class Parameters:
    """Counts the parameters of a model while it is made.

    Args:
        config: The file with its configuration.
    """

    def __init__(self, config: Path) -> None:
        nbytes = _bytes_of_weights(config.parent)
        self._config = config
        self._most = _MOST_PARAMETERS + nbytes // _LEAST_BYTES
        self._most_elements = _FEW_ELEMENTS + _MOST_ELEMENTS * nbytes
        self._count = self._elements = 0

    def add(self, elements: int) -> None:
        """Counts one more.

        Raises:
            CheckpointError: There are more than the weights of the folder can fill.
        """
        self._count += 1
        self._elements += elements
        is_much = self._count > self._most or self._elements > self._most_elements
        if is_much and settings.bounds:
            raise CheckpointError(
                f"{self._config}: asks for more than {self._count - 1:,} parameters with "
                f"{self._elements:,} elements, which the weights next to it cannot fill. {WAY_OUT}"
            )


def _bytes_of_weights(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(
            entry.stat().st_size
            for entry in entries
            if entry.name.endswith(_WEIGHTS) and entry.is_file()
        )
