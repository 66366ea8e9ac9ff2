"""`Rules.record`: records a function on arrays as rules."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fmapper.backends.arrays import HOST, Arrays
from fmapper.backends.discovery import adapters, owner_of
from fmapper.checkpoints import backend as _backend  # noqa: F401  (lazy arrays are leaves)
from fmapper.checkpoints.checkpoint import read_checkpoint
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.recording.abstract import Named, Unwritten
from fmapper.checkpoints.recording.arithmetic import place, refusal
from fmapper.checkpoints.recording.general import drop, rename, rules_of
from fmapper.checkpoints.recording.graph import Graph, Node, leaves_of
from fmapper.checkpoints.recording.recorder import Recorder
from fmapper.checkpoints.recording.steps import Steps
from fmapper.checkpoints.rules.naming import Drop, Tie
from fmapper.checkpoints.rules.rule import Rule
from fmapper.checkpoints.rules.rules import Rules
from fmapper.errors import CheckpointError
from fmapper.files.dtypes import numpy_dtype
from fmapper.files.urls import place_of
from fmapper.moves.mover import to_numpy
from fmapper.states.state import arrays_by_name
from fmapper.states.transient import transient_in
from fmapper.tracebacks import short_traceback
from fmapper.tree.fmap import fmap
from fmapper.tree.pattern import Pattern

_lock = threading.RLock()  # because recorders patch functions of their frameworks


@short_traceback
def record(
    function: Callable[..., Any], state: Any, backend: str | None, *args: Any, **kwargs: Any
) -> Rules:
    """Runs a function on arrays without data; see `Rules.record`."""
    if isinstance(state, str | os.PathLike):
        state = dict(read_checkpoint(place_of(state)))
    named = arrays_by_name(state)
    firsts: dict[int, str] = {}
    ties = {
        name: firsts[id(array)]
        for name, array in named.items()
        if firsts.setdefault(id(array), name) != name
    }
    recording = Recording(backend)
    call = partial(_call, function, args, kwargs)
    try:
        outputs = recording.run(call, state, firsts)
    except Exception as error:
        newer = Recording(backend)
        if newer.recorders.keys() == recording.recorders.keys():
            raise _clearer(recording, error) from None
        outputs = newer.run(call, state, firsts)  # the function has imported a framework
    drops = [
        Drop(Pattern.escape(name), tied_to=Pattern.escape(first)) for name, first in ties.items()
    ]
    return Rules([*drops, *derive_rules(outputs, list(firsts.values()))])


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Any
) -> Any:
    """Calls the function with copies of its further arguments, which it may modify."""
    copied_args, copied_kwargs = fmap(lambda leaf: leaf, (args, kwargs))
    return function(given, *copied_args, **copied_kwargs)


class Recording:
    """A run of a function on arrays without data.

    Args:
        backend: The framework of the arrays that the function takes; None for that of the state.

    Attributes:
        recorders: The recorder of each framework in use, by its name.
    """

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self.recorders: dict[str, Recorder] = {}
        for adapter in adapters(Arrays):
            recorder = adapter.recorder(self)
            if recorder is not None:
                self.recorders[adapter.name] = recorder

    def lazy(self, array: Any) -> LazyArray | None:
        """Returns the lazy array behind a framework's array; None for one with values."""
        for recorder in self.recorders.values():
            lazy = recorder.lazy(array)
            if lazy is not None:
                return lazy
        return None

    def run(
        self, function: Callable[[Any], Any], state: Any, names: dict[int, str]
    ) -> dict[str, LazyArray]:
        """Runs the function, and returns its arrays by name.

        Args:
            function: The function.
            state: Its argument, with arrays that have values.
            names: The name of each array of the state, by identity.
        """
        body: Callable[[], dict[str, LazyArray]] = partial(self._body, function, state, names)
        for recorder in self.recorders.values():
            body = partial(recorder.run, body)
        with _lock:
            return body()

    def _body(
        self, function: Callable[[Any], Any], state: Any, names: dict[int, str]
    ) -> dict[str, LazyArray]:
        given = fmap(
            lambda leaf: self._stand_in(names[id(leaf)], leaf) if id(leaf) in names else leaf, state
        )
        result = function(given)
        outcome = given if result is None else result
        left_out = transient_in(outcome)
        outputs = {}
        for name, array in arrays_by_name(outcome).items():
            lazy = self.lazy(array)
            if lazy is None and (id(array) in left_out or owner_of(array).stays(array)):
                continue  # such as buffers that checkpoints leave out, and random keys
            outputs[name] = _constant(array) if lazy is None else lazy
        return outputs

    def _stand_in(self, name: str, array: Any) -> Any:
        adapter = owner_of(array)
        named = Named(name, adapter.shape(array), numpy_dtype(adapter.dtype(array)))
        backend = self._backend or (HOST.backend if isinstance(array, LazyArray) else adapter.name)
        if backend not in self.recorders:
            raise CheckpointError(
                f"operations on arrays of {backend} cannot be recorded. Write backend= with one of "
                f"{', '.join(self.recorders)}, and import that framework before"
            )
        return self.recorders[backend].stand_in(named)


def _constant(array: Any) -> LazyArray:
    """Returns an array that does not depend on the state as a lazy array."""
    adapter = owner_of(array)
    if adapter.device(array).kind == "meta":
        return Unwritten(adapter.shape(array), numpy_dtype(adapter.dtype(array)))
    return array if isinstance(array, LazyArray) else LazyArray.of(to_numpy(array))


def _clearer(recording: Recording, error: Exception) -> Exception:
    """Returns a clearer error, with the line, if a framework lacks the values of arrays."""
    cause: BaseException | None = error
    while cause is not None:  # NumPy catches the error of `__float__`
        if isinstance(cause, CheckpointError):
            return cause
        cause = cause.__cause__ or cause.__context__
    for recorder in recording.recorders.values():
        operation = recorder.explain(error)
        if operation is not None:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            return refusal(operation, place(reversed(frames)))
    return error


def derive_rules(
    outputs: Mapping[str, LazyArray], names: Sequence[str], ties: Mapping[str, str] | None = None
) -> Rules:
    """Returns the rules that compute arrays from others.

    Args:
        outputs: The arrays by their new names: operations on `Named` arrays.
        names: The names of all input arrays. Those that no output needs are dropped.
        ties: Further names of outputs, each with the one that it is tied to.

    Raises:
        CheckpointError: Rules cannot express how an output is computed from named arrays.
    """
    graph = Graph()
    nodes: dict[str, Node] = {}
    for name, array in outputs.items():
        try:
            nodes[name] = graph.node(array)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
    graph.divide()
    firsts: dict[int, str] = {}
    tied = dict(ties or {})
    for name, node in nodes.items():
        if firsts.setdefault(id(node), name) != name:
            tied[name] = firsts[id(node)]
    nodes = {name: node for name, node in nodes.items() if name not in tied}
    used = leaves_of([*nodes.values()])
    rules: list[Rule] = drop([name for name in names if name not in used], names)
    live = [name for name in names if name in used]
    steps = Steps(nodes, live)
    more, now = rules_of(steps.steps, live)
    rules += more
    last = {steps.names[name]: name for name in nodes}
    rules += drop([name for name in now if name not in last], now)
    rules += rename(last, last)
    rules += [Tie(source, target) for target, source in tied.items()]
    return Rules(rules)
