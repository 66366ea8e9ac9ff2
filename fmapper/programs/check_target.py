"""Compares a converted model with its source, on the examples and at other sizes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fmapper.backends.models import Models
from fmapper.errors import ConversionError, ConversionWarning, FmapperError, FmapperWarning
from fmapper.moves.mover import mover_to, to_numpy
from fmapper.programs.program import Program
from fmapper.programs.sizes import size_of
from fmapper.tree.fmap import fmap
from fmapper.verification.models.owners import inputs_for
from fmapper.warn import warn

# Allowed differences, relative to the largest element: operations agree, kernels differ.
_TOLERANCE = {
    "float64": 1e-6,
    "complex128": 1e-6,
    "float32": 1e-3,
    "complex64": 1e-3,
    "float16": 3e-2,
    "bfloat16": 1e-1,
}
# Perturbations of the inputs, which show whether a result depends on their last bits.
_ROUNDING = {"float64": 1e-13, "complex128": 1e-13, "float16": 2e-3, "bfloat16": 1e-2}
# Operations with several correct results: vectors are determined up to signs and phases.
_AMBIGUOUS = frozenset(("eig", "eigh", "svd", "qr"))
_MOST_TRIES = 500
_MOST_SIZES = 3  # tried on the source model

Outcome = tuple[list[Any], dict[str, Any]]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def check(
    model: Any,
    source: Models,
    converted: Any,
    target: Models,
    program: Program,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Compares both models in each recorded mode, and at other sizes if sizes vary.

    Raises:
        ConversionError: They differ, or the converted model does not run; the message says where.
    """
    options = source.options(model)
    keywords = {name: value for name, value in kwargs.items() if name in options}
    rest = {name: value for name, value in kwargs.items() if name not in options}
    with warnings.catch_warnings(action="ignore"):  # recording has warned already
        examples: Call = mover_to(source)((args, rest), strict=False)
    modes = [program] if program.evaluation is None else [program.evaluation, program]
    for recorded in modes:
        run = _prepare(model, source, recorded, (examples[0], {**examples[1], **keywords}))
        if run is None:
            return
        if isinstance(run, str):
            warn(
                f"{program.name} does not run on the examples, so nothing was compared: {run}",
                FmapperWarning,
            )
            return
        outcome = _outcome(converted, target, recorded, examples, "the examples")
        try:
            _compare(recorded, run, outcome, "the examples")
        except ConversionError as error:
            if recorded.train:
                raise
            raise ConversionError(f"{error}. {_where(model, converted, args, kwargs)}") from None
    if program.symbols:
        reasons = [
            _compare_other_sizes(model, source, converted, target, recorded, examples, keywords)
            for recorded in modes
        ]
        if any(reasons):
            varying = program.name_sizes(", ".join(program.symbols))
            warn(
                f"{program.name} was compared with the converted model only on the examples, not "
                f"at other sizes, although {varying} may vary: "
                f"{next(filter(None, reasons))}",
                ConversionWarning,
            )


