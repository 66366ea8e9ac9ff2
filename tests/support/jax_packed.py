"""Checks of arrays that hold several side by side, on eight devices of JAX.

`meshes/test_packed.py` has them run.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fmapper
from fmapper.backends import PackedAxes
from fmapper.checkpoints import SourceFile
from fmapper.meshes import Sharding

FOLDER = Path()
KINDS = AxisType.Auto, AxisType.Explicit
SENT = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("


class Layer(torch.nn.Module):
    """An attention of four heads that share two keys, and a perceptron with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.both, self.down = torch.nn.Linear(16, 48), torch.nn.Linear(24, 16)
        self.norm, self.last = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        n, t, _ = x.shape
        y = self.qkv(x)
        q, k, v = (
            part.reshape(n, t, -1, 4).transpose(1, 2)
            for part in (y[..., :16], y[..., 16:24], y[..., 24:])
        )
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, 16))
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return self.last(x + self.down(torch.nn.functional.silu(gate) * up))


torch.manual_seed(0)
X = torch.randn(8, 3, 16)
NET = Layer()
MODEL = fmapper.convert(NET, "jax", (X,))
WANTED = MODEL(X.numpy())


def mesh_of(kind: AxisType = AxisType.Auto, shape: tuple[int, int] = (4, 2)) -> Any:
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


def sharded(mesh: Any, rules: Any = "derive") -> tuple[Any, Any]:
    return fmapper.shard(MODEL, mesh, rules), fmapper.shard(X.numpy(), mesh, ("data",))


def forward(model: Any, x: Any) -> Any:
    return model(x)


