"""Several processes that write one file: it appears whole, and nobody waits for the dead."""

import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from fmapper.files import meeting
meeting.PATIENCE = 3.0
target, rank, count, victim, stage = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
mine = rank == victim

def die(at):
    if mine and stage.partition(" ")[0] == at:
        os.kill(os.getpid(), signal.SIGKILL)

def prepare():
    die("prepare")
    (own.data / target.name).write_bytes(bytes(count))

def write():
    if mine and stage == "fails":
        raise OSError("the disk is full")
    handle = os.open(own.data / target.name, os.O_WRONLY)
    os.pwrite(handle, bytes([rank + 1]), rank)
    die("write")
    os.close(handle)
    if mine and stage == "slow":
        time.sleep(5)
    if rank == 0 and stage == "write slowly":
        time.sleep(2 * meeting.PATIENCE)

own = meeting.Meeting(target, rank, count)
if stage == "done":
    put = own._put
    own._put = lambda name, text: (put(name, text), name == f"done-{rank}" and die("done"))
die("start")
begun = time.monotonic()
try:
    own.run(prepare, write)
except Exception as error:
    raise OSError(f"after {time.monotonic() - begun:.0f} s: {error}")
"""


def run(target, victim=-1, stage="", count=3):
    """Runs all processes; returns the exit status and last line of each."""
    commands = [
        [sys.executable, "-c", PROGRAM, str(target), str(rank), str(count), str(victim), stage]
        for rank in range(count)
    ]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        ends = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [(end.strip().splitlines() or [""])[-1] for end in ends]
    return list(zip((p.returncode for p in processes), lines, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("victim", "stage"),
    [(0, "prepare"), (0, "write"), (1, "start"), (2, "write"), (0, "done")],
)
def test_the_others_end_soon_where_one_dies(tmp_path, victim, stage):
    target = tmp_path / "file"
    target.write_bytes(b"before")
    begun = time.monotonic()
    ends = run(target, victim, stage)
    assert time.monotonic() - begun < 30
    assert target.read_bytes() == b"before"
    for rank, (status, line) in enumerate(ends):
        if rank == victim:
            assert status == -9
        else:
            assert status == 1
            assert f"process {victim}" in line or "has failed" in line, line
    assert [end for end in run(target) if end[0]] == []  # what the dead have left is not in the way
    assert target.read_bytes() == bytes([1, 2, 3])
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("victim", [0, 1])
def test_what_has_failed_in_one_fails_in_all(tmp_path, victim):
    ends = run(tmp_path / "file", victim, "fails")
    for rank, (status, line) in enumerate(ends):
        assert status == 1
        # where 0 has failed before another came, that one hears nothing of it
        late = victim == 0 and rank and "process 0 of 3 has not responded" in line
        assert late or "the disk is full" in line, line
    assert not (tmp_path / "file").exists()


@pytest.mark.nightly
def test_slow_processes_are_waited_for(tmp_path):
    for victim in (0, 2):
        assert [end for end in run(tmp_path / "file", victim, "slow") if end[0]] == []
        assert (tmp_path / "file").read_bytes() == bytes([1, 2, 3])


@pytest.mark.nightly
def test_what_a_process_writes_meanwhile_does_not_add_to_the_time(tmp_path):
    """Of three processes one dies while another, for which the third waits, writes for 6 s."""
    ends = run(tmp_path / "file", 2, "write slowly")
    assert ends[2][0] == -9
    for rank, most in ((0, 8), (1, 5)):  # with a patience of 3 s
        assert "process 2 of 3 has not responded" in ends[rank][1], ends[rank]
        assert int(ends[rank][1].partition(" s:")[0].rpartition(" ")[2]) <= most, ends[rank]
