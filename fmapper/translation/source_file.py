"""A model as source code, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmapper.translation.reading.weights import Weights


@dataclass(slots=True)
class Source:
    """A model as source code.

    Attributes:
        code: The file.
        name: The class of the model in it.
        weights: Its arrays, and where those are in the source.
        layers: How many parameters are in layers of the target, and how many there are.
        dissolved: Submodules without code of their own, with the reason.
        modes: In which it computes what the model does: `eval`, `train`.
        by_operations: Why it is not in the words of the model's source; empty if it is.
        lacks_training: Why it is for evaluation alone, though the program for training is known.
        parameters: What the model takes there.
        positional: Those for what the example gave by position; empty for what it does not take.
        leaves: Parameters for arrays in an object that the model is given, as a state -> which
            of all arrays it is.
        objects: Parameters for objects of records of the file, or with such -> their structure.
        fixed: Sizes of inputs that were to vary and do not, each in a sentence with the reason.
    """

    code: str
    name: str
    weights: Weights
    layers: tuple[int, int]
    dissolved: dict[str, str]
    modes: tuple[str, ...] = ("eval",)
    parameters: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    leaves: Mapping[str, int] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    lacks_training: str = ""
    by_operations: str = ""
