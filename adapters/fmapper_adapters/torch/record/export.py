"""Records a module with `torch.export`, and says in fmapper's words why it cannot be recorded."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental import sym_node

from fmapper import ConversionError, ConversionWarning, NotCompiledWarning, to_torch
from fmapper.programs import Program
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.compute.record_lock import turns
from fmapper_adapters.torch.from_fx import (
    check as _faithful,
)
from fmapper_adapters.torch.from_fx import (
    decompositions,
    fast_decompose,
    graph,
    guards,
    overlaps,
    static_sizes,
    trusted_asserts,
)
from fmapper_adapters.torch.record import (
    autograd,
    expert_loops,
    foreign_classes,
    gradient_ends,
    obstacles,
    operations,
    patches,
    values,
)
from fmapper_adapters.torch.record import (
    encoders as _encoders,
)
from fmapper_adapters.torch.record import (
    packed as _packed,
)
from fmapper_adapters.torch.record.restore import unwound

_Way = Callable[..., torch.export.ExportedProgram]


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
) -> Program:
    """Returns the program of a module for example inputs.

    The module is recorded in evaluation mode, or for `train=True` in training mode; a module that
    is in training mode already keeps the modes of its submodules. Its modes, parameters and buffers
    are afterwards what they were. Operations that are not in `whole`, nor in torch's core ATen, are
    taken apart.

    Raises:
        ConversionError: torch cannot record it; gives torch's reason and the usual remedy. Or what
            it has recorded gives other results for the examples than the module does.
    """
    module = _plain(module)
    obstacles.refuse(module)
    if packed := obstacles.has_packed(module):
        module = obstacles.unpack(module)
    args, inputs = _as_tensors((tuple(args), dict(kwargs)))
    recording = module
    if obstacles.without_values(module, (args, inputs)):
        recording, (args, inputs) = obstacles.with_shapes(module, (args, inputs))
        check = False
    settings: dict[str, Any] = {"check": check, "whole": whole}
    with (
        contextlib.nullcontext() if turns.taken else turns,
        mode(recording, train=train),
        foreign_classes.register(recording, (args, inputs)),
    ):
        encoders, later = _encoders.that_leave_out(recording, args, inputs)
        for path in later:
            warnings.warn(_padding_message(module, path), ConversionWarning, stacklevel=_level())
        with _encoders.leaving_out(encoders):
            lowered = record(recording, args, inputs, dynamic_shapes, **settings)
        found = graph.program(module, lowered, train=train, whole=whole)
        if specialize and static_sizes.remaining(found):
            ways = _WAYS_FOR_VALUES[::-1]
            with _encoders.leaving_out(encoders):
                lowered = record(recording, args, inputs, dynamic_shapes, **settings, ways=ways)
            found = graph.program(module, lowered, train=train, whole=whole)
    _warn_of_sizes(found, specialize=specialize)
    return graph.with_integers_as_buffers(found) if packed else found


def _level() -> int:
    """Returns how many frames above that of the caller the user's own is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fmapper"):
        frame, level = frame.f_back, level + 1
    return level


def _padding_message(module: torch.nn.Module, path: str) -> str:
    name = f"{type(module).__name__}.{path}" if path else type(module).__name__
    return (
        f"{name}: a TransformerEncoder gives zeros at padded places under torch.no_grad(), and "
        "what its layers make of the padding with gradients. The program does the latter, as the "
        "module does now. Convert it under torch.no_grad() for the zeros, or make the encoder with "
        "enable_nested_tensor=False, which has no zeros in either mode."
    )


def record(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    check: bool = False,
    ways: Sequence[_Way] = (),
    whole: Collection[str] = (),
) -> torch.export.ExportedProgram:
    """Records the program as torch has it, with nothing in place and what is not lowered apart.

    Raises:
        ConversionError: torch cannot record it.
    """
    if dynamic_shapes is not None and not isinstance(dynamic_shapes, _collection):
        args, kwargs = _without_bases((args, kwargs))
    if isinstance(dynamic_shapes, str):
        dynamic_shapes = _all_sizes(dynamic_shapes, (args, kwargs))
    with (
        obstacles.run_uncompiled(),
        patches.name_keywords(module, kwargs, dynamic_shapes) as shapes,
    ):
        settings: dict[str, Any] = {"check": check, "ways": ways, "whole": whole}
        return _recorded_somehow(module, args, kwargs, shapes, **settings)


