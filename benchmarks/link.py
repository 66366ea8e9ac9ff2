"""Which way over the link between host and GPU is fastest? Decides constants of `arrays/pinned`.

    python benchmarks/link.py [--mebibytes 1024] [--rounds 5]

Ways up: pageable memory as `Tensor.to` copies it, pinned memory (the rate of the link), and through
pinned pieces of several sizes, so many of which are under way, or that several threads fill, as
from a file. Ways down likewise. Then what small tensors cost, one by one and packed. Medians;
without a GPU there is nothing to measure.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fmapper_adapters.torch.arrays import pinned as _link
from fmapper_adapters.torch.arrays import streaming as _streaming


class MemoryReader:
    """A tensor in pageable memory, read as a file is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.address = tensor, tensor.data_ptr()
        self.shape, self.dtype = tuple(tensor.shape), np.dtype(str(tensor.dtype)[6:])
        self.nbytes, self.extent = tensor.nbytes, ("", self.address)

    def read_bytes(self, out: memoryview, start: int) -> None:
        """Copies bytes, with the GIL released."""
        to = ctypes.addressof(ctypes.c_char.from_buffer(out))
        ctypes.memmove(to, self.address + start, len(out))


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of a call after a first one, the device's work included."""
    samples = []
    for _ in range(rounds + 1):
        torch.accelerator.synchronize()
        start = perf_counter()
        result = call()
        torch.accelerator.synchronize()
        samples.append(perf_counter() - start)
        del result
    return median(samples[1:])


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the large tensor")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way (5)")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        print("torch sees no GPU: nothing to measure.")
        return
    gpu = torch.accelerator.current_accelerator(check_available=True)
    assert gpu is not None
    print(f"torch {torch.__version__}  {torch.get_device_module().get_device_name()}  "
          f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads")  # fmt: skip

    nbytes = args.mebibytes << 20
    host = torch.ones(nbytes, dtype=torch.uint8)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    there = host.to(gpu)

    def rate(what: str, call: Callable[[], Any]) -> None:
        print(f"  {what:40} {nbytes / seconds(call, args.rounds) / 1e9:6.1f} GB/s")

    print(f"\none tensor of {args.mebibytes} MiB")
    rate("up, pageable: Tensor.to", lambda: host.to(gpu))
    rate("up, pinned: the link", lambda: there.copy_(pinned, non_blocking=True))
    rate("on the host: Tensor.copy_", lambda: pinned.copy_(host))
    rate("down, pageable: Tensor.cpu", there.cpu)
    rate("down, pinned: the link", lambda: pinned.copy_(there, non_blocking=True))
    chosen = _link.PIECE, _link.UNDER_WAY
    for mebibytes in (2, 8, 32):
        for under_way in (2, 4, 8):
            _link.PIECE, _link.UNDER_WAY = mebibytes << 20, under_way  # type: ignore[misc]
            what = f"{under_way} pieces of {mebibytes} MiB"
            mark = "  <- chosen" if chosen == (_link.PIECE, _link.UNDER_WAY) else ""
            rate(f"up, {what}{mark}", lambda: _link.upload([host], gpu))
            rate(f"down, {what}{mark}", lambda: _link.download([there]))
    _link.PIECE, _link.UNDER_WAY = chosen  # type: ignore[misc]
    by_threads = _streaming.PIECE, _streaming.threads_for_memory
    for mebibytes in (2, 8, 32):
        for threads in (4, 8, 16):
            _streaming.PIECE = mebibytes << 20  # type: ignore[misc]
            _streaming.threads_for_memory = lambda threads=threads: threads
            what = f"{threads} threads, pieces of {mebibytes} MiB"
            rate(f"up, {what}", lambda: _streaming.fill([MemoryReader(host)], gpu))
    _streaming.PIECE, _streaming.threads_for_memory = by_threads  # type: ignore[misc]

    for count, size in ((10_000, 256), (1_000, 16_384), (1_000, 131_072), (300, 262_144)):
        small = [torch.randn(size) for _ in range(count)]
        remote = [tensor.to(gpu) for tensor in small]

        def per_tensor(what: str, call: Callable[[], Any], count: int = count) -> None:
            print(f"  {what:40} {seconds(call, args.rounds) / count * 1e6:6.2f} us a tensor")

        print(f"\n{count} tensors of {size * 4} bytes")
        per_tensor("up, Tensor.to", lambda some=small: [t.to(gpu) for t in some])
        per_tensor("up, in batches", lambda some=small: _link.upload(some, gpu))
        per_tensor("down, Tensor.cpu", lambda some=remote: [t.cpu() for t in some])
        per_tensor("down, in batches", lambda some=remote: _link.download(some))


if __name__ == "__main__":
    main()
