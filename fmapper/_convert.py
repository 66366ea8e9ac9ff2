"""Converting programs: a model of one framework as a model of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from fmapper._adapter import Adapter
from fmapper._discovery import adapters, get_adapter
from fmapper._errors import ConversionError, DeclarationError, FmapperError
from fmapper._move import mover_to
from fmapper._program import Lowering, Program
from fmapper._recording import in_turn

F = TypeVar("F", bound=Callable[..., Any])

_added: dict[str, dict[str, Lowering]] = {}


def lowering(
    *ops: str,
    to: str | None = None,
    random: bool | Literal["optional"] = False,
    concrete: bool = False,
    scalar: bool = False,
    numbers: bool = False,
    about: bool = False,
) -> Callable[[F], F]:
    """Says how operations are computed in a target framework, such as custom operations of yours.

    The function takes the arguments as the schema of the operation has them, with arrays of the
    target in place of tensors, and returns arrays. A name without an overload stands for all that
    have no lowering of their own; a lowering added here wins over a built-in one.

    Args:
        ops: Their names, as `mylib::op` or `aten::add.Tensor`.
        to: The target framework; `torch` for the primitives of JAX, `lax::...`, else `jax`, unless
            it is given.
        random: The function takes a keyword `key`, the source of its random numbers. `optional`:
            which may be None, so that a model can be called without one.
        concrete: The shape of the result depends on values, so a program with it is not compiled.
        scalar: The result counts as a Python number when dtypes are promoted.
        numbers: The function takes a scalar beside an array as a Python number.
        about: The function takes a keyword `about`, with the dtypes and shapes of operands and
            results as the source framework has them.

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
            target = to or ("torch" if op.startswith("lax::") else "jax")
            _added.setdefault(target, {})[op] = Lowering(
                function, random, concrete, scalar, numbers, about
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
    **options: Any,
) -> Any:
    """A model of one framework as a model of another: its program is recorded and lowered.

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
            fixed to those of the examples. `auto`: all that the code does not fix; sizes of 0 and 1
            among the examples are fixed, so give larger ones. For models of JAX also as
            `jax.export` takes it, as `["batch, _"]`.
        train: Record what the model does in training: dropout, batch statistics. For `torch` that
            is recorded unasked where it can be, beside evaluation; True makes it an error if not.
        verify: Compare the result with the model on the example inputs; see `fmapper.verify`.
        check: Compare what was recorded with the model on the example inputs, in its own framework:
            a model that asks whether it is being recorded may do something else then.
        strict: For functions of JAX that use arrays of an object which nobody declared: False makes
            those constants, which are not trained, where else they are an error.
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
    target = get_adapter(to)
    if not isinstance(example_inputs, tuple):
        example_inputs = (
            tuple(example_inputs) if isinstance(example_inputs, list) else (example_inputs,)
        )
    if isinstance(model, Program):
        return lower(model, target, **options)
    source = source_of(model)
    if source is target:
        raise ConversionError(f"{type(model).__name__} is a model of {to} already")
    if source is None and (example_inputs or example_kwargs):
        source = source_of_callable(model, target)
    elif source is not None and _family(source) == _family(target):
        source = None  # a program of the same framework: only the arrays are to be moved
    if source is None:
        return mover_to(target)(model)
    if verify and train and not target.has_modes:
        raise ConversionError(
            "verify=True compares what a model does in evaluation: convert it with train=False, too"
        )
    program = recorded(
        model,
        source,
        target,
        example_inputs,
        example_kwargs or {},
        dynamic_shapes=dynamic_shapes,
        train=train,
        check=check,
        strict=strict,
    )
    converted = lowered(program, target, train=train, **options)
    if verify:
        _check(model, converted, example_inputs, example_kwargs or {})
    return converted


def _check(model: Any, converted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    from fmapper._verify import verify  # which few programs use

    report = verify(model, converted, *args, kwargs=kwargs)
    if not report:
        raise ConversionError(f"{type(model).__name__}: the converted model differs. {report}")


@in_turn
def recorded(
    model: Any,
    source: Adapter,
    target: Adapter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any,
    train: bool,
    check: bool = True,
    strict: bool | None = None,
) -> Program:
    """The program of a model; for a target that has modes, of both if it is to be trained."""

    def record(*, train: bool) -> Program:
        return source.export_program(
            model,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            train=train,
            check=check,
            strict=strict,
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


@in_turn
def lower(program: Program, target: Adapter, **options: Any) -> Any:
    """The model of a target framework for a program."""
    added = {**_added.get(target.lowers_like, {}), **_added.get(target.name, {})}
    try:
        return target.from_program(program, added, **options)
    except FmapperError:
        raise
    except Exception as error:  # of what a call says: a file may say anything
        raise ConversionError(
            f"{program.name or 'the program'} cannot be lowered to {target.name}: "
            f"{type(error).__name__}: {error}"
        ) from error


def lowered(program: Program, target: Adapter, *, train: bool, **options: Any) -> Any:
    """The same; training that nobody has asked for is left out where it cannot be lowered."""
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


def source_of_callable(model: Any, target: Adapter) -> Adapter | None:
    """The framework that can record a function, or a tree that is called, for another one."""
    others = (adapter for adapter in adapters() if _family(adapter) != _family(target))
    return next((adapter for adapter in others if adapter.is_callable_model(model)), None)


def _family(adapter: Adapter) -> str:
    return adapter.lowers_like or adapter.name


def source_of(model: Any) -> Adapter | None:
    """The framework that a model is one of."""
    return next((adapter for adapter in adapters() if adapter.is_model(model)), None)
