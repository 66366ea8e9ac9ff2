"""`device_map`: plans the device of each part of a model by bytes, for a few small devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fmapper.errors import PlacementError
from fmapper.files.dtypes import itemsize
from fmapper.programs.program import Program
from fmapper.render import as_html, as_text, parse_bytes, readable_bytes
from fmapper.states.inventory import Inventory
from fmapper.states.state import named_arrays
from fmapper.tree.keypath import KeyPath

if TYPE_CHECKING:
    from rich.console import RenderableType

OFFLOADED = ("cpu", "disk")
_FLOATS = ("float", "bfloat")


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part of a model, and its planned device.

    Attributes:
        path: Its name, the start of the names of its arrays; empty for the whole model.
        device: A key of `max_memory`.
        nbytes: Bytes that its arrays take there; arrays that are already there are not counted
            again.
    """

    path: str
    device: Any
    nbytes: int


@dataclass(frozen=True)
class DeviceMap(Mapping[str, Any]):
    """A mapping of the parts of a model to devices; see `device_map`.

    Pass `dict(plan)` as `device_map=` to transformers and accelerate. It prints as a table.

    Attributes:
        parts: The parts, in the order in which they are used.
        nbytes: Bytes of arrays on each device.
        room: Bytes of the first device that are kept free for arrays from "cpu" or "disk".
        copies: Tied arrays that are on several devices: the name, and the devices.
    """

    parts: tuple[PlacedPart, ...]
    nbytes: dict[Any, int]
    room: int = 0
    copies: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __getitem__(self, path: str) -> Any:
        for part in self.parts:
            if part.path == path:
                return part.device
        raise KeyError(path)

    def __iter__(self) -> Iterator[str]:
        return (part.path for part in self.parts)

    def computes(self, device: Any) -> bool:
        """Returns whether a device runs layers: the first one, and all except "cpu" and "disk"."""
        return device == next(iter(self.nbytes)) or device not in OFFLOADED

    def __len__(self) -> int:
        return len(self.parts)

    def device_of(self, name: str) -> Any:
        """Returns the device of an array or submodule by name.

        Raises:
            KeyError: No part contains this name.
        """
        for part in self.parts:
            if not part.path or name == part.path or name.startswith(part.path + "."):
                return part.device
        raise KeyError(name)

    def __str__(self) -> str:
        """Returns the table, as plain text."""
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich__(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(caption_justify="left")
        table.add_column("part", overflow="fold")
        table.add_column("device")
        table.add_column("bytes", justify="right")
        for part in self.parts:
            row = part.path or "the whole model", str(part.device), readable_bytes(part.nbytes)
            table.add_row(*map(Text, row))
        lines = [f"{device}: {readable_bytes(n)}" for device, n in self.nbytes.items()]
        if self.room:
            lines[0] += f", and {readable_bytes(self.room)} free for layers from elsewhere"
        lines += [f"{name} is on {' and '.join(map(str, on))}" for name, on in self.copies]
        table.caption = "\n".join(lines)
        return table


def device_map(
    model: Any,
    max_memory: Mapping[Any, int | str | None],
    *,
    no_split: Sequence[str] | None = None,
    dtype: str | None = None,
    ahead: int = 0,
) -> DeviceMap:
    """Plans the device of each part of a model, by bytes, before anything is loaded.

    Devices are filled one after the other, with the parts in order of use: that of the program for
    a converted model, that of the children for other models. A part that does not fit is divided
    into its children, and those that do not fit go to the next device. If anything goes to "cpu" or
    "disk", the first device keeps room for the largest layer. A tied array counts once per device;
    a part whose arrays are all on one device goes there, and arrays that are still on several are
    listed in `copies`.

    Args:
        model: A model; only shapes and dtypes matter, so a module on torch's meta device or a model
            of `jax.ShapeDtypeStruct` is enough.
        max_memory: The bytes that weights may take on each device, as a number or as "1.5GiB" or
            "800MB"; None for no limit. Devices may have any names, and are filled in this order;
            "cpu" and "disk" are memory from which layers are fetched to the first device.
        no_split: Names of classes whose instances stay whole; by default those that a transformers
            model declares. A converted model has no classes: pass names of parts.
        dtype: The dtype to assume for floating-point arrays, such as "bfloat16"; None for their
            own.
        ahead: How many layers to fetch while the previous one is computed. The first device keeps
            room for as many more; with 0, `offload` fetches less than a layer at a time.

    Returns:
        The plan; nothing is moved.

    Raises:
        PlacementError: The model does not fit, or an amount of memory cannot be read.
    """
    budget = {device: _amount(device, amount) for device, amount in max_memory.items()}
    if not budget:
        raise PlacementError("max_memory= names no device: pass the bytes of each device.")
    if no_split is None:
        no_split = getattr(model, "_no_split_modules", None) or ()
    whole = {no_split} if isinstance(no_split, str) else set(no_split)
    root = _parts(model, dtype)
    first, room = next(iter(budget)), 0
    while True:
        filling = _Filling({**budget, first: budget[first] - room}, whole)
        plan = filling.fill(root, room)
        away = (part.size() for part in root.layers(whole) if filling.is_away(part, first))
        largest = max(away, default=0)
        needed = largest * (1 + ahead)
        if first == "disk" or needed <= room:
            return plan
        if needed > budget[first]:
            more = f", {1 + ahead} must fit at once" if ahead else ""
            raise PlacementError(
                f"the largest layer has {readable_bytes(largest)}{more}, and {first} may take "
                f"{readable_bytes(int(budget[first]))}: no layer would fit there. Increase it in "
                "max_memory=, or name fewer classes in no_split=."
            )
        room = needed


@dataclass
class _Part:
    """A part of a model: a submodule with its own arrays, or one array; identity -> bytes."""

    path: str
    cls: str = ""
    arrays: dict[Any, int] = field(default_factory=dict)  # including those of all children
    children: dict[str, _Part] = field(default_factory=dict)

    def size(self) -> int:
        return sum(self.arrays.values())

    def stays_whole(self, whole: set[str]) -> bool:
        return not self.children or self.cls in whole or self.path in whole

    def layers(self, whole: set[str]) -> Iterator[_Part]:
        """Yields the parts that stay whole or have arrays of their own."""
        if self.stays_whole(whole) or not any(c.children for c in self.children.values()):
            yield self
            return
        direct = _Part(self.path)
        for child in self.children.values():
            if child.children:
                yield from child.layers(whole)
            else:
                direct.arrays.update(child.arrays)
        yield direct


class _Filling:
    """Fills devices in order; `on` has the devices of each array."""

    def __init__(self, budget: dict[Any, float], whole: set[str]) -> None:
        self.free, self.whole = dict(budget), whole
        self.waiting = list(budget)
        self.on: dict[Any, dict[Any, None]] = {}
        self.names: dict[Any, str] = {}

    def fill(self, root: _Part, room: int = 0) -> DeviceMap:
        used = dict.fromkeys(self.free, 0)
        parts = tuple(self._merge(root, self._place(root)))
        for part in parts:
            used[part.device] += part.nbytes
        copies = ((self.names[a], tuple(on)) for a, on in self.on.items() if len(on) > 1)
        return DeviceMap(parts, used, room, tuple(copies))

    def is_away(self, part: _Part, first: Any) -> bool:
        """Returns whether arrays of a part have to be moved to the first device."""
        places = (self.on.get(array, {}) for array in part.arrays)
        return any(first not in on and any(place in OFFLOADED for place in on) for on in places)

    def _place(self, part: _Part) -> list[PlacedPart]:
        """Places a part, or its children."""
        common = [d for d in self.free if all(d in self.on.get(a, ()) for a in part.arrays)]
        if common and part.arrays:
            return [PlacedPart(part.path, common[0], 0)]
        stays = part.stays_whole(self.whole)
        while self.waiting:
            device = self.waiting[0]
            missing = {a: n for a, n in part.arrays.items() if device not in self.on.get(a, ())}
            nbytes = sum(missing.values())
            is_split = any(a in self.on for a in missing)  # tied to arrays on other devices
            if nbytes <= self.free[device] and (stays or not is_split):
                self.free[device] -= nbytes
                for array in missing:
                    self.on.setdefault(array, {})[device] = None
                    self.names.setdefault(array, array)
                return [PlacedPart(part.path, device, nbytes)]
            if not stays:
                children = part.children.values()
                return [p for child in children for p in self._merge(child, self._place(child))]
            self.waiting.pop(0)
        raise PlacementError(
            f"{part.path or 'the model'} ({readable_bytes(part.size())}) does not fit on any of "
            f"the remaining devices"
            f" {', '.join(map(str, self.free))}. Increase max_memory=, plan for a "
            'smaller dtype=, or add "cpu": None or "disk": None.'
        )

    def _merge(self, part: _Part, placed: list[PlacedPart]) -> list[PlacedPart]:
        """Merges parts that are all on one device."""
        devices = list(dict.fromkeys(p.device for p in placed))
        if len(devices) != 1:
            return placed
        return [PlacedPart(part.path, devices[0], sum(p.nbytes for p in placed))]


def _parts(model: Any, dtype: str | None) -> _Part:
    program = getattr(model, "program", model)
    classes: dict[tuple[str, ...], str] = {}
    if isinstance(program, Program):
        arrays = _of_program(program)
    else:
        rows = Inventory(model).rows
        classes = {tuple(map(str, row.path)): row.cls for row in rows}
        at = {tuple(row.path): row for row in rows}
        named = named_arrays(model)
        seen: dict[int, tuple[str, str, int, str]] = {}
        arrays = []
        for name, (link, array) in named.items():
            row = at.get(tuple(KeyPath.from_link(link)))
            if id(array) not in seen:
                size = 0 if row is None else row.nbytes
                seen[id(array)] = (name, name, size, (row and row.dtype) or "")
            arrays.append((name, *seen[id(array)][1:]))
    root = _Part("", classes.get((), ""))
    for name, first, size, stored in arrays:
        is_cast = dtype is not None and stored.startswith(_FLOATS) and bool(itemsize(stored))
        nbytes = size // itemsize(stored) * itemsize(dtype or stored) if is_cast else size
        part, keys = root, name.split(".")
        root.arrays[first] = nbytes
        for n in range(1, len(keys) + 1):
            path = ".".join(keys[:n])
            cls = classes.get(tuple(keys[:n]), "")
            part = part.children.setdefault(keys[n - 1], _Part(path, cls))
            part.arrays[first] = nbytes
    return root


def _of_program(program: Program) -> list[tuple[str, str, int, str]]:
    """Returns name, first name, bytes and dtype of the arrays of a program, by first use."""
    held = {
        ref: given
        for ref, given in zip(program.graph.inputs, program.inputs, strict=True)
        if given.kind in ("parameter", "buffer", "constant")
    }
    used = [ref for call in program.graph.walk() for ref in call.refs() if ref in held]
    inputs = [held[ref] for ref in dict.fromkeys((*used, *held))]
    sizes = [math.prod(map(int, given.shape)) * itemsize(given.dtype) for given in inputs]
    names = [str(given.target) for given in inputs]
    return [(n, n, size, given.dtype) for n, size, given in zip(names, sizes, inputs, strict=True)]


def _amount(device: Any, amount: int | str | None) -> float:
    if amount is None:
        return math.inf
    if isinstance(amount, str):
        count = parse_bytes(amount)
        if count is not None:
            return count
    elif amount >= 0:
        return amount
    raise PlacementError(
        f"max_memory[{device!r}]={amount!r}: pass bytes, such as 1000, '1.5GiB' or '800MB', or "
        f"None for no limit."
    )
