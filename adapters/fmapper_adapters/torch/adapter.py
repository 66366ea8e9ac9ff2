"""The adapter for PyTorch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils.dlpack

from fmapper import Device, DeviceInfo
from fmapper.backends import (
    DEVICE_KINDS,
    USUAL_GPU,
    Adapter,
    Exchange,
    Memory,
    NodeType,
    Observation,
)
from fmapper_adapters.torch.arrays import batches, casts, parameters, tensors, threads
from fmapper_adapters.torch.arrays import devices as _devices
from fmapper_adapters.torch.arrays.writes import Writes
from fmapper_adapters.torch.checkpoints.adapter import Files
from fmapper_adapters.torch.compute import parameter_standin
from fmapper_adapters.torch.meshes.dtensors import TorchMeshes
from fmapper_adapters.torch.modules import caches, module_nodes, optimizer_nodes, pytrees
from fmapper_adapters.torch.modules.layers import Layers
from fmapper_adapters.torch.pretrained.origin import origin_of
from fmapper_adapters.torch.training.facet import TorchOptimizers
from fmapper_adapters.torch.writing import Writing

if TYPE_CHECKING:
    from fmapper.backends import Counts
    from fmapper.generation import Generation
    from fmapper.programs import Lowering, Program

CPU = Device("torch", "cpu")
_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex(32|64|128)|float8_\w+")


class TorchAdapter(Files, TorchMeshes, Writes, Writing, Layers, TorchOptimizers, Adapter):
    """The adapter for tensors; `Parameter`s stay parameters as long as they stay in torch."""

    name: ClassVar[str] = "torch"
    keeps_memory: ClassVar[bool] = True
    has_modes: ClassVar[bool] = True
    conversion_options: ClassVar[tuple[str, ...]] = ("arguments", "fused", "structure")
    needs_source: ClassVar[str] = (
        "functions written in JAX are recorded with JAX, which is not installed"
    )
    aliases: ClassVar[dict[str, str]] = {"gpu": USUAL_GPU}
    keeps_of_a_gpu: ClassVar[str] = (
        "torch keeps the memory of freed tensors until torch.accelerator.empty_cache()"
    )
    array_types: ClassVar[tuple[type, ...]] = (torch.Tensor, torch.nn.Parameter)

    # Not a cached_property: its lock in Python 3.11 cannot be traced by torch.compile.
    @property
    def functional(self) -> Any:
        """Loaded when first asked for."""
        from fmapper_adapters.torch.compute import functional as _functional

        return _functional

    @property
    def random(self) -> Any:
        """Loaded when first asked for."""
        from fmapper_adapters.torch.compute import random as _random

        return _random

    def is_array_type(self, cls: type) -> bool:
        """Returns whether a class is `torch.Tensor` or a subclass."""
        return issubclass(cls, torch.Tensor)

    def device(self, array: Any) -> Device:
        """Returns `array.device`."""
        return _device(array.device)

    def dtype(self, array: Any) -> str:
        """Returns `array.dtype` without its module."""
        return _name(array.dtype)

    def shape(self, array: Any) -> tuple[int, ...]:
        """Returns `array.shape`.

        Raises:
            TypeError: The tensor has no shape: a lazy parameter or a nested tensor.
        """
        return tensors.shape(array)

    def devices(self) -> Sequence[Device]:
        """Returns the CPU, then the accelerators that torch sees."""
        return [CPU, *_devices.accelerators()]

    def as_device(self, device: Any) -> Device | None:
        """Returns a `torch.device`."""
        return _device(device) if isinstance(device, torch.device) else None

    def find_device(self, kind: str, index: int | None) -> Device:
        """Finds a device; `meta` always exists; without an index, the current accelerator."""
        if kind == "meta":
            return Device("torch", "meta")
        device = super().find_device(kind, index)
        if device.is_accelerator:
            _devices.check_fork(device)
        if index is not None or not device.is_accelerator:
            return device
        return replace(device, index=torch.accelerator.current_device_index())

    def device_info(self, device: Device) -> DeviceInfo:
        """Returns name and memory as the driver reports them; torch's cache is not free memory."""
        if device.kind in ("cpu", "meta") or not isinstance(device.index, int):
            return super().device_info(device)
        return DeviceInfo(device, *_devices.about(device.kind, device.index))

    def why_not(self, kind: str, index: int | None) -> str:
        """Returns whether the build, the driver or the index is to blame."""
        return _devices.why_not(kind) or super().why_not(kind, index)

    def abstract(self, shape: Sequence[int], dtype: str) -> Any:
        """Returns a tensor on the device `meta`."""
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Captures grad and inference mode, default device and accelerator; adds a stream."""
        return threads.settings()

    def hand_over(self, arrays: Sequence[Any]) -> Callable[[], object] | None:
        """Orders the streams of two threads, for tensors on an accelerator."""
        return threads.hand_over(arrays)

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """Moves in batches, along with gradients and attributes of parameters."""
        return batches.to_device(arrays, _torch_device(device))

    def nbytes(self, array: Any) -> int:
        """Returns the bytes stored: of a sparse tensor, values and indices."""
        return tensors.nbytes(array)

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the dtype, and the device unless it is the CPU."""
        return [array.dtype if array.is_cpu else (array.dtype, array.device) for array in arrays]

    def is_freed(self, array: Any) -> bool:
        """Returns whether the storage of a tensor was freed, as FSDP does between uses."""
        return tensors.is_freed(array)

    def check(self, array: Any) -> None:
        """Checks that a tensor has values in strided memory.

        Raises:
            TypeError: The tensor has none; the message says what it is.
        """
        tensors.check(array)

    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Returns views for NumPy, or DLPack where the target is a GPU too."""
        quick = tensors.quick_views(arrays)
        if quick is not None:
            return Exchange(quick)
        plain: list[torch.Tensor] = []
        private: set[int] = set()
        for at, array in enumerate(arrays):
            values, is_copy = tensors.plain(array)
            plain.append(values)
            if is_copy:
                private.add(at)
        device = next((values.device for values in plain), torch.device("cpu"))
        if target.is_accelerator and DEVICE_KINDS.get(device.type) == DEVICE_KINDS.get(target.kind):
            dense = [values.contiguous() for values in plain]
            private |= {at for at, values in enumerate(plain) if dense[at] is not values}
            data = list(map(_devices.Shared, dense))
            return Exchange(data, private=private, device=_device(device))
        if device.type != "cpu":
            local = batches.carry(plain, torch.device("cpu"))
            return Exchange([tensors.to_numpy(v) for v in local], private=range(len(plain)))
        return Exchange([tensors.to_numpy(values) for values in plain], private=private)

    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Wraps the memory of the exchange, or copies it to the device."""
        target = _torch_device(device)
        if exchange.device is not None and not share:
            return _devices.take(exchange.data, exchange.private, target)
        if exchange.device is not None:
            wrapped: Iterable[Any] = map(torch.utils.dlpack.from_dlpack, exchange.data)
        elif share and exchange.owners is not None:
            wrapped = map(torch.utils.dlpack.from_dlpack, exchange.owners)
        elif target.type == "cpu":
            return tensors.all_from_numpy(exchange.data, must_share=share)
        elif not share:
            return batches.take(exchange.data, target)
        else:
            wrapped = map(tensors.from_numpy, exchange.data)
        if share:
            return (tensors.same_device(tensor, target) for tensor in wrapped)
        return (tensor if tensor.device == target else tensor.to(target) for tensor in wrapped)

    def storable(self, dtype: str) -> str | None:
        """Returns the dtypes of torch."""
        is_dtype = isinstance(getattr(torch, dtype, None), torch.dtype)
        return dtype if is_dtype and _DTYPES.fullmatch(dtype) else None

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """Casts by `Tensor.to`, along with gradients and attributes of parameters."""
        new = casts.cast(array, getattr(torch, dtype))
        return new, casts.has_survived(array.detach(), new.detach())

    def casts(self, arrays: Sequence[Any], dtype: str) -> Iterable[tuple[Any, bool]]:
        """Casts many tensors, and checks many small results at once."""
        return casts.casts(arrays, getattr(torch, dtype))

    def like(self, new: Any, old: Any) -> Any:
        """Returns a parameter in place of a parameter, except while a gradient is taken."""
        if isinstance(new, torch.nn.Parameter) or parameter_standin.stands_for(old) is None:
            return new
        if parameter_standin.is_differentiated(new):
            return parameter_standin.stand_in(new, old)
        return parameters.as_parameter(new, old)

    def swap(self, old: Any, new: Any) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """Swaps as `Module.to` does, so that autograd leaves keep their identity."""
        return parameters.swap(old, new)

    def generator_device(self, x: Any) -> Device | None:
        """Returns `generator.device`."""
        return _device(x.device) if issubclass(type(x), torch.Generator) else None

    def generator_to(self, generator: Any, device: Device) -> Any:
        """Copies the state to a device of the same kind; seeds one of another kind from it."""
        return tensors.generator_on(generator, _torch_device(device))

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Returns False if all tensors are dense and their spans are disjoint."""
        return tensors.may_share_memory(arrays)

    def memory(self, array: Any) -> Memory | None:
        """Returns the memory of strided tensors with data."""
        if not tensors.has_memory(array) or not array.numel():
            return None
        lazy = array.is_conj() or array.is_neg()
        return Memory(array.data_ptr(), tuple(array.stride()), array.element_size(), not lazy)

    def shares_elements(self, a: Any, b: Any) -> bool:
        """Returns whether two tensors have an element in common."""
        return tensors.shares_elements(a, b)

    def view(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], offset: int, like: Any
    ) -> Any:
        """Calls `as_strided`, as part of the autograd graph if the old view was."""
        if any(stride < 0 for stride in strides):
            raise TypeError("torch has no negative strides")
        start = base.storage_offset() + offset
        if not isinstance(like, torch.Tensor):
            return base.as_strided(shape, strides, start)
        if not parameters.is_replaceable(like):
            return base.as_strided(shape, strides, start)
        values = base.detach().as_strided(shape, strides, start)
        grad = None if like.grad is None else like.grad.to(values, copy=True)
        return parameters.replace(like, values, grad)

    def is_trainable(self, array: Any) -> bool:
        """Returns whether a tensor is not a frozen parameter."""
        return parameter_standin.is_trained(array) is not False

    def training_rule(self, cls: type) -> Callable[[Any], bool] | None:
        """Trains parameters of modules and optimizers unless frozen, but not buffers or moments."""
        if issubclass(cls, _WITH_PARAMETERS):
            return _is_trained_parameter
        return _is_never_trained if optimizer_nodes.node_type(cls) is not None else None

    def computes_with(self, cls: type) -> str | None:
        """Returns torch for modules."""
        return self.name if issubclass(cls, torch.nn.Module) else None

    def to_evaluation(self, node: Any) -> None:
        """Calls `module.eval()`: no dropout, fixed running statistics."""
        if isinstance(node, torch.nn.Module) and node.training:
            node.eval()

    def runner(
        self, call: Callable[..., Any], model: Any, *, compile: bool | None
    ) -> Callable[..., Any]:
        """Runs eagerly without gradients, or by `torch.compile` if asked to."""
        from fmapper_adapters.torch import profile

        return profile.runner(call, model, compile)

    def wait(self, device: Device, results: Any) -> None:
        """Calls `torch.accelerator.synchronize`."""
        if device.kind not in ("cpu", "meta"):
            torch.accelerator.synchronize(_torch_device(device))

    def count(self, call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts | None:
        """Runs the model once under a mode that counts every operation."""
        from fmapper_adapters.torch import profile

        return profile.count(call, model, inputs)

    def no_transforms(self) -> str | None:
        """Returns None: all functions can be transformed."""
        return None

    def untransformable(self, array: Any, error: Exception) -> str | None:
        """Finds a lazy parameter, or a nested tensor that torch cannot record."""
        return tensors.why_untransformable(array, error)

    def value_and_grad(
        self,
        run: Callable[[Sequence[Any]], tuple[Any, list[Any]]],
        arrays: Sequence[Any],
        elsewhere: Callable[[], bool],
    ) -> tuple[Any, list[Any], Sequence[Any]]:
        """Differentiates by autograd, or by `torch.func` within `torch.func`."""
        from fmapper_adapters.torch.compute import transforms

        return transforms.value_and_grad(run, arrays, elsewhere)

    def vectorize(
        self,
        run: Callable[[Sequence[Any]], list[Any]],
        arrays: Sequence[Any],
        axes: Sequence[int | None],
    ) -> list[Any]:
        """Calls `torch.func.vmap`."""
        from fmapper_adapters.torch.compute import transforms

        return transforms.vectorize(run, arrays, axes)

    def compile(
        self,
        run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]],
        give_up: Callable[[str], None],
    ) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
        """Calls `torch.compile`."""
        from fmapper_adapters.torch.compute import transforms

        return transforms.compile(run, give_up)

    def hollow(self, array: Any) -> Any:
        """Returns a tensor on the device `meta`; a parameter if the array is one."""
        values = torch.empty(array.shape, dtype=array.dtype, device="meta")
        if isinstance(array, torch.nn.Parameter):
            return torch.nn.Parameter(values, requires_grad=array.requires_grad)
        return values

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node types of modules, optimizers and their relatives."""
        return (
            module_nodes.node_type(cls) or optimizer_nodes.node_type(cls) or caches.node_type(cls)
        )

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of exactly this class in `torch.utils._pytree`."""
        return pytrees.registered_type(cls)

    def register_functor(self, cls: type) -> None:
        """Registers the class with `torch.utils._pytree`, which `torch.func` uses."""
        pytrees.register_functor(cls)

    def is_model(self, x: Any) -> bool:
        """Returns whether an object is a module."""
        return isinstance(x, torch.nn.Module)

    def advice(self, x: Any) -> str:
        """Returns what to convert instead of an exported program."""
        is_exported = isinstance(x, torch.export.ExportedProgram)
        return "convert its module, exported.module()" if is_exported else ""

    def export_program(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        strict: bool | None,
        **settings: Any,
    ) -> Program:
        """Records the model by `torch.export`."""
        from fmapper_adapters.torch.record import export as _export

        program = _export.export_program(model, args, kwargs, **settings)
        source = getattr(model, "program", None) if hasattr(model, "as_program") else None
        if source is not None:  # converted to torch before: its forward takes any arguments
            program.signature, program.name = source.signature, source.name
        return program

    def export_generation(self, model: Any, **settings: Any) -> Generation:
        """Records a model of transformers, or a module with `prefill` and `step`."""
        from fmapper_adapters.torch.generation import record as _record

        return _record.export_generation(model, **settings)

    def lowers(self, op: str) -> bool:
        """Returns whether an operation is a primitive of JAX."""
        return op.startswith("lax::")

    def program_of(self, model: Any) -> Program | None:
        """Returns the program of a converted model."""
        from fmapper_adapters.torch.model.torch_model import TorchModel

        return model.program if isinstance(model, TorchModel) else None

    def origin_of(self, model: Any) -> str:
        """Returns the folder that a model, converted or of transformers, was made from."""
        return super().origin_of(model) or origin_of(model)

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """Returns a `TorchModel`, or with `structure=True` a module with the model's classes."""
        from fmapper_adapters.torch.model import torch_model

        modes = options.pop("modes", False)
        if options.pop("structure", False):
            return self.build(program, modes=modes)
        return torch_model.from_program(program, lowerings, **options)

    def call(self, model: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        """Calls a module without gradients, on copies of the inputs."""
        from fmapper_adapters.torch import verify

        return verify.call_module(model, args, kwargs, **options)

    def outcome(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
    ) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
        """Prepares a call of a model that was converted from another framework."""
        from fmapper_adapters.torch import verify

        return verify.outcome(model, args, kwargs, train=train)

    def modes(self, model: Any, args: Any, kwargs: Any) -> Mapping[str, bool]:
        """Returns the mode of a module; its submodules may have others."""
        is_module = isinstance(model, torch.nn.Module)
        return {f"training={model.training}": model.training} if is_module else {}

    def call_in_float64(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        train: bool | None = None,
    ) -> Any | None:
        """Calls a copy of a module in float64."""
        from fmapper_adapters.torch import verify

        return verify.call_in_float64(model, args, kwargs, train=train)

    def watch(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        whole: Collection[str] = (),
        train: bool | None = None,
        double: bool = False,
    ) -> Iterable[Observation] | None:
        """Records the operations of the program that `convert` makes."""
        from fmapper_adapters.torch import verify

        return verify.watch(model, args, kwargs, whole, train=train, double=double)


_WITH_PARAMETERS = (torch.nn.Module, torch.optim.Optimizer)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_never_trained(array: Any) -> bool:
    return False


def _is_trained_parameter(array: Any) -> bool:
    return parameter_standin.is_trained(array) is True


@functools.cache
def _device(device: torch.device) -> Device:
    has_index = device.type not in ("cpu", "meta")
    return Device("torch", device.type, device.index or 0 if has_index else None)


def _torch_device(device: Device) -> torch.device:
    if isinstance(device.index, int):
        return torch.device(device.kind, device.index)
    return torch.device(device.kind)
