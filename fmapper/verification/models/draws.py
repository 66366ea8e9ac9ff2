"""Random numbers that a model and its translation are both given while they are compared."""

from __future__ import annotations

from typing import Any


class Draws:
    """Numbers by their kind, shape and turn, so that they do not depend on a generator's state.

    Draws of other shapes may come in another order in the file than in its source.

    Attributes:
        turns: How often each kind and shape was drawn in the present call.
        drawn: What the last whole call drew, as a line.
    """

    def __init__(self) -> None:
        self.turns: dict[Any, int] = {}
        self.drawn = ""

    def begin(self) -> None:
        """Begins anew: each call of a model is given the same numbers."""
        self.turns.clear()

    def end(self) -> None:
        """Notes what a call has drawn; one that is compiled runs but once in Python."""
        self.drawn = ", ".join(
            f"{n} {kind} {shape}" for (kind, shape), n in sorted(self.turns.items())
        )

    def take(self, kind: str, shape: Any) -> Any:
        """Returns a NumPy array of float32, `normal` or `uniform` in [0, 1)."""
        import numpy as np

        shape = tuple(map(int, shape))
        turn = self.turns[kind, shape] = self.turns.get((kind, shape), 0) + 1
        generator = np.random.default_rng([turn, kind == "normal", *shape])
        if kind == "normal":
            return generator.standard_normal(shape, np.float32)
        return generator.random(shape, np.float32)
