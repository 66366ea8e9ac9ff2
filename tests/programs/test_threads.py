"""What converting does to the rest of a process: other threads, and what is left of a failure."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

import fmapper

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402


class Masked(torch.nn.Module):
    """Asks what recording is told about, has a buffer, and may raise while it is recorded."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.error = error

    def forward(self, x: Any) -> Any:
        y = self.norm(self.dense(x))
        if self.error is not None:
            raise self.error("stopped")
        if not torch.compiler.is_compiling() and (x > 0).all():
            return y
        return y + 1


def watched() -> dict[Any, Any]:
    """All functions, classes and flags of torch's modules and classes, and its modes."""
    found: dict[Any, Any] = {}
    kinds = (types.FunctionType, type, bool, classmethod, staticmethod, property)
    for name, module in list(sys.modules.items()):
        if not name.startswith(("torch", "jax.", "jax._src")) or "reduce_op" in dir(module):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, kinds):
                found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("torch."):
                methods = [(k, v) for k, v in vars(value).items() if isinstance(v, kinds)]
                found.update({(value, inner): method for inner, method in methods})
    found["fakes"] = type(torch._subclasses)
    found["modes"] = len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()
    found["grad"] = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    found["nodes"] = set(pytree.SUPPORTED_NODES)
    return found


def changed(before: dict[Any, Any]) -> list[Any]:
    after = watched()
    return [k for k, v in before.items() if k not in after or (after[k] is not v != after[k])]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What is imported at the first conversion, and where one fails, is no change."""
    with pytest.raises(fmapper.ConversionError):
        fmapper.convert(Masked(ValueError), "jax", (torch.ones(3, 4),))
    fmapper.convert(Masked(), "jax", (torch.ones(3, 4),))
    fmapper.convert(lambda x: x + 1, "torch", (jnp.ones(3),))


def is_as_built(module: Any) -> bool:
    return module.training and "forward" not in vars(module) and not module._forward_hooks


@pytest.mark.nightly
def test_threads_convert_in_both_directions_at_once() -> None:
    before = watched()
    modules = [Masked() for _ in range(4)]
    weights = {"w": jnp.ones((4, 4))}
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            if i % 2:
                fmapper.convert((lambda p, x: x @ p["w"], weights), "torch", (jnp.ones((3, 4)),))
            else:
                model = fmapper.convert(modules[i // 2], "jax", (torch.ones(3, 4),))
                assert fmapper.verify(modules[i // 2].eval(), model, torch.ones(3, 4))
                modules[i // 2].train()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not changed(before)
    assert all(is_as_built(module) for module in modules)


@pytest.mark.nightly
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_process_is_as_before_after_a_recording_that_ends_early(error: Any) -> None:
    before = watched()
    module = Masked(error)
    with pytest.raises(fmapper.ConversionError if error is ValueError else error):
        fmapper.convert(module, "jax", (torch.ones(3, 4),))
    assert not changed(before)
    assert is_as_built(module)

    def stopped(x: Any) -> Any:
        raise error("stopped")

    with pytest.raises(BaseException, match="stopped"):
        fmapper.convert(stopped, "torch", (jnp.ones(3),))
    assert not changed(before)
    module.error = None
    done = threading.Thread(
        target=lambda: fmapper.convert(module, "jax", (torch.ones(3, 4),)), daemon=True
    )
    done.start()  # in another thread: the lock is free, too
    done.join(60)
    assert not done.is_alive()
