"""Fuzzes a conversion: draws random programs, judges each, cuts those that fail to a minimum.

A program is a few inputs and some steps, each one expression of Python. A `Direction` says which
steps there are and compares the two frameworks; all else is here. Each program has a seed of its
own, so that one is drawn again alone:

    PYTHONPATH=tests python -m sweeps.fuzz_jax_to_torch --minutes 60
    PYTHONPATH=tests python -m sweeps.fuzz_jax_to_torch --only 7:123
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import math
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

TRIES = 20  # how often a step is drawn that does not run before there is one less
REST = 300  # programs between two times that the frameworks forget what they have compiled
CUTS = 400  # how many smaller programs are tried for one that fails
STEP = 10.0  # seconds that the source framework has for a step that is drawn
ROUNDED = re.compile(
    "exp|log|sqrt|sin|cos|tan|pow|div|sig|soft|mean|var|std|norm|hypot|elu|silu|fft|erf|gamma|i0"
)  # steps whose results are rounded, also where double precision gives the same number
SAMPLES = 6  # how often a program is disturbed to see what rounding does to its results

# Few, so that little is compiled.
SHAPES = ((), (1,), (3,), (4,), (2, 3), (3, 3), (3, 2), (1, 3), (2, 1, 3), (4, 4), (0,), (0, 3))
ODD = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-3, 300.0, 1e20)
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53,
            "complex64": 2.0**-24, "complex128": 2.0**-53}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """One expression, or a statement that changes a value in place.

    Attributes:
        text: Python, where `{0}`, `{1}`, ... stand for the operands, as in `jnp.add({0}, {1})`.
        operands: Which values: the inputs come first, then the result of each step.
        name: What it is reported as.
    """

    text: str
    operands: tuple[int, ...]
    name: str = ""

    def called(self) -> str:
        """The name of the operation: the one given, or the first one in the text."""
        return self.name or next(iter(re.findall(r"[\w.]+(?=\()", self.text)), self.text)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is converted.

    Attributes:
        inputs: Arrays of NumPy, of the dtypes of `ml_dtypes` where NumPy has none.
        steps: In order; each gives one value.
        seed: From which it was drawn.
    """

    inputs: tuple[Any, ...]
    steps: tuple[Step, ...]
    seed: str = ""

    def source(self, *, after: bool = False) -> str:
        """A function `program` of the inputs as Python; it returns what no step uses.

        With `after` a function of this name is given each result, and gives another one for it.
        """
        names = [f"x{i}" for i in range(len(self.inputs))]
        lines = [f"def program({', '.join(names)}):"]
        used: set[int] = set()
        for i, step in enumerate(self.steps):
            names.append(f"y{i}")
            used.update(step.operands)
            text = step.text
            for place, operand in enumerate(step.operands):
                text = text.replace(f"{{{place}}}", names[operand])
            lines.append(f"    y{i} = {text}")
            if after:
                lines.append(f"    y{i} = after({i}, y{i})")
        first = len(self.inputs) if self.steps else 0
        results = [name for i, name in enumerate(names) if i >= first and i not in used]
        return "\n".join([*lines, f"    return ({', '.join(results)},)"])

    def function(
        self, names: dict[str, Any], after: Callable[[int, Any], Any] | None = None
    ) -> Callable[..., tuple[Any, ...]]:
        """The function; `names` are those that the steps use, as `jnp`.

        Args:
            names: What the steps use.
            after: Is given the number and the result of each step, and gives another one for it.
        """
        space = {**names, "after": after}
        source = self.source(after=after is not None)
        exec(compile(source, "<program>", "exec"), space)
        made: Callable[..., tuple[Any, ...]] = space["program"]
        return made


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a program.

    Attributes:
        kind: `value`, `dtype`, `shape`, `gradient` or `error`; `refused` is counted and is right.
        text: What was given and what was wanted.
    """

    kind: str
    text: str


class Direction(Protocol):
    """From one framework to the other."""

    title: str
    names: dict[str, Any]  # what the steps use: {"jnp": jax.numpy}

    def inputs(self, rng: random.Random) -> list[Any]:
        """Draws the inputs of a program, as arrays of NumPy."""

    def load(self, values: Any) -> Any:
        """Makes an array of the source framework of one of NumPy."""

    def step(self, rng: random.Random, values: Sequence[Any]) -> Step:
        """Draws a step for the values so far, arrays of the source framework."""

    def promised(self, step: Step, operands: Sequence[Any], value: Any) -> bool:
        """Whether the source framework gives this value of a step wherever it is computed."""

    def judge(self, program: Program) -> Finding | None:
        """Compares both frameworks; None where they agree. It raises only where the source does."""

    def write(self, values: Any) -> str:
        """Writes an input as Python."""

    def rest(self) -> None:
        """Frees what the frameworks keep of past programs."""


def draw(direction: Direction, seed: str) -> Program:
    """Draws the program of a seed: 1 to 3 inputs and 3 to 15 steps."""
    rng = random.Random(seed)
    inputs = tuple(direction.inputs(rng))
    values = [direction.load(x) for x in inputs]
    steps: list[Step] = []
    for _ in range(rng.randint(3, 15)):
        for _ in range(TRIES):
            step = direction.step(rng, values)
            own = {f"v{i}": values[at] for i, at in enumerate(step.operands)}
            text = re.sub(r"\{(\d+)\}", r"v\1", step.text)
            try:
                with warnings.catch_warnings(), limit(STEP):
                    warnings.simplefilter("ignore")
                    value = eval(text, {**direction.names, **own})
                    if not direction.promised(step, list(own.values()), value):
                        continue
            except Exception:  # what the source framework refuses, or is slow at, is no step
                continue
            values.append(value)
            steps.append(step)
            break
    return Program(inputs, tuple(steps), seed)


def draw_inputs(rng: random.Random, dtypes: Sequence[str]) -> list[Any]:
    """Draws one to three arrays of NumPy, some of them of the same shape."""
    shapes = [rng.choice(SHAPES)]
    for _ in range(rng.randint(0, 2)):
        shapes.append(rng.choice([shapes[0], rng.choice(SHAPES), shapes[0][1:]]))
    return [draw_values(rng, shape, rng.choice(dtypes)) for shape in shapes]


def draw_values(rng: random.Random, shape: tuple[int, ...], dtype: str) -> Any:
    """Draws an array: small numbers, and now and then the ends of the range, NaN and infinities."""
    count = math.prod(shape)
    if dtype == "bool":
        flat: list[Any] = [rng.random() < 0.5 for _ in range(count)]
    elif "int" in dtype:
        span = np.iinfo(dtype)
        edges = [int(span.min), int(span.max), 0, 1]
        flat = [rng.choice(edges) if rng.random() < 0.1 else max(rng.randint(-4, 9), int(span.min))
                for _ in range(count)]  # fmt: skip
    else:
        odd = rng.random() < 0.25
        flat = [rng.choice(ODD) if odd and rng.random() < 0.25 else round(rng.gauss(0, 2), 3)
                for _ in range(count)]  # fmt: skip
        if dtype == "complex64":
            flat = [complex(x, round(rng.gauss(0, 2), 3)) for x in flat]
    with np.errstate(all="ignore"):
        return np.asarray(np.array(flat).reshape(shape)).astype(np.dtype(dtype))


def literal(values: Any, module: str) -> str:
    """The elements of an array as Python, with the NaN and infinities of a module."""
    kind = np.asarray(values).dtype
    if kind.kind not in "biu":  # the halves of ml_dtypes are of kind V or f
        kind = np.dtype(complex if kind.kind == "c" else float)
    text = repr(np.asarray(values).astype(kind).tolist())
    return text.replace("nan", f"{module}.nan").replace("inf", f"{module}.inf")


def wrong_kind(dtypes: tuple[str, str], shapes: tuple[Any, Any]) -> Finding | None:
    """What is wrong with a result before its elements are looked at.

    Args:
        dtypes: The names of the one that came and of the one that is wanted.
        shapes: Likewise.
    """
    got, want = map(tuple, shapes)
    if dtypes[0] != dtypes[1]:
        return Finding("dtype", f"{dtypes[0]} for {dtypes[1]}")
    return Finding("shape", f"{got} for {want}") if got != want else None


def widest(values: Any) -> Any:
    """Floats in double precision; other arrays as they are."""
    name = values.dtype.name
    if name not in ROUNDING:
        return values
    return values.astype(np.complex128 if name.startswith("complex") else np.float64)


def difference(got: Any, want: Any, allowed: Any = 0.0, excused: Any = False) -> str:
    """Where an array is not another one; empty if it is.

    Which part of a complex number is NaN where the other one is infinite depends on how a product
    is taken, and counts as the same.

    Args:
        got: An array of NumPy.
        want: Likewise.
        allowed: How far finite elements may be apart, for all or for each.
        excused: Which elements do not count.
    """
    x, y = widest(got), widest(want)
    same = (x == y) | excused
    if want.dtype.name in ROUNDING:
        with np.errstate(all="ignore"):
            finite = np.isfinite(x) & np.isfinite(y)
            same |= (np.isnan(x) & np.isnan(y)) | ((np.abs(x - y) <= allowed) & finite)
            if x.dtype.kind == "c":
                same |= ~np.isfinite(x) & ~np.isfinite(y)
    if same.all():
        return ""
    at = tuple(int(i) for i in np.unravel_index(np.argmin(same), same.shape))
    return f"{int((~same).sum())} of {same.size} elements, as {x[at]!r} for {y[at]!r} at {at}"


def disturbances(sample: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Factors as near to 1 as rounding to a dtype is: all up, all down, or at random."""
    if sample < 2:
        signs = np.full(shape, 1.0 - 2.0 * sample)
    else:
        signs = np.random.default_rng(sample).uniform(-1, 1, shape)
    return 1 + ROUNDING[dtype] * signs


