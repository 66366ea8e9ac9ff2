"""Fuzzes a conversion: draws random programs, judges each, cuts those that fail to a minimum.

A program is a few inputs and some steps, each one expression of Python. A `Direction` says which
steps there are and compares the two frameworks; all else is here. Each program has a seed of its
own, so that one is drawn again alone:

    python tests/fuzz_jax_to_torch.py --minutes 60
    python tests/fuzz_jax_to_torch.py --only 7:123
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
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

    def source(self) -> str:
        """A function `program` of the inputs as Python; it returns what no step uses."""
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
        first = len(self.inputs) if self.steps else 0
        results = [name for i, name in enumerate(names) if i >= first and i not in used]
        return "\n".join([*lines, f"    return ({', '.join(results)},)"])

    def function(self, names: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
        """The function; `names` are those that the steps use, as `jnp`."""
        space = dict(names)
        exec(compile(self.source(), "<program>", "exec"), space)
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
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    values.append(eval(text, {**direction.names, **own}))
            except Exception:  # what the source framework refuses is no step
                continue
            steps.append(step)
            break
    return Program(inputs, tuple(steps), seed)


def judged(direction: Direction, program: Program, seconds: float = 60.0) -> Finding | None:
    """Judges a program; one that takes longer is a finding as well."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return direction.judge(program)
    except TimeoutError as error:
        return Finding("error", str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
        refused: Why conversions were refused, and how often.
        found: The first reproduction of each finding, by what it is, and how many there were.
    """

    programs: int = 0
    steps: int = 0
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    found: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def text(self) -> str:
        """The report in words."""
        lines = [
            f"{self.programs} programs of {self.steps} steps: {len(self.found)} findings, "
            f"{self.refused.total()} refused"
        ]
        lines += [f"  refused {n} times: {why}" for why, n in self.refused.most_common(20)]
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
            report.refused[finding.text.splitlines()[0][:200]] += 1
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
    parser.add_argument("--programs", type=int, default=10**9, help="how many at most")
    parser.add_argument("--only", default="", help="seeds of single programs, as 7:123,7:140")
    parser.add_argument("--out", default="", help="a file for the report; beside it what runs now")
    options = parser.parse_args(arguments)
    faulthandler.enable(sys.__stderr__)
    seeds = iter(options.only.split(",")) if options.only else (
        f"{options.seed}:{n}" for n in range(options.programs)
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
