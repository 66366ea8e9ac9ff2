"""What the tests of conversion share: converted models against eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fmapper
from support import comparing

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

# Units in the last place of the largest element that two ways to add numbers may differ by.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}


class Function(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def check(model: Any, *args: Any, scale: float = 1.0, options: Any = None, **kwargs: Any) -> Any:
    """Converts a module or a function and compares it with torch on the same inputs.

    Every output must have the shape and the dtype that torch's has (64 bits are 32 in JAX), be NaN
    and infinite where it is, and differ by no more than rounding, `scale` times `TOLERANCE` of the
    largest element; integers and bools are equal.

    Returns:
        The converted model.
    """
    module = model if isinstance(model, torch.nn.Module) else Function(model)
    module.eval()
    with torch.no_grad():
        converted = fmapper.convert(module, "jax", args, kwargs, **(options or {}))
        want = module(*clones(args), **clones(kwargs))
    compare(converted(*arrays(args), **arrays(kwargs)), want, scale=scale)
    return converted


def check_gradients(model: Any, *args: Any, scale: float = 1.0) -> None:
    """Compares the gradients of all floating inputs with torch's.

    What is differentiated is the sum of all floating outputs, each element times a number of its
    own.
    """
    module = model if isinstance(model, torch.nn.Module) else Function(model)
    module.eval()
    converted = fmapper.convert(module, "jax", args)
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    outputs = floating(module(*inputs))
    generator = torch.Generator().manual_seed(0)
    factors = [torch.rand(y.shape, generator=generator) + 0.5 for y in outputs]
    torch.autograd.backward(outputs, factors)
    numbers = [fmapper.to_jax(w) for w in factors]
    places = [i for i, x in enumerate(inputs) if x.requires_grad]
    given = [fmapper.to_jax(x.detach()) for x in args]

    def loss(chosen: Any) -> Any:
        values = list(given)
        for place, value in zip(places, chosen, strict=True):
            values[place] = value
        found = floating(converted(*values))
        return sum((y * w).sum() for y, w in zip(found, numbers, strict=True))

    got = jax.grad(loss)([given[i] for i in places])
    for place, gradient in zip(places, got, strict=True):
        want = inputs[place].grad
        want = torch.zeros_like(inputs[place]) if want is None else want
        compare_arrays(gradient, want, scale, f"gradient of input {place}")


def floating(outputs: Any) -> list[Any]:
    """The outputs that have gradients, in order."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return [y for inner in outputs for y in floating(inner)]
    return [outputs] if "float" in str(outputs.dtype) else []


def clones(tree: Any) -> Any:
    """Inputs that a forward may change."""
    is_tensor = torch.is_tensor
    return fmapper.fmap(lambda x: x.detach().clone() if is_tensor(x) else x, tree)


def arrays(tree: Any) -> Any:
    """Inputs as JAX arrays."""
    return fmapper.fmap(lambda x: fmapper.to_jax(x.detach()) if torch.is_tensor(x) else x, tree)


def compare(got: Any, want: Any, *, scale: float = 1.0, path: str = "output") -> None:
    """Asserts that outputs of JAX are those of torch, of which there are some."""
    comparing.compare_trees(got, want, lambda a, b, at: compare_arrays(a, b, scale, at), path)


def compare_arrays(got: Any, want: Any, scale: float, path: str) -> None:
    expected = str(want.dtype).removeprefix("torch.")
    assert got.dtype == jax.dtypes.canonicalize_dtype(expected), f"{path}: {got.dtype} {expected}"
    want = want.detach().resolve_conj().resolve_neg()
    want = want.float() if want.dtype == torch.bfloat16 else want
    tolerance = scale * TOLERANCE.get(expected.replace("complex64", "float32"), 1e-5)
    comparing.compare_numbers(np.asarray(got), want.numpy(), tolerance, path, least=1e-30)