def spread(results: Sequence[Any], exact: Any) -> Any:
    """How far disturbed results are from the exact one, for each element; 0 where not finite."""
    off = np.zeros(exact.shape)
    with np.errstate(all="ignore"):
        for one in results:
            if one.shape == exact.shape:
                apart = np.abs(widest(one) - widest(exact))
                off = np.maximum(off, np.where(np.isfinite(apart), apart, 0))
    return off


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in what takes longer; limits are not nested."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judged(direction: Direction, program: Program, seconds: float = 60.0) -> Finding | None:
    """Judges a program; one that takes longer is a finding as well."""
    try:
        with limit(seconds):
            return direction.judge(program)
    except TimeoutError as error:
        return Finding("error", str(error))


def shrink(direction: Direction, program: Program, finding: Finding) -> tuple[Program, Finding]:
    """Cuts a program that fails for as long as what is left fails in the same way."""
    left = CUTS
    while left > 0:
        for smaller in _smaller(program):
            left -= 1
            try:
                found = judged(direction, smaller)
            except Exception:  # the source framework refuses it
                found = None
            if found is not None and found.kind == finding.kind:
                program, finding = smaller, found
                break
            if left <= 0:
                break
        else:
            break
    return program, finding


def _smaller(program: Program) -> Iterator[Program]:
    count = len(program.inputs)
    for i in reversed(range(len(program.steps))):
        place = count + i
        for other in dict.fromkeys((*program.steps[i].operands, *range(count))):
            steps = [
                dataclasses.replace(step, operands=_moved(step.operands, place, other))
                for step in program.steps
            ]
            yield dataclasses.replace(program, steps=(*steps[:i], *steps[i + 1 :]))
            if not any(place in step.operands for step in program.steps):
                break
    used = {at for step in program.steps for at in step.operands}
    for i in range(count):
        if i not in used and count > 1:
            steps = [
                dataclasses.replace(step, operands=_moved(step.operands, i, 0))
                for step in program.steps
            ]
            inputs = (*program.inputs[:i], *program.inputs[i + 1 :])
            yield dataclasses.replace(program, inputs=inputs, steps=tuple(steps))
    for i, values in enumerate(program.inputs):
        for simpler in _simpler(values):
            inputs = (*program.inputs[:i], simpler, *program.inputs[i + 1 :])
            yield dataclasses.replace(program, inputs=inputs)


