"""Functions within a program that have a derivative of their own."""

from __future__ import annotations

from typing import Any

from fmapper import Graph
from fmapper_adapters.torch._emit import current
from fmapper_adapters.torch.lax._table import lax


@lax("custom_jvp_call", "custom_vjp_call")
def custom_call(
    *operands: Any,
    call_jaxpr: Graph,
    function: str,
    differentiable: Any,
    cotangents: Any,
    num_consts: int = 0,
    backward: Graph | None = None,
) -> Any:
    return current().inline(call_jaxpr, operands)
