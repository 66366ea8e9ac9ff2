"""Numbers that are read from arrays, and arithmetic of them."""

from __future__ import annotations

from typing import Any

from fmapper.translation import Printing, Value, expr
from fmapper_adapters.jax.translation.table import prints

_TEMPLATES = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "add": "{0} + {1}", "sub": "{0} - {1}",
    "mul": "{0} * {1}", "truediv": "{0} / {1}", "floordiv": "{0} // {1}", "mod": "{0} % {1}",
    "neg": "-{0}", "pow": "{0} ** {1}",
}  # fmt: skip


def _enter(name: str, template: str) -> None:
    @prints(f"sym::{name}")
    def number(p: Printing, *args: Any) -> Any:
        return expr(template, *args)


for _name, _template in _TEMPLATES.items():
    _enter(_name, _template)


@prints("aten::_local_scalar_dense", "aten::item")
def read(p: Printing, x: Value) -> Any:
    """Prints the array: one element is a number to JAX."""
    return x if not x.shape else expr("{0}.reshape(())", x)
