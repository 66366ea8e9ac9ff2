"""A plugin that writes how long tests took: `nox -s durations`, after tests have changed."""

import json
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[1] / "durations.json"
FAST = 0.5  # seconds; tests that take less are part of the usual run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Keeps the tests of tests/ that took more than half a second."""
    reports = terminalreporter.stats.get("passed", [])
    took = {r.nodeid: round(r.duration, 1) for r in reports if r.when == "call"}
    slow = {name: t for name, t in took.items() if t >= FAST and name.startswith("tests/")}
    PLACE.write_text(json.dumps(dict(sorted(slow.items())), indent=0, ensure_ascii=False) + "\n")
