"""A model on four processes, of JAX or of torch: divided, trained for a step, saved, loaded.

The processes talk over loopback. On a cluster they are started by its launcher, with the address
of the first and their numbers, and the rest stays: each has its own parts, reads and writes those
alone, and the checkpoint that they write is one file, which any mesh of either framework reads.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fmapper
from fmapper.meshes import Sharding

COUNT = 4
# Of two layers the first is divided by its outputs, the second by its inputs; torch has weights as
# (outputs, inputs). What is not named is in every process.
RULES = {"0": ("model",), "2.weight": (None, "model")}
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def module():
    """Two layers of torch, the same in every process."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def in_jax(rank, port, folder):
    """Takes a step in JAX, and saves the parameters."""
    import jax
    import torch
    from jax.sharding import AxisType

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", COUNT, rank)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    model = fmapper.convert(module(), "jax", (torch.ones(8, 8),))
    model, x = fmapper.shard(model, mesh, RULES), fmapper.shard(X, mesh, ("data",))

    @jax.jit
    def step(params, x):
        loss, gradients = jax.value_and_grad(
            lambda params: (model.replace(params=params)(x) ** 2).mean()
        )(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    loss, params = step(model.params, x)
    fmapper.save(params, folder / "jax.safetensors")
    like = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}
    flat = jax.make_mesh((COUNT,), ("model",), axis_types=(AxisType.Auto,))
    again = fmapper.load(folder / "jax.safetensors", like=like, sharding=Sharding(flat, RULES))
    part = again["0.weight"].addressable_shards[0].data.shape
    return float(loss), part


def in_torch(rank, port, folder):
    """Does the same in torch."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication

    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=COUNT, init_method=address)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    net, x = fmapper.shard(module(), mesh, RULES), fmapper.shard(X, mesh, ("data",))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with implicit_replication():
        loss = (net(x) ** 2).mean()
        loss.backward()
        optimizer.step()
    fmapper.save(net, folder / "torch.safetensors")
    flat = init_device_mesh("cpu", (COUNT,), mesh_dim_names=("model",))
    like = module().to("meta")
    again = fmapper.load(folder / "torch.safetensors", like=like, sharding=Sharding(flat, RULES))
    part = tuple(again[0].weight.to_local().shape)
    total = loss.full_tensor().item()
    torch.distributed.destroy_process_group()
    return total, part


def run(framework, folder):
    """Starts the processes and returns what the first of them prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    commands = [
        [sys.executable, __file__, "--one", framework, str(rank), str(port), str(folder)]
        for rank in range(COUNT)
    ]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return outputs[0]


def main():
    """Runs the four processes in each framework, and compares what they have saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    one = parser.parse_args().one
    if one:
        framework, rank, port, folder = one
        call = {"jax": in_jax, "torch": in_torch}[framework]
        loss, part = call(int(rank), int(port), Path(folder))
        print(f"{framework}: loss {loss:.6f}, each process has {part} of (32, 8)")
        return
    with tempfile.TemporaryDirectory() as folder:
        for framework in ("jax", "torch"):
            print(run(framework, Path(folder)).splitlines()[-1])
        saved = [fmapper.load(Path(folder) / f"{name}.safetensors") for name in ("jax", "torch")]
        for name in saved[0]:
            one, other = (checkpoint[name].read() for checkpoint in saved)
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        print(f"both have saved the same {len(saved[0])} arrays")


if __name__ == "__main__":
    main()
