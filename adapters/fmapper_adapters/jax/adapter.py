"""The adapter for JAX."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fmapper import Device, DeviceInfo, DeviceUnavailableError
from fmapper.backends import DEVICE_KINDS, Compute, Exchange, Nodes, NodeType, Observation
from fmapper_adapters.jax import tree
from fmapper_adapters.jax.arrays import devices as _devices
from fmapper_adapters.jax.arrays import host
from fmapper_adapters.jax.arrays.packed import PackedArray, blocks_of, in_order
from fmapper_adapters.jax.arrays.sharding import JaxMeshes
from fmapper_adapters.jax.compute import transforms
from fmapper_adapters.jax.libraries import JaxModels
from fmapper_adapters.jax.training.facet import JaxOptimizers
from fmapper_adapters.jax.writing import Writing

if TYPE_CHECKING:
    from fmapper.backends import Counts
    from fmapper.generation import Decoding, Generation
    from fmapper.programs import Lowering, Program

# The dtypes that JAX uses in place of 64-bit ones unless jax_enable_x64 is set.
_NARROWED = {
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex128": "complex64",
}
_dtype = attrgetter("dtype")
_META = Device("jax", "meta")
_shape_only: Any = jax.ShapeDtypeStruct
_sharding = attrgetter("sharding")


class JaxAdapter(Writing, JaxOptimizers, JaxMeshes, JaxModels, Compute, Nodes):
    """The adapter for `jax.Array`s and tracers; PRNG keys stay in JAX.

    A `jax.ShapeDtypeStruct` is an array without values, on the device `meta`.
    """

    name: ClassVar[str] = "jax"
    compiles: ClassVar[bool] = True
    conversion_options: ClassVar[tuple[str, ...]] = ("precision",)
    keeps_of_a_gpu: ClassVar[str] = (
        "JAX reserves three quarters of a GPU when it starts; before importing it, set "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 for two fifths"
    )
    widened_by: ClassVar[str] = "jax.config.update('jax_enable_x64', True)"
    needs_source: ClassVar[str] = (
        "make it the forward of a torch.nn.Module; functions written in JAX do not need one"
    )
    compares: ClassVar[bool] = True
    keeps_memory: ClassVar[bool] = True
    frozen: ClassVar[bool] = True
    read_only: ClassVar[bool] = True
    order: ClassVar[Literal["K", "C"]] = "C"
    takes_host_arrays: ClassVar[bool] = True
    aliases: ClassVar[dict[str, str]] = {
        word: general for word, general in DEVICE_KINDS.items() if word != general
    }

    @cached_property
    def functional(self) -> Any:
        """Loaded when first asked for."""
        return importlib.import_module("fmapper_adapters.jax.compute.functional")

    @cached_property
    def random(self) -> Any:
        """Loaded when first asked for."""
        return importlib.import_module("fmapper_adapters.jax.compute.random")

    def is_array_type(self, cls: type) -> bool:
        """Returns whether instances of a class are arrays, PRNG keys, tracers or shapes."""
        return issubclass(cls, jax.Array | jax.core.Tracer | jax.ShapeDtypeStruct | PackedArray)

    def device(self, array: Any) -> Device:
        """Returns the device of an array: all ids if there are several, the default for tracers."""
        array = blocks_of(array)
        if isinstance(array, jax.core.Tracer):
            return _devices.device_of(_default())
        if isinstance(array, jax.ShapeDtypeStruct):
            return _META
        if array.is_deleted():
            raise RuntimeError("the array was deleted, probably because it was donated")
        return _devices.home(array)

    def dtype(self, array: Any) -> str:
        """Returns `array.dtype` by name; PRNG keys have one like key<fry>."""
        return str(array.dtype.name)

    def shape(self, array: Any) -> tuple[int, ...]:
        """Returns `array.shape`."""
        return tuple(array.shape)

    def devices(self) -> Sequence[Device]:
        """Returns the devices of this process: the CPUs first, then the other platforms."""
        return list(map(_devices.device_of, _devices.local()))

    def known_devices(self) -> Sequence[Device]:
        """Returns the devices if JAX is initialised: initialising it would reserve GPU memory."""
        return list(map(_devices.device_of, _devices.started_devices()))

    def may_have_gpu(self) -> bool:
        """Returns whether JAX has an accelerator, or, before it has started, a plugin for one."""
        return _devices.may_have_accelerator()

    def as_device(self, device: Any) -> Device | None:
        """Converts a `jax.Device`, or a `SingleDeviceSharding` with its memory."""
        if isinstance(device, jax.sharding.SingleDeviceSharding):
            (jax_device,) = device.device_set
            memory = None if device.memory_kind is None else device.memory_kind
            usual = memory in (None, _devices.usual_memory(jax_device))
            return replace(_devices.device_of(jax_device), memory=None if usual else memory)
        return _devices.device_of(device) if isinstance(device, jax.Device) else None

    def in_memory(self, device: Device, memory: str | None) -> Device:
        """Returns one of the memories that JAX has on a device, such as `pinned_host`."""
        if memory is None or isinstance(device.index, tuple):
            return super().in_memory(device, memory)
        jax_device = _devices.find(device)
        names, usual = _devices.memories(jax_device), _devices.usual_memory(jax_device)
        if memory not in names:
            raise DeviceUnavailableError(
                f"{replace(device, memory=memory)} is not available: the memories of {device} are "
                f"{', '.join(names)}."
            )
        return replace(device, memory=None if memory == usual else memory)

    def host_memory(self, device: Device) -> Device | None:
        """Returns `pinned_host`, which every release that has memories has on every device."""
        if "pinned_host" not in _devices.memories(_devices.find(device)):
            return None
        return self.in_memory(device, "pinned_host")

    def find_device(self, kind: str, index: int | None) -> Device:
        """Finds a device; without an index, the default one if it is of that kind.

        `meta` always exists.
        """
        if kind == "meta":
            return _META
        chosen = _devices.default()
        if index is None and chosen is not None:
            default = _devices.device_of(chosen)
            if default.kind == self.aliases.get(kind, kind):
                return default
        return super().find_device(kind, index)

    def device_info(self, device: Device) -> DeviceInfo:
        """Returns name and memory as XLA reports it: what JAX may use, and what is free."""
        if device.kind == "cpu" or not isinstance(device.index, int):
            return super().device_info(device)
        return DeviceInfo(device, *_devices.about(_devices.find(device)))

    def why_not(self, kind: str, index: int | None) -> str:
        """Returns whether the plugin, the driver, a setting or the index is to blame."""
        here = any(device.kind == kind for device in self.devices())
        return (None if here else _devices.why_not(kind)) or super().why_not(kind, index)

    def is_traced(self, array: Any) -> bool:
        """Returns whether an array is a tracer."""
        return isinstance(blocks_of(array), jax.core.Tracer)

    def abstract(self, shape: Sequence[int], dtype: str) -> Any:
        """Returns a `jax.ShapeDtypeStruct`."""
        return _shape_only(tuple(shape), jnp.dtype(dtype))

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Returns jax_enable_x64, jax_default_device, transfer guards: they belong to a thread."""
        return _devices.thread_settings()

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterator[Any]:
        """Moves all arrays with one `device_put`; copies on the same device if asked to.

        An accelerator may run out of memory after JAX has returned, so arrays there are waited for.
        """
        if device.kind == "meta":
            yield from (_shape_only(array.shape, array.dtype) for array in arrays)
            return
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
            for array in arrays:
                host.refuse(array)
        if copy and all(self.device(array) == device for array in arrays):
            yield from map(host.copy if device.memory is None else host.copy_within_memory, arrays)
            return
        target, arrays = _devices.place(device), [*map(in_order, arrays)]
        try:
            moved = jax.device_put(list(arrays), target)
        except (RuntimeError, ValueError, TypeError):  # one by one, to find the one that fails
            moved = (jax.device_put(array, target) for array in arrays)
        yield from host.wait_for_each(moved) if device.is_accelerator else moved

    def nbytes(self, array: Any) -> int:
        """Returns the bytes of an array; a PRNG key takes several numbers."""
        return int(math.prod(array.shape) * array.dtype.itemsize)

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the dtype, and the devices unless those are the same for all."""
        cls = type(arrays[0])
        if issubclass(cls, jax.core.Tracer):
            return super().signatures(arrays)
        dtypes = list(map(_dtype, arrays))
        if issubclass(cls, jax.ShapeDtypeStruct):
            return dtypes
        shardings = list(map(_sharding, arrays))
        if shardings.count(shardings[0]) == len(shardings):
            return dtypes
        homes = {id(x): (frozenset(x.device_set), x.memory_kind) for x in shardings}
        places = [homes[id(x)] for x in shardings]
        return dtypes if len(set(places)) == 1 else list(zip(dtypes, places, strict=True))

    def stays(self, array: Any) -> str | None:
        """Explains why PRNG keys stay: other frameworks draw no numbers from them."""
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        return "a PRNG key has no meaning outside JAX" if is_key else None

    def unusable(self, arrays: Sequence[Any]) -> int | None:
        """Returns the first array that was deleted."""
        deleted = (at for at, array in enumerate(arrays) if not _is_usable(array))
        return next(deleted, None)

    def check(self, array: Any) -> None:
        """Checks that the values of an array can leave JAX.

        Raises:
            TypeError: The values cannot leave JAX; the message says why.
        """
        host.refuse(array)

    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Exports read-only NumPy views of CPU memory, or DLPack where the target is a GPU too."""
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
            for array in arrays:
                host.refuse(array)
        origin = self.device(arrays[0]) if arrays else Device("jax", "cpu", 0)
        is_there = target.is_accelerator and DEVICE_KINDS.get(target.kind) == origin.kind
        if is_there and isinstance(origin.index, int) and origin.memory is None:
            return Exchange(arrays, frozen=True, device=origin)
        try:
            data = host.to_numpy(arrays, origin.is_accelerator)
        except (TypeError, RuntimeError):
            for array in arrays:
                host.refuse(array)
            raise
        return Exchange(data, frozen=True, owners=arrays)

    def is_view(self, data: Any, array: Any) -> bool:
        """Compares pointers: JAX copies arrays not in C order, or on several devices."""
        if not isinstance(data, np.ndarray) or not data.size:
            return True
        is_single = len(array.devices()) == 1
        return is_single and array.unsafe_buffer_pointer() == data.ctypes.data

    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Puts host memory on the device, without a copy if aligned and on the CPU."""
        target = _devices.find(device)
        committed: Any = None if target == _default() else target
        if device.memory is not None:
            committed = _devices.place(device)
        if exchange.device is not None:
            if exchange.device.index != device.index:
                committed = committed or target
            return host.take(exchange, committed, share)
        if share:
            return (host.share(data, target, committed) for data in exchange.data)
        put = partial(jax.device_put, device=committed)
        try:
            new: list[Any] = host.put_all(exchange.data, target, committed)
        except (RuntimeError, ValueError, TypeError, MemoryError):
            # one by one, so that the first that fails is known
            return map(host.wait_for, map(put, exchange.data))
        if device.is_accelerator:
            # the host memory belongs to the caller and must have been read on return
            return host.wait_for_each(new)
        return new

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Returns False: JAX has no views."""
        return False

    def storable(self, dtype: str) -> str | None:
        """Returns the dtype, or its 32-bit half without jax_enable_x64; None if JAX lacks it."""
        if dtype in _NARROWED:
            return dtype if jax.dtypes.canonicalize_dtype(dtype) == dtype else _NARROWED[dtype]
        exists = hasattr(jnp, dtype) and not dtype.startswith("float6")  # XLA has no float6
        return dtype if exists or dtype == "bool" else None

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """Casts by `astype`; inside a transformation nothing can be checked."""
        if isinstance(array, PackedArray):
            new, survived = self.cast(array.blocks, dtype)
            return array.with_blocks(new), survived
        if isinstance(array, jax.ShapeDtypeStruct):
            return (
                _shape_only(array.shape, jnp.dtype(dtype), sharding=array.sharding),
                True,
            )
        to_real = jnp.iscomplexobj(array) and not dtype.startswith("complex")
        values = array.real if to_real else array
        if isinstance(array, jax.core.Tracer):
            return values.astype(dtype), True
        new = host.cast(values, dtype)
        return new, host.has_survived(array, new)

    def computes_with(self, cls: type) -> str | None:
        """Returns JAX for classes in its registry, such as those of Equinox."""
        return self.name if tree.registered_type(cls) is not None else None

    def runner(
        self, call: Callable[..., Any], model: Any, *, compile: bool | None
    ) -> Callable[..., Any]:
        """Runs under `jax.jit`, unless `compile` is False."""
        from fmapper_adapters.jax import profile

        return profile.runner(call, model, compile)

    def wait(self, device: Device, results: Any) -> None:
        """Calls `jax.block_until_ready`."""
        jax.block_until_ready(results)  # type: ignore[no-untyped-call]

    def count(self, call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts | None:
        """Counts the operations of the jaxpr without computing them."""
        from fmapper_adapters.jax import profile

        return profile.count(call, model, inputs)

    def no_transforms(self) -> str | None:
        """Returns None: all functions can be transformed."""
        return None

    def value_and_grad(
        self, run: transforms.Calls, arrays: Sequence[Any], elsewhere: Callable[[], bool]
    ) -> tuple[Any, list[Any], Sequence[Any]]:
        """Calls `jax.value_and_grad`."""
        return transforms.value_and_grad(run, arrays)

    def vectorize(
        self,
        run: Callable[[Sequence[Any]], list[Any]],
        arrays: Sequence[Any],
        axes: Sequence[int | None],
    ) -> list[Any]:
        """Calls `jax.vmap`."""
        return transforms.vectorize(run, arrays, axes)

    def compile(
        self,
        run: Callable[[Sequence[Any], Any], tuple[list[Any], Any]],
        give_up: Callable[[str], None],
    ) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
        """Calls `jax.jit`."""
        return transforms.compile(run)

    def hollow(self, array: Any) -> Any:
        """Returns a `jax.ShapeDtypeStruct`, also for PRNG keys."""
        return _shape_only(array.shape, array.dtype)

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of exactly this class in `jax.tree_util`."""
        return tree.registered_type(cls)

    def register_functor(self, cls: type) -> None:
        """Registers the class in `jax.tree_util`."""
        tree.register_functor(cls)

    def lowers(self, op: str) -> bool:
        """Returns whether an operation is not a primitive of JAX."""
        return not op.startswith("lax::")

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """Returns a `JaxModel`."""
        from fmapper_adapters.jax.model import jax_model

        return jax_model.from_program(program, lowerings, **options)

    def from_generation(
        self,
        generation: Generation,
        decoding: Decoding,
        lowerings: Mapping[str, Lowering],
        **options: Any,
    ) -> Any:
        """Returns a `JaxGenerator`."""
        from fmapper_adapters.jax.generation import jax_generator

        return jax_generator.from_generation(generation, decoding, lowerings, **options)

    def is_model(self, x: Any) -> bool:
        """Returns whether a model is a converted one."""
        return getattr(type(x), "is_converted_model", False) is True

    def is_callable_model(self, x: Any) -> bool:
        """Accepts functions, pairs of a function and its parameters, and callable trees."""
        return callable(x) or (isinstance(x, tuple) and len(x) == 2 and callable(x[0]))

    def examine(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """Calls `JaxModel.examine`."""
        output: tuple[Any] | None = model.examine(args, kwargs)
        return output

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
        """Records the operations of a converted model, or of the program of another model."""
        if self.is_converted(model):
            has_none = double or model.is_random
            seen: Iterable[Observation] | None = None if has_none else model.watch(args, kwargs)
            return seen
        return super().watch(model, args, kwargs, whole=whole, train=train, double=double)

    def sources(self) -> Any:
        """Returns the module for functions, with parameters or without, and callable trees."""
        from fmapper_adapters.jax.record import source

        return source

    def is_converted(self, model: Any) -> bool:
        """Returns whether the model is a `JaxModel`."""
        return self.is_model(model)

    def transient(self, node: Any) -> Iterable[Any]:
        """Returns the buffers of a converted model that its module does not save."""
        if not self.is_model(node):
            return ()
        return [node.buffers[n] for n in node.program.transient if n in node.buffers]

    def program_of(self, model: Any) -> Program | None:
        """Returns the program of a converted model."""
        return model.without_arrays() if self.is_model(model) else None

    def options_of(self, model: Any) -> Mapping[str, Any] | None:
        """Returns the precision of a converted model."""
        return {"precision": model.precision} if self.is_model(model) else None

    def axes(self, node: Any) -> Sequence[tuple[str, Any, tuple[Any, ...]]]:
        """Returns the axes that the source module of a converted model names."""
        if not self.is_model(node):
            return ()
        held = {**node.params, **node.buffers}
        return [(n, held[n], axes) for n, axes in node.program.axes.items() if n in held]

    def weights(self, model: Any) -> tuple[dict[str, Any], Callable[[Any], Any]] | None:
        """Returns the arrays of a converted model, a model with its state, or a closure."""
        if not self.is_model(model):
            result: tuple[dict[str, Any], Callable[[Any], Any]] | None
            result = self.sources().weights(model)
            return result
        arrays = {**model.params, **model.buffers}
        tied = {name: arrays[first] for name, first in model.aliases.items() if first in arrays}

        def back(filled: Mapping[str, Any]) -> Any:
            params = {name: filled[name] for name in model.params}
            return model.replace(
                params=params, buffers={name: filled[name] for name in model.buffers}
            )

        return {**arrays, **tied}, back

    def portable(self, array: Any) -> Any:
        """Returns a PRNG key as its words, and integers of few bits as bytes."""
        return host.portable(array)

    def from_portable(self, array: Any, old: Any) -> Any:
        """Returns the PRNG keys that have these words."""
        return host.from_portable(array, old)


def _is_usable(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct) or not array.is_deleted()


def _default() -> Any:
    return _devices.default() or jax.local_devices()[0]
