"""Functions with a derivative of their own as classes of `torch.autograd.Function`."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator

from fmapper.translation import Derived, literal, text


def function_class(name: str, function: Derived) -> Iterator[str]:
    """Yields the lines of the class of a function."""
    yield f"class {name}(torch.autograd.Function):"
    yield f'    """`{function.label}`, with the gradient that the model gives it."""'
    yield ""
    yield from _method("forward", function.parameters, [*_save(function), *function.lines])
    yield ""
    if isinstance(function.backward, str):
        error = text(literal(f"it has no gradient: {function.backward}"))
        lines = [f"raise NotImplementedError({error})"]
    else:
        lines = [*_refuse(function), *_read(function), *function.backward]
    yield from _method("backward", function.gradients, lines)


def _save(function: Derived) -> Iterator[str]:
    if function.saved:
        yield f"ctx.save_for_backward({', '.join(function.saved)})"


def _read(function: Derived) -> Iterator[str]:
    if function.saved:
        names = ", ".join(function.saved)
        names = names if len(function.saved) > 1 else f"({names},)"
        yield f"{names} = ctx.saved_tensors"


def _refuse(function: Derived) -> Iterator[str]:
    if function.once:  # `once_differentiable` of torch forgets gradients without an error
        error = f"{function.label} has no second gradient: JAX's is that of its forward rule"
        yield "if torch.is_grad_enabled():  # by create_graph=True"
        yield f"    raise NotImplementedError({text(literal(error))})"


def _method(name: str, parameters: Collection[str], lines: Collection[str]) -> Iterator[str]:
    yield "    @staticmethod"
    yield f"    def {name}({', '.join(['ctx', *parameters])}):"
    yield from (textwrap.indent(line, "        ") for line in lines)
