"""Twins that people wrote, with and without a mistake: what `verify` says of each pair.

    PYTHONPATH=tests python -m sweeps.parity [NAME ...] [--fault FAULT] [--out FILE]

The bar: each mistake is seen, and its place named; no sound pair is called different; a comparison
takes less than a minute of a processor.
"""

from __future__ import annotations

import argparse
import json
import linecache
import re
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import jax

import fmapper
import parity.stranger_pairs  # noqa: F401  (which adds to PAIRS)
from parity.pairs import PAIRS, Pair

SECONDS = 60.0  # of a processor, for a comparison


@dataclass(frozen=True)
class Result:
    """What was said of a pair.

    Attributes:
        pair: The name of the pair.
        fault: The mistake; empty for a sound pair.
        differs: Whether the two were called different.
        place: The first place where they part, as the report says it.
        located: Whether that is where the mistake is.
        seconds: Of a processor.
        report: The report as text, or an error.
    """

    pair: str
    fault: str
    differs: bool
    place: str
    located: bool
    seconds: float
    report: str

    @property
    def verdict(self) -> str:
        """One word for what was said; `right` is what it should be."""
        if self.seconds > SECONDS:
            return "slow"
        if not self.fault:
            return "FALSE ALARM" if self.differs else "right"
        if not self.differs:
            return "MISSED"
        return "right" if self.located else "MISPLACED"


def describe(first: fmapper.verification.Parting) -> str:
    """A place with the code of its lines instead of their numbers."""

    def code(found: re.Match[str]) -> str:
        return f"({linecache.getline(found[1], int(found[2])).strip()})"

    return f"{first.stage}: {re.sub(r'[(]([^ ]+):([0-9]+)[)]', code, str(first))}"


def judge(pair: Pair, fault: str) -> Result:
    """Compares a pair in each of its modes, until one differs."""
    start = time.process_time()
    differs, place, text = False, "", ""
    try:
        for train in pair.modes:
            twins = pair.make(fault)
            settings = {"gradients": True, "steps": 2, "rules": twins.rules, **twins.options}
            report = fmapper.verify(twins.a, twins.b, *twins.inputs, train=train, **settings)
            differs, text = not report, str(report)
            place = "" if report.first is None else describe(report.first)
            if differs:
                break
    except Exception:
        differs, place, text = not fault, "", traceback.format_exc(limit=-3)
    located = bool(fault and differs and re.search(pair.faults[fault], place))
    took = round(time.process_time() - start, 1)
    return Result(pair.name, fault, differs, place, located, took, text)


def table(results: list[Result]) -> str:
    """A row for each pair, and the totals."""
    lines = ["| pair | sound | faults | found | located | seconds |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(one.pair for one in results):
        of_pair = [one for one in results if one.pair == name]
        faults = [one for one in of_pair if one.fault]
        sound = ", ".join(one.verdict for one in of_pair if not one.fault)
        counts = len(faults), sum(f.differs for f in faults), sum(f.located for f in faults)
        cells = (name, sound, *counts, max(one.seconds for one in of_pair))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", str(dict(Counter(one.verdict for one in results)))])


def run(
    chosen: Callable[[Pair, str], bool],
    show: Callable[[str], object],
    results: Mapping[tuple[str, str], Result] = MappingProxyType({}),
    keep: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Judges each chosen pair, sound and with each of its faults.

    Args:
        chosen: Says whether a pair is judged with a fault.
        show: Called with a line for each that was judged.
        results: Those of an earlier run, by pair and fault, which are taken as they are.
        keep: Called with each new result.
    """
    every = [(pair, fault) for pair in PAIRS for fault in ("", *pair.faults) if chosen(pair, fault)]
    results = dict(results)
    last: Pair | None = None
    for pair, fault in every:
        if (pair.name, fault) not in results:
            if pair is not last:
                jax.clear_caches()  # programs of pairs that are done with take gigabytes
            last = pair
            result = results[pair.name, fault] = judge(pair, fault)
            keep(result)
            show(f"{result.verdict:11} {result.seconds:5} s  {pair.name} / {fault or 'sound'}: "
                 f"{result.place}")  # fmt: skip
    return [results[pair.name, fault] for pair, fault in every]


def earlier(path: Path, commit: str) -> dict[tuple[str, str], Result]:
    """The results of a commit in a file of them."""
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    results = [Result(**row) for row in rows if row.pop("commit") == commit]
    return {(result.pair, result.fault): result for result in results}


def main() -> int:
    """Prints the table; the status is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns: pairs whose name has one")
    parser.add_argument("--fault", help="this fault only, or `sound`")
    parser.add_argument("--report", action="store_true", help="print the reports of what is wrong")
    parser.add_argument(
        "--out", type=Path,
        help="append each result to this file, a line of JSON; what it has of this commit is kept",
    )  # fmt: skip
    options = parser.parse_args()

    def chosen(pair: Pair, fault: str) -> bool:
        named = not options.names or any(re.search(name, pair.name) for name in options.names)
        return named and options.fault in (None, fault or "sound")

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip

    def keep(result: Result) -> None:
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({"commit": commit, **asdict(result)}) + "\n")

    results = run(
        chosen,
        lambda text: print(text, flush=True),
        earlier(options.out, commit) if options.out else {},
        keep,
    )
    print(table(results))
    wrong = [one for one in results if one.verdict != "right"]
    for one in wrong if options.report else ():
        print(f"\n{one.verdict}: {one.pair} / {one.fault or 'sound'}\n{one.report}")
    return 1 if wrong or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
