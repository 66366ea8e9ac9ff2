"""How fast do leaves get from one framework to another, and what memory does that take?

    python benchmarks/leaves.py [--case NAME ...] [--direction numpy:torch ...] [--json FILE]

Ours and the obvious script run interleaved in one process. A ratio is the median, over the rounds,
of the ratio within a round. The bars, and the exit status 1 where one is missed:

    per-leaf   small leaves take fmapper at most 1.5 times the bare call of the framework in a dict
               comprehension. The bare call is the quickest of those marked `bar`: the ways to make
               arrays that share no memory which anyone can write to.
    there      what is already there comes back as the same objects.
    rate       a model of 1 GiB goes at 0.9 of the rate of `np.copyto` in one thread into memory
               that has been touched, in the same rounds, or faster. With `copy=False` the time of a
               leaf does not grow with its size.
    memory     a conversion takes the memory of its result and at most 5 % more. Each is measured
               in a process of its own.

The arrays are made in `_sources.py`, the memory is measured in `_peak.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optree
import torch
from _interleave import Call, Prepared, Timings, interleave, paired
from _report import machine, plain
from _sources import (
    GIB,
    KIB,
    MIB,
    Shape,
    Tree,
    address,
    gpt2_shapes,
    make_tree,
    numpy_dtype,
)

import fmapper

OURS: Final = "fmapper"
PACKAGES: Final = ("fmapper", "numpy", "torch", "jax", "optree")
MOVERS: Final = {
    "numpy": fmapper.to_numpy,
    "torch": fmapper.to_torch,
    "jax": fmapper.to_jax,
}
DIRECTIONS: Final = (
    ("numpy", "torch"),
    ("torch", "numpy"),
    ("numpy", "jax"),
    ("jax", "numpy"),
    ("torch", "jax"),
    ("jax", "torch"),
)

PER_LEAF: Final = 1.5  # times the bare call
OF_MEMCPY: Final = 0.9
ABOVE_RESULT: Final = 1.05
GROWTH: Final = 2.0  # of the time of a shared leaf 64 times larger, where a copy takes 64 times

# A table of small leaves, or of a large model, begins no further round after so many seconds.
LEAF_SECONDS: Final = 1.5
MODEL_SECONDS: Final = 20.0

Direction = tuple[str, str]


# --- the obvious scripts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """What people write without fmapper, for a flat dict."""

    text: str
    convert: Callable[[Tree], Tree]
    is_bar: bool = True  # counts for the bar; the others are there to compare with
    for_bfloat16: Callable[[Tree], Tree] | None = None  # where the plain one cannot

    def of(self, dtype: str) -> Callable[[Tree], Tree]:
        """Return the route for a dtype."""
        return self.for_bfloat16 or self.convert if dtype == "bfloat16" else self.convert


def array_and_wait(tree: Tree) -> Tree:
    """Copy into JAX; it may read its source later than the call returns, so wait."""
    return jax.block_until_ready({k: jnp.array(a) for k, a in tree.items()})


def put_one_by_one(tree: Tree) -> Tree:
    """Give JAX a private copy of each array: it may take that over as it is."""
    return {k: jax.device_put(a.copy()) for k, a in tree.items()}


def put_at_once(tree: Tree) -> Tree:
    """Give JAX private copies of all arrays in one call."""
    return jax.device_put({k: a.copy() for k, a in tree.items()})


BFLOAT16: Final = numpy_dtype("bfloat16")

ROUTES: Final[Mapping[Direction, Sequence[Route]]] = {
    ("numpy", "torch"): (
        Route(
            "torch.from_numpy(a.copy())",
            lambda tree: {k: torch.from_numpy(a.copy()) for k, a in tree.items()},
            for_bfloat16=lambda tree: {
                k: torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16)
                for k, a in tree.items()
            },
        ),
        Route(
            "torch.tensor(a)",
            lambda tree: {k: torch.tensor(a) for k, a in tree.items()},
            is_bar=False,
        ),
    ),
    ("torch", "numpy"): (
        Route(
            "t.detach().numpy().copy()",
            lambda tree: {k: t.detach().numpy().copy() for k, t in tree.items()},
            for_bfloat16=lambda tree: {
                k: t.detach().view(torch.int16).numpy().copy().view(BFLOAT16)
                for k, t in tree.items()
            },
        ),
    ),
    ("numpy", "jax"): (
        Route("jnp.array(a), then wait", array_and_wait),
        Route("jax.device_put(a.copy())", put_one_by_one),
        Route("jax.device_put(dict of copies)", put_at_once, is_bar=False),
    ),
    ("jax", "numpy"): (
        Route(  # read-only, and what it shows can never change
            "np.asarray(j)", lambda tree: {k: np.asarray(j) for k, j in tree.items()}
        ),
        Route("np.array(j)", lambda tree: {k: np.array(j) for k, j in tree.items()}, is_bar=False),
    ),
    ("torch", "jax"): (
        Route(
            "jax.dlpack.from_dlpack(t.clone())",
            lambda tree: {k: jax.dlpack.from_dlpack(t.clone()) for k, t in tree.items()},
        ),
    ),
    ("jax", "torch"): (
        Route(
            "torch.from_dlpack(j).clone()",
            lambda tree: {k: torch.from_dlpack(j).clone() for k, j in tree.items()},
        ),
    ),
}


# --- what came out -------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of a table."""

    table: str
    name: str
    figures: dict[str, float | str]


