"""`from_pretrained` and `save_pretrained`: folders as transformers writes and reads them."""

import copy
import json
import shutil
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

import fmapper
from fmapper.checkpoints import diff
from fmapper.meshes import Offload
from sweeps import pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("flax")

from fmapper_adapters.jax.libraries import ProgramArrays  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL,
            vocab_size=100,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ),
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, vocab_size=100, num_attention_heads=4)
    ),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ),
}
INPUTS = {
    "llama": lambda: {
        "input_ids": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6, dtype=torch.int64),
    },
    "bert": lambda: {
        "input_ids": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6, dtype=torch.int64),
    },
    "resnet": lambda: {"pixel_values": torch.randn(3, 3, 224, 224)},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each, and the module that is in it."""
    made = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        module = make().eval()
        for name_of_array, array in module.state_dict().items():
            if "running" in name_of_array:  # not what a fresh model has
                array.mul_(1.25)
        path = tmp_path_factory.mktemp(name) / "folder"
        module.save_pretrained(path)
        made[name] = path, module
    return made


@pytest.mark.daily_cases("bert-torch", "resnet-torch")
@pytest.mark.parametrize("to", ["torch", "flax", "jax"])
@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_a_folder_becomes_a_model_and_a_folder_again(folders, tmp_path, name, to):
    folder, module = folders[name]
    kwargs = INPUTS[name]()
    model = fmapper.from_pretrained(folder, to)
    given = kwargs if to == "torch" else fmapper.to_numpy(kwargs)
    wanted = module(**kwargs).logits.detach().numpy()
    found = model(**given).logits
    found = found.detach() if to == "torch" else found
    np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-5)
    fmapper.save_pretrained(model, tmp_path / "out")
    assert not diff(folder, tmp_path / "out")
    back = type(module).from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, back.state_dict().values(), module.state_dict().values()))


@pytest.mark.nightly
def test_sizes_vary_ties_hold_and_a_trained_model_is_saved(folders, tmp_path):
    folder, module = folders["llama"]
    model = fmapper.from_pretrained(folder, "flax")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for shape in ((2, 6), (3, 11)):
        ids = np.arange(np.prod(shape)).reshape(shape)
        mask = np.ones_like(ids)
        wanted = module(torch.from_numpy(ids), torch.from_numpy(mask)).logits.detach().numpy()
        np.testing.assert_allclose(
            model(input_ids=ids, attention_mask=mask).logits, wanted, atol=2e-5
        )
    trained = fmapper.fmap(lambda x: x + 1 if x.ndim else x, model)
    fmapper.save_pretrained(trained, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in module.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight + 1), name
    assert back.lm_head.weight is back.model.embed_tokens.weight


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["jax", "flax"])
def test_what_does_not_fit_on_the_device_stays_in_its_files(folders, to):
    path, module = folders["llama"]
    small = Offload({"cpu:0": "30kB", "cpu": "9kB", "disk": None})
    model = fmapper.from_pretrained(path, to, offload=small)
    assert min(model.plan.nbytes.values()) > 0
    inputs = INPUTS["llama"]()
    got = model(**{name: x.numpy() for name, x in inputs.items()})
    want = module(**inputs).logits.detach().numpy()
    np.testing.assert_allclose(np.asarray(got["logits"]), want, rtol=1e-5, atol=1e-6)


def test_offload_says_where_all_is_and_needs_a_program(folders):
    path, _ = folders["llama"]
    with pytest.raises(TypeError, match="pass neither sharding= nor device="):
        fmapper.from_pretrained(path, "jax", offload=Offload({"cpu:0": None}), device="cpu")
    with pytest.raises(fmapper.PlacementError, match="has no program"):
        fmapper.from_pretrained(path, "torch", offload=Offload({"cpu": None}))


@pytest.mark.nightly
def test_a_dtype_is_cast_while_it_is_read(folders):
    folder, module = folders["llama"]
    model = fmapper.from_pretrained(folder, "torch", dtype="bfloat16")
    cast = copy.deepcopy(module).to(torch.bfloat16)
    assert all(map(torch.equal, model.parameters(), cast.parameters()))
    in_jax = fmapper.from_pretrained(folder, "jax", dtype="bfloat16", dynamic_shapes=None)
    assert {str(array.dtype) for array in in_jax.params.values()} == {"bfloat16"}


def test_a_model_is_saved_in_the_dtype_that_it_has(folders, tmp_path):
    folder, module = folders["llama"]
    model = fmapper.from_pretrained(folder, "torch", dtype="bfloat16")
    fmapper.save_pretrained(model, tmp_path / "half", like=folder, max_shard_size="20KB")
    assert len([*(tmp_path / "half").glob("model-*.safetensors")]) > 1
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert back.dtype is torch.bfloat16
    assert torch.equal(back.model.norm.weight, module.model.norm.weight.bfloat16())


def test_quantised_weights_are_dequantised_on_the_way(folders, tmp_path):
    folder, _ = folders["llama"]
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path = change(folder, tmp_path, quantization_config=method, dtype="bfloat16")
    arrays = dict(fmapper.to_numpy(fmapper.load(folder)))
    wanted = {}
    for name in [n for n in arrays if n.endswith("_proj.weight")]:
        rows, columns = arrays[name].shape
        blocks = arrays[name].reshape(rows // 16, 16, columns // 16, 16)
        scale = np.abs(blocks).max((1, 3), keepdims=True) / 448
        values = (blocks / scale).astype(ml_dtypes.float8_e4m3fn)
        arrays[name] = values.reshape(rows, columns)
        arrays[f"{name}_scale_inv"] = scale[:, 0, :, 0]
        wanted[name] = (values.astype(np.float32) * scale).reshape(rows, columns)
    fmapper.save(arrays, path / "model.safetensors")
    model = fmapper.from_pretrained(path, "torch")
    for name, weight in model.named_parameters():
        expected = wanted.get(name, arrays.get(name))
        assert torch.equal(weight, torch.from_numpy(expected).bfloat16()), name
    exact = fmapper.from_pretrained(path, "torch", dtype="float32").state_dict()
    assert all(torch.equal(exact[name], torch.from_numpy(x)) for name, x in wanted.items())
    fmapper.save_pretrained(model, tmp_path / "plain", like=path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(
        again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    )


@pytest.mark.parametrize("lost", ["configuration", "name of the scales", "scales"])
def test_floats_of_8_bits_are_not_read_without_their_scales(folders, tmp_path, lost):
    folder, _ = folders["llama"]
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    settings = {} if lost == "configuration" else {"quantization_config": method}
    path = change(folder, tmp_path, **settings)
    arrays = dict(fmapper.to_numpy(fmapper.load(folder)))
    name = "model.layers.0.mlp.up_proj.weight"
    arrays[name] = arrays[name].astype(ml_dtypes.float8_e4m3fn)
    suffix = {"configuration": "_scale_inv", "name of the scales": "_s"}.get(lost)
    if suffix:
        arrays[name + suffix] = np.ones((4, 2), np.float32)
    fmapper.save(arrays, path / "model.safetensors")
    with pytest.raises(fmapper.CheckpointError, match=r"without scales|scales are missing"):
        fmapper.from_pretrained(path, "torch")


def test_shards_and_files_of_torch_are_read(folders, tmp_path):
    folder, module = folders["bert"]
    module.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    model = fmapper.from_pretrained(tmp_path / "shards", "torch")
    assert all(map(torch.equal, model.state_dict().values(), module.state_dict().values()))
    (tmp_path / "old").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "old")
    torch.save(module.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    model = fmapper.from_pretrained(tmp_path / "old", "torch")
    assert all(map(torch.equal, model.state_dict().values(), module.state_dict().values()))


@pytest.mark.nightly
def test_torch_allocates_no_parameter(folders, monkeypatch):
    folder, _ = folders["llama"]
    seen = []
    original = torch.nn.Module.register_parameter

    def watch(module, name, parameter):
        seen.append(parameter)
        original(module, name, parameter)

    fmapper.from_pretrained(folder, "torch")
    monkeypatch.setattr(torch.nn.Module, "register_parameter", watch)
    fmapper.from_pretrained(folder, "jax", dynamic_shapes=None)
    assert seen
    assert all(parameter is None or parameter.is_meta for parameter in seen)
    assert torch.nn.Module.register_parameter is watch, "what was patched is as before"


def change(folder, tmp_path, **settings):
    shutil.copytree(folder, tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return path.parent


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "of-my-own"}, "Code that comes with a folder is not executed"),
        ({"architectures": ["os"]}, "is not a class of the installed transformers"),
        ({"architectures": ["LlamaConfig"]}, "is not a class of the installed transformers"),
        ({"architectures": 3}, "is not a class of the installed transformers"),
    ],
)
def test_what_is_not_known_is_refused(folders, tmp_path, settings, said):
    with pytest.raises(fmapper.CheckpointError, match=said):
        fmapper.from_pretrained(change(folders["llama"][0], tmp_path, **settings), "torch")


def test_code_in_a_folder_is_not_run(folders, tmp_path):
    auto = {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "attn_implementation": "evil/kernel",
        "_attn_implementation": "evil/kernel",
        "_attn_implementation_internal": "evil/kernel",
        "use_kernels": True,
    }
    folder = change(folders["llama"][0], tmp_path, **auto)
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    model = fmapper.from_pretrained(folder, "torch")
    assert "evil" not in str(model.config)


def test_a_configuration_may_hold_infinity(folders, tmp_path):
    limit = {"some_limit": [0.0, {"__float__": "Infinity"}]}
    model = fmapper.from_pretrained(change(folders["llama"][0], tmp_path, **limit), "torch")
    assert model.config.some_limit == [0.0, float("inf")]


def test_missing_and_left_over_weights_are_said(folders, tmp_path):
    folder, module = folders["bert"]
    shutil.copytree(folder, tmp_path / "less")
    arrays = dict(fmapper.to_numpy(fmapper.load(folder)))
    weight = arrays.pop("classifier.weight")
    fmapper.save(arrays, tmp_path / "less" / "model.safetensors")
    with pytest.raises(
        fmapper.StructureMismatchError, match=r"no weights for:\n  classifier.weight$"
    ):
        fmapper.from_pretrained(tmp_path / "less", "torch")
    more = {**arrays, "classifier.weight": weight, "other": weight}
    fmapper.save(more, tmp_path / "less" / "model.safetensors")
    with pytest.warns(
        fmapper.FmapperWarning, match="1 arrays have no place in BertFor.* and were ignored: other"
    ):
        model = fmapper.from_pretrained(tmp_path / "less", "torch")
    assert torch.equal(model.classifier.weight, module.classifier.weight)


def test_a_name_of_the_hub_is_downloaded_through_its_library(folders, monkeypatch):
    folder, module = folders["bert"]
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = fmapper.from_pretrained("org/bert", "torch")
    assert torch.equal(model.classifier.weight, module.classifier.weight)
    ((name, patterns),) = asked
    assert name == "org/bert"
    assert "*.safetensors" in patterns
    assert not {"*", "*.py", "*.bin"} & {*patterns}


def test_a_target_whose_models_hold_no_arrays_is_refused(folders):
    with pytest.raises(fmapper.ConversionError, match="load the module with to='torch'"):
        fmapper.from_pretrained(folders["bert"][0], "linen")
    with pytest.raises(fmapper.BackendUnavailableError, match="Did you mean 'flax'"):
        fmapper.from_pretrained(folders["bert"][0], "flx")


def test_pickles_of_the_hub_are_downloaded_where_there_is_nothing_else(monkeypatch, tmp_path):
    from fmapper.files import hub

    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.download("org/old") == tmp_path
    assert ["*.bin" in patterns for patterns in asked] == [False, True]


def test_a_name_that_cannot_be_downloaded_says_why(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"org/name: no such folder, .* no route to host"):
        fmapper.from_pretrained("org/name", "flax")
    with pytest.raises(FileNotFoundError, match="not the name of a repository"):
        fmapper.from_pretrained("models/llama/7b", "flax")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        fmapper.from_pretrained("org/name", "flax")


def test_the_dtype_of_the_configuration_is_that_of_transformers(folders, tmp_path):
    _, module = folders["bert"]
    copy.deepcopy(module).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    for dtype in (None, "auto"):
        model = fmapper.from_pretrained(tmp_path / "half", "torch", dtype=dtype)
        assert model.dtype is torch.bfloat16


@pytest.mark.nightly
def test_a_converted_model_knows_the_folder_of_its_module(folders, tmp_path):
    folder, module = folders["bert"]
    opened = type(module).from_pretrained(folder).eval()
    converted = fmapper.convert(opened, "jax", (), INPUTS["bert"]())
    fmapper.save_pretrained(converted, tmp_path / "out")
    assert not diff(folder, tmp_path / "out")


@pytest.mark.nightly
def test_a_model_whose_folder_is_not_known_needs_one(folders, tmp_path):
    folder, _ = folders["bert"]
    shutil.copytree(folder, tmp_path / "copy")
    model = fmapper.from_pretrained(tmp_path / "copy", "jax")
    model.save(tmp_path / "program.safetensors")
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(fmapper.CheckpointError, match=r"copy, which it .* is gone.*like="):
        fmapper.save_pretrained(model, tmp_path / "out")
    loaded = fmapper.convert(fmapper.load_program(tmp_path / "program.safetensors"), "jax")
    assert str(tmp_path).encode() not in (tmp_path / "program.safetensors").read_bytes()
    for unknown in (loaded, torch.nn.Linear(2, 2)):
        with pytest.raises(fmapper.CheckpointError, match=r"is not known.*like="):
            fmapper.save_pretrained(unknown, tmp_path / "out")
    fmapper.save_pretrained(loaded, tmp_path / "out", like=folder)
    assert not diff(folder, tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["jax", "flax"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_converted_model_is_filled_from_a_checkpoint_of_its_source(folders, tmp_path, name, to):
    folder, module = folders[name]
    model = fmapper.from_pretrained(folder, to)
    changed = fmapper.fmap(lambda x: x * 0 if x.ndim == 2 and x.dtype == "float32" else x, model)
    given = fmapper.to_numpy(INPUTS[name]())
    wanted = np.asarray(model(**given).logits)
    assert not np.allclose(changed(**given).logits, wanted)
    arrays = type(module).from_pretrained(folder).state_dict()
    fmapper.save(arrays, tmp_path / "of_torch.safetensors")
    fmapper.save(model, tmp_path / "own.safetensors")
    for path in (folder, tmp_path / "of_torch.safetensors", tmp_path / "own.safetensors"):
        filled = fmapper.load(path, like=changed)
        assert type(filled) is type(model)
        np.testing.assert_array_equal(filled(**given).logits, wanted)
    less = {n: x for n, x in arrays.items() if "query" not in n and "q_proj" not in n}
    fmapper.save(less, tmp_path / "less.safetensors")
    with pytest.raises(fmapper.StructureMismatchError, match=r"(query|q_proj)\.weight: missing"):
        fmapper.load(tmp_path / "less.safetensors", like=changed)


def test_another_model_is_not_saved_in_its_place(folders, tmp_path):
    with pytest.raises(fmapper.StructureMismatchError, match="does not match"):
        fmapper.save_pretrained(torch.nn.Linear(2, 2), tmp_path / "out", like=folders["bert"][0])
    assert not (tmp_path / "out").exists()


def test_nothing_is_said_of_what_is_right(folders):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmapper.from_pretrained(folders["bert"][0], "torch")


@pytest.mark.nightly
def test_a_folder_says_how_its_model_generates(folders, tmp_path):
    folder, _ = folders["llama"]
    shutil.copytree(folder, tmp_path / "llama")
    said = {
        "eos_token_id": [7, 9],
        "pad_token_id": 0,
        "repetition_penalty": 3.0,
        "max_new_tokens": 12,
    }
    (tmp_path / "llama" / "generation_config.json").write_text(json.dumps(said))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    tokens = torch.arange(10, 16).reshape(2, 3)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        wanted = theirs.generate(tokens, attention_mask=mask)
        plain = theirs.generate(tokens, attention_mask=mask, repetition_penalty=1.0)
        ours = fmapper.from_pretrained(tmp_path / "llama", "torch")
        assert torch.equal(ours.generate(tokens, attention_mask=mask), wanted)
    assert not torch.equal(wanted, plain)
    generator = fmapper.generator(tmp_path / "llama", max_length=24, batch=2)
    found = generator(tokens, mask)
    np.testing.assert_array_equal(found, wanted)
    model = fmapper.from_pretrained(tmp_path / "llama", "flax")
    np.testing.assert_array_equal(generator.replace(params=model)(tokens, mask), wanted)
    with pytest.raises(fmapper.ConversionError, match=r"fmapper\.generator\(folder, \.\.\.\)"):
        fmapper.generator(model, max_length=24)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not an object"),
        ('{"max_new_tokens": {}}', "not supported"),
        ('{"a": 1, "a": 2}', "a key twice"),
    ],
)
def test_a_damaged_generation_config_is_the_one_error(folders, tmp_path, text, said):
    shutil.copytree(folders["llama"][0], tmp_path / "llama")
    (tmp_path / "llama" / "generation_config.json").write_text(text)
    with pytest.raises(fmapper.CheckpointError, match=f"generation_config.json: .*{said}"):
        fmapper.from_pretrained(tmp_path / "llama", "torch")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MixtralForCausalLM", "mixtral"),  # experts that are stacked
        ("T5ForConditionalGeneration", "t5"),  # ties
        ("ParakeetForRNNT", "parakeet_rnnt"),  # an LSTM, which has its weights in a list as well
        ("CLIPModel", "clip"),  # text and pictures, which are made from the configuration
    ],
)
def test_a_folder_is_the_same_after_flax(name, kind):
    found = pretrained.folder_case(name, kind, "flax")
    assert found["class"] == "ok"
    assert found["examples"] == ("given" if name == "ParakeetForRNNT" else "from the configuration")


def test_an_error_names_the_example_inputs_that_were_made(folders, monkeypatch):
    def fail(*_, **__):
        raise fmapper.ConversionError("cannot be recorded")

    monkeypatch.setattr("fmapper.programs.convert.convert_with_arrays", fail)
    with pytest.raises(fmapper.ConversionError) as caught:
        fmapper.from_pretrained(folders["llama"][0], "jax")
    (note,) = caught.value.__notes__
    assert "input_ids[2, 8], attention_mask[2, 8]" in note
    assert "example_kwargs=" in note


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "jax"])
def test_a_mask_of_all_tokens_may_be_omitted(folders, tmp_path, to):
    folder, module = folders["llama"]
    model = fmapper.from_pretrained(folder, to)
    tokens = torch.arange(12).reshape(2, 6)
    wanted = module(tokens).logits.detach().numpy()
    ones = np.ones((2, 6), int)
    for kwargs in ({}, {"attention_mask": None}, {"attention_mask": ones}, {}):
        found = model(tokens.numpy(), **kwargs).logits
        np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-5)
    ones[0, 0] = 0
    masked = module(tokens, attention_mask=torch.from_numpy(ones)).logits.detach().numpy()
    found = model(tokens.numpy(), attention_mask=ones).logits
    np.testing.assert_allclose(np.asarray(found)[1:], masked[1:], atol=2e-5)
    np.testing.assert_allclose(np.asarray(found)[0, 1:], masked[0, 1:], atol=2e-5)
    with pytest.raises(fmapper.ProgramInputError, match="input_ids is missing"):
        model(attention_mask=ones)
    fmapper.convert(module, "jax", example_kwargs=INPUTS["llama"]()).save(tmp_path / "program")
    again = fmapper.convert(fmapper.load_program(tmp_path / "program"), "jax")
    np.testing.assert_allclose(np.asarray(again(tokens.numpy()).logits), wanted, atol=2e-5)


@pytest.mark.nightly
def test_a_model_that_was_recorded_without_a_mask_takes_none(folders):
    _, module = folders["llama"]
    tokens = torch.arange(12).reshape(2, 6)
    model = fmapper.convert(module, "jax", (tokens,))
    wanted = module(tokens).logits.detach().numpy()
    np.testing.assert_allclose(np.asarray(model(tokens.numpy()).logits), wanted, atol=2e-5)
    with pytest.raises(fmapper.ProgramInputError, match="attention_mask was passed"):
        model(tokens.numpy(), attention_mask=np.ones((2, 6), int))


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_a_folder_becomes_classes_with_layers_of_the_target(folders, to, monkeypatch):
    pytest.importorskip(to)
    folder, _ = folders["llama"]
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    seen = []
    moved = ProgramArrays.__getitem__
    monkeypatch.setattr(
        ProgramArrays,
        "__getitem__",
        lambda arrays, name: (seen.append(name), moved(arrays, name))[1],
    )
    model = fmapper.from_pretrained(folder, to, structure=True, device="cpu")
    given = INPUTS["llama"]()
    wanted = module(**given).logits.detach().numpy()
    for kwargs in (given, {"input_ids": given["input_ids"]}):  # the mask is all ones
        found = model(**fmapper.to_jax(kwargs)).logits
        np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-5)
    up = module.model.layers[0].mlp.up_proj.weight.detach().numpy()
    layer = model.model.layers[0].mlp.up_proj
    kernel = layer.kernel[...] if to == "flax" else layer.weight
    np.testing.assert_array_equal(np.asarray(kernel), up.T if to == "flax" else up)
    assert len(seen) == len(set(seen)), "each array is read once"


def test_classes_with_layers_are_not_divided_while_they_are_read(folders):
    with pytest.raises(TypeError, match="structure=True takes neither"):
        fmapper.from_pretrained(folders["llama"][0], "flax", structure=True, offload=Offload({}))
    with pytest.raises(TypeError, match="takes no structure"):
        fmapper.from_pretrained(folders["llama"][0], "torch", structure=True)


@pytest.mark.parametrize(
    "option", [{"example_inputs": ()}, {"example_kwargs": {}}, {"dynamic_shapes": ()}]
)
def test_options_of_recording_need_a_conversion(folders, option):
    with pytest.raises(TypeError, match=f"loading to torch takes no {next(iter(option))}"):
        fmapper.from_pretrained(folders["resnet"][0], "torch", **option)


@pytest.mark.nightly
def test_tensors_that_are_plain_attributes_are_in_no_folder(tmp_path):
    config = transformers.VideoMAEConfig(
        **SMALL, num_attention_heads=4, image_size=32, num_frames=4, decoder_hidden_size=32
    )
    module = transformers.VideoMAEModel(config).eval()
    assert isinstance(module.embeddings.position_embeddings, torch.Tensor)
    assert not any("position_embeddings" in name for name in module.state_dict())
    module.save_pretrained(tmp_path)
    video = torch.randn(2, 4, 3, 32, 32)
    wanted = module(video).last_hidden_state.detach()
    found = fmapper.from_pretrained(tmp_path, "torch")(video).last_hidden_state
    torch.testing.assert_close(found, wanted)
    model = fmapper.from_pretrained(tmp_path, "jax", dynamic_shapes=None)
    found = np.array(model(video.numpy()).last_hidden_state)
    np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5)
