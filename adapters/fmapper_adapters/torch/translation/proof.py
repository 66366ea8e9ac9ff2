"""Runs a translated file's module in torch, in a process without the source framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fmapper.verification import Draws, Runner

_Gradients = list[torch.Tensor]


class TorchRunner(Runner):
    """A module with `nn.Dropout` as its only dropout."""

    @classmethod
    def prepare(cls, draws: Draws, *, double: bool) -> None:
        """Has torch make arrays of double precision."""
        if double:
            torch.set_default_dtype(torch.float64)

    def array(self, value: Any) -> Any:
        """Returns a tensor."""
        return torch.from_numpy(np.array(value))

    def order(self, value: dict[str, Any]) -> list[str]:
        """Returns sorted keys, as JAX has flattened the dict."""
        return sorted(value)

    def make(self, *, train: bool, rate_of: Callable[[Any], float] = lambda _: 0.0) -> nn.Module:
        """Returns the module with the weights of the source."""
        model: nn.Module = getattr(self.net, self.name)()
        self.net.load_weights(model, self.weights)
        model.train(train)
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = rate_of(layer.p)
        return model

    def run(self, model: Any, *, train: bool) -> list[Any]:
        """Returns the outputs of the module."""
        with torch.no_grad():
            return [x.numpy() for x in self.leaves(model(*self.args, **self.kwargs))]

    def run_with_dropout(
        self, rate_of: Callable[[Any], float]
    ) -> Callable[[int], list[Any]] | None:
        """Returns a function of the seed of torch."""
        model = self.make(train=True, rate_of=rate_of)
        if not any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules()):
            return None

        def outputs(seed: int) -> list[Any]:
            torch.manual_seed(seed)
            return self.run(model, train=True)

        return outputs

    def learn(self, model: Any, *, train: bool) -> tuple[list[Any], _Gradients]:
        """Returns the outputs, and a gradient for each parameter."""
        model.zero_grad()
        outputs = self.leaves(model(*self.args, **self.kwargs))
        total = sum((x * _waves(x)).mean() for x in outputs if x.is_floating_point())
        if isinstance(total, torch.Tensor) and total.requires_grad:
            torch.autograd.backward(total)  # or no output depends on a parameter
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return [x.detach().numpy() for x in outputs], slopes

    def descend(self, model: Any, slopes: _Gradients, rate: float) -> Any:
        """Changes the parameters in place."""
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter.sub_(rate * slope)
        return model

    def gradients_by_name(self, model: Any, slopes: _Gradients) -> dict[str, Any]:
        """Returns gradients by name; what the file has not got has none."""
        by_parameter = dict(zip(map(id, model.parameters()), slopes, strict=True))
        arrays = {key: np.zeros(value.shape) for key, value in self.weights.items()}
        for key, order, parameter, rows in self._places(model):
            if id(parameter) in by_parameter:
                slope = by_parameter[id(parameter)]
                arrays[key] = self._as_in_source(_rows(slope, rows), order, key)
        return arrays

    def arrays_by_name(self, model: Any) -> dict[str, Any]:
        """Returns arrays by name; what the file has not got stays."""
        absent = {key: value.numpy() for key, value in self.weights.items()}
        return absent | {
            key: self._as_in_source(_rows(parameter, rows), order, key)
            for key, order, parameter, rows in self._places(model)
        }

    def _places(self, model: nn.Module) -> Iterator[tuple[str, Any, torch.Tensor, slice]]:
        """Yields the name of each array in the source, its order of axes, and where it lies."""
        for path, module in model.named_modules():
            renamed = self.net.ARRAYS.get(type(module), {})
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for key, parameter in held:
                source, order = renamed.get(key, (key, None))
                full = f"{path}.{source}" if path else source
                for ours, (theirs, other) in getattr(self.net, "RENAMED", {}).items():
                    if f".{path}.{key}".endswith(f".{ours}"):
                        full, order = f"{path}.{key}".lstrip(".").removesuffix(ours) + theirs, other
                        break
                for ours, theirs in getattr(self.net, "LISTS", {}).items():
                    full = re.sub(rf"\b{ours}\.(\d+)", rf"{theirs}\1", full)
                for name, axes, rows in self._gates(f"{path}.{key}".lstrip("."), full, order):
                    if self._shape(name) is not None:
                        yield name, axes, parameter, rows

    def _gates(self, ours: str, full: str, order: Any) -> Iterator[tuple[str, Any, slice]]:
        """Yields the arrays of the source that are the rows of one of the module."""
        gates = getattr(self.net, "GATES", {}).get(ours)
        if gates is None:
            yield full, order, slice(None)
            return
        pattern, names, order = gates
        begin = 0
        for gate in names:
            part = pattern.format(gate)
            shape = self._shape(part)
            assert shape is not None
            end = begin + shape[0 if order is None else order[0]]
            yield part, order, slice(begin, end)
            begin = end

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of an array of the source or of a row of one; None if it has none."""
        for path in reversed(getattr(self.net, "STACKED", {})):
            if name not in self.weights and name.startswith(f"{path}."):
                _, _, rest = name[len(path) + 1 :].partition(".")
                shape = self._shape(f"{path}.{rest}" if rest else path)
                return None if shape is None else shape[1:]
        return tuple(self.weights[name].shape) if name in self.weights else None

    def _as_in_source(self, value: torch.Tensor, order: Any, name: str) -> Any:
        """Returns an array in the layout of the source."""
        array, shape = value.detach().numpy(), self._shape(name)
        assert shape is not None
        if order is None:
            return array.reshape(shape)
        axes = [max(i, ~i) for i in order]
        flipped = tuple(at for at, i in enumerate(order) if i < 0)
        array = np.flip(array.reshape([shape[i] for i in axes]), flipped)
        return array.transpose(np.argsort(axes))


def _waves(x: torch.Tensor) -> torch.Tensor:
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return torch.cos(torch.arange(x.numel(), dtype=dtype)).reshape(x.shape)


def _rows(value: torch.Tensor, rows: slice) -> torch.Tensor:
    return value[rows] if value.ndim else value
