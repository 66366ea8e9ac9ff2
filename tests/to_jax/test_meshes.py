"""Converted models on meshes of eight devices, whose axes are Explicit or Auto."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

pytest.importorskip("torch")
jax = pytest.importorskip("jax")

PROGRAM = Path(__file__).parents[1] / "support" / "meshes.py"


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs meshes with Explicit axes")
@pytest.mark.parametrize("names", ["mlp embedding", "convolution recurrent", "encoder", "grouped"])
def test_models_on_meshes(names):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), *names.split()]
    found = subprocess.run(
        command, env=os.environ | flags, capture_output=True, text=True, timeout=500, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert f"{len(names.split())} models agree" in found.stdout
