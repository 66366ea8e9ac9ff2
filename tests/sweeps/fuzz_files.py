"""Damages files of programs and asks that nothing but the documented errors comes of it.

    PYTHONPATH=tests python -m sweeps.fuzz_files --count 100000 --seed 7

It damages the files of the corpus, each by one to three changes: of bytes, of the header, or of any
value in the program, also to text that would run code, to sizes beyond all memory, and to parts of
other programs. Each file is loaded; if that works it is converted, and its code is read. Wanted is
the documented error, or a model, in little time and memory, with nothing run, opened or imported
meanwhile, which an audit hook sees.

`--case 7:4711` says what one case is and runs it; `--write FILE` keeps its file.
"""

from __future__ import annotations

import argparse
import builtins
import copy
import io
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fmapper
from fmapper.files.untrusted import Misfit
from fmapper.programs import file
from support import program_files

KEY = "fmapper.program"
SENTINEL = "fmapper_was_run"
RUN = f"__import__('builtins').__dict__.__setitem__('{SENTINEL}', 1)"
HOSTILE = [
    f"\r    {RUN} #", f"\n    {RUN} #", f"\r{RUN}", f"\n{RUN}", f"\n    {RUN}", f"\x0c{RUN}",
    f"\x85{RUN}", f"\u2028{RUN}\n",
    f"a:1\r{RUN}",
    f"a:1\n{RUN}\n", f"x={RUN},**kw", f"x:{RUN}", f"*x={RUN}", f"x, y={RUN}", f"x): {RUN} #",
    f'"),{RUN},("', f"'),{RUN},('", f'w"+str({RUN})+"', f"{{{RUN}}}", f"'''{RUN}'''", f"\\\r{RUN}",
    f"x\0{RUN}", f"x;{RUN}", f"lambda:{RUN}", f"f'{{{RUN}}}'", RUN,
    "/etc/passwd:1", "/dev/zero:1", "/dev/stdin:1", "/proc/self/mem:1", "/nowhere/x.py:x", ":1",
    "a:-1",
    "os.system", "torch.load", "load", "__class__", "__init__", "__reduce__", "__dict__", "forward",
    "_modules", "_parameters", "_training_x", "train", "self", "class", "None", "a.b.c", ".",
    "..", "",
    " ", "\0", "\ud800", "é", "ﬁ", "x" * 5000, "9**9**9", "2**2**2**2**2**2", "9" * 400, "(" * 300,
    "-" * 3000 + "1", "1+" * 2000 + "1", "1//0", "1%0", "b" * 100, "9*" * 100 + "9", "2^63",
    "max(1)",
    "object", "O", "V1000000000", "M8[ns]", "(1000000,)f8", "f8,f8", "key<fry>", "float128", "int",
    "aten::add.Tensor", "lax::while", "lax::iota", "sym::getitem", "higher_order::cond", "lax::",
    "lax::scan", "lax::custom_jvp_call", "lax::dot_general", "lax::sort", "lax::reduce_window_max",
    "lax::cumsum", "lax::fft", "lax::conv_general_dilated", "lax::random_bits", "lax::gather",
    "aten::_assert_async.msg", "fmapper::packed_network.default", "user", "static", "constant",
    "leaf",
    "record", "dict", "tuple", "list", "args", "kwargs", "positional", "float32", "bool", "int64",
]  # fmt: skip
VALUES = [
    None, True, False, 0, 1, -1, 2, 7, 31, 64, 1009, 2**20, 2**30, 2**31, 2**33, 2**40, 2**48,
    2**62,
    2**63, 2**64, -(2**31), -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320, [], {}, [[]],
    [0], [2**30], [2**20, 2**20], [2**62, 2**62], [-1], [1] * 70, ["9**9**9"], ["b", "b"],
    {"float": "nan"}, {"float": "inf"}, {"float": "9" * 50}, {"complex": [0, 1]}, {"complex": [1]},
    {"ref": "x"}, {"ref": "nobody"}, {"dtype": "float64"}, {"dtype": "load"}, {"Size": ["9**9**9"]},
    {"Size": ["b"]}, {"Scalar": [2**70, "int32"]}, {"Scalar": ["x", "int32"]}, {"Scalar": [1, "O"]},
    {"map": []}, {"map": [[1, 2], [1, 3]]}, {"map": [["a", 1]]}, {"map": [[[], 1]]}, {"map": 3},
    {"graph": [[], [], [], []]}, {"graph": [["x"], [], [{"ref": "x"}], []]}, {"graph": 1},
    {"a": 1, "b": 2},
    {"Call": ["c", "aten::relu.default", []]}, {"TreeSpec": ["leaf", [], [], "", []]},
    {"Program": []},
    {"TreeSpec": ["record", [], [], "os.system", []]}, {"Input": ["user", 0]}, {"exec": "1"},
]  # fmt: skip
# What is allowed while a file is read, converted and shown: what the library does itself.
# namedtuple makes its class with <string>; <unknown> is only parsed, as by those who show errors.
_OWN_CODE = ("<fmapper ", "<eval_with_key>", "<string>", "<frozen ", "<sympy", "<unknown>")
_WATCHED = ("open", "os.", "subprocess.", "socket.", "shutil.", "ctypes.dlopen", "import", "exec",
            "compile", "pty.", "tempfile.", "urllib.", "mmap.", "webbrowser.")  # fmt: skip
