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
"""Whether the tree that is being rebuilt is a gradient: tensors in it are not parameters."""


def is_gradient() -> bool:
    """Returns whether the node that is being rebuilt is part of a gradient."""
    return filling_gradient.get()


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
        name: The name of its result among those of the call; empty where it has none.
        operands: The names of the results that it takes, as far as they are observed.
        loop: The steps of the loops that it is in, outer ones first, as `scan[3]`.
    """

    module: str
    op: str
    source: str
    values: tuple[Any, ...]
    name: str = ""
    operands: tuple[str, ...] = ()
    loop: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """The operations, bytes and launches of one run of a model.

    Attributes:
        launches: How many kernels it starts.
        flops: Floating point operations; a multiplication and an addition are two.
        nbytes: Bytes that the kernels read from and write to the memory of the device.
        syncs: How often it waits for a value to come to the host: `.item()`, `bool(x)`, `.cpu()`.
        compiled: Whether one program is started and starts the kernels, instead of Python.
        unseen: What could not be counted, in words.
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
            error: What was raised, which may have come of something else.
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

    def vectorize(
        self,
        run: Callable[[Sequence[Any]], list[Any]],
        arrays: Sequence[Any],
        axes: Sequence[int | None],
    ) -> list[Any]:
        """Calls a function for every index of the arrays at once; results have it as axis 0."""
        raise NotImplementedError

    def compile(
        self, run: Run, give_up: Callable[[str], None]
    ) -> Callable[[list[Any], Any], tuple[Sequence[Any], Any] | None]:
        """Returns a function that is recorded the first time and then replayed.

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
        """Returns a placeholder without values for an array that is being recorded."""
        return self.abstract(self.shape(array), self.dtype(array))

    # arrays in step

    def domain(self, array: Any) -> str:
        """Returns a text that arrays have in common which one computation can take.

        Empty in memory of the host, where copies are faster.
        """
        device = self.device(array)
        if not device.is_accelerator or device.memory or isinstance(device.index, tuple):
            return ""
        return f"accelerator {device.index or 0}"

    def compile_for(
        self, run: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]], like: Sequence[Any]
    ) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
        """Returns a function as it is run best, again and again with arrays that lie alike.

        Args:
            run: `run(arrays) -> (values, flags)`, of operations that all frameworks have.
            like: How the values are to lie; they share no memory with the arrays.
        """
        return run

    # running models

    def runner(
        self, call: Callable[..., Any], model: Any, *, compile: bool | None
    ) -> Callable[..., Any]:
        """Returns how this backend runs a model for inference: a function of the inputs alone.

        Args:
            call: `call(model, *inputs)` is one run.
            model: Its arrays are of this backend, on one device.
            compile: Whether the backend's compiler is used; None for what is usual there.
        """
        return functools.partial(call, model)

    def count(self, call: Callable[..., Any], model: Any, inputs: Sequence[Any]) -> Counts | None:
        """Counts the operations and bytes of one run; None where they cannot be counted."""
        return None


class Optimizers(Framework):
    """Optimizers as plain data, and back.

    The parameters of a model have an order, in which all methods give and take them.
    """

    lacking: ClassVar[str] = "optimizers"

    @abstractmethod
    def is_optimizer(self, x: Any) -> bool:
        """Returns whether an object is an optimizer, with its state, of this framework."""

    @abstractmethod
    def trainable(self, model: Any) -> list[Any]:
        """Returns the arrays of `state(model)` that an optimizer may update, in order."""

    @abstractmethod
    def read_optimizer(
        self, model: Any, optimizer: Any, scheduler: Any, every: int | None = None
    ) -> Any:
        """Returns an `OptimizerState`.

        Args:
            model: The model.
            optimizer: Its optimizer.
            scheduler: The scheduler of the optimizer; None if there is none.
            every: How many updates there are between two steps of the scheduler; None where the
                counts of the optimizer are to tell.

        Raises:
            ConversionError: Says which optimizer, setting or schedule cannot be read.
        """

    @abstractmethod
    def write_optimizer(self, model: Any, state: Any) -> tuple[Any, Any]:
        """Returns an optimizer for a model, and a scheduler; None where the optimizer has it.

        Raises:
            ConversionError: Says which algorithm or setting has no counterpart.
        """

    def without_gradient(self, array: Any) -> Any:
        """Returns an array through which no gradient goes."""
        return array

    def low_rank_sum(self, weight: Any, left: Any, right: Any) -> Any:
        """Returns `weight + left @ right` in parts, as models take it that `with_named` returns."""
        return weight + left @ right

    def with_named(self, model: Any, change: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Returns a copy of a model, of whose parameters a function of their names returns others.

        Raises:
            StructureMismatchError: Its parameters are not arrays by name.
        """
        raise StructureMismatchError(
            f"{type(model).__name__} takes no adapter beside its weights: pass its parameters "
            "by name, such as dict(module.named_parameters()) or fmapper.state(model)."
        )

    def attach_low_rank(
        self, model: Any, layers: Mapping[str, tuple[Any, Any]], others: Sequence[str]
    ) -> Any:
        """Returns a copy of a model with pairs of matrices around its linear layers.

        Args:
            model: The model.
            layers: The names that the source has for the weights of the layers -> the pairs.
            others: Weights that have no such pair, which an error names.

        Raises:
            StructureMismatchError: Its layers cannot hold any, or not these.
        """
        raise StructureMismatchError(
            f"{type(model).__name__} cannot hold an adapter in its layers: only models of Flax "
            "that were converted with structure=True can. Use it as a function of the parameters."
        )

    def detach_low_rank(self, model: Any, layers: Iterable[str]) -> list[tuple[Any, Any]]:
        """Returns the pairs of matrices that layers of a model have around them.

        Raises:
            StructureMismatchError: Its layers hold none.
        """
        raise StructureMismatchError(
            f"{type(model).__name__} holds no adapter in its layers: pass what attach has returned."
        )
