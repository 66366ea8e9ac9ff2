"""What fmapper must know of a framework: the one protocol that every adapter answers."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from fmapper.backends.dtypes import itemsize
from fmapper.errors import ConversionError, DeviceUnavailableError
from fmapper.tree.nodes import NodeType

if TYPE_CHECKING:
    from fmapper.backends.counts import Counts
    from fmapper.programs.program import Lowering, Program


@dataclass(frozen=True, slots=True)
class Device:
    """Where arrays live: whose they are, the kind of device, and which of that kind.

    Attributes:
        backend: numpy, torch, jax, or what an adapter adds.
        kind: cpu, cuda, gpu, mps, tpu, meta ... in the words of the backend.
        index: Which one; None where there is only one; a tuple for an array spread over several.

    Examples:
        >>> print(Device("torch", "cuda", 0), Device("numpy", "cpu"))
        torch:cuda:0 numpy:cpu
    """

    backend: str
    kind: str
    index: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.backend}:{self.kind}"
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        return f"{self.backend}:{self.kind}:{','.join(map(str, index))}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is known of a device at one moment; None for what is not known.

    Attributes:
        device: The device.
        name: What its maker calls it, as "NVIDIA H200".
        total: Bytes of memory that its backend could use there if nothing else did.
        free: Bytes of memory that are not in use now.
    """

    device: Device
    name: str | None = None
    total: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Arrays on their way from one backend to another.

    Attributes:
        data: NumPy arrays on the host (bfloat16 and float8 as ml_dtypes has them), or, where
            `device` is set, objects with `__dlpack__` on that device.
        private: Which of them, by index, are not in the memory of the array that was given. Nobody
            else holds that memory, unless it is read-only.
        frozen: Nobody can ever write to the memory of the others; host arrays on it are read-only.
        device: The device of DLPack exporters; None for host arrays.
        owners: The arrays themselves, for takers that can share more through DLPack than `data`
            allows.
    """

    data: Sequence[Any]
    private: Collection[int] = ()
    frozen: bool = False
    device: Device | None = None
    owners: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a strided array lies, in bytes: what tells a view and its base.

    Attributes:
        start: Address of the element with index zero in every dimension.
        strides: Step per dimension, in elements.
        itemsize: Bytes per element.
        plain: The values are what lies there; False for lazy conjugates and negatives.
    """

    start: int
    strides: tuple[int, ...]
    itemsize: int
    plain: bool = True


Run: TypeAlias = "Callable[[Sequence[Any], Any], tuple[list[Any], Any]]"


@dataclass(frozen=True, slots=True)
class Observation:
    """An operation that a model has carried out, and what it gave.

    Attributes:
        module: The path of the part of the model that it belongs to.
        op: The operation.
        source: The line of code that it comes from.
        values: The arrays that it gave; none where nobody can see them, or where it leaves open
            what is in them.
    """

    module: str
    op: str
    source: str
    values: tuple[Any, ...]


