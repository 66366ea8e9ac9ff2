"""Turns submodules with names such as `layers_0` and `layers_1` into items of a list `layers`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fmapper.programs.program import Program


def with_lists(program: Program) -> tuple[Program, dict[str, str]]:
    """Returns a program whose numbered submodules of one class are in lists.

    Linen calls the items of a list `layers_0`, and the blocks of a loop `Block_0`.

    Returns:
        The program, and the names of lists -> what comes before the number in the model.
    """
    lists = _find_lists(program)
    if not lists:
        return program, {}
    pattern = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, lists))})(\d+)(?![^.])")

    def rename(path: str) -> str:
        return pattern.sub(lambda m: f"{lists[m[1]]}.{m[2]}", path)

    return with_names(program, rename), {ours: theirs for theirs, ours in lists.items()}


def _find_lists(program: Program) -> dict[str, str]:
    """Maps the prefixes of numbered names to the names of the lists."""
    called = {part.path for part in program.parts}
    arrays = {*program.parameters, *program.buffers}
    paths = {path for path in program.types if path in called or _holds(path, arrays)}
    segments = {step for path in {*program.types, *arrays} for step in path.split(".")}
    groups: dict[str, dict[str, dict[int, str]]] = {}  # prefix -> owner -> number -> class
    for path in paths:
        owner, _, name = path.rpartition(".")
        found = re.fullmatch(r"(.*[^\d_]_)(\d+)", name)
        if found is not None and str(int(found[2])) == found[2]:
            known = groups.setdefault(found[1], {}).setdefault(owner, {})
            known[int(found[2])] = program.types[path]
    lists: dict[str, str] = {}
    for prefix, owners in groups.items():
        kinds = {kind for numbers in owners.values() for kind in numbers.values()}
        is_whole = all(sorted(numbers) == [*range(len(numbers))] for numbers in owners.values())
        is_several = any(len(numbers) > 1 for numbers in owners.values())
        alike = all(len({*numbers.values()}) == 1 for numbers in owners.values())
        name = _list_name(prefix.removesuffix("_"), kinds, program.types.get("", ""))
        is_free = name not in segments and name not in lists.values()
        if is_whole and is_several and alike and name and is_free:
            lists[prefix] = name
    return lists


def _holds(path: str, arrays: Iterable[str]) -> bool:
    return any(name.startswith(f"{path}.") for name in arrays)


def _list_name(stem: str, kinds: Iterable[str], root: str) -> str:
    """Returns the name of a list; empty for layers with automatic numbers.

    Args:
        stem: What comes before the number.
        kinds: The classes of the parts.
        root: The class of the model: classes of other packages are a library's.

    Examples:
        >>> _list_name("layers", ["a.Block"], "a.Net")
        'layers'
        >>> _list_name("EncoderBlock", ["a.EncoderBlock"], "a.Net")
        'encoder_blocks'
        >>> _list_name("Dense", ["library.linear.Dense"], "a.Net")
        ''
    """
    is_named = stem not in {kind.rpartition(".")[2] for kind in kinds}
    is_library = any(kind.partition(".")[0] != root.partition(".")[0] for kind in kinds)
    if is_library and not (is_named and stem.endswith("s")):
        return ""
    snake = stem if is_named else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()
    return snake if snake.endswith("s") else f"{snake}s"


def with_names(program: Program, rename: Callable[[str], str]) -> Program:
    """Returns a program whose submodules and arrays have other names."""

    def keys(named: Mapping[str, Any]) -> dict[str, Any]:
        return {rename(name): value for name, value in named.items()}

    def both(named: Mapping[str, str]) -> dict[str, str]:
        return {rename(name): rename(value) for name, value in named.items()}

    def targets(several: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(one, target=rename(one.target))
            if isinstance(one.target, str) and one.kind != "constant"
            else one
            for one in several
        )

    return dataclasses.replace(
        program,
        inputs=targets(program.inputs),
        outputs=targets(program.outputs),
        parameters=keys(program.parameters),
        buffers=keys(program.buffers),
        aliases=both(program.aliases),
        frozen=tuple(map(rename, program.frozen)),
        transient=tuple(map(rename, program.transient)),
        variable_types=keys(program.variable_types),
        few_bits=keys(program.few_bits),
        axes=keys(program.axes),
        types=keys(program.types),
        first_paths=both(program.first_paths),
        stacks={rename(name): tuple(map(rename, rows)) for name, rows in program.stacks.items()},
        parts=tuple(dataclasses.replace(one, path=rename(one.path)) for one in program.parts),
    )
