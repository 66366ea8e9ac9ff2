"""Counterparts of the infrastructure of transformers in files for Equinox; see `weights`."""

from __future__ import annotations

from typing import Any

import equinox as eqx


class PreTrainedModel(eqx.Module):
    """A model with its configuration."""

    config: Any = eqx.field(static=True)

    def __init__(self, config):
        self.config = config
