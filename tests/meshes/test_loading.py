"""Checkpoints that are read in shards, on eight devices of JAX and by four processes of torch."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from support import many_devices


@pytest.fixture(scope="module")
def on_eight_devices():
    return many_devices.run("jax", "loading")


@pytest.fixture(scope="module")
def by_four_processes():
    return many_devices.run("gloo", "loading", ranks=4)


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("jax", "loading"))
def test_jax(on_eight_devices, check):
    assert on_eight_devices.get(check, "did not run") == "", on_eight_devices.get("")


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("gloo", "loading"))
def test_torch(by_four_processes, check):
    assert by_four_processes.get(check, "did not run") == "", by_four_processes.get("")


@pytest.fixture(scope="module")
def by_four_processes_of_jax():
    return many_devices.run("jaxes", "loading", ranks=4)


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("gloo", "alone"))
def test_one_process_of_torch(check):
    assert many_devices.run("gloo", "alone").get(check) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("jaxes", "loading"))
def test_processes_of_jax(by_four_processes_of_jax, check):
    outcome = by_four_processes_of_jax
    assert outcome.get(check, "did not run") == "", outcome.get("")
