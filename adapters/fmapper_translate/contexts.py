"""Contexts in which the source computes: without gradients, or in another precision."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from fmapper_translate.expressions import Expressions


def stops_gradients(expressions: Expressions, node: ast.expr) -> bool:
    """Returns whether an expression is `torch.no_grad()` or the like."""
    kind = expressions.static(node.func if isinstance(node, ast.Call) else node)[1]
    return kind in (torch.no_grad, torch.inference_mode)


def is_precision(node: ast.expr) -> bool:
    """Returns whether an expression is a context of `autocast`, or one that picks kernels."""
    code = ast.unparse(node)
    return "autocast" in code or "sdpa_kernel" in code or "sdp_kernel" in code


def tensors_in(expressions: Expressions, body: list[ast.stmt]) -> Iterator[str]:
    """Returns the names that statements give to tensors."""
    for node in (item for statement in body for item in ast.walk(statement)):
        match node:
            case ast.Assign([ast.Name(name)], value):
                if any(isinstance(item, torch.Tensor) for item in expressions.values(value)):
                    yield name
            case ast.AugAssign(ast.Name(name)):
                yield name
            case ast.Assign([ast.Tuple(elts)]):
                yield from (item.id for item in elts if isinstance(item, ast.Name))
