"""The steps of a conversion, one thread at a time: finding the framework, recording, lowering."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from fmapper.backends.discovery import (
    adapters,
    get_adapter,
    known_frameworks,
)
from fmapper.backends.equality import equals
from fmapper.backends.models import Models
from fmapper.errors import (
    BackendUnavailableError,
    ConversionError,
    ConversionWarning,
    FmapperError,
    UnsupportedOpsError,
)
from fmapper.programs.lowering import Lowering, added
from fmapper.programs.program import Program
from fmapper.programs.reading.written import source_of_class
from fmapper.programs.sizes import names_in
from fmapper.progress import step
from fmapper.suggest import did_you_mean
from fmapper.verification.models.turns import in_turn
from fmapper.warn import warn


def user_lowerings(target: Models) -> dict[str, Lowering]:
    """Returns the user's lowerings to a framework, by operation."""
    family = get_adapter(target.lowers_like or target.name, Models)
    return {
        **{op: lowering for op, lowering in added.get(None, {}).items() if family.lowers(op)},
        **added.get(family.name, {}),
        **added.get(target.name, {}),
    }


@in_turn
def record_program(
    model: Any,
    source: Models,
    target: Models,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any,
    train: bool,
    check: bool = True,
    strict: bool | None = None,
    specialize: bool = False,
    parts: bool = False,
    only_layers: bool = False,
    both: bool = True,
) -> Program:
    """Records the program of a model, for `both` modes if the target has them."""

    def record(*, train: bool | None) -> Program:
        with step("recording training" if train else "recording"):
            return source.export_program(
                model,
                args,
                kwargs,
                dynamic_shapes=dynamic_shapes,
                train=train,
                check=check,
                strict=strict,
                whole=target.lowers_whole(user_lowerings(target)),
                **({"specialize": True} if specialize else {}),
                **({"parts": True} if parts else {}),
                **({"only_layers": True} if only_layers else {}),
            )

    if not target.has_modes:
        return record(train=train)
    try:
        program = record(train=train or source.has_training(model, args, kwargs))
    except ConversionError as error:
        if train or not source.has_training(model, args, kwargs):
            raise
        program = record(train=False)  # its training lacks arguments
        program.lacks_training = str(error)
    if program.train and both:
        program.evaluation = replace(record(train=False), parameters={}, buffers={})
        modes = source.modes(model, args, kwargs)
        if len({*modes.values()}) < 2:
            program.starts_in_training = any(modes.values())
        else:
            as_called = record(train=None)
            trains, evaluates = (
                _compute_the_same(as_called, recorded) for recorded in (program, program.evaluation)
            )
            if not trains and not evaluates:
                raise ConversionError(_mixed_modes_message(program.name, modes))
            # if both match, as for dropout of rate 0, the arguments decide: they come last
            program.starts_in_training = [*modes.values()][-1] if trains and evaluates else trains
    return program


def _compute_the_same(a: Program, b: Program) -> bool:
    """Returns whether two recordings of one model have the same calls and constants."""
    graphs = [
        (program.graph.inputs, program.graph.calls, program.graph.outputs, program.outputs)
        for program in (a, b)
    ]
    return repr(graphs[0]) == repr(graphs[1]) and equals(a.constants, b.constants)


def _mixed_modes_message(name: str, modes: Mapping[str, bool]) -> str:
    training, evaluation = (
        ", ".join(cause for cause, trains in modes.items() if trains is wanted)
        for wanted in (True, False)
    )
    return (
        f"{name}: this call is neither its training nor its evaluation: {training} is for "
        f"training, and {evaluation} is for evaluation. A converted model is in one mode as a "
        "whole: set that of the model first, as model.eval() does in NNX, or pass the arguments in "
        "example_inputs or example_kwargs."
    )


@in_turn
def lower(program: Program, target: Models, **options: Any) -> Any:
    """Lowers a program to a model of the target framework, with the user's lowerings.

    The program may lack its arrays, like that of a converted model; then the model lacks them, too.

    Args:
        program: The program.
        target: The adapter of the framework.
        **options: Options of the target.

    Raises:
        ConversionError: It cannot be lowered.
    """
    try:
        with step(f"lowering {len(program.graph.calls):,} operations"):
            return target.from_program(program, user_lowerings(target), **options)
    except FmapperError:
        raise
    except Exception as error:  # a call from a file may contain anything
        raise ConversionError(
            f"{program.name or 'the program'} cannot be lowered to {target.name}: "
            f"{type(error).__name__}: {error}"
        ) from error


