"""Radiance fields: points and directions to densities and colours."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class PositionalEncoding(nn.Module):
    def __init__(self, num_freqs, include_input=True):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(num_freqs), persistent=False)
        self.include_input = include_input

    def forward(self, x):
        scaled = (x[..., None, :] * self.freqs[:, None]).flatten(-2)
        encoded = torch.cat([torch.sin(scaled), torch.cos(scaled)], -1)
        return torch.cat([x, encoded], -1) if self.include_input else encoded


# Model
class NeRF(nn.Module):
    def __init__(
        self, D=8, W=256, input_freqs=4, view_freqs=2, output_ch=4, skips=[4], use_viewdirs=False
    ):
        """ """
        super(NeRF, self).__init__()
        self.D = D
        self.W = W
        self.skips = skips
        self.use_viewdirs = use_viewdirs
        self.embed_pts = PositionalEncoding(input_freqs)
        self.embed_views = PositionalEncoding(view_freqs)
        self.input_ch = input_ch = 3 * (1 + 2 * input_freqs)
        self.input_ch_views = input_ch_views = 3 * (1 + 2 * view_freqs)

        self.pts_linears = nn.ModuleList(
            [nn.Linear(input_ch, W)]
            + [
                nn.Linear(W, W) if i not in self.skips else nn.Linear(W + input_ch, W)
                for i in range(D - 1)
            ]
        )

        ### Implementation according to the official code release
        self.views_linears = nn.ModuleList([nn.Linear(input_ch_views + W, W // 2)])

        if use_viewdirs:
            self.feature_linear = nn.Linear(W, W)
            self.alpha_linear = nn.Linear(W, 1)
            self.rgb_linear = nn.Linear(W // 2, 3)
        else:
            self.output_linear = nn.Linear(W, output_ch)

    def forward(self, x):
        input_pts, input_views = torch.split(x, [3, 3], dim=-1)
        input_pts, input_views = self.embed_pts(input_pts), self.embed_views(input_views)
        h = input_pts
        for i, l in enumerate(self.pts_linears):
            h = self.pts_linears[i](h)
            h = F.relu(h)
            if i in self.skips:
                h = torch.cat([input_pts, h], -1)

        if self.use_viewdirs:
            alpha = self.alpha_linear(h)
            feature = self.feature_linear(h)
            h = torch.cat([feature, input_views], -1)

            for i, l in enumerate(self.views_linears):
                h = self.views_linears[i](h)
                h = F.relu(h)

            rgb = self.rgb_linear(h)
            outputs = torch.cat([rgb, alpha], -1)
        else:
            outputs = self.output_linear(h)

        return outputs


def build(width=16):
    kwargs = dict(D=4, W=width, skips=[1], use_viewdirs=True)
    return NeRF(**kwargs), (torch.randn(2, 5, 6),), ((), kwargs)
