"""A generator of images for classes, as teaching repositories write it."""

import torch
import torch.nn as nn


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class Generator(nn.Module):
    def __init__(self, nz=100, ngf=64, nc=3, n_classes=10, img_size=16):
        super().__init__()
        self.init_size = img_size // 4
        self.label_emb = nn.Embedding(n_classes, nz)
        self.l1 = nn.Sequential(nn.Linear(nz, 2 * ngf * self.init_size**2))

        self.conv_blocks = nn.Sequential(
            nn.BatchNorm2d(2 * ngf),
            nn.ConvTranspose2d(2 * ngf, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(ngf, nc, 3, stride=1, padding=1),
            nn.Tanh(),
        )
        self.apply(weights_init)

    def forward(self, noise, labels):
        gen_input = torch.mul(self.label_emb(labels), noise)
        out = self.l1(gen_input)
        out = out.view(out.shape[0], -1, self.init_size, self.init_size)
        img = self.conv_blocks(out)
        return img


def build(width=6):
    kwargs = dict(nz=12, ngf=width, img_size=8)
    return Generator(**kwargs), (torch.randn(2, 12), torch.tensor([3, 7])), ((), kwargs)
