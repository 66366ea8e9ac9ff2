"""What the tests of JAX -> torch share: converted functions against JAX itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fmapper
from support import comparing

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

# Of the largest element: what two orders of adding may differ by.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5, "float64": 1e-11}
TOLERANCE |= {"complex64": 1e-5, "complex128": 1e-11}


def check(function: Callable[..., Any], *args: Any, gradients: bool = True) -> Any:
    """Converts a function and compares its outputs, and its gradients, with JAX's.

    Integers and bools are equal; floats differ by rounding, and are NaN and infinite where JAX's
    are. What is differentiated is the sum of all outputs of floats, each element times a number.

    Returns:
        The converted function.
    """
    args = tuple(jnp.asarray(a) for a in args)
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    converted = fmapper.convert(function, "torch", args)
    inputs = [fmapper.to_torch(a) for a in args]
    comparing.compare_trees(jax.tree.leaves(converted(*inputs)), wanted, same)
    floats = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact)]
    factors = [_factors(w) if jnp.issubdtype(w.dtype, jnp.inexact) else None for w in wanted]
    if not gradients or not floats or all(f is None for f in factors):
        return converted

    def loss(*chosen: Any) -> Any:
        full = list(args)
        for place, value in zip(floats, chosen, strict=True):
            full[place] = value
        outputs = zip(jax.tree.leaves(function(*full)), factors, strict=True)
        return sum(jnp.real(y * f).sum() for y, f in outputs if f is not None)

    grads = jax.jit(jax.grad(loss, tuple(range(len(floats)))))(*(args[i] for i in floats))
    for i in floats:
        inputs[i] = inputs[i].clone().requires_grad_()
    outputs = jax.tree.leaves(converted(*inputs))
    total = sum(
        _real(y * torch.from_numpy(f)).sum()
        for y, f in zip(outputs, factors, strict=True)
        if f is not None
    )
    chosen = [inputs[i] for i in floats]
    total = total + sum(_real(x * 0).sum() for x in chosen)  # outputs may depend on none
    found = torch.autograd.grad(total, chosen, allow_unused=True, materialize_grads=True)
    for got, want in zip(found, grads, strict=True):
        same(got.conj().resolve_conj(), want)  # JAX's gradient of a complex number is conjugate
    return converted


def same(got: Any, want: Any, path: str = "output") -> None:
    """Asserts that a tensor is an array of JAX, but for rounding."""
    dtype = want.dtype.name
    assert str(got.dtype) == f"torch.{dtype}", path
    a, b = fmapper.to_numpy(got.detach()), np.asarray(want)
    if "float" in dtype:  # NumPy has not all of them
        a, b = a.astype(np.float64), b.astype(np.float64)
    comparing.compare_numbers(a, b, TOLERANCE.get(dtype, 0.0), path)


def operations(converted: Any) -> list[str]:
    """The names of the functions of torch that a converted function calls."""
    return [
        node.target if node.op == "call_method" else node.target.__name__
        for node in converted.graph.nodes
        if node.op in ("call_function", "call_method")
    ]


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    """Random numbers."""
    found = np.asarray(np.random.default_rng(seed).standard_normal(shape))
    return jnp.asarray(found).astype(dtype)


def _factors(like: Any) -> Any:
    numbers = np.random.default_rng(9).random(like.shape) + 0.5
    return np.asarray(
        numbers, np.float32 if like.dtype.name in ("float16", "bfloat16") else like.dtype
    )


def _real(x: Any) -> Any:
    return x.real if x.is_complex() else x
