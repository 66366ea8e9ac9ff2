"""The originals: small models of PyTorch, as papers and courses have them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (12, 32, 32, 5), dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes[0], sizes[1])
        self.norm1 = nn.LayerNorm(sizes[1])
        self.fc2 = nn.Linear(sizes[1], sizes[2])
        self.norm2 = nn.LayerNorm(sizes[2])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(sizes[2], sizes[3])

    def forward(self, x: Any) -> Any:
        x = self.dropout(F.gelu(self.norm1(self.fc1(x))))
        x = x + F.gelu(self.norm2(self.fc2(x)))
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.dropout(x.mean((2, 3))))


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.down = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else None
        self.bn3 = nn.BatchNorm2d(outer) if stride > 1 else None

    def forward(self, x: Any) -> Any:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.down is not None:
            x = self.bn3(self.down(x))
        return F.relu(x + y)


class ResNet(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.layer1 = BasicBlock(8, 8, 1)
        self.layer2 = BasicBlock(8, 12, 2)
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Any) -> Any:
        x = self.layer2(self.layer1(F.relu(self.bn(self.stem(x)))))
        return self.fc(x.mean((2, 3)))


class Attention(nn.Module):
    """Multi-head attention with all that the models below ask for."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int = 0, *, bias: bool = True, scaled: bool = True
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.scale = self.size**-0.5 if scaled else 1.0
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(dim, kv_heads * self.size, bias=bias)
        self.o = nn.Linear(dim, dim, bias=bias)

    def forward(
        self, x: Any, context: Any = None, mask: Any = None, bias: Any = None, rope: Any = None
    ) -> Any:
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k = self.k(context).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        v = self.v(context).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        v = v.repeat_interleave(self.heads // self.kv_heads, 1)
        scores = q @ k.transpose(-1, -2) * self.scale
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rope_tables(length: int, size: int, dtype: Any) -> tuple[Any, Any]:
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def causal(length: int) -> Any:
    return torch.ones(length, length, dtype=torch.bool).tril()


class FeedForward(nn.Module):
    def __init__(self, dim: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.approximate = approximate

    def forward(self, x: Any) -> Any:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class Block(nn.Module):
    """A pre-norm block of a transformer."""

    def __init__(self, dim: int, heads: int, eps: float, approximate: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.mlp = FeedForward(dim, approximate)

    def forward(self, x: Any, mask: Any = None) -> Any:
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, 5, dim))
        self.blocks = nn.ModuleList(Block(dim, 2, 1e-6, "none") for _ in range(depth))
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class BertLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim, 1e-12)
        self.mlp = FeedForward(dim)
        self.norm2 = nn.LayerNorm(dim, 1e-12)

    def forward(self, x: Any, mask: Any) -> Any:
        x = self.norm1(x + self.attn(x, mask=mask))
        return self.norm2(x + self.mlp(x))


class Bert(nn.Module):
    """Returns the logits of each position, with the embedding as the last matrix."""

    def __init__(self, dim: int = 16, depth: int = 2, vocabulary: int = 29) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim)
        self.places = nn.Embedding(16, dim)
        self.types = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, 1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, 2) for _ in range(depth))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Any, types: Any, lengths: Any) -> Any:
        places = torch.arange(ids.shape[1])
        x = self.norm(self.words(ids) + self.places(places) + self.types(types))
        mask = (places < lengths[:, None])[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x @ self.words.weight.T + self.bias


class GPT(nn.Module):
    """Returns logits, or with labels the loss of predicting the next token."""

    def __init__(self, dim: int = 16, depth: int = 2, vocabulary: int = 29) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.wpe = nn.Embedding(16, dim)
        self.h = nn.ModuleList(Block(dim, 2, 1e-5, "tanh") for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, ids: Any, labels: Any = None) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x, causal(ids.shape[1]))
        logits = self.ln_f(x) @ self.wte.weight.T
        return logits if labels is None else next_token_loss(logits, labels)


def next_token_loss(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Any) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LlamaLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(dim, 1e-5)
        self.attn = Attention(dim, 4, 2, bias=False)
        self.norm2 = RMSNorm(dim, 1e-5)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Any, mask: Any, rope: Any) -> Any:
        x = x + self.attn(self.norm1(x), mask=mask, rope=rope)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 2, vocabulary: int = 29) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(LlamaLayer(dim) for _ in range(depth))
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Any, labels: Any = None) -> Any:
        x = self.embed(ids)
        rope = rope_tables(ids.shape[1], 4, x.dtype)
        for layer in self.layers:
            x = layer(x, causal(ids.shape[1]), rope)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)


