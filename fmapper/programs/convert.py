"""Converts models of one framework to models of another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, TypeVar, Unpack, overload

from fmapper.backends.discovery import adapter_of, adapters, get_adapter
from fmapper.backends.models import Models
from fmapper.errors import ConversionError, FixedSizeWarning
from fmapper.moves.mover import mover_to
from fmapper.programs import check_target
from fmapper.programs.program import Program
from fmapper.programs.reading.written import source_of_class
from fmapper.programs.steps import (
    check_options,
    find_target,
    is_target,
    lower,
    lower_trained,
    lower_with_fixed_sizes,
    lower_with_varying_sizes,
    no_target,
    record_program,
    with_arrays,
)
from fmapper.progress import step
from fmapper.tracebacks import short_traceback
from fmapper.tree.fmap import fleaves
from fmapper.tree.functor import declaration_of
from fmapper.verification.models.owners import family_of, inputs_for, source_of, source_of_callable
from fmapper.warn import warn

if TYPE_CHECKING:
    from fmapper.array_types import Array
    from fmapper_adapters.flax import FlaxModel, LinenModel
    from fmapper_adapters.jax import JaxModel
    from fmapper_adapters.torch import TorchModel

    Inputs = tuple[Any, ...] | list[Any] | Array
    Keywords = Mapping[str, Any] | None
    Model = Callable[..., Any] | tuple[Any, Any] | Program

T = TypeVar("T")


class _Options(TypedDict, total=False):
    dynamic_shapes: Any
    train: bool
    check: bool
    strict: bool | None
    specialize: bool


class _ForJax(_Options, total=False):
    precision: str | None


class _ForFlax(_ForJax, total=False):
    rngs: Any
    structure: Literal[False]


class _ForTorch(_Options, total=False):
    fused: bool
    structure: Literal[False]


class _Structured(_Options, total=False):
    structure: Required[bool]
    arguments: Mapping[str, Any] | None


class _Scanned(_Structured, total=False):
    scan: bool


# A tree that is not callable is not a model: it is moved, and keeps its class. A structured model
# has a class that is generated at run time, so that its type is unknown.
# fmt: off
@overload
def convert(model: Model, to: Literal["jax"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_ForJax]) -> JaxModel: ...  # noqa: E501
@overload
def convert(model: Model, to: Literal["flax", "nnx"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_ForFlax]) -> FlaxModel: ...  # noqa: E501
@overload
def convert(model: Model, to: Literal["linen"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_ForJax]) -> LinenModel: ...  # noqa: E501
@overload
def convert(model: Model, to: Literal["torch"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_ForTorch]) -> TorchModel: ...  # noqa: E501
@overload
def convert(model: Model, to: Literal["torch"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_Structured]) -> Any: ...  # noqa: E501
@overload
def convert(model: Model, to: Literal["flax", "nnx", "equinox"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_Scanned]) -> Any: ...  # noqa: E501
@overload
def convert(model: T, to: Literal["jax"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_Options]) -> T: ...  # noqa: E501
@overload
def convert(model: T, to: Literal["flax", "nnx"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_Options]) -> T: ...  # noqa: E501
@overload
def convert(model: T, to: Literal["torch"], example_inputs: Inputs = ..., example_kwargs: Keywords = ..., **options: Unpack[_Options]) -> T: ...  # noqa: E501
# fmt: on
@short_traceback
def convert(
    model: Any,
    to: str,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
    check: bool = True,
    strict: bool | None = None,
    specialize: bool = False,
    **options: Any,
) -> Any:
    """Converts a model to another framework: records its program and lowers it.

    A tree without a framework's model, such as a functor, is moved leaf by leaf.

    Args:
        model: A `torch.nn.Module`; for `torch` a module of NNX, a pair of a Linen module and its
            variables, an Equinox module or another callable tree of JAX arrays, a function, or a
            pair of a function and its parameters. It is not changed. Or a `Program` from
            `load_program`.
        to: The target: `jax`, `flax` (or `nnx`, the same), `linen` or `torch`; with
            `structure=True` also `equinox`.
        example_inputs: The positional inputs of a call. Arrays may be of any backend.
        example_kwargs: The keyword inputs of a call.
        dynamic_shapes: Which sizes may vary, as for `torch.export.export`; all others are fixed to
            those of the examples. `auto`: all that the code does not fix, with a `FixedSizeWarning`
            that says which it fixes and why; sizes of 0 and 1 in the examples are fixed, so pass
            larger ones; if a torch module computes sizes by more than 60 operations, only the first
            size of each input varies. Also in the notation of `jax.export`, as `["batch, _"]`: a
            text for each input. Decisions of Python code that depend on such a size (`if x.shape[0]
            % 2`) are fixed to those of the examples; for inputs that would decide otherwise the
            model raises `ProgramInputError`.
        train: Whether to record training, with dropout and batch statistics. For `torch` it is
            recorded by default besides evaluation, if possible; True makes it an error if not.
        check: Whether to compare with the model on the example inputs. For a torch model, which may
            behave differently while it is recorded, the recording is compared in torch, and then
            the converted model, whose operations must also have torch's dtypes (this compiles its
            first call). For a JAX model the converted model is compared, also at other sizes if
            sizes vary.
        strict: For JAX functions that use arrays in undeclared objects: False makes them constants,
            which are not trained; by default they are an error.
        specialize: Whether to fix sizes that depend on the values of tensors, and are not padded,
            to those of the examples: the program checks them, and can be compiled.
        precision: For JAX, Flax and Linen, the precision of matrix products in float32: `highest`
            by default. None leaves it to `jax.default_matmul_precision`.
        rngs: For Flax, an `nnx.Rngs` that the model keeps.
        structure: For Flax, Equinox and torch, True for a module of the model's own classes with
            layers of the framework, whose code `fmapper.source` shows; in the words of the source
            where `source` writes those. Equinox always needs it.
        scan: With `structure=True` for Flax and Equinox, True for repeated blocks as one block with
            stacked arrays, called by a scan.
        arguments: With `structure=True` for Flax and torch, what the model's constructor was given,
            by name, where neither attributes nor layers say it; a model that cannot be made in the
            words of its source is then an error.
        fused: For torch, False to run the program's operations one by one, if torch's own softmax,
            norms and attention are unsuitable, for example for second derivatives of attention.
        options: The last six, which the adapter of the target reads.

    Returns:
        For `jax` a `JaxModel`: a pytree with `params` and `buffers`, called like the module. For
        `flax` a `FlaxModel`, an `nnx.Module` with the variables in a tree of the module's names.
        For `linen` a `LinenModel`, a `linen.Module` whose `init` returns the converted arrays. For
        `torch` a `TorchModel`, a `torch.nn.Module` with the names of the model.

    Raises:
        ConversionError: The program cannot be recorded, or `check` finds a difference; or an option
            or its value is invalid.
        NotAFunctorError: An undeclared object holds arrays of the model.
        UnsupportedOpsError: Operations have no lowering; lists all of them.
        BackendUnavailableError: There is no such target, or it is not installed.

    For type checkers a callable model becomes one of the target, and every other tree keeps its
    class. To only move a callable functor, use a mover.

    Examples:
        >>> import fmapper, torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> model = fmapper.convert(linear, "jax", (torch.ones(4, 2),))
        >>> model(torch.ones(4, 2).numpy()).shape, sorted(model.params)
        ((4, 3), ['bias', 'weight'])
    """
    return convert_with_arrays(
        model,
        to,
        example_inputs,
        example_kwargs,
        dynamic_shapes=dynamic_shapes,
        train=train,
        check=check,
        strict=strict,
        specialize=specialize,
        **options,
    )


def convert_with_arrays(
    model: Any,
    to: str,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    *,
    arrays: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    train: bool = False,
    check: bool = True,
    strict: bool | None = None,
    specialize: bool = False,
    modes: bool = False,
    **options: Any,
) -> Any:
    """Converts a model like `convert`, with arrays of a checkpoint in place of its own.

    With `modes` the model's own code is also recorded for evaluation. `convert` tries that if the
    program for training has other results in evaluation.
    """
    target, variant = find_target(to)
    others = {*_Options.__annotations__, "example_inputs", "example_kwargs"}
    check_options(target, options, others, variant)
    options |= variant
    arguments = options.pop("arguments", None)
    is_in_words = bool(options.get("structure")) and arrays is None and not (modes or specialize)
    is_in_words = is_in_words and not isinstance(model, Program)
    scan = options.get("scan", False)
    if (scan or arguments is not None) and not is_in_words:
        raise ConversionError(
            f"{'scan' if scan else 'arguments'}= is for structure=True without specialize=, which "
            "makes a model in the words of its source"
        )
    if not isinstance(example_inputs, tuple | list):
        example_inputs = (example_inputs,)
    example_inputs = tuple(example_inputs)
    if isinstance(model, Program):
        model.check_has_arrays()
        return lower(model, target, **options)
    source = source_of(model)
    if source is target:
        raise ConversionError(f"{type(model).__name__} is already a model of {to}")
    _check_is_no_substitute(model, source, target)
    if source is None and (example_inputs or example_kwargs or _is_called(model)):
        source = source_of_callable(model, target)
        if source is None and _is_called(model):
            raise ConversionError(_why_no_source(model, to))
    elif source is not None and family_of(source) == family_of(target):
        return _move_within(model, source, target)
    if source is None:
        is_called = bool(example_inputs or example_kwargs)
        if is_called and not callable(model):
            raise ConversionError(
                f"example_inputs need a model to call, but a {type(model).__name__} is not "
                "callable. Convert each model in it, pass (function, params), or omit the inputs "
                "to move the arrays only."
            )
        moved = _move(model, target)
        if is_called:
            _check_moved(moved, target, example_inputs, example_kwargs or {})
        return moved
    if not is_target(target):
        raise no_target(to)
    reason = ""
    if is_in_words:
        call = example_inputs, example_kwargs or {}
        shapes = "auto" if dynamic_shapes is None else dynamic_shapes
        words: dict[str, Any] = {"arguments": arguments, "dynamic_shapes": shapes, "scan": scan}
        try:
            with step(f"converting {type(model).__name__} to {to}"):
                return target.build_transcribed(
                    model, source, *call, train=train, check=check, **words
                )
        except ConversionError as error:
            if arguments is not None or scan:
                raise
            reason = str(error)
    settings: dict[str, Any] = {"train": train, "check": check, "strict": strict}
    settings["specialize"] = specialize
    settings["parts"] = bool(options.get("structure"))

    def record(shapes: Any) -> Program:
        given = (model, source, target, example_inputs, example_kwargs or {})
        layers = modes and target.writes_modes == "layers"
        settings.update(dynamic_shapes=shapes, both=not layers)
        recorded = record_program(*given, **settings)
        if not layers:
            return recorded
        return replace(
            recorded,
            evaluation=record_program(*given, only_layers=True, **settings),
            starts_in_training=any(source.modes(model, *given[3:]).values()),
        )

    def lower_it(program: Program) -> Any:
        if arrays is not None:
            program = with_arrays(program, arrays)
        extra = {"modes": True} if modes else {}
        return lower_trained(program, target, train=train, **options, **extra)

    with step(f"converting {type(model).__name__} to {to}") as say:
        program = record(dynamic_shapes)
        is_auto = isinstance(dynamic_shapes, str) and dynamic_shapes == "auto"
        if is_auto and program.symbols:
            vary = lower_with_varying_sizes if source.fixes_sizes else lower_with_fixed_sizes
            program, converted = vary(program, record, lower_it)
        else:
            converted = lower_it(program)
        if program.fixed:
            lines = "\n".join(f"  {sentence}" for sentence in program.fixed)
            warn(f"{program.name}: these sizes are fixed:\n{lines}", FixedSizeWarning)
        check = check and arrays is None  # otherwise the model itself has no values to compare with
        if check:
            say(f"comparing {type(model).__name__} and the converted model")
            is_one = bool(options.get("structure"))  # a structured model has both modes
            given = (example_inputs, example_kwargs or {})
            try:
                if source.compares:
                    for mode in _modes_of(program, is_one=is_one):
                        check_target.check(model, source, converted, target, mode, *given)
                else:
                    from fmapper.programs import check_source

                    alone = train and not is_one
                    refuse = check_source.refuse_difference
                    refuse(model, source, converted, target, *given, train=alone)
            except ConversionError:
                trains = train if target.writes_modes == "layers" else program.evaluation
                if modes or not (is_one and trains and target.writes_modes):
                    raise
                return convert_with_arrays(
                    model, to, *given, dynamic_shapes=dynamic_shapes, train=train,
                    strict=strict, specialize=specialize, modes=True, **options,
                )  # fmt: skip
    if reason:
        source_of_class(converted).by_operations = reason
    return converted


def _modes_of(program: Program, *, is_one: bool) -> list[Program]:
    """Returns the programs with which to compare a model, which if `is_one` has both modes."""
    other = program.evaluation
    if is_one and program.train and (other is None or other.train):
        program = replace(program, evaluation=None)
        return [program, replace(program, train=False)]
    return [program]


def _check_is_no_substitute(model: Any, source: Models | None, target: Models) -> None:
    """Raises for an object that was probably passed by mistake for a model.

    Raises:
        ConversionError: It is such an object; says what to pass instead.
    """
    if source is not None:
        return
    for adapter in adapters(Models):
        if advice := adapter.advice(model):
            name = type(model).__name__
            is_same = adapter.name == family_of(target)
            already = f" It is a program of {adapter.name} already." if is_same else ""
            raise ConversionError(f"{name} is not a model: {advice}.{already}")
    if isinstance(model, list) and len(model) == 2 and inspect.isroutine(model[0]):
        raise ConversionError(
            "a function and its parameters are converted as a tuple, (function, params), not as a "
            "list"
        )


def _is_called(model: Any) -> bool:
    """Returns whether an object is callable rather than a mere tree of arrays.

    A declared class may have a `__call__` that computes with arrays of any framework.
    """
    first = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    return callable(first) and declaration_of(type(first)) is None


def _why_no_source(model: Any, to: str) -> str:
    first = model[0] if isinstance(model, tuple) else model
    name = getattr(first, "__qualname__", type(first).__name__)
    way = (
        get_adapter(family_of(find_target(to)[0]), Models).needs_source
        or f"programs cannot be lowered to {to}"
    )
    return f"{name} cannot be converted to {to}: no framework can record it; {way}"


def _holds_arrays(tree: Any) -> bool:
    return any(adapter_of(leaf) is not None for leaf in fleaves(tree))


def _move(tree: Any, target: Models) -> Any:
    """Moves the arrays of a tree.

    Raises:
        ConversionError: There are no arrays, so that nothing would be converted.
    """
    moved = mover_to(target)(tree)
    if not _holds_arrays(moved):
        raise ConversionError(
            f"{type(tree).__name__} is not a model and holds no arrays: there is nothing to "
            f"convert to {target.name}"
        )
    return moved


def _move_within(model: Any, source: Models, target: Models) -> Any:
    """Moves the arrays of a model whose code already belongs to the framework.

    Raises:
        ConversionError: All arrays are already there, so that nothing would be converted, or the
            target has models of its own.
    """
    family = family_of(target)
    if target.name == family:
        moved = _move(model, target)
        if any(new is not old for new, old in zip(fleaves(moved), fleaves(model), strict=True)):
            return moved
    name = type(model[0] if isinstance(model, tuple) else model).__name__
    raise ConversionError(
        f"{name} is already a model of {source.name}, which computes with {family}, so there "
        f"is nothing to convert to {target.name}. Move arrays with fmapper.to_{family}; to convert "
        "a converted model again, convert its source."
    )


def _check_moved(
    moved: Any, target: Models, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Calls a functor whose arrays have been moved, since its code may need another framework.

    Raises:
        ConversionError: It does not compute with the arrays of the target.
    """
    family = family_of(target)
    given, named = inputs_for(target, args, kwargs)
    try:
        leaves = fleaves(moved(*given, **named))
        problem = ""
        owners = [owner for owner in map(adapter_of, leaves) if owner is not None]
        if not all(isinstance(owner, Models) and family_of(owner) == family for owner in owners):
            problem = "it returns arrays of another framework"
    except Exception as error:  # whatever the code of a user raises
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    if problem:
        raise ConversionError(
            f"{type(moved).__name__} was moved to {target.name}, but its code does not run there "
            f"({problem}). No framework records the code of a functor: write it with "
            "fmapper.array_namespace, or omit example_inputs to move the arrays only."
        )