DOCUMENTED = (fmapper.ConversionError, fmapper.LossyCastError, fmapper.MoveError)
# How often a file is taken: those that are converted slowly not so often.
WEIGHTS = {
    "tiny_jax": 20.0,
    "tiny_torch": 20.0,
    "loops_jax": 1.0,
    "sizes_jax": 0.5,
    "training_jax": 0.3,
}
SECONDS = 1.0
MEBIBYTES = 200


class TooLong(BaseException):
    """A case runs without end."""


class Corpus:
    """Files of programs, taken apart; those that convert quickly are taken more often."""

    def __init__(self, paths: list[Path]) -> None:
        self.names = [path.stem for path in paths]
        self.files = [path.read_bytes() for path in paths]
        self.parts = [taken_apart(data) for data in self.files]
        self.texts = [json.dumps(part[:2]) for part in self.parts]
        self.pieces = [piece for _, about, _ in self.parts for piece in _pieces(about)]
        self.weights = [WEIGHTS.get(name, 6.0) for name in self.names]


def taken_apart(data: bytes) -> tuple[Any, Any, bytes]:
    """The header of a file, the program in it, and the bytes of its arrays."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header.pop("__metadata__")[KEY])
    return header, about, data[8 + size :]


def _pieces(tree: Any) -> Iterator[Any]:
    yield tree
    for inner in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from _pieces(inner)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree as its holder and the key there."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])
    return found


def damaged(corpus: Corpus, case: str) -> tuple[str, bytes, list[str]]:
    """A damaged file: the name of what it was, its bytes, and what was done to it."""
    rng = random.Random(case)
    (at,) = rng.choices(range(len(corpus.names)), corpus.weights)
    done: list[str] = []
    if rng.random() < 0.2:
        data = bytearray(corpus.files[at])
        for _ in range(rng.randint(1, 3)):
            _damage_bytes(rng, data, done)
        return corpus.names[at], bytes(data), done
    header, about = json.loads(corpus.texts[at])
    arrays = corpus.parts[at][2]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _damage_tree(rng, corpus, about if rng.random() < 0.85 else header, done)
    metadata = {KEY: json.dumps(about)}
    if rng.random() < 0.02:
        metadata = rng.choice((None, 1, {}, {KEY: 1}, {KEY: ""}, {KEY: "[" * 100000}, {KEY: about}))  # type: ignore[assignment]
        done.append(f"metadata: {str(metadata)[:30]}")
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)
    size = len(text) if rng.random() < 0.98 else rng.choice((0, 1, 2**20, 2**40, 2**63))
    return corpus.names[at], size.to_bytes(8, "little") + text + arrays, done


def _damage_bytes(rng: random.Random, data: bytearray, done: list[str]) -> None:
    kind = rng.choice(("flip", "flip", "cut", "insert", "repeat", "truncate", "grow"))
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 2, 8, 50, 1000))
    if kind == "flip" and at < len(data):
        data[at] = rng.choice(
            (0, 0x22, 0x30, 0x39, 0x5B, 0x5D, 0x7B, 0x7D, 0x2C, 0xFF, rng.randrange(256))
        )
    elif kind == "cut":
        del data[at : at + length]
    elif kind == "insert":
        data[at:at] = rng.choice(
            (b"0", b"9" * 50, b"[" * 2000, b'"', b"\\", b"\n", b"{}", b"\xed\xa0\x80")
        )
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "truncate":
        del data[at:]
    elif kind == "grow":
        data += bytes(length)
    if not data:
        data += b"\0"
    done.append(f"{kind} at byte {at}")


def _damage_tree(rng: random.Random, corpus: Corpus, tree: Any, done: list[str]) -> None:
    there = places(tree)
    if not there:
        return
    holder, key = rng.choice(there)
    if rng.random() < 0.3:  # a string, of which there are fewer
        strings = [place for place in there if isinstance(place[0][place[1]], str)]
        holder, key = rng.choice(strings or there)
    before = holder[key]
    kind = rng.choice(
        ("text", "text", "value", "value", "piece", "swap", "drop", "twice", "key", "wrap")
    )
    if kind == "text":
        new: Any = rng.choice(HOSTILE)
        if isinstance(before, str) and rng.random() < 0.5:
            cut = rng.randrange(len(before) + 1)
            new = before[:cut] + new + before[cut:]
        holder[key] = new
    elif kind == "value":
        holder[key] = copy.deepcopy(rng.choice(VALUES))
        if type(before) is int and rng.random() < 0.5:
            holder[key] = before + rng.choice((-1, 1, 2, 100, 2**31))
    elif kind == "piece":
        holder[key] = copy.deepcopy(rng.choice(corpus.pieces))
    elif kind == "swap":
        other, at = rng.choice(there)
        holder[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(before)
    elif kind == "drop":
        del holder[key]
    elif kind == "twice" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(before))
    elif kind == "key" and isinstance(holder, dict):
        holder[rng.choice(HOSTILE)] = holder.pop(key)
    elif kind == "wrap":
        for _ in range(rng.choice((1, 2, 100, 250) if rng.random() < 0.1 else (1, 2))):
            holder[key] = [holder[key]]
    done.append(f"{kind} {_brief(before)} -> {_brief(_at(holder, key))}")


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(value)[:40]}}}"
    return f"a list of {len(value)}" if isinstance(value, list) else ascii(value)[:80]


def _at(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (KeyError, IndexError):
        return "gone"


class Watch:
    """Sees what is opened, imported and run while a case runs."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self._libraries = tuple({sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)})
        own = Path(str(fmapper.__file__)).parent
        self._libraries += (str(own), str(own.parent / "adapters"))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event.startswith(_WATCHED):
            try:
                self._look(event, args)
            except Exception as error:  # which the library would take for one of its own
                self.seen.append(f"{event}: {error!r}")

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        what = args[0] if args else ""
        if event == "exec":
            what = what.co_filename
        if event == "compile":
            what = args[1]
        text = os.fsdecode(what) if isinstance(what, bytes) else str(what)
        if event in ("exec", "compile") and text.startswith((*_OWN_CODE, *self._libraries)):
            return
        if event in ("open", "os.listdir", "os.scandir", "os.walk", "os.fwalk") and text.startswith(
            self._libraries
        ):
            return  # a module that is imported late
        if event == "import" and text.split(".")[0] in sys.modules:
            return
        self.seen.append(f"{event} {text[:200]}")


