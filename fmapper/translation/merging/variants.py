"""One class for submodules of one class of the source whose programs differ in a few statements.

What differs is below `if`s: an argument that is there or not, as `key_value_states is None`; a part
that some have, as `self.relative_attention_bias is None`; or a flag of the source, as `is_decoder`,
which becomes an argument of the constructor.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fmapper.translation.code import text
from fmapper.translation.constructors.differences import find_differences, flags_of_parts
from fmapper.translation.functions.forms import Argument, condition_on
from fmapper.translation.merging import bypasses, stand_ins
from fmapper.translation.merging.align import (
    Defaults,
    align_parts,
    fill_lacking,
    join_sequences,
    split_sequences,
)
from fmapper.translation.merging.bypasses import Bypass
from fmapper.translation.merging.conditions import (
    FLAG,
    Case,
    Choice,
    choose_shortest,
    evaluate,
    rules,
    with_flags,
)
from fmapper.translation.merging.numbers import mask_numbers
from fmapper.translation.merging.stand_ins import StandIn

if TYPE_CHECKING:
    from fmapper.translation.classes import Method, Sketch

Check = Callable[[ast.expr, str], ast.expr]
_MOST_BLOCKS = 6
_LEAST_SAVED = 0.75  # of the lines of separate classes, at most
_HEADS = 3  # lines of a class beside its statements
ABSENT = "None"
_KEY = "key"  # for random numbers, which parts that draw none may be given as well


@dataclass(slots=True)
class Variant:
    """The sketches of one class that differ in numbers alone.

    Attributes:
        sketches: Those.
        lines: The statements of the first, without the check of arguments.
        names: Its parameters by position, and those by keyword, each with its default or None.
        case: What conditions can ask of it.
        stand_in: How its statements are written with an argument that may be None.
        bypasses: How they are then written with the results of parts that it has not.
    """

    sketches: list[Sketch]
    lines: list[str]
    names: tuple[dict[str, str | None], dict[str, str | None]]
    case: Case
    stand_in: StandIn | None = None
    bypasses: tuple[Bypass, ...] = ()

    @property
    def method(self) -> Method:
        """The method of the first sketch."""
        return self.sketches[0].methods[0]

    def parameters(self) -> dict[str, str | None]:
        """Returns all parameters with their defaults."""
        return self.names[0] | self.names[1]

    def own(self, sketch: Sketch) -> list[str]:
        """Returns the statements of one of the sketches."""
        lines = _own_lines(sketch)
        for one in (self.stand_in, *self.bypasses):
            lines = lines if one is None else one.rewrite(lines)
        return lines


def unify(
    sketches: Sequence[Sketch], check: Check, lacking: frozenset[str], defaults: Defaults
) -> None:
    """Rewrites the sketches of one class of the source to one form, where there is one.

    What differs in that form is the values of flags, which become arguments of the constructor.

    Args:
        sketches: What each submodule needs; those that are rewritten change.
        check: Returns the code that checks a condition on arguments.
        lacking: Functions of the file that may be called with `mask=None`, or without.
        defaults: Classes of the target -> what their keywords are where they are not given.
    """
    by_title: dict[str, dict[str, list[Sketch]]] = {}
    for sketch in sketches:
        by_title.setdefault(sketch.title, {}).setdefault(sketch.shape(), []).append(sketch)
    for shapes in by_title.values():
        before = [(one, list(one.made)) for group in shapes.values() for one in group]
        split = split_sequences([one for one, _ in before]) if len(shapes) > 1 else {}
        if len(shapes) > 1:
            align_parts([one for one, _ in before], defaults)
        groups: dict[str, list[Sketch]] = {}
        for sketch, _ in before:
            groups.setdefault(sketch.shape(), []).append(sketch)
        hidden = frozenset(f"all_{attr}" for attr in split)
        found = _group_best(groups.values(), {}, hidden, check, lacking)
        if len(found) > 1:
            every = [one for one, _ in before]
            flags = {id(x): more for x, more in zip(every, find_differences(every), strict=True)}
            others = _group_best(groups.values(), flags, hidden, check, lacking)
            found = min(found, others, key=len)
        written_anew: set[int] = set()
        for known, merged in found:
            if merged is not None:
                _rewrite(merged)
                written_anew |= {id(sketch) for one in known for sketch in one.sketches}
        for sketch, made in before:
            if id(sketch) not in written_anew:
                sketch.made[:] = made
            elif split:
                join_sequences(sketch, split)


def _group_best(
    groups: Iterable[list[Sketch]],
    flags: Mapping[int, Mapping[str, bool]],
    hidden: frozenset[str],
    check: Check,
    lacking: frozenset[str],
) -> list[tuple[list[Variant], _Merged | None]]:
    """Returns the fewest groups of variants with a form in common.

    Args:
        groups: The sketches of each variant.
        flags: More flags, by the identity of sketches.
        hidden: Parts that are items of sequences.
        check: Returns the code that checks a condition on arguments.
        lacking: Functions of the file that may be called with `mask=None`, or without.
    """
    variants = [one for group in groups if (one := _variant(group, flags, hidden)) is not None]
    ways = [variants, *([written] if (written := _with_stand_ins(variants)) else [])]
    ways += [written for one in ways if (written := _with_bypasses(one))]
    found = [_group(one, check, lacking) for one in ways]
    return min(reversed(found), key=len)


def _group(
    variants: Sequence[Variant], check: Check, lacking: frozenset[str]
) -> list[tuple[list[Variant], _Merged | None]]:
    """Returns the variants that have a form in common, with that."""
    groups: list[tuple[list[Variant], _Merged | None]] = []
    for variant in variants:
        for at, (known, _) in enumerate(groups):
            merged = _merge([*known, variant], check, lacking)
            if merged is not None:
                groups[at] = [*known, variant], merged
                break
        else:
            groups.append(([variant], None))
    for at in reversed(range(1, len(groups))):  # what did not go with some may go with more
        for before in range(at):
            every = [*groups[before][0], *groups[at][0]]
            if (merged := _merge(every, check, lacking)) is not None:
                groups[before] = every, merged
                del groups[at]
                break
    return groups


def _with_stand_ins(variants: Sequence[Variant]) -> list[Variant] | None:
    """Returns the variants with an argument that is another one where it is not given."""
    if len(variants) < 2:
        return None
    optional = frozenset(name for one in variants for name in one.case.optional)
    found = stand_ins.find(
        [one.lines for one in variants], [one.case.given for one in variants], optional
    )
    if found is None:
        return None
    return [
        replace(
            one,
            lines=way.rewrite(one.lines),
            case=replace(one.case, optional=one.case.optional | {way.name}),
            stand_in=way,
        )
        for one, way in zip(variants, found, strict=True)
    ]


def _with_bypasses(variants: Sequence[Variant]) -> list[Variant] | None:
    """Returns the variants with the results of parts that only some have, if one has none."""
    found = list(variants)
    for part in sorted({part for one in variants for part in one.case.parts}):
        having = [one for one in found if part in one.case.parts]
        for at, one in enumerate(found):
            ways = (bypasses.find(part, other.lines, one.lines) for other in having)
            if one not in having and (way := next(filter(None, ways), None)):
                lines = way.rewrite(one.lines)
                found[at] = replace(one, lines=lines, bypasses=(*one.bypasses, way))
    return found if any(one.bypasses for one in found) else None


def _variant(
    sketches: list[Sketch], more: Mapping[int, Mapping[str, bool]], hidden: frozenset[str]
) -> Variant | None:
    """Returns the variant that sketches are; None for those that cannot be one."""
    first = sketches[0]
    method = first.methods[0] if len(first.methods) == 1 else None
    if method is None or method.name != "__call__" or first.ties or method.terms.has_twins:
        return None
    alike = [{**more.get(id(x), {}), **flags_of_parts(x), **x.flags} for x in sketches]
    flags = {
        key: value for key, value in alike[0].items() if all(o.get(key) == value for o in alike)
    }
    positional: dict[str, str | None] = {}
    keywords: dict[str, str | None] = {}
    target = positional
    for parameter in method.parameters:
        name, equals, default = parameter.partition("=")
        if name == "*":
            target = keywords
        else:
            target[name] = default if equals else None
    lines = _own_lines(first)
    parts = frozenset(attr for attr, _ in first.made)
    flags |= {f"has_{name}": name in parts for name in hidden}
    given = {name for name in positional | keywords if method.terms.fixed.get(name) != ABSENT}
    case = Case(frozenset(given), parts, flags, method.terms.optional, hidden)
    return Variant(sketches, lines, (positional, keywords), case)


def _own_lines(sketch: Sketch) -> list[str]:
    """Returns the statements of a sketch without the check of its arguments."""
    method = sketch.methods[0]
    return [line for line in method.lines if line != method.terms.check]


@dataclass(slots=True)
class _Merged:
    """The common form of several variants.

    Attributes:
        variants: Those, as they are written in it.
        parameters: Those of the method.
        checks: The statements that check them.
        pieces: Indices of common statements in each variant, or what the variants have in a place.
        attributes: What the constructor sets, in order -> the flag for it; empty where all have it.
        flags: The flags, for each variant.
    """

    variants: Sequence[Variant]
    parameters: tuple[str, ...]
    checks: list[str]
    pieces: list[tuple[int, ...] | Choice]
    attributes: dict[str, str]
    flags: list[dict[str, bool]]


def _merge(variants: Sequence[Variant], check: Check, lacking: frozenset[str]) -> _Merged | None:
    variants = stand_ins.drop_unused(variants)
    signature = _signature(variants, check)
    attributes = _attributes(variants)
    if signature is None or attributes is None or _lack_stand_in(variants):
        return None
    parameters, checks = signature
    known = {one.partition("=")[0] for one in parameters if not one.endswith(f"={ABSENT}")}
    cases = [replace(one.case, optional=one.case.optional | known) for one in variants]
    pieces: list[tuple[int, ...] | Choice] = []
    keys = [[_key(line, one.case, lacking) for line in one.lines] for one in variants]
    begins = [0] * len(variants)
    for common in [*_common(keys), tuple(len(one.lines) for one in variants)]:
        parts = [one.lines[a:b] for one, a, b in zip(variants, begins, common, strict=True)]
        if any(parts):
            chosen = choose_shortest(parts, cases)
            if not chosen or _vary(variants, begins, common):
                return None
            pieces += chosen
        pieces.append(common)
        begins = [at + 1 for at in common]
    pieces.pop()
    others = {n for n in known if any(x.startswith(f"{n}=") for x in parameters)} | {_KEY}
    found = rules([
        replace(one.case, given=one.case.given - others, optional=one.method.terms.optional)
        for one in variants
    ])  # fmt: skip
    if found is None:
        return None
    for condition, message in found:
        words = FLAG.sub(r"\1", message).replace("self.", "")
        checks.append(text(check(ast.parse(condition, mode="eval").body, words)))
    blocks = [one for one in pieces if isinstance(one, Choice)]
    size = sum(len(one.lines()) for one in blocks) + len(pieces) - len(blocks)
    total = sum(len(line.splitlines()) for one in variants for line in one.lines)
    size += len(attributes) + _HEADS
    total += sum(len(one.sketches[0].made) + _HEADS for one in variants)
    if len(blocks) > _MOST_BLOCKS or size > _LEAST_SAVED * total:
        return None
    used = {flag for one in blocks for flag in one.flags()} | {*filter(None, attributes.values())}
    used |= {flag for one in checks for flag in FLAG.findall(one)}
    flags = [
        {
            flag: one.case.flags[flag] if flag in one.case.flags else _has(one, flag, attributes)
            for flag in sorted(used)
        }
        for one in variants
    ]
    merged = _Merged(variants, parameters, checks, pieces, attributes, flags)
    return merged if _is_exact(variants, cases, merged, lacking) else None


def _lack_stand_in(variants: Sequence[Variant]) -> bool:
    """Returns whether the statements read an argument that none of the variants is given."""
    names = {one.stand_in.name for one in variants if one.stand_in is not None}
    return not names <= {name for one in variants for name in one.parameters()}


def _has(variant: Variant, flag: str, attributes: Mapping[str, str]) -> bool:
    return any(flag == one and attr in variant.case.parts for attr, one in attributes.items())


def _vary(variants: Sequence[Variant], begins: Sequence[int], ends: Sequence[int]) -> bool:
    """Returns whether statements that not all variants have differ in numbers by submodule."""
    for variant, begin, end in zip(variants, begins, ends, strict=True):
        rows = {tuple(variant.own(one)[begin:end]) for one in variant.sketches}
        if len(rows) > 1:
            return True
    return False


def _signature(
    variants: Sequence[Variant], check: Check
) -> tuple[tuple[str, ...], list[str]] | None:
    """Returns the parameters that take the calls of all variants, and the check of them."""
    longest = max((one.names[0] for one in variants), key=len)
    if any([*one.names[0]] != [*longest][: len(one.names[0])] for one in variants):
        return None
    every = dict.fromkeys(name for one in variants for name in one.parameters())
    printed: dict[str, str | None] = {}
    fixed: list[Argument] = []
    for name in every:
        having = [one for one in variants if name in one.parameters()]
        defaults = {one.parameters()[name] for one in having} - {None}
        values = {one.method.terms.fixed.get(name) for one in having}
        if len(defaults) > 1 or len(values - {None, ABSENT}) > 1:
            return None
        if len(values) > 1 and values != {None, ABSENT}:
            return None
        default = next(iter(defaults), None)
        if len(having) < len(variants):
            default = default or ABSENT
        printed[name] = default
        (value, *others) = values
        if value is not None and not others:
            fixed.append(Argument(name, ast.literal_eval(value), 0, "fixed", has_default=True))
    positional = [*longest]
    needed = {frozenset(one.method.terms.needed) for one in variants}
    later = [printed[name] is not None for name in positional]
    if later != sorted(later) or len(needed) > 1:
        return None
    found = [
        f"{name}={printed[name]}" if printed[name] is not None else name for name in positional
    ]
    by_keyword = [name for name in every if name not in longest]
    found += ["*"] if by_keyword else []
    found += [f"{n}={printed[n]}" if printed[n] is not None else n for n in by_keyword]
    condition = condition_on(tuple(fixed), next(iter(needed)))
    return tuple(found), [text(check(*condition))] if condition else []


def _attributes(variants: Sequence[Variant]) -> dict[str, str] | None:
    """Returns what the constructor sets, and the flag for what only some have."""
    longest = max((one.sketches[0].made for one in variants), key=len)
    order = [attr for attr, _ in longest]
    found: dict[str, str] = {}
    for attr in order:
        nodes = [dict(s.made)[attr] for v in variants for s in v.sketches if attr in v.case.parts]
        having = [attr in one.case.parts for one in variants]
        if all(having):
            if len({mask_numbers(node) for node in nodes}) > 1:
                return None
            found[attr] = ""
            continue
        if len({mask_numbers(node) for node in nodes}) > 1:
            return None
        flags = [f for f in variants[0].case.flags
                 if [one.case.flags.get(f) for one in variants] == having]  # fmt: skip
        named = [flag for flag in flags if attr in flag]
        found[attr] = (named or flags or [f"has_{attr}"])[0]
    for one in variants:
        if [attr for attr in order if attr in one.case.parts] != [
            a for a, _ in one.sketches[0].made
        ]:
            return None
    return found


def _common(keys: Sequence[Sequence[str]]) -> Iterator[tuple[int, ...]]:
    """Yields the places of statements that all have, in order."""
    rows: list[tuple[int, ...]] = [(at,) for at in range(len(keys[0]))]
    for other in keys[1:]:
        left = [keys[0][row[0]] for row in rows]
        matcher = difflib.SequenceMatcher(None, left, other, autojunk=False)
        rows = [
            (*rows[block.a + i], block.b + i)
            for block in matcher.get_matching_blocks()
            for i in range(block.size)
        ]
    yield from rows


def _key(line: str, case: Case, lacking: frozenset[str]) -> str:
    """Returns what is equal for statements that are one: without numbers, and without masks."""
    return mask_numbers(_without_masks(ast.parse(line), None, lacking))


def _without_masks(tree: ast.AST, only: frozenset[str] | None, lacking: frozenset[str]) -> ast.AST:
    """Removes `mask=mask` from calls that do as well without; `only` those that are not given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and text(node.func) in lacking:
            node.keywords = [
                one
                for one in node.keywords
                if one.arg != "mask"
                or not isinstance(one.value, ast.Name)
                or (only is not None and one.value.id in only)
            ]
    return tree


