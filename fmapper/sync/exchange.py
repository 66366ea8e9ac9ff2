"""Messages and arrays that processes send to one another in a sync.

Each call has four rounds. All say that they have begun, or why they cannot; then they send arrays;
then all say that they have everything; then they write and say that they have. A process that has
not heard from all that they have everything writes only if another one has.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import box_shape, parts_of_box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import FmapperError, SyncError
from fmapper.sync.ends import End, Held, Outline
from fmapper.sync.inputs import reads_of
from fmapper.sync.memory import Values, fill
from fmapper.sync.transports import Transport, default_transport

if TYPE_CHECKING:
    import numpy as np

    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.sync.here import Here
    from fmapper.sync.planning import Transfer

    Array = np.ndarray[Any, Any]

Outlines = tuple[dict[str, Outline], dict[str, Held]]
_HEADER = 64  # bytes before the values of a packet, which are aligned so
_WHOLE, _BASE, _DELTA = range(3)  # kinds of packets, in their first byte; a base is kept
_ALIGNMENT = 8  # bytes of the values of each transfer in a packet
_SHORT = 5.0  # seconds that one that has failed waits for what others have decided
_READY, _FAILED, _WRITTEN, _UNSURE = b"ready", b"failed ", b"written", b"unsure"
_ANOTHER = "calls another sync. Call those of one transport in the same order in all processes"
_OLD = ". The running model has its old weights"


class Exchanger:
    """The side of one process; it has no transport where there are no others."""

    def __init__(self, transport: Transport | None, timeout: float) -> None:
        self.transport = way = transport or default_transport()
        self._timeout = timeout
        self.rank, size, number = (way.rank, way.size, next(way.syncs)) if way else (0, 1, 0)
        self._ready = _READY + b" %d" % number  # it says which sync of the transport this is
        self._others = [rank for rank in range(size) if rank != self.rank]
        self._packets: dict[tuple[int, int], list[_Packet]] = {}  # by sender and receiver
        self._last: dict[tuple[int, int, int], Array] = {}  # the packets of a call with delta=True
        self._heard: dict[int, float] = {}
        self._lost: set[int] = set()  # processes of which nothing comes any more
        self._broken = ""

    def outlines(
        self, source: End | None, target: End | None, rules: Rules
    ) -> tuple[Outlines, Outlines, Rules, Rules]:
        """Returns the arrays of both ends from all processes, by name and as they are held.

        And the rules between them, and those that make the held arrays of the target of its names.
        """
        if not self._others and source is not None and target is not None:
            both = (source.outlines, source.held), (target.outlines, target.held)
            return *both, rules, target.layout
        ends = [end and [end.outlines, end.held, _as_text(end.layout)] for end in (source, target)]
        mine = json.dumps([*ends, _as_text(rules)]).encode()
        said = sorted([(self.rank, mine), *self._say(mine).items()])
        if problem := self._problem_in(dict(said)):
            raise problem
        written = [json.loads(text) for _, text in said]
        texts = {ends[2] for ends in written} - {""}
        if len(texts) > 1:
            raise SyncError("processes have different rules. Pass the same rules= in all of them")
        sides: list[Outlines] = []
        layout = ""
        for at, role in enumerate(("source", "target")):
            named: dict[str, Outline] = {}
            held: dict[str, Held] = {}
            for outlines, parts, text in (ends[at] for ends in written if ends[at]):
                layout = text
                named |= {n: Outline(tuple(shape), *x) for n, (shape, *x) in outlines.items()}
                for name, (shape, dtype, boxes, domain) in parts.items():
                    array = held.setdefault(name, Held(tuple(shape), dtype, {}, domain))
                    if array[:2] != (tuple(shape), dtype):
                        raise SyncError(
                            f"{name} is {array.dtype}{[*array.shape]} in one process and "
                            f"{dtype}{shape} in another"
                        )
                    for rank, each in boxes.items():
                        array.boxes[int(rank)] = tuple(tuple(map(tuple, box)) for box in each)
            if not held:
                raise SyncError(f"no process has a {role}. Pass it in one, and None in the others")
            sides.append((named, held))
        return sides[0], sides[1], _from_text("".join(texts)), _from_text(layout)

    def plan(self, transfers: Sequence[Transfer]) -> list[Values]:
        """Plans packets to and from others; returns what comes, which inputs get as parts."""
        for other in self._others:
            for ends in ((self.rank, other), (other, self.rank)):
                self._packets[ends] = [*_packets(t for t in transfers if t[:2] == ends)]
        came = [self._packets[other, self.rank] for other in self._others]
        return [x for packets in came for packet in packets for x in packet.receive()]

    def run(self, here: Here, begin: Callable[[], object], *, delta: bool) -> tuple[int, int]:
        """Sends and receives arrays; returns the bytes of both when all processes have theirs.

        Where it raises, nothing is to be written.
        """
        if self._broken:
            raise SyncError(f"an earlier call has failed: {self._broken}. Create another Sync")
        try:
            begin()
        except BaseException as error:
            self._say(self._failure("begin", error))
            raise
        self._broken = "it has not ended" if self._others else ""
        replies = self._say(self._ready)
        wrong = [r for r, said in replies.items() if said != self._ready and type(said) is bytes]
        replies |= {r: f"rank {r} {_ANOTHER}" for r in wrong}
        problem: Exception | None = self._problem_in(replies)
        if problem is not None:
            if not self._lost:
                self._broken = ""  # all know, and the next call may work
            raise problem
        moved, doing = (0, 0), "pack arrays"
        try:
            moved = self._exchange(delta=delta)
            doing = "finish"
            here.finish()
        except Exception as error:
            problem = error
        said = _READY if problem is None else self._failure(doing, problem)
        replies = self._say(said, patient=problem is None)
        if problem is None:
            problem = self._problem_in(replies)
            failed = {rank for rank, said in replies.items() if isinstance(said, str)}
            said = _UNSURE if problem else _WRITTEN
            replies = self._say(said, failed - self._lost, patient=problem is None)
        self._broken = "" if problem is None or not self._others else _text(problem)
        if problem is not None and _WRITTEN not in replies.values():
            raise problem
        return moved

    def _exchange(self, *, delta: bool) -> tuple[int, int]:
        """Sends and receives all packets; one that cannot be packed goes as an error."""
        sent: list[int] = []
        received: list[int] = []
        problems: list[Exception] = []

        def send(rank: int) -> None:
            for number, packet in enumerate(self._packets[self.rank, rank]):
                key = self.rank, rank, number
                try:
                    data, base = packet.pack(), self._last.pop(key, None)
                    if delta:
                        self._last[key] = data
                        data = _as_delta(data, base)
                except Exception as error:
                    problems.append(error)
                    self._send(self._failure("pack arrays", error), rank)
                    return
                self._send(data, rank)
                sent.append(data.nbytes - _HEADER)

        def receive(rank: int) -> None:
            for number, packet in enumerate(self._packets[rank, self.rank]):
                data, key = self._receive(rank), (rank, self.rank, number)
                if isinstance(data, str):
                    problems.append(SyncError(data + _OLD))
                    return
                received.append(data.nbytes - _HEADER)
                data = _whole(packet, data, self._last.pop(key, None), rank)
                if data[0] == _BASE:
                    self._last[key] = data = data if data.flags.writeable else data.copy()
                packet.unpack(data)

        work = {rank: (partial(send, rank), partial(receive, rank)) for rank in self._others}
        problem = self._problem_in(self._all(work))
        for error in filter(None, [*problems, problem]):
            raise error
        return sum(sent), sum(received)

    def _send(self, data: Any, rank: int) -> None:
        assert self.transport is not None
        self.transport.send(memoryview(data), rank)
        self._heard[rank] = time.monotonic()

    def _receive(self, rank: int) -> Any:
        """Returns the next bytes of a process, or the text of its failure."""
        import numpy as np

        assert self.transport is not None
        data = np.frombuffer(self.transport.receive(rank), np.uint8)
        self._heard[rank] = time.monotonic()
        size = len(_FAILED)
        return data[size:].tobytes().decode() if data[:size].tobytes() == _FAILED else data

    def _failure(self, what: str, error: BaseException) -> bytes:
        """Returns what the others are told of an error; one that has come is passed on."""
        text = _text(error)
        if not text.endswith(_OLD):
            text = f"rank {self.rank} cannot {what}: {text.removesuffix('.')}"
        return _FAILED + text.removesuffix(_OLD).encode()

    def _say(
        self, data: bytes, but: Container[int] = (), *, patient: bool = True
    ) -> dict[int, Any]:
        """Sends a message to other processes; returns their replies, or how they have failed."""

        def hear(rank: int) -> bytes | str:
            said = self._receive(rank)
            return said if isinstance(said, str) else said.tobytes()

        others = [rank for rank in self._others if rank not in but]
        work = {rank: (partial(self._send, data, rank), partial(hear, rank)) for rank in others}
        return self._all(work, patient=patient)

    def _all(
        self, work: Mapping[int, Sequence[Callable[[], object]]], *, patient: bool = True
    ) -> dict[int, Any]:
        """Runs functions for each other process, concurrently.

        Returns what the last of each gives, or in words why a process is lost: the error of the
        first that failed, or that there was no answer in time.
        """
        results: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()

        def do(rank: int, at: int, function: Callable[[], object]) -> None:
            try:
                results.put((rank, at, function()))
            except BaseException as error:  # for the thread that waits
                results.put((rank, at, error))

        missing: set[tuple[int, int]] = set()
        limit = self._timeout if patient else min(self._timeout, _SHORT)
        for rank, functions in work.items():
            self._heard[rank] = time.monotonic()
            for at, function in enumerate(functions):
                missing.add((rank, at))
                threading.Thread(target=do, args=(rank, at, function), daemon=True).start()
        replies: dict[int, Any] = {}
        while missing:
            first = min(self._heard[rank] for rank, _ in missing)
            try:
                rank, at, result = results.get(timeout=max(0.0, first + limit - time.monotonic()))
            except queue.Empty:
                late = {r for r, _ in missing if self._heard[r] + limit <= time.monotonic()}
                text = f"has not answered in {self._timeout:g} seconds"
                replies |= {r: f"rank {r} {text}" for r in late if r not in replies}
                missing = {pair for pair in missing if pair[0] not in late}
                self._lost |= late
                continue
            missing.discard((rank, at))
            if isinstance(result, BaseException):
                text, is_clear = _text(result), isinstance(result, SyncError)
                is_clear = is_clear and f"rank {rank}" in text
                replies[rank] = text if is_clear else f"rank {rank} cannot be reached: {text}"
                missing = {pair for pair in missing if pair[0] != rank}
                self._lost.add(rank)
            elif at == len(work[rank]) - 1:
                replies.setdefault(rank, result)
        return replies

    def _problem_in(self, replies: Mapping[int, Any]) -> SyncError | None:
        """Returns what a process has said of its failure, or that one is lost."""
        failed = {rank: said for rank, said in replies.items() if isinstance(said, str)}
        return (
            SyncError(failed[min(failed, key=self._lost.__contains__)] + _OLD) if failed else None
        )


def _text(error: BaseException) -> str:
    """Returns an error in words; those of others than fmapper need their class to be understood."""
    kind = "" if isinstance(error, FmapperError) else type(error).__name__
    return ": ".join(filter(None, (kind, str(error))))


class _Packet:
    """Transfers between two processes that go together: a header, and their aligned values."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers
        self._values: list[Values] = []  # of a packet that comes
        self._places: list[tuple[Any, Any, int]] = []  # shapes, dtypes and offsets
        self.nbytes = _HEADER
        for transfer in transfers:
            shape, dtype = box_shape(transfer.box), transfer.array.dtype
            self._places.append((shape, dtype, self.nbytes))
            self.nbytes += -(-transfer.nbytes // _ALIGNMENT) * _ALIGNMENT

    def receive(self) -> list[Values]:
        """Gives the inputs places for the values that come, and returns these."""
        for _, _, array, box in self._transfers:
            self._values.append(Values(box, array.dtype))
            array.parts[box] = self._values[-1]
        return self._values

    @cached_property
    def _reads(self) -> list[list[tuple[Any, LazyArray]]]:
        return [reads_of(transfer.array, transfer.box) for transfer in self._transfers]

    def pack(self) -> Array:
        """Returns the current values as bytes."""
        import numpy as np

        data = np.zeros(self.nbytes, np.uint8)
        pairs = zip(self._reads, self._views(data), strict=True)
        fill((out[index], array) for reads, out in pairs for index, array in reads)
        return data

    def unpack(self, data: Array) -> None:
        """Gives the inputs the values that have come."""
        for values, view in zip(self._values, self._views(data), strict=True):
            values.array = view

    def _views(self, data: Array) -> Iterator[Array]:
        import numpy as np

        return (np.ndarray(shape, dtype, data, at) for shape, dtype, at in self._places)


def _packets(ordered: Iterable[Transfer], nbytes: int = 64 << 20) -> Iterator[_Packet]:
    """Yields consecutive transfers, the large ones divided, that are sent together."""
    packet: list[Transfer] = []
    size = 0
    for whole in ordered:
        for box, _ in parts_of_box(whole.box, nbytes // whole.array.dtype.itemsize):
            transfer = whole._replace(box=box)
            if packet and size + transfer.nbytes > nbytes:
                yield _Packet(packet)
                packet, size = [], 0
            packet.append(transfer)
            size += transfer.nbytes
    if packet:
        yield _Packet(packet)


def _as_delta(data: Array, base: Array | None) -> Array:
    """Returns what has changed in a packet, or all of it if there is no base."""
    import numpy as np

    from fmapper.sync.delta import encode

    data[0] = _BASE
    if base is None:
        return data
    header = np.zeros(_HEADER, np.uint8)
    header[0] = _DELTA
    old, new = (LazyArray.of(each[_HEADER:].view(np.uint16)) for each in (base, data))
    return np.concatenate([header, encode(old, new).read()])


def _whole(packet: _Packet, data: Array, base: Array | None, rank: int) -> Array:
    """Returns the values of a packet that has come; raises if they are another packet's."""
    import numpy as np

    from fmapper.sync.delta import Changes

    if data.nbytes >= _HEADER and data[0] == _DELTA and base is not None:
        bits = base[_HEADER:].view(np.uint16)
        Changes(LazyArray.of(data[_HEADER:]), bits.size, bits.dtype).apply(bits)
        return base
    if data.nbytes != packet.nbytes or data[0] == _DELTA:
        raise SyncError(
            f"rank {rank} has planned another sync. Create both with models of the same classes"
        )
    return data


def _as_text(rules: Rules) -> str:
    return rules.to_toml() if rules.rules else ""


def _from_text(text: str) -> Rules:
    from fmapper.checkpoints.rules.rules import Rules

    return Rules.from_toml(text + "\n") if text else Rules()
