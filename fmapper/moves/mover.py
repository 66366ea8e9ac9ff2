"""Movers: callables that take leaves and whole trees to another device or backend."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

from fmapper.backends.arrays import DEVICE_KINDS, Arrays, Device
from fmapper.backends.device import DeviceSpec, parse_device
from fmapper.backends.discovery import adapter_of, adapters, get_adapter
from fmapper.backends.dtypes import dtype_name, wanted_dtype
from fmapper.backends.framework import Framework
from fmapper.backends.models import Models
from fmapper.backends.undeclared import check_carried, check_leaf
from fmapper.errors import (
    ConversionError,
    DeviceError,
    DeviceUnavailableError,
    MoveError,
    NoGPUWarning,
    UnsupportedLeafError,
)
from fmapper.moves.carry import UNTOUCHED, Route, Where, carry_out
from fmapper.moves.route import Generator, Target, gpu_for_host_arrays
from fmapper.moves.router import Router
from fmapper.suggest import did_you_mean
from fmapper.tracebacks import short_traceback, shorten_traceback
from fmapper.tree.fmap import fmap
from fmapper.tree.keypath import Link, format_link
from fmapper.tree.nodes import NodeType, node_type_of
from fmapper.warn import warn

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from fmapper.moves.mover_types import ArrayMover, Options
    from fmapper.moves.plan import Plan

T = TypeVar("T")


class _Given(enum.Enum):
    NO = "no tree was given"


_NO = _Given.NO


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Mover(Router):
    """A callable that moves leaves or whole trees; created by `to_device` and its relatives.

    `mover(tree)` is `fmap(mover, tree)`. Called with keywords alone it returns a mover with these
    options.

    Attributes:
        name: The name it was created under, such as `to_gpu`.
        backend: The backend whose arrays it makes; None to keep each leaf's own.
        spec: The device it moves to; None to keep each leaf where it lives.
        dtype: The dtype that floating and complex leaves get; None to keep each leaf's own.
        copy: True always copies, False never, None shares only what nobody can write to.
        strict: Whether undeclared holders of arrays and, for `to_gpu`, a missing GPU are errors.
        report: Called after a move with the `Plan` of what was done, such as `print`.
    """

    name: str
    backend: str | None = None
    spec: DeviceSpec | None = None
    dtype: str | None = None
    copy: bool | None = None
    strict: bool | None = None
    report: Callable[[Plan], object] | None = None

    @overload
    def __call__(self, **options: Unpack[Options]) -> Mover: ...
    @overload
    def __call__(self, tree: T, **options: Unpack[Options]) -> T: ...
    def __call__(self, tree: Any = _NO, **options: Any) -> Any:
        """Returns the tree, moved; or, without a tree, a mover with these options."""
        try:
            mover = self._with(**options) if options else self
            return mover if tree is _NO else fmap(mover, tree)
        except Exception as error:
            shorten_traceback(error)
            raise

    def __repr__(self) -> str:
        options = {"device": self.spec, "dtype": self.dtype, "copy": self.copy}
        options["strict"] = self.strict
        if self.name in ("to_cpu", "to_gpu"):
            del options["device"]
        shown = [f"{key}={value}" for key, value in options.items() if value is not None]
        return f"{self.name}({', '.join(shown)})"

    def _with(self, **options: Any) -> Mover:
        allowed = {"dtype", "copy", "strict", "report"} | ({"device"} if self.backend else set())
        unknown = sorted(options.keys() - allowed)
        if unknown:
            raise TypeError(
                f"{self.name} has no option {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(sorted(allowed))}.{did_you_mean(unknown[0], allowed)}"
            )
        changes: dict[str, Any] = dict(options)
        if changes.get("dtype") is not None:
            changes["dtype"] = dtype_name(changes["dtype"])
        if "device" in changes:
            device = changes.pop("device")
            changes["spec"] = None if device is None else self._own_spec(device)
        if not (changes.get("report") is None or callable(changes["report"])):
            raise TypeError(f"report= must be a function of a Plan, not {changes['report']!r}.")
        for option in ("copy", "strict"):
            value = changes.get(option)
            if value is not None:
                if value not in (True, False):
                    raise TypeError(f"{option} is True, False or None, not {value!r}.")
                changes[option] = bool(value)
        return dataclasses.replace(self, **changes)

    def _own_spec(self, device: Any) -> DeviceSpec:
        spec = parse_device(device)
        if spec.backend not in (None, self.backend):
            raise DeviceError(
                f"{self.name} creates arrays of {self.backend}, which cannot be on {spec}. "
                f"Write to_{spec.backend}(device={str(device)!r})."
            )
        return spec

    # The four steps of a move: see `Router`.

    @property
    def on_report(self) -> Callable[[Plan], object] | None:
        """The function given as `report=`."""
        return self.report

    def groups(self, leaves: Sequence[Any], where: Where) -> Iterable[tuple[Mover, Sequence[int]]]:
        """Takes all leaves."""
        return ((self, range(len(leaves))),)

    def mover_of_node(self, node: Any) -> Mover:
        """Returns itself: a mover applies to every node."""
        return self

    def carry(
        self, routes: Sequence[Route], others: Sequence[int], leaves: Sequence[Any], where: Where
    ) -> list[Any]:
        """Executes the result of `routes`; returns the moved leaves, in order."""
        results = carry_out(routes, leaves, where, copy=self.copy)
        missing = next((route.note for route in routes if route.note), "")
        if missing:
            _warn_no_gpu(missing, self.strict)
        moved: dict[Any, Any] = {}
        for place in others:
            leaf = leaves[place]
            generator = self.generator(leaf, where, place)
            if node_type_of(leaf) is not None:  # a node that is_leaf= made a leaf
                if not moved:  # objects to which it is tied, here and in other such leaves
                    moved = {id(old): new for old, new in zip(leaves, results, strict=True)}
                    for at in others:
                        del moved[id(leaves[at])]
                inner = dataclasses.replace(self, report=None)
                results[place] = fmap(inner, leaf, cache=moved)
            elif generator is not None and not generator.stays:
                results[place] = generator.adapter.generator_to(leaf, generator.device)
        return results

    def check_node(self, node: Any, node_type: NodeType, where: Callable[[Any], Link]) -> None:
        """Raises for a node that holds arrays besides its children."""
        carried = node_type.carried
        if self.strict is False or (carried is not None and not carried(node)):
            return
        check_carried(node, node_type, where)

    def check_borrowed(self, node: Any, missing: Any, where: Callable[[Any], Link]) -> None:
        """Raises for an optimizer that would leave its model behind.

        Raises:
            MoveError: The tree lacks the model's arrays.
        """
        if self.strict is not False:
            name = type(node).__name__
            raise MoveError(
                f"{format_link(where(node))}: {name} works on arrays that nothing else in this "
                f"tree holds ({format_link(where(missing))} is the first), so moving it alone "
                "would separate it from its model. Move both together, as in model, optimizer = "
                f"fmapper.fmap({self!r}, (model, optimizer)); or pass strict=False to move it "
                f"alone. {UNTOUCHED}"
            )

    @property
    def uncast(self) -> Mover:
        """This mover without a change of dtype."""
        return dataclasses.replace(self, dtype=None)

    def routes(self, leaves: Sequence[Any], where: Where) -> tuple[list[Route], list[int]]:
        """Routes the arrays among the leaves; returns also the indices of the other leaves.

        Raises:
            NotAFunctorError: An undeclared leaf holds arrays.
            UnsupportedLeafError: The target cannot hold an array.
            DeviceError: An array cannot be on the requested device.
        """
        classes = set(map(type, leaves))
        by_class: dict[type, list[int]] = {}
        for place, leaf in enumerate(leaves if len(classes) > 1 else ()):
            by_class.setdefault(type(leaf), []).append(place)
        routes: list[Route] = []
        others: list[int] = []
        for places in by_class.values() if len(classes) != 1 else (range(len(leaves)),):
            adapter = adapter_of(leaves[places[0]])
            if adapter is None:
                others += places
                continue
            arrays = leaves if len(places) == len(leaves) else [leaves[at] for at in places]
            for chosen in _alike(adapter.signatures(arrays), places):
                routes.append(self._route(chosen, leaves, adapter, where))
        for place in sorted(others) if self.strict is not False else ():
            if node_type_of(leaves[place]) is None:
                check_leaf(leaves[place], where, place, lambda: leaves)
        return routes, others

    def generator(self, leaf: Any, where: Where, place: int) -> Generator | None:
        """Moves a random generator; returns None for a leaf of another kind.

        It can move to another device of its backend. It has no counterpart in other backends, so
        there it stays where it is.
        """
        for adapter in adapters(Arrays):
            origin = adapter.generator_device(leaf)
            if origin is None:
                continue
            device = origin
            if self.backend in (None, adapter.name) and not adapter.host_only:
                _, device, _ = self._placed_target(adapter, origin, where, place)
                if device.kind == "meta":  # no numbers are drawn on meta
                    device = origin
            return Generator(adapter, origin, device, self.copy is not True and origin == device)
        return None

    def _placed_target(self, adapter: Arrays, origin: Device, where: Where, place: int) -> Target:
        try:
            return self._target(adapter, origin)
        except (DeviceError, DeviceUnavailableError) as error:
            error.args = (f"{format_link(where(place))}: {error.args[0]}",)
            raise

    def _route(
        self, places: Sequence[int], leaves: Sequence[Any], adapter: Arrays, where: Where
    ) -> Route:
        first = leaves[places[0]]
        try:
            origin = adapter.device(first)
        except RuntimeError as error:
            raise UnsupportedLeafError(f"{format_link(where(places[0]))}: {error}.") from error
        target, device, note = self._placed_target(adapter, origin, where, places[0])
        if target is not adapter and self.strict is False:
            why = adapter.stays(first)
            if why is not None:
                target, device, note = adapter, origin, why
        dtype = adapter.dtype(first)
        wanted = wanted_dtype(dtype, self.dtype)
        held = wanted if wanted == dtype and target is adapter else target.storable(wanted)
        if held is None:
            raise UnsupportedLeafError(
                f"{format_link(where(places[0]))}: "
                f"{_why_unsupported(adapter, first, target, wanted)}. "
                f"{UNTOUCHED}"
            )
        arrays = leaves if len(places) == len(leaves) else [leaves[place] for place in places]
        return Route(adapter, target, origin, device, dtype, wanted, held, places, arrays, note)

    def _target(self, adapter: Arrays, origin: Device) -> Target:
        """Chooses the target backend and device of arrays by their source."""
        if self.backend is not None:
            target = adapter if adapter.name == self.backend else get_adapter(self.backend, Arrays)
            return Target(target, self._device_of(target, adapter, origin))
        spec = self.spec
        if spec is None:  # only the dtype changes
            return Target(adapter, origin)
        if spec.backend not in (None, adapter.name):
            raise DeviceError(
                f"this is an array of {adapter.name}, which cannot be on {spec}. {self.name} keeps "
                f"the backend; to change it, write to_{spec.backend}(device={str(spec)!r})."
            )
        try:
            if spec.kind not in ("cpu", "meta") and adapter.host_only:
                return gpu_for_host_arrays(spec)
            return Target(adapter, self._on(adapter, spec, origin))
        except DeviceUnavailableError as error:
            if self.name != "to_gpu" or self.strict is True:
                raise
            return Target(adapter, origin, str(error))

    def _device_of(self, target: Arrays, adapter: Arrays, origin: Device) -> Device:
        if self.spec is not None:
            return self._on(target, self.spec, origin)
        if target is adapter:
            return origin
        if not origin.is_accelerator or target.host_only:
            return target.find_device("cpu", None)
        index = origin.index if isinstance(origin.index, int) else None
        return target.find_device(DEVICE_KINDS.get(origin.kind, origin.kind), index)

    def _on(self, adapter: Arrays, spec: DeviceSpec, origin: Device) -> Device:
        kind = adapter.aliases.get(spec.kind, spec.kind)
        is_kind = origin.kind == kind or (spec.kind == "gpu" and origin.is_accelerator)
        if (origin.backend == adapter.name and is_kind) and (
            spec.index == origin.index
            or (spec.index is None and not isinstance(origin.index, tuple))
        ):
            device = origin
        else:
            device = adapter.find_device(spec.kind, spec.index)
        return adapter.in_memory(device, spec.memory) if spec.memory != device.memory else device


@short_traceback
def to_device(
    device: Any,
    *,
    dtype: Any = None,
    copy: bool | None = None,
    strict: bool | None = None,
    report: Callable[[Plan], object] | None = None,
) -> Mover:
    """Makes a mover to a device that keeps each leaf's backend, except for NumPy's on a GPU.

    Args:
        device: `"cpu"`, `"gpu"`, `"cuda:1"`, `"mps"`, `"meta"` ..., qualified by a backend or not
            (`"jax:gpu:0"`), a `Device`, or a framework's own device object.
        dtype: The dtype for floating and complex leaves.
        copy: True always copies; False never copies, and raises if a copy is needed.
        strict: False ignores undeclared objects that hold arrays.
        report: Called after a move with the `Plan` of what was done, such as `print`.

    Raises:
        DeviceError: `device` is not a device; the message lists those that are.
        DeviceUnavailableError: On use of the mover: the device is not available; says why.

    Examples:
        >>> import fmapper, numpy as np
        >>> model = fmapper.fmap(fmapper.to_device("cpu"), {"w": np.ones(2)})
    """
    mover = Mover("to_device", spec=parse_device(device))
    return mover._with(dtype=dtype, copy=copy, strict=strict, report=report)


to_cpu = Mover("to_cpu", spec=DeviceSpec(None, "cpu"))
"""Moves a leaf or a tree to the CPU; each leaf keeps its backend. Options: dtype, copy, strict,
report.

