"""`jit`: recorded once for each structure, replayed with the same results."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import fmapper
from fmapper import (
    MixedDevicesError,
    NotAFunctorError,
    NotCompiledWarning,
    TransformError,
    fmap,
    functor,
    grad,
    jit,
    value_and_grad,
)

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch's compiler but for its last stage, which takes seconds for each program."""
    names = request.node.name
    if "inductor" in names or "[jax" in names:
        return
    torch = pytest.importorskip("torch")
    compile_ = torch.compile

    def quick(graph: Any, **settings: Any) -> Any:
        return compile_(graph, backend="aot_eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", quick)


@functor
class Tree:
    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


@functor
@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Any
    power: int = 2


class Pair(NamedTuple):
    a: Any
    b: Any


class Counted:
    """How often a function was recorded."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fun)
        self.fun, self.count = fun, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.fun(*args, **kwargs)


def close(xp: Any, got: Any, want: Any) -> None:
    got, want = xp.host(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12)


def ones(xp: Any, *shape: int) -> Any:
    return xp.array(np.ones(shape))


# --- recorded once ------------------------------------------------------------------------------


def test_recorded_once_for_one_structure(xp: Any) -> None:
    fun = Counted(lambda m, x: Tree(out=(m.w * x) ** m.power, power=m.power))
    jitted = jit(fun)
    for i in range(4):
        w = xp.array([1.0 + i, 2.0])
        got = jitted(Tree(w=w, power=2), ones(xp, 2))
        close(xp, got.out, xp.host(w) ** 2)
        assert got.power == 2
    assert fun.count == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "other",
    [
        lambda xp: Tree(w=ones(xp, 2), power=3),
        lambda xp: Tree(w=ones(xp, 3), power=2),
        lambda xp: Tree(w=xp.array([1.0, 1.0], "float32"), power=2),
        lambda xp: Tree(w=ones(xp, 1, 2), power=2),
        lambda xp: Tree(power=2, w=ones(xp, 2)),
        lambda xp: Tree(w=ones(xp, 2), power=2.0),
        lambda xp: Tree(w=ones(xp, 2), power=2, more=ones(xp, 1)),
        lambda xp: Tree(w=ones(xp, 2), power=2, name="x"),
        lambda xp: Frozen(ones(xp, 2)),
    ],
    ids=["value", "shape", "dtype", "rank", "order", "type", "array", "field", "class"],
)
def test_recorded_anew_for_another_structure(xp: Any, other: Callable[..., Any]) -> None:
    fun = Counted(lambda m: m.w * 2 + m.power)
    jitted = jit(fun)
    models = [Tree(w=ones(xp, 2), power=2), other(xp)]
    for _ in range(2):
        for model in models:
            got = jitted(model)
            assert got.dtype == model.w.dtype
            close(xp, got, xp.host(model.w) * 2 + model.power)
    assert fun.count == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"),
        (1, 2),
        (None, 1),
        (len, abs),
        ((1, "a"), (1, "b")),
        ({"k": "x"}, {"k": "y"}),
        (True, 1),
    ],
)
def test_static_values_within_functors(xp: Any, one: Any, other: Any) -> None:
    seen: list[Any] = []

    def f(m: Any) -> Any:
        seen.append(m.static)
        return m.w * 1.0, m.static

    jitted = jit(f)
    for static in (one, other, one, other):
        assert jitted(Tree(w=ones(xp, 1), static=static))[1] == static
    assert seen == [one, other]
    assert [type(x) for x in seen] == [type(one), type(other)]


def test_static_values_of_arguments(xp: Any) -> None:
    fun = Counted(lambda x, *, how: x.sum() if how == "sum" else x.mean())
    jitted = jit(fun)
    x = xp.array([1.0, 3.0])
    for how, want in (("sum", 4.0), ("mean", 2.0), ("sum", 4.0)):
        close(xp, jitted(x, how=how), want)
    assert fun.count == 2


def test_equal_settings_are_the_same_program(xp: Any) -> None:
    fun = Counted(lambda m: m.w * len(m.sizes))
    jitted = jit(fun)
    for _ in range(3):
        jitted(
            Tree(w=ones(xp, 2), sizes=(1, 2, "same"), names={"a": ["b"]}, when=dataclasses.field)
        )
    assert fun.count == 1


def test_containers_are_told_apart(xp: Any) -> None:
    x = ones(xp, 2)
    fun = Counted(lambda t: type(t).__name__)
    jitted = jit(lambda t: (fun(t), x)[0])
    for tree in ([x, x], (x, x), Pair(x, x), {"a": x, "b": x}, {"b": x, "a": x}, [x, [x]]):
        assert jitted(tree) == type(tree).__name__
    assert fun.count == 6


def test_ties_of_arguments_are_part_of_the_structure(xp: Any) -> None:
    fun = Counted(lambda m: (m.a is m.b, m.a + m.b))
    jitted = jit(fun)
    for _ in range(2):
        x = ones(xp, 2)
        assert jitted(Tree(a=x, b=x))[0] is True
        assert jitted(Tree(a=x, b=x * 2))[0] is False
        close(xp, jitted(Tree(a=x, b=x * 2))[1], [3, 3])
    assert fun.count == 2


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.nightly_cases("torch")
def test_numbers_are_right_whatever_they_are(xp: Any) -> None:
    jitted = jit(lambda x, n, d: x * n + d["k"])
    for n in (1, 2, 2.5, True, 3):
        close(xp, jitted(xp.array([1.0, 2.0]), n, {"k": n}), np.array([1.0, 2.0]) * n + n)


def test_numbers_do_not_record_anew_in_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    fun = Counted(lambda x, n: x * n)
    jitted = jit(fun)
    for n in range(5):
        assert float(jitted(jnp.float32(2), n)) == 2 * n
    assert fun.count == 1


@pytest.mark.parametrize("place", ["argument", "functor"])
def test_signs_of_zero_and_nan(xp: Any, place: str) -> None:
    """0.0 == -0.0 and NaN != NaN, but what matters is what a program does with them."""
    count = 0

    def f(x: Any, model: Any) -> Any:
        nonlocal count
        count += 1
        number = model if place == "argument" else model.power
        return 1 / (x * number)

    jitted = jit(f)
    x = ones(xp, 1)
    for number in (0.0, -0.0, float("nan"), float("nan") * 1):
        got = jitted(x, number if place == "argument" else Frozen(x, number))
        want = math.copysign(math.inf, number) if number == 0 else math.nan
        np.testing.assert_array_equal(xp.host(got), [want])
    assert count <= 3


@pytest.mark.nightly_cases("torch")
def test_static_argnums(xp: Any) -> None:
    fun = Counted(lambda x, n, y: [x * i for i in range(n)][-1] + y)
    for argnums in (1, -2, (1,), [1]):
        fun.count = 0
        jitted = jit(fun, static_argnums=argnums)
        for n in (2, 3, 2):
            close(xp, jitted(ones(xp, 1), n, ones(xp, 1)), [n])
        assert fun.count == 2


def test_as_a_decorator(xp: Any) -> None:
    @jit
    def one(x: Any) -> Any:
        """Words."""
        return x + 1

    @jit(static_argnums=1)
    def other(x: Any, n: int) -> Any:
        return x * sum(range(n))

    close(xp, one(ones(xp, 1)), [2])
    close(xp, other(ones(xp, 1), 4), [6])
    assert (one.__name__, one.__doc__, other.__name__) == ("one", "Words.", "other")


# --- results --------------------------------------------------------------------------------------


def test_results_keep_their_form(xp: Any) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        inner = Tree(w=y)
        return {
            "b": [y, (y, None)],
            "a": Pair(inner, inner),
            "n": 3,
            "s": "text",
            "frozen": Frozen(x + 1, 7),
            "input": x,
        }

    jitted = jit(f)
    x = xp.array([1.0, 2.0])
    for _ in range(2):
        got = jitted(x)
        assert list(got) == ["b", "a", "n", "s", "frozen", "input"]
        assert got["b"][0] is got["b"][1][0]
        assert got["b"][0] is got["a"].a.w
        assert got["a"].a is got["a"].b
        assert type(got["a"]) is Pair
        assert (got["n"], got["s"], got["frozen"].power, got["b"][1][1]) == (3, "text", 7, None)
        close(xp, got["b"][0], [2, 4])
        close(xp, got["frozen"].w, [2, 3])
        close(xp, got["input"], [1, 2])
    assert jitted(x)["a"].a is not jitted(x)["a"].a  # every call makes its own


def test_results_without_arrays(xp: Any) -> None:
    assert jit(lambda x: None)(ones(xp, 1)) is None
    assert jit(lambda x: x.shape)(ones(xp, 2, 3)) == (2, 3)
    assert jit(lambda x: {})(ones(xp, 1)) == {}


def test_results_that_are_constants(xp: Any) -> None:
    table = xp.array([5.0, 6.0])
    jitted = jit(lambda x: (table, x + table))
    for _ in range(2):
        got = jitted(ones(xp, 2))
        close(xp, got[0], [5, 6])
        close(xp, got[1], [6, 7])


def test_cycles(xp: Any) -> None:
    def f(m: Any) -> Any:
        new = Tree(w=m.me.w * 2)
        new.me = new
        return new

    model = Tree(w=ones(xp, 2))
    model.me = model
    jitted = jit(f)
    for _ in range(2):
        got = jitted(model)
        assert got.me is got
        close(xp, got.w, [2, 2])


def test_the_argument_is_not_changed(xp: Any) -> None:
    def f(m: Any) -> Any:
        m.w = m.w * 2
        m.d["new"] = m.w
        return m

    model = Tree(w=ones(xp, 2), d={})
    got = jit(f)(model)
    close(xp, got.w, [2, 2])
    close(xp, model.w, [1, 1])
    assert model.d == {}


# --- methods --------------------------------------------------------------------------------------


@functor
class Line:
    def __init__(self, w: Any, power: int = 1) -> None:
        self.w, self.power = w, power

    @jit
    def decorated(self, x: Any) -> Any:
        return self.w**self.power * x

    def plain(self, x: Any) -> Any:
        return self.w**self.power * x

    def __call__(self, x: Any) -> Any:
        return self.plain(x)


def test_methods_with_arguments_of_any_name(xp: Any) -> None:
    class Model(Tree):
        def __call__(self, x: Any, fun: Any) -> Any:
            return self.w * x * fun

    x = ones(xp, 1)
    assert xp.host(jit(Model(w=x))(x, fun=x)).tolist() == [1]


@pytest.mark.nightly_cases("torch")
def test_methods(xp: Any) -> None:
    for power in (1, 2):
        line = Line(xp.array([3.0]), power)
        for call in (line.decorated, jit(line.plain), jit(line), jit(Line.plain.__get__(line))):
            for x in (1.0, 2.0):
                close(xp, call(xp.array([x])), [3.0**power * x])
    line.w = xp.array([5.0])
    close(xp, line.decorated(ones(xp, 1)), [25])


# --- with gradients -----------------------------------------------------------------------------


def loss(m: Any, x: Any) -> Any:
    return ((x @ m.w + m.b) ** 3).sum()


def model_and_data(xp: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w, b, x = (xp.array(rng.normal(size=shape)) for shape in ((3, 2), (2,), (4, 3)))
    return Tree(w=w, b=b, n=3, tied=[w]), x


@pytest.mark.sampled(2)
@pytest.mark.nightly_cases("torch-grad of jit", "jax-jit of grad")
@pytest.mark.parametrize(
    "make",
    [
        lambda f: jit(value_and_grad(f)),
        lambda f: value_and_grad(jit(f)),
        lambda f: jit(value_and_grad(jit(f))),
        lambda f: jit(jit(value_and_grad(f))),
    ],
    ids=["jit of grad", "grad of jit", "both", "jit of jit"],
)
def test_with_gradients(xp: Any, make: Callable[..., Any]) -> None:
    model, x = model_and_data(xp)
    want, expected = value_and_grad(loss)(model, x)
    transformed = make(loss)
    for _ in range(2):
        value, gradient = transformed(model, x)
        close(xp, value, xp.host(want))
        close(xp, gradient.w, xp.host(expected.w))
        close(xp, gradient.b, xp.host(expected.b))
        assert type(gradient) is Tree
        assert gradient.n is fmapper.no_gradient
        assert gradient.tied[0] is gradient.w
        assert not getattr(value, "requires_grad", False)
        assert not getattr(gradient.w, "requires_grad", False)


@pytest.mark.sampled(3)
@pytest.mark.nightly_cases("torch-<lambda>1")
@pytest.mark.parametrize(
    "make",
    [
        lambda f: grad(grad(jit(f))),
        lambda f: grad(jit(grad(f))),
        lambda f: grad(jit(grad(jit(f)))),
        lambda f: jit(grad(grad(f))),
        lambda f: jit(grad(jit(grad(f)))),
    ],
)
def test_with_gradients_of_gradients(xp: Any, make: Callable[..., Any]) -> None:
    transformed = make(lambda x: (x**4).sum())
    for value in (2.0, 3.0):
        close(xp, transformed(xp.array(value)), 12 * value**2)


@pytest.mark.nightly
def test_a_gradient_through_a_recorded_step(xp: Any) -> None:
    model, x = model_and_data(xp)

    def step(m: Any) -> Any:
        return fmap(lambda p, g: p - 1e-3 * g, m, grad(loss)(m, x))

    jitted = jit(step)
    close(xp, jitted(model).w, xp.host(step(model).w))  # recorded where nothing differentiates it
    want = grad(lambda m: loss(step(m), x))(model)
    got = grad(lambda m: loss(jitted(m), x))(model)
    close(xp, got.w, xp.host(want.w))
    close(xp, got.b, xp.host(want.b))


def test_what_a_function_closes_over_is_differentiated(xp: Any) -> None:
    w = xp.array([2.0, 3.0])
    got = grad(lambda m: jit(lambda x: (m["w"] ** 2 * x).sum())(ones(xp, 2)))({"w": w})
    close(xp, got["w"], [4, 6])


@pytest.mark.nightly_cases("jax")
def test_a_hundred_steps_are_one_program(xp: Any) -> None:
    model, x = model_and_data(xp)
    calls = []

    @jit
    def step(m: Any, x: Any) -> Any:
        calls.append(1)
        value, gradient = value_and_grad(loss)(m, x)
        return fmap(lambda p, g: p - 1e-3 * g, m, gradient), value

    plain = model
    for _ in range(100):
        model, value = step(model, x)
        assert model.tied[0] is model.w
    assert len(calls) == 1
    for _ in range(100):
        want, gradient = value_and_grad(loss)(plain, x)
        plain = fmap(lambda p, g: p - 1e-3 * g, plain, gradient)
    np.testing.assert_allclose(xp.host(model.w), xp.host(plain.w), rtol=1e-9)
    np.testing.assert_allclose(xp.host(value), xp.host(want), rtol=1e-9)


# --- memory, threads ----------------------------------------------------------------------------


@pytest.mark.nightly
def test_nothing_of_a_call_is_kept(xp: Any) -> None:
    jitted = jit(lambda m: Tree(w=m.w * 2, same=m.b))
    for _ in range(2):
        model = Tree(w=ones(xp, 3), b=ones(xp, 2), n=1)
        result = jitted(model)
        dead = [weakref.ref(x) for x in (model, model.w, model.b, result, result.w)]
        del model, result
        gc.collect()
        assert [x() for x in dead] == [None] * 5


def test_threads(xp: Any) -> None:
    fun = jit(lambda m, x: Tree(out=m.w * x, n=m.n))
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(5):
            got = fun(Tree(w=xp.array([float(i)], "float32"), n=i % 2), xp.array([3.0], "float32"))
            found[i] = (float(got.out[0]), got.n)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: (3.0 * i, i % 2) for i in range(4)}


# --- errors ---------------------------------------------------------------------------------------


class Holder:
    def __init__(self, w: Any) -> None:
        self.w = w


def test_errors_of_the_function_come_out(xp: Any) -> None:
    fails = True

    def broken(x: Any) -> Any:
        if fails:
            raise KeyError("mine")
        return x * 2

    jitted = jit(broken)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            jitted(ones(xp, 1))
    fails = False
    close(xp, jitted(ones(xp, 1)), [2])  # no warning: it is compiled now


def test_no_arrays(xp: Any) -> None:
    for args in ((), (3,), ({"n": 1},), (Tree(),)):
        with pytest.raises(TransformError, match="no arrays"):
            jit(lambda *_: 1)(*args)
    with pytest.raises(TransformError, match="no argument 3"):
        jit(lambda x: x, static_argnums=3)(ones(xp, 1))


def test_numpy_is_told_where_to_go() -> None:
    with pytest.raises(TransformError, match="to_torch or to_jax"):
        jit(lambda m: m)({"a": np.ones(2)})


@pytest.mark.parametrize("args", [lambda w: (w, Holder(w)), lambda w: (Holder(w),)])
def test_an_undeclared_holder(xp: Any, args: Callable[..., Any]) -> None:
    with pytest.raises(NotAFunctorError, match=r"Holder holds arrays in \.w"):
        jit(lambda *args: args[0])(*args(ones(xp, 1)))


def test_an_undeclared_holder_after_one_that_holds_nothing(xp: Any) -> None:
    jitted = jit(lambda x, holder: x)
    jitted(ones(xp, 1), Holder(None))
    with pytest.raises(NotAFunctorError, match=r"\[1\]: Holder holds arrays in \.w"):
        jitted(ones(xp, 1), Holder(ones(xp, 1)))


@functor(children=("w",))
class Computed:
    """A child that is another array whenever one looks."""

    def __init__(self, w: Any) -> None:
        self.raw = w

    @property
    def w(self) -> Any:
        return self.raw * 1

    @w.setter
    def w(self, value: Any) -> None:
        self.raw = value


@pytest.mark.parametrize("transform", [jit, grad, fmapper.vmap])
def test_children_that_are_computed_are_refused(xp: Any, transform: Any) -> None:
    """The function would get arrays that are not followed: a gradient of zero, say."""
    model = [Computed(xp.array(np.ones(2)))]
    with pytest.raises(TransformError, match=r"model\[0\]\.w is recomputed"):
        transform(lambda m: m[0].raw.sum())(model)


def test_functions_go_along_whatever_they_close_over(xp: Any) -> None:
    w = xp.array([2.0])
    scale = lambda x: x * w  # noqa: E731
    jitted = jit(lambda f, x: f(x))
    for _ in range(2):
        close(xp, jitted(scale, ones(xp, 1)), [2])
        close(xp, jitted(functools.partial(scale), ones(xp, 1)), [2])


def test_mixed_backends() -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(MixedDevicesError, match=r"torch at model\.a, jax at model\.b"):
        jit(lambda m: m)({"a": torch.ones(1), "b": jnp.ones(1)})


def test_numpy_goes_along_to_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    got = jit(lambda x, y: x + y)(jnp.ones(2), np.ones(2, "float32"))
    assert got.tolist() == [2.0, 2.0]


# --- what only torch has --------------------------------------------------------------------------


@pytest.fixture
def torch() -> Iterator[Any]:
    return pytest.importorskip("torch")


@pytest.mark.nightly
def test_modules(torch: Any) -> None:
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    model[2].weight = nn.Parameter(model[2].weight.detach().clone(), requires_grad=False)
    x = torch.randn(5, 3, dtype=torch.float64)
    plain = fmap(lambda p: p.detach().clone(), model)
    f = lambda m, x: (m(x) ** 2).mean()  # noqa: E731

    def step(m: Any, x: Any) -> Any:
        value, gradient = value_and_grad(f)(m, x)
        with torch.no_grad():
            return fmap(lambda p, g: p - 0.1 * g, m, gradient), value

    fun = Counted(step)
    jitted = jit(fun)
    for _ in range(3):
        model, value = jitted(model, x)
        plain, want = step(plain, x)
        torch.testing.assert_close(value, want)
        assert not value.requires_grad
    assert fun.count == 1
    assert int(model[1].num_batches_tracked) == 3
    for name, entry in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], entry)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.requires_grad == (name != "2.weight")
    assert model.training
    model.eval()
    torch.testing.assert_close(jit(lambda m, x: m(x))(model, x), model(x))


def test_training_and_evaluation_are_two_programs(torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.9))
    jitted = jit(lambda m, x: m(x))
    x = torch.ones(64, 2)
    assert (jitted(model, x) == 0).any()
    model.eval()
    torch.testing.assert_close(jitted(model, x), model(x))


def test_the_graph_of_torch_goes_through(torch: Any) -> None:
    model = torch.nn.Linear(2, 1)
    jitted = jit(lambda m, x: m(x).sum())
    jitted(model, torch.ones(3, 2)).backward()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    with torch.no_grad():
        assert not jitted(model, torch.ones(3, 2)).requires_grad
    with torch.inference_mode():
        assert jitted(model, torch.ones(3, 2)).is_inference()
    assert jitted(model, torch.ones(3, 2)).requires_grad


def test_autocast_is_another_program(torch: Any) -> None:
    model = torch.nn.Linear(2, 1)
    jitted = jit(lambda m, x: m(x))
    assert jitted(model, torch.ones(3, 2)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert jitted(model, torch.ones(3, 2)).dtype == torch.bfloat16
    assert jitted(model, torch.ones(3, 2)).dtype == torch.float32


def test_buffers_of_a_module_are_written_to(torch: Any) -> None:
    model = torch.nn.BatchNorm1d(2)
    plain = torch.nn.BatchNorm1d(2)
    jitted = jit(lambda m, x: m(x))
    for _ in range(3):
        x = torch.randn(4, 2)
        torch.testing.assert_close(jitted(model, x), plain(x))
    assert torch.equal(model.num_batches_tracked, plain.num_batches_tracked)
    torch.testing.assert_close(model.running_var, plain.running_var)


def test_arrays_that_are_closed_over_may_change_in_place(torch: Any) -> None:
    table = torch.ones(2)
    jitted = jit(lambda x: x * table)
    assert jitted(torch.ones(2)).tolist() == [1, 1]
    table.mul_(3)
    assert jitted(torch.ones(2)).tolist() == [3, 3]


@pytest.mark.parametrize(
    "f",
    [lambda x: x * 2 if x.sum() > 0 else x * 3, lambda x: x * max(x.tolist()), lambda x: x.numpy()],
    ids=["branch", "list", "numpy"],
)
def test_what_looks_at_values_runs_as_it_is(torch: Any, f: Any) -> None:
    jitted = jit(f)
    inputs = [torch.tensor(x) for x in ([1.0, 2.0], [-1.0, -2.0], [1.0], [3.0, -1.0])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in inputs:
            assert (jitted(x) == f(x)).all()
    assert [x.category for x in caught] == [NotCompiledWarning]
    assert "<lambda> uncompiled" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0] * 2,
        lambda x: (x.sum().item(), x.tolist(), Frozen(x, x[0].item())),
        lambda x: x[x > 0].shape[0],
    ],
    ids=["item", "mask", "values", "size"],
)
def test_what_depends_on_values_is_right(torch: Any, f: Any) -> None:
    jitted = jit(f)
    with pytest.warns(NotCompiledWarning, match="could not be recorded"):
        jitted(torch.ones(2))
    for x in ([1.0, 2.0], [-1.0, -2.0], [3.0, -1.0], [0.5, 2.0]):
        assert repr(jitted(torch.tensor(x))) == repr(f(torch.tensor(x)))


def test_signs_that_are_put_off(torch: Any) -> None:
    """torch keeps the sign of `z.conj().imag` beside the values, where recording loses it."""
    z = torch.tensor([1 + 2j, 3 - 1j])
    double = jit(lambda x: x * 2)
    with pytest.warns(NotCompiledWarning, match="resolve_neg"):
        assert double(z.conj().imag).tolist() == [-4, 2]
    assert double(z.imag).tolist() == [4, -2]
    assert double(z.conj()).tolist() == [2 - 4j, 6 + 2j]


def test_a_program_that_calls_another_one(torch: Any) -> None:
    """An operation of one's own may do so while it is run: it must not wait for itself."""
    inner = jit(lambda x: x * 3)

    @torch.library.custom_op(
        "fmapper_tests::tripled", mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    def tripled(x: Any) -> Any:
        return inner(x).clone()

    tripled.register_fake(torch.empty_like)
    outer = jit(lambda x: tripled(x) + 1)
    thread = threading.Thread(target=lambda: done.extend(outer(torch.ones(1)) for _ in range(2)))
    done: list[Any] = []
    thread.daemon = True
    thread.start()
    thread.join(60)
    assert [x.tolist() for x in done] == [[4], [4]]


@pytest.mark.parametrize("when", ["made", "called"])
def test_without_a_compiler(torch: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", missing if when == "made" else lambda *_, **__: missing)
    model, x = torch.nn.Linear(2, 1), torch.ones(3, 2)
    jitted = jit(lambda m, x: m(x).sum())
    with pytest.warns(NotCompiledWarning, match="no compiler here") as caught:
        assert torch.equal(jitted(model, x), model(x).sum())
    assert len(caught) == 1
    assert torch.equal(jitted(model, x), model(x).sum())  # says so once
    assert torch.equal(jitted(model, x[:1]), model(x[:1]).sum())


@pytest.mark.nightly
def test_many_functions_inductor(torch: Any) -> None:
    """torch compiles one piece of code only so many times."""
    for n in range(12):
        assert jit(lambda x, n=n: x + n)(torch.zeros(1)).tolist() == [n]


@pytest.mark.nightly
def test_too_many_programs(torch: Any) -> None:
    jitted = jit(lambda x, n: x * n)
    for n in range(64):
        assert jitted(torch.ones(1), n).tolist() == [n]
    with pytest.warns(NotCompiledWarning, match="as tensors, not as numbers"):
        assert jitted(torch.ones(1), 64).tolist() == [64]
    assert jitted(torch.ones(1), 65).tolist() == [65]


def test_with_no_c_compiler_inductor(torch: Any) -> None:
    config = pytest.importorskip("torch._inductor.config")
    x = torch.tensor([0.25, 0.5])
    f = lambda x: (x.sin() * 7.125 + x.exp()).sum()  # noqa: E731  # nowhere else: it would be cached
    jitted = jit(f)
    with (
        config.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True}),
        pytest.warns(NotCompiledWarning, match="could not be compiled"),
    ):
        found = jitted(x)
    assert torch.equal(found, f(x))


