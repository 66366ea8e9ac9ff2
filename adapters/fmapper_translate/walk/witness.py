"""Functions of a file beside those of the source: what both give in the same calls."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fmapper.verification.files.conditions import LIMITS
from fmapper_translate.functions import Function
from fmapper_translate.recording import Activation, Recording
from fmapper_translate.walk.errors import NotTranscribed

Results = dict[Function, list[Any]]
UNSEEN = ...  # a result within a transformation, as of a function with a derivative of its own


def run_file(*codes: str) -> dict[str, Any]:
    """Runs a file as a module, and returns its names.

    Raises:
        NotTranscribed: It raised an error.
    """
    net = types.ModuleType("transcribed")
    sys.modules[net.__name__] = net  # where dataclasses look their names up
    try:
        code = compile("\n\n".join(codes), "<transcribed>", "exec", dont_inherit=True)
        exec(code, vars(net))
    except Exception as error:  # the file is new code, which may raise anything
        raise NotTranscribed(f"the file cannot be loaded: {error}") from error
    return vars(net)


class Watch:
    """Watches the functions of a file.

    Args:
        space: The names of the file, whose functions are replaced by ones that are watched.
        recording: What the source did.
        new_names: Names of methods -> those in the file.
        keep: Returns a result as it is kept.

    Attributes:
        results: What each function returned, each time.
    """

    def __init__(
        self,
        space: dict[str, Any],
        recording: Recording,
        new_names: Mapping[str, str],
        keep: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self.results: Results = defaultdict(list)
        self._recording = recording
        self._keep = keep
        self._callers: dict[Function, set[Function]] = defaultdict(set)
        self._stack: list[Function] = []
        self._first: dict[Function, Function] = {}  # of those that are one in the file
        watched: dict[tuple[str, str], Function] = {}
        for function in recording.functions:
            owner, names = function.owner, recording.names
            if (owner or function) not in names:
                continue
            name = names[function] if owner is None else function.name
            key = names[owner] if owner else "", new_names.get(name, name) if owner else name
            self._first[function] = watched.setdefault(key, function)
        for (of, name), function in watched.items():
            place = space.get(of)
            known = vars(place).get(name) if isinstance(place, type) else space.get(name)
            if not of and inspect.isfunction(known):
                space[name] = self._watch(function, known)
            elif isinstance(place, type) and inspect.isfunction(known) and name != "__init__":
                setattr(place, name, self._watch(function, known))

    def _watch(self, function: Function, target: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._stack:
                self._callers[self._stack[-1]].add(function)
            at = len(self.results[function])
            self.results[function].append(None)
            self._stack.append(function)
            result = target(*args, **kwargs)
            self._stack.pop()
            self.results[function][at] = self._keep(result)
            return result

        return call

    def begin(self) -> None:
        """Forgets what ran when the model was made."""
        for returned in self.results.values():
            returned.clear()

    def failure(self, error: Exception) -> dict[Function, str]:
        """Returns the function that raised an error, with the reason.

        Raises:
            NotTranscribed: It was raised outside of all, as when the model is made.
        """
        first = next(iter(str(error).splitlines()), "")
        if not self._stack:
            reason = f"{type(error).__name__}: {first}"
            raise NotTranscribed(f"the model of the file cannot be made: {reason}") from error
        return {self._stack[-1]: f"it does not run: {type(error).__name__}: {first}"}

    def compare(
        self, numbers: Callable[[Any], Any], *, has_rows: bool = False
    ) -> dict[Function, str]:
        """Returns the functions whose results differ, and none that they call, with the reason.

        Args:
            numbers: See `agree`.
            has_rows: Whether functions that others call may have more rows than the source's, of
                which the last are NaN, and calls for none.
        """
        recorded: dict[Function, list[Activation]] = defaultdict(list)
        for activation in self._recording.activations[self._recording.made :]:
            if activation.function in self._first:
                recorded[self._first[activation.function]].append(activation)
        called = {item for functions in self._callers.values() for item in functions}
        wrong = set()
        for function, results in self.results.items():
            runs, is_picked = recorded[function], has_rows and function in called
            if len(results) != len(runs) and any(result is UNSEEN for result in results):
                continue  # the body of a scan runs once for several calls
            if is_picked:
                runs = [run for run in runs if _has_numbers(run.snapshot, numbers)]
            kept = [x for x in results if not is_picked or _has_numbers(x, numbers)]
            for ours, theirs in zip(kept, runs, strict=False):
                is_seen = ours is not UNSEEN and not theirs.is_random
                if is_seen and not agree(ours, theirs.snapshot, numbers, is_picked=is_picked):
                    wrong.add(function)
        return {
            function: "its statements give something else"
            for function in wrong
            if not self._callers[function] & wrong - {function}
        }


def _has_numbers(result: Any, numbers: Callable[[Any], Any]) -> bool:
    """Returns whether a result has something else than NaN, or no arrays."""
    values = result.values() if isinstance(result, dict) else result
    if isinstance(result, dict | tuple | list):
        return not values or any(_has_numbers(value, numbers) for value in values)
    array = numbers(result)
    is_array = isinstance(array, np.ndarray)
    return not is_array or bool(array.size and not (array != array).all())  # noqa: PLR0124


def agree(
    ours: Any, theirs: Any, numbers: Callable[[Any], Any], *, is_picked: bool = False
) -> bool:
    """Returns whether arrays of a result are those of the other, as far as both are arrays.

    Args:
        ours: A result of the file.
        theirs: A result of the source.
        numbers: Returns a framework's array as one of NumPy, and something else as it is.
        is_picked: Whether arrays of the file may have more rows.
    """
    more = {"is_picked": is_picked}
    if isinstance(theirs, tuple | list):
        same = isinstance(ours, tuple | list) and len(ours) == len(theirs)
        return same and all(agree(a, b, numbers, **more) for a, b in zip(ours, theirs, strict=True))
    if isinstance(theirs, dict):
        ours = ours if isinstance(ours, dict) else vars(ours)
        return all(agree(ours.get(name), x, numbers, **more) for name, x in theirs.items())
    ours, theirs = numbers(ours), numbers(theirs)
    if not isinstance(theirs, np.ndarray):
        return True
    if is_picked and isinstance(ours, np.ndarray) and theirs.ndim:
        ours = ours[: len(theirs)]
    if not isinstance(ours, np.ndarray) or ours.shape != theirs.shape:
        return False
    wanted = theirs.astype(np.complex128)
    is_same = (wanted == ours) | (np.isnan(wanted) & np.isnan(ours))
    apart = np.abs(np.where(is_same, 0, ours - wanted)).max(initial=0)
    finite = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-6)
    return bool(apart <= LIMITS["outputs"] * finite)
