"""Arithmetic, comparisons and functions of single elements."""

from __future__ import annotations

from typing import Any

import torch

from fmapper import DType
from fmapper_adapters.torch._emit import current
from fmapper_adapters.torch.lax._table import About, lax

Tensor = torch.Tensor


@lax("add", "add_any", numbers=True)
def add(x: Any, y: Any) -> Any:
    return torch.add(*_tensor_first(x, y))


@lax("sub", numbers=True)
def sub(x: Any, y: Any) -> Any:
    return x - y


@lax("mul", numbers=True)
def mul(x: Any, y: Any) -> Any:
    return torch.mul(*_tensor_first(x, y))


def _tensor_first(x: Any, y: Any) -> tuple[Any, Any]:
    return (y, x) if isinstance(x, bool | int | float | complex) else (x, y)


@lax("neg")
def neg(x: Any) -> Any:
    return torch.neg(x)


@lax("div", numbers=True, about=True)
def div(x: Any, y: Any, *, about: About) -> Any:
    if "int" not in about.results[0][0]:
        return x / y
    return torch.div(x, y, rounding_mode="trunc")


@lax("max", numbers=True)
def maximum(x: Any, y: Any) -> Any:
    tensor, other = _tensor_first(x, y)
    if not isinstance(other, Tensor | torch.fx.Proxy):
        other = tensor.new_full((), other)
    return torch.maximum(tensor, other)


@lax("min", numbers=True)
def minimum(x: Any, y: Any) -> Any:
    tensor, other = _tensor_first(x, y)
    if not isinstance(other, Tensor | torch.fx.Proxy):
        other = tensor.new_full((), other)
    return torch.minimum(tensor, other)


@lax("exp")
def exp(x: Any) -> Any:
    return torch.exp(x)


@lax("log")
def log(x: Any) -> Any:
    return torch.log(x)


@lax("tanh")
def tanh(x: Any) -> Any:
    return torch.tanh(x)


@lax("logistic")
def logistic(x: Any) -> Any:
    return torch.sigmoid(x)


@lax("sqrt")
def sqrt(x: Any) -> Any:
    return torch.sqrt(x)


@lax("rsqrt")
def rsqrt(x: Any) -> Any:
    return torch.rsqrt(x)


@lax("square")
def square(x: Any) -> Any:
    return torch.square(x)


@lax("integer_pow")
def integer_pow(x: Any, *, y: int) -> Any:
    return torch.pow(x, y)


@lax("stop_gradient")
def stop_gradient(x: Any) -> Any:
    return x.detach()


@lax("copy", "copy_p")
def copy(x: Any) -> Any:
    return x


_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _comparison(name: str) -> Any:
    straight, swapped = getattr(torch, name), getattr(torch, _SWAPPED[name])

    def compare(x: Any, y: Any) -> Any:
        if isinstance(x, bool | int | float | complex):
            return swapped(y, x)
        return straight(x, y)

    return compare


for _name in _SWAPPED:
    lax(_name, numbers=True)(_comparison(_name))


@lax("and", numbers=True)
def bitwise_and(x: Any, y: Any) -> Any:
    return torch.bitwise_and(x, y)


@lax("or", numbers=True)
def bitwise_or(x: Any, y: Any) -> Any:
    return torch.bitwise_or(x, y)


@lax("select_n")
def select_n(which: Any, *cases: Any) -> Any:
    if which.dtype is torch.bool:
        return torch.where(which, cases[1], cases[0])
    found = cases[0]
    for i, case in enumerate(cases[1:], 1):
        found = torch.where(which >= i, case, found)
    return found


@lax("convert_element_type", about=True)
def convert_element_type(x: Any, *, new_dtype: DType, weak_type: bool, about: About) -> Any:
    return x.to(current().dtype(new_dtype.name))


@lax("iota")
def iota(*, dtype: DType, shape: tuple[Any, ...], dimension: int) -> Any:
    made = current().make(torch.arange, shape[dimension], dtype=current().dtype(dtype.name))
    view = [1] * len(shape)
    view[dimension] = shape[dimension]
    return made.reshape(view).expand(shape)
