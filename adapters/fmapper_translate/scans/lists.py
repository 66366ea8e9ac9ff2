"""Lists of blocks that files may have as one block with stacked arrays."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmapper_translate.functions import Function
from fmapper_translate.scans.loops import flow_of
from fmapper_translate.walk.errors import NotTranscribed

if TYPE_CHECKING:
    from fmapper_translate.files import File

_SETTINGS = (bool, int, float, str, tuple, type(None))


@dataclass(eq=False)
class Lists:
    """Lists in one attribute of a class.

    Attributes:
        owner: The class.
        name: The attribute.
        parts: The path of each list -> its blocks.
        loops: The loops and calls of the source that call them -> their functions.
        reason: Why they cannot be scanned; empty if they can.
    """

    owner: type
    name: str
    parts: dict[str, list[nn.Module]] = field(default_factory=dict)
    loops: dict[ast.AST, Function] = field(default_factory=dict)
    reason: str = ""


def lists_of(file: File) -> list[Lists]:
    """Returns the lists of blocks of a model that its source calls."""
    known: dict[tuple[type, str], Lists] = {}
    of: dict[int, Lists] = {}
    for path, owner in file.model.named_modules():
        for name, child in owner.named_children():
            is_list = type(child) in (nn.ModuleList, nn.Sequential) and len(child) > 1
            if not is_list or file.layers.layer_of(type(owner)) is not None:
                continue
            parts = list(child.children())
            if isinstance(child, nn.Sequential) and len({*map(type, parts)}) > 1:
                continue
            item = known.setdefault((type(owner), name), Lists(type(owner), name))
            item.parts[f"{path}.{name}".lstrip(".")] = parts
            of[id(child)] = item
    for function in file.recording.functions:
        if not file.constructs(function):
            _add_loops(file, function, of)
    read = {
        node.attr
        for function in file.recording.functions
        if not file.constructs(function)
        for node in function.nodes
        if isinstance(node, ast.Attribute) and node in file.recording.events
    }
    uses = Counter(id(x) for _, x in file.model.named_parameters(remove_duplicate=False))
    for item in known.values():
        for parts in item.parts.values() if not item.reason else ():
            item.reason = next(_differences(parts, read, uses), "")
    return [item for item in known.values() if item.loops or item.reason]


def _add_loops(file: File, function: Function, of: dict[int, Lists]) -> None:
    """Notes which loops and calls of a function call lists, and which do something else."""
    events = file.recording.events
    above = {part: node for node in function.nodes for part in ast.iter_child_nodes(node)}
    for node in function.nodes:
        for value in (event.value for event in events.get(node, ())):
            if id(value) not in of:
                continue
            item, loop = of[id(value)], _loop(node, above, events)
            if loop is None:
                whole = ast.unparse(above[node])
                item.reason = f"`{whole}` in {function.label} is not a loop over all of them"
                continue
            item.loops[loop] = function
            if isinstance(loop, ast.For):
                try:
                    flow_of(function, loop, events)
                except NotTranscribed as error:
                    item.reason = str(error)


def _loop(node: ast.AST, above: dict[ast.AST, ast.AST], events: Any) -> ast.AST | None:
    """Returns the loop over a list that an expression is, or its call or length; else None."""
    parent = above[node]
    match parent:
        case ast.Call(func) if func is node:  # a sequence
            return parent
        case ast.Call(ast.Name("len"), [_], []):
            return parent
        case ast.Subscript(slice=ast.Slice(lower=None, step=None)):
            owners = [event.value for event in events[node]]
            wholes = [event.value for event in events.get(parent, ())]
            if [*map(list, owners)] != [*map(list, wholes)]:
                return None
            node, parent = parent, above[parent]
        case ast.Call(ast.Name("enumerate"), [_], []):
            node, parent = parent, above[parent]
    return parent if isinstance(parent, ast.For) and parent.iter is node else None


def _differences(
    parts: list[nn.Module], read: set[str], uses: Counter[int], path: str = ""
) -> Iterator[str]:
    """Returns what keeps parts from being one: what differs, and arrays that others have too."""
    first = parts[0]
    for part in parts[1:]:
        if type(part) is not type(first):
            yield f"its parts differ: {type(first).__name__} and {type(part).__name__}"
            return
    for name, value in vars(first).items():
        is_known = name in read or type(first).__module__.startswith("torch.")
        if name.startswith("_") or name == "training" or not is_known:
            continue
        values = [getattr(part, name, None) for part in parts]
        if isinstance(value, _SETTINGS) and any(item != value for item in values):
            other = next(item for item in values if item != value)
            yield f"its parts differ: {path}{name} is {value} and {other}"
    for arrays in ([part._parameters for part in parts], [part._buffers for part in parts]):
        for name in dict.fromkeys(name for each in arrays for name in each):
            held = [each.get(name) for each in arrays]
            if len({*map(_kind, held)}) > 1:
                yield f"{path}{name} differs in its shape, or in whether it is trained"
            if any(uses[id(array)] > 1 for array in held):
                yield f"{path}{name} is shared"
    names = [[*part._modules] for part in parts]
    if any(item != names[0] for item in names):
        yield f"its parts differ: {path.rstrip('.')} has {', '.join(names[0])}"
        return
    for name in names[0]:
        inner = [part._modules[name] for part in parts]
        if any(item is None for item in inner):
            if any(item is not None for item in inner):
                yield f"its parts differ: {path}{name} is None in some"
            continue
        yield from _differences(inner, read, uses, f"{path}{name}.")  # type: ignore[arg-type]


def _kind(array: Any) -> Any:
    is_array = isinstance(array, torch.Tensor)
    return (array.shape, array.dtype, array.requires_grad) if is_array else array


def choose(file: File, check: Callable[[], object]) -> tuple[dict[str, int], dict[str, str]]:
    """Has a file call lists by scans, those for which it gives what the source gives.

    Args:
        file: The file.
        check: Writes the file.

    Returns:
        The lists that are scanned -> how many blocks they have; and the others -> the reason.

    Raises:
        NotTranscribed: None is scanned.
    """
    refused: dict[str, str] = {}
    groups: list[list[Lists]] = []
    every = lists_of(file)
    by_loop: dict[ast.AST, list[Lists]] = defaultdict(list)
    for item in every:
        for loop in item.loops:
            by_loop[loop].append(item)
    rest = list(every)
    while rest:  # those that the same loops call, together
        group = [rest.pop(0)]
        for item in group:
            new = [x for loop in item.loops for x in by_loop[loop] if x in rest]
            group += dict.fromkeys(new)
            rest = [x for x in rest if x not in new]
        groups.append(group)
    scanned: dict[str, int] = {}
    for group in groups:
        paths = {path: len(parts) for item in group for path, parts in item.parts.items()}
        reason = next((item.reason for item in group if item.reason), "")
        if not reason:
            before, fallen = list(file.scans), dict(file.fallen)
            file.scans += group
            try:
                check()
                reason = next((file.fallen[x] for x in file.fallen.keys() - fallen.keys()), "")
            except NotTranscribed as error:
                reason = str(error)
            if not reason:
                scanned |= paths
                continue
            file.scans, file.fallen = before, fallen
        refused |= dict.fromkeys(paths, reason)
    if not scanned:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
        raise NotTranscribed(
            f"{type(file.model).__name__}: nothing can be scanned: "
            f"{reasons or 'there is no list of submodules'}. Write it without scan=True (--scan)"
        )
    return scanned, refused
