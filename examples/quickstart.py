"""The three main jobs on real images, in less than a minute.

1. A class of your own, declared with `@functor`: trained with PyTorch, moved to JAX and NumPy (and
   to the GPU, where there is one), with the same predictions everywhere.
2. A PyTorch model of Hugging Face as a Flax module: converted, verified, trained by Flax.
3. A Flax module as a PyTorch module: converted, verified, trained by torch.

The images are the 1,797 handwritten digits of 8 by 8 pixels that ship with scikit-learn; the vision
transformer has random weights, so nothing is downloaded.
"""

import argparse
import os
import time
from itertools import pairwise

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--threads", type=int, default=1, help="processors to use (default: 1)")
options = parser.parse_args()
for setting in ("OMP_NUM_THREADS", "NPROC"):  # read by torch and by XLA when they are imported
    os.environ.setdefault(setting, str(options.threads))

print("importing torch, JAX, Flax and transformers ...", flush=True)
import jax
import numpy as np
import optax
import torch
from flax import nnx
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import fmapper
from fmapper import array_namespace, fleaves, fmap, functor, to_gpu, to_jax, to_numpy, to_torch


def digits():
    """Images (n, 8, 8) in [0, 1] and labels (n,): 1347 to train on and 450 to test."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = data.images[order].astype(np.float32) / 16, data.target[order]
    return (images[:1347], labels[:1347]), (images[1347:], labels[1347:])


def batches(count, seed, size=64):
    """The rows of each batch of an epoch, all of one size, in random order."""
    order = np.random.default_rng(seed).permutation(count)
    return [order[i : i + size] for i in range(0, count - size + 1, size)]


def accuracy(logits, labels):
    """The share of rows whose largest logit is at the label."""
    return (np.asarray(logits).argmax(-1) == labels).mean()


def shown(report):
    """A report of fmapper.verify in one line."""
    return ", ".join(line.strip() for line in str(report).splitlines())


# 1. A class of your own


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
    """Linear layers with rectifiers between them, for images of shape (batch, 8, 8)."""

    def __init__(self, rng, *sizes):
        """One layer from each size to the next."""
        self.layers = [Linear(rng, n, m) for n, m in pairwise(sizes)]

    def __call__(self, x):
        """The logits, of shape (batch, classes)."""
        xp = array_namespace(x)
        x = xp.reshape(x, (x.shape[0], 64))
        *hidden, last = self.layers
        for layer in hidden:
            x = xp.clip(layer(x), min=0)
        return last(x)


def train_in_torch(parameters, logits, images, labels, epochs, rate):
    """Adam on batches of 64, a line for each fifth of the epochs."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    images, labels = to_torch((images, labels))
    for epoch in range(epochs):
        total = 0.0
        for rows in batches(len(images), epoch):
            loss = torch.nn.functional.cross_entropy(logits(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if (epoch + 1) % max(epochs // 5, 1) == 0:
            print(f"  epoch {epoch + 1:>3}   loss {total / len(batches(len(images), 0)):.4f}")


def milliseconds(call, rounds=20):
    """The median time of a call, after one that warms up."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[rounds // 2]


def own_class(train, test):
    """Trains a functor in torch, runs it wherever it can go, and prints a table."""
    print("\n1. A class of your own: trained with torch, moved everywhere")
    model = fmap(to_torch, MLP(np.random.default_rng(1), 64, 128, 64, 10))
    parameters = [leaf.requires_grad_() for leaf in fleaves(model)]
    train_in_torch(parameters, model, *train, epochs=20, rate=2e-3)

    runs = [("torch", model), ("jax", fmap(to_jax, model)), ("numpy", fmap(to_numpy, model))]
    gpus = [device for device in fmapper.devices() if device.kind != "cpu"]
    for device in gpus[:1]:
        fmapper.use_backend(device.backend)
        runs.append((device.backend, fmap(to_gpu, to_numpy(model))))

    def call(model, x):
        return model(x)

    reference = None
    columns = f"{'accuracy':>9}{'max difference':>16}{'ms a batch of 450':>19}"
    print(f"\n  {'backend':<8}{'device':<8}{columns}")
    for backend, moved in runs:
        device = fmapper.get_device(moved)
        forward = jax.jit(call) if backend == "jax" else call
        mover = getattr(fmapper, f"to_{backend}")
        images = mover(test[0], device=None if device.kind == "cpu" else device)
        logits = to_numpy(forward(moved, images))
        reference = logits if reference is None else reference
        took = milliseconds(lambda: to_numpy(forward(moved, images)))  # noqa: B023
        difference = np.abs(logits - reference).max()
        print(
            f"  {backend:<8}{device.kind:<8}{accuracy(logits, test[1]):>9.2%}"
            f"{difference:>16.1e}{took:>19.3f}"
        )
        assert (logits.argmax(1) == reference.argmax(1)).all(), "the backends disagree"
    assert accuracy(reference, test[1]) > 0.95, "the model has not learned the digits"
    if not gpus:
        print("  No GPU here; on a machine with one, fmap(to_gpu, model) adds a row.")


# 2. Hugging Face to Flax


def torch_to_flax(train, test):
    """Converts a vision transformer to Flax and trains it there."""
    print("\n2. A Hugging Face model, from torch to Flax")
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    module = ViTForImageClassification(config).eval()
    x = torch.from_numpy(test[0][:64, None])

    start = time.perf_counter()
    model = fmapper.convert(module, "flax", (x,), train=True)
    took = time.perf_counter() - start
    print(f"  converted in {took:.1f} s: a {type(model).__name__}, which is an nnx.Module")
    model.eval()
    report = fmapper.verify(module, model, x)
    print(f"  verified: {shown(report)}")
    assert report

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, labels):
        def loss(model):
            logits = model(x).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    model.train()
    images, labels = train[0][:, None], train[1].astype(np.int32)
    for epoch in range(5):
        losses = [step(model, optimizer, images[b], labels[b]) for b in batches(len(images), epoch)]
        print(f"  epoch {epoch + 1:>3}   loss {np.mean(losses):.4f}")
    model.eval()
    logits = [model(test[0][i : i + 64, None]).logits for i in range(0, 448, 64)]
    reached = accuracy(np.concatenate(logits), test[1][:448])
    print(f"  accuracy after training with nnx.Optimizer: {reached:.2%}")
    assert reached > 0.7, "the converted model has not learned"


# 3. Flax to torch


class Convolutional(nnx.Module):
    """A small convolutional network of Flax, for images of shape (batch, 8, 8)."""

    def __init__(self, rngs):
        """Initialises the parameters."""
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        """The logits, of shape (batch, 10)."""
        x = nnx.relu(self.norm(self.conv(x[..., None])))
        return self.head(nnx.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


def flax_to_torch(train, test):
    """Converts a Flax model to torch and trains it there."""
    print("\n3. A Flax model, from JAX to torch")
    model = Convolutional(nnx.Rngs(0))
    model.eval()
    start = time.perf_counter()
    module = fmapper.convert(model, "torch", (test[0][:64],), dynamic_shapes=["batch, _, _"])
    took = time.perf_counter() - start
    print(f"  converted in {took:.1f} s: a {type(module).__name__}, which is a torch.nn.Module")
    report = fmapper.verify(model, module, test[0][:7])
    print(f"  verified: {shown(report)}")
    assert report
    train_in_torch(module.train().parameters(), module, *train, epochs=5, rate=3e-3)
    with torch.no_grad():
        reached = accuracy(module.eval()(torch.from_numpy(test[0])), test[1])
    print(f"  accuracy after training with torch.optim: {reached:.2%}")
    assert reached > 0.9, "the converted model has not learned"


def main():
    """Does the three jobs."""
    start = time.perf_counter()
    torch.set_num_threads(options.threads)
    train, test = digits()
    own_class(train, test)
    torch_to_flax(train, test)
    flax_to_torch(train, test)
    print(f"\nAll three jobs took {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
