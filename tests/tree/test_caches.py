"""The caches of transformers: walked, moved, given to converted models."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")
caches = transformers.cache_utils

CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=99,
)
MAKERS: dict[str, Any] = {
    "dynamic": lambda: caches.DynamicCache(config=CONFIG),
    "static": lambda: caches.StaticCache(config=CONFIG, max_cache_len=16),
}


def filled(name: str) -> Any:
    if name == "encoder and decoder":
        return caches.EncoderDecoderCache(filled("dynamic"), filled("dynamic"))
    cache = MAKERS[name]()
    for layer in range(2):
        cache.update(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), layer)
    return cache


@pytest.mark.parametrize("name", [*MAKERS, "encoder and decoder"])
def test_caches_go_there_and_back(name: str) -> None:
    cache = filled(name)
    there = fmapper.to_jax(cache)
    assert type(there) is type(cache)
    assert fmapper.get_device(there).backend == "jax"
    back = fmapper.to_torch(there)
    assert int(back.get_seq_length()) == 4
    for path, tensor in fmapper.state(cache).items():
        assert torch.equal(fmapper.state(back)[path], tensor)
    own = getattr(back, "self_attention_cache", back)
    own.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
    assert int(cache.get_seq_length()) == 4  # which has its own arrays


def test_a_cache_knows_its_dtype_after_a_cast() -> None:
    layer = fmapper.to_torch(dtype="float16")(filled("static")).layers[0]
    assert layer.dtype is layer.keys.dtype is torch.float16


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_cache_is_given_to_a_converted_model(name: str) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    token = torch.tensor([[5]])
    cache = filled(name)
    converted = fmapper.convert(model, "jax", (token,), {"past_key_values": cache})
    found = converted(token.numpy(), past_key_values=fmapper.to_jax(cache)).logits
    with torch.no_grad():
        wanted = model(token, past_key_values=cache).logits
    np.testing.assert_allclose(found, wanted, atol=1e-5)
