"""`load_weights` of files for torch, with its tables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fmapper.translation import (
    CHECK_NAMES,
    NOT_SAVED,
    Layer,
    names_beside,
    print_checks,
    tables_of,
)

Place = tuple[str, tuple[int, ...] | None]

_PUT_IN_ORDER = '''def put_in_order(array, order):
    """Returns an array with its dimensions in an order; `~i` is its dimension i backwards."""
    array = array.permute([max(i, ~i) for i in order])
    return array.flip([at for at, i in enumerate(order) if i < 0])


'''
_LOAD = f'''def load_weights(model: nn.Module, state, strict=True) -> nn.Module:
    """Fills the model with the arrays of the source, by name; returns it.

    With `strict=False` arrays that are not in there stay as they are, and others are ignored.

    Raises:
        ValueError: Arrays are missing or left over, or have another shape.
    """
    given = take_apart(state)
    known, missing = set(), []
    for path, module in model.named_modules():
        names = ARRAYS.get(type(module), {{}})
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, tensor in held:
            source, order = names.get(key, (key, None))
            name = f"{{path}}.{{source}}" if path else source
            for ours, (theirs, other) in RENAMED.items():
                if f".{{path}}.{{key}}".endswith(f".{{ours}}"):
                    name, order = f"{{path}}.{{key}}".lstrip(".").removesuffix(ours) + theirs, other
                    break
            for ours, theirs in LISTS.items():
                name = re.sub(rf"\\b{{ours}}\\.(\\d+)", rf"{{theirs}}\\1", name)
            known.add(name)
            if name in given:
                array = torch.as_tensor(given[name])
                if order is not None and array.ndim == len(order):
                    array = put_in_order(array, order)
                if array.ndim != tensor.ndim and array.numel() == tensor.numel():
                    array = array.reshape(tensor.shape)  # as of heads and their features
                if array.shape != tensor.shape:
                    shapes = f"{{tuple(array.shape)}} instead of {{tuple(tensor.shape)}}"
                    raise ValueError(f"{{name}} has the shape {{shapes}}")
                with torch.no_grad():
                    tensor.copy_(array)
            elif key in module.state_dict(){NOT_SAVED}:
                missing.append(name)
{CHECK_NAMES}    return model'''
_TAKE_APART = '''def take_apart(state):
    """Returns a state in which the rows of stacked arrays are arrays of the layers."""
    found = dict(state)
    for path, count in STACKED.items():
        for name, array in list(found.items()):
            if f"{name}.".startswith(f"{path}.") and tuple(array.shape[:1]) == (count,):
                rest = name[len(path) :]
                found.update((f"{path}.{i}{rest}", row) for i, row in enumerate(array))
    return found


'''
_MERGING = """                if array.ndim != tensor.ndim and array.numel() == tensor.numel():
                    array = array.reshape(tensor.shape)  # as of heads and their features
"""
_LISTS = """            for ours, theirs in LISTS.items():
                name = re.sub(rf"\\b{ours}\\.(\\d+)", rf"{theirs}\\1", name)
"""
_RENAMING = """            for ours, (theirs, other) in RENAMED.items():
                if f".{path}.{key}".endswith(f".{ours}"):
                    name, order = f"{path}.{key}".lstrip(".").removesuffix(ours) + theirs, other
                    break
"""


_WITHOUT_COLLECTIONS = '''def without_collections(state):
    """Returns a state with the names of modules, which those of variables of Linen end with."""
    return {
        name.partition(".")[2] if name not in KEPT and name.startswith(COLLECTIONS) else name: array
        for name, array in state.items()
    }


'''
_OF_STACKS = """    for path in STACKED:
        known.update(name for name in state if f"{name}.".startswith(f"{path}."))
"""
_NDIMS = {"nn.Linear": {"weight": 2, "bias": 1}, "nn.LayerNorm": {}}


def _is_reshaped(draft: Any, layer: Layer) -> bool:
    """Returns whether a layer's arrays have fewer dimensions than those of the source."""
    wanted = _NDIMS.get(layer.kind, {"bias": 1})
    return any(
        wanted.get(attr, ndim) != ndim
        for array, (attr, _) in layer.arrays.items()
        for ndim in [len(draft.structure.values[array][1])]
    )


