"""A LoRA adapter of a Llama, begun with PEFT in torch, trained further in JAX, and given back.

The model is small and has random weights; with the folder of a real one nothing else changes. The
adapter is a folder of PEFT in between and at the end, where PEFT opens what JAX has trained.
"""

import argparse
import copy
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fmapper

TEXT = np.frombuffer(__doc__.encode(), np.uint8).astype(np.int64)
ROWS, LENGTH = 4, 24


def batch(step):
    """Returns the tokens of a step, of shape (rows, length + 1)."""
    starts = np.random.default_rng(step).integers(0, len(TEXT) - LENGTH - 1, (ROWS, 1))
    return TEXT[starts + np.arange(LENGTH + 1)]


def make_base():
    """Returns a small Llama with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def train_in_torch(base, folder, steps):
    """Trains a new adapter with PEFT, and writes its folder."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    tuned = get_peft_model(copy.deepcopy(base), config)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = torch.from_numpy(batch(step))
        logits = tuned(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"torch  {step:3}  {loss.item():.3f}")
    tuned.save_pretrained(folder)


def train_in_jax(model, adapter, first, steps):
    """Returns an adapter after further steps in JAX, and the losses."""
    adamw = optax.adamw(1e-2)
    state = adamw.init(adapter)

    def loss_of(adapter, model, tokens):
        def run(params, tokens):
            tuned = model.replace(params=params)
            return tuned(input_ids=tokens, use_cache=False)["logits"]

        logits = adapter.apply(run, model.params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def update(adapter, state, model, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(adapter, model, tokens)
        updates, state = adamw.update(gradients, state, adapter)
        return optax.apply_updates(adapter, updates), state, loss

    losses = []
    for step in range(first, first + steps):
        adapter, state, loss = update(adapter, state, model, jnp.asarray(batch(step)))
        losses.append(float(loss))
        print(f"JAX    {step:3}  {losses[-1]:.3f}")
    return adapter, losses


def main():
    """Trains in torch, then in JAX, and compares the tuned model in both."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of PEFT's use of transformers
    base = make_base()
    with tempfile.TemporaryDirectory() as root:
        begun, ended = Path(root) / "begun", Path(root) / "ended"
        train_in_torch(base, begun, 3)

        example = {"input_ids": torch.from_numpy(batch(0)[:, :-1]), "use_cache": False}
        model = fmapper.convert(base, "jax", example_kwargs=example)
        adapter = fmapper.to_jax(fmapper.load_adapter(begun))
        adapter, losses = train_in_jax(model, adapter, 3, 12)
        assert losses[-1] < losses[0]
        fmapper.save_adapter(adapter, ended)

        theirs = PeftModel.from_pretrained(copy.deepcopy(base), ended)
        logits = theirs(**example).logits.detach()
        merged = model.replace(params=adapter(model.params))
        there = merged(input_ids=jnp.asarray(batch(0)[:, :-1]), use_cache=False)["logits"]
        assert np.allclose(there, logits, atol=1e-4)
    print("the same logits in torch and JAX")


if __name__ == "__main__":
    main()
