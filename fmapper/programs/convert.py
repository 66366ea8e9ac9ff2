"""Converting programs: a model of one framework as a model of another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from fmapper.backends.discovery import adapter_of, adapters, get_adapter, installed_backends
from fmapper.backends.models import Models
from fmapper.errors import (
    BackendUnavailableError,
    ConversionError,
    DeclarationError,
    FixedSizeWarning,
    FmapperError,
    UnsupportedOpsError,
)
from fmapper.moves.mover import mover_to
from fmapper.programs import check_target
from fmapper.programs.program import Int64, Lowering, Program
from fmapper.programs.record_lock import in_turn
from fmapper.tree.functor import declaration_of
from fmapper.tree.walk import fleaves
from fmapper.warn import warn

F = TypeVar("F", bound=Callable[..., Any])

_added: dict[str | None, dict[str, Lowering]] = {}  # by target, None where it was not named


def lowering(
    *ops: str,
    to: str | None = None,
    random: bool | Literal["optional"] = False,
    data_dependent_shape: bool = False,
    returns_number: bool = False,
    takes_numbers: bool = False,
    takes_avals: bool = False,
    whole: bool = True,
    int64: Int64 = "computes",
    elements: tuple[int, ...] = (),
) -> Callable[[F], F]:
    """Says how operations are computed in a target framework, such as custom operations of yours.

    The function takes the arguments as the schema of the operation has them, with arrays of the
    target in place of tensors, and returns arrays. A name without an overload stands for all that
    have no lowering of their own; a lowering added here wins over a built-in one, and the operation
    is recorded whole, so that the function is called.

    Args:
        ops: Their names, as `mylib::op` or `aten::add.Tensor`.
        to: The target framework; `torch` for the primitives of JAX, `lax::...`, else `jax`, unless
            it is given.
        random: The function takes a keyword `key`, the source of its random numbers. `optional`:
            which may be None, so that a model can be called without one.
        data_dependent_shape: The shape of the result depends on values, so a program with it is not
            compiled.
        returns_number: The result counts as a Python number when dtypes are promoted.
        takes_numbers: The function takes a scalar beside an array as a Python number.
        takes_avals: The function takes a keyword `avals`, with the dtypes and shapes of operands
            and results as the source framework has them.
        whole: The operation is recorded as it is. False where the recorder may write it in terms of
            others, as it does of those that nothing lowers.
        int64: What it does with integers of 64 bits where the target has 32. `computes`: a program
            that gives it one that does not fit is refused. With the ends of int64, which only mark
            places: `moves` its elements or chooses between them; `picks` them, with their places as
            its second result; `casts` them; `looks` at them, for a comparison, say.
        elements: The positions of numbers among its arguments that become elements, or are computed
            with them.

    Returns:
        A decorator that gives the function back.

    Raises:
        DeclarationError: A name has no namespace.

    Examples:
        >>> import fmapper
        >>> @fmapper.lowering("mylib::twice")
        ... def twice(x):
        ...     return 2 * x
    """
    for op in ops:
        if "::" not in op:
            raise DeclarationError(
                f"{op!r} names no operation: write it with its namespace, as "
                f"'aten::{op}' or 'mylib::{op}'."
            )

    def add(function: F) -> F:
        for op in ops:
            _added.setdefault(to, {})[op] = Lowering(
                function,
                random=random,
                data_dependent_shape=data_dependent_shape,
                returns_number=returns_number,
                takes_numbers=takes_numbers,
                takes_avals=takes_avals,
                whole=whole,
                int64=int64,
                elements=elements,
            )
        return function

    return add


def convert(
    model: Any,
    to: str,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
    verify: bool = False,
    check: bool = True,
    strict: bool | None = None,
    specialize: bool = False,
    **options: Any,
) -> Any:
    """Returns a model of one framework as a model of another: its program is recorded and lowered.

    A tree without a model of any framework, as a functor, is moved leaf by leaf.

    Args:
        model: A `torch.nn.Module`; for `torch` a module of NNX, a pair of a Linen module and its
            variables, an Equinox module or another tree of JAX arrays that is called, a function,
            or a pair of a function and its parameters. It is not changed. Or a `Program` from
            `load_program`.
        to: The target: `jax`, `flax` or `torch`.
        example_inputs: What the model is called with, by position. Arrays may be of any backend.
        example_kwargs: What it is called with by keyword.
        dynamic_shapes: Which sizes may vary, as `torch.export.export` takes it; all others are
            fixed to those of the examples. `auto`: all that the code does not fix, with a
            `FixedSizeWarning` that says which it fixes and why; sizes of 0 and 1 among the examples
            are fixed, so give larger ones. For models of JAX also as `jax.export` takes it, as
            `["batch, _"]`. What Python decides by such a size (`if x.shape[0] % 2`) is decided for
            the examples; for inputs of which it is not true the model raises `ProgramInputError`.
        train: Record what the model does in training: dropout, batch statistics. For `torch` that
            is recorded unasked where it can be, beside evaluation; True makes it an error if not.
        verify: Compare the result with the model on the example inputs; see `fmapper.verify`.
        check: Compare with the model on the example inputs: what was recorded, in its own
            framework, for a model of torch, which may do something else while it is recorded, and
            then the converted model, whose operations must give the dtypes of torch, too (its first
            call is compiled by that); the converted model for one of JAX, and with sizes that vary
            on others, too.
        strict: For functions of JAX that use arrays of an object which nobody declared: False makes
            those constants, which are not trained, where else they are an error.
        specialize: Where sizes depend on the values of tensors and are not padded, take those that
            the values of the examples give: the program checks them, and compiles.
        options: For `jax`: `precision`, the precision of matrix products in float32, `highest`
            unless given; None leaves it to `jax.default_matmul_precision`. For `flax` the same and
            `rngs`, an `nnx.Rngs` that the model keeps; `linen=True` for a module of Linen. For
            `torch`: `fused=False`, to compute everything as the program spells it out, where
            torch's own softmax, norms and attention will not do, as for second derivatives of
            attention.

    Returns:
        For `jax` a `JaxModel`: a pytree with `params` and `buffers`, called as the module is. For
        `flax` a `FlaxModel`, an `nnx.Module` with the variables in a tree of the module's names.
        For `torch` a `TorchModel`, a `torch.nn.Module` with the names of the model.

    Raises:
        ConversionError: The program cannot be recorded, or its results differ and `verify` is set.
        NotAFunctorError: An object that nobody declared holds arrays of the model.
        UnsupportedOpsError: Operations have no lowering; lists all of them.
        BackendUnavailableError: The target is not installed.

    Examples:
        >>> import fmapper, torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> model = fmapper.convert(linear, "jax", (torch.ones(4, 2),))
        >>> model(torch.ones(4, 2).numpy()).shape, sorted(model.params)
        ((4, 3), ['bias', 'weight'])
    """
    target = get_adapter(to, Models)
    if not isinstance(example_inputs, tuple):
        example_inputs = (
            tuple(example_inputs) if isinstance(example_inputs, list) else (example_inputs,)
        )
    if isinstance(model, Program):
        return lower(model, target, **options)
    source = source_of(model)
    if source is target:
        raise ConversionError(f"{type(model).__name__} is a model of {to} already")
    if source is None and (example_inputs or example_kwargs or _is_called(model)):
        source = source_of_callable(model, target)
        if source is None and _is_called(model) and not _holds_arrays(model):
            raise ConversionError(_why_no_source(model, to))
    elif source is not None and _family(source) == _family(target):
        source = None  # a program of the same framework: only the arrays are to be moved
    if source is None:
        return _move(model, target)
    if verify and train and not target.has_modes:
        raise ConversionError(
            "verify=True compares what a model does in evaluation: convert it with train=False, too"
        )
    settings: dict[str, Any] = {"train": train, "check": check, "strict": strict}
    settings["specialize"] = specialize

    def record(shapes: Any) -> Program:
        given = example_inputs, example_kwargs or {}
        return recorded(model, source, target, *given, dynamic_shapes=shapes, **settings)

    def lower_it(program: Program) -> Any:
        return lower_trained(program, target, train=train, **options)

    program = record(dynamic_shapes)
    is_auto = isinstance(dynamic_shapes, str) and dynamic_shapes == "auto"
    if is_auto and program.symbols:
        program, converted = _with_what_varies(program, record, lower_it)
    else:
        converted = lower_it(program)
    if program.fixed:
        told = "\n".join(f"  {sentence}" for sentence in program.fixed)
        warn(f"{program.name}: these sizes do not vary:\n{told}", FixedSizeWarning)
    if check and source.compares:
        check_target.check(
            model, source, converted, target, program, example_inputs, example_kwargs or {}
        )
    if verify:
        _check(model, converted, example_inputs, example_kwargs or {})
    if check and not source.compares:
        from fmapper.programs import check_source

        given = (example_inputs, example_kwargs or {})
        check_source.refuse_difference(model, source, converted, target, *given, train=train)
    return converted


class Auto(str):
    """`dynamic_shapes="auto"`, with what is known to be fixed.

    Attributes:
        fixed: The number of an array among the inputs, and a dimension -> why it does not vary.
    """

    fixed: dict[tuple[int, int], str]

    @classmethod
    def but(cls, fixed: Mapping[tuple[int, int], str]) -> Auto:
        """Returns `auto` for all other sizes."""
        made = cls("auto")
        made.fixed = dict(fixed)
        return made


def _with_what_varies(
    program: Program, record: Callable[[Any], Program], lower_it: Callable[[Program], Any]
) -> tuple[Program, Any]:
    """Returns a program and its model in which all sizes vary that can when it is lowered, too.

    Raises:
        ConversionError: It cannot be lowered, or not without fixing what cannot be fixed.
    """
    try:
        return program, lower_it(program)
    except UnsupportedOpsError:
        raise
    except ConversionError as error:
        first = error
    reason = str(first).strip().splitlines()[0]
    groups = [dict.fromkeys(places, reason) for places in _places_of(program)]
    alone = groups[::-1]  # those of the last dimensions first
    together = [
        {place: reason for group in alone[:n] for place in group} for n in range(2, len(alone) + 1)
    ]
    for fixed in (*alone, *together):
        try:
            narrower = record(Auto.but(fixed))
            if set(narrower.symbols) >= set(program.symbols):
                break  # this framework has its own way to choose
            return narrower, lower_it(narrower)
        except ConversionError:
            continue
    raise first


def _places_of(program: Program) -> list[list[tuple[int, int]]]:
    """Returns the dimensions of the input arrays in which each size that varies stands."""
    arrays = [given for given in program.inputs if given.kind == "user"]
    return [
        [
            (i, d)
            for i, given in enumerate(arrays)
            for d, size in enumerate(given.shape)
            if symbol in re.findall(r"[A-Za-z_]\w*", str(size))
        ]
        for symbol in program.symbols
    ]


def _is_called(model: Any) -> bool:
    """Says whether something is a program and no mere tree of arrays, whatever it is called with.

    A declared class may have a `__call__` that computes with the arrays of every framework.
    """
    first = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    return callable(first) and declaration_of(type(first)) is None


def _why_no_source(model: Any, to: str) -> str:
    first = model[0] if isinstance(model, tuple) else model
    name = getattr(first, "__qualname__", type(first).__name__)
    way = (
        get_adapter(_family(get_adapter(to, Models)), Models).needs_source
        or f"no programs are lowered to {to}"
    )
    return f"{name} cannot be converted to {to}: no framework can record it; {way}"


def _holds_arrays(tree: Any) -> bool:
    return any(adapter_of(leaf) is not None for leaf in fleaves(tree))


def _move(tree: Any, target: Models) -> Any:
    """Moves the arrays of a tree.

    Raises:
        ConversionError: There are none, so that nothing would be converted.
    """
    moved = mover_to(target)(tree)
    if not _holds_arrays(moved):
        raise ConversionError(
            f"{type(tree).__name__} is not a model and holds no arrays: there is nothing to "
            f"convert to {target.name}"
        )
    return moved


def _check(model: Any, converted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    from fmapper.programs.verify import verify

    report = verify(model, converted, *args, kwargs=kwargs)
    if not report:
        raise ConversionError(f"{type(model).__name__}: the converted model differs. {report}")


@in_turn
def recorded(
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
) -> Program:
    """Records the program of a model; for a target that has modes, both if it is to be trained."""

    def record(*, train: bool) -> Program:
        return source.export_program(
            model,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            train=train,
            check=check,
            strict=strict,
            whole=target.lowers_whole(added_for(target)),
            **({"specialize": True} if specialize else {}),
        )

    if not target.has_modes:
        return record(train=train)
    try:
        program = record(train=train or source.has_training(model, args, kwargs))
    except ConversionError as error:
        if train or not source.has_training(model, args, kwargs):
            raise
        program = record(train=False)  # its training needs what it was not given
        program.lacks_training = str(error)
    if program.train:
        program.evaluation = replace(record(train=False), parameters={}, buffers={})
        program.starts_in_training = source.is_in_training(model, args, kwargs)
    return program


def added_for(target: Models) -> dict[str, Lowering]:
    """Returns the lowerings to a framework that the user has added, by operation."""
    family = get_adapter(_family(target), Models)
    return {
        **{op: one for op, one in _added.get(None, {}).items() if family.lowers(op)},
        **_added.get(family.name, {}),
        **_added.get(target.name, {}),
    }


@in_turn
def lower(program: Program, target: Models, **options: Any) -> Any:
    """Returns the model of a target framework for a program."""
    try:
        return target.from_program(program, added_for(target), **options)
    except FmapperError:
        raise
    except Exception as error:  # of what a call says: a file may say anything
        raise ConversionError(
            f"{program.name or 'the program'} cannot be lowered to {target.name}: "
            f"{type(error).__name__}: {error}"
        ) from error


def lower_trained(program: Program, target: Models, *, train: bool, **options: Any) -> Any:
    """Lowers a program; training that nobody asked for is left out where it cannot be lowered."""
    try:
        return lower(program, target, **options)
    except ConversionError as error:
        if train or program.evaluation is None:
            raise
        alone = replace(
            program.evaluation,
            parameters=program.parameters,
            buffers=program.buffers,
            lacks_training=str(error),
        )
    return lower(alone, target, **options)


def source_of_callable(model: Any, target: Models) -> Models | None:
    """Returns the framework that can record a function, or a tree that is called, for another one.

    It need not be imported yet: a function may import it when it is called.
    """
    for adapter in _recorders():
        if _family(adapter) != _family(target) and adapter.is_callable_model(model):
            return adapter
    return None


def _recorders() -> Iterator[Models]:
    """Yields the adapters that are loaded, then those of frameworks that could be."""
    loaded = adapters(Models)
    yield from loaded
    for name in installed_backends():
        if all(adapter.name != name for adapter in loaded):
            try:
                yield get_adapter(name, Models)
            except BackendUnavailableError:  # it does not work, or has no models
                continue


def _family(adapter: Models) -> str:
    return adapter.lowers_like or adapter.name


def source_of(model: Any) -> Models | None:
    """Returns the framework that a model is one of."""
    return next((adapter for adapter in adapters(Models) if adapter.is_model(model)), None)
