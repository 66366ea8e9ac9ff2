"""A module of one's own that generates, by `prefill` and `step`; its files, arrays and keys."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fmapper
from fmapper.generation import Generator

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

TOKENS, WIDTH = 11, 6


class Mean(torch.nn.Module):
    """The next token goes by the mean of all before it: a cache of a sum and a count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.out = torch.nn.Linear(WIDTH, TOKENS)

    def logits(self, cache: Any) -> Any:
        return self.out(torch.tanh(3 * cache["sum"] / cache["count"]))

    def prefill(self, tokens: Any, mask: Any) -> Any:
        total = (self.embed(tokens) * mask[..., None]).sum(1)
        cache = {"sum": total, "count": mask.sum(1, keepdim=True).float()}
        return self.logits(cache), cache

    def step(self, tokens: Any, cache: Any) -> Any:
        cache = {"sum": cache["sum"] + self.embed(tokens), "count": cache["count"] + 1}
        return self.logits(cache), cache


def by_hand(module: Any, rows: list[list[int]], count: int) -> list[list[int]]:
    found = []
    with torch.no_grad():
        for row in rows:
            tokens = list(row)
            for _ in range(count):
                given = torch.tensor([tokens])
                tokens.append(int(module.prefill(given, torch.ones_like(given))[0].argmax()))
            found.append(tokens[len(row) :])
    return found


ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def made() -> Any:
    module = Mean()
    return module, fmapper.generator(module, max_length=40, batch=3)


def new_tokens(generator: Any, rows: Any = ROWS, **options: Any) -> Any:
    width = max(map(len, rows))
    return np.asarray(generator(rows, max_new_tokens=12, **options))[:, width:].tolist()


@pytest.mark.nightly
def test_a_module_with_prefill_and_step_generates(made: Any) -> None:
    module, generator = made
    assert new_tokens(generator) == by_hand(module, ROWS, 12)
    assert set(generator.params) == {"embed.weight", "out.weight", "out.bias"}


class Forgetful(Mean):
    """Keeps something in the module that a program has no access to."""

    def __init__(self, kept: Any, change: Any, read: Any) -> None:
        super().__init__()
        self.kept = kept
        self.change, self.read = change, read

    def prefill(self, tokens: Any, mask: Any) -> Any:
        self.change(self, tokens)
        return super().prefill(tokens, mask)

    def step(self, tokens: Any, cache: Any) -> Any:
        logits, cache = super().step(tokens, cache)
        return logits + self.read(self.kept), cache


def _count(self: Any, tokens: Any) -> None:
    self.kept += tokens.shape[1]


def _add(self: Any, tokens: Any) -> None:
    self.kept[0].add_(tokens.shape[1])


def _append(self: Any, tokens: Any) -> None:
    self.kept.append(tokens.float().mean())


def _insert(self: Any, tokens: Any) -> None:
    self.kept["width"] = tokens.shape[1]


OUTSIDE: dict[str, Any] = {
    "a number": (0, _count, lambda kept: torch.arange(TOKENS) * kept),
    "a tensor in a tuple": ((torch.zeros(()),), _add, lambda kept: torch.arange(TOKENS) * kept[0]),
    "a list that grows": ([], _append, lambda kept: torch.arange(TOKENS) * kept[-1]),
    "a dict": ({}, _insert, lambda kept: torch.arange(TOKENS) * kept["width"]),
    "an index": (0, _count, lambda kept: torch.arange(40)[kept : kept + 1]),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_prompt_leaves_in_the_module_is_refused(name: str) -> None:
    module = Forgetful(*copy.deepcopy(OUTSIDE[name][:1]), *OUTSIDE[name][1:])
    with pytest.raises(fmapper.ConversionError, match="Forgetful keeps kept in the module"):
        fmapper.generator(module, max_length=40)
    assert module.kept == OUTSIDE[name][0]


@pytest.mark.nightly
def test_a_count_of_prompts_is_no_state() -> None:
    module = Forgetful(0, _count, lambda kept: 0)
    with pytest.warns(fmapper.ConversionWarning, match="a call changes .*kept"):
        generator = fmapper.generator(module, max_length=40, batch=3)
    assert new_tokens(generator) == by_hand(Mean(), ROWS, 12)


@pytest.mark.nightly
def test_no_token_is_padding_where_nobody_says_so(made: Any) -> None:
    module, generator = made
    rows = [[0, 2, 0], [3, 0, 0]]
    found = np.asarray(generator(np.array(rows), max_new_tokens=12))[:, 3:].tolist()
    assert found == by_hand(module, rows, 12)


@pytest.mark.nightly
def test_random_tokens_are_those_of_the_key(made: Any) -> None:
    _, generator = made
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0}
    first = new_tokens(generator, key=jax.random.key(1), **options)
    assert new_tokens(generator, key=1, **options) == first
    assert new_tokens(generator, key=2, **options) != first
    assert new_tokens(generator, ROWS[:1], key=1, **options) == first[:1]  # in any batch
    streamed = generator.stream(ROWS, key=1, max_new_tokens=12, **options)
    assert np.stack(list(streamed), 1).tolist() == first


