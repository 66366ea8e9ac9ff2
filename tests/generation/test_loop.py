"""How the loop computes on the CPU: weights in blocks, heads in groups."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("transformers")

from support.generating import in_torch, prompts, tiny  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def reads_blocks_faster() -> Any:
    from fmapper_adapters.jax.generation import blocks

    known = dataclasses.replace(fmapper.device_info("numpy:cpu"), name="AMD EPYC")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "device_info", lambda name: known)
        patch.setattr(blocks, "threads_for_memory", lambda: 1)
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    """One layer whose last block is not full, and a table that is the weight of the head, too."""
    sizes = {"intermediate_size": 150, "vocab_size": 130, "num_hidden_layers": 1}
    return tiny("LlamaForCausalLM", **sizes, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def generator(model: Any) -> Any:
    return blocks_of(model)


def blocks_of(model: Any) -> Any:
    return fmapper.generator(model, max_length=20, batch=2, check=False)


def text_of_loop(generator: Any, rows: int = 2) -> str:
    """The compiled loop as XLA prints it."""
    from fmapper_adapters.jax.generation import loop

    kept: list[str] = []

    def spy(*args: Any) -> Any:
        kept.append(run.lower(*args).compile().as_text())
        return run(*args)

    run = loop.loop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "loop", spy)
        generator(*prompts(rows), max_new_tokens=3)
    return kept[0]


@pytest.mark.nightly
def test_weights_lie_in_blocks_of_columns(model: Any, generator: Any) -> None:
    held = generator._held
    assert held["model.embed_tokens.weight"].shape == (3, 32, 64)
    assert held["model.layers.0.mlp.up_proj.weight"].shape == (3, 32, 64)
    assert held["model.layers.0.mlp.down_proj.weight"].shape == (1, 150, 32)
    for name, array in model.state_dict().items():
        if name in generator.params:
            assert np.array_equal(generator.params[name], array.numpy())
    tokens, mask = prompts(2)
    assert np.array_equal(
        generator(tokens, mask, max_new_tokens=8), in_torch(model, tokens, mask, 8)
    )


@pytest.mark.nightly
def test_weights_of_gpt2_lie_in_blocks() -> None:
    model = tiny("GPT2LMHeadModel", num_hidden_layers=1)
    generator = blocks_of(model)
    assert generator._held["transformer.h.0.mlp.c_fc.weight"].shape == (2, 32, 64)
    assert generator.params["transformer.h.0.mlp.c_fc.weight"].shape == (32, 128)
    tokens, mask = prompts(2)
    assert np.array_equal(
        generator(tokens, mask, max_new_tokens=8), in_torch(model, tokens, mask, 8)
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "width"), [(1, None), (12, 64), (13, 200)])
def test_blocks_go_by_the_rows_of_a_step(generator: Any, batch: int, width: int | None) -> None:
    from fmapper_adapters.jax.generation import blocks

    name = "model.layers.0.mlp.up_proj.weight"
    params = generator.params | {name: jax.numpy.zeros((200, 32))}
    generation = dataclasses.replace(generator.generation, batch=batch)
    layout = blocks.choose(generation, params)
    assert layout.get(name) == (None if width is None else blocks.Block(200, width, True))


@pytest.mark.parametrize(
    ("called", "threads", "flags", "rows", "width"),
    [
        ("AMD EPYC 7B13", 1, "", 200, 64),
        ("AMD EPYC 7B13", 4, "", 200, 200),
        (None, 1, "", 200, 64),
        ("Intel(R) Xeon(R) Processor", 1, "", 200, 200),
        ("Intel(R) Xeon(R) Processor", 1, "", 1 << 14, 64),  # 2 MiB
        ("Intel(R) Xeon(R) Processor", 2, "", 1 << 14, 1 << 14),
        ("Intel(R) Xeon(R) Processor", 2, "--xla_cpu_multi_thread_eigen=false", 1 << 14, 64),
    ],
)
def test_blocks_go_by_the_processor(
    monkeypatch: Any, generator: Any, called: Any, threads: int, flags: str, rows: int, width: int
) -> None:
    from fmapper_adapters.jax.generation import blocks

    monkeypatch.setattr(blocks, "threads_for_memory", lambda: threads)
    monkeypatch.setenv("XLA_FLAGS", flags)

    named = dataclasses.replace(fmapper.device_info("numpy:cpu"), name=called)
    monkeypatch.setattr(blocks, "device_info", lambda name: named)
    name = "model.layers.0.mlp.up_proj.weight"
    params = generator.params | {name: jax.numpy.zeros((rows, 32))}
    layout = blocks.choose(generator.generation, params)
    assert layout[name].width == width


@pytest.mark.nightly
def test_weights_lie_in_one_block_of_memory(model: Any) -> None:
    generator = fmapper.generator(model, max_length=20, batch=2, check=False)
    held = [generator._held[name] for name in generator._codes.layout]
    ends = sorted((one.unsafe_buffer_pointer(), one.nbytes) for one in held)
    for (start, size), (after, _) in itertools.pairwise(ends):
        assert start + size <= after < start + size + 64
    assert not any(one.committed for one in held)
    (device,) = held[0].devices()
    placed = generator.replace(params=jax.device_put(generator.params, device))
    assert all(placed._held[name].committed for name in generator._codes.layout)


@pytest.mark.nightly
def test_weights_that_other_operations_use_stay_as_they_are() -> None:
    import torch

    class Bigrams(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(50, 50))

        def step(self, tokens: Any, cache: Any) -> Any:
            x = torch.nn.functional.embedding(tokens, self.table)
            return torch.nn.functional.linear(x, self.table) + self.table.sum(), cache

        def prefill(self, tokens: Any, mask: Any) -> Any:
            return self.step(tokens[:, -1], {"last": tokens[:, -1]})

    assert blocks_of(Bigrams())._held["table"].shape == (50, 50)


@pytest.mark.nightly
def test_many_rows_are_multiplied_with_all_blocks_at_once() -> None:
    from fmapper_adapters.jax.generation import blocks

    x, weight = np.random.default_rng(0).standard_normal((2, 200, 130))
    block = blocks.Block(200, 64, True)
    held = blocks._cut(weight, block)
    assert held.shape == (4, 130, 64)
    for rows in (3, 200):
        found = blocks._product(x[:rows], held, None, 200)
        np.testing.assert_allclose(found, x[:rows] @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_keys_and_values_are_not_repeated_for_each_head(generator: Any) -> None:
    """Two heads share them: no array of four heads is as long as the cache."""
    text = text_of_loop(generator)
    assert "f32[2,2,20,8]" in text
    assert "f32[2,4,20,8]" not in text


@pytest.mark.nightly
def test_the_cache_is_written_in_place(generator: Any) -> None:
    text = text_of_loop(generator)
    assert "input_output_alias" in text
    assert "scatter(" not in text
    copies = [line for line in text.splitlines() if " copy(" in line and "f32[2,2,20,8]" in line]
    assert not copies


@pytest.mark.nightly
def test_the_caches_of_a_single_row_are_not_copied_in_a_step() -> None:
    model = tiny("LlamaForCausalLM", num_hidden_layers=2)
    generator = fmapper.generator(model, max_length=20, batch=1, check=False)
    tokens, mask = prompts(1)
    found = generator(tokens, mask, max_new_tokens=8)
    assert np.array_equal(found, in_torch(model, tokens, mask, 8))
    text = text_of_loop(generator, rows=1)
    assert not re.search(r"f32\[(1,)?\d+,20,\d+\]\S* copy\(", text)
