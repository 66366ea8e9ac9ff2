"""How fast is `fmapper.fmap`, ties kept, beside the tree maps of other libraries, which keep none?

    python benchmarks/walk.py [--rounds 31] [--case NAME ...] [--json FILE]

All walkers of a case run interleaved in one process. `x optree` is the median, over the rounds, of
a row's time divided by that of optree's row of the same kind in the same round. The bar is 1.0 for
`fmapper.fmap`; the exit status is 1 where it is missed. "Ties kept" is found out by walking a tree
in which a leaf and a node occur twice, with an `f` that copies.

The trees, and how each library is told about their classes, are in `_models.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from _interleave import interleave, paired
from _models import (
    NAMESPACE,
    WRITTEN_OUT,
    Tree,
    as_dicts,
    is_array,
    make_chain,
    make_flat,
    make_gpt,
    make_module,
    tied_chain,
    tied_flat,
    tied_gpt,
    tied_module,
)
from _report import machine, plain

Map = Callable[..., Tree]  # map(f, *trees)

OURS: Final = "fmapper.fmap"
BAR: Final = "optree.tree_map"
LINEAR: Final = 10.0  # a leaf in a tree 100 times larger: memory costs 2 to 5, a square 100
PACKAGES: Final = (
    "fmapper",
    "numpy",
    "optree",
    "jax",
    "torch",
    "lightning-utilities",
    "accelerate",
    "thinc",
)


class Absent(Exception):
    """A walker that cannot take part in a case, and why."""


# --- the walkers ---------------------------------------------------------------------------------


def identity(leaf: Any) -> Any:
    """Return the leaf of the only tree."""
    return leaf


def first(leaf: Any, other: Any) -> Any:
    """Return the leaf of the first of two trees."""
    return leaf


def after_path(path: Any, leaf: Any) -> Any:
    """Return the leaf that comes with a path."""
    return leaf


@dataclass(frozen=True)
class Walker:
    """One way to map `f` over a tree."""

    name: str
    module: str
    bind: Callable[[Any], Map]  # module -> map
    flavour: str = "plain"  # whose registry must know the classes of the tree
    f: Callable[..., Any] = identity
    trees: int = 1
    against: str = BAR  # the row that the ratio is taken to
    in_place: bool = False
    namespaced: bool = False

    def load(self, *, for_classes: bool = False) -> Map:
        """Import the library and return its map."""
        try:
            module = import_module(self.module)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError)
            raise Absent("not installed" if missing else f"import fails: {error}") from error
        tree_map = self.bind(module)
        # a namespace costs optree 10 to 30 % on builtin containers, which do not need one
        return (
            partial(tree_map, namespace=NAMESPACE) if self.namespaced and for_classes else tree_map
        )


def optree_walker(
    name: str, function: str = "tree_map", flavour: str = "optree", **options: Any
) -> Walker:
    """Return one of optree's maps."""
    return Walker(name, "optree", attrgetter(function), flavour, namespaced=True, **options)


TWO: Final = f"{BAR}, two trees"
PATH: Final = "optree.tree_map_with_path"

WALKERS: Final = (
    Walker(OURS, "fmapper", attrgetter("fmap"), "fmapper"),
    optree_walker(BAR),
    optree_walker(WRITTEN_OUT, flavour=WRITTEN_OUT),
    Walker("jax.tree.map", "jax", attrgetter("tree.map"), "jax"),
    Walker("torch _pytree.tree_map", "torch.utils._pytree", attrgetter("tree_map"), "torch"),
    Walker(
        "torch _cxx_pytree.tree_map", "torch.utils._cxx_pytree", attrgetter("tree_map"), "torch"
    ),
    Walker(
        "lightning apply_to_collection",
        "lightning_utilities.core.apply_func",
        lambda module: lambda f, tree: module.apply_to_collection(tree, np.ndarray, f),
    ),
    Walker(
        "accelerate recursively_apply",
        "accelerate.utils",
        lambda module: partial(module.recursively_apply, test_type=is_array),
    ),
    Walker(
        "thinc convert_recursive",
        "thinc.util",
        lambda module: partial(module.convert_recursive, is_array),
    ),
    Walker(f"{OURS}, two trees", "fmapper", attrgetter("fmap"), "fmapper", first, 2, against=TWO),
    optree_walker(TWO, f=first, trees=2, against=TWO),
    Walker(
        "fmapper.fmap_with_path",
        "fmapper",
        attrgetter("fmap_with_path"),
        "fmapper",
        after_path,
        against=PATH,
    ),
    optree_walker(PATH, PATH.removeprefix("optree."), f=after_path, against=PATH),
)

