"""Checks of `fmapper.shard` on eight devices of JAX; `meshes/test_sharding.py` has them run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen
import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import fmapper
from fmapper.meshes import Sharding

FOLDER = Path()
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


RULES = {"up": ("model",), "down.weight": (None, "model")}


def specs(tree: Any) -> dict[str, Any]:
    return {name: x.sharding.spec for name, x in fmapper.state(tree).items()}


def check_a_converted_model_and_its_optimizer() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 8)
    model = fmapper.convert(net, "jax", (x,))
    optimizer = optax.adam(0.1)
    state = optimizer.init(model.params)
    new, new_state = fmapper.shard((model, state), MESH, RULES)
    assert new.params["up.weight"].sharding.is_equivalent_to(NamedSharding(MESH, P("model")), 2)
    assert new.params["up.bias"].sharding.spec == P("model")
    assert new.params["down.weight"].sharding.spec == P(None, "model")
    assert new.params["down.bias"].sharding.spec == P()
    assert new_state[0].mu["down.weight"].sharding.spec == P(None, "model")
    assert new_state[0].nu["up.bias"].sharding.spec == P("model")
    assert new_state[0].count.sharding.spec == P()
    assert not isinstance(model.params["up.weight"].sharding, NamedSharding)  # as it was
    batch = fmapper.shard(x.numpy(), MESH, ("data",))
    assert batch.sharding.spec == P("data")

    def step(model: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (model.replace(params=params)(x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(model.params)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(model.params, updates)

    want, wanted = jax.jit(step)(model, state, x.numpy())
    got, given = jax.jit(step)(new, new_state, batch)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for name, array in wanted.items():
        np.testing.assert_allclose(given[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def check_each_device_has_its_part_alone_and_nothing_of_the_source() -> None:
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    new = fmapper.shard({"w": array}, MESH, {"w": ("data", "model")})["w"]
    array[:] = 0
    assert new.addressable_shards[0].data.shape == (2, 4)
    np.testing.assert_array_equal(np.asarray(new), np.arange(64.0).reshape(8, 8))


def check_what_lies_there_is_given_back() -> None:
    once = fmapper.shard({"w": np.ones((8, 8), np.float32)}, MESH, {"w": ("data",)})
    again = fmapper.shard(once, MESH, {"w": ("data",)})
    assert again["w"] is once["w"]
    other = fmapper.shard(once, MESH, {"w": (None, ("data", "model"))})
    assert other["w"].sharding.spec == P(None, ("data", "model"))


def check_a_state_goes_where_the_old_arrays_lie() -> None:
    torch.manual_seed(0)
    net, other, x = Net(), Net(), torch.randn(8, 8)
    wanted = fmapper.state(other)
    whole = fmapper.to_jax(wanted)
    elsewhere = fmapper.shard(whole, MESH, {})
    for dtype in (torch.float32, torch.bfloat16):
        args = (x.to(dtype),)
        for framework in ("jax", "flax"):
            new = fmapper.shard(fmapper.convert(net.to(dtype), framework, args), MESH, RULES)
            own = getattr(new, "params", new)
            for state in (wanted, fmapper.to_numpy(wanted), whole, elsewhere):
                filled = fmapper.load_state(own, state)
                assert specs(filled) == specs(own)
                for name, array in fmapper.state(filled).items():
                    assert array.dtype == str(dtype).removeprefix("torch.")
                    cast = np.asarray(whole[name].astype(array.dtype))
                    np.testing.assert_array_equal(np.asarray(array), cast)
    given = np.ones((8, 8), np.float32)
    filled = fmapper.load_state({"w": elsewhere["up.weight"][:8]}, {"w": given})
    given[:] = 0
    np.testing.assert_array_equal(np.asarray(filled["w"]), 1)
    new.load_state_dict(wanted)
    assert new.up.weight.get_value().sharding.spec == P("model")
    cast = whole["up.weight"].astype("bfloat16")
    np.testing.assert_array_equal(new.up.weight.get_value(), cast)
    narrow = fmapper.to_jax(fmapper.state(new), dtype="float16")
    with pytest.raises(fmapper.LossyCastError, match=r"up\.bias"):
        fmapper.load_state(narrow, {**wanted, "up.bias": torch.full([16], 1e30)})


def check_values_that_cannot_be_divided_like_the_old_ones_are_refused() -> None:
    tree = fmapper.shard({"w": np.zeros((8, 8), np.float32)}, MESH, {"w": ("data",)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmapper.moves.onto_mesh.place_as", lambda old, new: None)
        with pytest.raises(fmapper.PlacementError, match=r"^w: jax cannot divide .* unevenly"):
            fmapper.load_state(tree, {"w": np.ones((8, 8), np.float32)})


def check_arrays_in_large_pages_stay_on_their_device() -> None:
    from fmapper_adapters.jax.arrays.host import in_large_pages

    device = jax.devices()[3]
    with jax.default_device(device):
        array = jax.numpy.arange(8.0)
    for given in (array, jax.device_put(array, device)):
        made = in_large_pages({"x": lambda given=given: given})["x"]  # type: ignore[misc]
        assert made.devices() == {device}
        assert made.committed is given.committed
        np.testing.assert_array_equal(made, given)


def check_ties_stay_and_must_be_of_one_mind() -> None:
    w = np.ones((8, 8), np.float32)
    tree = {"embed": {"weight": w}, "head": {"weight": w}}
    new = fmapper.shard(tree, MESH, {"embed": ("model",)})
    assert new["embed"]["weight"] is new["head"]["weight"]
    with pytest.raises(fmapper.PlacementError, match="are the same array, but the rule 'embed'"):
        fmapper.shard(tree, MESH, {"embed": ("model",), "head": (None, "model")})


def check_uneven_sizes_are_refused_by_name_or_left_whole() -> None:
    tree = {"a": np.ones((8, 6), np.float32), "b": np.ones(5, np.float32)}
    with pytest.raises(fmapper.PlacementError) as error:
        fmapper.shard(tree, MESH, {"*": ("data",)})
    assert "model.b, by the rule '*': dimension 0 of (5,) does not divide evenly by 4" in str(error)
    assert "model.a" not in str(error.value)
    new = fmapper.shard(tree, MESH, {"*": ("data",)}, uneven="replicate")
    assert specs(new) == {"a": P("data"), "b": P()}


def check_rules_that_cannot_be_followed() -> None:
    tree = {"up": {"weight": np.ones((8, 8)), "bias": np.ones(8)}}
    for rules, message in (
        ({"donw": ("model",)}, "'donw' matches no array"),
        ({"up": ("model",), "up.bias": ()}, "'up.bias' never applies"),
        ({"up": (None, "model")}, "model.up.bias, by the rule 'up'.*has 2 entries"),
        ({"up": ("tensr",)}, "'tensr' is neither an axis of the mesh"),
        ({"up.weight": ("model", "model")}, "'model' of the mesh more than once"),
        ({"up[0:2]": ("model",)}, r"\[0:2\]. matches no array"),
        ({3: ("model",)}, "path pattern or a class"),
        ("modl", "write rules as a dict"),
        ("model", "nothing in this tree specifies its sharding"),
    ):
        with pytest.raises(fmapper.PlacementError, match=message):
            fmapper.shard(tree, MESH, rules)
    with pytest.raises(fmapper.PlacementError, match="the mesh has no axis 'tp'"):
        fmapper.shard(tree, MESH, {"up": ("model",)}, names={"embed": "tp"})
    with pytest.raises(fmapper.PlacementError, match="the sizes of a mesh"):
        fmapper.shard(tree, {"model": 2}, {"up": ("model",)})
    with pytest.raises(TypeError, match="is not a mesh"):
        fmapper.shard(tree, "model", {"up": ("model",)})
    for undeclared, path in (({**tree, "own": Own(np.ones(8))}, "model.own"),
                             (Own(np.ones(8)), "model")):  # fmt: skip
        for rules in ((), {"up": ("model",)}):
            with pytest.raises(fmapper.NotAFunctorError, match=rf"^{path}: Own holds arrays in"):
                fmapper.shard(undeclared, MESH, rules)
    assert fmapper.shard({**tree, "own": Own(0)}, MESH, ())["own"].w == 0
    assert fmapper.shard({"state": ()}, MESH, ("data",)) == {"state": ()}


class Own:
    def __init__(self, w: Any) -> None:
        self.w = w


class Stack(Own):
    pass


fmapper.functor(Stack)


def check_stacks_classes_functions_keep_and_names() -> None:
    tree = {"scan": Stack(np.ones((3, 8, 4), np.float32)), "rest": np.ones(4, np.float32)}
    new = fmapper.shard(tree, MESH, {Stack: (..., "mlp", None), "rest": fmapper.keep},
                        names={"mlp": ("data", "model")})  # fmt: skip
    assert new["scan"].w.sharding.spec == P(None, ("data", "model"))
    assert new["rest"] is tree["rest"]
    new = fmapper.shard(tree, MESH, lambda name, x: (..., "model") if name == "scan.w" else None)
    assert specs(new) == {"scan.w": P(None, None, "model"), "rest": P()}


def check_axes_in_the_metadata_of_flax() -> None:
    init = flax.linen.initializers.lecun_normal()

    class Linen(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x: Any) -> Any:
            boxed = flax.linen.with_partitioning(init, ("embed", "mlp"))
            return flax.linen.Dense(8, kernel_init=boxed)(x)

    names = {"embed": None, "mlp": "model"}
    x = np.ones((2, 4), np.float32)
    variables = Linen().init(jax.random.key(0), x)
    new = fmapper.shard(variables, MESH, "model", names=names)
    assert specs(new) == {"params.Dense_0.kernel": P(None, "model"), "params.Dense_0.bias": P()}
    boxed = nnx.with_partitioning(init, ("embed", "mlp"), eager_sharding=False)
    module = nnx.Linear(4, 8, kernel_init=boxed, rngs=nnx.Rngs(0))
    new = fmapper.shard(module, MESH, "model", names=names)
    assert specs(new) == {"kernel": P(None, "model"), "bias": P()}
    for source in (module, (Linen(), variables)):
        back = fmapper.convert(fmapper.convert(source, "torch", (x,)), "jax", (torch.tensor(x),))
        kernel = next(n for n in back.program.axes if n.endswith("kernel"))
        assert back.program.axes[kernel] == ("embed", "mlp")
    back.save(FOLDER / "program.safetensors")
    assert fmapper.load_program(FOLDER / "program.safetensors").axes == back.program.axes


def check_the_plan_of_a_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    module = LlamaForCausalLM(config).eval()
    example = {"input_ids": torch.arange(16).reshape(2, 8), "use_cache": False}
    model = fmapper.convert(module, "flax", example_kwargs=example)
    new = fmapper.shard(model, MESH, "model")
    found = specs(new)
    assert found["model.layers.1.self_attn.k_proj.weight"] == P("model")
    assert found["model.layers.0.mlp.down_proj.weight"] == P(None, "model")
    assert found["model.norm.weight"] == P()
    assert found["lm_head.weight"] == P("model")
    plan = fmapper.plan(Sharding({"data": 4, "model": 2}, "model"), model)
    assert plan.devices == 8
    assert plan.nbytes == sum(x.nbytes for x in fmapper.state(model).values())
    own = {str(leaf.path): leaf for leaf in plan}
    weight = next(leaf for path, leaf in own.items() if "down_proj" in path)
    assert (weight.shard, weight.rule, weight.nbytes_per_device) == ((32, 32), "model", 4096)
    held = sum(x.addressable_shards[0].data.nbytes for x in fmapper.state(new).values())
    assert plan.nbytes_per_device == held
    assert "on each of 8 devices" in str(plan)
    refused = fmapper.plan(Sharding({"model": 5}, {"*": ("model",)}), {"w": np.ones(4)})
    assert "does not divide evenly by 5" in refused.refused[0].problem


def check_shapes_alone_and_meshes_without_devices() -> None:
    mesh = jax.sharding.AbstractMesh((8, 8), ("data", "model"))
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    new = fmapper.shard({"w": shape, "t": torch.ones(8, 8, device="meta")}, mesh,
                        {"*": ("data", "model")})  # fmt: skip
    assert new["w"].sharding.spec == P("data", "model")
    assert new["t"].shape == (8, 8)
    assert new["t"].sharding.mesh.shape == {"data": 8, "model": 8}
