"""Transfers of tensors between host and accelerator, in batches.

A copy costs about 10 us however small it is, and a device reads pageable memory at a seventh of the
rate of pinned memory. So small tensors are transferred together in one copy, and large ones in
pieces, both through pinned memory of torch's own cache, and on the caller's stream. This is enough
for the right order: torch reuses memory only when the copies that use it are done.

Every tensor gets its own storage at the destination: safetensors refuses tensors that share one,
and `torch.save` writes all of it with each. `benchmarks/link.py` measures the sizes chosen here.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Final

import torch

from fmapper import BatchError
from fmapper.backends import threads_for_memory
from fmapper_adapters.torch.arrays.streaming import Workers, fetch

PIECE: Final = 8 << 20  # largest number of bytes in one copy
UNDER_WAY: Final = 4  # pieces in flight: 32 MiB of pinned memory, however large the model
SMALL: Final = 512 << 10  # bytes up to which tensors are copied together
_FEW: Final = 4  # up to this count and size, pinned memory does not pay
_LITTLE: Final = 4 << 20
_MUCH: Final = 32 << 20  # bytes from which several threads write them
_TINY: Final = 16 << 10  # mean bytes up to which one thread packs tensors faster than several

# Dtypes that are copied directly. Others are copied as integers: some kernels take a float16 by way
# of float32, which changes the bits of a NaN, and some dtypes have no kernel.
_EXACT: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float32, torch.float64, torch.complex64, torch.complex128}
)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = Sequence[torch.Tensor]
_nbytes = attrgetter("nbytes")
_address = torch.Tensor.data_ptr


def upload(tensors: Tensors, device: torch.device, *, are_bare: bool = False) -> list[torch.Tensor]:
    """Copies tensors from the host to a device.

    The caller may change the sources as soon as this returns, and use the results on the current
    stream. Strides are those of `tensor.to(device)`.

    Args:
        tensors: Strided tensors, without a history while gradients are recorded.
        device: The device.
        are_bare: Whether all tensors are known to be contiguous and not lazy.

    Raises:
        BatchError: A tensor could not be transferred, for example for lack of memory. No memory of
            the call remains in use, not even while the error is held.
    """
    return _cross(tensors, device, device, _send_up, are_bare)


def download(tensors: Tensors, *, are_bare: bool = False) -> list[torch.Tensor]:
    """Copies tensors from their devices to pageable memory of the host.

    It waits for the values: when it returns, the results are complete and the sources may be
    changed. The tensors may be on several devices. Otherwise it is like `upload`.
    """
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    results: dict[int, torch.Tensor] = {}
    for device, indices in places.items():
        group = [tensors[index] for index in indices]
        try:
            copies = _cross(group, torch.device("cpu"), device, _send_down, are_bare)
        except BatchError as error:
            results.clear()
            raise BatchError(indices[error.index]) from error.__cause__
        results.update(zip(indices, copies, strict=True))
    return [results[index] for index in range(len(tensors))]


def _cross(
    tensors: Tensors,
    target: torch.device,
    remote: torch.device,
    send: Callable[[_Pieces, Tensors, Tensors], None],
    are_bare: bool,
) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    group = [0]
    try:
        if _is_plain(tensors, remote):
            results.extend(map(partial(torch.Tensor.to, device=target, copy=True), tensors))
        else:
            # All before the first is copied, so that a model that does not fit fails at once.
            results.extend(map(partial(torch.empty_like, device=target), tensors))
            _fill(results, group, tensors, _Pieces(remote, are_bare), send)
    except BatchError:
        results.clear()
        raise
    except Exception as error:
        index = len(results) if len(results) < len(tensors) else group[0]
        results.clear()
        raise BatchError(index) from error.with_traceback(None)  # its frames hold tensors
    return results


def _fill(
    results: Tensors,
    group: list[int],
    tensors: Tensors,
    pieces: _Pieces,
    send: Callable[[_Pieces, Tensors, Tensors], None],
) -> None:
    """Fills the results; `group` always holds the indices of the tensors in flight."""
    sizes = list(map(_nbytes, tensors))
    with _workers(sizes, pieces.device, send) as pieces.workers:
        for group[:] in _groups(tensors, sizes):
            pieces.index = group[0]
            send(pieces, [tensors[i] for i in group], [results[i] for i in group])
        pieces.finish()


def _workers(
    sizes: Sequence[int], remote: torch.device, send: Callable[[_Pieces, Tensors, Tensors], None]
) -> AbstractContextManager[Workers | None]:
    """Returns threads for a large download: one is slow at writing new memory."""
    if send is _send_down and remote.type != "cpu" and threads_for_memory() > 1:
        large = sum(nbytes for nbytes in sizes if nbytes > SMALL)
        return Workers(remote) if large >= _MUCH else nullcontext()
    return nullcontext()


def _is_plain(tensors: Tensors, remote: torch.device) -> bool:
    """Returns whether a copy per tensor is as fast: host memory, or few tensors."""
    few = len(tensors) < _FEW and sum(tensor.nbytes for tensor in tensors) <= _LITTLE
    return few or remote.type in {"cpu", "meta", "mps"}


def _groups(tensors: Tensors, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices to transfer together: large tensors alone, small ones by dtype.

    Empty ones are left out: CUDA divides by the size of what it splits.
    """
    packs: dict[torch.dtype, list[int]] = {}
    for index, (tensor, nbytes) in enumerate(zip(tensors, sizes, strict=True)):
        if nbytes > SMALL:
            yield [index]
        elif nbytes:
            packs.setdefault(tensor.dtype, []).append(index)
    for pack in packs.values():
        start = nbytes = 0
        for stop, index in enumerate(pack):
            nbytes += sizes[index]
            if nbytes > PIECE:
                yield pack[start:stop]
                start, nbytes = stop, sizes[index]
        yield pack[start:]


