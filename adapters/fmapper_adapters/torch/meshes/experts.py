"""Experts of transformers whose weights are `DTensor`s.

For `DTensor`s, torch lacks grouped products, loops over experts and lookups of weights, or gathers
their operands. The modules here call the forward of their class with the shards of their process:
rows of the batch are routed locally, features are divided as in Megatron-LM, and the partial
results are summed once. If gate and up are packed in one weight, each process has its part of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fmapper.backends import Packed
from fmapper_adapters.torch import _private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_DOWN, _GATE_UP = "down_proj", "gate_up_proj"
_CLASSES: dict[Any, Any] = {}  # class -> its subclass for shards


def localize(module: Any) -> None:
    """Makes experts of transformers compute with shards; leaves other modules unchanged."""
    cls = type(module)
    if not issubclass(cls, _Experts) and _are_experts(module):
        module.__class__ = _class_of_shards(cls)


def packings(module: Any) -> Iterator[tuple[str, Any, Packed]]:
    """Yields the weights of experts that pack gate and up side by side."""
    if not _are_experts(module) or not module.has_gate or not module.is_concatenated:
        return
    for name, parameter in module.named_parameters(recurse=False):
        if name in (_GATE_UP, f"{_GATE_UP}_bias"):
            at = 1 if name != _GATE_UP or not module.is_transposed else 2
            features = parameter.shape[at] // 2
            yield name, parameter, Packed(at, (features, features), features)


def _are_experts(module: Any) -> bool:
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, _DOWN):
        return False
    return all(hasattr(module, mark) for mark in _MARKS)


def _class_of_shards(cls: Any) -> Any:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"Sharded{cls.__name__}", (_Experts, cls), {})
    return _CLASSES[cls]


def _empty(cls: Any) -> Any:
    shard_class = _class_of_shards(cls)
    return shard_class.__new__(shard_class)


class _Experts:
    """Experts that compute with shards."""

    def __reduce__(self) -> Any:
        """Pickles and copies as the class of transformers, which can be imported."""
        return _empty, (type(self).__bases__[1],), vars(self)

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        module: Any = self
        shards = _Shards(module, hidden_states)
        x = shards.rows(hidden_states)
        inputs = x, shards.rows(top_k_index), shards.rows(top_k_weights)
        # attributes take precedence over parameters of the same names
        new = {name: shards.local(name, p) for name, p in shards.weights.items()}
        vars(module).update(new)
        try:
            output = super().forward(*inputs)  # type: ignore[misc]
        finally:
            for name in new:
                del vars(module)[name]
        return shards.add_up(output, hidden_states.shape)


class _Shards:
    """The placements of one call.

    Args:
        module: The experts.
        x: The input of the experts; its rows may be divided, anything else is gathered.
    """

    def __init__(self, module: Any, x: Any) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        self.is_packed = module.has_gate and module.is_concatenated

        named = dict(module.named_parameters(recurse=False))
        self.mesh: DeviceMesh = next(
            p.device_mesh for p in named.values() if isinstance(p, DTensor)
        )
        whole, sums = Replicate(), Partial()
        self.weights = {name: _on(self.mesh, parameter) for name, parameter in named.items()}
        x = _on(self.mesh, x)
        self.x: list[Any] = []
        self.gradient: list[Any] = []
        self.out: list[Any] = []
        self.features: list[int] = []  # axes of the mesh that divide features
        for at in range(self.mesh.ndim):
            row = x.placements[at] == Shard(0)
            is_divided = not row and self._divides_features(module, at)
            self.x.append(Shard(0) if row else whole)
            self.gradient.append(Shard(0) if row else sums if is_divided else whole)
            self.out.append(Shard(0) if row else sums if is_divided else whole)
            self.features += [at] * is_divided

    def _divides_features(self, module: Any, at: int) -> bool:
        """Returns whether a mesh axis divides the features of all weights of the experts."""
        from torch.distributed.tensor import Shard

        implementation = getattr(module.config, "_experts_implementation", None)
        if implementation not in ("grouped_mm", "batched_mm"):
            return False  # others do not declare where they apply the gate
        if getattr(module, "has_post_expert_norm", False):
            return False
        up = _GATE_UP if module.has_gate else "up_proj"
        outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
        size, features = self.mesh.size(at), self.weights[_DOWN].shape[inputs]
        kinds = self.weights[up].placements[at], self.weights[_DOWN].placements[at]
        return kinds == (self._of_up(outputs), Shard(inputs)) and features % size == 0

    def _of_up(self, dim: int) -> Any:
        """Returns the placement of gate and up, which are divided separately if packed."""
        from torch.distributed.tensor import Shard

        return _private.strided_shard(dim, 2) if self.is_packed else Shard(dim)

    def rows(self, tensor: Any) -> Any:
        """Returns the rows of this process."""
        tensor = _on(self.mesh, tensor).redistribute(self.mesh, self.x)
        return tensor.to_local(grad_placements=self.gradient)

    def local(self, name: str, weight: Any) -> Any:
        """Returns the part of a weight that this process needs."""
        from torch.distributed.tensor import Partial, Replicate

        kinds: list[Any] = []
        gradient: list[Any] = []
        is_down_bias = name == f"{_DOWN}_bias"
        for at, row in enumerate(self.x):
            placement = Replicate()
            if at in self.features and not is_down_bias:
                placement = (
                    self._of_up(1) if name.endswith("up_proj_bias") else weight.placements[at]
                )
            kinds.append(placement)
            is_sum = row.is_shard() or (at in self.features and placement.is_replicate())
            gradient.append(Partial() if is_sum else kinds[-1])
        local = weight.redistribute(self.mesh, kinds).to_local(grad_placements=gradient)
        if is_down_bias:  # added by only one of the processes that sum
            return local * all(self.mesh.get_local_rank(at) == 0 for at in self.features)
        return local

    def add_up(self, part: Any, shape: Any) -> Any:
        """Returns the sum of the results of all processes."""
        from torch.distributed.tensor import DTensor, Replicate

        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            part.contiguous(), self.mesh, self.out, run_check=False, shape=torch.Size(shape),
            stride=stride,
        )  # fmt: skip
        wanted = [Replicate() if kind.is_partial() else kind for kind in self.out]
        return made.redistribute(self.mesh, wanted)


def _on(mesh: DeviceMesh, tensor: Any) -> Any:
    """Returns a `DTensor` unchanged, and any other tensor as a replicated `DTensor`."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
