"""`DTensor`s: each process creates its own shard; only resharding sends data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fmapper import PlacementError
from fmapper.backends import Box, Meshes, Packed, PackedAxes, Spec
from fmapper.meshes import DimensionRule, boxes_at
from fmapper_adapters.torch import _private
from fmapper_adapters.torch.arrays import tensors, wrappers
from fmapper_adapters.torch.arrays.wrappers import is_dtensor
from fmapper_adapters.torch.meshes import experts, fully_shard, layers, messages, tp_plan

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


# Layer -> the dimension of its weight that it sums over.
_ADDED: dict[type, int] = {torch.nn.Embedding: 0, torch.nn.Linear: 1}
_LACKING = (torch.nn.RNNBase, torch.nn.EmbeddingBag)  # layers without operations for DTensors


_Convolution = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)


class TorchMeshes(Meshes):
    """The facet of the adapter for `DeviceMesh`es and tensors on them."""

    divides_unevenly = True
    gathers = True

    def mesh_axes(self, mesh: Any) -> Mapping[str, int] | None:
        """Returns the dimensions of a `DeviceMesh`, which must have names."""
        if not torch.distributed.is_available() or not type(mesh).__module__.startswith("torch."):
            return None
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            return None
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError(
                "the dimensions of this DeviceMesh have no names that rules could use: create it "
                "with "
                "mesh_dim_names=('data', 'model')"
            )
        return dict(zip(names, mesh.shape, strict=True))

    def dimension_rule(self, op: str) -> DimensionRule | None:
        """Returns the dimension rule of a primitive of JAX."""
        if not op.startswith("lax::"):
            return None
        from fmapper_adapters.torch.lax.table import TABLE

        return TABLE.dims(op)

    def shard(
        self, arrays: Sequence[Any], mesh: Any, specs: Sequence[Spec], where: Callable[[int], str]
    ) -> Iterator[Any]:
        """Cuts this process's part out of replicated tensors.

        A `DTensor` on this mesh is redistributed, which sends shards between processes.
        """
        planned = [placements(mesh, spec, where(at)) for at, spec in enumerate(specs)]
        for at, tensor in enumerate(arrays):
            _check(tensor, mesh, where(at))
        for tensor, spec, wanted in zip(arrays, specs, planned, strict=True):
            yield _divide(tensor, mesh, spec, wanted)

    def boxes_by_process(
        self, mesh: Any, shape: Sequence[int], spec: Spec
    ) -> Mapping[int, Sequence[Box]]:
        """Returns the part of each rank of the mesh."""
        axes = _axes(mesh)
        return {
            int(mesh.mesh[place]): boxes_at(spec, shape, axes, dict(zip(axes, place, strict=True)))
            for place in itertools.product(*map(range, mesh.shape))
        }

    def own_boxes(self, mesh: Any, shape: Sequence[int], spec: Spec) -> Sequence[Box]:
        """Returns the part of this process; none for a process off the mesh."""
        place = mesh.get_coordinate()
        if place is None:
            return ()
        axes = _axes(mesh)
        return boxes_at(spec, shape, axes, dict(zip(axes, place, strict=True)))

    def assemble(
        self,
        shape: Sequence[int],
        dtype: str,
        mesh: Any,
        spec: Spec,
        read: Callable[[Box], np.ndarray[Any, Any]],
    ) -> Any:
        """Makes a `DTensor` from the shard of this process."""
        import numpy as np  # torch works without NumPy

        wanted = placements(mesh, spec, "an array", any_order=True)
        boxes = self.own_boxes(mesh, shape, spec)
        parts = [tensors.from_numpy(read(box)) for box in boxes]
        local = _join(parts, spec) if parts else tensors.from_numpy(np.empty(0, np.float32))
        return _as_dtensor(local.to(mesh.device_type), mesh, wanted, tuple(shape))

    def prepare(self, nodes: Iterable[tuple[str, Any]]) -> None:
        """Makes layers with divided sums complete these sums at once.

        torch leaves them pending. It can complete the pending sum of an embedding only once, and
        that of a product it would complete differently in different places.
        """
        for where, node in nodes:
            if any(map(is_dtensor, _tensors(node))):
                if isinstance(node, _LACKING):
                    raise PlacementError(
                        f"{where}: torch cannot compute a {type(node).__name__} of DTensors. Shard "
                        "the other parts of the model without it, or convert the model to JAX, "
                        "which can."
                    )
                layers.localize(node)
                experts.localize(node)
            if isinstance(node, _Convolution) and not layers.is_local(node):
                self._check_convolution(where, node)
            dim = next((dim for cls, dim in _ADDED.items() if isinstance(node, cls)), None)
            layout = None if dim is None else self.layout(node.weight)
            if dim is not None and layout is not None and layout[1][dim]:
                node.register_forward_hook(add_up)

    def submesh(self, mesh: Any, axes: Sequence[str]) -> Any:
        """Returns the submesh that contains this process."""
        return mesh[axes[0] if len(axes) == 1 else tuple(axes)]

    def copy_whole(self, array: Any, mesh: Any) -> Any:
        """Returns a copy on the mesh's kind of device."""
        if is_dtensor(array):
            raise PlacementError(_not_again(array))
        detached = array.detach()
        return detached.clone() if detached.is_meta else detached.to(mesh.device_type, copy=True)

    def fully_shard(
        self, nodes: Sequence[tuple[str, str, Any]], mesh: Any, asked: Mapping[Any, Sequence[str]]
    ) -> None:
        """Applies `fully_shard` to modules, inner ones first."""
        fully_shard.fully_shard(nodes, mesh, asked)

    def refill_gathered(self, nodes: Iterable[Any], new: Mapping[Any, Any]) -> None:
        """Replaces parameters of modules and their optimizers in place."""
        fully_shard.refill(nodes, new)

    def is_gathered(self, array: Any) -> bool:
        """Returns whether an array is a parameter."""
        return isinstance(array, torch.nn.Parameter)

    def _check_convolution(self, where: str, node: Any) -> None:
        for name, tensor in node.named_parameters(recurse=False):
            layout = self.layout(tensor)
            if layout is not None and any(layout[1]):
                raise PlacementError(
                    f"{where}.{name}: torch's convolutions give wrong shapes for DTensors that "
                    f"are sharded by channels, and fmapper does not know how a "
                    f"{type(node).__name__} computes. Leave this array unsharded, with a rule None "
                    "before the others, and shard the batch; JAX supports this sharding."
                )

    def layout(self, array: Any) -> tuple[Any, Spec] | None:
        """Returns mesh and placements of a `DTensor`."""
        if not is_dtensor(array):
            return None
        from torch.distributed.tensor import Shard

        mesh = array.device_mesh
        spec: list[tuple[str, ...]] = [()] * array.ndim
        sizes = _axes(mesh)
        for name, placement in reversed([*zip(sizes, array.placements, strict=True)]):
            if placement.is_replicate():
                continue
            before = _private.parts_before(placement)
            axes = () if before is None else spec[placement.dim]
            if before is not None and (not axes or isinstance(axes, PackedAxes)):
                each = array.shape[placement.dim] // before
                spec[placement.dim] = PackedAxes((name, *axes), (each,) * before)
            elif before is not None and before == math.prod(
                sizes[axis] for axis in spec[placement.dim]
            ):
                spec[placement.dim] = (*spec[placement.dim], name)
            elif type(placement) is Shard:
                spec[placement.dim] = (name, *spec[placement.dim])
            else:
                raise TypeError(_not_in_parts(array))
        return mesh, tuple(spec)

    def process(self) -> tuple[int, int]:
        """Returns rank and world size; 0 and 1 without a process group."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()

    def messages(self) -> tuple[Callable[[memoryview, int], object], Callable[[int], Any]]:
        """Returns functions for a new group of processes, on the CPU."""
        return messages.of_new_group()

    def writers(self, array: Any) -> Mapping[Box, int] | None:
        """Returns the parts of a `DTensor`."""
        layout = self.layout(array)
        if layout is None:
            return None
        boxes: dict[Box, int] = {}
        for rank, held in sorted(self.boxes_by_process(layout[0], array.shape, layout[1]).items()):
            for box in held:
                boxes.setdefault(box, rank)
        return boxes

    def held_parts(self, array: Any) -> Mapping[Box, Any]:
        """Returns the local tensor."""
        layout = self.layout(array)
        assert layout is not None
        boxes = self.own_boxes(layout[0], array.shape, layout[1])
        local = array.detach().to_local()
        parts = local.chunk(len(boxes), _packed_dimension(layout[1])) if boxes[1:] else [local]
        for box, part in zip(boxes, parts, strict=True):
            if (wanted := tuple(end - start for start, end in box)) != part.shape:
                raise PlacementError(
                    f"a DTensor has {[*part.shape]} in this process, but {[*wanted]} by its mesh "
                    "and placements. Make it with distribute_tensor, and fully_shard on a mesh "
                    "whose ranks ascend"
                )
        return dict(zip(boxes, parts, strict=True))

    def packings(self, node: Any) -> Iterator[tuple[str, Any, Packed]]:
        """Returns the weights of experts that pack gate and up side by side."""
        return experts.packings(node)

    def join(self, shape: Sequence[int], mesh: Any, spec: Spec, parts: Mapping[Box, Any]) -> Any:
        """Makes a `DTensor` from the shard of this process."""
        local = _join([parts[box] for box in self.own_boxes(mesh, shape, spec)], spec)
        wanted = placements(mesh, spec, "an array")
        return _as_dtensor(local.to(mesh.device_type), mesh, wanted, tuple(shape))

    def axes(self, node: Any) -> Sequence[tuple[str, Any, tuple[Any, ...]]]:
        """Returns the `tp_plan` of a model of transformers."""
        return tp_plan.axes(node)

    def sums(self, node: Any) -> Sequence[str]:
        """Returns the weights that a `tp_plan` divides along their inputs."""
        return tp_plan.sums(node)


def _axes(mesh: DeviceMesh) -> dict[str, int]:
    """Returns the sizes of a mesh by axis; unnamed axes are numbered.

    Rules cannot name unnamed axes, but arrays can be on them: `fully_shard` makes such meshes.
    """
    names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))


def add_up(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """Completes pending sums of an output; a forward hook.

    The gradient of an embedding's output is completed, too: torch cannot convert a pending sum to
    the rows of each process.
    """
    if not is_dtensor(output):
        return output
    made = _complete(output)
    if isinstance(module, torch.nn.Embedding) and made.requires_grad:
        made.register_hook(_complete)
    return made


def _complete(tensor: Any) -> Any:
    """Returns a `DTensor` without pending sums."""
    from torch.distributed.tensor import Replicate

    wanted = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(tensor.device_mesh, wanted)


def _not_again(array: Any) -> str:
    return (
        f"is a DTensor on {array.device_mesh} already: pass fsdp= where it is sharded first, or "
        "gather it with tensor.full_tensor()."
    )


def _tensors(node: Any) -> list[Any]:
    """Returns the parameters and buffers of a module itself."""
    if not isinstance(node, torch.nn.Module):
        return []
    return [*node.parameters(recurse=False), *node.buffers(recurse=False)]


def _not_in_parts(array: Any) -> str:
    return (
        f"a DTensor placed as {array.placements} cannot be split into the parts that processes "
        "hold: redistribute it to Shard and Replicate first"
    )


def placements(
    mesh: DeviceMesh, spec: Spec, where: str, *, any_order: bool = False
) -> tuple[Placement, ...]:
    """Returns torch's placements for a spec: the dimension that each mesh axis divides.

    Args:
        mesh: The mesh.
        spec: The axes of the mesh that divide each dimension.
        where: The name of the array in errors.
        any_order: Whether an axis may divide the shards of later axes, as in `fully_shard`; torch
            can store such tensors, but hardly compute with them.

    Raises:
        PlacementError: Axes divide a dimension in another order than the mesh has them.
    """
    from torch.distributed.tensor import Replicate, Shard

    names = list(_axes(mesh))
    result: list[Placement] = [Replicate()] * len(names)
    for dim, axes in enumerate(spec):
        order = [names.index(axis) for axis in axes]
        if any_order and order != sorted(order) and order[:-1] == sorted(order[:-1]):
            *first, last = order
            before = math.prod(mesh.shape[at] for at in first)
            if last < first[0]:
                result[last] = _private.strided_shard(dim, before)
                order = first
        if order != sorted(order):
            raise PlacementError(
                f"{where}: dimension {dim} is divided by {', '.join(axes)}, but a DTensor is "
                f"divided in the order of its mesh, {', '.join(names)}. Write the axes in that "
                "order, or create the mesh in the other order."
            )
        kind: Placement = Shard(dim)
        if isinstance(axes, PackedAxes):
            if len(set(axes.sizes)) > 1:
                raise PlacementError(
                    f"{where}: dimension {dim} packs arrays of sizes "
                    f"{', '.join(map(str, axes.sizes))}; a DTensor can shard them separately only "
                    "if the sizes are equal"
                )
            kind = _private.strided_shard(dim, len(axes.sizes))
        for at in order:
            result[at] = kind
    return tuple(result)


def _check(tensor: torch.Tensor, mesh: DeviceMesh, where: str) -> None:
    if is_dtensor(tensor):
        dtensor: Any = tensor
        if dtensor.device_mesh != mesh:
            raise PlacementError(
                f"{where}: is on another mesh, {dtensor.device_mesh}. Gather it first with "
                f"tensor.full_tensor(), or save it and load it on the new mesh."
            )
    elif tensor.layout is not torch.strided:
        raise PlacementError(
            f"{where}: a tensor with layout {tensor.layout} cannot be sharded: make it dense with "
            "tensor.to_dense(), or keep it with fmapper.keep"
        )
    elif wrappers.is_wrapper(tensor):
        raise PlacementError(
            f"{where}: a {type(tensor).__name__} keeps its values in other tensors, which cannot "
            "be sharded: dequantize it first, or keep it with fmapper.keep"
        )


def _divide(
    tensor: torch.Tensor, mesh: DeviceMesh, spec: Spec, wanted: tuple[Placement, ...]
) -> torch.Tensor:
    values: Any = tensor.detach()
    if is_dtensor(values):
        if tuple(values.placements) == wanted:
            return tensor
        made: torch.Tensor = values.redistribute(mesh, wanted)
        return made
    place = mesh.get_coordinate()
    sizes = _axes(mesh)
    if place is None:
        local = values.new_empty(0)
    else:
        boxes = boxes_at(spec, values.shape, sizes, dict(zip(sizes, place, strict=True)))
        local = _join([values[tuple(itertools.starmap(slice, box))] for box in boxes], spec)
    if values.device.type == "meta":
        local = torch.empty_like(local, memory_format=torch.contiguous_format)
    else:
        local = local.to(mesh.device_type, copy=True).contiguous()
    return _as_dtensor(local, mesh, wanted, tuple(values.shape))


def _join(parts: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """Joins the parts that a process holds, several if arrays are packed, to one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], _packed_dimension(spec))


def _packed_dimension(spec: Spec) -> int:
    return next(at for at, axes in enumerate(spec) if isinstance(axes, PackedAxes))


def _as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, wanted: tuple[Placement, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    made: torch.Tensor = DTensor.from_local(
        local, mesh, wanted, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made
