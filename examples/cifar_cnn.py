"""A convolutional network for pictures: one program for NumPy, torch and JAX, CPU and GPU.

It learns the 1,797 handwritten digits that ship with scikit-learn, brought to the size of CIFAR-10.
With the archive from https://www.cs.toronto.edu/~kriz/cifar.html, "CIFAR-10 python version", it
learns that:

    python examples/cifar_cnn.py --data cifar-10-python.tar.gz --logdir runs

TensorBoard shows the loss of every step and the accuracy after every epoch: `tensorboard --logdir
runs`.
"""

import argparse
import hashlib
import io
import pickle
import tarfile
import time
from pathlib import Path

import numpy as np

import fmapper
import fmapper.nn.functional as F
from fmapper import array_namespace, fmap, functor, random

MD5 = "c58f30108f718f92721af3b95e74349a"  # as published beside the archive
CLASSES = 10


# --- the model ----------------------------------------------------------------------------------


@functor(children=("weight", "bias"))
class Conv:
    """A convolution with a weight of shape (outputs, inputs, size, size)."""

    def __init__(self, key, inputs, outputs, size, padding=0):
        """Draws the weight as He et al. do; the bias is zero."""
        self.weight = random.he_normal(key, (outputs, inputs, size, size))
        self.bias = np.zeros(outputs, np.float32)
        self.padding = padding

    def __call__(self, x):
        """For x of shape (batch, inputs, height, width)."""
        return F.conv2d(x, self.weight, self.bias, padding=self.padding)


@functor
class Linear:
    """A linear layer with a weight of shape (outputs, inputs)."""

    def __init__(self, key, inputs, outputs):
        """Draws the weight as He et al. do; the bias is zero."""
        self.weight = random.he_normal(key, (outputs, inputs))
        self.bias = np.zeros(outputs, np.float32)

    def __call__(self, x):
        """For x of shape (batch, inputs)."""
        return F.linear(x, self.weight, self.bias)


@functor
class CNN:
    """Four convolutions and three linear layers, 64-120-84-10 at the end."""

    def __init__(self, key):
        """The same weights on every backend for the same key."""
        keys = random.split(key, 7)
        self.convs = [
            Conv(keys[0], 3, 6, 5),
            Conv(keys[1], 6, 16, 5, padding=3),
            Conv(keys[2], 16, 16, 5),
            Conv(keys[3], 16, 16, 3),
        ]
        self.linears = [
            Linear(keys[4], 64, 120),
            Linear(keys[5], 120, 84),
            Linear(keys[6], 84, CLASSES),
        ]

    def __call__(self, x):
        """Logits of shape (batch, 10) for images of shape (batch, 3, 32, 32)."""
        first, second, third, fourth = self.convs
        x = F.max_pool2d(F.relu(first(x)), 2)
        x = F.relu(second(x))
        x = F.max_pool2d(F.relu(third(x)), 2)
        x = F.max_pool2d(F.relu(fourth(x)), 2)
        x = array_namespace(x).reshape(x, (x.shape[0], 64))
        *hidden, last = self.linears
        for linear in hidden:
            x = F.relu(linear(x))
        return last(x)


# --- training -----------------------------------------------------------------------------------


@functor
class Adam:
    """The moments of Kingma and Ba, https://arxiv.org/abs/1412.6980, for the arrays of a model."""

    def __init__(self, model):
        """Zeros like the arrays of the model."""
        self.mean = fmap(np.zeros_like, model)
        self.square = fmap(np.zeros_like, model)
        self.count = np.zeros((), np.float32)

    def update(self, model, gradient, lr, b1=0.9, b2=0.999, eps=1e-8):
        """The model after a step, and the moments after it."""
        new = fmap(lambda x: x, self)
        new.count = self.count + 1
        new.mean = fmap(lambda m, g: b1 * m + (1 - b1) * g, self.mean, gradient)
        new.square = fmap(lambda v, g: b2 * v + (1 - b2) * g * g, self.square, gradient)
        rate = lr * (1 - b2**new.count) ** 0.5 / (1 - b1**new.count)

        def move(p, m, v):
            return p - rate * m / (v**0.5 + eps)

        return fmap(move, model, new.mean, new.square), new


def loss_of(model, images, labels):
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(model(images), labels)


def step(model, adam, images, labels, lr=1e-3):
    """One update: the model, the optimizer's state and the loss."""
    loss, gradient = fmapper.value_and_grad(loss_of)(model, images, labels)
    model, adam = adam.update(model, gradient, lr)
    return model, adam, loss


def batches(images, labels, size, key):
    """The set once, in another order for every key; what is left over at its end is left out."""
    order = random.permutation(key, len(images))
    for start in range(0, len(images) - size + 1, size):
        rows = order[start : start + size]
        yield images[rows], labels[rows]


def train(
    model,
    adam,
    data,
    mover,
    *,
    epochs=1,
    size=256,
    compile=False,
    log=lambda *_: None,
    watch=lambda *_: None,
):
    """Trains where `mover` takes the model; returns the model, all losses and seconds per epoch.

    `log` is called with the count and the loss of every step, `watch` with the count, the model and
    the mean loss of every epoch.
    """
    model, adam = fmap(mover, (model, adam))
    update = fmapper.jit(step) if compile else step
    losses, seconds = [], []
    for epoch in range(epochs):
        start, before = time.perf_counter(), len(losses)
        key = random.fold_in(random.key(1), epoch)
        for images, labels in fmapper.DeviceLoader(batches(*data, size, key), mover):
            model, adam, loss = update(model, adam, images, labels)
            losses.append(float(loss))
            log(len(losses), losses[-1])
        seconds.append(time.perf_counter() - start)
        watch(epoch + 1, model, np.mean(losses[before:]))
    return model, losses, seconds


