"""Recurrent networks over sequences of every length, which torch would record step by step."""

from __future__ import annotations

import pytest

import fmapper

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from support import converting  # noqa: E402

nn = torch.nn
VARYING = dict.fromkeys((0, 1), torch.export.Dim.AUTO)


class Network(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(3, 4, **options)
        self.head = nn.Linear(self.rnn.hidden_size * (1 + self.rnn.bidirectional), 2)

    def forward(self, x):
        y, last = self.rnn(x)
        return self.head(y), last


KINDS = [
    ("LSTM", {}),
    ("LSTM", {"batch_first": True, "bidirectional": True, "num_layers": 2}),
    ("GRU", {"batch_first": True}),
    ("GRU", {"bidirectional": True, "bias": False}),
    ("RNN", {"num_layers": 2}),
    ("RNN", {"nonlinearity": "relu", "batch_first": True}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_one_recording_holds_for_every_length(kind, options):
    module = Network(kind, **options).eval()
    model = fmapper.convert(module, "jax", (torch.randn(5, 2, 3),), dynamic_shapes=(VARYING,))
    assert len(model.program.symbols) == 2
    assert not model.program.fixed
    for size in ((5, 2, 3), (2, 7, 3), (1, 1, 3), (9, 4, 3)):
        x = torch.randn(size)
        converting.compare(model(x.numpy()), module(x))


@pytest.mark.nightly
def test_states_are_projected():
    module = nn.LSTM(3, 4, proj_size=2, batch_first=True).eval()
    model = fmapper.convert(module, "jax", (torch.randn(2, 5, 3),), dynamic_shapes=(VARYING,))
    assert not model.program.fixed
    for size in ((2, 5, 3), (3, 8, 3)):
        x = torch.randn(size)
        converting.compare(model(x.numpy()), module(x))


@pytest.mark.nightly
def test_given_states_and_gradients_at_another_length():
    module = nn.GRU(3, 4)
    x, state = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    shapes = (VARYING, {1: torch.export.Dim.AUTO})
    model = fmapper.convert(module, "jax", (x, state), dynamic_shapes=shapes)
    x = torch.randn(8, 2, 3)
    found = jax.grad(lambda x: model(x, state.numpy())[0].sum())(x.numpy())
    x.requires_grad_()
    module(x, state)[0].sum().backward()
    converting.compare(found, x.grad)


@pytest.mark.nightly
def test_dropout_between_layers_is_drawn_in_training():
    module = Network("LSTM", num_layers=2, dropout=0.5)
    args = (torch.randn(5, 2, 3),)
    model = fmapper.convert(module, "jax", args, dynamic_shapes=(VARYING,), train=True)
    x = torch.randn(7, 2, 3).numpy()
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    first, same, other = (model(x, key=key)[0] for key in keys)
    assert (first == same).all()
    assert (first != other).any()


@pytest.mark.nightly
def test_a_length_that_is_given_as_a_number_stays_fixed():
    module = Network("LSTM").eval()
    x = torch.randn(5, 2, 3)
    model = fmapper.convert(module, "jax", (x,), dynamic_shapes=({1: torch.export.Dim("batch")},))
    converting.compare(model(torch.ones(5, 6, 3).numpy()), module(torch.ones(5, 6, 3)))
    with pytest.raises(fmapper.ProgramInputError, match="expected shape"):
        model(torch.ones(6, 2, 3).numpy())
