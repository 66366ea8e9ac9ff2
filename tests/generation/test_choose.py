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
    shape = (ROWS, PLACES)
    knobs = choose.settings(decoding, None, shape, VOCABULARY, PROMPT, PLACES, tokens)
    fixed = choose.static_settings(decoding, None)
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
    given = {"input_ids_seq_length": PROMPT, "encoder_input_ids": torch.from_numpy(tokens)}
    found = model._get_logits_processor(config, **given)
    return found(torch.from_numpy(tokens), torch.from_numpy(logits)).numpy()


@pytest.mark.sampled(18)
@pytest.mark.nightly_cases("0-{'repetition_penalty': 1.7}")
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
        {"do_sample": True, "top_h": 0.4},
        {"do_sample": True, "top_h": 0.01},
        {"do_sample": True, "eta_cutoff": 0.02},
        {"do_sample": True, "eta_cutoff": 0.9},
        {"renormalize_logits": True, "suppress_tokens": [1, 2]},
        {"encoder_repetition_penalty": 1.7},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 3},
        {"encoder_no_repeat_ngram_size": 9},
        {"no_repeat_ngram_size": 40},
        {"bad_words_ids": [[3], [1, 2, 4], [7]], "eos_token_id": 7},
        {"sequence_bias": [[[3], 2.5], [[5], -1.5]]},
        {"exponential_decay_length_penalty": (0, 1.5), "eos_token_id": [3, 4]},
        {"remove_invalid_values": True, "no_repeat_ngram_size": 1},
        {
            "do_sample": True,
            "top_h": 0.8,
            "top_k": 20,
            "eta_cutoff": 0.01,
            "renormalize_logits": True,
        },
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


def test_sequences_go_by_the_tokens_before() -> None:
    logits, tokens = state()
    tokens[0, -2:] = 5, 6
    tokens[1, -1:] = 6
    words = [[5, 6, 7], [6, 8], [6, 9], [1] * (PROMPT + 1) + [2]]
    found = ours(logits, tokens, bad_words_ids=words)
    assert np.array_equal(found, theirs(logits, tokens, bad_words_ids=words))
    assert np.argwhere(np.isinf(found)).tolist() == [[0, 7], [0, 8], [0, 9], [1, 8], [1, 9]]
    biases = [[[5, 6, 7], 1.5], [[6, 7], -2.5], [[7], 0.5]]
    want = theirs(logits, tokens, sequence_bias=biases)
    np.testing.assert_allclose(ours(logits, tokens, sequence_bias=biases), want, rtol=2e-6)


def test_stop_tokens_rise_the_later_the_more() -> None:
    from fmapper_adapters.jax.generation import choose

    logits, tokens = state()
    options: dict[str, Any] = {"exponential_decay_length_penalty": (2, 1.3), "eos_token_id": [3]}
    decoding = Decoding().with_options(options)
    knobs = choose.settings(decoding, None, (ROWS, PLACES), VOCABULARY, 2, PLACES, tokens)
    places = np.zeros((ROWS, PLACES), "int32")
    for at in (3, 4, 5, 8):
        processor = transformers.ExponentialDecayLengthPenalty((2, 1.3), [3], 2)
        want = processor(torch.from_numpy(tokens[:, :at]), torch.from_numpy(logits))
        found = choose.process(
            logits, choose.static_settings(decoding, None), knobs, places, at, None
        )
        np.testing.assert_allclose(found, want, rtol=2e-6)


def test_what_is_not_a_number_is_replaced() -> None:
    logits, tokens = state()
    logits[0, :3] = np.nan, np.inf, -np.inf
    found = ours(logits, tokens, remove_invalid_values=True)
    assert np.array_equal(found, theirs(logits, tokens, remove_invalid_values=True))


def test_a_token_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[5, 50\]: the vocabulary has only 50 tokens"):
        ours(*state(), bad_words_ids=[[5, 50]])


@pytest.mark.nightly
def test_tokens_are_drawn_as_often_as_their_logits_say() -> None:
    from fmapper_adapters.jax.generation import choose

    fixed = choose.Fixed(sample=True)
    shares = np.array([0.5, 0.3, 0.2, 0.0])
    logits = np.broadcast_to(np.log(shares + 1e-30), (20_000, 4)).astype("float32")
    found = np.bincount(choose.pick(logits, fixed, jax.random.key(3), 0), minlength=4) / 20_000
    np.testing.assert_allclose(found, shares, atol=0.015)


@pytest.mark.nightly
def test_a_row_draws_the_same_in_every_batch() -> None:
    from fmapper_adapters.jax.generation import choose

    fixed = choose.Fixed(sample=True)
    logits, _ = state()
    key = jax.random.key(1)
    whole = choose.pick(logits, fixed, key, 5)
    assert np.array_equal(choose.pick(logits[:2], fixed, key, 5), whole[:2])
    others = [choose.pick(logits, fixed, key, count) for count in range(8)]
    assert len({tuple(np.asarray(one).tolist()) for one in others}) > 4