MODULE_WALKERS: Final = (
    Walker(OURS, "fmapper", attrgetter("fmap")),
    optree_walker(BAR),
    Walker(
        f"{BAR}, parameters only",  # no module is made
        "optree",
        lambda optree: lambda f, module: optree.tree_map(f, dict(module.named_parameters())),
    ),
    Walker(
        "Module._apply", "torch", lambda torch: lambda f, module: module._apply(f), in_place=True
    ),
    Walker(
        "Module.to('cpu')", "torch", lambda torch: lambda f, module: module.to("cpu"), in_place=True
    ),
)


# --- the cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One tree, and the walkers that compete on it."""

    name: str
    title: str
    make: Callable[[str], Tree]  # flavour -> tree
    tied: Callable[[str], Tree]
    walkers: tuple[Walker, ...] = WALKERS
    has_classes: bool = False

    def runners(self) -> tuple[Walker, ...]:
        """Return the walkers; without classes there is nothing to write out."""
        return tuple(w for w in self.walkers if self.has_classes or "written out" not in w.name)


CASES: Final = (
    Case("flat", "a flat dict of 10 000 small arrays", make_flat, tied_flat),
    Case(
        "chain-dict",
        "a chain of 300 nested dicts",
        partial(make_chain, "dict"),
        partial(tied_chain, "dict"),
    ),
    Case(
        "chain-list",
        "a chain of 300 nested lists",
        partial(make_chain, "list"),
        partial(tied_chain, "list"),
    ),
    Case(
        "chain-class",
        "a chain of 300 nested objects of a plain class",
        partial(make_chain, "class"),
        partial(tied_chain, "class"),
        has_classes=True,
    ),
    Case("gpt2", "GPT-2 as 148 dataclass nodes", make_gpt, tied_gpt, has_classes=True),
    Case(
        "gpt2-dict",
        "the same GPT-2 as nested dicts",
        lambda flavour: as_dicts(make_gpt("plain")),
        lambda flavour: as_dicts(tied_gpt("plain")),
    ),
    Case(
        "module",
        "a torch module: 150 Linear in 15 blocks, 300 parameters",
        make_module,
        tied_module,
        MODULE_WALKERS,
        has_classes=True,
    ),
)


# --- what came out -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Census:
    """What a tree consists of."""

    places: int  # of leaves: a leaf counts once for every path to it
    leaves: int  # distinct
    nodes: int  # distinct


def census(tree: Tree) -> Census:
    """Count the leaves and nodes of an acyclic tree without the help of any library."""
    places, leaves, nodes = 0, set(), set()
    stack = [tree]
    while stack:
        x = stack.pop()
        if is_array(x) or hasattr(x, "detach"):
            places += 1
            leaves.add(id(x))
        elif (children := _children(x)) is not None:
            nodes.add(id(x))
            stack.extend(children)
    return Census(places, len(leaves), len(nodes))


def _children(x: Any) -> list[Any] | None:
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, list):
        return x
    if hasattr(x, "_parameters"):  # a torch module
        tables = (x._parameters, x._buffers, x._modules)
        return [child for table in tables for child in table.values()]
    return list(vars(x).values()) if hasattr(x, "__dict__") else None


def kept_ties(case: Case, walker: Walker, tree_map: Map) -> str:
    """Map a copying `f` over a tree with ties, and say which of them the result still has."""

    def copied(*args: Any) -> Any:
        leaf = walker.f(*args)
        if leaf is None:  # a leaf for torch
            return None
        return leaf.copy() if is_array(leaf) else leaf.detach().clone()

    tree = case.tied(walker.flavour)
    before = census(tree)
    out = tree_map(copied, *[tree] * walker.trees)
    after = census(out)
    if after.places < before.places:
        return "each tie at one place only"
    kept = [
        name
        for name, is_kept in (
            ("leaves", after.leaves == before.leaves),
            ("nodes", after.nodes == before.nodes),
        )
        if is_kept
    ]
    return " + ".join(kept) or "none"


