"""Compares a converted model with what it was made of, on the examples and on other sizes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fmapper._adapter import Adapter
from fmapper._errors import ConversionError, FmapperError, FmapperWarning
from fmapper._fmap import fmap
from fmapper._move import mover_to, to_numpy
from fmapper._program import Program
from fmapper._sizes import size_of
from fmapper._warn import warn

# What may differ, relative to the largest element: the operations are the same, their kernels not.
_TOLERANCE = {
    "float64": 1e-6,
    "complex128": 1e-6,
    "float32": 1e-3,
    "complex64": 1e-3,
    "float16": 3e-2,
    "bfloat16": 1e-1,
}
# Of the inputs, to see whether a result hangs on their last bits.
_ROUNDING = {"float64": 1e-13, "complex128": 1e-13, "float16": 2e-3, "bfloat16": 1e-2}
# Operations with several right results: signs of vectors, phases, orders of equal values.
_AMBIGUOUS = ("eig", "svd", "schur", "qr", "householder", "geqrf", "lu", "hessenberg", "tridiag")
_MOST_TRIES = 500

Outcome = tuple[list[Any], dict[str, Any]]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def check(
    model: Any,
    source: Adapter,
    converted: Any,
    target: Adapter,
    program: Program,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Runs both models in each mode that was recorded, and where sizes vary, on other ones, too.

    Raises:
        ConversionError: They differ, or the converted one does not run; says where.
    """
    options = source.options(model)
    own = {name: value for name, value in kwargs.items() if name in options}
    rest = {name: value for name, value in kwargs.items() if name not in options}
    with warnings.catch_warnings(action="ignore"):  # recording has said so
        examples: Call = mover_to(source)((args, rest), strict=False)
    modes = [program] if program.evaluation is None else [program.evaluation, program]
    for recorded in modes:
        places = _Places(recorded, examples)
        for sizes in (None, *itertools.islice(places.others(), 3)):
            given = examples if sizes is None else places.resized(sizes)
            about = "the examples" if sizes is None else _shown(sizes)
            whole = given[0], {**given[1], **own}
            wanted = _source_outcome(model, source, recorded, whole, first=sizes is None)
            if wanted is None:
                if sizes is None:
                    return
                continue
            _compare(recorded, wanted, _outcome(converted, target, recorded, given, about), about)
            if sizes is not None:
                break


def _source_outcome(
    model: Any, source: Adapter, program: Program, given: Call, *, first: bool
) -> Callable[..., Outcome] | None:
    """The call of the model itself; None where it is not to be had."""
    try:
        run = source.outcome(model, *given, train=program.train)
        if run is not None:
            run(0.0)
        return run
    except Exception as error:  # whatever the code of a user raises
        if first:
            text = str(error).strip().splitlines()
            warn(
                f"{program.name} does not run on the examples, so that nothing was compared: "
                f"{type(error).__name__}: {text[0][:200] if text else ''}",
                FmapperWarning,
            )
        return None


def _outcome(
    converted: Any, target: Adapter, program: Program, given: Call, about: str
) -> Outcome | None:
    from fmapper._verify import inputs_for  # which imports this package's way to convert

    with warnings.catch_warnings(action="ignore"):
        run = target.outcome(converted, *inputs_for(target, *given), train=program.train)
        if run is None:
            return None
        try:
            return run(0.0)
        except Exception as error:
            first = isinstance(error, FmapperError) and str(error)
            raise ConversionError(
                f"{program.name}: the converted model does not run on {about}: "
                f"{first or f'{type(error).__name__}: {error}'}"
            ) from error


def _compare(
    program: Program, run: Callable[..., Outcome], got: Outcome | None, about: str
) -> None:
    if got is None:
        return
    wanted = _by_path(*run(0.0))
    found = _by_path(*got)
    count = 0
    for path, expected in wanted.items():
        if path not in found:
            if path.startswith("output"):
                raise ConversionError(f"{program.name}: {path} is missing from what was converted")
            continue  # it is given back as it was
        problem = _problem(expected, found[path])
        count += 1
        if problem and not _is_open(program, run, path, expected, found[path]):
            raise ConversionError(
                f"{program.name}: on {about} the converted model gives something else than the "
                f"model itself: {path} {problem}. Please report it; check=False takes the program "
                "as it is"
            )
    if wanted and not count:
        raise ConversionError(f"{program.name}: on {about} nothing could be compared")


