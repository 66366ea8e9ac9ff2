"""Records a module with `torch.export`, and returns its program."""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as ContextManager
from typing import Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from fmapper import (
    ConversionError,
    ConversionWarning,
    FixedSizeWarning,
    NotCompiledWarning,
    to_torch,
)
from fmapper.backends import step
from fmapper.programs import Program
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.compute.record_lock import turns
from fmapper_adapters.torch.from_fx import check as checks
from fmapper_adapters.torch.from_fx import (
    decompositions,
    forms,
    gradient_ends,
    graph,
    guards,
    overlaps,
)
from fmapper_adapters.torch.passes import branches
from fmapper_adapters.torch.passes.static_sizes import find_remaining
from fmapper_adapters.torch.record import failures, idle, modes, obstacles, output_order
from fmapper_adapters.torch.record.parts import PartCalls
from fmapper_adapters.torch.record.patches import (
    autograd,
    batch_sizes,
    dead_results,
    foreign_classes,
    keywords,
    packed,
    plain_changes,
)
from fmapper_adapters.torch.record.patches.encoders import (
    leave_padding_out,
    that_leave_out,
    that_see_nothing,
)
from fmapper_adapters.torch.record.patches.restore import keep_attributes, unwind
from fmapper_adapters.torch.record.values import buffer_numbers, split_rows
from fmapper_adapters.torch.record.varying import sizes
from fmapper_adapters.torch.record.varying.layouts import guard_writes, leave_out_layouts
from fmapper_adapters.torch.record.ways import (
    SPECIALIZED,
    UNAWARE,
    WAYS,
    WITH_WHOLE_ROWS,
    Way,
    is_data_dependent,
    quiet,
)


class Recording(NamedTuple):
    """The result of a recording by torch.

    Attributes:
        exported: The program.
        other_forms: The names of its operations that are variants of other operations.
    """

    exported: torch.export.ExportedProgram
    other_forms: frozenset[str] = frozenset()


def export_program(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    train: bool = False,
    check: bool = True,
    specialize: bool = False,
    whole: Collection[str] = (),
    parts: bool = False,
    only_layers: bool = False,
) -> Program:
    """Returns the program of a module for example inputs.

    The module is recorded in evaluation mode, or for `train=True` in training mode; a module that
    is already in training mode keeps the modes of its submodules. Its modes, parameters and buffers
    are restored. Operations that are neither in `whole` nor in torch's core ATen are decomposed.

    Raises:
        ConversionError: torch cannot record it; the message has torch's reason and the usual
            remedy. Or the recording and the module have different results for the examples.
    """
    module = _plain(module)
    obstacles.refuse(module)
    if packed := obstacles.has_packed(module):
        module = obstacles.unpack(module)
    args, inputs = _as_tensors((tuple(args), dict(kwargs)), module)
    _give_shapes(module, args, inputs)
    recording = module
    if obstacles.without_values(module, (args, inputs)):
        recording, (args, inputs) = obstacles.with_shapes(module, (args, inputs))
        check = False
    calls = PartCalls(recording) if parts else None
    settings: dict[str, Any] = {"check": check, "whole": whole, "calls": calls}

    def in_mode(*more: ContextManager[Any]) -> ContextManager[list[Any]]:
        mode = modes.mode(recording, train=train, only_layers=only_layers)
        alone = contextlib.nullcontext() if turns.taken else turns
        return _together(alone, keep_attributes(recording), mode, *more)

    with in_mode():
        blind = itertools.chain(*that_see_nothing(recording, args, inputs))
    for path in blind:
        warnings.warn(_blind_message(module, path), ConversionWarning, stacklevel=level_of_user())
    with in_mode(foreign_classes.register(recording, (args, inputs))):
        encoders, later = that_leave_out(recording, args, inputs)
        for path in later:
            warnings.warn(
                _padding_message(module, path), ConversionWarning, stacklevel=level_of_user()
            )

        changed: dict[str, None] = {}

        def by(ways: Sequence[Way] = WAYS) -> Program:
            watching = () if calls is None else (dead_results.keep(), batch_sizes.take_any())
            notes = plain_changes.note_changes(recording)
            with _together(leave_padding_out(encoders), *watching, notes) as (*_, names):
                recorded = record(recording, args, inputs, dynamic_shapes, **settings, ways=ways)
                changed.update(names)
                if calls is not None and not train and not calls.left_out:
                    calls.left_out = idle.left_out_of_code(recording, args, kwargs)
            return graph.program(module, *recorded, train=train, whole=whole, calls=calls)

        program = by()
        if find_remaining(program) and split_rows.has_splits(recording):
            with contextlib.suppress(ConversionError):
                program = by(WITH_WHOLE_ROWS)
        if specialize and find_remaining(program):
            program = by(SPECIALIZED)
    if changed:
        plain_changes.warn(module, changed)
    if message := branches.describe_decided(program, numbers=not specialize):
        warnings.warn(message, ConversionWarning, stacklevel=level_of_user())
    _warn_of_sizes(program, specialize=specialize)
    return graph.with_integers_as_buffers(program) if packed else program


