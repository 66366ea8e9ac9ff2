"""The operations of a module, from a call on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from fmapper.backends import Observation
from fmapper_adapters.torch._private import FakeTensorMode, TorchDispatchMode, pytree
from fmapper_adapters.torch.model.compiled import without_logs
from fmapper_adapters.torch.record import modes, obstacles
from fmapper_adapters.torch.record.patches.restore import restore_after


def operations(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Observation] | None:
    """Returns the operations of a call in evaluation; None if the model is not a module."""
    if not isinstance(model, torch.nn.Module):
        return None
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    device = torch.device("meta" if any(x.is_meta for _, x in named) else "cpu")
    given, options = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), (args, {**kwargs}))
    contexts: list[Any] = [FakeTensorMode(allow_non_fake_inputs=True), contextlib.nullcontext()]
    for at, without_memory in enumerate(contexts):
        tracing = _Operations()
        for name, tensor in named:
            tracing.add(name, "weight", [tensor])
        for tensor in pytree.tree_leaves((given, options)):
            tracing.add("", "input", [tensor])
        try:
            with (
                obstacles.run_uncompiled(),
                without_logs(),
                torch.no_grad(),
                restore_after(model),
                torch.random.fork_rng(devices=[]),
                modes.mode(model, train=False),
                without_memory,
                tracing,
            ):
                model(*given, **options)
        except Exception:  # an operation without a meta kernel, or code that reads values
            if at or device.type == "meta":
                raise
        else:
            break
    return tracing.seen


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations within the block, and the results that each takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Observation] = []
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # since ids are reused

    def add(self, module: str, op: str, results: list[Any], operands: tuple[str, ...] = ()) -> None:
        """Adds an operation with its results."""
        name = f"%{len(self.seen)}"
        self.seen.append(Observation(module, op, "", (), name, operands))
        self._alive += results
        self._names.update({id(x): name for x in results if isinstance(x, torch.Tensor)})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        operands = tuple(self._names[id(x)] for x in given if id(x) in self._names)
        result = func(*args, **(kwargs or {}))
        self.add("", func.name(), pytree.tree_leaves(result), operands)
        return result
