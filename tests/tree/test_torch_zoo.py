"""Every kind of module that people hold: after a walk it computes the same, in the same state."""

import copy
import functools
import importlib

import pytest

import fmapper
from fmapper import fmap, to_cpu

torch = pytest.importorskip("torch")
nn = torch.nn


def f(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def parametrized(name, **options):
    return lambda: getattr(nn.utils.parametrizations, name)(nn.Linear(3, 3), **options)


def tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def pruned():
    model = nn.Linear(3, 3)
    prune = importlib.import_module("torch.nn.utils.prune")
    prune.l1_unstructured(model, "weight", amount=0.5)
    return model


def shared():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def lazy_that_has_run():
    model = nn.LazyLinear(2)
    model(f(4, 3))
    return model


def traced_by_fx():
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


INDICES = torch.tensor([[0, 3], [1, 4]])
MODULES = {
    "Linear": (lambda: nn.Linear(3, 2), f(4, 3)),
    "Bilinear": (lambda: nn.Bilinear(3, 3, 2), f(4, 3), f(4, 3)),
    "Identity": (nn.Identity, f(4, 3)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), f(1, 2, 8)),
    "Conv2d": (
        lambda: nn.Conv2d(2, 4, 3, groups=2, padding_mode="circular", padding=1),
        f(1, 2, 5, 5),
    ),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), f(1, 1, 4, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), f(1, 2, 4, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), f(4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2, affine=False), f(2, 2, 3, 3)),
    "BatchNorm without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), f(4, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(3), f(4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), f(4, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), f(2, 4, 3)),
    "InstanceNorm1d": (
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        f(2, 2, 4),
    ),
    "Embedding": (lambda: nn.Embedding(5, 3, padding_idx=0), INDICES),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 3), INDICES),
    "RNN": (lambda: nn.RNN(3, 4), f(5, 2, 3)),
    "LSTM": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2), f(5, 2, 3)),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True), f(2, 5, 3)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), f(2, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), f(2, 3)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), *[f(3, 1, 4)] * 3),
    "MultiheadAttention, kdim": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=3, add_bias_kv=True),
        f(3, 1, 4),
        *[f(3, 1, 3)] * 2,
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), f(3, 1, 4)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 8), *[f(3, 1, 4)] * 2),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8), *[f(3, 1, 4)] * 2),
    "PReLU": (lambda: nn.PReLU(3), f(4, 3)),
    "Dropout": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), f(4, 3)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), f(1, 1, 2, 2)),
    "Unfold": (lambda: nn.Unfold(2), f(1, 1, 3, 3)),
    "Flatten": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten()), f(1, 1, 3, 3)),
    "AdaptiveAvgPool": (lambda: nn.Sequential(nn.Linear(3, 8), nn.AdaptiveAvgPool1d(2)), f(1, 3)),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(torch.ones(3)), f(4, 3), torch.arange(4) % 3),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), *[f(4, 3)] * 2),
    "AdaptiveLogSoftmax": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(3, 6, [2, 4]),
        f(4, 3),
        torch.arange(4),
    ),
    "weight_norm": (parametrized("weight_norm"), f(4, 3)),
    "spectral_norm": (parametrized("spectral_norm"), f(4, 3)),
    "orthogonal": (parametrized("orthogonal"), f(4, 3)),
    "prune": (pruned, f(4, 3)),
    "tied": (tied, INDICES),
    "shared": (shared, f(4, 3)),
    "lazy": (lazy_that_has_run, f(4, 3)),
    "fx": (traced_by_fx, f(4, 3)),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(3, 2)), f(4, 3)),
    "old weight_norm": (lambda: old_style("weight_norm"), f(4, 3)),
    "old spectral_norm": (lambda: old_style("spectral_norm"), f(4, 3)),
}


def old_style(name):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # they are old, and people use them
        return getattr(nn.utils, name)(nn.Linear(3, 3))


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    if not isinstance(parts, dict | list | tuple | type({}.values())):
        return []
    return [tensor for part in parts for tensor in tensors_of(part)]


def assert_same_output(new, old, inputs, kwargs=None):
    results = []
    for module in (new, old):
        torch.manual_seed(3)
        results.append(tensors_of(module(*inputs, **(kwargs or {}))))
    assert results[0]
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def ties(module):
    names = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(names.values())


