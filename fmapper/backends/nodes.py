"""The facet of an adapter whose framework has classes that are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fmapper.backends.framework import Framework

if TYPE_CHECKING:
    from fmapper.backends.meshes import Packed
    from fmapper.tree.nodes import NodeType


class Nodes(Framework):
    """A framework with classes that are nodes, by their kind or in a pytree registry of its own.

    A subclass answers `node_type` or `registered_type`, or both.
    """

    lacking = "classes to take apart"

    def node_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class of this framework; None if it is not a node class."""
        return None

    def registered_type(self, cls: type) -> NodeType | None:
        """Returns the node type of a class in this framework's own registry, by exact type."""
        return None

    def register_functor(self, cls: type) -> None:
        """Registers a functor class with the pytree registry of this framework; once per class."""

    def training_rule(self, cls: type) -> Callable[[Any], bool] | None:
        """Returns a rule for which arrays below a node of a class are trained.

        It holds until a class further down says otherwise; None for a class that does not say.
        """
        return None

    def transient(self, node: Any) -> Iterable[Any]:
        """Returns the arrays of a node that the framework's own checkpoints leave out.

        They are computed when a model is made, as tables of positions are.
        """
        return ()

    def axes(self, node: Any) -> Sequence[tuple[str, Any, tuple[Any, ...]]]:
        """Returns how a node wants the arrays below it divided on a mesh.

        Returns:
            For each array that it says something of: its name there, the array, and an axis for
            each dimension, in the words of the node; None for one that is not divided.
        """
        return ()

    def sums(self, node: Any) -> Sequence[str]:
        """Names those of `axes` after which devices add up what each has, in a forward pass."""
        return ()

    def packings(self, node: Any) -> Iterable[tuple[str, Any, Packed]]:
        """Returns the arrays of a node in which several lie side by side: name, array, how.

        The framework can divide each of these by itself, and computes with them so.
        """
        return ()
