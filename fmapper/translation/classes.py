"""The classes of a file: one for all submodules of a class that have the same code."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fmapper.errors import ConversionError
from fmapper.translation.code import expr, identifier, text
from fmapper.translation.functions.keys import without_key
from fmapper.translation.functions.shapes import Shapes, combine, comment
from fmapper.translation.statements.origins import with_comments

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect


@dataclass(slots=True)
class Sketch:
    """The class that one submodule needs.

    Attributes:
        path: The submodule.
        title: What its class is called in the model's own code.
        made: What the constructor sets, in order: the attribute and the code.
        methods: The functions: name, parameters, and statements as text.
        ties: Statements of the constructor that make parts the same.
    """

    path: str
    title: str
    made: list[tuple[str, ast.expr]] = field(default_factory=list)
    methods: list[Method] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)

    def nodes(self) -> list[ast.AST]:
        """Returns all syntax trees of the class."""
        code: list[ast.AST] = [node for _, node in self.made]
        for method in self.methods:
            code += [ast.parse(line) for line in method.lines]
        return code

    def code(self) -> str:
        """Returns a text that is equal for submodules that can have one class."""
        made = [f"{name} = {text(node)}" for name, node in self.made]
        lines = [
            line for one in self.methods for line in (f"{one.name}{one.parameters}", *one.lines)
        ]
        return "\n".join([self.title, *made, *self.ties, *lines])


@dataclass(slots=True)
class Method:
    """A function of a class; each line is a statement, of several lines if it is a loop."""

    name: str
    parameters: tuple[str, ...]
    lines: list[str]
    shapes: list[Shapes] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)

    def print_lines(self) -> list[str]:
        """Returns the statements, after a comment on the shapes, with those on single lines."""
        found = comment(combine(self.shapes), self.lines)
        for line in self.lines:
            found += with_comments(line, self.comments)
        return found


@dataclass(slots=True)
class Class:
    """A class of the file.

    Attributes:
        name: Its name.
        sketch: The class of the first submodule that is one.
        paths: The submodules that are one.
    """

    name: str
    sketch: Sketch
    paths: list[str]

    @property
    def is_bare(self) -> bool:
        """Whether it is a part with methods alone, which needs no constructor."""
        return not (self.sketch.made or self.sketch.ties or "" in self.paths)


class Classes:
    """The classes of a file, those of parts first.

    Args:
        taken: Names that they cannot have.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {*taken}
        self._by_code: dict[str, Class] = {}

    def all(self) -> list[Class]:
        """Returns the classes in the order in which they were added."""
        return [*self._by_code.values()]

    def add(self, sketch: Sketch) -> Class:
        """Returns the class of a submodule: one that has the same code, or a new one."""
        code = sketch.code()
        found = self._by_code.get(code)
        if found is None:
            found = self._by_code[code] = Class(identifier(sketch.title, self._taken), sketch, [])
            self._taken.add(found.name)
        else:
            for method, like in zip(found.sketch.methods, sketch.methods, strict=True):
                method.shapes += like.shapes
        found.paths.append(sketch.path)
        return found


def with_masks(
    masks: Mapping[str, str], parameters: Sequence[str], lines: list[str], dialect: Dialect
) -> tuple[tuple[str, ...], list[str]]:
    """Lets a mask be omitted that then is all ones, unless another must be given after it.

    Args:
        masks: Names of masks -> of the parameter whose shape they have.
        parameters: The parameters of a function.
        lines: Its statements.
        dialect: Says how ones are written.

    Returns:
        The parameters, and the statements after one that fills the mask in.
    """
    found = list(parameters)
    is_last = True  # nothing after it must be given by position
    for at, name in reversed([*enumerate(parameters)]):
        like = masks.get(name, "")
        by_keyword = "*" in parameters[:at]
        if like in parameters and (is_last or by_keyword):
            found[at] = f"{name}=None"
            lines = [f"if {name} is None:\n    {name} = {dialect.ones_like.format(like)}", *lines]
        is_last = is_last and (by_keyword or name == "*" or "=" in found[at])
    return tuple(found), lines


def combine_modes(train: Sketch, evaluation: Sketch, dialect: Dialect) -> None:
    """Adds what a submodule does in evaluation to its sketch for training.

    A method that differs has both bodies, below `if self.deterministic`, or what else the framework
    calls the attribute that it sets with the mode.

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
