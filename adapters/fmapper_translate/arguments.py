"""The arguments of a model's constructor, read from the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fmapper_translate.operations import NotTranscribed


def find_arguments(model: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns what the constructor of a model was given.

    Raises:
        NotTranscribed: A parameter has no default, and the model no attribute of its name.
    """
    arguments = {}
    for name, parameter in inspect.signature(type(model)).parameters.items():
        if hasattr(model, name) and not isinstance(getattr(model, name), nn.Module):
            arguments[name] = getattr(model, name)
        elif parameter.default is inspect.Parameter.empty:
            raise NotTranscribed(
                f"{type(model).__name__}: the model does not say what {name} was. Give `arguments`"
            )
    return (), arguments
