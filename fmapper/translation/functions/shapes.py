"""The shapes of the arguments and results of a function, as a comment."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmapper.programs.program import refs_in
from fmapper.translation.code import identifier

if TYPE_CHECKING:
    from fmapper.translation.units import Structure

Shape = tuple[int | str, ...]
# What sizes are called, by the number of dimensions.
DIMENSIONS = {
    1: ("length",),
    2: ("batch", "length"),
    3: ("batch", "length", "features"),
    4: ("batch", "channels", "height", "width"),
    5: ("batch", "channels", "depth", "height", "width"),
}
_WIDEST = 84  # characters of a comment
_WIDEST_SIZE = 24  # of a size in it


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of one or several calls of a function.

    Attributes:
        given: Its parameters that are arrays -> their shapes.
        results: The shapes of what it gives; None for what is not an array.
    """

    given: Mapping[str, Shape]
    results: tuple[Shape | None, ...]


def shapes_of(values: Mapping[str, tuple[str, Shape]], given: Any, returns: Any) -> Shapes:
    """Returns the shapes of a call.

    Args:
        values: The dtype and shape of each value.
        given: For each parameter the structure of values that it takes.
        returns: The structure of values that it gives.
    """

    def shape(one: Any) -> Shape | None:
        known = values.get(getattr(one, "name", ""))
        return None if known is None else known[1]

    found = {name: known for name, one in given if (known := shape(one)) is not None}
    several = returns if isinstance(returns, tuple) else (returns,)
    return Shapes(found, tuple(map(shape, several)))


def combine(several: Iterable[Shapes]) -> Shapes | None:
    """Returns the shapes that calls have in common, `_` for sizes that differ."""
    found: Shapes | None = None
    for one in several:
        if found is None:
            found = one
            continue
        given = {
            name: both
            for name, shape in found.given.items()
            if (both := _combine_two(shape, one.given.get(name))) is not None
        }
        pairs = zip(found.results, one.results, strict=False)
        found = Shapes(given, tuple(_combine_two(*pair) for pair in pairs))
    return found


def _combine_two(a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else "_" for x, y in zip(a, b, strict=True))


def name_sizes(shapes: Shapes, name: Callable[[str, int, int], str]) -> Shapes:
    """Returns shapes with names for the sizes that vary.

    Args:
        shapes: The shapes.
        name: Names a size that is at a place among as many dimensions.
    """

    def word(size: int | str, at: int, ndim: int) -> int | str:
        if isinstance(size, int):
            return size
        named = re.sub(r"\b[a-z]\w*\b(?!\()", lambda m: name(m[0], at, ndim), size)
        plain = _without_brackets(named)
        return plain if len(plain) <= _WIDEST_SIZE else "_"

    def words(shape: Shape) -> Shape:
        return tuple(word(size, at, len(shape)) for at, size in enumerate(shape))

    given = {key: words(shape) for key, shape in shapes.given.items()}
    return Shapes(given, tuple(shape and words(shape) for shape in shapes.results))


def _without_brackets(size: str) -> str:
    """Returns an expression without those that it does not need.

    Examples:
        >>> _without_brackets("((width//4)) + 1")
        'width // 4 + 1'
    """
    try:
        return ast.unparse(ast.parse(size, mode="eval"))
    except SyntaxError:
        return size


def name_inputs(structure: Structure) -> dict[str, str]:
    """Names the sizes of a model's arguments, those of a further one after that: `tgt_length`."""
    found: dict[str, str] = {}
    for argument, given in structure.root.part.arguments.items():
        for value in refs_in((given,)):
            _, shape = structure.values.get(value, ("", ()))
            if len(shape) < 2 or (len(shape) == 2 and found and shape[0] not in found):
                continue  # what such sizes are is seen where they are used
            for at, size in enumerate(shape):
                if isinstance(size, str) and size.isidentifier() and size not in found:
                    wanted, taken = name_dimension(shape, at), {*found.values()}
                    is_taken = wanted in taken and argument.isidentifier()
                    found[size] = identifier(f"{argument}_{wanted}" if is_taken else wanted, taken)
    return found


def name_dimension(shape: Shape, at: int) -> str:
    """Names a dimension of an array after its place; channels that are fixed may come first.

    Examples:
        >>> name_dimension(("n", "t", 8), 1), name_dimension(("n", 8, "t"), 2)
        ('length', 'length')
        >>> name_dimension((3, "h", "w"), 1), name_dimension(("n", "h", "w", 3), 1)
        ('height', 'height')
    """
    usual = DIMENSIONS.get(len(shape), ())
    if len(shape) == 3 and isinstance(shape[0], int) and not isinstance(shape[1], int):
        usual = DIMENSIONS[4][1:]
    elif len(shape) == 3 and isinstance(shape[1], int):
        usual = ("batch", "channels", "length")
    elif len(shape) == 4 and [isinstance(one, int) for one in shape[1:]] == [False, False, True]:
        usual = ("batch", "height", "width", "channels")
    return usual[at] if at < len(usual) else "size"


def name_place(at: int, ndim: int) -> str:
    """Names a dimension among as many."""
    usual = DIMENSIONS.get(ndim, ())
    return usual[at] if at < len(usual) else "size"


def name_locally(shapes: Iterable[Shape], name: Callable[[str, int, int], str]) -> dict[str, str]:
    """Names the sizes of a function, without numbers and words before where one name is enough.

    Args:
        shapes: The shapes of its values.
        name: Names a size that is at a place among as many dimensions, as all functions do.
    """
    found: dict[str, str] = {}
    for shape in shapes:
        for at, size in enumerate(shape):
            if isinstance(size, str) and size.isidentifier() and size not in found:
                known = re.sub(r"_\d+$", "", name(size, at, len(shape)))
                base, taken = known.rpartition("_")[2], {*found.values()}
                found[size] = identifier(known if base in taken else base, taken)
    return found


def comment(shapes: Shapes | None, lines: Sequence[str]) -> list[str]:
    """Returns the comment for a function, without the shapes that it checks itself.

    Examples:
        >>> comment(Shapes({"x": ("batch", 8)}, (("batch", 3),)), [])
        ['# x: (batch, 8) -> (batch, 3)']
    """
    if shapes is None:
        return []
    is_checked = lines and lines[0].startswith("check_shapes(")
    given = {} if is_checked else shapes.given
    before = ", ".join(f"{name}: {_print(shape)}" for name, shape in given.items())
    after = ", ".join(_print(shape) for shape in shapes.results if shape is not None)
    parts = [part for part in (before, f"-> {after}" if after else "") if part]
    whole = " ".join(parts)
    several = [whole] if len(whole) <= _WIDEST else parts
    return [f"# {one}" for one in several if one and len(one) <= _WIDEST]


def _print(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
