"""The page that puts versions and peers side by side."""

import json
import sys

import pytest

from sweeps import scoreboard

SAME = {"class": "same", "reason": "off by 1.0e-07"}
OTHER = {"class": "other numbers", "reason": "off by 3.0e-01"}
FAILS = {"class": "fails", "reason": "TypeError: no `lowering`\nfor it"}
SOURCE = {"class": "source", "reason": "ValueError: random"}


def results(path, environment, sides):
    found = {"day": "2026-01-02", "sample": 4, "versions": {"torch": "2.13.0"}, "sides": sides}
    (path / f"{environment}.json").write_text(json.dumps(found))


def test_the_page_counts_what_is_right_and_names_what_is_not(tmp_path, monkeypatch):
    cases = {"a": SAME, "b": SAME, "c": SAME, "d": SOURCE}
    results(tmp_path, "daily", {"fmapper": {"nn": cases, "lax": {"x": SAME}}})
    peer = {"a": SAME, "b": OTHER, "c": FAILS, "d": SOURCE}
    results(tmp_path, "torchax", {"torchax": {"nn": peer}})
    (tmp_path / "onnx.json").write_text(json.dumps({"day": "2026-01-02", "reason": "no wheel"}))
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["scoreboard", "--out", str(tmp_path), "--page", str(page)])
    scoreboard.main()
    lines = page.read_text().splitlines()
    assert "| fmapper | daily |  | 3 of 3 |  |" in lines
    assert "| torchax | torchax |  | 1 of 3; 1 wrong |  |" in lines
    assert "| fmapper | daily | 1 of 1 |  |" in lines
    assert "* `b`: other numbers: `off by 3.0e-01`" in lines
    assert "* `c`: fails: `TypeError: no 'lowering' for it`" in lines
    assert not any("`d`" in line or "`a`" in line for line in lines)
    assert "| onnx | no wheel |" in lines
    assert "| oldest | not in this run |" in lines
    assert any("**sample**: 4 cases of each sweep" in line for line in lines)


def test_a_sample_is_the_same_wherever_it_is_taken():
    names = [f"case_{number:02}" for number in range(40)]
    chosen = scoreboard.spread([*names[::-1], "linalg.svd", "sort_random"], 4)
    assert chosen == ["case_00", "case_10", "case_20", "case_30"]
    assert scoreboard.spread(names, 0) == names


@pytest.mark.nightly
@pytest.mark.parametrize("sweep", ["opinfo", "lax"])
def test_a_case_is_converted_and_judged(sweep):
    pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    if sweep == "opinfo":
        case = scoreboard.torch_case(torch.nn.Linear(2, 3), (torch.ones(4, 2),), {})
    else:
        jax = pytest.importorskip("jax")
        case = scoreboard.jax_case(jax.numpy.tanh, (jax.numpy.ones(3),), {}, jax.numpy.tanh)
    side = scoreboard.OURS[sweep]
    assert scoreboard.outcome(lambda: case, side)["class"] == "same"
    off = scoreboard.outcome(lambda: case, lambda case: [x + 0.1 for x in side(case)])
    assert off["class"] == "other numbers"
    more = scoreboard.outcome(lambda: case, lambda case: side(case) * 2)
    assert (more["class"], more["reason"]) == ("other numbers", "2 outputs, not 1")
    refused = scoreboard.outcome(lambda: case, lambda case: case.unknown)
    assert refused["class"] == "fails"
    assert scoreboard.outcome(lambda: 1 / 0, side)["class"] == "source"


def test_what_draws_is_no_case():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="something else each time"):
        scoreboard.torch_case(torch.nn.Dropout().train(), (torch.ones(100),), {})
