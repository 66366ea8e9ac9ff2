"""The same work with two commits of fmapper, process by process in turns: what has become slower?

    python benchmarks/commits.py 301eca2 HEAD --rounds 7

Each round runs `_figures.py` of this checkout once with each commit. Times are those of the
processor, so that a machine that does other work as well matters less; what counts is the median of
the ratios of the rounds. A figure that a commit cannot give is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Print a table of figures: before, after, ratio."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("before", help="a commit, or a folder with one checked out")
    parser.add_argument("after", nargs="?", default=".", help="the same; this checkout by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="figures whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        names = {"before": options.before, "after": options.after}
        trees = [checkout(name, Path(place) / side) for side, name in names.items()]
        rounds: list[list[dict[str, float]]] = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            turns = [0, 1] if number % 2 == 0 else [1, 0]
            found = {side: figures(trees[side], options.only) for side in turns}
            rounds.append([found[0], found[1]])
    print("| figure | before, ms | after, ms | after / before |\n|---|---|---|---|")
    for name in rounds[0][0]:
        if not all(name in side for both in rounds for side in both):
            continue
        before, after = (median(both[side][name] for both in rounds) for side in (0, 1))
        ratio = median(new[name] / old[name] for old, new in rounds)
        print(f"| {name} | {before * 1e3:.3f} | {after * 1e3:.3f} | {ratio:.2f}x |")


def checkout(name: str, place: Path) -> Path:
    """Return a folder with the commit in it."""
    if Path(name, "fmapper").is_dir():
        return Path(name).resolve()
    place.mkdir()
    archive = subprocess.run(["git", "archive", name, "fmapper", "adapters"], cwd=HERE.parent,
                             check=True, stdout=subprocess.PIPE)  # fmt: skip
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    return place


def figures(tree: Path, only: str) -> dict[str, float]:
    """Run the figures in a process of their own, which imports fmapper from the folder."""
    env = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'adapters'}", "OMP_NUM_THREADS": "1"}
    env["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    command = [sys.executable, "-W", "ignore", str(HERE / "_figures.py"), only]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
