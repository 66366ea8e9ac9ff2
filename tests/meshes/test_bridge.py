"""Arrays that go between a mesh of JAX and one of torch, with nothing sent."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from support import many_devices


@pytest.fixture(scope="module")
def by_four_processes():
    return many_devices.run("jaxes", "bridge", ranks=4)


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("jaxes", "bridge"))
def test_bridge(by_four_processes, check):
    assert by_four_processes.get(check, "did not run") == "", by_four_processes.get("")
