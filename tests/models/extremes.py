"""The largest elements of what a batch norm and a ReLU give, which XLA computes twice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Extremes(nn.Module):
    """Point features as in PointNet: two layers over channels, and the largest of each.

    Args:
        reduce: What is done last, with features of shape (batch, channels, points, 1).
    """

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(35, 32, 1), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64)
        self.reduce = reduce

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.reduce(x)


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: torch.max(x, 2)[0],
    "max and where": lambda x: torch.cat([*torch.max(x, 2)], 1),
    "min": lambda x: (-x).min(2, keepdim=True)[0],
    "amax": lambda x: x.amax(2),
    "amin": lambda x: (-x).amin((2, 3)),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf"), 2),
    "pool": lambda x: nn.functional.adaptive_max_pool2d(x, 1),
}


def inputs() -> Any:
    """Returns three sets of four points."""
    return torch.randn(3, 35, 4, 1, generator=torch.Generator().manual_seed(0))
