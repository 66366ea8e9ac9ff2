"""Checks of `fmapper.Sync` on eight devices of one process; `sync/test_processes.py` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding

import fmapper

Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
FOLDER = Path()
FULLY = jax.make_mesh((8,), ("data",))
TENSOR = jax.make_mesh((2, 4), ("data", "model"))
RULES = {"up.kernel": (None, "model"), "up.bias": ("model",), "down.kernel": ("model",)}


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.relu(self.up(x)))


def assert_equal(target: Any, source: Any) -> None:
    for name, array in fmapper.state(target).items():
        np.testing.assert_array_equal(array, np.asarray(fmapper.state(source)[name]), name)


def layouts(tree: Any) -> dict[str, Any]:
    return {name: array.sharding for name, array in fmapper.state(tree).items()}


def check_between_meshes() -> None:
    source = fmapper.shard(Net(0), FULLY, {"*": ("data",)})
    target = fmapper.shard(Net(1), TENSOR, RULES)
    before = layouts(target)
    sync = fmapper.Sync(source, target)
    for _ in range(3):
        source.up.kernel.set_value(source.up.kernel.get_value() + 1)
        assert sync() is target
        assert_equal(target, source)
    assert layouts(target) == before


def check_parts_of_arrays_without_memory() -> None:
    """An engine that holds shards says which by shardings alone."""
    place = NamedSharding(TENSOR, Spec("data", "model"))
    values = np.arange(16 * 24.0, dtype="float32").reshape(16, 24)
    for source in (torch.from_numpy(values), jnp.array(values), jax.device_put(values, place)):
        engine = {"w": jax.ShapeDtypeStruct(values.shape, "float32", sharding=place)}
        parts = [*fmapper.Sync({"w": source}, engine).parts()]
        assert len(parts) == 8
        for name, box, part in parts:
            assert (name, part.shape) == ("w", (8, 6))
            np.testing.assert_array_equal(part, values[tuple(slice(*ends) for ends in box)])


def check_what_becomes_infinite_changes_nothing() -> None:
    place = NamedSharding(FULLY, Spec("data"))
    source = {"w": jax.device_put(jnp.ones(8), place), "v": jax.device_put(jnp.ones(8), place)}
    target = {name: array.astype("float16") for name, array in source.items()}
    held = dict(target)
    sync = fmapper.Sync(source, target)
    with pytest.raises(fmapper.LossyCastError, match=r"^v: "):
        sync({"w": 2 * source["w"], "v": 1e6 * source["v"]})
    assert all(target[name] is array for name, array in held.items())


def check_parts_of_a_mesh() -> None:
    place = NamedSharding(FULLY, Spec("data"))
    source = {"w": jax.device_put(jnp.arange(16.0), place)}
    target = {"w": jax.device_put(jnp.zeros(16), place)}
    parts = {box: values.tolist() for _, box, values in fmapper.Sync(source, target).parts()}
    assert parts == {((n, n + 2),): [n, n + 1] for n in range(0, 16, 2)}


def check_from_torch_onto_a_mesh() -> None:
    source = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    target = fmapper.shard(
        fmapper.convert(source, "jax", (torch.ones(2, 8),)), TENSOR, {"0": ("model",)}
    )
    before = layouts(target)
    sync = fmapper.Sync(source, target)
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        target = sync()
        for name, array in target.params.items():
            np.testing.assert_array_equal(array, dict(source.named_parameters())[name].detach())
    assert layouts(target) == before


def check_shared_where_both_lie_alike() -> None:
    source, target = (fmapper.shard(Net(seed), TENSOR, RULES) for seed in (0, 1))
    fmapper.Sync(source, target, share=True)()
    assert target.up.kernel.get_value() is source.up.kernel.get_value()
    other = fmapper.shard(Net(1), FULLY, {"*": ("data",)})
    fmapper.Sync(source, other, share=True)()
    assert_equal(other, source)


def check_off_a_mesh() -> None:
    source = fmapper.shard(Net(0), TENSOR, RULES)
    target = {name: torch.zeros(array.shape) for name, array in fmapper.state(source).items()}
    fmapper.Sync(source, target)()
    for name, array in fmapper.state(source).items():
        np.testing.assert_array_equal(array, target[name])


def check_a_call_takes_new_parameters() -> None:
    place = NamedSharding(FULLY, Spec("data"))
    source = {"w": jax.device_put(jnp.zeros((16, 4)), place)}
    target = {"w": jnp.zeros((16, 4))}
    sync = fmapper.Sync(source, target)
    new = {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), place)}
    sync(new)
    np.testing.assert_array_equal(target["w"], np.arange(64.0).reshape(16, 4))
