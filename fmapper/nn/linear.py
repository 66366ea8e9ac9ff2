"""Linear maps and embeddings."""

from __future__ import annotations

from typing import Any

from fmapper.nn.arguments import check_indices, common, kernels, shape_error


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Computes `x @ weight.T + bias`.

    Args:
        x: Of shape (..., in).
        weight: Of shape (out, in).
        bias: Of shape (out,).

    Returns:
        Of shape (..., out).

    Examples:
        >>> import numpy as np
        >>> from fmapper.nn import functional as F
        >>> F.linear(np.ones((2, 3)), np.ones((4, 3))).shape
        (2, 4)
    """
    functional = common("linear", x, ("weight", weight), ("bias", bias))
    if len(weight.shape) != 2 or not len(x.shape) or x.shape[-1] != weight.shape[1]:
        raise shape_error("linear", "x (..., in) and weight (out, in)", x=x, weight=weight)
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        raise shape_error("linear", "a bias (out,)", weight=weight, bias=bias)
    return functional.linear(x, weight, bias)


def embedding(x: Any, weight: Any) -> Any:
    """Returns the rows of a table.

    Args:
        x: Indices, integers of any shape.
        weight: The table, of shape (rows, width).

    Returns:
        Of shape (*x.shape, width). An index that is negative or too large is an IndexError in NumPy
        and torch; JAX cannot raise in compiled programs and returns a row of NaN.
    """
    functional = common("embedding", x, ("weight", weight))
    if len(weight.shape) != 2:
        raise shape_error("embedding", "a weight (rows, width)", weight=weight)
    check_indices("embedding", "x", x)
    return functional.embedding(x, weight)


def one_hot(x: Any, num_classes: int, *, dtype: Any = None) -> Any:
    """Returns one-hot vectors: one at each index, zero elsewhere.

    Args:
        x: Indices, integers of any shape.
        num_classes: The number of classes.
        dtype: The name of a dtype; None for the dtype of x.

    Returns:
        Of shape (*x.shape, num_classes); an index out of range gives zeros.
    """
    functional = kernels("one_hot", x)
    if num_classes < 1:
        raise ValueError(f"one_hot: num_classes={num_classes} must be at least 1")
    check_indices("one_hot", "x", x)
    return functional.one_hot(x, num_classes, dtype)
