"""Operations that take functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmapper_adapters.jax.aten._table import lowering


@lowering("higher_order::wrap_with_set_grad_enabled")
def wrap_with_set_grad_enabled(enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function; without gradients where torch had them switched off."""
    import jax

    found = function(*args)
    return found if enabled else jax.lax.stop_gradient(found)