def _lines_of(sketch: Sketch, merged: _Merged, at: int, variants: Sequence[Variant]) -> list[str]:
    """Returns the statements of a sketch in the common form, with conditions by name."""
    own = variants[at].own(sketch)
    found = [*merged.checks]
    for piece in merged.pieces:
        if isinstance(piece, Choice):
            found += piece.statements()
        else:
            line = own[piece[at]]
            others = [one.lines[i] for one, i in zip(variants, piece, strict=True)]
            longer = max(others, key=len)
            found.append(longer if "mask=" in longer and "mask=" not in line else line)
    return found


def _rewrite(merged: _Merged) -> None:
    variants = merged.variants
    nodes = fill_lacking([one for variant in variants for one in variant.sketches])
    comments: dict[str, str] = {}
    for one in variants:
        for sketch in one.sketches:
            comments |= sketch.methods[0].comments
    for at, (variant, flags) in enumerate(zip(variants, merged.flags, strict=True)):
        for sketch in variant.sketches:
            method = sketch.methods[0]
            lines = _lines_of(sketch, merged, at, variants)
            own = dict(sketch.made)
            made: list[tuple[str, ast.expr]] = []
            for attr, flag in merged.attributes.items():
                if not flag:
                    made.append((attr, own[attr]))
                    continue
                node = own.get(attr) or nodes[id(sketch)][attr]
                code = f"{text(node)} if flag({flag}={flags[flag]}) else None"
                made.append((attr, ast.parse(code, mode="eval").body))
            method.lines[:] = with_flags(lines, flags)
            method.parameters = merged.parameters
            method.comments.update(comments)
            sketch.made[:] = made


def _is_exact(
    variants: Sequence[Variant], cases: Sequence[Case], merged: _Merged, lacking: frozenset[str]
) -> bool:
    """Returns whether the common form is, for each sketch, what that was."""
    for at, (one, case) in enumerate(zip(variants, cases, strict=True)):
        for sketch in one.sketches:
            lines = [x for x in _lines_of(sketch, merged, at, variants) if x not in merged.checks]
            body = evaluate(ast.parse("\n".join(lines)), case)
            names = (x for x in ast.walk(body) if isinstance(x, ast.Name))
            computed = {one.id for one in names if isinstance(one.ctx, ast.Store)}
            found = _without_masks(body, case.given | computed, lacking)
            if text(found) != text(ast.parse("\n".join(one.own(sketch)))):
                return False
    return True