def gradient(model: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return (model.replace(params=params)(x) ** 2).mean()

    return jax.grad(loss)(model.params)


def sent(model: Any, x: Any) -> Counter[str]:
    text = jax.jit(forward).lower(model, x).compile().as_text()
    return Counter(re.findall(SENT, text))


def close(given: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(given), wanted, rtol=1e-5, atol=1e-5)


def equal(given: Any, wanted: Any) -> None:
    """Compares the arrays of two models by name, exactly."""
    given, wanted = (fmapper.state(fmapper.to_numpy(tree)) for tree in (given, wanted))
    assert given.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def check_nothing_moves() -> None:
    wanted = jax.jit(gradient)(MODEL, X.numpy())
    for kind in KINDS:
        mesh = mesh_of(kind)
        model, batch = sharded(mesh)
        plan = fmapper.plan(Sharding(mesh, "derive"), MODEL)
        assert (sorted(plan.sums), plan.moves) == (["down", "o"], ())
        assert "model in 3" in str(plan)
        for is_set in (False, True):
            with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
                assert sent(model, batch) == {"all-reduce": 2}, sent(model, batch)
                close(jax.jit(forward)(model, batch), WANTED)
                close(model(batch), WANTED)
                given = jax.jit(gradient)(model, batch)
                for name, array in wanted.items():
                    close(given[name], array)


def check_an_optimizer_follows() -> None:
    optimizer = optax.adam(0.1, eps=1e-3)

    def step(model: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(gradient(model, x), state)
        return model.replace(params=optax.apply_updates(model.params, updates)), state

    state = optimizer.init(MODEL.params)
    wanted = jax.jit(step)(*jax.jit(step)(MODEL, state, X.numpy()), X.numpy())
    for kind in KINDS:
        mesh = mesh_of(kind)
        for rules in ("derive", {"both": ("model",), "down.weight": (None, "model")}):
            model, own = fmapper.shard((MODEL, state), mesh, rules)
            assert own[0].mu["both.weight"].blocks.sharding.spec == P("model")
            batch = fmapper.shard(X.numpy(), mesh, ("data",))
            found = jax.jit(step)(*jax.jit(step)(model, own, batch), batch)
            for given, array in zip(
                fmapper.fleaves(found), fmapper.fleaves(wanted), strict=True
            ):  # fmt: skip
                close(given, array)


def last_result(model: Any, x: Any) -> Any:
    seen: list[Any] = []
    model.call((x,), observe=lambda _, result: seen.append(result))
    return seen[-1]


def check_the_arrays_are_those_of_the_model() -> None:
    for kind in KINDS:
        model, batch = sharded(mesh_of(kind))
        array = model.params["both.weight"]
        part = NET.both.weight.detach().numpy()
        for shard in array.blocks.addressable_shards:
            at = 12 * (shard.index[0].start or 0)
            own = np.concatenate([part[at : at + 12], part[24 + at : 36 + at]])
            np.testing.assert_array_equal(shard.data, own[None])
        np.testing.assert_array_equal(np.asarray(array), part)
        np.testing.assert_array_equal(jax.numpy.asarray(array), part)
        for same in (model, copy.deepcopy(model), copy.copy(model),
                     fmapper.to_jax(model, device="cpu:0"), pickle.loads(pickle.dumps(model)),
                     fmapper.to_jax(fmapper.to_torch(model.params)),
                     MODEL.load_state_dict(model.state_dict())):  # fmt: skip
            equal(getattr(same, "params", same), MODEL.params)
        assert isinstance(fmapper.to_jax(model, device="cpu:0").params["both.bias"], jax.Array)
        narrow = fmapper.to_jax(model, dtype="bfloat16")
        assert narrow.params["both.weight"].sizes == (24, 24)
        equal(narrow.params, fmapper.to_jax(MODEL, dtype="bfloat16").params)
        assert fmapper.summary(model).nbytes == fmapper.summary(MODEL).nbytes
        close(last_result(model, batch), WANTED)


def check_a_model_of_flax() -> None:
    def gradient(model: Any, x: Any) -> Any:
        return nnx.grad(lambda model: (model(x) ** 2).mean())(model)

    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, gradient(model, x))

    for kind in KINDS:
        mesh, net = mesh_of(kind), fmapper.convert(NET, "flax", (X,))
        model, batch = fmapper.shard(net, mesh, "derive"), fmapper.shard(X.numpy(), mesh, ("data",))
        assert fmapper.plan(Sharding(mesh, "derive"), net).moves == ()
        assert fmapper.state(model)["both.weight"].sizes == (24, 24)
        assert model.both.weight.shape == (2, 24, 16)
        graph, state = nnx.split(model)
        call = jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)
        text = call.lower(graph, state, batch).compile().as_text()
        assert Counter(re.findall(SENT, text)) == {"all-reduce": 2}
        for call in (forward, nnx.jit(forward)):
            close(call(model, batch), WANTED)
        wanted = fmapper.state(nnx.jit(gradient)(net, X.numpy()))
        for name, array in fmapper.state(nnx.jit(gradient)(model, batch)).items():
            close(array, wanted[name])
        for one, x in ((net, X.numpy()), (model, batch)):
            optimizer = nnx.Optimizer(one, optax.adam(0.1, eps=1e-3), wrt=nnx.Param)
            nnx.jit(step)(one, optimizer, x)
            nnx.jit(step)(one, optimizer, x)
        for name, array in fmapper.state(net).items():
            close(fmapper.state(model)[name], array)
        path = FOLDER / "flax.safetensors"
        model.save(path)
        for same in (
            type(model).load(path),
            copy.deepcopy(model),
            fmapper.to_jax(model, device="cpu:0"),
        ):
            equal(same, model)
        equal(fmapper.load(path, like=model), model)
        model.load_state_dict(NET.state_dict())
        assert model.both.weight.shape == (2, 24, 16)
        equal(fmapper.state(model), fmapper.state(NET))
        close(nnx.jit(forward)(model, batch), WANTED)


