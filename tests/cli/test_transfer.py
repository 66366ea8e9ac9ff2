"""`fmapper transfer`."""

import numpy as np
import pytest

import fmapper
from fmapper.cli.main import main

torch = pytest.importorskip("torch")
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(3, 2))
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "transfer_target.py").write_text(MODEL)
    source = tmp_path / "a.npz"
    fmapper.save({"fc.kernel": np.ones((3, 2), "f4"), "fc.bias": np.zeros(2, "f4")}, source)
    return source, f"{tmp_path}/transfer_target.py:make", tmp_path


def test_a_checkpoint_fills_a_model(files, capsys):
    source, target, folder = files
    out, rules = folder / "b.safetensors", folder / "rules.toml"
    command = ["transfer", str(source), target, "--out", str(out), "--rules-out", str(rules)]
    assert main([*command, "--dry-run"]) == 0
    assert "transpose 1x0" in capsys.readouterr().out
    assert not out.exists()
    assert main(command) == 0
    assert fmapper.load(out)["0.weight"].read().tolist() == [[1.0] * 3] * 2
    again = fmapper.checkpoints.Rules.from_toml(rules)
    assert fmapper.load(source, rules=again)["0.bias"].shape == (2,)
    assert main([*command, "--rules", str(rules)]) == 0


def test_another_architecture_is_one_line(files, capsys):
    _, target, folder = files
    fmapper.save({"fc.kernel": np.ones((4, 2), "f4")}, folder / "c.npz")
    assert main(["transfer", str(folder / "c.npz"), target]) == 1
    assert "has no counterpart" in capsys.readouterr().err
