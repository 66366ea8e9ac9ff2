"""Random numbers that a model and its translation share while they are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def numpy_seeded(seed: int = 0) -> Iterator[None]:
    """Has NumPy's own generator give the same numbers each time, and restores its state."""
    import numpy as np

    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


class Draws:
    """Numbers that depend on their kind, shape and turn, but not on a generator's state.

    The file may draw different shapes in another order than its source.

    Attributes:
        turns: How often each kind and shape was drawn in the current call.
        drawn: The draws of the last complete call, described in a line.
    """

    def __init__(self) -> None:
        self.turns: dict[Any, int] = {}
        self.drawn = ""

    def begin(self) -> None:
        """Starts over, so that each call of a model gets the same numbers."""
        self.turns.clear()

    def end(self) -> None:
        """Records the draws of a call; a compiled call runs only once in Python."""
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
