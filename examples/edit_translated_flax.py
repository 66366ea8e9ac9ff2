"""A PyTorch encoder as source for Flax: edited, trained by LoRA with rematerialised blocks.

The file that `fmapper.source` writes is kept and changed as any other: it needs neither fmapper nor
PyTorch. The task is to tell of rows of numbers whether their sum is positive.
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import fmapper


class Block(torch.nn.Module):
    """A block of an encoder."""

    def __init__(self, dim):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up = torch.nn.Linear(dim, 4 * dim)
        self.down = torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Encoder(torch.nn.Module):
    """What somebody has trained with PyTorch."""

    def __init__(self, features=16, dim=32, depth=4, classes=10):
        super().__init__()
        self.stem = torch.nn.Linear(features, dim)
        self.blocks = torch.nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = torch.nn.Linear(dim, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What an engineer changes in the file: a normalisation before the head, and blocks whose values are
# computed again in the backward pass. That there are two classes instead of ten is an argument.
EDITS = {
    "self.head = Linear(dim, classes, rngs=rngs)": (
        "self.norm = nnx.LayerNorm(dim, rngs=rngs)\n"
        "        self.head = Linear(dim, classes, rngs=rngs)"
    ),
    "x = block(x)": "x = nnx.remat(type(block).__call__)(block, x)",
    "return self.head(x)": "return self.head(self.norm(x))",
}


def load_file(path):
    """Imports a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_lora(model, rank, rngs):
    """Puts an adapter around every linear layer."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(vars(module).items()):
            if isinstance(layer, nnx.Linear):
                sizes = layer.in_features, rank, layer.out_features
                setattr(module, name, nnx.LoRA(*sizes, base_module=layer, rngs=rngs))


def data(count, seed):
    """Rows of numbers (count, 16), and whether their sum is positive (count,)."""
    x = np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)
    return x, (x.sum(-1) > 0).astype(np.int32)


def train(model, what, steps, rate):
    """Trains the variables of a class, and returns the last loss."""
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=what)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, what))(model)
        optimizer.update(model, gradients)
        return value

    for i in range(steps):
        value = step(model, optimizer, *data(256, 1 + i))
    return float(value)


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    encoder = Encoder().eval()
    x = torch.randn(8, 16)
    weights = {name: x.detach().numpy() for name, x in encoder.state_dict().items()}
    code = fmapper.source(encoder, "flax", (x,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.py"
        path.write_text(code)
        model = load_file(path).Encoder(rngs=nnx.Rngs(0))
        load_file(path).load_weights(model, weights)
        np.testing.assert_allclose(model(jnp.asarray(x)), encoder(x).detach(), atol=1e-5)

        for old, new in EDITS.items():
            assert code.count(old) == 1, old
            code = code.replace(old, new)
        edited = Path(folder) / "edited.py"
        edited.write_text(code)
        file = load_file(edited)
        model = file.Encoder(classes=2, rngs=nnx.Rngs(1))

    # The old weights, where the model still has them: the head and its norm begin anew.
    kept = {name: array for name, array in weights.items() if not name.startswith("head.")}
    file.load_weights(model, kept, strict=False)

    add_lora(model, 4, nnx.Rngs(2))
    print(f"{type(model.blocks[0].up).__name__} around {type(model.blocks[0].up.base_module)}")
    others = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    frozen = jax.tree.map(jnp.copy, nnx.state(model, others))
    loss = train(model, nnx.LoRAParam, 100, 1e-2)
    same = jax.tree.map(jnp.array_equal, frozen, nnx.state(model, others))
    lora = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    print(f"the loss after 100 steps of {lora:,} parameters by LoRA: {loss:.3f}")
    assert loss < 0.3
    x, y = data(1000, 0)
    accuracy = float((model(jnp.asarray(x)).argmax(-1) == y).mean())
    print(f"accuracy {accuracy:.3f}")
    assert accuracy > 0.9
    assert all(jax.tree.leaves(same)), "what LoRA does not train stays"


if __name__ == "__main__":
    main()
