"""A Flax encoder as source for PyTorch: edited, trained by LoRA on every linear layer.

The file that `fmapper.source` writes is kept and changed as any other: it needs neither fmapper nor
JAX. The adapters are those of PEFT where that is installed, else a class of a few lines. The task
is to tell of rows of numbers whether their sum is positive.
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmapper


class Block(nnx.Module):
    """A block of an encoder."""

    def __init__(self, dim, *, rngs):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Encoder(nnx.Module):
    """What somebody has trained with Flax."""

    def __init__(self, features=16, dim=32, depth=4, classes=10, *, rngs):
        self.stem = nnx.Linear(features, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(dim, classes, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What an engineer changes in the file: a normalisation before the head, and blocks whose values are
# computed again in the backward pass. That there are two classes instead of ten is an argument.
EDITS = {
    "self.head = Linear(dim, classes)": (
        "self.norm = nn.LayerNorm(dim)\n        self.head = Linear(dim, classes)"
    ),
    "x = block(x)": "x = checkpoint(block, x, use_reentrant=False)",
    "return self.head(x)": "return self.head(self.norm(x))",
}


class LoRA(nn.Module):
    """A linear layer that stays, and a product of two small matrices that is trained."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def add_lora(model, rank):
    """Puts an adapter around every linear layer, and freezes all else."""
    model.requires_grad_(False)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, inject_adapter_in_model

        return inject_adapter_in_model(LoraConfig(r=rank, target_modules=linear), model)
    for name in linear:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, LoRA(model.get_submodule(name), rank))
    return model


def load_file(path):
    """Imports a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.checkpoint = checkpoint
    return module


def data(count, seed):
    """Rows of numbers (count, 16), and whether their sum is positive (count,)."""
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(-1) > 0).long()


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    encoder = Encoder(rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32))
    code = fmapper.source(encoder, "torch", (x,))
    weights = {name: np.asarray(array) for name, array in fmapper.state(encoder).items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.py"
        path.write_text(code)
        file = load_file(path)
        model = file.load_weights(file.Encoder(), weights)
        with torch.no_grad():
            found = model(torch.from_numpy(np.array(x)))
        np.testing.assert_allclose(found, encoder(x), atol=1e-5)

        for old, new in EDITS.items():
            assert code.count(old) == 1, old
            code = code.replace(old, new)
        path = Path(folder) / "edited.py"
        path.write_text(code)
        file = load_file(path)
    # The old weights, where the model still has them: the head and its norm begin anew.
    kept = {name: array for name, array in weights.items() if not name.startswith("head.")}
    model = file.load_weights(file.Encoder(classes=2), kept, strict=False)

    model = add_lora(model, 4)
    print(f"{type(model.blocks[0].up).__module__}.{type(model.blocks[0].up).__name__}")
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, 1e-2)
    for i in range(100):
        rows, signs = data(256, 1 + i)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), signs)
        loss.backward()
        optimizer.step()
    count = sum(p.numel() for p in learned)
    print(f"the loss after 100 steps of {count:,} parameters by LoRA: {loss.item():.3f}")
    assert loss < 0.3
    rows, signs = data(1000, 0)
    with torch.no_grad():
        accuracy = float((model(rows).argmax(-1) == signs).float().mean())
    print(f"accuracy {accuracy:.3f}")
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
