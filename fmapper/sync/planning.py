"""Which bytes go from which process to which, for every array of a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fmapper.backends.dtypes import is_inexact
from fmapper.checkpoints.boxes import Box, box_shape, full_box
from fmapper.checkpoints.lazy import LazyArray, Operation
from fmapper.errors import CheckpointError, SyncError
from fmapper.files.dtypes import numpy_dtype
from fmapper.render import columns, readable_bytes
from fmapper.sync.strided import Leaf, Piece, View, clip, clip_source, pieces_of, views

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fmapper.checkpoints.rules.rules import Rules
    from fmapper.sync.ends import Held, Outline

STAGED = "\0"  # before the name of an array of the source that is needed whole, to compute others
_INTEGERS = ("int", "uint")
_SHOWN = 40  # arrays in the table that `print` gives


class Part(NamedTuple):
    """A part of an array in a process: the name of the array, and the box."""

    name: str
    box: Box


class Transfer(NamedTuple):
    """Elements that one process gives to another, or to itself."""

    sender: int  # the rank of the process that has them
    receiver: int  # that of the process that needs them
    source: Part | None  # what they are taken from; None for what is computed here
    target: Part  # what they become elements of
    froms: View  # their places in the one
    to: View  # their places in the other
    piece: Piece  # what they are; `steps` is what is done to them

    @property
    def nbytes(self) -> int:
        """Bytes that are sent, in the dtype of the target."""
        return math.prod(self.to.shape) * dtype_after(self.piece).itemsize


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


def dtype_after(piece: Piece) -> np.dtype[Any]:
    """Returns the dtype of elements after all steps."""
    return piece.steps[-1].dtype if piece.steps else piece.leaf.dtype


def match_arrays(
    source: Mapping[str, Outline], target: Mapping[str, Outline], rules: Rules
) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
    """Returns the arrays of a target by name, made of those of a source, and those that stay.

    Raises:
        SyncError: An array of either side is left over, or a shape or dtype differs.
    """
    leaves: dict[str, LazyArray] = {}
    for name, outline in source.items():
        if outline.dtype.startswith("key<"):  # a random key
            continue
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
        if given is None and any(target[name].free for name in tied):
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
    from fmapper.checkpoints.lazy_operations import Cast

    for name, array in arrays.items():
        dtype = numpy_dtype(target[name].dtype)
        if array.dtype != dtype:
            arrays[name] = Cast(array, dtype, name)
    return arrays, tuple(kept)


def _problem(array: LazyArray, target: Outline) -> str:
    if tuple(array.shape) != target.shape:
        return f"shape {tuple(array.shape)} from the source, {target.shape} in the target"
    if array.dtype == numpy_dtype(target.dtype):
        return ""
    given, wanted = array.dtype.name, target.dtype
    if given.startswith(_INTEGERS) and wanted.startswith(_INTEGERS):
        return ""  # if the values fit, which each call checks
    if not (is_inexact(given) and is_inexact(wanted)):
        return f"dtype {given} from the source, {wanted} in the target"
    if given.startswith("complex") and not wanted.startswith("complex"):
        return f"dtype {given} from the source, {wanted} in the target"
    return ""


def transfers(
    arrays: Mapping[str, LazyArray],
    source: Mapping[str, Held],
    target: Mapping[str, Held],
    rank: int,
    note: Callable[[str, int, int, int], object],
) -> Iterator[Transfer]:
    """Yields the transfers of a process, in the same order as its peers do.

    Args:
        arrays: The held arrays of the target, made of leaves of the source.
        source: The held arrays of the source, with the boxes of each process.
        target: Those of the target.
        rank: The process.
        note: Called with name, sender, receiver and bytes of all that goes between processes.

    Raises:
        SyncError: No process has some of what one needs.
    """

    def give(piece: Piece, part: Part, receiver: int, turn: int) -> Iterator[Transfer]:
        """Yields the transfers of one piece: from each process that has some of it, once."""
        shape = box_shape(part.box)
        if not isinstance(piece.leaf, Leaf):
            if receiver == rank:
                for froms, to in views(piece, piece.leaf.shape, shape):
                    yield Transfer(rank, rank, None, part, froms, to, piece)
            for leaf in leaves_of(piece.leaf):
                (whole,) = pieces_of(leaf)
                staged = Part(STAGED + leaf.name, full_box(leaf.shape))
                yield from give(whole, staged, receiver, turn)
            return
        held = source[piece.leaf.name]
        owners: dict[Box, list[int]] = {}
        for owner, boxes in sorted(held.boxes.items()):
            for box in boxes:
                owners.setdefault(box, []).append(owner)
        missing = piece.size
        for box, ranks in owners.items():
            sender = receiver if receiver in ranks else ranks[(turn + receiver) % len(ranks)]
            is_whole = box == full_box(held.shape)
            inner = [piece] if is_whole else clip_source([piece], held.shape, box)
            size = sum(each.size for each in inner)
            missing -= size
            if sender != receiver:
                nbytes = size * dtype_after(piece).itemsize
                note(part.name.removeprefix(STAGED), sender, receiver, nbytes)
            if rank in (sender, receiver):
                held_part = Part(piece.leaf.name, box)
                for each in inner:
                    for froms, to in views(each, box_shape(box), shape):
                        yield Transfer(sender, receiver, held_part, part, froms, to, piece)
        if missing:
            raise SyncError(
                f"{piece.leaf.name}: no process has {missing} of the {piece.size} elements that "
                f"{part.name} needs. Start the sync in all processes that have some of the source"
            )

    for turn, (name, array) in enumerate(arrays.items()):
        pieces = pieces_of(array)
        for receiver, boxes in sorted(target[name].boxes.items()):
            for box in boxes:
                whole = box == full_box(array.shape)
                for piece in pieces if whole else clip(pieces, array.shape, box):
                    yield from give(piece, Part(name, box), receiver, turn)


def leaves_of(array: LazyArray) -> Iterator[Leaf]:
    """Yields the leaves that a computed array is made of."""
    if isinstance(array, Leaf):
        yield array
    elif isinstance(array, Operation):
        for operand in array.operands:
            yield from leaves_of(operand)


def packets(ordered: Sequence[Transfer], nbytes: int = 64 << 20) -> Iterator[list[Transfer]]:
    """Yields consecutive transfers that are sent together."""
    packet: list[Transfer] = []
    size = 0
    for transfer in (part for whole in ordered for part in _divide(whole, nbytes)):
        if packet and size + transfer.nbytes > nbytes:
            yield packet
            packet, size = [], 0
        packet.append(transfer)
        size += transfer.nbytes
    if packet:
        yield packet


def _divide(transfer: Transfer, nbytes: int) -> Iterator[Transfer]:
    """Divides a transfer into pieces of at most `nbytes` bytes."""
    if transfer.nbytes <= nbytes:
        yield transfer
        return
    axis = next(axis for axis, size in enumerate(transfer.to.shape) if size > 1)
    middle = transfer.to.shape[axis] // 2
    for start, stop in ((0, middle), (middle, transfer.to.shape[axis])):
        froms, to = (view.part(axis, start, stop) for view in (transfer.froms, transfer.to))
        yield from _divide(transfer._replace(froms=froms, to=to), nbytes)


def summarise(
    arrays: Mapping[str, LazyArray],
    target: Mapping[str, Held],
    kept: Sequence[str],
    moved: Mapping[str, Mapping[tuple[int, int], int]],
) -> SyncPlan:
    """Returns the plan as it is printed.

    Args:
        arrays: The held arrays of the target.
        target: Their outlines.
        kept: What stays.
        moved: For each array, the bytes that go between each pair of ranks.
    """
    rows = []
    for name, array in arrays.items():
        pieces, between = pieces_of(array), moved.get(name, {})
        names = tuple(dict.fromkeys(leaf.name for p in pieces for leaf in leaves_of(p.leaf)))
        shape, dtype = target[name][:2]
        sent, ranks, layout = sum(between.values()), tuple(between), _layout(pieces)
        rows.append(SyncedArray(name, names, shape, dtype, layout, array.nbytes, sent, ranks))
    return SyncPlan(tuple(rows), tuple(kept))


def _layout(pieces: Sequence[Piece]) -> str:
    is_dense = len(pieces) == 1 and all(dim.source == dim.target for dim in pieces[0].dims)
    steps = {type(step).__name__ for piece in pieces for step in piece.steps}
    is_computed = steps - {"Cast"} or any(not isinstance(piece.leaf, Leaf) for piece in pieces)
    words = {"moved": not is_dense, "cast": "Cast" in steps, "computed": is_computed}
    return ", ".join(word for word, is_so in words.items() if is_so) or "same"
