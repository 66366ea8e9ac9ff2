"""Parts of libraries that call layers and activations one after the other, as `nn.Sequential`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fmapper.translation import Call, Layer, Ref, Structure, Unit, expr, is_of_library, local_array
from fmapper_adapters.torch.translation.layers.site import name_of

_ACTIVATIONS = {
    "F.relu": "nn.ReLU()", "F.silu": "nn.SiLU()", "torch.tanh": "nn.Tanh()", "F.elu": "nn.ELU()",
    "torch.sigmoid": "nn.Sigmoid()", "F.softplus": "nn.Softplus()", "F.selu": "nn.SELU()",
    "F.logsigmoid": "nn.LogSigmoid()", "F.relu6": "nn.ReLU6()",
}  # fmt: skip
_USUAL = {"inplace": False, "alpha": 1.0, "beta": 1.0, "threshold": 20.0}
_Find = Callable[..., Layer | None]


def layer_of_unit(structure: Structure, unit: Unit, of_unit: _Find, of_call: _Find) -> Layer | None:
    """Returns the sequence that a part of a library is, such as a multilayer perceptron.

    Args:
        structure: The program.
        unit: The part.
        of_unit: Returns the layer that a part is.
        of_call: Returns the layer that a call of a part is.
    """
    given = [name for name in unit.given if local_array(structure, unit, name) is None]
    is_part = is_of_library(structure, unit) and len(unit.gives) == len(given) == 1
    if not is_part:
        return None
    chain = _Chain(structure, of_unit, of_call, given[0])
    if not chain.run(unit) or chain.value != unit.gives[0] or not chain.arrays:
        return None
    if len(chain.made) < 2:
        return None
    made = ast.Call(expr("nn.Sequential"), chain.made, [])
    return Layer(
        made, (given[0],), chain.value, chain.arrays, "nn.Sequential", "net", inner=chain.inner
    )


@dataclass(slots=True)
class _Chain:
    """Modules that are called one after the other.

    Attributes:
        structure: The program.
        of_unit: Returns the layer that a part is.
        of_call: Returns the layer that a call of a part is.
        value: What the last one gives.
        made: The code for each.
        arrays: As a layer has them.
        inner: The classes of the layers, by their positions.
    """

    structure: Structure
    of_unit: _Find
    of_call: _Find
    value: str
    made: list[ast.expr] = field(default_factory=list)
    arrays: dict[str, tuple[str, Any]] = field(default_factory=dict)
    inner: dict[str, str] = field(default_factory=dict)

    def run(self, unit: Unit) -> bool:
        """Appends the steps of a part; returns whether all of them could be."""
        return all(self._take(unit, step) for step in unit.steps)

    def _take(self, unit: Unit, step: Call | Unit) -> bool:
        if isinstance(step, Unit):
            layer = self.of_unit(self.structure, step)
            return self._append(layer) if layer is not None else self.run(step)
        layer = self.of_call(self.structure, unit, step)
        if layer is not None:
            return self._append(layer)
        code = self._activation(step)
        if code is None:
            return False
        self.made.append(expr(code))
        self.value = step.name
        return True

    def _append(self, layer: Layer) -> bool:
        path = str(len(self.made))
        for array, (attr, order) in layer.arrays.items():
            self.arrays[array] = (f"{path}.{attr}", order)
        self.inner[path] = layer.kind
        self.inner |= {f"{path}.{key}": kind for key, kind in layer.inner.items()}
        self.made.append(layer.made)
        takes = layer.inputs == (self.value,) and not layer.results and not layer.draws
        self.value = layer.output
        return takes

    def _activation(self, call: Call) -> str | None:
        """Returns the module that computes a function of the last value alone."""
        name, rest = name_of(call), call.args[1:]
        if call.args[:1] != (Ref(self.value),):
            return None
        if name == "F.threshold" and rest == (0.0, 0.0):
            return "nn.ReLU()"
        if name == "F.gelu":
            kind = (*rest, call.kwargs.get("approximate", "none"))[0]
            return "nn.GELU()" if kind == "none" else f"nn.GELU(approximate={kind!r})"
        if name == "squeeze" and rest == (1,):
            shape = self.structure.values[self.value][1]
            return "nn.Flatten(0)" if len(shape) == 2 else None
        known = all(_USUAL.get(key, value) == value for key, value in call.kwargs.items())
        return _ACTIVATIONS.get(name) if known and not rest else None