def _warn_of_sizes(program: Program, *, specialize: bool) -> None:
    """Says which sizes keep a program from being compiled, and where they come from."""
    calls = static_sizes.remaining(program)
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
        "The values of the examples do not settle them."
        if specialize
        else "convert(..., specialize=True) takes the sizes that the examples give, checks them in "
        "each call, and compiles."
    )
    warnings.warn(
        f"{program.name} has sizes that depend on the values of tensors: the program can be "
        f"called, but not compiled, so not in jax.jit, jax.vmap or jax.export. {way_out} They come "
        "from\n" + "\n".join([*lines[:_MOST_LINES], *more]),
        NotCompiledWarning,
        stacklevel=_outside(),
    )


_MOST_LINES = 8


def _outside() -> int:
    """Returns how many calls the code that asked for the conversion is away."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("fmapper"):
        depth, frame = depth + 1, frame.f_back
    return depth


def _recorded_somehow(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    check: bool,
    ways: Sequence[_Way],
    whole: Collection[str],
) -> torch.export.ExportedProgram:
    reasons: list[Exception] = []
    for_values = [] if ways else [*_WAYS_FOR_ANY_VALUES, *_WAYS_FOR_VALUES]
    ways = [*(ways or _WAYS), _unaware]
    autograd.met.clear()
    while ways:
        way = ways.pop(0)
        try:
            with unwound(), _without_hooks_left():
                with guards.note_questions(dynamic_shapes):
                    exported = way(module, args, kwargs, dynamic_shapes)
                guards.want(exported, module, args, kwargs, dynamic_shapes)
                overlaps.refuse(type(module).__name__, exported)
                if check:
                    _refuse_lost_gradients(module, way, reasons)
                    exported = _as_it_runs(module, exported, args, kwargs, dynamic_shapes)
                return _decompose(exported, whole)
        except ConversionError:
            raise
        except _packed.Refused as error:
            where = ": ".join(filter(None, (type(module).__name__, _module_of(module, error))))
            raise ConversionError(f"{where}: {error}") from error
        except Exception as error:  # torch raises what its tracing happens to meet
            reasons.append(error)
            if _is_data_dependent(error):
                ways, for_values = [*for_values, *ways], []
    raise _failure(module, reasons[0]) from reasons[0]


@contextlib.contextmanager
def _without_hooks_left() -> Iterator[None]:
    """Takes away what torch 2.11 leaves in every module where a recording has failed.

    It is a hook that lets no module assign a tensor to a buffer from then on.
    """
    hooks = _private.buffer_hooks()
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            del hooks[key]


def _refuse_lost_gradients(module: torch.nn.Module, way: Any, reasons: list[Exception]) -> None:
    """Refuses functions with gradients of their own, which the strict way forgets.

    Raises:
        ConversionError: There are such functions.
    """
    if way is _STRICTLY and autograd.met:
        raise ConversionError(
            f"{type(module).__name__}: {', '.join(sorted(autograd.met))} has a gradient of "
            "its own (torch.autograd.Function), which torch forgets in the only way in which it "
            f"can record this module. By the other ways: {_first_line(reasons[0])}. Mend that, or "
            "pass check=False for a model that is differentiated as its forward is written."
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _as_it_runs(
    module: torch.nn.Module,
    exported: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
) -> torch.export.ExportedProgram:
    """Returns the program, or one of what the module does when it is not recorded, if it differs.

    Raises:
        ConversionError: They differ, and the module cannot be recorded so.
    """
    with _quiet():
        try:
            _faithful.check(module, exported, args, kwargs)
        except ConversionError:
            try:
                other = _unaware(module, args, kwargs, dynamic_shapes)
            except Exception:  # it cannot be recorded so: they differ
                other = None
            if other is None:
                raise
            _faithful.check(module, other, args, kwargs)
            return other
    return exported


def _decompose(
    exported: torch.export.ExportedProgram, whole: Collection[str]
) -> torch.export.ExportedProgram:
    gradient_ends.mark(exported)
    fast_decompose.drop_idle_dropout(exported)
    table = decompositions.choose(exported, whole)
    if fast_decompose.decompose(exported, table):
        return exported
    with _quiet():
        found: torch.export.ExportedProgram = exported.run_decompositions(table.table)
        return found


def _plain(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module that was given to `torch.compile`, or the module itself.

    Raises:
        ConversionError: It is a ScriptModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConversionError(
            f"{type(module).__name__}: torch.export does not take what torch.jit has made. Convert "
            "the module that it was made from."
        )
    inner = _private.compiled_from(module)
    return inner if isinstance(inner, torch.nn.Module) else module


def _as_tensors(tree: Any) -> Any:
    """Turns example inputs of other frameworks into tensors; objects with tensors stay."""
    return to_torch(tree, strict=False)


def _without_bases(inputs: Any) -> Any:
    """Copies examples that are views: torch asks for sizes of what they view."""
    if not any(
        isinstance(x, torch.Tensor) and _private.is_view(x) for x in pytree.tree_leaves(inputs)
    ):
        return inputs
    return pytree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, torch.Tensor) and _private.is_view(x) else x,
        inputs,
    )


_collection: Any = torch.export.ShapesCollection  # untyped in torch


def _all_sizes(word: str, inputs: Any) -> Any:
    """Returns every size of every tensor as one that may vary, unless the code fixes it.

    Raises:
        ConversionError: The word is not `auto`.
    """
    if word != "auto":
        raise ConversionError(
            f"dynamic_shapes={word!r} is not known: write 'auto', or what torch.export.export takes"
        )
    found: Any = _collection()
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            found[leaf] = dict.fromkeys(range(leaf.ndim), torch.export.Dim.AUTO)
    return found


def _plainly(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    grad: bool,
    strict: bool,
) -> torch.export.ExportedProgram:
    with _quiet(), torch.set_grad_enabled(grad), operations.stand_ins(unless=strict):
        return torch.export.export(
            module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
        )


def _is_data_dependent(error: Exception) -> bool:
    signs = ("GuardOnDataDependentSymNode", "data-dependent", "DataDependent", "UnbackedSymbol")
    return any(sign in f"{type(error).__name__}: {error}" for sign in signs)


# What `draft_export` does where it cannot go on, and that is sound: it goes the way that the
# examples go, and asserts in the program that other inputs go it too.
_SOUND = {"DATA_DEPENDENT_ERROR", "GUARD_ADDED"}
_FLOAT = re.compile(r"\bzuf\d")  # torch's names for floats that are read from arrays


def _for_branches(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Returns a program that goes the way of the examples and checks that its inputs go it, too."""
    with _quiet(), _without_provenance(), torch.enable_grad(), operations.stand_ins():
        found = torch.export.draft_export(
            module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
    report = _private.report_of(found)
    failures = list(getattr(report, "failures", ()))
    kinds = {failure.failure_type.name for failure in failures}
    if not kinds <= _SOUND:
        raise RuntimeError(f"draft_export: {', '.join(sorted(kinds - _SOUND))}")
    decided = [failure.data.get("expr") for failure in failures]
    for expression in decided:
        if _FLOAT.search(str(expression)):  # torch guesses, and asserts nothing
            raise RuntimeError(f"draft_export decides {expression} and does not check it")
    if not trusted_asserts.is_asserted(found.graph, decided):
        raise RuntimeError("draft_export: a value that is taken for granted is not asserted")
    with _quiet():
        _faithful.run(found.module(), module, args, kwargs, seed=0)  # what it asserts may be wrong
    return found


@contextlib.contextmanager
def _without_provenance() -> Iterator[None]:
    """Keeps torch from writing down how each expression of sizes has come about.

    That is for people who read its report, and takes most of the time of `draft_export`: minutes
    where sizes depend on sizes that depend on values.
    """
    log = getattr(sym_node, "dtrace_structured", None)

    def without_expressions(name: str, *args: Any, **kwargs: Any) -> None:
        if name != "expression_created" and log is not None:
            log(name, *args, **kwargs)

    try:
        if log is not None:
            setattr(sym_node, "dtrace_structured", without_expressions)  # noqa: B010
        yield
    finally:
        if log is not None:
            setattr(sym_node, "dtrace_structured", log)  # noqa: B010
        for reference in list(getattr(logging, "_handlerList", ())):
            if type(reference()).__name__ == "CaptureStructuredTrace":
                reference().close()  # torch leaves its file open


def _over_experts(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Returns a program whose loops over the experts that were hit go over all of them."""
    if not expert_loops.are_in(module):
        raise expert_loops.NotProved("there is no loop over the places of true elements")
    missing: set[Any] = set()
    while True:
        known = len(missing)
        try:
            with values.replaced_forward(module, expert_loops.over_all(module.forward, missing)):
                return _plainly(module, args, kwargs, dynamic_shapes, grad=True, strict=False)
        except Exception:  # torch may have another one for what it was raised as
            if len(missing) == known:
                raise


def _for_values(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Records a program for the values of the examples, which checks those that it gets."""
    with _quiet(), torch.enable_grad(), operations.stand_ins():
        return values.record_values(module, args, kwargs, dynamic_shapes)


def _unaware(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Records what the module does when it is not recorded."""
    with _quiet(), torch.enable_grad(), operations.stand_ins():
        return values.record_values(module, args, kwargs, dynamic_shapes, aware=False)


_STRICTLY = functools.partial(_plainly, grad=True, strict=True)
# Without reading the bytecode first, which is quicker; with it where that fails. Gradients are
# switched on, so that `torch.no_grad` is seen, unless only without them it can be recorded: torch
# has loops that it cannot differentiate.
_WAYS: tuple[_Way, ...] = (
    functools.partial(_plainly, grad=True, strict=False),
    functools.partial(_plainly, grad=False, strict=False),
    _STRICTLY,
)
# Those that keep more of the program general come first.
_WAYS_FOR_VALUES = (_for_branches, _for_values)
_WAYS_FOR_ANY_VALUES = (_over_experts,)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's warnings and log about its own workings; what fails is still reported.

    Where it fails torch prints the graph so far on stderr, too; what a forward prints there is kept
    back until it is known that it has not failed.
    """
    printed = io.StringIO()
    # Each has a level of its own, so that of `torch` would not do.
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


@contextlib.contextmanager
def mode(module: torch.nn.Module, *, train: bool) -> Iterator[None]:
    """Switches the module to training or evaluation mode inside."""
    before = {inner: inner.training for inner in module.modules()}
    try:
        if not train:
            module.eval()
        elif not module.training:
            module.train()
        yield
    finally:
        for inner, training in before.items():
            inner.training = training


_LOGS = (
    "torch.export",
    "torch.export._trace",
    "torch._export.non_strict_utils",
    "torch.export._draft_export",
    "torch.fx._symbolic_trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.utils._sympy.interp",
)

# What torch says, and what helps.
_REMEDIES = (
    (
        ("GuardOnDataDependentSymNode", "Could not guard on data-dependent"),
        "The forward branches on the value of a tensor. Write it with torch.where or torch.cond, "
        "or say what is known with torch._check. Where it compares a float that it has read, as "
        "x.item() > 0, comparing the tensor, x > 0, gives a program that checks which way it goes.",
    ),
    (
        ("ConstraintViolation", "Constraints violated", "specialized"),
        "A size that dynamic_shapes lets vary is fixed by the code. Leave it out of "
        "dynamic_shapes, or mark it torch.export.Dim.AUTO.",
    ),
    (
        ("missing a required argument", "positional argument", "unexpected keyword"),
        "Give the inputs of forward in example_inputs and example_kwargs.",
    ),
    (
        ("pytree", "is not supported as an input", "Unsupported input type"),
        "Register the class of the input with torch.export.register_dataclass, or give tensors in "
        "tuples, lists and dicts.",
    ),
    (
        ("expected scalar type", "to have the same dtype"),
        "The factors of a product are of different dtypes. Where it runs, torch lets that pass if "
        "there is nothing to multiply; a recording is for other sizes, too. Cast one of them, as "
        "in x.to(y.dtype).",
    ),
    (
        ("to out tensor with dtype",),
        "An operation in place gives another dtype than its tensor has, which torch casts where it "
        "runs and refuses to record. Write what it does, as in x = x.pow(2).to(x.dtype).",
    ),
)


def _failure(module: torch.nn.Module, error: Exception) -> ConversionError:
    text = f"{type(error).__name__}: {error}"
    remedy = next(
        (what for signs, what in _REMEDIES if any(sign in text for sign in signs)),
        "Call torch.export.export(module, args, kwargs) by itself to work on the reason; a part "
        "that cannot be recorded can be written anew, or given to the caller.",
    )
    where = _module_of(module, error)
    at = f" in {where}" if where else ""
    return ConversionError(
        f"{type(module).__name__}: torch.export could not record it{at}. {_first_lines(text)}\n"
        f"{remedy}"
    )


def _first_lines(text: str, most: int = 12) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:most])


def _module_of(module: torch.nn.Module, error: Exception) -> str:
    """Returns the path of the innermost submodule whose forward the error came through."""
    paths = {id(inner): path for path, inner in module.named_modules()}
    found = ""
    frames = error.__traceback__
    while frames is not None:
        owner = frames.tb_frame.f_locals.get("self")
        if frames.tb_frame.f_code.co_name == "forward" and id(owner) in paths:
            found = paths[id(owner)] or found
        frames = frames.tb_next
    return found
