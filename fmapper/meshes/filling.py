"""Divides values among devices while they are loaded into a tree without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fmapper.backends.arrays import Arrays
from fmapper.backends.discovery import adapter_of
from fmapper.backends.meshes import Meshes
from fmapper.moves.mover import Mover
from fmapper.moves.onto_mesh import bring, place_as
from fmapper.tree.keypath import name_of
from fmapper.tree.walk import visit

if TYPE_CHECKING:
    from fmapper.meshes.sharding import Sharding

T = TypeVar("T")


class Placer:
    """A function of an old array and its new values that returns the replacement.

    Only the parts of this process are read from files. Parameters that are gathered for use are
    read in `finish`: the parts of this process are known once their modules are sharded, which
    needs no values.

    Args:
        sharding: The sharding.
        adapter: The adapter of the mesh.
        mesh: The mesh of the axes that rules divide by; None for no axes.
        specs: The axes that divide each array of the tree, by id; None for an array that stays.
        gathers: Whether parameters are gathered for use.
    """

    def __init__(
        self,
        sharding: Sharding,
        adapter: Meshes,
        mesh: Any,
        specs: Mapping[int, Any],
        *,
        gathers: bool,
    ) -> None:
        assert isinstance(adapter, Arrays)
        self._sharding, self._adapter, self._mesh = sharding, adapter, mesh
        self._specs, self._gathers = specs, gathers
        self._later: dict[int, tuple[Any, Any]] = {}  # by id: array and values

    def __call__(self, old: Any, new: Any) -> Any:
        """Returns the new array."""
        target, spec = _arrays(old), self._specs[id(old)]
        if self._gathers and isinstance(target, Meshes) and target.is_gathered(old):
            source = _arrays(new)
            dtype = source.dtype(new)
            hollow = target.like(
                target.abstract(source.shape(new), target.storable(dtype) or dtype), old
            )
            self._later[id(hollow)] = hollow, new
            return hollow
        if spec is None or self._mesh is None:
            return target.like(Mover("load", target.name)(new), old)
        copy = self._sharding.copy
        return self._adapter.like(bring(new, self._mesh, spec, self._adapter, copy=copy), old)

    def finish(self, filled: T) -> T:
        """Returns the filled tree, with all of its arrays divided."""
        sharded = self._sharding(filled)
        if not self._later:
            return sharded
        values = {
            name_of(link): self._later[id(leaf)][1]
            for link, leaf, kind in visit(filled)
            if kind is None and id(leaf) in self._later
        }
        new: dict[Any, Any] = {}
        for link, leaf, kind in visit(sharded):
            name = "" if kind else name_of(link)
            if name in values and leaf not in new:
                new[leaf] = self._read(leaf, values[name])
        self._adapter.refill_gathered([node for _, node, kind in visit(sharded) if kind], new)
        return sharded

    def _read(self, old: Any, new: Any) -> Any:
        adapter, source = self._adapter, _arrays(new)
        layout = adapter.layout(old)
        if layout is None or source is not adapter:
            return place_as(old, new)
        shape, dtype = source.shape(new), source.dtype(new)
        array = adapter.assemble(shape, dtype, *layout, lambda box: source.read_box(new, box))
        return source.like(array, old)


def _arrays(array: Any) -> Arrays:
    adapter = adapter_of(array)
    assert adapter is not None
    return adapter
