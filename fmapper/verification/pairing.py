"""Pairs the elements of the arrays of two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from fmapper.backends.models import Models
from fmapper.errors import StructureMismatchError
from fmapper.verification.arrays import is_floating, to_host, widen
from fmapper.verification.models.trial import Trial

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pairing:
    """The counterparts in `a` of the elements of the arrays of `b`.

    Attributes:
        shapes: The shapes of the arrays of `a`, by name.
        places: For each array of `b`, the numbers of the elements of `a`, counted from 1; 0 for
            constants.
        shifts: For arrays of `b` that equal those of `a` plus a constant: that constant.
    """

    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, Any]
    shifts: Mapping[str, Any] = field(default_factory=dict)

    def pull(self, arrays: Arrays, *, add: bool = False) -> dict[str, Any]:
        """Returns arrays of `b` under the names and in the layouts of `a`.

        Arrays of `a` with unpaired elements are missing.

        Args:
            arrays: Arrays by their names in `b`.
            add: Whether to sum elements of `b` with the same counterpart in `a`, as for gradients.
        """
        import numpy as np

        sizes = [math.prod(shape) for shape in self.shapes.values()]
        wide = np.result_type(
            np.float64, *(x.dtype for x in arrays.values() if x.dtype.kind == "c")
        )
        flat, filled = np.zeros(sum(sizes) + 1, wide), np.zeros(sum(sizes) + 1, bool)
        for name, array in arrays.items():
            places = self.places.get(name)
            if places is None or places.shape != array.shape:
                continue
            if add:  # gradients, which a constant does not change
                np.add.at(flat, places.ravel(), array.ravel().astype(wide))
            else:
                flat[places.ravel()] = (array - self.shifts.get(name, 0)).ravel()
            filled[places.ravel()] = True
        pulled, begin = {}, 1
        for (name, shape), size in zip(self.shapes.items(), sizes, strict=True):
            if filled[begin : begin + size].all() and size:
                pulled[name] = flat[begin : begin + size].reshape(shape)
            begin += size
        return pulled

    def push(self, arrays: Arrays) -> dict[str, Any]:
        """Returns arrays of `a` under the names and in the layouts of `b`.

        Args:
            arrays: Arrays by their names in `a`. Arrays of `b` that need other elements are
                missing.
        """
        import numpy as np

        sizes = [math.prod(shape) for shape in self.shapes.values()]
        wide = _wide(arrays)
        flat, filled = np.zeros(sum(sizes) + 1, wide), np.zeros(sum(sizes) + 1, bool)
        begin = 1
        for name, size in zip(self.shapes, sizes, strict=True):
            if name in arrays:
                flat[begin : begin + size] = arrays[name].ravel()
                filled[begin : begin + size] = True
            begin += size
        return {
            name: flat[at] + self.shifts.get(name, 0)
            for name, at in self.places.items()
            if filled[at].all()
        }


class ArrayRules(Protocol):
    """Rules for the names and layouts of arrays, such as `fmapper.checkpoints.Rules`."""

    def apply(self, arrays: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Returns the arrays under their new names."""


def pair_arrays(
    a: Any, b: Any, of: tuple[Models | None, Models | None], trials: tuple[Trial, Trial],
    rules: ArrayRules | str | None, inputs: Any,
) -> Pairing:  # fmt: skip
    """Pairs the arrays of two models.

    Args:
        a: A model.
        b: The other one.
        of: Their adapters; None for goldens.
        trials: The trials of both.
        rules: Rules from the names and layouts of `a` to those of `b`; `"transfer"` to find them;
            None if names are equal, or `convert` made one of the two.
        inputs: Example inputs, by position and by keyword, of `a` and of `b`, for finding rules.

    Raises:
        StructureMismatchError: Arrays cannot be paired; says what to pass.
    """
    ours, theirs = map(arrays_of, trials)
    given = _transfer(a, b, rules, inputs) if isinstance(rules, str) else rules
    if given is not None:

        def apply(arrays: Arrays) -> Arrays:
            named = {**arrays, **{n: arrays[first] for n, first in trials[0].aliases.items()}}
            return given.apply(named, strict=False)

        return _check(Pairing(*follow_elements(apply, ours, theirs)), trials)
    if _have_equal_names(ours, theirs, trials):
        return _identity(ours, theirs, trials)
    if of[1] is not None and of[1].source_weights(b) is not None:
        return _check(Pairing(*follow_elements(_filler(b), ours, theirs)), trials)
    if of[0] is not None and of[0].source_weights(a) is not None:
        return _check(_inverse(Pairing(*follow_elements(_filler(a), theirs, ours)), ours), trials)
    only = [n for n in trials[0].weights if n not in theirs][:3]
    other = [n for n in trials[1].weights if n not in ours][:3]
    raise StructureMismatchError(
        "the parameters of a and b have other names or shapes, so that gradients and steps cannot "
        f"be compared: a has {', '.join(only) or 'the same names'}, "
        f"b has {', '.join(other) or 'other shapes'}. Pass rules=fmapper.checkpoints.Rules([...]) "
        'that take the names and layouts of a to those of b, or rules="transfer" to find them.'
    )