@pytest.mark.nightly_cases(
    "options1-temperature=, top_p= has no effect",
    "options0-key= has no effect on greedy search: pass do_sample=True",
)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": 0}, "key= has no effect on greedy search: pass do_sample=True"),
        ({"temperature": 0.7, "top_p": 0.9}, "temperature=, top_p= has no effect"),
        ({"top_k": 5, "do_sample": False}, "top_k= has no effect"),
    ],
)
def test_settings_of_sampling_without_sampling_are_refused(
    made: Any, options: dict[str, Any], says: str
) -> None:
    module, generator = made
    with pytest.raises(fmapper.ConversionError, match=says):
        generator(ROWS, max_new_tokens=3, **options)
    with pytest.raises(fmapper.ConversionError, match=says):
        next(generator.stream(ROWS, max_new_tokens=3, **options))
    settings = {name: value for name, value in options.items() if name != "key"}
    if settings:
        with pytest.raises(fmapper.ConversionError, match=says):
            generator.with_options(**settings)
    generator(ROWS, max_new_tokens=3, temperature=1.0, top_k=0)  # which ask for nothing
    assert by_hand(module, ROWS, 12) == new_tokens(generator)


@pytest.mark.nightly
def test_other_settings_of_a_kind_compile_nothing_anew(made: Any) -> None:
    from fmapper_adapters.jax.generation import loop

    _, generator = made
    options: dict[str, Any] = {"do_sample": True, "key": 0, "top_p": 0.9, "eos_token_id": 1}
    generator(ROWS, max_new_tokens=3, temperature=0.5, **options)
    before = [one._cache_size() for one in (loop.begin, loop.loop)]
    options |= {"key": 5, "top_p": 0.5, "eos_token_id": [2, 3]}
    generator(ROWS, max_new_tokens=9, temperature=1.5, **options)
    assert [one._cache_size() for one in (loop.begin, loop.loop)] == before


def test_settings_of_a_generator_hold_unless_a_call_says_otherwise(made: Any) -> None:
    _, generator = made
    own = generator.with_options(max_new_tokens=2)
    assert own(ROWS).shape == (3, 7)
    assert own(ROWS, max_new_tokens=4).shape == (3, 9)
    assert generator(ROWS, max_new_tokens=None, max_length=9).shape == (3, 9)
    assert generator(ROWS).shape == (3, 40)


def test_a_generator_is_a_functor(made: Any) -> None:
    module, generator = made
    assert {*fmapper.state(generator)} == {*fmapper.state(module)}
    other = Mean()
    torch.nn.init.normal_(other.out.weight)
    filled = fmapper.load_state(generator, fmapper.state(other))
    assert new_tokens(filled) == by_hand(other, ROWS, 12)
    assert new_tokens(generator) == by_hand(module, ROWS, 12)
    assert new_tokens(fmapper.to_cpu(generator)) == new_tokens(generator)
    with pytest.raises(fmapper.RebuildError, match="generator of JAX computes with arrays of JAX"):
        fmapper.to_torch(generator)


def test_other_arrays_come_from_a_dict_or_a_converted_model(made: Any) -> None:
    _, generator = made
    other = Mean()
    torch.nn.init.normal_(other.out.weight)
    want = by_hand(other, ROWS, 12)
    assert new_tokens(generator) != want
    assert new_tokens(generator.replace(params=fmapper.to_jax(dict(other.state_dict())))) == want

    class Forward(Mean):
        def forward(self, tokens: Any) -> Any:
            return self.prefill(tokens, torch.ones_like(tokens))[0]

    whole = Forward()
    whole.load_state_dict(other.state_dict())
    for target in ("jax", "flax"):
        if target == "flax":
            pytest.importorskip("flax")
        converted = fmapper.convert(whole, target, (torch.ones(2, 3, dtype=torch.int64),))
        assert new_tokens(generator.replace(params=converted)) == want
    with pytest.raises(fmapper.ConversionError, match=r"params has no embed\.weight"):
        generator.replace(params={})
    with pytest.raises(fmapper.ConversionError, match="expected shape"):
        generator.replace(params={**generator.params, "out.bias": np.zeros(3, "float32")})
    half = {name: array.astype("bfloat16") for name, array in generator.params.items()}
    with pytest.raises(fmapper.ConversionError, match="expected dtype float32, got bfloat16"):
        generator.replace(params=half)
    with pytest.raises(fmapper.ConversionError, match=r"has no out\.wieght"):
        generator.replace(params={**generator.params, "out.wieght": generator.params["out.bias"]})


