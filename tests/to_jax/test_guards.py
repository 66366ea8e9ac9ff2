"""What a module of torch asks of sizes that vary guards the program; sizes it fixes are told."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

import pytest
from torch.fx.experimental.sym_node import SymNode

import fmapper
from support import converting
from support.converting import Function, jax, np, torch

AUTO = torch.export.Dim.AUTO

ASKED = {
    "remainder": (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, (4, 3), (6, 3), (5, 3)),
    "one": (lambda x: x * 2 if x.shape[0] == 1 else x, (4, 3), (5, 3), (1, 3)),
    "none": (lambda x: x * 2 if x.shape[0] == 0 else x + 1, (4, 3), (1, 3), (0, 3)),
    "truth": (lambda x: x * 2 if x.shape[0] else x + 1, (4, 3), (1, 3), (0, 3)),
    "less than two": (lambda x: x * 2 if x.shape[0] < 2 else x, (4, 3), (2, 3), (1, 3)),
    "more": (lambda x: x * 2 if x.shape[0] > 3 else x, (4, 3), (5, 3), (3, 3)),
    "of two": (lambda x: x * 2 if x.shape[0] > x.shape[1] else x, (4, 3), (6, 5), (4, 4)),
    "rounded up": (
        lambda x: x * 2 if math.ceil(x.shape[0] / 3) == 2 else x, (4, 3), (6, 3), (7, 3)
    ),
    "among others": (lambda x: x * 2 if x.shape[0] in (3, 7) else x, (4, 3), (5, 3), (7, 3)),
    "the larger": (lambda x: x * 2 if max(x.shape[0], 4) > 4 else x, (5, 3), (6, 3), (4, 3)),
    "in a layer of torch": (torch.nn.Linear(3, 3).eval(), (4, 3), (1, 3), None),
}  # fmt: skip


class Stages(torch.nn.Module):
    """Patches, a norm of the features, and a stride, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 4, 4, 4)
        self.smaller = torch.nn.Conv2d(4, 4, 2, 2)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.patches(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.norm(self.smaller(x).mean([-2, -1]))


@pytest.mark.nightly
@pytest.mark.parametrize("size", [8, 16])
def test_layouts_in_memory_restrict_no_size(size: int) -> None:
    model = Stages().eval()
    shapes = ["b, _, h, w"]
    converted = fmapper.convert(
        model, "jax", (torch.randn(2, 3, size, size),), dynamic_shapes=shapes, check=False
    )
    for other in ((1, 3, 8, 8), (2, 3, 17, 8)):
        x = torch.randn(other)
        np.testing.assert_allclose(converted(x.numpy()), model(x).detach(), rtol=1e-4, atol=1e-5)


# A function -> the sizes of its example, and others that it takes.
ARRANGED: dict[str, tuple[Any, tuple[int, ...], list[tuple[int, ...]]]] = {
    "split": (lambda x: x.reshape(4, -1), (4, 6), [(2, 6), (1, 4), (8, 1)]),
    "merge": (lambda x: x.transpose(0, 1).reshape(-1), (4, 6), [(1, 6), (6, 1), (1, 1)]),
    "heads": (
        lambda x: x.reshape(x.shape[0], -1, 2, 3).transpose(1, 2).reshape(x.shape[0] * 2, -1, 3),
        (4, 6, 6),
        [(1, 6, 6), (1, 1, 6), (2, 1, 12)],
    ),
    "patches": (
        lambda x: x.reshape(x.shape[0], x.shape[1] // 2, 2, -1).transpose(1, 2).flatten(2),
        (2, 8, 3),
        [(1, 4, 1), (2, 2, 3), (3, 12, 5)],
    ),
}  # fmt: skip


class Calls(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.nightly_cases("heads", "patches")
@pytest.mark.parametrize("name", ARRANGED)
def test_how_torch_arranges_a_view_restricts_no_size(name: str) -> None:
    function, shape, others = ARRANGED[name]
    converted = fmapper.convert(
        Calls(function), "jax", (torch.randn(shape),), dynamic_shapes="auto", check=False
    )
    for other in others:
        x = torch.randn(other)
        np.testing.assert_array_equal(converted(x.numpy()), function(x))


class ChangesAView(torch.nn.Module):
    """Changes a reshaped tensor, which is a view for a batch of one and a copy otherwise."""

    def forward(self, x: Any) -> Any:
        x = x + 0
        x.transpose(0, 1).reshape(-1).mul_(2)
        return x


def test_layouts_that_decide_what_is_changed_are_guards() -> None:
    model = ChangesAView()
    converted = fmapper.convert(model, "jax", (torch.ones(2, 3),), dynamic_shapes="auto")
    np.testing.assert_array_equal(converted(np.ones((3, 4), "float32")), model(torch.ones(3, 4)))
    with pytest.raises(fmapper.ProgramInputError, match=r"x.shape\[0\] >= 2 at .*test_guards.py"):
        converted(np.ones((1, 3), "float32"))


@pytest.mark.daily_cases("one", "among others", "the larger")
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_a_size_holds_at_each_call(name: str, tmp_path: Path) -> None:
    function, shape, other, refused = ASKED[name]
    shapes = {"args": ({0: AUTO} if "layer" in name else (AUTO, AUTO),)}
    model = converting.check(
        Function(function), torch.rand(shape), options={"dynamic_shapes": shapes}
    )
    assert not model.program.fixed
    x = torch.rand(other)
    converting.compare(model(jnp_of(x)), function(x))
    if refused is None:
        return
    told = r"may be from . to|args\[0\].shape\[0\].*guards.py:\d+"
    model.save(tmp_path / "model.safetensors")
    for one in model, type(model).load(tmp_path / "model.safetensors"):
        with pytest.raises(fmapper.ProgramInputError, match=told):
            one(jnp_of(torch.rand(refused)))


def jnp_of(x: Any) -> Any:
    return jax.numpy.asarray(x.numpy())


def test_what_is_asked_of_a_size_that_is_worked_out() -> None:
    n = torch.export.Dim("n")
    model = fmapper.convert(
        Function(lambda x: x * 2 if x.shape[0] % 4 == 0 else x),
        "jax",
        (torch.ones(4, 3),),
        dynamic_shapes={"args": ({0: 2 * n},)},
    )
    assert float(model(np.ones((8, 3), "float32")).sum()) == 48
    with pytest.raises(fmapper.ProgramInputError, match=r"2\*\w+ is 6.*guards.py:\d+"):
        model(np.ones((6, 3), "float32"))


@pytest.mark.nightly
def test_what_is_asked_of_a_number_that_varies() -> None:
    model = fmapper.convert(
        Function(lambda x, n: x * n if n % 2 else x),
        "jax",
        (torch.ones(3), 5),
        dynamic_shapes={"args": (None, torch.export.Dim.DYNAMIC)},
    )
    assert float(model(np.ones(3, "float32"), 7)[0]) == 7
    with pytest.raises(fmapper.ProgramInputError, match=r"guards.py:\d+"):
        model(np.ones(3, "float32"), 4)


@pytest.mark.nightly
def test_symbols_of_jax_must_fulfil_what_was_asked() -> None:
    model = fmapper.convert(
        Function(ASKED["remainder"][0]), "jax", (torch.ones(4, 3),), dynamic_shapes="auto"
    )

    def export(shape: str) -> Any:
        given = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32")
        return jax.export.export(jax.jit(model))(given)

    assert export("2*b, 3").call(np.ones((6, 3), "float32")).sum() == 36
    with pytest.raises(fmapper.ProgramInputError, match=r"Mod\(args\[0\].shape\[0\], 2\)"):
        export("b, 3")


FIXED = {
    "a comparison": (
        lambda x: x * 2 if x.shape[0] == 4 else x, (4, 3),
        r"args\[0\].shape\[0\] is 4: the code fixes it at .*guards.py:\d+: ",
    ),
    "a shape": (lambda x: x.expand(4, -1), (4, 3), r"\[0\] is 4: .*guards.py:\d+: "),
    "a length": (lambda x: x / len(x), (4, 3), r"\[0\] is 4: .*guards.py:\d+: "),
    "weights": (lambda x: x @ torch.ones(3, 2), (4, 3), r"\[1\] is 3: .*guards.py:\d+: "),
    "one": (lambda x: x * 2, (4, 1), r"args\[0\].shape\[1\] is 1: torch fixes sizes that are 1"),
    "what cannot be checked": (
        lambda x: x * 2 if x.shape[0] ** 0.5 > 1.5 else x, (4, 3),
        r"args\[0\].shape\[0\] is 4: .* at .*guards.py:\d+, which cannot be checked",
    ),
}  # fmt: skip


@pytest.mark.daily_cases("a shape")
@pytest.mark.parametrize("name", FIXED)
def test_a_size_that_does_not_vary_is_told(name: str) -> None:
    function, shape, told = FIXED[name]
    with pytest.warns(fmapper.FixedSizeWarning, match=told):
        model = fmapper.convert(Function(function), "jax", (torch.ones(shape),),
                                dynamic_shapes="auto")  # fmt: skip
    (sentence,) = model.program.fixed
    at = int(sentence[sentence.index("shape[") + 6])
    other = torch.ones([n + 1 if d != at else n for d, n in enumerate(shape)])
    converting.compare(model(jnp_of(other)), function(other))
    with pytest.raises(fmapper.ProgramInputError):
        model(jnp_of(torch.ones([n + 1 if d == at else n for d, n in enumerate(shape)])))


@pytest.mark.nightly
def test_sizes_that_were_not_to_vary_are_not_told() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any, given: Any, *, rest: Any) -> Any:
            return x.reshape(4, -1), given["a"] + rest[0], given["b"]

    given = {"a": torch.ones(3, 2), "b": torch.ones(1, 2)}
    rest = [torch.ones(3, 2)]
    shapes = {"x": {1: AUTO}, "given": {"a": (None, AUTO), "b": None}, "rest": [{0: AUTO, 1: AUTO}]}
    with pytest.warns(fmapper.FixedSizeWarning) as told:
        model = fmapper.convert(
            Net(), "jax", (torch.ones(4, 3), given), {"rest": rest}, dynamic_shapes=shapes
        )
    assert len(told) == 1
    (sentence,) = model.program.fixed
    assert sentence.startswith("rest[0].shape[0] is 3: the code fixes it at ")
    assert sentence.endswith('return x.reshape(4, -1), given["a"] + rest[0], given["b"]')


@pytest.mark.nightly
def test_torch_is_afterwards_as_it_was() -> None:
    names = ("guard_bool", "eq", "ne", "lt", "le", "gt", "ge")
    before = operator.attrgetter(*names)(SymNode)
    fmapper.convert(Function(torch.sin), "jax", (torch.ones(2, 3),), dynamic_shapes="auto")
    assert operator.attrgetter(*names)(SymNode) == before