class T5Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(dim, 1e-6)
        self.attn = Attention(dim, 2, bias=False, scaled=False)
        self.norm2 = RMSNorm(dim, 1e-6)
        self.wi = nn.Linear(dim, 2 * dim, bias=False)
        self.wo = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Any, bias: Any, mask: Any) -> Any:
        x = x + self.attn(self.norm1(x), bias=bias, mask=mask)
        return x + self.wo(F.relu(self.wi(self.norm2(x))))


class T5Encoder(nn.Module):
    def __init__(self, dim: int = 16, depth: int = 2, vocabulary: int = 29) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.buckets = nn.Embedding(8, 2)
        self.layers = nn.ModuleList(T5Layer(dim) for _ in range(depth))
        self.norm = RMSNorm(dim, 1e-6)

    def forward(self, ids: Any, lengths: Any) -> Any:
        x = self.embed(ids)
        at = torch.arange(ids.shape[1])
        away = at[None] - at[:, None]
        bucket = (away > 0).long() * 4 + away.abs().clamp(max=3)
        bias = self.buckets(bucket).permute(2, 0, 1)
        mask = (at < lengths[:, None])[:, None, None]
        for layer in self.layers:
            x = layer(x, bias, mask)
        return self.norm(x)


class Recurrent(nn.Module):
    """Tags each position with an LSTM or a GRU."""

    def __init__(self, kind: str, dim: int = 12, tags: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, dim)
        self.rnn = (nn.LSTM if kind == "lstm" else nn.GRU)(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, tags)

    def forward(self, ids: Any) -> Any:
        x, _ = self.rnn(self.embed(ids))
        return self.head(self.norm(x))


