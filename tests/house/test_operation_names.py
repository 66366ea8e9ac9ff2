"""Every operation that has a lowering is one of its framework: no name is misspelt or forgotten."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
core = pytest.importorskip("jax.extend.core")

# Primitives that the JAX installed here may not have, and where they are.
ELSEWHERE = {
    "polynomial": "JAX 0.12",
    "reduced_vary_cast_p": "between JAX 0.9 and 0.11",
    "copy_p": "between JAX 0.5 and 0.10",
    "log2": "JAX 0.11",
    "random_gamma_grad": "JAX 0.5",
    "linear_solve": "lineax",
    "error_if": "fmapper writes it for the checks of equinox",
    "linalg_solve": "fmapper writes it for systems that are solved by LU factors",
    "loop_begin": "fmapper writes it for loops whose steps call submodules",
    "loop_end": "fmapper writes it for loops whose steps call submodules",
}
EQUINOX = {"nonbatchable", "nontraceable", "nondifferentiable_backward", "select_if_vmap"}
EQUINOX |= {"unvmap_all", "unvmap_any", "unvmap_max"}


def _is_older(module: Any, than: tuple[int, int]) -> bool:
    return tuple(int(part) for part in module.__version__.split(".")[:2]) < than


@pytest.mark.skipif(_is_older(torch, (2, 13)), reason="older versions of torch have fewer")
def test_operations_of_torch() -> None:
    from fmapper_adapters.jax.aten import table

    table.load()
    torchs = [op for op in table.LOWERINGS if op.startswith("aten::")]
    assert len(torchs) > 500
    assert [op for op in torchs if not _is_torchs(op)] == []


def _is_torchs(op: str) -> bool:
    if op == "aten::cholesky" and not _is_older(torch, (2, 15)):
        return True  # a function of Python there
    name, _, overload = op.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (not overload or overload in packet.overloads())


@pytest.mark.skipif(_is_older(jax, (0, 10)), reason="older versions of JAX have fewer")
def test_primitives_of_jax() -> None:
    from fmapper_adapters.torch.lax import table

    try:
        import equinox.internal  # noqa: F401
    except ImportError:
        missing = EQUINOX | set(ELSEWHERE)
    else:
        missing = set(ELSEWHERE)
    importlib.import_module("jax.experimental.sparse")  # which has primitives of its own
    table.TABLE.load()
    gc.unfreeze()  # what is frozen is not among the objects
    known = {one.name for one in gc.get_objects() if issubclass(type(one), core.Primitive)}
    ops = {op.removeprefix("lax::") for op in table.TABLE.entries if op.startswith("lax::")}
    assert len(ops) > 150
    assert ops - known <= missing