def _by_path(outputs: list[Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    numbered = {f"output[{i}]": x for i, x in enumerate(outputs)}
    found = {**numbered, **changed}
    return {path: _array(x) for path, x in found.items() if hasattr(x, "shape")}


def _array(x: Any) -> Any:
    array: Any = to_numpy(x, copy=None)
    return array


def _problem(expected: Any, found: Any) -> str:
    """What is wrong with an array, in words; empty if nothing is."""
    import numpy as np

    if expected.shape != found.shape:
        return f"is of shape {found.shape}, not {expected.shape}"
    if expected.dtype != found.dtype:
        return f"is {found.dtype}, not {expected.dtype}"
    tolerance = _TOLERANCE.get(expected.dtype.name)
    if tolerance is None and expected.dtype.kind != "V" and "float" not in expected.dtype.name:
        wrong = int((expected != found).sum())
        return f"differs in {wrong} of {expected.size} elements" if wrong else ""
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    x, y = expected.astype(wide), found.astype(wide)
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any() or (np.isnan(x) != np.isnan(y)).any():
        return "is infinite or NaN elsewhere"
    if not finite.any():
        return ""
    largest = max(float(np.abs(x[finite]).max()), 1e-30)
    worst = float(np.abs(x[finite] - y[finite]).max())
    allowed = (tolerance or 0.3) * largest
    return "" if worst <= max(allowed, 1e-6) else f"differs by {worst:.2g} of {largest:.2g}"


def _is_open(
    program: Program, run: Callable[..., Outcome], path: str, expected: Any, found: Any
) -> bool:
    """Whether a result is not determined: several are right, or it hangs on the last bits.

    What a compiler fuses has other rounding than one operation after the other, which can make NaN
    of `exp(x - max(x))` where x is large: either is the model's own answer.
    """
    import numpy as np

    stepwise = _by_path(*run(0.0, compiled=False)).get(path)
    if stepwise is not None and not _problem(stepwise, found):
        return True
    ops = {op.rpartition("::")[2] for op in program.ops()}
    if any(op.startswith(_AMBIGUOUS) for op in ops):
        return True
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    dtypes = {d for call in program.graph.walk() for d, _ in call.result if "float" in d}
    off = max((_ROUNDING.get(d, 1e-6) for d in dtypes), default=1e-6)
    shaken = _by_path(*run(off))[path]
    if not _problem(expected, shaken):
        return False
    if expected.dtype.kind in "iub":
        return bool((expected != shaken).sum() * 4 >= (expected != found).sum())
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    x, y, z = (one.astype(wide) for one in (expected, found, shaken))
    finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    if not finite.any():
        return True
    return bool(np.abs(x - y)[finite].max() <= 10 * np.abs(x - z)[finite].max())


def _shown(sizes: Mapping[str, int]) -> str:
    return "inputs with " + ", ".join(f"{name} = {size}" for name, size in sizes.items())


class _Places:
    """The sizes of a call that vary, and where they are.

    Args:
        program: The program.
        examples: The arguments.
    """

    def __init__(self, program: Program, examples: Call) -> None:
        self._program = program
        self._examples = examples
        users = [given for given in program.inputs if given.kind in ("user", "static")]
        self._shapes = [given.shape if given.kind == "user" else () for given in users]
        self._sizes: dict[str, int] = {}
        for leaf, shape in zip(self._leaves(), self._shapes, strict=False):
            for size, n in zip(shape, getattr(leaf, "shape", ()), strict=False):
                if isinstance(size, str) and size.isidentifier():
                    self._sizes.setdefault(size, n)

    def _leaves(self) -> list[Any]:
        from fmapper import _calls

        return _calls.bind(self._program, *self._examples, sparing=True)

    def others(self) -> Iterator[dict[str, int]]:
        """Sizes unlike those of the examples for which the program is meant."""
        names = list(self._sizes)
        if not names:
            return
        steps = (1, 2, 3, -1, 4, 5, -2, 6, 8, 7, 12, 16)
        tries = itertools.product(range(len(steps)), repeat=min(len(names), 4))
        for chosen in sorted(itertools.islice(tries, _MOST_TRIES), key=sum):
            sizes = {
                name: self._sizes[name] + steps[(chosen[i % len(chosen)] + i) % len(steps)]
                for i, name in enumerate(names)
            }
            if self._fit(sizes):
                yield sizes

    def _fit(self, sizes: dict[str, int]) -> bool:
        for name, size in sizes.items():
            low, high = self._program.symbols.get(name, (None, None))
            if size < max(low or 1, 1) or (high is not None and size > high):
                return False
        for shape in self._shapes:
            if any((size_of(n, sizes) or 0) < 1 for n in shape if isinstance(n, str)):
                return False
        return not self._program.size_problem(dict(sizes))

    def resized(self, sizes: Mapping[str, int]) -> Call:
        """The examples with other sizes: their elements from the start again, or fewer."""
        import numpy as np

        known: dict[int, Any] = {}
        for leaf, shape in zip(self._leaves(), self._shapes, strict=False):
            resized = leaf
            for axis, size in enumerate(shape):
                if isinstance(size, str) and leaf is not None:
                    wanted = size_of(size, sizes) or 1
                    at = np.arange(wanted) % leaf.shape[axis]
                    resized = resized[(*(slice(None),) * axis, at)]
            if resized is not leaf:
                known[id(leaf)] = resized
        found: Call = fmap(lambda x: known.get(id(x), x), self._examples)
        return found
