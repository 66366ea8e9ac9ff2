"""The facet of an adapter whose framework computes: kernels, transformations, compiled calls."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from fmapper.backends.arrays import Arrays
from fmapper.backends.framework import Framework
from fmapper.errors import StructureMismatchError

NO_TRANSFORMS = "it has neither gradients nor a compiler. Move them first: to_torch or to_jax."

filling_gradient: ContextVar[bool] = ContextVar("fmapper_filling_gradient", default=False)
"""Whether the tree that is being rebuilt is a gradient, whose tensors are not parameters."""


def is_gradient() -> bool:
    """Returns whether the node that is being rebuilt is part of a gradient."""
    return filling_gradient.get()


Run: TypeAlias = "Callable[[Sequence[Any], Any], tuple[list[Any], Any]]"


@dataclass(frozen=True, slots=True)
class Observation:
    """An operation that a model has executed, and its results.

    Attributes:
        module: The path of the submodule that it belongs to.
        op: The operation.
        source: The line of code that called it.
        values: The arrays that it returned; empty if they cannot be observed, or if the operation
            leaves their contents undefined.
        name: The name of its result in the call; empty if it has none.
        operands: The names of the results that are its operands, as far as these are observed.
        loop: The iterations of the loops around it, outer ones first, such as `scan[3]`.
        scope: What a model that was converted from this one calls the submodule, if not by its
            path.
    """

    module: str
    op: str
    source: str
    values: tuple[Any, ...]
    name: str = ""
    operands: tuple[str, ...] = ()
    loop: str = ""
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The operations, bytes and launches of one run of a model.

    Attributes:
        launches: How many kernels the run starts.
        flops: Floating point operations; a multiplication and an addition are two.
        nbytes: Bytes that the kernels read from and write to the memory of the device.
        syncs: How often it waits for a value on the host: `.item()`, `bool(x)`, `.cpu()`.
        compiled: Whether a compiled program starts the kernels, instead of Python.
        unseen: Operations that could not be counted, in words.
    """

    launches: float
    flops: float
    nbytes: float
    syncs: float = 0
    compiled: bool = False
    unseen: tuple[str, ...] = ()


