"""Records the two programs of a model that generates."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from fmapper import ConversionError, ConversionWarning, NotCompiledWarning, fmap, to_cpu
from fmapper.generation import Decoding, Generation, read_config
from fmapper.programs import Graph, Program
from fmapper_adapters.torch.generation import recurrent, refusals, rotary
from fmapper_adapters.torch.record.export import export_program, level_of_user
from fmapper_adapters.torch.record.modes import mode

_COLUMNS = 7  # columns of the example prompts, unlike any other size
_MOST_COLUMNS = 1 << 15  # if a model sets no limit
_FEWER = re.compile(r"Dim\('columns', max=(\d+)\)")  # torch's suggestion
_TOP_K = 50  # the default of `generate`
_LEAST = 2  # columns; torch would fix a size of one


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
    options: Mapping[str, Any] | None = None,
) -> Generation:
    """Records a model's programs for a prompt and for a step, and its settings.

    Raises:
        ConversionError: The model cannot be recorded, or does not generate.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "meta"):
        # Trials exceed the cache, after which a GPU cannot be used.
        model = to_cpu(model)
    config = getattr(model, "generation_config", None) or {}
    if not isinstance(config, Mapping):
        config = config.to_dict()
        if config.get("top_k") is None:
            config["top_k"] = _TOP_K
    decoding, unsupported = read_config(config)
    rows = batch * decoding.with_options(options or {}).copies
    protocol, prefix = _protocol_of(model, max_length, rows)
    with rotary.without_memory(protocol):
        generation = _export(model, protocol, prefix, max_length, rows, check=check, whole=whole)
    generation = replace(generation, decoding=decoding, unsupported=unsupported)
    return generation if device.type in ("cpu", "meta") else _on(device, generation)


def _on(device: torch.device, generation: Generation) -> Generation:
    """Returns programs with their arrays on a device; shared arrays stay shared."""
    programs = {"prefill": generation.prefill, "step": generation.step}
    groups = ("parameters", "buffers", "constants")
    held = {
        name: {group: dict(getattr(program, group)) for group in groups}
        for name, program in programs.items()
        if program is not None
    }
    changed: Any = fmap(lambda tensor: tensor.to(device), held)
    for name, arrays in changed.items():
        changed[name] = replace(getattr(generation, name), **arrays)
    return replace(generation, **changed)


def _export(
    model: Any,
    protocol: Any,
    prefix: str,
    max_length: int,
    batch: int,
    *,
    check: bool,
    whole: Collection[str],
) -> Generation:
    most = _most_columns(protocol, max_length)
    tokens = torch.ones((batch, min(_COLUMNS, most)), dtype=torch.int64)
    mask = torch.ones_like(tokens)
    settings: dict[str, Any] = {"check": check, "whole": whole}
    lengths: tuple[int, ...] = ()
    prefill = example = None
    places = None if protocol is model else max_length
    with mode(protocol, train=False), torch.no_grad():
        try:
            example = refusals.prefill(protocol, tokens, mask, places)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if protocol is not model or isinstance(error, ConversionError):
                raise  # a user's module may accept only prompts of the full width
    try:
        if not getattr(protocol, "by_steps", False):
            prefill, most = _of_any_columns(protocol, (tokens, mask), most, settings)
    except ConversionError:
        # A recurrent model's code goes over the prompt in Python.
        if not getattr(protocol, "is_recurrent", False):
            tokens = torch.ones((batch, max_length), dtype=torch.int64)
            mask, lengths = torch.ones_like(tokens), (max_length,)
            example = None
            prefill = export_program(_Prefill(protocol), (tokens, mask), {}, **settings)
    with mode(protocol, train=False), torch.no_grad():
        logits, cache = example or refusals.prefill(protocol, tokens, mask, None)
    columns: Any = torch.export.Dim("columns", min=_LEAST, max=most)
    sizes = None
    if hasattr(protocol, "sizes") and not lengths:
        sizes = {"tokens": None, "cache": protocol.sizes(cache, columns)}
    given = (logits.argmax(-1), cache)
    step = export_program(_Step(protocol), given, {}, dynamic_shapes=sizes, **settings)
    return Generation(
        prefill=None if prefill is None else _rename(prefill, prefix),
        step=_rename(step, prefix),
        decoding=Decoding(),
        unsupported=(),
        max_length=max_length,
        batch=batch,
        vocabulary=logits.shape[-1],
        columns=max_length if lengths else most,
        padding="right" if prefill is None else getattr(protocol, "padding", "left"),
        start=getattr(protocol, "start", ()),
        counts_padding=getattr(protocol, "counts_padding", False),
        lengths=lengths,
        name=type(model).__name__,
    )


