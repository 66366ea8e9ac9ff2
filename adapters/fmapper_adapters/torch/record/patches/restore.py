"""Restores the buffers and parameters that a call of a module changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmapper.programs import PlainState
from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@contextlib.contextmanager
def restore_after(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Restores buffers, parameters and plain attributes that calls within the block change.

    Only parameters that change are copied, because copies of all may be too large.

    Yields:
        The original buffers by name, and the parameters that have been changed so far.
    """
    buffers = [
        (inner._buffers, name, buffer, buffer.detach().clone())
        for inner in module.modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None
    ]
    kept = {id(buffer): values for _, _, buffer, values in buffers}
    values = {name: kept[id(tensor)] for name, tensor in module.named_buffers()}
    with keep_attributes(module) as state:
        plain = {name: x for name, x in state.arrays.items() if isinstance(x, torch.Tensor)}
        keeper = _Keeper({**plain, **dict(module.named_parameters())}, values)
        try:
            with keeper:
                yield keeper.before
        finally:
            with torch.no_grad():
                for owner, name, buffer, before in buffers:
                    buffer.copy_(before)
                    owner[name] = buffer
                keeper.restore()


@contextlib.contextmanager
def keep_attributes(module: torch.nn.Module) -> Iterator[PlainState]:
    """Restores attributes, and containers in them, that calls within the block change.

    A flag may record a change of weights, which are restored, too. A lazy module that has been
    initialised keeps its sizes. Tensors that a call stores, as in `self.attention = weights`, may
    be tensors of a recording, without values.
    """
    state = plain_state(module)
    try:
        yield state
    finally:
        state.restore()


def plain_state(module: torch.nn.Module) -> PlainState:
    """Captures the attributes of a module, apart from its parameters, buffers and hooks."""
    return PlainState(
        module,
        libraries=("torch",),
        opens=lambda cls: issubclass(cls, torch.nn.Module),
        hides=_OF_TORCH.__contains__,
        unnamed=("_modules",),
    )


_OF_TORCH = vars(torch.nn.Module()).keys() - {"training", "_modules"}


@contextlib.contextmanager
def unwind() -> Iterator[None]:
    """Exits levels of `torch.func` transformations that have failed."""
    depth = _private.count_levels()
    had_hooks = _private.has_saved_tensors_hooks()
    try:
        yield
    except BaseException:
        while _private.count_levels() > depth:
            _private.leave_level()
        if had_hooks and not _private.has_saved_tensors_hooks():
            _private.allow_saved_tensors_hooks()
        if not _private.is_dual():
            _leave_dual_level()
        raise


def _leave_dual_level() -> None:
    """Exits the forward-mode level if it is still active."""
    with contextlib.suppress(RuntimeError):  # raised if the level is open
        _private.enter_dual_level()
    _private.exit_dual_level()


class _Keeper(TorchFunctionMode):
    """Copies tensors before they are written to, once per storage.

    Args:
        tensors: The tensors by name.
        buffers: The values of the buffers by name, which are not watched.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.before = dict(buffers)
        self._arrays = [(name, tensor, tensor.data) for name, tensor in tensors.items()]
        self._at: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, _, data in self._arrays:
            if place := _place(data):
                self._at.setdefault(place, []).append((name, data))
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:
            self.before.update({n: data for n, tensor, data in self._arrays if tensor is args[0]})
        elif _writes(func, kwargs):
            for x in pytree.tree_leaves((args, kwargs)):
                place = _place(x) if torch.is_tensor(x) else 0
                if place in self._at and place not in self._copies:
                    self._copy(place)
        return func(*args, **kwargs)

    def _copy(self, place: int) -> None:
        storage: Any = self._at[place][0][1].untyped_storage()
        copy = storage.clone()
        self._copies[place] = storage, copy
        for name, data in self._at[place]:
            at = data.storage_offset(), data.shape, data.stride()
            self.before[name] = torch.empty(0, dtype=data.dtype, device=data.device).set_(copy, *at)

    def restore(self) -> None:
        """Restores the tensors."""
        for _, tensor, data in self._arrays:
            if _place(tensor) != _place(data):
                tensor.data = data
        for storage, copy in self._copies.values():
            storage.copy_(copy)


def _place(x: torch.Tensor) -> int:
    """Returns the address of a tensor's values; 0 without one."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # inside torch.func.vmap
        return 0


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    schema = _private.schema_of(func)
    if schema is not None:
        return bool(schema.is_mutable)
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or kwargs.get("max_norm") is not None:
        return True
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))
