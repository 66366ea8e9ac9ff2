"""The bits of tensors as another dtype, under torch.func.vmap in every version of torch."""

from __future__ import annotations

from typing import Any

import torch

from fmapper_adapters.torch import _private

Tensor = torch.Tensor

# torch.func.vmap of torch 2.11 maps over no view as another dtype; that of 2.13 does.
IS_MAPPED: bool = _private.has_kernel("aten::view.dtype", "FuncTorchBatched")


def view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `x.view(dtype)`, for which torch.func.vmap may have no rule of its own."""
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
    """Bits have no derivative."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        # The last dimension is the one that bits of another size make longer or shorter.
        return view_as(x.movedim(in_dims[0], 0).contiguous(), dtype), 0
