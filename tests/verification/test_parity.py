"""A sample of the twins; `nox -s parity` compares all of them, and plants mistakes in each."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")

import fmapper
from parity.pairs import PAIRS
from sweeps.parity import judge, table

BY_NAME = {pair.name: pair for pair in PAIRS}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("lstm torch torch", ""),
        ("lstm torch torch", "stop-gradient"),
        ("lstm torch torch", "eps"),
        ("resnet torch torch", "momentum"),
        ("byol torch torch", ""),
        ("byol torch torch", "ema"),
        ("byol torch torch", "frozen"),
        ("gpt loss torch plain", "label shift"),
        ("mlp torch equinox", ""),
        ("mlp torch equinox", "swapped norms"),
    ],
)
@pytest.mark.daily_cases("lstm*", "resnet*", "byol*")
def test_twins_are_told_from_others(name, fault):
    result = judge(BY_NAME[name], fault)
    assert result.verdict == "right", result.report
    assert f"| {name} |" in table([result])


def test_every_kind_of_mistake_is_planted_in_several_architectures():
    kinds = [fault for pair in PAIRS for fault in pair.faults]
    assert len(PAIRS) >= 40
    for kind in ("eps", "gelu", "mask", "rope", "momentum", "ema", "frozen", "weight decay"):
        assert kinds.count(kind) >= 3


def test_a_layer_that_does_not_promote_is_compared_in_float64():
    eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")
    conv = eqx.nn.Conv1d(2, 3, 1, key=jax.random.key(0))
    report = fmapper.verify(conv, conv, jax.numpy.ones((2, 4)), gradients=True)
    assert report, report
    assert {one.precision for one in report.gradients} == {"float64"}
