"""Idioms of packages whose models lie in several modules, beside what PyTorch computes."""

from __future__ import annotations

import functools
import importlib
import sys

import pytest

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
pytest.importorskip("flax")

import torch.nn.functional as F  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402

from fmapper.translation.source import note_arguments  # noqa: E402
from fmapper_translate import transcribe  # noqa: E402
from fmapper_translate.constructors.notes import arguments_of  # noqa: E402
from fmapper_translate.walk.names import Marks, disambiguate  # noqa: E402

repeat = None  # of einops, where it is installed


def assert_same(model, x, **options):
    """Compares a module and its file; returns the file."""
    made = transcribe(model.eval(), (x,), **options)
    assert not made.fallen
    space = {"__name__": "file"}
    exec(made.whole, space)
    net = space["load_weights"](space[made.maker](rngs=nnx.Rngs(0)), made.weights)
    net.eval()
    wanted = model(x).detach().numpy()
    assert jnp.allclose(net(jnp.array(x.numpy())), wanted, atol=1e-5)
    return made.whole


# --- one name in several modules ------------------------------------------------------------------

_FIRST = """
import torch
from torch import nn

def act(x):
    return torch.tanh(x)

def default(value, other):
    return other if value is None else value

class Block(nn.Module):
    def __init__(self, dim, hidden=None):
        super().__init__()
        self.fc = nn.Linear(dim, default(hidden, dim))

    def forward(self, x):
        return act(self.fc(x))
"""
_SECOND = """
import torch
from torch import nn
from package_of_two.first import Block as Inner

def act(x):
    return torch.sin(x)

def default(value, other):
    return other if value is None else value

class Block(Inner):
    def __init__(self, dim, scale=None):
        super().__init__(dim)
        self.scale = default(scale, 3.0)

    def forward(self, x):
        return act(super().forward(x)) * self.scale
"""
_NET = """
from torch import nn
from package_of_two import first, second

class Net(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.one, self.two = first.Block(dim), second.Block(dim)

    def forward(self, x):
        return first.act(self.two(self.one(x)))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes modules of a package from their code."""

    def make(**codes):
        folder = tmp_path / "package_of_two"
        folder.mkdir()
        for name, code in {"__init__": "", **codes}.items():
            (folder / f"{name}.py").write_text(code)
        importlib.invalidate_caches()
        return importlib.import_module("package_of_two.net")

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in [name for name in sys.modules if name.startswith("package_of_two")]:
        del sys.modules[name]


@pytest.mark.nightly
def test_definitions_of_one_name_have_names_of_their_modules(package):
    torch.manual_seed(0)
    net = package(first=_FIRST, second=_SECOND, net=_NET).Net(4)
    code = assert_same(net, torch.randn(2, 4), arguments=((4,), {}))
    assert "class SecondBlock(Block):" in code
    assert "def second_act(x):" in code
    assert "return act(self.two(self.one(x)))" in code
    assert code.count("def default(") == 1  # the same in both


@pytest.mark.nightly
def test_constants_of_one_name_and_several_values_are_numbers(package):
    torch.manual_seed(0)
    modules = {
        "first": _FIRST.replace("def act", "SIZE = 2.0\n\ndef act").replace(
            "act(s", "SIZE * act(s"
        ),
        "second": _SECOND.replace("def act", "SIZE = 3.0\n\ndef act").replace(
            "act(s", "SIZE * act(s"
        ),
    }
    net = package(**modules, net=_NET).Net(4)
    code = assert_same(net, torch.randn(2, 4), arguments=((4,), {}))
    assert "SIZE * act(" in code
    assert "3.0 * second_act(" in code


def test_definitions_are_the_same_if_all_that_they_name_is(package):
    part, same = "class Part:\n    size = {}", "class Same:\n    size = 3"
    whole = "class Whole:\n    part = Part, Same"
    codes = {
        name: "\n".join((part.format(size), same, whole)) for name, size in (("a", 1), ("b", 2))
    }
    package(**codes, net="from package_of_two import a, b")
    a, b = sys.modules["package_of_two.a"], sys.modules["package_of_two.b"]
    printed = {a.Part: part.format(1), b.Part: part.format(2)} | {
        item: code for m in (a, b) for item, code in ((m.Same, same), (m.Whole, whole))
    }
    made, names = disambiguate(printed, b.Whole, Marks([]))
    assert (names[a.Part], names[b.Part]) == ("Part", "BPart")
    assert names[a.Same] == names[b.Same] == "Same"
    assert (names[a.Whole], names[b.Whole]) == ("AWhole", "Whole")
    assert made[a.Whole] == "class AWhole:\n    part = Part, Same"
    assert made[b.Whole] == "class Whole:\n    part = BPart, Same"


# --- functions and classes that are given ---------------------------------------------------------

LinearNoBias = functools.partial(nn.Linear, bias=False)


def kept(make):
    made = {}

    def again(key=None):
        if key in made:
            return made[key]
        made[key] = make()
        return made[key]

    return again