def arrays_of(trial: Trial) -> dict[str, Any]:
    """Returns all arrays of a model by name, without keys."""
    state = {name: to_host(x) for name, x in trial.state.items()}
    return {**trial.weights, **trial.fixed, **state}


def _transfer(a: Any, b: Any, rules: str, inputs: Any) -> ArrayRules:
    if rules != "transfer":
        raise StructureMismatchError(
            f'rules={rules!r} is not a Rules object. rules="transfer" finds the rules.'
        )
    transfer: Any = import_module("fmapper").transfer  # this room is above
    (args, kwargs), (other_args, _) = inputs
    given = {"example_kwargs": kwargs} if kwargs else {}
    _, report = transfer(a, b, example_inputs=args, target_inputs=other_args, **given)
    transferred: ArrayRules = report.rules
    return transferred


def _have_equal_names(ours: Arrays, theirs: Arrays, trials: tuple[Trial, Trial]) -> bool:
    first = {_first(trials[0], name) for name in trials[1].weights}
    if not all(name in ours for name in first):
        return False
    if not all(_first(trials[1], name) in theirs for name in trials[0].weights):
        return False
    return all(
        ours[_first(trials[0], name)].shape == array.shape
        for name, array in trials[1].weights.items()
    )


def _first(trial: Trial, name: str) -> str:
    return trial.aliases.get(name, name)


