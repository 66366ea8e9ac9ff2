"""What every benchmark reports: the machine it ran on, and its numbers as strict JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any


def machine(packages: Iterable[str]) -> dict[str, str]:
    """Name what the numbers depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    available = getattr(os, "sched_getaffinity", None)
    found["cpus"] = str(len(available(0)) if available else os.cpu_count())
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "from a checkout" if find_spec(package) else "not installed"
    return found


def plain(report: Any) -> Any:
    """Turn a report into what strict JSON can hold."""
    if is_dataclass(report) and not isinstance(report, type):
        return plain(asdict(report))
    if isinstance(report, dict):
        return {str(key): plain(value) for key, value in report.items()}
    if isinstance(report, list):
        return [plain(value) for value in report]
    return None if isinstance(report, float) and math.isnan(report) else report
