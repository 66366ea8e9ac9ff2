"""The classes of a file: one for all similar submodules, with arguments for their differences."""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fmapper.translation.code import expr, identifier, replace_nodes, text
from fmapper.translation.functions.forms import Terms
from fmapper.translation.functions.origins import with_comments
from fmapper.translation.functions.shapes import Shapes, combine, comment
from fmapper.translation.merging.align import align
from fmapper.translation.merging.numbers import mask_numbers, numbers_in
from fmapper.translation.merging.variants import unify, without_flags
from fmapper.translation.naming import singular

if TYPE_CHECKING:
    from fmapper.translation.dialect import Dialect


Values = tuple[object, ...]


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
    """

    path: str
    title: str
    made: list[tuple[str, ast.expr]] = field(default_factory=list)
    methods: list[Method] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    flags: Mapping[str, bool] = field(default_factory=dict)

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
    align(sketches, dialect.defaults)
    if dialect.has_variants:
        unify(sketches, dialect.check, dialect.lacking, dialect.defaults)
    groups: dict[str, list[Sketch]] = {}
    for sketch in sketches:
        groups.setdefault(sketch.shape(), []).append(sketch)
    return [_class(group, taken, names) for group in groups.values()]


def _class(group: list[Sketch], taken: set[str], names: Mapping[str, Sequence[str]]) -> Class:
    first = group[0]
    for other in group[1:]:
        for method, like in zip(first.methods, other.methods, strict=True):
            method.shapes += like.shapes
    made = Class(identifier(first.title, taken), first)
    taken.add(made.name)
    rows = [[(c.value, key) for node in s.nodes() for c, key in numbers_in(node)] for s in group]
    columns = list(zip(*rows, strict=True))
    differing = [
        i for i, column in enumerate(columns) if len({(type(v), v) for v, _ in column}) > 1
    ]
    if not differing:
        made.arguments = {sketch.path: () for sketch in group}
        return made
    by_values: dict[tuple[object, ...], str] = {}
    chosen: dict[int, str] = {}
    own: set[str] = {"rngs", "self", *(name for name, _ in first.made)}
    for i in differing:
        values = tuple(value for value, _ in columns[i])
        if values not in by_values:
            wanted = _parameter_name(columns[i][0][1], names)
            by_values[values] = identifier(wanted, own)
            own.add(by_values[values])
        chosen[i] = by_values[values]
    columns_of = {name: values for values, name in _in_order(by_values)}
    made.parameters = tuple(columns_of)
    made.arguments = {
        sketch.path: tuple(values[at] for values in columns_of.values())
        for at, sketch in enumerate(group)
    }
    made.sketch = without_flags(_generalise(first, chosen, made))
    return made


def _in_order(by_values: Mapping[Values, str]) -> list[tuple[Values, str]]:
    """Returns parameters with those first that are called as the first two, and flags last."""
    names = [name for values, name in by_values.items() if type(values[0]) is not bool]
    first = {re.sub(r"_\d+$", "", name) for name in names[:2]}

    def rank(one: tuple[Values, str]) -> int:
        values, name = one
        return 2 if type(values[0]) is bool else re.sub(r"_\d+$", "", name) not in first

    return sorted(by_values.items(), key=rank)


def _parameter_name(key: str, names: Mapping[str, Sequence[str]]) -> str:
    function, _, at = key.rpartition(":")
    if not function:
        return at or "value"
    known = names.get(function, ())
    if int(at) < len(known):
        return known[int(at)]
    return "size" if function.rpartition(".")[2] in _OF_SIZES else "value"


def _generalise(sketch: Sketch, chosen: dict[int, str], made: Class) -> Sketch:
    """Turns numbers that differ into parameters of a class."""
    at = 0
    fields: list[tuple[str, ast.expr]] = []
    for attr, made_by in sketch.made:
        node = copy.deepcopy(made_by)
        replaced = {}
        for constant, _ in numbers_in(node):
            if at in chosen:
                replaced[id(constant)] = expr(chosen[at])
            at += 1
        fields.append((attr, replace_nodes(node, replaced)))
    stored: dict[str, None] = {}
    methods = []
    for method in sketch.methods:
        lines = []
        comments = dict(method.comments)
        for line in method.lines:
            tree = ast.parse(line)
            replaced = {}
            for constant, _ in numbers_in(tree):
                if at in chosen:
                    replaced[id(constant)] = expr(f"self.{chosen[at]}")
                    stored[chosen[at]] = None
                at += 1
            lines.append(text(replace_nodes(tree, replaced)) if replaced else line)
            for old, new in zip(line.splitlines(), lines[-1].splitlines(), strict=False):
                if old.strip() in comments:
                    comments[new.strip()] = comments[old.strip()]
        terms = method.terms
        methods.append(
            Method(method.name, method.parameters, lines, method.shapes, comments, terms)
        )
    made.stored = tuple(stored)
    return Sketch(sketch.path, sketch.title, fields, methods, sketch.ties)


_OF_SIZES = frozenset({"arange", "broadcast_to", "full", "ones", "reshape", "view", "zeros"})
_INDEX = re.compile(r"self((?:\.\w+|\[\d+\])*\.\w+)\[(\d+)\]")
_INNER = re.compile(r"self((?:\.\w+|\[\d+\])*\.\w+\[\d+\])\[(\d+)\]")  # of lists in lists


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


def with_loops(
    lines: list[str], lengths: dict[str, int], titles: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Writes repeated statements on the parts of a list as a loop.

    Args:
        lines: The statements of a function.
        lengths: The lists, as `self.layers` -> how many parts they have.
        titles: What the class of each of their parts is called.
    """
    titles = titles or {}
    *_, before, last = "", "", *lines
    target, code = before.partition(" = ")[0], last.removeprefix("return ")
    if code != last and target.isidentifier() and _INDEX.search(code) and _INDEX.search(before):
        whole = _loops([*lines[:-1], f"{target} = {code}", f"return {target}"], lengths, titles)
        if len(whole) < len(lines):
            return whole
    return _loops(lines, lengths, titles)