def _moved(operands: tuple[int, ...], place: int, other: int) -> tuple[int, ...]:
    """Positions after a value is gone and another one stands for it."""
    found = (other if at == place else at for at in operands)
    return tuple(at - 1 if at > place else at for at in found)


def _simpler(values: Any) -> Iterator[Any]:
    """Arrays with more elements of one, fewer first."""
    flat = np.asarray(values).reshape(-1)
    odd = [i for i in range(flat.size) if flat[i] != flat.dtype.type(1)]
    for part in (odd, *([i] for i in odd[:12])) if len(odd) > 1 else (odd,):
        if part:
            made = flat.copy()
            made[part] = 1
            yield made.reshape(np.shape(values))


def reproduction(direction: Direction, program: Program, finding: Finding) -> str:
    """What a program is, what is wrong with it, and how it is drawn again."""
    inputs = [f"x{i} = {direction.write(x)}" for i, x in enumerate(program.inputs)]
    lines = [f"# {direction.title}, seed {program.seed}: {finding.kind}", *inputs]
    lines += [program.source(), *(f"# {line}" for line in finding.text.splitlines())]
    return "\n".join(lines)


@dataclasses.dataclass
class Report:
    """What a run found.

    Attributes:
        programs: How many were judged.
        steps: How many steps they had in all.
        refused: Why conversions were refused, and the seed of each program.
        found: The first reproduction of each finding, by what it is, and how many there were.
    """

    programs: int = 0
    steps: int = 0
    refused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    found: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def text(self) -> str:
        """The report in words."""
        lines = [
            f"{self.programs} programs of {self.steps} steps: {len(self.found)} findings, "
            f"{sum(map(len, self.refused.values()))} refused"
        ]
        often = sorted(self.refused.items(), key=lambda item: -len(item[1]))[:20]
        lines += [f"  refused {len(seeds)} times, as {seeds[0]}: {why}" for why, seeds in often]
        for what, shown in self.found.items():
            lines += ["", f"## {what}, {self.counts[what]} times", shown]
        return "\n".join(lines)


