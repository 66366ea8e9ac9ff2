"""A recurrent network forecasts a sine wave: one program for NumPy, torch and JAX.

The network sees one value of the wave and its own context, six numbers, and predicts the next
value. Its weights change after every step in time; the context goes on as it is, and no gradient
flows through it. It is trained on the first 80 values and tested on the 40 that follow: one step
ahead, and running freely, fed with its own forecasts. Either way it is compared with the naive
forecast, the last value that was seen. Try `--backend jax --compile`, `--device gpu`, `--out runs`.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import fmapper
from fmapper import array_namespace, fmap, functor, random

CONTEXT = 6
SEEN, HELD_OUT = 80, 40  # values of the wave, which has a period of 15.7


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
    """What goes in and what is to come out: arrays of shape (points - 1, 1, 1)."""
    wave = np.sin(2 + 0.4 * np.arange(points)).reshape(-1, 1, 1)
    return wave[:-1], wave[1:]


def train(
    model, inputs, targets, context, *, epochs=200, lr=0.1, compile=False, log=lambda *_: None
):
    """Updates after every time step; returns the model and the loss of every epoch."""
    update = fmapper.jit(step) if compile else step
    trace = []
    for epoch in range(1, epochs + 1):
        state, losses = context, []
        for x, y in zip(inputs, targets, strict=True):
            model, state, loss = update(model, x, state, y, lr)
            losses.append(loss)
        trace.append(sum(map(float, losses)))
        log(epoch, trace[-1])
    return model, trace


def predictions(model, inputs, context):
    """One prediction per input, as a NumPy array of shape (steps,)."""
    found = []
    for x in inputs:
        prediction, context = model(x, context)
        found.append(float(prediction[0, 0]))
    return np.array(found)


def forecast(model, inputs, context, count):
    """What follows the inputs: `count` values, each the network's answer to the one before."""
    found = []
    for x in inputs:
        prediction, context = model(x, context)
    for _ in range(count):
        found.append(float(prediction[0, 0]))
        prediction, context = model(prediction, context)
    return np.array(found)


def show(wanted, free, width=61):
    """Prints the held-out wave and the free forecast as text, time going down."""
    print("\nthe held-out wave (o) and the free forecast (*), or both at one place (@)")
    print(f"  {'-1':<{width}}1")
    for values in zip(wanted, free, strict=True):
        actual, predicted = (round((np.clip(value, -1, 1) + 1) / 2 * width) for value in values)
        line = [" "] * (width + 1)
        line[actual], line[predicted] = "o", "*" if actual != predicted else "@"
        print("  " + "".join(line).rstrip())


def plot(path, seen, wanted, ahead, free):
    """Saves a picture of the wave and of both forecasts."""
    from matplotlib.figure import Figure

    held_out = np.arange(len(seen), len(seen) + len(wanted))
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(len(seen)), seen, "o", label="seen in training")
    axes.plot(held_out, wanted, "o", markerfacecolor="none", label="held out")
    axes.plot(held_out, ahead, "-", label="one step ahead")
    axes.plot(held_out, free, "--", label="running freely")
    axes.set(xlabel="time step", ylabel="value", title="sin(x), forecast")
    axes.legend()
    figure.savefig(path)


def main(arguments=None):
    """Trains, forecasts what was held out, and compares with the naive forecast."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--device", default="cpu", help="cpu, gpu, cuda:1 ...")
    parser.add_argument("--compile", action="store_true", help="record the step once, then replay")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a folder for a picture, instead of one in text")
    options = parser.parse_args(arguments)
    if options.backend == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    inputs, targets = series(SEEN + HELD_OUT)
    context = np.zeros((1, CONTEXT))
    fresh = ContextRNN(random.key(0))

    there = getattr(fmapper, f"to_{options.backend}")(device=options.device)
    known = slice(SEEN - 1)  # the last target is the last value that is seen
    moved = fmap(there, (fresh, list(inputs[known]), list(targets[known]), context))
    print(f"training on {fmapper.get_device(moved)}: {SEEN} values, {options.epochs} epochs")

    def log(epoch, loss):
        if epoch == 1 or epoch % max(options.epochs // 5, 1) == 0:
            print(f"  epoch {epoch:>4}: loss {loss:.6f}", flush=True)

    start = time.perf_counter()
    model, _ = train(*moved, epochs=options.epochs, lr=0.05, compile=options.compile, log=log)
    print(f"  {time.perf_counter() - start:.1f} s")

    model = fmap(fmapper.to_numpy, model)  # NumPy runs the same forward pass
    wave, wanted = inputs.ravel(), targets.ravel()[SEEN - 1 :]
    ahead = predictions(model, inputs, context)[SEEN - 1 :]
    free = forecast(model, inputs[:SEEN], context, HELD_OUT)
    naive = {"one step ahead": wave[SEEN - 1 :], "running freely": wave[SEEN - 1]}
    print(f"\nmean error on {HELD_OUT} held-out values\n{'':<18}{'network':>9}{'naive':>9}")
    for (name, last), ours in zip(naive.items(), (ahead, free), strict=True):
        errors = np.abs(ours - wanted).mean(), np.abs(last - wanted).mean()
        print(f"  {name:<16}{errors[0]:>9.3f}{errors[1]:>9.3f}")
    if options.out is None:
        show(wanted, free)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    plot(options.out / "forecast.png", wave[:SEEN], wanted, ahead, free)
    print(f"Saved {options.out / 'forecast.png'}.")


if __name__ == "__main__":
    main()
