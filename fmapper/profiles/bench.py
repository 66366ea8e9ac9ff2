"""Copies a model to a device, runs it there, times it and counts its operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fmapper.backends.arrays import HOST, Device, Exchange
from fmapper.backends.compute import Compute, Counts
from fmapper.backends.device import DeviceSpec
from fmapper.backends.discovery import adapter_of, adapters, get_adapter
from fmapper.backends.dtypes import is_inexact
from fmapper.backends.models import Models
from fmapper.backends.namespace import array_namespace
from fmapper.moves.mover import Mover, to_numpy
from fmapper.profiles import timing
from fmapper.profiles.predict import Traffic
from fmapper.profiles.result import ProfileCell
from fmapper.profiles.timing import Timing, rounds
from fmapper.tree.fmap import fmap
from fmapper.tree.walk import visit


class Bench:
    """A model and its inputs, the same for every device.

    Args:
        model: The model; it is copied and never changed.
        call: `call(model, *inputs)` is one run.
        batches: NumPy arrays by batch size.
        train: Whether a run includes the gradient.
        compile: See `Compute.runner`.
        seconds: The time to spend on one device at one batch size.
    """

    def __init__(
        self,
        model: Any,
        call: Callable[..., Any],
        batches: Mapping[int, tuple[Any, ...]],
        *,
        train: bool = False,
        compile: bool | None,
        seconds: float,
    ) -> None:
        self.model, self.batches, self.train = model, batches, train
        self.call = _with_gradient(call) if train else call
        self.compile, self.seconds = compile, seconds
        self._placed: dict[Device, Placed] = {}

    def on(self, device: Device) -> Placed:
        """Returns the copy of the model on a device, cached until `forget`."""
        if device not in self._placed:
            self._placed[device] = Placed(device, self)
        return self._placed[device]

    def forget(self, device: Device) -> None:
        """Frees the memory on a device."""
        self._placed.pop(device, None)

    @property
    def dtype(self) -> str:
        """The floating dtype of most bytes of the model and its inputs."""
        nbytes: dict[str, int] = {}
        first = next(iter(self.batches.values()))
        for array in arrays_of((self.model, first)):
            adapter = adapter_of(array)
            assert adapter is not None
            name = adapter.dtype(array)
            if is_inexact(name):
                nbytes[name] = nbytes.get(name, 0) + adapter.nbytes(array)
        return max(nbytes, key=lambda name: nbytes[name]) if nbytes else "float32"


class Placed:
    """A copy of the model on one device."""

    def __init__(self, device: Device, bench: Bench) -> None:
        self.device, self.bench = device, bench
        self.adapter = get_adapter(device.backend, Compute)
        self._ways: dict[int, Callable[[], tuple[Any, ...]]] = {}
        for size in list(bench.batches)[:1]:
            # Starting a device takes time, which must not count as part of the first run.
            self.adapter.wait(device, self.inputs(size))
        self.model = mover_to(device)(bench.model, copy=True)
        self.adapter.wait(device, arrays_of(self.model))
        loaded = adapters(Models)
        for _, node, kind in visit(self.model, once=True):
            if kind is not None and not bench.train:
                for adapter in loaded:
                    adapter.to_evaluation(node)
        self.run = self.adapter.runner(bench.call, self.model, compile=bench.compile)
        self._traffic: dict[int, Traffic] = {}
        self._host_in: list[float] = []
        self._host_out: list[float] = []

    def inputs(self, size: int) -> tuple[Any, ...]:
        """Transfers the inputs by the backend's own means, without the checks of a mover."""
        return self._ways[size]() if size in self._ways else self._way(size)()

    def _way(self, size: int) -> Callable[[], tuple[Any, ...]]:
        """Moves the inputs once with all checks, and returns a fast transfer for later runs."""
        host = self.bench.batches[size]
        if self.adapter.host_only:
            self._ways[size] = lambda: host
            return self._ways[size]
        moved = mover_to(self.device)(host)
        arrays = arrays_of(moved)
        load = loader(self.device, to_numpy(arrays))
        place = {id(array): at for at, array in enumerate(arrays)}

        if all(id(argument) in place for argument in moved):
            order = [place[id(argument)] for argument in moved]

            def bring() -> tuple[Any, ...]:
                new = load()
                return tuple(new[at] for at in order)
        else:

            def bring() -> tuple[Any, ...]:
                new = load()
                inputs = fmap(
                    lambda leaf: new[place[id(leaf)]] if id(leaf) in place else leaf, moved
                )
                return tuple(inputs)

        self._ways[size] = bring
        return bring

    def cell(self, size: int) -> ProfileCell:
        """Measures one batch size."""
        clock, wait, device = timing.clock, self.adapter.wait, self.device
        inputs = self.inputs(size)
        wait(device, inputs)
        start = clock()
        results = self.run(*inputs)
        wait(device, results)
        first_call = clock() - start
        traffic = self._traffic_of(inputs, results)
        del inputs, results

        def once() -> tuple[float, ...]:
            start = clock()
            inputs = self.inputs(size)
            wait(device, inputs)
            arrived = clock()
            results = self.run(*inputs)
            wait(device, results)
            computed = clock()
            # The gradient, which a training step needs on the device, stays there.
            sent = results[0] if self.bench.train else results
            arrays = [x for x in arrays_of(sent) if adapter_of(x) is self.adapter]
            leaving = clock()
            fetch(device, arrays)
            home = clock()
            return arrived - start, computed - arrived, home - leaving

        seconds = rounds(once, self.bench.seconds)
        come, compute, go = (Timing.of(times) for times in zip(*seconds, strict=True))
        totals = [sum(times) for times in seconds]
        moving = [
            (times[0] + times[2]) / total if total else 0.0
            for times, total in zip(seconds, totals, strict=True)
        ]
        self._traffic[size] = traffic
        self._host_in.append(come.median)
        self._host_out.append(go.median)
        return ProfileCell(
            str(device),
            size,
            come,
            compute,
            go,
            Timing.of(totals),
            Timing.of(moving),
            first_call,
            int(traffic.bytes_in),
            int(traffic.bytes_out),
            traffic.arrays_in,
            traffic.arrays_out,
            # The number of kernels explains the time of an accelerator.
            counts=None if device.kind == "cpu" else self.count(size),
        )

    def count(self, size: int) -> Counts | None:
        """Counts the operations and bytes of a run."""
        return self.adapter.count(self.bench.call, self.model, self.inputs(size))

    def traffic(self, size: int) -> Traffic:
        """Returns the bytes in and out of a run, and the latency of an empty transfer."""
        if size not in self._traffic:
            inputs = self.inputs(size)
            self._traffic[size] = self._traffic_of(inputs, self.run(*inputs))
        host_in, host_out = min(self._host_in, default=0.0), min(self._host_out, default=0.0)
        return dataclasses.replace(self._traffic[size], host_in=host_in, host_out=host_out)

    def _traffic_of(self, inputs: Any, results: Any) -> Traffic:
        sent, received = arrays_of(inputs), arrays_of(results[0] if self.bench.train else results)
        return Traffic(_nbytes(sent), _nbytes(received), len(sent), len(received))


