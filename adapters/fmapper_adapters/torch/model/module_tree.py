"""The tree of modules that holds the arrays of a converted model."""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING, Any

import torch

from fmapper_adapters.torch.lax import types
from fmapper_adapters.torch.model import quoted

MADE = ("_training_", "_evaluation_")  # the names of functions and constants of the graphs


class Part(torch.nn.Module):
    """A submodule of a converted model, with its arrays and submodules but without a forward."""

    if TYPE_CHECKING:  # typed as tensor or module in torch.nn.Module

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, key: int | str) -> Any:
        """Returns a part or an array by number or name."""
        if isinstance(key, int) and not hasattr(self, str(key)):
            raise IndexError(key)
        return getattr(self, str(key))

    def __getstate__(self) -> dict[str, Any]:
        """Pickles unsigned arrays as signed ones: torch cannot pickle uint16, uint32, uint64."""
        state = dict(self.__dict__)
        state["_buffers"] = dict(state["_buffers"])
        kinds = {}
        for name, tensor in state["_buffers"].items():
            signed = None if tensor is None else types.to_signed(tensor.dtype)
            if signed is not None:
                kinds[name] = tensor.dtype
                state["_buffers"][name] = tensor.view(signed)
        return {**state, "_unsigned": kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        kinds = state.pop("_unsigned")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in kinds.items():
            self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        """Returns the shapes of the arrays."""
        arrays = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return ", ".join(f"{name}: {tuple(array.shape)}" for name, array in arrays)


class Places:
    """The places of a program's arrays in a tree of modules, by names that modules allow."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.names: dict[str, str] = {}
        self._root = root

    def parameter(self, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
        """Registers a parameter under a dotted name."""
        trained = trained and (tensor.is_floating_point() or tensor.is_complex())
        owner, last = self._place(name)
        owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=trained))

    def buffer(self, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
        """Registers a buffer under a dotted name."""
        owner, last = self._place(name)
        owner.register_buffer(last, tensor, persistent=persistent)

    def alias(self, name: str, first: str) -> None:
        """Registers a tensor under another name."""
        tensor = get(self._root, self.names[first])
        owner, last = self._place(name)
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor)

    def _place(self, name: str) -> tuple[torch.nn.Module, str]:
        owner = self._root
        taken = []
        *parts, last = name.split(".")
        for wanted in parts:
            part = _free(owner, wanted, owner._modules)
            if part not in owner._modules:
                owner.add_module(part, Part())
            owner = owner._modules[part]  # type: ignore[assignment]
            taken.append(part)
        last = _free(owner, last, ())
        self.names[name] = ".".join((*taken, last))
        return owner, last


def _free(owner: torch.nn.Module, name: str, allowed: Any) -> str:
    """Returns a name that is free on a module and not a keyword, such as `train_`."""
    name = quoted.as_attribute(name)
    name = name[1:] if name.startswith(MADE) else name
    name = f"{name}_" if keyword.iskeyword(name) or not name else name
    while name not in allowed and (hasattr(type(owner), name) or hasattr(owner, name)):
        name += "_"
    return name


def get(root: torch.nn.Module, target: str) -> Any:
    """Returns the array at a path."""
    owner, _, last = target.rpartition(".")
    return getattr(root.get_submodule(owner), last)
