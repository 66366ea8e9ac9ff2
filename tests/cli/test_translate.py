"""`fmapper translate`: the file that it writes, and those that it does not overwrite."""

from pathlib import Path

import pytest

from fmapper.cli.main import main
from fmapper.files.stamp import is_edited, with_stamp

pytest.importorskip("torch")
pytest.importorskip("flax")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    net = tmp_path / "net_to_translate.py"
    net.write_text("import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()\n")
    example = ["--example", "randn(3, 4)", "--eval", "--fixed"]
    return ["translate", f"{net}:model", "--to", "nnx", *example, "--out", str(tmp_path / "out.py")]


def test_a_stamp_tells_whether_a_file_was_edited(tmp_path: Path) -> None:
    path = tmp_path / "out.py"
    assert not is_edited(path)
    path.write_text(with_stamp("x = 1\n"))
    assert not is_edited(path)
    path.write_text(with_stamp("x = 1\n").replace("1", "2", 1))
    assert is_edited(path)
    path.write_text("x = 1\n")
    assert is_edited(path)
    path.write_bytes(b"\xff")
    assert is_edited(path)


@pytest.mark.parametrize("name", ["out.py", "test_out.py"])
def test_an_edited_file_is_refused_before_anything_runs(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine = True\n")
    (tmp_path / "net_to_translate.py").unlink()  # it is not looked for
    assert main([*words, "--tests"]) == 1
    shown = capsys.readouterr().err
    assert f"{name} would be overwritten" in shown
    assert "--force" in shown
    assert (tmp_path / name).read_text() == "mine = True\n"


@pytest.mark.nightly
def test_what_was_written_is_written_again_until_it_is_edited(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.py"
    assert main(words) == 0
    assert "nnx.Linear(4, 2" in out.read_text()
    assert main(words) == 0
    out.write_text("# mine\n" + out.read_text())
    assert main(words) == 1
    assert out.read_text().startswith("# mine\n")
    assert main([*words, "--force"]) == 0
    assert not out.read_text().startswith("# mine\n")
