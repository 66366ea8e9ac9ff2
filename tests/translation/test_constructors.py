"""Constructors of files: the names of the source's, and what that computes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import fmapper
from fmapper.programs.reading.arithmetic import compute
from fmapper.programs.reading.settings import Settings, settings_of
from fmapper.translation.source import translate_proved

jax = pytest.importorskip("jax")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")


def conv3x3(inside, outside, stride=1):
    """3x3 with padding."""
    return nn.Conv2d(inside, outside, kernel_size=3, stride=stride, padding=1, bias=False)


class Squeeze(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.down = nn.Linear(channels, reduced)
        self.up = nn.Linear(reduced, channels)

    def forward(self, x):
        scale = self.down(x.mean((2, 3))).relu()
        return x * self.up(scale).sigmoid()[:, :, None, None]


class Inverted(nn.Module):
    """A block whose list of layers depends on its arguments, as in MobileNet."""

    expansion = 2

    def __init__(self, inp, oup, stride, kernel):
        super().__init__()
        hidden = inp * self.expansion if stride == 1 else inp
        layers = []
        if stride == 1:
            layers += [nn.Conv2d(inp, hidden, 1, bias=False), nn.ReLU()]
        layers.append(nn.Conv2d(hidden, hidden, kernel, 1, kernel // 2, groups=hidden))
        layers.extend([nn.ReLU(), Squeeze(hidden, max(1, inp // 4))])
        layers.append(nn.Conv2d(hidden, oup, 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Dilated(nn.Module):
    def __init__(self, channels, size=3, dilation=(1, 3, 5)):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv1d(channels, channels, size, dilation=d, padding=(size * d - d) // 2)
                for d in dilation
            ]
        )

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(x).relu()
        return x


class Basic(nn.Module):
    def __init__(self, inplanes, planes, kernel=1):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes)
        self.conv2 = conv3x3(planes, planes * 2)
        self.kernel = kernel

    def forward(self, x):
        return self.conv2(self.conv1(x).relu())


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def image(channels):
    return torch.randn(2, channels, 6, 7)


CASES = {
    "inverted": (
        Blocks(Inverted(4, 8, 1, 3), Inverted(8, 16, 1, 5), Inverted(16, 8, 1, 3)),
        image(4),
        "inp, oup, kernel, hidden",
        ["Squeeze(hidden, max(1, inp // 4)", "padding=kernel // 2"],
    ),
    "dilated": (
        Blocks(Dilated(4), Dilated(4, 5), Dilated(4, 7)),
        torch.randn(2, 4, 11),
        "size=3",
        ["// 2"],
    ),
    "basic": (
        Blocks(Basic(3, 4), Basic(8, 2), Basic(4, 5)),
        image(3),
        "inplanes, planes",
        ["(inplanes, planes, ", "(planes, planes * 2, "],
    ),
}


def given(target, code, name):
    """Returns the arguments of the constructor of a class, and the code of that."""
    flat = re.sub(r"\s+", " ", code)
    found = re.search(
        rf"class {name}\(.*?def __init__\( ?self, (.*?),? \*, (.*?)def __call__", flat
    )
    return found[1], re.sub(r"([\[(]) | (?=[\])])", r"\1", found[2])


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
@pytest.mark.parametrize("name", CASES)
def test_constructors_have_the_names_of_the_source(name, target):
    module, x, parameters, parts = CASES[name]
    code = fmapper.source(module.eval(), target, (x,))
    found, made = given(target, code, type(module.blocks[0]).__name__)
    assert found == parameters
    for part in parts:
        assert part in made


@pytest.mark.nightly
def test_variables_of_loops_are_those_of_comprehensions():
    module, x, *_ = CASES["dilated"]
    _, made = given("flax", fmapper.source(module.eval(), "flax", (x,)), "Dilated")
    assert "padding=(size * dilation - dilation) // 2" in made
    assert "for dilation in (1, 3, 5)" in made
    _, made = given("equinox", fmapper.source(module.eval(), "equinox", (x,)), "Dilated")
    assert "padding=(size - 1) // 2" in made


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_files_with_names_of_the_source_compute_the_same(name):
    module, x, *_ = CASES[name]
    space = {"__name__": "translated"}
    exec(compile(fmapper.source(module.eval(), "flax", (x,)), "translated.py", "exec"), space)
    model = space["load_weights"](space["Blocks"](rngs=nnx.Rngs(0)), {
        key: value.detach().numpy() for key, value in module.state_dict().items()
    })  # fmt: skip
    np.testing.assert_allclose(model(x.numpy()), module(x).detach(), rtol=2e-5, atol=2e-5)


class Named(nn.Module):
    """Its variables have the names of attributes, of layers and of each other's numbers."""

    def __init__(self, linear, Linear, rngs, key):
        super().__init__()
        self.linear = nn.Linear(linear, Linear)
        self.second = nn.Linear(Linear, rngs)
        self.third = nn.Linear(rngs, key)

    def forward(self, x):
        return self.third(self.second(self.linear(x)))


