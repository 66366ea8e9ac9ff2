"""A part of the fuzzer of torch programs; `nox -s fuzz` runs an hour of it."""

import warnings

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import fuzz_torch_to_jax
import fuzzing


def test_random_programs_are_what_torch_computes():
    with warnings.catch_warnings(action="ignore"):
        report = fuzzing.fuzz(fuzz_torch_to_jax.TorchToJax(), [f"5:{n}" for n in range(30)])
    assert report.programs == 30
    assert not report.found, report.text()
    assert report.refused.total() <= 3
