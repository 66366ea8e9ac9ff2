"""Which bytes go from which process to which, for every array of a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fmapper.backends.dtypes import is_inexact
from fmapper.checkpoints.boxes import Box, box_shape, full_box, overlap
from fmapper.checkpoints.lazy import LazyArray
from fmapper.checkpoints.lazy_operations import MOVES, Cast, Reshape
from fmapper.errors import CheckpointError, SyncError
from fmapper.files.dtypes import numpy_dtype
from fmapper.render import columns, readable_bytes
from fmapper.sync.inputs import Input, Leaf, leaves_of, needs, nodes_of

if TYPE_CHECKING:
    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.sync.ends import Held, Outline

_SHOWN = 40  # arrays in the table that `print` gives


class Transfer(NamedTuple):
    """Elements that one process sends to another."""

    sender: int  # the rank of the process that has them
    receiver: int  # that of the process that needs them
    array: Input
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes that are sent, in the dtype of the input."""
        return math.prod(box_shape(self.box)) * self.array.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SyncedArray:
    """The plan of one array of the target.

    Attributes:
        name: Its name.
        sources: The arrays of the source that it is made of.
        shape: Its shape.
        dtype: Its dtype.
        layout: What is done on the way: `same`, `moved`, `cast`, `computed`.
        nbytes: Its bytes.
        sent: Bytes of it that go from one process to another.
        ranks: The pairs of ranks between which they go.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: str
    nbytes: int
    sent: int = 0
    ranks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The plan of a sync; printing it gives a table.

    Attributes:
        arrays: The arrays of the target.
        kept: Names of the target that stay as they are: counters and random states.
    """

    arrays: tuple[SyncedArray, ...]
    kept: tuple[str, ...]

    def __iter__(self) -> Iterator[SyncedArray]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the target, each counted once."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def sent(self) -> int:
        """Bytes that go from one process to another."""
        return sum(array.sent for array in self.arrays)

    def __str__(self) -> str:
        """Returns a table of as many arrays as fit, and the bytes in all."""
        rows = [("target", "source", "dtype", "shape", "layout", "bytes", "ranks")]
        for array in self.arrays[:_SHOWN]:
            ranks = ", ".join(f"{sender}->{receiver}" for sender, receiver in array.ranks)
            sources = ", ".join(array.sources[:3]) + ", ..." * (len(array.sources) > 3)
            names = array.name, "" if sources == array.name else sources
            size = readable_bytes(array.nbytes)
            rows.append((*names, array.dtype, str(array.shape), array.layout, size, ranks))
        rest = len(self) - _SHOWN
        more = f"... and {rest} arrays more\n" if rest > 0 else ""
        sizes = f"{readable_bytes(self.nbytes)} in all, of which {readable_bytes(self.sent)}"
        return f"{columns(rows)}\n{more}{sizes} go from one process to another"


def match_arrays(
    source: Mapping[str, Outline], target: Mapping[str, Outline], rules: Rules
) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
    """Returns the arrays of a target by name, made of those of a source, and those that stay."""
    leaves: dict[str, LazyArray] = {}
    random = {name for end in (source, target) for name in end if end[name].random}
    for name, outline in source.items():
        if name not in random:
            leaf = leaves.get(outline.tied_to)
            leaves[name] = leaf or Leaf(name, outline.shape, numpy_dtype(outline.dtype))
    try:
        made = rules.apply(leaves)
    except CheckpointError as error:
        raise SyncError(f"the rules do not fit the source: {error}") from error
    names: dict[str, list[str]] = {}
    for name, outline in target.items():
        names.setdefault(outline.tied_to or name, []).append(name)
    arrays: dict[str, LazyArray] = {}
    kept, problems = [], []
    for first, tied in names.items():
        given = next((name for name in tied if name in made), None)
        if given is None and any(target[name].free or name in random for name in tied):
            kept.append(first)
        elif given is None:
            problems.append(f"{first}: the source has nothing for it")
        else:
            problem = _problem(made[given], target[first])
            others = [n for n in tied if n in made and made[n] is not made[given]]
            if others:
                problem = f"tied to {others[0]} in the target, but not in the source"
            problems += [f"{first}: {problem}"] if problem else []
            for name in tied:
                arrays[name] = made[given]
    used = {leaf for array in arrays.values() for leaf in leaves_of(array)}
    for name in made.keys() - target.keys():
        if made[name] not in used and (name not in source or source[name].needed):
            problems.append(f"{name}: the target has no place for it")
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        lines = "\n".join(f"  {line}" for line in problems[:20])
        raise SyncError(
            f"source and target do not fit:\n{lines}{more}\nPass rules=, such as those of the "
            "report of fmapper.transfer, which rename, drop and reshape"
        )
    for name, array in arrays.items():
        dtype = numpy_dtype(target[name].dtype)
        if array.dtype != dtype:
            arrays[name] = Cast(array, dtype, name)
    return arrays, tuple(kept)


