"""Small models with random weights that generate, and prompts for them."""

from __future__ import annotations

from typing import Any

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
    import torch
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**COMMON | config)).eval()


def prompts(rows: int = 3, width: int = 9) -> tuple[Any, Any]:
    """Prompts of unequal lengths, padded on the left."""
    import torch

    tokens = torch.randint(3, 99, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, : (3 * row) % width] = 0
    return tokens * mask, mask


def in_torch(model: Any, tokens: Any, mask: Any, count: int, **options: Any) -> Any:
    """What `generate` makes of prompts."""
    import torch

    with torch.no_grad():
        return model.generate(
            tokens, attention_mask=mask, **{"do_sample": False, "max_new_tokens": count} | options
        )
