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
from fmapper_adapters.jax.arrays.packed import PackedArray

SENT = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
IDS = np.arange(64, dtype=np.int32).reshape(8, 8)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def mixtral(layers: int = 2) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = SIZES | {"num_hidden_layers": layers}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)).eval()


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
        for rules in ("derive", "model"):
            plan = fmapper.plan(Sharding(mesh, rules), model)
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


def check_experts_send_what_is_planned() -> None:
    torch.manual_seed(0)
    for options in ({}, {"dynamic_shapes": "auto"}):
        model = convert(mixtral(), **options)
        want = logits(model, IDS)
        wanted = jax.jit(jax.grad(partial(squares, logits)))(model.params, model, IDS)
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = mesh_of(kind)
            new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(IDS, mesh, ("data",))
            plan = fmapper.plan(Sharding(mesh, "derive"), model)
            assert len(plan.sums) == 2 * 2 + 1
            assert plan.moves == ()
            assert sent(new, batch) == {"all-reduce": len(plan.sums)}, sent(new, batch)
            assert sent(new, batch) == sent(fmapper.shard(model, mesh, "model"), batch)
            with jax.set_mesh(mesh):
                got = jax.jit(logits)(new, batch)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)
            given = jax.jit(jax.grad(partial(squares, logits)))(new.params, new, batch)
            assert_close(given, wanted)


def check_experts_along_an_axis_of_their_own_are_gathered_once() -> None:
    torch.manual_seed(0)
    model = convert(mixtral())
    want = logits(model, IDS)
    wanted = jax.jit(jax.grad(partial(squares, logits)))(model.params, model, IDS)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "expert"), axis_types=(kind, kind))
        new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(IDS, mesh, ("data",))
        plan = fmapper.plan(Sharding(mesh, "derive"), model)
        assert len(plan.gathers) == 2 * 2
        assert sent(new, batch) == {"all-gather": len(plan.gathers)}, sent(new, batch)
        np.testing.assert_allclose(jax.jit(logits)(new, batch), want, rtol=1e-5, atol=1e-5)
        given = jax.jit(jax.grad(partial(squares, logits)))(new.params, new, batch)
        assert_close(given, wanted)


def check_experts_in_a_loop_shift_no_rows() -> None:
    torch.manual_seed(0)
    module = mixtral(layers=1)
    module.config._experts_implementation = "eager"
    model, mesh = convert(module), mesh_of(AxisType.Auto)
    new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(IDS, mesh, ("data",))
    found = sent(new, batch)
    # A gather for the mask of each expert; sums of the embedding, the attention, and of the rows.
    assert found == {"all-gather": 4, "all-reduce": 5}, found
    np.testing.assert_allclose(
        jax.jit(logits)(new, batch), logits(model, IDS), rtol=1e-5, atol=1e-5
    )


def check_each_device_computes_the_experts_of_its_rows() -> None:
    torch.manual_seed(0)
    model, mesh = convert(mixtral()), jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole, divided = (
        jax.jit(logits).lower(fmapper.shard(model, mesh, {}), batch).compile().cost_analysis()
        for batch in (fmapper.shard(IDS, mesh, ()), fmapper.shard(IDS, mesh, ("data",)))
    )
    assert divided["flops"] < whole["flops"] / 6, (divided["flops"], whole["flops"])


