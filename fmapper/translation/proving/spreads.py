"""Compares the effect of dropout on the outputs of two models, over many seeds."""

from __future__ import annotations

from typing import Any


class Spread:
    """Means and variances, over seeds, of how far outputs are from those without dropout.

    Of each output these are the distances of its elements, and their squares; then the share of the
    output without dropout that is in it, the mean square of the distances, and how many elements
    are not finite.

    Args:
        still: The outputs without dropout; those that are not floating do not count.
    """

    def __init__(self, still: Any) -> None:
        import numpy as np

        self._places = [i for i, x in enumerate(still) if np.asarray(x).dtype.kind in "fc"]
        self._still = [self._flat(still[i]) for i in self._places]
        self._sums: Any = 0.0
        self._squares: Any = 0.0
        self.count = 0

    def add(self, outputs: Any) -> None:
        """Adds the outputs for a seed."""
        import numpy as np

        parts: list[Any] = []
        for still, i in zip(self._still, self._places, strict=True):
            known = np.where(np.isfinite(still), still, 0)
            scale = np.abs(known).max(initial=0) or 1.0
            apart = (self._flat(outputs[i]) - still) / scale
            is_finite = np.isfinite(apart)
            apart = np.where(is_finite, apart, 0)
            known = known / scale
            share = (known * apart).sum() / max((known**2).sum(), 1e-30)
            parts += [apart, apart**2, [share, (apart**2).mean(), (~is_finite).mean()]]
        found = np.concatenate(parts) if parts else np.zeros(0)
        self._sums, self._squares = self._sums + found, self._squares + found**2
        self.count += 1

    def result(self) -> Any:
        """Returns the means and the variances, in two rows."""
        import numpy as np

        mean = self._sums / self.count
        variance = (self._squares - self.count * mean**2) / max(self.count - 1, 1)
        return np.stack([mean, np.maximum(variance, 0)])

    def distance(self, other: Any) -> float:
        """Returns the largest distance from the result of as many runs, in standard errors.

        Those of single elements are the largest of many, and count for three quarters.
        """
        import numpy as np

        mean, variance = self.result()
        known, spread = other
        if mean.shape != known.shape:
            return float("inf")
        error = np.sqrt((variance + spread) / self.count + 1e-4**2)
        apart = np.abs(mean - known) / error
        ends = np.cumsum([2 * x.size + 3 for x in self._still])
        pooled = [int(end) - i for end in ends for i in (3, 2, 1)]
        alone = np.delete(apart, pooled)
        return float(max(apart[pooled].max(initial=0), 0.75 * alone.max(initial=0)))

    @staticmethod
    def _flat(x: Any) -> Any:
        import numpy as np

        x = np.asarray(x)
        x = np.stack([x.real, x.imag]) if x.dtype.kind == "c" else x
        return x.astype(np.float64).ravel()
