"""The command line as a whole: help, exit statuses, errors of one line, files that appear whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fmapper
from fmapper.cli.main import command, main
from fmapper.cli.output import whole_file, write_text

COMMANDS = set(command.commands)


def fmapper_command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "fmapper", *words],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fmapper {fmapper.__version__}\n"


def test_help_of_all_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    names = {"convert", "transfer", "translate", "verify", "checkpoint", "profile", "devices"}
    names |= {"completion"}
    assert names == COMMANDS
    assert all(command in shown for command in COMMANDS)


WITH_EXAMPLES = [
    *sorted(COMMANDS - {"checkpoint", "devices"}),
    "checkpoint convert",
    "checkpoint inspect",
    "checkpoint diff",
]


@pytest.mark.parametrize("command", WITH_EXAMPLES)
def test_help_has_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*command.split(), "-h"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(f"fmapper {command} ") >= 3  # the usage, and examples


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["convert"], "Missing argument 'FILE:MODEL'"),
        (["convert", "net.py:model"], "Missing option '--to'"),
        (["convert", "net.py:model", "--to", "jax", "--dynamic", "some"], "'auto'"),
        (["profile", "net.py:model", "--example", "ones(1)", "--seconds", "-1"], "--seconds"),
        (["devices", "--everywhere"], "No such option"),
    ],
)
def test_wrong_usage(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_an_error_is_one_line_and_debug_raises_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", "/no/such.py:model", "--to", "jax"]
    assert main(words) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("fmapper convert: ")
    assert shown.count("\n") == 1
    for place in (0, 1, len(words)):
        with pytest.raises(fmapper.TargetError):
            main([*words[:place], "--debug", *words[place:]])


def test_an_error_names_the_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", "/no/such/checkpoint"]) == 1
    assert capsys.readouterr().err.startswith("fmapper checkpoint inspect: /no/such/checkpoint: ")


def test_an_error_that_nobody_foresaw_names_its_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise KeyError("toy")

    monkeypatch.setattr("fmapper.cli.devices.every_device", fails)
    assert main(["devices"]) == 1
    assert capsys.readouterr().err == "fmapper devices: KeyError: 'toy' (--debug shows where)\n"


def test_an_interrupt_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fmapper.cli.devices.every_device", interrupted)
    assert main(["devices"]) == 130
    assert capsys.readouterr().err.strip() == "fmapper devices: interrupted"


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_while_a_file_of_the_user_runs(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, signal, time\n"
        # What a shell starts in the background ignores the signal, and so does what that starts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "pathlib.Path('started').touch()\n"
        "time.sleep(60)\n"
    )
    words = ["convert", "slow.py:model", "--to", "jax", "--out", "out.safetensors"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fmapper", *words, "--json", "out.json"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "fmapper convert: interrupted"
    assert {path.name for path in tmp_path.iterdir()} <= {"slow.py", "started", "__pycache__"}


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_text(path, "first")

    def write_half() -> None:
        with whole_file(path) as beside:
            beside.write_text("half")
            assert beside.suffix == path.suffix  # which says what kind of picture a plot is
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.nightly
def test_a_reader_that_has_enough_is_no_error() -> None:
    code = "import sys; from fmapper.cli.main import main; sys.exit(main(['devices']))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as writer:
        writer.stdout.close()
        assert "Traceback" not in writer.stderr.read()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_FMAPPER_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_completion_of_the_shell() -> None:
    environment = {
        **os.environ,
        "_FMAPPER_COMPLETE": "bash_complete",
        "COMP_WORDS": "fmapper ",
        "COMP_CWORD": "1",
    }
    done = fmapper_command(env=environment)
    assert {line.partition(",")[2] for line in done.stdout.split()} == COMMANDS


def test_the_command_is_installed_under_its_name() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="console_scripts", name="fmapper")
    assert found.load() is main