def run_case(name: str, data: bytes, *, convert: bool = True) -> str:
    """Loads a file as `load_program` does, converts it and reads its code.

    Returns:
        refused, loaded, or converted.
    """
    try:
        program = file.read_program(io.BytesIO(data), len(data))
    except Misfit as error:
        str(error)
        return "refused"
    if not convert:
        return "loaded"
    for target in program_files.targets(name):
        try:
            model = fmapper.convert(program, target)
        except DOCUMENTED as error:
            str(error)
            return "loaded"
        if target == "torch":
            try:
                len(model.code)
            except fmapper.ProgramInputError as error:  # not recorded for the mode it starts in
                str(error)
                return "loaded"
    return "converted"


def fuzz(corpus: Corpus, seed: int, cases: range, seconds: float, watch: Watch) -> Counter[str]:
    """Runs cases until they or the time are over; prints each finding with how to see it again."""
    outcomes: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _too_long)
    end = time.monotonic() + seconds
    shown: Counter[str] = Counter()
    for number in cases:
        if time.monotonic() > end:
            break
        name, data, done = damaged(corpus, f"{seed}:{number}")
        finding = ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        watch.seen, watch.on = [], True
        signal.alarm(30)
        try:
            outcome = run_case(name, data)
        except (Exception, TooLong) as error:
            outcome = "finding"
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            finding = f"{type(error).__name__} at {where}: {str(error)[:200]}"
        finally:
            signal.alarm(0)
            watch.on = False
        took = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
        if hasattr(builtins, SENTINEL):
            delattr(builtins, SENTINEL)
            finding = "code of the file was run"
        elif watch.seen:
            finding = finding or f"seen: {watch.seen[0]}"
        elif took > SECONDS:
            finding = finding or f"took {took:.1f} s ({outcome})"
        elif grown > MEBIBYTES:
            finding = finding or f"took {grown:.0f} MiB ({outcome})"
        if finding:
            outcome = "finding"
            kind = finding.split(":")[0] if not finding.startswith("took") else finding[:6]
            shown[kind] += 1
            if shown[kind] <= 5:
                print(
                    f"--case {seed}:{number} {name}: {finding}\n    {'; '.join(done)}", flush=True
                )
        outcomes[outcome] += 1
        if (number + 1) % 20000 == 0:
            print(f"# {number + 1}: {dict(outcomes)}", flush=True)
    return outcomes


