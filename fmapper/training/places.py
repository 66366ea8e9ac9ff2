"""Where the rows and columns of an adapted weight lie in a model that has it otherwise.

A twin that somebody else wrote stacks layers, splits heads and transposes kernels. What its rules
do to a weight is followed with the numbers of rows and columns in place of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmapper.backends.namespace import array_namespace
from fmapper.checkpoints.lazy import LazyArray
from fmapper.errors import StructureMismatchError
from fmapper.moves.mover import to_numpy
from fmapper.states.state import load_state, state
from fmapper.verification.pairing import carry_numbers

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)  # compared as one object by the caches of JAX
class Place:
    """A part of a weight in an array of a model.

    Attributes:
        name: The name of the array.
        box: Where in it the part is; empty if the array is the weight.
        rows: The rows of the weight along the axes of the box that number them, in order.
        columns: The same of its columns; those of a convolution are all axes but the first.
        axes: The axes of the box: those of rows, then those of columns.
    """

    name: str
    box: tuple[slice, ...]
    rows: Any
    columns: Any
    axes: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: Shape) -> Place:
        """Returns the place of a weight that is an array of the model."""
        import numpy as np

        height, *rest = map(int, shape)
        columns = np.arange(math.prod(rest)).reshape(rest)
        return cls(name, (), np.arange(height), columns, tuple(range(len(shape))))

    def lay_out(self, matrix: Any) -> Any:
        """Returns a matrix of these rows and columns in the layout of the box."""
        shape = (*self.rows.shape, *self.columns.shape)
        order = sorted(range(len(self.axes)), key=lambda at: self.axes[at])
        xp = array_namespace(matrix)
        return xp.permute_dims(xp.reshape(matrix, shape), tuple(order))

    def part(self, array: Any) -> Any:
        """Returns this part of an array like the weight, laid out like the box."""
        if not self.box:
            return array
        xp = array_namespace(array)
        matrix = xp.reshape(array, (array.shape[0], -1))
        return self.lay_out(matrix[self.rows.ravel()][:, self.columns.ravel()])

    def flat(self, box: Any) -> Any:
        """Returns the box as a matrix of these rows and columns."""
        xp = array_namespace(box)
        return xp.reshape(xp.permute_dims(box, self.axes), (self.rows.size, self.columns.size))


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The parts of adapted weights: name -> places."""

    of: Mapping[str, Sequence[Place]]


def find_places(
    weights: Mapping[str, Shape], model: Any, rules: Rules | None
) -> dict[str, list[Place]]:
    """Returns where weights are in a model.

    Args:
        weights: Their names and shapes.
        model: The model, or its arrays by name.
        rules: From the names and layouts of the weights to those of the model; None for one that
            `convert` made of their model.

    Raises:
        StructureMismatchError: A weight is not in the model, or its values are changed or mixed on
            the way; says which.
        CheckpointError: The rules do not fit, or have no inverse.
    """
    import numpy as np

    carry: Callable[[dict[str, Any]], Mapping[str, Any]]
    if rules is None:
        shapes = {name: tuple(x.shape) for name, x in state(model, source=True).items()}
        there = list(state(model))

        def carry_digits(digits: Sequence[Any]) -> list[Any]:
            filled = load_state(model, dict(zip(shapes, digits, strict=True)), source=True)
            return [np.asarray(to_numpy(x)).astype(np.float32) for x in state(filled).values()]

        def carry(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
            arrays = carry_numbers([numbers[name] for name in shapes], carry_digits)
            return dict(zip(there, arrays, strict=True))

    else:
        from fmapper.checkpoints import Cast, Rules

        plain = Rules(rule for rule in rules if not isinstance(rule, Cast))  # would round numbers
        arrays = model if isinstance(model, Mapping) else state(model)
        lazy = {n: LazyArray.full(tuple(x.shape), 0, np.float64) for n, x in arrays.items()}
        shapes = {name: x.shape for name, x in plain.inverse().apply(lazy).items()}
        carry = plain.apply
    for name, shape in weights.items():
        if shapes.get(name) != shape:
            raise StructureMismatchError(
                f"{name}: the adapter is for a weight of shape {shape}, and the model has "
                f"{shapes.get(name, 'no such weight')}"
            )
    order = list(weights)

    def number_elements(number: Callable[[int, Shape], Any]) -> Mapping[str, Any]:
        """Carries a number for each element, by the place of its weight in `order`."""
        marks = {name: np.broadcast_to(np.float64(0), shape) for name, shape in shapes.items()}
        for at, name in enumerate(order):
            height, *rest = shape = weights[name]
            matrix = np.broadcast_to(number(at, shape), (height, math.prod(rest)))
            marks[name] = np.reshape(matrix, shape)
        return carry(marks)

    nothing = number_elements(lambda at, shape: 0.0)
    owners = number_elements(lambda at, shape: at + 1.0)
    rows = number_elements(lambda at, shape: np.arange(float(shape[0]))[:, None])
    columns = number_elements(lambda at, shape: np.arange(float(math.prod(shape[1:])))[None, :])
    places: dict[str, list[Place]] = {name: [] for name in order}
    for target in owners:
        base, owner = _read(nothing[target]), _read(owners[target])
        for number in np.unique(owner[owner != base]):
            box = _box((owner == number) & (owner != base))
            height, width = (_read(x[target])[box] for x in (rows, columns))
            at, place = int(number) - 1, None
            is_whole = (owner[box] == number).all() and not base[box].any()
            if at + 1 == number and 0 <= at < len(order) and is_whole:
                place = _place(target, box, height, width)
            if place is None:
                raise StructureMismatchError(
                    f"{target}: weights of the adapter are mixed or changed there"
                )
            places[order[at]].append(place)
    for name, shape in weights.items():
        size = sum(place.rows.size * place.columns.size for place in places[name])
        if size != math.prod(shape):
            raise StructureMismatchError(f"{name}: {size} of {math.prod(shape)} numbers are there")
    return places


def _read(array: Any) -> Any:
    return array.read() if isinstance(array, LazyArray) else array


def _box(mask: Any) -> tuple[slice, ...]:
    """Returns the smallest box that has all places of a mask."""
    import numpy as np

    return tuple(slice(int(at.min()), int(at.max()) + 1) for at in np.nonzero(mask))


def _place(name: str, box: tuple[slice, ...], rows: Any, columns: Any) -> Place | None:
    """Returns the place of a part; None where an axis numbers both rows and columns."""
    import numpy as np

    def varies(numbers: Any, axis: int) -> bool:
        return bool((numbers != np.take(numbers, [0], axis)).any())

    of_rows = [axis for axis in range(rows.ndim) if varies(rows, axis)]
    of_columns = [axis for axis in range(rows.ndim) if axis not in of_rows]
    if any(varies(columns, axis) for axis in of_rows):
        return None
    first = tuple(slice(None) if axis in of_rows else 0 for axis in range(rows.ndim))
    other = tuple(0 if axis in of_rows else slice(None) for axis in range(rows.ndim))
    numbers = rows[first].astype(np.int64), columns[other].astype(np.int64)
    return Place(name, box, *numbers, (*of_rows, *of_columns))
