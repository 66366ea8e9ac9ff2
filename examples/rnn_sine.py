"""A recurrent network learns a sine wave: one program for NumPy, torch and JAX.

The network sees one value of the wave and its own context, six numbers, and predicts the next
value. Its weights change after every step in time; the context goes on as it is, and no gradient
flows through it. Try `--backend jax`, `--device gpu`, `--compile`.
"""

import argparse
import time

import numpy as np

import fmapper
from fmapper import array_namespace, fmap, functor, random

CONTEXT = 6


@functor
class ContextRNN:
    """h = tanh([x, context] w1), y = h w2; h is the next context."""

    def __init__(self, key):
        """Draws w1, of shape (7, 6), and w2, of shape (6, 1), as float64."""
        first, second = random.split(key)
        self.w1 = 0.4 * random.normal(first, (1 + CONTEXT, CONTEXT), "float64")
        self.w2 = 0.3 * random.normal(second, (CONTEXT, 1), "float64")

    def __call__(self, x, context):
        """For x of shape (batch, 1) and context (batch, 6): y (batch, 1), and the new context."""
        xp = array_namespace(x)
        context = xp.tanh(xp.concat([x, context], axis=1) @ self.w1)
        return context @ self.w2, context


def loss_of(model, x, context, y):
    """Half the squared error of one prediction, and the new context."""
    prediction, context = model(x, context)
    return ((prediction - y) ** 2).sum() / 2, context


def step(model, x, context, y, lr):
    """One update of the weights: the model, the context and the loss after it."""
    (loss, context), gradient = fmapper.value_and_grad(loss_of, has_aux=True)(model, x, context, y)
    return fmap(lambda p, g: p - lr * g, model, gradient), context, loss


def series(points=21):
    """What goes in and what is to come out: arrays of shape (steps, 1, 1)."""
    wave = np.sin(np.linspace(2, 10, points)).reshape(-1, 1, 1)
    return wave[:-1], wave[1:]


def train(model, inputs, targets, context, *, epochs=200, lr=0.1, compile=False):
    """Updates after every time step; returns the model and the loss of every epoch."""
    update = fmapper.jit(step) if compile else step
    trace = []
    for _ in range(epochs):
        state, losses = context, []
        for x, y in zip(inputs, targets, strict=True):
            model, state, loss = update(model, x, state, y, lr)
            losses.append(loss)
        trace.append(sum(map(float, losses)))
    return model, trace


def predictions(model, inputs, context):
    """One prediction per input, as a NumPy array of shape (steps,)."""
    found = []
    for x in inputs:
        prediction, context = model(x, context)
        found.append(float(prediction[0, 0]))
    return np.array(found)


def plot(path, inputs, targets, predicted):
    """Saves a picture of the wave and what the network makes of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = np.arange(1, 1 + len(targets))
    figure, axes = pyplot.subplots()
    axes.plot(steps, targets.ravel(), "o", label="actual")
    axes.plot(steps, predicted, "-", label="predicted")
    axes.set(xlabel="time step", ylabel="value", title="sin(x), one step ahead")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments=None):
    """Predicts before and after training, and saves the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--device", default="cpu", help="cpu, gpu, cuda:1 ...")
    parser.add_argument("--compile", action="store_true", help="record the step once, then replay")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--plot", default="rnn_sine.png")
    options = parser.parse_args(arguments)
    if options.backend == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    inputs, targets = series()
    fresh = ContextRNN(random.key(0))
    context = np.zeros((1, CONTEXT))
    before = predictions(fresh, inputs, context)  # NumPy runs the same forward pass

    there = getattr(fmapper, f"to_{options.backend}")(device=options.device)
    moved = fmap(there, (fresh, list(inputs), list(targets), context))
    start = time.perf_counter()
    model, trace = train(*moved, epochs=options.epochs, compile=options.compile)
    seconds = time.perf_counter() - start

    after = predictions(fmap(fmapper.to_numpy, model), inputs, context)
    wanted = targets.ravel()
    print(f"{fmapper.get_device(model)}: {options.epochs} epochs in {seconds:.1f} s")
    for epoch in sorted({0, options.epochs // 10, options.epochs - 1}):
        print(f"epoch {epoch:>4}: loss {trace[epoch]:.6f}")
    print(
        f"mean error {np.abs(before - wanted).mean():.3f}, now {np.abs(after - wanted).mean():.3f}"
    )
    plot(options.plot, inputs, targets, after)
    print(f"Saved {options.plot}.")


if __name__ == "__main__":
    main()
