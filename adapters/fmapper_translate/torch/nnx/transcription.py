"""A model of Flax NNX as a file for PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from fmapper.checkpoints import Rules
from fmapper.translation.source import format_code
from fmapper_adapters.jax.libraries import train_flags
from fmapper_translate.constructors.arguments import find_arguments
from fmapper_translate.functions import Function
from fmapper_translate.recording import record
from fmapper_translate.sources.nnx import NnxSource
from fmapper_translate.torch.files import File
from fmapper_translate.torch.nnx.arguments import NNX
from fmapper_translate.torch.tables import is_library_module, is_random
from fmapper_translate.torch.witness import functions_that_differ
from fmapper_translate.transcription import Transcription
from fmapper_translate.walk.errors import NotTranscribed
from fmapper_translate.walk.witness import run_file

Inputs = tuple[Any, ...]


def from_nnx(
    model: Any,
    inputs: Inputs | list[Inputs],
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> Transcription:
    """Writes a module of NNX as a file for PyTorch; see `transcribe`."""
    if not isinstance(model, nnx.Module):
        raise NotTranscribed(
            f"{type(model).__name__} is neither a module of PyTorch nor of Flax NNX"
        )
    cls = type(model)
    if is_library_module(cls):
        raise NotTranscribed(
            f"{cls.__name__} is Flax's own: only classes of a model are transcribed"
        )
    refuse_keys(cls, (inputs, dict(options or {})))
    args, kwargs = find_arguments(model, NNX) if arguments is None else arguments

    def make() -> Any:
        made = NNX.make(cls, args, kwargs)
        nnx.update(made, nnx.state(model, nnx.Not(nnx.RngState)))
        return made

    examples = inputs if isinstance(inputs, list) else [inputs]
    calls = [functools.partial(_call, example, options or {}) for example in examples]
    recording, twin = record(NnxSource(), make, calls)
    file = File(recording, twin)
    weights = _weights(model)

    def differ(code: str, example: str) -> dict[Function, str]:
        return functions_that_differ(code, example, recording, weights, examples, options or {})

    title = f"{cls.__name__} for PyTorch, transcribed from {cls.__module__}"
    code, example = file.write(title, args, kwargs, differ)
    rules = rules_of(code, example, weights)
    return Transcription(
        format_code(code), cls.__name__, example, weights, {}, rules=rules, target="torch",
        flags=flags_of(cls, examples[0], model),
    )  # fmt: skip


def refuse_keys(cls: type, given: Any) -> None:
    """Refuses calls with keys of random numbers among their inputs.

    Raises:
        NotTranscribed: There is one.
    """
    if any(map(is_random, jax.tree.leaves(given))):
        raise NotTranscribed(
            f"{cls.__name__} is called with a key of random numbers; a file draws its own, so "
            "nothing proves what it gives"
        )


def _call(inputs: Inputs, options: Mapping[str, Any], model: Any) -> object:
    return model(*inputs, **options)


def _weights(model: Any) -> dict[str, Any]:
    """Returns the arrays of a model by name, those that are shared once."""
    return {
        ".".join(map(str, path)): value.get_raw_value()
        for path, value in nnx.iter_graph(model)
        if isinstance(value, nnx.Variable) and not is_random(value)
    }


def flags_of(cls: type, inputs: Inputs, owner: Any = None) -> dict[str, bool]:
    """Returns the arguments by keyword that tell a model its mode -> their values in training."""
    found = train_flags.find_flags(cls.__call__, 1, inputs, owner)
    return {name: flag.in_training for name, flag in found.items() if flag.position is None}


def rules_of(code: str, example: str, weights: Mapping[str, Any]) -> Rules:
    """Returns the rules from the state of the model to the state dict of the file's."""
    space = run_file(code)
    model = eval(example, space)
    names = {id(tensor): name for name, tensor in
             [*model.named_buffers(), *model.named_parameters()]}  # fmt: skip
    places = {
        name: (names[id(tensor)], axes)
        for name, tensor, axes in space["named_arrays"](model)
        if name in weights
    }

    def rename(state: Mapping[str, Any]) -> dict[str, Any]:
        named = [(places[name], array) for name, array in state.items()]
        return {key: array.transpose(axes) if axes else array for (key, axes), array in named}

    saved = {name: jax.device_get(value) for name, value in weights.items()}
    return Rules(Rules.record(rename, saved, backend="numpy"))
