"""Which dimensions of the arrays of a program are one and the same: what follows from its calls.

Two dimensions belong together where a call takes them side by side, element for element: then
dividing one of them divides the other, and nothing is sent. A product adds up over a dimension: if
that is divided, the parts must be added up between devices. A call that needs a dimension as a
whole, such as a softmax along it, says so. What a call does is looked up by its name; one that is
not known here needs all of its dimensions whole, which costs communication and no correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fmapper.programs.program import Call, Program, Ref

Dims: TypeAlias = list[int]  # of one array: a number for each dimension, see `Dimensions.same`


@dataclass(slots=True)
class Group:
    """Dimensions that are one.

    Attributes:
        sizes: The sizes that they have, as heads and as features.
        parameters: The parameters that have one of them: name -> which dimension.
        sums: The calls that add up over it.
        moves: The calls that take equal parts of it apart, which changes where they lie.
        whole: The calls that need it whole.
        experts: Whether it counts experts.
    """

    sizes: set[int | str] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)
    sums: list[Call] = field(default_factory=list)
    moves: list[Call] = field(default_factory=list)
    whole: list[Call] = field(default_factory=list)
    experts: bool = False


class Dimensions:
    """The dimensions of the arrays of a program, and which of them are one."""

    def __init__(self, program: Program) -> None:
        self._parents: list[int] = []
        self._sizes: list[int | str] = []
        self._sums: list[tuple[int, Call]] = []
        self._moves: list[tuple[int, Call]] = []
        self._whole: list[tuple[int, Call]] = []
        self._experts: list[int] = []
        self._values: dict[str, list[Dims]] = {}
        self._parameters: dict[str, Dims] = {}
        for name, spec in zip(program.graph.inputs, program.inputs, strict=True):
            dims = self._fresh(spec.shape)
            self._values[name] = [dims]
            if spec.kind == "parameter":
                self._parameters[str(spec.target)] = dims
        for call in program.graph.calls:
            self._call(call)

    def groups(self) -> list[Group]:
        """Returns the dimensions that are one together, those that parameters have."""
        found: dict[int, Group] = {}
        for name, dims in self._parameters.items():
            for at, dim in enumerate(dims):
                found.setdefault(self.same(dim), Group()).parameters.setdefault(name, at)
        for dim, size in enumerate(self._sizes):
            group = found.get(self.same(dim))
            if group is not None:
                group.sizes.add(size)
        for pairs, attribute in (
            (self._sums, "sums"),
            (self._moves, "moves"),
            (self._whole, "whole"),
        ):
            for dim, call in pairs:
                group = found.get(self.same(dim))
                if group is not None and call not in getattr(group, attribute):
                    getattr(group, attribute).append(call)
        for dim in self._experts:
            if self.same(dim) in found:
                found[self.same(dim)].experts = True
        return list(found.values())

    def same(self, dim: int) -> int:
        """Returns the number that all dimensions share that are one with this one."""
        root = dim
        while self._parents[root] != root:
            root = self._parents[root]
        while self._parents[dim] != root:
            self._parents[dim], dim = root, self._parents[dim]
        return root

    # --- what calls say -------------------------------------------------------------------------

    def join(self, a: int, b: int) -> None:
        """Notes that two dimensions are one."""
        self._parents[self.same(a)] = self.same(b)

    def sum(self, dim: int, call: Call) -> None:
        """Notes that a call adds up over a dimension."""
        self._sums.append((dim, call))

    def move(self, dim: int, call: Call) -> None:
        """Notes that a call takes equal parts of a dimension apart."""
        self._moves.append((dim, call))

    def need(self, dims: Sequence[int], call: Call) -> None:
        """Notes that a call needs dimensions whole."""
        self._whole += [(dim, call) for dim in dims]

    def expert(self, dim: int) -> None:
        """Notes that a dimension counts experts."""
        self._experts.append(dim)

    def size(self, dim: int) -> int | str:
        """Returns the size of a dimension."""
        return self._sizes[dim]

    def align(self, a: Dims, b: Dims) -> None:
        """Joins dimensions that broadcasting puts side by side."""
        for x, y in zip(reversed(a), reversed(b), strict=False):
            if self.size(x) == self.size(y):
                self.join(x, y)

    def regroup(self, old: Dims, new: Dims, call: Call) -> None:
        """Joins dimensions across a change of shape: a division of a product is of its first."""
        i = j = 0
        while i < len(old) and j < len(new):
            left, right = [old[i]], [new[j]]
            i, j = i + 1, j + 1
            while self._product(left) != self._product(right):
                if _is_less(self._product(left), self._product(right)) and i < len(old):
                    left.append(old[i])
                    i += 1
                elif j < len(new):
                    right.append(new[j])
                    j += 1
                else:
                    self.need([*left, *right, *old[i:]], call)
                    return
            left = [d for d in left if self.size(d) != 1]
            right = [d for d in right if self.size(d) != 1]
            if left and right:
                self.join(left[0], right[0])
                self.need([*left[1:], *(right[1:] if len(left) > 1 else ())], call)

    def _product(self, dims: Dims) -> tuple[int, tuple[str, ...]]:
        sizes = [self.size(dim) for dim in dims]
        names = tuple(sorted(size for size in sizes if isinstance(size, str)))
        return math.prod(size for size in sizes if isinstance(size, int)), names

    # --- walking the program --------------------------------------------------------------------

    def _fresh(self, shape: Sequence[int | str]) -> Dims:
        start = len(self._parents)
        self._parents += range(start, start + len(shape))
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
        says = _SAYS.get(call.op.partition(".")[0])
        operands = [self._dims(value) for value in call.args]
        if says is None or not results:
            self.need([d for dims in self._all_of(call) for d in dims], call)
            self.need([d for dims in results for d in dims], call)
        else:
            says(self, call, operands, results)

    def _dims(self, value: Any) -> Any:
        """Returns the dimensions of an operand; a list of those of several, None for a number."""
        if isinstance(value, Ref):
            found = self._values.get(value.name, [])
            return found[0] if len(found) == 1 else None
        if isinstance(value, tuple) and any(isinstance(part, Ref) for part in value):
            return [self._dims(part) for part in value]
        return None

    def _all_of(self, call: Call) -> Iterator[Dims]:
        for name in call.refs():
            yield from self._values.get(name, [])


def _is_less(a: tuple[int, tuple[str, ...]], b: tuple[int, tuple[str, ...]]) -> bool:
    """Tells which side of a change of shape lacks factors."""
    return (len(a[1]), a[0]) < (len(b[1]), b[0])


# --- what is known of operations ------------------------------------------------------------------

Says: TypeAlias = Callable[[Dimensions, Call, list[Any], list[Dims]], None]
_SAYS: dict[str, Says] = {}


def _says(*names: str) -> Callable[[Says], Says]:
    def add(function: Says) -> Says:
        _SAYS.update((name if "::" in name else f"aten::{name}", function) for name in names)
        return function

    return add


def _argument(call: Call, at: int, name: str, default: Any = None) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


_POINTWISE = """
abs add alias bitwise_and bitwise_not bitwise_or clamp clamp_max clamp_min clone contiguous cos
detach div dropout elu eq erf exp expand expm1 full_like ge gelu gt hardsigmoid hardswish hardtanh
le leaky_relu log log1p log_sigmoid logical_and logical_not logical_or lt masked_fill maximum
minimum mish mul native_dropout ne neg ones_like pow reciprocal relu relu6 rsqrt rsub sigmoid silu
sin softplus sqrt square sub tanh to _to_copy where zeros_like fmapper::stop_gradient
"""


@_says(*_POINTWISE.split())
def _pointwise(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for operand in operands:
        for result in results:
            if operand is not None:
                own.align(operand, result)


@_says("linear")
def _linear(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, w, *bias = operands
    (y,) = results
    own.align(x[:-1], y[:-1])
    _contract(own, call, x[-1], w[-1])
    own.join(w[0], y[-1])
    if bias and bias[0]:
        own.join(bias[0][0], y[-1])


@_says("matmul", "mm", "bmm", "mv", "dot")
def _matmul(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    a, b = operands
    (y,) = results
    _contract(own, call, a[-1], b[-2] if len(b) > 1 else b[-1])
    rows = [*a[:-1]]
    if len(b) > 1:
        own.join(b[-1], y[-1])
        own.align(b[:-2], y[:-2])
        own.align(rows, y[:-1])
    else:
        own.align(rows, y)


@_says("addmm", "baddbmm")
def _addmm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    bias, *factors = operands
    _matmul(own, call, factors[:2], results)
    if bias:
        own.align(bias, results[0])


def _contract(own: Dimensions, call: Call, a: int, b: int) -> None:
    own.join(a, b)
    own.sum(a, call)


@_says("embedding")
def _embedding(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    weight, indices = operands[:2]
    (y,) = results
    own.align(indices, y[:-1])
    own.join(weight[1], y[-1])
    own.sum(weight[0], call)


@_says("scaled_dot_product_attention")
def _attention(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    q, k, v, *mask = operands
    (y,) = results
    own.align(q[:-1], y[:-1])
    own.join(v[-1], y[-1])
    own.align(k[:-2], v[:-2])
    for at, dim in enumerate(k[:-2]):
        if len(k) == len(q):
            own.join(dim, q[at])  # with fewer heads the first of those that share one
    _contract(own, call, q[-1], k[-1])
    _contract(own, call, k[-2], v[-2])
    own.need([k[-2]], call)
    if mask and mask[0]:
        own.align(mask[0], [*q[:-1], k[-2]])


@_says("conv1d", "conv2d", "conv3d", "convolution")
def _convolution(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, w, *bias = operands
    (y,) = results
    groups = _argument(call, 8 if call.op.startswith("aten::convolution") else 6, "groups", 1)
    if len(x) == len(y):
        own.join(x[0], y[0])
    own.join(w[0], y[1 - len(w)])
    if groups == 1:
        _contract(own, call, x[1 - len(w)], w[1])
    elif groups == own.size(x[1 - len(w)]) == own.size(w[0]):
        own.join(x[1 - len(w)], w[0])
    else:
        own.need([x[1 - len(w)], w[0], w[1]], call)
    own.need([*x[2 - len(w) :], *y[2 - len(w) :], *w[2:]], call)
    if bias and bias[0]:
        own.join(bias[0][0], w[0])


@_says("_native_batch_norm_legit_no_training", "batch_norm", "_native_batch_norm_legit")
def _batch_norm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, *others = operands
    own.align(x, results[0])
    for other in others:
        if other and len(other) == 1:
            own.join(other[0], x[1])


@_says("layer_norm", "rms_norm", "native_layer_norm")
def _layer_norm(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, *others = operands
    own.align(x, results[0])
    for other in others:
        if other:
            own.align(other, x)
    count = len(_argument(call, 1, "normalized_shape", (0,)))
    for dim in x[len(x) - count :]:
        own.sum(dim, call)


@_says("mean", "sum", "amax", "amin", "prod", "var", "std", "var_mean")
def _reduce(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    asked = _argument(call, 1, "dim", ())
    if asked is None or asked == () or call.op.endswith(".default"):
        gone = set(range(len(x)))
    else:
        gone = {at % len(x) for at in (asked if isinstance(asked, tuple) else (asked,))}
    for at in gone:
        own.sum(x[at], call)
    kept = len(results[0]) == len(x)
    rest = [d for at, d in enumerate(x) if kept or at not in gone]
    own.align(rest, results[0])


@_says("max_pool2d_with_indices", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "max_pool1d",
       "avg_pool1d", "adaptive_avg_pool1d")  # fmt: skip
def _pool(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    for result in results:
        count = 1 if "1d" in call.op else 2
        own.align(x[:-count], result[:-count])
        own.need([*x[-count:], *result[-count:]], call)


@_says("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum")
def _along(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    own.align(x, results[0])
    own.need([x[_argument(call, 1, "dim", -1)]], call)


@_says("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
def _reshape(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    own.regroup(operands[0], results[0], call)


@_says("repeat_interleave")
def _repeat(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, (y,) = operands[0], results
    if len(x) == len(y) and isinstance(_argument(call, 1, "repeats"), int):
        for a, b in zip(x, y, strict=True):
            own.join(a, b)
    else:
        own.need([*x, *y], call)


@_says("permute")
def _permute(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    for at, dim in enumerate(_argument(call, 1, "dims")):
        own.join(operands[0][dim], results[0][at])


@_says("transpose")
def _transpose(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    order = [*operands[0]]
    a, b = call.args[1:3]
    order[a], order[b] = order[b], order[a]
    own.align(order, results[0])


@_says("t")
def _t(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    own.align(operands[0][::-1], results[0])


@_says("slice", "select", "index_select", "gather", "narrow")
def _part(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, (y,) = operands[0], results
    at = _argument(call, 1, "dim", 0) % len(x)
    rest = [d for i, d in enumerate(x) if i != at]
    kept = [d for i, d in enumerate(y) if i != at] if len(y) == len(x) else y
    for a, b in zip(rest, kept, strict=True):
        own.join(a, b)
    if len(y) == len(x) and own.size(y[at]) == own.size(x[at]) and "slice" in call.op:
        own.join(x[at], y[at])
    else:
        own.need([x[at], *([y[at]] if len(y) == len(x) else ())], call)


@_says("index")
def _index(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, indices = operands[:2]
    (y,) = results
    if indices and len(indices) == 1 and indices[0]:
        own.need([x[0]], call)
        for a, b in zip(x[1:], y[len(y) - len(x) + 1 :], strict=True):
            own.join(a, b)
    else:
        own.need([*x, *y], call)


@_says("cat")
def _cat(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    (y,) = results
    at = _argument(call, 1, "dim", 0) % len(y)
    parts = [part for part in operands[0] or () if part]
    own.need([dims[at] for dims in (y, *parts)], call)
    for part in parts:
        _join_but(own, at, part, y)


@_says("split_with_sizes", "split", "chunk")
def _split(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x = operands[0]
    at = _argument(call, 2, "dim", 0) % len(x)
    for part in results:
        _join_but(own, at, x, part)
    if len({own.size(part[at]) for part in results}) > 1:
        own.need([dims[at] for dims in (x, *results)], call)
        return
    for part in results:  # what was packed in one array, as the gate of a perceptron beside it
        own.join(x[at], part[at])
    own.move(x[at], call)


def _join_but(own: Dimensions, at: int, a: Dims, b: Dims) -> None:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if i != at:
            own.join(x, y)


@_says("transformers::grouped_mm_fallback", "_grouped_mm", "fmapper::grouped_mm")
def _grouped(own: Dimensions, call: Call, operands: list[Any], results: list[Dims]) -> None:
    x, w = operands[:2]
    (y,) = results
    own.expert(w[0])
    _contract(own, call, x[-1], w[-2])
    own.join(w[-1], y[-1])
    own.join(x[0], y[0])
    own.need([x[0]], call)
