"""Gives results whose size depends on values a size that is a number, so that a program compiles.

What is asserted to be of one size has that size. What has as many rows as some mask has true
elements gets as many as the mask has elements: those that count come first, the others are padding
behind them, which goes where nobody looks. Row by row a program may compute with them; what brings
rows together leaves the padding out. A program that does more with such rows stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fmapper.programs import Call, DType, Graph, Program, Ref

_OVERLOAD = type(torch.ops.aten.add.Tensor)
_END = 2**62  # what slices to the end are written with is larger
_Sizes = tuple[Any, ...]

# Row by row, wherever the rows are.
_ROW_BY_ROW = {"clone", "_to_copy", "to", "detach", "alias", "contiguous", "masked_fill", "dropout"}
_ROW_BY_ROW |= {"where", "lift_fresh_copy", "zeros_like", "ones_like", "full_like", "empty_like"}
_ROW_BY_ROW |= {
    "native_dropout",
    "copy",
    "fill",
    "stop_gradient",
    "_conj",
    "view_as_real",
    "view_as_complex",
}
# Row by row where the rows are the first dimension of the first argument.
_BY_BATCH = {"conv1d", "conv2d", "conv3d", "convolution", "max_pool1d", "max_pool2d", "avg_pool1d"}
_BY_BATCH |= {"avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "group_norm", "bmm"}
_BY_BATCH |= {"scaled_dot_product_attention"}
# The place of the dimensions among the arguments that an operation brings together.
_ALONG = {"softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "sum": 1, "mean": 1}
_ALONG |= {"amax": 1, "amin": 1, "any": 1, "all": 1, "argmax": 1, "argmin": 1, "cumsum": 1}
_ALONG |= {"topk": 2, "sort": 1, "max": 1, "min": 1, "var": 1, "std": 1, "logsumexp": 1, "norm": 2}
_ALONG |= {"flip": 1, "glu": 1, "cat": 1, "split": 2, "split_with_sizes": 2, "chunk": 2}
_ALONG |= {"unbind": 1, "select": 1, "cumprod": 1, "narrow": 1, "roll": 2, "linalg_vector_norm": 2}
_DEFAULT_DIM = {"cat": 0, "split": 0, "split_with_sizes": 0, "chunk": 0, "unbind": 0}
_DEFAULT_DIM |= {"topk": -1, "sort": -1, "glu": -1}
_SHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}
_MOVES = {"permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "movedim"}
# Where sizes stand among the arguments: such a size is one with padding.
_SIZES = {"view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "full": 0, "zeros": 0, "ones": 0}
_SIZES |= {"empty": 0, "new_zeros": 1, "new_ones": 1, "new_full": 1, "new_empty": 1, "unflatten": 2}


class _Remains(Exception):
    """A size that depends on values; says which call is in the way."""


def static(graph: Graph, module: torch.fx.GraphModule) -> Graph:
    """Returns the graph with sizes that are numbers; or the graph itself, where that cannot be."""
    facts = _Facts.of(module)
    if not facts.symbols and not facts.is_sized:
        return graph
    try:
        return _Rewriter(graph, facts).done()
    except _Remains:
        return graph


def remaining(program: Program) -> list[Call]:
    """Returns the calls whose results have sizes that depend on values."""
    return [
        call
        for call in program.graph.walk()
        if call.op in _EAGER
        or any(isinstance(s, str) and _UNKNOWN.search(s) for _, shape in call.result for s in shape)
    ]


_UNKNOWN = re.compile(r"\bu\d+")  # how torch names sizes that are read from arrays
_EAGER = {"aten::nonzero.default", "aten::argwhere.default", "aten::masked_select.default"}
_EAGER |= {"aten::_unique2.default", "aten::unique_consecutive.default", "aten::unique_dim.default"}
_EAGER |= {"aten::nonzero_numpy.default", "aten::bincount.default", "aten::_unique.default"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Facts:
    """What torch knows of the sizes in a graph.

    Attributes:
        shapes: The shape of each array, with symbols.
        numbers: What each number that is read or computed is, with symbols.
        dtypes: The dtype of each array.
        known: Symbols that are asserted to be a number.
        symbols: All that stand for what is read from arrays.
        is_sized: Whether values make sizes, also such as torch knows.
    """

    shapes: dict[str, _Sizes]
    numbers: dict[str, Any]
    dtypes: dict[str, str]
    known: dict[Any, int]
    symbols: frozenset[Any]
    is_sized: bool

    @classmethod
    def of(cls, module: torch.fx.GraphModule) -> _Facts:
        shapes: dict[str, _Sizes] = {}
        numbers: dict[str, Any] = {}
        dtypes: dict[str, str] = {}
        known: dict[Any, int] = {}
        symbols: set[Any] = set()
        sized = False
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shapes[node.name] = tuple(map(_expression, value.shape))
                dtypes[node.name] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, torch.SymInt):
                numbers[node.name] = _expression(value)
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, torch.Tensor | torch.SymInt):
                    symbols |= set(free_unbacked_symbols(one))
            if node.target is torch.ops.aten._assert_scalar.default:
                known |= _asserted_symbol(node.args[0])
            packet = getattr(node.target, "overloadpacket", None)
            sized = sized or packet in _SIZED or (packet is _INDEX and _has_mask(node))
        return cls(shapes, numbers, dtypes, known, frozenset(symbols), sized)


_SIZED = {
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten._unique2,
    torch.ops.aten.repeat_interleave,
}
_INDEX = torch.ops.aten.index


def _has_mask(node: torch.fx.Node) -> bool:
    indices: Any = node.args[1]
    kinds = [one.meta["val"].dtype for one in indices if isinstance(one, torch.fx.Node)]
    return torch.bool in kinds or torch.uint8 in kinds


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _asserted_symbol(condition: Any) -> dict[Any, int]:
    """Returns the symbol that an assertion fixes to a number, if it does."""
    if not isinstance(condition, torch.fx.Node) or condition.target is not operator.eq:
        return {}
    for one, other in (condition.args, condition.args[::-1]):
        value = one.meta.get("val") if isinstance(one, torch.fx.Node) else None
        if isinstance(value, torch.SymInt) and type(other) is int:
            expression = _expression(value)
            if isinstance(expression, sympy.Symbol):
                return {expression: other}
    return {}


class _Rewriter:
    """One graph on its way.

    Attributes:
        calls: The new calls.
        rows: By the name of an array with padding: in which dimension, and its symbol.
        most: Symbol -> the number of rows with padding.
        counts: Symbol -> the name of how many rows count.
        renamed: Results that are other ones now.
    """

    def __init__(self, graph: Graph, facts: _Facts) -> None:
        self.graph = graph
        self.facts = facts
        self.calls: list[Call] = []
        self.shapes = dict(facts.shapes)
        self.numbers = dict(facts.numbers)
        self.dtypes = dict(facts.dtypes)
        self.rows: dict[str, tuple[int, Any]] = {}
        self.most: dict[Any, int] = {}
        self.counts: dict[Any, Ref] = {}
        self.masks: dict[tuple[Any, Any], Ref] = {}
        self.renamed: dict[str, Any] = {}
        self.made = 0
        self.at: Call | None = None

    def done(self) -> Graph:
        for call in self.graph.calls:
            self.at = call
            self._rewrite(_replace(call, self.renamed))
        outputs = _rename(self.graph.outputs, self.renamed)
        for name in _names(outputs):
            if name in self.rows:
                raise _Remains(name)
        return Graph(self.graph.inputs, self.calls, outputs, self.graph.kinds)

    # --- helpers ----------------------------------------------------------------------------------

    def add(
        self, op: str, *args: Any, shape: _Sizes | None = None, dtype: str = "", **kw: Any
    ) -> Ref:
        """Adds a call, and gives what stands for its result."""
        self.made += 1
        assert self.at is not None
        name = f"{self.at.name}_static_{self.made}"
        result = () if shape is None else ((dtype, tuple(shape)),)
        self.calls.append(Call(name, op, args, kw, self.at.module, self.at.source, result))
        if shape is not None:
            self.shapes[name] = tuple(shape)
            self.dtypes[name] = dtype
        return Ref(name)

    def size(self, expression: Any) -> int:
        """Returns a size, with padding."""
        if isinstance(expression, int):
            return expression
        found = sympy.sympify(expression).subs(self.facts.known).subs(self.most)
        if not found.is_Integer:
            raise _Remains(str(expression))
        return int(found)

    def unknowns(self, expression: Any) -> set[Any]:
        """Returns the symbols in a size that depend on values and are not asserted."""
        if isinstance(expression, int):
            return set()
        found: set[Any] = sympy.sympify(expression).free_symbols & self.facts.symbols
        return found - set(self.facts.known)

    def sizes(self, shape: _Sizes) -> tuple[int, ...]:
        return tuple(self.size(one) for one in shape)

    def padded_dim(self, shape: _Sizes) -> tuple[int, Any] | None:
        """Tells which dimension has padding, and how many of its rows count."""
        found = []
        for dim, size in enumerate(shape):
            left = self.unknowns(size)
            if left:
                found.append((dim, size, left))
        if not found:
            return None
        if len(found) > 1 or len(found[0][2]) > 1:
            raise _Remains("several such sizes in one array")
        dim, size, left = found[0]
        symbol = next(iter(left))
        if symbol not in self.most:
            raise _Remains(str(symbol))
        if not (size / symbol).is_Integer:
            raise _Remains(str(size))
        return dim, size

    def count(self, expression: Any) -> Ref:
        """Returns how many rows count, as a number."""
        symbol = next(iter(expression.free_symbols))
        times = int(expression / symbol)
        one = self.counts[symbol]
        if times == 1:
            return one
        found = self.add("sym::mul", one, times)
        self.numbers[found.name] = expression
        return found

    def mask(self, expression: Any) -> Ref:
        """Tells which rows count, as a row of bools."""
        key = expression, "mask"
        if key not in self.masks:
            rows = self.size(expression)
            places = self.add("aten::arange.default", rows, shape=(rows,), dtype="int64")
            counts = self.count(expression)
            self.masks[key] = self.add(
                "aten::lt.Scalar", places, counts, shape=(rows,), dtype="bool"
            )
        return self.masks[key]

    def _positions(self, mask: Ref, count: int) -> list[Ref]:
        """Returns the indices of the elements that are not zero, one row per dimension."""
        shape = self._static(mask)
        found = self.add(
            "aten::nonzero_static.default", mask, size=count, fill_value=0,
            shape=(count, len(shape)), dtype="int64",
        )  # fmt: skip
        return [
            self.add("aten::select.int", found, 1, dim, shape=(count,), dtype="int64")
            for dim in range(len(shape))
        ]

    def _static(self, ref: Ref) -> tuple[int, ...]:
        shape = self.shapes.get(ref.name)
        if shape is None or ref.name in self.rows:
            raise _Remains(ref.name)
        return self.sizes(shape)

    def _count_true(self, mask: Ref) -> Ref:
        hit = self.add("aten::ne.Scalar", mask, 0, shape=self._static(mask), dtype="bool")
        total = self.add("aten::sum.default", hit, shape=(), dtype="int64")
        return self.add("aten::item.default", total)

    # --- calls ------------------------------------------------------------------------------------

    def _rewrite(self, call: Call) -> None:
        name = call.op.partition("::")[2].partition(".")[0]
        if call.graphs():
            if self._padded_refs(call):
                raise _Remains(call.op)
            return self._keep(call)
        if call.op.startswith(("sym::", "aten::_assert", "aten::item", "aten::_local")):
            return self._number(call)
        if call.op == "aten::sym_size.int":
            return self._size_of(call)
        if call.op == "sym::getitem" or not call.op.startswith("aten::"):
            return self._plain(call, name)
        if (source := getattr(self, f"_source_{name}", None)) is not None and source(call):
            return None
        return self._plain(call, name)

    def _keep(self, call: Call) -> None:
        """Adds a call with the sizes of its results as numbers; notes which of them is padded."""
        shape = self.facts.shapes.get(call.name)
        result = call.result
        if shape is not None:
            if (padded := self.padded_dim(shape)) is not None:
                self.rows[call.name] = padded
            if any(isinstance(size, str) for _, one in result for size in one):
                self._refuse_reads(call)
            if call.result:
                result = ((call.result[0][0], tuple(map(self._as_size, shape))),)
        elif any(isinstance(size, str) for _, one in result for size in one):
            result = tuple((kind, self._named_shape(one)) for kind, one in result)
        self.calls.append(dataclasses.replace(call, result=result))

    def _refuse_reads(self, call: Call) -> None:
        """Refuses sizes made of numbers read from arrays, also where torch knows those."""
        for name in call.refs():
            expression = self.numbers.get(name)
            if expression is not None and self.unknowns(expression) - set(self.most):
                raise _Remains(call.op)

    def _as_size(self, expression: Any) -> int | str:
        """Returns a number, or the name of a size that varies with the inputs."""
        if isinstance(expression, int):
            return expression
        if sympy.sympify(expression).free_symbols & self.facts.symbols:
            return self.size(expression)
        return int(expression) if expression.is_Integer else str(expression)

    def _named_shape(self, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        by_name = {str(symbol): symbol for symbol in self.facts.symbols}
        return tuple(
            s
            if isinstance(s, int) or not any(name in s for name in by_name)
            else self.size(sympy.sympify(s, locals=by_name))
            for s in shape
        )

    def _padded_refs(self, call: Call) -> list[str]:
        return [name for name in call.refs() if name in self.rows]

    def _number(self, call: Call) -> None:
        """Emits a call that computes with numbers: with the counts, as it is written."""
        if call.op == "sym::getitem":
            return self._plain(call, "getitem")
        if self._padded_refs(call):
            raise _Remains(call.op)
        self.calls.append(call)
        return None

    def _size_of(self, call: Call) -> None:
        array, dim = call.args[0].name, call.args[1]
        padded = self.rows.get(array)
        if padded is not None and dim % len(self.shapes[array]) == padded[0]:
            self.renamed[call.name] = self.count(padded[1])
            return
        self.calls.append(call)

    def _plain(self, call: Call, name: str) -> None:
        """Emits a call whose operands may have padding, if it can bear that."""
        call = self._with_sizes(call, name)
        padded = self._padded_refs(call)
        if padded:
            bears = getattr(self, f"_bears_{name}", None)
            if bears is not None:
                if (new := bears(call)) is None:
                    return
                call = new
            elif not self._is_row_by_row(call, name):
                raise _Remains(call.op)
        self._keep(call)

    def _with_sizes(self, call: Call, name: str) -> Call:
        """Replaces what stands for known numbers, and sizes with padding, by numbers."""

        def number(value: Any, *, is_size: bool) -> Any:
            if isinstance(value, tuple):
                return tuple([number(inner, is_size=is_size) for inner in value])
            expression = self.numbers.get(value.name) if isinstance(value, Ref) else None
            if expression is None or isinstance(expression, int):
                return value if expression is None else expression
            unknown = self.unknowns(expression)
            if unknown & set(self.most):
                if not is_size and not _is_pointwise(call.op):
                    raise _Remains(call.op)
                return self.size(expression) if is_size else value
            if unknown or not sympy.sympify(expression).free_symbols & self.facts.symbols:
                return value
            return self.size(expression)

        at = _SIZES.get(name)
        if name == "arange" and (call.op == "aten::arange.default" or call.args[0] == 0):
            at = 1 if len(call.args) == 2 else 0  # behind a step nothing is known of the end
        if name == "slice" and call.args[0].name in self.rows:
            at = 3
        args = tuple([number(v, is_size=i == at) for i, v in enumerate(call.args)])
        kwargs = {key: number(value, is_size=False) for key, value in call.kwargs.items()}
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    def _is_row_by_row(self, call: Call, name: str) -> bool:
        """Tells whether each row of the result depends on that row of the operands alone."""
        shape = self.facts.shapes.get(call.name)
        target = self.padded_dim(shape) if shape is not None else None
        operands = [(n, *self.rows[n]) for n in self._padded_refs(call)]
        if name == "getitem":
            return True
        if name in _ROW_BY_ROW or _is_pointwise(call.op):
            # from the end, as shapes are matched
            return target is not None and all(
                dim - len(self.shapes[n]) == target[0] - len(shape or ()) and size == target[1]
                for n, dim, size in operands
            )
        first = next(iter(call.refs()), None)
        if name == "cat":
            dim = _dim_of(call, name, len(shape or ()))[0]
            own = [ref.name for ref in call.args[0]]
            return target is not None and all(
                n in self.rows and self.rows[n] == target and target[0] != dim for n in own
            )
        if name in _BY_BATCH:
            tensors = [ref.name for ref in call.args if isinstance(ref, Ref)]
            if name in ("scaled_dot_product_attention", "bmm"):
                return target == (0, operands[0][2]) and all(
                    self.rows.get(n) == target for n in tensors
                )
            return len(operands) == 1 and operands[0][0] == first and operands[0][1] == 0
        if len(operands) != 1 or operands[0][0] != first:
            return False
        array, dim, _ = operands[0]
        rank = len(self.shapes[array])
        if name in _MOVES:
            return target is not None and target[1] == operands[0][2]
        if name in _SHAPES:
            return self._keeps_prefix(self.shapes[array], shape or (), dim, target)
        if name in ("linear", "mm", "matmul"):
            return dim != rank - 1 and target is not None
        if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
            return dim < rank - len(call.args[1])
        if name == "slice":
            return self._is_whole_slice(call, rank, operands[0])
        if name in ("cumsum", "cumprod"):  # those behind do not count in those before
            return True
        if name in _ALONG:
            dims = _dim_of(call, name, rank)
            return bool(dims) and dim not in dims
        return False

    def _is_whole_slice(self, call: Call, rank: int, operand: tuple[str, int, Any]) -> bool:
        _, dim, size = operand
        along = (call.args[1] if len(call.args) > 1 else 0) % rank
        if along != dim:
            return True
        start, end = (*call.args[2:], None, None)[:2]
        step = call.args[4] if len(call.args) > 4 else 1
        whole = end is None or (isinstance(end, int) and end >= min(_END, self.size(size)))
        return start in (None, 0) and whole and step == 1

    def _keeps_prefix(self, old: _Sizes, new: _Sizes, dim: int, target: Any) -> bool:
        """Tells whether the rows that count come first in the other shape, too."""
        if target is None:
            return False
        before, after = self.sizes(old[:dim]), self.sizes(new[: target[0]])
        return math.prod(before) == math.prod(after)

    # --- where such rows come from ----------------------------------------------------------------

    def _enter(self, call: Call, mask: Ref, size: Any) -> int:
        """Returns how many rows a call gets that has as many as a mask has true elements."""
        if not self.unknowns(size):
            self._assert_size(self._count_true(mask), self.size(size))
            return self.size(size)
        most = math.prod(self._static(mask))
        if not isinstance(size, sympy.Symbol) or not most:
            raise _Remains(call.op)
        if size not in self.most:
            self.most[size] = most
            self.counts[size] = self._count_true(mask)
            self.numbers[self.counts[size].name] = size
        return self.most[size]

    def _assert_size(self, found: Ref, wanted: int) -> None:
        """Asserts that a size that depends on values is the number that results are made of."""
        self._assert(
            self.add("sym::eq", found, wanted), f"a size that depends on values is {wanted}"
        )

    def _source_nonzero(self, call: Call) -> bool:
        mask = call.args[0]
        count = self._enter(call, mask, self.facts.shapes[call.name][0])
        self._keep(
            dataclasses.replace(
                call,
                op="aten::nonzero_static.default",
                kwargs={"size": count, "fill_value": 0},
            )
        )
        return True

    _source_argwhere = _source_nonzero

    def _source_masked_select(self, call: Call) -> bool:
        x, mask = call.args
        shape = self._static(x)
        if self._static(mask) != shape:
            mask = self.add("aten::expand.default", mask, shape, shape=shape, dtype="bool")
        count = self._enter(call, mask, self.facts.shapes[call.name][0])
        self._keep(
            dataclasses.replace(
                call, op="aten::index.Tensor", args=(x, tuple(self._positions(mask, count)))
            )
        )
        return True

    def _source_index(self, call: Call) -> bool:
        """Replaces an index with a mask by the places of its true elements."""
        x, indices = call.args
        masks = [one for one in indices if one is not None and self._is_mask(one)]
        if not masks:
            return False
        if len(masks) > 1 or any(one is not None for one in indices if one not in masks):
            raise _Remains(call.op)
        (mask,) = masks
        if x.name in self.rows or mask.name in self.rows:
            raise _Remains(call.op)
        dim = indices.index(mask)
        count = self._enter(call, mask, self.facts.shapes[call.name][dim])
        places = self._positions(mask, count)
        found = (*indices[:dim], *places, *indices[dim + 1 :])
        self._keep(dataclasses.replace(call, args=(x, found)))
        return True

    def _is_mask(self, ref: Ref) -> bool:
        return self._dtype(ref) in ("bool", "uint8")

    def _dtype(self, ref: Ref) -> str:
        return self.dtypes[ref.name]

    def _source_unique_consecutive(self, call: Call) -> bool:
        """Takes the number of runs, where that is asserted."""
        return self._unique(call, "fmapper::unique_consecutive.static", call.args[0])

    def _source__unique2(self, call: Call) -> bool:
        """Takes the number of values in order, where that is asserted."""
        x = call.args[0]
        shape = (math.prod(self._static(x)),)
        dtype = self._dtype(x)
        row = self.add("aten::view.default", x, shape, shape=shape, dtype=dtype)
        both = self.add("aten::sort.default", row, 0)
        row = self.add("sym::getitem", both, 0, shape=shape, dtype=dtype)
        return self._unique(call, "fmapper::unique.static", row)

    def _unique(self, call: Call, op: str, x: Ref) -> bool:
        dims = (*call.args[3:], call.kwargs.get("dim")) if "consecutive" in op else ()
        if (
            self._padded_refs(call)
            or len(self.shapes[x.name]) != 1
            or any(d is not None for d in dims)
        ):
            raise _Remains(call.op)
        size = self._named_shape(call.result[0][1])[0]
        rows = self._static(x)[0]
        if not isinstance(size, int) or not rows:
            raise _Remains(call.op)
        kind, short = self._dtype(x), (rows - 1,)
        later = self.add("aten::slice.Tensor", x, 0, 1, rows, shape=short, dtype=kind)
        sooner = self.add("aten::slice.Tensor", x, 0, 0, rows - 1, shape=short, dtype=kind)
        other = self.add("aten::ne.Tensor", later, sooner, shape=short, dtype="bool")
        total = self.add("aten::sum.default", other, shape=(), dtype="int64")
        self._assert_size(self.add("aten::item.default", total), size - 1)
        self._keep(dataclasses.replace(call, op=op, kwargs={**call.kwargs, "size": size}))
        return True

    def _source_repeat_interleave(self, call: Call) -> bool:
        """Takes the number of rows, where that is asserted."""
        repeats = call.args[:2][-1]
        if (
            not isinstance(repeats, Ref)
            or repeats.name not in self.shapes
            or self._padded_refs(call)
        ):
            return False
        if call.kwargs.get("output_size") is not None:
            return False
        dim = call.args[2] if len(call.args) > 2 and call.args[2] is not None else 0
        size = self.facts.shapes[call.name][dim]
        if self.unknowns(size) or math.prod(self._static(repeats)) == 1:
            raise _Remains(call.op)
        total = self.add("aten::sum.default", repeats, shape=(), dtype="int64")
        self._assert_size(self.add("aten::item.default", total), self.size(size))
        kwargs = {**call.kwargs, "output_size": self.size(size)}
        self._keep(dataclasses.replace(call, kwargs=kwargs))
        return True

    # --- where they go ----------------------------------------------------------------------------

    def _bears_masked_scatter(self, call: Call) -> Call | None:
        """Takes the elements that count, which come first: as many as the mask has true ones."""
        x, mask, source = call.args
        dim, size = self.rows.get(source.name, (1, 0))
        if dim != 0 or x.name in self.rows or mask.name in self.rows:
            raise _Remains(call.op)
        shape = self.facts.shapes[call.name]
        whole = self.add(
            "aten::expand.default", mask, self.sizes(shape), shape=self.sizes(shape), dtype="bool"
        )
        wanted = self._count_true(whole)
        row = math.prod(self.sizes(self.shapes[source.name][1:]))
        have = self.add("sym::mul", self.count(size), row)
        self._assert(self.add("sym::le", wanted, have), "masked_scatter has too few elements")
        return call

    def _assert(self, condition: Ref, message: str) -> None:
        self.add("aten::_assert_scalar.default", condition, message)

    def _bears_index(self, call: Call) -> Call | None:
        """Returns rows that are taken: those behind are taken from the first place."""
        x, indices = call.args
        own = [one for one in indices if one is not None]
        if any(self._is_mask(one) for one in own):
            raise _Remains(call.op)
        shape = self.facts.shapes[call.name]
        if x.name not in self.rows:  # indices with padding, all of them rows of it
            sizes = {self.rows[one.name] for one in own if one.name in self.rows}
            ranks = {len(self.shapes[one.name]) for one in own if one.name in self.rows}
            if len(sizes) != 1 or len(ranks) != 1:
                raise _Remains(call.op)
            for one in own:  # others are matched from the end: none may be of a higher rank
                if len(self.shapes[one.name]) > max(ranks):
                    raise _Remains(call.op)
            if self.padded_dim(shape) is None:
                raise _Remains(call.op)
            return call
        dim, size = self.rows[x.name]
        if any(one.name in self.rows for one in own):
            raise _Remains(call.op)
        target = self.padded_dim(shape)
        if target is None:  # rows that are taken by places which count
            return call
        if target[1] != size or indices[dim : dim + 1] not in ((), (None,)):
            raise _Remains(call.op)
        return call

    def _bears_index_select(self, call: Call) -> Call | None:
        x, _, index = call.args
        if x.name in self.rows or index.name not in self.rows:
            raise _Remains(call.op)
        return call

    def _bears_embedding(self, call: Call) -> Call | None:
        if call.args[0].name in self.rows:
            raise _Remains(call.op)
        return call

    def _bears_gather(self, call: Call) -> Call | None:
        x, dim, index = call.args[:3]
        own = self.rows.get(x.name), self.rows.get(index.name)
        if own[0] is None or own[0] != own[1] or own[0][0] == dim % len(self.shapes[x.name]):
            raise _Remains(call.op)
        return call

    def _bears_addmm(self, call: Call) -> Call | None:
        bias, a, b = call.args[:3]
        if bias.name in self.rows or b.name in self.rows or self.rows[a.name][0] != 0:
            raise _Remains(call.op)
        return call

    def _bears_sum(self, call: Call) -> Call | None:
        """Returns a sum over such rows: of those that count."""
        array = call.args[0].name
        rank = len(self.shapes[array])
        dims = _dim_of(call, "sum", rank)
        if dims and self.rows[array][0] not in dims:
            return call
        return dataclasses.replace(call, args=(self._zero_padding(call.args[0]), *call.args[1:]))

    def _bears_any(self, call: Call) -> Call | None:
        return self._bears_sum(call)

    def _zero_padding(self, ref: Ref) -> Ref:
        """Returns the array with zeros for padding."""
        dim, size = self.rows[ref.name]
        shape = self.sizes(self.shapes[ref.name])
        mask = self.mask(size)
        if len(shape) > 1:
            sides = tuple(-1 if i == dim else 1 for i in range(len(shape)))
            flat = tuple(shape[dim] if i == dim else 1 for i in range(len(shape)))
            mask = self.add("aten::view.default", mask, sides, shape=flat, dtype="bool")
        dtype = self._dtype(ref)
        zero = self.add("aten::zeros_like.default", ref, shape=shape, dtype=dtype)
        return self.add("aten::where.self", mask, ref, zero, shape=shape, dtype=dtype)

    def _beyond(self, index: Ref, size: int) -> Ref:
        """Returns indices, which lead to a place behind the last one for padding."""
        rank = len(self.shapes[index.name])
        if rank != 1:
            raise _Remains("indices of several dimensions")
        rows = self.sizes(self.shapes[index.name])
        mask = self.mask(self.rows[index.name][1])
        kind = self._dtype(index)
        negative = self.add("aten::lt.Scalar", index, 0, shape=rows, dtype="bool")
        shifted = self.add("aten::add.Tensor", index, size, shape=rows, dtype=kind)
        plain = self.add("aten::where.self", negative, shifted, index, shape=rows, dtype=kind)
        last = self.add("aten::full_like.default", index, size, shape=rows, dtype=kind)
        return self.add("aten::where.self", mask, plain, last, shape=rows, dtype=kind)

    def _with_place(self, call: Call, x: Ref, dim: int) -> tuple[Ref, Callable[[Call], None]]:
        """Returns an array with one more place at the end, and what removes that from a result."""
        shape = self._static(x)
        longer = (*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])
        pads = [0, 0] * (len(shape) - 1 - dim) + [0, 1]
        dtype = self._dtype(x)
        op = "aten::constant_pad_nd.default"
        padded = self.add(op, x, tuple(pads), 0, shape=longer, dtype=dtype)

        def finish(inner: Call) -> None:
            found = self.add(inner.op, *inner.args, shape=longer, dtype=dtype, **inner.kwargs)
            args = (found, dim, 0, shape[dim])
            self._keep(dataclasses.replace(call, op="aten::slice.Tensor", args=args, kwargs={}))

        return padded, finish

    def _bears_index_add(self, call: Call) -> Call | None:
        """Returns rows that are added, or put: padding goes to a place of its own."""
        x, dim, index, source = call.args[:4]
        dim %= max(len(self.shapes[x.name]), 1)
        own = {self.rows.get(index.name), self.rows.get(source.name)}
        if x.name in self.rows or index.name not in self.rows or self.rows[index.name][0] != 0:
            raise _Remains(call.op)
        if self.rows.get(source.name) != (dim, self.rows[index.name][1]):
            raise _Remains(f"{call.op}: {own}")
        shape = self._static(x)
        padded, finish = self._with_place(call, x, dim)
        places = self._beyond(index, shape[dim])
        args = (padded, dim, places, source, *call.args[4:])
        finish(dataclasses.replace(call, args=args))
        return None

    _bears_index_copy = _bears_index_add

    def _bears_index_put(self, call: Call) -> Call | None:
        x, indices, values = call.args[:3]
        own = [one for one in indices if one is not None]
        if x.name in self.rows:
            raise _Remains(call.op)
        if len(own) == 1 and self._is_mask(own[0]):
            return self._put_by_mask(call)
        first = indices.index(own[0])
        padded = [one for one in own if one.name in self.rows]
        if not padded or any(len(self.shapes[one.name]) != 1 for one in own):
            raise _Remains(call.op)
        size = self.rows[padded[0].name][1]
        if any(self.rows[one.name][1] != size for one in padded):
            raise _Remains(call.op)
        given = self.rows.get(values.name)
        rank = len(self.shapes[values.name])
        if given is None and rank and self.sizes(self.shapes[values.name])[0] != 1:
            raise _Remains(call.op)  # values that are matched with rows have their number
        if given is not None and (given != (0, size) or first != 0):
            raise _Remains(call.op)
        at = next(i for i, one in enumerate(indices) if one in padded)
        shape = self._static(x)
        longer, finish = self._with_place(call, x, at)
        places = self._beyond(indices[at], shape[at])
        found = (*indices[:at], places, *indices[at + 1 :])
        finish(dataclasses.replace(call, args=(longer, found, *call.args[2:])))
        return None

    def _put_by_mask(self, call: Call) -> Call | None:
        """Returns rows in the places where a mask holds, one after the other: both are as many."""
        x, indices, values = call.args[:3]
        mask = next(one for one in indices if one is not None)
        if indices.index(mask) != 0 or mask.name in self.rows or any(call.args[3:]):
            raise _Remains(call.op)
        if self.rows.get(values.name, (1,))[0] != 0:
            raise _Remains(call.op)
        size = self.rows[values.name][1]
        rows, marked = self.size(size), self._static(mask)
        same = self.add("sym::eq", self._count_true(mask), self.count(size))
        self._assert(same, "as many rows are put as there are places for them")
        most = math.prod(marked)
        shape = self._static(x)
        flat = (most, *shape[len(marked) :])
        dtype = self._dtype(x)
        row = self.add("aten::view.default", mask, (most,), shape=(most,), dtype="bool")
        order = self.add("aten::cumsum.default", row, 0, shape=(most,), dtype="int64")
        order = self.add("aten::sub.Tensor", order, 1, shape=(most,), dtype="int64")
        order = self.add("aten::clamp.default", order, 0, rows - 1, shape=(most,), dtype="int64")
        taken = self.add("aten::index.Tensor", values, (order,), shape=flat, dtype=dtype)
        taken = self.add("aten::view.default", taken, shape, shape=shape, dtype=dtype)
        sides = (*marked, *[1] * (len(shape) - len(marked)))
        wide = self.add("aten::view.default", mask, sides, shape=sides, dtype="bool")
        self._keep(
            dataclasses.replace(call, op="aten::where.self", args=(wide, taken, x), kwargs={})
        )
        return None


def _is_pointwise(op: str) -> bool:
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None)
    return isinstance(found, _OVERLOAD) and torch.Tag.pointwise in found.tags


def _dim_of(call: Call, name: str, rank: int) -> tuple[int, ...]:
    """Returns the dimensions that a call brings together, or cuts; none where it names none."""
    at = _ALONG[name]
    value = call.args[at] if len(call.args) > at else call.kwargs.get("dim", _DEFAULT_DIM.get(name))
    if value is None or isinstance(value, bool | float | DType):
        return ()
    dims = value if isinstance(value, tuple) else (value,)
    return tuple(dim % max(rank, 1) for dim in dims if isinstance(dim, int))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for inner in value:
            yield from _names(inner)
    elif isinstance(value, Mapping):
        yield from _names(tuple(value.values()))


def _rename(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return known.get(value.name, value)
    if isinstance(value, tuple):
        return tuple(_rename(inner, known) for inner in value)
    if isinstance(value, Mapping):
        return {key: _rename(inner, known) for key, inner in value.items()}
    return value


def _replace(call: Call, known: Mapping[str, Any]) -> Call:
    if not known:
        return call
    return dataclasses.replace(
        call, args=_rename(call.args, known), kwargs=_rename(call.kwargs, known)
    )
