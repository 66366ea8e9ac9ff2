"""Changes of arrays as they were before rules, in any framework and under `jit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from fmapper.backends.namespace import array_namespace
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.checkpoints.lazy_operations import compute
from fmapper.errors import StructureMismatchError
from fmapper.sync.inputs import Leaf, leaves_of

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules

Arrays = Mapping[str, Any]


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
    before = plain.inverse().apply(_leaves(arrays), strict=False)
    brought = cache(lambda name: bring(arrays[name]))
    given = [name for name in names if name in before]
    new = change({name: _compute(before[name], lambda x: brought(x.name)) for name in given})
    changed = _leaves(new)
    result, lost, own = dict(arrays), {*changed}, {*changed.values()}
    for name, array in plain.apply({**before, **changed}, strict=False).items():
        leaves = own.intersection(leaves_of(array))
        if leaves and name in arrays:
            made = _compute(array, lambda x: new[x.name] if x in own else brought(x.name))
            result[name] = array_namespace(made).astype(made, brought(name).dtype)
            lost -= {leaf.name for leaf in leaves}
    if lost:
        names = ", ".join([name for name in changed if name in lost][:3])
        raise StructureMismatchError(f"{names}: is not in the model after the rules")
    return result


def _leaves(arrays: Arrays) -> dict[str, Leaf]:
    """Returns arrays to plan operations for, to which dtypes do not matter."""
    import numpy as np

    dtype = np.dtype(np.float32)
    return {name: Leaf(name, [*map(int, x.shape)], dtype) for name, x in arrays.items()}


def _compute(array: LazyArray, value: Callable[[Leaf], Any]) -> Any:
    """Computes what is planned for an array, from the values of its leaves."""

    def leaf(array: LazyArray) -> Any:
        if not isinstance(array, Leaf):
            raise StructureMismatchError(f"{array}: only arrays of the model can be moved by rules")
        return value(array)

    return compute(array, leaf, _refuse)


def _refuse(array: Operation, operands: object) -> NoReturn:
    raise StructureMismatchError(f"{array}: an adapter cannot be taken through this operation")
