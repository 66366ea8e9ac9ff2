"""How tokens are chosen, against the processors of transformers."""

from __future__ import annotations

from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")

from fmapper.generation import Decoding  # noqa: E402

ROWS, VOCABULARY, PROMPT, PLACES = 4, 50, 8, 20


def state(seed: int = 0) -> tuple[Any, Any]:
    """Logits, and the tokens before them."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(ROWS, VOCABULARY)).astype("float32") * 3
    return logits, draw.integers(0, VOCABULARY, (ROWS, PROMPT))


def ours(logits: Any, tokens: Any, **options: Any) -> Any:
    """What fmapper makes of logits, at the first new place."""
    from fmapper_adapters.jax.generation import choose

    decoding = Decoding().with_options(options)
    knobs = choose.settings(decoding, None, ROWS, VOCABULARY, PROMPT, PLACES)
    fixed = choose.Fixed(
        decoding.do_sample, decoding.top_k, decoding.no_repeat_ngram_size, scores=False
    )
    places = np.zeros((ROWS, PLACES), "int32")
    places[:, :PROMPT] = tokens
    seen = np.zeros(logits.shape, bool)
    seen[np.arange(ROWS)[:, None], tokens] = True
    run = jax.jit(choose.process, static_argnums=1)
    return np.asarray(run(logits, fixed, knobs, places, PROMPT, seen))


def theirs(logits: Any, tokens: Any, **options: Any) -> Any:
    """What transformers makes of them."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=1)
    )
    config = transformers.GenerationConfig(**{"eos_token_id": None, "top_k": 0, **options})
    model._prepare_special_tokens(config)
    found = model._get_logits_processor(config, input_ids_seq_length=PROMPT)
    return found(torch.from_numpy(tokens), torch.from_numpy(logits)).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 2, "eos_token_id": [3, 4]},
        {"min_length": 9, "eos_token_id": 7},
        {"min_length": 8, "eos_token_id": 7},
        {"suppress_tokens": [1, 2, 30]},
        {"begin_suppress_tokens": [1, 2, 30]},
        {"do_sample": True, "temperature": 0.3},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "top_k": 500},
        {"do_sample": True, "top_p": 0.7},
        {"do_sample": True, "top_p": 0.01},
        {"do_sample": True, "min_p": 0.1},
        {"do_sample": True, "typical_p": 0.6},
        {"do_sample": True, "epsilon_cutoff": 0.02},
        {"do_sample": True, "temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
        {"do_sample": True, "repetition_penalty": 0.8, "no_repeat_ngram_size": 2, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_the_processors(options: dict[str, Any], seed: int) -> None:
    logits, tokens = state(seed)
    tokens[0, :4] = tokens[0, 4:]  # what may repeat itself
    want = theirs(logits, tokens, **options)
    np.testing.assert_allclose(ours(logits, tokens, **options), want, rtol=2e-6)


def test_tokens_are_drawn_as_often_as_their_logits_say() -> None:
    from fmapper_adapters.jax.generation import choose

    fixed = choose.Fixed(sample=True, top_k=0, ngram=0, scores=False)
    shares = np.array([0.5, 0.3, 0.2, 0.0])
    logits = np.broadcast_to(np.log(shares + 1e-30), (20_000, 4)).astype("float32")
    found = np.bincount(choose.pick(logits, fixed, jax.random.key(3), 0), minlength=4) / 20_000
    np.testing.assert_allclose(found, shares, atol=0.015)


def test_a_row_draws_the_same_in_every_batch() -> None:
    from fmapper_adapters.jax.generation import choose

    fixed = choose.Fixed(sample=True, top_k=0, ngram=0, scores=False)
    logits, _ = state()
    key = jax.random.key(1)
    whole = choose.pick(logits, fixed, key, 5)
    assert np.array_equal(choose.pick(logits[:2], fixed, key, 5), whole[:2])
    others = [choose.pick(logits, fixed, key, count) for count in range(8)]
    assert len({tuple(np.asarray(one).tolist()) for one in others}) > 4
