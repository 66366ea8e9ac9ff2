"""Beam search, against that of transformers."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")

from support.generating import in_torch, prompts, tiny  # noqa: E402

BEAMS = 4


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny("LlamaForCausalLM", initializer_range=0.3)  # or the best text is clear
    return model, fmapper.generator(model, max_length=40, batch=3, num_beams=BEAMS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2},
        {"num_beams": 3, "early_stopping": True},
        {"early_stopping": True},
        {"early_stopping": "never"},
        {"length_penalty": 2.0},
        {"length_penalty": -1.5},
        {"length_penalty": 0.0, "early_stopping": "never"},
        {"length_penalty": 3.0, "early_stopping": "never"},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"forced_eos_token_id": 9, "min_new_tokens": 4},
        {"renormalize_logits": True, "bad_words_ids": [[4, 5]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("stops", [None, [11, 12, 13], list(range(3, 40))], ids=["", "3", "37"])
def test_texts_are_those_of_generate(llama: Any, options: dict[str, Any], stops: Any) -> None:
    model, generator = llama
    tokens, mask = prompts()
    options = {"num_beams": BEAMS, "eos_token_id": stops, "pad_token_id": 2} | options
    found = generator(tokens, mask, max_new_tokens=12, **options)
    assert np.array_equal(found, in_torch(model, tokens, mask, 12, **options))


@pytest.mark.nightly
def test_answers_and_scores_are_the_best(llama: Any) -> None:
    model, generator = llama
    tokens, mask = prompts()
    options: dict[str, Any] = {
        "num_beams": BEAMS,
        "num_return_sequences": 3,
        "eos_token_id": [5, 6],
    }
    found = generator(tokens, mask, max_new_tokens=9, scores=True, **options)
    more = {"output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    want = in_torch(model, tokens, mask, 9, **options, **more)
    assert np.array_equal(found.tokens, want.sequences)
    np.testing.assert_allclose(found.scores, want.sequences_scores, rtol=1e-5)


@pytest.mark.nightly
def test_a_prompt_has_the_answer_that_it_has_alone(llama: Any) -> None:
    _, generator = llama
    tokens, mask = prompts()
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": list(range(3, 30))}
    whole = np.asarray(generator(tokens, mask, **options))
    for row in range(3):
        alone = np.asarray(generator(tokens[row : row + 1], mask[row : row + 1], **options))[0]
        assert np.array_equal(alone, whole[row, : len(alone)])
        assert set(whole[row, len(alone) :].tolist()) <= {3}


@pytest.mark.nightly
def test_rows_are_for_beams_or_for_prompts(llama: Any) -> None:
    model, generator = llama
    assert generator.batch == 3
    assert generator.with_options(num_beams=1).batch == 12
    tokens, mask = prompts(12)
    found = generator(tokens, mask, num_beams=1, max_new_tokens=5)
    assert np.array_equal(found, in_torch(model, tokens, mask, 5))
    five = generator(*prompts(2), num_beams=5, max_new_tokens=5)  # two rows are left
    assert np.array_equal(five, in_torch(model, *prompts(2), 5, num_beams=5))
    with pytest.raises(fmapper.ProgramInputError, match=r"each takes 4 rows.* with batch=16"):
        generator(*prompts(4), max_new_tokens=5)


@pytest.mark.nightly
def test_a_stream_has_no_beams(llama: Any) -> None:
    with pytest.raises(fmapper.ProgramInputError, match="pass num_beams=1"):
        llama[1].stream([[5]])


@pytest.mark.nightly
def test_beams_compile_nothing_anew(llama: Any) -> None:
    from fmapper_adapters.jax.generation import loop

    _, generator = llama
    options: dict[str, Any] = {"encoder_no_repeat_ngram_size": 3, "sequence_bias": {(5,): 1.0}}
    generator(*prompts(3, 5), max_new_tokens=3, **options)
    compiled: tuple[Any, ...] = loop.prefill, loop.begin, loop.loop
    before = [one._cache_size() for one in compiled]
    options["sequence_bias"] = {(6,): 2.0}
    for width in range(3, 12):
        generator(*prompts(2, width), max_new_tokens=width, length_penalty=width / 5, **options)
    assert [one._cache_size() for one in compiled] == before


@pytest.mark.nightly
def test_a_model_that_wants_beams_has_them(tmp_path: Any) -> None:
    from fmapper.generation import Generator

    model = tiny("LlamaForCausalLM", num_hidden_layers=1, initializer_range=0.3)
    model.generation_config.num_beams = 2
    tokens, mask = prompts()
    generator = fmapper.generator(model, max_length=20, batch=3, bad_words_ids=[[4], [5, 6]])
    found = generator(tokens, mask, max_new_tokens=6)
    assert np.array_equal(found, in_torch(model, tokens, mask, 6, bad_words_ids=[[4], [5, 6]]))
    generator.save(tmp_path / "beams.safetensors")
    loaded = Generator.load(tmp_path / "beams.safetensors")
    assert loaded.decoding == generator.decoding
    assert np.array_equal(loaded(tokens, mask, max_new_tokens=6), found)


@pytest.mark.nightly
def test_several_answers_are_drawn(llama: Any) -> None:
    _, generator = llama
    options: dict[str, Any] = {"do_sample": True, "num_beams": 1, "num_return_sequences": 3}
    found = np.asarray(generator([[5, 6], [7, 8]], max_new_tokens=6, key=0, **options))
    assert found[:, :2].tolist() == [[5, 6]] * 3 + [[7, 8]] * 3
    assert len({tuple(row) for row in found.tolist()}) == 6


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("MistralForCausalLM", {"sliding_window": 6}),
        ("MambaForCausalLM", {"state_size": 4}),
        ("T5ForConditionalGeneration", {"decoder_start_token_id": 0, "num_decoder_layers": 2}),
    ],
)
def test_every_kind_of_cache_goes_with_its_text(name: str, config: dict[str, Any]) -> None:
    model = tiny(name, **config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    generator = fmapper.generator(model, max_length=30, batch=3, num_beams=3)
    tokens, mask = prompts()
    if model.config.is_encoder_decoder:
        tokens, mask = tokens.flip(1), mask.flip(1)
    options: dict[str, Any] = {"num_beams": 3, "eos_token_id": [5, 6, 7], "pad_token_id": 2}
    found = generator(tokens, mask, max_new_tokens=15, **options)
    assert np.array_equal(found, in_torch(model, tokens, mask, 15, **options))