@dataclass
class Row:
    """One line of a table: a walker on a case. Times in microseconds, ratios paired."""

    walker: str
    absent: str | None = None  # why it does not take part
    us: float = math.nan
    ns_per_leaf: float = math.nan
    ratio: float = math.nan  # to optree's row of the same kind
    ratio_q1: float = math.nan
    ratio_q3: float = math.nan
    ties: str = ""


def enter(case: Case, walker: Walker) -> tuple[Callable[[], Tree], str]:
    """Build a walker's trees, see that it maps every leaf, find out which ties it keeps."""
    tree_map = walker.load(for_classes=case.has_classes)
    try:
        trees = [case.make(walker.flavour) for _ in range(walker.trees)]
        out = tree_map(walker.f, *trees)
        if out is trees[0] and not walker.in_place:
            raise Absent("takes these objects for leaves")
        if (found := census(out).places) != (wanted := census(trees[0]).places):
            raise Absent(f"maps {found} of {wanted} leaves")
        ties = kept_ties(case, walker, tree_map)
    except Absent:
        raise
    except Exception as error:  # a walker that fails is a line of the table
        raise Absent(f"fails: {type(error).__name__}: {error}"[:160]) from error
    return partial(tree_map, walker.f, *trees), ties + (", in place" if walker.in_place else "")


def run_case(case: Case, rounds: int, keep_gc: bool) -> list[Row]:
    """Time all walkers of a case against each other."""
    rows = {walker.name: Row(walker.name) for walker in case.runners()}
    calls = {}
    for walker in case.runners():
        try:
            calls[walker.name], rows[walker.name].ties = enter(case, walker)
        except Absent as reason:
            rows[walker.name].absent = str(reason)
    try:
        places = census(case.make("plain")).places
    except ImportError:
        return list(rows.values())
    timings = interleave(calls, rounds, keep_gc=keep_gc)
    for walker in case.runners():
        if walker.name in timings:
            row, seconds = rows[walker.name], timings[walker.name]
            row.us = median(seconds) * 1e6
            row.ns_per_leaf = median(seconds) * 1e9 / places
            if walker.against in timings:
                row.ratio, row.ratio_q1, row.ratio_q3 = paired(seconds, timings[walker.against])
    return list(rows.values())


def verdict(rows: Sequence[Row]) -> str:
    """Hold fmap against the bar: no slower than optree.tree_map."""
    by_name = {row.walker: row for row in rows}
    ours, bar = by_name[OURS], by_name[BAR]
    if ours.absent or bar.absent:
        who = ours if ours.absent else bar
        return f"{'FAIL' if bar.absent is None else 'NO BAR'}  {who.walker} {who.absent}"
    passed = "PASS" if ours.ratio <= 1 else "FAIL"
    result = f"{passed}  {ours.ratio:.2f}x (quartiles {ours.ratio_q1:.2f} to {ours.ratio_q3:.2f})"
    best = by_name.get(WRITTEN_OUT)
    if best is not None and not best.absent:
        result += f"; {ours.us / best.us:.2f}x where the registration is written out"
    return result


@dataclass
class Growth:
    """What a leaf, or a level, costs as the tree grows."""

    walker: str
    title: str
    ns: dict[int, float] = field(default_factory=dict)  # size -> per leaf or level
    failure: str | None = None

    @property
    def factor(self) -> float:
        """Return the cost in the largest tree by that in the smallest."""
        return self.ns[max(self.ns)] / self.ns[min(self.ns)]

    @property
    def verdict(self) -> str:
        """Hold the growth against a straight line."""
        if self.failure:
            return f"FAIL  {self.failure}"
        passed = "PASS" if self.factor <= LINEAR else "FAIL"
        return f"{passed}  {self.factor:.2f}x the cost at 100x the size"


