"""The facet of an adapter whose framework has models, and an adapter with all four facets.

Models are recorded as programs, and built from programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fmapper.backends.compute import Compute, Observation
from fmapper.backends.framework import Framework
from fmapper.backends.nodes import Nodes
from fmapper.errors import ConversionError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from fmapper.checkpoints.lazy import LazyArray
    from fmapper.checkpoints.pretrained import Pretrained
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.generation.decoding import Decoding
    from fmapper.generation.generation import Generation
    from fmapper.generation.generator import Generator
    from fmapper.programs.lowering import Lowering
    from fmapper.programs.program import Program
    from fmapper.verification.models.trial import Trial


class Models(Framework):
    """A framework with models.

    A subclass implements `is_model` and `export_program` if its models can be recorded, and
    `from_program` if they can be built from a program.

    Attributes:
        has_modes: Its models switch between training and evaluation: `convert(train=True)` records
            a program for each.
        writes_modes: How `translate` writes both modes into one file. `layers`: the program for
            evaluation is recorded with `only_layers`; `all`: it is recorded as by `convert`, also
            to find out whether the file needs it; empty: it cannot.
        compiles: The first call of a model that was built from a program compiles it.
        needs_source: The advice for a function that cannot be recorded for this framework.
        compares: `convert` compares its models with the converted ones, by `outcome`.
        fixes_sizes: `export_program` respects `Auto.fixed`, so that recording again with fewer
            varying sizes makes a difference.
        sorts_keys: Dicts are flattened in the order of their sorted keys.
        lowers_like: The framework whose user-defined lowerings this one uses, too.
        targets: Further names of targets, each with the options of `from_program` that it stands
            for.
        layer_modules: The modules whose classes are layers of this framework.
        weight_layouts: The position of the outputs in the weights of a layer, by the name of its
            class: `outputs first`, `outputs last`; or `rows` for a table.
        conversion_options: The keywords of `from_program` and `from_generation`, so that `convert`
            and `generator` refuse others before they record; None for no such check.
    """

    lacking = "models"
    has_modes: ClassVar[bool] = False
    writes_modes: ClassVar[str] = ""
    needs_source: ClassVar[str] = ""
    compiles: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    fixes_sizes: ClassVar[bool] = False
    sorts_keys: ClassVar[bool] = False
    lowers_like: ClassVar[str] = ""
    targets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    conversion_options: ClassVar[tuple[str, ...] | None] = None
    layer_modules: ClassVar[tuple[str, ...]] = ()
    weight_layouts: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # models

    def is_model(self, x: Any) -> bool:
        """Returns whether an object is a model of this framework, which `convert` can record."""
        return False

    def is_callable_model(self, x: Any) -> bool:
        """Returns whether `export_program` takes a callable that is not a model by its class.

        That is a function, a function with its parameters, or a callable tree of arrays.
        """
        return False

    def as_model(self, x: Any) -> Any:
        """Returns a model as it is, and a bare function of this framework's arrays as a model."""
        return x

    def advice(self, x: Any) -> str:
        """Says what to convert instead of an object that only contains a model; empty for others.

        Such an object holds the program of a model, for example the result of
        `torch.export.export`.
        """
        return ""

    def has_training(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a model has modes, so that its training is recorded by default."""
        return False

    def modes(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Mapping[str, bool]:
        """Returns for each submodule and argument that selects a mode whether it selects training.

        The keys are for messages: `norm.use_running_average=False`. Omitted arguments count with
        their defaults. If the values differ, only a recording with `train=None` shows what the call
        does.
        """
        return {}

    def options(self, model: Any) -> Sequence[str]:
        """Returns the keywords that are options of a call rather than inputs of the model.

        A program has fixed values for them; models that are built from it do not take them.
        """
        return ()

    def computes_with(self, cls: type) -> str | None:
        """Returns the backend of the arrays that a class of this framework computes with.

        None for a class that is not of this framework, or that works with any arrays.
        """
        return None

    def to_evaluation(self, node: Any) -> None:
        """Puts a node of this framework, owned by the caller, into inference mode."""

    def layer(self, cls: type) -> tuple[str, str] | None:
        """Returns the name and the weight layout, if known, of a layer class."""
        for base in cls.__mro__:
            if base.__module__.startswith(self.layer_modules):
                if base.__name__ in ("Module", "Object", "Pytree"):
                    return None
                layouts = (self.weight_layouts.get(c.__name__) for c in cls.__mro__)
                return f"{self.name}.{base.__name__}", next(filter(None, layouts), "")
        return None

    def read_pretrained(
        self, folder: Path, dtype: str | None, arrays: Mapping[str, LazyArray]
    ) -> Pretrained | None:
        """Reads a folder if it holds a pretrained model of this framework; else returns None.

        Nothing in the folder is run, and the model has no memory for its parameters.

        Args:
            folder: The folder.
            dtype: The dtype of floating parameters; None for that of the folder.
            arrays: The lazy arrays of its weights, which limit what the model can contain.
        """
        return None

    def weights(self, model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a converted model by source name, and the inverse function.

        None if those are the names in `state`. A tied array is one object under each of its names;
        the inverse takes such a dict.
        """
        return None

    def source_weights(
        self, model: Any, *, transient: bool = True
    ) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a structured model by source name, and the inverse function.

        They have the layouts of the source, so that some are computed from the model's arrays. None
        for other models.

        Args:
            model: The model.
            transient: Whether to include buffers that the state dict of the source lacks.
        """
        return None

    # programs

    def program_of(self, model: Any) -> Program | None:
        """Returns the program of a converted model; None for any other model."""
        return None

    def origin_of(self, model: Any) -> str:
        """Returns the folder of weights from which a model was loaded; empty if unknown."""
        program = self.program_of(model)
        return "" if program is None else program.origin

    def options_of(self, model: Any) -> Mapping[str, Any] | None:
        """Returns the options with which `from_program` built a model; None for other models."""
        return None

    def export_program(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
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
        """Records the program of a model of this framework for example inputs.

        Args:
            model: The model.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            dynamic_shapes: Which sizes may vary.
            train: Whether to record training; None to record the call as it is, for models with
                mixed `modes`. Submodules of a model that is already in training keep their modes.
            check: Whether to compare the recording with the model.
            strict: Whether arrays in undeclared objects are an error.
            specialize: Whether to fix sizes that depend on values to those of the examples.
            whole: The operations of the target's `lowers_whole`, which the recorder must not
                decompose; empty without a target.
            parts: Whether to record the calls of submodules, too.
            only_layers: With `train`: whether only layers of the framework are in training, and the
                model's own code in evaluation.

        Raises:
            ConversionError: It cannot be recorded; says why, and where. With `check`: the recording
                has other results for the examples.
        """
        raise ConversionError(f"models of {self.name} cannot be recorded")

    def translate(self, program: Program, *, modes: bool = False) -> Any:
        """Writes a program that was recorded with `parts` as source code, a `Source`.

        Args:
            program: The program.
            modes: Whether its `evaluation` differs, so that the code branches on the mode.
        """
        raise ConversionError(f"models cannot be written as source code for {self.name}")

    def build(self, program: Program, *, modes: bool = False) -> Any:
        """Builds a model of the classes that `translate` writes, with the program's arrays."""
        raise ConversionError(f"models cannot be written as source code for {self.name}")

    def build_transcribed(self, model: Any, source: Models, *call: Any, **options: Any) -> Any:
        """Builds a model in the words of its source; see `fmapper.translation`."""
        raise ConversionError(f"structure=True does not transcribe for {self.name}, as source does")

    def finish(self, model: Any, *, trains: bool, reason: str = "") -> None:
        """Prepares a model of a file for use; without `trains` it refuses to be trained."""

    def open_file(
        self, net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the model in a file of `translate`, and the further arguments of a call.

        `weights` are the NumPy arrays of the source, by name.
        """
        raise ConversionError(f"models cannot be written as source code for {self.name}")

    def trial(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        train: bool | None,
        parts: bool = False,
    ) -> Trial:
        """Returns a `Trial`, with which `verify` calls and trains a model on these inputs.

        Args:
            model: The model, which is not changed.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            train: Whether to train; None for the mode of the call.
            parts: Whether to name arrays as in a program that was recorded with `parts`.
        """
        raise ConversionError(f"models of {self.name} cannot be trained by verify")

    def as_argument(self, value: Any) -> Any:
        """Returns an array as a translated file takes it: for a key, its raw words."""
        return value

    def lowers(self, op: str) -> bool:
        """Returns whether this framework uses lowerings of an operation that name no target."""
        return False

    def lowers_whole(self, lowerings: Mapping[str, Lowering]) -> Collection[str]:
        """Returns the operations that recorders must not decompose in programs for this framework.

        Args:
            lowerings: The user's lowerings, by operation.

        Returns:
            Their names: `aten::gelu`, or `aten::std.correction` for one overload.
        """
        return ()

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """Builds a model of this framework that computes a program.

        Args:
            program: The program.
            lowerings: The user's lowerings, by operation; they override the built-in ones.
            options: Options of this framework.

        Raises:
            UnsupportedOpsError: Operations have no lowering; lists all of them.
        """
        raise ConversionError(f"programs cannot be lowered to {self.name}")

    def check_options(self, **options: Any) -> None:
        """Checks options for `from_program` before a program is recorded.

        Raises:
            ConversionError: An option has an invalid value.
        """

    # generating text

    def export_generation(
        self,
        model: Any,
        *,
        max_length: int,
        batch: int,
        check: bool,
        whole: Collection[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Records the two programs of a generating model: for a prompt, and for one more token.

        Args:
            model: The model.
            max_length: How many tokens its cache can hold.
            batch: How many prompts a call takes.
            check: Whether to compare the recording with the model.
            whole: The operations that the target lowers whole.
            options: Decoding options that override the model's configuration; the number of rows
                per prompt depends on them.

        Raises:
            ConversionError: It cannot be recorded, or does not generate.
        """
        raise ConversionError(
            f"models of {self.name} cannot be recorded for generation. If this model was "
            "converted, create the generator from the original model, or from the folder that you "
            "passed to from_pretrained, fmapper.generator(folder, ...), and then pass it these "
            "arrays, generator.replace(params=model)."
        )

    def from_generation(
        self,
        generation: Generation,
        decoding: Decoding,
        lowerings: Mapping[str, Lowering],
        **options: Any,
    ) -> Generator:
        """Builds the generator of this framework from the two programs.

        Args:
            generation: The programs.
            decoding: The decoding options, which a call can override.
            lowerings: The user's lowerings, by operation.
            options: Options of this framework.
        """
        raise ConversionError(f"{self.name} has no generators")

    # calls for comparisons

    def call(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        train: bool | None = None,
        seed: int | None = None,
    ) -> Any:
        """Calls a model with inputs that it may change; the results are ready to be compared.

        Args:
            model: The model, which is not changed.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            train: Whether to train; None for the model's current mode.
            seed: The seed of the framework's global random generator; None for its present state.
        """
        return model(*args, **kwargs)

    def caller(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
        """Returns a fast version of `call`, such as a user of this framework would write."""
        self.to_evaluation(model)
        if isinstance(self, Compute):
            return self.runner(lambda module, a, k: module(*a, **k), model, compile=None)
        return lambda a, k: model(*a, **k)

    def outcome(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
    ) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
        """Prepares a call of a model in one of its modes, for a comparison.

        Returns:
            A function that returns the leaves of the output in order, and by name the arrays that
            the call changes; it does not change the model. It takes a relative perturbation of the
            values of floating arrays; `compiled=False` runs the operations one by one, without
            fusing; and `turned=True` changes the signs and phases of eigenvectors, singular vectors
            and orthogonal factors. None if this framework does not support it.
        """
        return None

    def examine(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Calls a converted model, for a comparison with its source.

        Returns:
            The outputs, or None if they cannot be compared, for example because they are random.

        Raises:
            ConversionError: The dtype of an operation's result differs from the source's.
        """
        return None

    def call_in_float64(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        train: bool | None = None,
    ) -> Any | None:
        """Calls a model in float64; returns None if that is not possible."""
        return None

    def watch(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        whole: Collection[str] = (),
        train: bool | None = None,
        double: bool = False,
    ) -> Iterable[Observation] | None:
        """Records every operation of a call, in order; None where that is not possible.

        Inputs and arrays of the model may come first, as the operations `input` and `weight`.

        Args:
            model: The model.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            whole: The operations that a recording of the model does not decompose.
            train: Whether to train; None for the model's current mode.
            double: Whether to compute in double precision, which not every model supports.
        """
        return None

    def watcher(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], Iterable[Observation]]:
        """Returns a function like `watch`, in evaluation, for the same model with other arrays."""
        return lambda other: self.watch(other, args, kwargs, train=False) or ()

    def own_rules(self, model: Any, arrays: Mapping[str, Any]) -> Rules | None:
        """Returns the rules by which a model's own library loads arrays of these names and shapes.

        None if that library has no such rules.

        Raises:
            CheckpointError: The library cannot load them.
        """
        return None

    def outline(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterable[Observation] | None:
        """Records the operations of a call in evaluation without computing them.

        None where that is not possible. The observations have no values. Inputs and arrays of the
        model come before the operations, as `input` and `weight`, the latter with the array's name
        as their module; layers that are stacked for a loop are unrolled into `layers.0.weight` and
        so on.
        """
        return None


class Adapter(Compute, Nodes, Models):
    """A complete adapter of one framework, with four facets.

    A subclass implements the abstract methods of `Arrays`; everything else has a default. The
    adapter of a framework with fewer capabilities derives from some facets: for arrays alone from
    `Arrays`, for layers over another framework's arrays from `Nodes` and `Models`.
    """
