"""Compares a recorded program with its module."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.backends import equals
from fmapper_adapters.torch._private import pytree
from fmapper_adapters.torch.record.patches import encoders
from fmapper_adapters.torch.record.patches.restore import restore_after, unwind

_TOLERANCE = 1e-3  # of the largest value: other calls of the same kernels may round otherwise


def check(
    module: torch.nn.Module,
    exported: torch.export.ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Runs both on the example inputs.

    A module that asks whether it is being recorded (`torch.compiler.is_compiling`) may behave
    differently when it is not: then its program is silently wrong. Programs that draw random
    numbers are not compared.

    Raises:
        ConversionError: The results differ; the message says where and by how much.
    """
    program = exported.module()
    may_be_random = any(map(_draws, exported.graph.nodes))
    try:
        recorded = run(program, module, args, kwargs, seed=0)
        again = run(program, module, args, kwargs, seed=1) if may_be_random else recorded
    except Exception:  # the module fails on its own examples
        return
    if any(_difference(again.get(path), leaf) is not None for path, leaf in recorded.items()):
        return
    wanted = run(module, module, args, kwargs, seed=0)
    difference = _first_difference(recorded, wanted)
    if difference and any(leaves_open(node.target) for node in exported.graph.nodes):
        with _fill_memory():
            recorded = run(program, module, args, kwargs, seed=0)
            wanted = run(module, module, args, kwargs, seed=0)
        difference = _first_difference(recorded, wanted)
    if difference:
        raise ConversionError(
            f"{type(module).__name__}: the program recorded by torch.export differs from the "
            f"module: {difference}. The module behaves differently while it is recorded, because "
            "it asks torch.compiler.is_compiling() or similar. Configure it so that it does not "
            "(for transformers: pass attention masks yourself, or choose another "
            "attn_implementation), or pass check=False to accept the program."
        )


def _first_difference(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describes the first difference; empty if there is none."""
    for path, expected in wanted.items():
        difference = _difference(recorded.get(path), expected)
        if difference is not None:
            return f"{path} {difference}"
    return ""


@contextlib.contextmanager
def _fill_memory() -> Iterator[None]:
    """Makes torch fill new memory, so that `torch.empty` is deterministic."""
    mode = torch.get_deterministic_debug_mode()
    fill: Any = torch.utils.deterministic
    before = fill.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        fill.fill_uninitialized_memory = True
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        fill.fill_uninitialized_memory = before
        torch.set_deterministic_debug_mode(mode)


def leaves_open(target: Any) -> bool:
    """Returns whether an operation returns uninitialised memory."""
    return any(word in str(target) for word in ("empty", "resize"))


def _draws(node: torch.fx.Node) -> bool:
    """Returns whether a call may draw random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is _ATTENTION:  # tagged as random because of its dropout
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate != 0.0)
    return not (node.target in _DROPOUT and node.args[2] is False)


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default)


def run(
    model: Any,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    seed: int,
) -> dict[str, Any]:
    """Runs copies of the inputs; returns outputs by path, and the arrays that changed.

    The module is restored afterwards.
    """
    args, kwargs = copy.deepcopy((args, dict(kwargs)))
    with (
        unwind(),
        torch.no_grad(),
        attention(),
        restore_after(module) as before,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(seed)
        leaves, _ = pytree.tree_flatten_with_path(model(*args, **kwargs))
        outputs = {f"output{pytree.keystr(path)}": leaf for path, leaf in leaves}
        for name, array in (*model.named_parameters(), *model.named_buffers()):
            if name in before and not _is_same(array, before[name]):
                outputs[name] = array.detach().clone()
    return outputs


@contextlib.contextmanager
def attention(*, wanted: bool = False) -> Iterator[None]:
    """Allows or forbids the inference kernels of `nn.TransformerEncoder` within the block.

    They return zeros where a padding mask is set, and are used only without gradients.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    wanted = before and (wanted or encoders.leave_out())
    torch.backends.mha.set_fastpath_enabled(wanted)
    try:
        with encoders.unseen_modes() if wanted else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.is_sparse or equals(tensor.detach(), other.detach())


def _difference(actual: Any, expected: Any) -> str | None:
    """Describes the difference of an output from the expected one; None if there is none."""
    if not isinstance(expected, torch.Tensor):
        return None
    if not isinstance(actual, torch.Tensor):
        return "is missing"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"is {actual.dtype} of shape {tuple(actual.shape)}, but the module returns "
            f"{expected.dtype} of shape {tuple(expected.shape)}"
        )
    if not expected.numel() or expected.layout is not torch.strided:
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if torch.equal(actual, expected) else "has other values"
    if expected.itemsize == 1:  # torch has no isfinite for float8
        expected, actual = expected.float(), actual.float()
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return "is finite elsewhere"
    if not finite.any():
        return None
    expected, actual = expected[finite].to(torch.complex128), actual[finite].to(torch.complex128)
    worst = (actual - expected).abs().max().item()
    largest = expected.abs().max().item()
    return None if worst <= _TOLERANCE * max(largest, 1e-6) else f"differs by {worst:.2g}"
