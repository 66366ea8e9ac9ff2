"""Operands of expressions, and their code."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from fmapper.translation import expr
from fmapper_translate.operations import Given
from fmapper_translate.recording import Event

_ALIASES: dict[str, str | None] = {
    "axis": "dim",
    "keepdims": "keepdim",
}  # names of NumPy's that PyTorch takes
_LISTS = (tuple, list, nn.ParameterList)
Code = Callable[[ast.expr], ast.expr]


def arguments_of(node: ast.expr, event: Event, print_code: Code) -> Iterator[Given]:
    """Returns the arguments of a call or an operator, what a method belongs to in front."""

    def operand(part: ast.expr, name: str = "") -> Iterator[Given]:
        starred = isinstance(part, ast.Starred)
        inner = part.value if isinstance(part, ast.Starred) else part
        known = event.parts.get(inner)
        code = functools.partial(print_code, inner)
        if known is not None:
            yield Given(inner, known.value, name, code, starred)
        elif isinstance(inner, ast.Constant):
            yield Given(inner, inner.value, name, code)

    match node:
        case ast.Call():
            if isinstance(node.func, ast.Attribute):
                method = event.parts.get(node.func)
                owner = method.parts.get(node.func.value) if method is not None else None
                if owner is not None and isinstance(owner.value, torch.Tensor):
                    code = functools.partial(print_code, node.func.value)
                    yield Given(node.func.value, owner.value, "", code)
            for arg in node.args:
                yield from operand(arg)
            for key in node.keywords:
                yield from operand(key.value, _ALIASES.get(key.arg or "", key.arg) or "")
        case ast.BinOp():
            yield from operand(node.left)
            yield from operand(node.right)
        case ast.Compare():
            yield from operand(node.left)
            yield from operand(node.comparators[0])
        case ast.UnaryOp():
            yield from operand(node.operand)


def tensors_of(event: Event, print_code: Code) -> Iterator[tuple[int, Callable[[], ast.expr]]]:
    """Returns the tensors that the parts of an expression are, and those in lists of them."""
    for part, inner in event.parts.items():
        assert isinstance(part, ast.expr)
        if isinstance(part, ast.Attribute | ast.Tuple | ast.List | ast.Call):
            yield from tensors_of(inner, print_code)
    for part, inner in event.parts.items():
        assert isinstance(part, ast.expr)
        if isinstance(inner.value, torch.Tensor):
            yield id(inner.value), functools.partial(print_code, part)
        elif isinstance(inner.value, _LISTS) and not isinstance(part, ast.Tuple | ast.List):
            for at, item in enumerate(inner.value):
                if isinstance(item, torch.Tensor):
                    yield id(item), functools.partial(_element, print_code, part, at)


def _element(print_code: Code, node: ast.expr, at: int) -> ast.expr:
    return expr(f"{{0}}[{at}]", print_code(node))


# Methods of tensors that give sizes.
_SIZES = {
    "dim": "{0}.ndim", "ndimension": "{0}.ndim", "numel": "{0}.size", "nelement": "{0}.size",
    "element_size": "{0}.itemsize",
}  # fmt: skip


def size_of(print_code: Code, node: ast.Call, func: ast.Attribute) -> ast.expr | None:
    """Returns the code for a method of a tensor that gives sizes; None for another one."""
    if func.attr == "size":
        shape = expr("{0}.shape", print_code(func.value))
        given = [*node.args, *(key.value for key in node.keywords)]
        return expr("{0}[{1}]", shape, print_code(given[0])) if given else shape
    template = _SIZES.get(func.attr)
    return None if template is None else expr(template, print_code(func.value))
