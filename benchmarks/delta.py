"""How many bytes and how much time does it take to send the weights that a step has changed?

    python benchmarks/delta.py [--mib 256] [--rounds 3] [--folder /dev/shm]

Weights in bfloat16, of which a share has changed: as a delta, as `np.savez_compressed` of the
difference of the bits, and as the whole file. Rates are bytes of the weights by time; each side
makes a file, or the new weights of the old ones and a file. `encode` and `apply` are without files.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from _interleave import interleave
from _report import machine

import fmapper
from fmapper.checkpoints import LazyArray
from fmapper.sync import apply_delta, save_delta
from fmapper.sync.delta import Changes, digest, encode

LAYER = 8 << 20  # elements
SHARES = (0.0, 0.001, 0.01, 0.05)


def weights(mib: int, share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights before and after a step that changes a share of them in their last bit."""
    rng = np.random.default_rng(0)
    base, new = {}, {}
    for number in range(max(1, (mib << 20) // (2 * LAYER))):
        values = rng.normal(0, 0.02, LAYER).astype(np.float32).astype(ml_dtypes.bfloat16)
        changed = values.copy()
        changed.view("u2")[rng.random(LAYER, np.float32) < share] ^= 1
        base[f"layers.{number}"], new[f"layers.{number}"] = values, changed
    return base, new


def bits(state: dict[str, Any]) -> dict[str, Any]:
    """The bits of each array."""
    return {name: LazyArray.of(array.view("u2")) for name, array in state.items()}


def calls(folder: Path, base: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What is timed, and the sizes of the files."""
    old, now = bits(base), bits(new)
    codes = {name: encode(old[name], now[name]) for name in old}
    copies = {name: array.view("u2").copy() for name, array in base.items()}

    def apply(name: str) -> None:
        out = copies[name]
        Changes(codes[name], out.size, out.dtype).apply(out)

    delta, npz, whole = (folder / name for name in ("d.safetensors", "d.npz", "w.safetensors"))

    def changes() -> dict[str, Any]:
        return {name: base[name].view("u2") ^ new[name].view("u2") for name in base}

    def unpack() -> Any:
        with np.load(npz) as loaded:
            return {name: array.view("u2") ^ loaded[name] for name, array in base.items()}

    work = {
        "memcpy": lambda: [np.copyto(copies[n], base[n].view("u2")) for n in old],
        "digest": lambda: [digest(old[n]) for n in old],
        "encode": lambda: [encode(old[n], now[n]) for n in old],
        "apply": lambda: [apply(n) for n in old],
        "save_delta": lambda: save_delta(delta, base, new),
        "apply_delta": lambda: apply_delta(base, delta),
        "savez_compressed": lambda: np.savez_compressed(npz, **changes()),
        "load of that": unpack,
        "save of all": lambda: fmapper.save(new, whole),
        "load of all": lambda: fmapper.to_numpy(dict(fmapper.load(whole))),
    }
    for name in ("save_delta", "savez_compressed", "save of all"):
        work[name]()
    files = {"save_delta": delta, "savez_compressed": npz, "save of all": whole}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return work, {**sizes, "encode": sum(code.size for code in codes.values())}


def main() -> None:
    """Prints a line for each way and share."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine(("fmapper", "numpy")).items()))
    for share in SHARES:
        base, new = weights(options.mib, share)
        nbytes = sum(array.nbytes for array in base.values())
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            work, sizes = calls(Path(folder), base, new)
            timings = interleave(work, options.rounds, once=True)
        for name, times in timings.items():
            size = f", {100 * sizes[name] / nbytes:.2f} % of the bytes" if name in sizes else ""
            rate = nbytes / median(times) / 1e9
            print(f"{100 * share:g} % changed: {name}: {rate:.2f} GB/s{size}", flush=True)


if __name__ == "__main__":
    main()
