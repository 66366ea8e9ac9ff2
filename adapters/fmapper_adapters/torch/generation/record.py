"""Records the two programs of a model that generates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from fmapper import ConversionError
from fmapper.generation import Generation, read_config
from fmapper.programs import Graph, Program
from fmapper_adapters.torch.record.export import export_program

_COLUMNS = 7  # of the prompts that are the example: neither a power of two nor any other size
_LEAST = 2  # columns: torch takes a size of one for fixed


class _Prefill(torch.nn.Module):
    """The program of a prompt."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.of = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Returns logits and cache."""
        logits, cache = self.of.prefill(tokens, mask)
        return {"logits": logits, "cache": cache}


class _Step(torch.nn.Module):
    """The program of one token after the prompt."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.of = model

    def forward(self, tokens: torch.Tensor, cache: Any) -> dict[str, Any]:
        """Returns logits and cache."""
        logits, cache = self.of.step(tokens, cache)
        return {"logits": logits, "cache": cache}


def export_generation(
    model: torch.nn.Module,
    *,
    max_length: int,
    batch: int,
    check: bool,
    whole: Collection[str],
) -> Generation:
    """Returns the programs of a model for a prompt and for a step, and how it is to generate.

    Raises:
        ConversionError: It cannot be recorded, or is not a model that generates.
    """
    own, prefix, config = _protocol_of(model, max_length)
    tokens = torch.ones((batch, min(_COLUMNS, max_length)), dtype=torch.int64)
    mask = torch.ones_like(tokens)
    settings: dict[str, Any] = {"check": check, "whole": whole}
    columns = {1: torch.export.Dim("columns", min=_LEAST, max=max_length)}
    shapes = {"tokens": columns, "mask": columns}
    prefill = export_program(_Prefill(own), (tokens, mask), {}, dynamic_shapes=shapes, **settings)
    with torch.no_grad():
        was = {inner: inner.training for inner in own.modules()}
        own.eval()
        logits, cache = own.prefill(tokens, mask)
        for inner, training in was.items():
            inner.training = training
    step = export_program(_Step(own), (logits.argmax(-1), cache), {}, **settings)
    decoding, unsupported = read_config(config)
    return Generation(
        prefill=_renamed(prefill, prefix),
        step=_renamed(step, prefix),
        decoding=decoding,
        unsupported=unsupported,
        max_length=max_length,
        batch=batch,
        vocabulary=logits.shape[-1],
        padding=own.padding,
        name=type(model).__name__,
    )


def _protocol_of(model: Any, max_length: int) -> tuple[Any, str, Mapping[str, Any]]:
    """Returns what has `prefill` and `step`, the prefix of its names, and its configuration."""
    if callable(getattr(model, "prefill", None)) and callable(getattr(model, "step", None)):
        return model, "of.", getattr(model, "generation_config", None) or {}
    config = getattr(model, "generation_config", None)
    if config is None or not hasattr(model, "prepare_inputs_for_generation"):
        raise ConversionError(
            f"{type(model).__name__} does not generate: it is neither a model of transformers with "
            "generate, nor has it the methods prefill(tokens, mask) and step(tokens, cache), each "
            "of which returns logits and a cache; see fmapper.generator."
        )
    from fmapper_adapters.torch.generation.causal_lm import CausalLM

    return CausalLM(model, max_length), "of.model.", config.to_dict()


def _renamed(program: Program, prefix: str) -> Program:
    """Returns a program with the names that its arrays have in the model."""

    def cut(name: Any) -> Any:
        return name.removeprefix(prefix) if isinstance(name, str) else name

    def inner(value: Any) -> Any:
        if isinstance(value, Graph):
            calls = [
                replace(
                    call,
                    args=inner(call.args),
                    kwargs=inner(call.kwargs),
                    module=f"{call.module}.".removeprefix(prefix).rstrip("."),
                )
                for call in value.calls
            ]
            return Graph(value.inputs, calls, value.outputs, value.kinds)
        if isinstance(value, tuple):
            return tuple(map(inner, value))
        if isinstance(value, Mapping):
            return {key: inner(one) for key, one in value.items()}
        return value

    return replace(
        program,
        graph=inner(program.graph),
        inputs=tuple(replace(i, target=cut(i.target)) for i in program.inputs),
        outputs=tuple(replace(o, target=cut(o.target)) for o in program.outputs),
        parameters={cut(name): array for name, array in program.parameters.items()},
        buffers={cut(name): array for name, array in program.buffers.items()},
        constants={cut(name): array for name, array in program.constants.items()},
        aliases={cut(name): cut(own) for name, own in program.aliases.items()},
        frozen=tuple(map(cut, program.frozen)),
        transient=tuple(map(cut, program.transient)),
    )
