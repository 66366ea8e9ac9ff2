"""Calls of functions of Python and PyTorch that become others."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING

from torch import nn

from fmapper.translation import expr
from fmapper_translate.operations import negate

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions


def isinstance_(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `isinstance`, without the classes of layers that the model has nowhere."""
    value, kinds = call.args
    tested = expressions.code(value)
    if isinstance(tested, ast.Constant):
        return ast.Constant(isinstance(tested.value, expressions.values(kinds)[0]))
    listed = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    kept = [kind for kind in listed if not set(expressions.values(kind)) & expressions.file.absent]
    if not kept:
        return ast.Constant(False)
    made = expressions.code(kept[0] if len(kept) == 1 else ast.Tuple(kept, ast.Load()))
    return expr("isinstance({0}, {1})", tested, made)


def dropout(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `F.dropout`, which draws from the model's random numbers."""
    code = expressions.code
    named = {str(key.arg): key.value for key in call.keywords}
    given = inspect.signature(nn.functional.dropout).bind(*call.args, **named).arguments
    rate = code(given["p"]) if "p" in given else expr("0.5")
    training = code(given["training"]) if "training" in given else expr("True")
    return expr("nnx.Dropout({1})({0}, deterministic={3}, rngs={2})",
                code(given["input"]), rate, expressions.rngs(), negate(training))  # fmt: skip
