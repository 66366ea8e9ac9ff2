"""Writes a test beside a translated file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmapper.files.stamp import with_stamp

if TYPE_CHECKING:
    from fmapper.verification.files.proof import Proof


def write_test(file: Path, proof: Proof) -> Path:
    """Writes a test of a translated file, and the data of the test, next to it.

    It runs with pytest, and does not need the framework of the source.

    Returns:
        The test.
    """
    import numpy as np

    test, data = file_of_test(file), file.with_name(f"{file.stem}_data.npz")
    given: dict[str, Any] = {key: np.asarray(value) for key, value in proof.data.items()}
    np.savez(data, **given)
    modes = sorted({what.split()[0] for what in proof.errors})
    code = _TEST.format(
        file=file.name, data=data.name, limits=proof.bounds, framework=proof.framework,
        name=proof.name, modes=", ".join(f'"{mode}"' for mode in modes),
    )  # fmt: skip
    test.write_text(with_stamp(code), encoding="utf-8")
    return test


def file_of_test(file: Path) -> Path:
    """Returns the path of the test of a translated file."""
    return file.with_name(f"test_{file.stem}.py")


_TEST = '''"""{file} gives what its source gave: outputs, gradients, five steps of training."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMITS = {limits}


def test_it_computes_what_its_source_does():
    command = [sys.executable, "-m", "fmapper.verification.files.process", "{framework}"]
    command += [HERE / "{file}", HERE / "{data}", "{name}", {modes}]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors
    for what, error in errors.items():
        assert error <= LIMITS.get(what, 0), what
'''
