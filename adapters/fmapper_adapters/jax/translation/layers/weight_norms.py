"""Layers whose weights are normalised at each call, as `weight_norm` and `spectral_norm` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, local_array

Order = tuple[int, ...]
# What gives the elements of one of its arguments -> the place of that argument.
_COPIES = {"clone": 0, "copy": 1, "overwrite": 1, "stop_gradient": 0, "expand": 0}


@dataclass(frozen=True)
class _Product:
    """The product of a vector and a parameter as a matrix, whose rows are one of its dimensions.

    Attributes:
        source: The parameter.
        axis: The dimension.
        is_turned: Whether the matrix is transposed.
        vector: The vector.
    """

    source: str
    axis: int
    is_turned: bool
    vector: str


@dataclass
class _Weight:
    """A weight that is computed from a parameter.

    Attributes:
        source: The parameter.
        kind: The class that holds the layer.
        options: What it is told, given the order of the kernel's dimensions.
        arrays: Its further arrays -> what it calls them, and whether they are turned as the kernel.
    """

    source: str
    kind: str
    options: Callable[[Order], str]
    arrays: dict[str, tuple[str, bool]] = field(default_factory=dict)


def layer_under_norm(
    structure: Structure,
    unit: Unit,
    layer_of_call: Callable[[Structure, Unit, Call], Layer | None],
) -> Layer | None:
    """Returns a linear layer, a convolution or an embedding, in one that normalises its weight."""
    calls = [*unit.calls()]
    last = next((call for call in calls if [call.name] == unit.gives), None)
    at = int(last is not None and _name_of(last) != "embedding")
    if last is None or len(last.args) < 2 or not isinstance(last.args[at], Ref):
        return None
    search = _Search(structure, unit, {call.name: call for call in calls})
    weight = search.weight(last.args[at])
    if weight is None or search.used | {last.name} != {call.name for call in calls}:
        return None
    arrays = (weight.source, *weight.arrays)
    if any(local_array(structure, unit, name) is None for name in arrays):
        return None
    args = (*last.args[:at], Ref(weight.source), *last.args[at + 1 :])
    layer = layer_of_call(structure, unit, replace(last, args=args))
    if layer is None or layer.arrays.get(weight.source, ("",))[0] not in ("kernel", "embedding"):
        return None
    order = layer.arrays[weight.source][1] or (0, 1)
    held: dict[str, tuple[str, Order | None]] = {
        name: (f"layer.{attr}", turned) for name, (attr, turned) in layer.arrays.items()
    }
    for name, (attr, is_turned) in weight.arrays.items():
        held[name] = (attr, order if is_turned else None)
    made = expr(f"{weight.kind}({{0}}{weight.options(order)})", layer.made)
    inner = {"layer": layer.kind}
    return replace(layer, made=made, arrays=held, kind=weight.kind, inner=inner)


class _Search:
    """Follows a weight back to the arrays that it is computed from.

    Attributes:
        used: The calls on the way.
    """

    def __init__(self, structure: Structure, unit: Unit, made: Mapping[str, Call]) -> None:
        self._structure = structure
        self._made = made
        self.used: set[str] = set()

    def weight(self, value: Ref) -> _Weight | None:
        """Returns what a weight is; None for another computation."""
        call = self._call(value, "mul")
        if call is not None:
            return self._by_length(call)
        call = self._call(value, "div")
        return None if call is None else self._by_singular_value(call)

    def _by_length(self, call: Call) -> _Weight | None:
        """Finds `v * (g / norm(v))`."""
        source, scale = call.args
        ratio = self._call(scale, "div")
        norm = ratio and self._call(ratio.args[1], "linalg_vector_norm")
        if not norm or not ratio or norm.args[0] != source or norm.args[1] != 2:
            return None
        length = ratio.args[0]
        if not isinstance(source, Ref) or not isinstance(length, Ref) or norm.args[3:] != (True,):
            return None
        shape = self._structure.values[source.name][1]
        count = len(shape)
        kept = {*range(count)} - {axis % count for axis in norm.args[2]}
        lengths = tuple(size if at in kept else 1 for at, size in enumerate(shape))
        if len(kept) != 1 or self._structure.values[length.name][1] != lengths or norm.kwargs:
            return None

        def options(order: Order) -> str:
            axis = order.index(*kept) - count
            return "" if axis == -1 else f", axis={axis}"

        return _Weight(source.name, "WeightNorm", options, {length.name: ("scale", True)})

    def _by_singular_value(self, call: Call) -> _Weight | None:
        """Finds `w / (u @ (w @ v))`, whose vectors are power iterations in training."""
        source, value = call.args
        outer = self._call(value, "sum")
        product = outer and self._call(outer.args[0], "mul")
        found = product and self._product(product.args[1])
        if not found or not product or not outer or outer.args[1:] != ((),):
            return None
        is_matrix = len(self._structure.values[found.source][1]) == 2
        if Ref(found.source) != source or (found.is_turned and not is_matrix):
            return None
        vectors = {"u": self._plain(product.args[0]), "v": found.vector}
        steps = self._steps(vectors, found)
        buffers = {name: self._buffer(vector) for name, vector in vectors.items()}
        if steps is None or not buffers["u"] or not buffers["v"]:
            return None

        def options(order: Order) -> str:
            axis = order.index(1 if found.is_turned else found.axis) - len(order)
            is_last = "" if axis == -1 else f", axis={axis}"
            return f'{is_last}, steps="{steps}", rngs=rngs'

        arrays = {str(buffer): (name, False) for name, buffer in buffers.items()}
        return _Weight(found.source, "SpectralNorm", options, arrays)

    def _steps(self, vectors: Mapping[str, str], last: _Product) -> str | None:
        """Returns the letters of the vectors in the order in which they are improved.

        Each is made of the one before; the first one of what a buffer holds.
        """
        found = {name: self._direction(vector) for name, vector in vectors.items()}
        made = {name: one.vector for name, one in found.items() if one is not None}
        if not made:
            return ""
        ends = [name for name, other in ("uv", "vu") if made.get(name) == vectors[other]]
        if len(ends) != 1:
            return None
        name, vector, steps = ends[0], vectors[ends[0]], ""
        while one := self._direction(vector):
            if one.source != last.source or one.is_turned != (last.is_turned ^ (name == "v")):
                return None
            steps, vector, name = name + steps, one.vector, "v" if name == "u" else "u"
        changed = self._updates()
        if len(steps) % 2 or self._buffer(vectors[name]) != vector or vectors[name] not in changed:
            return None
        return steps

    def _direction(self, vector: str) -> _Product | None:
        """Returns the product that a vector of length one is the direction of."""
        call = self._call(Ref(vector), "div")
        length = call and self._call(Ref(self._plain(call.args[1])), "clamp")
        norm = length and self._call(Ref(self._plain(length.args[0])), "linalg_vector_norm")
        if not call or not length or not norm or norm.args[:2] != (call.args[0], 2):
            return None
        return self._product(call.args[0]) if length.args[1:] == (1e-12,) else None

    def _product(self, value: Any) -> _Product | None:
        """Finds the product of a vector and a parameter as a matrix: `(w * v).sum(1)`."""
        total = self._call(value, "sum")
        product = total and self._call(total.args[0], "mul")
        if not product or not total or total.args[1:] != ((1,),):
            return None
        matrix, vector = product.args
        axis, is_turned = 0, False
        while isinstance(matrix, Ref) and (call := self._made.get(matrix.name)) is not None:
            self.used.add(call.name)
            name, before = _name_of(call), call.args[0]
            shape = self._structure.values[before.name][1]
            if name == "permute" and call.args[1] == (1, 0) and len(shape) == 2:
                is_turned = not is_turned
            elif name == "permute" and not axis:
                axis = call.args[1][0]
                if call.args[1] != (axis, *(at for at in range(len(shape)) if at != axis)):
                    return None
            elif name != "clone" and not (name == "view" and call.args[1][:-1] == shape[:1]):
                return None
            matrix = before
        if not isinstance(matrix, Ref) or not isinstance(vector, Ref):
            return None
        return _Product(matrix.name, axis, is_turned, self._plain(vector))

    def _buffer(self, vector: str) -> str | None:
        """Returns the buffer that a vector is, or that it becomes."""
        target = self._updates().get(vector)
        for name, one in self._structure.inputs.items():
            if one.kind == "buffer" and (name == vector or one.target == target):
                return name
        return None

    def _updates(self) -> dict[str, str]:
        """Maps what buffers become to those."""
        program = self._structure.program
        return {
            self._plain(value): str(output.target)
            for value, output in zip(program.graph.outputs, program.outputs, strict=True)
            if output.kind == "buffer" and isinstance(value, Ref) and value.name in self._made
        }

    def _plain(self, value: Any) -> str:
        """Returns the value that another one is a copy of."""
        while isinstance(value, Ref) and (call := self._made.get(value.name)) is not None:
            if (name := _name_of(call)) not in _COPIES:
                break
            self.used.add(call.name)
            value = call.args[_COPIES[name]]
        return value.name if isinstance(value, Ref) else ""

    def _call(self, value: Any, name: str) -> Call | None:
        """Returns the call that makes a value, if it is of that name."""
        call = self._made.get(value.name) if isinstance(value, Ref) else None
        if call is None or _name_of(call) != name:
            return None
        self.used.add(call.name)
        return call


def _name_of(call: Call) -> str:
    return call.op.partition("::")[2].partition(".")[0]
