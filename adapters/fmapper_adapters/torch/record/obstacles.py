"""Obstacles to recording a module, which are reported before torch fails, or removed.

They are weights without values, offloaded weights, quantised weights, and compiled parts.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fmapper import ConversionError
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import (
    FakeTensor,
    FakeTensorMode,
    is_traceable_wrapper_subclass,
    pytree,
)
from fmapper_adapters.torch.record.patches import unaware

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def refuse(module: torch.nn.Module) -> None:
    """Checks for weights that cannot be recorded.

    Raises:
        ConversionError: The weights are offloaded, or packed by torch's quantisation.
    """
    name = type(module).__name__
    for path, inner in module.named_modules():
        if type(inner).__module__.startswith(_QUANTISED):
            raise ConversionError(
                f"{name}: {path or 'it'} is quantized by torch.ao "
                f"({type(inner).__module__}.{type(inner).__name__}): its weights are packed for "
                "kernels that only torch has. Convert the model before it is quantized, or replace "
                "such parts by floating-point layers with the weights part.weight().dequantize() "
                "and part.bias()."
            )
        if _is_offloaded(inner):
            weights = [n for n, p in inner.named_parameters(recurse=False) if p.is_meta]
            at = ".".join(filter(None, (path, *weights[:1])))
            raise ConversionError(
                f"{name}: {at} is offloaded: accelerate keeps its values on the host or a disk, "
                "and loads them only while that part runs. Load the model without offloading (no "
                "device_map, or device_map='cpu'), or restore the weights with "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True). To convert a model "
                "that does not fit into memory, create it under torch.device('meta'), and fill the "
                "result with fmapper.materialize."
            )


def _is_offloaded(module: torch.nn.Module) -> bool:
    """Returns whether accelerate loads the weights of a module on each call."""
    hook = getattr(module, "_hf_hook", None)
    hooks = [hook, *getattr(hook, "hooks", ())]
    parameter = next(module.parameters(recurse=False), None)
    return (
        parameter is not None
        and parameter.is_meta
        and any(getattr(h, "offload", False) for h in hooks)
    )


@contextlib.contextmanager
def run_uncompiled() -> Iterator[None]:
    """Disables `torch.compile` within the block.

    Otherwise torch would compile the patches of the recording, too. Torch's own compilations, such
    as of the branches of `torch.cond`, are not disabled.
    """
    compiler, stance = torch.compile, getattr(torch.compiler, "set_stance", None)
    if stance is None or torch.compiler.is_compiling():
        yield
        return

    def compile_in_turn(*args: Any, **options: Any) -> Any:
        compiled: Any = compiler(*args, **options)
        if not unaware.asks_torch(sys._getframe(1)) or not (args and callable(args[0])):
            return compiled

        def run(*args: Any, **kwargs: Any) -> Any:
            with stance("default"):
                return compiled(*args, **kwargs)

        return run

    try:
        torch.compile = compile_in_turn
        with stance("force_eager"):
            yield
    finally:
        torch.compile = compiler


def has_packed(module: torch.nn.Module) -> bool:
    """Returns whether some parameters consist of other tensors, as quantised ones do."""
    return any(map(is_traceable_wrapper_subclass, module.parameters()))


def unpack(module: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy with inner tensors as parameters, assembled on each call.

    Raises:
        ConversionError: A tensor cannot be taken apart; the message names it.
    """
    copied = with_tensors(module, lambda tensor: tensor)
    try:
        _private.unwrap_parameters(copied)
    except Exception as error:  # foreign classes may raise anything
        path, wrapper = next(
            (n, p) for n, p in module.named_parameters() if is_traceable_wrapper_subclass(p)
        )
        raise ConversionError(
            f"{type(module).__name__}: {path} is a {type(wrapper).__name__}, which cannot be taken "
            f"apart ({error}). Put torch.nn.Parameter(tensor.dequantize()) in its place."
        ) from error
    return copied


def without_values(module: torch.nn.Module, inputs: Any) -> list[str]:
    """Returns the abstract tensors of a module and its inputs."""
    named = (*module.named_parameters(), *module.named_buffers())
    names = [name for name, tensor in named if tensor.is_meta]
    for path, leaf in pytree.tree_leaves_with_path(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            names.append(f"inputs{pytree.keystr(path)}")
    return names


def with_shapes(module: torch.nn.Module, inputs: Any) -> tuple[torch.nn.Module, Any]:
    """Returns abstract copies of a module and its inputs, on the CPU."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with mode:
            abstract: torch.Tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(abstract, requires_grad=tensor.requires_grad)
        return abstract

    given = pytree.tree_map(lambda x: shape(x) if isinstance(x, torch.Tensor) else x, inputs)
    return with_tensors(module, shape), given


def with_tensors(
    module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """Returns a copy of a module with other tensors as its parameters and buffers.

    Raises:
        ConversionError: The module cannot be copied.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        return copy.deepcopy(module, {key: change(tensor) for key, tensor in tensors.items()})
    except Exception as error:  # attributes may raise anything
        raise ConversionError(
            f"{type(module).__name__} has weights that are quantized or without values, and cannot "
            f"be copied for recording: {type(error).__name__}: {error}"
        ) from error
