"""A classifier of point clouds, as teaching repositories write it."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable


class STNkd(nn.Module):
    def __init__(self, k=64, width=16):
        super(STNkd, self).__init__()
        self.conv1 = torch.nn.Conv1d(k, width, 1)
        self.conv2 = torch.nn.Conv1d(width, 2 * width, 1)
        self.fc1 = nn.Linear(2 * width, width)
        self.fc2 = nn.Linear(width, k * k)
        self.relu = nn.ReLU()

        self.bn1 = nn.BatchNorm1d(width)
        self.bn2 = nn.BatchNorm1d(2 * width)
        self.bn3 = nn.BatchNorm1d(width)

        self.k = k

    def forward(self, x):
        batchsize = x.size()[0]
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(x, 2, keepdim=True)[0]
        x = x.view(batchsize, -1)

        x = F.relu(self.bn3(self.fc1(x)))
        x = self.fc2(x)

        iden = (
            Variable(torch.from_numpy(np.eye(self.k).flatten().astype(np.float32)))
            .view(1, self.k * self.k)
            .repeat(batchsize, 1)
        )
        if x.is_cuda:
            iden = iden.cuda()
        x = x + iden
        x = x.view(-1, self.k, self.k)
        return x


class PointNetfeat(nn.Module):
    def __init__(self, global_feat=True, feature_transform=False, width=16):
        super(PointNetfeat, self).__init__()
        self.stn = STNkd(k=3, width=width)
        self.conv1 = torch.nn.Conv1d(3, width, 1)
        self.conv2 = torch.nn.Conv1d(width, 2 * width, 1)
        self.bn1 = nn.BatchNorm1d(width)
        self.bn2 = nn.BatchNorm1d(2 * width)
        self.width = width
        self.global_feat = global_feat
        self.feature_transform = feature_transform
        if self.feature_transform:
            self.fstn = STNkd(k=width, width=width)

    def forward(self, x):
        n_pts = x.size()[2]
        trans = self.stn(x)
        x = x.transpose(2, 1)
        x = torch.bmm(x, trans)
        x = x.transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))

        if self.feature_transform:
            trans_feat = self.fstn(x)
            x = x.transpose(2, 1)
            x = torch.bmm(x, trans_feat)
            x = x.transpose(2, 1)
        else:
            trans_feat = None

        pointfeat = x
        x = self.bn2(self.conv2(x))
        x = torch.max(x, 2, keepdim=True)[0]
        x = x.view(-1, 2 * self.width)
        if self.global_feat:
            return x, trans, trans_feat
        else:
            x = x.view(-1, 2 * self.width, 1).repeat(1, 1, n_pts)
            return torch.cat([x, pointfeat], 1), trans, trans_feat


class PointNetCls(nn.Module):
    def __init__(self, k=2, feature_transform=False, width=16):
        super(PointNetCls, self).__init__()
        self.feature_transform = feature_transform
        self.feat = PointNetfeat(global_feat=True, feature_transform=feature_transform, width=width)
        self.fc1 = nn.Linear(2 * width, width)
        self.fc2 = nn.Linear(width, k)
        self.dropout = nn.Dropout(p=0.3)
        self.bn1 = nn.BatchNorm1d(width)
        self.relu = nn.ReLU()

    def forward(self, x):
        x, trans, trans_feat = self.feat(x)
        x = F.relu(self.bn1(self.dropout(self.fc1(x))))
        x = self.fc2(x)
        return F.log_softmax(x, dim=1), trans, trans_feat


def build(width=8):
    model = PointNetCls(k=5, feature_transform=True, width=width)
    return model, (torch.randn(4, 3, 10),), ((), dict(k=5, feature_transform=True, width=width))
