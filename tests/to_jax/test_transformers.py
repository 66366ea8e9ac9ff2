"""Models of transformers, small and with random weights: outputs, gradients, caches, files."""

import subprocess
import sys

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")
import jax.numpy as jnp  # noqa: E402

from support import converting  # noqa: E402

pytestmark = pytest.mark.nightly

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SMALL, "vocab_size": 99}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def bert():
    config = transformers.BertConfig(**TEXT)
    return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, **TOKENS, **options)
    return transformers.LlamaForCausalLM(config)


def vit():
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config)


def text():
    ids = torch.randint(3, 99, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def image():
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("make", "inputs"), [(bert, text), (gpt2, text), (llama, text), (vit, image)]
)
def test_outputs_and_gradients(make, inputs):
    model, given = make().eval(), inputs()
    converted = fmapper.convert(model, "jax", (), given)
    report = fmapper.verify(model, converted, example_kwargs=given)
    assert report, str(report)
    output = model(**given)
    assert type(converted(**converting.arrays(given))).__name__ == type(output).__name__
    output.logits.square().mean().backward()
    arrays = converting.arrays(given)

    @jax.jit
    @jax.grad
    def gradient(params):
        return (converted.replace(params=params)(**arrays).logits ** 2).mean()

    found = gradient(converted.params)
    assert found.keys() == dict(model.named_parameters()).keys()
    want = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    most = max(np.abs(gradient).max() for gradient in want.values())
    for name, gradient in want.items():
        # that of a key's bias is zero but for rounding, so a gradient is measured by all, too
        error, size = np.abs(found[name] - gradient).max(), np.abs(gradient).max()
        assert error <= 1e-4 * max(size, 1e-3 * most), name


def test_greedy_decoding_with_the_cache_of_the_model():
    model = llama().eval()
    ids = text()["input_ids"]
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(input_ids=ids, past_key_values=cache, use_cache=True)
    token = first.logits[:, -1:].argmax(-1)
    start = fmapper.convert(model, "jax", (), {"input_ids": ids, "use_cache": True})
    with pytest.warns(fmapper.FixedSizeWarning, match=r"input_ids.shape\[1\] is 1: "):
        step = fmapper.convert(
            model,
            "jax",
            (),
            {"input_ids": token, "past_key_values": first.past_key_values, "use_cache": True},
            dynamic_shapes="auto",
        )
    output = start(input_ids=ids.numpy(), use_cache=True)
    found = []
    for _ in range(4):
        token = output.logits[:, -1:].argmax(-1)
        found.append(token)
        output = step(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    mask = torch.ones_like(ids)
    want = model.generate(
        ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    np.testing.assert_array_equal(jnp.concatenate(found, 1), want[:, ids.shape[1] :])


def test_one_conversion_serves_other_sizes():
    model = llama(use_cache=False).eval()
    converted = fmapper.convert(model, "jax", (), text(), dynamic_shapes="auto")
    for batch, length in [(3, 4), (1, 17)]:
        ids = torch.randint(3, 99, (batch, length))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        report = fmapper.verify(model, converted, example_kwargs=given)
        assert report, str(report)


def test_in_training_the_examples_may_be_dropped_out_and_gradients_flow():
    model = gpt2()
    given = text()
    converted = fmapper.convert(model, "jax", (), given, train=True)
    arrays = converting.arrays(given)

    def loss(params, key):
        return (converted.replace(params=params)(**arrays, key=key).logits ** 2).mean()

    first, second = (jax.jit(jax.grad(loss))(converted.params, jax.random.key(i)) for i in (0, 1))
    name = "transformer.h.0.attn.c_attn.weight"
    assert jnp.isfinite(first[name]).all()
    assert (first[name] != second[name]).any()


RUN = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
import jax.numpy as jnp, numpy as np, fmapper
model = fmapper.convert(fmapper.load_program(sys.argv[1]), "jax")
given = dict(np.load(sys.argv[2]))
np.save(sys.argv[3], model(**given).logits)
"""


def test_a_saved_model_runs_without_torch_and_transformers(tmp_path):
    model, given = bert().eval(), text()
    fmapper.convert(model, "jax", (), given).save(tmp_path / "bert.safetensors")
    np.savez(tmp_path / "in.npz", **{name: array.numpy() for name, array in given.items()})
    paths = [tmp_path / name for name in ("bert.safetensors", "in.npz", "out.npy")]
    subprocess.run([sys.executable, "-c", RUN, *paths], check=True)
    converting.compare(np.load(paths[2]), model(**given).logits)
