"""Reads the parameters of a module's forward, and the sizes that may vary."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fmapper.programs import Input, Parameter


def symbols(
    exported: torch.export.ExportedProgram,
) -> dict[str, tuple[int | None, int | None]]:
    """Maps varying sizes to their bounds."""
    return {
        str(symbol): (_bound(span.lower), _bound(span.upper))
        for symbol, span in exported.range_constraints.items()
    }


def _bound(value: Any) -> int | None:
    """Returns a bound as an integer; None for torch's infinity."""
    try:
        return int(value) if math.isfinite(float(value)) and abs(int(value)) < 2**62 else None
    except (TypeError, ValueError, OverflowError):
        return None


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}


def parameters(module: torch.nn.Module) -> tuple[Parameter, ...]:
    """Returns the parameters of `forward`."""
    entries = []
    for parameter in inspect.signature(module.forward).parameters.values():
        default = parameter.default
        required = default is inspect.Parameter.empty
        plain = default is None or isinstance(default, bool | int | float | str)
        entries.append(
            Parameter(
                parameter.name,
                _KINDS[parameter.kind],
                default if plain and not required else None,
                required,
            )
        )
    return tuple(entries)


def ones_like(module: torch.nn.Module, inputs: Mapping[str, Input]) -> dict[str, str]:
    """Returns the masks that a model may be called without: token masks of transformers.

    Without a mask, these models attend to all tokens, as with a mask of ones.

    Args:
        module: The model.
        inputs: The inputs that it was recorded for, by their paths.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return {}
    arguments = inspect.signature(module.forward).parameters
    is_optional = "attention_mask" in arguments and arguments["attention_mask"].default is None
    mask, tokens = (inputs.get(name) for name in ("attention_mask", "input_ids"))
    if not is_optional or mask is None or tokens is None:
        return {}
    shapes = [[n if isinstance(n, int) else None for n in entry.shape] for entry in (mask, tokens)]
    return {"attention_mask": "input_ids"} if shapes[0] == shapes[1] else {}


def own_inputs(signature: Any, nodes: Sequence[torch.fx.Node]) -> list[str]:
    """Returns the names of a graph's inputs, without those that torch created for constants."""
    made = ("CONSTANT_TENSOR", "CUSTOM_OBJ", "TOKEN")
    pairs = zip(signature.input_specs, nodes, strict=True)
    return [node.name for spec, node in pairs if spec.kind.name not in made]


def buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers by name, without those that only the code of converted submodules uses."""
    constants = tuple(
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if hasattr(part, "constants_of_programs")
        for name in part.constants_of_programs()
    )
    for name, array in module.named_buffers(remove_duplicate=False):
        if not name.startswith(constants):
            yield name, array
