"""Checks of `fmapper.Sync` between processes of `jax.distributed`, two devices each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import fmapper
from fmapper.checkpoints import Rules, Transpose

Spec: Any = jax.sharding.PartitionSpec  # untyped in JAX
FOLDER = Path()
FULLY = jax.make_mesh((4,), ("data",))
TENSOR = jax.make_mesh((2, 2), ("data", "model"))


def put(values: Any, mesh: Any, *spec: Any) -> Any:
    array = jnp.asarray(values)
    place = NamedSharding(mesh, Spec(*spec))
    return jax.make_array_from_callback(array.shape, place, lambda index: np.asarray(array)[index])


def weights(factor: float) -> dict[str, Any]:
    w, b = np.arange(64.0, dtype="float32").reshape(16, 4), np.arange(8.0, dtype="float32")
    return {"w": put(factor * w, FULLY, "data"), "b": put(factor * b, FULLY, "data")}


def assert_equal(array: Any, values: Any) -> None:
    assert not array.is_fully_addressable
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def check_between_meshes() -> None:
    target = {
        "w": put(jnp.zeros((4, 16), jnp.bfloat16), TENSOR, "model", "data"),
        "b": put(jnp.zeros(8), TENSOR),
    }
    layouts = {name: array.sharding for name, array in target.items()}
    sync = fmapper.Sync(weights(0), target, Rules([Transpose("w")]))
    for factor in (1, 2, 3):
        assert sync(weights(factor)) is target
        assert_equal(target["w"], factor * np.arange(64.0).reshape(16, 4).T)
        assert_equal(target["b"], factor * np.arange(8.0))
        assert {name: array.sharding for name, array in target.items()} == layouts
        assert (sync.stats.sent, sync.stats.received) == (0, 0)


def check_what_becomes_infinite_changes_nothing() -> None:
    target = {"w": put(jnp.zeros((16, 4), jnp.float16), TENSOR, "data"), "b": weights(0)["b"]}
    held = dict(target)
    sync = fmapper.Sync(weights(0), target)
    with pytest.raises(fmapper.LossyCastError, match=r"^w: "):
        sync(weights(1e6))
    assert all(target[name] is array for name, array in held.items())


def check_off_the_mesh() -> None:
    """What one process has whole comes through the coordinator."""
    target = {"w": np.zeros((16, 4)), "b": np.zeros(8)} if jax.process_index() else None
    sync = fmapper.Sync(weights(0), target)
    sync(weights(5))
    if target is not None:
        np.testing.assert_array_equal(target["w"], 5 * np.arange(64.0).reshape(16, 4))
        np.testing.assert_array_equal(target["b"], 5 * np.arange(8.0))
        assert sync.stats.received == (32 + 4) * 8


def check_rules_on_a_mesh() -> None:
    """Every operation that rules are made of, beside those of the host."""
    on_host = {f"w{n}": np.arange(64.0, dtype="float32").reshape(8, 8) + n for n in (1, 2)}
    on_mesh = {name: put(array, FULLY, "data") for name, array in on_host.items()}

    def write(state: Any) -> dict[str, Any]:
        first, second = state["w1"], state["w2"]
        return {
            "a": np.concatenate([first.T, second], 1)[2:6].reshape(4, 2, 8),
            "b": (first + 1.5) * 2,
            "c": first + second,
            "d": (second / 4).astype("float16"),
        }

    rules = Rules.record(write, on_host)
    wanted = write(on_host)
    target = {name: put(np.zeros_like(array), TENSOR, "data") for name, array in wanted.items()}
    sync = fmapper.Sync(on_mesh, target, rules)
    for _ in range(2):
        sync()
        assert sync.stats.sent == 0
        for name, array in wanted.items():
            assert_equal(target[name], array)


def check_other_arrays_are_refused() -> None:
    source, target = ({"w": put(np.ones(8, "float32"), FULLY, "data")} for _ in range(2))
    sync = fmapper.Sync(source, target)
    held = target["w"]
    for wrong, words in [
        (put(np.ones(16, "float32"), FULLY, "data"), r"float32\[16\]"),
        (put(np.ones(8, "int32"), FULLY, "data"), "int32"),
        (put(np.ones(8, "float32"), TENSOR), "now"),
    ]:
        with pytest.raises(fmapper.SyncError, match=f"w of the source .*{words}"):
            sync({"w": wrong})
    gone = put(np.ones(8, "float32"), FULLY, "data")
    gone.delete()
    with pytest.raises(fmapper.SyncError, match=r"w of the source .*gone"):
        sync({"w": gone})
    assert target["w"] is held
    target["w"] = put(np.ones(8, "float16"), FULLY, "data")
    with pytest.raises(fmapper.SyncError, match=r"w of the target .*float16"):
        sync()


def check_what_was_brought_is_not_donated_with_the_source() -> None:
    source, target = ({"w": put(np.full(8, n), FULLY, "data")} for n in (1.0, 0.0))
    fmapper.Sync(source, target)()
    jax.jit(lambda w: w + 1, donate_argnums=0)(source["w"])
    assert_equal(target["w"], np.ones(8))
