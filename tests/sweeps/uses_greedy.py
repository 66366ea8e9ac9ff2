"""Greedy decoding with a converted model and its own cache, against `generate` of torch."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

from sweeps import sweeping, zoo
from sweeps.using import TOLERANCE, Arrays, CannotError, Found, arrays

NEW_TOKENS = 5
CACHES = ("past_key_values", "cache_params", "mems", "past_buckets_states")


@dataclass
class Recorded:
    """A call of a module: what it got and gave, with caches as they were then.

    The tensors that it gave are kept by themselves: who called may change what holds them.
    """

    module: Any
    given: Arrays
    gave: Any
    tensors: list[Any]


def greedy(model: Any, inputs: Arrays) -> Found:
    """Greedy decoding in JAX with the model's own cache, against `generate` of torch.

    `generate` says which modules are called and what they get. Of this the loop in JAX takes what
    does not depend on what is generated (masks, positions); tokens, caches and what an encoder
    gives are its own.
    """
    import jax.numpy as jnp
    import torch

    import fmapper

    calls, tokens = generated(model, inputs)
    decoder = max(
        (call.module for call in calls), key=lambda m: sum(call.module is m for call in calls)
    )
    steps = [call for call in calls if call.module is decoder]
    cache = next((name for name in CACHES if steps[-1].given.get(name) is not None), None)
    if len(steps) < 2 or cache is None:
        raise CannotError("its generate uses no cache")
    if steps[-1].gave.get(cache) is None:
        raise CannotError(f"its outputs have no {cache}: the state is in attributes of modules")
    known: dict[int, Any] = {}
    for call in calls:
        if call.module is not decoder:
            converted = fmapper.convert(call.module, "jax", (), call.given)
            gave = converted.call((), translated(call.given, known)).output
            known |= {id(t): x for x, t in zip(parts(gave), call.tensors, strict=True)}
    steps[0].given.pop(cache, None)  # an empty one: it makes that itself
    start, step = (
        fmapper.convert(decoder, "jax", (), call.given, dynamic_shapes=shapes)
        for call, shapes in zip(steps[:2], (None, "auto"), strict=True)
    )
    ids = "decoder_input_ids" if "decoder_input_ids" in steps[1].given else "input_ids"
    token, state, found, worst, programs = None, None, [], 0.0, 2
    for turn, call in enumerate(steps):
        given = translated({n: x for n, x in call.given.items() if turn == 0 or n != cache}, known)
        if turn:
            token = token[:, None].astype(given[ids].dtype)
            if given[ids].shape[1] > 1:  # some tokens again, and a place for the next one
                row = jnp.concatenate([arrays(inputs[ids]), *(x[:, None] for x in found)], 1)
                token = row[:, 1 - given[ids].shape[1] :]
                token = jnp.concatenate([token, given[ids][:, -1:]], 1)
            given |= {cache: as_long_as(call.given[cache], state), ids: token}
        try:
            output = (step if turn else start).call((), given).output
        except fmapper.ProgramInputError as error:
            if turn < 2 or "sizes are fixed" not in str(error):
                raise
            # The cache counts in Python, so torch records it for this length only.
            programs += 1
            output = fmapper.convert(decoder, "jax", (), call.given).call((), given).output
        state = output[cache]
        worst = max(worst, zoo.difference(output["logits"], call.gave["logits"])[0])
        token = output["logits"][:, -1].argmax(-1)
        found.append(token)
        if worst > TOLERANCE:
            return {"class": "MISMATCH", "reason": f"logits of step {turn} are off by {worst:.2e}"}
    got = torch.tensor(jnp.stack(found, 1).tolist())
    want = tokens[:, -got.shape[1] :]
    kind = "ok" if torch.equal(got, want) else "MISMATCH"
    reason = "" if kind == "ok" else f"{got.tolist()} instead of {want.tolist()}"
    return {"class": kind, "reason": reason, "worst": worst, "programs": programs}


def as_long_as(theirs: Any, state: Any) -> Any:
    """Plain arrays of a cache cut to the length of torch's, which `generate` may have cut."""
    if not isinstance(theirs, tuple) or not all(hasattr(x, "shape") for x in theirs):
        return state
    return tuple(x[: len(y)] for x, y in zip(state, theirs, strict=True))


def generated(model: Any, inputs: Arrays) -> tuple[list[Recorded], Any]:
    """The calls of modules that `generate` makes, the outermost ones, and the tokens it gives."""
    import torch
    from transformers import GenerationMixin

    config = getattr(model, "generation_config", None)
    if config is None:
        raise CannotError("it has no generate")
    config.eos_token_id = None
    if config.decoder_start_token_id is None:
        config.decoder_start_token_id = 2
    config.forced_eos_token_id = None
    config.pad_token_id = 0
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        setattr(config, name, None)
    calls: list[Recorded] = []
    depth: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        if not depth:
            names = list(inspect.signature(module.forward).parameters)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            frozen = {n: copy.deepcopy(x) if n in CACHES else x for n, x in given.items()}
            calls.append(Recorded(module, frozen, None, []))
        depth.append(module)

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        depth.pop()
        if not depth:
            calls[-1].gave, calls[-1].tensors = output, parts(output)

    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
    ]
    own = type(model).__name__.startswith("Blip")  # its generate is that of its decoder
    call = model.generate if own else functools.partial(GenerationMixin.generate, model)
    given = {n: x for n, x in inputs.items() if n != "decoder_attention_mask"}
    try:
        with torch.no_grad():
            tokens = call(**given, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
    except Exception as error:
        raise CannotError(f"generate: {sweeping.reason(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls, tokens


def parts(tree: Any) -> list[Any]:
    """The arrays in outputs, caches left out."""
    if isinstance(tree, dict):
        return [x for key, value in tree.items() if key not in CACHES for x in parts(value)]
    if isinstance(tree, list | tuple):
        return [x for value in tree for x in parts(value)]
    return [tree] if hasattr(tree, "shape") else []


def translated(tree: Any, known: dict[int, Any]) -> Any:
    """Inputs as JAX arrays; of those that a converted module has given, its own."""
    import torch

    import fmapper

    def one(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        return known[id(x)] if id(x) in known else fmapper.to_jax(x.detach().clone())

    return fmapper.fmap(one, tree)