class Adapter(ABC):
    """All that fmapper knows of one framework.

    A subclass answers the abstract methods; the others have defaults that are right for a
    framework with one device, no views and no node types of its own. The suite that an adapter
    must pass is `tests/support/conformance.py`.

    Attributes:
        name: The backend's name, as in `torch:cuda:0`.
        framework: The module whose import makes the adapter load; usually the name.
        aliases: Other words for device kinds, as `{"gpu": "cuda"}`.
        host_only: Its arrays are never on an accelerator; `to_gpu` takes them to another backend.
        keeps_memory: `take` lays arrays on the host memory that it is given; then it is given
            memory that nobody else holds. Where it copies anyway this is False.
        frozen: Nobody can write to the memory of its arrays.
        read_only: It never writes to the memory of an array, or can be told not to; then arrays
            whose memory nobody can write to are shared.
        order: How it wants host memory: `K` as the source has it, `C` row by row.
        takes_host_arrays: Its functions take NumPy arrays, too.
        array_types: The classes of its usual arrays, which are then known without a look; a
            compiler that traces the lookup finds them in a table.
        has_modes: Its models switch between training and evaluation: `convert(train=True)` gives
            them a program for each.
        needs_source: What to do about a function that no framework can record for it.
        compares: `convert` compares what it makes of its models with them, by `outcome`.
        lowers_like: The framework whose lowerings, those that users add, are its own too.
    """

    name: ClassVar[str]
    framework: ClassVar[str] = ""
    aliases: ClassVar[dict[str, str]] = {}
    host_only: ClassVar[bool] = False
    keeps_memory: ClassVar[bool] = False
    frozen: ClassVar[bool] = False
    read_only: ClassVar[bool] = False
    order: ClassVar[Literal["K", "C"]] = "K"
    takes_host_arrays: ClassVar[bool] = False
    array_types: ClassVar[tuple[type, ...]] = ()
    has_modes: ClassVar[bool] = False
    needs_source: ClassVar[str] = ""
    compares: ClassVar[bool] = False
    lowers_like: ClassVar[str] = ""

    # arrays

    @abstractmethod
    def is_array_type(self, cls: type) -> bool:
        """Whether instances of a class are arrays of this backend."""

    def is_interned_type(self, cls: type) -> bool:
        """Whether equal arrays of a class are one object, as `np.True_`: no sign of a tie."""
        return False

    def is_number(self, array: Any) -> bool:
        """Whether an array is but a number that cannot be written to, as `np.float64(0.5)`."""
        return False

    def is_fitted_type(self, cls: type) -> bool:
        """Whether nodes of this framework wrap what takes the place of arrays of a class.

        The slots of such nodes are `Fitting`: what they make of it is there at all its places.
        """
        return False

    @abstractmethod
    def device(self, array: Any) -> Device:
        """Where an array lives."""

    @abstractmethod
    def dtype(self, array: Any) -> str:
        """The name of its dtype: float32, bfloat16, float8_e4m3fn, int64, complex64, bool ..."""

    @abstractmethod
    def shape(self, array: Any) -> tuple[int, ...]:
        """Its shape."""

    def nbytes(self, array: Any) -> int:
        """How much memory its values take, or would take if it had any."""
        return math.prod(self.shape(array)) * itemsize(self.dtype(array))

    def signatures(self, arrays: Sequence[Any]) -> Sequence[Hashable]:
        """Something for each array that is equal for arrays of one dtype on one device.

        A quicker way to sort many arrays than to ask for both; the arrays are of one class.
        """
        return [(self.device(array), self.dtype(array)) for array in arrays]

    def stays(self, array: Any) -> str | None:
        """Why an array has no meaning in another backend, as a PRNG key; None if it has.

        Then a mover to another backend raises, and with `strict=False` leaves it as it is.
        """
        return None

    def unusable(self, arrays: Sequence[Any]) -> int | None:
        """Which of the arrays has no values any more, so that it is not even left as it is."""
        return None

    def check(self, array: Any) -> None:  # noqa: B027  (most arrays can leave)
        """Refuses an array that can neither leave its backend nor be copied there.

        Raises:
            TypeError: Says why, and what to do.
        """

    # devices

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """Every device of this backend that is here, the CPU first."""

    def as_device(self, device: Any) -> Device | None:
        """The device that an object of the framework's own stands for; None if it is no such."""
        return None

    def device_info(self, device: Device) -> DeviceInfo:
        """What one of its devices is called, and its memory; the host is known to every adapter."""
        if device.kind != "cpu":
            return DeviceInfo(device)
        from fmapper.backends.machine import host_memory, processor_name

        return DeviceInfo(device, processor_name(), *host_memory())

    def why_not(self, kind: str, index: int | None) -> str:
        """Why a device is not here: no driver, a CPU-only build, an index too high."""
        have = [device for device in self.devices() if device.kind == kind]
        if have and index is not None:
            return f"the index is too high, {self.name} sees {len(have)} of kind {kind}"
        return f"{self.name} has no device of kind {kind} here"

    def find_device(self, kind: str, index: int | None) -> Device:
        """The device that a kind and an index mean for this backend.

        Raises:
            DeviceUnavailableError: There is none; says what is missing and what is there.
        """
        own = self.aliases.get(kind, kind)
        for device in self.devices():
            if device.kind == own and index in (None, 0 if device.index is None else device.index):
                return device
        here = ", ".join(map(str, self.devices())) or "nothing"
        wanted = Device(self.name, own, index)
        raise DeviceUnavailableError(
            f"{wanted} is not available: {self.why_not(own, index)}. Here: {here}."
        )

    @abstractmethod
    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """Brings arrays of this backend to one of its devices, one result per array, in order.

        Results that are yielded one by one let an error name the array that failed; so does a
        `BatchError`. An array that is there already is only given for `copy=True`, and must be
        copied then.
        """

    def is_traced(self, array: Any) -> bool:
        """Whether an array only stands for one in a program that is being recorded.

        It is nowhere yet, and will be where the arrays are that the program is run with.
        """
        return False

    def abstract(self, shape: Sequence[int], dtype: str) -> Any:
        """An array on the device of kind `meta`: it has a shape and a dtype, but no values.

        Raises:
            TypeError: There are no such arrays here.
        """
        raise TypeError(f"{self.name} has no arrays without values")

    # threads

    def thread_settings(self) -> Callable[[], AbstractContextManager[object]]:
        """Takes the settings of this thread along to another one.

        Called where arrays are wanted; what it returns is called once in the thread that makes
        them, which does so inside that context.
        """
        return nullcontext

    def hand_over(self, arrays: Sequence[Any]) -> Callable[[], object] | None:
        """Gives arrays of this backend to another thread.

        Called in the thread that made them; what it returns is called in the thread that is going
        to use them, before it does. None if there is nothing to wait for.
        """
        return None

    # exchange

    @abstractmethod
    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Gives arrays to the exchange, without a copy where that can be.

        Raises:
            TypeError: The values of one of them cannot leave; see `check`.
        """

    def is_view(self, data: Any, array: Any) -> bool:
        """Whether what `export` gave for an array, and did not call private, is in its memory.

        Asked for `copy=False` only: frameworks that copy on their own tell nobody.
        """
        return True

    @abstractmethod
    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Makes arrays of this backend from the exchange, one per array, in order.

        For `device` on the host and an adapter that `keeps_memory`, all host memory in `exchange`
        is private, or frozen, or to be shared. Other memory may be read until the last result is
        given, not longer.

        Args:
            exchange: The arrays.
            device: Where the results are to be.
            share: The results must lie in the very memory of the exchange.

        Raises:
            BufferError: They cannot.
        """

    # dtypes

    def storable(self, dtype: str) -> str | None:
        """The dtype in which this backend holds `dtype`: itself, a narrower one, None for none."""
        return dtype

    def cast(self, array: Any, dtype: str) -> tuple[Any, bool]:
        """A new array of another dtype, and whether every value has survived.

        An integer survives if it is equal, a floating value if it is rounded but not made infinite.
        """
        raise TypeError(f"the {self.name} adapter cannot cast {self.dtype(array)} to {dtype}")

    def casts(self, arrays: Sequence[Any], dtype: str) -> Iterable[tuple[Any, bool]]:
        """`cast` for many arrays, in order, where there is a quicker way for all at once.

        An error is about the array whose turn it is, or a `BatchError`.
        """
        return (self.cast(array, dtype) for array in arrays)

    def like(self, new: Any, old: Any) -> Any:
        """`new` as what `old` is beside its values: a parameter, for example."""
        return new

    def swap(self, old: Any, new: Any) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """How an array that others hold references to gets the contents of another one, in place.

        Returns:
            What does that, and what takes it back, also half of it; None where arrays of this kind
            are replaced by new ones instead.
        """
        return None

    # neural functions and random numbers

    @cached_property
    def functional(self) -> Any:
        """The kernels that `fmapper.nn.functional` calls, a module; None if there are none."""
        return None

    @cached_property
    def random(self) -> Any:
        """The kernels that `fmapper.random` calls, a module; None if there are none."""
        return None

    # random generators

    def generator_device(self, x: Any) -> Device | None:
        """Where an object draws its random numbers; None if it is no generator of this backend."""
        return None

    def generator_to(self, generator: Any, device: Device) -> Any:
        """A new generator on a device, which may be that of the old one.

        It goes on as the old one would where the device draws the same numbers from the same state.
        """
        raise TypeError(f"{self.name} has no random generators")

    # ties by view

    def may_share_memory(self, arrays: Sequence[Any]) -> bool:
        """Whether two of the arrays may have memory in common; a quick look, True if in doubt."""
        return True

    def memory(self, array: Any) -> Memory | None:
        """Where a strided array lies; None where the backend has no views, or not for this one."""
        return None

    def shares_elements(self, a: Any, b: Any) -> bool:
        """Whether two arrays with memory have an element in common, not just the span."""
        return True

    def view(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], offset: int, like: Any
    ) -> Any:
        """A view of `base`: strides and offset in elements, counted from the first of `base`.

        `like` is the view that it replaces.

        Raises:
            TypeError: There are no such views here, with negative strides for example.
        """
        raise TypeError(f"{self.name} has no views")

    # training

    def is_trainable(self, array: Any) -> bool:
        """Whether an array may be trained, as far as it says so itself: not a frozen parameter."""
        return True

    def trained_below(self, cls: type) -> Callable[[Any], bool] | None:
        """Which arrays below a node of a class of this framework are trained.

        It holds until a class further down says otherwise; None for a class that does not say.
        """
        return None

    # running models

    def computes_with(self, cls: type) -> str | None:
        """The one backend with whose arrays a class of this framework computes.

        None for a class that is not of this framework, or that works with any arrays.
        """
        return None

    def to_evaluation(self, node: Any) -> None:  # noqa: B027  (most nodes have no modes)
        """Puts a node of this framework, which nobody else holds, into its mode for inference."""

    def runner(
        self, call: Callable[..., Any], model: Any, *, compile: bool | None
    ) -> Callable[..., Any]:
        """How this backend runs a model for inference: a function of the inputs alone.

        Args:
            call: `call(model, *inputs)` is one run.
            model: Its arrays are of this backend, on one device.
            compile: Whether the backend's compiler is used; None for what is usual there.
        """
        return functools.partial(call, model)

    def wait(self, device: Device, results: Any) -> None:  # noqa: B027  (nothing runs behind one)
        """Waits until what runs on one of its devices has been computed.

        Args:
            device: The device.
            results: What the runs gave, an array or a tree with some.
        """

    def count(self, call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts | None:
        """What one run asks of an accelerator, found out without one; None where nobody knows."""
        return None

    # transformations

    def no_transforms(self) -> str | None:
        """Why functions of these arrays cannot be transformed, and what to do; None if they can."""
        return "it has neither gradients nor a compiler. Move them first: to_torch or to_jax."

    def value_and_grad(
        self,
        run: Callable[[Sequence[Any]], tuple[Any, list[Any]]],
        arrays: Sequence[Any],
        elsewhere: Callable[[], bool],
    ) -> tuple[Any, list[Any], Sequence[Any]]:
        """Calls a function and differentiates its value.

        Args:
            run: `run(arrays) -> (value, further results)`; to be called once, with arrays in the
                place of those that are given, or with the same ones.
            arrays: What it is differentiated with respect to.
            elsewhere: Whether the function is given some of the arrays elsewhere too, where they
                are constants, so that it must not be run with the same ones.

        Returns:
            The value, the further results, and one gradient per array: the direction in which the
            value grows fastest, of a complex array too. None of them is part of a recording of this
            call.
        """
        raise NotImplementedError

    def vectorized(
        self,
        run: Callable[[Sequence[Any]], list[Any]],
        arrays: Sequence[Any],
        axes: Sequence[int | None],
    ) -> list[Any]:
        """Calls a function for every index of the arrays at once; results have it as axis 0."""
        raise NotImplementedError

    def compiled(
        self, run: Run, give_up: Callable[[str], None]
    ) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
        """A function that is recorded the first time and then replayed.

        Args:
            run: `run(arrays, key) -> (results, rest)`. The rest is what the results belong into; it
                is made while recording, and handed out again with the results of every replay.
                Among the arrays there may be numbers.
            give_up: To be called with the reason where nothing can be recorded.

        Returns:
            The same function, recorded anew for another key, and for arrays of another shape, dtype
            or device. It returns None where nothing was or will be recorded: then the caller is to
            run what is to be run as it is.
        """
        raise NotImplementedError

    def hollow(self, array: Any) -> Any:
        """What keeps the place of an array that is being recorded: it has no values."""
        return self.abstract(self.shape(array), self.dtype(array))

    # trees

    def node_type(self, cls: type) -> NodeType | None:
        """How a class of this framework is taken apart; None if it is no node class of it."""
        return None

    def registered_type(self, cls: type) -> NodeType | None:
        """The same for a class in this framework's own pytree registry, by exact type."""
        return None

    def register_functor(self, cls: type) -> None:  # noqa: B027  (nothing to do without a registry)
        """Tells this framework's pytree registry about a functor class; called once per class."""

    # programs

    def is_model(self, x: Any) -> bool:
        """Whether an object is a model of this framework, whose program `convert` can record."""
        return False

    def is_callable_model(self, x: Any) -> bool:
        """Whether `export_program` takes what is no model by its class.

        That is a function, a function with its parameters, or a tree of arrays that is called.
        """
        return False

    def has_training(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a model has modes, so that its training is recorded unasked."""
        return False

    def is_in_training(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a model is in its mode for training now, or the examples say so."""
        return False

    def export_program(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        dynamic_shapes: Any,
        train: bool,
        check: bool,
        strict: bool | None,
        specialize: bool = False,
        whole: Collection[str] = (),
    ) -> Program:
        """Records what a model of this framework computes for example inputs.

        Args:
            model: The model.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            dynamic_shapes: Which sizes may vary.
            train: Whether what it does in training is recorded.
            check: Whether what was recorded is compared with the model.
            strict: Whether arrays of objects that nobody declared are an error.
            specialize: Whether sizes that depend on values are those of the examples.
            whole: The operations that the target lowers whole, as `lowers_whole` gives them. A
                recorder that would take one apart leaves it. Without a target there are none.

        Raises:
            ConversionError: It cannot be recorded; says why, and where. With `check`: what was
                recorded gives other results for the examples.
        """
        raise ConversionError(f"models of {self.name} cannot be recorded")

    def lowers(self, op: str) -> bool:
        """Whether a lowering of an operation that names no target is one to this framework."""
        return False

    def lowers_whole(self, lowerings: Mapping[str, Lowering]) -> Collection[str]:
        """The operations that a recorder leaves whole in programs for this framework.

        Args:
            lowerings: Those that the user has added, by operation.

        Returns:
            Their names: `aten::gelu`, or `aten::std.correction` for one overload.
        """
        return ()

    def from_program(
        self, program: Program, lowerings: Mapping[str, Lowering], **options: Any
    ) -> Any:
        """A model of this framework that computes what a program says.

        Args:
            program: The program.
            lowerings: Those that the user has added, by operation; they win over the built-in ones.
            options: What is particular to this framework.

        Raises:
            UnsupportedOpsError: Operations have no lowering; lists all of them.
        """
        raise ConversionError(f"programs cannot be lowered to {self.name}")

    def options(self, model: Any) -> Sequence[str]:
        """Keywords by which this framework is told how to call a model; they are no inputs of it.

        A program has them fixed; models that are made of it do not take them.
        """
        return ()

    def call(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a model gives for inputs that are its own to change, ready to be compared."""
        return model(*args, **kwargs)

    def caller(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
        """`call` for such inputs, as quick as a user of this framework would have it."""
        self.to_evaluation(model)
        return self.runner(lambda own, a, k: own(*a, **k), model, compile=None)

    def outcome(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
    ) -> Callable[..., tuple[list[Any], dict[str, Any]]] | None:
        """Prepares a call of a model in one of its modes, to be compared with another one.

        Returns:
            A function that gives the leaves of the output in order, and the arrays that the call
            changes by name; the model stays as it is. It takes by how much the values of floating
            arrays are to be off, relative to them; `compiled`: False asks for one operation after
            the other, without fusing; and `turned`: True asks for other signs and phases of
            eigenvectors, singular vectors and orthogonal factors. None where this framework has
            no such thing.
        """
        return None

    def examine(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """The output of a model that a conversion has made, to be compared with its source.

        Returns:
            None where there is nothing to compare, as where it draws random numbers.

        Raises:
            ConversionError: An operation gives another dtype than in its source.
        """
        return None

    def call_in_float64(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any | None:
        """The same, computed in float64; None where that cannot be."""
        return None

    def portable(self, array: Any) -> Any:
        """The array that stands for one in other frameworks, if it `stays` as it is."""
        return array

    def watch(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        whole: Collection[str] = (),
    ) -> Iterable[Observation] | None:
        """Every operation of a call, in order; None where they cannot be told.

        Args:
            model: The model.
            args: Its inputs by position.
            kwargs: Its inputs by keyword.
            whole: The operations that are left whole where the model is recorded.
        """
        return None


class NodeAdapter(Adapter):
    """All that fmapper knows of a framework whose arrays are those of another one.

    Such a framework has classes to take apart, and no device, dtype or exchange: Flax is one, its
    arrays are JAX's. A subclass gives `name` and `node_type` or `registered_type`. One that is
    found by its entry point is asked for devices as a backend is, and has none.
    """

    def is_array_type(self, cls: type) -> bool:
        """No class is."""
        return False

    def devices(self) -> Sequence[Device]:
        """None: the arrays are on those of their backend."""
        return ()

    def device(self, array: Any) -> Device:
        """Refuses."""
        raise self._no_arrays()

    def dtype(self, array: Any) -> str:
        """Refuses."""
        raise self._no_arrays()

    def shape(self, array: Any) -> tuple[int, ...]:
        """Refuses."""
        raise self._no_arrays()

    def to_device(
        self, arrays: Sequence[Any], device: Device, *, copy: bool | None
    ) -> Iterable[Any]:
        """Refuses."""
        raise self._no_arrays()

    def export(self, arrays: Sequence[Any], target: Device) -> Exchange:
        """Refuses."""
        raise self._no_arrays()

    def take(self, exchange: Exchange, device: Device, *, share: bool) -> Iterable[Any]:
        """Refuses."""
        raise self._no_arrays()

    def _no_arrays(self) -> TypeError:
        return TypeError(f"{self.name} has no arrays of its own")