@pytest.mark.nightly
def test_a_file_is_read_without_torch(made: Any, tmp_path: Path) -> None:
    _, generator = made
    path = tmp_path / "mean.safetensors"
    generator.with_options(repetition_penalty=1.5).save(path)
    script = f"""
import sys
from fmapper.generation import Generator
generator = Generator.load({str(path)!r})
print(generator({ROWS}, max_new_tokens=12)[:, 5:].tolist())
assert not {{"torch", "transformers"}} & {{*sys.modules}}
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(run.stdout) == new_tokens(generator, repetition_penalty=1.5)
    with pytest.raises(fmapper.ProgramFileError, match="more than a program"):
        fmapper.load_program(path)
    program = tmp_path / "program.safetensors"
    fmapper.convert(torch.nn.Linear(2, 2), "jax", (torch.ones(1, 2),)).save(program)
    with pytest.raises(fmapper.ProgramFileError, match="not a generator"):
        Generator.load(program)


def test_a_damaged_file_is_an_error_of_its_own(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "mean.safetensors"
    made[1].save(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["fmapper.generator"])

    def written(changed: Any) -> Path:
        header["__metadata__"]["fmapper.generator"] = json.dumps(changed)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64 + 56)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        return path

    def refused(changed: Any, says: str = ".") -> None:
        with pytest.raises(fmapper.ProgramFileError, match=says):
            Generator.load(written(changed))

    assert Generator.load(written(about)).max_length == 40
    assert about.pop("name") == made[0].__class__.__name__
    for key in about:
        refused({name: value for name, value in about.items() if name != key})
        for wrong in (None, "x", -1, [1.5], {"a": 1}, 1 << 40, True):
            if wrong != about[key] or type(wrong) is not type(about[key]):
                refused(about | {key: wrong})
    for wrong in (None, 1, "x" * 201, "a\nb"):
        refused(about | {"name": wrong}, "name")
    refused(about | {"batch": 4}, "another batch size")
    refused(about | {"vocabulary": 12}, "logits")
    refused(about | {"decoding": about["decoding"] | {"temperature": -1}}, "temperature")
    draw = random.Random(0)
    for _ in range(60):
        at = draw.randrange(len(data))
        path.write_bytes(data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :])
        try:
            Generator.load(path)
        except (fmapper.ProgramFileError, fmapper.ConversionError):
            continue


@pytest.mark.nightly
def test_sharded_parameters_stay_sharded(made: Any) -> None:
    _, generator = made
    mesh = jax.make_mesh((1,), ("model",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    params = {name: jax.device_put(x, spec) for name, x in generator.params.items()}
    assert new_tokens(generator.replace(params=params)) == new_tokens(generator)


SHARDED = """
import fmapper, jax, numpy as np
from fmapper.generation import Generator
from fmapper_adapters.jax.generation import loop

generator = Generator.load({path!r})
mesh = jax.make_mesh((2, 2), ("data", "model"))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
none = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

def place(x):
    for spec in (both, rows):
        if x.ndim >= len(spec.spec) and all(n % 2 == 0 for n in x.shape[: len(spec.spec)]):
            return jax.device_put(x, spec)
    return jax.device_put(x, none)

params = {{name: place(x) for name, x in generator.params.items()}}
assert any(not x.sharding.is_fully_replicated for x in params.values())
sharded = generator.replace(params=params)
for name, x in sharded.params.items():
    assert len(x.sharding.device_set) == 4, name
for options in ({{}}, {{"do_sample": True, "key": 3, "top_p": 0.9}}, {{"num_beams": 2}}):
    given = {{"max_new_tokens": 12, **options}}
    rows = [[4, 5, 6, 7], [8, 9]]
    want, found = generator(rows, **given), sharded(rows, **given)
    assert np.array_equal(found, want), (options, found, want)
rules = {{**dict.fromkeys(["q_proj", "k_proj", "v_proj"], ("model",)), "o_proj": (None, "model")}}
heads = generator.replace(params=fmapper.shard(generator.params, mesh, rules))
caches, prefill = [], loop.prefill

def kept(*given):
    found = prefill(*given)
    caches.append(found[1])
    return found

loop.prefill = kept
assert np.array_equal(heads(rows, max_new_tokens=12), generator(rows, max_new_tokens=12))
cached = [x for x in jax.tree.leaves(caches[0]) if x.ndim == 4]
assert {{x.sharding.spec[1] for x in cached}} == {{"model"}}  # heads, as their weights
streamed = np.stack(list(sharded.stream(rows, max_new_tokens=12)), 1)
assert np.array_equal(streamed, np.asarray(generator(rows, max_new_tokens=12))[:, 4:])
print(len(jax.devices()))
"""


@pytest.mark.nightly
def test_four_devices_give_the_tokens_of_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from support.generating import tiny

    model = tiny("LlamaForCausalLM", vocab_size=100)
    generator = fmapper.generator(model, max_length=20, batch=4)
    path = tmp_path / "model.safetensors"
    generator.save(path)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SHARDED.format(path=str(path))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "4", run.stderr[-2000:]
