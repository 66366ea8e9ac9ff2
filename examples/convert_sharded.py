"""A converted model on eight devices: parameters and batch sharded, one step of fine-tuning.

The devices are eight parts of this CPU, which XLA makes when it is told so before JAX starts; on a
machine with several GPUs or TPUs the line about XLA_FLAGS goes, and the rest stays.
"""

import argparse
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fmapper


class Block(torch.nn.Module):
    """A layer of a transformer, for inputs of shape (batch, length, 32)."""

    def __init__(self):
        """Random weights."""
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.up = torch.nn.Linear(32, 128)
        self.down = torch.nn.Linear(128, 32)

    def forward(self, x):
        """The outputs, of the shape of x."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


# How the parameters are divided along the axis `model`; torch has weights as (outputs, inputs).
# What is not named is on every device.
RULES = {
    "up": ("model",),
    "down.weight": (None, "model"),
    "attention.out_proj.weight": (None, "model"),
}


def main():
    """Converts, shards, takes one step on eight devices and on one, and compares."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    x, target = torch.randn(2, 16, 10, 32)
    module = Block().eval()
    model = fmapper.convert(module, "jax", (x,))
    assert fmapper.verify(module, model, x)

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    optimizer = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(params, state, x, target):
        def loss(params):
            return ((model.replace(params=params)(x) - target) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    # Committed arrays say where a program runs: there is nothing else to change.
    sharded = fmapper.shard(model, mesh, RULES).params
    batch = fmapper.shard((x.numpy(), target.numpy()), mesh, ("data",))
    on_eight, _, loss_on_eight = step(sharded, optimizer.init(sharded), *batch)

    alone = jax.device_put(model.params, jax.devices()[0])
    on_one, _, loss_on_one = step(alone, optimizer.init(alone), x.numpy(), target.numpy())

    weight = on_eight["up.weight"]
    print(f"up.weight {weight.shape} lies as {weight.sharding.spec} on {len(weight.devices())}")
    print(f"each device has {weight.addressable_shards[0].data.shape} of it")
    print(f"loss {loss_on_eight:.6f} on eight devices, {loss_on_one:.6f} on one")
    assert weight.sharding.spec == P("model")
    assert weight.addressable_shards[0].data.shape == (32, 32)
    worst = max(float(np.abs(np.asarray(on_eight[n]) - on_one[n]).max()) for n in on_one)
    print(f"after one step the parameters differ by no more than {worst:.1e}")
    assert worst < 1e-6


if __name__ == "__main__":
    main()
