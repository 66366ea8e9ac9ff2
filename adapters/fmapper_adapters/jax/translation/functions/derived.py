"""Functions with a derivative of their own as functions under `jax.custom_vjp`."""

from __future__ import annotations

import builtins
import re
import textwrap
from collections.abc import Iterator, Sequence

from fmapper.translation import Derived, literal, text


def function_name(title: str) -> str:
    """Returns the name of a function, of its title.

    Examples:
        >>> function_name("StraightThrough"), function_name("Round")
        ('straight_through', 'round_')
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title).lower()
    return f"{name}_" if hasattr(builtins, name) else name


def function_with_rules(name: str, function: Derived) -> Iterator[str]:
    """Yields the lines of a function, of its rules, and of what connects them."""
    parameters = ", ".join(function.parameters)
    forward, backward = (f"_{name.rstrip('_')}_{kind}" for kind in ("forward", "backward"))
    yield "@jax.custom_vjp"
    yield f"def {name}({parameters}):"
    yield f'    """`{function.label}`, with the gradient that the model gives it."""'
    yield from _inside(function.lines)
    yield from ("", "")
    kept, read = _name_kept(function.saved)
    yield f"def {forward}({parameters}):"
    yield f"    return {name}({parameters}), {kept if function.saved else None}"
    yield from ("", "")
    gradients = function.gradients
    given = gradients[0] if len(gradients) == 1 else "gradients"
    yield from ["@jax.custom_jvp"] if function.once else []
    yield f"def {backward}({read}, {given}):"
    yield from _inside(_backward(function, kept, read))
    yield from ("", "")
    if function.once:  # as torch, which raises where that is differentiated
        error = f"{function.label} is once_differentiable: its gradient has none"
        yield f"@{backward}.defjvp"
        yield f"def {backward}_jvp(primals, tangents):"
        yield f"    raise NotImplementedError({text(literal(error))})"
        yield from ("", "")
    yield f"{name}.defvjp({forward}, {backward})"


def _name_kept(saved: Sequence[str]) -> tuple[str, str]:
    """Returns what the forward rule keeps, and what the backward rule calls that."""
    if len(saved) == 1:
        return saved[0], saved[0]
    return f"({', '.join(saved)})", "kept" if saved else "_"


def _backward(function: Derived, kept: str, read: str) -> Iterator[str]:
    if isinstance(function.backward, str):
        error = f"{function.label} has no gradient: {function.backward}"
        yield f"raise NotImplementedError({text(literal(error))})"
        return
    if read == "kept":
        yield f"{kept[1:-1]} = kept"
    if len(function.gradients) > 1:
        yield f"{', '.join(function.gradients)} = gradients"
    *lines, last = function.backward
    yield from lines
    if len(function.parameters) == 1:  # a gradient alone
        last = f"return ({last.removeprefix('return ')},)"
    yield last


def _inside(lines: Sequence[str] | Iterator[str]) -> Iterator[str]:
    yield from (textwrap.indent(line, "    ") for line in lines)