@dataclass
class Verdict:
    """A bar, and whether it was met."""

    bar: str
    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.text}"


@dataclass
class Report:
    """The tables and bars of one section."""

    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, table: str, name: str, **figures: float | str) -> None:
        """Add a line."""
        self.rows.append(Row(table, name, figures))

    def judge(self, bar: str, passed: bool, text: str) -> None:
        """Add a bar."""
        self.verdicts.append(Verdict(bar, passed, text))


@dataclass(frozen=True)
class Options:
    """How much of everything."""

    leaves: int
    gib: float
    mib: float
    rounds: int
    directions: Sequence[Direction]

    @property
    def backends(self) -> list[str]:
        """Return the backends that the directions begin at."""
        return list(dict.fromkeys(source for source, _ in self.directions))


def arrow(direction: Direction) -> str:
    """Write a direction."""
    return " -> ".join(direction)


def spread(ours: list[float], theirs: list[float]) -> tuple[float, str]:
    """Return the median ratio, and it and its quartiles as text."""
    middle, low, high = paired(ours, theirs)
    return middle, f"{middle:.2f}x ({low:.2f} to {high:.2f})"


# --- small leaves --------------------------------------------------------------------------------

VARIANTS: Final[Sequence[tuple[str, Shape, str]]] = (
    ("16 float32", (16,), "float32"),
    ("0-d float32", (), "float32"),
    ("16 bfloat16", (16,), "bfloat16"),
)


def fresh(source: str, tree: Tree, call: Callable[[Any], object]) -> Call:
    """Return a call on a tree, or on new arrays each time where they remember their host value."""
    if source != "jax":
        return partial(call, tree)
    hosts = {k: np.asarray(j) for k, j in tree.items()}
    return Prepared(lambda: jax.device_put(hosts), call)


def see_same(direction: Direction, tree: Tree, ours: Tree, theirs: Tree) -> None:
    """See that two results are equal, and that neither shares what it must not."""
    for key, leaf in tree.items():
        found = [np.asarray(x.view(torch.uint8) if isinstance(x, torch.Tensor) and x.ndim else x)
                 for x in (ours[key], theirs[key])]  # fmt: skip
        if found[0].tobytes() != found[1].tobytes() or type(ours[key]) is not type(theirs[key]):
            raise AssertionError(f"{arrow(direction)}: fmapper made another {key}")
        if direction != ("jax", "numpy") and address(ours[key]) == address(leaf):
            raise AssertionError(f"{arrow(direction)}: {key} is not a copy")


