"""Makes `nn.TransformerEncoder` treat padded positions alike in all modes.

Without gradients, it skips padded positions and returns zeros there, if each sequence is padded at
its end. With gradients, it returns the outputs of its layers for the padding. A program behaves
like the module in the mode of the recording.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from fmapper_adapters.torch import _private
from fmapper_adapters.torch.record.patches.restore import restore_after

_leaving_out: ContextVar[tuple[Any, ...]] = ContextVar("encoders that leave out", default=())


def that_leave_out(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], list[str]]:
    """Returns the encoders that drop padding for these inputs.

    Returns:
        The encoders that drop padding in torch's present mode, and the paths of encoders that drop
        it only without gradients.
    """
    paths = {
        id(part): path
        for path, part in module.named_modules()
        if isinstance(part, torch.nn.TransformerEncoder)
    }
    if not paths:
        return [], []
    now = _find_encoders(module, args, kwargs)
    if not torch.is_grad_enabled():
        return now, []
    with torch.no_grad():
        later = _find_encoders(module, args, kwargs)
    return now, [paths[id(part)] for part in later if part not in now and id(part) in paths]


def _find_encoders(module: torch.nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Finds the encoders that drop padding in a call."""
    encoders: list[Any] = []
    nest, is_aligned = _private.get_nesting()
    inside: list[Any] = []

    def see(*args: Any, **kwargs: Any) -> Any:
        if inside and inside[-1] not in encoders:
            encoders.append(inside[-1])
        return nest(*args, **kwargs)

    try:
        _private.set_nesting(see, lambda *_: True)  # others in it may drop padding
        with _spy((torch.nn.TransformerEncoder,), inside):
            _try_call(module, args, kwargs)
    finally:
        _private.set_nesting(nest, is_aligned)
    return encoders


def that_see_nothing(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Finds layers with attention whose mask hides all positions from some position.

    The kernels for inference return NaN there, unlike the computation with gradients.

    Returns:
        The paths of the layers that use these kernels in torch's present mode, and of layers that
        use them only without gradients.
    """
    kinds = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    paths = {id(part): path for path, part in module.named_modules() if isinstance(part, kinds)}
    if not paths:
        return [], []
    now = _find_blind(module, args, kwargs, kinds)
    later: list[Any] = []
    if torch.is_grad_enabled():
        with torch.no_grad():
            later = [part for part in _find_blind(module, args, kwargs, kinds) if part not in now]
    first, second = (
        [paths[id(part)] for part in some if id(part) in paths] for some in (now, later)
    )
    return first, second


def _find_blind(module: torch.nn.Module, args: Any, kwargs: Any, kinds: Any) -> list[Any]:
    blind: list[Any] = []
    inside: list[Any] = []
    kernels = _private.get_attention_kernels()

    def watch(kernel: Any) -> Any:
        def see(x: Any, *args: Any, **kwargs: Any) -> Any:
            result = kernel(x, *args, **kwargs)
            values = result[0] if isinstance(result, tuple) else result
            if inside and not values.is_nested and values.isnan().any() and not x.isnan().any():
                blind.append(inside[-1])
            return result

        return see

    try:
        _private.set_attention_kernels(
            {name: watch(function) for name, function in kernels.items()}
        )
        with _spy(kinds, inside):
            _try_call(module, args, kwargs)
    finally:
        _private.set_attention_kernels(kernels)
    return blind


@contextlib.contextmanager
def _spy(kinds: tuple[Any, ...], inside: list[Any]) -> Iterator[None]:
    """Keeps a list of the modules of some classes that are being called."""
    before = {kind: kind.forward for kind in kinds}

    def spy_on(forward: Any) -> Any:
        @functools.wraps(forward)
        def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
            inside.append(self)
            try:
                return forward(self, *args, **kwargs)
            finally:
                inside.pop()

        return spy

    try:
        for kind, forward in before.items():
            kind.forward = spy_on(forward)
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


def _try_call(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Calls a module on copies of its inputs, and ignores errors."""
    args, kwargs = copy.deepcopy((args, dict(kwargs)))
    with (
        contextlib.suppress(Exception),  # the recording reports errors
        warnings.catch_warnings(action="ignore"),  # about nested tensors
        restore_after(module),
        torch.random.fork_rng(devices=[]),
        torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x),
        unseen_modes(),
    ):
        module(*args, **kwargs)


@contextlib.contextmanager
def unseen_modes() -> Iterator[None]:
    """Hides active modes from encoders, which would otherwise keep padding."""
    overrides: Any = torch.overrides
    before = overrides.has_torch_function
    overrides.has_torch_function = lambda _: False
    try:
        yield
    finally:
        overrides.has_torch_function = before


@contextlib.contextmanager
def leave_padding_out(encoders: list[Any]) -> Iterator[None]:
    """Makes the recording of these encoders return zeros at padded positions."""
    token = _leaving_out.set(tuple(encoders))
    try:
        yield
    finally:
        _leaving_out.reset(token)


def leave_out() -> bool:
    """Returns whether some encoders drop padding."""
    return bool(_leaving_out.get())


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replaces the padding functions of encoders by ones that can be recorded.

    Masks are not tested for being causal, either, since attention gives the same result.
    """
    encoders = _leaving_out.get()
    find = _private.replace_causal_check(lambda mask, is_causal=None, size=None: is_causal is True)
    for encoder in encoders:
        encoder.forward = functools.partial(_forward, encoder, encoder.forward)
    try:
        yield
    finally:
        _private.replace_causal_check(find)
        for encoder in encoders:
            encoder.forward = encoder.forward.args[1]
            if encoder.forward == type(encoder).forward.__get__(encoder):
                del encoder.forward


def _forward(
    encoder: Any,
    forward: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    norm, encoder.norm = encoder.norm, None
    try:
        output: torch.Tensor = forward(src, mask, src_key_padding_mask, is_causal)
    finally:
        encoder.norm = norm
    if src_key_padding_mask is not None and mask is None:
        valid = src_key_padding_mask.logical_not()
        left_out = ~valid
        if getattr(encoder, "mask_check", True):
            left_out = left_out & (valid[:, 1:] <= valid[:, :-1]).all()
        output = output.masked_fill(left_out.unsqueeze(-1), 0.0)
    return output if norm is None else norm(output)
