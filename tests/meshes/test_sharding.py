"""`fmapper.shard`, on eight devices of JAX and by four processes of torch."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from support import many_devices


@pytest.fixture(scope="module")
def on_eight_devices(request):
    return many_devices.run("jax", "sharding", only=many_devices.chosen(request.node))


@pytest.fixture(scope="module")
def by_four_processes():
    return many_devices.run("gloo", "sharding", ranks=4)


@pytest.mark.nightly_cases(
    "check_a_state_goes_where_the_old_arrays_lie",
    "check_what_lies_there_is_given_back",
    "check_each_device_has_its_part_alone_and_nothing_of_the_source",
    "check_a_converted_model_and_its_optimizer",
)
@pytest.mark.parametrize("check", many_devices.names("jax", "sharding"))
def test_jax(on_eight_devices, check):
    assert on_eight_devices.get(check, "did not run") == "", on_eight_devices.get("")


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("gloo", "sharding"))
def test_torch(by_four_processes, check):
    assert by_four_processes.get(check, "did not run") == "", by_four_processes.get("")