def with_arrays(program: Program, arrays: Mapping[str, Any]) -> Program:
    """Replaces the arrays of a program; a tied array may have any of its names."""
    given = {program.aliases.get(name, name): array for name, array in arrays.items()}
    return replace(
        program,
        parameters={name: given.get(name, old) for name, old in program.parameters.items()},
        buffers={name: given.get(name, old) for name, old in program.buffers.items()},
    )


def lower_trained(program: Program, target: Models, *, train: bool, **options: Any) -> Any:
    """Lowers a program; leaves training out if it cannot be lowered and is not required."""
    if program.evaluation is None:
        return lower(program, target, **options)
    try:
        model = lower(program, target, **options)
        written = source_of_class(model)
        lack = "" if written is None else written.lacks_training
        if lack and train:
            raise ConversionError(
                f"{program.name}: its training cannot be written with layers of {target.name}, but "
                f"convert without structure=True records it: {lack}"
            )
    except ConversionError as error:
        if train:
            raise
        lack = str(error)
        alone = replace(evaluation_of(program), lacks_training=lack)
        model = lower(alone, target, **options)
    if lack and program.starts_in_training:
        warn(
            f"{program.name} was passed in training mode, but was converted for evaluation "
            f"alone. train=True makes this an error. {lack}",
            ConversionWarning,
        )
    return model


def evaluation_of(program: Program) -> Program:
    """Returns the evaluation program of one for training, with the shared arrays."""
    assert program.evaluation is not None
    return replace(program.evaluation, parameters=program.parameters, buffers=program.buffers)


def find_target(to: Any) -> tuple[Models, dict[str, Any]]:
    """Returns the adapter of a target, and the options that the target's name implies.

    Args:
        to: The name of a framework, or a name of `Models.targets`: `"nnx"`, `"linen"`.

    Raises:
        ConversionError: `to` is not a string.
        BackendUnavailableError: The target does not exist, is not installed, or has no models.
    """
    if not isinstance(to, str):
        raise ConversionError(
            f"convert takes the name of the target as its second argument, not "
            f"{type(to).__name__}: convert(model, 'jax', example_inputs)."
        )
    for adapter in adapters(Models):
        if to in adapter.targets:
            return adapter, dict(adapter.targets[to])
    builtin: Mapping[str, str] = import_module("fmapper_adapters").TARGETS
    if to in builtin:
        adapter = get_adapter(builtin[to], Models)
        return adapter, dict(adapter.targets[to])
    try:
        return get_adapter(to, Models), {}
    except BackendUnavailableError as error:
        if error.__cause__ is not None:  # it exists, but is not installed
            raise
        raise no_target(to) from None


def no_target(to: str) -> BackendUnavailableError:
    """Returns the error for a name that is not a target; it lists the targets."""
    targets = sorted(_targets())
    return BackendUnavailableError(
        f"{to!r} is not a target.{did_you_mean(to, targets)} Available targets: "
        f"{', '.join(map(repr, targets))}."
    )


def _targets() -> Iterator[str]:
    """Yields the names of the installed targets; imports their frameworks."""
    for name in known_frameworks():
        try:
            adapter = get_adapter(name, Models)
        except BackendUnavailableError:  # not installed, broken, or without models
            continue
        if is_target(adapter):
            yield adapter.name
            yield from adapter.targets


def is_target(adapter: Models) -> bool:
    """Returns whether programs can be lowered to a framework."""
    return type(adapter).from_program is not Models.from_program


def check_options(
    target: Models, options: Mapping[str, Any], others: Collection[str], variant: Mapping[str, Any]
) -> None:
    """Raises for an option that a target does not have, before anything is recorded.

    Args:
        target: The adapter of the target.
        options: The options that the user passed.
        others: The options that every target has.
        variant: The options that the name of the target implies.

    Raises:
        ConversionError: The target lacks an option, or options exclude each other.
    """
    accepted = target.conversion_options
    if accepted is not None:
        names = sorted({*others, *accepted})
        for name in options:
            if name not in names:
                raise ConversionError(
                    f"convert to {target.name} has no option {name!r}.{did_you_mean(name, names)} "
                    f"It takes {', '.join(names)}."
                )
    target.check_options(**options, **variant)


