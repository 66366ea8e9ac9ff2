"""Finds equal dimensions among the arrays of a program, by its calls.

Two dimensions belong together if a call combines them element by element: then dividing one of them
divides the other, without communication. A product sums over a dimension: if that is divided, the
partial results must be summed over devices. Some calls need a whole dimension, such as a softmax
along it. The rule for a call is looked up by its operation; an unknown one needs all of its
dimensions whole, which is correct but costs communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from fmapper.meshes.packings import Cut, Packing, Step, find_packings
from fmapper.programs.program import Call, Graph, Input, Program
from fmapper.programs.sizes import reshape_groups
from fmapper.programs.treespec import Ref, TreeSpec

Dims: TypeAlias = "list[int]"
"""A number for each dimension of an array; numbers of equal dimensions are joined."""

DimensionRule: TypeAlias = "Callable[[Dimensions, Call, list[Any], list[Dims]], None]"
"""A rule: `(dimensions, call, operands by position, results) -> None` records a call's effect.

If it raises an IndexError, TypeError or ValueError, for example for an unknown form of the
operation, the call is treated as needing its operands whole.
"""


@dataclass(slots=True)
class Group:
    """A group of dimensions that must be sharded alike.

    Attributes:
        sizes: Their sizes, for example in heads and in features.
        parameters: The parameters with such a dimension: name -> index of the dimension.
        sums: The calls that sum over it.
        lookups: Those of them that look up rows.
        moves: The calls that split it into parts, which then are on other devices.
        whole: The calls that need it whole.
        experts: Whether it counts experts.
    """

    sizes: set[int | str] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)
    sums: list[Call] = field(default_factory=list)
    lookups: list[Call] = field(default_factory=list)
    moves: list[Call] = field(default_factory=list)
    whole: list[Call] = field(default_factory=list)
    experts: bool = False


class Dimensions:
    """The dimensions of the arrays of a program, grouped by equality.

    Args:
        program: The program.
        rule: Returns the rule of an operation by name; None for an unknown one.
    """

    def __init__(self, program: Program, rule: Callable[[str], DimensionRule | None]) -> None:
        self._rule = rule
        self._parents: list[int] = []
        self._sizes: list[int | str] = []
        self._sums: list[tuple[int, Call]] = []
        self._lookups: list[tuple[int, Call]] = []
        self._moves: list[tuple[int, Call]] = []
        self._whole: list[tuple[int, Call]] = []
        self._experts: list[int] = []
        self._aligned: list[int] = []  # as _parents, but without joins by cuts
        self._cuts: dict[int, list[Cut]] = {}  # by dimension
        self._steps: list[Step] = []  # of the outer graph
        self._fixed: list[int] = []  # dimensions of inputs, whose order is fixed
        self._depth = 0
        self._times = 1
        self._repeats: dict[int, int] = {}  # by id of a call that runs more than once
        self._values: dict[str, list[Dims]] = {}
        self._parameters: dict[str, Dims] = {}
        for name, spec in zip(program.graph.inputs, program.inputs, strict=True):
            dims = self._fresh(spec.shape)
            self._values[name] = [dims]
            if spec.kind == "parameter":
                self._parameters[str(spec.target)] = dims
            else:
                self._fixed += dims
        for call in program.graph.calls:
            self._call(call)
        self._close_cuts()
        self._outputs = [self._dims(value) or [] for value in program.graph.outputs]
        self._fixed += chain(*self._outputs)

    def of_outputs(self) -> list[list[dict[str, int]]]:
        """Returns the dimensions of parameters that equal each dimension of each output.

        The list has an entry for each output of the program: for each dimension a dict, name of a
        parameter -> index of the equal dimension.
        """
        equal: dict[int, dict[str, int]] = {}
        for name, dims in self._parameters.items():
            for at, dim in enumerate(dims):
                equal.setdefault(self.same(dim), {}).setdefault(name, at)
        return [[equal.get(self.same(dim), {}) for dim in dims] for dims in self._outputs]

    def groups(self) -> list[Group]:
        """Returns the groups of equal dimensions that parameters have."""
        groups: dict[int, Group] = {}
        for name, dims in self._parameters.items():
            for at, dim in enumerate(dims):
                groups.setdefault(self.same(dim), Group()).parameters.setdefault(name, at)
        for dim, size in enumerate(self._sizes):
            group = groups.get(self.same(dim))
            if group is not None:
                group.sizes.add(size)
        for pairs, attribute in (
            (self._sums, "sums"),
            (self._lookups, "lookups"),
            (self._moves, "moves"),
            (self._whole, "whole"),
        ):
            for dim, call in pairs:
                group = groups.get(self.same(dim))
                if group is not None and call not in getattr(group, attribute):
                    getattr(group, attribute).append(call)
        for dim in self._experts:
            if self.same(dim) in groups:
                groups[self.same(dim)].experts = True
        return list(groups.values())

    def packings(self) -> list[Packing]:
        """Returns the parameters that pack several arrays, which calls cut apart."""
        fixed = [*self._fixed, *(dim for dim, _ in (*self._whole, *self._lookups))]

        def order(dim: int) -> int:
            return _root(self._aligned, dim)

        parameters = self._parameters
        return find_packings(order, self._sizes, parameters, self._cuts, self._steps, fixed)

    def follow(self, call: Call, rows: Mapping[str, int]) -> list[int] | None:
        """Returns the dimension of each result that one dimension of the operands alone becomes.

        Args:
            call: The only call of the program.
            rows: Operands -> this dimension.

        Returns:
            None if the call does not keep it, or combines it with another one.
        """
        groups = {self.same(self._values[name][0][at]) for name, at in rows.items()}
        mixed = chain(self._sums, self._lookups, self._moves, self._whole)
        if len(groups) != 1 or not groups.isdisjoint(self.same(dim) for dim, _ in mixed):
            return None
        places = {
            name: [[at for at, dim in enumerate(dims) if self.same(dim) in groups] for dims in each]
            for name, each in self._values.items()
        }
        kept = places.pop(call.name)
        if any(places[n][0] != ([rows[n]] if n in rows else []) for n in places):
            return None
        return [at for (at,) in kept] if all(len(dims) == 1 for dims in kept) else None

    def same(self, dim: int) -> int:
        """Returns the representative of the group of a dimension."""
        return _root(self._parents, dim)

    # --- for rules -----------------------------------------------------------------------------

    def join(self, a: int, b: int) -> None:
        """Joins two dimensions."""
        self._parents[self.same(a)] = self.same(b)
        self._aligned[_root(self._aligned, a)] = _root(self._aligned, b)

    def sum(self, dim: int, call: Call) -> None:
        """Records that a call sums over a dimension."""
        self._sums.append((dim, call))
        self._repeats[id(call)] = self._times

    def inside(self, graph: Graph, operands: Sequence[Any], *, times: int = 1) -> list[Any]:
        """Follows the calls of an inner graph; returns the dimensions of its outputs.

        Args:
            graph: The graph, as a call holds it.
            operands: The dimensions of its inputs; None for a number.
            times: How often it runs.
        """
        saved, self._times = (self._values, self._times), self._times * times
        self._depth += 1
        pairs = zip(graph.inputs, operands, strict=True)
        self._values = {name: [] if dims is None else [dims] for name, dims in pairs}
        try:
            for call in graph.calls:
                self._call(call)
            return [self._dims(value) for value in graph.outputs]
        finally:
            self._values, self._times = saved
            self._depth -= 1

    def times(self, call: Call) -> int:
        """Returns how often a call runs: more than once in a loop."""
        return self._repeats.get(id(call), 1)

    def contract(self, a: int, b: int, call: Call) -> None:
        """Records that a call contracts two dimensions, like a matrix product."""
        self.join(a, b)
        self.sum(a, call)

    def look_up(self, dim: int, call: Call) -> None:
        """Records that a call looks up rows; devices without them contribute zeros."""
        self._lookups.append((dim, call))
        self.sum(dim, call)

    def move(self, dim: int, call: Call) -> None:
        """Records that a call splits a dimension into parts that are divided alike."""
        self._moves.append((dim, call))

    def cut(self, dim: int, part: int, start: int, call: Call) -> None:
        """Records that a call takes the part of a dimension that begins at `start`.

        If such parts cover the whole dimension, they were packed in one array, such as the queries,
        keys and values of an attention; otherwise the dimension is needed whole.
        """
        operand = self._dims(call.args[0])
        at = None if self._depth else operand.index(dim) - len(operand)
        self._cuts.setdefault(dim, []).append(Cut(start, part, call, at))

    def need(self, dims: Sequence[int], call: Call) -> None:
        """Records that a call needs dimensions whole."""
        self._whole += [(dim, call) for dim in dims]

    def expert(self, dim: int) -> None:
        """Records that a dimension counts experts."""
        self._experts.append(dim)

    def size(self, dim: int) -> int | str:
        """Returns the size of a dimension."""
        return self._sizes[dim]

    def align(self, a: Dims, b: Dims) -> None:
        """Joins dimensions that broadcasting aligns."""
        for x, y in zip(reversed(a), reversed(b), strict=False):
            if self.size(x) == self.size(y):
                self.join(x, y)

    def regroup(self, old: Dims, new: Dims, call: Call) -> None:
        """Joins dimensions across a reshape: dividing a product divides its first factor."""
        groups, fits = reshape_groups([*map(self.size, old)], [*map(self.size, new)])
        if not fits:
            source, target = groups.pop()
            self.need([*old[source], *new[target]], call)
        for source, target in groups:
            left = [d for d in old[source] if self.size(d) != 1]
            right = [d for d in new[target] if self.size(d) != 1]
            if left and right:
                self.join(left[0], right[0])
                self.need([*left[1:], *(right[1:] if len(left) > 1 else ())], call)

    def _close_cuts(self) -> None:
        for dim, cuts in [*self._cuts.items()]:
            end: int | None = 0
            for start, size in sorted({(cut.start, str(self.size(cut.part))) for cut in cuts}):
                end = end + int(size) if start == end and size.isdecimal() else None
            if end != self.size(dim):
                for cut in self._cuts.pop(dim):
                    self.need([dim, cut.part], cut.call)
                continue
            for cut in cuts:  # but not in `_aligned`
                self._parents[self.same(dim)] = self.same(cut.part)
            self.move(dim, cuts[0].call)

    # --- walking the program --------------------------------------------------------------------

    def _fresh(self, shape: Sequence[int | str]) -> Dims:
        start = len(self._parents)
        self._parents += range(start, start + len(shape))
        self._aligned += range(start, start + len(shape))
        self._sizes += shape
        return list(range(start, start + len(shape)))

    def _call(self, call: Call) -> None:
        if call.op == "sym::getitem":
            source, at = call.args
            several = self._values.get(getattr(source, "name", ""), [])
            if isinstance(at, int) and at < len(several):
                self._values[call.name] = [several[at]]
            return
        results = [self._fresh(shape) for _, shape in call.result]
        self._values[call.name] = results
        if not any(self._all_of(call)):
            self._fixed += chain(*results)
            return  # without operands: each device can compute its part
        says = self._rule(call.op)
        operands = [self._dims(value) for value in call.args]
        sums = len(self._sums)
        try:
            if says is not None and results:
                says(self, call, operands, results)
                if not self._depth:
                    taken, given = chain(*self._all_of(call)), chain(*results)
                    summed = [dim for dim, _ in self._sums[sums:]]
                    self._steps.append(Step(call, [*taken], [*given], summed))
                return
        except (IndexError, TypeError, ValueError):  # a form that the rule does not cover
            pass
        self.need([d for dims in self._all_of(call) for d in dims], call)
        self.need([d for dims in results for d in dims], call)

    def _dims(self, value: Any) -> Any:
        """Returns the dimensions of an operand; a list for several arrays, None for a number."""
        if isinstance(value, Ref):
            results = self._values.get(value.name, [])
            return results[0] if len(results) == 1 else None
        if isinstance(value, tuple):
            parts = [self._dims(part) for part in value]
            return parts if any(part is not None for part in parts) else None
        return None

    def _all_of(self, call: Call) -> Iterator[Dims]:
        for name in call.refs():
            yield from self._values.get(name, [])


def follow_rows(
    call: Call,
    shapes: Mapping[str, Sequence[int | str]],
    rows: Mapping[str, int],
    rule: DimensionRule | None,
) -> list[int] | None:
    """Returns where the results of a call have rows, each computed from one row of the operands.

    Args:
        call: The call, with the shapes of its results.
        shapes: The shapes of its operands, by name.
        rows: The operands with rows -> the dimension that counts them.
        rule: The rule of its operation.

    Returns:
        The dimension of the rows in each result; None if a row may depend on several, or on its
        position. After a reshape, several rows may be one, or one several: their number tells.
    """
    if rule is None:
        return None
    names = [name for name in dict.fromkeys(call.refs()) if name in shapes]
    inputs = tuple(Input("user", at, "", tuple(shapes[n])) for at, n in enumerate(names))
    graph = Graph(tuple(names), [call], ())
    none = TreeSpec("tuple")
    dimensions = Dimensions(Program(graph, inputs, (), none, none), lambda _: rule)
    return dimensions.follow(call, {name: rows[name] for name in names if name in rows})


def _root(parents: list[int], dim: int) -> int:
    """Returns the representative of a dimension, with path compression."""
    root = dim
    while parents[root] != root:
        root = parents[root]
    while parents[dim] != root:
        parents[dim], dim = root, parents[dim]
    return root
