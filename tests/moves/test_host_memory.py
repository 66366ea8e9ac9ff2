"""Memory for what is read from files: private, aligned, and brought before it is written."""

from __future__ import annotations

import mmap
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fmapper import machine
from fmapper.machine import HugePages, populate
from fmapper.moves.host_copy import ALIGNMENT, host_buffers


def test_memory_for_what_is_read_is_private_and_aligned(monkeypatch):
    mapped, new = [], mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *given: mapped.append(given) or new(*given))
    small, large, none = host_buffers([((3,), "f4"), ((100, 1 << 18), "u1"), ((0, 2), "f8")])
    assert {a.ctypes.data % ALIGNMENT for a in (small, large)} == {0}
    assert (large.flags.writeable, none.size) == (True, 0)
    if hasattr(mmap, "MAP_PRIVATE"):  # what is shared a forked process would write to as well
        assert {flags & mmap.MAP_PRIVATE for _, _, flags in mapped} == {mmap.MAP_PRIVATE}


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has the call")
def test_memory_for_what_is_read_is_brought_at_once():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    (whole,) = host_buffers([((32 << 20,), "u1")])
    part = whole[12345 : 12345 + (24 << 20)]  # which begins within a page
    whole[12000] = 7
    before = resident()
    populate(part)
    grown = resident() - before
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14):
        assert 24 << 20 <= grown + (1 << 20) <= 26 << 20
    assert whole[12000] == 7
    assert not part.any()


def test_huge_pages_are_left_for_a_while_when_they_are_slow():
    huge, page = HugePages(), 2 << 20
    assert huge.are_due(page)
    assert huge.came(page, page / 15e9)
    pauses = []
    for _ in range(6):
        assert huge.are_due(page)
        assert not huge.came(page, page / 0.4e9)
        pauses.append(0)
        while not huge.are_due(page):
            pauses[-1] += page
    assert pauses == [n << 20 for n in (64, 128, 256, 512, 1024, 1024)]
    assert huge.came(page, page / 15e9)
    assert not huge.came(page, page / 0.4e9)
    assert huge.skip == 64 << 20  # one fast page, and the next pause is short again


@pytest.mark.nightly_cases("at hand")
@pytest.mark.skipif(sys.platform != "linux", reason="no other system has the call")
@pytest.mark.parametrize("seconds", [1e-5, 1.0], ids=["at hand", "slow"])
def test_huge_pages_lie_within_the_array_that_is_filled(monkeypatch, seconds):
    page, calls = 2 << 20, []
    clock = iter(np.arange(0, 1000, seconds).tolist())
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "_madvise", lambda: lambda *given: calls.append(given) and 0)
    (whole,) = host_buffers([((40 << 20,), "u1")])
    start = -(-whole.ctypes.data // page) * page
    array = whole[start - whole.ctypes.data + 4096 :][: 20 << 20]  # from one page after `start`
    for at in (0, 8 << 20, 16 << 20):
        machine.populate(array[at : at + (8 << 20)], array, HugePages())
    ranges = {
        advice: [(a - start, a - start + n) for a, n, given in calls if given == advice]
        for advice in (14, 15, 23)
    }
    end = start + (20 << 20)  # of the last huge page that lies in the array
    assert ranges[14] == [(page, 10 << 20), (8 << 20, 18 << 20), (16 << 20, end - start)]
    if seconds == 1.0:
        assert ranges[15] == [(2 * page, 10 << 20), (10 << 20, 18 << 20), (18 << 20, end - start)]
    else:
        assert not ranges[15]
    small = [r for r in ranges[23] if r[1] - r[0] != page]
    assert small == [
        (4096, 4096 + (8 << 20)),
        (4096 + (8 << 20), 4096 + (16 << 20)),
        (4096 + (16 << 20), 4096 + (20 << 20)),
    ]


def test_memory_is_brought_nowhere_else(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    machine._madvise.cache_clear()
    try:
        assert machine.populate(np.zeros(1 << 20)) is None
    finally:
        machine._madvise.cache_clear()