def _problem(array: LazyArray, target: Outline) -> str:
    if tuple(array.shape) != target.shape:
        return f"shape {tuple(array.shape)} from the source, {target.shape} in the target"
    given, wanted = array.dtype.name, target.dtype
    if array.dtype == numpy_dtype(wanted):
        return ""
    if "int" in given and "int" in wanted:
        return ""  # if the values fit, which each call checks
    is_real = given.startswith("complex") and not wanted.startswith("complex")
    if is_inexact(given) and is_inexact(wanted) and not is_real:
        return ""
    return f"dtype {given} from the source, {wanted} in the target"


def transfers(
    arrays: Mapping[str, LazyArray],
    source: Mapping[str, Held],
    target: Mapping[str, Held],
    moved: dict[str, list[Transfer]],
) -> Iterator[Transfer]:
    """Yields what processes send to one another, in the same order in all of them.

    They are added to `moved` by the name of the array of the target that needs them.
    """
    owners: dict[str, dict[Box, list[int]]] = {}
    seen: set[tuple[Input, int, Box]] = set()

    def give(array: Input, box: Box, receiver: int, turn: int) -> Iterator[Transfer]:
        missing = size = math.prod(box_shape(box))
        for part, ranks in owners[array.name].items():
            common = overlap(part, box)
            if common is None:
                continue
            missing -= math.prod(box_shape(common))
            if receiver not in ranks and (array, receiver, common) not in seen:
                seen.add((array, receiver, common))
                yield Transfer(ranks[(turn + receiver) % len(ranks)], receiver, array, common)
        if missing:
            raise SyncError(
                f"{array.name}: no process has {missing} of the {size} elements that {name} "
                "needs. Start the sync in all processes that have some of the source"
            )

    for turn, (name, array) in enumerate(arrays.items()):
        leaves = {leaf.name: source[leaf.name] for leaf in leaves_of(array)}
        for leaf, held in leaves.items():
            by_box: dict[Box, list[int]] = {}
            for owner, boxes in sorted(held.boxes.items()):
                for box in boxes:
                    by_box.setdefault(box, []).append(owner)
            owners[leaf] = by_box
        for receiver, boxes in sorted(target[name].boxes.items()):
            wholes = ((full_box(x.shape), x.boxes.get(receiver, ())) for x in leaves.values())
            if all(whole in held for whole, held in wholes):
                continue
            for box in boxes if array.size else ():
                for need, inner in needs(array, box):
                    for transfer in give(need, inner, receiver, turn):
                        moved.setdefault(name, []).append(transfer)
                        yield transfer


def summarise(
    arrays: Mapping[str, LazyArray],
    target: Mapping[str, Held],
    kept: Sequence[str],
    moved: Mapping[str, Sequence[Transfer]],
) -> SyncPlan:
    """Returns the plan as it is printed; `moved` is what `transfers` adds to."""
    rows = []
    for name, array in arrays.items():
        names = tuple(dict.fromkeys(leaf.name for leaf in leaves_of(array)))
        between = moved.get(name, ())
        ranks = tuple(dict.fromkeys(each[:2] for each in between))
        shape, dtype = target[name][:2]
        sent, layout = sum(each.nbytes for each in between), _layout(array)
        rows.append(SyncedArray(name, names, shape, dtype, layout, array.nbytes, sent, ranks))
    return SyncPlan(tuple(rows), tuple(kept))


def _layout(array: LazyArray) -> str:
    kinds = {*map(type, nodes_of(array))}
    is_computed = not kinds <= {Leaf, Cast, *MOVES}
    words = {"moved": kinds & {*MOVES} - {Reshape}, "cast": Cast in kinds, "computed": is_computed}
    return ", ".join(word for word, is_so in words.items() if is_so) or "same"