@contextlib.contextmanager
def _together(*patches: ContextManager[Any]) -> Iterator[list[Any]]:
    """Enters contexts one after the other; yields their values."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(patch) for patch in patches]


def level_of_user() -> int:
    """Returns the stack level of the user's frame."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fmapper"):
        frame, level = frame.f_back, level + 1
    return level


def _padding_message(module: torch.nn.Module, path: str) -> str:
    name = f"{type(module).__name__}.{path}" if path else type(module).__name__
    return (
        f"{name}: a TransformerEncoder returns zeros at padded positions under torch.no_grad(), "
        f"and the outputs of its layers for the padding when gradients are on. The program does "
        f"the latter, as the module does now. Convert it under torch.no_grad() to get zeros, or "
        f"create the encoder with enable_nested_tensor=False, which never returns zeros."
    )


def _blind_message(module: torch.nn.Module, path: str) -> str:
    name = f"{type(module).__name__}.{path}" if path else type(module).__name__
    return (
        f"{name}: a mask hides all positions from some position, where torch's attention returns "
        "NaN without gradients, and numbers with them. The program does the latter. Let each "
        "position attend to at least one."
    )


def record(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    check: bool = False,
    ways: Sequence[Way] = WAYS,
    whole: Collection[str] = (),
    again: bool = False,
    calls: PartCalls | None = None,
) -> Recording:
    """Records torch's program, functional and decomposed.

    Args:
        module: The module.
        args: Example inputs by position.
        kwargs: Example inputs by keyword.
        dynamic_shapes: The sizes that may vary.
        check: Whether to compare the program with the module.
        ways: The ways to try, in order.
        whole: The operations that are lowered whole.
        again: Whether torch must trace it again, so that it contains no variants of operations.
        calls: The recorder of the calls of submodules; None to ignore them.

    Raises:
        ConversionError: torch cannot record it.
    """
    if dynamic_shapes is not None and not isinstance(dynamic_shapes, sizes.ShapesCollection):
        args, kwargs = _without_bases((args, kwargs))

    def go(*, only_first: bool = False) -> Recording:
        varying = sizes.as_torch_takes_them(dynamic_shapes, (args, kwargs), only_first=only_first)
        with (
            obstacles.run_uncompiled(),
            torch.backends.opt_einsum.flags(enabled=False),  # it would read sizes as numbers
            keywords.name_keywords(module, kwargs, varying) as shapes,
        ):
            settings: dict[str, Any] = {"check": check, "ways": ways, "whole": whole}
            return _try_ways(module, args, kwargs, shapes, **settings, again=again, calls=calls)

    if not isinstance(dynamic_shapes, str):
        return go()
    try:
        with sizes.limit():
            return go()
    except sizes.TooManyOperations as error:
        reason = f"{failures.place_of(module, error)}: {error}, as with windows of an image"
    except ConversionError as error:
        if "solve_univariate_inequality" not in str(error.__cause__):
            raise
        reason = f"{type(module).__name__}: torch cannot solve the conditions on its sizes"
    warnings.warn(
        f"{reason}, so only the first size of each input varies. Name the sizes that should vary "
        "in dynamic_shapes=.",
        FixedSizeWarning,
        stacklevel=level_of_user(),
    )
    return go(only_first=True)


def _warn_of_sizes(program: Program, *, specialize: bool) -> None:
    """Warns about sizes that prevent a program from being compiled."""
    calls = find_remaining(program)
    if not calls:
        return
    places: dict[str, set[str]] = {}
    for call in calls:
        places.setdefault(call.source or call.module or program.name, set()).add(
            call.op.partition(".")[0]
        )
    lines = [f"  {place}: {', '.join(sorted(ops))}" for place, ops in places.items()]
    more = [f"  and at {len(lines) - _MOST_LINES} more places"] if len(lines) > _MOST_LINES else []
    way_out = (
        "The values of the examples do not determine them."
        if specialize
        else "convert(..., specialize=True) fixes the sizes of the examples, checks them in each "
        "call, and compiles."
    )
    warnings.warn(
        f"{program.name} has sizes that depend on the values of tensors: the program can be "
        f"called, but not compiled, so it does not work in jax.jit, jax.vmap or jax.export. "
        f"{way_out} They come "
        "from\n" + "\n".join([*lines[:_MOST_LINES], *more]),
        NotCompiledWarning,
        stacklevel=level_of_user(),
    )


_MOST_LINES = 8


