"""A vision model of torch, fine-tuned in Flax: the digits of scikit-learn, optax under jit.

The torch module is trained for one epoch, converted with its batch statistics and its dropout, and
trained on as an `nnx.Module`. At the end its weights go back into the torch module.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from sklearn.datasets import load_digits

import fmapper


class Classifier(torch.nn.Module):
    """Two convolutions and a linear layer, for images of shape (batch, 1, 8, 8)."""

    def __init__(self):
        """Random weights."""
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
        )
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(32 * 16, 10)

    def forward(self, images):
        """The logits, of shape (batch, 10)."""
        return self.head(self.drop(self.body(images).flatten(1)))


def digits():
    """Images of shape (n, 1, 8, 8) and labels, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 1, 8, 8) / 16
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1344], order[1344:]
    return images[train], labels[train], images[test], labels[test]


def train_a_little(model, images, labels):
    """One epoch in torch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for rows in torch.arange(len(images)).split(64):
        loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cross_entropy(model, images, labels):
    """The mean over a batch."""
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def step(model, optimizer, images, labels):
    """One step; weights, batch statistics and random numbers are updated in place."""
    loss, gradients = nnx.value_and_grad(cross_entropy)(model, images, labels)
    optimizer.update(model, gradients)
    return loss


def accuracy(model, images, labels):
    """Of a model in evaluation mode."""
    return float((np.asarray(model(images)).argmax(1) == labels).mean())


def main():
    """Trains in torch, converts, trains on in Flax, and gives the weights back."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    train_images, train_labels, test_images, test_labels = digits()
    model = Classifier()
    train_a_little(model, torch.from_numpy(train_images), torch.from_numpy(train_labels))

    batch = torch.from_numpy(train_images[:64])
    sizes = {"images": {0: torch.export.Dim("batch", min=2)}}
    converted = fmapper.convert(
        model, "flax", (batch,), dynamic_shapes=sizes, train=True, rngs=nnx.Rngs(dropout=0)
    )
    converted.eval()
    report = fmapper.verify(model.eval(), converted, test_images)
    print(f"torch and Flax: {report}")
    assert report
    print(
        "first kernel:",
        converted.body[0].weight.shape,
        "as",
        type(converted.body[0].weight).__name__,
    )

    before = accuracy(converted, test_images, test_labels)
    converted.train()
    optimizer = nnx.Optimizer(converted, optax.adamw(3e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for epoch in range(4):
        order = rng.permutation(len(train_images)).reshape(-1, 64)
        losses = [
            step(converted, optimizer, train_images[rows], train_labels[rows]) for rows in order
        ]
        print(f"epoch {epoch}: loss {np.mean(jnp.stack(losses)):.3f}")
    converted.eval()
    after = accuracy(converted, test_images, test_labels)
    print(f"accuracy {before:.1%} before, {after:.1%} after")
    assert after > max(before, 0.93)

    state = fmapper.to_torch(converted.state_dict())
    model.load_state_dict(state)
    with torch.no_grad():
        back = accuracy(model.eval(), torch.from_numpy(test_images), test_labels)
    print(f"accuracy {back:.1%} of the torch module with these weights")
    assert back == after


if __name__ == "__main__":
    main()
