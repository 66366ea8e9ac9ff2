"""The origin of a model of transformers."""

from __future__ import annotations

import os
from typing import Any


def origin_of(model: Any) -> str:
    """Returns the local folder that a model of transformers was made from; empty for others."""
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    return os.path.abspath(place) if isinstance(place, str) and os.path.isdir(place) else ""
