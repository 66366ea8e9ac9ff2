"""The classes of a file: one for all similar submodules, with arguments for their differences."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fmapper.translation.code import expr, identifier, text
from fmapper.translation.constructors.arguments import arguments_of_class, with_arguments
from fmapper.translation.functions.forms import Terms
from fmapper.translation.functions.shapes import Shapes, combine, comment
from fmapper.translation.merging.align import align
from fmapper.translation.merging.alternatives import choose_parts, form_of_parts
from fmapper.translation.merging.conditions import without_flags
from fmapper.translation.merging.numbers import mask_numbers
from fmapper.translation.merging.twins import share_methods
from fmapper.translation.merging.variants import unify
from fmapper.translation.statements.origins import with_comments

if TYPE_CHECKING:
    from fmapper.programs.program import Part
    from fmapper.translation.dialect import Dialect


_MOST_GIVEN = 2  # parts that a constructor is given
_FUNCTION = "activation"  # what a sequence is given
_IDENTITY = "lambda x: x"
_HEAD = 100  # characters of a class apart from its statements
_TAKEN = ("self", "rngs", "key", "keys")  # what a constructor has besides
_DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class Sketch:
    """The class that one submodule needs.

    Attributes:
        path: The submodule.
        title: What its class is called in the model's own code.
        made: What the constructor sets, in order: the attribute and the code.
        methods: The functions: name, parameters, and statements as text.
        ties: Statements of the constructor that make parts the same.
        flags: The flags of the source's submodule, as `is_decoder`.
        numbers: The numbers that it has there, as `num_heads`, and those of its constructor.
        code: Arguments of parts -> what its constructor gives them, `conv.padding` -> `size // 2`.
        words: What it has there that is None, True, False, a text or a function, as text.
        defaults: What parameters of its constructor there are by default.
        arrays: What it sets that is an array.
        given: What the constructor is given -> the code for it.
        is_sequence: Whether it calls its parts in order, which are the only thing that it sets.
    """

    path: str
    title: str
    made: list[tuple[str, ast.expr]] = field(default_factory=list)
    methods: list[Method] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    flags: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int | float] = field(default_factory=dict)
    arrays: frozenset[str] = frozenset()
    given: dict[str, ast.expr] = field(default_factory=dict)
    is_sequence: bool = False

    def learn(self, part: Part) -> None:
        """Takes what a call of the submodule says of its attributes."""
        self.flags, self.numbers = part.flags, part.numbers
        self.code, self.words, self.defaults = part.code, part.words, part.defaults

    def nodes(self) -> list[ast.AST]:
        """Returns all syntax trees of the class."""
        code: list[ast.AST] = [node for _, node in self.made]
        for method in self.methods:
            code += [ast.parse(line) for line in method.lines]
        return code

    def shape(self) -> str:
        """Returns a key that is equal for classes that differ only in numbers."""
        return "\n".join([self.shape_of_parts(), *(one.shape() for one in self.methods)])

    def shape_of_parts(self) -> str:
        """Returns a key that is equal for classes whose constructors differ only in numbers."""
        made = [f"{name} = {mask_numbers(node)}" for name, node in self.made]
        return "\n".join([self.title, *made, *self.ties])


@dataclass(slots=True)
class Method:
    """A function of a class; each line is a statement, of several lines if it is a loop."""

    name: str
    parameters: tuple[str, ...]
    lines: list[str]
    shapes: list[Shapes] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)

    def shape(self) -> str:
        """Returns a key that is equal for methods that differ only in numbers."""
        header = f"{self.name}({', '.join(self.parameters)})"
        return "\n".join([header, *(mask_numbers(ast.parse(line)) for line in self.lines)])

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
        parameters: The arguments of the constructor, besides that for random numbers.
        stored: Those among them that methods read.
        arguments: For each submodule what its constructor is given.
    """

    name: str
    sketch: Sketch
    parameters: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    arguments: dict[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        """Whether it is a part with methods alone, which needs no constructor."""
        has_parts = self.sketch.made or self.sketch.ties or self.parameters
        return not has_parts and "" not in self.arguments


def merge(
    sketches: Sequence[Sketch],
    taken: set[str],
    names: Mapping[str, Sequence[str]],
    dialect: Dialect,
) -> list[Class]:
    """Merges equal classes of submodules.

    Args:
        sketches: What each submodule needs.
        taken: Names that are not free; those of the classes are added.
        names: Classes of the target -> the names of the parameters of their constructors.
        dialect: The target.
    """
    share_methods(sketches)
    for group in _by_title(sketches) if dialect.takes_parts else ():
        _give_activations(group, dialect)
    _unify(sketches, dialect)
    _choose_parts(sketches, dialect, only_told=True)
    for group in _by_title(sketches) if dialect.takes_parts else ():
        if group[0].is_sequence:
            _give_functions(group, dialect)
        else:
            _give_parts(group, dialect)
    _choose_parts(sketches, dialect, only_told=False)
    groups: dict[str, list[Sketch]] = {}
    for sketch in sketches:
        groups.setdefault(sketch.shape(), []).append(sketch)
    return [_class(group, taken, names) for group in groups.values()]


def _unify(sketches: Sequence[Sketch], dialect: Dialect) -> None:
    align(sketches, dialect.defaults)
    if dialect.has_variants:
        unify(sketches, dialect.check, dialect.lacking, dialect.defaults)


def _by_title(sketches: Sequence[Sketch]) -> list[list[Sketch]]:
    found: dict[tuple[str, bool], list[Sketch]] = {}
    for sketch in sketches:
        found.setdefault((sketch.title, sketch.is_sequence), []).append(sketch)
    return [*found.values()]


def _give_parts(sketches: list[Sketch], dialect: Dialect) -> None:
    """Gives constructors the parts that are others for each submodule: `PreNorm(Attention(...))`.

    Args:
        sketches: Those of one class of the source; they change where they become fewer classes.
        dialect: The target.
    """
    shapes = {sketch.shape(): sketch for sketch in sketches}
    attributes = {tuple(attr for attr, _ in sketch.made) for sketch in sketches}
    if len(shapes) < 2 or len(attributes) > 1:
        return
    rows = zip(*(sketch.made for sketch in sketches), strict=True)
    differing = {row[0][0] for row in rows if len({mask_numbers(node) for _, node in row}) > 1}
    nodes = [node for one in sketches for attr, node in one.made if attr in differing]
    are_parts = all(isinstance(one, ast.Call) for one in nodes)
    are_parts &= not any(sketch.arrays & differing for sketch in sketches)
    if not are_parts or not 1 <= len(differing) <= _MOST_GIVEN:
        return
    changed = copy.deepcopy(sketches)
    names = {attr: f"{attr}_" if attr in _TAKEN else attr for attr in differing}
    for sketch in changed:
        sketch.given = {names[attr]: node for attr, node in sketch.made if attr in differing}
        sketch.made = [
            (attr, expr(names[attr]) if attr in differing else node) for attr, node in sketch.made
        ]
    _unify(changed, dialect)
    left = {sketch.shape(): sketch for sketch in changed}
    saved = sum(map(_size, shapes.values())) - sum(map(_size, left.values()))
    given = {(_DIGITS.sub("", one.path), text(node)) for one in changed
             for node in one.given.values()}  # fmt: skip
    if sum(len(code) for _, code in given) < saved:  # items of a list are made in one place
        for sketch, other in zip(sketches, changed, strict=True):
            sketch.made, sketch.methods, sketch.given = other.made, other.methods, other.given


def _choose_parts(sketches: Sequence[Sketch], dialect: Dialect, *, only_told: bool) -> None:
    """Writes parts that are of two kinds below flags: `silu() if use_silu else relu`.

    Args:
        sketches: All; those of one class of the source change where they become fewer classes.
        dialect: The target.
        only_told: Whether only items of sequences, and what a variable of the source decides on.
    """
    by_form: dict[tuple[object, ...], list[Sketch]] = {}
    for sketch in sketches if dialect.has_variants else ():
        key = sketch.title, sketch.is_sequence, form_of_parts(sketch)
        by_form.setdefault(key, []).append(sketch)
    for group in by_form.values():
        shapes = {sketch.shape(): sketch for sketch in group}
        changed = copy.deepcopy(group)
        if len(shapes) < 2 or not choose_parts(changed, dialect.defaults, only_told=only_told):
            continue
        _unify(changed, dialect)
        left = {sketch.shape(): sketch for sketch in changed}
        saved = sum(map(_size, shapes.values())) - sum(map(_size, left.values()))
        if len(left) < len(shapes) and saved > 0:
            for sketch, other in zip(group, changed, strict=True):
                sketch.made, sketch.methods, sketch.given = other.made, other.methods, other.given


def _give_functions(sketches: list[Sketch], dialect: Dialect) -> None:
    """Gives constructors of sequences the function that is another one for each: `act=relu`."""
    by_count: dict[int, list[Sketch]] = {}
    for sketch in sketches:
        ((_, node),) = sketch.made
        assert isinstance(node, ast.Call)
        by_count.setdefault(len(node.args), []).append(sketch)
    for group in by_count.values():
        calls = [one.made[0][1] for one in group]
        rows = [*zip(*(one.args for one in calls if isinstance(one, ast.Call)), strict=True)]
        places = [
            at for at, row in enumerate(rows)
            if not any(isinstance(one, ast.Call | ast.IfExp) for one in row)
            and len({*map(text, row)}) > 1
        ]  # fmt: skip
        for sketch, call in zip(group, calls, strict=True) if len(places) == 1 else ():
            changed = copy.deepcopy(call)
            assert isinstance(changed, ast.Call)
            sketch.given = {_FUNCTION: changed.args[places[0]]}
            changed.args[places[0]] = expr(_FUNCTION)
            sketch.made = [(sketch.made[0][0], changed)]
        align(group, dialect.defaults)


def _give_activations(sketches: Sequence[Sketch], dialect: Dialect) -> None:
    """Gives constructors the function that statements of methods call: `Block(8, jax.nn.silu)`.

    Args:
        sketches: Those of one class of the source; they change where they become fewer classes.
        dialect: The target.
    """
    by_form: dict[tuple[object, ...], list[Sketch]] = {}
    for sketch in sketches:
        names = (*(attr for attr, _ in sketch.made), *sketch.ties)
        methods = [(one.name, one.parameters, len(one.lines)) for one in sketch.methods]
        if sketch.path and _FUNCTION not in names:
            by_form.setdefault((names, *methods), []).append(sketch)
    for group in by_form.values():
        ways = (_call_activations, _take_activations)
        changed = next((one for way in ways if way(one := copy.deepcopy(group))), None)
        if changed is None or len({one.shape() for one in group}) < 2:
            continue
        before = copy.deepcopy(group)
        _unify(before, dialect)
        _unify(changed, dialect)
        if len({one.shape() for one in changed}) < len({one.shape() for one in before}):
            for sketch, other in zip(group, changed, strict=True):
                sketch.made, sketch.methods, sketch.given = other.made, other.methods, other.given


def _call_activations(sketches: Sequence[Sketch]) -> bool:
    """Writes the functions that methods call as an attribute; returns whether that is one each."""
    functions: set[tuple[str, ...]] = set()
    for methods in zip(*(one.methods for one in sketches), strict=True):
        for at, lines in enumerate(zip(*(one.lines for one in methods), strict=True)):
            trees = _with_activations([ast.parse(line) for line in lines], functions)
            for method, tree, line in zip(methods, trees, lines, strict=True):
                method.lines[at] = new = text(tree)
                if line in method.comments:
                    method.comments[new] = method.comments[line]
    if len(functions) != 1 or any(
        _reads_variables(one, sketches[0]) for one in next(iter(functions))
    ):
        return False
    for sketch, function in zip(sketches, functions.pop(), strict=True):
        sketch.made.append((_FUNCTION, expr(_FUNCTION)))
        sketch.given = {_FUNCTION: expr(function)}
    return True


def _take_activations(sketches: Sequence[Sketch]) -> bool:
    """Writes the functions in sequences as a parameter; returns whether that is one each."""
    places = [[*_functions_in(one)] for one in sketches]
    if len({*map(len, places)}) > 1:
        return False
    rows = [tuple(text(args[i]) for args, i in row) for row in zip(*places, strict=True)]
    differing = {row for row in rows if len({*row}) > 1}
    for sketch, own in zip(sketches, places, strict=True) if len(differing) == 1 else ():
        for (args, i), row in zip(own, rows, strict=True):
            if row in differing:
                sketch.given, args[i] = {_FUNCTION: args[i]}, expr(_FUNCTION)
    return len(differing) == 1


def _functions_in(sketch: Sketch) -> Iterator[tuple[list[ast.expr], int]]:
    """Yields the places of functions among the parts of sequences."""
    for _, node in sketch.made:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and text(call.func) == "Sequential":
                for i, one in enumerate(call.args):
                    if isinstance(one, ast.Name | ast.Attribute | ast.Lambda):
                        yield call.args, i


def _with_activations(nodes: list[Any], functions: set[tuple[str, ...]]) -> list[Any]:
    """Returns code with an attribute in place of the functions that are others in each.

    Args:
        nodes: What each submodule has in a place; it changes.
        functions: Takes the functions of each place.
    """
    if len({*map(mask_numbers, nodes)}) == 1:
        return nodes
    calls = [_split_call(node) for node in nodes]
    inner = {mask_numbers(call[1]) for call in calls if call}
    called = [
        call or (_IDENTITY, node)
        for call, node in zip(calls, nodes, strict=True)
        if call or mask_numbers(node) in inner
    ]
    if len(called) == len(nodes) and len({function for function, _ in called}) > 1:
        functions.add(tuple(function for function, _ in called))
        given = _with_activations([operand for _, operand in called], functions)
        return [expr(f"self.{_FUNCTION}({{0}})", operand) for operand in given]
    if len({type(node) for node in nodes}) == 1:
        for field in nodes[0]._fields:
            values = [getattr(node, field) for node in nodes]
            if all(isinstance(value, ast.AST) for value in values):
                for node, new in zip(nodes, _with_activations(values, functions), strict=True):
                    setattr(node, field, new)
            elif all(isinstance(value, list) for value in values):
                rows = [_with_activations([*row], functions) for row in zip(*values, strict=False)]
                for value, column in zip(values, zip(*rows, strict=True), strict=False):
                    value[: len(column)] = column
    return nodes


def _reads_variables(function: str, sketch: Sketch) -> bool:
    """Returns whether a function is a method of what a method of a sketch computes."""
    if function == _IDENTITY:
        return False
    root = function.removeprefix("lambda x: ").partition("(")[0].partition(".")[0]
    parameters = {one.partition("=")[0] for method in sketch.methods for one in method.parameters}
    names = (one for node in sketch.nodes() for one in ast.walk(node) if isinstance(one, ast.Name))
    return root in parameters | {one.id for one in names if isinstance(one.ctx, ast.Store)}


def _split_call(node: ast.AST) -> tuple[str, ast.expr] | None:
    """Returns a function of one array, with its numbers, and the array that it is called with."""
    if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Starred):
        return None
    others = [*node.args[1:], *(key.value for key in node.keywords)]
    name = text(node.func)
    if name.split(".")[0] == "self" or not name.replace(".", "").isidentifier():
        return None
    if not all(isinstance(one, ast.Constant) for one in others):
        return None
    if others:
        changed = copy.deepcopy(node)
        changed.args[0] = ast.Name("x", ast.Load())
        name = f"lambda x: {text(changed)}"
    return name, node.args[0]


def _size(sketch: Sketch) -> int:
    """Returns about how many characters a class has."""
    return _HEAD + sum(len(text(node)) for node in sketch.nodes())


def _class(group: list[Sketch], taken: set[str], names: Mapping[str, Sequence[str]]) -> Class:
    first = group[0]
    for other in group[1:]:
        for method, like in zip(first.methods, other.methods, strict=True):
            method.shapes += like.shapes
    made = Class(identifier(first.title, taken), first)
    taken.add(made.name)
    found = arguments_of_class(group, names)
    numbers = found.numbers
    last = _FUNCTION in first.given  # which is the last argument
    ends = ((*first.given,), ()) if not last else ((), (*first.given,))
    made.parameters = (*ends[0], *found.parameters, *ends[1])
    for at, sketch in enumerate(group):
        parts = (*sketch.given.values(),)
        own = numbers[at] if numbers else ()
        made.arguments[sketch.path] = (*own, *parts) if last else (*parts, *own)
    if found.parameters:
        sketch, made.stored = with_arguments(first, found.code)
        made.sketch = without_flags(sketch)
    return made


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
