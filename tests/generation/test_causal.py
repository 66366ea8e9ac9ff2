"""Causal language models of transformers generate in JAX what they generate in torch."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tiny(name: str, **config: Any) -> Any:
    """A small model with random weights, which ends no text by itself."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**COMMON | config)).eval()


def prompts(rows: int = 3, width: int = 9) -> tuple[Any, Any]:
    """Prompts of unequal lengths, padded on the left."""
    tokens = torch.randint(3, 99, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, : (3 * row) % width] = 0
    return tokens * mask, mask


def generate(model: Any, tokens: Any, mask: Any, count: int, **options: Any) -> Any:
    """What torch makes of it."""
    with torch.no_grad():
        return model.generate(
            tokens, attention_mask=mask, **{"do_sample": False, "max_new_tokens": count} | options
        ).numpy()


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny("LlamaForCausalLM")
    return model, fmapper.generator(model, max_length=80, batch=3)


def test_greedy_tokens_are_those_of_generate(llama: Any) -> None:
    model, generator = llama
    tokens, mask = prompts()
    found = generator(tokens, mask, max_new_tokens=64)
    assert np.array_equal(found, generate(model, tokens, mask, 64))
