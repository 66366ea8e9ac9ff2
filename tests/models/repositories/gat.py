"""Attention over the neighbours in a graph, as repositories of graph models write it."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class NeighbourAttention(nn.Module):
    """Attends to neighbours alone.

    Args:
        in_features: Features of a node.
        out_features: Features of a node afterwards.
    """

    def __init__(self, in_features, out_features, dropout=0.5, slope=0.2, last=False):
        super().__init__()
        self.dropout = dropout
        self.out_features = out_features
        self.last = last
        self.W = nn.Parameter(torch.empty(size=(in_features, out_features)))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(size=(2 * out_features, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.leaky = nn.LeakyReLU(slope)

    def scores(self, h):
        # each pair's is a sum of one for the node and one for its neighbour
        ours = torch.matmul(h, self.a[: self.out_features, :])
        theirs = torch.matmul(h, self.a[self.out_features :, :])
        return self.leaky(ours + theirs.T)

    def forward(self, x, edges):
        h = torch.mm(x, self.W)
        scores = self.scores(h)
        scores[edges == 0] = -9e15
        weights = F.dropout(F.softmax(scores, dim=1), self.dropout, training=self.training)
        h = torch.matmul(weights, h)
        return h if self.last else F.elu(h)


class GraphNet(nn.Module):
    def __init__(self, features, hidden, classes, heads=2):
        super().__init__()
        self.heads = [NeighbourAttention(features, hidden) for _ in range(heads)]
        for i, head in enumerate(self.heads):
            self.add_module("head_{}".format(i), head)
        self.out = NeighbourAttention(hidden * heads, classes, last=True)

    def forward(self, x, edges):
        x = torch.cat([head(x, edges) for head in self.heads], dim=1)
        return F.log_softmax(self.out(x, edges), dim=1)


def build(width=6):
    kwargs = dict(features=5, hidden=width, classes=3)
    edges = (torch.rand(7, 7) > 0.6).float() + torch.eye(7)
    return GraphNet(**kwargs), (torch.randn(7, 5), edges), ((), kwargs)
