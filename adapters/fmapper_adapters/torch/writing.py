"""The part of the adapter that writes models, and runs them for comparison with translations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper.backends import Models
from fmapper.programs.reading import origin_of_written, source_of_model

if TYPE_CHECKING:
    from types import ModuleType

    from fmapper.programs import Program
    from fmapper.translation import Source
    from fmapper.verification import Trial


class Writing(Models):
    """Models as source code."""

    writes_modes: ClassVar[str] = "all"

    def translate(self, program: Program, *, modes: bool = False) -> Source:
        """Returns a file for torch."""
        from fmapper_adapters.torch.translation import write as _write

        return _write.write(program, modes=modes)

    def build(self, program: Program, *, modes: bool = False) -> Any:
        """Returns the module."""
        from fmapper_adapters.torch.translation import build as _build

        return _build.build(program, self.translate(program, modes=modes))

    def build_transcribed(self, model: Any, source: Models, *call: Any, **options: Any) -> Any:
        """Builds a model in the words of its source."""
        from fmapper.translation import build_transcribed

        return build_transcribed(model, source, self, *call, **options)

    def weights(self, model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a converted or compiled model whose modules have other names."""
        from fmapper_adapters.torch.model.torch_model import TorchModel
        from fmapper_adapters.torch.modules import compiled

        return model.weights() if isinstance(model, TorchModel) else compiled.weights(model)

    def source_weights(
        self, model: Any, *, transient: bool = True
    ) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a model of written classes by source name."""
        if source_of_model(model) is None:
            return None
        import torch

        from fmapper.translation import source_weights

        with torch.no_grad():
            return source_weights(model, self.name, transient=transient)

    def origin_of(self, model: Any) -> str:
        """Returns the folder of weights that a model was made from."""
        return super().origin_of(model) or origin_of_written(model)

    def as_model(self, x: Any) -> Any:
        """Returns the module itself; for a function, a module that calls it."""
        from fmapper_adapters.torch.trials.trial import as_module

        return as_module(x)

    def open_file(
        self, net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the model of a file, filled with the arrays of its source, and options."""
        from fmapper_adapters.torch.translation import build as _build

        return _build.open_file(net, name, weights, train=train)

    def trial(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        train: bool | None,
        parts: bool = False,
    ) -> Trial:
        """Returns a copy of the module to be called and trained."""
        from fmapper_adapters.torch import verify
        from fmapper_adapters.torch.trials import trial as _trial

        return _trial.TorchTrial(model, args, verify.options_of(model, kwargs), train=train)
