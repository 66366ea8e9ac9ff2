"""The commands for checkpoints."""

import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import Rename, Rules, Transpose
from fmapper.cli.main import main


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "a.safetensors"
    fmapper.save({"w": np.arange(6.0).reshape(2, 3), "step": 3}, made)
    return made


def test_inspect_lists_arrays(path, capsys):
    assert main(["checkpoint", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "float64  [2, 3]  48" in out
    assert "step = 3" in out
    assert "safetensors, 1 arrays, 48 bytes" in out


def test_convert_and_diff(path, tmp_path, capsys):
    target = tmp_path / "b.npz"
    assert main(["checkpoint", "convert", str(path), str(target), "--dtype", "float32"]) == 0
    assert "npz, 1 arrays" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(path), str(target)]) == 1
    assert "w: dtype float64 and float32" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(path), str(path)]) == 0
    assert main(["checkpoint", "convert", str(path), str(target)]) == 1
    assert "already exists" in capsys.readouterr().err


def test_quantised_arrays_are_dequantised_or_refused(tmp_path, capsys):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weight = np.arange(6).reshape(2, 3).astype(ml_dtypes.float8_e4m3fn)
    source, target = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    fmapper.save({"w": weight, "w_scale": np.full((2, 1), 2, np.float32)}, source)
    command = ["checkpoint", "convert", source, target]
    assert main([*command, "--dtype", "bfloat16"]) == 1
    assert "--dequantize" in capsys.readouterr().err
    assert main([*command, "--dtype", "float32", "--dequantize"]) == 0
    assert fmapper.load(target)["w"].read().tolist() == [[0, 2, 4], [6, 8, 10]]


def test_values_that_differ_are_measured(path, tmp_path, capsys):
    other = tmp_path / "c.npz"
    fmapper.save({"w": np.arange(6.0).reshape(2, 3) + 0.5, "step": 4}, other)
    assert main(["checkpoint", "diff", str(path), str(other)]) == 1
    out = capsys.readouterr().out
    assert "w: 6 elements differ, by up to 0.5 (0.1 of the largest)" in out
    assert "step: value 3 and 4" in out
    assert main(["checkpoint", "diff", "--headers", str(path), str(other)]) == 1
    assert "elements differ" not in capsys.readouterr().out


def test_wrong_usage_is_said(path, capsys):
    assert main(["checkpoint", "convert", str(path)]) == 2
    assert "Missing argument 'OUT'" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(path), "x", "--to", "orbx"]) == 1
    assert "Did you mean 'orbax'" in capsys.readouterr().err


def test_rules_are_read_from_a_file(path, tmp_path, capsys):
    rules = tmp_path / "rules.toml"
    made = Rules([Rename("w", "v"), Transpose("v")])
    rules.write_text(made.to_toml())
    assert (
        main(["checkpoint", "convert", str(path), str(tmp_path / "d.npz"), "--rules", str(rules)])
        == 0
    )
    found = fmapper.to_numpy(fmapper.load(tmp_path / "d.npz"))
    assert found["v"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_is_wrong_with_a_path_is_one_line(path, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    for number in ("9", "10"):
        (tmp_path / "run" / number).mkdir(parents=True)
        fmapper.save({"w": np.ones(2)}, tmp_path / "run" / number / "model.safetensors")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("hello")
    for arguments, said in (
        (["checkpoint", "inspect", "gone"], "gone: no such file or folder"),
        (["checkpoint", "diff", str(path), "gone"], "gone: no such file or folder"),
        (["checkpoint", "convert", "gone", "x.npz"], "gone: no such file or folder"),
        (
            ["checkpoint", "inspect", str(tmp_path / "empty")],
            "is a folder without a checkpoint: it is empty",
        ),
        (
            ["checkpoint", "inspect", str(tmp_path / "run")],
            "without a checkpoint; '10' in it is one",
        ),
        (
            ["checkpoint", "inspect", str(tmp_path / "texts")],
            "would have files such as model.safetensors",
        ),
        (["checkpoint", "inspect", str(tmp_path / "text.txt")], "is not in a known format"),
        (["checkpoint", "convert", str(path), str(tmp_path / "x.xyz")], "--to on the command line"),
        (
            ["checkpoint", "convert", str(path), "x.npz", "--rules", "gone.toml"],
            "gone.toml: no such file",
        ),
        (
            ["checkpoint", "convert", str(path), str(tmp_path / "gone" / "x.npz")],
            "gone: no such folder",
        ),
    ):
        assert main(arguments) == 1
        out, err = capsys.readouterr()
        assert said in err
        assert (out, err.count("\n")) == ("", 1)
