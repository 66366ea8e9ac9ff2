"""A part of the fuzzer of torch programs; `nox -s fuzz` runs an hour of it."""

import warnings

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import jax.numpy as jnp
import numpy as np

import fmapper
from sweeps import fuzz_torch_to_jax, fuzzing


@pytest.mark.nightly
def test_random_programs_are_what_torch_computes():
    with warnings.catch_warnings(action="ignore"):
        report = fuzzing.fuzz(fuzz_torch_to_jax.TorchToJax(), [f"5:{n}" for n in range(30)])
    assert report.programs == 30
    assert not report.found, report.text()
    assert sum(map(len, report.refused.values())) <= 3


def judged(inputs, *steps):
    arrays = tuple(np.array(x, kind) for x, kind in inputs)
    program = fuzzing.Program(arrays, tuple(fuzzing.Step(text, at) for text, at in steps))
    finding = fuzz_torch_to_jax.TorchToJax().judge(program)
    return finding and finding.kind


def off_by(distance):
    """Stands for `convert`: a model that is wrong by this."""

    def convert(module, to, tensors, **options):
        (result,) = module(*tensors)
        return lambda *inputs: (jnp.asarray(result.numpy() + distance, result.numpy().dtype),)

    return convert


def test_integers_may_differ_where_rounding_decides_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(fmapper, "convert", off_by(-1))
    assert judged([([9.0], "float32")], ("torch.tanh({0})", (0,)), ("{0}.long()", (1,))) != "value"
    assert judged([([9], "int32")], ("torch.tanh({0})", (0,)), ("{0}.long()", (1,))) != "value"
    assert judged([([2.0], "float32")], ("{0}.floor().long()", (0,))) == "value"


def test_numbers_too_small_for_the_normal_range_may_be_zero(monkeypatch):
    step = ("{0} * 1e-42", (0,))
    monkeypatch.setattr(fmapper, "convert", off_by(np.float32(-1e-42)))
    assert judged([([1.0], "float32")], step) != "value"
