"""Many tensors to another device at once, with what hangs on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fmapper import BatchError
from fmapper_adapters.torch import _host, _link


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """New tensors on a device: parameters with their gradients, leaves of autograd as leaves.

    A tensor with a history keeps it, as `tensor.to(device)` does.

    Raises:
        BatchError: One of them could not be moved.
    """
    sources: list[torch.Tensor] = []
    owners: list[int] = []  # whose a source is
    for at, tensor in enumerate(() if _host.are_whole(tensors) else tensors):
        try:
            _host.check_filled(tensor)
        except TypeError as error:
            raise BatchError(at) from error
    for at, tensor in enumerate(tensors):
        is_plain = _host.is_replaceable(tensor)
        sources.append(tensor.detach() if is_plain and tensor.requires_grad else tensor)
        owners.append(at)
        if is_plain and tensor.grad is not None:
            sources.append(tensor.grad)
            owners.append(at)
    try:
        moved = iter(carried(sources, device))
    except BatchError as error:
        raise BatchError(owners[error.index]) from error.__cause__
    for tensor in tensors:
        if not _host.is_replaceable(tensor):
            yield next(moved)
            continue
        values = next(moved)
        grad = None if tensor.grad is None else next(moved)
        yield _host.replaced(tensor, values, grad)


def carried(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The bare tensors, copied to a device.

    Raises:
        BatchError: One of them could not be.
    """
    upwards = device.type != "cpu"
    batch = [at for at, t in enumerate(tensors) if t.is_cpu == upwards and _is_bare(t)]
    chosen = [tensors[at] for at in batch]
    try:
        copies = _link.upload(chosen, device) if upwards else _link.download(chosen)
    except BatchError as error:
        raise BatchError(batch[error.index]) from error.__cause__
    results = dict(zip(batch, copies, strict=True))
    for at, tensor in enumerate(tensors):
        if at not in results:
            try:
                results[at] = tensor.to(device, copy=True)
            except Exception as error:
                raise BatchError(at) from error
    return [results[at] for at in range(len(tensors))]


def _is_bare(tensor: Any) -> bool:
    """Whether a tensor is nothing but strided memory."""
    return _host.has_memory(tensor) and not tensor.requires_grad
