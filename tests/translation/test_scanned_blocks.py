"""Blocks that repeat as one with stacked arrays, called by a scan."""

from __future__ import annotations

import ast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


class Block(nn.Module):
    def __init__(self, dim, hidden=12, rate=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.drop = nn.Dropout(rate)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x, bias):
        y = torch.relu(self.up(self.norm(x)) + bias)
        return x + self.drop(self.down(y))


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 3)

    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


class Collects(nn.Module):
    """Gives what each block computes, as models with `output_hidden_states` do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x, bias):
        states = ()
        for block in self.blocks:
            states = (*states, x)
            x = block(x, bias)
        return x, (*states, x)


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
        for block in self.others:
            x = block(x, bias)
        return x + self.blocks[1](x, bias)


torch.manual_seed(0)
INPUTS = (torch.randn(4, 8), torch.randn(12))
MODELS = {
    "net": (lambda: Net(Block(8) for _ in range(3)), INPUTS, {"blocks": 3}),
    "collects": (Collects, INPUTS, {"blocks": 3}),
    "sequence": (Sequence, (torch.randn(5, 6),), {"body": 4}),
    "stages": (
        Stages,
        INPUTS,
        {"stages": 3, "stages.0.blocks": 2, "stages.1.blocks": 2, "stages.2.blocks": 2},
    ),
    "tapped": (Tapped, INPUTS, {"others": 3}),
}
SCANS = {"flax": "nnx.scan(", "equinox": "jax.lax.scan(", "jax": "jax.lax.scan("}


@pytest.mark.nightly
@pytest.mark.parametrize("to", SCANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_with_scans_is_proved(name, to):
    pytest.importorskip(to)
    make, inputs, scans = MODELS[name]
    train = name != "sequence" or to == "flax"  # which changes arrays
    source, _, proof = translate(make(), to, inputs, train=train, proved=True, scan=True)
    assert proof, proof
    assert dict(source.scans) == scans
    ast.parse(source.code)


TRANSFORMERS = {
    "Llama": {"num_key_value_heads": 2, "num_hidden_layers": 3, "use_cache": False},
    "Bert": {"num_hidden_layers": 3},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False},
    "ViT": {"num_hidden_layers": 3, "image_size": 32, "patch_size": 8},
}


@pytest.mark.nightly
@pytest.mark.parametrize("to", SCANS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_layers_of_transformers_are_scanned(name, to):
    pytest.importorskip(to)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes = {} if name == "GPT2" else sizes
    if name != "ViT":
        sizes["vocab_size"] = 99
    config = getattr(transformers, f"{name}Config")(**sizes, **TRANSFORMERS[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    given = torch.randn(2, 3, 32, 32) if name == "ViT" else torch.arange(10).reshape(2, 5)
    source, _, proof = translate(model, to, (given,), train=True, proved=True, scan=True)
    assert proof, proof
    assert list(source.scans.values()) == [3]


@pytest.mark.nightly
def test_the_program_has_one_block():
    torch.manual_seed(0)
    model = Net(Block(8) for _ in range(6)).eval()
    lengths = []
    for scan in (False, True):
        found = fmapper.convert(model, "flax", INPUTS, structure=True, scan=scan)
        arrays = [x.numpy() for x in INPUTS]
        program = nnx.jit(lambda model, *given: model(*given)).lower(found, *arrays)
        lengths.append(program.as_text().count("dot_general"))
        np.testing.assert_allclose(
            np.asarray(found(*arrays)), model(*INPUTS).detach().numpy(), rtol=1e-5, atol=1e-5
        )
    assert lengths == [2 * 6 + 1, 2 + 1]


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_state_has_the_names_of_the_source(to):
    pytest.importorskip(to)
    torch.manual_seed(0)
    model = Net(Block(8) for _ in range(3)).eval()
    found = fmapper.convert(model, to, INPUTS, structure=True, scan=True)
    named = fmapper.state(found, source=True)
    theirs = model.state_dict()
    assert set(named) == set(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(np.asarray(named[name]), array.numpy())
    changed = {name: array + 1 for name, array in theirs.items()}
    filled = fmapper.load_state(found, changed, source=True)
    for name, array in fmapper.state(filled, source=True).items():
        np.testing.assert_array_equal(np.asarray(array), changed[name].numpy())


@pytest.mark.nightly
def test_blocks_begin_and_drop_differently():
    torch.manual_seed(0)
    code = fmapper.source(Net(Block(8) for _ in range(3)), "flax", INPUTS, train=True, scan=True)
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    model = space["Net"](rngs=nnx.Rngs(0))
    kernel = np.asarray(model.blocks.up.kernel[...])
    assert kernel.shape == (3, 8, 12)
    assert not (kernel[0] == kernel[1]).any()
    keys = jax.random.key_data(model.blocks.drop.rngs.key[...])
    assert len({tuple(np.asarray(key)) for key in keys}) == 3
    arrays = [x.numpy() for x in INPUTS]
    model.train()
    one, other = model(*arrays), model(*arrays)
    assert not (np.asarray(one) == np.asarray(other)).all()


@pytest.mark.nightly
def test_each_block_can_be_rematerialised():
    torch.manual_seed(0)
    model = Net(Block(8) for _ in range(3)).eval()
    code = fmapper.source(model, "flax", INPUTS, scan=True)
    edited = code.replace("        def call_blocks", "        @nnx.remat\n        def call_blocks")
    found = []
    for one in (code, edited):
        space = {"__name__": "translated"}
        exec(compile(one, "translated.py", "exec"), space)
        net = space["Net"](rngs=nnx.Rngs(0))
        space["load_weights"](net, {name: x.numpy() for name, x in model.state_dict().items()})
        arrays = [x.numpy() for x in INPUTS]
        loss = nnx.grad(lambda net, arrays=arrays: (net(*arrays) ** 2).sum())
        found.append(jax.tree.leaves(loss(net)))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_frozen_blocks_stay_frozen():
    model = Net(Block(8) for _ in range(3))
    for block in model.blocks:
        block.up.requires_grad_(False)
    _source, _, proof = translate(model, "flax", INPUTS, train=True, proved=True, scan=True)
    assert proof, proof


def refusal(model, to="flax", inputs=INPUTS):
    with pytest.raises(fmapper.ConversionError) as caught:
        translate(model, to, inputs, train=to == "flax", scan=True)
    return str(caught.value)


@pytest.mark.nightly
def test_what_cannot_be_scanned_says_why():
    blocks = [Block(8), Block(8, hidden=12, rate=0.3), Block(8)]
    told = refusal(Net(blocks))
    assert "blocks: its parts differ: Block(rngs=rngs) and Block_2(rngs=rngs)" in told
    uneven = Net(Block(8) for _ in range(3))
    uneven.blocks[1].up.weight.requires_grad_(False)
    assert "blocks: up.kernel differs in its shape, or in whether it is trained" in refusal(uneven)
    tied = Net(Block(8) for _ in range(3))
    tied.blocks[2].up.weight = tied.blocks[0].up.weight
    assert "blocks: " in refusal(tied)
    plain = refusal(nn.Linear(8, 3), inputs=INPUTS[:1])
    assert "there is no list of submodules" in plain
    assert "without scan=True (--scan)" in plain


@pytest.mark.nightly
def test_lists_that_are_not_scanned_are_told():
    source, _, _ = translate(Tapped(), "flax", INPUTS, scan=True)
    assert "is not a loop over all of them" in source.not_scanned["blocks"]


def test_scans_need_written_classes():
    with pytest.raises(fmapper.ConversionError, match="pass structure=True"):
        fmapper.convert(Stage(), "flax", INPUTS, scan=True)


@pytest.mark.nightly
def test_torch_has_no_scans():
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert "torch has no scan over modules" in refusal(net, "torch", (np.ones((4, 2), "f"),))
