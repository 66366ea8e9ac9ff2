"""Weights of linear layers in blocks of columns, which XLA reads sequentially on the CPU.

A step multiplies few rows with each weight, so its speed is that of reading the weights. torch
stores a weight as (out, in), which XLA multiplies at a fifth of the memory bandwidth. Stored as
(blocks, in, 64), with a product per block, everything is read once and in order, at two thirds of
the bandwidth. With many rows, a product is bound by arithmetic, and (in, out) as a single block is
best. So it is for weights that fit into the cache of an Intel processor, and with several
processors: XLA divides a plain product among them, but not one of blocks. On accelerators there is
no difference.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fmapper import device_info
from fmapper.backends import threads_for_memory
from fmapper.checkpoints import AddConstant, Concatenate, Pattern, Reshape, Rules, Transpose
from fmapper.generation import Generation
from fmapper.programs import Call, Graph, Lowering, Program, Ref
from fmapper_adapters.jax.arrays.host import in_large_pages
from fmapper_adapters.jax.aten.matrices.linalg import of_one_dtype
from fmapper_adapters.jax.aten.types import cast
from fmapper_adapters.jax.model.static_program import Arrays, StaticProgram

_PRODUCT = "fmapper::product_with_blocks"
_ROWS = "fmapper::rows_of_blocks"
_WIDTH = 64  # columns of a block: 32 and 128 are slower
_FEW = 12  # the most rows of a step for which blocks are faster
_CACHE = 2 << 20  # bytes in an Intel processor, which multiplies (in, out) as fast from there
_ONE_THREAD = "xla_cpu_multi_thread_eigen=false"
_MANY = 192  # the fewest rows for which blocks are joined before a product

# Operation -> the position of its weight, and whether that is (out, in).
_WEIGHTS = {
    "aten::linear.default": (1, True),
    "aten::addmm.default": (2, False),
    "aten::mm.default": (1, False),
    "aten::matmul.default": (1, False),
}
_LOOKUP = "aten::embedding.default"


class Block(NamedTuple):
    """The layout of a weight.

    Attributes:
        outputs: The number of columns.
        width: The number of columns in a block; the last block is padded with zeros.
        turned: Whether the model stores it as (out, in).
    """

    outputs: int
    width: int
    turned: bool


Layout = Mapping[str, Block]


def choose(generation: Generation, params: Arrays) -> Layout:
    """Returns the layout of the weights that are used only in products and lookups."""
    if generation.batch == 1 or not all(map(_is_on_one_cpu, params.values())):
        return {}
    turns: dict[str, bool] = {}
    others: set[str] = set()
    for program in filter(None, (generation.prefill, generation.step)):
        turned = _turn(program.graph)
        rest = _uses_otherwise(program.graph)
        for label, name in _names(program).items():
            if label in rest or len(turned.get(label, ())) > 1:
                others.add(name)
            elif label in turned:
                (is_turned,) = turned[label]
                if turns.setdefault(name, is_turned) != is_turned:
                    others.add(name)
    kept = {n: t for n, t in turns.items() if n not in others and params[n].ndim == 2}
    least = _least_in_blocks() if generation.batch <= _FEW else math.inf
    return {n: _block(params[n], t, least) for n, t in kept.items()}


def _block(weight: Any, turned: bool, least: float) -> Block:
    outputs = weight.shape[0 if turned else 1]
    is_large = weight.nbytes >= least and outputs >= 2 * _WIDTH and weight.dtype.itemsize >= 4
    return Block(outputs, _WIDTH if is_large else outputs, turned)


def _least_in_blocks() -> float:
    """Returns the size in bytes from which the processor reads weights faster in blocks."""
    is_alone = threads_for_memory() == 1 or _ONE_THREAD in os.environ.get("XLA_FLAGS", "")
    if not is_alone:
        return math.inf
    return _CACHE if "Intel" in (device_info("numpy:cpu").name or "") else 0


def _is_on_one_cpu(array: Any) -> bool:
    devices: set[Any] = getattr(array, "devices", set)()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _names(program: Program) -> dict[str, str]:
    """Returns the names of the parameters in a model by those in the graph."""
    pairs = zip(program.graph.inputs, program.inputs, strict=True)
    return {label: str(entry.target) for label, entry in pairs if entry.kind == "parameter"}


def _weight_of(call: Call) -> tuple[str, bool] | None:
    """Returns the weight that a call multiplies with, and whether it is (out, in)."""
    at, turned = _WEIGHTS.get(call.op, (0, False))
    if call.op not in _WEIGHTS or call.kwargs or not isinstance(call.args[at], Ref):
        return None
    return call.args[at].name, turned


def _turn(graph: Graph) -> dict[str, set[bool]]:
    turns: dict[str, set[bool]] = {}
    for call in graph.calls:
        weight = _weight_of(call)
        if weight is not None:
            turns.setdefault(weight[0], set()).add(weight[1])
    return turns


def _uses_otherwise(graph: Graph) -> frozenset[str]:
    """Returns the names that a graph uses other than as weights or tables."""

    def bare(call: Call) -> Call:
        at = 0 if call.op == _LOOKUP else _WEIGHTS.get(call.op, (None,))[0]
        if at is None or (call.op != _LOOKUP and _weight_of(call) is None):
            return call
        return dataclasses.replace(call, args=(*call.args[:at], None, *call.args[at + 1 :]))

    return Graph(graph.inputs, [bare(call) for call in graph.calls], graph.outputs).uses()


# --- arrays ---------------------------------------------------------------------------------------


def lay_out(params: Arrays, layout: Layout) -> Arrays:
    """Puts weights into blocks, and these into large pages of memory."""
    laid_out = {name: partial(_cut, params[name], block) for name, block in layout.items()}
    return params | in_large_pages(laid_out)


def restore(held: Arrays, layout: Layout) -> Arrays:
    """Joins the blocks of weights to the model's own weights."""
    return held | {name: _join(held[name], block) for name, block in layout.items()}


