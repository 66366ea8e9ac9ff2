"""The losses by which two models are trained."""

from __future__ import annotations

from typing import Any

from fmapper.errors import ConversionError
from fmapper.verification.arrays import dtype_of
from fmapper.verification.differences import pairs_of
from fmapper.verification.models.side import Side, arrays_in
from fmapper.verification.models.trial import Loss


def make_losses(sides: tuple[Side, Side], loss: Any) -> tuple[Loss, Loss]:
    """Returns the loss of each model, as a function of its output.

    Raises:
        ConversionError: It is neither a function nor a pair of functions; or, in training, one does
            not return a scalar.
    """
    if loss is None:
        return _waves(sides)
    pair = loss if isinstance(loss, tuple) else (loss, loss)
    if len(pair) != 2 or not all(map(callable, pair)):
        raise ConversionError(
            "loss takes a function of the output that returns a scalar, or a pair of them."
        )

    def of(name: str, side: Side, function: Any) -> Loss:
        def check(output: Any, constant: Any) -> Any:
            value = function(side.outputs(output))
            shape = tuple(getattr(value, "shape", ()))
            if shape:
                raise ConversionError(
                    f"loss of {name} returns an array of shape {shape}, not a scalar. Return its "
                    "mean or its sum."
                )
            return value

        return check

    return of("a", sides[0], pair[0]), of("b", sides[1], pair[1])


def _waves(sides: tuple[Side, Side]) -> tuple[Loss, Loss]:
    """Returns losses: the sum of the means of all floating arrays times `cos(0), cos(1), ...`."""
    outputs = [side.outputs(call.output) for side in sides if (call := side.call()) is not None]
    pairs = [*pairs_of(*outputs)]
    waves = [
        (pair, np_waves(pair.x))
        for pair in pairs
        if not pair.note and dtype_of(pair.x).startswith(("float", "bfloat"))
    ]

    def of(side: Side, paths: list[str]) -> Loss:
        def total(output: Any, constant: Any) -> Any:
            arrays = arrays_in(side.outputs(output))
            terms = [
                (arrays[path] * constant(wave)).mean()
                for path, (_, wave) in zip(paths, waves, strict=True)
            ]
            return sum(terms[1:], terms[0])

        return total

    if not waves:
        raise ConversionError(
            "gradients and steps need an output with floating numbers, or a loss: pass loss=."
        )
    return of(sides[0], [p.path for p, _ in waves]), of(sides[1], [p.other for p, _ in waves])


def np_waves(x: Any) -> Any:
    """Returns `cos(0), cos(1), ...` in the shape of an array."""
    import numpy as np

    return np.cos(np.arange(x.size)).reshape(x.shape)
