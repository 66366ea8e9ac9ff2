"""Causal language models of transformers generate in JAX what they generate in torch."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")

from support.generating import in_torch, prompts, tiny  # noqa: E402


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny("LlamaForCausalLM")
    generator = fmapper.generator(model, max_length=80, batch=3)
    generator(*prompts(), max_new_tokens=1)  # which compiles
    list(generator.stream(*prompts(2), max_new_tokens=1))
    return model, generator


def test_greedy_tokens_are_those_of_generate(llama: Any) -> None:
    model, generator = llama
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=64)
    assert np.array_equal(found, in_torch(model, tokens, mask, 64))


@pytest.mark.nightly
def test_scores_are_those_of_generate(llama: Any) -> None:
    model, generator = llama
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=6, scores=True)
    options = {"output_scores": True, "return_dict_in_generate": True}
    want = in_torch(model, tokens, mask, 6, **options)
    assert np.array_equal(found.tokens, want.sequences)
    np.testing.assert_allclose(found.scores, torch.stack(want.scores, 1), atol=1e-5)


@pytest.mark.nightly
def test_prompts_come_in_several_forms(llama: Any) -> None:
    _, generator = llama
    tokens, mask = prompts()
    want = generator(tokens, mask, max_new_tokens=4)
    lists = [row[kept].tolist() for row, kept in zip(tokens, mask.bool(), strict=True)]
    assert np.array_equal(generator(lists, max_new_tokens=4), want)
    assert np.array_equal(generator(tokens.numpy(), max_new_tokens=4), want)  # 0 is padding
    assert np.array_equal(
        generator(lists, [[1] * len(row) for row in lists], max_new_tokens=4), want
    )
    assert np.array_equal(generator(tokens.tolist(), mask.tolist(), max_new_tokens=4), want)
    for convert in (np.array, torch.tensor, jax.numpy.array):
        assert np.array_equal(generator([*map(convert, lists)], max_new_tokens=4), want)
    alone = generator(lists[1], max_new_tokens=4)
    assert np.array_equal(alone[0], want[1, mask.shape[1] - len(lists[1]) :])


@pytest.mark.nightly
def test_prompts_of_one_bucket_compile_nothing_anew(llama: Any) -> None:
    from fmapper_adapters.jax.generation import loop

    model, generator = llama
    generator(prompts(3, 5)[0], max_new_tokens=3)
    generator(prompts(3, 33)[0], max_new_tokens=3)
    compiled = loop.prefill, loop.begin, loop.loop
    before = [one._cache_size() for one in compiled]
    for width in range(4, 17):
        tokens, mask = prompts(3, width)
        found = generator(tokens, mask, max_new_tokens=width)
        assert np.array_equal(found, in_torch(model, tokens, mask, width))
    for width in (*range(1, 8), *range(34, 54)):
        generator(prompts(2, width)[0], max_new_tokens=2)
    assert [one._cache_size() for one in compiled] == before


@pytest.mark.nightly
def test_a_width_that_is_new_compiles_not_even_a_slice(llama: Any, caplog: Any) -> None:
    _, generator = llama
    generator(prompts(3, 5)[0], max_new_tokens=3)
    with jax.log_compiles():
        for width in range(2, 17):
            tokens, mask = prompts(1 + width % 3, width)
            generator(tokens, mask, max_new_tokens=20 + width)
    assert [one for one in caplog.messages if "compil" in one.lower()] == []


@pytest.mark.nightly
def test_a_prompt_is_one_call_of_its_program(llama: Any) -> None:
    _, generator = llama
    assert generator.generation.prefill is not None
    (name,) = generator.generation.prefill.symbols
    assert generator.generation.prefill.symbols[name] == (2, 80)


@pytest.mark.nightly
def test_a_row_that_stops_does_not_change_the_others(llama: Any) -> None:
    model, generator = llama
    tokens, mask = prompts()
    free = np.asarray(generator(tokens, mask, max_new_tokens=20))
    stop = int(free[1, tokens.shape[1] + 3])
    found = generator(tokens, mask, max_new_tokens=20, eos_token_id=stop)
    assert np.array_equal(
        found, in_torch(model, tokens, mask, 20, eos_token_id=stop, pad_token_id=0)
    )
    own = generator(tokens, mask, max_new_tokens=20, eos_token_id=[[], [stop], []])
    assert np.array_equal(own[0], free[0])
    assert np.array_equal(own[2], free[2])
    assert not np.asarray(own[1, tokens.shape[1] + 4 :]).any()


@pytest.mark.nightly
def test_it_ends_where_all_rows_have_stopped(llama: Any) -> None:
    _, generator = llama
    tokens, mask = prompts()
    free = np.asarray(generator(tokens, mask, max_new_tokens=20))
    stops = free[:, tokens.shape[1] + 2].tolist()
    found = generator(tokens, mask, max_new_tokens=20, eos_token_id=stops)
    assert found.shape[1] <= tokens.shape[1] + 3


def test_a_stream_gives_the_tokens_of_a_call(llama: Any) -> None:
    _, generator = llama
    tokens, mask = prompts(2)
    want = generator(tokens, mask, max_new_tokens=7)
    streamed = list(generator.stream(tokens, mask, max_new_tokens=7))
    assert np.array_equal(np.stack(streamed, 1), want[:, tokens.shape[1] :])
    assert list(generator.stream(tokens, mask, max_new_tokens=0)) == []
    assert generator(tokens, mask, max_new_tokens=0).shape == tokens.shape


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        ([[5] * 81], {}, "longer than the cache, which holds 80"),
        (
            [[5] * 70],
            {"max_new_tokens": 11},
            "Request 10, or create the generator with max_length=81",
        ),
        ([[5]] * 4, {}, "4 prompts were passed to a generator with batch=3"),
        ([[5, 99]], {}, "the token 99, but the vocabulary has 99"),
        ([[-1]], {}, "the token -1"),
        (np.zeros((0, 3), int), {}, "empty"),
        (np.ones((1, 3)), {}, "expected input_ids as integers"),
        ([[5]], {"do_sample": True}, "pass key="),
        ([], {}, "empty"),
        ([[5], []], {}, "empty: row 1 of input_ids"),
        ([[5.5, 6.0]], {}, r"row 0 is \[5.5, 6.0\]"),
        ([[True, False]], {}, "lists of integers"),
        (["a text"], {}, "lists of integers"),
        ([[[5]]], {}, "lists of integers"),
        ([5, [6]], {}, "row 0 is 5"),
        ([[5, [6]]], {}, "lists of integers"),
        ({"input_ids": [[5]]}, {}, r"generator\(\*\*prompts\)"),
        ([[5, 6]], {"attention_mask": [[1]]}, r"rows of \[1\] numbers, input_ids of \[2\]"),
        ([[5], [6], [7]], {"eos_token_id": [[2], [3]]}, "for 2 rows, but there are 3 prompts"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(
    llama: Any, tokens: Any, options: Any, says: str
) -> None:
    with pytest.raises(fmapper.ProgramInputError, match=says):
        llama[1](tokens, **options)


def test_a_call_that_is_traced_is_refused(llama: Any) -> None:
    with pytest.raises(fmapper.ProgramInputError, match="cannot be called within jit"):
        jax.jit(lambda x: llama[1]([[5, 6]], max_new_tokens=2) + x)(1)


def test_padding_on_the_right_is_refused(llama: Any) -> None:
    tokens, mask = prompts()
    with pytest.raises(fmapper.ProgramInputError, match="Pad them on the left"):
        llama[1](tokens.flip(1), mask.flip(1))


def test_no_torch_is_needed_for_a_call(llama: Any) -> None:
    found = llama[1].params
    assert set(found) == {name for name, _ in llama[0].named_parameters()}
    assert all(isinstance(x, jax.Array) for x in found.values())


MODELS: dict[str, Any] = {
    "learned positions": ("GPT2LMHeadModel", {}, {60}),
    "a window": ("MistralForCausalLM", {"sliding_window": 6}, {6}),
    "a window and softcaps": ("Gemma2ForCausalLM", {"sliding_window": 6, "head_dim": 8}, {6, 60}),
    "layers of both kinds": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 6,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {6, 60},
    ),
    "frequencies by length": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        {60},
    ),
    "one of two sets of frequencies": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
                "rope_theta": 1e4,
            },
        },
        {60},
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_positions_and_caches(kind: str) -> None:
    """Beyond the window, and beyond the length at which frequencies change."""
    name, config, sizes = MODELS[kind]
    model = tiny(name, **config)
    generator = fmapper.generator(model, max_length=60, batch=3)
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=45)
    assert np.array_equal(found, in_torch(model, tokens, mask, 45))
    short, few = prompts(3, 4)
    assert np.array_equal(generator(short, few, max_new_tokens=10), in_torch(model, short, few, 10))
    assert cache_sizes(generator) == sizes


def cache_sizes(generator: Any) -> set[int]:
    """How many positions the layers of the cache hold."""
    inputs = [i for i in generator.generation.step.inputs if i.kind == "user"]
    return {i.shape[2] for i in inputs if len(i.shape) == 4}


def test_a_cache_is_not_longer_than_it_is_asked_to_be(llama: Any) -> None:
    assert cache_sizes(llama[1]) == {80}


@pytest.mark.nightly
def test_more_places_than_positions_are_refused() -> None:
    model = tiny("GPT2LMHeadModel", max_position_embeddings=16, num_hidden_layers=1)
    with pytest.raises(fmapper.ConversionError, match="max_length=17 exceeds the positions"):
        fmapper.generator(model, max_length=17)


LONGROPE = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
        "rope_theta": 1e4,
    },
}


@pytest.mark.nightly
def test_a_cache_that_is_computed_anew_is_refused() -> None:
    """Phi-3 does so where a text becomes longer than its first frequencies are for."""
    model = tiny("Phi3ForCausalLM", **LONGROPE)
    with pytest.raises(fmapper.ConversionError, match="need a smaller max_length"):
        fmapper.generator(model, max_length=60, batch=3)
    generator = fmapper.generator(model, max_length=32, batch=3)
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=23)
    assert np.array_equal(found, in_torch(model, tokens, mask, 23))


@pytest.mark.nightly
def test_positions_may_be_a_range_from_the_length_on() -> None:
    """`torch.arange(past, past + n)`, where how much is past is a tensor."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    model = tiny("TrOCRForCausalLM", **sizes, decoder_ffn_dim=64)
    generator = fmapper.generator(model, max_length=30, batch=3)
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=20)
    assert np.array_equal(found, in_torch(model, tokens, mask, 20))
