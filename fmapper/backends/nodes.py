"""The facet of an adapter whose framework has classes of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.backends.framework import Framework

if TYPE_CHECKING:
    from fmapper.backends.meshes import Packed
    from fmapper.tree.nodes import NodeType


class Nodes(Framework):
    """A framework with classes that are nodes, by themselves or through its pytree registry.

    A subclass implements `node_type`, `registered_type`, or both.
    """

    lacking = "classes to take apart"

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class of this framework; None if it is not a node class."""
        return None

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class in this framework's own registry, by exact type."""
        return None

    def register_functor(self, cls: type) -> None:
        """Registers a functor class, once, with the pytree registry of this framework."""

    def training_rule(self, cls: type) -> Callable[[Any], bool] | None:
        """Returns a predicate for the arrays below a node that are trained.

        It applies down to nodes with a rule of their own. None for a class without a rule.
        """
        return None

    def transient(self, node: Any) -> Iterable[Any]:
        """Returns the arrays of a node that the framework's own checkpoints leave out.

        Such arrays, for example tables of positions, are computed when a model is created.
        """
        return ()

    def axes(self, node: Any) -> Sequence[tuple[str, Any, tuple[Any, ...]]]:
        """Returns how a node wants to divide the arrays below it on a mesh.

        Returns:
            For each array about which the node says something: its name there, the array, and for
                each dimension the node's name of an axis, or None if the dimension is not divided.
        """
        return ()

    def sums(self, node: Any) -> Sequence[str]:
        """Returns the names of the arrays in `axes` whose products are summed over the devices."""
        return ()

    def packings(self, node: Any) -> Iterable[tuple[str, Any, Packed]]:
        """Returns the arrays of a node that pack several side by side: name, array, and packing.

        The framework can divide each packed array separately, and compute with the result.
        """
        return ()
