"""Blocks that repeat as one with stacked arrays, in files in the words of their source."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.files import File  # noqa: E402
from fmapper_translate.flax.target import FlaxTarget  # noqa: E402
from fmapper_translate.recording import record  # noqa: E402
from fmapper_translate.scans.lists import lists_of  # noqa: E402
from fmapper_translate.sources.torch import TorchSource  # noqa: E402
from fmapper_translate.walk.witness import run_file  # noqa: E402


class Block(nn.Module):
    def __init__(self, dim, hidden=12, rate=0.1, number=0):
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.drop = nn.Dropout(rate)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x, bias):
        y = torch.relu(self.up(self.norm(x)) + bias)
        return x + self.drop(self.down(y))


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, number=i) for i in range(depth)])
        self.head = nn.Linear(8, 3)

    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


class Collects(Net):
    """Gives what each block computes, as models with `output_hidden_states` do."""

    def forward(self, x, bias):
        states, sums = (), []
        for _, block in enumerate(self.blocks):
            states = (*states, x)
            x = block(x, bias)
            sums.append(x.sum())
        return x, (*states, x), sums


class Asked(Net):
    """Collects what a call asks for."""

    def forward(self, x, bias, states=False, sums=False):
        all_states = () if states else None
        all_sums = []
        for block in self.blocks:
            if states:
                all_states = all_states + (x,)  # noqa: RUF005
            x = block(x, bias)
            if sums:
                all_sums.append(x.sum())
        return x, all_states, all_sums


class Norm(nn.Module):
    """Has running statistics, which each block changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.body = nn.Sequential(*(Norm() for _ in range(4)))

    def forward(self, x):
        return self.body(self.stem(x)).sum(-1)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
        return x


class Stages(nn.Module):
    """Blocks in blocks."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(3))

    def forward(self, x, bias):
        for stage in self.stages:
            x = stage(x, bias)
            bias = bias * 2
        return x


class Tapped(nn.Module):
    """The second block is called otherwise, too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.others = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
        for block in self.others[: len(self.others)]:
            x = block(x, bias)
        return x + self.blocks[1](x, bias)


torch.manual_seed(0)
INPUTS = (torch.randn(4, 8), torch.randn(12))
IN_STAGES = {f"stages.{i}.blocks": 2 for i in range(3)}
MODELS = {
    "net": (Net, INPUTS, {"blocks": 3}),
    "collects": (Collects, INPUTS, {"blocks": 3}),
    "sequence": (Sequence, (torch.randn(5, 6),), {"body": 4}),
    "stages": (Stages, INPUTS, {"stages": 3, **IN_STAGES}),
    "tapped": (Tapped, INPUTS, {"others": 3}),
}
TARGETS = ("flax", "equinox")


@pytest.mark.nightly
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", [*MODELS, "Llama", "Bert", "GPT2", "ViT"])
def test_a_file_with_scans_is_proved(name, to):
    model, inputs, scans = MODELS[name] if name in MODELS else of_transformers(name)
    model = model() if isinstance(model, type) else model
    found = transcribe(model, inputs, target=to, scan=True)
    assert dict(found.scans) == scans
    assert not found.fallen
    proof = found.prove(model, inputs)
    assert proof, proof
    assert ("train steps" in proof.errors) is not bool(found.only_evaluation)


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 3, "vocab_size": 99}
    more = {
        "Llama": {"num_key_value_heads": 2, "use_cache": False},
        "GPT2": {"n_positions": 64, "use_cache": False},
        "ViT": {"image_size": 32, "patch_size": 8},
    }.get(name, {})
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    model = getattr(transformers, f"{name}Model")(config).eval()
    given = torch.randn(2, 3, 32, 32) if name == "ViT" else torch.arange(10).reshape(2, 5)
    path = {"Bert": "encoder.layer", "GPT2": "h"}.get(name, "layers")
    return model, (given,), {path: 3}


def run(found, model, inputs, to):
    """The file's model, and what it gives in evaluation."""
    names = run_file(found.whole)
    given = {"rngs": nnx.Rngs(0)} if to == "flax" else {"key": jax.random.key(0)}
    state = {name: x.numpy() for name, x in model.state_dict().items()}
    made = names["load_weights"](names["make_model"](**given), state)
    back = names["source_state"](made)
    assert all(np.array_equal(back[name], state[name]) for name in back)
    assert back.keys() == {name for name in state if "num_batches" not in name}
    return made, [x.numpy() for x in inputs]


@pytest.mark.parametrize("to", ["flax", pytest.param("equinox", marks=pytest.mark.nightly)])
def test_a_loop_over_blocks_is_a_scan(to):
    model = Net()
    found = transcribe(model, INPUTS, target=to, scan=True)
    assert "self.blocks.scan(call_blocks, x" in found.code
    assert "for block in self" not in found.code
    made, arrays = run(found, model, INPUTS, to)
    if to == "flax":
        made.eval()
        kernels = made.blocks.block.up.kernel[...]
    else:
        kernels = jnp.swapaxes(made.blocks.block.up.weight, 1, 2)
        made = eqx.nn.inference_mode(made)
    assert kernels.shape == (3, 8, 12)
    assert np.allclose(made(*arrays), model.eval()(*INPUTS).detach(), atol=1e-5)


