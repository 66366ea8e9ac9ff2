"""Models that draw random numbers: a file draws its own, and is proved with those of torch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate, translate_proved  # noqa: E402

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.1))
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)
        self.decoder = nn.Linear(3, 8)

    def forward(self, x):
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        std = torch.exp(0.5 * spread)
        noise = torch.randn_like(std)
        return self.decoder(mean + noise * std), mean, spread


class Noisy(nn.Module):
    """Draws with each operation that a proof knows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        count = x.shape[0]
        y = nn.functional.linear(x, self.weight + torch.randn(3, 8))
        y = torch.distributions.Normal(y, 0.5).rsample() + torch.normal(0.0, 2.0, (count, 3))
        y = y * torch.rand(count, 1) + torch.rand_like(y)
        y = y * torch.bernoulli(torch.full_like(y, 0.7)) * torch.empty_like(y).bernoulli_(0.6)
        y = y + torch.empty_like(y).normal_(1.0, 0.1) * torch.empty(3).uniform_(-1, 2)
        y = y + torch.empty_like(y).exponential_() - torch.empty_like(y).exponential_(2.0)
        y = y + torch.randint(5, (count, 1)) - torch.randint(2, 9, (3,))
        y = y + torch.randint_like(y, 4) + torch.empty_like(y).log_normal_(0.1, 0.2)
        return nn.functional.gumbel_softmax(y[torch.randperm(count)], tau=0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox", "jax"])
@pytest.mark.parametrize("model", [Autoencoder, Noisy])
def test_both_modes_are_proved_with_the_same_numbers(model, target):
    if target == "equinox":
        pytest.importorskip("equinox")
    source, proof, reason = translate_proved(model(), target, (X,))
    assert proof, proof
    assert not reason
    assert source.modes == ("eval", "train")


@pytest.mark.nightly
def test_a_model_draws_other_numbers_in_each_call_and_of_the_same_distribution():
    fmapper.source(Autoencoder(), "flax", (X,))
    model = fmapper.convert(Autoencoder(), "flax", (X[:1].expand(4000, 8),), structure=True)
    call = nnx.jit(lambda model, x: model(x)[0])
    x = jnp.broadcast_to(jnp.asarray(X[0].numpy()), (4000, 8))
    first, second = call(model, x), call(model, x)
    assert (first != second).all()
    spread = jnp.exp(0.5 * model.spread(model.encoder(x[:1])))
    expected = np.sqrt((np.asarray(spread).T ** 2 * np.asarray(model.decoder.kernel) ** 2).sum(0))
    np.testing.assert_allclose(np.std(first, 0), expected, rtol=0.1)


@pytest.mark.nightly
def test_functions_take_a_key():
    made: dict = {}
    exec(fmapper.source(Autoencoder(), "jax", (X,)), made)
    params = made["init_autoencoder"](jax.random.key(0))
    x = jnp.asarray(X.numpy())
    one, other = (made["autoencoder"](params, x, key=jax.random.key(i))[0] for i in range(2))
    again = made["autoencoder"](params, x, key=jax.random.key(0))[0]
    assert (one != other).all()
    np.testing.assert_array_equal(one, again)


@pytest.mark.nightly
def test_a_file_that_uses_its_numbers_otherwise_is_not_written(monkeypatch):
    from fmapper_adapters.jax.translation import print_numbers

    drawn = print_numbers._draw
    monkeypatch.setattr(
        print_numbers,
        "_draw",
        lambda p, kind, shape, **options: drawn(p, "uniform", shape, **options),
    )
    _, proof, _ = translate_proved(Autoencoder(), "flax", (X,))
    assert not proof


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x):
        return x[:, torch.multinomial(self.linear(x).softmax(-1), 2)[0]]


def test_numbers_that_no_proof_knows_are_refused_by_their_place():
    with pytest.raises(fmapper.ConversionError, match=r"multinomial.* draws random numbers.*py:"):
        fmapper.source(Choosing(), "flax", (X,))


class Labels(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, labels, train):
        if train:
            dropped = torch.rand(labels.shape[0]) < 1e-6
            labels = torch.where(dropped, 10, labels)
        return self.table(labels)


class Guided(nn.Module):
    """Draws numbers in training alone, which seldom make a difference."""

    def __init__(self):
        super().__init__()
        self.labels = Labels()

    def forward(self, labels):
        return self.labels(labels, self.training)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox", "jax"])
def test_a_file_draws_in_the_modes_in_which_its_source_does(target):
    if target == "equinox":
        pytest.importorskip("equinox")
    labels = torch.tensor([1, 2, 3])
    _, _, proof = translate(Guided(), target, (labels,), train=True, proved=True)
    assert not proof
    assert proof.holds("train")
    assert "eval draws other random numbers than its source" in str(proof)
    _source, proof, reason = translate_proved(Guided(), target, (labels,))
    assert proof, proof
    assert reason
