"""Some of the pairs of `nox -s twins`: nothing is wrong, and friendly names are complete."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
pytest.importorskip("flax")
pytest.importorskip("equinox")

from models import twin_pairs
from sweeps import twins

COMPLETE = [
    "gpt2 -> nanogpt",
    "whisper -> nnx",
    "convnext -> nnx",
    "mixer -> linen",
    "unet -> nnx",
    "equinox -> gru",
    "equinox -> lstm",
    "stacked -> experts",
    "experts -> stacked",
    "nnx -> neox",
    "neox -> nnx",
    "linen -> deconvolution",
    "deconvolution -> linen",
    "grouped -> nnx",
    "gates in another order",
    "neighbours -> halves",
    "gate and up -> named for the gate",
]
DAILY = [
    "gpt2 -> nanogpt",
    "equinox -> gru",
    "stacked -> experts",
    "linen -> deconvolution",
    "gate and up -> named for the gate",
]
HARD = ["trap: norms, gate, projections", "trap: equal layers", "gru -> equinox"]


@pytest.mark.daily_cases(*DAILY)
@pytest.mark.parametrize("name", COMPLETE)
def test_a_pair_is_complete_without_a_rule(name):
    found = twins.outcome(twin_pairs.PAIRS[name](), with_inputs=False)
    assert (found.kind, found.back) == (twins.COMPLETE, True), found.message


@pytest.mark.parametrize("name", HARD)
def test_nothing_is_guessed(name):
    found = twins.outcome(twin_pairs.PAIRS[name](), with_inputs=False)
    assert found.kind in (twins.COMPLETE, twins.ASKED, twins.REFUSED), found.message


def test_there_are_many_pairs():
    assert len(twin_pairs.PAIRS) >= 70