@pytest.mark.parametrize("to", ["flax", pytest.param("equinox", marks=pytest.mark.nightly)])
def test_a_call_may_ask_what_is_collected(to):
    model = Asked()
    found = transcribe(model, INPUTS, target=to, scan=True)
    made, arrays = run(found, model, INPUTS, to)
    made = made.eval() or made if to == "flax" else eqx.nn.inference_mode(made)
    for asked in ({}, {"states": True}, {"states": True, "sums": True}):
        wanted = model.eval()(*INPUTS, **asked)
        given = made(*arrays, **asked)
        assert jax.tree.structure(given) == jax.tree.structure(wanted)
        for mine, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_the_program_has_one_block_of_which_each_begins_and_drops_differently():
    found = transcribe(Net(depth=6), INPUTS, target="flax", scan=True)
    made, arrays = run(found, Net(depth=6), INPUTS, "flax")
    program = nnx.jit(lambda model, *given: model(*given)).lower(made, *arrays)
    assert program.as_text().count("dot_general") == 2 + 1
    keys = jax.random.key_data(made.blocks.block.drop.rngs.key[...])
    assert len({tuple(np.asarray(key)) for key in keys}) == 6
    made.train()
    assert not (made(*arrays) == made(*arrays)).all()
    names = {}
    exec(found.code, names)
    first = names["Net"](depth=2, rngs=nnx.Rngs(0)).blocks.block.up.kernel
    assert first.shape == (2, 8, 12)
    assert not (first[0] == first[1]).any()


@pytest.mark.nightly
def test_each_block_can_be_rematerialised():
    model = Net()
    found = transcribe(model, INPUTS, scan=True)
    edited = found.code.replace(
        "        def call_blocks", "        @nnx.remat\n        def call_blocks"
    )
    slopes = []
    for code in (found.code, edited):
        names = {}
        exec(f"{code}\nnet = Net(rngs=nnx.Rngs(0))", names)
        net = names["load_weights"](
            names["net"], {name: x.numpy() for name, x in model.state_dict().items()}
        )
        net.eval()
        arrays = [x.numpy() for x in INPUTS]
        slopes.append(jax.tree.leaves(nnx.grad(lambda net, a=arrays: (net(*a) ** 2).sum())(net)))
    assert "nnx.remat" in edited
    for mine, theirs in zip(*slopes, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("to", TARGETS)
def test_a_structured_model_has_the_names_of_the_source(to):
    for name in ("sequence", "stages"):
        make, inputs, _ = MODELS[name]
        model = make().eval()
        made = fmapper.convert(model, to, inputs, structure=True, scan=True)
        assert type(made.body if name == "sequence" else made.stages).__name__ == "Stack"
        assert "transcribed from" in fmapper.source(made)
        theirs = model.state_dict()
        named = fmapper.state(made, source=True)
        assert set(named) == set(theirs)
        changed = {
            name: array + array.is_floating_point()  # no count: the program has none
            for name, array in theirs.items()
        }
        filled = fmapper.load_state(made, changed, source=True)
        for other, array in fmapper.state(filled, source=True).items():
            np.testing.assert_array_equal(np.asarray(array), changed[other].numpy())
        model.load_state_dict(changed)
        wanted = model(*inputs).detach().numpy()
        np.testing.assert_allclose(filled(*[x.numpy() for x in inputs]), wanted, rtol=1e-4)


class Rated(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, rate=0.1 * i) for i in range(3)])


class Uneven(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight.requires_grad_(False)


class Shared(Net):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Ends(Net):
    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
            if x.ndim == 5:
                break
        return x


class Last(Net):
    def forward(self, x, bias):
        for block in self.blocks:
            y = block.norm(x)
            x = block(y, bias)
        return x + y


class Keeps(Net):
    def forward(self, x, bias):
        known = {}
        for block in self.blocks:
            x = block(x, bias)
            known.update(x=x)
        return known["x"]


class Numbered(Net):
    def forward(self, x, bias):
        for i, block in enumerate(self.blocks):
            x = block(x, bias) * i
        return x


class Grows(Net):
    def forward(self, x, bias):
        for block in self.blocks:
            x = block(torch.cat([x[:1], x]), bias)
        return x


class Changed(Net):
    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
            self.last = x
        return x


REFUSALS = {
    Rated: r"its parts differ: drop.p is 0.0 and 0.1",
    Uneven: "up.weight differs in its shape, or in whether it is trained",
    Shared: "up.weight is shared",
    Ends: "its loop may end early",
    Last: "`y` of the last block is read after its loop",
    Keeps: "its loop changes `known`",
    Numbered: "its loop reads the number `i`",
    Changed: "its loop changes `self.last`",
}


@pytest.mark.parametrize("model", REFUSALS)
def test_what_cannot_be_scanned_says_why(model):
    source = TorchSource(FlaxTarget.layers)
    calls = [lambda net: net(*INPUTS)]
    recording, twin = record(source, model, calls, only_evaluation=True)
    (found,) = lists_of(File(recording, twin, FlaxTarget()))
    assert REFUSALS[model] in found.reason


@pytest.mark.nightly
def test_there_is_nothing_to_be_scanned():
    with pytest.raises(NotTranscribed, match=r"same type|carry"):
        transcribe(Grows(), INPUTS, scan=True)
    with pytest.raises(NotTranscribed, match=r"there is no list of submodules.*without scan=True"):
        transcribe(Block(8), INPUTS, scan=True)
    with pytest.raises(NotTranscribed, match="PyTorch has none over modules"):
        transcribe(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), (jnp.ones(2),), scan=True)
    code = fmapper.source(Tapped(), "flax", INPUTS, scan=True)
    assert "self.others.scan(" in code
    assert "for block in self.blocks:" in code
