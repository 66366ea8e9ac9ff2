"""Calls of functions of Python and PyTorch that become others."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING

from torch import nn

from fmapper.translation import expr
from fmapper_translate.operations import NotTranscribed, negate

if TYPE_CHECKING:
    from fmapper_translate.expressions import Expressions


def isinstance_(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `isinstance`, without the classes of layers that the model has nowhere."""
    value, kinds = call.args
    listed = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    kept = [kind for kind in listed if not set(expressions.values(kind)) & expressions.file.absent]
    if not kept:
        return ast.Constant(False)
    made = expressions.code(kept[0] if len(kept) == 1 else ast.Tuple(kept, ast.Load()))
    return expr("isinstance({0}, {1})", expressions.code(value), made)


def dropout(expressions: Expressions, call: ast.Call) -> ast.expr:
    """Prints `F.dropout`, which draws from the model's random numbers.

    Raises:
        NotTranscribed: It is in no module, which would have some.
    """
    code, file, owner = expressions.code, expressions.file, expressions.function.owner
    named = {str(key.arg): key.value for key in call.keywords}
    given = inspect.signature(nn.functional.dropout).bind(*call.args, **named).arguments
    rate = code(given["p"]) if "p" in given else expr("0.5")
    training = code(given["training"]) if "training" in given else expr("True")
    if not file.is_module(owner):
        raise NotTranscribed("a function has no random numbers")
    file.draws.add(owner)
    return expr("dropout({0}, {1}, self.rngs, deterministic={2})",
                code(given["input"]), rate, negate(training))  # fmt: skip
