"""The sources of a file's arrays: the tables of `load_weights`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmapper.translation.reading.weights import Place as _PlaceInSource
from fmapper.translation.reading.weights import Weights

if TYPE_CHECKING:
    from fmapper.programs.program import Program
    from fmapper.translation.dialect import Layer

Place = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Loading:
    """The tables of `load_weights`.

    Attributes:
        by_class: Classes of layers -> their arrays -> the last part of the source's name, and the
            order of the dimensions; only what differs.
        by_name: Ends of names in the file -> those of the source, and the order: the exceptions.
    """

    by_class: dict[str, dict[str, Place]]
    by_name: dict[str, Place]


def whole_arrays(
    program: Program, convert: Callable[[Any], Any], stack: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Returns the parameters and buffers of the model, with the rows of its stacks joined.

    Args:
        program: The program.
        convert: What is done to each array.
        stack: Puts rows together.
    """
    arrays = {**program.parameters, **program.buffers}
    found = {name: convert(array) for name, array in arrays.items()}
    for name, rows in reversed(program.stacks.items()):  # inner ones first
        found[name] = stack([found.pop(row) for row in rows])
    return found


def weights_of(draft: Any) -> Weights:
    """Returns the arrays of a file with their places in the source."""
    program: Program = draft.program
    shapes = {name: tuple(array.shape)
              for name, array in {**program.parameters, **program.buffers}.items()}  # fmt: skip
    arrays = {
        draft.dialect.state_name(draft, path): _PlaceInSource(target, order, shapes[target])
        for path, (target, order) in draft._arrays().items()
        if target in shapes
    }
    slices = getattr(draft.dialect, "slices", {})
    beside = program.stacks, program.aliases, program.transient
    return Weights(arrays, slices, *beside, origin=program.origin)


def tables_of(draft: Any) -> Loading:
    """Returns the tables for a file."""
    layers = dict(_layers(draft.root, ""))
    wanted: dict[str, Place] = {}
    votes: dict[tuple[str, str], Counter[Place]] = {}
    found: list[tuple[str, str, str, Place]] = []
    for path, place in draft._arrays().items():
        layer = layers.get(path.rpartition(".")[0])
        kind = layer.kind if layer is not None else ""
        ours = ".".join(draft.place(path))
        attr = ours.rpartition(".")[2]
        last: Place = (place[0].rpartition(".")[2], place[1])
        wanted[ours] = place
        found.append((ours, kind, attr, last))
        votes.setdefault((kind, attr), Counter())[last] += 1
    by_class: dict[str, dict[str, Place]] = {}
    told = {
        (kind, attr, last) for ours, kind, attr, last in found
        if wanted[ours] == (".".join([*ours.split(".")[:-1], last[0]]), last[1])
    }  # fmt: skip
    for (kind, attr), counted in votes.items():
        best = counted.most_common(1)[0][0]
        if kind and best != (attr, None) and (kind, attr, best) in told:
            by_class.setdefault(kind, {})[attr] = best
    renamed: dict[str, Place] = {}
    for ours, kind, attr, _ in found:
        name, order = by_class.get(kind, {}).get(attr, (attr, None))
        owner = ours.rpartition(".")[0]
        if (f"{owner}.{name}" if owner else name, order) != wanted[ours]:
            renamed[ours] = wanted[ours]
    return Loading(by_class, by_suffix(renamed, wanted))


def by_suffix(renamed: Mapping[str, Place], everything: Mapping[str, Place]) -> dict[str, Place]:
    """Maps suffixes of names to replacements, as short as possible; the first that fits counts.

    Args:
        renamed: Names -> what the source calls them, and the order of the dimensions there.
        everything: The same for all names, those that need no replacement, too.

    Examples:
        >>> names = {"a.w": ("a.weight", None), "b.c.w": ("b.c.weight", None), "v.w": ("v.v", None)}
        >>> by_suffix(names, names)
        {'v.w': ('v.v', None), 'w': ('weight', None)}
    """
    votes: dict[str, Counter[Place]] = {}
    for name, (theirs, order) in renamed.items():
        begin = _common_steps(name, theirs)
        votes.setdefault(_end(name, begin), Counter())[_end(theirs, begin), order] += 1
    rules = {end: counted.most_common(1)[0][0] for end, counted in votes.items()}
    while True:
        wrong = [name for name in everything if not _is_right(name, rules, renamed, everything)]
        for name in wrong:
            if not _is_right(name, rules, renamed, everything):
                end, place = _exception(name, everything)
                rules[end] = place
        if not wrong:
            return dict(sorted(rules.items(), key=lambda rule: (-rule[0].count("."), rule[0])))


