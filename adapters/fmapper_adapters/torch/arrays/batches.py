"""Moves many tensors to another device at once, with their gradients and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from fmapper import BatchError
from fmapper_adapters.torch.arrays import parameters, pinned, streaming, wrappers
from fmapper_adapters.torch.arrays import tensors as _host

_requires_grad = attrgetter("requires_grad")


def to_device(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    copied: dict[int, torch.Tensor] | None = None,
) -> Iterable[torch.Tensor]:
    """Returns copies on a device: parameters with gradients, autograd leaves as leaves.

    A tensor with a history keeps it, as with `tensor.to(device)`. Tensors inside of tensors, and
    attributes of tensors, are moved with them.

    Args:
        tensors: The tensors.
        device: The target device.
        copied: The copies of inner tensors, by the ids of the originals.

    Raises:
        BatchError: A tensor could not be moved.
    """
    copied = {} if copied is None else copied
    upwards = device.type != "cpu"
    if _host.are_bare(tensors, upwards) and parameters.are_ordinary(tensors):
        return _ordinary_to_device(tensors, device)
    return _any_to_device(tensors, device, copied)


def _ordinary_to_device(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Moves tensors that need no question each."""
    results = _cross(tensors, device, are_bare=True)
    grads = [tensor.grad for tensor in tensors]
    owners = [at for at, grad in enumerate(grads) if grad is not None]
    try:
        moved = carry([grad for grad in grads if grad is not None], device)
    except BatchError as error:
        raise BatchError(owners[error.index]) from error.__cause__
    for at, grad in zip(owners, moved, strict=True):
        grads[at] = grad
    parameters.replace_all(tensors, results, grads)
    return results


def _any_to_device(
    tensors: Sequence[torch.Tensor], device: torch.device, copied: dict[int, torch.Tensor]
) -> Iterator[torch.Tensor]:
    sources: list[torch.Tensor] = []
    owners: list[int] = []  # index of the tensor of each source
    for at, tensor in enumerate(() if _host.are_whole(tensors) else tensors):
        try:
            _host.check_filled(tensor)
        except TypeError as error:
            raise BatchError(at) from error
    for at, tensor in enumerate(tensors):
        is_plain = parameters.is_replaceable(tensor)
        is_bare = not is_plain or not tensor.requires_grad or wrappers.is_wrapper(tensor)
        sources.append(tensor if is_bare else tensor.detach())
        owners.append(at)
        if is_plain and tensor.grad is not None:
            sources.append(tensor.grad)
            owners.append(at)
    try:
        moved = iter(carry(sources, device, copied))
    except BatchError as error:
        raise BatchError(owners[error.index]) from error.__cause__
    if not any(map(_has_attributes, tensors)):
        yield from _replace_all(tensors, moved)
        return
    results = list(_replace_all(tensors, moved))
    copied.update(zip(map(id, tensors), results, strict=True))
    for at, (old, new) in enumerate(zip(tensors, results, strict=True)):
        try:
            wrappers.move_attributes(old, new, device, partial(_move_inside, device, copied))
        except Exception as error:
            raise BatchError(at) from error
    yield from results


def _has_attributes(tensor: torch.Tensor) -> bool:
    return bool(tensor.__dict__)


def _replace_all(
    tensors: Sequence[torch.Tensor], moved: Iterator[torch.Tensor]
) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if not parameters.is_replaceable(tensor):
            yield next(moved)
            continue
        values = next(moved)
        grad = None if tensor.grad is None else next(moved)
        yield parameters.replace(tensor, values, grad)


def _move_inside(
    device: torch.device, copied: dict[int, torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    """Moves an inner tensor to a device, only once if it occurs several times."""
    if id(tensor) not in copied:
        (new,) = to_device([tensor], device, copied)
        copied[id(tensor)] = new
    return copied[id(tensor)]


def carry(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    copied: dict[int, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Copies bare tensors to a device.

    Args:
        tensors: The tensors, whose gradients and attributes are ignored.
        device: The target device.
        copied: The copies of inner tensors, by the ids of the originals.

    Raises:
        BatchError: A tensor could not be copied.
    """
    upwards = device.type != "cpu"
    if _host.are_bare(tensors, upwards) and not any(map(_requires_grad, tensors)):
        return _cross(tensors, device, are_bare=True)
    batch = [at for at, t in enumerate(tensors) if t.is_cpu == upwards and _is_bare(t)]
    try:
        copies = _cross([tensors[at] for at in batch], device, are_bare=False)
    except BatchError as error:
        raise BatchError(batch[error.index]) from error.__cause__
    results = dict(zip(batch, copies, strict=True))
    inside = partial(_move_inside, device, {} if copied is None else copied)
    for at, tensor in enumerate(tensors):
        if at not in results:
            try:
                if wrappers.is_wrapper(tensor):
                    results[at] = wrappers.move_inside(tensor, device, inside)
                else:
                    results[at] = tensor.to(device, copy=True)
            except Exception as error:
                raise BatchError(at) from error
    return [results[at] for at in range(len(tensors))]


def take(data: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """Copies NumPy arrays to a device, and reads files into its memory.

    Raises:
        BatchError: An array could not be copied or read.
    """
    results: dict[int, torch.Tensor] = {}

    def put(places: Sequence[int], move: Callable[[list[Any]], list[torch.Tensor]]) -> None:
        try:
            moved = move([data[at] for at in places]) if places else []
        except BatchError as error:
            raise BatchError(places[error.index]) from error.__cause__
        results.update(zip(places, moved, strict=True))

    readers = [at for at, item in enumerate(data) if hasattr(item, "read_bytes")]
    arrays = sorted({*range(len(data))}.difference(readers))
    put(arrays, lambda chosen: carry(list(map(_host.from_numpy, chosen)), device))
    put(readers, lambda chosen: streaming.fill(chosen, device))
    return [results[at] for at in range(len(data))]


def _cross(
    tensors: Sequence[torch.Tensor], device: torch.device, *, are_bare: bool
) -> list[torch.Tensor]:
    """Copies strided tensors between the host and a device, without a history."""
    with torch.no_grad():
        if device.type != "cpu":
            return pinned.upload(tensors, device, are_bare=are_bare)
        return pinned.download(tensors, are_bare=are_bare)


def _is_bare(tensor: Any) -> bool:
    """Returns whether a tensor is plain strided memory."""
    return _host.has_memory(tensor) and not tensor.requires_grad