def check_any_mesh_to_any_other() -> None:
    for kind in KINDS:
        model, _ = sharded(mesh_of(kind))
        for rules in ("derive", {"both": ("data",)}, {"both.weight": (None, "data")}, {}):
            mesh = mesh_of(kind, (2, 4))
            new, batch = (
                fmapper.shard(model, mesh, rules),
                fmapper.shard(X.numpy(), mesh, ("data",)),
            )
            equal(new, MODEL)
            close(jax.jit(forward)(new, batch), WANTED)
        assert isinstance(new.params["both.weight"], jax.Array)


def check_checkpoints() -> None:
    mesh = mesh_of()
    model, batch = sharded(mesh)
    path = FOLDER / "packed.safetensors"
    fmapper.save(model, path)
    equal(dict(fmapper.load(path)), fmapper.state(MODEL))
    like = fmapper.to_jax(MODEL, device="meta")
    new = fmapper.load(path, like=like, sharding=Sharding(mesh, "derive"))
    hollow = fmapper.shard(like, mesh, "derive")
    with pytest.raises(fmapper.ProgramInputError, match=r"qkv\.weight has a shape but no values"):
        hollow.call((batch,))
    for filled in (new, fmapper.load(path, like=model), fmapper.load(path, like=hollow),
                   fmapper.materialize(like, fmapper.state(MODEL),
                                       sharding=Sharding(mesh, "derive"))):  # fmt: skip
        assert filled.params["both.weight"].sizes == (24, 24)
        equal(filled, MODEL)
        assert sent(filled, batch) == {"all-reduce": 2}
        close(jax.jit(forward)(filled, batch), WANTED)
    model.save(FOLDER / "program.safetensors")
    equal(type(model).load(FOLDER / "program.safetensors"), MODEL)


def check_each_part_is_read_once() -> None:
    array = np.arange(1 << 20, dtype=np.float32).reshape(2048, 512)
    path, mesh = FOLDER / "large.safetensors", mesh_of()
    fmapper.save({"w": array}, path)
    count, own = [0], SourceFile.read_into

    def read_into(file: Any, handle: int, out: memoryview, offset: int) -> None:
        count[0] += len(out)
        own(file, handle, out, offset)

    SourceFile.read_into = read_into
    like = {"w": jax.ShapeDtypeStruct(array.shape, array.dtype)}
    try:
        for axes in (
            (PackedAxes(["model"], [512, 1536]),),
            (None, PackedAxes(["model"], [256] * 2)),
        ):
            count[0] = 0
            new = fmapper.load(path, like=like, sharding=Sharding(mesh, {"w": axes}))["w"]
            assert array.nbytes <= count[0] <= 1.02 * array.nbytes
            np.testing.assert_array_equal(np.asarray(new), array)
    finally:
        SourceFile.read_into = own


def check_of_arrays_that_belong_together_some_are_packed() -> None:
    mesh = mesh_of()
    model, batch = sharded(mesh, {"both.weight": ("model",), "down.weight": (None, "model")})
    assert isinstance(model.params["both.bias"], jax.Array)
    assert sent(model, batch)["all-reduce"] == 1
    close(jax.jit(forward)(model, batch), WANTED)
    both = {"both.weight": ("model",), "both.bias": ("data",)}  # in other numbers of blocks
    model, batch = sharded(mesh, both)
    close(jax.jit(forward)(model, batch), WANTED)


def check_rules_by_hand() -> None:
    mesh = mesh_of()
    array = np.arange(12, dtype=np.float32)
    new = fmapper.shard({"w": array}, mesh, {"w": (PackedAxes(["model"], [4, 8]),)})["w"]
    np.testing.assert_array_equal(np.asarray(new), array)
    first = next(s for s in new.blocks.addressable_shards if not s.index[0].start)
    np.testing.assert_array_equal(first.data, [[0, 1, 4, 5, 6, 7]])
    for sizes in ([4, 4], [3, 9]):
        with pytest.raises(fmapper.PlacementError, match="must add up to it, and divide evenly"):
            fmapper.shard({"w": array}, mesh, {"w": (PackedAxes(["model"], sizes),)})