def _is_right(
    name: str,
    rules: Mapping[str, Place],
    renamed: Mapping[str, Place],
    everything: Mapping[str, Place],
) -> bool:
    """Returns whether the longest suffix of a name that has a replacement gives what is wanted."""
    for begin in range(name.count(".") + 1):
        end = _end(name, begin)
        if end in rules:
            theirs, order = rules[end]
            return (name.removesuffix(end) + theirs, order) == everything[name]
    return name not in renamed


def _exception(name: str, everything: Mapping[str, Place]) -> tuple[str, Place]:
    """Returns the shortest suffix of a name that has one replacement everywhere; else the name."""
    theirs, order = everything[name]
    for begin in range(_common_steps(name, theirs), -1, -1):
        end, place = _end(name, begin), _end(theirs, begin)
        same = [one for one in everything if f".{one}".endswith(f".{end}")]
        if all(everything[one] == (one.removesuffix(end) + place, order) for one in same):
            break
    return end, (place, order)


def _common_steps(name: str, other: str) -> int:
    """Returns how many steps two names begin with alike, without the last one of each."""
    steps, others = name.split("."), other.split(".")
    pairs = zip(steps[:-1], others[:-1], strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _end(name: str, begin: int) -> str:
    return ".".join(name.split(".")[begin:])


def names_beside(draft: Any, ends: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Returns ends of names in the source about which `load_weights` is not strict.

    Args:
        draft: The draft.
        ends: Ends of names of arrays that are taken apart.

    Returns:
        Those of arrays of the file that a state dict may lack, and those of arrays that it may
        have although the file does not.
    """
    program: Program = draft.program
    taken = {target for target, _ in draft._arrays().values()}
    stacked = {row for rows in program.stacks.values() for row in rows}
    every = {*program.parameters, *program.buffers, *program.aliases, *program.transient}
    lacking = {name for name in taken if name in program.transient}
    ignored = every - taken - stacked
    return (
        _shortest_ends(lacking, taken - lacking),
        [*_shortest_ends(ignored, taken), *(f".{end}" for end in ends)],
    )


def _shortest_ends(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Returns the shortest ends of names that none of the others has.

    Examples:
        >>> _shortest_ends(["a.norm.count", "count"], ["a.mean"])
        ['.count']
    """
    found: dict[str, None] = {}
    for name in sorted(names):
        steps = name.split(".")
        ends = ["." + ".".join(steps[begin:]) for begin in range(len(steps) - 1, -1, -1)]
        fits = (end for end in ends if not any(f".{one}".endswith(end) for one in others))
        found[next(fits, ends[-1])] = None
    return list(found)


def print_checks(load: str, lacking: Collection[str], ignored: Collection[str]) -> list[str]:
    """Returns the tables of ends of names, and `load_weights`, which reads those that there are."""
    lines = []
    for table, ends, test in (
        ("NOT_SAVED", lacking, NOT_SAVED),
        ("IGNORED", ignored, IGNORED),
    ):
        if ends:
            lines.append(f"{table} = ({', '.join(map(repr, ends))},)")
        else:
            load = load.replace(test, "")
    return [*lines, load]


NOT_SAVED = ' and not f".{name}".endswith(NOT_SAVED)'
IGNORED = ' and not f".{name}".endswith(IGNORED)'
CHECK_NAMES = f"""    left = [name for name in state if name not in known{IGNORED}]
    if strict and (missing or left):
        raise ValueError(f"the state lacks {{missing}}; {{left}} are not in the model")
"""


def shortest_parts(wanted: Iterable[str], others: Collection[str]) -> list[str]:
    """Returns the shortest paths that lead to all wanted names, and to none of the others.

    Examples:
        >>> shortest_parts(["a.norm.scale", "a.norm.bias", "b.kernel"], ["a.kernel"])
        ['a.norm', 'b']
    """
    refused = {path for name in others for path in _paths(name)}
    return list(
        dict.fromkeys(
            next((path for path in _paths(name) if path not in refused), name) for name in wanted
        )
    )


def _paths(name: str) -> list[str]:
    """Returns the paths of the parts that a name lies in, and the name."""
    steps = name.split(".")
    return [".".join(steps[:end]) for end in range(1, len(steps) + 1)]


def _layers(node: Any, path: str) -> Iterator[tuple[str, Layer]]:
    if node.layer is not None:
        yield path, node.layer
    for key, child in node.children.items():
        yield from _layers(child, f"{path}.{key}" if path else key)
