"""One class for what a submodule does in training and in evaluation, by the mode that it is in.

A method that differs has both bodies, below `if self.deterministic`, or what else the framework
calls the attribute that it sets with the mode.
"""

from __future__ import annotations

import ast
import textwrap
from typing import TYPE_CHECKING

from fmapper.errors import ConversionError
from fmapper.translation.code import expr, text
from fmapper.translation.functions.keys import without_key

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch
    from fmapper.translation.dialect import Dialect


def combine(train: Sketch, evaluation: Sketch, dialect: Dialect) -> None:
    """Adds what a submodule does in evaluation to its sketch for training.

    Args:
        train: The sketch.
        evaluation: That of the submodule in evaluation.
        dialect: The target, which says by which attribute the two are told apart.

    Raises:
        ConversionError: It has other parts, arguments or methods there.
    """
    made = {attr: _text_for_both(node, dialect) for attr, node in train.made}
    is_alike = (
        all(made.get(attr) == _text_for_both(node, dialect) for attr, node in evaluation.made)
        and train.ties == evaluation.ties
        and {one.name for one in evaluation.methods} <= {one.name for one in train.methods}
    )
    others = {one.name: one for one in evaluation.methods}
    differ = False
    for method in train.methods:
        other = others.get(method.name)
        if other is None:
            continue
        is_alike &= other.parameters in (method.parameters, without_key(method.parameters))
        if other.lines != method.lines:
            differ = True
            method.comments = other.comments | method.comments
            inner = textwrap.indent("\n".join(other.lines), "    ")
            method.lines = [f"if {dialect.in_evaluation}:\n{inner}", *method.lines]
    if not is_alike:
        raise refusal(train.path or train.title)
    if differ and dialect.mode:
        train.made.append((dialect.mode, expr("False")))


def refusal(part: str) -> ConversionError:
    """Returns the error for a part whose two modes one class cannot have."""
    return ConversionError(
        f"{part}: its parts or arguments are others in evaluation than in training, so that one "
        "class cannot have both. Use train=False (--eval)"
    )


def _text_for_both(node: ast.expr, dialect: Dialect) -> str:
    """Returns the code that makes a part, without what is known of it in training alone."""
    tree = ast.parse(text(node), mode="eval").body
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            told = dialect.told_in_training.get(text(call.func), ())
            call.keywords = [one for one in call.keywords if one.arg not in told]
    return text(tree)
