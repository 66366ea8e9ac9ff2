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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fmapper.checkpoints.boxes import box_shape, parts_of_box
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import SyncError
from fmapper.sync.ends import End, Held, Outline
from fmapper.sync.memory import fill
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


class Exchanger:
    """The side of one process.

    Attributes:
        transport: How bytes go to the others; None where there are none.
        rank: The number of the process.
    """

    def __init__(self, transport: Transport | None, timeout: float) -> None:
        self.transport = transport or default_transport()
        self._timeout = timeout
        self.rank = 0 if self.transport is None else self.transport.rank
        size = 1 if self.transport is None else self.transport.size
        self._others = [rank for rank in range(size) if rank != self.rank]
        self._packets: dict[tuple[int, int], list[list[Transfer]]] = {}  # by sender and receiver
        self._last: dict[tuple[int, int, int], Array] = {}  # the packets of a call with delta=True
        self._heard: dict[int, float] = {}
        self._broken = ""

    # planning

    def outlines(
        self, source: End | None, target: End | None, rules: Rules
    ) -> tuple[Outlines, Outlines, Rules, Rules]:
        """Returns the arrays of both ends from all processes, by name and as they are held.

        And the rules between them, and those that make the held arrays of the target of its names.

        Raises:
            SyncError: No process has one of the ends, or two have different rules.
        """
        if not self._others and source is not None and target is not None:
            both = (source.outlines, source.held), (target.outlines, target.held)
            return *both, rules, target.layout
        ends = [end and [end.outlines, end.held, _as_text(end.layout)] for end in (source, target)]
        mine = json.dumps([*ends, _as_text(rules)]).encode()
        said = sorted([(self.rank, mine), *self._say(mine).items()])
        written = [json.loads(bytes(self._check(*each))) for each in said]
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
                raise SyncError(
                    f"no process has a {role} with arrays. Pass it in one of them, and None in the "
                    "others"
                )
            sides.append((named, held))
        return sides[0], sides[1], _from_text("".join(texts)), _from_text(layout)

    def plan(self, transfers: Sequence[Transfer]) -> None:
        """Divides what goes to and comes from other processes into packets."""
        for other in self._others:
            for ends in ((self.rank, other), (other, self.rank)):
                self._packets[ends] = [*_packets(t for t in transfers if t[:2] == ends)]

    # a call

    def run(self, here: Here, begin: Callable[[], object], *, delta: bool) -> tuple[int, int]:
        """Sends and receives arrays; returns when all processes have theirs.

        Returns:
            The bytes that were sent, and those that came.

        Raises:
            SyncError: A process cannot begin, or has failed; nothing is to be written.
        """
        if self._broken:
            raise SyncError(f"an earlier call has failed: {self._broken}. Create another Sync")
        try:
            begin()
        except BaseException as error:
            self._say(_FAILED + str(error).encode())
            raise
        self._broken = "it has not ended" if self._others else ""
        replies = {rank: self._check(rank, said) for rank, said in self._say(_READY).items()}
        for rank, said in replies.items():
            if said.startswith(_FAILED):
                self._broken = ""
                text = said[len(_FAILED) :].decode()
                raise SyncError(f"rank {rank} cannot begin: {text}. Nothing has changed")
        sent: list[int] = []
        received: list[int] = []
        problem: Exception | None = None
        try:
            self._exchange(here, sent, received, delta=delta)
            here.finish()
            for rank, said in self._say(_READY).items():
                self._check(rank, said)
        except Exception as error:  # the others are to know at once
            problem = error
        answers = self._say(_UNSURE if problem else _WRITTEN, patient=problem is None)
        if problem is None:
            self._broken = ""
        elif self._others:
            self._broken = str(problem) or type(problem).__name__
        if problem is not None and _WRITTEN not in answers.values():
            raise problem
        return sum(sent), sum(received)

    def _exchange(self, here: Here, sent: list[int], received: list[int], *, delta: bool) -> None:
        def send(rank: int) -> None:
            for number, packet in enumerate(self._packets[self.rank, rank]):
                data, key = _pack(packet), (self.rank, rank, number)
                base = self._last.pop(key, None)
                if delta:
                    self._last[key] = data
                    data = _as_delta(data, base)
                self._send(data, rank)
                sent.append(data.nbytes - _HEADER)

        def receive(rank: int) -> None:
            for number, packet in enumerate(self._packets[rank, self.rank]):
                data, key = self._receive(rank), (rank, self.rank, number)
                received.append(data.nbytes - _HEADER)
                data = _whole(packet, data, self._last.pop(key, None))
                if data[0] == _BASE:
                    self._last[key] = data = data if data.flags.writeable else data.copy()
                for transfer, values in _values(data, packet):
                    here.stage(transfer, values)

        work = {rank: (partial(send, rank), partial(receive, rank)) for rank in self._others}
        for rank, result in self._all(work).items():
            self._check(rank, result)

    # messages

    def _send(self, data: Any, rank: int) -> None:
        assert self.transport is not None
        self.transport.send(memoryview(data), rank)
        self._heard[rank] = time.monotonic()

    def _receive(self, rank: int) -> Array:
        import numpy as np

        assert self.transport is not None
        data = np.frombuffer(self.transport.receive(rank), np.uint8)
        self._heard[rank] = time.monotonic()
        return data

    def _say(self, data: bytes, *, patient: bool = True) -> dict[int, Any]:
        """Sends a message to all other processes; returns their replies, or errors."""

        def hear(rank: int) -> bytes:
            return self._receive(rank).tobytes()

        work = {
            rank: (partial(self._send, data, rank), partial(hear, rank)) for rank in self._others
        }
        return self._all(work, patient=patient)

    def _all(
        self, work: Mapping[int, Sequence[Callable[[], object]]], *, patient: bool = True
    ) -> dict[int, Any]:
        """Runs functions for each other process, concurrently.

        Returns what the last function of each gives, or an error: that of the first that failed,
        or that there was no answer in time.
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
                replies |= {r: SyncError(f"rank {r} {text}") for r in late if r not in replies}
                missing = {pair for pair in missing if pair[0] not in late}
                continue
            missing.discard((rank, at))
            if isinstance(result, BaseException):
                replies[rank] = result
                missing = {pair for pair in missing if pair[0] != rank}
            elif at == len(work[rank]) - 1:
                replies.setdefault(rank, result)
        return replies

    def _check(self, rank: int, result: Any) -> Any:
        """Returns the reply of a process, unless it is an error."""
        if isinstance(result, BaseException):
            text = str(result)
            if not isinstance(result, SyncError) or f"rank {rank}" not in text:
                text = f"rank {rank} cannot be reached: {text}"
            raise SyncError(f"{text}. The running model has its old weights") from result
        if result == _UNSURE:
            raise SyncError(f"rank {rank} lacks some arrays. The running model has its old weights")
        return result


def _packets(ordered: Iterable[Transfer], nbytes: int = 64 << 20) -> Iterator[list[Transfer]]:
    """Yields consecutive transfers, the large ones divided, that are sent together."""
    packet: list[Transfer] = []
    size = 0
    for whole in ordered:
        for box, _ in parts_of_box(whole.box, nbytes // whole.array.dtype.itemsize):
            transfer = whole._replace(box=box)
            if packet and size + transfer.nbytes > nbytes:
                yield packet
                packet, size = [], 0
            packet.append(transfer)
            size += transfer.nbytes
    if packet:
        yield packet


def _values(data: Array, packet: Sequence[Transfer]) -> Iterator[tuple[Transfer, Array]]:
    """Yields the transfers of a packet with their places in its bytes."""
    at = _HEADER
    for transfer in packet:
        values = data[at : at + transfer.nbytes].view(transfer.array.dtype)
        yield transfer, values.reshape(box_shape(transfer.box))
        at += _room_for(transfer)


def _room_for(transfer: Transfer) -> int:
    return -(-transfer.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(packet: Sequence[Transfer]) -> Array:
    import numpy as np

    data = np.zeros(_HEADER + sum(map(_room_for, packet)), np.uint8)
    fill((transfer.array, transfer.box, values) for transfer, values in _values(data, packet))
    return data


def _as_delta(data: Array, base: Array | None) -> Array:
    """Returns what has changed in a packet, or all of it if there is no base."""
    import numpy as np

    from fmapper.sync.delta import encode

    data[0] = _BASE
    if base is None:
        return data
    header = np.zeros(_HEADER, np.uint8)
    header[0] = _DELTA
    return np.concatenate([header, encode(_bits(base), _bits(data)).read()])


def _whole(packet: Sequence[Transfer], data: Array, base: Array | None) -> Array:
    """Returns the values of a packet that has come.

    Raises:
        SyncError: They are another packet's.
    """
    import numpy as np

    from fmapper.sync.delta import Changes

    if data.nbytes >= _HEADER and data[0] == _DELTA and base is not None:
        bits = base[_HEADER:].view(np.uint16)
        Changes(LazyArray.of(data[_HEADER:]), bits.size, bits.dtype).apply(bits)
        return base
    if data.nbytes != _HEADER + sum(map(_room_for, packet)) or data[0] == _DELTA:
        raise SyncError(
            "processes have planned different syncs. Create them with models of the same classes"
        )
    return data


def _bits(data: Array) -> LazyArray:
    import numpy as np

    return LazyArray.of(data[_HEADER:].view(np.uint16))


def _as_text(rules: Rules) -> str:
    return rules.to_toml() if rules.rules else ""


def _from_text(text: str) -> Rules:
    from fmapper.checkpoints.rules.rules import Rules

    return Rules.from_toml(text + "\n") if text else Rules()
