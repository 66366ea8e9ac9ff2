"""The benchmark of the leaves runs, and its report is whole; what it measures is not judged."""

import importlib
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("ml_dtypes")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DIRECTIONS = [
    "numpy -> torch",
    "torch -> numpy",
    "numpy -> jax",
    "jax -> numpy",
    "torch -> jax",
    "jax -> torch",
]


@pytest.fixture
def leaves(monkeypatch):
    """The script as a module; it finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("leaves")


def run(leaves, tmp_path, capsys, *options):
    """The report of a run at tiny sizes, and what it printed."""
    file = tmp_path / "report.json"
    tiny = ["--leaves", "5", "--rounds", "2", "--gib", "0.0005", "--mib", "2"]
    status = leaves.main([*tiny, "--json", str(file), *options])
    report = json.loads(file.read_text())["sections"]
    verdicts = [verdict for section in report.values() for verdict in section["verdicts"]]
    assert status == int(not all(verdict["passed"] for verdict in verdicts))
    return report, capsys.readouterr().out


def check(section):
    """Every row has figures, and every figure is a number: `plain` writes NaN as null."""
    assert section["rows"]
    for row in section["rows"]:
        assert row["figures"], row
        for figure in row["figures"].values():
            assert isinstance(figure, str) or (math.isfinite(figure) and figure >= 0), row
    for verdict in section["verdicts"]:
        assert "nan" not in verdict["text"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "bars_of_a_direction"),
    [("per-leaf", 3), ("rate", 4)],  # three kinds of leaves; three models and what shares memory
)
def test_the_sections_over_all_directions(leaves, tmp_path, capsys, case, bars_of_a_direction):
    report, printed = run(leaves, tmp_path, capsys, "--case", case)
    assert list(report) == [case]
    check(report[case])
    bars = [verdict["bar"] for verdict in report[case]["verdicts"]]
    for direction in DIRECTIONS:
        assert sum(bar.endswith(direction) for bar in bars) == bars_of_a_direction
        assert f"{case}: " in printed
        assert all(bar in printed for bar in bars)


@pytest.mark.nightly
def test_the_section_of_what_is_there(leaves, tmp_path, capsys):
    report, printed = run(leaves, tmp_path, capsys, "--case", "there")
    check(report["there"])
    assert len(report["there"]["verdicts"]) == 6  # per backend its own mover and to_cpu
    assert all(verdict["passed"] for verdict in report["there"]["verdicts"])
    assert "there: jax: 5 leaves" in printed


@pytest.mark.nightly
def test_the_section_of_the_memory(leaves, tmp_path, capsys):
    report, printed = run(
        leaves, tmp_path, capsys, "--case", "memory", "--direction", "numpy:torch"
    )
    check(report["memory"])
    results = [row["figures"]["result_mib"] for row in report["memory"]["rows"]]
    assert results[1] < results[0] < results[2]  # as it is, half as wide, twice as wide
    assert "memory, numpy -> torch, float32 to bfloat16" in printed


@pytest.mark.nightly
def test_a_slow_mover_misses_the_bar(leaves, tmp_path, capsys, monkeypatch):
    def slow(tree):
        return {
            k: leaf.clone() for _ in range(20) for k, leaf in leaves.fmapper.to_torch(tree).items()
        }

    monkeypatch.setitem(leaves.MOVERS, "torch", slow)
    options = ("--case", "per-leaf", "--direction", "numpy:torch")
    report, printed = run(leaves, tmp_path, capsys, *options)
    assert not any(verdict["passed"] for verdict in report["per-leaf"]["verdicts"])
    assert "0 of 3 met" in printed


@pytest.mark.nightly
def test_other_objects_miss_the_bar(leaves, tmp_path, capsys, monkeypatch):
    def other(tree):
        return {k: leaf.copy() for k, leaf in tree.items()}

    monkeypatch.setitem(leaves.MOVERS, "numpy", other)
    report, _ = run(leaves, tmp_path, capsys, "--case", "there", "--direction", "numpy:torch")
    missed = [verdict["bar"] for verdict in report["there"]["verdicts"] if not verdict["passed"]]
    assert missed == ["there, numpy, to_numpy"]


def test_an_alias_is_no_conversion(leaves, tmp_path, capsys, monkeypatch):
    def alias(tree):
        return {k: leaves.torch.from_numpy(a) for k, a in tree.items()}

    monkeypatch.setitem(leaves.MOVERS, "torch", alias)
    options = ("--case", "per-leaf", "--direction", "numpy:torch")
    with pytest.raises(AssertionError, match="not a copy"):
        run(leaves, tmp_path, capsys, *options)


@pytest.mark.nightly
def test_a_prepared_call_gets_an_argument_of_its_own_each_time(leaves):
    made, seen = [], []

    def prepare():
        made.append(object())
        return made[-1]

    interleaving = importlib.import_module("_interleave")
    call = interleaving.Prepared(prepare, seen.append)
    timings = interleaving.interleave({"a": call}, 3, once=True)
    assert len(timings["a"]) == 3
    assert len(made) == 3
    assert seen == made