def _try_ways(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    check: bool,
    ways: Sequence[Way],
    whole: Collection[str],
    again: bool,
    calls: PartCalls | None,
) -> Recording:
    reasons: list[Exception] = []
    for_values = [way for way in ways if way.for_values and ways is WAYS]
    left = [way for way in ways if way not in for_values]
    autograd.met.clear()
    while left:
        way = left.pop(0)
        try:
            with unwind(), _without_hooks_left(), leave_out_layouts():
                watch = calls.watch() if calls and way.sees_parts else contextlib.nullcontext()
                with watch, keep_attributes(module), guards.note_questions(dynamic_shapes):
                    exported = way.record(module, args, kwargs, dynamic_shapes)
                guards.want(exported, module, args, kwargs, dynamic_shapes)
                guard_writes(exported)
                overlaps.refuse(type(module).__name__, exported)
                buffer_numbers.assert_numbers(exported)
                if check:
                    _refuse_lost_gradients(module, way, reasons)
                    exported = _as_it_runs(module, exported, args, kwargs, dynamic_shapes)
                if calls is not None:
                    calls.left_out = idle.left_out_of(module, exported)
                return _decompose(exported, whole, again=again)
        except ConversionError:
            raise
        except packed.Refused as error:
            where = failures.place_of(module, error)
            raise ConversionError(f"{where}: {error}") from error
        except Exception as error:  # tracing in torch may raise anything
            reasons.append(error)
            if is_data_dependent(error):
                left, for_values = [*for_values, *left], []
    raise failures.failure(module, reasons[0], args, kwargs)


@contextlib.contextmanager
def _without_hooks_left() -> Iterator[None]:
    """Removes hooks that torch 2.11 leaves in modules after a failed recording.

    Such a hook prevents every module from assigning a tensor to a buffer.
    """
    hooks = _private.buffer_hooks()
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            del hooks[key]


def _refuse_lost_gradients(module: torch.nn.Module, way: Way, reasons: list[Exception]) -> None:
    """Checks that there are no custom autograd functions if a way loses their gradients.

    Raises:
        ConversionError: There are such functions.
    """
    if autograd.met and not way.keeps_gradients:
        raise ConversionError(
            f"{type(module).__name__}: {', '.join(sorted(autograd.met))} has a custom gradient "
            "(torch.autograd.Function), which torch loses in the only way in which it can record "
            f"this module, {way.name}. The others fail: {failures.first_line(reasons[0])}. Fix "
            "that, or pass check=False for a model that differentiates its forward instead."
        )


def _as_it_runs(
    module: torch.nn.Module,
    exported: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
) -> torch.export.ExportedProgram:
    """Returns the program, or another recording if the module behaves differently when recorded.

    Raises:
        ConversionError: Program and module differ, and no other recording is possible.
    """
    with quiet(), step("comparing with the module"):
        try:
            checks.check(module, exported, args, kwargs)
        except ConversionError:
            try:
                other = UNAWARE.record(module, args, kwargs, dynamic_shapes)
            except Exception:  # no other recording, so the difference remains
                other = None
            if other is None:
                raise
            checks.check(module, other, args, kwargs)
            return other
    return exported


def _decompose(
    exported: torch.export.ExportedProgram, whole: Collection[str], *, again: bool
) -> Recording:
    """Decomposes operations that are not lowered, by tracing `again` if necessary."""
    gradient_ends.mark(exported)
    forms.drop_idle_dropout(exported)
    forms.drop_idle_slices(exported)
    forms.write_idle_expansions(exported)
    table = decompositions.choose(exported, whole)
    others = None if again else forms.other_forms(exported, table)
    if others is not None:
        return Recording(exported, others)
    with quiet(), step("decomposing"):
        return Recording(output_order.decompose(exported, table.table))


def _plain(module: torch.nn.Module) -> torch.nn.Module:
    """Unwraps a module from `torch.compile`.

    Raises:
        ConversionError: The module is a ScriptModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConversionError(
            f"{type(module).__name__}: torch.export does not accept TorchScript modules. Convert "
            f"the original module."
        )
    inner = _private.original_of(module)
    return inner if isinstance(inner, torch.nn.Module) else module


def _give_shapes(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls a module in evaluation if lazy layers have no shapes yet, which initialises them.

    Raises:
        ConversionError: The module cannot be called.
    """
    parts = [*module.modules()]
    lazy = (part for part in parts if isinstance(part, LazyModuleMixin))
    if not any(part.has_uninitialized_params() for part in lazy):
        return
    before = [part.training for part in parts]
    try:
        with torch.no_grad():
            module.eval()(*args, **kwargs)
    except Exception as error:
        raise failures.failure(module, error, args, kwargs)  # noqa: B904 - it has its cause
    finally:
        for part, training in zip(parts, before, strict=True):
            part.training = training


def _as_tensors(tree: Any, module: torch.nn.Module) -> Any:
    """Converts example inputs of other frameworks to tensors, and copies repeated ones.

    If one tensor is two inputs, or an input and a parameter, torch records only one of the two.
    """
    tensors = to_torch(tree, strict=False)
    leaves, spec = pytree.tree_flatten(tensors)
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    again = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
            again.append(at)
        seen.add(id(leaf))
    for at in again:
        leaves[at] = leaves[at].detach().clone().requires_grad_(leaves[at].requires_grad)
    return pytree.tree_unflatten(leaves, spec) if again else tensors


def _without_bases(inputs: Any) -> Any:
    """Copies examples that are views: torch would guard on the sizes of their bases."""
    if not any(
        isinstance(x, torch.Tensor) and _private.is_view(x) for x in pytree.tree_leaves(inputs)
    ):
        return inputs
    return pytree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, torch.Tensor) and _private.is_view(x) else x,
        inputs,
    )
