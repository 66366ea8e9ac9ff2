"""The adapter for PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.utils.dlpack

from fmapper import Adapter, Device, DeviceInfo, Exchange, Memory, NodeType, Observation, Program
from fmapper_adapters.torch import _batch, _devices, _host, _nodes, _optim, _threads

CPU = Device("torch", "cpu")
_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex(32|64|128)|float8_\w+")


class TorchAdapter(Adapter):
    """Arrays are tensors; `Parameter`s stay parameters as long as they stay in torch."""

    name: ClassVar[str] = "torch"
    keeps_memory: ClassVar[bool] = True
    aliases: ClassVar[dict[str, str]] = {"gpu": "cuda"}

    def is_array_type(self, cls: type) -> bool:
        """Tensors and all subclasses."""
        return issubclass(cls, torch.Tensor)

    def is_fitted_type(self, cls: type) -> bool:
        """Parameters: modules make parameters of what takes their place."""
        return issubclass(cls, torch.nn.Parameter)

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

    def abstract(self, shape: Sequence[int], dtype: str) -> Any:
        """A tensor on the device `meta`."""
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Grad and inference mode, default device, current CUDA device; a stream of its own."""
        return _threads.settings()

    def hand_over(self, arrays: Sequence[Any]) -> Callable[[], object] | None:
        """Orders the streams of two threads, for tensors on CUDA."""
        return _threads.handed_over(arrays)

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """In batches over the link of a GPU, with everything that hangs on a parameter."""
        return _batch.to_device(arrays, _torch_device(device))

    def nbytes(self, array: Any) -> int:
        """Of what is stored: of a sparse tensor the values and where they are."""
        return _host.nbytes(array)

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The dtype, and the device unless it is the CPU."""
        return [array.dtype if array.is_cpu else (array.dtype, array.device) for array in arrays]

    def check(self, array: Any) -> None:
        """Refuses tensors without values in strided memory.

        Raises:
            TypeError: Says what it is.
        """
        _host.check(array)

    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Views for NumPy, or DLPack where the target is a GPU too."""
        quick = _host.quick_views(arrays)
        if quick is not None:
            return Exchange(quick)
        plain: list[torch.Tensor] = []
        private: set[int] = set()
        for at, array in enumerate(arrays):
            values, is_copy = _host.plain(array)
            plain.append(values)
            if is_copy:
                private.add(at)
        device = next((values.device for values in plain), torch.device("cpu"))
        if device.type == "cuda" and target.kind in ("gpu", "cuda"):
            dense = [values.contiguous() for values in plain]
            private |= {at for at, values in enumerate(plain) if dense[at] is not values}
            return Exchange(dense, private=private, device=_device(device))
        if device.type != "cpu":
            local = _batch.carried(plain, torch.device("cpu"))
            return Exchange([_host.to_numpy(v) for v in local], private=range(len(plain)))
        return Exchange([_host.to_numpy(values) for values in plain], private=private)

    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Wraps the memory of the exchange, or brings it to another device."""
        target = _torch_device(device)
        if exchange.device is not None:
            found: Iterable[Any] = map(torch.utils.dlpack.from_dlpack, exchange.data)
        elif share and exchange.owners is not None:
            found = map(torch.utils.dlpack.from_dlpack, exchange.owners)
        elif target.type == "cpu":
            return _host.all_from_numpy(exchange.data, must_share=share)
        elif not share:
            return _batch.carried([_host.from_numpy(a) for a in exchange.data], target)
        else:
            found = map(_host.from_numpy, exchange.data)
        if share:
            return (_host.same_device(tensor, target) for tensor in found)
        return (tensor if tensor.device == target else tensor.to(target) for tensor in found)

    def storable(self, dtype: str) -> str | None:
        """The dtypes of torch."""
        found = isinstance(getattr(torch, dtype, None), torch.dtype)
        return dtype if found and _DTYPES.fullmatch(dtype) else None

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """`Tensor.to`, with everything that hangs on a parameter."""
        new = _host.cast(array, getattr(torch, dtype))
        return new, _host.survived(array.detach(), new.detach())

    def like(self, new: Any, old: Any) -> Any:
        """A parameter where there was one; inside torch.func a tensor stays what it is."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(new)
        if wrapped or not isinstance(old, torch.nn.Parameter):
            return new
        return new if isinstance(new, torch.nn.Parameter) else _host.as_parameter(new, old)

    def swap(self, old: Any, new: Any) -> Callable[[], object] | None:
        """As `Module.to` does: leaves of autograd stay the same objects."""
        return _host.swap(old, new)

    def generator_device(self, x: Any) -> Device | None:
        """`generator.device`."""
        return _device(x.device) if isinstance(x, torch.Generator) else None

    def generator_to(self, generator: Any, device: Device) -> Any:
        """The state goes along to devices of the same kind; another kind is seeded from it."""
        return _host.generator_on(generator, _torch_device(device))

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Not if each is dense and ends before the next one begins."""
        return _host.may_share_memory(arrays)

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
        values = base.detach().as_strided(shape, strides, start)
        grad = None if like.grad is None else like.grad.to(values, copy=True)
        return _host.replaced(like, values, grad)

    def is_trainable(self, array: Any) -> bool:
        """All but frozen parameters; a plain tensor does not say."""
        return not isinstance(array, torch.nn.Parameter) or array.requires_grad

    def trained_below(self, cls: type) -> Callable[[Any], bool] | None:
        """In a module or an optimizer: parameters that are not frozen; no buffers, no moments."""
        if issubclass(cls, _WITH_PARAMETERS):
            return _is_trained_parameter
        return _is_never_trained if _optim.node_type(cls) is not None else None

    def node_type(self, cls: type) -> NodeType | None:
        """Modules, optimizers, and what goes with them."""
        return _nodes.node_type(cls) or _optim.node_type(cls)

    def registered_type(self, cls: type) -> NodeType | None:
        """What `torch.utils._pytree` has for exactly this class."""
        return _nodes.registered_type(cls)

    def register_functor(self, cls: type) -> None:
        """Enters the class into `torch.utils._pytree`, which `torch.func` goes by."""
        _nodes.register_functor(cls)

    def is_model(self, x: Any) -> bool:
        """Modules."""
        return isinstance(x, torch.nn.Module)

    def export_program(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        dynamic_shapes: Any,
        train: bool,
    ) -> Program:
        """What `torch.export` records."""
        from fmapper_adapters.torch import _export  # torch.export is slow to import

        return _export.export_program(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, train=train
        )

    def call(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A module in evaluation mode, without gradients, on copies of the inputs."""
        from fmapper_adapters.torch import _watch

        return _watch.call(model, args, kwargs)

    def call_in_float64(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any | None:
        """A copy of a module in float64."""
        from fmapper_adapters.torch import _watch

        return _watch.call_in_float64(model, args, kwargs)

    def watch(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterable[Observation] | None:
        """The operations of the program that `convert` records."""
        from fmapper_adapters.torch import _watch

        return _watch.watch(model, args, kwargs)


_WITH_PARAMETERS = (torch.nn.Module, torch.optim.Optimizer)


def _is_never_trained(array: Any) -> bool:
    return False


def _is_trained_parameter(array: Any) -> bool:
    return isinstance(array, torch.nn.Parameter) and array.requires_grad


def _device(device: torch.device) -> Device:
    if device.type in ("cpu", "meta"):
        return Device("torch", device.type)
    return Device("torch", device.type, 0 if device.index is None else device.index)


def _torch_device(device: Device) -> torch.device:
    if isinstance(device.index, int):
        return torch.device(device.kind, device.index)
    return torch.device(device.kind)
