"""The bits of tensors as another dtype, under torch.func.vmap in every version of torch."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch import _private

Tensor = torch.Tensor

# torch.func.vmap supports views as another dtype in torch 2.13, but not in 2.11.
IS_MAPPED: bool = _private.has_kernel("aten::view.dtype", "FuncTorchBatched")


def view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `x.view(dtype)`, for which torch.func.vmap may lack a rule."""
    if torch.compiler.is_compiling() or not is_batched(x):
        return x.view(dtype)
    viewed: Tensor = _Viewed.apply(x, dtype)  # type: ignore[no-untyped-call]
    return viewed


def is_batched(x: Tensor) -> bool:
    """Returns whether torch.func.vmap maps over a tensor, at any level."""
    while _private.is_wrapped(x):
        if _private.is_batched(x):
            return True
        x = _private.unwrap(x)
    return False


class _Viewed(torch.autograd.Function):
    """A view of bits, which has no derivative."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        # Bits of another size change the last dimension.
        return view_as(x.movedim(in_dims[0], 0).contiguous(), dtype), 0
