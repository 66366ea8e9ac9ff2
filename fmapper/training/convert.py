"""`convert_training`: a model and its optimizer, so that a run goes on in another framework."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.compute import Optimizers
from fmapper.backends.discovery import adapters
from fmapper.errors import ConversionError
from fmapper.moves.mover import mover_to, to_numpy
from fmapper.programs.steps import find_target
from fmapper.states.state import load_state, state, weights_of
from fmapper.tracebacks import short_traceback
from fmapper.training.state import BY_AXES, OptimizerState
from fmapper.verification.models.owners import adapter_of_model, source_of_callable
from fmapper.verification.pairing import carry_numbers

if TYPE_CHECKING:
    from fmapper.checkpoints import Rules


class Training(NamedTuple):
    """A model that trains.

    Attributes:
        model: The model, as `convert` returns it.
        optimizer: For `torch` a `torch.optim.Optimizer`, for `flax` an `nnx.Optimizer`; for `jax`
            and `equinox` a pair of an optax transformation and its state. An average of the
            weights is an `AveragedModel`, or such a pair. A tuple where several were given.
        scheduler: For `torch` an `LRScheduler` where the rate changes; else None: in JAX the
            optimizer has the schedule. A tuple where several optimizers were given.
    """

    model: Any
    optimizer: Any
    scheduler: Any = None


@short_traceback
def convert_training(
    model: Any,
    optimizer: Any,
    to: Any,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    scheduler: Any = None,
    scheduler_every: int | Sequence[int | None] | None = None,
    rules: Rules | None = None,
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
            arrays of an Equinox module. Or an average of the weights: an `AveragedModel`, or a pair
            of `optax.ema`. Or a tuple of several.
        to: `torch`, `jax`, `flax` or `equinox`; or a model of any of them that somebody wrote,
            which gets the weights as by `transfer`. What that keeps is not updated.
        example_inputs: As for `convert`.
        example_kwargs: As for `convert`.
        scheduler: The scheduler of `torch.optim.lr_scheduler` that goes with a torch optimizer;
            with several optimizers a tuple, with None for those that have none.
        scheduler_every: How many updates of the parameters there are between two calls of
            `scheduler.step()`: 1, or the batches of an epoch. None takes it to be 1, which the
            counts of the optimizer must confirm. A tuple where several schedulers differ in it.
        rules: As for `transfer`, where `to` is a model.
        options: As for `convert`, such as `structure=True`; or for `transfer`.

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
    if isinstance(to, str) and rules is not None:
        raise ConversionError(
            f"rules= are for a model that somebody wrote: pass that in place of {to!r}"
        )
    is_one = not isinstance(optimizer, tuple | list) or any(
        adapter.is_optimizer(optimizer) for adapter in adapters(Optimizers)
    )
    optimizers = [optimizer] if is_one else [*optimizer]
    schedulers, counts = (
        [*x]
        if not is_one and isinstance(x, tuple | list)
        else [x] * (len(optimizers) if x is None or isinstance(x, int) else 1)
        for x in (scheduler, scheduler_every)
    )
    if not len(optimizers) == len(schedulers) == len(counts) > 0:
        raise ConversionError(
            f"{len(optimizers)} optimizers, {len(schedulers)} schedulers and {len(counts)} numbers "
            "of updates were given: pass a tuple with one for each, or None"
        )
    framework = find_target(to)[0] if isinstance(to, str) else None
    source = adapter_of_model(model) or source_of_callable(model, framework)
    if not (isinstance(source, Optimizers) and all(map(source.is_optimizer, optimizers))):
        raise ConversionError(
            f"{', '.join(type(x).__name__ for x in optimizers)}: {type(model).__name__} is not a "
            "model that it could train. Pass a torch module with a torch.optim.Optimizer, an "
            "nnx.Module with its nnx.Optimizer, or a JaxModel or Equinox module with (optax "
            "transformation, state)."
        )
    states = [
        source.read_optimizer(model, each, schedule, every if is_one or schedule else None)
        for each, schedule, every in zip(optimizers, schedulers, counts, strict=True)
    ]
    fill: Callable[[dict[str, Any]], Any]
    if isinstance(to, str):
        from fmapper.programs.convert import convert_with_arrays

        converted = convert_with_arrays(model, to, example_inputs, example_kwargs, **options)
        fill = partial(load_state, converted, source=bool(options.get("structure")))
    else:
        given = {"example_inputs": example_inputs or None, "example_kwargs": example_kwargs}
        converted, fill = _transfer(model, to, rules=rules, **given, **options)
    target = adapter_of_model(converted)
    if not isinstance(target, Optimizers):
        raise ConversionError(f"optimizers cannot be converted to {type(converted).__name__}")
    if not target.trainable(converted):
        raise ConversionError(
            f"a {type(converted).__name__} holds no parameters, which an optimizer could update: "
            "its init returns them. Convert to a target whose models hold theirs."
        )
    carried = (_carry(held, source, model, target, fill) for held in states)
    written = [target.write_optimizer(converted, held) for held in carried]
    if is_one:
        return Training(converted, *written[0])
    return Training(converted, *zip(*written, strict=True))


def _transfer(model: Any, twin: Any, **options: Any) -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    """Returns a twin with the weights of a model, and what fills a copy of it."""
    import numpy as np

    from fmapper.checkpoints import AddConstant, Cast, Offset, Rules, Scale, Sum
    from fmapper.twins.transferring import transfer

    filled, report = transfer(model, twin, **options)
    for rule in report.rules:
        if isinstance(rule, AddConstant | Offset | Scale | Sum):
            raise ConversionError(
                f"{rule} changes values, so that the moments of the source are not those of the "
                "twin. Transfer the weights alone, and begin a new optimizer."
            )
    moves = Rules(rule for rule in report.rules if not isinstance(rule, Cast))  # filling casts
    kept = {n: np.zeros(x.shape) for n, x in state(filled).items() if n in {*report.kept}}

    def fill(arrays: dict[str, Any]) -> Any:
        moved = moves.apply(to_numpy(arrays))
        return load_state(filled, {name: array.read() for name, array in moved.items()} | kept)

    return filled, fill


def _carry(
    held: OptimizerState,
    source: Optimizers,
    model: Any,
    target: Optimizers,
    fill: Callable[[dict[str, Any]], Any],
) -> OptimizerState:
    """Returns an optimizer's state in the order and layouts of the converted model.

    A moment is laid out like its parameter. So it goes the way of the parameters: by their names
    into a copy of the converted model, and out of that.
    """
    import numpy as np

    old = source.trainable(model)
    is_pair = isinstance(model, tuple) and weights_of(model) is None  # a function, its parameters
    arrays = state(model[1] if is_pair else model)
    if len({*map(id, old)}) < len(old):
        raise ConversionError(
            "two parameters are one array, which is converted as a tie, and the optimizer has each "
            "of them: copy one, or give the model one parameter for both"
        )

    names = {id(array): name for name, array in arrays.items()}
    for moments in held.slots.values():
        for at, x in moments.items():
            (dtype, shape), like = ((y.dtype, tuple(y.shape)) for y in (x, old[at]))
            if dtype != like[0] or (held.algorithm != "adafactor" and shape != like[1]):
                raise ConversionError(
                    f"{names[id(old[at])]}: its moments are of {dtype} and shape {shape}, but it "
                    f"is of {like[0]} and shape {like[1]}. Pass the model that the optimizer was "
                    "made for, in the dtype of its moments."
                )

    def through(new: Sequence[Any]) -> list[Any]:
        changed = {id(x): array for x, array in zip(old, new, strict=True)}
        return target.trainable(fill({n: changed.get(id(x), x) for n, x in arrays.items()}))

    def follow(numbers: Iterable[Any]) -> list[Any]:
        """Returns whole numbers in the places of the new parameters, from some for each old one."""
        full = [np.broadcast_to(x, like.shape) for x, like in zip(numbers, old, strict=True)]
        return carry_numbers(
            full, lambda new: [x.astype(np.float32) for x in to_numpy(through(new))]
        )

    # Of which old parameters each new one is made; -1 for constants.
    origins = [
        {*(np.flatnonzero(np.bincount(array.ravel().astype(np.int64))) - 1).tolist()}
        for array in follow(range(1, len(old) + 1))
    ]
    numbers = {at: number for number, group in enumerate(held.groups) for at in group.members}
    elements: list[Any] = []
    if held.algorithm in BY_AXES:
        elements = [np.arange(x.size, dtype=np.int32).reshape(x.shape) for x in map(to_numpy, old)]
    moved = follow(elements) if elements else []
    members: dict[tuple[int, Any], list[int]] = defaultdict(list)
    for at, origin in enumerate(origins):
        own, axes = {numbers.get(x, -1) for x in origin}, None
        if len(own) > 1:
            raise ConversionError(
                f"parameter {at} of the result is made of several of the source, for which the "
                "optimizer has different settings or counts. Give them the same, or convert "
                "without structure=True."
            )
        number = max(own, default=-1)
        if number < 0:
            continue
        if elements:  # the order of axes in which the algorithm takes them; None for their own
            new, plain = moved[at], tuple(range(moved[at].ndim))
            before, ways = elements[max(origin)], permutations(plain)
            way = next((w for w in ways if np.array_equal(new.transpose(w), before)), None)
            if way is None:
                raise ConversionError(
                    f"{held.algorithm} tells rows of a parameter from columns, and parameter {at} "
                    "of the converted model is not one of the source with its axes in another "
                    "order. Convert without structure=True."
                )
            taken = tuple(way[x] for x in held.groups[number].settings.get("axes") or plain)
            axes = None if taken == plain else taken
        members[number, axes].append(at)
    groups = []
    for (number, axes), places in sorted(members.items(), key=lambda item: item[0][0]):
        group = held.groups[number]
        settings = {**group.settings, "axes": axes} if elements else group.settings
        groups.append(replace(group, members=tuple(places), settings=settings))
    slots = {}
    for slot, moments in held.slots.items():
        if held.algorithm == "adafactor":  # whose slots are laid out as it takes the axes
            firsts = {at: max(origins[at]) for group in groups for at in group.members}
            kept = {at: moments[origin] for at, origin in firsts.items() if origin in moments}
            slots[slot] = mover_to(target)(kept)
            continue
        # Where there is none, the parameter stands for it, and is left out again.
        new = through([moments.get(at, x) for at, x in enumerate(old)])
        slots[slot] = {at: new[at] for at, origin in enumerate(origins) if origin <= moments.keys()}
    return replace(held, groups=tuple(groups), slots=slots)
