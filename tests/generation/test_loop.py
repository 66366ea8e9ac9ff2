"""How the loop computes on the CPU: weights the other way round, heads in groups."""

from __future__ import annotations

from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("transformers")

from support.generating import prompts, tiny  # noqa: E402


@pytest.fixture(scope="module")
def generator() -> Any:
    model = tiny("LlamaForCausalLM", tie_word_embeddings=True)
    return fmapper.generator(model, max_length=20, batch=2)


def text_of_loop(generator: Any) -> str:
    """The compiled loop as XLA prints it."""
    from fmapper_adapters.jax.generation import loop

    kept: list[str] = []

    def spy(*args: Any) -> Any:
        kept.append(run.lower(*args).compile().as_text())
        return run(*args)

    run = loop.loop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "loop", spy)
        generator(*prompts(2), max_new_tokens=3)
    return kept[0]


def test_weights_are_turned_but_those_that_others_use(generator: Any) -> None:
    own = generator._codes.turned
    assert "model.layers.0.mlp.up_proj.weight" in own
    assert "model.embed_tokens.weight" not in own
    assert generator.params["model.layers.0.mlp.up_proj.weight"].shape == (64, 32)
    assert generator._held["model.layers.0.mlp.up_proj.weight"].shape == (32, 64)


def test_weights_that_leave_the_cache_of_the_processor_stay_as_they_are(generator: Any) -> None:
    from fmapper_adapters.jax.generation import turned

    programs = [generator.generation.prefill, generator.generation.step]
    assert turned.names(programs, generator.params, 2) == generator._codes.turned != frozenset()
    name = "model.layers.0.mlp.up_proj.weight"
    large = generator.params | {name: jax.numpy.zeros((2049, 1024))}
    assert turned.names(programs, large, 2) == frozenset()


def test_keys_and_values_are_not_repeated_for_each_head(generator: Any) -> None:
    """Two heads share them: no array of four heads is as long as the cache."""
    text = text_of_loop(generator)
    assert "f32[2,2,20,8]" in text
    assert "f32[2,4,20,8]" not in text


def test_the_cache_is_written_in_place(generator: Any) -> None:
    text = text_of_loop(generator)
    assert "input_output_alias" in text
    assert "scatter(" not in text
    copies = [line for line in text.splitlines() if " copy(" in line and "f32[2,2,20,8]" in line]
    assert not copies
