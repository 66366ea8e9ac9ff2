"""A user's program that calls every public function, for mypy --strict and pyright; never run.

`test_types.py` sees to it that both find nothing to say, and that no public name is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_type

import jax
import numpy as np
import torch

import fmapper
from fmapper import KeyPath
from fmapper.checkpoints import Checkpoint
from fmapper.generation import Generator
from fmapper.programs import Program
from fmapper.sync import apply_delta, save_delta
from fmapper_adapters.flax import FlaxModel, LinenModel
from fmapper_adapters.jax import JaxModel
from fmapper_adapters.torch import TorchModel

Host = np.ndarray[tuple[int], np.dtype[np.float64]]


@fmapper.functor
@dataclass
class Dense:
    w: Any
    b: Any

    def __call__(self, x: Any) -> Any:
        xp = fmapper.array_namespace(x)
        return xp.tanh(x @ self.w + self.b)


@fmapper.functor(children=("dense",), trainable=("dense",), static=(), repr=True)
class Model:
    def __init__(self, dense: Dense) -> None:
        self.dense = dense


@fmapper.leaf
class Tokenizer: ...


def double(x: Any) -> Any:
    return 2 * x


def named(path: KeyPath, x: Any) -> str:
    return f"{path}: {x}"


def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = (fmapper.fmap(double, x) + model.dense(x)).sum()
    return value


def movers(model: Model, array: Host, tensor: torch.Tensor, module: torch.nn.Linear) -> None:
    assert_type(fmapper.to_cpu(model), Model)
    assert_type(fmapper.to_gpu(model, strict=True, copy=None), Model)
    assert_type(fmapper.to_device("cuda:1", dtype="bfloat16"), fmapper.Mover)
    assert_type(fmapper.to_device("cuda:1")(module), torch.nn.Linear)
    assert_type(fmapper.to_torch(model, device="cpu", report=print), Model)
    assert_type(fmapper.to_jax(model, dtype="bfloat16"), Model)
    assert_type(fmapper.to_numpy(model), Model)
    assert_type(fmapper.to_torch(array), torch.Tensor)
    assert_type(fmapper.to_jax(tensor), jax.Array)
    assert_type(fmapper.to_cpu(array), Host)
    assert_type(fmapper.to_torch({"x": array}), dict[str, torch.Tensor])
    assert_type(fmapper.to_torch([array]), list[torch.Tensor])
    assert_type(fmapper.to_torch((array, array)), tuple[torch.Tensor, ...])
    assert_type(fmapper.to_torch({"a": model}), dict[str, Model])
    assert_type(fmapper.to_torch((model, array)), tuple[Model, Host])
    half = fmapper.to_torch(dtype="float16")
    assert_type(half(array), torch.Tensor)
    assert_type(half(model), Model)
    assert_type(fmapper.cast(model, {"*": "bfloat16", "*norm*": "float32"}), Model)
    assert_type(fmapper.cast(array, "float32"), Host)
    assert_type(fmapper.place(model, {"dense": "cpu", Dense: fmapper.keep}), Model)
    assert_type(fmapper.Placement({"*": "cpu"}, strict=False)(model), Model)
    assert_type(fmapper.move_(module, fmapper.to_gpu), torch.nn.Linear)
    loader = fmapper.DeviceLoader([(array, array)], fmapper.to_torch, prefetch=2)
    for x, y in loader:
        print(x, y, len(loader))
    found = fmapper.plan(fmapper.to_gpu, model)
    assert_type(found, fmapper.Plan)
    print(found.plot(depth=2).get_label())
    print(found, found.nbytes, [leaf.path for leaf in found.refused])


def trees(model: Model, array: Host) -> None:
    assert_type(fmapper.fmap(fmapper.to_jax, model), Model)
    assert_type(fmapper.fmap(fmapper.to_jax, array), jax.Array)
    assert_type(fmapper.fmap(fmapper.to_torch, {"x": array}), dict[str, torch.Tensor])
    assert_type(fmapper.fmap(fmapper.to_torch, [array]), list[torch.Tensor])
    assert_type(fmapper.fmap(fmapper.to_torch, (array, array)), tuple[torch.Tensor, ...])
    assert_type(fmapper.fmap(fmapper.to_torch, {"a": model}), dict[str, Model])
    assert_type(fmapper.fmap(double, model), Model)
    assert_type(fmapper.fmap(double, {"a": 1}, {"a": 2}, cache=None), dict[str, Any])
    assert_type(fmapper.fmap_with_path(named, model, is_leaf=lambda path, _: len(path) > 2), Model)
    assert_type(fmapper.fmap_with_path(named, [1, 2]), list[Any])
    print(fmapper.fmap(double, model, walk=fmapper.collecting_walk))
    print(fmapper.fmap(double, model, walk=fmapper.default_walk, prune=None))
    print(fmapper.fmap(double, model, walk=fmapper.structural_walk))
    print(fmapper.fmapstructure(double, model), fmapper.fmapstructure_with_path(named, model))
    print(fmapper.fleaves(model), fmapper.fcollect(model), fmapper.is_leaf(model))
    assert_type(fmapper.rebuild(model, fmapper.children(model)), Model)
    assert_type(fmapper.set_path(model, "dense.w", 0), Model)
    print(fmapper.get_path(model, KeyPath("dense", "w")), fmapper.has_path(model, "dense"))
    print(fmapper.fmap(lambda p, g: p if isinstance(g, fmapper.NoGradient) else g, model, model))
    print(fmapper.no_gradient)


def states(model: Model, module: torch.nn.Linear) -> None:
    held = fmapper.state(model)
    assert_type(held, dict[str, Any])
    filled, transferred = fmapper.transfer(held, model)
    assert_type(filled, Model)
    assert_type(transferred, fmapper.TransferReport)
    assert_type(fmapper.load_state(model, held, strict=False), Model)
    assert_type(fmapper.materialize(module, held, device="cpu"), torch.nn.Linear)
    vector, rebuild = fmapper.destructure(model)
    assert_type(rebuild(2 * vector), Model)
    print(fmapper.trainables(model), fmapper.summary(model, depth=2).nbytes)


def transforms(model: Model, x: torch.Tensor) -> None:
    value, gradient = fmapper.value_and_grad(loss)(model, x)
    assert_type(value, torch.Tensor)
    assert_type(gradient, Model)
    assert_type(fmapper.grad(loss)(model, x), Model)
    print(fmapper.grad(loss, argnums=(0, 1))(model, x))
    assert_type(fmapper.jit(loss)(model, x), torch.Tensor)
    assert_type(fmapper.vmap(loss, in_axes=(None, 0))(model, x), torch.Tensor)

    @fmapper.jit(static_argnums=1)
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return x**n

    assert_type(power(x, 2), torch.Tensor)


def programs(module: torch.nn.Linear, x: torch.Tensor, path: Path, mesh: Any) -> None:
    model = fmapper.convert(module, "jax", (x,), dynamic_shapes="auto", precision=None)
    assert_type(model, JaxModel)
    assert_type(fmapper.convert(module, "flax", (x,), {}, train=True, check=False), FlaxModel)
    assert_type(fmapper.convert(module, "nnx", (x,)).layers[0].weight, Any)
    assert_type(fmapper.convert(module, "linen", (x,), precision=None), LinenModel)
    assert_type(fmapper.convert(module, "nnx", (x,), structure=True, scan=True), Any)
    assert_type(fmapper.convert(module, "equinox", (x,), structure=True), Any)
    assert_type(fmapper.convert(jax.numpy.tanh, "torch", (x,), structure=True), Any)
    assert_type(fmapper.convert(module, "flax", (x,), structure=len(x) > 1), Any)
    assert_type(fmapper.convert(jax.numpy.tanh, "torch", (x,), fused=False), TorchModel)
    assert_type(fmapper.convert((jax.numpy.tanh, {"w": x}), "torch", [x]), TorchModel)
    assert_type(fmapper.convert({"w": x}, "jax"), dict[str, torch.Tensor])
    report = fmapper.verify(module, model, x, example_kwargs={}, rtol=1e-3, layers=True)
    assert_type(report, fmapper.Report)
    print(report.plot().get_label(), [layer.path for layer in report.layers])
    print(report.ok, report.first, [output.error for output in report.outputs])
    fmapper.record_goldens(module, (x,), path)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trained = fmapper.convert_training(module, optimizer, "flax", (x,))
    assert_type(trained.model, Any)
    adapter = fmapper.load_adapter(path)
    assert_type(adapter({"weight": x}), dict[str, Any])
    fmapper.save_adapter(adapter, path)
    assert_type(fmapper.generator(module, max_length=8), Generator)
    assert_type(fmapper.source(module, "flax", (x,)), str)
    assert_type(fmapper.shard(module, mesh, {"weight": ("model", None)}), torch.nn.Linear)
    assert_type(fmapper.from_pretrained(path, "jax"), JaxModel)
    assert_type(fmapper.from_pretrained(path, "flax", dtype="bfloat16"), FlaxModel)
    assert_type(fmapper.from_pretrained("org/name", "nnx", structure=True), Any)
    fmapper.save_pretrained(model, path, like=path)
    assert_type(fmapper.Sync(model, module)(), torch.nn.Linear)
    save_delta(path, module, path)
    assert_type(apply_delta(module, path, path), torch.nn.Linear)
    assert_type(apply_delta(path, path), Checkpoint)
    fmapper.save(module, path)
    assert_type(fmapper.load(path, like=module), torch.nn.Linear)
    assert_type(fmapper.load(path), Any)
    assert_type(fmapper.load(path, to="torch"), Any)
    assert_type(fmapper.load(path, format="npz"), Checkpoint)
    fmapper.save_program(model.as_program(), path, to="jax")
    program = fmapper.load_program(path)
    assert_type(program, Program)
    assert_type(fmapper.convert(program, "torch"), TorchModel)

    @fmapper.lowering("mylib::twice", to="jax")
    def twice(x: jax.Array) -> jax.Array:
        return 2 * x

    assert_type(twice(model.params["weight"]), jax.Array)


def chosen(module: torch.nn.Linear, to: Literal["jax", "torch"]) -> None:
    assert_type(fmapper.convert(module, to, (1,)), JaxModel | TorchModel)


def devices(model: Model, batches: Iterator[Mapping[str, Host]]) -> Callable[[], None]:
    for device in fmapper.devices():
        assert_type(device, fmapper.Device)
        assert_type(fmapper.device_info(device), fmapper.DeviceInfo)
    assert_type(fmapper.get_device(model), fmapper.Device | None)
    with fmapper.use_backend("jax"):
        print(fmapper.to_gpu(next(batches)))
    measured = fmapper.profile(model, np.ones(3), accelerator=fmapper.Accelerator("A", {}, 1, 1))
    assert_type(measured, fmapper.Profile)
    return lambda: print(measured)


def settings() -> None:
    assert_type(fmapper.settings.progress, bool)
    fmapper.settings.progress = False
    fmapper.settings.full_tracebacks = True


def types_of_results() -> tuple[type[fmapper.Summary], type[fmapper.Report]]:
    return fmapper.Summary, fmapper.Report
