"""`Sync` between processes, and onto many devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from support import many_devices


def check_in_folder(name: str, *arguments: str) -> None:
    command = [sys.executable, many_devices.HERE / "folder_sync.py", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "check",
    [
        "check_two_trainers_and_two_runners",
        "check_changes_alone",
        "check_a_trainer_that_is_killed",
        "check_other_names_are_refused_in_all_processes",
        "check_rules_of_one_process_are_those_of_all",
        "check_a_path_has_one_folder_in_a_process",
        "check_processes_of_other_machines_are_waited_for",
        "check_a_process_without_memory_is_named_at_once",
        "check_arrays_that_cannot_be_packed_are_said_to_all",
        pytest.param("check_a_trainer_that_stalls", marks=pytest.mark.nightly),
    ],
)
def test_in_a_folder(check: str) -> None:
    check_in_folder(check)


@pytest.mark.nightly
@pytest.mark.parametrize(("of", "times"), [("", 50), ("_of_gloo", 15)])
def test_a_trainer_that_is_killed_at_many_moments(of: str, times: int) -> None:
    check_in_folder(f"check_a_trainer{of}_that_is_killed", str(times))


@pytest.fixture(scope="module")
def on_eight_devices(request: pytest.FixtureRequest) -> dict[str, str]:
    return many_devices.run("jax", "sync", only=many_devices.chosen(request.node))


@pytest.mark.daily_cases("check_between_meshes", "check_from_torch_onto_a_mesh")
@pytest.mark.parametrize("check", many_devices.names("jax", "sync"))
def test_on_eight_devices(on_eight_devices: dict[str, str], check: str) -> None:
    assert on_eight_devices.get(check, "did not run") == "", on_eight_devices.get("")


@pytest.fixture(scope="module")
def by_processes_of_jax() -> dict[str, str]:
    return many_devices.run("jaxes", "sync", ranks=2)


@pytest.mark.parametrize("check", many_devices.names("jaxes", "sync"))
def test_by_processes_of_jax(by_processes_of_jax: dict[str, str], check: str) -> None:
    assert by_processes_of_jax.get(check, "did not run") == "", by_processes_of_jax.get("")


@pytest.fixture(scope="module")
def by_four_processes() -> dict[str, str]:
    return many_devices.run("gloo", "sync", ranks=4)


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("gloo", "sync"))
def test_by_four_processes(by_four_processes: dict[str, str], check: str) -> None:
    assert by_four_processes.get(check, "did not run") == "", by_four_processes.get("")
