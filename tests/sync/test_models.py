"""Syncs of models of transformers with what `convert` made of them, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fmapper
from fmapper.states.state import weights_of

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}
MIXTURE = {"num_local_experts": 4, "num_key_value_heads": 2}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
PICTURES = torch.ones(2, 3, 32, 32)
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertModel": (SIZES, {"input_ids": IDS}),
    "LlamaForCausalLM": (SIZES, {"input_ids": IDS}),
    "MixtralForCausalLM": (
        SIZES | {"num_local_experts": 4, "num_key_value_heads": 2},
        {"input_ids": IDS},
    ),
    "T5ForConditionalGeneration": (T5, {"input_ids": IDS, "decoder_input_ids": IDS}),
    "ResNetModel": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        {"pixel_values": PICTURES},
    ),
    "ViTModel": (SIZES | {"image_size": 32, "patch_size": 8}, {"pixel_values": PICTURES}),
}


def make(name: str) -> Any:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**MODELS[name][0])).eval()


def change(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)


def arrays(model: Any) -> dict[str, Any]:
    of_model = weights_of(model)
    return fmapper.state(model) if of_model is None else of_model[0]


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["jax", "flax", "written classes"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_conversion(name: str, to: str) -> None:
    model, inputs = make(name), MODELS[name][1]

    def convert() -> Any:
        if to == "written classes":
            return fmapper.convert(model, "flax", example_kwargs=inputs, structure=True)
        return fmapper.convert(model, to, example_kwargs=inputs, check=False)

    target = convert()
    sync = fmapper.Sync(model, target)
    for seed in (1, 2):
        change(model, seed)
        target = sync()
    wanted = arrays(convert())
    for key, array in arrays(target).items():
        if "key<" in str(array.dtype):  # of dropout, which the model draws by another generator
            continue
        np.testing.assert_array_equal(np.asarray(array), np.asarray(wanted[key]), key)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    change(model, 3)
    assert fmapper.Sync(target, model)() is model
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
