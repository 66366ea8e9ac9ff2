"""Runs a module to compare it: as a whole, in float64, or operation by operation."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from fmapper import fmap
from fmapper.backends import Observation
from fmapper.programs.reading import source_of_class
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.arrays.tensors import has_memory
from fmapper_adapters.torch.from_fx import check, graph
from fmapper_adapters.torch.record import export, lines, modes, obstacles
from fmapper_adapters.torch.record.patches import encoders as _encoders
from fmapper_adapters.torch.record.patches import foreign_classes
from fmapper_adapters.torch.record.patches.restore import restore_after
from fmapper_adapters.torch.trials.precision import WideCasts, precision, wider


def call_module(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool | None = None,
    seed: int | None = None,
) -> Any:
    """Calls a module on copies of the inputs, without changing it; None leaves its mode."""
    if not isinstance(model, torch.nn.Module):
        return model(*args, **kwargs)
    args, kwargs = copy.deepcopy((args, options_of(model, kwargs)))
    with _mode(model, train):
        encoders, _ = _encoders.that_leave_out(model, args, kwargs)
        are_blind, _ = _encoders.that_see_nothing(model, args, kwargs)
        state = {x.data_ptr() for x in (*model.parameters(), *model.buffers()) if has_memory(x)}

        def keep(x: Any) -> Any:
            """Copies a result that restoring the module would overwrite."""
            is_shared = isinstance(x, torch.Tensor) and has_memory(x) and x.data_ptr() in state
            return x.clone() if is_shared else x

        is_ours = hasattr(model, "as_program")  # users who compile it want to see warnings
        with (
            contextlib.nullcontext() if is_ours else obstacles.run_uncompiled(),
            _encoders.leave_padding_out(encoders),
            torch.no_grad(),
            check.attention(wanted=bool(are_blind)),
            restore_after(model),
            torch.random.fork_rng(devices=[]),
        ):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            return fmap(keep, model(*args, **kwargs))


def _mode(model: Any, train: bool | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if train is None else modes.mode(model, train=train)


def call_in_float64(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool | None = None
) -> Any | None:
    """Calls a copy in float64; returns None if the model requires another dtype."""
    if not isinstance(model, torch.nn.Module):
        return None

    args, kwargs = _widen(model, args, kwargs)
    try:
        with precision(double=True), WideCasts():
            return call_module(copy.deepcopy(model).double(), args, kwargs, train=train)
    except Exception:  # mixed dtypes; the model's code may raise anything
        return None


def _widen(model: Any, args: Any, kwargs: Any) -> Any:
    """Returns the inputs in double precision."""

    def widen(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    with foreign_classes.register(model, (args, kwargs)):
        return pytree.tree_map(widen, (args, dict(kwargs)))


def watch(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: Collection[str],
    *,
    train: bool | None,
    double: bool,
) -> Iterator[Observation] | None:
    """Records every operation of the program for these inputs, computed by torch."""
    if not isinstance(model, torch.nn.Module):
        return None
    args, kwargs = copy.deepcopy((args, options_of(model, kwargs)))
    if double:
        with precision(double=True):
            model = copy.deepcopy(model).double()
            args, kwargs = _widen(model, args, kwargs)
            return _watch(model, args, kwargs, whole, train=train, double=True)
    return _watch(model, args, kwargs, whole, train=train, double=False)


def _watch(
    model: Any, args: Any, kwargs: Any, whole: Collection[str], *, train: bool | None, double: bool
) -> Iterator[Observation]:
    watch = getattr(model, "watch", None)
    if watch is not None and hasattr(model, "as_program"):  # converted from another framework
        with _mode(model, train):
            seen: list[Observation] = watch(args, kwargs)
            return iter(seen)
    with _mode(model, train), foreign_classes.register(model, (args, kwargs)):
        exported = _record(model, args, kwargs, whole)
        inputs = _flat_inputs(exported, args, kwargs)
    return _run(exported, inputs, whole, double=double)


def watcher(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Any], Iterator[Observation]] | None:
    """Records a module, and returns a function that watches modules with other arrays, or None."""
    if not isinstance(model, torch.nn.Module) or hasattr(model, "as_program"):
        return None
    args, kwargs = copy.deepcopy((args, options_of(model, kwargs)))
    with _mode(model, train=False), foreign_classes.register(model, (args, kwargs)):
        exported = _record(model, args, kwargs, ())

    def run(other: torch.nn.Module) -> Iterator[Observation]:
        with foreign_classes.register(other, (args, kwargs)):
            given = copy.deepcopy((args, kwargs))
            inputs = _flat_inputs(exported, *given, dict(other.state_dict()))
        return _run(exported, inputs, (), double=False)

    return run


def _record(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: Collection[str],
) -> torch.export.ExportedProgram:
    encoders, _ = _encoders.that_leave_out(model, args, kwargs)
    with _encoders.leave_padding_out(encoders), _noting_lines(model):
        return export.record(model, args, dict(kwargs), None, whole=whole, again=True)[0]


@contextlib.contextmanager
def _noting_lines(model: torch.nn.Module) -> Iterator[None]:
    """Notes the innermost source line of each operation recorded within the block."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)

    def describe(frame: FrameType | None) -> dict[str, Any]:
        line = lines.innermost_line(frame, code)
        return {"fmapper_method": line} if line else {}

    def begin(*_: Any) -> None:
        if _private.place_in_recording() is not None:
            _private.note_lines(code, describe)

    handle = model.register_forward_pre_hook(begin, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _flat_inputs(
    exported: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    others: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Returns the values of the graph's placeholders, with other arrays if there are any."""
    order = exported.call_spec.in_spec.child(1).context
    users = iter(pytree.tree_leaves((args, {name: kwargs[name] for name in order})))
    arrays = {**exported.constants, **exported.state_dict, **(others or {})}
    return [
        next(users) if spec.kind.name == "USER_INPUT" else arrays[spec.target]
        for spec in exported.graph_signature.input_specs
    ]


def _run(
    exported: torch.export.ExportedProgram, inputs: Any, whole: Collection[str], *, double: bool
) -> Iterator[Observation]:
    seen: list[Observation] = []

    specs = exported.graph_signature.input_specs
    users = {spec.arg.name for spec in specs if spec.kind.name == "USER_INPUT"}
    held = [spec for spec in specs if spec.kind.name in ("PARAMETER", "BUFFER")]
    targets = {spec.arg.name: str(spec.target) for spec in held}

    class Watching(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if double:  # casts to lower precision are skipped
                args, kwargs = pytree.tree_map(wider, (args, kwargs))
            return super().call_function(target, args, kwargs)

        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            tensors = tuple(
                x.detach().clone() for x in pytree.tree_leaves(result) if torch.is_tensor(x)
            )  # a later operation may change it
            operands = tuple(node.name for node in n.all_input_nodes)
            if n.op == "placeholder":
                kind = "input" if n.name in users else "weight"
                seen.append(Observation(targets.get(n.name, ""), kind, "", tensors, n.name))
            elif n.op == "call_function":
                if check.leaves_open(n.target):
                    tensors = ()
                path, source = graph.place(n)
                op = graph.op_name(n, whole)
                seen.append(Observation(path, op, source, tensors, n.name, operands))
            return result

    with torch.no_grad():
        Watching(exported.graph_module).run(*inputs)
    return iter(seen)


def outcome(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
    """Prepares a call of a converted model; see `Models.outcome`.

    A module of generated classes is called in training if it has a training mode and draws no
    random numbers there, which would differ from the source's.
    """
    written = source_of_class(model)
    if written is not None:
        if train and (written.lacks_training or _draws(model, args, kwargs)):
            return None
        return lambda off, **_: (_outputs(model, args, kwargs, train=train), {})
    run = getattr(model, "outcome", None)
    if run is None or not hasattr(model, "as_program"):
        return None
    return lambda off, **_: run(args, kwargs, train=train)


def options_of(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those keyword arguments of the source that a module of generated classes accepts.

    It accepts no keys for layers that draw random numbers themselves, and no mode flags.
    """
    if source_of_class(model) is None:
        return dict(kwargs)
    parameters = inspect.signature(model.forward).parameters
    options = dict(kwargs)
    for name, several in kwargs.items():  # such as Linen's keys, separate in files
        if isinstance(several, Mapping):
            options |= {f"{name}_{key}": value for key, value in several.items()}
    return {key: value for key, value in options.items() if key in parameters}


def _draws(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a module of generated classes draws random numbers in training."""
    with torch.random.fork_rng(devices=()):
        state = torch.get_rng_state()
        _outputs(model, args, kwargs, train=True)
        return not torch.equal(state, torch.get_rng_state())


def _outputs(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
) -> list[Any]:
    """Returns the outputs of a module of generated classes, in the order of its source."""
    given = options_of(model, kwargs)
    was_training = model.training
    held = {name: array.clone() for name, array in model.named_buffers()}
    model.train(train)
    try:
        with torch.no_grad():
            return _leaves(model(*args, **given))
    finally:
        model.train(was_training)
        with torch.no_grad():
            for name, array in model.named_buffers():
                array.copy_(held[name])


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # in JAX's order
        value = [value[key] for key in sorted(value)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if value is None else [value]
