"""The host: the name of its processor, and its memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def processor_name(root: Path = _ROOT) -> str:
    """Returns the model name of the processor, or its architecture."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def host_memory(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """Returns how many bytes of memory this process can use in total, and how many are free.

    Both are those of the machine, unless the tightest control group of this process allows less: a
    container is stopped at its own limit.

    Args:
        root: The root of the file system.
    """
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    total, free = _kibibytes(fields.get("MemTotal")), _kibibytes(fields.get("MemAvailable"))
    if total is None and root == _ROOT:
        total = _total_of_the_system()
    for limit, used in _control_groups(root):
        if total is None or limit < total:
            total = limit
        left = max(limit - used, 0)
        if free is None or left < free:
            free = left
    return total, free


def _total_of_the_system() -> int | None:
    """Returns the physical memory by POSIX; None on Windows."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and use, in bytes, of every cgroup of this process with a memory limit.

    In a container the group's own folder may not be mounted, but only its parents, so every level
    is tried and missing ones are skipped.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy for everything
            base, limit_file, use_file, cached = mount, "memory.max", "memory.current", "inactive_"
        elif "memory" in controllers.split(","):
            base, limit_file = mount / "memory", "memory.limit_in_bytes"
            use_file, cached = "memory.usage_in_bytes", "total_inactive_"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            limit, used = _number(folder / limit_file), _number(folder / use_file)
            if limit is not None and used is not None:
                # The system takes cached file pages back before it refuses anything.
                kept = [line for line in _lines(folder / "memory.stat") if line.startswith(cached)]
                files = sum(int(line.split()[1]) for line in kept if "_file " in line)
                yield limit, max(used - files, 0)
            if folder == base:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # another system, or not ours to read
        return []


def _number(path: Path) -> int | None:
    words = _lines(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _kibibytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024
