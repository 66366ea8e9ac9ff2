"""The facet of an adapter whose framework divides arrays among the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fmapper.backends.framework import Framework

if TYPE_CHECKING:
    import numpy as np

    from fmapper.meshes.dimensions import DimensionRule

Spec: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The axes of a mesh that divide each dimension of an array, the outermost first.

A dimension along which several arrays lie side by side may have `PackedAxes`.
"""

Box: TypeAlias = "tuple[tuple[int, int], ...]"
"""A range of each dimension of an array."""


class PackedAxes(tuple[str, ...]):
    """The axes of a mesh that divide each of several arrays packed side by side in one array.

    A device gets its part of each of them, such as of a perceptron's gate and up projections.

    Attributes:
        sizes: The sizes of these arrays along the dimension; each divides evenly.
    """

    sizes: tuple[int, ...]

    def __new__(cls, axes: Iterable[str], sizes: Iterable[int]) -> PackedAxes:
        """Creates the axes."""
        packed = super().__new__(cls, axes)
        packed.sizes = tuple(sizes)
        return packed


@dataclass(frozen=True, slots=True)
class Packed:
    """A dimension of an array along which several arrays lie side by side.

    Attributes:
        dim: The dimension.
        sizes: Their sizes along it.
        limit: A number that every possible number of equal parts divides.
    """

    dim: int
    sizes: tuple[int, ...]
    limit: int

    def divide(self, spec: Spec, mesh: Mapping[str, int]) -> Spec:
        """Returns a spec that divides each packed array separately; the same spec if it cannot."""
        axes = spec[self.dim] if spec else ()
        parts = parts_of(axes, mesh)
        if parts < _DIVIDED or self.limit % parts:
            return spec
        entry = PackedAxes(axes, self.sizes)
        return (*spec[: self.dim], entry, *spec[self.dim + 1 :])


_DIVIDED = 2  # parts