def assert_same_state(new, old):
    assert type(new) is type(old)
    assert list(new.state_dict()) == list(old.state_dict())
    assert all(torch.equal(new.state_dict()[key], x) for key, x in old.state_dict().items())
    assert ties(new) == ties(old)
    assert [name for name, _ in new.named_modules()] == [name for name, _ in old.named_modules()]
    for a, b in zip(new.modules(), old.modules(), strict=True):
        assert type(a) is type(b)
        assert a.training == b.training
        assert a._non_persistent_buffers_set == b._non_persistent_buffers_set
    for a, b in zip(new.parameters(), old.parameters(), strict=True):
        assert type(a) is type(b)
        assert a.requires_grad == b.requires_grad


WAYS = {
    "identity": lambda module: fmap(lambda x: x, module),
    "clone": lambda module: fmap(lambda x: x.clone(), module),
    "to_cpu": to_cpu(copy=True),
    "there and back": lambda module: to_cpu(dtype="float32")(to_cpu(dtype="float64")(module)),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings(
    "ignore:LSTM with projections", "ignore:enable_nested_tensor", "ignore:Initializing zero-elem"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch(name, way):
    make, *inputs = MODULES[name]
    torch.manual_seed(0)
    module = make()
    before = {key: x.clone() for key, x in module.state_dict().items()}
    new = WAYS[way](module)
    assert_same_state(new, module)
    assert all(torch.equal(before[key], x) for key, x in module.state_dict().items())
    twin = new if way == "identity" else None
    for mode in (module.eval, module.train):
        mode()
        getattr(new, mode.__name__)()
        if twin is None or mode.__name__ == "eval":  # with shared buffers a second run differs
            assert_same_output(new, module, inputs)
    if way == "identity":
        assert all(a is b for a, b in zip(new.parameters(), module.parameters(), strict=True))
        return
    storages = [
        {x.data_ptr() for x in one.state_dict().values() if x.is_floating_point() and x.numel()}
        for one in (module, new)
    ]
    assert not storages[0] & storages[1]


# --- Hugging Face -------------------------------------------------------------------------------

TOKENS = torch.tensor([[3, 5, 7, 2], [4, 6, 1, 2]])
PIXELS = f(1, 3, 32, 32)
TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = TEXT | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 32}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WHISPER = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
WHISPER |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
WHISPER |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAV = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WAV |= {"intermediate_size": 32, "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2)}
WAV |= {
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
WAV |= {"mask_time_prob": 0.0, "layerdrop": 0.0}
CLIP = {
    "text_config": TEXT | {"intermediate_size": 32, "max_position_embeddings": 8},
    "vision_config": VISION,
    "projection_dim": 8,
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
SWIN |= {"window_size": 4}
TIED = {"tie_word_embeddings": True}
ARCHITECTURES = {
    "BertForMaskedLM": ("BertConfig", TEXT | {"intermediate_size": 32}, {"input_ids": TOKENS}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        {"input_ids": TOKENS},
    ),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA | TIED, {"input_ids": TOKENS}),
    "T5ForConditionalGeneration": (
        "T5Config",
        T5 | {"decoder_start_token_id": 0},
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
    ),
    "MistralForCausalLM": ("MistralConfig", LLAMA, {"input_ids": TOKENS}),
    "MixtralForCausalLM": (
        "MixtralConfig",
        LLAMA | {"num_local_experts": 2},
        {"input_ids": TOKENS},
    ),
    "Qwen2ForCausalLM": ("Qwen2Config", LLAMA | TIED, {"input_ids": TOKENS}),
    "ViTForImageClassification": ("ViTConfig", VISION, {"pixel_values": PIXELS}),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2},
        {"pixel_values": PIXELS},
    ),
    "CLIPModel": ("CLIPConfig", CLIP, {"input_ids": TOKENS[:1], "pixel_values": PIXELS}),
    "SwinForImageClassification": ("SwinConfig", SWIN, {"pixel_values": PIXELS}),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        WHISPER,
        {"input_features": f(1, 8, 16), "decoder_input_ids": TOKENS[:1]},
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", WAV, {"input_values": f(1, 200)}),
}
DEFAULT = ("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM")
HAS_TIES = {"BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM"}
HAS_TIES |= {"T5ForConditionalGeneration", "WhisperForConditionalGeneration"}


@functools.cache
def architecture(name):
    transformers = pytest.importorskip("transformers")
    config, options, inputs = ARCHITECTURES[name]
    torch.manual_seed(0)
    built = getattr(transformers, config)(**options)
    return getattr(transformers, name)(built).eval(), inputs


def ten_steps(model, optimizer, inputs):
    for _ in range(10):
        optimizer.zero_grad()
        output = model(**inputs)
        parts = [x for x in tensors_of(dict(output)) if x.requires_grad]
        sum(x.square().mean() for x in parts).backward()
        optimizer.step()


@pytest.mark.nightly_cases("BertForMaskedLM")
@pytest.mark.filterwarnings("ignore")  # theirs: deprecations, that change with every release
@pytest.mark.parametrize(
    "name",
    [
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.nightly)
        for name in ARCHITECTURES
    ],
)
def test_architectures_of_hugging_face(name):
    model, inputs = architecture(name)
    model = copy.deepcopy(model)
    assert any(len(names) > 1 for names in ties(model)) == (name in HAS_TIES)
    for way in WAYS.values():
        new = way(model)
        assert_same_state(new, model)
        assert new.config is model.config
        assert_same_output(new, model, (), inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    new, new_optimizer = to_cpu(copy=True)((model, optimizer))
    ten_steps(model, optimizer, inputs)
    ten_steps(new, new_optimizer, inputs)
    assert_same_state(new, model)
    for a, b in zip(new.parameters(), model.parameters(), strict=True):
        assert a is not b


# --- classes of users ---------------------------------------------------------------------------


class Metric(nn.Module):
    """As torchmetrics does it: states by name, with defaults beside them, and wrapped methods."""

    def __init__(self):
        super().__init__()
        self._defaults = {}
        self._reductions = {}
        self.add_state("total", torch.zeros(2), sum)
        self.add_state("seen", [], None)
        self.update = self._wrapped(self.update)

    def add_state(self, name, default, reduction):
        setattr(self, name, default.clone() if isinstance(default, torch.Tensor) else [])
        self._defaults[name] = default
        self._reductions[name] = reduction

    def _wrapped(self, update):
        @functools.wraps(update)
        def wrapped(*args):
            self.updates = getattr(self, "updates", 0) + 1
            return update(*args)

        return wrapped

    def update(self, x):
        self.total += x.sum(0)
        self.seen.append(x)


@pytest.mark.parametrize("way", ["clone", "to_cpu", "there and back"])
def test_a_metric_with_a_wrapped_method(way):
    metric = Metric()
    metric.update(torch.ones(1, 2))
    new = WAYS[way](metric)
    new.update(torch.ones(1, 2))
    assert (metric.updates, new.updates) == (1, 2)
    assert metric.total.tolist() == [1, 1]
    assert new.total.tolist() == [2, 2]
    assert (len(metric.seen), len(new.seen)) == (1, 2)
    assert new._defaults["total"].tolist() == [0, 0]


@fmapper.functor
class Trainer:
    def __init__(self, module):
        self.module = module
        self.optimizer = module.configure_optimizers()
        module.trainer = self

    def fit(self):
        self.optimizer.zero_grad()
        self.module.training_step(torch.ones(1, 2)).backward()
        self.optimizer.step()


class LightningLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.trainer = None
        self.example_input_array = torch.ones(1, 2)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def training_step(self, x):
        return self.net(x).square().sum()


@pytest.mark.parametrize("way", ["clone", "to_cpu"])
@pytest.mark.parametrize("start", ["module", "trainer"])
def test_a_module_that_knows_its_trainer(way, start):
    trainer = Trainer(LightningLike())
    trainer.fit()
    new = WAYS[way](trainer if start == "trainer" else trainer.module)
    new = new if start == "trainer" else new.trainer
    assert new.module.trainer is new
    assert new is not trainer
    for one in (new, trainer):
        one.fit()
    assert torch.equal(new.module.net.weight, trainer.module.net.weight)
    assert new.module.net.weight is not trainer.module.net.weight
