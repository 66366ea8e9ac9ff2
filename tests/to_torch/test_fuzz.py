"""Some programs of the fuzzer; `nox -s fuzz -- jax-to-torch` draws more."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import numpy as np

import fmapper
from sweeps import fuzz_jax_to_torch, fuzzing


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # those of JAX's own code
def test_some_random_programs_are_converted_right():
    report = fuzzing.fuzz(fuzz_jax_to_torch.direction(), [f"0:{n}" for n in range(15)])
    assert not report.found, report.text()
    assert sum(map(len, report.refused.values())) < 4, report.text()


def judged(inputs, *steps):
    arrays = tuple(np.array(x, kind) for x, kind in inputs)
    program = fuzzing.Program(arrays, tuple(fuzzing.Step(text, at) for text, at in steps))
    finding = fuzz_jax_to_torch.direction().judge(program)
    return finding and finding.kind


def off_by(distance):
    """Stands for `convert`: a model that is wrong by this."""

    def convert(function, to, arrays, **options):
        (result,) = function(*arrays)
        return lambda *inputs: (fmapper.to_torch(result) + distance,)

    return convert


@pytest.mark.nightly
def test_differences_count_by_the_size_of_the_result(monkeypatch):
    monkeypatch.setattr(fmapper, "convert", off_by(1e-10))
    inputs = [([1.0, 3.0], "float32")]
    assert judged(inputs, ("{0} * 1e-8", (0,))) == "value"
    assert judged(inputs, ("{0} * 1e-2", (0,))) != "value"


@pytest.mark.nightly
def test_what_is_left_of_larger_numbers_may_be_off_as_they_are(monkeypatch):
    monkeypatch.setattr(fmapper, "convert", off_by(1e-7))
    steps = ("jnp.sin({0})", (0,)), ("{0} - 0.841", (1,))
    assert judged([([1.0], "float32")], *steps) != "value"
    assert judged([([0.0], "float32")], *steps) != "value"  # by rounding of 0.841
    assert judged([([1.0], "float32")], ("{0} * 1e-3", (0,))) == "value"


@pytest.mark.nightly
def test_integers_may_differ_where_rounding_decides_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(fmapper, "convert", off_by(-1))
    ends = ("jnp.tanh({0})", (0,)), ("{0}.astype('int32')", (1,))
    assert judged([([9], "uint32")], *ends) != "value"
    assert judged([([9.0], "float32")], *ends) != "value"
    assert judged([([2.0], "float32")], ("jnp.floor({0}).astype('int32')", (0,))) == "value"