class Meshes(Framework):
    """A framework whose arrays can be divided among the devices of a mesh.

    Every process calls the same methods in the same order, and holds its own shards only.

    Attributes:
        divides_unevenly: Its last devices may hold smaller parts of an array; see `boxes_at`.
        gathers: It can gather the parameters of nodes for each use; see `fully_shard`.
    """

    lacking = "meshes"
    divides_unevenly: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    def mesh_axes(self, mesh: Any) -> Mapping[str, int] | None:
        """Returns the axis sizes of a mesh by name; None if it is not a mesh of this framework.

        Raises:
            ValueError: It is a mesh whose axes have no names.
        """
        return None

    def shard(
        self, arrays: Sequence[Any], mesh: Any, specs: Sequence[Spec], where: Callable[[int], str]
    ) -> Iterable[Any]:
        """Divides arrays of this framework, one result per array, in order.

        An array that is already divided so is returned as it is. An array without values gets
        shards without values.

        Args:
            arrays: The arrays.
            mesh: The mesh.
            specs: For each array, the axes of the mesh that divide each dimension.
            where: Returns the name of an array by its index, for errors.

        Raises:
            PlacementError: The framework cannot divide an array in this way; names it.
        """
        raise NotImplementedError

    def boxes_by_process(
        self, mesh: Any, shape: Sequence[int], spec: Spec
    ) -> Mapping[int, Sequence[Box]]:
        """Returns the parts of an array that the devices of each process hold, by process index.

        Every process gets the same result, without communication.
        """
        raise NotImplementedError

    def own_boxes(self, mesh: Any, shape: Sequence[int], spec: Spec) -> Sequence[Box]:
        """Returns the parts of an array that devices of this process hold, each once."""
        raise NotImplementedError

    def assemble(
        self,
        shape: Sequence[int],
        dtype: str,
        mesh: Any,
        spec: Spec,
        read: Callable[[Box], np.ndarray[Any, Any]],
    ) -> Any:
        """Makes an array of this framework from the parts that this process will hold.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            mesh: The mesh.
            spec: The axes of the mesh that divide each dimension.
            read: Returns the part in a box; called once for each of `own_boxes`. Nobody else writes
                to the memory of the result.
        """
        raise NotImplementedError

    def prepare(self, nodes: Iterable[tuple[str, Any]]) -> None:
        """Prepares the nodes of a new tree, of this process alone, to compute with its shards.

        Args:
            nodes: The name of each node in errors, and the node.

        Raises:
            PlacementError: The framework cannot compute with a node that is divided so; names it.
        """

    def submesh(self, mesh: Any, axes: Sequence[str]) -> Any:
        """Returns the mesh of some axes of a mesh, through this process."""
        raise NotImplementedError

    def copy_whole(self, array: Any, mesh: Any) -> Any:
        """Copies an array to the device of this process; returns one without values as it is."""
        raise NotImplementedError

    def fully_shard(
        self, nodes: Sequence[tuple[str, str, Any]], mesh: Any, asked: Mapping[Any, Sequence[str]]
    ) -> None:
        """Shards the parameters of nodes in place, so that they are gathered for use.

        Args:
            nodes: For each node of a new tree, its name in errors, its name, and the node.
            mesh: The mesh.
            asked: The axes of the mesh by class or name pattern of nodes, see `shard`.

        Raises:
            PlacementError: A key selects no node, or a node cannot be sharded so; names it.
        """
        raise NotImplementedError

    def is_gathered(self, array: Any) -> bool:
        """Returns whether `fully_shard` shards an array of a node, because it is a parameter."""
        return False

    def refill_gathered(self, nodes: Iterable[Any], new: Mapping[Any, Any]) -> None:
        """Replaces the parameters that `fully_shard` left without values.

        Args:
            nodes: The nodes of a tree that is sharded.
            new: The new parameters by the old ones.
        """
        raise NotImplementedError

    def layout(self, array: Any) -> tuple[Any, Spec] | None:
        """Returns the mesh of an array and its spec; None for an array without a mesh."""
        return None

    def process(self) -> tuple[int, int]:
        """Returns the index of this process and the number of processes; starts nothing."""
        return 0, 1

    def messages(self) -> tuple[Callable[[memoryview, int], object], Callable[[int], Any]] | None:
        """Returns functions that send bytes to a process and receive them; None if there are none.

        All processes call this at the same time. See `fmapper.sync.Transport`.
        """
        return None

    def writers(self, array: Any) -> Mapping[Box, int] | None:
        """Maps each part of an array that is spread over processes to the process that writes it.

        Returns None for an array that this process has whole.

        Raises:
            TypeError: The processes hold partial sums instead of parts.
        """
        return None

    def held_parts(self, array: Any) -> Mapping[Box, Any]:
        """Returns the parts of an array on a mesh that this process holds, each as an array.

        Each is an array of this framework on one device and shares memory with `array`.
        """
        raise NotImplementedError

    def join(self, shape: Sequence[int], mesh: Any, spec: Spec, parts: Mapping[Box, Any]) -> Any:
        """Joins the parts that this process holds into an array, in place where possible.

        Args:
            shape: The shape of the array.
            mesh: The mesh.
            spec: The axes of the mesh that divide each dimension.
            parts: An array of this framework for each of `own_boxes`.
        """
        raise NotImplementedError

    def dimension_rule(self, op: str) -> DimensionRule | None:
        """Returns the rule for the dimensions of an operation; None for an unknown operation.

        Args:
            op: The operation, such as `aten::linear.default`.
        """
        return None


def uneven_dimension(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> int | None:
    """Returns the first dimension that does not divide evenly; None if all do."""
    for at, (axes, size) in enumerate(zip(spec, shape, strict=True)):
        if size % parts_of(axes, mesh):
            return at
    return None


def parts_of(axes: Iterable[str], mesh: Mapping[str, int]) -> int:
    """Returns the number of parts into which axes divide a dimension."""
    return math.prod(mesh[axis] for axis in axes)