class UBlock(nn.Module):
    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inner)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.norm2 = nn.GroupNorm(4, outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Any, time: Any) -> Any:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Predicts noise, as in DDPM."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time1 = nn.Linear(width, width)
        self.time2 = nn.Linear(width, width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = UBlock(width, width, width)
        self.shrink = nn.Conv2d(width, width, 3, 2, 1)
        self.middle = UBlock(width, width, width)
        self.grow = nn.Conv2d(width, width, 3, padding=1)
        self.up = UBlock(2 * width, width, width)
        self.last = nn.Conv2d(width, 3, 3, padding=1)
        self.width = width

    def forward(self, x: Any, t: Any) -> Any:
        half = self.width // 2
        angles = t[:, None].float() * torch.exp(-math.log(10_000) * torch.arange(half) / half)
        time = self.time2(F.silu(self.time1(torch.cat((angles.sin(), angles.cos()), -1))))
        x = self.stem(x)
        skip = self.down(x, time)
        y = self.middle(self.shrink(skip), time)
        y = self.grow(F.interpolate(y, scale_factor=2, mode="nearest"))
        return self.last(self.up(torch.cat((y, skip), 1), time))


class MixerBlock(nn.Module):
    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.tokens = FeedForward(tokens)
        self.norm2 = nn.LayerNorm(dim)
        self.channels = FeedForward(dim)

    def forward(self, x: Any) -> Any:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(dim, 4) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class MoE(nn.Module):
    """Sends each token to two of four experts, and adds the loss that balances them."""

    def __init__(self, dim: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.zeros(experts, dim, 2 * dim))
        self.w2 = nn.Parameter(torch.zeros(experts, 2 * dim, dim))
        self.b2 = nn.Parameter(torch.zeros(experts, dim))

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        chances = self.router(y).float().softmax(-1)
        best, chosen = chances.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        gates = torch.zeros_like(chances).scatter(-1, chosen, best).to(x.dtype)
        inner = F.gelu(torch.einsum("bsd,edf->bsef", y, self.w1))
        outer = torch.einsum("bsef,efd->bsed", inner, self.w2) + self.b2
        return x + torch.einsum("bsed,bse->bsd", outer, gates), (chances.mean((0, 1)) ** 2).sum()


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.fc2(F.gelu(self.fc1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 2, 2)
        self.blocks = nn.ModuleList(ConvNeXtBlock(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


class ActorCritic(nn.Module):
    """A policy and a value; the value does not train the trunk."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.mean = nn.Linear(dim, 2)
        self.log_std = nn.Parameter(torch.zeros(2))
        self.value1 = nn.Linear(dim, dim)
        self.value2 = nn.Linear(dim, 1)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.fc2(torch.tanh(self.fc1(x))))
        value = self.value2(torch.tanh(self.value1(x.detach())))
        return self.mean(x), self.log_std.exp(), value.squeeze(-1)


class VAE(nn.Module):
    """Returns the reconstruction and the divergence; the noise is an input."""

    def __init__(self, dim: int = 12, latent: int = 4) -> None:
        super().__init__()
        self.enc = nn.Linear(dim, 16)
        self.mu = nn.Linear(16, latent)
        self.logvar = nn.Linear(16, latent)
        self.dec1 = nn.Linear(latent, 16)
        self.dec2 = nn.Linear(16, dim)

    def forward(self, x: Any, noise: Any) -> Any:
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        y = torch.sigmoid(self.dec2(F.relu(self.dec1(z))))
        return y, -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(-1).mean()


class Perceiver(nn.Module):
    """Queries that are learned look at tokens, of which some are padding."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(1, 3, dim))
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn = Attention(dim, 4)
        self.mlp = FeedForward(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Any, lengths: Any) -> Any:
        mask = (torch.arange(x.shape[1]) < lengths[:, None])[:, None, None]
        queries = self.queries.expand(len(x), -1, -1)
        y = queries + self.attn(self.norm1(queries), self.norm2(x), mask=mask)
        return self.head((y + self.mlp(y)).mean(1))


class BYOL(nn.Module):
    """Learns to predict its own moving average; returns the loss."""

    def __init__(self, dim: int = 12, decay: float = 0.9) -> None:
        super().__init__()
        self.online = nn.Linear(dim, dim)
        self.predictor = nn.Linear(dim, dim)
        self.register_buffer("target_weight", torch.zeros(dim, dim))
        self.register_buffer("target_bias", torch.zeros(dim))
        self.decay = decay

    def forward(self, x: Any, y: Any) -> Any:
        guess = self.predictor(F.relu(self.online(x)))
        wanted = F.relu(F.linear(y, self.target_weight.clone(), self.target_bias.clone()))
        wanted = (wanted + 0.1 * self.online(y)).detach()
        away = F.normalize(guess, dim=-1) - F.normalize(wanted, dim=-1)
        if self.training:
            with torch.no_grad():
                self.target_weight.lerp_(self.online.weight, 1 - self.decay)
                self.target_bias.lerp_(self.online.bias, 1 - self.decay)
        return away.square().sum(-1).mean()


class VQ(nn.Module):
    """Quantizes with a codebook that is a moving average; gradients pass straight through."""

    def __init__(self, dim: int = 6, codes: int = 8) -> None:
        super().__init__()
        self.enc = nn.Linear(dim, dim)
        self.register_buffer("codes", torch.zeros(codes, dim))
        self.register_buffer("counts", torch.ones(codes))
        self.dec = nn.Linear(dim, dim)

    def forward(self, x: Any) -> Any:
        z = self.enc(x)
        away = (z[:, None] - self.codes).square().sum(-1)
        hot = F.one_hot(away.argmin(-1), len(self.codes)).to(z.dtype)
        code = hot @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(0.1 * hot.sum(0))
                self.codes.mul_(0.9).add_(0.1 * hot.T @ z)
        commitment = (z - code.detach()).square().mean()
        return self.dec(z + (code - z).detach()), commitment


class CLIP(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.image1 = nn.Linear(10, dim)
        self.image2 = nn.Linear(dim, dim)
        self.text1 = nn.Embedding(29, dim)
        self.text2 = nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, image: Any, ids: Any) -> Any:
        a = F.normalize(self.image2(F.gelu(self.image1(image))), dim=-1)
        b = F.normalize(self.text2(self.text1(ids).mean(1)), dim=-1)
        return self.logit_scale.exp() * a @ b.T


class Finetune(nn.Module):
    """A new head on a backbone whose weights stay."""

    def __init__(self, dim: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.backbone = FeedForward(dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, 5)
        self.backbone.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.dropout(self.norm(x + self.backbone(x))))


class DQN(nn.Module):
    """A duelling network and its target; returns the error of the Bellman equation."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, dim)
        self.value = nn.Linear(dim, 1)
        self.advantage = nn.Linear(dim, 3)

    def q(self, x: Any) -> Any:
        h = F.relu(self.trunk(x))
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(-1, keepdim=True)

    def forward(self, state: Any, action: Any, reward: Any, after: Any) -> Any:
        taken = self.q(state).gather(-1, action[:, None]).squeeze(-1)
        wanted = reward + 0.9 * self.q(after).detach().amax(-1)
        return F.smooth_l1_loss(taken, wanted)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(3))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(3))
        self.last = nn.Conv1d(width, 4, 1)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for i, (filter_, gate) in enumerate(zip(self.filters, self.gates, strict=True)):
            y = F.pad(x, (2**i, 0))
            x = x + torch.tanh(filter_(y)) * torch.sigmoid(gate(y))
        return self.last(F.relu(x))
