"""The adapter for PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.utils.dlpack

from fmapper import Adapter, Device, DeviceInfo, Exchange, Memory, NodeType
from fmapper_adapters.torch import _devices, _host, _nodes, _threads

CPU = Device("torch", "cpu")
_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex(32|64|128)|float8_\w+")


class TorchAdapter(Adapter):
    """Arrays are tensors; `Parameter`s stay parameters as long as they stay in torch."""

    name: ClassVar[str] = "torch"
    aliases: ClassVar[dict[str, str]] = {"gpu": "cuda"}

    def is_array_type(self, cls: type) -> bool:
        """Tensors and all subclasses."""
        return issubclass(cls, torch.Tensor)

    def device(self, array: Any) -> Device:
        """`array.device`."""
        return _device(array.device)

    def dtype(self, array: Any) -> str:
        """`array.dtype` without its module."""
        return str(array.dtype).removeprefix("torch.")

    def shape(self, array: Any) -> tuple[int, ...]:
        """`array.shape`."""
        return tuple(array.shape)

    def devices(self) -> Sequence[Device]:
        """The CPU, then the accelerators that torch sees."""
        found = [CPU]
        found += [Device("torch", "cuda", i) for i in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            found.append(Device("torch", "mps", 0))
        if torch.xpu.is_available():
            found += [Device("torch", "xpu", i) for i in range(torch.xpu.device_count())]
        return found

    def as_device(self, device: Any) -> Device | None:
        """A `torch.device`."""
        return _device(device) if isinstance(device, torch.device) else None

    def find_device(self, kind: str, index: int | None) -> Device:
        """As for every backend; `meta` is everywhere; without an index, the current CUDA device."""
        if kind == "meta":
            return Device("torch", "meta")
        if kind == "gpu":
            kind = next((d.kind for d in self.devices() if d.kind != "cpu"), "cuda")
        if self.aliases.get(kind, kind) == "cuda" and index is None and torch.cuda.is_available():
            index = torch.cuda.current_device()
        return super().find_device(kind, index)

    def device_info(self, device: Device) -> DeviceInfo:
        """Name and memory as the driver has them; what torch keeps for reuse is not free."""
        if device.kind in ("cpu", "meta") or not isinstance(device.index, int):
            return super().device_info(device)
        return DeviceInfo(device, *_devices.about(device.kind, device.index))

    def why_not(self, kind: str, index: int | None) -> str:
        """Whether the build, the driver or the index is to blame."""
        return _devices.why_not(kind) or super().why_not(kind, index)

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Grad and inference mode, default device, current CUDA device; a stream of its own."""
        return _threads.settings()

    def hand_over(self, arrays: Sequence[Any]) -> Callable[[], object] | None:
        """Orders the streams of two threads, for tensors on CUDA."""
        return _threads.handed_over(arrays)

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterator[Any]:
        """`Tensor.to`, with everything that hangs on a parameter."""
        target = _torch_device(device)
        for array in arrays:
            yield _host.moved(array, lambda t: t.to(target, copy=True))

    def export(self, arrays: Sequence[Any], target: Device) -> Iterator[Exchange]:
        """Views for NumPy, or DLPack where the target is a GPU too."""
        for array in arrays:
            plain, private = _host.plain(array)
            if plain.device.type == "cuda" and target.kind in ("gpu", "cuda"):
                yield Exchange(plain.contiguous(), private=private, device=_device(plain.device))
            elif plain.device.type != "cpu":
                yield Exchange(_host.to_numpy(plain.cpu()), private=True)
            else:
                yield Exchange(_host.to_numpy(plain), private=private)

    def take(
        self, exchanges: Iterable[Exchange], device: Device, *, copy: bool | None
    ) -> Iterator[Any]:
        """Wraps the memory of the exchange, then clones it unless it is private."""
        target = _torch_device(device)
        for exchange in exchanges:
            if exchange.device is not None:
                found = torch.utils.dlpack.from_dlpack(exchange.data)
                shared = not exchange.private
            elif copy is False and exchange.owner is not None:
                found, shared = torch.utils.dlpack.from_dlpack(exchange.owner), True
            else:
                found, shared = _host.from_numpy(exchange.data, must_share=copy is False)
                shared = shared and not exchange.private
            if found.device != target:
                if copy is False:
                    raise BufferError(f"memory on {found.device} cannot be shared with {target}")
                yield found.to(target)
            else:
                yield found.clone() if shared and copy is not False else found

    def storable(self, dtype: str) -> str | None:
        """The dtypes of torch."""
        found = isinstance(getattr(torch, dtype, None), torch.dtype)
        return dtype if found and _DTYPES.fullmatch(dtype) else None

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """`Tensor.to`, with everything that hangs on a parameter."""
        target = getattr(torch, dtype)
        to_real = array.is_complex() and not target.is_complex
        new = _host.moved(array, lambda t: (t.real if to_real else t).to(target))
        return new, _host.survived(array.detach(), new.detach())

    def like(self, new: Any, old: Any) -> Any:
        """A parameter where there was one; inside torch.func a tensor stays what it is."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(new)
        if wrapped or not isinstance(old, torch.nn.Parameter):
            return new
        return new if isinstance(new, torch.nn.Parameter) else _host.as_parameter(new, old)

    def memory(self, array: Any) -> Memory | None:
        """Of strided tensors with data."""
        if not _host.has_memory(array) or not array.numel():
            return None
        lazy = array.is_conj() or array.is_neg()
        return Memory(array.data_ptr(), tuple(array.stride()), array.element_size(), not lazy)

    def shares_elements(self, a: Any, b: Any) -> bool:
        """Whether two tensors have an element in common."""
        return _host.shares_elements(a, b)

    def view(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], offset: int, like: Any
    ) -> Any:
        """`as_strided`, part of the autograd graph if the old view was."""
        if any(stride < 0 for stride in strides):
            raise TypeError("torch has no negative strides")
        start = base.storage_offset() + offset
        if not isinstance(like, torch.Tensor):
            return base.as_strided(shape, strides, start)
        if not like.is_leaf:
            return base.as_strided(shape, strides, start)
        return _host.replaced(like, base.detach().as_strided(shape, strides, start))

    def node_type(self, cls: type) -> NodeType | None:
        """Modules."""
        return _nodes.node_type(cls)

    def registered_type(self, cls: type) -> NodeType | None:
        """What `torch.utils._pytree` has for exactly this class."""
        return _nodes.registered_type(cls)

    def register_functor(self, cls: type) -> None:
        """Enters the class into `torch.utils._pytree`, which `torch.func` goes by."""
        _nodes.register_functor(cls)


def _device(device: torch.device) -> Device:
    if device.type in ("cpu", "meta"):
        return Device("torch", device.type)
    return Device("torch", device.type, 0 if device.index is None else device.index)


def _torch_device(device: Device) -> torch.device:
    if isinstance(device.index, int):
        return torch.device(device.kind, device.index)
    return torch.device(device.kind)