def _where(model: Any, converted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Names the operations whose results differ first."""
    from fmapper.verification.comparison import verify

    return str(verify(model, converted, *args, example_kwargs=kwargs))


def _compare_other_sizes(
    model: Any,
    source: Models,
    converted: Any,
    target: Models,
    program: Program,
    examples: Call,
    keywords: Mapping[str, Any],
) -> str:
    """Compares both at other sizes; returns the reason if that was not possible."""
    places = _Places(program, examples)
    failures = []
    for sizes in itertools.islice(places.others(), _MOST_SIZES):
        given = places.resize(sizes)
        run = _prepare(model, source, program, (given[0], {**given[1], **keywords}))
        if run is None:
            return ""
        if isinstance(run, str):
            failures.append(f"the original model does not run on {_show(sizes)}: {run}")
            continue
        about = _show(sizes)
        _compare(program, run, _outcome(converted, target, program, given, about), about)
        return ""
    return (
        failures[0] if failures else "no other sizes were found that satisfy all inputs and guards"
    )


def _prepare(
    model: Any, source: Models, program: Program, given: Call
) -> Callable[..., Outcome] | str | None:
    """Prepares a call of the source model; returns its error if it fails, None if it cannot run."""
    try:
        run = source.outcome(model, *given, train=program.train)
        if run is not None:
            run(0.0)
        return run
    except Exception as error:  # anything that the user's code raises
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def _outcome(
    converted: Any, target: Models, program: Program, given: Call, about: str
) -> Outcome | None:

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
    program: Program, run: Callable[..., Outcome], outcome: Outcome | None, about: str
) -> None:
    if outcome is None:
        return
    wanted = _by_path(*run(0.0))
    actual = _by_path(*outcome)
    count = 0
    chosen = []
    for path, expected in wanted.items():
        if path not in actual:
            if path.startswith("output"):
                raise ConversionError(f"{program.name}: {path} is missing from the converted model")
            continue  # the converted model returns it unchanged
        problem = _problem(expected, actual[path])
        count += 1
        if not problem or _is_open(program, run, path, expected, actual[path]):
            continue
        others = _with_other_vectors(program, run, path)
        if others is not None and _problem(expected, others):
            if _problem(abs(expected), abs(others)):
                chosen.append(path)
                continue
            if not _problem(abs(expected), abs(actual[path])):
                continue  # the values agree up to their signs
        raise ConversionError(
            f"{program.name}: on {about} the converted model differs from the original: {path} "
            f"{problem}. Please report this as a bug, unless it is a lowering of yours; "
            "check=False accepts the program as it is"
        )
    if chosen:
        warn(
            f"{program.name}: {', '.join(chosen)} could not be compared on {about}: "
            "these results depend on the signs or phases of eigenvectors, singular vectors or "
            "orthogonal factors, for which the converted model makes other, equally valid choices",
            ConversionWarning,
        )
    for path in actual:
        if path.startswith("output") and path not in wanted:
            raise ConversionError(
                f"{program.name}: on {about} the converted model returns {path}, which the "
                "original does not"
            )
    if wanted and not count:
        raise ConversionError(f"{program.name}: nothing could be compared on {about}")


def _by_path(outputs: list[Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    numbered = {f"output[{i}]": x for i, x in enumerate(outputs)}
    arrays = {**numbered, **changed}
    return {path: _array(x) for path, x in arrays.items() if hasattr(x, "shape")}


def _array(x: Any) -> Any:
    array: Any = to_numpy(x, copy=None)
    return array


def _problem(expected: Any, actual: Any) -> str:
    """Describes how an array differs from the expected one; empty if it agrees."""
    import numpy as np

    if expected.shape != actual.shape:
        return f"has shape {actual.shape}, not {expected.shape}"
    if expected.dtype != actual.dtype:
        return f"has dtype {actual.dtype}, not {expected.dtype}"
    tolerance = _TOLERANCE.get(expected.dtype.name)
    if tolerance is None and expected.dtype.kind != "V" and "float" not in expected.dtype.name:
        wrong = int((expected != actual).sum())
        return f"differs in {wrong} of {expected.size} elements" if wrong else ""
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    x, y = expected.astype(wide), actual.astype(wide)
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any() or (np.isnan(x) != np.isnan(y)).any():
        return "is infinite or NaN at other places"
    if not finite.any():
        return ""
    largest = max(float(np.abs(x[finite]).max()), 1e-30)
    worst = float(np.abs(x[finite] - y[finite]).max())
    allowed = (tolerance or 0.3) * largest
    return "" if worst <= max(allowed, 1e-6) else f"differs by {worst:.2g} of {largest:.2g}"


def _is_open(
    program: Program, run: Callable[..., Outcome], path: str, expected: Any, actual: Any
) -> bool:
    """Returns whether several results are correct, or the last bits of inputs decide.

    A compiler that fuses operations rounds differently than single operations do, which can turn
    `exp(x - max(x))` into NaN where x is large: both are valid outputs of the model.
    """
    import numpy as np

    stepwise = _by_path(*run(0.0, compiled=False)).get(path)
    if stepwise is not None and not _problem(stepwise, actual):
        return True
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    dtypes = {d for call in program.graph.walk() for d, _ in call.result if "float" in d}
    off = max((_ROUNDING.get(d, 1e-6) for d in dtypes), default=1e-6)
    shaken = _by_path(*run(off))[path]
    if not _problem(expected, shaken):
        return False
    if expected.dtype.kind in "iub":
        return bool((expected != shaken).sum() * 4 >= (expected != actual).sum())
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    x, y, z = (array.astype(wide) for array in (expected, actual, shaken))
    finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    if not finite.any():
        return True
    x, y, z = x[finite], y[finite], z[finite]
    return bool(np.abs(x - y).max() <= 10 * np.abs(x - z).max())


def _with_other_vectors(program: Program, run: Callable[..., Outcome], path: str) -> Any | None:
    """Returns the result with other signs of the computed vectors, or None."""
    if _AMBIGUOUS.isdisjoint(op.rpartition("::")[2] for op in program.ops()):
        return None
    return _by_path(*run(0.0, turned=True))[path]


def _show(sizes: Mapping[str, int]) -> str:
    return "inputs with " + ", ".join(f"{name} = {size}" for name, size in sizes.items())


class _Places:
    """The variable sizes of a call, and where they occur.

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
        from fmapper.programs import bind

        return bind.bind(self._program, *self._examples, sparing=True)

    def others(self) -> Iterator[dict[str, int]]:
        """Yields other sizes that the program allows: larger ones and multiples in turns."""
        turns = itertools.zip_longest(self._sums(), self._multiples())
        candidates = (sizes for turn in turns for sizes in turn if sizes is not None)
        return (sizes for sizes in candidates if sizes != self._sizes and self._fit(sizes))

    def _sums(self) -> Iterator[dict[str, int]]:
        names = list(self._sizes)
        steps = (1, 2, 3, -1, 4, 5, -2, 6, 8, 7, 12, 16)
        tries = itertools.product(range(len(steps)), repeat=min(len(names), 4))
        for chosen in sorted(tries, key=sum)[: _MOST_TRIES if names else 0]:
            yield {
                name: self._sizes[name] + steps[(chosen[i % len(chosen)] + i) % len(steps)]
                for i, name in enumerate(names)
            }

    def _multiples(self) -> Iterator[dict[str, int]]:
        """Yields multiples of all sizes, then of some of them."""
        names = list(self._sizes)
        for count in range(len(names), 0, -1):
            for some in itertools.islice(itertools.combinations(names, count), _MOST_TRIES):
                for up, down, more in ((2, 1, 0), (3, 1, 0), (1, 2, 0), (1, 1, 1)):
                    yield {
                        name: size * up // down + more if name in some else size
                        for name, size in self._sizes.items()
                    }

    def _fit(self, sizes: dict[str, int]) -> bool:
        for name, size in sizes.items():
            low, high = self._program.symbols.get(name, (None, None))
            if size < max(low or 1, 1) or (high is not None and size > high):
                return False
        for shape in self._shapes:
            if any((size_of(n, sizes) or 0) < 1 for n in shape if isinstance(n, str)):
                return False
        return not self._program.size_problem(dict(sizes))

    def resize(self, sizes: Mapping[str, int]) -> Call:
        """Returns the examples at other sizes, with elements repeated or dropped."""
        import numpy as np

        copies: dict[int, Any] = {}
        for leaf, shape in zip(self._leaves(), self._shapes, strict=False):
            resized = leaf
            for axis, size in enumerate(shape):
                if isinstance(size, str) and leaf is not None:
                    wanted = size_of(size, sizes) or 1
                    at = np.arange(wanted) % leaf.shape[axis]
                    resized = resized[(*(slice(None),) * axis, at)]
            if resized is not leaf:
                copies[id(leaf)] = resized
        examples: Call = fmap(lambda x: copies.get(id(x), x), self._examples)
        return examples
