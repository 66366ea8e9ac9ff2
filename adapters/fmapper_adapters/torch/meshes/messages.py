"""Bytes between the processes of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def of_new_group() -> tuple[Callable[[memoryview, int], object], Callable[[int], Any]]:
    """Returns functions that send and receive bytes in a new process group.

    Its messages cannot be confused with those of training at the same time.
    """
    distributed = torch.distributed
    group = distributed.new_group(backend="gloo")

    def send(data: memoryview, rank: int) -> None:
        size = torch.tensor([data.nbytes], device="cpu")
        distributed.send(size, rank, group=group)
        if data.nbytes:
            distributed.send(_as_tensor(data), rank, group=group)

    def receive(rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        distributed.recv(size, rank, group=group)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if data.numel():
            distributed.recv(data, rank, group=group)
        return data.numpy()

    return send, receive


def _as_tensor(data: memoryview) -> torch.Tensor:
    import numpy as np

    array = np.frombuffer(data, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
