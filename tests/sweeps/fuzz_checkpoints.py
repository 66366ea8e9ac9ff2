"""Damages checkpoints of every format and asks that nothing but the documented error comes of it.

    PYTHONPATH=tests python -m sweeps.fuzz_checkpoints --count 100000 --seed 7

Each case takes a small checkpoint, damages one of its files by one to four changes (bytes, lengths,
numbers in headers, other names, links to elsewhere), looks into it and reads every array that is
not larger than a budget. Some cases are files of many small things instead (`hostile_files`), of
random length. Wanted is a `CheckpointError`, or arrays, in little time and memory, with
nothing run and nothing opened outside of the folder, which an audit hook sees.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tracemalloc
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fmapper
from fmapper.checkpoints import LazyArray, convert_checkpoint, inspect
from fmapper.files import bounds
from sweeps import hostile_files

SECONDS = 1.0  # of processor time
MEBIBYTES = 64  # of Python's memory
BUDGET = 1 << 20  # bytes of an array that is read
FORMATS = {
    "a.safetensors": "safetensors",
    "folder": "safetensors",
    "a.npz": "npz",
    "a.pt": "pt",
    "a.msgpack": "msgpack",
    "a.dcp": "dcp",
}
CHECKPOINTS = [*FORMATS, "a.gguf"]
SMALL = 0.02  # of the cases are many small things, each at most a hundredth of the full size
MANY = {
    name: (make, max(40, most // 100))
    for name, (make, most) in hostile_files.FILES.items()
    if make is not hostile_files.large_shards  # one alone has 8,000 arrays
}
NUMBERS = [0, 1, -1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1, 10**30, 1.5, "1", None, [], {}]
TEXTS = [
    "",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "a\0b",
    "x" * 9000,
    "\ud800",
    "..",
    ".",
]


def tree() -> dict[str, Any]:
    """A checkpoint with what checkpoints have."""
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "w": w,
        "tied": w,
        "layers": [{"b": np.ones(5, ml_dtypes.bfloat16), "n": np.arange(3)}],
        "flag": np.array([True, False]),
        "step": 7,
        "name": "net",
    }


def write_gguf(path: Path) -> None:
    """Writes arrays of numbers and of blocks, and a vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "bb", "ccc"])
    writer.add_token_scores([0.5, 1.5])
    writer.add_tensor("w", np.ones((2, 4), np.float32))
    kinds = gguf.GGMLQuantizationType
    writer.add_tensor("blocks", np.ones((2, 34), np.uint8), raw_dtype=kinds.Q8_0)
    writer.add_tensor("more", np.ones((1, 144), np.uint8), raw_dtype=kinds.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(folder: Path) -> None:
    """Writes the checkpoint in every format, and one in the format that is only read."""
    write_gguf(folder / "a.gguf")
    for name, form in FORMATS.items():
        fmapper.save(tree(), folder / name, form)
    parts = fmapper.load(folder / "a.safetensors")
    target = folder / "folder"
    shutil.rmtree(target)
    target.mkdir()
    fmapper.save({"w": parts["w"]}, target / "model-00001-of-00002.safetensors")
    fmapper.save({"n": parts["layers.0.n"]}, target / "model-00002-of-00002.safetensors")
    index = {"w": "model-00001-of-00002.safetensors", "n": "model-00002-of-00002.safetensors"}
    text = json.dumps({"metadata": {"total_size": 72}, "weight_map": index})
    (target / "model.safetensors.index.json").write_text(text)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Changes a file in one place."""
    changed = bytearray(data or b"\0")
    kind, at = rng.randrange(9), rng.randrange(len(changed))
    if kind == 0:
        changed[at] = rng.randrange(256)
    elif kind == 1:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        word = rng.choice(
            [b"\xff" * 8, b"\0" * 8, (1 << 62).to_bytes(8, "little"), b"\x7f\xff\xff\xff"]
        )
        changed[at : at + len(word)] = word
    elif kind == 3:
        del changed[at : at + rng.randrange(1, 9)]
    elif kind == 4:
        changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 5:
        del changed[at:]
    elif kind == 6:
        other = rng.randrange(len(changed))
        changed[at:at] = changed[other : other + rng.randrange(1, 200)]
    else:
        numbers = list(re.finditer(rb"\d+", bytes(changed)))
        texts = list(re.finditer(rb'"[^"]*"', bytes(changed)))
        if kind == 7 and numbers:
            found = rng.choice(numbers)
            changed[found.start() : found.end()] = json.dumps(rng.choice(NUMBERS)).encode()
        elif texts:
            found = rng.choice(texts)
            changed[found.start() : found.end()] = json.dumps(rng.choice(TEXTS)).encode()
    return bytes(changed)


def case(source: Path, folder: Path, rng: random.Random) -> tuple[Path, str]:
    """Puts a damaged checkpoint into a folder; tells where and what is changed."""
    if rng.random() < SMALL:
        name = rng.choice([*MANY])
        make, most = MANY[name]
        count = int(most ** rng.uniform(0.2, 1))
        place = make(folder, count)
        if place.is_file() and rng.random() < 0.5:
            place.write_bytes(damage(place.read_bytes(), rng))
        return place, f"{name}: {count}"
    name = rng.choice(CHECKPOINTS)
    place = folder / name
    if (source / name).is_dir():
        shutil.copytree(source / name, place)
        file = rng.choice(sorted(place.iterdir()))
        if rng.random() < 0.1:
            file.unlink()
            target = rng.choice(["/etc/passwd", "/dev/zero", str(place), "gone", file.name])
            file.symlink_to(target)
            return place, f"{name}: {file.name} is a link to {target}"
    else:
        shutil.copy(source / name, place)
        file = place
    data = file.read_bytes()
    for _ in range(rng.choice([1, 1, 2, 4])):
        data = damage(data, rng)
    if name == "a.npz" and rng.random() < 0.2:
        pack(file, data, rng)
    else:
        file.write_bytes(data)
    return place, f"{name}: {file.name}"


def pack(file: Path, data: bytes, rng: random.Random) -> None:
    """Writes a zip file whose members are damaged, and which itself is not."""
    with zipfile.ZipFile(file, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as made:
        header = (
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
        )
        made.writestr("w.npy", damage(header + data[:48], rng))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name that occurs twice
            made.writestr(rng.choice(["w.npy", "../w.npy", "/w.npy", "v.npy"]), b"0" * 100_000)


class Watch:
    """What is opened or run while a case runs."""

    def __init__(self) -> None:
        self.folder = ""
        self.seen: list[str] = []
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path = str(args[0])
            known = path.startswith((self.folder, sys.prefix, sys.base_prefix))
            if not known and not path.isdigit() and path.endswith(".py") is False:
                self.seen.append(f"open {path}")
        elif event in ("exec", "os.system", "subprocess.Popen", "socket.connect", "os.exec"):
            code = args[0] if args else ""
            if getattr(code, "co_filename", "") == "<string>":
                self.seen.append(event)


class TooLong(BaseException):
    """Raised by the clock."""


def read(place: Path) -> str:
    """Looks into a checkpoint and reads what is small."""
    try:
        inspect(place)
        found = fmapper.load(place)
        for array in found.values():
            if isinstance(array, LazyArray) and array.nbytes <= BUDGET:
                array.read()
        target = place.with_name("out.npz")
        if sum(a.nbytes for a in found.values() if isinstance(a, LazyArray)) <= BUDGET:
            convert_checkpoint(place, target, check=False)
    except fmapper.CheckpointError:
        return "refused"
    return "read"


def run(
    count: int, seed: int, start: int = 0, on_finding: Callable[[str], None] = print
) -> Counter[str]:
    """Runs cases; tells how many ended how. Bounds are a hundredth, as are many small things."""
    with _low_bounds():
        return _run(count, seed, start, on_finding)


@contextmanager
def _low_bounds() -> Iterator[None]:
    usual = dict(bounds._MOST)
    bounds._MOST.update({name: most // 100 for name, most in usual.items()})
    try:
        yield
    finally:
        bounds._MOST.update(usual)


def _run(count: int, seed: int, start: int, on_finding: Callable[[str], None]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    watch = Watch()

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        write(source)
        for form in CHECKPOINTS:  # what is imported late is there
            read(source / form)
            (source / "out.npz").unlink(missing_ok=True)
        (source / "gone").mkdir()
        (source / "gone" / ".metadata").symlink_to(source / "nowhere")
        read(source / "gone")  # and what is imported for an error
        gc.freeze()  # what others have left in this process is not collected within a case
        tracemalloc.start()
        for number in range(start, start + count):
            rng = random.Random(f"{seed}:{number}")
            folder = Path(name) / "case"
            folder.mkdir()
            place, what = case(source, folder, rng)
            watch.seen.clear()
            watch.folder = str(folder)
            tracemalloc.reset_peak()
            begin = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, 20)  # of a processor: others may have it
            signal.alarm(600)
            finding = ""
            try:
                outcome = read(place)
            except TooLong:
                finding = "does not end"
            except Exception as error:
                finding = f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
                watch.folder = ""
            took, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1] >> 20
            if not finding and took > SECONDS:
                took = _time_alone(place)
            if not finding and watch.seen:
                finding = watch.seen[0]
            if not finding and took > SECONDS:
                finding = f"took {took:.1f} s"
            if not finding and peak > MEBIBYTES:
                finding = f"took {peak} MiB"
            if finding:
                outcome = "finding"
                on_finding(f"{seed}:{number} {what}: {finding}")
            outcomes[outcome] += 1
            shutil.rmtree(folder)
            if (number + 1) % 10000 == 0:
                print(f"# {number + 1}: {dict(outcomes)}", flush=True)
        tracemalloc.stop()
        gc.unfreeze()
    return outcomes


def _time_alone(place: Path) -> float:
    """Returns the seconds of a processor that a read takes while no memory is traced."""
    tracemalloc.stop()
    begin = time.process_time()
    with suppress(Exception):
        read(place)
    took = time.process_time() - begin
    tracemalloc.start()
    return took


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = run(options.count, options.seed, options.start)
    print(dict(outcomes))
    return int(outcomes["finding"] > 0)


if __name__ == "__main__":
    sys.exit(main())
