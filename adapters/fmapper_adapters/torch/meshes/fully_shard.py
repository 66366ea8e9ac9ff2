"""Modules with sharded parameters that are gathered for use: torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fmapper import PlacementError

Axes = Sequence[str]
Node = tuple[str, str, Any]
"""What errors call a node, its name, and the node."""


def fully_shard(nodes: Sequence[Node], mesh: Any, asked: Mapping[Any, Sequence[str]]) -> None:
    """Shards the parameters of modules in place, and the state of optimizers likewise.

    Args:
        nodes: The nodes of a new tree.
        mesh: The mesh.
        asked: Class or pattern -> axes of the mesh; the outermost modules that match are units.
            None stands for the classes that models of transformers do not split. Modules at the top
            of the tree are units, too.

    Raises:
        PlacementError: A class or pattern matches no module, or a parameter is in two units. The
            modules are unchanged.
    """
    from torch.distributed.fsdp import fully_shard as apply

    modules = [node for node in nodes if isinstance(node[2], torch.nn.Module)]
    inside = {id(child) for _, _, node in modules for child in _below(node)}
    roots = [node for node in modules if id(node[2]) not in inside]
    if not roots:
        raise PlacementError("fsdp= shards modules of torch, and this tree has none.")
    units: dict[int, tuple[str, torch.nn.Module, Axes]] = {}
    for key, axes in asked.items():
        for where, _, node in _matches(key, modules, roots):
            units.setdefault(id(node), (where, node, axes))
    first = next(iter(asked.values()))
    for where, _, node in roots:
        units.setdefault(id(node), (where, node, first))
    _check_ties([unit for unit in units.values() if id(unit[1]) in inside], roots)
    before = {id(p): (module, name) for module, name, p in _parameters(roots)}
    for where, node, axes in sorted(units.values(), key=lambda unit: _count(unit[1])):
        try:
            apply(node, mesh=mesh[axes[0] if len(axes) == 1 else tuple(axes)])
        except (TypeError, ValueError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise PlacementError(f"{where}: torch's fully_shard refuses it: {reason}") from error
    for _, _, node in nodes:
        if isinstance(node, torch.optim.Optimizer):
            _follow(node, before, mesh, {axes[-1] for axes in asked.values()})


def refill(nodes: Iterable[Any], new: Mapping[Any, Any]) -> None:
    """Replaces parameters of modules, under all names of tied ones, and of their optimizers."""
    for node in nodes:
        if isinstance(node, torch.nn.Module):
            parameters = node._parameters
            parameters.update({name: new[old] for name, old in parameters.items() if old in new})
        elif isinstance(node, torch.optim.Optimizer):
            for group in node.param_groups:
                group["params"] = [new.get(old, old) for old in group["params"]]
            for old in [*node.state]:
                if old in new:
                    node.state[new[old]] = node.state.pop(old)


def _matches(key: Any, modules: Sequence[Node], roots: Sequence[Node]) -> list[Node]:
    if key is None:
        class_names = {
            name for _, _, root in roots for name in getattr(root, "_no_split_modules", ()) or ()
        }
        matches = [node for node in modules if type(node[2]).__name__ in class_names]
        if not matches:
            raise PlacementError(
                "these modules do not declare which of their parameters are gathered together, "
                "unlike those of transformers. Name the modules by class or path: "
                'fsdp={Block: "data"}, or fsdp={"layers.*": "data"}.'
            )
        return matches
    if isinstance(key, type):
        matches = [node for node in modules if isinstance(node[2], key)]
    else:
        hits = [node for node in modules if key.occurs_in(node[1])]
        inside = {id(child) for _, _, node in hits for child in _below(node)}
        matches = [node for node in hits if id(node[2]) not in inside]
    if not matches:
        name = key.__qualname__ if isinstance(key, type) else repr(key)
        names = [name for _, name, _ in modules if name]
        shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
        raise PlacementError(f"fsdp= names {name}, which matches no module. There are {shown}.")
    return matches


def _below(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [child for child in module.modules() if child is not module]


def _count(module: torch.nn.Module) -> int:
    """Returns the number of modules in a module; inner modules have fewer than outer ones."""
    return sum(1 for _ in module.modules())


def _parameters(roots: Sequence[Node]) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    for _, _, root in roots:
        for module in root.modules():
            for name, parameter in module.named_parameters(recurse=False):
                yield module, name, parameter


def _check_ties(units: Sequence[tuple[str, torch.nn.Module, Axes]], roots: Sequence[Node]) -> None:
    """Raises for parameters in two units, which torch would untie."""
    owner = {}
    for where, unit, _ in sorted(units, key=lambda unit: -_count(unit[1])):
        for module in unit.modules():
            owner[id(module)] = where
    seen: dict[int, tuple[str, str]] = {}
    for where, _, root in roots:
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{path}.{name}".strip(".")
                current = owner.get(id(module), where)
                other, first = seen.setdefault(id(parameter), (current, full))
                if other != current:
                    raise PlacementError(
                        f"{first} and {full} are the same parameter, but fsdp= gathers it with "
                        f"{other} and with {current}, which unties it. Leave one of them out, so "
                        "that both are in one unit."
                    )


def _follow(optimizer: Any, before: Mapping[int, Any], mesh: Any, axes: set[str]) -> None:
    """Gives an optimizer the new parameters, and shards its state like them."""
    new = {}
    for group in optimizer.param_groups:
        for at, old in enumerate(group["params"]):
            if id(old) in before:
                module, name = before[id(old)]
                new[old] = group["params"][at] = getattr(module, name)
    for old, parameter in new.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[parameter] = {
                key: _shard_like(value, old, parameter, mesh, axes) for key, value in state.items()
            }


def _shard_like(value: Any, old: Any, parameter: Any, mesh: Any, axes: set[str]) -> Any:
    """Shards an array of a parameter's state like the parameter."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape:
        return value
    from torch.distributed.tensor import DTensor

    local = value.to_local() if isinstance(value, DTensor) else value
    device_mesh = parameter.device_mesh
    axis = next(name for name in device_mesh.mesh_dim_names if name in axes)
    parts = local.chunk(mesh[axis].size())
    at = mesh[axis].get_local_rank()
    part = parts[at].clone() if at < len(parts) else local[:0].clone()
    return DTensor.from_local(
        part, device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
