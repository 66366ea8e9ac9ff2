"""The adapter for Equinox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper import ConversionError
from fmapper.programs import Lowering, Program
from fmapper_adapters.jax.libraries import (
    JaxModels,
    draws,
    prepare_program,
    refuse_changes,
)

if TYPE_CHECKING:
    from types import ModuleType

    from fmapper.backends import Models
    from fmapper.translation import Source


class EquinoxAdapter(JaxModels):
    """Equinox as a target: writes modules that use its layers.

    Modules of Equinox are trees and functions of JAX, which its adapter moves and records.
    """

    name: ClassVar[str] = "equinox"
    compiles: ClassVar[bool] = True
    conversion_options: ClassVar[tuple[str, ...]] = ("scan", "structure")
    writes_modes: ClassVar[str] = "layers"
    lowers_like: ClassVar[str] = "jax"
    layer_modules: ClassVar[tuple[str, ...]] = ("equinox",)
    weight_layouts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("Linear", "Conv", "LSTMCell", "GRUCell"), "outputs first"),
        "Embedding": "rows",
    }

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """Returns the module of Equinox, the only form of a model there.

        Raises:
            ConversionError: The option `structure=True` is missing.
        """
        if not options.get("structure"):
            raise ConversionError(
                "for Equinox there are only models with their own classes: pass structure=True. "
                "convert(model, 'jax', ...) gives a model that is called as a whole."
            )
        return self.build(program, modes=options.get("modes", False))

    def translate(self, program: Program, *, modes: bool = False) -> Source:
        """Returns a file for Equinox.

        Raises:
            ConversionError: A call of the model changes its arrays.
        """
        from fmapper.translation import write
        from fmapper_adapters.equinox.translation.dialect import EquinoxDialect

        refuse_changes(program, "Equinox")
        evaluation = program.evaluation
        keys = program.train or draws(program)
        program, slices = prepare_program(program)
        if evaluation is not None:
            evaluation, others = prepare_program(evaluation)
            if slices != others:
                raise ConversionError(
                    f"{program.name}: its arrays are split differently in evaluation and "
                    "training, so one file cannot hold both. Use train=False (--eval)"
                )
        dialect = EquinoxDialect(slices, keys=keys)
        return write(program, dialect, evaluation=evaluation)

    def build(self, program: Program, *, modes: bool = False) -> Any:
        """Returns the module of Equinox."""
        from fmapper_adapters.equinox.translation import build as _build

        model = _build.build(program, self.translate(program, modes=modes))
        has_modes = program.evaluation is not None and not program.starts_in_training
        return _build.for_evaluation(model) if has_modes else model

    def build_transcribed(self, model: Any, source: Models, *call: Any, **options: Any) -> Any:
        """Builds a model in the words of its source."""
        from fmapper.translation import build_transcribed

        return build_transcribed(model, source, self, *call, **options)

    def open_file(
        self, net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the model of a file, filled with the arrays of its source, and options."""
        from fmapper_adapters.equinox.translation import build as _build

        return _build.open_file(net, name, weights, train=train)

    def is_model(self, x: Any) -> bool:
        """Returns False: models of Equinox belong to JAX."""
        return False

    def sources(self) -> Any:
        """Returns the module that makes sources of callable trees, such as modules of Equinox."""
        from fmapper_adapters.jax.libraries import tree_source

        return tree_source

    def is_converted(self, model: Any) -> bool:
        """Returns False: converted models are plain Equinox."""
        return False

    def examine(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Calls the model in evaluation mode.

        Raises:
            ConversionError: The model draws random numbers in evaluation, and has no key.
        """
        import inspect

        from fmapper_adapters.equinox.translation.build import for_evaluation

        known = inspect.signature(type(model).__call__).parameters
        given = {key: value for key, value in kwargs.items() if key in known}
        try:
            return (for_evaluation(model)(*args, **given),)
        except TypeError as error:  # the error for a key of None
            if "key" not in known:
                raise
            raise ConversionError(
                f"{type(model).__name__} does not run without a key: {error}"
            ) from error
