"""Binds the arguments of a call to the inputs of a program, and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fmapper.backends.equality import equals
from fmapper.errors import ProgramInputError, StructureMismatchError
from fmapper.programs import sizes
from fmapper.programs.program import Parameter, Program
from fmapper.programs.treespec import TreeSpec
from fmapper.suggest import did_you_mean

if TYPE_CHECKING:
    pass

_MISSING: Any = object()


def bind(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, sparing: bool = False
) -> list[Any]:
    """Returns the leaves of a call in the order of the program's inputs.

    Arguments may be passed by position or by keyword, whatever the examples used. One that the
    examples lacked may only be passed with its default value, and one that was a constant in the
    examples may be omitted if that is its default. So may those of `program.ones_like`.

    Args:
        program: The program.
        args: The arguments by position.
        kwargs: The arguments by keyword.
        sparing: Whether an argument with a default that no operation uses may be omitted, such as
            random keys in evaluation; its leaves are then None.

    Raises:
        ProgramInputError: Arguments are missing, left over, or of another structure.
    """
    given = by_name(program, args, kwargs)
    positional, keyword = program.in_spec.children
    names = names_of_arguments(program)
    for name, other in program.ones_like.items():
        is_taken = name in names or name in keyword.keys
        if is_taken and given.get(name) is None and hasattr(given.get(other), "shape"):
            given[name] = given[other] * 0 + 1  # on the device and in the shards of the other
    static = _static_values(program)
    leaves: list[Any] = []
    for name, spec in (
        *zip(names, positional.children, strict=True),
        *zip(keyword.keys, keyword.children, strict=True),
    ):
        value = given.pop(name, _MISSING)
        if value is _MISSING:
            at = len(leaves)
            count = len(spec.leaf_paths())
            if sparing and _is_spare(program, name, at, count):
                leaves += [None] * count
                continue
            value = _value_of_omitted(program, name, spec, static[at : at + 1], given)
        try:
            leaves += spec.flatten(value, str(name))
        except StructureMismatchError as error:
            raise ProgramInputError(
                f"{program.name}: {error}; inputs need the structure of the examples"
            ) from None
    for name, value in given.items():
        _check_left_over(program, name, value)
    return leaves


def names_of_arguments(program: Program) -> list[Any]:
    """Returns the names of the positional arguments."""
    return _positions(program.signature, len(program.in_spec.children[0].children))


def leaf_paths(program: Program) -> list[str]:
    """Returns the path of each leaf, for errors."""
    positional, keyword = program.in_spec.children
    names = names_of_arguments(program)
    return [
        path
        for name, spec in (
            *zip(names, positional.children, strict=True),
            *zip(keyword.keys, keyword.children, strict=True),
        )
        for path in spec.leaf_paths(str(name))
    ]


def name_sizes(program: Program, text: str) -> str:
    """Replaces a recorder's names of sizes by the inputs that have these sizes."""
    places: dict[str, str] = {}
    users = [user for user in program.inputs if user.kind in ("user", "static")]
    for user, path in zip(users, leaf_paths(program), strict=True):
        places.setdefault(str(user.value), path)
        for d, size in enumerate(user.shape):
            places.setdefault(str(size), f"{path}.shape[{d}]")
    return sizes.name_sizes(text, places)


def by_name(program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the arguments of a call by their names.

    Raises:
        ProgramInputError: An argument is passed twice.
    """
    names = _positions(program.signature, len(args))
    given: dict[Any, Any] = dict(zip(names, args, strict=True))
    for name, value in kwargs.items():
        if name in given:
            raise ProgramInputError(
                f"{program.name}: {name} was passed both by position and by keyword"
            )
        given[name] = value
    return given


def _positions(signature: tuple[Parameter, ...], count: int) -> list[Any]:
    """Returns the names of positional arguments; those of `*args` are args[0] and so on."""
    names: list[Any] = [p.name for p in signature if p.kind == "positional"][:count]
    rest = next((p.name for p in signature if p.kind == "args"), "args")
    return names + [f"{rest}[{i}]" for i in range(count - len(names))]


def _static_values(program: Program) -> list[Any]:
    inputs = [i for i in program.inputs if i.kind in ("user", "static")]
    return [i.value if i.kind == "static" else _MISSING for i in inputs]


def _is_spare(program: Program, name: Any, at: int, count: int) -> bool:
    """Returns whether an argument has a default and no operation uses it."""
    if not any(p.name == name and not p.required for p in program.signature):
        return False
    users = [label for label, given in zip(program.graph.inputs, program.inputs, strict=True)
             if given.kind in ("user", "static")]  # fmt: skip
    kinds = [i.kind for i in program.inputs if i.kind in ("user", "static")]
    leaves = list(zip(users, kinds, strict=True))[at : at + count]
    return all(kind == "user" and label not in program.graph.uses() for label, kind in leaves)


def _value_of_omitted(
    program: Program,
    name: Any,
    spec: TreeSpec,
    static: list[Any],
    given: Mapping[Any, Any],
) -> Any:
    default = next((p for p in program.signature if p.name == name and not p.required), None)
    if spec.kind == "leaf" and static and static[0] is not _MISSING:
        is_default = default is not None and equals(default.default, static[0])
        if is_default or (default is None and static[0] is None):
            return static[0]
    way_out = ""
    if default is not None:
        way_out = f" To call the model without it, convert it with examples that omit {name}."
    raise ProgramInputError(
        f"{program.name}: {name} is missing; it was among the example inputs. Expected inputs: "
        f"{', '.join(leaf_paths(program))}.{_unknown(program, given)}{way_out}"
    )


def _unknown(program: Program, given: Mapping[Any, Any]) -> str:
    """Names the arguments that the signature lacks, such as a misspelt name."""
    names = [p.name for p in program.signature if p.kind in ("positional", "keyword")]
    if not names or any(p.kind == "kwargs" for p in program.signature):
        return ""
    return "".join(
        f" There is no argument {name!r}.{did_you_mean(name, names)}"
        for name in given
        if isinstance(name, str) and name.isidentifier() and name not in names
    )


def _check_left_over(program: Program, name: Any, value: Any) -> None:
    default = next((p for p in program.signature if p.name == name and not p.required), None)
    if value is None or (default is not None and equals(default.default, value)):
        return
    if unknown := _unknown(program, {name: value}):
        raise ProgramInputError(f"{program.name}:{unknown}")
    raise ProgramInputError(
        f"{program.name}: {name} was passed, but was not among the example inputs, or was fixed "
        f"by them, so the program would ignore it. Omit it, or convert the model with it: "
        f"example_kwargs={{{name!r}: ...}}."
    )
