"""Leaves a check for training out of recordings; layers of the target have their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fmapper_adapters.torch import _private


@contextlib.contextmanager
def take_any() -> Iterator[None]:
    """Records `batch_norm` without the condition that channels have several values.

    The condition is for training only, and a file for both modes would refuse single examples.
    """
    batch_norm = torch.nn.functional.batch_norm

    def without_check(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _private.any_batch_size():
            return batch_norm(*args, **kwargs)

    torch.nn.functional.batch_norm = without_check
    try:
        yield
    finally:
        torch.nn.functional.batch_norm = batch_norm
