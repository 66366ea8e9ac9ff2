"""A text model of dilated causal convolutions with normed weights, as sequence repositories write it."""

import torch
import torch.nn as nn
from torch.nn.utils import weight_norm


class Trim(nn.Module):
    """Cuts what a padded convolution has seen of the future."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class CausalBlock(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, dilation, dropout=0.2):
        super().__init__()
        reach = (kernel_size - 1) * dilation
        self.body = nn.Sequential()
        for i, channels in enumerate((in_channels, out_channels)):
            conv = nn.Conv1d(channels, out_channels, kernel_size, padding=reach, dilation=dilation)
            self.body.add_module(f"conv{i}", weight_norm(conv))
            self.body.add_module(f"trim{i}", Trim(reach))
            self.body.add_module(f"act{i}", nn.PReLU())
            self.body.add_module(f"drop{i}", nn.Dropout(dropout))
        is_same = in_channels == out_channels
        self.skip = None if is_same else nn.Conv1d(in_channels, out_channels, 1)
        self.reset()

    def reset(self):
        if self.skip is not None:
            self.skip.weight.data.normal_(0, 0.01)

    def forward(self, x):
        residual = x if self.skip is None else self.skip(x)
        return torch.relu(self.body(x) + residual)


class CausalNet(nn.Module):
    def __init__(self, vocabulary, width, channels, kernel_size=2, dropout=0.2):
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        blocks = []
        for level, size in enumerate(channels):
            before = width if level == 0 else channels[level - 1]
            blocks += [CausalBlock(before, size, kernel_size, 2**level, dropout)]
        self.blocks = nn.Sequential(*blocks)
        self.decoder = nn.Linear(channels[-1], vocabulary)
        bound = 0.1
        self.encoder.weight.data.uniform_(-bound, bound)
        self.decoder.weight.data *= 0.5  # begins with small logits
        self.decoder.bias.data.fill_(0)

    def forward(self, tokens):
        """Gives logits of (batch, length, vocabulary)."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens have {tokens.dim()} dimensions, {tokens.size(0)} first")
        x = self.encoder(tokens).transpose(1, 2)
        return self.decoder(self.blocks(x).transpose(1, 2))


def build(width=8):
    args, kwargs = (11, width), dict(channels=[6, 8])
    return CausalNet(*args, **kwargs), (torch.randint(0, 11, (2, 9)),), (args, kwargs)
