"""Restores the buffers and parameters that a call of a module changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmapper_adapters.torch import _private
from fmapper_adapters.torch._private import pytree

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@contextlib.contextmanager
def restore_after(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Restores buffers, parameters and plain attributes that calls within the block change.

    Only the parameters that are changed are copied, because all of them may be too large.

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
    keeper = _Keeper(module)
    keeper.before.update({name: kept[id(one)] for name, one in module.named_buffers()})
    try:
        with keeper, keep_attributes(module):
            yield keeper.before
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in buffers:
                buffer.copy_(values)
                owner[name] = buffer
            keeper.restore()


@contextlib.contextmanager
def keep_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Restores the numbers, flags and names that calls within the block change in modules.

    Such a flag may say what was done to weights, which are restored, too. A lazy module that has
    become another one has its sizes. Tensors that a call keeps, as `self.attention = weights`, may
    be those of a recording, without values.
    """
    before = [(inner, type(inner), dict(vars(inner))) for inner in module.modules()]
    try:
        yield
    finally:
        for inner, kind, attributes in before:
            if type(inner) is kind:
                plain = {k: v for k, v in attributes.items() if isinstance(v, _PLAIN)}
                vars(inner).update(plain)
                _restore_tensors(vars(inner), attributes)


def _restore_tensors(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Puts back what stood in place of other tensors, or of none."""
    for name, value in [*now.items()]:
        if value is before.get(name) or not any(map(torch.is_tensor, pytree.tree_leaves(value))):
            continue
        if name in before:
            now[name] = before[name]
        else:
            del now[name]


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
    with contextlib.suppress(RuntimeError):  # raised where the level is open
        _private.enter_dual_level()
    _private.exit_dual_level()


class _Keeper(TorchFunctionMode):
    """Copies parameters before they are written to."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.before: dict[str, torch.Tensor] = {}
        self._arrays = [(name, one, one.data) for name, one in module.named_parameters()]
        self._names: dict[int, list[str]] = {}
        for name, _, data in self._arrays:
            if place := _place(data):
                self._names.setdefault(place, []).append(name)
        self._copies: dict[str, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA:
            self.before.update({n: data for n, one, data in self._arrays if one is args[0]})
        elif _writes(func, kwargs):
            for x in pytree.tree_leaves((args, kwargs)):
                for name in self._names.get(_place(x), ()) if torch.is_tensor(x) else ():
                    if name not in self._copies:
                        data = next(data for n, _, data in self._arrays if n == name)
                        self._copies[name] = self.before[name] = data.clone()
        return func(*args, **kwargs)

    def restore(self) -> None:
        """Restores the parameters."""
        for name, parameter, data in self._arrays:
            if _place(parameter) != _place(data):
                parameter.data = data
            if name in self._copies:
                data.copy_(self._copies[name])


def _place(x: torch.Tensor) -> int:
    """Returns the address of the values; 0 if they have none."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # inside of torch.func.vmap
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