Examples:
    >>> import fmapper, numpy as np
    >>> model = fmapper.fmap(fmapper.to_cpu, {"w": np.ones(2)})
"""

to_gpu = Mover("to_gpu", spec=DeviceSpec(None, "gpu"))
"""Moves a leaf or a tree to the GPU; each leaf keeps its backend, NumPy arrays go to the backend
that sees a GPU (see `use_backend`). Options: dtype, copy, strict,
report.

Without a GPU it warns once and leaves everything where it is; with `strict=True` it raises
`DeviceUnavailableError`, with `strict=False` it is silent.
"""

to_numpy = cast("ArrayMover[np.ndarray[Any, Any]]", Mover("to_numpy", backend="numpy"))
"""Makes the arrays of a leaf or a tree NumPy arrays. Options: dtype, copy, strict,
report.

Examples:
    >>> import fmapper, jax.numpy as jnp
    >>> fmapper.to_numpy({"w": jnp.arange(3)})
    {'w': array([0, 1, 2], dtype=int32)}
"""

to_torch = cast("ArrayMover[torch.Tensor]", Mover("to_torch", backend="torch"))
"""Makes the arrays of a leaf or a tree torch tensors. Options: device, dtype, copy,
strict, report.

Examples:
    >>> import fmapper, numpy as np
    >>> half = fmapper.to_torch(dtype="float16")  # a mover, configured
    >>> half({"w": np.ones(2), "n": np.arange(2)})
    {'w': tensor([1., 1.], dtype=torch.float16), 'n': tensor([0, 1])}
