"""The arrays of a program as JAX has them, each when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fmapper import to_jax
from fmapper.programs import Program


class ProgramArrays(Mapping[str, Any]):
    """The parameters and buffers of a program, moved to JAX one at a time.

    A module that transposes them then never has all of them twice.
    """

    def __init__(self, program: Program) -> None:
        self._arrays = {**program.parameters, **program.buffers}

    def __getitem__(self, name: str) -> Any:
        """Moves one array; those of a checkpoint are read."""
        return to_jax({name: self._arrays[name]})[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
