"""Compares the effect of dropout on the outputs of two models, over many seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def with_effect(drawn: Mapping[float, Sequence[Any]]) -> dict[float, Sequence[Any]]:
    """Returns the outputs for each seed by the rate of dropout, without those of no effect.

    Dropout that a call leaves out gives the same outputs for all seeds. The rate nan is for all
    other noise, and stays.
    """
    import numpy as np

    def varies(outputs: Sequence[Any]) -> bool:
        pairs = (pair for each in outputs for pair in zip(outputs[0], each, strict=True))
        return not all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)

    return {rate: each for rate, each in drawn.items() if math.isnan(rate) or varies(each)}


class Spread:
    """Means and variances, over seeds, of the deviations of outputs from those without dropout.

    For each output, statistics of single elements are their deviations and the squares of these.
    Statistics pooled over all elements are the share of the output without dropout in it, the mean
    square of the deviations, the numbers of elements that are not finite and that are zero, and the
    mean squares of sums of deviations with fixed signs along each axis: these distinguish dropout
    before a linear layer, after which elements vary together, from dropout after it.

    Args:
        still: The outputs without dropout, of which only floating ones are used.
    """

    SIGNS = 8  # sums along each axis

    def __init__(self, still: Any) -> None:
        import numpy as np

        self._places = [i for i, x in enumerate(still) if np.asarray(x).dtype.kind in "fc"]
        self._still = [self._real(still[i]) for i in self._places]
        self._pooled = [4 + self.SIGNS * x.ndim for x in self._still]
        self._sums: Any = 0.0
        self._squares: Any = 0.0
        self.count = 0

    def add(self, outputs: Any) -> None:
        """Adds the outputs for a seed."""
        import numpy as np

        parts: list[Any] = []
        for still, i in zip(self._still, self._places, strict=True):
            values = self._real(outputs[i])
            base = np.where(np.isfinite(still), still, 0)
            scale = np.abs(base).max(initial=0) or 1.0
            distances = (values - still) / scale
            is_finite = np.isfinite(distances)
            distances = np.where(is_finite, distances, 0)
            base = base / scale
            share = (base * distances).sum() / max((base**2).sum(), 1e-30)
            parts += [distances.ravel(), distances.ravel() ** 2, [share]]
            parts += [[(distances**2).mean(), (~is_finite).mean(), (values == 0).mean()]]
            parts += [self._sum_with_signs(distances, axis) for axis in range(distances.ndim)]
        values = np.concatenate(parts) if parts else np.zeros(0)
        self._sums, self._squares = self._sums + values, self._squares + values**2
        self.count += 1

    def result(self) -> Any:
        """Returns the means and the variances as two rows."""
        import numpy as np

        mean = self._sums / self.count
        variance = (self._squares - self.count * mean**2) / max(self.count - 1, 1)
        return np.stack([mean, np.maximum(variance, 0)])

    def distance(self, other: Any) -> float:
        """Returns the largest distance from the result of as many other runs, in standard errors.

        Distances of single elements are the largest of many, and count for three quarters. For two
        equal models the difference over n runs is symmetric, so that it exceeds t of its own
        standard errors with a probability of at most 2 exp(-t**2 / 2), whatever the distribution
        (Hoeffding): 3e-8 of the pooled values and 3e-14 of the others exceed a distance of 6.
        """
        import numpy as np

        mean, variance = self.result()
        expected, spread = other
        if mean.shape != expected.shape:
            return float("inf")
        error = np.sqrt((variance + spread) / self.count + 1e-4**2)
        distances = np.abs(mean - expected) / error
        pooled: list[int] = []
        end = 0
        for still, count in zip(self._still, self._pooled, strict=True):
            end += 2 * still.size + count
            pooled += range(end - count, end)
        alone = np.delete(distances, pooled)
        return float(max(distances[pooled].max(initial=0), 0.75 * alone.max(initial=0)))

    @classmethod
    def _sum_with_signs(cls, x: Any, axis: int) -> Any:
        """Returns the mean squares of sums along an axis, each with different signs."""
        import numpy as np

        length = x.shape[axis]
        signs = np.random.default_rng(length).choice((-1.0, 1.0), (cls.SIGNS, length))
        sums = np.tensordot(signs, x, (1, axis)).reshape(cls.SIGNS, -1)
        return (sums**2).mean(1) / max(length, 1) if sums.size else np.zeros(cls.SIGNS)

    @staticmethod
    def _real(x: Any) -> Any:
        import numpy as np

        x = np.asarray(x)
        x = np.stack([x.real, x.imag]) if x.dtype.kind == "c" else x
        return x.astype(np.float64)