def run_per_leaf(options: Options) -> Report:
    """Time small leaves, where the memory does not count."""
    report = Report()
    for variant, shape, dtype in VARIANTS:
        for direction in options.directions:
            source, target = direction
            table = f"{arrow(direction)}, {options.leaves} leaves of {variant}"
            tree = make_tree(source, [shape] * options.leaves, dtype)
            routes = [
                route
                for route in ROUTES[direction]
                if dtype != "bfloat16" or route.is_bar or "torch" not in target
            ]
            see_same(direction, tree, MOVERS[target](tree), routes[0].of(dtype)(tree))
            calls = {OURS: fresh(source, tree, MOVERS[target])}
            calls |= {route.text: fresh(source, tree, route.of(dtype)) for route in routes}
            timings = interleave(calls, options.rounds, budget=LEAF_SECONDS)
            ns = {name: median(s) * 1e9 / options.leaves for name, s in timings.items()}
            bar = min((r.text for r in routes if r.is_bar), key=ns.__getitem__)
            for name, seconds in timings.items():
                ratio = spread(seconds, timings[bar])[0]
                marks = "bar" if name == bar else ""
                report.add(table, name, ns_per_leaf=ns[name], x_bar=ratio, mark=marks)
            ratio, text = spread(timings[OURS], timings[bar])
            report.judge(
                f"per-leaf, {variant}, {arrow(direction)}",
                ratio <= PER_LEAF,
                f"{text} of {bar}: {ns[OURS]:.0f} ns by {ns[bar]:.0f}",
            )
    return report


# --- what is there already -----------------------------------------------------------------------


def run_there(options: Options) -> Report:
    """Time moves of what is there already."""
    report = Report()
    identity = partial(optree.tree_map, lambda leaf: leaf)
    device = jax.devices("cpu")[0]
    scripts: dict[str, dict[str, Callable[[Tree], object]]] = {
        "numpy": {"np.asarray(a)": lambda tree: {k: np.asarray(a) for k, a in tree.items()}},
        "torch": {'t.to("cpu")': lambda tree: {k: t.to("cpu") for k, t in tree.items()}},
        "jax": {"jax.device_put(tree, device)": lambda tree: jax.device_put(tree, device)},
    }
    optree_name = "optree.tree_map(identity)"
    for backend in dict.fromkeys(name for direction in options.directions for name in direction):
        tree = make_tree(backend, [(16,)] * options.leaves)
        own = f"fmapper.to_{backend}"
        movers: dict[str, Callable[[Tree], Any]] = {
            own: MOVERS[backend],
            "fmapper.to_cpu": fmapper.to_cpu,
        }
        peers: dict[str, Callable[[Tree], Any]] = {optree_name: identity, **scripts[backend]}
        same = {
            name: all(
                new is old for new, old in zip(call(tree).values(), tree.values(), strict=True)
            )
            for name, call in (movers | peers).items()
        }
        timings = interleave(
            {name: partial(call, tree) for name, call in (movers | peers).items()}, options.rounds
        )
        for name, seconds in timings.items():
            report.add(
                f"{backend}: {options.leaves} leaves that are there already",
                name,
                ns_per_leaf=median(seconds) * 1e9 / options.leaves,
                x_optree=spread(seconds, timings[optree_name])[0],
                objects="the same" if same[name] else "others",
            )
        for name in movers:
            peer = next(iter(scripts[backend]))
            report.judge(
                f"there, {backend}, {name.removeprefix('fmapper.')}",
                same[name],
                f"{'the same' if same[name] else 'other'} objects; "
                f"{spread(timings[name], timings[optree_name])[0]:.2f}x {optree_name}, "
                f"{spread(timings[name], timings[peer])[0]:.2f}x {peer}",
            )
    return report


# --- large models --------------------------------------------------------------------------------

WARM: Final = "np.copyto, touched memory"
UNTOUCHED: Final = "np.copyto, new memory"


