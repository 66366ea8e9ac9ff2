"""The static part of a converted model: everything but its arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from fmapper import LossyCastError
from fmapper.meshes import Dimensions, Packing
from fmapper.programs import Echoes, Graph, Lowering, Program, Ref
from fmapper_adapters.jax.aten import table, types
from fmapper_adapters.jax.model import call_cache, interpret, narrow_ints, packing, row_blocks

Arrays = dict[str, Any]
Lowered = tuple[Graph, Mapping[str, Lowering]]


class StaticProgram:
    """The part of a model that is not an array: a constant to `jax.jit`, compared by identity.

    Attributes:
        program: The program, without its parameters and buffers.
        lowerings: The lowerings by operation.
        convolves: Whether it has convolutions.
        constants: Arrays in the code of the model, on the host.
        random: Whether it draws random numbers.
        concrete: Whether shapes depend on values, so that it cannot be compiled.
        paths: The name of each flattened input in errors.
        checks: The calls that assert something.
        own_keywords: Arguments of forward with the names of keywords of `__call__`.
        names: The names of the parameters and buffers that the program takes, in order.
        pick_params, pick_buffers: Take these arrays from a dict.
        routes: The cache of calls that were checked.
        echoes: Outputs that are returned as objects of the classes of arguments.
        problems: During an examination, the problems with results of operations.
        too_wide: Integers that need 64 bits; empty if there are none.
    """

    def __init__(
        self, program: Program, lowerings: Mapping[str, Lowering], constants: Arrays
    ) -> None:
        self.program = program
        self.lowerings = lowerings
        self.constants = constants
        self.convolves = any("conv" in op for op in lowerings)
        self.random = any(lowering.random is True for lowering in lowerings.values())
        self.concrete = program.has_unknown_sizes() or any(
            lowering.data_dependent_shape for lowering in lowerings.values()
        )
        self.users = [i for i in program.inputs if i.kind in ("user", "static")]
        self.paths = program.input_paths()
        self.too_wide = narrow_ints.problem(program, constants, lowerings)
        self.checks = [call for call in program.graph.calls if interpret.is_check(call)]
        self.problems: list[str] | None = None
        self.check_width()
        self.fixed_outputs = [
            None if isinstance(value, Ref) else (value,)
            for value, output in zip(program.graph.outputs, program.outputs, strict=True)
            if output.kind == "user"
        ]
        self.all_computed = not any(self.fixed_outputs)
        self.own_keywords = {p.name for p in program.signature} & {"key", "mutable"}
        self.names = {
            kind: [str(i.target) for i in program.inputs if i.kind == kind]
            for kind in ("parameter", "buffer")
        }
        self.pick_params = _picker(self.names["parameter"])
        self.pick_buffers = _picker(self.names["buffer"])
        self.routes = call_cache.Routes(program)
        self._graphs: dict[Any, Lowered] = {}
        self.echoes = Echoes(program)

    @cached_property
    def output_dimensions(self) -> list[list[dict[str, int]]]:
        """The parameters that have each dimension of each computed output of the user's."""
        rows = Dimensions(self.program, table.dims).of_outputs()
        pairs = zip(self.program.graph.outputs, self.program.outputs, rows, strict=True)
        return [row for value, out, row in pairs if out.kind == "user" and isinstance(value, Ref)]

    @cached_property
    def row_blocks(self) -> Lowered:
        """The graph for several devices, where parts of a batch sort their own; its lowerings."""
        is_random = {op: bool(lowering.random) for op, lowering in self.lowerings.items()}
        graph = row_blocks.with_row_blocks(self.program, is_random)
        added = {call.op: () for call in graph.walk() if call.op not in self.lowerings}
        return graph, {**self.lowerings, **table.find_all(added, {})}

    @cached_property
    def packings(self) -> list[Packing]:
        """The parameters that pack several arrays side by side."""
        return Dimensions(self.program, table.dims).packings()

    def graph_with_blocks(self, counts: packing.Counts, *, in_parts: bool) -> Lowered:
        """Returns the graph for packed parameters, and its lowerings.

        Args:
            counts: The number of blocks of each packed parameter.
            in_parts: Whether parts of a batch sort their own rows.
        """
        key = counts, in_parts
        if key not in self._graphs:
            graph, lowerings = self.row_blocks if in_parts else (self.program.graph, self.lowerings)
            graph = packing.with_blocks(graph, self.packings, counts)
            added = {call.op: () for call in graph.walk() if call.op not in lowerings}
            self._graphs[key] = graph, {**lowerings, **table.find_all(added, {})}
        return self._graphs[key]

    def check_width(self) -> None:
        """Checks that the program's integers fit, once their width is known.

        Raises:
            LossyCastError: An integer does not fit.
        """
        if self.too_wide and types.dtype_of("int64").itemsize == 4:
            raise LossyCastError(self.too_wide)


def _picker(names: list[str]) -> Callable[[Arrays], tuple[Any, ...]]:
    if len(names) < 2:  # itemgetter returns no tuple for one name
        return lambda arrays: tuple([arrays[name] for name in names])
    return operator.itemgetter(*names)
