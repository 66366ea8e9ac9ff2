"""`Sync`: brings the weights of a model that is trained to one that runs, again and again."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fmapper.progress import step
from fmapper.render import readable_bytes
from fmapper.sync.ends import End
from fmapper.sync.exchange import Exchanger
from fmapper.sync.inputs import Input, with_inputs
from fmapper.sync.pairing import rules_between
from fmapper.sync.planning import SyncPlan, match_arrays, summarise, transfers
from fmapper.tracebacks import short_traceback

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    import numpy as np

    from fmapper.checkpoints.boxes import Box
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.sync.planning import Transfer
    from fmapper.sync.transports import Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyncStats:
    """The work of a call in this process.

    Attributes:
        seconds: How long it took.
        nbytes: Bytes of the arrays of the target that are here.
        sent: Bytes that were sent to other processes.
        received: Bytes that came from others.
    """

    seconds: float
    nbytes: int
    sent: int
    received: int


class Sync(Generic[T]):
    """Keeps the weights of a running model in step with those of another one.

    Names, layouts, dtypes and parts are planned once; a call copies. What is trained may be
    sharded otherwise than what runs, and be in other processes: everyone sends what others need
    and nothing else. Either all arrays of the target are new after a call or, when it raises, none.

    Arrays of torch and NumPy in the target are written in place. Those of JAX are replaced: in
    modules of Flax and in generators, which use them from their next call on, or in a new tree,
    that a call returns.

    Args:
        source: The model that is trained, or its arrays by name; None in a process without it.
        target: The model that runs: a model of any framework, a generator, a dict of arrays; None
            in a process without it.
        rules: How names and layouts of the source become those of the target. None where the names
            are the same, as those of a model and what `convert` made of it, and where
            `fmapper.transfer` finds them.
        keep: Patterns for names of the target that stay as they are where the source lacks them.
        share: Let arrays of JAX that are right as they are be the same objects in both models. The
            source must not donate them.
        transport: How bytes go to other processes: a `fmapper.sync.Transport`, a
            `fmapper.sync.Folder`; None for the processes of `torch.distributed`, where it was
            started. Every process creates the sync and calls it.
        timeout: Seconds without a message from another process, after which it counts as failed.

    Attributes:
        stats: What the last call has done.

    Raises:
        SyncError: An array of either side has no counterpart, or a process lacks one.
        AmbiguousTransferError: There are no rules, and it is not sure which arrays belong together.

    Examples:
        >>> import fmapper, torch
        >>> trained, running = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> sync = fmapper.Sync(trained, running)
        >>> _ = torch.nn.init.ones_(trained.weight)
        >>> sync() is running
        True
        >>> running.weight.tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    @short_traceback
    def __init__(
        self,
        source: Any,
        target: T,
        rules: Rules | None = None,
        *,
        keep: Sequence[str] = (),
        share: bool = False,
        transport: Transport | None = None,
        timeout: float = 60.0,
    ) -> None:
        from fmapper.checkpoints.formats.format import without_collection
        from fmapper.checkpoints.rules.rules import Rules
        from fmapper.sync.here import Here
        from fmapper.sync.on_device import lies_together

        with step("planning the sync"), without_collection():
            self._exchange = Exchanger(transport, timeout)
            way = self._exchange.transport
            self._source = None if source is None else End(source, "source", way)
            self._target = None if target is None else End(target, "target", way, keep)
            if self._source is not None and self._target is not None:
                rules = rules_between(source, target, self._source, self._target, rules)
            ours = self._source, self._target, rules or Rules()
            sources, targets, rules, layout = self._exchange.outlines(*ours)
            made, kept = match_arrays(sources[0], targets[0], rules)
            held = {n: x for n, x in layout.apply(made).items() if n in targets[1]}
            is_computed = partial(lies_together, source=sources[1], share=share)
            computed = {n: x for n, x in held.items() if is_computed(x, targets[1][n])}
            inputs: dict[Hashable, Input] = {}
            apart = {n: with_inputs(x, inputs) for n, x in held.items() if n not in computed}
            moved: dict[str, list[Transfer]] = {}
            parts = [*transfers(apart, sources[1], targets[1], moved)]
            sent = [each for each in parts if each.sender == self._exchange.rank]
            ends = self._source, self._target
            came = self._exchange.plan(parts)
            self._here = Here(*ends, apart, computed, sent, came, share=share)
            for end in filter(None, ends):
                end.forget()
            self._summary = partial(summarise, held, targets[1], kept, moved)
        self.stats = SyncStats(0.0, 0, 0, 0)
        self._lock = threading.Lock() if way is None else way.lock

    @cached_property
    def plan(self) -> SyncPlan:
        """The plan: the arrays, their layouts and ways; printing it gives a table."""
        return self._summary()

    @property
    def target(self) -> T:
        """The model that runs, with the arrays of the last call."""
        return self._target.tree if self._target is not None else None  # type: ignore[return-value]

    @short_traceback
    def __call__(self, source: Any = None, *, delta: bool = False) -> T:
        """Copies the current weights.

        Args:
            source: A new version of the source, where that is not changed in place: parameters of
                JAX. It has the structure that the sync was planned with.
            delta: Send to other processes only what has changed since the last call.

        Returns:
            The target; a new one if it cannot be changed, as a model of Equinox.

        Raises:
            SyncError: A shape, dtype or the structure is another one than planned, or a process
                has failed; the target is as it was.
            LossyCastError: A finite value becomes infinite in the dtype of the target.
        """
        target: T = self._run(source, delta=delta)
        return target

    @short_traceback
    def parts(self, source: Any = None) -> Iterator[tuple[str, Box, np.ndarray[Any, Any]]]:
        """Yields the new weights of the target, for an engine with its own way to load them.

        The target only says names, shapes, dtypes and which parts are here, so it needs no memory:
        tensors on the device `meta`, `jax.ShapeDtypeStruct`s.

        Args:
            source: As for a call.

        Returns:
            For each part of an array of the target: its name, the range of each dimension, and
            its values in memory of the sync, which the next call uses again.

        Raises:
            SyncError: As for a call; or the target has memory that a call writes to.

        Examples:
            >>> import fmapper, torch
            >>> layer = torch.nn.Linear(3, 2, dtype=torch.float64)
            >>> engine = torch.nn.Linear(3, 2, device="meta")
            >>> for name, box, values in fmapper.Sync(layer, engine).parts():
            ...     print(name, box, values.dtype)
            weight ((0, 2), (0, 3)) float32
            bias ((0, 2),) float32
        """
        return self._run(source, is_written=False)  # type: ignore[no-any-return]

    def _run(self, source: Any, *, is_written: bool = True, delta: bool = False) -> Any:
        here, began = self._here, time.perf_counter()
        with self._lock:
            try:
                begin = partial(here.begin, source, is_written=is_written)
                moved = self._exchange.run(here, begin, delta=delta)
                result = here.commit() if is_written else here.parts()
            finally:
                here.release()
            self.stats = SyncStats(time.perf_counter() - began, here.nbytes, *moved)
        return result

    def __repr__(self) -> str:
        """Shows how many arrays there are."""
        return f"Sync({len(self.plan)} arrays, {readable_bytes(self.plan.nbytes)})"
