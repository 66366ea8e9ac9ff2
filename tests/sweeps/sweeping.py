"""Running many cases, each in a process of its own: time and memory are bounded, nothing is lost.

A case ends in one of a few classes; what it found is appended to a file of JSON lines at once, so
that a sweep which was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import queue
import re
import resource
import select
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

OK = "ok"
MISMATCH = "MISMATCH"
Found = dict[str, Any]
Case = Callable[[], Found]

# How cases end, in the order of the report.
CLASSES = {
    OK: "the same numbers",
    MISMATCH: "other numbers, and no error",
    "rounding": "no more than four times as far from torch as torch is from itself in float64",
    "specialized": "right under jit with specialize=True alone, for sizes of the examples",
    "sized by values": "likewise, and sizes of outputs depend on values, which jit never allows",
    "unsupported": "refused at conversion: operations without a lowering",
    "refused": "refused at conversion for another reason",
    "error": "an error while the converted model ran",
    "timeout": "not done in time",
    "died": "the process died, as for want of memory",
    "torch.export": "refused by torch.export",
    "parameters": "parameters are missing, or have no effect",
    "gradient": "right outputs, other gradients",
    "exported": "right, and refused by torch.export",
    "compiled_run": "right, and refused by torch.compile",
    "torch": "what is asked cannot be done by torch either: it gives no numbers to compare with",
    "not built": "no small model could be built, or it does not run in its own framework",
}


# torch gives nothing to compare with, or no compiled program could give the same.
NO_CASES = ("not built", "torch.export", "torch", "sized by values")
WAITING = 10  # how many times its own time a case may take on a busy machine


def run_case(case: Case, *, seconds: float, gigabytes: float) -> Found:
    """What a case returns, in a forked process; its class says where it did not get so far.

    Its seconds are those of a processor, so that what else the machine does changes no result.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(case, write, seconds, gigabytes)
    os.close(write)
    began = time.monotonic()
    text = b""
    while True:
        left = began + WAITING * seconds - time.monotonic()
        ready = select.select([read], [], [], max(left, 0))[0]
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        piece = os.read(read, 1 << 16)
        if not piece:
            break
        text += piece
    os.close(read)
    _, status, usage = os.wait4(child, 0)
    took = round(usage.ru_utime + usage.ru_stime, 1)
    waited = round(time.monotonic() - began, 1)
    try:
        found: Found = json.loads(text)
    except ValueError:
        # The kernel counts a little more than it reports.
        late = took >= 0.95 * seconds or waited >= WAITING * seconds
        found = {"class": "timeout" if late else "died", "reason": f"status {status}"}
    return found | {"seconds": took, "waited": waited}


def run_here(case: Case, **_: Any) -> Found:
    """What a case returns, in this process."""
    began = time.monotonic(), time.process_time()
    try:
        found = case()
    except Exception as error:
        found = {"class": "error", "reason": reason(error), "trace": trace(error)}
    waited, took = time.monotonic() - began[0], time.process_time() - began[1]
    return {**found, "seconds": round(took, 1), "waited": round(waited, 1)}


def _child(case: Case, write: int, seconds: float, gigabytes: float) -> None:
    own = math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (own, own))
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        try:
            found = case()
        except BaseException as error:
            found = {"class": "error", "reason": reason(error), "trace": trace(error)}
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(found, default=str).encode())
    finally:
        os._exit(0)


class Worker:
    """A process that answers with lines of JSON about the cases that are named to it.

    Args:
        command: What it runs.
        names: Of the cases; it reads them, a line each.
    """

    def __init__(self, command: list[str], names: Iterable[str]) -> None:
        tests = str(Path(__file__).parents[1])
        path = os.pathsep.join((tests, os.environ.get("PYTHONPATH", "")))
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(names))
        self.process.stdin.close()

    def _read(self) -> None:
        for text in self.process.stdout or ():
            if text.startswith("{"):
                self._lines.put(text)
        self._lines.put(None)

    def answer(self, seconds: float) -> Any | None:
        """What it says next; None where it died or is silent."""
        try:
            text = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        return None if text is None else json.loads(text)