def _loops(
    lines: list[str], lengths: dict[str, int], titles: Mapping[str, Sequence[str]]
) -> list[str]:
    found: list[str] = []
    lines = list(lines)
    at = 0
    while at < len(lines):
        run = _run_at(lines, at, titles)
        if run is None and (begun := _as_begun(lines, at)):
            rewritten = [*lines[:at], *begun, *lines[at + 1 :]]
            run = _run_at(rewritten, at + 1, titles)
            if run is not None:
                lines = rewritten
                found.append(lines[at])
                at += 1
        if run is None:
            found.append(lines[at])
            at += 1
            continue
        period, count, first, owners = run
        last = at + period * count
        if period == 1 and all(first + count == lengths.get(one, 0) - 1 for one in owners):
            parted = _last_apart(lines[last - 1], lines[last : last + 1])
            lines[last : last + 1] = parted
            count += len(parted) > 1
        found += _loop(lines[at : at + period], owners, first, count, lengths, titles)
        at += period * count
    return found


def _last_apart(before: str, after: list[str]) -> list[str]:
    """Extracts the last step of a loop from the statement that uses its result.

    Examples:
        >>> _last_apart("x = self.layers[1](x)", ["return self.head(self.layers[2](x))"])
        ['x = self.layers[2](x)', 'return self.head(x)']
    """
    step = _shift([before], 1)[0]
    target, _, code = step.partition(" = ")
    if not after or not target.isidentifier() or after[0].count(code) != 1 or after[0] == step:
        return after
    rest = after[0].replace(code, "\0")
    if re.search(rf"(?<![.\w]){target}\b", rest.partition(" = ")[2] or rest):
        return after
    return [step, rest.replace("\0", target)]


def _run_at(
    lines: list[str], at: int, titles: Mapping[str, Sequence[str]]
) -> tuple[int, int, int, list[str]] | None:
    """Finds repeated statements: length, count, first index, and lists."""
    for period, index in itertools.product(range(1, 25), (_INDEX, _INNER)):
        group = lines[at : at + period]
        if len(group) < period:
            return None
        found = [m for line in group for m in index.finditer(line)]
        if not found or (not index.search(group[0]) and period == 1):
            continue
        indices = {int(m[2]) for m in found}
        if len(indices) != 1:
            continue
        first = indices.pop()
        count = 1
        while _shift(group, count, index) == lines[at + count * period : at + (count + 1) * period]:
            count += 1
        owners = list(dict.fromkeys(f"self{m[1]}" for m in found))
        if count > 1 and all(_is_one_kind(titles.get(one, ()), first, count) for one in owners):
            return period, count, first, owners
    return None


def _is_one_kind(titles: Sequence[str], first: int, count: int) -> bool:
    """Returns whether parts are all that a list has, or of one class."""
    return count >= len(titles) - 1 or len({*titles[first : first + count]}) < 2


def _as_begun(lines: list[str], at: int) -> list[str]:
    """Rewrites the first iteration of a loop like the later ones."""
    first = lines[at]
    later = lines[at + 1] if at + 1 < len(lines) else ""
    target, equals, code = first.partition(" = ")
    if not equals or not target.isidentifier() or not _INDEX.search(first):
        return []
    wanted = _shift([later], -1)[0].partition(" = ")[2]
    if not later.startswith(f"{target} = ") or code == wanted:
        return []
    words = set(re.findall(r"(?<![.\w])[a-z_]\w*\b(?!\s*=)", code))
    for other in sorted(words - {"self"}) if target not in words else ():
        if re.sub(rf"(?<![.\w]){other}\b(?!\s*=)", target, code) == wanted:
            return [f"{target} = {other}", f"{target} = {wanted}"]
    return []


def _shift(group: list[str], by: int, index: re.Pattern[str] = _INDEX) -> list[str]:
    return [index.sub(lambda m: f"self{m[1]}[{int(m[2]) + by}]", line) for line in group]


def _loop(
    group: list[str],
    owners: list[str],
    first: int,
    count: int,
    lengths: dict[str, int],
    titles: Mapping[str, Sequence[str]],
) -> list[str]:
    used = set(re.findall(r"\w+", " ".join(group)))
    variables = []
    for owner in owners:
        plural = re.sub(r"\[\d+\]$", "", owner.rpartition(".")[2])
        variable = identifier(singular(plural, titles.get(owner, [""])[0]), used)
        used.add(variable)
        variables.append(variable)
    sources = [
        owner
        if (first, count) == (0, lengths.get(owner))
        else f"{owner}[{first or ''}:{first + count}]"
        for owner in owners
    ]
    over = sources[0] if len(sources) == 1 else f"zip({', '.join(sources)}, strict=True)"
    lines = [f"for {', '.join(variables)} in {over}:"]
    for statement in group:
        line = statement
        for owner, variable in zip(owners, variables, strict=True):
            line = line.replace(f"{owner}[{first}]", variable)
        lines.append(f"    {line}")
    return ["\n".join(lines)]