def _too_long(*_: Any) -> None:
    raise TooLong


def warm(corpus: Corpus) -> None:
    """Loads and converts everything once, so that what is imported late is there."""
    for name, data in zip(corpus.names, corpus.files, strict=True):
        if run_case(name, data) != "converted":
            raise SystemExit(f"{name} is damaged to begin with")


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--case", help="SEED:NUMBER of one case")
    parser.add_argument("--write", type=Path, help="where the file of that case is written")
    parser.add_argument("--operations", action="store_true", help="programs of one operation each")
    options = parser.parse_args()
    paths = sorted(program_files.WRITTEN.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        if options.operations:
            paths = []
            for name, make in program_files.operations().items():
                paths.append(Path(folder) / f"{name}.safetensors")
                make().save(paths[-1])
        corpus = Corpus(paths)
    if options.case:
        name, data, done = damaged(corpus, options.case)
        print(name, *done, sep="\n  ")
        if options.write:
            options.write.write_bytes(data)
        print(run_case(name, data))
        return 0
    logging.disable()  # torch's, of operations that do not fit
    warm(corpus)
    cases = range(options.start, options.start + options.count)
    outcomes = fuzz(corpus, options.seed, cases, options.minutes * 60, Watch())
    print(f"{outcomes.total()} files: {dict(outcomes)}")
    return 1 if outcomes["finding"] else 0


if __name__ == "__main__":
    sys.exit(main())
