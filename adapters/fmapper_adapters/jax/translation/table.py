"""The table of printers of ATen operations as code for JAX; the files beside this one fill it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any

from fmapper.translation import DType, PrinterTable, Value, expr

TABLE = PrinterTable()
prints = TABLE.prints
HALVES = ("float16", "bfloat16")


def load() -> PrinterTable:
    """Returns the table, filled."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("print_"):
            importlib.import_module(f"{__package__}.{module.name}")
    return TABLE


def dtype_code(name: str) -> ast.expr:
    """Returns a dtype by name as code; integers of 64 bits are those that JAX has."""
    narrow = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
    name = narrow.get(name, name)
    return expr("bool") if name == "bool" else expr(f"jnp.{name}")


def cast(x: Any, dtype: str) -> Any:
    """Returns an array in a dtype; itself if it has it."""
    if isinstance(x, Value) and x.dtype == dtype:
        return x
    node = expr("{0}.astype({1})", x, dtype_code(dtype))
    return Value(node, dtype, x.shape) if isinstance(x, Value) else node


def name_of(dtype: Any) -> str:
    """Returns the name of a dtype among arguments; empty for None."""
    return dtype.name if isinstance(dtype, DType) else ""


def helpers() -> dict[str, str]:
    """Returns the functions that printed code may call -> their source."""
    try:
        from fmapper_adapters.jax.translation.helpers import HELPERS
    except ImportError:
        return {}
    return HELPERS
