"""Facts about layers of torch and transformers for `fmapper.transfer`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from fmapper.backends import Models, Observation
from fmapper.checkpoints import Rules

_OUTPUTS_FIRST = (
    "Linear Bilinear Conv1d Conv2d Conv3d LSTM GRU RNN RNNBase LSTMCell GRUCell RNNCell "
    "RNNCellBase MultiheadAttention"
)


class Layers(Models):
    """The layouts of weights, and runs of modules with other arrays."""

    layer_modules: ClassVar[tuple[str, ...]] = ("torch.nn", "transformers.pytorch_utils")
    weight_layouts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_OUTPUTS_FIRST.split(), "outputs first"),
        "Conv1D": "outputs last",  # transformers' layer
        "Embedding": "rows",
        "EmbeddingBag": "rows",
    }

    def watcher(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], Iterable[Observation]]:
        """Records a module once, and runs the program with arrays of other modules."""
        from fmapper_adapters.torch import verify

        return verify.watcher(model, args, kwargs) or super().watcher(model, args, kwargs)

    def own_rules(self, model: Any, arrays: Mapping[str, Any]) -> Rules | None:
        """Returns the rules of transformers' tables for a model of transformers."""
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            return None
        from fmapper_adapters.torch.pretrained.tables import transformers_rules

        return transformers_rules(model, arrays)

    def outline(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterable[Observation] | None:
        """Calls a module on tensors without memory."""
        from fmapper_adapters.torch import outline

        return outline.operations(model, args, kwargs)
