"""Some programs of the fuzzer; `nox -s fuzz -- jax-to-torch` draws more."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import fuzz_jax_to_torch
import fuzzing


@pytest.mark.filterwarnings("ignore")  # those of JAX's own code
def test_some_random_programs_are_converted_right():
    report = fuzzing.fuzz(fuzz_jax_to_torch.direction(), [f"0:{n}" for n in range(15)])
    assert not report.found, report.text()
    assert report.refused.total() < 4, report.text()