def _of_any_columns(
    protocol: Any, given: tuple[Any, Any], most: int, settings: dict[str, Any]
) -> tuple[Program, int]:
    """Records the program of a prompt of any width, and returns its largest width.

    An encoder may treat longer prompts differently, in windows: it gets shorter ones.
    """
    while True:
        columns = torch.export.Dim("columns", min=_LEAST, max=most)
        shapes = {"tokens": {1: columns}, "mask": {1: columns}}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotCompiledWarning)  # the program may be dropped
                made = export_program(
                    _Prefill(protocol), given, {}, dynamic_shapes=shapes, **settings
                )
        except ConversionError as error:
            match = _FEWER.search(str(error.__cause__))
            encodes = bool(getattr(protocol, "start", ""))
            fewer = int(match[1]) if match and encodes else most
            if not _COLUMNS <= fewer < most:
                raise
            most = fewer
            continue
        if made.has_unknown_sizes():
            raise ConversionError("sizes that depend on values need a fixed number of columns")
        return made, most


def _protocol_of(model: Any, max_length: int, batch: int) -> tuple[Any, str]:
    """Returns the object with `prefill` and `step`, and the prefix of its array names."""
    if callable(getattr(model, "prefill", None)) and callable(getattr(model, "step", None)):
        return model, "of."
    config = getattr(model, "generation_config", None)
    if config is None or not hasattr(model, "prepare_inputs_for_generation"):
        raise ConversionError(
            f"{type(model).__name__} cannot generate: it is neither a transformers model with "
            "generate, nor does it have the methods prefill(tokens, mask) and step(tokens, cache), "
            "each of which returns logits and a cache; see fmapper.generator."
        )
    _refuse_other_inputs(model)
    if model.config.is_encoder_decoder:
        from fmapper_adapters.torch.generation.encoder_decoder import EncoderDecoder

        start = config.decoder_start_token_id
        start = config.bos_token_id if start is None else start
        if not isinstance(start, int):
            raise ConversionError(
                f"{type(model).__name__}: its generation_config has decoder_start_token_id={start}"
                ": set it to the token that answers begin with"
            )
        return EncoderDecoder(model, max_length, (start,)), "of.model."
    if kind := recurrent.KINDS.get(model.config.model_type):
        return kind(model, batch), "of.model."
    from fmapper_adapters.torch.generation.causal_lm import CausalLM

    protocol = CausalLM(model, max_length)
    if not protocol.cache_name:
        from fmapper_adapters.torch.generation.uncached import without_cache

        protocol = without_cache(model, max_length)
        warnings.warn(
            f"{type(model).__name__} keeps no cache that fmapper knows: the generator computes the "
            "whole text again for each token. For a cache, give it the methods prefill and step; "
            "see fmapper.generator",
            ConversionWarning,
            stacklevel=level_of_user(),
        )
    return protocol, "of.model."


def _refuse_other_inputs(model: Any) -> None:
    """Raises for a model that generates from something other than tokens, such as speech.

    Raises:
        ConversionError: The main input is not tokens, or forward needs another argument.
    """
    parameters = inspect.signature(model.forward).parameters
    name = getattr(model, "main_input_name", "input_ids")
    needed = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    others = [key for key in (name, *needed) if key != "input_ids"]
    if others:
        tokens = "decoder_input_ids" if "decoder_input_ids" in parameters else "input_ids"
        also = f", with {tokens} among the example inputs" if tokens in parameters else ""
        raise ConversionError(
            f"{type(model).__name__} generates from {others[0]}, and a generator takes tokens. "
            f"Convert it with fmapper.convert{also}, and choose the tokens yourself; or give it "
            "the methods prefill and step, see fmapper.generator."
        )


def _most_columns(protocol: Any, max_length: int) -> int:
    """Returns the largest width of a prompt; encoders have their own limit."""
    if not getattr(protocol, "start", ()):
        return max_length
    config = protocol.config.get_text_config(encoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit >= _LEAST else _MOST_COLUMNS


def _rename(program: Program, prefix: str) -> Program:
    """Renames the arrays of a program as in the model."""

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
            return {key: inner(item) for key, item in value.items()}
        return value

    return replace(
        program,
        graph=inner(program.graph),
        inputs=tuple(replace(i, target=cut(i.target)) for i in program.inputs),
        outputs=tuple(replace(o, target=cut(o.target)) for o in program.outputs),
        parameters={cut(name): array for name, array in program.parameters.items()},
        buffers={cut(name): array for name, array in program.buffers.items()},
        constants={cut(name): array for name, array in program.constants.items()},
        aliases={cut(name): cut(first) for name, first in program.aliases.items()},
        frozen=tuple(map(cut, program.frozen)),
        transient=tuple(map(cut, program.transient)),
        axes={cut(name): axes for name, axes in program.axes.items()},
    )