@pytest.mark.nightly
def test_random_numbers_are_those_of_the_seed_inductor(torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    x = torch.ones(8, 4)
    f = lambda m, x: m(x) + torch.rand_like(x) + torch.randn(4)  # noqa: E731
    jitted = jit(f)
    jitted(model, x)
    torch.manual_seed(3)
    got = [jitted(model, x), jitted(model, x)]
    torch.manual_seed(3)
    want = [f(model, x), f(model, x)]
    torch.testing.assert_close(got, want)
    assert not torch.equal(got[0], got[1])


@pytest.mark.nightly
def test_a_step_of_training_inductor(torch: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 3)

    def step(m: Any, x: Any) -> Any:
        value, gradient = value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        with torch.no_grad():
            return fmap(lambda p, g: p - 0.1 * g, m, gradient), value

    plain, jitted = model, jit(step)
    for _ in range(3):
        model, value = jitted(model, x)
        plain, want = step(plain, x)
        torch.testing.assert_close(value, want)
    assert value < step(plain, x)[1] * 2
    assert model[0].weight.requires_grad


@functor
class Scaling:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return (self.w * x).sum()

    def twice(self, x):
        return 2 * self(x)


@pytest.mark.parametrize("name", ["__call__", "twice"])
def test_what_a_model_holds_is_an_input_of_its_methods(xp, name):
    model = Scaling(xp.array([1.0, 1.0, 1.0]))
    call = jit(model if name == "__call__" else model.twice)
    first = float(call(xp.array([1.0, 1.0, 1.0])))
    model.w = 5 * model.w
    assert float(call(xp.array([1.0, 1.0, 1.0]))) == 5 * first
    assert "w" not in vars(call)
