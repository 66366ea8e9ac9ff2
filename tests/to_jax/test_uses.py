"""A sample of what `nox -s uses` does with converted models of transformers."""

import types

import pytest

import fmapper
from sweeps import uses as sweep_uses
from sweeps import uses_bfloat16, uses_training

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")

SAMPLE = [
    "electra/ElectraForTokenClassification:gradients",
    "mamba/MambaForCausalLM:gradients",
    "bloom/BloomForCausalLM:bfloat16",
    "gpt2/GPT2LMHeadModel:dynamic",
    "t5/T5ForConditionalGeneration:dynamic",
    "phi3/Phi3ForCausalLM:train",
    "llama/LlamaForCausalLM:greedy",
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", SAMPLE)
def test_a_model_is_used_as_in_torch(case):
    found = sweep_uses.cases()[case]()
    assert found["class"] == "ok", found.get("reason")


class Small(torch.nn.Module):
    """With statistics and dropout, and a parameter that nothing depends on."""

    def __init__(self, slope=1.0):
        super().__init__()
        self.dense = torch.nn.Linear(4, 8, bias=False)  # batch norm takes a bias away
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.0)
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.slope = slope
        self.config = types.SimpleNamespace()

    def forward(self, x):
        return {"y": self.drop(self.norm(self.dense(x))) * self.slope, "mask": x * 0 - 3e38}


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Small().eval(), {"x": torch.randn(6, 4)}


@pytest.mark.nightly_cases("bfloat16", "dynamic", "train")
@pytest.mark.parametrize("use", ["gradients", "bfloat16", "bfloat16_module", "dynamic", "train"])
def test_uses_of_a_small_model(small, use):
    found = sweep_uses.USES[use](*small)
    assert found["class"] == "ok", found.get("reason")
    if use == "train":
        assert found["statistics"] == 2
        assert found["random"]
        assert found["parameters"] == 4


@pytest.mark.nightly
def test_other_numbers_are_seen(small):
    """A model with other factors has other gradients, and other numbers in bfloat16."""
    model, inputs = small
    other = Small(slope=1.01)
    other.load_state_dict(model.state_dict())
    converted = fmapper.convert(other, "jax", (), inputs)
    found = uses_training.compared_gradients(model.eval(), converted, inputs)
    assert found["class"] == "gradient"
    far = Small(slope=1.1).eval().bfloat16()
    far.load_state_dict(model.state_dict())
    given = {"x": inputs["x"].bfloat16()}
    converted = fmapper.convert(far, "jax", (), given)
    found = uses_bfloat16.compared_halves(model.bfloat16(), converted, given)
    assert found["class"] == "MISMATCH"


def test_the_sample_is_there():
    from models import tiny_models

    names = [name for names in sweep_uses.SAMPLE.values() for name in names]
    assert len(set(names)) == 40
    assert set(names) <= set(tiny_models.classes())
    assert set(SAMPLE) <= set(sweep_uses.cases())
