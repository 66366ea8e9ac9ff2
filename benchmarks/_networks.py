"""The torch models of `convert.py`: written as the libraries that made them known write them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

# --- images --------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (n, width)."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        y: torch.Tensor = self.layers[-1](x)
        return y


class Bottleneck(nn.Module):
    """Three convolutions around which the input is added (He and others, 2015)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.down: nn.Conv2d | None = None
        if stride != 1 or inside != 4 * width:
            self.down = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
            self.down_bn = nn.BatchNorm2d(4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, inside, h, w) to (n, 4 width, h / stride, w / stride)."""
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return (y + (x if self.down is None else self.down_bn(self.down(x)))).relu()


class ResNet(nn.Module):
    """ResNet with bottlenecks; without classes it gives features."""

    def __init__(self, depths: tuple[int, ...], classes: int | None = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, inside = [], 64
        for i, depth in enumerate(depths):
            for j in range(depth):
                blocks.append(Bottleneck(inside, 64 << i, 2 if i and not j else 1))
                inside = 4 * (64 << i)
        self.blocks = nn.Sequential(*blocks)
        self.head = None if classes is None else nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 3, h, w) to scores (n, classes), or features (n, 2048, h / 32, w / 32)."""
        y: torch.Tensor = self.blocks(self.pool(self.bn1(self.conv1(x)).relu()))
        return y if self.head is None else self.head(y.mean((2, 3)))


class VGG(nn.Module):
    """VGG-19 (Simonyan and Zisserman, 2014)."""

    def __init__(self, hidden: int = 4096) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(depth):
                layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
                inside = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, 1000),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 3, h, w) to scores (n, 1000)."""
        scores: torch.Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return scores


class Detector(nn.Module):
    """A detector as DETR (Carion and others, 2020): features, encoder, decoder with queries."""

    def __init__(self, depths: tuple[int, ...], width: int, layers: int, positions: int) -> None:
        super().__init__()
        heads = width // 32
        self.backbone = ResNet(depths, None)
        self.project = nn.Conv2d(64 * 4 << len(depths) - 1, width, 1)
        self.position = nn.Parameter(torch.rand(positions, width))
        self.queries = nn.Parameter(torch.rand(100, width))
        options: dict[str, Any] = {"dim_feedforward": 8 * width, "batch_first": True}
        self.transformer = nn.Transformer(width, heads, layers, layers, **options)
        self.classes = nn.Linear(width, 92)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images (n, 3, h, w) to scores (n, 100, 92) and boxes (n, 100, 4) from 0 to 1."""
        seen = self.project(self.backbone(x)).flatten(2).transpose(1, 2) + self.position
        found = self.transformer(seen, self.queries.expand(x.shape[0], -1, -1))
        return {"logits": self.classes(found), "boxes": self.boxes(found).sigmoid()}


# --- text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSize:
    """The sizes of a text model: those of BERT-base and of GPT-2 by default."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 30522
    length: int = 512


class Attention(nn.Module):
    """Attention of a text to itself, or of each token to those before it."""

    def __init__(self, size: TextSize, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.query = nn.Linear(size.width, size.width)
        self.key = nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Texts (n, length, width); mask (n, 1, 1, length), true for what counts."""
        parts = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class TextBlock(nn.Module):
    """Attention and two layers, normalised after (BERT) or before (GPT-2)."""

    def __init__(self, size: TextSize, *, causal: bool) -> None:
        super().__init__()
        self.before = causal
        self.attention = Attention(size, causal=causal)
        self.norm1 = nn.LayerNorm(size.width)
        self.wide = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.gelu = nn.GELU(approximate="tanh" if causal else "none")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Texts (n, length, width) to the same."""
        if self.before:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.narrow(self.gelu(self.wide(self.norm2(x))))
        x = self.norm1(x + self.attention(x, mask))
        y: torch.Tensor = self.norm2(x + self.narrow(self.gelu(self.wide(x))))
        return y


class Encoder(nn.Module):
    """An encoder as BERT (Devlin and others, 2018)."""

    def __init__(self, size: TextSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.ModuleList([TextBlock(size, causal=False) for _ in range(size.layers)])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ids (n, length) and a mask of the same shape to (n, length, width)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x, mask[:, None, None].bool())
        return x


class Decoder(nn.Module):
    """A decoder as GPT-2 (Radford and others, 2019), its head tied to its embedding."""

    def __init__(self, size: TextSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([TextBlock(size, causal=True) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (n, length) to scores (n, length, vocabulary)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x, None)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores
