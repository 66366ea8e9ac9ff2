"""Checks of loading in shards on eight devices of JAX; `meshes/test_loading.py` has them run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fmapper
from fmapper.checkpoints import SourceFile
from fmapper.meshes import Sharding

FOLDER = Path()
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Read:
    """Counts the bytes that are read of arrays while it is entered."""

    def __enter__(self) -> Read:
        self.count = 0
        self._own = SourceFile.read_into

        def read_into(file: Any, handle: int, out: memoryview, offset: int) -> None:
            self.count += len(out)
            self._own(file, handle, out, offset)

        SourceFile.read_into = read_into
        return self

    def __exit__(self, *error: object) -> None:
        SourceFile.read_into = self._own


def check_each_part_is_read_once() -> None:
    rng = np.random.default_rng(0)
    tree = {
        "rows": rng.standard_normal((512, 2048), "f"),
        "columns": rng.standard_normal((512, 4096), "f"),
        "both": rng.standard_normal((256, 8192), "f").astype(ml_dtypes.bfloat16),
        "whole": rng.standard_normal((100, 3), "f"),
        "count": np.arange(8, dtype=np.int32),
    }
    path = FOLDER / "tree.safetensors"
    fmapper.save(tree, path)
    rules = {"rows": ("data",), "columns": (None, "model"), "both": ("data", "model")}
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tree.items()}
    with Read() as read:
        new = fmapper.load(path, like=like, sharding=Sharding(MESH, rules))
    size = sum(x.nbytes for x in tree.values())
    assert size <= read.count <= 1.02 * size
    assert new["columns"].sharding.spec == P(None, "model")
    assert new["both"].addressable_shards[0].data.shape == (64, 4096)
    for name, array in tree.items():
        np.testing.assert_array_equal(np.asarray(new[name]), array, err_msg=name)
    narrow = fmapper.load(path, like=like, sharding=Sharding(MESH, rules), dtype="bfloat16")
    assert narrow["columns"].dtype == "bfloat16"
    assert narrow["columns"].sharding.spec == P(None, "model")
    np.testing.assert_array_equal(
        np.asarray(narrow["columns"]), tree["columns"].astype(ml_dtypes.bfloat16)
    )


def check_a_model_with_its_optimizer_from_one_mesh_to_another() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    x = torch.randn(8, 8)
    model = fmapper.convert(net, "jax", (x,))
    tree = {"model": model, "state": optax.adam(0.1).init(model.params), "step": 7}
    once = fmapper.shard(tree, MESH, {"0.weight": ("model",), "2.weight": (None, "data")})
    path = FOLDER / "model.safetensors"
    fmapper.save(once, path)
    flat = jax.make_mesh((8,), ("model",))
    like = {**tree, "step": 0}
    new = fmapper.load(path, like=like, sharding=Sharding(flat, "derive"))
    assert new["model"].params["0.weight"].sharding.spec == P("model")
    assert new["state"][0].mu["2.weight"].sharding.spec == P(None, "model")
    assert new["step"] == 7
    batch = fmapper.shard(x.numpy(), flat, ("model",))
    np.testing.assert_allclose(new["model"](batch), net(x).detach().numpy(), rtol=1e-5, atol=1e-5)


def check_what_is_on_a_mesh_is_read_as_it_lies() -> None:
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.ones(3, np.float32)}
    path = FOLDER / "lies.safetensors"
    fmapper.save(tree, path)
    spec = NamedSharding(MESH, P(None, "model"))
    like = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=spec), "b": tree["b"]}
    new = fmapper.load(path, like=like)
    assert new["w"].sharding == spec
    np.testing.assert_array_equal(np.asarray(new["w"]), tree["w"])
    assert isinstance(new["b"], np.ndarray)
    again = fmapper.load(path, like={**new, "w": new["w"] * 0})
    assert again["w"].sharding.spec == P(None, "model")


def check_folders_of_the_hub() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    module.save_pretrained(FOLDER / "llama")
    ids = torch.arange(16).reshape(2, 8)
    mask = torch.ones_like(ids)
    want = module(input_ids=ids, attention_mask=mask).logits.detach().numpy()
    pair = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    for to in ("jax", "flax"):
        for rules in ("model", "derive"):
            model = fmapper.from_pretrained(FOLDER / "llama", to, sharding=Sharding(pair, rules))
            found = {n: x.sharding.spec for n, x in fmapper.state(model).items()}
            weight = next(n for n in found if n.endswith("layers.1.mlp.down_proj.weight"))
            assert found[weight] == P(None, "model"), (to, rules)
            assert all(len(x.devices()) == 2 for x in fmapper.state(model).values())
            given = fmapper.shard({"input_ids": ids.numpy(), "attention_mask": mask.numpy()}, pair,
                                  ("data",))  # fmt: skip
            got = model(**given)["logits"]
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)
