"""Structured models, whose classes were generated: `convert(..., structure=True)`."""

from __future__ import annotations

import sys
from typing import Any


def source_of_class(model: Any) -> Any:
    """Returns the `Source` that wrote the class of a model or submodule, or None."""
    return getattr(sys.modules.get(type(model).__module__), "__fmapper_source__", None)


def source_of_model(model: Any) -> Any:
    """Returns the `Source` of a whole structured model, or None."""
    source = source_of_class(model)
    return source if source is not None and type(model).__name__ == source.name else None


def origin_of_written(model: Any) -> str:
    """Returns the folder from which the arrays of a structured model were read."""
    source = source_of_model(model)
    return "" if source is None else str(source.weights.origin)
