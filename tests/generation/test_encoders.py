"""Models with an encoder, and models whose state is not a list of positions, as in torch."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")

from support.generating import COMMON, in_torch, prompts, tiny  # noqa: E402


def bart() -> Any:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers",)}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, max_position_embeddings=64, **sizes, **heads, **widths
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("make", [bart, t5])
def test_an_encoder_takes_the_prompts(make: Any) -> None:
    model = make()
    generator = fmapper.generator(model, max_length=40, batch=3, forced_eos_token_id=None)
    model.generation_config.forced_eos_token_id = None
    tokens, mask = (x.flip(1) for x in prompts())  # padded on the right
    found = generator(tokens, mask, max_new_tokens=30)
    assert np.array_equal(found, in_torch(model, tokens, mask, 30))
    lists = [row[kept].tolist() for row, kept in zip(tokens, mask.bool(), strict=True)]
    assert np.array_equal(generator(lists, max_new_tokens=30), found)
    longer, more = (x.flip(1) for x in prompts(3, 21))  # another bucket
    assert np.array_equal(
        generator(longer, more, max_new_tokens=8), in_torch(model, longer, more, 8)
    )
    ended = generator(tokens, mask, max_new_tokens=6, forced_eos_token_id=7)
    assert np.asarray(ended)[:, -1].tolist() == [7, 7, 7]


def t5gemma() -> Any:
    return transformers.T5GemmaConfig(encoder=WINDOWS, decoder=WINDOWS, vocab_size=99)


def t5gemma2() -> Any:
    """Its decoder attends to itself and to the prompt in one."""
    seen = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    seen |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    encoder = {"text_config": WINDOWS, "vision_config": seen, "mm_tokens_per_image": 4}
    return transformers.T5Gemma2Config(encoder=encoder, decoder=WINDOWS, image_token_index=97)


WINDOWS = COMMON | {
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("make", [t5gemma, t5gemma2])
def test_a_window_of_the_decoder_does_not_hide_the_prompt(make: Any) -> None:
    torch.manual_seed(0)
    config = make()
    name = type(config).__name__.replace("Config", "ForConditionalGeneration")
    model = getattr(transformers, name)(config).eval()
    model.generation_config.eos_token_id = None
    generator = fmapper.generator(model, max_length=20, batch=3)
    tokens, mask = (x.flip(1) for x in prompts())  # longer than the window
    found = generator(tokens, mask, max_new_tokens=15)
    assert np.array_equal(found, in_torch(model, tokens, mask, 15))


@pytest.mark.nightly
def test_experts_of_an_encoder_and_a_decoder() -> None:
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    generator = fmapper.generator(model, max_length=20, batch=3)
    tokens, mask = (x.flip(1) for x in prompts())
    found = generator(tokens, mask, max_new_tokens=15)
    assert np.array_equal(found, in_torch(model, tokens, mask, 15))


@pytest.mark.nightly
def test_a_prompt_of_a_recurrent_model_goes_through_its_steps() -> None:
    config = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    model = tiny("MambaForCausalLM", **config)
    generator = fmapper.generator(model, max_length=40, batch=3)
    assert generator.generation.prefill is None
    for width in (9, 4, 17):
        tokens, mask = prompts(3, width)
        found = generator(tokens, mask, max_new_tokens=20)
        assert np.array_equal(found, in_torch(model, tokens, mask, 20))


@pytest.mark.nightly
def test_generators_of_both_kinds_are_saved(tmp_path: Any) -> None:
    from fmapper.generation import Generator

    generator = fmapper.generator(t5(), max_length=20, batch=2)
    tokens = [[5, 6, 7], [8, 9]]
    generator.save(tmp_path / "t5.safetensors")
    loaded = Generator.load(tmp_path / "t5.safetensors")
    assert np.array_equal(loaded(tokens), generator(tokens))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("WhisperForConditionalGeneration", "input_features"),
        ("Speech2TextForConditionalGeneration", "input_features"),
        ("MoonshineForConditionalGeneration", "input_values"),
        ("BlipForConditionalGeneration", "pixel_values"),
        ("BlipForQuestionAnswering", "pixel_values"),
        ("Kosmos2ForConditionalGeneration", "pixel_values"),
        ("Pix2StructForConditionalGeneration", "flattened_patches"),
    ],
)
def test_a_model_that_generates_from_speech_or_pictures_is_refused_by_what_it_takes(
    name: str, given: str
) -> None:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    with pytest.raises(
        fmapper.ConversionError, match=f"{name} generates from {given}, and a generator takes"
    ):
        fmapper.generator(model, max_length=8)
