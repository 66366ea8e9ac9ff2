"""Changes of arrays as they were before rules, in any framework and under `jit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fmapper.backends.namespace import array_namespace
from fmapper.checkpoints import lazy_operations as ops
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.errors import StructureMismatchError

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules

Arrays = Mapping[str, Any]


class _Given(LazyArray):
    """An array that operations of rules are planned for; its dtype does not matter to them."""

    def __init__(self, array: Any, bring: Callable[[Any], Any]) -> None:
        import numpy as np

        self._array, self._bring = array, bring
        self.shape, self.dtype = tuple(map(int, array.shape)), np.dtype(np.float32)

    @cached_property
    def array(self) -> Any:  # where it is computed with
        return self._bring(self._array)


def change_before(
    rules: Rules,
    arrays: Arrays,
    names: Iterable[str],
    change: Callable[[Arrays], Arrays],
    bring: Callable[[Any], Any],
) -> dict[str, Any]:
    """Returns the arrays of a model with a change of those that rules have made them of.

    The change gets those of `names` that there are; `bring` takes arrays to where it is computed.

    Raises:
        StructureMismatchError: What is changed is not in the model, or a rule does more than move,
            scale and add.
        CheckpointError: The rules do not fit, or have no inverse.
    """
    from fmapper.checkpoints import Cast, Rules

    plain = Rules(rule for rule in rules if not isinstance(rule, Cast))  # arrays keep their dtypes
    given = {name: _Given(array, bring) for name, array in arrays.items()}
    before = plain.inverse().apply(given, strict=False)
    new = change({name: _compute(before[name]) for name in names if name in before})
    changed = {_Given(array, bring): name for name, array in new.items()}
    after = plain.apply(
        {**before, **{name: array for array, name in changed.items()}}, strict=False
    )
    result, lost = dict(arrays), {*changed}
    for name, array in after.items():
        leaves = {*_leaves(array)} & changed.keys()
        if leaves and name in arrays:
            made = _compute(array)
            result[name] = array_namespace(made).astype(made, given[name].array.dtype)
            lost -= leaves
    if lost:
        names = ", ".join([changed[array] for array in changed if array in lost][:3])
        raise StructureMismatchError(f"{names}: is not in the model after the rules")
    return result


def _leaves(array: LazyArray) -> Iterable[LazyArray]:
    if not isinstance(array, Operation):
        return [array]
    return [leaf for operand in array.operands for leaf in _leaves(operand)]


_OPERATIONS: dict[type, Callable[..., Any]] = {
    ops.Transpose: lambda xp, op, x: xp.permute_dims(x, tuple(op.axes)),
    ops.Reshape: lambda xp, op, x: xp.reshape(x, op.shape),
    ops.Part: lambda xp, op, x: x[tuple(slice(*bounds) for bounds in op.box)],
    ops.Concatenate: lambda xp, op, *parts: xp.concat(parts, axis=op.along),
    ops.Scale: lambda xp, op, x: x / op.factor if op.divide else x * op.factor,
    ops.Offset: lambda xp, op, x: x + op.value,
    ops.Sum: lambda xp, op, *parts: sum(parts[1:], parts[0]),
}


def _compute(array: LazyArray) -> Any:
    """Computes what is planned for an array."""
    if isinstance(array, _Given):
        return array.array
    if not isinstance(array, Operation):
        raise StructureMismatchError(f"{array}: only arrays of the model can be moved by rules")
    if type(array) not in _OPERATIONS:
        raise StructureMismatchError(f"{array}: an adapter cannot be taken through this operation")
    operands = [_compute(operand) for operand in array.operands]
    return _OPERATIONS[type(array)](array_namespace(operands), array, *operands)
