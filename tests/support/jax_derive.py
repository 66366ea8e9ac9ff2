"""Checks of derived rules on eight devices of JAX; `meshes/test_derive.py` has them run."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fmapper
from fmapper.meshes import Sharding

SENT = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
IDS = np.arange(64, dtype=np.int32).reshape(8, 8)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()


def convert(module: Any, **options: Any) -> Any:
    example = {"input_ids": torch.arange(64).reshape(8, 8), "use_cache": False}
    return fmapper.convert(module, "jax", example_kwargs=example, **options)


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def logits(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, use_cache=False)["logits"]


def sent(model: Any, ids: Any, forward: Any = logits) -> Counter[str]:
    text = jax.jit(forward).lower(model, ids).compile().as_text()
    return Counter(re.findall(SENT, text))


def check_two_sums_a_layer_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = convert(llama())
    ids = np.arange(64, dtype=np.int32).reshape(8, 8)
    want = logits(model, ids)
    # by its own eps Adam divides gradients that are rounding by themselves
    optimizer = optax.adam(1e-2, eps=1e-5)

    def step(model: Any, state: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            return (logits(model.replace(params=params), ids) ** 2).mean()

        gradients = jax.grad(loss)(model.params)
        updates, state = optimizer.update(gradients, state)
        return gradients, optax.apply_updates(model.params, updates)

    wanted = jax.jit(step)(model, optimizer.init(model.params), ids)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        plan = fmapper.plan(Sharding(mesh, "derive"), model)
        assert len(plan.sums) == 2 * 2 + 1  # and the embedding
        assert plan.sums.count("model.layers.1.mlp.down_proj") == 1
        new = fmapper.shard(model, mesh, "derive")
        batch = fmapper.shard(ids, mesh, ("data",))
        found = sent(new, batch)
        assert found["all-reduce"] == len(plan.sums)
        assert found == sent(fmapper.shard(model, mesh, "model"), batch)
        assert found.total() == len(plan.sums)
        np.testing.assert_allclose(jax.jit(logits)(new, batch), want, rtol=1e-5, atol=1e-5)
        given = jax.jit(step)(new, optimizer.init(new.params), batch)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(given), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def check_experts_where_an_explicit_mesh_is_set() -> None:
    torch.manual_seed(0)
    model = convert(mixtral())
    ids = np.arange(64, dtype=np.int32).reshape(8, 8)
    mesh = mesh_of(AxisType.Explicit)
    new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(ids, mesh, ("data",))
    with jax.set_mesh(mesh):
        got = jax.jit(logits)(new, batch)
    np.testing.assert_allclose(np.asarray(got), logits(model, ids), rtol=1e-5, atol=1e-5)
    plan = fmapper.plan(Sharding(mesh, "derive"), model)
    assert len(plan.sums) == 2 * 2 + 1
    assert sent(new, batch) == sent(fmapper.shard(model, mesh, "model"), batch)


def check_a_loss_that_needs_whole_rows_on_an_explicit_mesh() -> None:
    """JAX refuses sharded rows there; they are gathered where they are needed."""
    torch.manual_seed(0)
    net, ids = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)), IDS
    model, mesh = fmapper.convert(net, "jax", (torch.from_numpy(ids),)), mesh_of(AxisType.Explicit)
    new, batch = fmapper.shard(model, mesh, {"1": ("model",)}), fmapper.shard(ids, mesh, ("data",))
    assert jax.typeof(jax.jit(lambda m, x: m(x))(new, batch)).sharding.spec == P(
        "data", None, "model"
    )

    def loss(params: Any, model: Any, ids: Any, mesh: Any = None) -> Any:
        found = model.replace(params=params)(ids)
        if mesh is not None:
            found = jax.sharding.reshard(found, NamedSharding(mesh, P("data")))
        return optax.softmax_cross_entropy_with_integer_labels(found, ids).mean()

    wanted = jax.jit(jax.grad(loss))(model.params, model, ids)
    given = jax.jit(jax.grad(partial(loss, mesh=mesh)))(new.params, new, batch)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(given[name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)


def check_experts_of_each_part_of_a_batch_send_what_is_planned() -> None:
    torch.manual_seed(0)
    model = convert(mixtral(), dynamic_shapes="auto")
    ids, mesh = np.arange(64, dtype=np.int32).reshape(8, 8), mesh_of(AxisType.Auto)
    new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(ids, mesh, ("data",))
    forward = jax.shard_map(
        logits, mesh=mesh, axis_names={"data"}, in_specs=(P(), P("data")), out_specs=P("data")
    )
    plan = fmapper.plan(Sharding(mesh, "derive"), model)
    # gate and up lie in one array: each device sends the other what it has of both
    planned = {"all-reduce": len(plan.sums), "collective-permute": 2 * len(plan.moves)}
    assert sent(new, batch, forward) == planned

    def loss(call: Any, params: Any, ids: Any) -> Any:
        return (call(model.replace(params=params), ids) ** 2).mean()

    given = jax.jit(jax.grad(partial(loss, forward)))(new.params, batch)
    wanted = jax.jit(jax.grad(partial(loss, logits)))(model.params, ids)
    for name, gradient in wanted.items():
        largest = float(abs(gradient).max())
        np.testing.assert_allclose(
            given[name], gradient, rtol=1e-5, atol=1e-5 * largest, err_msg=name
        )


def check_fused_queries_keys_and_values() -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    model = convert(Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)).eval())
    ids, mesh = np.arange(64, dtype=np.int32).reshape(8, 8), mesh_of(AxisType.Auto)
    new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(ids, mesh, ("data",))
    plan = fmapper.plan(Sharding(mesh, "derive"), model)
    assert len(plan.sums) == 2 * 2 + 1
    assert sent(new, batch)["all-reduce"] == len(plan.sums)
    assert sent(new, batch) == sent(fmapper.shard(model, mesh, "model"), batch)
    np.testing.assert_allclose(
        jax.jit(logits)(new, batch), logits(model, ids), rtol=1e-5, atol=1e-5
    )