class _Pieces:
    """The pieces under way between the host and a device, on its current stream."""

    def __init__(self, device: torch.device, are_bare: bool = False) -> None:
        self.device = device
        self.are_bare = are_bare  # contiguous and not lazy
        self.must_wait = False  # for the last piece, before the call returns
        self.workers: Workers | None = None  # threads for large tensors
        self.index = 0  # of the tensor whose pieces are sent
        self._stream = torch.accelerator.current_stream(device)
        self._under_way: deque[tuple[torch.Event, Callable[[], object]]] = deque()

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocates pinned memory, once few enough pieces are in flight."""
        self._wait(UNDER_WAY - 1)
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def start(
        self, to: torch.Tensor, source: torch.Tensor, then: Callable[[], object] = int
    ) -> None:
        """Starts a copy to or from pinned memory, and queues its completion."""
        to.copy_(source, non_blocking=True)
        event = torch.Event(self.device)
        event.record(self._stream)
        self._under_way.append((event, then))

    def finish(self) -> None:
        """Waits for all pieces, if the caller relies on their arrival."""
        if self.must_wait:
            self._wait(0)
        if self.workers is not None:
            self.workers.finish()

    def _wait(self, left: int) -> None:
        while len(self._under_way) > left:
            event, then = self._under_way.popleft()
            event.synchronize()
            then()


def _send_up(pieces: _Pieces, sources: Tensors, results: Tensors) -> None:
    if sources[0].nbytes <= SMALL:
        sources = sources if pieces.are_bare else _all_dense(sources)
        places = _all_flat(results)
        sizes = list(map(torch.Tensor.numel, places))
        piece = pieces.allocate(places[0].new_empty(sum(sizes), device="meta"))
        _pack(piece, sources)
        staged = torch.empty_like(piece, device=pieces.device)
        pieces.start(staged, piece)
        torch.split_with_sizes_copy(staged, sizes, out=places)
        return
    ((source,), (result,)) = sources, results
    if source.is_pinned() and _is_dense(source) and not _is_lazy(source):
        pieces.start(result, source)
        pieces.must_wait = True  # the device reads the source, which the caller may change then
        return
    for block, place in _blocks(source, result):
        piece = pieces.allocate(block)
        piece.copy_(block)  # in torch's threads
        pieces.start(place, piece)


def _send_down(pieces: _Pieces, sources: Tensors, results: Tensors) -> None:
    pieces.must_wait = True
    if sources[0].nbytes <= SMALL:
        staged = torch.cat(_all_flat(sources if pieces.are_bare else _all_dense(sources)))
        piece = pieces.allocate(staged)
        pieces.start(piece, staged, partial(_unpack, piece, results))
        return
    ((source,), (result,)) = sources, results
    for block, place in _blocks(source, result):
        if pieces.workers is not None and block.dim() == 1 and place.is_contiguous():
            pieces.workers.start(pieces.index, partial(fetch, pieces.workers, block, place, result))
            continue
        piece = pieces.allocate(block)
        pieces.start(piece, block, partial(place.copy_, piece))


def _pack(piece: torch.Tensor, sources: Tensors) -> None:
    """Copies dense tensors of the host one after the other into a flat one."""
    if piece.nbytes > _TINY * len(sources):
        torch.cat(_all_flat(sources), out=piece)  # in torch's threads
        return
    sizes = list(map(_nbytes, sources))
    _copy_bytes(
        itertools.accumulate(sizes, initial=piece.data_ptr()), map(_address, sources), sizes
    )


def _unpack(piece: torch.Tensor, results: Tensors) -> None:
    """Copies the parts of a flat tensor to dense ones, all on the host."""
    if piece.nbytes > _TINY * len(results):
        flat = _all_flat(results)
        torch.split_with_sizes_copy(piece, list(map(torch.Tensor.numel, flat)), out=flat)
        return
    sizes = list(map(_nbytes, results))
    _copy_bytes(
        map(_address, results), itertools.accumulate(sizes, initial=piece.data_ptr()), sizes
    )


def _copy_bytes(to: Iterable[int], source: Iterable[int], sizes: Iterable[int]) -> None:
    """Copies bytes between addresses, in a third of the time of a view of each tensor."""
    deque(map(ctypes.memmove, to, source, sizes), 0)


def _all_dense(tensors: Tensors) -> Tensors:
    """Returns the tensors, of which those that are not dense or are lazy are dense copies."""
    if (
        all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
    ):
        return tensors
    return list(map(_dense, tensors))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether elements fill their memory without gaps and overlaps, in any order."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default
    return tensor.is_contiguous() or bool(dense(tensor))


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a lazy negation or conjugate of its memory."""
    return tensor.is_conj() or tensor.is_neg()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a dense copy with the strides that `to` gives."""
    if _is_lazy(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if _is_dense(tensor) else tensor.clone()


def _all_flat(tensors: Tensors) -> list[torch.Tensor]:
    """Returns the elements of dense tensors of one dtype as `_flat` does."""
    if tensors[0].dtype in _EXACT and all(map(torch.Tensor.is_contiguous, tensors)):
        return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
    return list(map(_flat, tensors))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor in memory order, in a dtype that copies exactly."""
    is_bare = tensor.is_contiguous()
    flat = tensor.view(-1) if is_bare else tensor.as_strided((tensor.numel(),), (1,))
    return flat if tensor.dtype in _EXACT else flat.view(_BITS[tensor.dtype.itemsize])


def _blocks(
    source: torch.Tensor, result: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields views of at most `PIECE` bytes of source and result."""
    if source.stride() == result.stride() and not _is_lazy(source):
        source, result = _flat(source), _flat(result)
    else:
        order = sorted(range(result.dim()), key=result.stride, reverse=True)
        source, result = source.permute(order), result.permute(order)
    yield from _rows(source, result, PIECE // source.element_size())


def _rows(
    source: torch.Tensor, result: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if source.numel() <= limit:
        yield source, result
    elif rows := limit // source[0].numel():
        yield from zip(torch.split(source, rows), torch.split(result, rows), strict=True)
    else:
        for part, place in zip(source, result, strict=True):
            yield from _rows(part, place, limit)