def _identity(ours: Arrays, theirs: Arrays, trials: tuple[Trial, Trial]) -> Pairing:
    import numpy as np

    shapes = {name: array.shape for name, array in ours.items()}
    ids = _numbers(shapes)
    places = {}
    for name, array in theirs.items():
        partner = _first(trials[0], name)
        same = partner in shapes and shapes[partner] == array.shape
        places[name] = ids[partner] if same else np.zeros(array.shape, np.int64)
    return Pairing(shapes, places)


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Numbers all elements, from 1."""
    import numpy as np

    numbers, begin = {}, 1
    for name, shape in shapes.items():
        size = math.prod(shape)
        numbers[name] = np.arange(begin, begin + size).reshape(shape)
        begin += size
    return numbers


def _filler(model: Any) -> Callable[[Arrays], Arrays]:
    """Returns a function from arrays of a source to the layouts of a model converted from it."""
    from fmapper.states.state import arrays_by_name, load_state

    def fill(arrays: Arrays) -> Arrays:
        return arrays_by_name(load_state(model, arrays, source=True, strict=False))

    return fill


def follow_elements(
    apply: Callable[[Arrays], Arrays], ours: Arrays, theirs: Arrays
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any], dict[str, Any]]:
    """Follows the elements of arrays through a function that moves them.

    The function is applied to the numbers of the elements, digit by digit, so that every dtype can
    hold them.

    Returns:
        The fields of a `Pairing`.

    Raises:
        StructureMismatchError: The function adds arrays or multiplies them.
    """
    import numpy as np

    shapes = {name: array.shape for name, array in ours.items()}
    ids = _numbers(shapes)

    def follow(numbers: Arrays) -> dict[str, Any]:
        arrays = {}
        for name, array in apply(numbers).items():
            place = name if name in theirs else name.removeprefix("1.")  # (function, parameters)
            if place in theirs:
                moved = np.asarray(to_host(array)).astype(np.float64)
                if moved.shape == theirs[place].shape:
                    arrays[place] = moved
        return arrays

    zeros, ones = (
        follow({name: np.full(shape, x, np.float32) for name, shape in shapes.items()})
        for x in (0, 1)
    )
    for name, array in ones.items():
        changed = array != zeros[name]  # a mask of b's own may be infinite, and stays
        if not (array[changed] - zeros[name][changed] == 1).all():
            raise StructureMismatchError(
                f"{name} of b is a sum or a multiple of arrays of a, which training changes by "
                "other steps. Compare the outputs alone, without gradients and steps."
            )
    is_moved = {name: array != zeros[name] for name, array in ones.items()}  # not b's own keys
    shifts = {name: np.where(is_moved[name], x, 0) for name, x in zeros.items() if np.any(x)}

    def carry(digits: Sequence[Any]) -> list[Any]:
        moved = follow(dict(zip(ids, digits, strict=True)))
        with np.errstate(invalid="ignore"):  # of what stays infinite
            return [
                np.where(is_moved[name], np.rint(moved[name] - zeros[name]), 0)
                if name in moved
                else np.zeros(array.shape)
                for name, array in theirs.items()
            ]

    carried = carry_numbers([*ids.values()], carry)
    places = {name: x.astype(np.int64) for name, x in zip(theirs, carried, strict=True)}
    return shapes, places, shifts


_BASE = 200  # with a constant added, still below the first integer that bfloat16 lacks


def carry_numbers(numbers: Sequence[Any], carry: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Carries whole numbers digit by digit, because small dtypes lack large integers."""
    import numpy as np

    largest = max((int(array.max(initial=0)) for array in numbers), default=0)
    dtype = np.float32 if largest < 2**24 else np.float64  # the smallest that holds all numbers
    carried, unit = carry([(array % _BASE).astype(np.float32) for array in numbers]), _BASE
    while unit <= largest:
        digits = carry([(array // unit % _BASE).astype(np.float32) for array in numbers])
        carried = [low + dtype(unit) * high for low, high in zip(carried, digits, strict=True)]
        unit *= _BASE
    return carried


def _inverse(pairing: Pairing, ours: Arrays) -> Pairing:
    """Inverts a pairing of `a` with `b`."""
    import numpy as np

    ids = _numbers({name: array.shape for name, array in ours.items()})
    places = _numbers(pairing.shapes)
    flat = np.zeros(sum(math.prod(s) for s in pairing.shapes.values()) + 1, np.int64)
    for name, at in pairing.places.items():
        flat[at.ravel()] = ids[name].ravel()
    flat[0] = 0
    return Pairing(
        {name: array.shape for name, array in ours.items()},
        {name: flat[at] for name, at in places.items()},
    )


def _wide(arrays: Arrays) -> Any:
    """Returns a dtype that holds the values of all arrays."""
    import numpy as np

    is_complex = any(x.dtype.kind == "c" for x in arrays.values())
    return np.complex128 if is_complex else np.float64


def _check(pairing: Pairing, trials: tuple[Trial, Trial]) -> Pairing:
    """Raises for trained arrays of `b` without a counterpart in `a`.

    Raises:
        StructureMismatchError: There are such arrays; names them.
    """
    import numpy as np

    lost = [name for name in trials[1].weights if not np.any(pairing.places[name])]
    reached = pairing.pull({n: np.zeros(at.shape) for n, at in pairing.places.items()})
    left = [name for name in trials[0].weights if name not in reached]
    if lost or left:
        faults = [f"{name} of b has no partner in a" for name in lost[:3]]
        faults += [f"{name} of a has no partner in b" for name in left[:3]]
        raise StructureMismatchError(
            f"the rules do not pair all parameters: {'; '.join(faults)}. They take the names that "
            "fmapper.state(a) gives to those of fmapper.state(b)."
        )
    return pairing


def floats(arrays: Arrays, *, double: bool = False) -> dict[str, Any]:
    """Returns the floating arrays as NumPy arrays, if `double` in double precision."""
    host = {name: to_host(x) for name, x in arrays.items()}
    return {name: widen(x) if double else x for name, x in host.items() if is_floating(x)}
