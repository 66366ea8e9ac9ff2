"""Syncs from and to a GPU, which may be a simulated one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

import fmapper
from fmapper.checkpoints import Rules

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


def test_layouts_and_casts_on_a_gpu() -> None:
    """Nothing goes through the host: sums, transposes, parts and casts are computed there."""
    source = weights("cuda")
    rules = Rules.record(
        lambda state: {
            "joined": np.concatenate([state["layers.0"].T, state["layers.1"].T])[3:9],
            "sum": (state["layers.2"] + state["layers.3"]).astype("float16"),
        },
        {name: tensor.cpu().numpy() for name, tensor in source.items()},
    )
    target = {
        "joined": torch.zeros(6, 16, device="cuda"),
        "sum": torch.zeros(16, 8, device="cuda", dtype=torch.float16),
    }
    sync = fmapper.Sync(source, target, rules)
    for _ in range(3):
        wanted = changed(source)
        sync()
        joined = np.concatenate([wanted["layers.0"].T, wanted["layers.1"].T])[3:9]
        np.testing.assert_array_equal(target["joined"].cpu(), joined)
        total = (wanted["layers.2"] + wanted["layers.3"]).astype("float16")
        np.testing.assert_array_equal(target["sum"].cpu(), total)
    before = {name: tensor.clone() for name, tensor in target.items()}
    source["layers.2"].fill_(1e6)
    with pytest.raises(fmapper.LossyCastError, match="sum"):
        sync()
    assert all(torch.equal(target[name], before[name]) for name in target)


def test_from_jax_into_tensors_on_a_gpu() -> None:
    device = jax.devices()[0]
    target = weights("cuda")
    source = {n: jax.device_put(np.zeros((16, 8), "float32"), device) for n in target}
    sync = fmapper.Sync(source, target)
    for step in range(3):
        sync({name: array + step for name, array in source.items()})
        for tensor in target.values():
            assert tensor.device.type == "cuda"
            np.testing.assert_array_equal(tensor.cpu(), np.full((16, 8), step, "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_a_gpu_into_jax(dtype: str) -> None:
    source = weights("cuda")
    device = jax.devices()[0]
    target = {n: jax.device_put(np.zeros((16, 8), "float32"), device) for n in source}
    target = {n: array.astype(dtype) for n, array in target.items()}
    sync = fmapper.Sync(source, target)
    source["layers.1"] = torch.randn(8, 16).to("cuda").T  # which JAX cannot take as it lies
    for _ in range(3):
        wanted = changed(source)
        sync()
        for name, array in target.items():
            assert array.devices() == {device}
            np.testing.assert_array_equal(
                np.asarray(array.astype("float32")),
                np.asarray(jax.numpy.asarray(wanted[name]).astype(dtype).astype("float32")),
            )