def fuzz(
    direction: Direction,
    seeds: Sequence[str] | Iterator[str],
    *,
    seconds: float = 1e9,
    show: Callable[[str], None] = lambda text: None,
    now: Path | None = None,
) -> Report:
    """Draws and judges the programs of seeds until the time is over.

    Args:
        direction: What is fuzzed.
        seeds: One a program.
        seconds: After which no other program begins.
        show: Is given each finding when it is new.
        now: A file that has the seed of the program that runs: what kills the process is known.
    """
    report, end = Report(), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end:
            break
        if now is not None:
            now.write_text(seed)
        program = draw(direction, seed)
        finding = judged(direction, program)
        report.programs += 1
        report.steps += len(program.steps)
        if report.programs % REST == 0:
            direction.rest()
        if finding is None:
            continue
        if finding.kind == "refused":
            report.refused.setdefault(finding.text.splitlines()[0][:200], []).append(seed)
            continue
        program, finding = shrink(direction, program, finding)
        what = f"{finding.kind}: {', '.join(step.called() for step in program.steps)}"
        report.counts[what] += 1
        if what not in report.found:
            report.found[what] = reproduction(direction, program, finding)
            show(report.found[what])
    return report


def main(direction: Direction, arguments: Sequence[str] | None = None) -> int:
    """Runs a direction from the command line; the exit code is 1 where something was found."""
    parser = argparse.ArgumentParser(description=f"Fuzzes the conversion {direction.title}.")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the run")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long it draws programs")
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, default=10**9, help="how many at most")
    parser.add_argument("--only", default="", help="seeds of single programs, as 7:123,7:140")
    parser.add_argument("--out", default="", help="a file for the report; beside it what runs now")
    options = parser.parse_args(arguments)
    faulthandler.enable(sys.__stderr__)
    seeds = iter(options.only.split(",")) if options.only else (
        f"{options.seed}:{options.start + n}" for n in range(options.programs)
    )  # fmt: skip
    print(f"{direction.title}, seed {options.seed}", flush=True)
    out = Path(options.out) if options.out else None
    report = fuzz(
        direction,
        seeds,
        seconds=60 * options.minutes,
        show=lambda text: print(f"\n{text}", flush=True),
        now=out.with_suffix(".now") if out else None,
    )
    print(f"\n{report.text()}")
    if out:
        out.write_text(report.text())
    return 1 if report.found else 0
