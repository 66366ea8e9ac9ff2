"""Wrapper tensors, which keep their values in inner tensors, and tensors in attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fmapper.backends import holds_arrays
from fmapper_adapters.torch._private import FakeTensor, is_traceable_wrapper_subclass

Move = Callable[[torch.Tensor], torch.Tensor]
_CONTAINERS = (dict, list, tuple)


def dispatches(cls: type) -> bool:
    """Returns whether a class of tensors overrides dispatch, as wrapper subclasses do."""
    dispatch: Any = getattr(cls, "__torch_dispatch__", None)
    return dispatch is not torch.Tensor.__torch_dispatch__


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has no memory of its own but holds tensors that do."""
    if not dispatches(type(tensor)) or isinstance(tensor, FakeTensor):
        return False
    if is_traceable_wrapper_subclass(tensor):
        return True
    try:
        return tensor.numel() > 0 and tensor.device.type != "meta" and not tensor.data_ptr()
    except RuntimeError:  # an invalid storage, or none
        return True


def is_dtensor(tensor: Any) -> bool:
    """Returns whether a tensor is a `DTensor`, or a parameter that is one."""
    if type(tensor) is torch.Tensor or not isinstance(tensor, torch.Tensor):
        return False
    if "torch.distributed.tensor" not in sys.modules:  # importing it takes a while
        return False
    from torch.distributed.tensor import DTensor

    data = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    return isinstance(data, DTensor)


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain values of a replicated `DTensor`; any other tensor unchanged.

    Nothing is sent: each axis of the mesh replicates the tensor or has a single process.
    """
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor.detach()
    mesh = dtensor.device_mesh
    is_whole = all(
        placement.is_replicate() or size == 1
        for placement, size in zip(dtensor.placements, mesh.shape, strict=True)
    )
    values: torch.Tensor = dtensor.full_tensor() if is_whole and mesh.get_coordinate() else dtensor
    return values


def inner_names(tensor: torch.Tensor) -> list[str]:
    """Returns the attributes in which a wrapper holds its tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names = tensor.__tensor_flatten__()[0]  # in torch 2.13 also the name of a mesh
    return [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]


def why_not(tensor: torch.Tensor) -> str:
    """Explains why a wrapper cannot leave torch."""
    names = [f".{name}" for name in inner_names(tensor)]
    inside = f" ({', '.join(names)})" if names else ""
    cls = type(tensor).__name__
    article = "an" if cls[0] in "AEIOU" else "a"
    if is_dtensor(tensor):
        return (
            "a DTensor that is divided among processes: replicate it first with "
            "fmapper.shard(tree, mesh, None) in every process, or bring it to a mesh of JAX with "
            'fmapper.shard(tree, jax_mesh, "layout")'
        )
    return (
        f"{article} {cls} keeps its values in other tensors{inside}: move those, or "
        "tensor.dequantize() if it exists"
    )


def move_inside(tensor: torch.Tensor, device: torch.device, move: Move) -> torch.Tensor:
    """Moves the inner tensors of a wrapper to a device.

    Classes of torch move themselves, if that moves everything; others are flattened and rebuilt by
    their `__tensor_flatten__`.

    Args:
        tensor: The wrapper.
        device: The target device.
        move: Moves an inner tensor there.

    Raises:
        TypeError: An inner tensor would not move; the message names it.
    """
    cls = type(tensor)
    has_parts = is_traceable_wrapper_subclass(tensor)
    if tensor.grad_fn is not None or not has_parts or cls.__module__.startswith("torch."):
        try:
            new = tensor.to(device, copy=True)
            behind = _left_behind(new, device) if type(new) is cls else f"it became a {type(new)}"
        except Exception as error:
            if not has_parts or tensor.grad_fn is not None:
                raise
            behind = str(error)
        if not behind:
            return new
        if not has_parts or tensor.grad_fn is not None:
            raise TypeError(_refusal(cls, behind))
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    inner = {n: move(part) if isinstance(part, torch.Tensor) else part for n, part in parts.items()}
    with torch.no_grad():
        new = type(wrapper).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    made: torch.Tensor = new
    behind = _left_behind(made, device)
    if behind:
        raise TypeError(_refusal(cls, behind))
    return made


def check_class(old: torch.Tensor, new: torch.Tensor) -> None:
    """Checks that a cast tensor has not lost the state of its class.

    Raises:
        TypeError: The tensor has become one of another class, without the state.
    """
    cls, made = type(old), type(new)
    if made is not cls and dispatches(cls) and dispatches(made) and issubclass(cls, made):
        raise TypeError(
            f"a {cls.__name__} cannot be cast: it became a {made.__name__}, without the other "
            f"contents of a {cls.__name__}. Implement aten._to_copy in the class"
        )


def _refusal(cls: type, behind: str) -> str:
    return (
        f"a {cls.__name__} cannot be moved: {behind}. Define __tensor_flatten__ and "
        f"__tensor_unflatten__ on the class, covering all of its tensors"
    )


def _left_behind(new: torch.Tensor, device: torch.device) -> str:
    """Describes which parts of a moved wrapper are not on the device."""
    if not is_on(new, device):
        return f"afterwards it reports to be on {new.device}"
    for name in inner_names(new):
        inner = getattr(new, name)
        if not is_on(inner, device) or (is_wrapper(inner) and _left_behind(inner, device)):
            return f".{name} stays on {inner.device}"
    for name, value in vars(new).items():
        if any(not is_on(inner, device) for inner in _tensors_in(value)):
            return f".{name} holds a tensor that stays on another device"
    return ""


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns whether a tensor is on a device, which may lack an index."""
    current = tensor.device
    return current.type == device.type and (
        None in (current.index, device.index) or current == device
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields tensors in plain containers."""
    todo, seen = [value], {}
    while todo:
        part = todo.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, _CONTAINERS) and id(part) not in seen:
            seen[id(part)] = part
            todo += part.values() if isinstance(part, dict) else part


def move_attributes(old: torch.Tensor, new: torch.Tensor, device: torch.device, move: Move) -> None:
    """Moves the attributes of a moved tensor to its device.

    Raises:
        TypeError: An object that is neither a tensor nor a plain container holds some.
    """
    if new.grad_fn is not None or not vars(old):
        return
    inner = set(inner_names(new))
    for name, value in list(vars(new).items()):
        if name in inner or value is not vars(old).get(name) or _stands_by_itself(value):
            continue
        if next(_tensors_in(value), None) is not None:
            vars(new)[name] = _map(value, move)
        elif type(old) not in _PLAIN and holds_arrays(value):
            raise TypeError(
                f"the attribute .{name} of this {type(old).__name__} is a {type(value).__name__} "
                f"that holds arrays, which would stay on {old.device}: store them in a tensor, a "
                f"list or a dict, or move the tensor with the method of its class"
            )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _stands_by_itself(value: Any) -> bool:
    """Returns whether an attribute has no array: a callable such as a hook, or a plain value."""
    return callable(value) or value is None or isinstance(value, bool | int | float | str)


def _map(value: Any, move: Move) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _map(part, move) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(part, move) for part in value)
    return value


def inner_pairs(
    old: torch.Tensor, new: torch.Tensor
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs the inner tensors of two wrappers of one class."""
    if type(old) is not type(new):
        return []
    names = inner_names(old)
    return [(getattr(old, name), getattr(new, name)) for name in names if hasattr(new, name)]
