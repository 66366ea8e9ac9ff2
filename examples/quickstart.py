"""One model, written once: trained with torch, run by JAX and NumPy, on the CPU and the GPU.

The model is a plain class that declares itself a functor. Its forward pass asks the arrays whose
they are, so the same lines run wherever `fmap` has taken them. The data are the 1797 images of
digits that ship with scikit-learn.
"""

import time
from itertools import pairwise

import jax
import numpy as np
import torch
from sklearn.datasets import load_digits

import fmapper
from fmapper import array_namespace, fleaves, fmap, functor, to_gpu, to_jax, to_numpy, to_torch


@functor
class Linear:
    """y = x w + b, for x of shape (batch, inputs)."""

    def __init__(self, rng, inputs, outputs):
        """Draws w, of shape (inputs, outputs), from a normal distribution scaled as He et al."""
        scale = np.sqrt(2 / inputs)
        self.w = rng.normal(scale=scale, size=(inputs, outputs)).astype(np.float32)
        self.b = np.zeros(outputs, np.float32)

    def __call__(self, x):
        """The outputs, of shape (batch, outputs)."""
        return x @ self.w + self.b


@functor
class MLP:
    """Linear layers with rectifiers between them."""

    def __init__(self, rng, *sizes):
        """One layer from each size to the next."""
        self.layers = [Linear(rng, n, m) for n, m in pairwise(sizes)]

    def __call__(self, x):
        """The logits, of shape (batch, classes)."""
        xp = array_namespace(x)
        *hidden, last = self.layers
        for layer in hidden:
            x = xp.clip(layer(x), min=0)
        return last(x)


def digits():
    """Images of shape (n, 64) and labels, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1347], order[1347:]
    return images[train], labels[train], images[test], labels[test]


def train(model, images, labels, epochs=40, batch=64):
    """Trains a model of torch tensors in place, with Adam."""
    parameters = [leaf.requires_grad_() for leaf in fleaves(model)]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(batch):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def timed(forward, model, images, rounds=20):
    """The logits as a NumPy array, and the median time of a call in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        logits = to_numpy(forward(model, images))
        times.append(1e3 * (time.perf_counter() - start))
    return logits, sorted(times)[rounds // 2]


def main():
    """Trains, moves, evaluates everywhere, and prints a table."""
    train_images, train_labels, test_images, test_labels = digits()
    model = MLP(np.random.default_rng(1), 64, 128, 64, 10)
    trained = train(fmap(to_torch, model), *to_torch((train_images, train_labels)))

    def call(model, images):
        return model(images)

    runs = [(trained, call), (fmap(to_jax, trained), jax.jit(call)), (to_numpy(trained), call)]
    gpus = [device for device in fmapper.devices() if device.kind != "cpu"]
    for device in gpus[:1]:
        fmapper.use_backend(device.backend)
        runs.append((fmap(to_gpu, to_numpy(trained)), call))

    reference = None
    print(f"{'backend':<9}{'device':<14}{'accuracy':>9}{'max |difference|':>18}{'ms':>9}")
    for moved, forward in runs:
        device = fmapper.get_device(moved)
        images = getattr(fmapper, f"to_{device.backend}")(
            test_images, device=None if device.kind == "cpu" else device
        )
        logits, milliseconds = timed(forward, moved, images)
        reference = logits if reference is None else reference
        accuracy = (logits.argmax(1) == test_labels).mean()
        difference = np.abs(logits - reference).max()
        row = f"{device.backend:<9}{device.kind:<14}{accuracy:>9.2%}{difference:>18.1e}"
        print(f"{row}{milliseconds:>9.2f}")
        assert accuracy > 0.95, "the model has not learned the digits"
        assert (logits.argmax(1) == reference.argmax(1)).all(), "the backends disagree"
    if not gpus:
        print("No GPU here: on a machine with one, fmap(to_gpu, model) adds a row.")
    print(f"The same {len(test_labels)} predictions everywhere.")


if __name__ == "__main__":
    main()
