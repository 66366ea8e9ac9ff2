"""torch and JAX with the same words: what the tests of transformations are run with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

np = pytest.importorskip("numpy")


class Torch:
    """torch, and its own functions as the reference."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.lib: Any = torch

    def array(self, values: Any, dtype: str = "float64") -> Any:
        return self.lib.tensor(np.asarray(values), dtype=getattr(self.lib, dtype))

    def reference(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The loss of flat arrays and its gradients, by torch.func."""
        gradients, value = self.lib.func.grad_and_value(lambda xs: loss(*xs))(tuple(arrays))
        return value, list(gradients)

    def host(self, array: Any) -> Any:
        array = array.detach()
        return (array.float() if array.dtype == self.lib.bfloat16 else array).resolve_conj().numpy()

    def jit(self, fun: Callable[..., Any]) -> Any:
        return fun

    def vmap(self, fun: Callable[..., Any]) -> Any:
        return self.lib.func.vmap(fun)

    def grad(self, fun: Callable[..., Any]) -> Any:
        return self.lib.func.grad(fun)


class Jax:
    """JAX, and its own functions as the reference."""

    name = "jax"

    def __init__(self) -> None:
        import jax

        self.lib: Any = jax

    def array(self, values: Any, dtype: str = "float64") -> Any:
        return self.lib.numpy.asarray(values, dtype=dtype)

    def reference(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The loss of flat arrays and its gradients, by jax.value_and_grad."""
        value, gradients = self.lib.value_and_grad(lambda xs: loss(*xs))(list(arrays))
        return value, gradients

    def host(self, array: Any) -> Any:
        return np.asarray(array)

    def jit(self, fun: Callable[..., Any]) -> Any:
        return self.lib.jit(fun)

    def vmap(self, fun: Callable[..., Any]) -> Any:
        return self.lib.vmap(fun)

    def grad(self, fun: Callable[..., Any]) -> Any:
        return self.lib.grad(fun)


@contextlib.contextmanager
def backend(name: str) -> Iterator[Any]:
    """A backend that computes in float64."""
    if name == "torch":
        yield Torch()
        return
    found = Jax()
    if hasattr(found.lib, "enable_x64"):
        with found.lib.enable_x64(True):
            yield found
    else:
        from jax.experimental import enable_x64

        with enable_x64(True):
            yield found
