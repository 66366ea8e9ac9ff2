"""Writes a test beside a translated file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.files.stamp import with_stamp

if TYPE_CHECKING:
    from fmapper.verification.files.proof import Proof


def write_test(file: Path, proof: Proof) -> Path:
    """Writes a test of a translated file, and the data of the test, next to it.

    It runs with pytest, and needs neither fmapper nor the framework of the source.

    Returns:
        The test.
    """
    import numpy as np

    data = file.with_name(f"{file.stem}_data.npz")
    test, script = files_of_test(file)
    given: dict[str, Any] = {key: np.asarray(value) for key, value in proof.data.items()}
    np.savez(data, **given)
    script.write_text(with_stamp(proof.script), encoding="utf-8")
    modes = sorted({what.split()[0] for what in proof.errors})
    code = _TEST.format(
        file=file.name, script=script.name, data=data.name, name=proof.name,
        modes=json.dumps(modes), limits=proof.bounds,
    )  # fmt: skip
    test.write_text(with_stamp(code), encoding="utf-8")
    return test


def files_of_test(file: Path) -> tuple[Path, Path]:
    """Returns the paths of the test of a translated file, and of the script that the test runs."""
    return file.with_name(f"test_{file.stem}.py"), file.with_name(f"{file.stem}_proof.py")


_TEST = '''"""{file} gives what its source gave: outputs, gradients, five steps of training."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMITS = {limits}


def test_it_computes_what_its_source_does():
    files = [HERE / "{script}", HERE / "{file}", HERE / "{data}"]
    command = [sys.executable, *map(str, files), "{name}", \'{modes}\']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors
    for what, error in errors.items():
        assert error <= LIMITS.get(what, 0), what
'''
