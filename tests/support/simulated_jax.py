"""Gives JAX four GPUs where there is none, whose memory is apart from the host's.

    pip install --no-deps --target PLACE xla-cpu-pjrt
    SIMULATED_JAX=PLACE PYTHONPATH=tests python -m pytest -p support.simulated_jax -m gpu

Beside `-p support.simulated_gpu` arrays also go between two libraries on one simulated GPU.

The package is XLA's compiler for CPUs as a plugin. A shim in C calls it `cuda`, and lets it copy
host memory, which a CPU would share. What XLA computes there is right, and soon there: it shows
devices, platforms, copies and failures, not streams and speed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SHIM = r"""
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "pjrt_c_api.h"

static const PJRT_Api* real;
static PJRT_Api* api;

static PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  PJRT_Error* error = real->PJRT_Client_PlatformName(args);
  args->platform_name = "cuda";
  args->platform_name_size = 4;
  return error;
}

static PJRT_Error* platform_version(PJRT_Client_PlatformVersion_Args* args) {
  PJRT_Error* error = real->PJRT_Client_PlatformVersion(args);
  args->platform_version = "cuda 13000";
  args->platform_version_size = 10;
  return error;
}

static PJRT_Error* topology_name(PJRT_TopologyDescription_PlatformName_Args* args) {
  PJRT_Error* error = real->PJRT_TopologyDescription_PlatformName(args);
  args->platform_name = "cuda";
  args->platform_name_size = 4;
  return error;
}

static PJRT_Error* create(PJRT_Client_Create_Args* args) {
  args->num_options = 0;  /* those for GPUs */
  return real->PJRT_Client_Create(args);
}

static PJRT_Error* from_host(PJRT_Client_BufferFromHostBuffer_Args* args) {
  args->host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  return real->PJRT_Client_BufferFromHostBuffer(args);
}

const PJRT_Api* GetPjrtApi(void) {
  if (api) return api;
  void* library = dlopen(getenv("SIMULATED_JAX_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  if (!library) return 0;
  real = ((const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi"))();
  api = malloc(real->struct_size + sizeof(PJRT_Api));
  memcpy(api, real, real->struct_size);
  api->PJRT_Client_Create = create;
  api->PJRT_Client_PlatformName = platform_name;
  api->PJRT_Client_PlatformVersion = platform_version;
  api->PJRT_TopologyDescription_PlatformName = topology_name;
  api->PJRT_Client_BufferFromHostBuffer = from_host;
  return api;
}
"""


def build(place: Path) -> Path:
    """Compile the shim, unless that was done before."""
    shim = place / "shim.so"
    if not shim.exists():
        source = place / "shim.c"
        source.write_text(SHIM)
        headers = place / "xla_plugins" / "xla_cpu_pjrt" / "include"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-I", headers, source, "-o", shim, "-ldl"]
        subprocess.run(command, check=True)
    return shim


def install(place: Path) -> None:
    """Register the platform, before JAX has looked for devices."""
    library = place / "xla_plugins" / "xla_cpu_pjrt" / "xla_cpu_pjrt.so"
    os.environ["SIMULATED_JAX_LIBRARY"] = str(library)
    from jax._src import dlpack, hardware_utils, xla_bridge

    utils: Any = hardware_utils
    utils.has_visible_nvidia_gpu = lambda: True
    xla_bridge.register_plugin("cuda", priority=500, library_path=str(build(place)), options=None)
    export: Any = dlpack.to_dlpack

    def to_dlpack(x: Any, stream: Any = None, **options: Any) -> Any:
        """Wait instead: the plugin has no streams."""
        return export(x.block_until_ready(), stream=None, **options)

    dlpack.to_dlpack = to_dlpack


HARDWARE = {"test_devices.py::test_a_real_gpu_of_jax": "memory that is counted"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what waits for hardware."""
    for item in items:
        for name, reason in HARDWARE.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"not simulated: {reason}"))


def pytest_configure(config: pytest.Config) -> None:
    """Simulate GPUs from here on."""
    install(Path(os.environ["SIMULATED_JAX"]).resolve())