class Turned(nn.Module):
    """Its method reads what its constructor computes."""

    def __init__(self, k):
        super().__init__()
        self.k = k
        self.layer = nn.Linear(k, k * k)

    def forward(self, x):
        return self.layer(x) + torch.eye(self.k).view(1, self.k * self.k)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.two, self.three = Turned(2), Turned(3)

    def forward(self, x, y):
        return self.two(x), self.three(y)


@pytest.mark.nightly_cases("flax")
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_methods_compute_what_constructors_do(target):
    code = fmapper.source(Several(), target, (torch.randn(4, 2), torch.randn(4, 3)))
    assert given(target, code, "Turned")[0] == "k"
    assert "self.k * self.k" in code


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_names_that_are_taken_get_numbers(target):
    module, x = Blocks(Named(2, 3, 4, 5), Named(5, 6, 7, 8)), torch.randn(2, 2)
    code = fmapper.source(module, target, (x,))
    compile(code, "translated.py", "exec")
    found, _ = given(target, code, "Named")
    names = re.split(r",\s*", found)
    assert len({*names}) == 4
    assert not {*names} & {"linear", "rngs", "key"}


class Lazy(nn.Module):
    """Has a property that must not be asked for."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.asked = nn.Linear(width, 2)

    @property
    def asked(self):
        raise AssertionError

    @asked.setter
    def asked(self, value):
        pass


class Limited(nn.Module):
    """Has a number that is called as a function which its constructor calls."""

    def __init__(self, width, limit):
        super().__init__()
        self.max = limit + 1
        self.layer = nn.Linear(width, max(1, width // 2))

    def forward(self, x):
        return self.layer(x)[:, :1].expand(-1, self.max) * self.max


@pytest.mark.nightly
def test_functions_that_are_called_are_not_the_names_of_arguments():
    module = Blocks(Limited(4, 5), Limited(6, 7)).eval()
    space = {"__name__": "translated"}
    code = fmapper.source(module, "flax", (torch.randn(2, 4),))
    assert "max(1, width // 2)" in code
    exec(compile(code, "translated.py", "exec"), space)
    assert space["Blocks"](rngs=nnx.Rngs(0))(np.ones((2, 4), np.float32)).shape == (2, 8)


def test_properties_are_not_computed():
    assert settings_of(Lazy(3)).numbers == {"width": 3}


class Shy(nn.Module):
    """Raises where its parts are counted."""

    def __init__(self, width):
        super().__init__()
        self.parts = Counted(nn.Linear(width, width))
        self.width = width


class Counted(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def __len__(self):
        raise RuntimeError


def test_modules_that_raise_keep_their_attributes():
    assert settings_of(Shy(3)).numbers == {"width": 3}
    assert settings_of(Shy(3)).code == {}


def test_numbers_of_constructors_are_read_where_their_code_tells():
    block = CASES["inverted"][0].blocks[0]
    found = settings_of(block)
    assert [*found.numbers.items()] == [("inp", 4), ("oup", 8), ("kernel", 3), ("hidden", 8)]
    assert found.code["layers.2.padding"] == "kernel // 2"
    assert found.code["layers.4.reduced"] == "max(1, inp // 4)"
    assert settings_of(block.layers[4]).numbers == {"channels": 8, "reduced": 1}
    assert settings_of(nn.Linear(2, 3)).numbers == {"in_features": 2, "out_features": 3}
    dilated = settings_of(Dilated(4, 5))
    assert dilated.numbers == {"channels": 4, "size": 5}  # and `d` is several numbers
    assert dilated.code["convs.1.padding"] == "(size * 3 - 3) // 2"
    assert settings_of(len) == Settings()


class Mixed(nnx.Module):
    def __init__(self, cin, cout, kernel, *, rngs):
        self.conv = nnx.Conv(cin, cout, (kernel, kernel), padding="VALID", rngs=rngs)
        self.up = nnx.Linear(cout, cout * 2, rngs=rngs)
        self.down = nnx.Linear(cout * 2, cout, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(self.conv(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Mixed(3, 4, 3, rngs=rngs), Mixed(4, 5, 2, rngs=rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.nightly
def test_constructors_of_torch_files_have_the_names_of_flax_modules():
    code = fmapper.source(Net(nnx.Rngs(0)), "torch", (np.ones((2, 8, 8, 3), np.float32),))
    assert "def __init__(self, cin, cout, kernel):" in code
    assert "Linear(cout * 2, cout)" in code


class Fields(linen.Module):
    width: int
    hidden: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.width)(linen.relu(linen.Dense(self.hidden)(x)))


class Stack(linen.Module):
    @linen.compact
    def __call__(self, x):
        for width in (4, 8, 6):
            x = Fields(width, 2 * width + 1)(x)
        return x


@pytest.mark.nightly
def test_constructors_of_torch_files_have_the_names_of_fields():
    x = np.ones((2, 5), np.float32)
    code = fmapper.source(Stack().bind(Stack().init(jax.random.key(0), x)), "torch", (x,))
    assert "def __init__(self, width, hidden, in_features):" in code


@pytest.mark.parametrize(
    "code", ["width.shape", "open(width)", "[width]", "width ** 9", "width // 0", "'a' * width"]
)
def test_code_that_is_more_than_arithmetic_gives_no_number(code):
    assert compute(code, {"width": 3}) is None


class Strided(nnx.Module):
    """Pads as JAX does: for strides more behind than before."""

    def __init__(self, width, stride, *, rngs):
        self.conv = nnx.Conv(width, width, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.mix = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.mix(nnx.relu(self.norm(self.conv(x))))


class Pyramid(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Strided(4, stride, rngs=rngs) for stride in (1, 2, 1, 2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.nightly
def test_paddings_on_one_side_are_arguments():
    x = np.random.default_rng(0).standard_normal((2, 8, 8, 4)).astype(np.float32)
    source, proof, _ = translate_proved(Pyramid(nnx.Rngs(0)), "torch", (x,))
    assert proof, proof
    assert "class Strided_2(" not in source.code
    assert "pad=(0, pad, 0, pad)" in source.code


class Heads(nn.Module):
    def __init__(self, in_features, out_features, heads):
        super().__init__()
        self.num_of_heads, self.num_out_features = heads, out_features
        self.proj = nn.Linear(in_features, heads * out_features)
        self.query = nn.Parameter(torch.randn(1, heads, out_features))

    def forward(self, x):
        y = self.proj(x).view(-1, self.num_of_heads, self.num_out_features)
        return (y * self.query).tanh().flatten(1)


@pytest.mark.nightly
def test_products_of_arguments_that_methods_read():
    """`out_features` was what the layer is given, not what the source calls so."""
    net = nn.Sequential(Heads(5, 4, 4), Heads(16, 4, 4), Heads(16, 3, 6))
    source, proof, _ = translate_proved(net, "flax", (torch.randn(2, 5),))
    assert proof
    assert "def __init__(self, in_features, out_features, heads, *, rngs" in source.code
    assert "nnx.Linear(in_features, heads * out_features, rngs=rngs)" in source.code


class Doubled(nn.Module):
    """Has a width in between that is that of the output if nobody says otherwise, as in U-Net."""

    def __init__(self, inside, outside, middle=None):
        super().__init__()
        middle = middle or outside
        self.layers = nn.Sequential(
            nn.Conv1d(inside, middle, 3, padding=1), nn.ReLU(), nn.Conv1d(middle, outside, 3)
        )

    def forward(self, x):
        return self.layers(x)


@pytest.mark.nightly
def test_numbers_with_two_names_are_called_as_the_first_parameter():
    net = nn.Sequential(Doubled(3, 4), Doubled(4, 8), Doubled(8, 16)).eval()
    code = fmapper.source(net, "flax", (torch.randn(2, 3, 12),))
    assert "def __init__(self, inside, outside, *, rngs: nnx.Rngs):" in code


class Table(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Parameter(torch.ones(size))


class RowsTaken(torch.overrides.TorchFunctionMode):
    """Counts the rows that code takes of tensors."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.__getitem__
        return func(*args, **(kwargs or {}))


def test_arrays_are_not_read_row_by_row():
    with RowsTaken() as rows:
        settings_of(Table(50))
    assert rows.count == 0  # or each would be recorded where a model is


def test_a_module_that_does_not_tell_its_parts_has_no_words():
    class Closed(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.width, self.mode = width, "fast"

        def named_children(self):
            raise RuntimeError("not in this state")

    found = settings_of(Closed(3))
    assert found.numbers["width"] == 3
    assert found.words == {}


def test_rows_of_a_variable_are_not_read_one_by_one():
    read = []

    class Table:
        """A variable that has rows, but is not an array."""

        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return self.rows

        def __getitem__(self, at):
            read.append(at)

    class Owner:
        def __init__(self):
            self.table = Table(8000)

    settings_of(Owner())
    assert not read
