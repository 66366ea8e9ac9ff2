"""Derives sharding rules with little communication from a program."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fmapper.backends.discovery import adapters
from fmapper.backends.meshes import Meshes, Packed, Spec, parts_of
from fmapper.backends.models import Models
from fmapper.backends.nodes import Nodes
from fmapper.errors import PlacementError
from fmapper.meshes.dimensions import DimensionRule, Dimensions, Group
from fmapper.meshes.layout import BATCH, Axes, mesh_sizes, read_names
from fmapper.programs.program import Call, Program

_SMALL = 2  # parameters of fewer dimensions do not justify the communication


@dataclass(frozen=True, slots=True)
class Traffic:
    """The predicted communication between devices in a forward pass of a program.

    Attributes:
        sums: The places in the model where partial results are summed over devices, once per sum.
        gathers: The parameters that are gathered before use, and the places that need a divided
            array whole.
        moves: The places where shards are exchanged, because the framework cannot divide each of
            several packed arrays separately.
    """

    sums: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        """Returns the combined traffic of two programs."""
        return Traffic(
            self.sums + other.sums, self.gathers + other.gathers, self.moves + other.moves
        )


@dataclass(frozen=True, slots=True)
class Derivation(Traffic):
    """The axes that were derived from a program, and the resulting communication.

    Attributes:
        axes: For each parameter the axis of each dimension: `tensor`, `expert`, `zero` or None.
    """

    axes: dict[str, Axes] = field(default_factory=dict)


def derive(model: Any, mesh: Any, *, names: Mapping[str, Any] | None = None) -> Derivation:
    """Derives rules for `shard` from the program of a model.

    `shard(model, mesh, "derive")` applies them directly. The names are those of the model that was
    converted, so that the rules apply to that model, too.

    Args:
        model: A converted model, or a `Program`.
        mesh: A mesh, or the sizes of its axes: `{"data": 8, "model": 4}`.
        names: The mesh axes that `tensor`, `expert` and `zero` stand for, as for `shard`.

    Raises:
        PlacementError: The model has no program, or a name stands for an axis that the mesh lacks.

    Examples:
        >>> import fmapper, torch
        >>> from fmapper.meshes import derive
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> found = derive(fmapper.convert(net, "jax", (torch.ones(2, 4),)), {"model": 2})
        >>> found.axes["0.weight"], found.axes["2.weight"], found.sums
        (('tensor', None), (None, 'tensor'), ('2',))
    """
    sizes = mesh_sizes(mesh)
    program = model if isinstance(model, Program) else program_of(model)
    if program is None:
        raise PlacementError(
            f"a {type(model).__name__} has no program from which rules could be derived: convert it"
        )
    meanings = read_names(names, sizes)
    parts = {word: parts_of(axes, sizes) for word, axes in meanings.items()}
    axes = derive_axes(program, parts)
    specs = {
        name: tuple(meanings[word] if word else () for word in words)
        for name, words in axes.items()
    }
    packed = {name for name, _, _ in packed_arrays(model)}
    sent = traffic(program, specs, sizes, packed, gathered=meanings["zero"])
    return Derivation(sent.sums, sent.gathers, sent.moves, axes)


def program_of(model: Any) -> Program | None:
    """Returns the program of a converted model; None for other models."""
    programs = (adapter.program_of(model) for adapter in adapters(Models))
    return next(filter(None, programs), None)


def packed_arrays(node: Any) -> list[tuple[str, Any, Packed]]:
    """Returns the arrays of a node that pack several side by side: name, array, and packing."""
    return [packing for adapter in adapters(Nodes) for packing in adapter.packings(node)]


def traffic(
    program: Program,
    specs: Mapping[str, Spec],
    mesh: Mapping[str, int],
    packed: Collection[str] = (),
    *,
    gathered: Collection[str] = (),
) -> Traffic:
    """Predicts the communication of a program with divided parameters.

    If one parameter divides a dimension, all arrays that share the dimension are divided. A sum
    over it is computed in parts, which are added up; before a call that needs it whole it is
    gathered. Axes that divide the batch cannot divide anything else, so that parameters are
    gathered along them.

    Args:
        program: The program.
        specs: The axes that divide each dimension of the parameters, by name.
        mesh: The sizes of the axes of the mesh.
        packed: The names of parameters that pack several arrays, each divided separately.
        gathered: Axes that divide the batch, besides those named in `BATCH`.
    """
    batch = {*BATCH, *gathered}
    dimensions = Dimensions(program, dimension_rule)
    sums: list[str] = []
    moves: list[str] = []
    gathers = [name for name, spec in specs.items() if batch.intersection(chain(*spec))]
    for group in dimensions.groups():
        divided = {n: specs[n][at] for n, at in group.parameters.items() if n in specs}
        axes = [axis for axis in set(chain(*divided.values())) - batch if mesh[axis] > 1]
        if not axes:
            continue
        if group.experts:
            gathers += [name for name, places in divided.items() if places]
            continue
        parts = parts_of(axes, mesh)
        separate = _apart(dimensions, parts, packed)
        sums += [_place(c) for c in group.sums for _ in range(dimensions.times(c))]
        gathers += [_place(c) for c in group.whole if c not in group.sums]
        moves += [_place(c) for c in group.moves if c.name not in separate]
    return Traffic(tuple(sums), tuple(gathers), tuple(moves))


def _place(call: Call) -> str:
    return call.module or call.name


def _apart(dimensions: Dimensions, parts: int, packed: Collection[str]) -> set[str]:
    """Returns the calls that unpack separately divided arrays, which needs no communication."""
    return {
        name
        for packing in (dimensions.packings() if packed else ())
        for name in packing.cuts
        if all(n in packed and not p.limit % parts for n, p in packing.parameters.items())
    }


def derive_axes(program: Program, parts: Mapping[str, int]) -> dict[str, Axes]:
    """Divides the parameters of a program with little communication.

    If two matrix products follow each other, and nothing between them needs whole rows, the first
    is divided by its outputs and the second by its inputs, as in Megatron-LM
    (https://arxiv.org/abs/1909.08053): the partial results are added up once. This applies to the
    heads of an attention, the features between the layers of a perceptron or two convolutions, and
    the rows of embeddings and output heads. Experts are distributed over the devices.

    Args:
        program: The program.
        parts: The number of parts for each of `tensor`, `expert` and `zero`; 1 if there is no such
            axis.

    Returns:
        For each parameter the axis of each dimension: `tensor`, `expert`, `zero` or None.
    """
    shapes = {str(spec.target): spec.shape for spec in program.inputs if spec.kind == "parameter"}
    dimensions = Dimensions(program, dimension_rule)
    groups = [group for group in dimensions.groups() if not group.whole]
    axes: dict[str, list[str | None]] = {name: [None] * len(s) for name, s in shapes.items()}
    for group in groups if parts["expert"] > 1 else ():
        if group.experts and _divides(group, parts["expert"]):
            _mark(axes, group, "expert")
    taken = {name for name, words in axes.items() if any(words)}
    ranked = sorted(groups, key=lambda group: _rank(group, dimensions, shapes))
    for group in ranked if parts["tensor"] > 1 else ():
        if group.experts or not _divides(group, parts["tensor"]):
            continue
        if taken & {name for name in group.parameters if len(shapes[name]) >= _SMALL}:
            continue
        if _pays(group, shapes):
            _mark(axes, group, "tensor")
            taken |= set(group.parameters)
    if parts["zero"] > 1:
        for name, words in axes.items():
            _mark_rest(words, shapes[name], parts)
    return {name: tuple(words) for name, words in axes.items()}


def dimension_rule(op: str) -> DimensionRule | None:
    """Returns the rule for the dimensions of an operation; None if no adapter has one."""
    rules = (adapter.dimension_rule(op) for adapter in adapters(Meshes))
    return next(filter(None, rules), None)


def _divides(group: Group, parts: int) -> bool:
    return all(isinstance(size, int) and size % parts == 0 for size in group.sizes)


def _pays(group: Group, shapes: Mapping[str, tuple[int | str, ...]]) -> bool:
    """Returns whether dividing a group saves more than it sends.

    One sum over devices pays off for at least two matrices, one divided by its outputs and one by
    its inputs; a lookup table pays off alone.
    """
    matrices = [name for name in group.parameters if len(shapes[name]) >= _SMALL]
    products = len(group.sums) - len(group.lookups)
    return bool(matrices) and 2 * products <= len(matrices) - bool(group.lookups)


def _rank(
    group: Group, dimensions: Dimensions, shapes: Mapping[str, tuple[int | str, ...]]
) -> tuple[bool, float]:
    """Ranks groups: chains first, then by the numbers sent per number that is divided."""
    sent = sum(
        _count(shape) * dimensions.times(call)
        for call in (*group.sums, *group.moves)
        for _, shape in call.result
    )
    return not group.sums, sent / (sum(_count(shapes[name]) for name in group.parameters) or 1)


def _count(shape: Iterable[int | str]) -> int:
    """Counts the numbers of an array, with dynamic sizes counted as 1."""
    return math.prod(n for n in shape if isinstance(n, int))


def _mark(axes: dict[str, list[str | None]], group: Group, word: str) -> None:
    for name, at in group.parameters.items():
        if not any(axes[name]):
            axes[name][at] = word


def _mark_rest(
    words: list[str | None], shape: tuple[int | str, ...], parts: Mapping[str, int]
) -> None:
    """Divides the largest remaining dimension along `zero`."""
    sizes = [
        (size, -at)
        for at, (word, size) in enumerate(zip(words, shape, strict=True))
        if word is None and isinstance(size, int) and size % parts["zero"] == 0
    ]
    if sizes:
        words[-max(sizes)[1]] = "zero"
