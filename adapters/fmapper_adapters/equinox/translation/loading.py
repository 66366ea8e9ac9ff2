"""`load_weights` of files for Equinox."""

from __future__ import annotations

import re
from typing import Any

from fmapper.translation import (
    CHECK_NAMES,
    NOT_SAVED,
    names_beside,
    print_checks,
    shortest_parts,
    tables_of,
)
from fmapper_adapters.jax.libraries import TAKE_APART, slices_by_suffix

_SOURCE = '''def source_of(model, path):
    """Returns the name of an array in the source, and the order of its dimensions there."""
    steps, owner, kind = [], model, None
    for step in path:
        if not isinstance(owner, eqx.nn.Sequential):
            steps.append(str(getattr(step, "name", getattr(step, "idx", None))))
        kind = type(owner)
        owner = getattr(owner, step.name) if hasattr(step, "name") else owner[step.idx]
    *place, last = steps
    last, order = ARRAYS.get(kind, {}).get(last, (last, None))
    name, own = ".".join([*place, last]), ".".join(steps)
    for ours, (theirs, other) in RENAMED.items():
        if f".{own}".endswith(f".{ours}"):
            return own.removesuffix(ours) + theirs, other
    return name, order'''
_RENAMING = """    for ours, (theirs, other) in RENAMED.items():
        if f".{own}".endswith(f".{ours}"):
            return own.removesuffix(ours) + theirs, other
"""
_LOAD = f'''def load_weights(model, state, strict=True):
    """Returns the model with the arrays of the source's state dict, by name.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = take_apart(state)
    known, missing = set(), []

    def load(path, leaf):
        name, order = source_of(model, path)
        known.add(name)
        if name not in given:
            missing.extend([name] if True{NOT_SAVED} else [])
            return leaf
        array = jnp.asarray(given[name], leaf.dtype)
        if order is not None and array.ndim == len(order):  # `~i`: i backwards
            array = array.transpose([max(i, ~i) for i in order])
            array = jnp.flip(array, [at for at, i in enumerate(order) if i < 0])
        if array.ndim == 1:  # the bias of a convolution has dimensions of size one
            array = array.reshape(-1, *(1,) * (leaf.ndim - 1))
        if array.shape != leaf.shape:
            raise ValueError(f"{{name}} has the shape {{array.shape}} instead of {{leaf.shape}}")
        return array

    arrays, rest = eqx.partition(model, eqx.is_array)
    filled = eqx.combine(jax.tree_util.tree_map_with_path(load, arrays), rest)
{CHECK_NAMES}    return filled'''
_ORDER = """        if order is not None and array.ndim == len(order):  # `~i`: i backwards
            array = array.transpose([max(i, ~i) for i in order])
            array = jnp.flip(array, [at for at, i in enumerate(order) if i < 0])
"""
_BIAS = """        if array.ndim == 1:  # the bias of a convolution has dimensions of size one
            array = array.reshape(-1, *(1,) * (leaf.ndim - 1))
"""


_FREEZE = """def freeze(model):
    \"\"\"Returns the model with parameters that get no gradient where they are not trained.\"\"\"

    def stop(path, leaf):
        if not eqx.is_inexact_array(leaf):
            return leaf
        name, _ = source_of(model, path)
        is_frozen = any(f"{name}.".startswith(f"{part}.") for part in FROZEN)
        return jax.lax.stop_gradient(leaf) if is_frozen else leaf

    return jax.tree_util.tree_map_with_path(stop, model)"""


def frozen_parts(draft: Any) -> list[str]:
    """Returns what the root has to freeze: parts of the source, and single arrays.

    An array that its own class reads gets no gradient there; those in layers, and those that
    another class reads, would.
    """
    program = draft.program
    fixed = {*program.frozen, *program.buffers}
    wanted = [name for name in program.frozen if name in draft.owners]
    for bodies in draft.bodies.values():
        for _, body in bodies:
            wanted += [
                name for place, name in body.arrays.items() if "." in place and name in fixed
            ]
    return shortest_parts(wanted, [name for name in program.parameters if name not in fixed])


def print_loading(draft: Any, code: str, frozen: list[str]) -> str:
    """Returns `load_weights` with its tables.

    Args:
        draft: The draft.
        code: The classes of the file.
        frozen: The parts, and parameters in layers, that are not trained, in the source.
    """
    known = tables_of(draft)
    rows = [f"    {kind}: {_table(names)}," for kind, names in known.by_class.items()]
    lines = ["ARRAYS = {", *rows, "}"] if rows else ["ARRAYS = {}"]
    source, load = _SOURCE, _LOAD
    if frozen:
        lines += ["FROZEN = (", *(f"    {part!r}," for part in frozen), ")"]
    if known.by_name:
        renamed = [f"    {ours!r}: {_place(theirs)}," for ours, theirs in known.by_name.items()]
        lines += ["RENAMED = {", *renamed, "}"]
    else:
        source = source.replace(_RENAMING, "").replace(
            '    name, own = ".".join([*place, last]), ".".join(steps)\n    return name, order',
            '    return ".".join([*place, last]), order',
        )
    slices = slices_by_suffix(draft.dialect.slices)
    if slices:
        lines += ["SLICES = {", *(f"    {name!r}: {parts!r}," for name, parts in slices.items()),
                  "}"]  # fmt: skip
        source = TAKE_APART + source
    else:
        load = load.replace("    given = take_apart(state)\n", "").replace("given", "state")
    *tables, load = print_checks(load, *names_beside(draft, slices))
    lines += tables
    load = load.replace("missing.extend([name] if True else [])", "missing.append(name)")
    load = load.replace("if True and ", "if ")
    orders = [order for _, order in draft._arrays().values() if order is not None]
    if not orders:
        load = load.replace(_ORDER, "").replace("name, order = source", "name, _ = source")
    elif not any(i < 0 for order in orders for i in order):
        load = load.replace(_ORDER, "        if order is not None and array.ndim == len(order):\n"
                            "            array = array.transpose(order)\n")  # fmt: skip
    if not re.search(r"\bConv(Transpose)?\dd\(", code):
        load = load.replace(_BIAS, "")
    functions = (source, _FREEZE, load) if frozen else (source, load)
    return "\n\n\n".join(["\n".join(lines), *functions])


def _table(names: Any) -> str:
    return f"{{{', '.join(f'{ours!r}: {_place(theirs)}' for ours, theirs in names.items())}}}"


def _place(place: tuple[str, tuple[int, ...] | None]) -> str:
    """Returns the code for a name and an order of dimensions, `~i` for dimension i backwards."""
    name, order = place
    axes = [str(i) if i >= 0 else f"~{~i}" for i in order or ()]
    return f"({name!r}, {None if order is None else '(' + ', '.join(axes) + ')'})"