class Experts(torch.nn.Module):
    """Experts that add up where their rows came from, of whose order `told` is a part."""

    def __init__(self, told: bool = False) -> None:
        import transformers.integrations.moe  # noqa: F401  # has the operation

        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, 8, 16))
        self.down = torch.nn.Parameter(torch.randn(4, 16, 8))
        self.scale = torch.nn.Parameter(torch.rand(4))
        self.router = torch.nn.Linear(8, 4)
        self.told = told

    def forward(self, x: Any) -> Any:
        shape, x = x.shape, x.reshape(-1, 8)
        scores, chosen = self.router(x).topk(2)
        chosen, order = torch.sort(chosen.reshape(-1), stable=True)
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        hidden = torch.ops.transformers.grouped_mm_fallback(x[order // 2], self.up, ends).relu()
        scores = scores.reshape(-1)[order] * self.scale[chosen]
        rows = torch.ops.transformers.grouped_mm_fallback(hidden, self.down, ends) * scores[:, None]
        total = torch.zeros_like(x).index_add(0, order // 2, rows).reshape(shape)
        return (total, order) if self.told else total


def check_experts_that_add_up_where_rows_came_from() -> None:
    torch.manual_seed(0)
    net, mesh = Experts(), mesh_of(AxisType.Auto)
    for rows in (3, 8):  # of 24 rows each device gets the same number, too
        x = torch.randn(4, rows, 8)
        model = fmapper.convert(net, "jax", (x,))
        new, batch = fmapper.shard(model, mesh, {}), fmapper.shard(x.numpy(), mesh, ("data",))
        np.testing.assert_allclose(
            jax.jit(lambda m, x: m(x))(new, batch), net(x).detach(), rtol=1e-5, atol=1e-5
        )
        assert sent(new, batch, lambda m, x: m(x)) == {}


def check_an_order_that_is_told_is_that_of_all_rows() -> None:
    torch.manual_seed(0)
    net, x, mesh = Experts(told=True), torch.randn(4, 8, 8), mesh_of(AxisType.Auto)
    model = fmapper.convert(net, "jax", (x,))
    new, batch = fmapper.shard(model, mesh, {}), fmapper.shard(x.numpy(), mesh, ("data",))
    given = jax.jit(lambda m, x: m(x))(new, batch)
    for a, b in zip(given, net(x), strict=True):
        np.testing.assert_allclose(a, b.detach(), rtol=1e-5, atol=1e-5)


def squares(call: Any, params: Any, model: Any, ids: Any) -> Any:
    return (call(model.replace(params=params), ids) ** 2).mean()


def assert_close(given: Any, wanted: Any) -> None:
    for name, gradient in wanted.items():
        largest = float(abs(gradient).max())
        np.testing.assert_allclose(
            given[name], gradient, rtol=1e-5, atol=1e-5 * largest, err_msg=name
        )


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
    assert sent(new, batch, forward) == {"all-reduce": len(plan.sums)}
    given = jax.jit(jax.grad(partial(squares, forward)))(new.params, new, batch)
    assert_close(given, jax.jit(jax.grad(partial(squares, logits)))(model.params, model, ids))


def check_fused_queries_keys_and_values() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    ids, mesh = np.arange(64, dtype=np.int32).reshape(8, 8), mesh_of(AxisType.Auto)
    tied = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    for module, lookups in (  # XLA adds what two tables give up at once
        (Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)), 1), (GPT2LMHeadModel(tied), 2)
    ):  # fmt: skip
        model = convert(module.eval())
        new, batch = fmapper.shard(model, mesh, "derive"), fmapper.shard(ids, mesh, ("data",))
        plan = fmapper.plan(Sharding(mesh, "derive"), model)
        assert len(plan.sums) == 2 * 2 + lookups
        assert sent(new, batch) == {"all-reduce": 5}
        if model.program.axes:
            assert sent(new, batch) == sent(fmapper.shard(model, mesh, "model"), batch)
        np.testing.assert_allclose(
            jax.jit(logits)(new, batch), logits(model, ids), rtol=1e-5, atol=1e-5
        )


def check_experts_in_other_forms() -> None:
    """Experts in a loop, as products of each token's own, and of attention: all give the same."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    torch.manual_seed(0)
    loop, batched = mixtral(layers=1), mixtral(layers=1)
    loop.config._experts_implementation = "eager"
    batched.config._experts_implementation = "batched_mm"
    own = {n: size for n, size in SIZES.items() if n != "num_attention_heads"}
    config = JetMoeConfig(**own | {"num_hidden_layers": 1}, kv_channels=8, num_local_experts=4)
    features = {"*.gate_up_proj": (None, "model"), "*.down_proj": (None, None, "model")}
    mesh = mesh_of(AxisType.Auto)
    batch = fmapper.shard(IDS, mesh, ("data",))
    packed = {"*.kv_proj.weight": ("model",), "mlp.input_linear.weight": (None, "model")}
    jetmoe = JetMoeForCausalLM(config).eval()
    for module, rules in ((loop, features), (batched, features), (jetmoe, packed)):
        model = convert(module, check=False)
        new = fmapper.shard(model, mesh, rules)
        assert any(isinstance(array, PackedArray) for array in new.params.values())
        want = jax.jit(logits)(model, IDS)
        got = jax.jit(logits)(new, batch)
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)
