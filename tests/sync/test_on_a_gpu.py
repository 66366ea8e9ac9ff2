"""Syncs from and to a GPU, which may be a simulated one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

import fmapper

pytestmark = pytest.mark.gpu


def weights(device: str) -> dict[str, torch.Tensor]:
    return {f"layers.{n}": torch.randn(16, 8).to(device) for n in range(4)}


def changed(source: dict[str, torch.Tensor]) -> dict[str, Any]:
    for tensor in source.values():
        tensor.mul_(2).add_(1)
    return {name: tensor.cpu().numpy() for name, tensor in source.items()}


@pytest.mark.parametrize(("froms", "to"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_between_tensors(froms: str, to: str) -> None:
    source, target = weights(froms), weights(to)
    held = dict(target)
    sync = fmapper.Sync(source, target)
    for _ in range(3):
        wanted = changed(source)
        sync()
        for name, tensor in target.items():
            assert tensor is held[name]
            assert tensor.device.type == to
            np.testing.assert_array_equal(tensor.cpu().numpy(), wanted[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_a_gpu_into_jax(dtype: str) -> None:
    source = weights("cuda")
    device = jax.devices()[0]
    target = {n: jax.device_put(np.zeros((16, 8), "float32"), device) for n in source}
    target = {n: array.astype(dtype) for n, array in target.items()}
    sync = fmapper.Sync(source, target)
    for _ in range(3):
        wanted = changed(source)
        sync()
        for name, array in target.items():
            assert array.devices() == {device}
            np.testing.assert_array_equal(
                np.asarray(array.astype("float32")),
                np.asarray(jax.numpy.asarray(wanted[name]).astype(dtype).astype("float32")),
            )