"""

to_jax = cast("ArrayMover[jax.Array]", Mover("to_jax", backend="jax"))
"""Makes the arrays of a leaf or a tree JAX arrays. Options: device, dtype, copy,
strict, report.

Without `jax_enable_x64` JAX holds no 64-bit numbers: integers that fit are narrowed, others raise
`LossyCastError`; floats are narrowed with a `PrecisionWarning`.

Examples:
    >>> import fmapper, numpy as np
    >>> fmapper.to_jax({"w": np.ones(2, np.float32)}, dtype="bfloat16")
    {'w': Array([1, 1], dtype=bfloat16)}
"""


def _why_unsupported(adapter: Arrays, leaf: Any, target: Arrays, dtype: str) -> str:
    """Explains why a dtype cannot be moved, in its adapter's words if it never can."""
    try:
        adapter.check(leaf)
    except TypeError as error:
        return f"{target.name} has no dtype {dtype}: {error}"
    return f"{target.name} has no dtype {dtype}"


def _alike(signatures: Sequence[Hashable], places: Sequence[int]) -> Iterable[Sequence[int]]:
    """Groups indices by signature; usually all arrays of a model share one."""
    if len(set(signatures)) == 1:
        return [places]
    groups: dict[Hashable, list[int]] = {}
    for signature, place in zip(signatures, places, strict=True):
        groups.setdefault(signature, []).append(place)
    return groups.values()


_warned_no_gpu: set[str] = set()


def _warn_no_gpu(reason: str, strict: bool | None) -> None:
    if strict is False or _warned_no_gpu:
        return
    _warned_no_gpu.add(reason)
    warn(
        f"to_gpu leaves the model on the CPU: {reason.rstrip('.')}. This warning is shown once; "
        f"to_gpu(strict=True) raises instead.",
        NoGPUWarning,
    )


def mover_to(adapter: Framework) -> Mover:
    """Returns the mover to the arrays that a framework computes with.

    Raises:
        ConversionError: The framework has no arrays, neither its own nor those of another one.
    """
    family = adapter.lowers_like if isinstance(adapter, Models) else ""
    if not family and not isinstance(adapter, Arrays):
        raise ConversionError(
            f"{adapter.name} has no arrays of its own, and its adapter does not state which "
            f"backend's arrays its models use (lowers_like), so nothing can be moved to it."
        )
    backend = family or adapter.name
    return Mover(f"to_{backend}", backend=backend)
