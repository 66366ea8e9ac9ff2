"""Files made of many small things, and how long and in what memory fmapper reads or refuses them.

    PYTHONPATH=tests python -m sweeps.hostile_files [NAME ...]

Each is written at its full size, which is as bad as its maker could think of, and looked into in a
process of its own. The bar is one second of processor time and 200 MB over the imports. Files that
are honest, whose names begin with `honest`, must be read; how long they may take is their own.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps.hostile_folders import (
    dcp_names,
    dcp_parts,
    dcp_pieces,
    dcp_shared,
    dcp_sizes,
    dcp_ties,
    dcp_values,
    entries,
    header,
    index,
    large_shards,
    orbax,
    pickled,
    shards,
)

SECONDS, MEBIBYTES = 1.0, 200
_NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (0,), }"


def arrays(folder: Path, count: int) -> Path:
    """Writes a header with many arrays."""
    return header(folder / "x.safetensors", f"{{{entries(count)}}}", 4 * count)


def arrays_in_blanks(folder: Path, count: int) -> Path:
    """Writes a header with many arrays, its keys in another order and with blanks."""
    text = ", ".join(
        f'"w{at}" : {{"shape": [0], "data_offsets": [0, 0], "dtype": "U8"}}' for at in range(count)
    )
    return header(folder / "x.safetensors", f"{{{text}}}")


def metadata(folder: Path, count: int) -> Path:
    """Writes a header whose metadata have many texts."""
    text = ",".join(f'"{at}":"{at}"' for at in range(count))
    return header(folder / "x.safetensors", f'{{"__metadata__":{{{text}}}}}')


def _about(folder: Path, text: str) -> Path:
    return header(folder / "x.safetensors", json.dumps({"__metadata__": {"fmapper": text}}))


def values(folder: Path, count: int) -> Path:
    """Writes many numbers that stand beside the arrays."""
    numbers = ",".join(f'"v{at}":{at}' for at in range(count))
    return _about(folder, f'{{"version":1,"values":{{{numbers}}}}}')


def lists(folder: Path, count: int) -> Path:
    """Writes lists without end into a header."""
    return header(folder / "x.safetensors", f'{{"a":[{"[]," * count}0]}}')


def objects(folder: Path, count: int) -> Path:
    """Writes objects without end into a header."""
    return header(folder / "x.safetensors", f'{{"a":[{"{}," * count}0]}}')


def numbers(folder: Path, count: int) -> Path:
    """Writes numbers of which each is an object into the shape of an array."""
    inner = "1000.5," * count
    return header(folder / "x.safetensors", f'{{"a":{{"shape":[{inner}1]}}}}')


def texts(folder: Path, count: int) -> Path:
    """Writes texts without end into a header."""
    inner = '"ab",' * count
    return header(folder / "x.safetensors", f'{{"a":[{inner}0]}}')


def escapes(folder: Path, count: int) -> Path:
    """Writes a text of nothing but escapes."""
    escaped = r"\n" * count
    return header(folder / "x.safetensors", f'{{"__metadata__":{{"a":"{escaped}"}}}}')


def wide_escapes(folder: Path, count: int) -> Path:
    """Writes a text of characters of four bytes, the first of which makes all as wide."""
    escaped = r"\ud83d\ude00" + "a" * count
    return header(folder / "x.safetensors", f'{{"__metadata__":{{"a":"{escaped}"}}}}')


def blanks(folder: Path, count: int) -> Path:
    """Writes a header that is nothing but blanks."""
    return header(folder / "x.safetensors", f"{{{' ' * count}}}")


def _zip(path: Path, kind: int = zipfile.ZIP_STORED) -> zipfile.ZipFile:
    return zipfile.ZipFile(path, "w", kind)


def members(folder: Path, count: int) -> Path:
    """Writes an npz of many arrays."""
    with _zip(folder / "x.npz") as archive:
        for at in range(count):
            archive.writestr(f"w{at}.npy", _NPY.ljust(127) + b"\n")
    return folder / "x.npz"


def settings(folder: Path, count: int) -> Path:
    """Writes settings of blanks, in a file that is a thousandth of them."""
    with _zip(folder / "x.npz", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__fmapper__.json", b" " * count + b"{}")
    return folder / "x.npz"


def settings_values(folder: Path, count: int) -> Path:
    """Writes settings with many values."""
    inner = ",".join(f'"v{at}":{at}' for at in range(count))
    about = json.dumps({"about": f'{{"version":1,"values":{{{inner}}}}}'})
    with _zip(folder / "x.npz") as archive:
        archive.writestr("__fmapper__.json", about)
    return folder / "x.npz"


def pickled_lists(folder: Path, count: int) -> Path:
    """Writes lists in lists, side by side."""
    return pickled(folder, b"]" + b"(" + b"]" * count + b"e")


def pickled_nest(folder: Path, count: int) -> Path:
    """Writes lists in each other."""
    return pickled(folder, b"]" * count + b"a" * (count - 1))


def pickled_tuples(folder: Path, count: int) -> Path:
    """Writes tuples in each other."""
    return pickled(folder, b")" + b"\x85" * count)


def pickled_numbers(folder: Path, count: int) -> Path:
    """Writes a list of numbers."""
    inner = b"".join(b"J" + struct.pack("<i", at) for at in range(count))
    return pickled(folder, b"](" + inner + b"e")


def pickled_dicts(folder: Path, count: int) -> Path:
    """Writes empty dicts."""
    return pickled(folder, b"](" + b"}" * count + b"e")


def pickled_texts(folder: Path, count: int) -> Path:
    """Writes short texts."""
    inner = b"".join(b"X" + struct.pack("<I", 4) + b"%04x" % (at & 65535) for at in range(count))
    return pickled(folder, b"](" + inner + b"e")


def pickled_memo(folder: Path, count: int) -> Path:
    """Writes lists that are each in the next one ten times: as many leaves as powers of ten."""
    data = b"K\x01q\x00"
    for at in range(count):
        data += b"](" + b"h%c" % at * 10 + b"eq%c" % (at + 1)
    return pickled(folder, data)


def pickled_long_key(folder: Path, count: int) -> Path:
    """Writes a dict with one key of megabytes and many numbers below it."""
    key = b"X" + struct.pack("<I", 1 << 20) + b"k" * (1 << 20)
    return pickled(folder, b"}(" + key + b"](" + b"K\x01" * count + b"eu")


def pickled_ordered(folder: Path, count: int) -> Path:
    """Writes calls of a class that is allowed."""
    name = b"ccollections\nOrderedDict\nq\x00"
    return pickled(folder, b"](" + name + b")R" + b"h\x00)R" * count + b"e")


def tensors(folder: Path, count: int) -> Path:
    """Writes many tensors by torch itself."""
    import torch

    torch.save({f"layers.{at}.weight": torch.ones(1) for at in range(count)}, folder / "x.pt")
    return folder / "x.pt"


def views(folder: Path, count: int) -> Path:
    """Writes many tensors of one storage, by torch itself."""
    import torch

    whole = torch.ones(count)
    torch.save({f"{at}": whole[at : at + 1] for at in range(count)}, folder / "x.pt")
    return folder / "x.pt"


def pickled_shape(folder: Path, count: int) -> Path:
    """Writes a shape of many dimensions, which as many tensors have."""
    head = b"ctorch._utils\n_rebuild_tensor_v2\nq\x00(" + b"K\x01" * count + b"tq\x01"
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\1tQq\x02"
    tensor = b"h\0(h\2K\0h\1h\1\x89Nt" + b"R"
    return pickled(folder, head + b"0" + storage + b"00](" + tensor * count + b"e")


def pickled_long_names(folder: Path, count: int) -> Path:
    """Writes values below a key of 4,000 characters."""
    key = b"X" + struct.pack("<I", 4000) + b"k" * 4000
    return pickled(folder, b"}(" + key + b"](" + b"K\x01" * count + b"eu")


def packed_long_names(folder: Path, count: int) -> Path:
    """Writes a map with a key of 4,000 characters and values below it."""
    key = b"\xda" + struct.pack(">H", 4000) + b"k" * 4000
    data = b"\x81" + key + b"\xdd" + struct.pack(">I", count) + b"\1" * count
    (folder / "x.msgpack").write_bytes(data)
    return folder / "x.msgpack"


def packed_values(folder: Path, count: int) -> Path:
    """Writes a list of msgpack with many numbers."""
    (folder / "x.msgpack").write_bytes(b"\x81\xa1a\xdd" + struct.pack(">I", count) + b"\1" * count)
    return folder / "x.msgpack"


def packed_lists(folder: Path, count: int) -> Path:
    """Writes lists of lists of lists, none of which has many things."""
    inner = b"\xdc" + struct.pack(">H", 1000) + b"\x90" * 1000
    data = b"\xdd" + struct.pack(">I", count // 1000) + inner * (count // 1000)
    (folder / "x.msgpack").write_bytes(b"\x81\xa1a" + data)
    return folder / "x.msgpack"


def packed_arrays(folder: Path, count: int) -> Path:
    """Writes a map of many small arrays."""
    about = b"\x93\x91\x01\xa7float32\xc4\x04\0\0\0\0"
    array = b"\xc7" + struct.pack(">Bb", len(about), 1) + about
    parts = [b"\xa8" + b"%08d" % at + array for at in range(count)]
    (folder / "x.msgpack").write_bytes(b"\xdf" + struct.pack(">I", count) + b"".join(parts))
    return folder / "x.msgpack"


def packed_long_key(folder: Path, count: int) -> Path:
    """Writes a map with one key of a megabyte and many numbers below it."""
    key = b"\xdb" + struct.pack(">I", 1 << 20) + b"k" * (1 << 20)
    data = b"\x81" + key + b"\xdd" + struct.pack(">I", count) + b"\1" * count
    (folder / "x.msgpack").write_bytes(data)
    return folder / "x.msgpack"


def _gguf(folder: Path, arrays: int, values: int, body: bytes) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, arrays, values)
    (folder / "x.gguf").write_bytes(head + body + b"\0" * 64)
    return folder / "x.gguf"


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def vocabulary(folder: Path, count: int) -> Path:
    """Writes a vocabulary of many texts."""
    head = _text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, count)
    return _gguf(folder, 0, 1, head + _text(b"abcd") * count)


def long_vocabulary(folder: Path, count: int) -> Path:
    """Writes a vocabulary whose texts have a kilobyte each, and scores beside it."""
    head = _text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, count)
    scores = _text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, count)
    return _gguf(folder, 0, 2, head + _text(b"a" * 1000) * count + scores + b"\0" * (4 * count))


def gguf_values(folder: Path, count: int) -> Path:
    """Writes many values."""
    body = b"".join(_text(b"v%d" % at) + struct.pack("<II", 4, at) for at in range(count))
    return _gguf(folder, 0, count, body)


def gguf_arrays(folder: Path, count: int) -> Path:
    """Writes many arrays."""
    about = struct.pack("<IQIQ", 1, 0, 0, 0)
    return _gguf(folder, count, 0, b"".join(_text(b"w%d" % at) + about for at in range(count)))


def gguf_text(folder: Path, count: int) -> Path:
    """Writes a value that is a long text."""
    body = _text(b"tokenizer.huggingface.json") + struct.pack("<I", 8) + _text(b"a" * count)
    return _gguf(folder, 0, 1, body)


def _goldens(folder: Path, **fields: Any) -> Path:
    """Writes goldens of nothing, but for some fields."""
    about: dict[str, Any] = {
        "version": 1, "model": "", "framework": "", "train": False, "args": [], "kwargs": {},
        "output": {"value": 0}, "wide": {"value": None}, "weights": [], "fixed": [], "state": [],
        "after": [], "aliases": {}, "draws": "", "rates": [], "unit": 0.0, "sensitivity": [],
        "operations": [], "training": None, **fields,
    }  # fmt: skip
    text = json.dumps({"__metadata__": {"fmapper.goldens": json.dumps(about)}})
    return header(folder / "x.safetensors", text)


def golden_operations(folder: Path, count: int) -> Path:
    """Writes operations without results."""
    return _goldens(folder, operations=[["", "", "", "", "", [], [], 0.0]] * count)


def golden_values(folder: Path, count: int) -> Path:
    """Writes an output of many numbers."""
    return _goldens(folder, output={"list": [{"value": 0}] * count})


def golden_structures(folder: Path, count: int) -> Path:
    """Writes lists in lists, a hundred deep."""
    inner: Any = {"value": 0}
    for _ in range(90):
        inner = {"list": [inner]}
    return _goldens(folder, output={"list": [inner] * (count // 90)})


def golden_names(folder: Path, count: int) -> Path:
    """Writes names of arrays that are not there."""
    return _goldens(folder, weights=[str(at) for at in range(count)])


def golden_bounds(folder: Path, count: int) -> Path:
    """Writes how far many outputs are from themselves."""
    return _goldens(folder, sensitivity=[[0.0, False, {str(at): 0.0 for at in range(count)}, {}]])


GOLDENS: dict[str, tuple[Callable[[Path, int], Path], int]] = {
    "goldens: operations": (golden_operations, 500_000),
    "goldens: values": (golden_values, 1_000_000),
    "goldens: structures": (golden_structures, 1_000_000),
    "goldens: names": (golden_names, 1_000_000),
    "goldens: bounds": (golden_bounds, 1_000_000),
    "honest goldens of 20,000 operations": (golden_operations, 20_000),
}
FILES: dict[str, tuple[Callable[[Path, int], Path], int]] = {
    "safetensors: arrays": (arrays, 1_000_000),
    "safetensors: arrays within the bound": (arrays, 100_000),
    "safetensors: arrays with blanks": (arrays_in_blanks, 100_000),
    "safetensors: metadata within the bound": (metadata, 149_999),
    "safetensors: values within the bound": (values, 149_999),
    "safetensors: metadata": (metadata, 5_000_000),
    "safetensors: values": (values, 2_000_000),
    "safetensors: lists": (lists, 9_000_000),
    "safetensors: objects": (objects, 9_000_000),
    "safetensors: numbers": (numbers, 9_000_000),
    "safetensors: texts": (texts, 9_000_000),
    "safetensors: escapes": (escapes, 49_000_000),
    "safetensors: wide characters": (wide_escapes, 99_000_000),
    "safetensors: blanks": (blanks, 99_000_000),
    "safetensors: index": (index, 1_000_000),
    "npz: arrays": (members, 200_000),
    "npz: arrays within the bound": (members, 50_000),
    "npz: settings of blanks": (settings, 99_000_000),
    "npz: values": (settings_values, 2_000_000),
    "pt: lists": (pickled_lists, 3_000_000),
    "pt: lists in lists": (pickled_nest, 3_000_000),
    "pt: tuples in tuples": (pickled_tuples, 1_000_000),
    "pt: numbers": (pickled_numbers, 2_000_000),
    "pt: dicts": (pickled_dicts, 5_000_000),
    "pt: texts": (pickled_texts, 5_000_000),
    "pt: shared lists": (pickled_memo, 60),
    "pt: a long key": (pickled_long_key, 100_000),
    "pt: calls": (pickled_ordered, 3_000_000),
    "pt: tensors": (tensors, 300_000),
    "pt: tensors within the bound": (tensors, 49_990),
    "pt: views within the bound": (views, 75_000),
    "pt: numbers within the bound": (pickled_numbers, 149_999),
    "pt: a shared shape": (pickled_shape, 100_000),
    "pt: long names": (pickled_long_names, 100_000),
    "dcp: arrays": (dcp_names, 100_000),
    "dcp: arrays within the bound": (dcp_names, 5_400),
    "dcp: ties within the bound": (dcp_ties, 49_000),
    "dcp: pieces within the bound": (dcp_parts, 50_000),
    "dcp: shared pieces": (dcp_shared, 20_000),
    "dcp: shared sizes": (dcp_sizes, 100_000),
    "dcp: values": (dcp_values, 10_000),
    "orbax: arrays within the bound": (orbax, 8_000),
    "msgpack: values": (packed_values, 5_000_000),
    "msgpack: lists": (packed_lists, 5_000_000),
    "msgpack: arrays": (packed_arrays, 300_000),
    "msgpack: arrays within the bound": (packed_arrays, 100_000),
    "msgpack: values within the bound": (packed_values, 149_999),
    "msgpack: long names": (packed_long_names, 100_000),
    "msgpack: a long key": (packed_long_key, 100_000),
    "gguf: texts": (vocabulary, 20_000_000),
    "gguf: values": (gguf_values, 2_000_000),
    "gguf: arrays": (gguf_arrays, 1_000_000),
    "gguf: arrays within the bound": (gguf_arrays, 100_000),
    "gguf: values within the bound": (gguf_values, 149_999),
    "honest safetensors of 100,000 arrays": (arrays, 100_000),
    "honest folder of 1,000 shards": (shards, 1000),
    "honest folder of 8,000 arrays in each of 30 shards": (large_shards, 30),
    "honest npz of 20,000 arrays": (members, 20_000),
    "honest pt of 40,000 tensors": (tensors, 40_000),
    "honest dcp of 5,000 arrays": (dcp_pieces, 5000),
    "honest orbax of 3,000 arrays": (orbax, 3000),
    "honest msgpack of 100,000 arrays": (packed_arrays, 100_000),
    "honest gguf of 500,000 texts": (vocabulary, 500_000),
    "honest gguf with a vocabulary of 500 MB": (long_vocabulary, 500_000),
    "honest gguf with a text of 500 MB": (gguf_text, 500_000_000),
}


def look(path: Path) -> dict[str, Any]:
    """Looks into a file as a process of its own does; tells time, memory and what came of it."""
    import jax  # noqa: F401
    import numpy as np
    import torch  # noqa: F401

    import fmapper
    from fmapper.checkpoints import inspect
    from fmapper.verification.goldens.file import holds_goldens, read_goldens

    with tempfile.TemporaryDirectory() as small:  # what is imported late is there
        for name in ("x.npz", "x.msgpack", "x.pt", "x.safetensors", "x.dcp", "x.orbax"):
            fmapper.save({"w": np.ones(2)}, Path(small) / name)
            fmapper.load(Path(small) / name)
    base = _peak()
    begin = time.process_time()
    try:
        if path.suffix == ".safetensors" and holds_goldens(path):
            outcome = f"read {len(read_goldens(path).operations)} operations"
        else:
            found = inspect(path)
            outcome = f"read {len(found.rows)} arrays, {len(found.values)} values"
    except (fmapper.CheckpointError, fmapper.GoldensError) as error:
        outcome = f"refused: {error}"
    except Exception as error:  # what should not be, and is told
        outcome = f"{type(error).__name__}: {error}"
    took = time.process_time() - begin
    return {"seconds": took, "mebibytes": (_peak() - base) / 1024, "outcome": outcome}


def _peak() -> int:
    """Returns the most memory that this process has had, in KiB."""
    status = Path("/proc/self/status")
    if status.exists():  # what `getrusage` says may be that of the process that started this one
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(path: Path, limit: int = 100) -> dict[str, Any]:
    """Looks into a file in a process of its own."""
    command = [sys.executable, "-m", "sweeps.hostile_files", "--look", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"seconds": float(limit), "mebibytes": 0.0, "outcome": "does not end"}
    if done.returncode:
        return {"seconds": 0.0, "mebibytes": 0.0, "outcome": f"died: {done.stderr[-300:]}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of files; all without any")
    parser.add_argument("--look", type=Path)
    options = parser.parse_args()
    if options.look:
        print(json.dumps(look(options.look)))
        return 0
    missed = 0
    for name, (make, count) in (FILES | GOLDENS).items():
        if options.names and not any(part in name for part in options.names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(make(Path(folder), count))
        is_honest = name.startswith("honest")
        is_met = found["seconds"] <= SECONDS and found["mebibytes"] <= MEBIBYTES
        wanted = ("read",) if is_honest else ("read", "refused")
        is_met = (is_honest or is_met) and found["outcome"].startswith(wanted)
        missed += not is_met
        print(
            f"{'met   ' if is_met else 'MISSED'} {name} ({count:,}): {found['seconds']:.2f} s, "
            f"{found['mebibytes']:.0f} MiB: {found['outcome'][:160]}",
            flush=True,
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