def _with_gradient(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model so that a run returns loss and gradients, which compilers then cannot drop."""
    from fmapper.transforms.grad import value_and_grad

    def run(model: Any, *inputs: Any) -> tuple[Any, list[Any]]:
        def loss(model: Any) -> Any:
            return _as_loss(call(model, *inputs))

        value, gradient = value_and_grad(loss)(model)
        return value, arrays_of(gradient)

    return run


def _as_loss(results: Any) -> Any:
    arrays = []
    for array in arrays_of(results):
        adapter = adapter_of(array)
        if adapter is not None and is_inexact(adapter.dtype(array)):
            arrays.append(array)
    if len(arrays) == 1 and not arrays[0].shape:
        return arrays[0]
    xp = array_namespace(arrays)
    return sum(xp.mean(xp.abs(array) ** 2) for array in arrays)


def mover_to(device: Device) -> Mover:
    """Returns the mover to one device of one backend."""
    assert not isinstance(device.index, tuple)
    spec = DeviceSpec(device.backend, device.kind, device.index)
    return Mover(f"to_{device.backend}", backend=device.backend, spec=spec)


def loader(device: Device, arrays: Sequence[Any]) -> Callable[[], list[Any]]:
    """Returns the backend's own transfer of NumPy arrays to a device, without checks."""
    import numpy as np  # the host arrays

    adapter = get_adapter(device.backend, Compute)
    # Private: nobody else holds this memory, and it is not written to here.
    copies = [np.array(array, order="C") for array in arrays]
    exchange = Exchange(copies, private=range(len(copies)))
    return lambda: list(adapter.take(exchange, device, share=False))


def fetch(device: Device, arrays: Sequence[Any]) -> None:
    """Copies arrays to the host by the backend's own transfer."""
    adapter = get_adapter(device.backend, Compute)
    if not adapter.host_only:
        adapter.export(arrays, HOST)


def arrays_of(tree: Any) -> list[Any]:
    """Returns the arrays in a tree, each once."""
    leaves = (leaf for _, leaf, kind in visit(tree, once=True) if kind is None)
    return [leaf for leaf in leaves if adapter_of(leaf) is not None]


def _nbytes(arrays: Sequence[Any]) -> int:
    total = 0
    for array in arrays:
        adapter = adapter_of(array)
        assert adapter is not None
        total += adapter.nbytes(array)
    return total
