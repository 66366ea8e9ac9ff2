"""Runs models for inference with torch, and counts the operations and bytes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fmapper.backends import Counts
from fmapper_adapters.torch._private import TorchDispatchMode, pytree


def runner(call: Callable[..., Any], model: Any, compile: bool | None) -> Callable[..., Any]:
    """Runs `call` without gradients, compiled by `torch.compile` on request."""

    def forward(*inputs: Any) -> Any:
        return call(model, *inputs)

    function = torch.compile(forward) if compile else forward

    def run(*inputs: Any) -> Any:
        with torch.no_grad():
            return function(*inputs)

    return run


def count(call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts:
    """Runs the model once, and counts every operation that reaches a device."""
    flops, kernels, reads = FlopCounterMode(display=False), _Kernels(), _Reads()
    with torch.no_grad(), flops, kernels, reads:
        call(model, *inputs)
    return Counts(
        launches=kernels.launches,
        flops=flops.get_total_flops() + kernels.flops,
        nbytes=kernels.nbytes,
        syncs=kernels.syncs + reads.syncs,
    )


_aten = torch.ops.aten

# They allocate or alias memory, without a kernel.
_FREE = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
    _aten.lift_fresh,
    _aten._reshape_alias,
    _aten.resize_,
    _aten.set_,
}
# A value is read by the host: a copy, and a wait.
_WAITS = {_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal}
# The shape of the result depends on values: a kernel, and a wait for the size.
_SIZED_BY_VALUES = {
    _aten.nonzero,
    _aten.masked_select,
    _aten.unique_consecutive,
    _aten._unique2,
    _aten.unique_dim,
    _aten.bincount,
    _aten.repeat_interleave,
}
# The same if an index is a mask.
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_BY_ELEMENT = 1  # operations per element of the result if torch's counter has no formula


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that start a kernel: one each, since PyTorch fuses none by itself.

    A few start two or three (a convolution that changes the layout, a sort), a few none (a copy to
    the same device).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.nbytes, self.flops, self.syncs = 0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _WAITS:
            self.syncs += 1
            self.launches += packet is _aten.equal
        elif func.namespace != "prim" and not func.is_view and packet not in _FREE:
            self.launches += 1
            self.syncs += packet in _SIZED_BY_VALUES
            if packet in _INDEXING and any(_is_mask(index) for index in args[1]):
                self.launches += 1  # a kernel that counts, and the wait for the size
                self.syncs += 1
            made = _tensors(result)
            self.nbytes += sum(map(_nbytes, _tensors((args, kwargs)))) + sum(map(_nbytes, made))
            self.flops += _BY_ELEMENT * sum(t.numel() for t in made if t.is_floating_point())
        return result


class _Reads(TorchFunctionMode):
    """Counts reads of values by the host that are not operations.

    On the CPU reads are free; from a GPU, each read is a copy and a wait.
    """

    _METHODS = (
        torch.Tensor.cpu,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
    )

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = (*args[1:], kwargs.get("device")) if func is torch.Tensor.to else ()
        if func in self._METHODS or any(map(_is_cpu, targets)):
            self.syncs += 1
        return func(*args, **kwargs)


def _is_cpu(argument: Any) -> bool:
    if isinstance(argument, str):
        return argument.partition(":")[0] == "cpu"
    return isinstance(argument, torch.device) and argument.type == "cpu"


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0
