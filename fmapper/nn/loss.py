"""Losses."""

from __future__ import annotations

from typing import Any

from fmapper.nn.arguments import check_indices, common, floating_kernels, shape_error

_REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    x: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes `-log(softmax(x)[target])`.

    Args:
        x: Logits of shape (batch, classes, ...) or (classes,).
        target: Indices of classes, integers of shape (batch, ...) or (); or probabilities, floats
            of the shape of x.
        ignore_index: The index of targets to leave out; for indices only.
        reduction: "mean" over the targets that count (NaN if none does), "sum", or "none".
        label_smoothing: The share of each target that is spread evenly over all classes.

    Returns:
        A scalar, or for "none" an array of the shape of the indices.
    """
    floating_kernels("cross_entropy", x)
    functional = common("cross_entropy", x, ("target", target))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing={label_smoothing} is not in [0, 1]")
    _check_reduction("cross_entropy", reduction)
    shape, given = tuple(x.shape), tuple(target.shape)
    if not shape or (given != shape and given != (*shape[:1], *shape[2:])[: len(shape) - 1]):
        raise shape_error(
            "cross_entropy",
            "x (batch, classes, ...) and target (batch, ...) or (batch, classes, ...)",
            x=x,
            target=target,
        )
    axis = 0 if len(shape) == 1 else 1
    if given == shape:
        return functional.soft_cross_entropy(x, target, axis, reduction, label_smoothing)
    check_indices("cross_entropy", "target", target)
    return functional.cross_entropy(x, target, axis, ignore_index, reduction, label_smoothing)


def mse_loss(x: Any, target: Any, *, reduction: str = "mean") -> Any:
    """Returns the squared difference.

    Args:
        x: Of any shape.
        target: Of the same shape.
        reduction: "mean", "sum", or "none".
    """
    floating_kernels("mse_loss", x)
    functional = common("mse_loss", x, ("target", target))
    _check_reduction("mse_loss", reduction)
    if tuple(x.shape) != tuple(target.shape):
        raise shape_error("mse_loss", "x and target of one shape", x=x, target=target)
    return functional.mse_loss(x, target, reduction)


def _check_reduction(function: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"{function}: reduction={reduction!r} is not one of {', '.join(_REDUCTIONS)}"
        )
