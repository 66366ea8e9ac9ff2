"""What torch knows of its devices, and why one is not here."""

from __future__ import annotations

import os
from typing import Any

import torch


def about(kind: str, index: int) -> tuple[str | None, int | None, int | None]:
    """Returns name, total and free bytes of an accelerator; None for what torch does not say."""
    if kind == "mps":
        total = torch.mps.recommended_max_memory()
        return None, total, max(total - torch.mps.driver_allocated_memory(), 0)
    module: Any = getattr(torch, kind)
    free, total = module.mem_get_info(index)
    return module.get_device_name(index), total, free


def why_not(kind: str) -> str | None:
    """Tells whether the build or the driver is to blame that there is no device of a kind."""
    if kind == "cuda":
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                "this torch is a CPU-only build (install one for CUDA or ROCm: "
                "https://pytorch.org/get-started/locally)"
            )
        if not torch.cuda.is_available():
            built = "ROCm" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
            return f"torch was built for {built}, but finds no driver or no GPU: {_no_cuda()}"
    if kind == "mps":
        if not torch.backends.mps.is_built():
            return "this torch is built without MPS, which is for Macs only"
        if not torch.backends.mps.is_available():
            return "torch was built with MPS, but this Mac has no GPU or system that it can use"
    if kind == "xpu" and not torch.xpu.is_available():
        return "this torch is not built for Intel GPUs, or finds no driver or no GPU"
    return None


def _no_cuda() -> str:
    """Says what CUDA itself has to say, and which variable hides GPUs if somebody has set it."""
    cuda: Any = torch.cuda
    reason = "the driver answers, but shows no GPU"
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in os.environ:
            reason += f" ({variable} is {os.environ[variable]!r})"
    return reason
