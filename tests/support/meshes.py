"""Runs converted models on meshes of eight devices; `to_jax/test_meshes.py` starts it.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/support/meshes.py mlp recurrent
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from torch import nn

import fmapper


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2),
        )
        self.head = nn.Linear(8, 16)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).mean((2, 3)))


class Grouped(nn.Module):
    """The gradients of such weights XLA gets wrong on a mesh with two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, groups=4),
            nn.GELU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
        )

    def forward(self, x: Any) -> Any:
        return self.body(x).mean((2, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.places = nn.Parameter(torch.randn(1, 6, 16))
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.norm(self.tokens(ids) + self.places)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 8))


MODELS = {
    "mlp": (mlp, lambda: torch.randn(8, 8)),
    "convolution": (Convolution, lambda: torch.randn(8, 3, 16, 16)),
    "grouped": (Grouped, lambda: torch.randn(8, 4, 6, 6)),
    "encoder": (encoder, lambda: torch.randn(8, 6, 16)),
    "recurrent": (Recurrent, lambda: torch.randn(8, 5, 8)),
    "embedding": (Embedding, lambda: torch.randint(0, 32, (8, 6))),
}
# How arrays of the model lie: the dimension that is divided, among how many devices, by which axis.
LAYOUTS = {"none": None, "columns": (0, 2, "model"), "rows": (1, 2, "model"), "all": (0, 4, "data")}


# The kind of the axes, the layout, and whether the mesh is set.
MESHES = (
    (AxisType.Explicit, "none", False),
    (AxisType.Explicit, "all", False),
    (AxisType.Explicit, "columns", True),
    (AxisType.Auto, "rows", True),
)


def placed(arrays: dict[str, Any], mesh: Any, layout: str) -> dict[str, Any]:
    """Arrays on a mesh."""

    def spec(array: Any) -> PartitionSpec:
        dim, parts, axis = LAYOUTS[layout] or (9, 1, "")
        divided = array.ndim > dim and array.shape[dim] % parts == 0
        return PartitionSpec(*[None] * dim, axis) if divided else PartitionSpec()

    return {name: jax.device_put(x, NamedSharding(mesh, spec(x))) for name, x in arrays.items()}


def check_spec(spec: Any, name: str, *, is_divided: bool) -> None:
    """Raises unless an output lies along the batch, and along the rows of the last weights."""
    is_divided &= name not in ("encoder", "grouped")  # which end in norms and means
    assert (spec[0], spec[-1]) == ("data", "model" if is_divided else None), spec


def loss(model: Any, params: Any, x: Any) -> Any:
    return (model.replace(params=params)(x) ** 2).sum()


def check(name: str) -> None:
    """Compares outputs and gradients on all meshes with those of torch and of one device.

    Raises:
        AssertionError: They differ.
    """
    torch.manual_seed(0)
    make, example = MODELS[name]
    module, x = make().eval(), example()
    alone = fmapper.convert(module, "jax", (x,))
    want, given = module(x).detach().numpy(), x.numpy()
    gradients = jax.jit(jax.grad(lambda p: loss(alone, p, given)))(alone.params)
    for kind, layout, is_set in MESHES:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        model = alone.replace(
            params=placed(alone.params, mesh, layout), buffers=placed(alone.buffers, mesh, layout)
        )
        batch = jax.device_put(given, NamedSharding(mesh, PartitionSpec("data")))
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            if name == "mlp":
                found = [model(batch), alone(batch)]
            else:
                found = [jax.jit(lambda m, x: m(x))(model, batch)]
            for one, is_placed in zip(found, (True, False), strict=False):
                np.testing.assert_allclose(np.asarray(one), want, rtol=1e-3, atol=1e-4)
                if kind is AxisType.Explicit:
                    is_divided = is_placed and layout == "columns"
                    check_spec(jax.typeof(one).sharding.spec, name, is_divided=is_divided)
            own = jax.jit(jax.grad(lambda p, x, m=model: loss(m, p, x)))(model.params, batch)
        for path, gradient in gradients.items():
            got = np.asarray(own[path])
            np.testing.assert_allclose(got, gradient, rtol=2e-3, atol=2e-3, err_msg=path)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        check(each)
    print(f"{len(sys.argv) - 1} models agree")
