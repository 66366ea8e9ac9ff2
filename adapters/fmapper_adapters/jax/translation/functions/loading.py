"""`load_weights` of files for plain JAX."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fmapper.translation import CHECK_NAMES, NOT_SAVED, by_suffix, names_beside, print_checks
from fmapper_adapters.jax.translation.layers.slices import (
    TAKE_APART,
    slices_by_suffix,
)

_NAME = '''def source_of(path):
    """Returns the name of an array in the source, and the order of its dimensions there."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    for ours, (theirs, order) in RENAMED.items():
        if f".{name}".endswith(f".{ours}"):
            return name.removesuffix(ours) + theirs, order
    return name, None'''
_PLAIN_NAME = '''def source_of(path):
    """Returns the name of an array in the source, and the order of its dimensions there."""
    return jax.tree_util.keystr(path, simple=True, separator="."), None'''
_LOAD = f'''def load_weights(params, state, strict=True):
    """Returns the parameters with the arrays of the source's state dict, by name.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = take_apart(state)
    known, missing = set(), []

    def load(path, leaf):
        name, order = source_of(path)
        known.add(name)
        if name not in given:
            missing.extend([name] if True{NOT_SAVED} else [])
            return leaf
        array = jnp.asarray(given[name], leaf.dtype)
        if order is not None and array.ndim == len(order):
            array = array.transpose(order)
        if array.shape != leaf.shape:
            raise ValueError(f"{{name}} has the shape {{array.shape}} instead of {{leaf.shape}}")
        return array

    filled = jax.tree_util.tree_map_with_path(load, params)
{CHECK_NAMES}    return filled'''
_ORDER = """        if order is not None and array.ndim == len(order):
            array = array.transpose(order)
"""


def buffers_of(draft: Any, without: Collection[str] = ()) -> list[str]:
    """Returns the ends of names of arrays that are not trained: as short as they can be.

    Args:
        draft: The draft.
        without: Those of the source that are left out.
    """
    program = draft.program
    known = draft._arrays().items()
    arrays = {path: target for path, (target, _) in known}
    fixed = {
        path
        for path, target in arrays.items()
        if target not in without and (target in program.buffers or target in program.frozen)
    }
    found: dict[str, None] = {}
    for path in sorted(fixed):
        steps = path.split(".")
        for start in range(len(steps) - 1, -1, -1):
            end = "." + ".".join(steps[start:])
            if all(other in fixed for other in arrays if f".{other}".endswith(end)):
                break
        found[end] = None
    return list(found)


def print_loading(draft: Any, buffers: list[str]) -> str:
    """Returns `load_weights` with its tables."""
    wanted = draft._arrays()
    others = {path: place for path, place in wanted.items() if place != (path, None)}
    renamed = by_suffix(others, wanted)
    lines = []
    if buffers:
        lines.append(f"BUFFERS = ({', '.join(map(repr, buffers))},)")
    source, load = _PLAIN_NAME, _LOAD
    if renamed:
        rows = [f"    {ours!r}: {theirs!r}," for ours, theirs in renamed.items()]
        lines += ["RENAMED = {", *rows, "}"]
        source = _NAME
    slices = slices_by_suffix(draft.dialect.slices)
    if slices:
        rows = [f"    {whole!r}: {parts!r}," for whole, parts in slices.items()]
        lines += ["SLICES = {", *rows, "}"]
        source = TAKE_APART + source
    else:
        load = load.replace("    given = take_apart(state)\n", "").replace("given", "state")
    *tables, load = print_checks(load, *names_beside(draft, slices))
    lines += tables
    load = load.replace("missing.extend([name] if True else [])", "missing.append(name)")
    load = load.replace("if True and ", "if ")
    if not any(order for _, order in renamed.values()):
        load = load.replace(_ORDER, "").replace("name, order = source", "name, _ = source")
    if buffers:
        load = load.replace("load_weights(params, state", "load_weights(trees, state")
        load = load.replace("the parameters with", "parameters and buffers with")
        load = load.replace("source_of(path)", "source_of(path[1:])")
        load = load.replace("sources_of(path)", "sources_of(path[1:])")
        load = load.replace("(load, params)", "(load, trees)")
    return "\n".join([*lines, "", "", source, "", "", load]).lstrip()
