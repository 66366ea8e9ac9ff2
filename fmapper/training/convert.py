"""`convert_training`: a model and its optimizer, so that a run goes on in another framework."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fmapper.backends.compute import Optimizers
from fmapper.backends.discovery import adapters
from fmapper.backends.models import Models
from fmapper.backends.namespace import array_namespace
from fmapper.errors import ConversionError
from fmapper.moves.mover import mover_to
from fmapper.programs.steps import find_target
from fmapper.states.state import load_state, state, weights_of
from fmapper.tracebacks import short_traceback
from fmapper.training.state import OptimizerState
from fmapper.verification.models.owners import adapter_of_model, source_of_callable

_BASE = 200  # smaller than the first integer that bfloat16 lacks


class Training(NamedTuple):
    """A model that trains.

    Attributes:
        model: The model, as `convert` returns it.
        optimizer: For `torch` a `torch.optim.Optimizer`, for `flax` an `nnx.Optimizer`; for `jax`
            and `equinox` a pair of an optax transformation and its state.
        scheduler: For `torch` an `LRScheduler` where the rate changes; else None: in JAX the
            optimizer has the schedule.
    """

    model: Any
    optimizer: Any
    scheduler: Any = None


@short_traceback
def convert_training(
    model: Any,
    optimizer: Any,
    to: str,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    scheduler: Any = None,
    **options: Any,
) -> Training:
    """Converts a model with its optimizer, so that its training goes on in another framework.

    Moments follow their parameters through every change of name and layout, and the counts of
    steps and the position of the schedule go along: the next updates are those that the source
    would have made, to rounding. Groups of parameters with settings of their own become an
    `optax.partition`, and back.

    Args:
        model: The model; see `convert`.
        optimizer: A `torch.optim.Optimizer` of its parameters, an `nnx.Optimizer`, or a pair of an
            optax transformation and its state: over the `params` of a `JaxModel`, or the inexact
            arrays of an Equinox module.
        to: `torch`, `jax`, `flax` or `equinox`.
        example_inputs: As for `convert`.
        example_kwargs: As for `convert`.
        scheduler: A scheduler of `torch.optim.lr_scheduler` that is called after each update.
        options: As for `convert`, such as `structure=True`.

    Returns:
        The model, its optimizer, and its scheduler; both of the source stay as they are.

    Raises:
        ConversionError: The algorithm or one of its settings has no counterpart, or the optimizer
            is not one of this model; says which. Nothing is converted then.

    Examples:
        >>> import fmapper, torch
        >>> net = torch.nn.Linear(2, 3)
        >>> adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
        >>> x = torch.ones(4, 2)
        >>> model, optimizer, _ = fmapper.convert_training(net, adam, "flax", (x,))
        >>> type(optimizer).__name__
        'Optimizer'
    """
    from fmapper.programs.convert import convert_with_arrays

    source = _adapter_for(model, optimizer, find_target(to)[0])
    held = source.read_optimizer(model, optimizer, scheduler)
    converted = convert_with_arrays(model, to, example_inputs, example_kwargs, **options)
    target = adapter_of_model(converted)
    if not isinstance(target, Optimizers):
        raise ConversionError(f"optimizers cannot be converted to {to}")
    if not target.trainable(converted):
        raise ConversionError(
            f"a {type(converted).__name__} holds no parameters, which an optimizer could update: "
            "its init returns them. Convert to a target whose models hold theirs."
        )
    carried = _carry(held, source, model, target, converted, bool(options.get("structure")))
    return Training(converted, *target.write_optimizer(converted, carried))


def _adapter_for(model: Any, optimizer: Any, target: Models) -> Optimizers:
    """Returns the adapter of a model that knows an optimizer.

    Raises:
        ConversionError: None does.
    """
    adapter = adapter_of_model(model) or source_of_callable(model, target)
    if isinstance(adapter, Optimizers) and adapter.is_optimizer(optimizer):
        return adapter
    known = [other.name for other in adapters(Optimizers) if other.is_optimizer(optimizer)]
    what = f"one of {known[0]}" if known else "not an optimizer that fmapper knows"
    raise ConversionError(
        f"{type(optimizer).__name__} is {what}, and {type(model).__name__} is not a model that it "
        "could train. Pass a torch module with a torch.optim.Optimizer, an nnx.Module with its "
        "nnx.Optimizer, or a JaxModel or Equinox module with (optax transformation, state)."
    )


def _carry(
    held: OptimizerState,
    source: Optimizers,
    model: Any,
    target: Optimizers,
    converted: Any,
    is_structured: bool,
) -> OptimizerState:
    """Returns an optimizer's state in the order and layouts of the converted model.

    A moment is laid out like its parameter. So it goes the way of the parameters: into a copy of
    the source, by name into a copy of the converted model, and out of that.
    """
    old = source.trainable(model)
    is_pair = isinstance(model, tuple) and weights_of(model) is None  # a function, its parameters

    def through(arrays: Sequence[Any]) -> list[Any]:
        """Takes one array for each parameter to the converted model."""
        copy = source.with_trainable(model, arrays)
        named = state(copy[1] if is_pair else copy)
        filled = load_state(converted, named, source=is_structured)
        return target.trainable(filled)

    marks = [0] * len(old)
    for number, group in enumerate(held.groups, 1):
        for at in group.members:
            marks[at] = number
    marked = through([_full_like(array, mark) for array, mark in zip(old, marks, strict=True)])
    members: dict[int, list[int]] = defaultdict(list)
    for at, array in enumerate(marked):
        lowest, highest = _range(array)
        if lowest != highest:
            raise ConversionError(
                f"parameter {at} of the converted model is made of several of the source, for "
                "which the optimizer has different settings or counts. Give them the same, or "
                "convert without structure=True."
            )
        members[int(lowest)].append(at)
    groups = tuple(
        replace(group, members=tuple(members[number]))
        for number, group in enumerate(held.groups, 1)
        if members[number]
    )
    slots = {}
    for slot, arrays in held.slots.items():
        plain = [_is_like(arrays.get(at), array) for at, array in enumerate(old)]
        if not all(plain):
            moved = _by_position(slot, arrays, old, marked, through)
            slots[slot] = mover_to(target)(moved)
            continue
        new = through([arrays.get(at, _full_like(x, 0)) for at, x in enumerate(old)])
        has = through([_full_like(x, int(at in arrays)) for at, x in enumerate(old)])
        slots[slot] = {at: new[at] for at, array in enumerate(has) if _range(array)[1] == 1}
    return replace(held, groups=groups, slots=slots)


def _by_position(
    slot: str,
    arrays: Mapping[int, Any],
    old: Sequence[Any],
    new: Sequence[Any],
    through: Callable[[Sequence[Any]], list[Any]],
) -> dict[int, Any]:
    """Returns arrays that have a shape of their own, for parameters of the same layout.

    Raises:
        ConversionError: A layout differs, so that nobody knows what becomes of the array.
    """
    digits = [  # exact in every dtype
        through([_full_like(x, at // unit % _BASE) for at, x in enumerate(old)])
        for unit in (1, _BASE, _BASE**2)
    ]
    moved = {}
    for at, array in enumerate(new):
        low, high = zip(*(_range(found[at]) for found in digits), strict=True)
        source = sum(int(digit) * _BASE**power for power, digit in enumerate(low))
        if low != high or tuple(array.shape) != tuple(old[source].shape):
            raise ConversionError(
                f"{slot} has not the shape of its parameter, and the converted model has "
                "parameters of other layouts. Convert without structure=True."
            )
        if source in arrays:
            moved[at] = arrays[source]
    return moved


def _is_like(array: Any, parameter: Any) -> bool:
    return array is None or tuple(array.shape) == tuple(parameter.shape)


def _full_like(array: Any, value: int) -> Any:
    return array_namespace(array).full_like(array, value)


def _range(array: Any) -> tuple[float, float]:
    if not array.size if isinstance(array.size, int) else not array.numel():
        return 0.0, 0.0
    xp = array_namespace(array)
    return float(xp.min(array)), float(xp.max(array))
