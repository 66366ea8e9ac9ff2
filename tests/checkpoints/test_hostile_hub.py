"""Folders in the Hub's layout that ask for more than their weights can fill, or lead elsewhere."""

import json
import os

import pytest

import fmapper
from support.patience import no_hang

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
limits = pytest.importorskip("fmapper_adapters.torch.pretrained.limits")


@pytest.fixture
def folder(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def refused(folder, said):
    with no_hang(), pytest.raises(fmapper.CheckpointError, match=said) as caught:
        fmapper.from_pretrained(folder, to="torch")
    assert str(folder) in str(caught.value)


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("hidden_size", 10**9, "hidden_size is 1,000,000,000, but the weights"),
        ("num_hidden_layers", 10**7, "num_hidden_layers is 10,000,000.*settings.bounds"),
        ("num_hidden_layers", 500, "parameters with .* elements, which the weights"),
        ("vocab_size", 10**12, "vocab_size is"),
        ("head_dim", 10**9, "head_dim is"),
        ("hidden_size", -(10**9), "hidden_size is"),
        ("hidden_size", 1e30, "hidden_size is"),
        ("hidden_size", "wide", "transformers cannot create a model from it"),
        ("layer_types", ["full_attention"] * 200_000, "layer_types has 200,000 items"),
        ("architectures", ["Evil"], "not a class of the installed"),
        ("model_type", "evil", "Code that comes with a folder is not executed"),
    ],
)
def test_sizes_that_the_weights_cannot_have_are_refused(folder, setting, value, said, monkeypatch):
    monkeypatch.setattr(limits, "_MOST_PARAMETERS", 100)
    change(folder, **{setting: value})
    refused(folder, said)


def test_code_of_a_folder_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    change(folder, auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"})
    assert type(fmapper.from_pretrained(folder, to="torch")).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("place", ["/dev/zero", "../x.safetensors", "/etc/passwd", "pipe"])
def test_indexes_lead_to_files_of_the_folder(folder, place):
    os.mkfifo(folder / "pipe")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = json.dumps({"weight_map": {"lm_head.weight": place}})
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "not a file of the folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_of_a_folder_lead_to_it(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/etc/hostname")
    refused(folder, "out of the folder|is a link")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_pipes_of_a_folder_are_not_opened(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, "not a regular file|no known|known format")


@pytest.mark.parametrize("kind", ["whisper", "gptj"])
def test_tables_that_a_configuration_has_computed_are_bounded(kind, tmp_path, monkeypatch):
    import transformers

    sizes = {"vocab_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "whisper":
        names = ["d_model", "encoder_ffn_dim", "decoder_ffn_dim", "num_mel_bins"]
        names += ["max_source_positions", "max_target_positions"]
        sizes |= dict.fromkeys(names, 8) | {"decoder_start_token_id": 1}
        ones = ["encoder_layers", "decoder_layers", "encoder_attention_heads"]
        sizes |= dict.fromkeys([*ones, "decoder_attention_heads"], 1)
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))
        name = "max_source_positions"
    else:
        sizes |= {"n_embd": 8, "n_layer": 1, "n_head": 1, "rotary_dim": 8, "n_positions": 8}
        model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes))
        name = "n_positions"
    model.save_pretrained(tmp_path)
    fmapper.from_pretrained(tmp_path, "torch")
    change(tmp_path, **{name: 10**8})
    with pytest.raises(fmapper.CheckpointError, match=r"computes tensors of .*settings\.bounds"):
        fmapper.from_pretrained(tmp_path, "torch")
    change(tmp_path, **{name: 6_000_000})  # of which a table or two have more than 128 MB
    with pytest.raises(fmapper.CheckpointError, match="computes tensors of"):
        fmapper.from_pretrained(tmp_path, "torch")
