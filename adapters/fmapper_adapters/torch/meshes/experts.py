"""Experts of transformers whose weights are `DTensor`s.

torch has no grouped products, loops over experts and lookups of weights for `DTensor`s, or gathers
all that they take. The modules here call the forward of their class with the shards of their
process: rows of the batch are routed where they are, features are divided as for Megatron-LM, and
the parts of the result are added up once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_DOWN = "down_proj"
_CLASSES: dict[Any, Any] = {}  # class -> that of its shards


def localize(module: Any) -> None:
    """Lets experts of transformers compute with shards; leaves other modules alone."""
    cls = type(module)
    if issubclass(cls, _Experts) or not hasattr(cls, "_apply_gate"):
        return
    if all(hasattr(module, mark) for mark in _MARKS) and hasattr(module, _DOWN):
        module.__class__ = _class_of_shards(cls)


def _class_of_shards(cls: Any) -> Any:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"Sharded{cls.__name__}", (_Experts, cls), {})
    return _CLASSES[cls]


def _empty(cls: Any) -> Any:
    own = _class_of_shards(cls)
    return own.__new__(own)


class _Experts:
    """Experts of shards."""

    _own: _Shards | None = None  # during a call

    def __reduce__(self) -> Any:
        """Pickles and copies by the class of transformers, which has a name."""
        return _empty, (type(self).__bases__[1],), vars(self)

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        module: Any = self
        shards = _Shards(module, hidden_states)
        x = shards.rows(hidden_states)
        own = x, shards.rows(top_k_index), shards.rows(top_k_weights)
        # attributes of a module come before its parameters of the same names
        new = {"_own": shards} | {n: shards.local(n, p) for n, p in shards.weights.items()}
        vars(module).update(new)
        try:
            found = super().forward(*own)  # type: ignore[misc]
        finally:
            for name in new:
                del vars(module)[name]
        return shards.add_up(found, hidden_states.shape)

    def _apply_gate(self, gate_up_out: Any) -> Any:
        if self._own is not None:
            gate_up_out = self._own.bring_together(gate_up_out)
        return super()._apply_gate(gate_up_out)  # type: ignore[misc]


class _Shards:
    """The placements of one call.

    Args:
        module: The experts.
        x: Their input, of which rows may be divided; all else is gathered.
    """

    def __init__(self, module: Any, x: Any) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
        self.features: list[int] = []  # axes of the mesh that divide these
        for at in range(self.mesh.ndim):
            row = x.placements[at] == Shard(0)
            is_divided = not row and self._divides_features(module, at)
            self.x.append(Shard(0) if row else whole)
            self.gradient.append(Shard(0) if row else sums if is_divided else whole)
            self.out.append(Shard(0) if row else sums if is_divided else whole)
            self.features += [at] * is_divided
        # a packed dimension that several axes divide would have to be sorted along both
        if len(self.features) > 1:
            for at in self.features[1:]:
                self.gradient[at] = self.out[at] = whole
            del self.features[1:]
        self.is_packed = module.has_gate and module.is_concatenated

    def _divides_features(self, module: Any, at: int) -> bool:
        """Returns whether an axis divides the features of experts, as all weights have them."""
        from torch.distributed.tensor import Shard

        implementation = getattr(module.config, "_experts_implementation", None)
        if implementation not in ("grouped_mm", "batched_mm"):
            return False  # others do not say where they apply the gate
        if getattr(module, "has_post_expert_norm", False):
            return False
        up = "gate_up_proj" if module.has_gate else "up_proj"
        outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
        size, features = self.mesh.size(at), self.weights[_DOWN].shape[inputs]
        kinds = self.weights[up].placements[at], self.weights[_DOWN].placements[at]
        return kinds == (Shard(outputs), Shard(inputs)) and features % size == 0

    def rows(self, tensor: Any) -> Any:
        """Returns the rows of this process."""
        tensor = _on(self.mesh, tensor).redistribute(self.mesh, self.x)
        return tensor.to_local(grad_placements=self.gradient)

    def local(self, name: str, weight: Any) -> Any:
        """Returns what this process needs of a weight."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        kinds: list[Any] = []
        gradient: list[Any] = []
        is_down_bias = name == f"{_DOWN}_bias"
        for at, row in enumerate(self.x):
            divided = at in self.features and not is_down_bias
            own = self._feature(name, weight) if divided else None
            kinds.append(Replicate() if own is None else Shard(own))
            is_sum = row == Shard(0) or (at in self.features and own is None)
            gradient.append(Partial() if is_sum else kinds[-1])
        found = weight.redistribute(self.mesh, kinds).to_local(grad_placements=gradient)
        if is_down_bias:  # which is added by one process of those that add up
            return found * all(self.mesh.get_local_rank(at) == 0 for at in self.features)
        return found

    def _feature(self, name: str, weight: Any) -> int | None:
        """Returns the dimension of a weight that counts features; None for one without."""
        at = self.features[0]
        kind = weight.placements[at]
        if kind.is_shard():
            return int(kind.dim)
        return 1 if name.endswith("up_proj_bias") else None

    def bring_together(self, out: Any) -> Any:
        """Returns the features of gate and up that belong together.

        They lie side by side in one array, so that of two devices one has all gates.
        """
        if not self.features or not self.is_packed:
            return out
        (at,) = self.features
        return _swap(out, self.mesh.get_group(at), self.mesh.get_local_rank(at), False)

    def add_up(self, part: Any, shape: Any) -> Any:
        """Returns the sum of what each process found."""
        from torch.distributed.tensor import DTensor, Replicate

        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            part.contiguous(), self.mesh, self.out, run_check=False, shape=torch.Size(shape),
            stride=stride,
        )  # fmt: skip
        wanted = [Replicate() if kind.is_partial() else kind for kind in self.out]
        return made.redistribute(self.mesh, wanted)


def _swap(x: Any, group: Any, rank: int, is_back: bool) -> Any:
    apply: Any = _Swap.apply  # untyped in torch
    return apply(x, group, rank, is_back)


class _Swap(torch.autograd.Function):
    """Sends halves of features between processes: from side by side to pairs, or back.

    Of 2n blocks, gates before ups, process i has two: 2i and 2i + 1 side by side, i and n + i as a
    pair.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, rank: int, is_back: bool) -> torch.Tensor:
        ctx.own = group, rank, is_back
        count = torch.distributed.get_world_size(group)
        targets = [2 * rank % count, (2 * rank + 1) % count]
        sources = [rank // 2, (count + rank) // 2]
        blocks = x.reshape(*x.shape[:-1], 2, -1).movedim(-2, 0)
        to, come_from = (sources, targets) if is_back else (targets, sources)
        if to[0] > to[1]:
            blocks = blocks.flip(0)
        new = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(
            new, blocks.contiguous(), [come_from.count(i) for i in range(count)],
            [to.count(i) for i in range(count)], group=group,
        )  # fmt: skip
        if come_from[0] > come_from[1]:
            new = new.flip(0)
        return new.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group, rank, is_back = ctx.own
        return _swap(gradients[0], group, rank, not is_back), None, None, None


def _on(mesh: DeviceMesh, tensor: Any) -> Any:
    """Returns a `DTensor` as it is, and another tensor as one that all processes have."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
