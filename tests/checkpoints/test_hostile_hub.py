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
        ("num_hidden_layers", -3, "num_hidden_layers is -3, which is negative"),
        ("num_labels", 2_000_000, "num_labels is 2,000,000"),
        ("rope_theta", 1e308, "rope_theta is 1e.308, which float32 cannot hold"),
        ("odd", {"a": [[0] * 90_000, [0] * 90_000, [0] * 90_000]}, "more than 200,000 items"),
        ("architectures", ["PreTrainedModel"], "not a class of the installed"),
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


def without(folder, name):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    arrays = load_file(path)
    del arrays[name]
    save_file(arrays, path, {"format": "pt"})


def reshape(folder, name):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    arrays = load_file(path)
    arrays[name] = torch.zeros(3, 3)
    save_file(arrays, path, {"format": "pt"})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda f: without(f, NORM), fmapper.StructureMismatchError, f"no weights for:\n  {NORM}$"),
        (lambda f: reshape(f, NORM), fmapper.StructureMismatchError, r"shape \(3, 3\) in the fol"),
        (
            lambda f: change(f, num_key_value_heads=3),
            fmapper.StructureMismatchError,
            r"shape \(16, 16\) in the folder, \(24, 16\) in the model",
        ),
        (
            lambda f: (f / "model.safetensors").unlink(),
            fmapper.CheckpointError,
            "folder without a checkpoint",
        ),
        (
            lambda f: os.truncate(f / "model.safetensors", 300),
            fmapper.CheckpointError,
            "model.safetensors",
        ),
    ],
)
def test_weights_are_compared_with_the_model_before_its_program_is_recorded(
    folder, damage, error, said, monkeypatch
):
    from fmapper.checkpoints import pretrained

    pytest.importorskip("flax")
    damage(folder)
    monkeypatch.setattr(pretrained, "_convert", lambda *args, **options: pytest.fail("recorded"))
    for to in ("torch", "jax", "flax"):
        with pytest.raises(error, match=said) as caught:
            fmapper.from_pretrained(folder, to=to)
        assert str(folder) in str(caught.value)


def test_headers_are_read_before_a_class_is_made(folder, monkeypatch):
    module = pytest.importorskip("fmapper_adapters.torch.pretrained.folder")
    os.truncate(folder / "model.safetensors", 300)
    monkeypatch.setattr(module, "read", lambda *args: pytest.fail("a class was made"))
    refused(folder, "model.safetensors")


def test_files_of_which_nothing_was_written_allow_no_more(folder):
    with (folder / "other.bin").open("wb") as file:
        file.truncate(10**12)
    change(folder, num_hidden_layers=10_000)
    refused(folder, "parameters with .* elements, which the weights")


def test_texts_that_are_not_text_are_said_where_they_are_written_again(folder, tmp_path):
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    model = fmapper.from_pretrained(folder, to="torch")
    with pytest.raises(fmapper.CheckpointError, match=r"tokenizer\.json: is not text"):
        fmapper.save_pretrained(model, tmp_path / "again")
