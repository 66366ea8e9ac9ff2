"""The calls of a submodule as layers are looked for among them, and how arrays are turned."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, local_array

Order = tuple[int, ...] | None
Groups = tuple[tuple[int, ...], ...]
_MERGES = ("reshape", "flatten", "view")


def name_of(call: Call) -> str:
    """Returns the operation of a call without its kind."""
    return call.op.partition("::")[2]


class Site:
    """The calls of a submodule, and what is known of values.

    Args:
        structure: The program.
        unit: The submodule.
        whole: Whether a layer may stand for what is done around a call, too.
    """

    def __init__(self, structure: Structure, unit: Unit, *, whole: bool) -> None:
        self.whole = whole
        self.structure = structure
        self.unit = unit
        self.made = {call.name: call for call in unit.steps if isinstance(call, Call)}
        self.seen: set[str] = set()  # calls that a layer stands for
        self._uses = Counter(
            value
            for step in unit.steps
            for value in ({*step.refs()} if isinstance(step, Call) else step.given)
        )

    def array(self, value: Any) -> tuple[str, str, Order] | None:
        """Returns an array of the module's own: its name, its path there, and its order."""
        found = self.array_with_flips(value)
        return None if found is None or any(i < 0 for i in found[2] or ()) else found

    def array_with_flips(self, value: Any) -> tuple[str, str, Order] | None:
        """Returns an array of the module's own, as `array`; `~i` is its dimension i backwards."""
        chain: list[Call] = []
        while isinstance(value, Ref) and value.name in self.made:
            chain.append(self.made[value.name])
            value = chain[-1].args[0] if chain[-1].args else None
        if not isinstance(value, Ref) or not self._are_alone(chain):
            return None
        local = local_array(self.structure, self.unit, value.name)
        if local is None:
            return None
        ndim = len(self.shape(value))
        order = tuple(range(ndim))
        for call in reversed(chain):
            turned = permutation_of(call, ndim)
            flipped = flips_of(call, ndim) if turned is None else ()
            if turned is not None:
                order = tuple(order[i] for i in turned)
            elif flipped is not None:
                order = tuple(~one if i in flipped else one for i, one in enumerate(order))
            else:
                return None
        self.seen |= {call.name for call in chain}
        return value.name, local, None if order == tuple(range(ndim)) else order

    def merge(self, value: Any) -> tuple[str, str, Groups] | None:
        """Returns an array of the module's own, some of its dimensions taken as one.

        Returns:
            Its name, its path there, and for each dimension of the value those of the array.
        """
        chain: list[Call] = []
        while isinstance(value, Ref) and value.name in self.made:
            chain.append(self.made[value.name])
            value = chain[-1].args[0] if chain[-1].args else None
        if not isinstance(value, Ref) or not self._are_alone(chain):
            return None
        local = local_array(self.structure, self.unit, value.name)
        if local is None:
            return None
        sizes = self.shape(value)
        groups: Groups = tuple((i,) for i in range(len(sizes)))
        for call in reversed(chain):
            turned = permutation_of(call, len(groups))
            if turned is not None:
                groups = tuple(groups[i] for i in turned)
                continue
            merges = name_of(call) in _MERGES
            joined = _joined_dims(groups, sizes, self.shape(call.name)) if merges else None
            if joined is None:
                return None
            groups = joined
        self.seen |= {call.name for call in chain}
        return value.name, local, groups

    def _are_alone(self, chain: list[Call]) -> bool:
        """Returns whether values have one use, so that nothing but a layer wants them."""
        return all(self._uses[call.name] < 2 and call.name not in self.unit.gives for call in chain)

    def call(self, value: Any, *names: str) -> Call | None:
        """Returns the call that gives a value, if it is one of these."""
        found = self.made.get(value.name) if isinstance(value, Ref) else None
        return found if found is not None and name_of(found) in names else None

    def user(self, value: str) -> Call | None:
        """Returns the only call that uses a value, if a layer may do what it does, too."""
        if not self.whole:
            return None
        found = [call for call in self.made.values() if value in {*call.refs()}]
        return found[0] if len(found) == 1 and value not in self.unit.gives else None

    def shape(self, value: Any) -> tuple[Any, ...]:
        """Returns the sizes of a value."""
        name = value.name if isinstance(value, Ref) else value
        return self.structure.values.get(name, ("", ()))[1]

    def dtype(self, value: Any) -> str:
        """Returns the dtype of a value."""
        name = value.name if isinstance(value, Ref) else value
        return self.structure.values.get(name, ("", ()))[0]

    def is_all(self, layer: Layer, calls: list[Call]) -> bool:
        """Returns whether nothing is left that a layer does not do."""
        return {call.name for call in calls} <= self.seen


def _joined_dims(groups: Groups, sizes: tuple[Any, ...], shape: tuple[Any, ...]) -> Groups | None:
    """Returns the dimensions that a reshape makes one; None if it does anything else."""
    left, found = list(groups), []
    for size in shape:
        group: tuple[int, ...] = ()
        while left and (not group or math.prod(sizes[i] for i in group) != size):
            group += left.pop(0)
        if not group or math.prod(sizes[i] for i in group) != size:
            return None
        found.append(group)
    return None if left else tuple(found)


def permutation_of(call: Call, ndim: int) -> Order:
    """Returns the order in which a call puts dimensions; None for another call."""
    name = name_of(call)
    if name == "t":
        return (1, 0)
    if name in ("permute", "torch.permute"):
        order = call.args[1] if isinstance(call.args[1], tuple) else call.args[1:]
        return tuple(int(i) % ndim for i in order)
    if name == "movedim" and all(isinstance(one, int) for one in call.args[1:3]):
        axes = list(range(ndim))
        axis = axes.pop(call.args[1] % ndim)
        axes.insert(call.args[2] % ndim, axis)
        return tuple(axes)
    if name in ("transpose", "torch.transpose"):
        axes = list(range(ndim))
        a, b = (one % ndim for one in call.args[1:3])
        axes[a], axes[b] = axes[b], axes[a]
        return tuple(axes)
    return None


def flips_of(call: Call, ndim: int) -> tuple[int, ...] | None:
    """Returns the dimensions that a call turns around; None for another call."""
    if name_of(call) not in ("torch.flip", "flip"):
        return None
    dims = call.args[1] if isinstance(call.args[1], tuple) else call.args[1:]
    return tuple(int(i) % ndim for i in dims)


def dtype_option(site: Site, value: Any) -> str:
    """Returns the keyword of a layer whose arrays are of another dtype than the usual one."""
    name = site.dtype(value)
    return "" if name == "float32" else f", dtype=torch.{name}"


def stem_of(local: str, default: str) -> str:
    """Names a layer after its weight."""
    *path, last = local.split(".")
    for end in ("weight", "kernel", "scale", "embedding"):
        last = last.removesuffix(end)
    return last.strip("_") or (path[-1] if path else default)
