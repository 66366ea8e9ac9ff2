"""Canonicalizes operations of torch: variants of an operation become that operation.

torch would do this by tracing a recorded program twice more, which takes longer than recording. But
most changes only rename views, casts and flags, or concern in-place changes that nothing else sees.
`from_fx/forms.py` decides whether this is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fmapper.programs import Call, DType, Graph, Program, Ref, substitute

Kind = tuple[str, tuple[Any, ...]]
WITHOUT_GRADIENTS = "higher_order::wrap_with_set_grad_enabled"


def one_form(program: Program, ops: Collection[str]) -> Program:
    """Rewrites some operations of a program to their canonical form.

    Args:
        program: The program.
        ops: The operations. Calls without gradients are inlined as well.
    """
    if not ops:
        return program
    kinds = {
        name: (entry.dtype, entry.shape)
        for name, entry in zip(program.graph.inputs, program.inputs, strict=True)
    }
    return replace(program, graph=_Writer(ops, kinds).graph(program.graph))


class _Writer:
    """Rewrites a graph.

    Attributes:
        kinds: dtype and shape of each array so far.
        names: The new names of results that were dropped or changed in place.
    """

    def __init__(self, ops: Collection[str], kinds: dict[str, Kind]) -> None:
        self.ops = ops
        self.kinds = kinds
        self.names: dict[str, Any] = {}
        self._calls: list[Call] = []
        self._at: Call | None = None

    def graph(self, graph: Graph) -> Graph:
        graph = inline(graph)
        for call in graph.calls:
            self._call(replace(call, args=self._now(call.args), kwargs=self._now(call.kwargs)))
        return Graph(graph.inputs, self._calls, self._now(graph.outputs), graph.kinds)

    def add(self, op: str, *args: Any, of: Sequence[Kind] = (), **kwargs: Any) -> Ref:
        """Adds a call before the rewritten one; `of` lists the kinds of its results."""
        assert self._at is not None
        name = f"{self._at.name}_form_{len(self._calls)}"
        call = replace(self._at, name=name, op=op, args=args, kwargs=kwargs)
        self._keep(replace(call, result=tuple(of)))
        return Ref(name)

    def sizes(self, x: Ref, dims: Iterable[int]) -> tuple[int | Ref, ...]:
        """Returns sizes of an array, and adds calls that read varying ones."""
        shape = self.kinds[x.name][1]
        return tuple(
            shape[dim] if isinstance(shape[dim], int) else self.add("aten::sym_size.int", x, dim)
            for dim in dims
        )

    def _call(self, call: Call) -> None:
        form = FORMS.get(call.op) if call.op in self.ops else None
        if form is None:
            return self._keep(call)
        self._at = call
        result = form(self, call)
        if isinstance(result, Ref):
            self.names[call.name] = result
            return None
        self._keep(result)
        if call.op in IN_PLACE:
            self._rename(call.args[0], Ref(call.name))
        return None

    def _keep(self, call: Call) -> None:
        if len(call.result) == 1:
            self.kinds[call.name] = call.result[0]
        self._calls.append(call)

    def _rename(self, old: Ref, new: Ref) -> None:
        """Renames a value that was changed in place, under each of its names, for later calls."""
        self.names = {name: new if ref == old else ref for name, ref in self.names.items()}
        self.names[old.name] = new

    def _now(self, value: Any) -> Any:
        return substitute(value, self.names)


def inline(graph: Graph) -> Graph:
    """Inlines calls without gradients into a graph, and marks where gradients end."""
    calls: list[Call] = []
    names: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for old in graph.calls:
        call = replace(old, args=substitute(old.args, names), kwargs=substitute(old.kwargs, names))
        if call.op == WITHOUT_GRADIENTS:
            inner = inline(call.args[1])
            values: dict[str, Any] = dict(zip(inner.inputs, call.args[2:], strict=True))
            for nested in inner.calls:
                name = f"{call.name}_{nested.name}"
                args, kwargs = substitute(nested.args, values), substitute(nested.kwargs, values)
                calls.append(replace(nested, name=name, args=args, kwargs=kwargs))
                values[nested.name] = Ref(name)
            results[call.name] = substitute(inner.outputs, values)
        elif call.op == "sym::getitem" and call.args[0].name in results:
            names[call.name] = results[call.args[0].name][call.args[1]]
        else:
            calls.append(call)
    return Graph(graph.inputs, calls, substitute(graph.outputs, names), graph.kinds)


# --- the forms: a call's replacement, or the result that it equals --------------------------------


Form = Callable[[_Writer, Call], Call | Ref]


def _as(op: str) -> Form:
    return lambda writer, call: replace(call, op=op)


def _same(writer: _Writer, call: Call) -> Ref:
    x: Ref = call.args[0]
    return x


def _fill(number: int) -> Form:
    def full(writer: _Writer, call: Call) -> Call:
        dtype = DType(call.result[0][0])
        return _write(call, "aten::full.default", call.args[0], number, dtype=dtype)

    return full


def _write(call: Call, op: str, *args: Any, **kwargs: Any) -> Call:
    return replace(call, op=op, args=args, kwargs=kwargs)


def _arange(writer: _Writer, call: Call) -> Call:
    bounds = call.args if len(call.args) == 2 else (0, *call.args)
    return replace(call, op="aten::arange.start_step", args=bounds)


def _cast(writer: _Writer, call: Call) -> Call | Ref:
    x, dtype = call.args[0], call.result[0][0]
    if writer.kinds[x.name][0] == dtype:
        unchanged: Ref = x
        return unchanged
    return _write(call, "aten::_to_copy.default", x, dtype=DType(dtype))


def _transpose(writer: _Writer, call: Call) -> Call:
    x, *pair = call.args
    order = list(range(len(call.result[0][1])))
    first, second = pair or (0, 1)
    order[first], order[second] = order[second], order[first]
    return _write(call, "aten::permute.default", x, tuple(order))


def _reshape(writer: _Writer, call: Call) -> Call:
    shape = call.result[0][1]
    if not _is_fixed(shape):
        shape = call.args[1]
    return _write(call, "aten::view.default", call.args[0], shape)


def _flatten(writer: _Writer, call: Call) -> Call:
    x, *ends = call.args
    shape: tuple[Any, ...] = call.result[0][1]
    if not _is_fixed(shape):
        old = writer.kinds[x.name][1]
        first, last = (end % max(len(old), 1) for end in (*ends, *(0, -1)[len(ends) :]))
        before, after = range(first), range(last + 1, len(old))
        size = shape[first]
        flat = size if isinstance(size, int) else -1
        shape = (*writer.sizes(x, before), flat, *writer.sizes(x, after))
    return _write(call, "aten::view.default", x, shape)


def _is_fixed(shape: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _split(writer: _Writer, call: Call) -> Call:
    dim = call.args[2] if len(call.args) > 2 else 0
    sizes = tuple(shape[dim] for _, shape in call.result)
    return _write(
        call, "aten::split_with_sizes.default", call.args[0], sizes, *([dim] if dim else [])
    )


def _squeeze(writer: _Writer, call: Call) -> Call:
    x, *dim = call.args
    dims = tuple(dim) or tuple(range(len(writer.kinds[x.name][1])))
    return _write(call, "aten::squeeze.dims", x, dims)


def _choose(writer: _Writer, call: Call) -> Call:
    """Emits `where` with a number as one of the two cases."""
    dtype, _ = call.result[0]
    where, *both = call.args
    kind = DType(dtype)
    refs = [
        x if isinstance(x, Ref) else
        writer.add("aten::scalar_tensor.default", x, of=[(dtype, ())], dtype=kind)
        for x in both
    ]  # fmt: skip
    kinds = [writer.kinds[ref.name] for ref in refs]
    wide = [
        ref if current == dtype else
        writer.add("aten::_to_copy.default", ref, of=[(dtype, shape)], dtype=kind)
        for ref, (current, shape) in zip(refs, kinds, strict=True)
    ]  # fmt: skip
    return _write(call, "aten::where.self", where, *wide)


def _stack(writer: _Writer, call: Call) -> Call:
    parts, dim = (*call.args, 0)[:2]
    dtype, shape = call.result[0]
    at = dim % len(shape)
    if at == len(shape) - 1 or not _is_fixed(shape):
        single = (*shape[:at], 1, *shape[at + 1 :])
        wide = tuple(
            writer.add("aten::unsqueeze.default", x, at, of=[(writer.kinds[x.name][0], single)])
            for x in parts
        )
        return _write(call, "aten::cat.default", wide, *([dim] if dim else []))
    flat = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    joined = writer.add("aten::cat.default", parts, *([at] if at else []), of=[(dtype, flat)])
    return _write(call, "aten::view.default", joined, shape)


def _normalise(writer: _Writer, call: Call) -> Call:
    x, weight, bias, mean, variance, _, momentum, eps, *_ = call.args
    args = x, weight, bias, mean, variance, momentum, eps
    nothing = ("float32", (0,))
    return _first(
        writer, call, "aten::_native_batch_norm_legit_no_training.default", args, nothing, nothing
    )


def _pool(writer: _Writer, call: Call) -> Call:
    places = ("int64", call.result[0][1])
    return _first(writer, call, "aten::max_pool2d_with_indices.default", call.args, places)


def _first(writer: _Writer, call: Call, op: str, args: tuple[Any, ...], *others: Kind) -> Call:
    """Returns the first result of an operation that has several."""
    several = writer.add(op, *args, of=[call.result[0], *others])
    return _write(call, "sym::getitem", several, 0)


def _subtract(writer: _Writer, call: Call) -> Call:
    x, number = call.args
    return _write(call, "aten::sub.Tensor", number, x)


# In-place changes of some elements -> the operations that return the changed array.
WRITES = {
    f"aten::{name}_.default": f"aten::{name}.default"
    for name in ("index_add", "index_copy", "index_put")
}
IN_PLACE = WRITES | {
    f"aten::{name}_.{overload}": f"aten::{name}.{overload}"
    for names, overload in (
        ("add sub mul div", "Tensor"),
        ("relu silu sigmoid tanh hardtanh hardswish leaky_relu", "default"),
        ("masked_fill", "Scalar"),
    )
    for name in names.split()
}

FORMS: dict[str, Form] = {
    "aten::arange.default": _arange,
    "aten::arange.start": _arange,
    "aten::zeros.default": _fill(0),
    "aten::ones.default": _fill(1),
    "aten::lift_fresh_copy.default": _as("aten::clone.default"),
    "aten::detach_.default": _same,  # constants have no gradients
    "aten::to.device": _cast,
    "aten::to.dtype": _cast,
    "aten::to.dtype_layout": _cast,
    "aten::type_as.default": _cast,
    "aten::transpose.int": _transpose,
    "aten::t.default": _transpose,
    "aten::contiguous.default": lambda writer, call: call,  # canonical already
    "aten::reshape.default": _reshape,
    "aten::flatten.using_ints": _flatten,
    "aten::chunk.default": _split,
    "aten::split.Tensor": _split,
    "aten::squeeze.dim": _squeeze,
    "aten::squeeze.default": _squeeze,
    "aten::stack.default": _stack,
    "aten::where.ScalarOther": _choose,
    "aten::where.ScalarSelf": _choose,
    "aten::__and__.Tensor": _as("aten::bitwise_and.Tensor"),
    "aten::__or__.Tensor": _as("aten::bitwise_or.Tensor"),
    "aten::min.other": _as("aten::minimum.default"),
    "aten::max.other": _as("aten::maximum.default"),
    "aten::batch_norm.default": _normalise,
    "aten::max_pool2d.default": _pool,
    "aten::rsub.Scalar": _subtract,
    **{changing: _as(op) for changing, op in IN_PLACE.items()},
}
