"""Generates text with every causal and encoder-decoder architecture of transformers, in tiny sizes.

Counted are those that generate with a static cache in torch. Greedy, 64 tokens, three prompts of
unequal lengths in one batch, against eager `generate`: the same tokens, and scores as near.
`nox -s generate` runs all; `nox -s generate -- '^llama/'` those whose names match.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import warnings
from typing import Any

from sweeps import sweeping, zoo
from sweeps.sweeping import Found

NEW_TOKENS = 64
MAX_LENGTH = 80
LENGTHS = (9, 5, 7)
TOLERANCE = 1e-3  # of scores, relative to the largest


def cases() -> dict[str, sweeping.Case]:
    """A case for each class, by `architecture/Class`."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        for kind, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    order = sorted(found)
    random.Random(0).shuffle(order)  # a sweep that is stopped early has seen a sample
    return {f"{found[name]}/{name}": functools.partial(case, name, found[name]) for name in order}


def case(name: str, kind: str) -> Found:
    """What became of one class."""
    import torch

    from models import tiny_models

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model = tiny_models.build(name, kind).model.eval()
    except tiny_models.CannotBuild as error:
        return {"class": "not built", "reason": str(error)}
    try:
        tokens, mask = prompts(model)
    except AttributeError:
        return {"class": "torch", "reason": "its tokens are of several codebooks, not of a text"}
    options = prepared(model)
    given = {"input_ids": tokens, "attention_mask": mask, **options}
    runs = []
    for cache, more in (("its own", {}), ("a static", {"cache_implementation": "static"})):
        try:
            with torch.no_grad():
                runs.append(model.generate(**given, **more))
        except Exception as error:
            reason = f"generate of torch, with {cache} cache: {sweeping.reason(error)}"
            return {"class": "torch", "reason": reason}
    return compared(model, tokens, mask, *runs)


def compared(model: Any, tokens: Any, mask: Any, want: Any, static: Any) -> Found:
    """What JAX generates, beside what torch does with both of its caches."""
    import numpy as np

    import fmapper

    try:
        generator = fmapper.generator(model, max_length=MAX_LENGTH, batch=len(LENGTHS), check=False)
    except fmapper.UnsupportedOpsError as error:
        return {"class": "unsupported", "reason": sweeping.reason(error)}
    except fmapper.ConversionError as error:
        return {"class": "refused", "reason": sweeping.reason(error)}
    found = generator(tokens, mask, max_new_tokens=NEW_TOKENS, scores=True)
    got = np.asarray(found.tokens)
    near = [worst(found.scores, one.scores) for one in (want, static)]
    agree = [bool(np.array_equal(got, one.sequences.numpy())) for one in (want, static)]
    more = {"worst": near[0], "caches agree": bool((want.sequences == static.sequences).all())}
    if any(same and far <= TOLERANCE for same, far in zip(agree, near, strict=True)):
        return {"class": "ok", "reason": "", **more}
    other = np.argwhere(got != want.sequences.numpy())
    reason = f"first other token at {other[0].tolist()}" if len(other) else f"scores: {near[0]:.1e}"
    return {"class": "MISMATCH", "reason": reason, **more}


def worst(scores: Any, wanted: Any) -> float:
    """How far scores are off at most, relative to the largest of a step."""
    import numpy as np

    found = 0.0
    for own, theirs in zip(np.moveaxis(np.asarray(scores), 1, 0), wanted, strict=False):
        other = theirs.float().numpy()
        finite = np.isfinite(other)
        if finite.any():
            scale = max(np.abs(other[finite]).max(), 1e-6)
            found = max(found, float(np.abs(own - other)[finite].max() / scale))
    return found


def prompts(model: Any) -> tuple[Any, Any]:
    """Prompts of unequal lengths: padded on the left, or on the right for an encoder."""
    import torch

    width, count = max(LENGTHS), model.get_input_embeddings().num_embeddings
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(min(5, count - 1), count, (len(LENGTHS), width), generator=draw)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(LENGTHS):
        mask[row, slice(length) if model.config.is_encoder_decoder else slice(-length, None)] = 1
    return tokens * mask, mask


def prepared(model: Any) -> dict[str, Any]:
    """Options of `generate`, which does nothing here but greedy search without an end."""
    config = model.generation_config
    config.eos_token_id, config.pad_token_id, config.num_beams = None, 0, 1
    config.forced_eos_token_id = config.forced_bos_token_id = None
    config.suppress_tokens = config.begin_suppress_tokens = None
    config.no_repeat_ngram_size = config.early_stopping = None
    if config.decoder_start_token_id is None and model.config.is_encoder_decoder:
        config.decoder_start_token_id = 2
    return {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "return_dict_in_generate": True,
        "output_scores": True,
    }


def main() -> None:
    """Runs the cases that the command line asks for, and writes the report."""
    options = sweeping.arguments(__doc__ or "", "generate").parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    zoo.prepare()
    from models import tiny_models

    tiny_models.build("LlamaForCausalLM", "llama")  # what transformers imports when used
    gc.freeze()  # or each process would copy all of it
    sweeping.sweep(cases(), options, "Generating text")


if __name__ == "__main__":
    main()
