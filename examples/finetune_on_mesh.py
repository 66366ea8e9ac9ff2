"""A Hugging Face folder, fine-tuned in JAX on a mesh of data and model, stopped and resumed.

The folder has a small Llama with random weights; with the folder of a real one nothing else
changes. Each device reads its own part of the weights. A step adds up the gradients of several
small batches, and the activations of a batch are computed again for its gradients, not kept.

The devices are eight parts of this CPU, which XLA makes when it is told so before JAX starts; on a
machine with several GPUs or TPUs the two lines about the environment go.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import AxisType
from transformers import LlamaConfig, LlamaForCausalLM

import fmapper
from fmapper.meshes import Sharding

TEXT = np.frombuffer(__doc__.encode(), np.uint8).astype(np.int32)
ROWS, LENGTH, BATCHES = 4, 24, 2  # of a small batch; small batches of a step


def write_folder(folder):
    """Writes the folder of a model, as `save_pretrained` does."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def batches(step):
    """Returns the tokens of a step, of shape (batches, rows, length + 1)."""
    random = np.random.default_rng(step)  # by its number, so that a resumed run reads the same
    starts = random.integers(0, len(TEXT) - LENGTH - 1, (BATCHES, ROWS, 1))
    return TEXT[starts + np.arange(LENGTH + 1)]


def load_model(folder, mesh):
    """Loads the model, each device its part, and divided as transformers' own plan says."""
    example = {"input_ids": np.zeros((ROWS, LENGTH), np.int32), "use_cache": False}
    return fmapper.from_pretrained(
        folder, "jax", sharding=Sharding(mesh, "model"), example_kwargs=example
    )


def make_step(model, optimizer):
    """Returns a compiled step: parameters, optimizer state and tokens -> new ones and the loss."""

    @jax.checkpoint
    def loss(params, tokens):
        logits = model.replace(params=params)(input_ids=tokens[:, :-1], use_cache=False)["logits"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def step(params, state, tokens):
        def add(total, batch):
            found = jax.value_and_grad(loss)(params, batch)
            return jax.tree.map(lambda a, b: a + b / BATCHES, total, found), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (value, gradients), _ = jax.lax.scan(add, zeros, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def train(model, optimizer, mesh, run, steps):
    """Trains from the checkpoint of a run, or from the start; returns losses and parameters."""
    params, state, first = model.params, optimizer.init(model.params), 0
    if run.exists():
        like = {"params": params, "state": state, "step": 0}
        saved = fmapper.load(run, like=like)  # each device its part, as these lie
        params, state, first = saved["params"], saved["state"], saved["step"]
    step = make_step(model, optimizer)
    losses = []
    for at in range(first, steps):
        tokens = fmapper.shard(batches(at), mesh, (None, "data"))
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    fmapper.save({"params": params, "state": state, "step": steps}, run)
    return losses, params


def main():
    """Trains in one go, and stopped and resumed; both must end with the same parameters."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    with tempfile.TemporaryDirectory() as place:
        folder, root = Path(place) / "llama", Path(place)
        write_folder(folder)
        model = load_model(folder, mesh)
        weight = model.params["model.layers.0.mlp.up_proj.weight"]
        part = weight.addressable_shards[0].data
        print(f"up_proj {weight.shape}, of which a device has {part.shape}")
        optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 5e-3, 2, 12))
        losses, whole = train(model, optimizer, mesh, root / "whole.safetensors", 12)
        train(model, optimizer, mesh, root / "run.safetensors", 6)
        rest, resumed = train(model, optimizer, mesh, root / "run.safetensors", 12)
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after 12 steps")
    assert losses[-1] < losses[0] - 0.5
    assert rest == losses[6:]
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)
    print("stopped after 6 steps and resumed: the same losses and parameters")


if __name__ == "__main__":
    main()
