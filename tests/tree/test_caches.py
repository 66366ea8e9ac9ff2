"""The caches of transformers: walked, moved, given to converted models."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
transformers = pytest.importorskip("transformers")
caches = transformers.cache_utils

CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=99,
)
MAKERS: dict[str, Any] = {
    "dynamic": lambda: caches.DynamicCache(config=CONFIG),
    "static": lambda: caches.StaticCache(config=CONFIG, max_cache_len=16),
}


def filled(name: str) -> Any:
    if name == "encoder and decoder":
        return caches.EncoderDecoderCache(filled("dynamic"), filled("dynamic"))
    cache = MAKERS[name]()
    for layer in range(2):
        cache.update(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), layer)
    return cache


@pytest.mark.parametrize("name", [*MAKERS, "encoder and decoder"])
def test_caches_go_there_and_back(name: str) -> None:
    cache = filled(name)
    there = fmapper.to_jax(cache)
    assert type(there) is type(cache)
    assert fmapper.get_device(there).backend == "jax"
    back = fmapper.to_torch(there)
    assert int(back.get_seq_length()) == 4
    for path, tensor in fmapper.state(cache).items():
        assert torch.equal(fmapper.state(back)[path], tensor)
    own = getattr(back, "self_attention_cache", back)
    own.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
    assert int(cache.get_seq_length()) == 4  # which has its own arrays


def test_a_cache_knows_its_dtype_after_a_cast() -> None:
    cache = filled("static")
    own = cache.layers[0]  # newer releases keep no dtype, but for that of an indexer
    own.indexer_keys = torch.ones(2)
    own.dtype = own.indexer_dtype = torch.float32
    layer = fmapper.to_torch(dtype="float16")(cache).layers[0]
    assert layer.dtype is layer.indexer_dtype is layer.keys.dtype is torch.float16
    there = fmapper.to_torch(device="meta")(cache).layers[0]
    assert there.device.type == there.indexer_keys.device.type == "meta"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_cache_is_given_to_a_converted_model(name: str) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    token = torch.tensor([[5]])
    cache = filled(name)
    converted = fmapper.convert(model, "jax", (token,), {"past_key_values": cache})
    found = converted(token.numpy(), past_key_values=fmapper.to_jax(cache)).logits
    with torch.no_grad():
        wanted = model(token, past_key_values=cache).logits
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def concrete(base: type) -> list[type]:
    """The classes of layers that can be made, but those of libraries that are not here."""
    found = [cls for sub in base.__subclasses__() for cls in (sub, *concrete(sub))]
    absent = (caches.QuantizedLayer,)
    here = [cls for cls in found if cls.__module__ == caches.__name__]
    kept = [cls for cls in here if not cls.__abstractmethods__ and not issubclass(cls, absent)]
    return list(dict.fromkeys(kept))


def filled_layer(cls: type) -> Any:
    layer = cls(max_cache_len=16, sliding_window=6) if "Static" in cls.__name__ else None
    if layer is None:
        layer = cls(sliding_window=6) if "Sliding" in cls.__name__ else cls()
    if hasattr(layer, "update"):
        layer.update(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
    if hasattr(layer, "update_conv_state"):
        layer.update_conv_state(torch.randn(1, 4, 3))
        layer.update_recurrent_state(torch.randn(1, 2, 4, 4))
    if hasattr(layer, "update_indexer"):
        layer.update_indexer(torch.randn(1, 4, 8))
    return layer


LAYERS = concrete(caches.CacheLayerMixin) + concrete(caches.LinearAttentionCacheLayerMixin)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cls", dict.fromkeys(LAYERS), ids=lambda cls: cls.__name__)
def test_a_layer_is_an_argument_of_a_plain_jit(cls: type) -> None:
    layer = fmapper.to_jax(filled_layer(cls))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(layer)]
    own = {str(path) for path in fmapper.state(layer)}
    assert {path.lstrip(".").replace("[", ".").replace("]", "") for path in paths} == own
    negative = jax.jit(lambda layer: jax.tree.map(lambda x: -x, layer))(layer)
    assert type(negative) is cls
    assert jax.tree.structure(negative) == jax.tree.structure(layer)
    for path, array in fmapper.state(layer).items():
        np.testing.assert_array_equal(fmapper.state(negative)[path], -array)
    assert vars(negative).keys() == vars(layer).keys()


class Decoder:
    """A tiny model with a cache, and what comes next."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model.eval(), cache
        with torch.no_grad():
            model(torch.arange(3, 7)[None], past_key_values=cache)

    def step(self, token: Any, cache: Any) -> Any:
        with torch.no_grad():
            return self.model(token, past_key_values=cache).logits


SIZES: dict[str, Any] = CONFIG.to_diff_dict() | {"vocab_size": 99, "pad_token_id": 0}
SIZES = {name: SIZES[name] for name in SIZES if name.startswith(("hidden", "num", "inter", "voc"))}


def llama() -> Any:
    return transformers.LlamaForCausalLM(CONFIG)


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6))