def accuracy(model, images, labels, size=500):
    """The share of images that NumPy puts into the right class with a model of NumPy arrays."""
    right = sum(
        int((model(images[i : i + size]).argmax(1) == labels[i : i + size]).sum())
        for i in range(0, len(images), size)
    )
    return right / len(images)


# --- data ---------------------------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """Reads lists, dicts, strings and NumPy arrays; refuses what could run code."""

    def find_class(self, module, name):
        """The names that a pickled array needs, and bytes where Python 3 has written them."""
        allowed = {
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
            ("multiarray", "_reconstruct"): np.ndarray.__reduce__(np.zeros(0))[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        found = allowed.get((module.rpartition(".")[2], name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no business in CIFAR-10")
        return found


def cifar10(archive, checksum=MD5):
    """Images, float32 in [-1, 1] of shape (n, 3, 32, 32), and labels: for training, for testing.

    Raises:
        FileNotFoundError: The archive is not there; says where it is to be had.
        ValueError: It is damaged, or another file.
    """
    path = Path(archive)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there. Download the CIFAR-10 python version from "
            "https://www.cs.toronto.edu/~kriz/cifar.html (170 MB) and give its path with --data; "
            "without --data the digits of scikit-learn are used."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if checksum is not None and found != checksum:
        raise ValueError(f"{path} has the MD5 checksum {found}, not {checksum}: download it again.")
    parts = {"data_batch": [], "test_batch": []}
    with tarfile.open(path) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            kind = Path(member.name).name[:10]
            if kind in parts and member.isfile():
                content = tar.extractfile(member).read()
                parts[kind].append(_ArraysOnly(io.BytesIO(content), encoding="bytes").load())
    if not all(parts.values()):
        raise ValueError(f"{path} is not the python version of CIFAR-10: it has no such batches.")
    return tuple(map(_decoded, parts.values()))


def _decoded(parts):
    images = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part[b"labels"] for part in parts]).astype(np.int32)
    return images.astype(np.float32) / 127.5 - 1, labels


def digits():
    """The digits of scikit-learn as sets like those of `cifar10`: 1,344 to train on, 453 to test.

    Their 8 x 8 pixels become blocks of 4 x 4, grey in three colours.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    order = random.permutation(random.key(2), len(data.target))
    images = (data.images[order] / 8 - 1).astype(np.float32)
    images = np.repeat(images.repeat(4, 1).repeat(4, 2)[:, None], 3, axis=1)
    labels = data.target[order].astype(np.int32)
    return (images[:1344], labels[:1344]), (images[1344:], labels[1344:])


# --- the command --------------------------------------------------------------------------------


def main(arguments=None):
    """Trains on every device that is asked for and prints the times side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="the archive of CIFAR-10; scikit-learn's digits without it")
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--devices", nargs="+", help="cpu, gpu, cuda:1 ...; cpu and gpu if there")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--logdir", help="where TensorBoard is to find loss and accuracy")
    options = parser.parse_args(arguments)
    train_set, test_set = cifar10(options.data) if options.data else digits()
    print(f"{len(train_set[1])} images to train on, {len(test_set[1])} to test")
    mover = getattr(fmapper, f"to_{options.backend}")
    fmapper.backends.get_adapter(options.backend)  # imported, so that devices() has it
    here = [d for d in fmapper.devices() if d.backend == options.backend]
    gpus = [str(device).partition(":")[2] for device in here if device.kind != "cpu"]
    rows = []
    for device in options.devices or ["cpu", *gpus[:1]]:
        print(f"{options.backend}:{device}")
        writer, shares = None, []
        if options.logdir:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(Path(options.logdir) / f"{options.backend}-{device}")

        def log(count, loss, writer=writer):
            if writer is not None:
                writer.add_scalar("loss", loss, count)

        def watch(epoch, model, loss, writer=writer, shares=shares):
            shares.append(accuracy(fmap(fmapper.to_numpy, model), *test_set))  # judged by NumPy
            print(f"  epoch {epoch:>3}: loss {loss:.4f}, accuracy {shares[-1]:.1%}", flush=True)
            if writer is not None:
                writer.add_scalar("accuracy", shares[-1], epoch)

        model = CNN(random.key(0))
        _, losses, seconds = train(
            model,
            Adam(model),
            train_set,
            mover(device=device),
            epochs=options.epochs,
            size=options.batch,
            compile=options.backend == "jax" or "cpu" not in device,
            log=log,
            watch=watch,
        )
        if writer is not None:
            writer.close()
        rows.append((device, losses[0], losses[-1], shares[-1], seconds[0], min(seconds)))
    print(f"\n{'device':<10}{'first loss':>12}{'last loss':>12}{'accuracy':>10}", end="")
    print(f"{'1st epoch':>11}{'best epoch':>12}")
    for device, first, last, share, once, best in rows:
        print(f"{device:<10}{first:>12.4f}{last:>12.4f}{share:>10.1%}{once:>9.2f} s{best:>10.2f} s")
    if not gpus:
        print(f"{options.backend} sees no GPU here; where it does, the table has a row for it.")
    if options.logdir:
        print(f"tensorboard --logdir {options.logdir}")


if __name__ == "__main__":
    main()
