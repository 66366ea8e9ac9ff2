"""What depends on the length of a text while a step is recorded."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


def tracked(slots: int = 10) -> Any:
    from fmapper_adapters.torch.generation.ranges import FromLength

    length = torch.full((), 4)
    return length, FromLength(length, slots)


def test_a_range_from_a_length_has_a_known_size() -> None:
    length, mode = tracked()
    with mode:
        assert torch.arange(length, length + 3).tolist() == [4, 5, 6]
        assert torch.arange(length + 1, length + 3).tolist() == [5, 6]


def test_comparisons_that_hold_for_every_length_are_bools() -> None:
    length, mode = tracked()
    with mode:
        assert (length + 1 > 0) is True
        assert (1 - (1 + length) > 0) is False
        assert (length < 10) is True
        assert isinstance(length > 4, torch.Tensor)


def test_limits_that_hold_for_every_length_are_numbers() -> None:
    """torch.export calls `torch.clamp` for `max(0, length)`."""
    length, mode = tracked()
    with mode:
        assert torch.clamp(-1 - length, min=0) == 0
        assert not isinstance(torch.clamp(-1 - length, min=0), torch.Tensor)
        assert torch.clamp(length, min=0) is length
        assert torch.clamp(length + 1, max=10).tolist() == 5
        assert isinstance(torch.clamp(length, max=3), torch.Tensor)
