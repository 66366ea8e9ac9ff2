"""One class for what a submodule does in training and in evaluation, by the mode that it is in.

What differs is below `if self.deterministic`, or what else the framework calls the attribute that
it sets with the mode.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fmapper.errors import ConversionError
from fmapper.translation.code import expr, statement_text, text
from fmapper.translation.functions.keys import with_several_keys, without_key
from fmapper.translation.merging.same_sizes import with_sizes

if TYPE_CHECKING:
    from fmapper.translation.classes import Sketch
    from fmapper.translation.dialect import Dialect

# Statements that differ in more places and of which fewer are alike are below one `if`.
_MOST_CHANGES, _LEAST_ALIKE = 3, 0.5


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
    kept = {attr for attr, _ in evaluation.made}
    dropped = {
        attr
        for attr, node in train.made
        if isinstance(node, ast.Call) and text(node.func) in dialect.only_in_training
    } - kept
    others = {one.name: one for one in evaluation.methods}
    differ = False
    for method in train.methods:
        other = others.get(method.name)
        if other is None:
            continue
        is_alike &= other.parameters in (method.parameters, without_key(method.parameters))
        ours, theirs = with_several_keys(method.lines, other.lines)
        lines = combine_statements(ours, theirs, dialect.in_evaluation, dropped)
        if dialect.in_evaluation.removeprefix("not ") in "\n".join(lines):
            differ = True
            method.comments = other.comments | method.comments
            method.lines = lines
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


def combine_statements(
    train: Sequence[str],
    evaluation: Sequence[str],
    in_evaluation: str,
    only_in_training: Collection[str] = (),
) -> list[str]:
    r"""Returns the statements of a function for both modes.

    Where both have a statement it stands once; each mode is left with its own statements, in order.

    Args:
        train: The statements for training.
        evaluation: Those for evaluation.
        in_evaluation: The code that says that it is in evaluation.
        only_in_training: Attributes for layers that give what they are given in evaluation.

    Examples:
        >>> print(*combine_statements(["x = f(x)", "x = g(x)", "return x"],
        ...                           ["x = f(x)", "return x"], "not self.training"), sep="\n")
        x = f(x)
        if self.training:
            x = g(x)
        return x
    """
    ours, theirs = with_sizes(*(ast.parse("\n".join(lines)).body for lines in (train, evaluation)))
    return [
        statement_text(one) for one in _Modes(in_evaluation, only_in_training).combine(ours, theirs)
    ]


class _Modes:
    """The combination of the statements of two modes."""

    def __init__(self, in_evaluation: str, only_in_training: Collection[str]) -> None:
        self._evaluation = in_evaluation
        is_negative = in_evaluation.startswith("not ")
        self._training = in_evaluation[4:] if is_negative else f"not {in_evaluation}"
        self._without = _Without(only_in_training)

    def combine(self, train: list[ast.stmt], evaluation: list[ast.stmt]) -> list[ast.stmt]:
        """Returns the statements, with those of one mode alone below conditions."""
        groups = self._groups(train)
        ours = [self._in_evaluation(group[0]) for group in groups]
        theirs = [text(one) for one in evaluation]
        matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
        found: list[ast.stmt] = []
        changes = sum(kind != "equal" for kind, *_ in matcher.get_opcodes())
        if changes > _MOST_CHANGES and matcher.ratio() < _LEAST_ALIKE:
            return self._choice(train, evaluation)
        for kind, begin, end, first, last in matcher.get_opcodes():
            mine = [one for group in groups[begin:end] for one in group]
            other = evaluation[first:last]
            if kind == "equal":
                found += mine
                continue
            at, there = _same_loop(mine, other)
            if at < 0:
                found += self._choice(mine, other)
                continue
            loop, same = mine[at], other[there]
            assert isinstance(loop, ast.For)
            assert isinstance(same, ast.For)
            found += self._choice(mine[:at], other[:there])
            found.append(ast.For(loop.target, loop.iter, self.combine(loop.body, same.body), []))
            found += self._choice(mine[at + 1 :], other[there + 1 :])
        return found

    def _groups(self, train: list[ast.stmt]) -> list[list[ast.stmt]]:
        """Returns statements, each with those after it that do nothing in evaluation."""
        found: list[list[ast.stmt]] = []
        for one in train:
            target, equals, code = self._in_evaluation(one).partition(" = ")
            if found and equals and target == code:
                found[-1].append(one)
            else:
                found.append([one])
        return found

    def _in_evaluation(self, statement: ast.stmt) -> str:
        """Returns the code of a statement for training as it is in evaluation."""
        return text(self._without.visit(ast.parse(text(statement))))

    def _choice(self, train: list[ast.stmt], evaluation: list[ast.stmt]) -> list[ast.stmt]:
        """Returns statements for each mode; none after those that return."""
        if not train and not evaluation:
            return []
        if not evaluation:
            return [ast.If(expr(self._training), train, [])]
        if isinstance(evaluation[-1], ast.Return):
            return [ast.If(expr(self._evaluation), evaluation, []), *train]
        if train and self._evaluation.startswith("not "):
            return [ast.If(expr(self._training), train, evaluation)]
        return [ast.If(expr(self._evaluation), evaluation, train)]  # `train` may be empty


class _Without(ast.NodeTransformer):
    """Puts what a layer is given in place of its call."""

    def __init__(self, layers: Collection[str]) -> None:
        self._layers = {f"self.{attr}" for attr in layers}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return node.args[0] if text(node.func) in self._layers and node.args else node


def _same_loop(train: list[ast.stmt], evaluation: list[ast.stmt]) -> tuple[int, int]:
    """Returns the places of the one loop that both have; -1 if there is none, or several."""
    heads = [[_head(one) for one in side] for side in (train, evaluation)]
    if any(sum(map(bool, side)) != 1 for side in heads):
        return -1, -1
    ours, theirs = (next(filter(None, side)) for side in heads)
    return (heads[0].index(ours), heads[1].index(theirs)) if ours == theirs else (-1, -1)


def _head(statement: ast.stmt) -> str:
    """Returns the beginning of a loop; empty for other statements."""
    if not isinstance(statement, ast.For) or statement.orelse:
        return ""
    return f"{text(statement.target)} in {text(statement.iter)}"