def models(gib: float) -> dict[str, list[Shape]]:
    """Return the shapes of the models: few large leaves, a real model, many small ones."""
    size = int(gib * GIB)
    large, count = max(1, size // 16 // 4), max(1, size // (256 * KIB))
    gpt = gpt2_shapes(size)
    return {
        f"16 x {large * 4 / MIB:.3g} MiB": [(large,)] * 16,
        f"GPT-2, {len(gpt)} leaves, width {gpt[0][1]}": gpt,
        f"{count} x 256 KiB": [(64 * KIB,)] * count,
    }


@dataclass(frozen=True)
class Conversion:
    """A direction of the rates, perhaps with an option of the mover."""

    direction: Direction
    route: Route
    copy: bool | None = None

    def __str__(self) -> str:
        return arrow(self.direction) + (f", copy={self.copy}" if self.copy is not None else "")

    def ours(self, tree: Tree) -> Any:
        """Convert with fmapper; the result is complete on return."""
        mover = MOVERS[self.direction[1]]
        return jax.block_until_ready(mover(tree) if self.copy is None else mover(tree, copy=True))

    def script(self, tree: Tree) -> Any:
        """Convert with the obvious script; the result is complete on return."""
        return jax.block_until_ready(self.route.convert(tree))


def conversions(directions: Iterable[Direction]) -> list[Conversion]:
    """Return what is timed: from JAX to NumPy also as a copy, since the plain one shares."""
    found = []
    for direction in directions:
        found.append(Conversion(direction, ROUTES[direction][0]))
        if direction == ("jax", "numpy"):
            found.append(Conversion(direction, ROUTES[direction][1], copy=True))
    return found


def into_touched(tree: Tree, there: Sequence[Any]) -> None:
    """Copy into memory that has its pages."""
    for new, old in zip(there, tree.values(), strict=True):
        np.copyto(new, old)


def into_new(tree: Tree) -> list[Any]:
    """Copy into memory that gets its pages on the way."""
    made = [np.empty_like(a) for a in tree.values()]
    for new, old in zip(made, tree.values(), strict=True):
        np.copyto(new, old)
    return made


def settle(size: int) -> None:
    """Use as much memory as a result takes, in huge pages, and free it.

    A virtual machine may have given free memory back to its host, and whoever is the first to use
    it pays for that: up to twenty times the cost of a page that is there.
    """
    np.empty(size, np.uint8).fill(1)


def settled(call: Callable[[], object], size: int) -> Prepared:
    """Return a call that finds the memory for its result in order."""
    return Prepared(partial(settle, size), lambda _: call())


def run_rate(options: Options) -> Report:
    """Time large models against the memory itself, then what shares its memory."""
    report = Report()
    for model, shapes in models(options.gib).items():
        run_model(options, model, shapes, report)
    run_shared(options, report)
    return report


def run_model(options: Options, model: str, shapes: Sequence[Shape], report: Report) -> None:
    """Time one large model in every direction."""
    trees = {name: make_tree(name, shapes) for name in dict.fromkeys(["numpy", *options.backends])}
    total = sum(a.nbytes for a in trees["numpy"].values())
    size = total / GIB
    touched = [np.full_like(a, 2) for a in trees["numpy"].values()]
    bare: dict[str, Callable[[], object]] = {
        WARM: partial(into_touched, trees["numpy"], touched),
        UNTOUCHED: partial(into_new, trees["numpy"]),
    }
    wanted = conversions(options.directions)
    for conversion in wanted:
        small = make_tree(conversion.direction[0], [(16,)] * 2)
        tree = trees[conversion.direction[0]]
        for name, call in ((OURS, conversion.ours), (conversion.route.text, conversion.script)):
            call(small)  # loads and compiles what it needs
            bare[f"{conversion}, {name}"] = partial(call, tree)
    calls = {name: settled(call, total) for name, call in bare.items()}
    timings = interleave(calls, options.rounds, once=True, budget=MODEL_SECONDS)
    for name, seconds in timings.items():
        report.add(
            f"{model}, {size:.2f} GiB",
            name,
            gib_per_s=size / median(seconds),
            of_memcpy=paired(timings[WARM], seconds)[0],
            of_new=paired(timings[UNTOUCHED], seconds)[0],
        )
    for conversion in wanted:
        _judge_rate(report, f"rate, {model}, {conversion}", conversion, timings, size)


def _judge_rate(
    report: Report, bar: str, conversion: Conversion, timings: Timings, size: float
) -> None:
    ours = timings[f"{conversion}, {OURS}"]
    script = timings[f"{conversion}, {conversion.route.text}"]
    ratio, text = spread(timings[WARM], ours)
    report.judge(
        bar,
        ratio >= OF_MEMCPY,
        f"{text} of memcpy: {size / median(ours):.2f} GiB/s; "
        f"{paired(script, ours)[0]:.2f}x the rate of {conversion.route.text}",
    )


# --- shared memory -------------------------------------------------------------------------------

SHARED: Final = 16  # leaves
MUST_SHARE: Final = (("numpy", "torch"), ("torch", "numpy"), ("jax", "numpy"), ("torch", "jax"))


def sharing(direction: Direction, tensors: Sequence[Any]) -> Call:
    """Return a call that shares tensors, or arrays of another backend on the same memory.

    torch aligns to 64 bytes, without which JAX shares nothing. Arrays of JAX are new each time,
    since they remember their host value.
    """
    source, target = direction
    share = partial(MOVERS[target], copy=False)
    if source == "jax":
        return Prepared(
            lambda: {f"leaf{i}": jax.dlpack.from_dlpack(t) for i, t in enumerate(tensors)}, share
        )
    leaves = [t.numpy() for t in tensors] if source == "numpy" else tensors
    return partial(share, {f"leaf{i}": leaf for i, leaf in enumerate(leaves)})


def run_shared(options: Options, report: Report) -> None:
    """Time `copy=False` for leaves of two sizes, and see that it does share."""
    large = max(64, int(options.gib * GIB) // SHARED // 4)
    sizes = {f"{n * 4 / MIB:.3g} MiB": n for n in (max(1, large // 64), large)}
    made = {size: [torch.full((n,), 1.0) for _ in range(SHARED)] for size, n in sizes.items()}
    table = f"copy=False, {SHARED} leaves"
    calls: dict[str, Call] = {}
    refused: dict[Direction, str] = {}
    for direction in options.directions:
        for size, tensors in made.items():
            call = sharing(direction, tensors)
            try:
                out: Any = call.call(call.prepare()) if isinstance(call, Prepared) else call()
            except fmapper.CopyNeededError as error:
                refused[direction] = str(error).partition(". ")[0]
                continue
            pairs = zip(out.values(), tensors, strict=True)
            if not all(address(new) == address(old) for new, old in pairs):
                refused[direction] = "the result is a copy"
                continue
            calls[f"{arrow(direction)}, {size}"] = call
    timings = interleave(calls, options.rounds)
    for name, seconds in timings.items():
        report.add(table, name, ns_per_leaf=median(seconds) * 1e9 / SHARED)
    small, big = sizes
    for direction in options.directions:
        bar = f"copy=False, {arrow(direction)}"
        if direction in refused:
            report.add(table, f"{arrow(direction)}: {refused[direction]}")
            if direction in MUST_SHARE:
                report.judge(bar, False, refused[direction])
            continue
        by_size = [timings[f"{arrow(direction)}, {size}"] for size in (big, small)]
        ratio, text = spread(*by_size)
        ns = median(by_size[0]) * 1e9 / SHARED
        report.judge(bar, ratio <= GROWTH, f"{ns:.0f} ns a leaf of {big}, {text} that of {small}")


# --- memory --------------------------------------------------------------------------------------

CASTS: Final = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"))
AT_ONCE: Final = 2  # processes: each holds up to three times the size of the model


def peak(direction: Direction, cast: tuple[str, str], mib: float) -> dict[str, int]:
    """Convert a model in a process of its own."""
    script = Path(__file__).with_name("_peak.py")
    command = [sys.executable, str(script), *direction, *cast, str(mib)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def run_memory(options: Options) -> Report:
    """Measure the peak of the memory during conversions, with and without a cast."""
    report = Report()
    wanted = [(direction, cast) for direction in options.directions for cast in CASTS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda todo: peak(*todo, options.mib), wanted))
    for (direction, (dtype, new)), sizes in zip(wanted, found, strict=True):
        name = arrow(direction) + (f", {dtype} to {new}" if dtype != new else "")
        times = sizes["peak"] / sizes["result"]
        report.add(
            f"a model of {options.mib:g} MiB",
            name,
            peak_mib=sizes["peak"] / MIB,
            result_mib=sizes["result"] / MIB,
            x_result=times,
        )
        report.judge(
            f"memory, {name}",
            times <= ABOVE_RESULT,
            f"{times:.2f}x the result: {sizes['peak'] / MIB:.0f} MiB by "
            f"{sizes['result'] / MIB:.0f}",
        )
    return report


# --- printing ------------------------------------------------------------------------------------

SECTIONS: Final[Mapping[str, Callable[[Options], Report]]] = {
    "per-leaf": run_per_leaf,
    "there": run_there,
    "rate": run_rate,
    "memory": run_memory,
}


def shown(value: float | str) -> str:
    """Write a figure with three digits or so."""
    if isinstance(value, str) or math.isnan(value):
        return str(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def print_report(section: str, report: Report) -> None:
    """Print the tables of a section."""
    table = ""
    for row in report.rows:
        if row.table != table:
            table = row.table
            columns = "".join(f"{name.replace('_', ' '):>13}" for name in row.figures)
            print(f"\n{section}: {table}\n  {'':52}{columns}")
        figures = "".join(f"{shown(value):>13}" for value in row.figures.values())
        print(f"  {row.name:52}{figures}".rstrip())


def direction_of(text: str) -> Direction:
    """Read a direction from the command line."""
    source, _, target = text.partition(":")
    if (source, target) not in DIRECTIONS:
        known = ", ".join(map(":".join, DIRECTIONS))
        raise argparse.ArgumentTypeError(f"{text} is none of {known}")
    return source, target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    names = list(SECTIONS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"which of: {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--direction", nargs="+", type=direction_of, default=list(DIRECTIONS),
                        metavar="A:B", help="as numpy:torch (all)")  # fmt: skip
    parser.add_argument("--leaves", type=int, default=2000, help="small leaves in a tree (2000)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a large model (1)")
    parser.add_argument("--mib", type=float, default=512.0,
                        help="size of the model whose peak is measured (512)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9,
                        help="samples of each call, as far as the time allows (9)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    args = parser.parse_args(argv)
    options = Options(args.leaves, args.gib, args.mib, args.rounds, args.direction)

    versions = machine(PACKAGES)
    if hasattr(os, "getloadavg"):  # who shares the machine shares the rate of its memory
        versions["load"] = f"{os.getloadavg()[0]:.1f}"
    print("  ".join(f"{name} {version}" for name, version in versions.items()))
    reports: dict[str, Report] = {}
    for section in names:
        if section in args.case:
            reports[section] = SECTIONS[section](options)
            print_report(section, reports[section])
            sys.stdout.flush()  # the next section may take a minute

    print(f"\nthe bars: {PER_LEAF}x the bare call, the same objects, {OF_MEMCPY} of memcpy, "
          f"{ABOVE_RESULT}x the result; in brackets the quartiles of a ratio")  # fmt: skip
    verdicts = [verdict for report in reports.values() for verdict in report.verdicts]
    for verdict in verdicts:
        print(f"  {verdict.bar:58} {verdict}")
    print(f"  {sum(verdict.passed for verdict in verdicts)} of {len(verdicts)} met")
    if args.json:
        report = {"versions": versions, "options": options, "sections": reports}
        args.json.write_text(json.dumps(plain(report), indent=2, allow_nan=False) + "\n")
    return int(not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
