"""The facet of an adapter whose framework has models, and an adapter with all four facets.

Models are recorded as programs, and made of programs.
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

    A subclass answers `is_model` and `export_program` if its models can be recorded, `from_program`
    if they can be made of a program.

    Attributes:
        has_modes: Its models switch between training and evaluation: `convert(train=True)` gives
            them a program for each.
        writes_modes: `translate` writes one file for two programs with `modes`. `layers`: the one
            for evaluation is recorded with `only_layers`; `all`: it is that of `convert`, and
            whether a file needs it is asked for evaluation alone, too; empty: it does not.
        compiles: The first call of a model that was made of a program compiles it.
        needs_source: What to do about a function that no framework can record for it.
        compares: `convert` compares what it makes of its models with them, by `outcome`.
        fixes_sizes: `export_program` heeds `Auto.fixed`; else a recording for fewer varying sizes
            would be the same again.
        sorts_keys: Dicts are flattened in the order of their sorted keys.
        lowers_like: The framework whose lowerings, those that users add, are its own too.
        targets: Other names of targets than that of the framework, with the options of
            `from_program` that each stands for.
        layer_modules: The modules whose classes are layers of this framework.
        weight_layouts: Where the weights of a layer have their outputs, by the name of its class:
            `outputs first`, `outputs last`; or `rows`, for a table of them.
        conversion_options: The keywords of `from_program` and `from_generation`, so that `convert`
            and `generator` refuse others before they record; None where they are not to look.
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

        That is a function, a function with its parameters, or a tree of arrays that is called.
        """
        return False

    def as_model(self, x: Any) -> Any:
        """Returns a model, or a bare function of arrays of this framework as one."""
        return x

    def advice(self, x: Any) -> str:
        """Says what to convert in place of an object that stands for a model; empty if it does not.

        Such an object holds the program of a model, as what `torch.export.export` gives.
        """
        return ""

    def has_training(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a model has modes, so that its training is recorded by default."""
        return False

    def modes(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Mapping[str, bool]:
        """Returns whether a call trains, by each part and argument that says so.

        The keys are for messages: `norm.use_running_average=False`. Arguments that the call leaves
        out count with their defaults. Where the values differ, only a recording with `train=None`
        shows what the call does.
        """
        return {}

    def options(self, model: Any) -> Sequence[str]:
        """Returns the keywords that are options of a call rather than inputs of the model.

        A program has them fixed; models that are made of it do not take them.
        """
        return ()

    def computes_with(self, cls: type) -> str | None:
        """Returns the backend whose arrays a class of this framework computes with.

        None for a class that is not of this framework, or that works with any arrays.
        """
        return None

    def to_evaluation(self, node: Any) -> None:
        """Puts a node of this framework, owned by the caller, into inference mode."""

    def layer(self, cls: type) -> tuple[str, str] | None:
        """Returns the name and the weight layout, if known, of the layer that a class is."""
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
            arrays: The arrays of its weights, none of them read: the model cannot ask for more.
        """
        return None

    def weights(self, model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a converted model by source name, and the inverse function.

        None where those are the names that `state` gives. What is tied is one object under each of
        its names; the way back takes such a dict.
        """
        return None

    def source_weights(
        self, model: Any, *, transient: bool = True
    ) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a model of written classes by source name, and the way back.

        They have the layouts of the source: some are not the arrays of the model, but made of
        them. None for other models.

        Args:
            model: The model.
            transient: Whether buffers are among them that the state dict of the source has not.
        """
        return None

    # programs

    def program_of(self, model: Any) -> Program | None:
        """Returns the program of a converted model; None for any other model."""
        return None

    def origin_of(self, model: Any) -> str:
        """Returns the folder of weights that a model was made from; empty where it is not known."""
        program = self.program_of(model)
        return "" if program is None else program.origin

    def options_of(self, model: Any) -> Mapping[str, Any] | None:
        """Returns the options with which `from_program` made a model; None for one of others."""
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
            train: Whether what it does in training is recorded; None for what the call does as it
                stands, of models that have several `modes`. Parts of a model that trains already
                keep their modes in training.
            check: Whether what was recorded is compared with the model.
            strict: Whether arrays of objects that nobody declared are an error.
            specialize: Whether sizes that depend on values are those of the examples.
            whole: The operations that the target lowers whole, as `lowers_whole` gives them. A
                recorder that would take one apart leaves it. Without a target there are none.
            parts: Whether the calls of submodules are recorded, too.
            only_layers: With `train`: only layers of the framework are in training, and the model's
                own code does what it does in evaluation.

        Raises:
            ConversionError: It cannot be recorded; says why, and where. With `check`: what was
                recorded gives other results for the examples.
        """
        raise ConversionError(f"models of {self.name} cannot be recorded")

    def translate(self, program: Program, *, scan: bool = False, modes: bool = False) -> Any:
        """Returns a program that was recorded with its parts as source code: a `Source`.

        Args:
            program: The program.
            scan: Write blocks that repeat as one with stacked arrays, and their loop as a scan.
            modes: Its `evaluation` does something else, which is written below conditions.

        Raises:
            ConversionError: This framework is not written, or something in the program is not.
        """
        raise ConversionError(f"models cannot be written as source code for {self.name}")

    def build(self, program: Program, *, scan: bool = False, modes: bool = False) -> Any:
        """Returns the model of the classes that `translate` writes, with the program's arrays.

        It takes what `translate` takes, and raises as that does.
        """
        raise ConversionError(f"models cannot be written as source code for {self.name}")

    def open_file(
        self, net: ModuleType, name: str, weights: Mapping[str, Any], *, train: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the model of a file that `translate` has written, and what a call takes besides.

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
        """Returns a model as `verify` calls and trains it, on these inputs.

        Args:
            model: The model, which stays as it is.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            train: The mode; None for that in which the call runs.
            parts: Whether arrays have the names that they have in a program with parts.
        """
        raise ConversionError(f"models of {self.name} cannot be trained by verify")

    def as_argument(self, value: Any) -> Any:
        """Returns the argument of a translated file for an array: the words of a key."""
        return value

    def lowers(self, op: str) -> bool:
        """Returns whether a lowering that names no target belongs to this framework."""
        return False

    def lowers_whole(self, lowerings: Mapping[str, Lowering]) -> Collection[str]:
        """Returns the operations that a recorder leaves whole in programs for this framework.

        Args:
            lowerings: Those that the user has added, by operation.

        Returns:
            Their names: `aten::gelu`, or `aten::std.correction` for one overload.
        """
        return ()

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """Builds the model of this framework that computes a program.

        Args:
            program: The program.
            lowerings: Those that the user has added, by operation; they win over the built-in ones.
            options: What is particular to this framework.

        Raises:
            UnsupportedOpsError: Operations have no lowering; lists all of them.
        """
        raise ConversionError(f"programs cannot be lowered to {self.name}")

    def check_options(self, **options: Any) -> None:
        """Checks options for `from_program` before a program is recorded.

        Raises:
            ConversionError: There is no such value.
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
            max_length: How many tokens its cache is to hold.
            batch: How many prompts a call takes.
            check: Whether what was recorded is compared with the model.
            whole: The operations that the target lowers whole.
            options: How tokens are chosen where it is not to be as the model's own configuration
                says: how many rows a prompt takes goes by it.

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
            decoding: How tokens are chosen unless a call says otherwise.
            lowerings: Those that the user has added, by operation.
            options: What is particular to this framework.
        """
        raise ConversionError(f"{self.name} has no generators")

    # calls that are compared

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
            model: The model, which stays as it is.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            train: The mode; None for that in which the model is.
            seed: That of the framework's global random generator; None for its present state.
        """
        return model(*args, **kwargs)

    def caller(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
        """Returns a function like `call`, as fast as a user of this framework would make it."""
        self.to_evaluation(model)
        if isinstance(self, Compute):
            return self.runner(lambda own, a, k: own(*a, **k), model, compile=None)
        return lambda a, k: model(*a, **k)

    def outcome(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
    ) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
        """Prepares a call of a model in one of its modes, for a comparison.

        Returns:
            A function that gives the leaves of the output in order, and the arrays that the call
            changes by name; the model stays as it is. It takes by how much the values of floating
            arrays are to be off, relative to them; `compiled`: False asks for one operation after
            the other, without fusing; and `turned`: True asks for other signs and phases of
            eigenvectors, singular vectors and orthogonal factors. None where this framework has
            no such thing.
        """
        return None

    def examine(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Calls a converted model, for a comparison with its source.

        Returns:
            None where there is nothing to compare, as where it draws random numbers.

        Raises:
            ConversionError: An operation gives another dtype than in its source.
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
        """Calls a model in float64; returns None where that cannot be."""
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

        Inputs and arrays of the model may stand before them, as the operations `input` and
        `weight`.

        Args:
            model: The model.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            whole: The operations that are left whole where the model is recorded.
            train: The mode; None for that in which the model is.
            double: Compute in double precision, which not every model can.
        """
        return None

    def watcher(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], Iterable[Observation]]:
        """Returns `watch`, in evaluation, for models with other arrays than this one."""
        return lambda other: self.watch(other, args, kwargs, train=False) or ()

    def own_rules(self, model: Any, arrays: Mapping[str, Any]) -> Rules | None:
        """Returns the rules by which the library of a model loads arrays of such names and shapes.

        None where that library has none.

        Raises:
            CheckpointError: It does not load them.
        """
        return None

    def outline(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterable[Observation] | None:
        """Records the operations of a call in evaluation without computing them.

        None where that is not possible. The values are left out. Inputs and arrays of the model
        stand before the operations, as `input` and `weight`, the latter with the array's name as
        their module; layers that are stacked for a loop are unrolled, as `layers.0.weight`.
        """
        return None


class Adapter(Compute, Nodes, Models):
    """All that fmapper knows of one framework, in four facets.

    A subclass answers the abstract methods of `Arrays`; everything else has a default. An adapter
    of a framework that has less derives from the facets that it has: one of arrays alone from
    `Arrays`, one of layers over another framework's arrays from `Nodes` and `Models`.
    """
