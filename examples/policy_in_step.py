"""Policy gradient: a trainer in torch, and a sampler in JAX that gets its weights after each step.

    python examples/policy_in_step.py             four processes, FSDP2 and a sampler on two devices
    python examples/policy_in_step.py --apart     a trainer and a sampler, over shared memory

The policy is a small Llama that writes numbers; the reward of a text is its share of even ones. It
rises from a half, as the sampler is in step with the trainer.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RANKS, STEPS = 4, 30
ROWS, LENGTH, VOCABULARY = 16, 8, 16
PROMPTS = [[1]] * ROWS


def policy():
    """A Llama of two layers with random weights, the same in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, pad_token_id=0, **sizes, **heads)
    return LlamaForCausalLM(config).eval()


def sampler(devices=1):
    """A generator in JAX with the policy's first weights, divided among devices."""
    import jax

    import fmapper

    sizes = {"max_length": 1 + LENGTH, "batch": ROWS, "max_new_tokens": LENGTH}
    generator = fmapper.generator(policy(), to="jax", do_sample=True, **sizes)
    if devices == 1:
        return generator
    mesh = jax.make_mesh((devices,), ("model",))
    rules = {"o_proj.weight": (None, "model"), "*_proj.weight": ("model",), "*": ()}
    return fmapper.shard(generator, mesh, rules)


def reward(tokens):
    """The share of even numbers in each text."""
    return (tokens[:, 1:] % 2 == 0).mean(1)


def train(model, optimizer, tokens):
    """Makes texts with more reward than the others likelier."""
    import torch

    texts, gain = torch.tensor(tokens), torch.tensor(reward(tokens))
    logits = model(texts[:, :-1]).logits.log_softmax(-1)
    chosen = logits.gather(-1, texts[:, 1:, None]).squeeze(-1).sum(1)
    loss = -((gain - gain.mean()) * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def together(rank, port):
    """A process of four that trains a quarter of the weights, and samples with all of them."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import fmapper

    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=RANKS, init_method=f"tcp://127.0.0.1:{port}"
    )
    model, generator = policy(), sampler(devices=2)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sync = fmapper.Sync(model, generator)
    for step in range(STEPS):
        tokens = np.asarray(generator(PROMPTS, key=RANKS * step + rank))
        if rank == 0:
            print(f"step {step:2}  reward {reward(tokens).mean():.2f}")
        train(model, optimizer, tokens)
        sync()
    if rank == 0:
        print(f"the last sync sent {sync.stats.sent} of {sync.plan.sent} bytes from here")
    torch.distributed.destroy_process_group()


def trainer_apart(path):
    """Trains on the texts that come, and gives the weights away."""
    import torch

    import fmapper
    from fmapper.sync import Folder

    model, texts = policy(), Folder(path / "texts", 0, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sync = fmapper.Sync(model, None, transport=Folder(path / "weights", 0, 2))
    for step in range(STEPS):
        received = np.frombuffer(texts.receive(1), np.int64)
        tokens = received.reshape(ROWS, 1 + LENGTH)
        print(f"step {step:2}  reward {reward(tokens).mean():.2f}")
        train(model, optimizer, tokens)
        sync()


def sampler_apart(path):
    """Samples, and gets weights."""
    import fmapper
    from fmapper.sync import Folder

    generator, texts = sampler(), Folder(path / "texts", 1, 2)
    sync = fmapper.Sync(None, generator, transport=Folder(path / "weights", 1, 2))
    for step in range(STEPS):
        tokens = np.asarray(generator(PROMPTS, key=step)).astype(np.int64)
        texts.send(memoryview(tokens.tobytes()), 0)
        sync()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--apart", action="store_true", help="two processes over shared memory")
    parser.add_argument("--process", type=int, help="the number of this process")
    parser.add_argument("--place", help="where the processes meet")
    given = parser.parse_args()
    roles = [trainer_apart, sampler_apart] if given.apart else [together] * RANKS
    if given.process is not None:
        if given.apart:
            roles[given.process](Path(given.place))
        else:
            together(given.process, int(given.place))
        return
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        socket.socket() as free,
    ):
        free.bind(("127.0.0.1", 0))
        place = folder if given.apart else str(free.getsockname()[1])
        free.close()
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        command = [sys.executable, __file__, *sys.argv[1:], "--place", place]
        processes = [
            subprocess.Popen([*command, "--process", str(number)], env=environment)
            for number in range(len(roles))
        ]
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"processes have ended with {codes}")


if __name__ == "__main__":
    main()