def reason(error: BaseException) -> str:
    """The kind of an error and its first lines."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    notes = getattr(error, "__notes__", [])
    return "\n".join([f"{type(error).__name__}: {' | '.join(lines[:6])[:700]}", *notes])


def trace(error: BaseException) -> str:
    """The last calls that led to an error."""
    return "".join(traceback.format_tb(error.__traceback__)[-4:])


def arguments(about: str, where: str) -> argparse.ArgumentParser:
    """What every sweep takes on its command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("filter", nargs="*", help="regular expressions: cases whose name has one")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th case, from the i-th on")
    parser.add_argument("--out", default=where, help="folder of the results and the report")
    parser.add_argument("--again", default="", help="classes to run anew, as 'error,MISMATCH'")
    parser.add_argument("--first", type=int, default=10**9, help="how many cases at most")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a processor, per case")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="per case")
    parser.add_argument("--minutes", type=float, default=1e9, help="for all cases together")
    return parser


def sweep(
    cases: dict[str, Case], options: argparse.Namespace, title: str, *, show: bool = True
) -> dict[str, Found]:
    """Runs the cases that the options choose and that have no result yet; writes the report."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    part, parts = (int(number) for number in options.shard.split("/"))
    log = out / f"results-{part}-of-{parts}.jsonl"
    known = results(out)
    again = set(filter(None, options.again.split(",")))
    chosen = [
        name
        for name in list(cases)[part::parts]
        if not options.filter or any(re.search(one, name) for one in options.filter)
    ]
    chosen = [n for n in chosen[: options.first] if n not in known or known[n]["class"] in again]
    end = time.monotonic() + 60 * options.minutes
    with log.open("a") as file:
        for name in chosen:
            if time.monotonic() > end:
                break
            found = run_case(cases[name], seconds=options.seconds, gigabytes=options.gigabytes)
            file.write(json.dumps({"name": name, "at": time.time()} | found) + "\n")
            file.flush()
            if show:
                first = found.get("reason", "").splitlines()[:1]
                print(f"{found['class']:12} {found['seconds']:6} s  {name}  {first}", flush=True)
    known = results(out)
    report(known, out, title, len(cases))
    return known


def results(out: Path) -> dict[str, Found]:
    """The latest result of every case, of all shards."""
    found: list[Found] = []
    for file in out.glob("results-*.jsonl"):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    found.sort(key=lambda one: one["at"])
    return {one["name"]: one for one in found}


def report(known: dict[str, Found], out: Path, title: str, count: int) -> str:
    """Writes `report.json` and `report.md`; gives the latter."""
    by_class: dict[str, list[Found]] = collections.defaultdict(list)
    for one in known.values():
        by_class[one["class"]].append(one)
    exported = [n for n, one in known.items() if one["class"] not in NO_CASES]
    good = len(by_class[OK])
    share = 100 * good / max(len(exported), 1)
    lines = [f"# {title}", "", f"{len(known)} of {count} cases have run."]
    lines += [f"{good} of the {len(exported)} that can be recorded are right: {share:.1f} %.", ""]
    lines += ["| class | cases | share | what it means |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {len(by_class[name])} | {100 * len(by_class[name]) / max(len(known), 1):.1f} %"
        f" | {what} |"
        for name, what in CLASSES.items()
    ]
    lines += ["", *_missing(by_class["unsupported"])]
    for name in list(CLASSES)[1:]:
        lines += _reasons(name, by_class[name]) if by_class[name] else []
    text = "\n".join(lines) + "\n"
    (out / "report.md").write_text(text)
    (out / "report.json").write_text(json.dumps(list(known.values()), indent=1))
    return text


def _missing(refused: Iterable[Found]) -> list[str]:
    counts = collections.Counter(op for one in refused for op in one.get("ops", ()))
    if not counts:
        return []
    lines = ["## Operations without a lowering", "", "| operation | cases |", "|---|---|"]
    return [*lines, *(f"| {op} | {count} |" for op, count in counts.most_common()), ""]


def _reasons(name: str, found: list[Found]) -> list[str]:
    lines = [f"## {name}", ""]
    for one in sorted(found, key=lambda one: str(one.get("reason"))):
        lines.append(f"* {one['name']}: {' '.join(str(one.get('reason', '')).split())[:500]}")
    return [*lines, ""]
