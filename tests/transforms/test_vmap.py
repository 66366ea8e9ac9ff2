"""`vmap` against a loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import fmapper
from fmapper import (
    MixedDevicesError,
    NotAFunctorError,
    TransformError,
    fmap,
    functor,
    no_gradient,
    vmap,
)

np = pytest.importorskip("numpy")


@functor
class Tree:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


class Pair(NamedTuple):
    a: Any
    b: Any


def arrays(xp: Any, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(1)
    return [xp.array(rng.normal(size=shape)) for shape in shapes]


def close(xp: Any, got: Any, want: Any) -> None:
    got, want = xp.host(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize(
    ("in_axes", "first", "second"),
    [
        (0, (3, 2), (3, 2)),
        ((0, None), (3, 2), (2,)),
        ((None, 0), (2,), (3, 2)),
        ([1, 0], (2, 3), (3, 2)),
        ((-1, 0), (2, 3), (3, 2)),
        (1, (2, 3), (2, 3)),
        (-1, (2, 3), (2, 3)),
    ],
)
def test_in_axes(xp: Any, in_axes: Any, first: Any, second: Any) -> None:
    a, b = arrays(xp, first, second)
    got = vmap(lambda a, b: (a * b**2).sum(), in_axes)(a, b)
    per = in_axes if isinstance(in_axes, tuple | list) else (in_axes, in_axes)
    parts = [
        np.broadcast_to(xp.host(x), (3, 2)) if axis is None else np.moveaxis(xp.host(x), axis, 0)
        for x, axis in zip((a, b), per, strict=True)
    ]
    close(xp, got, (parts[0] * parts[1] ** 2).sum(1))


@pytest.mark.parametrize(
    "axes",
    [{"a": 0, "b": [None, 1]}, {"a": 0, "b": (None, -1)}, {"b": [None, 1], "a": 0}],
)
def test_axes_within_an_argument(xp: Any, axes: Any) -> None:
    a, b, c = arrays(xp, (3, 2), (2,), (2, 3))
    got = vmap(lambda m: (m["a"] * m["b"][0] * m["b"][1]).sum(), (axes,))({"a": a, "b": [b, c]})
    close(xp, got, (xp.host(a) * xp.host(b) * xp.host(c).T).sum(1))


def test_axes_within_a_functor(xp: Any) -> None:
    a, b = arrays(xp, (3, 2), (2,))
    got = vmap(lambda m: (m.a * m.b).sum() * m.n, ({"a": 0, "b": None, "n": None},))(
        Tree(a=a, b=b, n=2)
    )
    close(xp, got, (xp.host(a) * xp.host(b)).sum(1) * 2)


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1, -2])
def test_out_axes(xp: Any, out_axes: int) -> None:
    (a,) = arrays(xp, (5, 2, 3))
    got = vmap(lambda a: {"x": a * 2}, out_axes=out_axes)(a)
    close(xp, got["x"], np.moveaxis(xp.host(a) * 2, 0, out_axes))


def test_out_axes_for_each_part(xp: Any) -> None:
    (a,) = arrays(xp, (5, 2, 3))
    one, other, whole = vmap(lambda a: (a, [a + 1], a * 0), out_axes=(1, -1, None))(a)
    close(xp, one, np.moveaxis(xp.host(a), 0, 1))
    close(xp, other[0], np.moveaxis(xp.host(a) + 1, 0, -1))
    close(xp, whole, np.zeros((2, 3)))


def test_what_is_no_array_goes_along(xp: Any) -> None:
    (a,) = arrays(xp, (3, 2))
    seen = []

    def f(model: Any, power: Any, *, name: Any, f: Any) -> Any:
        seen.append((model.n, model.none, power, name, f))
        return {
            "out": model.a**power,
            "n": power,
            "name": name,
            "none": None,
            "pair": Pair(model.a, 1),
        }

    got = vmap(f)(Tree(a=a, n=4, none=None), 2, name="x", f=len)
    assert seen == [(4, None, 2, "x", len)]
    close(xp, got["out"], xp.host(a) ** 2)
    assert (got["n"], got["name"], got["none"]) == (2, "x", None)
    assert type(got["pair"]) is Pair
    close(xp, got["pair"].a, xp.host(a))
    assert got["pair"].b == 1


def test_arguments_by_name_are_taken_apart_too(xp: Any) -> None:
    a, b = arrays(xp, (3, 2), (3,))
    close(xp, vmap(lambda a, *, b: a.sum() * b)(a, b=b), xp.host(a).sum(1) * xp.host(b))


def test_an_ensemble(xp: Any) -> None:
    models = [
        Tree(w=w, rest=[b], n=2)
        for w, b in zip(arrays(xp, *[(3, 2)] * 4), arrays(xp, *[(2,)] * 4), strict=True)
    ]
    (x,) = arrays(xp, (5, 3))
    stack = xp.lib.stack if xp.name == "torch" else xp.lib.numpy.stack
    stacked = fmap(
        lambda first, *rest: stack([first, *rest]) if hasattr(first, "shape") else first, *models
    )
    out = vmap(lambda m, x: (x @ m.w + m.rest[0]) * m.n, in_axes=(0, None))(stacked, x)
    for i, model in enumerate(models):
        close(xp, out[i], (xp.host(x) @ xp.host(model.w) + xp.host(model.rest[0])) * 2)


def test_models_come_out(xp: Any) -> None:
    (a,) = arrays(xp, (3, 2))
    got = vmap(lambda m: Tree(w=m.w * 2, same=m.w, tied=m.w, n=m.n))(Tree(w=a, n=3))
    assert type(got) is Tree
    assert got.n == 3
    assert got.same is got.tied
    close(xp, got.w, xp.host(a) * 2)
    close(xp, got.same, xp.host(a))


def test_ties_of_arguments(xp: Any) -> None:
    (a,) = arrays(xp, (3, 2))

    def f(m: Any, other: Any) -> Any:
        assert m.a is m.b
        return (m.a * other).sum()

    close(xp, vmap(f)(Tree(a=a, b=a), a), (xp.host(a) ** 2).sum(1))
    close(xp, vmap(f, in_axes=({"a": 0, "b": 0}, 0))(Tree(a=a, b=a), a), (xp.host(a) ** 2).sum(1))
    with pytest.raises(TransformError, match="tied"):
        vmap(f, in_axes=({"a": 0, "b": None}, 0))(Tree(a=a, b=a), a)


def test_what_does_not_depend_on_the_index(xp: Any) -> None:
    a, b = arrays(xp, (3, 2), (2,))
    got = vmap(lambda a: b * 2)(a)
    close(xp, got, np.tile(xp.host(b) * 2, (3, 1)))
    assert vmap(lambda a: {"n": 3})(a) == {"n": 3}


@pytest.mark.nightly_cases("torch")
def test_of_each_other(xp: Any) -> None:
    a, b = arrays(xp, (3, 2), (4, 2))
    got = vmap(lambda a: vmap(lambda b: (a * b).sum())(b))(a)
    close(xp, got, xp.host(a) @ xp.host(b).T)
    jitted = fmapper.jit(vmap(lambda a: a.sum() ** 2))
    close(xp, vmap(fmapper.jit(lambda a: a.sum() ** 2))(a), xp.host(a).sum(1) ** 2)
    close(xp, jitted(a), xp.host(a).sum(1) ** 2)


def test_gradients_of_one_model_for_every_sample(xp: Any) -> None:
    w, x = arrays(xp, (2,), (4, 2))
    each = vmap(fmapper.grad(lambda m, x: (m["w"] * x).sum() ** 2), (None, 0))({"w": w, "n": 1}, x)
    want = 2 * (xp.host(x) @ xp.host(w))[:, None] * xp.host(x)
    close(xp, each["w"], want)
    assert each["n"] is no_gradient


def test_integers_and_booleans_are_arrays(xp: Any) -> None:
    whole = xp.array([[1, 2], [3, 4]], "int32")
    close(xp, vmap(lambda m: m["i"].sum())({"i": whole}), [3, 7])


# --- errors ---------------------------------------------------------------------------------------


class Holder:
    def __init__(self, w: Any) -> None:
        self.w = w


@pytest.mark.parametrize("in_axes", [(0,), (0, 0, 0), ({"a": 0}, 0), ([0, 0], 0), "ab", 1.5])
def test_axes_that_do_not_fit(xp: Any, in_axes: Any) -> None:
    a, b = arrays(xp, (3, 2), (3, 2))
    with pytest.raises(TransformError, match="fit"):
        vmap(lambda m, x: x, in_axes)({"a": a, "b": b}, b)


def test_no_arrays(xp: Any) -> None:
    for args in ((), (3,), ({"n": 1},)):
        with pytest.raises(TransformError, match="no arrays"):
            vmap(lambda *_: 1)(*args)


def test_numpy_is_told_where_to_go() -> None:
    with pytest.raises(TransformError, match="to_torch or to_jax"):
        vmap(lambda m: m)({"a": np.ones(2)})


def test_an_undeclared_holder(xp: Any) -> None:
    (a,) = arrays(xp, (3, 2))
    with pytest.raises(NotAFunctorError, match=r"model\[1\]\.h: Holder holds arrays in \.w"):
        vmap(lambda a, m: a)(a, Tree(h=Holder(a)))


def test_mixed_backends() -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(MixedDevicesError, match=r"torch at model\.a, jax at model\.b"):
        vmap(lambda m: m)({"a": torch.ones(1), "b": jnp.ones(1)})


def test_errors_of_the_function_come_out(xp: Any) -> None:
    def broken(a: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vmap(broken)(*arrays(xp, (3, 2)))


# --- modules of torch -----------------------------------------------------------------------------


def test_an_ensemble_of_modules() -> None:
    torch = pytest.importorskip("torch")
    make = torch.nn.Linear
    models = [torch.nn.Sequential(make(3, 4), torch.nn.Tanh(), make(4, 1)) for _ in range(3)]
    x = torch.randn(5, 3)
    stacked = fmap(lambda *ps: torch.stack(ps), *models)
    out = vmap(lambda m, x: m(x), in_axes=(0, None))(stacked, x)
    torch.testing.assert_close(out, torch.stack([m(x) for m in models]))
    out.sum().backward()  # torch's own graph goes through
    torch.testing.assert_close(stacked[2].bias.grad, torch.full((3, 1), 5.0))


def test_modules_come_out_with_parameters() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(requires_grad=False)
    x = torch.randn(5, 1)
    with torch.no_grad():
        got = vmap(lambda m, x: fmap(lambda p: p * x, m), in_axes=(None, 0))(model, x)
    assert type(got) is torch.nn.Linear
    assert type(got.weight) is torch.nn.Parameter
    assert got.weight.requires_grad
    assert not got.bias.requires_grad
    torch.testing.assert_close(got.weight.detach(), model.weight.detach() * x[:, None])


def test_random_numbers_differ_from_index_to_index() -> None:
    torch = pytest.importorskip("torch")
    out = vmap(torch.nn.functional.dropout)(torch.ones(4, 64))
    assert not torch.equal(out[0], out[1])