def own_name(name: str, lists: Mapping[str, str]) -> str:
    """Returns what the model calls an array.

    Examples:
        >>> own_name("encoder.layers.1.norm.weight", {"layers": "layers_"})
        'encoder.layers_1.norm.weight'
    """
    for ours, theirs in lists.items():
        name = re.sub(rf"\b{ours}\.(\d+)", rf"{theirs}\1", name)
    return name


def _stem(whole: str, rows: Sequence[str]) -> str:
    """Returns the path of the list that the rows of an array are in.

    Examples:
        >>> _stem("blocks.mlp.0.w", ["blocks.0.mlp.0.w", "blocks.1.mlp.0.w"])
        'blocks'
    """
    others = rows[1] if len(rows) > 1 else whole
    steps = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(rows[0].split("."), others.split("."), strict=False)
    )
    return ".".join(step for step, _ in steps)


def _table(names: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{ours!r}: {_place(theirs)}' for ours, theirs in names.items())}}}"


def _place(place: tuple[str, tuple[int, ...] | None]) -> str:
    """Returns the code for a name and an order of dimensions, `~i` for dimension i backwards."""
    name, order = place
    axes = [str(i) if i >= 0 else f"~{~i}" for i in order or ()]
    return f"({name!r}, {None if order is None else _tuple(axes)})"


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def print_loading(draft: Any) -> str:
    """Returns `load_weights` with its tables."""
    known = tables_of(draft)
    rows = [f"    {kind}: {_table(names)}," for kind, names in known.by_class.items()]
    lines = ["ARRAYS = {", *rows, "}"] if rows else ["ARRAYS = {}"]
    loading = _LOAD
    if known.by_name:
        renamed = [f"    {ours!r}: {_place(theirs)}," for ours, theirs in known.by_name.items()]
        lines += ["RENAMED = {", *renamed, "}"]
    else:
        loading = loading.replace(_RENAMING, "")
    units = (form.layer for form in draft.forms.values())
    inner = (layer for group in draft.bodies.values() for _, body in group
             for layer in body.layers.values())  # fmt: skip
    if not any(one is not None and _is_reshaped(draft, one) for one in (*units, *inner)):
        loading = loading.replace(_MERGING, "")
    lists = draft.dialect.lists
    if lists:
        lines.append(f"LISTS = {lists!r}")
    else:
        loading = loading.replace(_LISTS, "")
    stacks = draft.program.stacks.items()
    stacked = {own_name(_stem(whole, rows), lists): len(rows) for whole, rows in stacks}
    lacking, ignored = names_beside(draft)
    if any("BatchNorm" in one.layer.kind for one in draft.forms.values() if one.layer is not None):
        lacking.append(".num_batches_tracked")
    if stacked:
        lines.append(f"STACKED = {stacked!r}")
        loading = _TAKE_APART + loading
        begin = "    known, missing = set(), []\n"
        loading = loading.replace(begin, begin + _OF_STACKS)
    else:
        loading = loading.replace("    given = take_apart(state)\n", "")
        loading = loading.replace("given", "state")
    names = draft.program.source_names
    collections = sorted({name.removesuffix(short) for short, name in names.items()} - {""})
    if collections:
        lines.append(f"COLLECTIONS = ({', '.join(map(repr, collections))},)")
        kept = sorted(name for short, name in names.items() if short == name)
        lines += [f"KEPT = ({', '.join(map(repr, kept))},)"] if kept else []
        strip = _WITHOUT_COLLECTIONS
        loading = (strip if kept else strip.replace("name not in KEPT and ", "")) + loading
        begin = "    known, missing = set(), []\n"
        first = "    given = " if stacked else begin
        loading = loading.replace(first, f"    state = without_collections(state)\n{first}", 1)
    *tables, loading = print_checks(loading, lacking, ignored)
    lines += tables
    if any(i < 0 for _, order in draft.owners.values() for i in order or ()):
        loading = _PUT_IN_ORDER + loading
    else:
        loading = loading.replace("put_in_order(array, order)", "array.permute(order)")
    return "\n".join([*lines, "", "", loading])
