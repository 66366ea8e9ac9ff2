"""A Flax model of digits, trained with JAX, served and trained on by PyTorch.

The data are the 1,797 handwritten digits of 8 by 8 pixels that scikit-learn has with it.
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from sklearn.datasets import load_digits

import fmapper


class Classifier(nnx.Module):
    """Convolution, batch normalisation, dropout, and a dense layer: all that has state or modes."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.head(self.drop(x.reshape(x.shape[0], -1)))


def data():
    """Images (n, 8, 8, 1) and labels (n,), for training and for testing."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def train_in_jax(model, images, labels, steps):
    """A few steps of Adam, as Flax does them."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    model.train()
    for i in range(steps):
        batch = slice(100 * (i % 14), 100 * (i % 14) + 100)
        step(model, optimizer, images[batch], labels[batch])


def train_in_torch(model, images, labels, steps):
    """A few more, as torch does them: the parameters are parameters, the statistics are buffers."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    model.train()
    for i in range(steps):
        batch = slice(100 * (i % 14), 100 * (i % 14) + 100)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()


def accuracy(scores, labels):
    return float((np.asarray(scores).argmax(-1) == labels).mean())


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    (images, labels), (test_images, test_labels) = data()
    model = Classifier(nnx.Rngs(0))
    train_in_jax(model, images, labels, 28)
    model.eval()
    before = accuracy(model(jnp.asarray(test_images)), test_labels)

    # From here on it is a torch module; the batch may be of any size.
    module = fmapper.convert(model, "torch", (images[:100],), dynamic_shapes=["batch, _, _, _"])
    report = fmapper.verify(model, module, images[:7])
    print(report)
    assert report
    x, y = torch.from_numpy(test_images), test_labels
    with torch.no_grad():
        served = accuracy(module.eval()(x), y)
    print(f"accuracy in JAX {before:.3f}, in torch {served:.3f}")
    assert abs(before - served) < 0.01

    train_in_torch(module, torch.from_numpy(images), torch.from_numpy(labels).long(), 56)
    with torch.no_grad():
        after = accuracy(module.eval()(x), y)
    print(f"after fine-tuning with torch.optim {after:.3f}")
    assert after > max(served, 0.93)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        module.save(path)
        again = fmapper.convert(fmapper.load_program(path), "torch").eval()  # needs no JAX
        assert torch.equal(again(x[:5]), module(x[:5]))


if __name__ == "__main__":
    main()