def by_prefix(prefix, options):
    found = [{}, {}]
    for key in options:
        found[int(not key.startswith(prefix))][key] = options[key]
    return (*found,)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * gradient  # another one than JAX would derive


square = Square.apply


class Given(nn.Module):
    def __init__(self, dim, token=None, **options):
        super().__init__()
        heads, rest = by_prefix("head_", options)
        make = kept(lambda: nn.Linear(dim, dim))
        self.linear, self.same = make(), make()
        self.head = LinearNoBias(dim, heads["head_dim"])
        self.scale = rest["scale"]
        self.token = nn.Parameter(torch.ones(1, dim)) if token else None
        self.count = len([part for part in self.modules() if isinstance(part, nn.Linear)])
        self.softmax = functools.partial(F.softmax, dim=-1)
        self.mask = None
        if self.mask is None:
            self.mask = torch.eye(dim)

    def forward(self, x):
        with sdpa_kernel([SDPBackend.MATH]):
            y = square(self.same(self.linear(x))) @ self.mask
        shifts = ((1, -1), (-1, 1))
        shifted = [*map(lambda sizes: F.pad(y, sizes), shifts)]  # noqa: C417
        product = lambda args: torch.einsum("bd,bd->bd", *args)  # noqa: E731
        leaves, tree = tree_flatten((product(shifted), y))
        z, y = tree_unflatten([leaf * self.scale for leaf in leaves], tree)
        if self.token is not None:
            y = y + repeat(self.token, "1 d -> b d", b=x.shape[0])
        return self.softmax(self.head(z + y)) * self.count


@pytest.mark.nightly
def test_functions_classes_and_settings_that_are_given_are_called(monkeypatch):
    monkeypatch.setitem(globals(), "repeat", pytest.importorskip("einops").repeat)
    torch.manual_seed(0)
    given = ((4,), {"token": True, "head_dim": 3, "scale": 0.5})
    code = assert_same(Given(*given[0], **given[1]), torch.randn(2, 4), arguments=given)
    assert "LinearNoBias = partial(Linear, bias=False)" in code
    assert "return 3 * x * gradient" in code
    assert "def kept(make):" in code
    assert "jax.tree.flatten(" in code


class Tree(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, x):
        leaves, _ = tree_flatten({name: x * at for at, name in enumerate(self.names)})
        return leaves[0]


def test_trees_whose_leaves_have_another_order_in_jax_are_not_those_of_jax():
    x = torch.randn(2, 3)
    made = transcribe(Tree(("b", "a")), (x,))
    assert "sorts the keys of dicts" in str(made.fallen)
    assert "jax.tree" not in made.code
    assert "jax.tree.flatten(" in assert_same(Tree(("a", "b")), x)


class Strided(nn.Conv2d):
    def __init__(self, channels, stride):
        super().__init__(channels, channels, 3, stride)
        self.stride = self.stride if stride > 1 else [1] * 2
        down, right = self.stride
        self.sizes = (0, right - 1, 0, down - 1)

    def forward(self, x):
        y, z = map(functools.partial(torch.cat, dim=1), ((x, -x), (x, x)))
        x = F.pad((y * z)[:, : x.shape[1]], self.sizes)
        return F.conv2d(x, self.weight, self.bias, self.stride)


@pytest.mark.nightly
def test_settings_that_a_layer_of_the_source_changes_are_those_of_its_base():
    torch.manual_seed(0)
    code = assert_same(Strided(2, 2), torch.randn(2, 2, 8, 8), arguments=((2, 2), {}))
    assert "self.strides = self.strides if stride > 1 else [1] * 2" in code
    assert "map(partial(jnp.concatenate, axis=1), ((x, -x), (x, x)))" in code.replace(
        "functools.", ""
    )


class Around(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def around(self, x, dim, value):
        return F.pad(x, (*((0, 0) * (-dim - 1)), 1, 2), value=value)

    def forward(self, x):
        y = self.around(self.linear(x), -1, 1.0)
        return self.around(y[:, None], -2, -1.0)


@pytest.mark.nightly
def test_sizes_of_a_padding_along_any_dimension_are_those_of_the_call():
    torch.manual_seed(0)
    code = assert_same(Around(3), torch.randn(2, 3), arguments=((3,), {}))
    assert "return pad(x, (*(0, 0) * (-dim - 1), 1, 2), value)" in code


# --- arguments of constructors --------------------------------------------------------------------


def checked(function):
    @functools.wraps(function)
    def call(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return call


class Changed(nn.Module):
    @checked
    def __init__(self, dim, *, hidden=None):
        if hidden is None:
            hidden = 2 * dim
        super().__init__()
        self.linear = nn.Linear(dim, hidden)


def test_arguments_are_noted_before_a_constructor_changes_them():
    before = sys.getprofile()
    with note_arguments():
        model = Changed(3)
    assert sys.getprofile() is before
    assert arguments_of(model) == ((), {"dim": 3, "hidden": None})
