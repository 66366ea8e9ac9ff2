"""A sample of the twins; `nox -s parity` compares all of them, and plants mistakes in each."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")

import fmapper
from parity.pairs import PAIRS

BY_NAME = {pair.name: pair for pair in PAIRS}


def compare(name, fault=""):
    twins = BY_NAME[name].make(fault)
    return fmapper.verify(twins.a.eval(), twins.b, *twins.inputs)


@pytest.mark.parametrize("name", ["lstm torch torch", "mlp torch plain"])
def test_a_sound_pair_is_the_same(name):
    assert compare(name)


def test_every_kind_of_mistake_is_planted_in_several_architectures():
    kinds = [fault for pair in PAIRS for fault in pair.faults]
    assert len(PAIRS) >= 40
    for kind in ("eps", "gelu", "mask", "rope", "momentum", "ema", "frozen", "weight decay"):
        assert kinds.count(kind) >= 3