def hybrid() -> Any:
    kinds = ["conv", "full_attention"]
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SIZES, layer_types=kinds))


DECODERS: dict[str, Any] = {
    "dynamic": (llama, lambda config: caches.DynamicCache(config=config)),
    "static": (llama, lambda config: caches.StaticCache(config=config, max_cache_len=16)),
    "fp8": (llama, lambda config: caches.QuantizedCache("fp8", config)),
    "sliding": (mistral, lambda config: caches.DynamicCache(config=config)),
    "static sliding": (mistral, lambda config: caches.StaticCache(config, max_cache_len=16)),
    "hybrid": (hybrid, lambda config: caches.DynamicCache(config=config)),
    "static hybrid": (hybrid, lambda config: caches.StaticCache(config, max_cache_len=16)),
}


def decoder(name: str) -> Decoder:
    torch.manual_seed(0)
    make, cache = DECODERS[name]
    model = make()
    return Decoder(model, cache(model.config))


@pytest.mark.nightly
@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_is_an_argument_of_jit_and_grad(name: str) -> None:
    own = decoder(name)
    token = torch.tensor([[5]])
    converted = fmapper.convert(own.model, "jax", (token,), {"past_key_values": own.cache})
    cache = fmapper.to_jax(own.cache)

    def step(params: Any, token: Any, cache: Any) -> Any:
        output = converted.replace(params=params)(token, past_key_values=cache)
        return output.logits, output.past_key_values

    logits, after = jax.jit(step)(converted.params, token.numpy(), cache)

    @jax.jit
    @jax.grad
    def gradient(params: Any, cache: Any) -> Any:
        return (step(params, token.numpy(), cache)[0] ** 2).sum()

    assert any(float(abs(g).max()) > 0 for g in gradient(converted.params, cache).values())
    wanted = own.step(token, own.cache)  # which has the token from now on
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert type(after) is type(own.cache)
    assert int(fmapper.to_torch(after).get_seq_length()) == int(own.cache.get_seq_length())
    for path, tensor in fmapper.state(own.cache).items():
        found = np.asarray(fmapper.state(after)[path], np.float32)
        np.testing.assert_allclose(found, tensor.float(), atol=1e-5, err_msg=str(path))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["static", "static hybrid"])
def test_a_static_cache_is_carried_by_a_loop(name: str) -> None:
    own = decoder(name)
    token = torch.tensor([[5]])
    converted = fmapper.convert(own.model, "jax", (token,), {"past_key_values": own.cache})

    def body(carry: Any) -> Any:
        at, token, logits, cache = carry
        output = converted(token, past_key_values=cache)
        token = output.logits[:, -1:].argmax(-1).astype(token.dtype)
        return at + 1, token, logits.at[at].set(output.logits[0, 0]), output.past_key_values

    start = (0, jax.numpy.asarray(token.numpy()), jax.numpy.zeros((5, 99)))
    carry = (*start, fmapper.to_jax(own.cache))
    _, _, found, after = jax.lax.while_loop(lambda carry: carry[0] < 5, body, carry)
    for logits in found:
        wanted = own.step(token, own.cache)
        np.testing.assert_allclose(logits, wanted[0, 0], atol=1e-5)
        token = wanted[:, -1:].argmax(-1)
    assert int(after.get_seq_length()) == 9


@pytest.mark.nightly
def test_an_encoder_and_decoder_takes_its_cache() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=99
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    cache = caches.EncoderDecoderCache(caches.DynamicCache(), caches.DynamicCache())
    given = {"input_ids": torch.arange(3, 9)[None], "past_key_values": cache}
    with torch.no_grad():
        model(**given, decoder_input_ids=torch.tensor([[0]]))
    given["decoder_input_ids"] = torch.tensor([[7]])
    converted = fmapper.convert(model, "jax", (), given)
    arrays = fmapper.to_jax(given)
    output = jax.jit(lambda given: converted(**given).past_key_values)(arrays)
    assert type(output) is caches.EncoderDecoderCache
    assert fmapper.to_torch(output).get_seq_length() == 2
    found = jax.jit(lambda given: converted(**given).logits)(arrays)
    with torch.no_grad():
        np.testing.assert_allclose(found, model(**given).logits, atol=1e-5)


@pytest.mark.nightly
def test_the_names_of_fields_of_a_record_stay_where_one_of_them_is_private() -> None:
    own = decoder("sliding")
    converted = fmapper.convert(
        own.model, "jax", (torch.tensor([[5]]),), {"past_key_values": own.cache}
    )
    given = {"layers": [vars(fmapper.to_jax(layer)) for layer in own.cache.layers]}
    names = ("keys", "values", "sliding_window", "cumulative_length", "_sliding_window_tensor")
    given["layers"] = [{name: layer[name] for name in names} for layer in given["layers"]]
    record = converted(np.array([[5]]), past_key_values=given).past_key_values
    assert record.layers[0]._fields == (*names[:-1], "sliding_window_tensor")
    assert record.layers[0].keys.shape == (1, 2, 5, 8)
