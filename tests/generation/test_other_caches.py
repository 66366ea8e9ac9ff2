"""Models without the usual cache: states of their own, the text itself, experts in a loop."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper
from fmapper.generation import Generator

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")

from support.generating import in_torch, prompts  # noqa: E402


def small(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(vocab_size=99, pad_token_id=0, eos_token_id=None, **config)).eval()


def gpt1() -> Any:
    return small("OpenAIGPTLMHeadModel", n_embd=32, n_layer=1, n_head=4, n_positions=64)


def xlstm() -> Any:
    return small("xLSTMForCausalLM", hidden_size=128, num_hidden_layers=1, num_heads=4)


@pytest.mark.nightly
def test_a_causal_model_without_a_cache_generates() -> None:
    model = gpt1()
    with pytest.warns(fmapper.ConversionWarning, match="keeps no cache that fmapper knows"):
        generator = fmapper.generator(model, max_length=40, batch=3)
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=12)
    assert np.array_equal(found, in_torch(model, tokens, mask, 12))
    with pytest.raises(fmapper.ConversionError, match="max_length=65 exceeds the positions"):
        fmapper.generator(model, max_length=65)


@pytest.mark.parametrize("name", ["XLMWithLMHeadModel", "XLNetLMHeadModel"])
def test_a_model_that_sees_what_follows_is_refused(name: str) -> None:
    sizes = {"emb_dim": 32, "n_heads": 4} if "XLM" in name else {"d_model": 32, "n_head": 4}
    model = small(name, n_layers=1, **sizes)
    with pytest.raises(fmapper.ConversionError, match="keeps no cache, and is not causal"):
        fmapper.generator(model, max_length=20)


@pytest.mark.nightly
def test_a_state_of_its_own_is_the_cache(tmp_path: Any) -> None:
    model = xlstm()
    generator = fmapper.generator(model, max_length=40, batch=3)
    tokens, mask = prompts()
    want = in_torch(model, tokens, mask, 12)
    assert np.array_equal(generator(tokens, mask, max_new_tokens=12), want)
    generator.save(tmp_path / "xlstm.safetensors")
    again = Generator.load(tmp_path / "xlstm.safetensors")
    assert np.array_equal(again(tokens, mask, max_new_tokens=12), want)


@pytest.mark.nightly
def test_lists_are_prompts_without_padding_where_there_is_no_mask() -> None:
    model = xlstm()
    generator = fmapper.generator(model, max_length=40, batch=2)
    rows = [[5, 6, 7, 8], [9, 10]]
    found = generator(rows, max_new_tokens=12)
    for row, own in zip(rows, found, strict=True):
        given = torch.tensor([row])
        want = in_torch(model, given, torch.ones_like(given), 12)[0]
        assert np.array_equal(own[4 - len(row) :], want)


@pytest.mark.nightly
def test_rwkv_generates_row_by_row() -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 3, "rescale_every": 2}
    model = small("RwkvForCausalLM", context_length=64, **config)
    with pytest.raises(fmapper.ConversionError, match="mixes the rows of a batch"):
        fmapper.generator(model, max_length=40, batch=3)
    generator = fmapper.generator(model, max_length=40)
    for row in ([5, 6, 7, 8], [9]):
        given = torch.tensor([row])
        want = in_torch(model, given, torch.ones_like(given), 12)
        assert np.array_equal(generator(given, max_new_tokens=12), want)


@pytest.mark.nightly
def test_experts_in_a_loop_are_visited_in_a_step() -> None:
    """By row, so that other experts than those of the example are right, too."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_experts": 3}
    model = small(
        "SwitchTransformersForConditionalGeneration",
        num_layers=1,
        num_decoder_layers=1,
        num_sparse_encoder_layers=0,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        **sizes,
    )
    generator = fmapper.generator(model, max_length=24, batch=3)
    tokens, mask = prompts()
    tokens, mask = tokens.flip(1), mask.flip(1)
    found = generator(tokens, mask, max_new_tokens=12)
    assert np.array_equal(found, in_torch(model, tokens, mask, 12))


def test_a_model_without_a_mask_in_a_step_is_refused() -> None:
    """FSMT would attend to the zeros in a cache of fixed size."""
    sizes = {"d_model": 32, "src_vocab_size": 99, "tgt_vocab_size": 99, "langs": ["en", "de"]}
    layers = {f"{one}_{what}": n for one in ("encoder", "decoder") for what, n in _FSMT.items()}
    torch.manual_seed(0)
    config = transformers.FSMTConfig(**sizes, **layers, max_position_embeddings=64)
    model = transformers.FSMTForConditionalGeneration(config).eval()
    with pytest.raises(fmapper.ConversionError, match="applies no mask to its cache in a step"):
        fmapper.generator(model, max_length=20)


_FSMT = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}


def test_state_in_the_module_is_refused() -> None:
    """RecurrentGemma keeps the states of its recurrent layers there."""
    config = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = small("RecurrentGemmaForCausalLM", **config, intermediate_size=64, lru_width=32)
    with pytest.raises(fmapper.ConversionError, match="conv1d_state in the module"):
        fmapper.generator(model, max_length=20)
    assert all(getattr(part, "conv1d_state", None) is None for part in model.modules())


@pytest.mark.nightly
def test_minimax_takes_a_cache_of_its_own_class() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    experts = {"num_local_experts": 2, "num_key_value_heads": 2}
    model = small("MiniMaxForCausalLM", **sizes, **layers, **experts)
    generator = fmapper.generator(model, max_length=40, batch=3)
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=24)
    assert np.array_equal(found, in_torch(model, tokens, mask, 24))
