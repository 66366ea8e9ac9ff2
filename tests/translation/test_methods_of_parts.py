"""Methods of parts that others call are methods of their classes in files, too."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 4)

    def embed(self, ids):
        return self.table(ids) * 2

    def forward(self, x):
        return self.linear(x).relu()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, ids):
        return self.encoder(self.encoder.embed(ids))


@pytest.mark.nightly
def test_methods_of_parts_of_torch_are_methods_of_their_classes():
    net, ids = Both().eval(), torch.tensor([[1, 2, 0]])
    model = fmapper.convert(net, "flax", (ids,), structure=True)
    found = model.encoder.embed(ids.numpy())
    assert np.allclose(found, net.encoder.embed(ids).detach(), atol=1e-6)
    assert np.allclose(model(ids.numpy()), net(ids).detach(), atol=1e-6)