def rules(params: Arrays, layout: Layout) -> Rules:
    """Returns the rules that put weights into blocks."""
    steps: list[Any] = []
    for name, block in layout.items():
        label, pad = Pattern.escape(name), f"{Pattern.escape(name)}.padding"
        weight = params[name]
        rows = weight.shape[1 if block.turned else 0]
        missing = -block.outputs % block.width
        if block.turned:
            steps.append(Transpose(label, (1, 0)))
        if missing:
            steps.append(AddConstant(pad, (rows, missing), 0, str(weight.dtype)))
            steps.append(Concatenate([label, pad], label, 1, [block.outputs, missing]))
        steps.append(Reshape(label, (rows, -1, block.width), (rows, block.outputs + missing)))
        steps.append(Transpose(label, (1, 0, 2)))
    return Rules(steps)


@partial(jax.jit, static_argnums=1)
def _cut(weight: Any, block: Block) -> Any:
    weight = weight.T if block.turned else weight
    missing = -block.outputs % block.width
    weight = jnp.pad(weight, ((0, 0), (0, missing)))
    return weight.reshape(len(weight), -1, block.width).swapaxes(0, 1)


@partial(jax.jit, static_argnums=1)
def _join(blocks: Any, block: Block) -> Any:
    weight = _whole(blocks)[:, : block.outputs]
    return weight.T if block.turned else weight


def _whole(blocks: Any) -> Any:
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1)


# --- programs -------------------------------------------------------------------------------------


def code(original: StaticProgram, layout: Layout) -> StaticProgram:
    """Returns code that runs a program with its weights in blocks."""
    program = original.program
    blocks = {label: layout[n] for label, n in _names(program).items() if n in layout}
    if not blocks:
        return original
    calls = [_with_blocks(call, blocks) for call in program.graph.calls]
    graph = Graph(program.graph.inputs, calls, program.graph.outputs, program.graph.kinds)
    more = {_PRODUCT: Lowering(_product), _ROWS: Lowering(_rows)}
    new = dataclasses.replace(program, graph=graph)
    return StaticProgram(new, {**original.lowerings, **more}, original.constants)


def _with_blocks(call: Call, blocks: Mapping[str, Block]) -> Call:
    weight = _weight_of(call)
    if weight is not None and weight[0] in blocks:
        x, bias = call.args[0], None
        if call.op == "aten::addmm.default":
            bias, x = call.args[:2]
        elif call.op == "aten::linear.default":
            bias = (*call.args, None)[2]
        args = (x, Ref(weight[0]), bias, blocks[weight[0]].outputs)
        return dataclasses.replace(call, op=_PRODUCT, args=args)
    table = call.args[0] if call.op == _LOOKUP else None
    if isinstance(table, Ref) and table.name in blocks:
        looked_up = (table, call.args[1], blocks[table.name].turned)
        return dataclasses.replace(call, op=_ROWS, args=looked_up, kwargs={})
    return call


def _product(x: Any, blocks: Any, bias: Any, outputs: int) -> jax.Array:
    """Computes `x @ weight + bias`."""
    x, blocks = of_one_dtype(x, blocks)
    count, inner, _ = blocks.shape
    rows = math.prod(x.shape[:-1])
    flat = x.reshape(rows, inner)
    if count == 1 or rows > _MANY:
        y = flat @ (blocks[0] if count == 1 else _whole(blocks))
    else:
        # The rows are repeated for each block: XLA multiplies two batches in place, but would
        # transpose all blocks for a product with a single matrix.
        each = jnp.broadcast_to(flat, (count, rows, inner))
        y = (each @ blocks).swapaxes(0, 1).reshape(rows, -1)
    product: jax.Array = y[:, :outputs].reshape(*x.shape[:-1], outputs)
    return product if bias is None else jnp.add(product, cast(bias, y.dtype))


def _rows(blocks: Any, indices: Any, turned: bool) -> jax.Array:
    """Looks up rows of a table, which are columns of its blocks if it is turned."""
    width = blocks.shape[2]
    if turned:
        columns: jax.Array = blocks[indices // width, :, indices % width]
        return columns
    picked = jnp.take(blocks, indices, axis=1)
    return jnp.moveaxis(picked, 0, -2).reshape(*indices.shape, -1)
