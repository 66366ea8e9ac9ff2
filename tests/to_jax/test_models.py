"""Models of transformers in JAX: a spread sample, made small; `nox -s zoo` runs all of them."""

import pytest

from sweeps import zoo as sweep

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("transformers")

MODELS = """bert/BertForMaskedLM gpt2/GPT2LMHeadModel llama/LlamaForCausalLM
mixtral/MixtralForCausalLM t5/T5ForConditionalGeneration vit/ViTForImageClassification
clip/CLIPModel whisper/WhisperForConditionalGeneration wav2vec2/Wav2Vec2ForCTC
swin/SwinForImageClassification mamba/MambaForCausalLM"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # theirs: deprecations, that change with every release
@pytest.mark.parametrize("name", MODELS.split())
def test_models(name):
    kind, _, cls = name.partition("/")
    found = sweep.zoo_case(cls, kind)
    assert found["class"] == "ok", found


@pytest.mark.nightly
def test_the_sweep_finds_what_is_wrong():
    model = torch.nn.Linear(3, 2)
    x = torch.ones(4, 3)
    want = model(x).detach()
    assert sweep.converted_case(model, (x,), {}, want)["class"] == "ok"
    assert sweep.converted_case(model, (x,), {}, want + 1e-3)["class"] == "MISMATCH"
    assert sweep.converted_case(model, (x,), {}, want[:3])["class"] == "MISMATCH"
    assert sweep.converted_case(model, (x,), {}, want * float("nan"))["class"] == "MISMATCH"


def test_the_sweep_compares_models_that_draw_numbers():
    class Noisy(torch.nn.Module):
        def forward(self, x):
            noise = torch.randn_like(x) * torch.rand(3) + torch.empty(3).normal_()
            return torch.nn.functional.dropout(x, 0.4) + noise + torch.bernoulli(x.sigmoid())

    found = sweep.converted_case(Noisy(), (torch.ones(4, 3),), {}, None)
    assert found["class"] == "ok", found


def test_the_sweep_tells_rounding_from_errors():
    class Cancels(torch.nn.Module):
        def forward(self, x):
            return (x + 1000.0) - 1000.0

    x = torch.rand(4, 3)
    assert sweep.rounding(Cancels(), (x,), {}) > 1e-5
    found = sweep.converted_case(Cancels(), (x,), {}, x.sin())
    assert found["class"] == "MISMATCH", found
