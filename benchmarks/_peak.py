"""Convert one model in a process of its own and print, as JSON, how much memory that took.

    python benchmarks/_peak.py SOURCE TARGET DTYPE WANTED MIB

`leaves.py` runs it. The peak is that of the resident memory during the conversion, above what was
resident before; "resident" on Linux includes file pages, so a small model goes first, which loads
what is loaded at first use.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path
from typing import Final

from _sources import MIB, gpt2_shapes, make_tree, numpy_dtype

import fmapper

STATUS: Final = Path("/proc/self/status")
CLEAR: Final = Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """Return a field of the process status, in bytes."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main(source: str, target: str, dtype: str, wanted: str, mib: str) -> None:
    """Build, settle, convert, look."""
    mover = getattr(fmapper, f"to_{target}")
    options = {} if wanted == dtype else {"dtype": wanted}
    # `gpt2_shapes` counts in float32
    size = float(mib) * MIB * 4 / numpy_dtype(dtype).itemsize
    mover(make_tree(source, [(64,), (8, 8)], dtype), **options)
    tree = make_tree(source, gpt2_shapes(int(size)), dtype)
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory to reuse would hide what the conversion takes
        CLEAR.write_text("5")  # the high-water mark begins anew
        before = resident("VmRSS")
    else:  # only the peak of the whole life is known; building the model has reached what it holds
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = mover(tree, **options)
    if target == "jax":
        import jax

        jax.block_until_ready(out)
    after = (
        resident("VmHWM")
        if sys.platform == "linux"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    result = sum(leaf.nbytes for leaf in out.values())
    print(json.dumps({"peak": max(0, after - before), "result": result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