class Compute(Arrays):
    """A framework that computes with its arrays."""

    lacking = "kernels of its own"

    # neural functions and random numbers

    @cached_property
    def functional(self) -> Any:
        """The kernels that `fmapper.nn.functional` calls, a module; None if there are none."""
        return None

    @cached_property
    def random(self) -> Any:
        """The kernels that `fmapper.random` calls, a module; None if there are none."""
        return None

    # transformations

    def no_transforms(self) -> str | None:
        """Explains why functions of these arrays cannot be transformed; None if they can."""
        return NO_TRANSFORMS

    def untransformable(self, array: Any, error: Exception) -> str | None:
        """Explains why an array cannot be an argument of a transformed function; None if it can.

        Args:
            array: An argument of a call that failed.
            error: The error of that call, which may have another cause.
        """
        return None

    def value_and_grad(
        self,
        run: Callable[[Sequence[Any]], tuple[Any, list[Any]]],
        arrays: Sequence[Any],
        elsewhere: Callable[[], bool],
    ) -> tuple[Any, list[Any], Sequence[Any]]:
        """Calls a function and differentiates its value.

        Args:
            run: `run(arrays) -> (value, further results)`; call it once, with replacements of the
                arrays or with the arrays themselves.
            arrays: The arrays with respect to which to differentiate.
            elsewhere: Returns whether the function also receives some of the arrays as constants,
                so that it must not be run with the arrays themselves.

        Returns:
            The value, the further results, and one gradient per array: the direction in which the
                value grows fastest, also for a complex array. All are detached from the recording
                of this call.
        """
        raise NotImplementedError

    def vectorize(
        self,
        run: Callable[[Sequence[Any]], list[Any]],
        arrays: Sequence[Any],
        axes: Sequence[int | None],
    ) -> list[Any]:
        """Maps a function over an axis of each array at once, the first axis of the results."""
        raise NotImplementedError

    def compile(
        self, run: Run, give_up: Callable[[str], None]
    ) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
        """Returns a function that is recorded the first time and then replayed.

        Args:
            run: `run(arrays, key) -> (results, rest)`. The rest is the structure around the
                results; it is made while recording, and returned again with the results of every
                replay. The arrays may include numbers.
            give_up: A function to call with the reason if the function cannot be recorded.

        Returns:
            The compiled function, which is recorded again for another key, and for arrays of
                another shape, dtype or device. It returns None if the function cannot be recorded:
                then the caller runs it uncompiled.
        """
        raise NotImplementedError

    def hollow(self, array: Any) -> Any:
        """Returns a placeholder without values for an array that is being recorded."""
        return self.abstract(self.shape(array), self.dtype(array))

    # arrays that are computed together

    def domain(self, array: Any) -> str:
        """Returns a text that is equal for arrays which one computation can take together.

        Empty for host memory, where copies are faster.
        """
        device = self.device(array)
        if not device.is_accelerator or device.memory or isinstance(device.index, tuple):
            return ""
        return f"accelerator {device.index or 0}"

    def compile_for(
        self, run: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]], like: Sequence[Any]
    ) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
        """Optimizes a function that is called repeatedly with arrays of the same placement.

        Args:
            run: `run(arrays) -> (values, flags)`, which uses only operations that all frameworks
                have.
            like: Arrays with the placement for the values, which share no memory with the
                arguments.
        """
        return run

    # running models

    def runner(
        self, call: Callable[..., Any], model: Any, *, compile: bool | None
    ) -> Callable[..., Any]:
        """Returns a function of the inputs alone that runs a model for inference.

        Args:
            call: `call(model, *inputs)` is one run.
            model: The model; its arrays belong to this backend and are on one device.
            compile: Whether to use the backend's compiler; None for the backend's default.
        """
        return functools.partial(call, model)

    def count(self, call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts | None:
        """Counts the operations and bytes of one run; None where they cannot be counted."""
        return None


class Optimizers(Framework):
    """Optimizers as plain data, and back.

    All methods take and return the parameters of a model in the same order.
    """

    lacking: ClassVar[str] = "optimizers"

    @abstractmethod
    def is_optimizer(self, x: Any) -> bool:
        """Returns whether an object is an optimizer of this framework, including its state."""

    @abstractmethod
    def trainable(self, model: Any) -> list[Any]:
        """Returns the arrays of `state(model)` that an optimizer may update, in order."""

    @abstractmethod
    def read_optimizer(
        self, model: Any, optimizer: Any, scheduler: Any, every: int | None = None
    ) -> Any:
        """Reads an optimizer and its scheduler as an `OptimizerState`.

        Args:
            model: The model.
            optimizer: Its optimizer.
            scheduler: The scheduler of the optimizer; None if there is none.
            every: The number of updates between two steps of the scheduler; None to infer it from
                the counts of the optimizer.

        Raises:
            ConversionError: An optimizer, setting or schedule cannot be read; names it.
        """

    @abstractmethod
    def write_optimizer(self, model: Any, state: Any) -> tuple[Any, Any]:
        """Returns an optimizer for a model, and its scheduler; None if the optimizer includes it.

        Raises:
            ConversionError: An algorithm or setting has no counterpart; names it.
        """

    def without_gradient(self, array: Any) -> Any:
        """Returns an array through which no gradient flows."""
        return array

    def call_apart(self, function: Callable[..., Any], weights: Any, *args: Any) -> Any:
        """Returns `function(weights, *args)`, if possible without sums of matrices in memory."""
        return function(weights, *args)

    def attach_low_rank(
        self, model: Any, layers: Mapping[str, tuple[Any, Any]], others: Sequence[str]
    ) -> Any:
        """Returns a copy of a model with pairs of matrices around its linear layers.

        Args:
            model: The model.
            layers: The source's names for the weights of the layers -> the pairs.
            others: Weights without such a pair, which an error names.

        Raises:
            StructureMismatchError: The layers cannot hold such pairs, or not these.
        """
        raise StructureMismatchError(
            f"{type(model).__name__} cannot hold a LoRA adapter in its layers: only Flax models "
            "that were converted with structure=True can. Use it as a function of the parameters."
        )

    def detach_low_rank(self, model: Any, layers: Iterable[str]) -> list[tuple[Any, Any]]:
        """Returns the pairs of matrices around the linear layers of a model.

        Raises:
            StructureMismatchError: The layers have no such pairs.
        """
        raise StructureMismatchError(
            f"{type(model).__name__} has no LoRA adapter in its layers: pass the result of attach."
        )
