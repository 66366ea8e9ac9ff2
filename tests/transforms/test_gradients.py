"""`value_and_grad` and `grad` against the gradients of the frameworks themselves."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import fmapper
from fmapper import (
    MixedDevicesError,
    NotAFunctorError,
    TransformError,
    children,
    destructure,
    fleaves,
    fmap,
    fmap_with_path,
    fmapstructure,
    functor,
    grad,
    load_state,
    no_gradient,
    rebuild,
    state,
    summary,
    trainables,
    value_and_grad,
    vmap,
)

np = pytest.importorskip("numpy")


@functor
class Tree:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


@functor(children=("w", "b"))
class Named:
    def __init__(self, w: Any, b: Any, note: Any = "note") -> None:
        self.w, self.b, self.note = w, b, note


@functor(children=("w", "b"), trainable=("w",))
class Partly(Named):
    pass


@functor
@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Any
    b: Any
    steps: int = 3


@functor
class Slots:
    __slots__ = ("b", "kind", "w")

    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b, self.kind = w, b, "slots"


@functor(children=("w", "b"), rebuild=lambda self, children: Rebuilt(**children))
class Rebuilt:
    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b, self.size = w, b, w.shape


class Pair(NamedTuple):
    w: Any
    b: Any


def as_dict(w: Any, b: Any) -> Any:
    return {"w": w, "b": b}


def as_deep(w: Any, b: Any) -> Any:
    deque = collections.deque([b], maxlen=2)
    return Tree(inner=[(w, {"k": Tree(b=deque)})], name="deep", size=3, f=len)


def wb(model: Any) -> tuple[Any, Any]:
    """The weight and bias of any of the models, or what its gradient has there."""
    if isinstance(model, dict):
        return model["w"], model["b"]
    if isinstance(model, list | tuple) and not isinstance(model, Pair):
        return model[0], model[1]
    if hasattr(model, "inner"):
        w, rest = model.inner[0]
        return w, rest["k"].b[0]
    return model.w, model.b


MODELS = [
    lambda w, b: Tree(w=w, b=b, n=2, name="x", nothing=None, fun=len),
    Named,
    Frozen,
    Slots,
    Rebuilt,
    Pair,
    as_dict,
    lambda w, b: [w, b],
    lambda w, b: (w, b),
    as_deep,
]
NAMES = ["all", "named", "frozen", "slots", "rebuilt", "pair", "dict", "list", "tuple", "deep"]


def loss(model: Any, x: Any) -> Any:
    w, b = wb(model)
    return ((x @ w + b) ** 3).sum()


def data(xp: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(xp.array(rng.normal(size=shape)) for shape in ((3, 2), (2,), (4, 3)))


def close(xp: Any, got: Any, want: Any) -> None:
    assert type(got) is type(want)
    got, want = xp.host(got), xp.host(want)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def by_hand(recurse: Callable[..., Any], node: Any, *rest: Any) -> Any:
    have, others = children(node), [children(other) for other in rest]
    return rebuild(node, {k: recurse(x, *(other[k] for other in others)) for k, x in have.items()})


# --- trees ------------------------------------------------------------------------------------


@pytest.mark.nightly_cases("jax-all")
@pytest.mark.parametrize("make", MODELS, ids=NAMES)
def test_of_any_tree(xp: Any, make: Callable[..., Any]) -> None:
    w, b, x = data(xp)
    model = make(w, b)
    value, gradient = value_and_grad(loss)(model, x)
    want, (gw, gb) = xp.reference(lambda w, b: ((x @ w + b) ** 3).sum(), (w, b))
    close(xp, value, want)
    assert type(gradient) is type(model)
    close(xp, wb(gradient)[0], gw)
    close(xp, wb(gradient)[1], gb)
    assert wb(model)[0] is w  # the argument is what it was
    assert not getattr(value, "requires_grad", False)
    assert not getattr(wb(gradient)[0], "requires_grad", False)
    close(xp, wb(grad(loss)(model, x))[0], gw)


@pytest.mark.parametrize("make", MODELS, ids=NAMES)
@pytest.mark.parametrize(
    "walk",
    [
        fmap,
        lambda f, *trees: fmap(f, *trees, cache=None),
        lambda f, *trees: fmap_with_path(lambda path, *leaves: f(*leaves), *trees),
        lambda f, *trees: fmap(f, *trees, cache={}),
        lambda f, *trees: fmap(f, *trees, walk=by_hand),
    ],
    ids=["fmap", "no cache", "path", "own cache", "walk"],
)
def test_a_step(xp: Any, make: Callable[..., Any], walk: Callable[..., Any]) -> None:
    w, b, x = data(xp)
    model = make(w, b)
    new = walk(lambda p, g: p - 0.1 * g, model, grad(loss)(model, x))
    _, (gw, gb) = xp.reference(lambda w, b: ((x @ w + b) ** 3).sum(), (w, b))
    assert type(new) is type(model)
    close(xp, wb(new)[0], w - 0.1 * gw)
    close(xp, wb(new)[1], b - 0.1 * gb)


def test_what_is_not_trained_is_not_touched(xp: Any) -> None:
    w, b, x = data(xp)
    whole = xp.array([1, 2], "int32")
    flags = xp.array([True, False], "bool")
    model = Tree(
        w=w, part=Partly(w, b), i=whole, flags=flags, n=5, f=2.5, s="s", none=None, fun=len
    )
    gradient = grad(lambda m, x: ((x @ m.w + m.part.b) ** 3).sum() * m.n)(model, x)
    for name in ("i", "flags", "n", "f", "s", "fun"):
        assert getattr(gradient, name) is no_gradient
    assert gradient.none is None
    assert gradient.part.b is no_gradient
    assert gradient.part.w is gradient.w
    assert gradient.part.note == "note"
    new = fmap(lambda p, g: p - g, model, gradient)
    for name in ("i", "flags", "n", "f", "s", "fun"):
        assert getattr(new, name) is getattr(model, name)
    assert new.part.b is b
    assert new.part.w is new.w
    assert fmapstructure(lambda p, g: p - g, model, gradient)["i"] is whole


def test_a_gradient_is_a_tree_like_others(xp: Any) -> None:
    w, b, x = data(xp)
    gradient = grad(loss)(Tree(inner=[(w, {"k": Tree(b=[b])})], n=3), x)
    gw, gb = wb(gradient)
    assert [id(leaf) for leaf in fleaves(gradient)] == [id(gw), id(gb)]
    assert list(state(gradient)) == list(trainables(gradient)) == ["inner.0.0", "inner.0.1.k.b.0"]
    doubled = fmap(lambda g: g * 2, gradient)
    assert doubled.n is no_gradient
    close(xp, wb(doubled)[0], gw * 2)
    close(xp, wb(fmap(lambda a, b: a + b, gradient, doubled))[1], gb * 3)
    close(xp, wb(load_state(gradient, state(doubled)))[0], gw * 2)
    vector, restore = destructure(gradient)
    assert vector.shape == (8,)
    close(xp, wb(restore(vector))[1], gb)
    for other in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))):
        close(xp, wb(other)[0], gw)
        assert other.n is no_gradient
    assert "NoGradient" in str(summary(gradient))
    assert isinstance(wb(fmapper.to_numpy(gradient))[0], np.ndarray)


def test_gradient_first_and_model_second(xp: Any) -> None:
    w, b, x = data(xp)
    model = Tree(w=w, b=b, n=3, i=xp.array([1], "int32"))
    gradient = grad(loss)(model, x)
    decayed = fmap(lambda g, p: g + 0.5 * p, gradient, model)
    close(xp, decayed.w, gradient.w + 0.5 * w)
    assert decayed.n is decayed.i is no_gradient


def test_arrays_that_the_loss_does_not_use_have_gradient_zero(xp: Any) -> None:
    w, b, _ = data(xp)
    gradient = grad(lambda m: m["b"].sum())(as_dict(w, b))
    close(xp, gradient["w"], w * 0)
    assert float(gradient["b"].sum()) == 2
    close(xp, value_and_grad(lambda m: xp.array(3.5))(w)[1], w * 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_are_kept(xp: Any, dtype: str) -> None:
    x = xp.array([1.0, 2.0], dtype)
    gradient = grad(lambda x: (x * x).sum())(x)
    assert gradient.dtype == x.dtype
    np.testing.assert_array_equal(xp.host(gradient).astype("float32"), [2, 4])


def test_complex_arrays_have_the_direction_of_growth(xp: Any) -> None:
    z = np.array([1 + 2j, -0.5 + 1j])

    def f(x: Any, conj: Callable[[Any], Any]) -> Any:
        return (x * conj(x) * x * conj(x)).real.sum() + (x * (2 + 1j)).real.sum()

    gradient = xp.host(grad(lambda x: f(x, lambda x: x.conj()))(xp.array(z, "complex128")))
    step = 1e-6
    for i in range(2):
        for unit in (1, 1j):
            moved = np.zeros(2, complex)
            moved[i] = unit * step
            slope = (f(z + moved, np.conj) - f(z - moved, np.conj)) / (2 * step)
            part = gradient[i].real if unit == 1 else gradient[i].imag
            np.testing.assert_allclose(part, slope, rtol=1e-8)


@pytest.mark.nightly_cases("jax")
def test_central_differences(xp: Any) -> None:
    w, b, x = data(xp)
    exp = xp.lib.exp if xp.name == "torch" else xp.lib.numpy.exp

    def f(model: Any) -> Any:
        return (1 / (1 + exp(-(x @ model["w"] + model["b"])))).sum() ** 2

    gradient = xp.host(grad(f)(as_dict(w, b))["w"])
    step = 1e-6
    for place in np.ndindex(3, 2):
        delta = np.zeros((3, 2))
        delta[place] = step
        up, down = (f(as_dict(w + xp.array(d), b)) for d in (delta, -delta))
        np.testing.assert_allclose(gradient[place], float(up - down) / (2 * step), rtol=1e-6)


# --- ties ---------------------------------------------------------------------------------------


def test_a_tied_array_has_one_summed_gradient_everywhere(xp: Any) -> None:
    w, _, _ = data(xp)
    inner = Tree(w=w)
    model = Tree(a=w, b=inner, c=inner, d=[w, {"k": w}])
    model.me = model

    def f(m: Any) -> Any:
        return (m.a * 2 + m.b.w**2 * m.me.c.w + m.d[1]["k"] ** 2).sum()

    gradient = grad(f)(model)
    _, (want,) = xp.reference(lambda w: (w * 2 + w**3 + w**2).sum(), (w,))
    close(xp, gradient.a, want)
    assert gradient.b is gradient.c
    assert gradient.me is gradient
    assert gradient.a is gradient.b.w
    assert gradient.a is gradient.d[0]
    assert gradient.a is gradient.d[1]["k"]
    new = fmap(lambda p, g: p - 0.1 * g, model, gradient)
    assert new.me is new
    assert new.b is new.c
    assert new.a is new.b.w
    assert new.a is new.d[1]["k"]
    close(xp, new.a, w - 0.1 * want)


def test_an_array_is_tied_across_arguments(xp: Any) -> None:
    w, b, _ = data(xp)
    one, other = Tree(w=w), {"w": w, "b": b}
    found = grad(lambda one, other: (one.w * other["w"]).sum() + other["b"].sum(), (0, 1))(
        one, other
    )
    assert isinstance(found, tuple)
    close(xp, found[0].w, 2 * w)
    assert found[0].w is found[1]["w"]


@pytest.mark.parametrize("kind", ["array", "tree", "keyword"])
def test_an_array_is_constant_in_other_arguments(xp: Any, kind: str) -> None:
    w, _, _ = data(xp)
    arrays = [w]
    if xp.name == "torch":
        arrays.append(xp.lib.nn.Parameter(w))
    for array in arrays:
        if kind == "array":
            got = grad(lambda a, b: (a * a * b).sum())(array, array)
        elif kind == "tree":
            got = grad(lambda a, b: (a["w"] ** 2 * b[0]["w"]).sum())({"w": array}, [{"w": array}])[
                "w"
            ]
        else:
            got = grad(lambda a, b: (a * a * b.w).sum())(array, b=Tree(w=array))
        np.testing.assert_allclose(xp.host(got), 2 * xp.host(w) ** 2)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argnums", "places"),
    [(0, [0]), (1, [1]), (-1, [2]), ((0, 2), [0, 2]), ([2, -2], [2, 1]), ((1,), [1])],
)
def test_argnums(xp: Any, argnums: Any, places: list[int]) -> None:
    arrays = [xp.array([1.0, 2.0]), xp.array([3.0, -1.0]), xp.array([0.5, 4.0])]
    value, found = value_and_grad(lambda a, b, c: (a * b**2 * c**3).sum(), argnums)(*arrays)
    want, gradients = xp.reference(lambda a, b, c: (a * b**2 * c**3).sum(), arrays)
    close(xp, value, want)
    if isinstance(argnums, int):
        found = (found,)
    assert type(found) is tuple
    assert len(found) == len(places)
    for got, place in zip(found, places, strict=True):
        close(xp, got, gradients[place])


def test_arguments_by_name_are_passed_on(xp: Any) -> None:
    w, b, x = data(xp)
    got = grad(lambda m, *, x, power: ((x @ m["w"] + m["b"]) ** power).sum())(
        as_dict(w, b), x=x, power=3
    )
    close(xp, got["w"], grad(loss)(as_dict(w, b), x)["w"])


@pytest.mark.parametrize("number", [1, -2, 7])
def test_no_such_argument(xp: Any, number: int) -> None:
    with pytest.raises(TransformError, match=f"no argument {number}"):
        grad(lambda x: x.sum(), number)(xp.array([1.0]))


def test_has_aux(xp: Any) -> None:
    w, b, x = data(xp)
    table = np.ones(2)

    def f(m: Any, x: Any) -> Any:
        out = x @ m.w + m.b
        return (out**3).sum(), {
            "out": [out, out],
            "model": m,
            "n": 7,
            "s": "s",
            "none": None,
            "np": table,
        }

    model = Tree(w=w, b=b, n=3)
    (value, aux), gradient = value_and_grad(f, has_aux=True)(model, x)
    close(xp, value, loss(model, x))
    close(xp, gradient.w, grad(loss)(model, x).w)
    close(xp, aux["out"][0], x @ w + b)
    assert aux["out"][0] is aux["out"][1]
    assert type(aux["model"]) is Tree
    close(xp, aux["model"].w, w)
    assert (aux["n"], aux["s"], aux["none"]) == (7, "s", None)
    assert aux["np"] is table
    assert not any(getattr(leaf, "requires_grad", False) for leaf in fleaves(aux))
    again, aux = grad(f, has_aux=True)(model, x)
    close(xp, again.w, gradient.w)
    assert aux["n"] == 7


# --- transformations of transformations -----------------------------------------------------------


def test_a_gradient_of_a_gradient(xp: Any) -> None:
    x = xp.array([1.0, 2.0, 3.0])
    twice = grad(lambda m: grad(lambda m: (m["w"] ** 4).sum())(m)["w"].sum())({"w": x, "n": 1})
    close(xp, twice["w"], 12 * x**2)
    close(xp, grad(grad(grad(lambda x: x**4)))(xp.array(2.0)), xp.array(48.0))


@pytest.mark.nightly_cases("jax")
def test_a_hessian(xp: Any) -> None:
    x = xp.array([1.0, 2.0, 3.0])

    def f(x: Any) -> Any:
        return (x**3).sum() + x[0] * x[1] * x[2]

    def row(x: Any, direction: Any) -> Any:
        return grad(lambda x: (grad(f)(x) * direction).sum())(x)

    hessian = vmap(row, in_axes=(None, 0))(x, xp.array(np.eye(3)))
    np.testing.assert_allclose(xp.host(hessian), [[6, 3, 2], [3, 12, 1], [2, 1, 18]])


@pytest.mark.nightly_cases("jax")
def test_a_gradient_through_steps(xp: Any) -> None:
    """Meta-learning: the gradient of the loss after two steps of descent."""
    w, b, x = data(xp)

    def meta(model: Any) -> Any:
        total = 0.0
        for _ in range(2):
            value, gradient = value_and_grad(loss)(model, x)
            total = total + 0.1 * value
            model = fmap(lambda p, g: p - 1e-3 * g, model, gradient)
        return loss(model, x) + total

    def flat(w: Any, b: Any) -> Any:
        total = 0.0
        for _ in range(2):
            value = ((x @ w + b) ** 3).sum()
            residual = 3 * (x @ w + b) ** 2
            w, b = w - 1e-3 * (x.T @ residual), b - 1e-3 * residual.sum(0)
            total = total + 0.1 * value
        return ((x @ w + b) ** 3).sum() + total

    value, gradient = value_and_grad(meta)(Tree(w=w, b=b, n=2))
    want, (gw, gb) = xp.reference(flat, (w, b))
    close(xp, value, want)
    close(xp, gradient.w, gw)
    close(xp, gradient.b, gb)


def test_gradients_of_single_samples(xp: Any) -> None:
    w, b, x = data(xp)
    model = Tree(w=w, b=b, n=3)
    each = vmap(grad(loss), in_axes=(None, 0))(model, x)
    assert type(each) is Tree
    assert each.n is no_gradient
    for i in range(4):
        close(xp, each.w[i], grad(loss)(model, x[i]).w)


@pytest.mark.nightly_cases("jax")
def test_within_the_frameworks_own_transformations(xp: Any) -> None:
    w, b, x = data(xp)
    want = grad(loss)(as_dict(w, b), x)["w"]

    def inner(w: Any) -> Any:
        return grad(loss)(Tree(w=w, b=b, n=2), x).w

    close(xp, xp.jit(inner)(w), want)
    close(xp, xp.vmap(inner)(w[None])[0], want)
    _, (second,) = xp.reference(lambda w: (3 * (x @ w + b) ** 2).sum(1) @ (x.sum(1)), (w,))
    close(xp, xp.grad(lambda w: inner(w).sum())(w), second)


# --- errors ---------------------------------------------------------------------------------------


class Holder:
    def __init__(self, w: Any) -> None:
        self.w = w


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda w: w, r"shape \(2,\)"),
        (lambda w: w[:1], r"shape \(1,\)"),
        (lambda w: None, "NoneType"),
        (lambda w: (w.sum(), w), "tuple"),
        (lambda w: 3, "int"),
        (lambda w: True, "bool"),
        (lambda w: 3.5, "loses the gradient"),
        (lambda w: "loss", "str"),
        (lambda w: w.sum() * 1j, "complex128"),
        (lambda w: w.sum() > 0, "bool"),
    ],
)
def test_a_loss_is_a_real_scalar(xp: Any, result: Any, says: str) -> None:
    with pytest.raises(TransformError, match=says):
        value_and_grad(result)(xp.array([1.0, 2.0]))
    with pytest.raises(TransformError, match=says):
        grad(lambda w: (result(w), 1), has_aux=True)(xp.array([1.0, 2.0]))


def test_aux_has_to_be_there(xp: Any) -> None:
    for result in (lambda w: w.sum(), lambda w: (w.sum(), 1, 2), lambda w: [w.sum(), 1]):
        with pytest.raises(TransformError, match="has_aux"):
            grad(result, has_aux=True)(xp.array([1.0]))


def test_nothing_to_differentiate_by(xp: Any) -> None:
    for tree in ({}, Tree(), 3.0, None, [Tree(n=1)]):
        with pytest.raises(TransformError, match="holds no arrays"):
            grad(lambda m: 1.0)(tree)
    with pytest.raises(TransformError, match="int32"):
        grad(lambda m: 1.0)([xp.array([1, 2], "int32")])
    with pytest.raises(TransformError, match="trainable="):
        grad(lambda m: 1.0)(functor(trainable=())(type("None_", (Tree,), {}))(w=xp.array([1.0])))


def test_numpy_is_told_where_to_go() -> None:
    with pytest.raises(TransformError, match="to_torch or to_jax"):
        grad(lambda m: m["w"].sum())({"w": np.ones(2)})


def test_an_undeclared_holder(xp: Any) -> None:
    with pytest.raises(NotAFunctorError, match=r"model\.inner\[0\]: Holder holds arrays in \.w"):
        grad(lambda m: m.w.sum())(Tree(w=xp.array([1.0]), inner=[Holder(xp.array([1.0]))]))


def test_mixed_backends() -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    tree = {"a": [torch.ones(1)], "b": jnp.ones(1)}
    with pytest.raises(MixedDevicesError, match=r"torch at model\.a\[0\], jax at model\.b"):
        grad(lambda m: m["a"][0].sum())(tree)
    with pytest.raises(MixedDevicesError, match=r"model\[0\].*model\[1\]"):
        grad(lambda a, b: a.sum(), (0, 1))(torch.ones(1), jnp.ones(1))


def test_errors_of_the_function_come_out(xp: Any) -> None:
    def broken(w: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        grad(broken)(xp.array([1.0]))
    # ... and nothing is left behind by them
    close(xp, grad(lambda w: (w**2).sum())(xp.array([3.0])), xp.array([6.0]))


def test_the_function_keeps_its_name(xp: Any) -> None:
    def named(w: Any) -> Any:
        """Words."""
        return w.sum()

    assert value_and_grad(named).__name__ == grad(named).__name__ == "named"
    assert grad(named).__doc__ == "Words."


def test_a_number_of_numpy_beside_arrays_is_a_setting(xp: Any) -> None:
    model = {"w": xp.array([1.0, 2.0]), "scale": 1 / np.sqrt(4)}
    gradient = grad(lambda m: (m["w"] * float(m["scale"])).sum())(model)
    close(xp, gradient["w"], xp.array([0.5, 0.5]))
    assert gradient["scale"] is no_gradient