FLAT_SIZES: Final = (10_000, 100_000, 1_000_000)
CHAIN_SIZES: Final = (1_000, 10_000, 100_000)


def run_growth(rounds: int, keep_gc: bool) -> list[Growth]:
    """Time ever larger trees; optree.tree_map shows what the machine's memory costs by itself."""
    fmapper, bar = WALKERS[:2]
    flat = partial(make_flat, "plain")
    chain = partial(make_chain, "dict", "plain")
    grow = partial(_grow, rounds=rounds, keep_gc=keep_gc)
    return [
        *grow("leaf of a flat dict", flat, FLAT_SIZES, (fmapper, bar)),
        *grow("level of a chain of dicts", chain, CHAIN_SIZES, (fmapper,)),
    ]


def _grow(
    title: str,
    make: Callable[[int], Tree],
    sizes: Sequence[int],
    walkers: Sequence[Walker],
    **timing: Any,
) -> list[Growth]:
    """Time the walkers on one kind of tree, until they fail."""
    growths = {walker.name: Growth(walker.name, title) for walker in walkers}
    for size in sizes:
        tree = make(size)
        calls = {}
        for walker in walkers:
            growth = growths[walker.name]
            if growth.failure:
                continue
            try:
                call = partial(walker.load(), walker.f, tree)
                if (found := census(call()).places) != size:
                    growth.failure = f"maps {found} of {size} leaves"
                else:
                    calls[walker.name] = call
            except Exception as error:  # also a line of the table
                growth.failure = f"size {size:,}: {type(error).__name__}: {error}"[:160]
        for name, seconds in interleave(calls, **timing).items():
            growths[name].ns[size] = median(seconds) * 1e9 / size
    return list(growths.values())


# --- printing ------------------------------------------------------------------------------------


def print_rows(case: Case, rows: Sequence[Row]) -> None:
    """Print the table of one case."""
    print(f"\n{case.name}: {case.title}")
    print(f"  {'walker':36} {'us':>10} {'ns/leaf':>8} {'x optree':>9}  ties kept")
    for row in rows:
        if row.absent:
            print(f"  {row.walker:36} {'-':>10} {'-':>8} {'-':>9}  ({row.absent})")
        else:
            ratio = "-" if math.isnan(row.ratio) else f"{row.ratio:.2f}"
            print(f"  {row.walker:36} {row.us:10.1f} {row.ns_per_leaf:8.0f} {ratio:>9}  {row.ties}")


def print_growth(growths: Sequence[Growth]) -> None:
    """Print the table of the growth."""
    print("\ngrowth: the cost of a leaf or a level as the tree grows")
    for growth in growths:
        steps = ", ".join(f"{size:,}: {ns:.0f} ns" for size, ns in growth.ns.items())
        print(f"  {growth.walker:20} per {growth.title:26} {steps}  ({growth.verdict})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    names = [case.name for case in CASES] + ["growth"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31, help="samples of each walker (31)")
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"which of: {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    args = parser.parse_args(argv)

    versions = machine(PACKAGES)
    print("  ".join(f"{name} {version}" for name, version in versions.items()))
    tables: dict[str, list[Row]] = {}
    verdicts: dict[str, str] = {}
    growths: list[Growth] = []
    for case in CASES:
        if case.name in args.case:
            tables[case.name] = run_case(case, args.rounds, args.gc)
            print_rows(case, tables[case.name])
            verdicts[case.name] = verdict(tables[case.name])
    if "growth" in args.case:
        growths = run_growth(min(args.rounds, 5), args.gc)
        print_growth(growths)
        verdicts |= {f"growth, {g.title}": g.verdict for g in growths if g.walker == OURS}

    print(f"\n{OURS}, ties kept, against {BAR}; the bar is 1.0; {args.rounds} rounds")
    for name, result in verdicts.items():
        print(f"  {name:34} {result}")
    if args.json:
        report = {
            "versions": versions,
            "rounds": args.rounds,
            "gc": args.gc,
            "cases": tables,
            "growth": growths,
            "verdicts": verdicts,
        }
        args.json.write_text(json.dumps(plain(report), indent=2, allow_nan=False) + "\n")
    return int(any(result.startswith("FAIL") for result in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
