"""Answers torch's questions about memory layouts without restricting sizes.

torch asks whether tensors are contiguous, and how the dimensions of a view derive from those of its
base, and treats each answer as a condition on sizes. Results depend on the answers only if the
result of a `reshape` is changed in place, which may or may not change its base, too. Then they are
guards.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.from_fx import graph, guards, overlaps
from fmapper_adapters.torch.from_fx.size_facts import expression_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
# The functions that ask, by module.
FUNCTIONS = {
    "_prims_common": (
        "check_contiguous_sizes_strides",
        "is_contiguous",
        "is_channels_last_contiguous_2d",
        "is_channels_last_contiguous_3d",
        "is_non_overlapping_and_dense_or_false",
        "_is_non_overlapping_and_dense_or_false",
        "are_strides_like_channels_last_or_false",
        "suggest_memory_format",
        "compute_elementwise_output_logical_to_physical_perm",
    ),
    "_prims": ("_collapse_view_helper",),
}
_FUNCTIONS = frozenset(
    (os.path.join(_TORCH, module, "__init__.py"), name)
    for module, names in FUNCTIONS.items()
    for name in names
)
# C++ files that ask whether a tensor is contiguous, and for the strides of a view.
_IN_CPP = ("/c10/core/Contiguity.h", "/aten/src/ATen/TensorUtils.cpp")
_GUARDS = ("<string>", "_")  # where decompositions repeat guards
_ASKING = (
    _GUARDS[0],
    *(os.path.join(_TORCH, module, "__init__.py") for module in ("", *FUNCTIONS)),
    os.path.join(_TORCH, "fx", ""),
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
)
_aten: Any = torch.ops.aten
# They return a view or a copy of their first argument, by its layout.
_VIEW_OR_COPY = (
    _aten.reshape.default, _aten.reshape_as.default, _aten.flatten.using_ints,
    _aten.ravel.default, _aten.contiguous.default,
)  # fmt: skip
_answers: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def leave_out_layouts() -> Iterator[None]:
    """Leaves layouts out of the guards on sizes within the block."""
    evaluate: Any = ShapeEnv.evaluate_sym_node
    arrange = getattr(*_private.VIEW_RULE)
    thread = threading.get_ident()
    arranging = 0

    def evaluate_sym_node(self: Any, *args: Any, **options: Any) -> Any:
        is_own = threading.get_ident() == thread
        is_left_out = is_own and (arranging or _restricts_nothing(sys._getframe(1)))
        if not is_left_out:
            return evaluate(self, *args, **options)
        with self.suppress_guards():
            answer = evaluate(self, *args, **options)
        if isinstance(answer, bool | sympy.logic.boolalg.BooleanAtom):
            _answers.setdefault(self, {})[args[0].expr] = bool(answer)
        return answer

    def reshape(a: Any, shape: Any, allow_copy: bool) -> Any:
        nonlocal arranging
        # Elsewhere, as in decompositions, the steps are recorded.
        if threading.get_ident() != thread or sys._getframe(2).f_code.co_name != "_view_meta":
            return arrange(a, shape, allow_copy)
        arranging += 1
        try:
            view = arrange(a, shape, allow_copy)
            return view.as_strided(shape, view.stride())
        finally:
            arranging -= 1

    ShapeEnv.evaluate_sym_node = evaluate_sym_node  # type: ignore[method-assign]
    setattr(*_private.VIEW_RULE, reshape)
    try:
        yield
    finally:
        ShapeEnv.evaluate_sym_node = evaluate  # type: ignore[method-assign]
        setattr(*_private.VIEW_RULE, arrange)


def _restricts_nothing(frame: FrameType | None) -> bool:
    """Returns whether a question is about a layout, or is guarded already."""
    while frame is not None and frame.f_code.co_filename.startswith(_ASKING):
        code = frame.f_code
        asking = code.co_filename, code.co_name
        if asking in _FUNCTIONS or asking == _GUARDS:
            return True
        # C++ names its file
        if code.co_name.startswith(("guard_", "expect_")) and str(
            frame.f_locals.get("file", "")
        ).endswith(_IN_CPP):
            return True
        frame = frame.f_back
    return False


def guard_writes(exported: torch.export.ExportedProgram) -> None:
    """Guards the layouts that determine which tensors are changed in place.

    Args:
        exported: The program before functionalisation.
    """
    env = guards.env_of(exported)
    if env is None or not (answers := _answers.get(env)):
        return
    nodes = list(exported.graph.nodes)
    writes = [(at, written) for at, node in enumerate(nodes) if (written := _targets(node))]
    for at, node in enumerate(nodes):
        if not writes or node.target not in _VIEW_OR_COPY:
            continue
        if symbols := _deciding_symbols(node.args[0]):
            for later, written in writes:
                if later > at and _changes_one(node, written, nodes[later + 1 :]):
                    line = graph.place(nodes[later])[1]
                    for symbol in symbols:
                        guards.ask(env, sympy.Ge(symbol, 2), True, line)  # as torch assumes
                    for condition, answer in answers.items():
                        guards.ask(env, condition, answer, line)


def _deciding_symbols(base: Any) -> list[Any]:
    """Returns the symbols of the shape of a tensor that is not contiguous for all sizes."""
    value = overlaps.value_of(base)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return []
    shape = [sympy.sympify(expression_of(size)) for size in value.shape]
    dense: Any = 1
    for size, stride in zip(reversed(shape), reversed(value.stride()), strict=True):
        if sympy.expand(dense - expression_of(stride)) != 0:
            break
        dense *= size
    else:
        return []
    return sorted({symbol for size in shape for symbol in size.free_symbols}, key=str)


def _targets(node: Node) -> list[Node]:
    """Returns the values that an operation changes in place."""
    schema = _private.schema_of(node.target)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False))
    given |= node.kwargs
    return [
        leaf
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(given.get(argument.name))
        if isinstance(leaf, Node)
    ]


def _changes_one(node: Node, written: Sequence[Node], later: Sequence[Node]) -> bool:
    """Returns whether a view or copy, or its base, is changed, and the other is used later."""
    base = list(overlaps.bases_of(node.args[0]))
    first = base[-1]

    def side(value: Node) -> bool | None:
        """Returns whether a value belongs to the result (True) or its base; None for others."""
        if (chain := list(overlaps.bases_of(value)))[-1] is not first:
            return None
        return node in chain

    sides = {side(value) for value in written} - {None}
    if not sides:
        return False
    if True in sides and first.op in ("placeholder", "get_attr"):
        return True
    used = (value for user in later for value in user.all_input_nodes)
    return any(answer is not None and answer not in sides for answer in map(side, used))