class Auto(str):
    """`dynamic_shapes="auto"`, with facts about the sizes.

    Attributes:
        fixed: The index of an input and a dimension -> why it is fixed; empty if that was already
            said.
        names: Likewise, the symbols of dimensions that vary unless the fixed ones prevent it.
    """

    fixed: dict[tuple[int, int], str]
    names: dict[tuple[int, int], str]

    @classmethod
    def but(cls, fixed: Mapping[tuple[int, int], str], program: Program) -> Auto:
        """Returns `auto` for the other dynamic sizes of a program."""
        auto = cls("auto")
        sizes = {
            (i, d): size
            for i, given in enumerate(user for user in program.inputs if user.kind == "user")
            for d, size in enumerate(given.shape)
        }
        auto.fixed = {place: "" for place, size in sizes.items() if isinstance(size, int)}
        auto.fixed.update(fixed)
        auto.names = {
            place: size
            for place, size in sizes.items()
            if isinstance(size, str) and size.isidentifier() and place not in fixed
        }
        return auto


def lower_with_varying_sizes(
    program: Program, record: Callable[[Any], Program], lower_it: Callable[[Program], Any]
) -> tuple[Program, Any]:
    """Lowers a program with as many varying sizes as the target allows.

    Raises:
        ConversionError: It cannot be lowered, even with sizes fixed.
    """
    try:
        return program, lower_it(program)
    except UnsupportedOpsError:
        raise
    except ConversionError as error:
        first = error
    reason = str(first).strip().splitlines()[0]
    groups = [dict.fromkeys(places, reason) for places in _places_of(program)]
    alone = groups[::-1]  # last dimensions first
    together = [
        {place: reason for group in alone[:n] for place in group} for n in range(2, len(alone) + 1)
    ]

    def attempt(fixed: Mapping[tuple[int, int], str]) -> tuple[Program, Any] | None:
        try:
            narrower = record(Auto.but(fixed, program))
            if set(narrower.symbols) >= set(program.symbols):
                raise first  # the framework chooses by itself
            narrower = replace(narrower, fixed=(*program.fixed, *narrower.fixed))
            return narrower, lower_it(narrower)
        except ConversionError as error:
            if error is first:
                raise
            return None

    for fixed in alone:
        if (lowered := attempt(fixed)) is not None:
            return lowered
    for n, fixed in enumerate(together, 2):
        if (lowered := attempt(fixed)) is not None:
            return _vary_again(alone[:n], lowered, attempt)
    raise first


def _vary_again(
    groups: Sequence[Mapping[tuple[int, int], str]],
    lowered: tuple[Program, Any],
    attempt: Callable[[Mapping[tuple[int, int], str]], tuple[Program, Any] | None],
) -> tuple[Program, Any]:
    """Lowers with as few of these groups of sizes fixed as possible.

    Lowering without the last group, and with each group alone, was tried before.
    """
    kept = list(groups)
    for group in groups[:-1]:
        fewer = [member for member in kept if member is not group]
        if len(fewer) < 2:
            break
        other = attempt({place: why for member in fewer for place, why in member.items()})
        if other is not None:
            kept, lowered = fewer, other
    return lowered


def lower_with_fixed_sizes(
    program: Program, record: Callable[[Any], Program], lower_it: Callable[[Program], Any]
) -> tuple[Program, Any]:
    """Lowers a program; if values decide sizes, with all others fixed if necessary.

    Raises:
        ConversionError: It cannot be lowered.
    """
    try:
        return program, lower_it(program)
    except ConversionError as error:
        if all(_places_of(program)):  # all sizes occur in the inputs
            raise
        reason = str(error).strip().splitlines()[0].partition(", and ")[0]
        try:
            fixed = record(None)
            lowered = lower_it(fixed)
        except ConversionError:
            raise error from None
    return replace(fixed, fixed=(f"all sizes are those of the examples: {reason}",)), lowered


def _places_of(program: Program) -> list[list[tuple[int, int]]]:
    """Returns the input dimensions of each varying size."""
    arrays = [given for given in program.inputs if given.kind == "user"]
    return [
        [
            (i, d)
            for i, given in enumerate(arrays)
            for d, size in enumerate(given.shape)
            if symbol in names_in(size)
        ]
        for symbol in program.symbols
    ]
