"""An Equinox model of digits, served and trained on by PyTorch.

The data are the 1,797 handwritten digits of 8 by 8 pixels that scikit-learn has with it.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits

import fmapper


class Classifier(eqx.Module):
    """Rows of pixels attend to each other; dropout in between."""

    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(8, 32, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=keys[1])
        self.norm = eqx.nn.LayerNorm(32)
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.MLP(8 * 32, 10, 64, 1, key=keys[2])

    def __call__(self, image, *, key=None):
        rows = jax.vmap(self.embed)(image)
        rows = rows + self.attention(rows, rows, rows)
        rows = self.dropout(jax.vmap(self.norm)(rows), key=key)
        return self.head(rows.reshape(-1))


def data():
    """Images (n, 8, 8) and labels (n,), for training and for testing."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def train_in_jax(model, images, labels, steps):
    optimizer = optax.adam(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x, y, key):
        def loss(model):
            scores = jax.vmap(model)(x, key=jax.random.split(key, len(x)))
            return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

        gradients = eqx.filter_grad(loss)(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state

    for i in range(steps):
        batch = slice(100 * (i % 14), 100 * (i % 14) + 100)
        model, state = step(model, state, images[batch], labels[batch], jax.random.key(i))
    return model


def accuracy(scores, labels):
    return float((np.asarray(scores).argmax(-1) == labels).mean())


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    (images, labels), (test_images, test_labels) = data()
    model = train_in_jax(Classifier(jax.random.key(0)), images, labels, 28)

    # One image at a time is how Equinox writes a model; torch gets the one for batches.
    batched = jax.vmap(lambda image, key: model(image, key=key))
    keys = jax.random.split(jax.random.key(0), 100)
    module = fmapper.convert(
        batched, "torch", (images[:100], keys), dynamic_shapes=["batch, _, _", "batch"]
    )
    print(sorted(module.state_dict())[:4], "...")
    inference = jax.vmap(eqx.nn.inference_mode(model))
    before = accuracy(inference(jnp.asarray(test_images)), test_labels)

    def words(count, seed):
        """Keys of JAX as torch has them: two words each."""
        found = jax.random.key_data(jax.random.split(jax.random.key(seed), count))
        return fmapper.to_torch(found)

    x = torch.from_numpy(test_images)
    with torch.no_grad():
        served = accuracy(module.eval()(x, words(len(x), 0)), test_labels)
    print(f"accuracy in JAX {before:.3f}, in torch {served:.3f}")
    assert abs(before - served) < 0.01

    optimizer = torch.optim.AdamW(module.parameters(), 2e-3)
    target = torch.from_numpy(labels).long()
    module.train()
    for i in range(56):
        batch = slice(100 * (i % 14), 100 * (i % 14) + 100)
        optimizer.zero_grad()
        scores = module(torch.from_numpy(images[batch]), words(100, i))
        torch.nn.functional.cross_entropy(scores, target[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        after = accuracy(module.eval()(x, words(len(x), 0)), test_labels)
    print(f"after fine-tuning with torch.optim {after:.3f}")
    assert after > max(served, 0.9)


if __name__ == "__main__":
    main()
