"""What a model asks for is done, or said; nothing is dropped."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest

import fmapper
from fmapper.generation import Decoding, read_config


def test_a_configuration_is_read() -> None:
    decoding, missing = read_config(
        {
            "eos_token_id": [2, 3],
            "pad_token_id": 0,
            "do_sample": True,
            "top_k": 50,
            "temperature": 0.7,
            "max_new_tokens": 5,
            "bos_token_id": 1,
            "transformers_version": "5.23.0",
            "length_penalty": 1.0,
            "top_p": None,
        }
    )
    assert missing == ()
    assert decoding == Decoding(
        eos_token_id=(2, 3),
        pad_token_id=0,
        do_sample=True,
        top_k=50,
        temperature=0.7,
        max_new_tokens=5,
    )


def test_what_only_matters_to_samples_waits_for_a_call_that_draws() -> None:
    """As `generate` does it. Nobody looks at such values before, so they may be invalid."""
    given = {"top_k": 50, "temperature": 0.6, "top_p": 1.5}
    assert read_config(given)[0] == Decoding(top_k=50, temperature=0.6)
    with pytest.raises(ValueError, match=r"top_p=1\.5"):
        read_config(given | {"do_sample": True})


@pytest.mark.nightly
def test_fifty_tokens_are_drawn_from_where_a_model_of_transformers_does_not_say() -> None:
    pytest.importorskip("jax")
    transformers = pytest.importorskip("transformers")
    from support.generating import tiny

    model = tiny("LlamaForCausalLM", num_hidden_layers=1)
    for own, want in ((None, 50), (7, 7), (0, 0)):
        model.generation_config = transformers.GenerationConfig(top_k=own)
        assert fmapper.generator(model, max_length=8, check=False).decoding.top_k == want


def test_a_negative_token_is_none() -> None:
    """Configurations of the first Llama have -1 for padding."""
    decoding, missing = read_config({"eos_token_id": [-1, 3], "pad_token_id": -1})
    assert (decoding.eos_token_id, decoding.pad_token_id) == ((3,), 3)
    assert len(missing) == 1
    assert missing[0].startswith("pad_token_id=-1: this is not a token")
    assert read_config({"eos_token_id": -1}) == (Decoding(), ())
    assert read_config({"eos_token_id": [-1]}) == (Decoding(), ())


def test_the_first_stop_token_is_padding_where_there_is_none() -> None:
    assert read_config({"eos_token_id": [7, 8]})[0].pad_token_id == 7


def test_everything_else_is_told() -> None:
    _, missing = read_config(
        {"num_beam_groups": 4, "guidance_scale": 1.5, "bad_words_ids": [[1]], "of_tomorrow": 3}
    )
    assert [line.partition("=")[0] for line in missing] == [
        "num_beam_groups",
        "guidance_scale",
        "of_tomorrow",
    ]


def test_every_setting_of_transformers_is_known() -> None:
    """A default asks for nothing; a setting that is new has to be looked at."""
    transformers = pytest.importorskip("transformers")
    assert read_config(transformers.GenerationConfig().to_dict())[1] == ()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"temprature": 1.0}, TypeError, "temperature"),
        ({"temperature": 0}, ValueError, "out of range: pass do_sample=False"),
        ({"temperature": float("nan")}, ValueError, "out of range"),
        ({"top_p": 1.5}, ValueError, "out of range"),
        ({"top_k": -1}, ValueError, "a number of tokens"),
        ({"do_sample": 1}, ValueError, "True or False"),
        ({"eos_token_id": "2"}, ValueError, "must be a token"),
        ({"guidance_scale": 2.0}, fmapper.ConversionError, "a second run"),
        ({"stop_strings": ["."]}, fmapper.ConversionError, "pass the tokens as eos_token_id"),
        ({"bad_words_ids": [3]}, ValueError, "a list of tokens"),
        ({"bad_words_ids": [[]]}, ValueError, "a list of tokens"),
        ({"sequence_bias": [[[1], float("nan")]]}, ValueError, "out of range"),
        ({"exponential_decay_length_penalty": 3}, ValueError, "a factor"),
        ({"early_stopping": "soon"}, ValueError, "'never'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        Decoding().with_options(options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2, "do_sample": True}, "pass do_sample=False, or num_beams=1"),
        ({"num_beams": 2, "num_return_sequences": 3}, "returns at most num_beams sequences"),
        ({"num_return_sequences": 3}, "greedy search returns a single sequence"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, says: str) -> None:
    with pytest.raises(fmapper.ConversionError, match=says):
        Decoding().with_options(options).check()


def test_a_bias_may_be_a_dict() -> None:
    want = (((1, 2), 0.5),)
    assert Decoding().with_options({"sequence_bias": {(1, 2): 0.5}}).sequence_bias == want
    assert Decoding().with_options({"sequence_bias": [[[1, 2], 0.5]]}).sequence_bias == want


def test_numbers_may_be_those_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    given = {
        "max_new_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "eos_token_id": np.int32(2),
    }
    decoding = Decoding().with_options(given)
    found = (decoding.max_new_tokens, decoding.temperature, *decoding.eos_token_id)
    assert found == (3, 0.5, 2)
    assert [type(x) for x in found] == [int, float, int]


@pytest.mark.nightly
def test_a_model_that_asks_in_vain_says_so_once() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("transformers")
    from support.generating import tiny

    model = tiny("LlamaForCausalLM", num_hidden_layers=1)
    model.generation_config.guidance_scale = 1.5
    with pytest.warns(fmapper.ConversionWarning, match="guidance_scale=1.5"):
        generator = fmapper.generator(model, max_length=20, max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generator([[5, 6]]).shape == (1, 5)


def test_the_room_imports_no_framework() -> None:
    script = (
        "import sys, fmapper.generation.generator; assert not {'torch', 'jax'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_model_that_does_not_generate_is_refused() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    with pytest.raises(fmapper.ConversionError, match="Linear cannot generate"):
        fmapper.generator(torch.nn.Linear(2, 2), max_length=5)
    converted = fmapper.convert(torch.nn.Linear(2, 2), "jax", (torch.ones(1, 2),))
    with pytest.raises(fmapper.ConversionError, match=r"generator\.replace\(params=model\)"):
        fmapper.generator(converted, max_length=5)
    for name in ("top_kk", "max_new_token"):
        with pytest.raises(TypeError, match=f"no option '{name}'. Did you mean '{name[:5]}"):
            fmapper.generator(torch.nn.Linear(2, 2), max_length=5, **{name: 3})
    for options in ({"max_length": 1}, {"max_length": 5, "batch": 0}):
        with pytest.raises(fmapper.ConversionError, match=r"max_length=1|batch=0"):
            fmapper.generator(torch.nn.Linear(2, 2), **options)
