"""Twins in PyTorch of models in PyTorch, written by somebody else."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parity.torch_models import FeedForward


class Bert(nn.Module):
    """With the layers that PyTorch has."""

    def __init__(self, dim: int = 16, vocabulary: int = 29, fault: str = "") -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim)
        self.places = nn.Embedding(16, dim)
        self.types = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, 1e-5 if fault == "eps" else 1e-12)
        gelu = (lambda x: F.gelu(x, approximate="tanh")) if fault == "gelu" else "gelu"
        layer = nn.TransformerEncoderLayer(
            dim, 2, 2 * dim, 0.0, gelu, 1e-12, True, fault == "norm first"
        )
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.fault = fault

    def forward(self, ids: Any, types: Any, lengths: Any) -> Any:
        places = torch.arange(ids.shape[1])
        x = self.norm(self.words(ids) + self.types(types) + self.places(places))
        away = places > lengths[:, None] if self.fault == "mask" else places >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=away)
        return F.linear(x, self.words.weight, self.bias)


class ResNet(nn.Module):
    """In the functional style, with the parameters by name."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.ModuleList(
            nn.Conv2d(i, o, 3, s, 1, bias=False)
            for i, o, s in ((8, 8, 1), (8, 8, 1), (8, 12, 2), (12, 12, 1))
        )
        momentum = 0.9 if fault == "momentum" else 0.1
        self.norm = nn.ModuleList(nn.BatchNorm2d(n, momentum=momentum) for n in (8, 8, 12, 12))
        self.norm[3].eps = 1e-3 if fault == "eps" else 1e-5
        self.down = nn.Sequential(nn.Conv2d(8, 12, 1, 2, bias=False), nn.BatchNorm2d(12))
        self.fc = nn.Linear(12, 5)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        x = F.relu(self.bn(self.stem(x)))
        y = F.relu(self.norm[0](self.conv[0](x)))
        x = F.relu(self.norm[1](self.conv[1](y)) + x)
        order = (3, 2) if self.fault == "swapped norms" else (2, 3)
        y = F.relu(self.norm[order[0]](self.conv[2](x)))
        x = F.relu(self.norm[order[1]](self.conv[3](y)) + self.down(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    """Cell by cell."""

    def __init__(self, dim: int = 12, fault: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(29, dim)
        self.cell = nn.LSTMCell(dim, dim)
        self.norm = nn.LayerNorm(dim, 1e-6 if fault == "eps" else 1e-5)
        self.head = nn.Linear(dim, 5)
        self.fault = fault

    def forward(self, ids: Any) -> Any:
        h = c = torch.zeros(len(ids), self.cell.hidden_size)
        states = []
        for x in self.embed(ids).unbind(1):
            h, c = self.cell(x, (h, c))
            if self.fault == "stop-gradient":
                h, c = h.detach(), c.detach()
            states.append(h)
        x = self.norm(torch.stack(states, 1))
        if self.fault == "dropout in eval":
            x = F.dropout(x, 0.5)
        return self.head(x)


class ViTBlock(nn.Module):
    def __init__(self, dim: int, fault: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, 1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, 1e-6)
        self.mlp = FeedForward(dim)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        batch, length, dim = x.shape
        first, second = self.norm1, self.norm2
        if self.fault == "swapped norms":
            first, second = second, first
        q, k, v = self.qkv(first(x)).reshape(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        scale = 1.0 if self.fault == "scale" else None
        y = F.scaled_dot_product_attention(q, k, v, scale=scale)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(second(x))


class ViT(nn.Module):
    """As timm writes it: one matrix for queries, keys and values."""

    def __init__(self, dim: int = 16, fault: str = "") -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, 5, dim))
        self.blocks = nn.ModuleList(ViTBlock(dim, fault * i) for i in range(2))
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.cls.repeat(x.shape[0], 1, 1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class BYOL(nn.Module):
    """With the target as a module."""

    def __init__(self, dim: int = 12, fault: str = "") -> None:
        super().__init__()
        self.online = nn.Linear(dim, dim)
        self.predictor = nn.Linear(dim, dim)
        self.target = nn.Linear(dim, dim)
        if fault != "frozen":
            self.target.requires_grad_(False)
        self.fault = fault

    @torch.no_grad()
    def update(self) -> None:
        new = 0.9 if self.fault == "momentum" else 0.1
        for old, now in zip(self.target.parameters(), self.online.parameters(), strict=True):
            old.copy_((1 - new) * old + new * now)

    def forward(self, x: Any, y: Any) -> Any:
        guess = F.normalize(self.predictor(F.relu(self.online(x))), dim=-1)
        online = 0.1 * self.online(y)
        wanted = F.relu(F.linear(y, self.target.weight.clone(), self.target.bias.clone())) + (
            online if self.fault == "stop-gradient" else online.detach()
        )
        loss = 2 - 2 * (guess * F.normalize(wanted, dim=-1)).sum(-1).mean()
        if self.training and self.fault != "ema":
            self.update()
        return loss
