"""The face of this package for adapters of libraries that build on JAX.

`JaxModels` is the facet of models that JAX computes. The other names are for recording such models,
and are imported on first access.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from fmapper import ConversionError
from fmapper.backends import Models, Observation
from fmapper.programs.reading import origin_of_written, source_of_model

if TYPE_CHECKING:
    from fmapper.checkpoints import Recorder, Recording
    from fmapper.programs import Lowering, Program
    from fmapper.verification import Trial
    from fmapper_adapters.jax.arrays.packed import PackedArray
    from fmapper_adapters.jax.model.jax_model import from_program
    from fmapper_adapters.jax.record import parts, train_flags
    from fmapper_adapters.jax.record import source as tree_source
    from fmapper_adapters.jax.record.closure import Lifted, classes_at, objects_at
    from fmapper_adapters.jax.record.source import call_and_restore
    from fmapper_adapters.jax.record.trace import Source
    from fmapper_adapters.jax.training.facet import JaxOptimizers
    from fmapper_adapters.jax.translation.dialect import JaxDialect, refuse_changes
    from fmapper_adapters.jax.translation.functions.opening import key_for
    from fmapper_adapters.jax.translation.layers import prepare_program
    from fmapper_adapters.jax.translation.layers.arrays import ProgramArrays
    from fmapper_adapters.jax.translation.layers.slices import (
        TAKE_APART,
        Slices,
        slices_by_suffix,
    )
    from fmapper_adapters.jax.translation.layers.statistics import with_shared_statistics
    from fmapper_adapters.jax.translation.print_numbers import draws
    from fmapper_adapters.jax.tree import registered_type

__all__ = [
    "TAKE_APART",
    "JaxDialect",
    "JaxModels",
    "JaxOptimizers",
    "Lifted",
    "PackedArray",
    "ProgramArrays",
    "Slices",
    "Source",
    "call_and_restore",
    "classes_at",
    "draws",
    "from_program",
    "key_for",
    "objects_at",
    "parts",
    "prepare_program",
    "refuse_changes",
    "registered_type",
    "slices_by_suffix",
    "train_flags",
    "tree_source",
    "with_shared_statistics",
]

_MODULES = {
    "TAKE_APART": "translation.layers.slices",
    "JaxDialect": "translation.dialect",
    "JaxOptimizers": "training.facet",
    "Lifted": "record.closure",
    "PackedArray": "arrays.packed",
    "ProgramArrays": "translation.layers.arrays",
    "Slices": "translation.layers.slices",
    "Source": "record.trace",
    "call_and_restore": "record.source",
    "classes_at": "record.closure",
    "draws": "translation.print_numbers",
    "from_program": "model.jax_model",
    "key_for": "translation.functions.opening",
    "refuse_changes": "translation.dialect",
    "registered_type": "tree",
    "objects_at": "record.closure",
    "parts": "record",
    "prepare_program": "translation.layers",
    "slices_by_suffix": "translation.layers.slices",
    "train_flags": "record",
    "tree_source": "record",
    "with_shared_statistics": "translation.layers.statistics",
}

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = f"fmapper_adapters.jax.{_MODULES[name]}"
    if name in ("parts", "train_flags", "tree_source"):
        return import_module(f"{place}.{name.removeprefix('tree_')}")
    return getattr(import_module(place), name)


class JaxModels(Models):
    """Models that JAX computes: JAX's own, and those of libraries that build on it."""

    fixes_sizes: ClassVar[bool] = True
    sorts_keys: ClassVar[bool] = True

    def check_options(self, **options: Any) -> None:
        """Checks that JAX knows the precision.

        Raises:
            ConversionError: JAX does not know it.
        """
        try:
            with jax.default_matmul_precision(options.get("precision")):
                pass
        except ValueError as error:
            raise ConversionError(f"precision={options['precision']!r}: {error}") from None

    @abstractmethod
    def sources(self) -> Any:
        """Returns the module that makes the `Source` of a model.

        It has the functions `make_source(model, args, kwargs, *, train)`, which returns the source
        and the arguments that it takes, `evaluate(model, args, kwargs, *, train)`, which calls the
        model, and `has_training` and `modes`, as in `Models`.
        """

    @abstractmethod
    def is_converted(self, model: Any) -> bool:
        """Returns whether a model is a converted one."""

    def recorder(self, recording: Recording) -> Recorder:
        """Returns the recorder for arrays of JAX."""
        from fmapper_adapters.jax.arrays.recording import JaxRecorder  # rarely needed

        return JaxRecorder(recording)

    def lowers_whole(self, lowerings: Mapping[str, Lowering]) -> Collection[str]:
        """Returns the operations of `jax/aten/`."""
        from fmapper_adapters.jax.aten import table

        return table.lowers_whole(lowerings)

    def has_training(self, model: Any, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether a submodule or an argument of the model has a training mode."""
        result: bool = self.sources().has_training(model, args, kwargs)
        return result

    def modes(self, model: Any, args: Args, kwargs: Kwargs) -> Mapping[str, bool]:
        """Returns the mode of each submodule and mode argument: True for training."""
        result: Mapping[str, bool] = self.sources().modes(model, args, kwargs)
        return result

    def export_program(
        self,
        model: Any,
        args: Args,
        kwargs: Kwargs,
        *,
        dynamic_shapes: Any,
        train: bool | None,
        check: bool,
        strict: bool | None,
        specialize: bool = False,
        whole: Collection[str] = (),
        parts: bool = False,
        only_layers: bool = False,
    ) -> Program:
        """Records the model by `jax.make_jaxpr`."""
        from fmapper_adapters.jax.record import trace

        source, args, kwargs = self.sources().make_source(model, args, kwargs, train=train)
        options = {"dynamic_shapes": dynamic_shapes, "train": bool(train), "strict": strict}
        return trace.record(source, args, kwargs, parts=parts, **options)

    def source_weights(
        self, model: Any, *, transient: bool = True
    ) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a model of written classes by source name."""
        if source_of_model(model) is None:
            return None
        from fmapper.translation import source_weights

        return source_weights(model, "jax", transient=transient)

    def origin_of(self, model: Any) -> str:
        """Returns the folder of weights that a model was made from."""
        return super().origin_of(model) or origin_of_written(model)

    def call(
        self,
        model: Any,
        args: Args,
        kwargs: Kwargs,
        *,
        train: bool | None = None,
        seed: int | None = None,
    ) -> Any:
        """Calls the model and leaves it unchanged."""
        given = {**self.keys(model, train=train), **kwargs}
        return self.sources().evaluate(model, args, given, train=train)

    def keys(self, model: Any, *, train: bool | None) -> dict[str, Any]:
        """Returns the random key that a call of a converted model takes by keyword."""
        is_random = self.is_converted(model) and getattr(model, "is_random", False)
        return {"key": jax.random.key(0)} if is_random else {}

    def watch(
        self,
        model: Any,
        args: Args,
        kwargs: Kwargs,
        *,
        whole: Collection[str] = (),
        train: bool | None = None,
        double: bool = False,
    ) -> Iterable[Observation] | None:
        """Records the model, and returns the operations of its program."""
        from fmapper_adapters.jax import verify

        source = self.sources().make_source(model, args, kwargs, train=train)
        return verify.in_double(*source) if double else verify.operations(*source)

    def outline(self, model: Any, args: Args, kwargs: Kwargs) -> Iterable[Observation] | None:
        """Traces the model."""
        if self.is_converted(model):
            return None
        from fmapper_adapters.jax import verify
        from fmapper_adapters.jax.record import trace

        source, args, kwargs = self.sources().make_source(model, args, kwargs, train=False)
        return verify.outline(trace.record(source, args, kwargs, strict=False, parts=True))

    def caller(
        self, model: Any, args: Args, kwargs: Kwargs
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
        """Returns the compiled model, with its arrays as arguments."""
        if self.is_converted(model):
            return lambda a, k: self.call(model, a, k, train=False)
        from fmapper_adapters.jax import verify

        return verify.compile_model(*self.sources().make_source(model, args, kwargs, train=False))

    def outcome(
        self, model: Any, args: Args, kwargs: Kwargs, *, train: bool
    ) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
        """Prepares a call of the model, compiled with little effort."""
        from fmapper_adapters.jax import verify

        return verify.outcome(*self.sources().make_source(model, args, kwargs, train=train))

    def trial(
        self, model: Any, args: Args, kwargs: Kwargs, *, train: bool | None, parts: bool = False
    ) -> Trial:
        """Returns the model as a function of its arrays, to be called and trained."""
        from fmapper_adapters.jax.trials import trial as _trial

        keys = self.keys(model, train=train)
        kwargs = {**keys, **kwargs}
        source, args, kwargs = self.sources().make_source(model, args, kwargs, train=train)
        source = source.with_short_names() if parts else source
        return _trial.JaxTrial(source, args, kwargs, same=not parts and not keys)

    def as_argument(self, value: Any) -> Any:
        """Returns the words of a PRNG key; anything else unchanged."""
        import jax

        dtype = getattr(value, "dtype", None)
        is_key = dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
        return jax.random.key_data(value) if is_key else value

    def call_in_float64(
        self, model: Any, args: Args, kwargs: Kwargs, *, train: bool | None = None
    ) -> Any | None:
        """Calls the model with jax_enable_x64, on arrays of float64."""
        if self.is_converted(model):
            return None
        from fmapper_adapters.jax import verify

        return verify.in_float64(*self.sources().make_source(model, args, kwargs, train=train))
