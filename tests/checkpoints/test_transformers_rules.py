"""The tables of transformers as rules: folders that it writes, to its models and back."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from fmapper.checkpoints import LazyArray, Rename, Rules, Tie  # noqa: E402
from fmapper.checkpoints.recording.steps import fold_numbers  # noqa: E402
from fmapper_adapters.torch.pretrained.tables import transformers_rules  # noqa: E402
from support.hub_folders import difference, numpy_of, rules_against_transformers, saved  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def qwen3_moe(**fields):
    moe = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeConfig(**SMALL, **moe, **fields)


CONFIGS = {
    "marian": lambda: transformers.MarianConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, vocab_size=64, pad_token_id=0
    ),
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": qwen3_moe,
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=12),
    "bert": lambda: transformers.BertConfig(**SMALL),
    "t5": lambda: transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4),
}
CLASSES = {
    "marian": "MarianMTModel",
    "llama, tied": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rules_do_what_transformers_does(name):
    model = getattr(transformers, CLASSES[name])(CONFIGS[name]())
    rules, wrong = rules_against_transformers(model, saved(model))
    assert wrong is None
    assert len(rules) < 12  # layers and experts are not named one by one


def test_rules_are_written_for_all_layers_at_once():
    model = transformers.Qwen3MoeForCausalLM(qwen3_moe())
    text = repr(transformers_rules(model))
    assert "Stack('model.layers.{i}.mlp.experts.{n}.down_proj.weight'," in text
    assert "'model.layers.{i}.mlp.experts.gate_up_proj', axis=1)" in text


def test_a_model_without_memory_and_a_configuration_give_the_same_rules():
    config = qwen3_moe(architectures=["Qwen3MoeForCausalLM"])
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    assert transformers_rules(config) == transformers_rules(model)
    assert transformers_rules(config, back=True) == transformers_rules(model, back=True)
    assert len(transformers_rules(config)) == 4
    tied = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    tied.architectures = ["LlamaForCausalLM"]
    assert transformers_rules(tied) == Rules([Tie("model.embed_tokens.weight", "lm_head.weight")])


def test_nothing_that_a_configuration_names_is_looked_up_elsewhere():
    config = transformers.LlamaConfig(**SMALL, architectures=["pipeline"])
    assert transformers_rules(config) == Rules()  # those of the plain model
    with pytest.raises(ValueError, match="is not a model of transformers"):
        transformers_rules(object())


def test_a_folder_of_a_base_model_and_its_old_names():
    """The folder of the model inside, in float16, with an array that nobody takes."""
    model = transformers.BertForMaskedLM(CONFIGS["bert"]())
    folder = {f"{name}": array for name, array in saved(model.bert).items()}
    folder["embeddings.position_ids"] = folder["embeddings.LayerNorm.bias"]
    gamma = folder.pop("embeddings.LayerNorm.weight")
    folder["embeddings.LayerNorm.gamma"] = gamma  # as checkpoints of TensorFlow had it
    found = transformers_rules(model, folder).apply(folder)
    state = {name: numpy_of(tensor) for name, tensor in model.state_dict().items()}
    inner = {name: array for name, array in state.items() if name in found}
    assert len(inner) > 30
    assert difference(found, inner) is None
    assert found["bert.embeddings.LayerNorm.weight"].read() is not None


def test_rules_tell_arrays_apart_that_differ_in_one_layer():
    """Layers 0 and 2 have what layer 1 has not, or has in another form."""
    config = qwen3_moe(mlp_only_layers=[1])
    model = transformers.Qwen3MoeForCausalLM(config)
    _, wrong = rules_against_transformers(model, saved(model))
    assert wrong is None


def test_names_that_differ_in_one_number():
    assert fold_numbers(["a.1.b2", "a.2.b2"]) == ("a.\x00.b2", (1, 2))
    assert fold_numbers(["a.1.b1", "a.2.b2"]) is None
    assert fold_numbers(["a.1", "a.3"]) is None
    assert fold_numbers(["a.1", "b.2"]) is None
    assert fold_numbers(["a.1"]) is None


def test_names_may_change_places():
    rules = Rules([Rename({"a": "b", "b": "a"})])
    found = rules.apply({"a": LazyArray.full((1,), 1, "uint8"), "b": LazyArray.full((2,), 1, "u1")})
    assert {name: array.shape for name, array in found.items()} == {"b": (1,), "a": (2,)}
