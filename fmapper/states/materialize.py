"""Fills a tree of arrays without values from a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from fmapper.backends.arrays import Arrays, Device
from fmapper.backends.device import DeviceSpec, parse_device
from fmapper.backends.discovery import adapter_of
from fmapper.backends.dtypes import dtype_name, is_inexact, wanted_dtype
from fmapper.backends.equality import equal_arrays
from fmapper.errors import DeviceError, StructureMismatchError
from fmapper.moves.carry import carry_out
from fmapper.moves.mover import Mover
from fmapper.moves.view_ties import find_view_ties
from fmapper.states.state import (
    constants_in,
    identity_of,
    in_one_form,
    left_over,
    named_arrays,
    refill,
    weights_of,
)
from fmapper.tracebacks import short_traceback
from fmapper.tree.keypath import Link, name_of
from fmapper.tree.nodes import sync

T = TypeVar("T")
_INTEGERS = ("int", "uint")
Default = Callable[[str, Any], Any] | Mapping[str, Any]


@short_traceback
def materialize(
    tree: T,
    state: Mapping[str, Any],
    *,
    device: Any = None,
    dtype: Any = None,
    default: Default | None = None,
    strict: bool = True,
    sharding: Any = None,
) -> T:
    """Returns a new tree with values for its abstract arrays, from a state.

    Such arrays are tensors on torch's device `meta`, parameters or not, and
    `jax.ShapeDtypeStruct`s. `to_torch(device="meta")`, `to_jax(device="meta")`,
    `torch.device("meta")` and `jax.eval_shape` create them. The values may be arrays of any
    backend; they are moved to the backend of the arrays that they replace, and become parameters
    where these were parameters. Ties are kept, and the state may have a tied array under any of its
    names. Arrays of `tree` that have values stay as they are, unless the state has them.

    An array that needs no change becomes part of the tree without a copy, so that even a model that
    fills the memory can be loaded.

    Args:
        tree: The tree to fill; it is not changed.
        state: Arrays by name, from `state`, `state_dict` or a safetensors file.
        device: The device for the new arrays; None for those of the state's arrays, or the CPU if
            the backend of the tree cannot use those.
        dtype: The dtype for floating and complex arrays, to which those of the state are cast; None
            for that of `tree`, which the state must have, too. Integers of another width are
            accepted if they fit.
        default: Values for arrays that the state lacks, such as buffers that torch leaves out of a
            `state_dict`: a mapping like it, or `default(name, array)`, which returns a new array.
        strict: False ignores extra arrays of the state, and leaves missing ones without values.
        sharding: A `fmapper.meshes.Sharding`, by which the arrays of the result are divided. Each
            process reads only its own shards of a checkpoint.

    Raises:
        StructureMismatchError: Names are missing or left over, a shape or dtype differs, or the
            state has different values for arrays that are tied; the message lists all of them.
        DeviceUnavailableError: The device is not available.
        LossyCastError: A value does not fit into its dtype.

    Examples:
        >>> import fmapper, torch
        >>> model = torch.nn.Linear(2, 1, device="meta")
        >>> state = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
        >>> fmapper.materialize(model, state)(torch.ones(3, 2)).tolist()
        [[2.0], [2.0], [2.0]]
    """
    sync()
    check_constants(tree)
    place = None if sharding is None else sharding.placer(tree)
    arrays, back = weights_of(tree) or (tree, lambda filled: filled)
    new = back(
        fill(arrays, state, device=device, dtype=dtype, default=default, strict=strict, place=place)
    )
    return cast("T", new if place is None else place.finish(new))


def fill(
    tree: T,
    state: Mapping[str, Any],
    *,
    device: Any = None,
    dtype: Any = None,
    default: Default | None = None,
    strict: bool = True,
    place: Callable[[Any, Any], Any] | None = None,
) -> T:
    """Materialises a tree; `place(old, new)` may choose each new array.

    If it returns None, the array is placed as by default.
    """
    sync()
    filling = _Filling(
        None if device is None else parse_device(device),
        None if dtype is None else dtype_name(dtype),
        place,
    )
    named = named_arrays(tree)
    for name, (link, old) in named.items():
        if name in state:
            filling.add(name, link, old, state[name])
    missing = filling.find_missing(named)
    for names in missing:
        values = {name: default_for(default, name, named[name][1]) for name in names}
        for name, value in values.items():
            if value is not None:
                filling.add(name, *named[name], value)
        if strict and all(value is None for value in values.values()):
            also = f" (nor is {', '.join(names[1:])}, tied to it)" if names[1:] else ""
            filling.problems.append(f"{names[0]}: not in the state{also}")
    filling.problems += left_over(tree, state, named, strict)
    if filling.problems:
        way_out = (
            "\nArrays that a state lacks, such as torch's non-persistent buffers, can come from "
            "default=: a dict, or a function of the name and the empty array."
        )
        raise StructureMismatchError(
            "the state does not fit the tree:\n"
            + "\n".join(f"  {line}" for line in filling.problems)
            + (way_out if missing and strict else "")
        )
    filled = filling.finish()
    identities = {name: identity_of(name, array) for name, (_, array) in named.items()}
    return refill(tree, lambda link, leaf: filled.get(identities.get(name_of(link)), leaf))


def check_constants(tree: Any) -> None:
    """Raises for a converted model whose constants have no values, because no state has them.

    Raises:
        StructureMismatchError: There are such constants; names them.
    """
    empty = [name for name, array in constants_in(tree).items() if is_abstract(array)]
    if empty:
        raise StructureMismatchError(
            f"{', '.join(empty)}: constants of a converted model that have no values. They are "
            "part of its program, and not of a state. Fill the model from convert or load_program, "
            "which has them, instead of one that was moved to meta."
        )


def is_abstract(array: Any) -> bool:
    """Returns whether an array has a shape and a dtype, but no values."""
    adapter = adapter_of(array)
    return adapter is not None and adapter.device(array).kind == "meta"


def default_for(default: Default | None, name: str, old: Any) -> Any:
    """Returns the default for an array; None if there is none."""
    if default is None:
        return None
    return default.get(name) if isinstance(default, Mapping) else default(name, old)


class _Filling:
    """The assignment of values to abstract arrays, with all its problems.

    Attributes:
        sources: By identity of each array to fill: its name, its link, the array, the new values.
        keys: The random keys, by identity, whose raw words `sources` has.
        problems: Descriptions of mismatches.
    """

    def __init__(
        self,
        spec: DeviceSpec | None,
        dtype: str | None,
        place: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.spec, self.dtype, self.place = spec, dtype, place
        self.sources: dict[Any, tuple[str, Link, Any, Any]] = {}
        self.keys: dict[Any, Any] = {}
        self.problems: list[str] = []

    def find_missing(self, named: Mapping[str, tuple[Link, Any]]) -> list[list[str]]:
        """Returns the names of abstract arrays that still lack values."""
        names: dict[Any, list[str]] = {}
        for name, (_, old) in named.items():
            identity = identity_of(name, old)
            if identity not in self.sources and is_abstract(old):
                names.setdefault(identity, []).append(name)
        return list(names.values())

    def add(self, name: str, link: Link, old: Any, new: Any) -> None:
        """Adds values for an array of the tree, if they fit."""
        identity = identity_of(name, old)
        array = old
        if adapter_of(new) is not None:
            old, new = in_one_form(old, new)
            if old is not array:
                self.keys[identity] = array
        problem = self._problem(old, new)
        if problem:
            self.problems.append(f"{name}: {problem}")
            self.sources.setdefault(identity, (name, link, old, None))
        elif identity not in self.sources:
            self.sources[identity] = name, link, old, new
        else:
            first, *_, earlier = self.sources[identity]
            if earlier is not None and not equal_arrays(earlier, new):
                self.problems.append(f"{name}: tied to {first}, but the state has other values")

    def _problem(self, old: Any, new: Any) -> str:
        adapter, source = adapter_of(old), adapter_of(new)
        assert adapter is not None
        if source is None:
            return f"{type(new).__name__} is not an array"
        if is_abstract(new):
            return "the state has no values there either"
        try:
            shape, given = adapter.shape(old), source.shape(new)
        except (RuntimeError, TypeError) as error:  # a lazy parameter, a nested tensor
            return str(error).partition("\n")[0]
        if shape != given:
            return f"shape {given} in the state, {shape} in the tree"
        dtype, wanted = source.dtype(new), adapter.dtype(old)
        if wanted in (dtype, adapter.storable(dtype)):
            return ""
        if dtype.startswith(_INTEGERS) and wanted.startswith(_INTEGERS):
            return ""  # if the values fit, which is checked when they are moved
        if self.dtype is not None and is_inexact(dtype) and is_inexact(wanted):
            return ""
        way_out = "; dtype= casts" if is_inexact(dtype) and is_inexact(wanted) else ""
        return f"dtype {dtype} in the state, {wanted} in the tree{way_out}"

    def finish(self) -> dict[Any, Any]:
        """Returns the new arrays by the ids of the arrays that they replace."""
        self._untie()
        groups: dict[tuple[Mover, str | None], list[Any]] = {}
        filled = {}
        for identity, (_, _, old, new) in self.sources.items():
            array = self._place(old, new) if self._is_right(old, new) else None
            if array is not None:
                filled[identity] = array
                continue
            dtype = _adapter(old).dtype(old)
            whole = dtype if dtype.startswith(_INTEGERS) else None
            groups.setdefault((self._mover(old), whole), []).append(identity)
        for (mover, whole), identities in groups.items():
            links = [self.sources[identity][1] for identity in identities]
            values = [self.sources[identity][3] for identity in identities]
            routes, _ = mover.routes(values, links.__getitem__)
            for route in routes:
                if whole is not None:
                    route.wanted = whole
                    route.held = route.target.storable(whole) or whole
            news = carry_out(routes, values, links.__getitem__, copy=None)
            for identity, new in zip(identities, news, strict=True):
                old = self.sources[identity][2]
                array = _adapter(old).like(new, old)
                placed = self._place(old, array)
                filled[identity] = array if placed is None else placed
        for identity, key in self.keys.items():
            filled[identity] = _adapter(key).from_portable(filled[identity], key)
        return filled

    def _place(self, old: Any, new: Any) -> Any:
        return None if self.place is None else self.place(old, new)

    def _is_right(self, old: Any, new: Any) -> bool:
        """Returns whether values have the expected dtype."""
        dtype, wanted = _adapter(new).dtype(new), _adapter(old).dtype(old)
        return dtype == (wanted if self.dtype is None else wanted_dtype(wanted, self.dtype))

    def _mover(self, old: Any) -> Mover:
        adapter = _adapter(old)
        spec = self.spec
        if spec is not None and spec.backend not in (None, adapter.name):
            raise DeviceError(
                f"materialize keeps the backend, and the tree has arrays of {adapter.name}, which "
                f"cannot be on {spec}."
            )
        if spec is None and not is_abstract(old):
            spec = _spec(adapter.device(old))
        return Mover("materialize", adapter.name, spec, self.dtype)

    def _untie(self) -> None:
        """Copies values that share memory but belong to arrays that are not tied."""
        of_backend: dict[str, list[Any]] = {}
        met: set[int] = set()
        for identity, (name, link, old, new) in self.sources.items():
            if id(new) in met:
                (new,) = _copies([new])  # noqa: PLW2901
                self.sources[identity] = name, link, old, new
            met.add(id(new))
            of_backend.setdefault(_adapter(new).name, []).append(identity)
        for identities in of_backend.values():
            values = [self.sources[identity][3] for identity in identities]
            adapter = _adapter(values[0])
            if adapter.frozen or not adapter.may_share_memory(values):
                continue
            for tie in find_view_ties(values, adapter):
                (new,) = _copies([values[tie.view]])
                self.sources[identities[tie.view]] = *self.sources[identities[tie.view]][:3], new


def _copies(arrays: Sequence[Any]) -> list[Any]:
    return [Mover("materialize", _adapter(array).name, copy=True)(array) for array in arrays]


def _spec(device: Device) -> DeviceSpec | None:
    several = isinstance(device.index, tuple)
    return None if several else parse_device(device)


def _adapter(array: Any) -> Arrays:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter
