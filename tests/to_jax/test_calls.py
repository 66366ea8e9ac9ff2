"""Calls of a converted model after the first: checked as it, and given as it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

jnp = jax.numpy


class Blend(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: Any, y: Any, scale: Any = None, flag: bool = True) -> Any:
        z = x - self.weight * y
        z = self.norm(z) if self.training else z
        return {"z": z if flag else -z, "scaled": None if scale is None else z * scale}


X, Y = torch.ones(2, 3), torch.full((2, 3), 2.0)
A, B = jnp.asarray(X.numpy()), jnp.asarray(Y.numpy())
WANT = 1 - 2 * np.arange(3.0)


def blend(*args: Any, train: bool = False, **kwargs: Any) -> Any:
    return fmapper.convert(Blend(), "jax", args, kwargs, train=train)


def was_routed(model: Any, *args: Any, **kwargs: Any) -> bool:
    return model._code.routes.find(args, kwargs) is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(A, B),
        lambda model: model(A, y=B),
        lambda model: model(y=B, x=A),
        lambda model: model(A, B, None, True),
        lambda model: model(A, B, flag=True, scale=None),
        lambda model: model(np.asarray(A), B),
    ],
)
def test_however_it_is_called_the_second_call_is_the_first(call):
    model = blend(X, Y)
    outputs = [call(model) for _ in range(3)]
    for output in outputs:
        np.testing.assert_array_equal(output["z"][0], WANT)
        assert output["scaled"] is None


def test_ways_to_call_do_not_mix():
    model = blend(X, Y)
    for _ in range(2):
        np.testing.assert_array_equal(model(A, B)["z"][0], WANT)
        np.testing.assert_array_equal(model(B, A)["z"][0], 2 - np.arange(3.0))
        np.testing.assert_array_equal(model(A, A)["z"][0], 1 - np.arange(3.0))
        np.testing.assert_array_equal(model(y=A, x=B)["z"][0], 2 - np.arange(3.0))
        np.testing.assert_array_equal(model(B, y=A)["z"][0], 2 - np.arange(3.0))
    assert was_routed(model, A, B)
    assert was_routed(model, y=A, x=B)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((jnp.ones((3, 3)), B), {}),
        ((jnp.ones((2, 3), int), B), {}),
        ((A,), {}),
        ((A, B, B), {}),
        ((A, B, None, False), {}),
        ((A, B, None, 1), {}),
        ((A, B), {"flag": False}),
        ((A, B), {"x": A}),
        ((A, [1.0]), {}),
        ((A, X), {}),
    ],
)
def test_what_a_call_may_not_be_it_may_not_be_later(args, kwargs):
    model = blend(X, Y, None, True)
    for _ in range(2):
        model(A, B, None, True)
        model(A, B)
        with pytest.raises(fmapper.ProgramInputError):
            model(*args, **kwargs)
    assert was_routed(model, A, B, None, True)


def test_trees_are_looked_at_in_every_call():
    class Tree(torch.nn.Module):
        def forward(self, pair: Any, n: Any) -> Any:
            return pair[0] * n + pair[1]["x"]

    model = fmapper.convert(Tree(), "jax", ((X, {"x": Y}), X[:, :1]))
    for n in (2.0, 3.0):
        for _ in range(2):
            assert model((A, {"x": B}), jnp.full((2, 1), n))[0, 0] == n + 2
    assert not was_routed(model, (A, {"x": B}), jnp.ones((2, 1)))


@pytest.mark.nightly
def test_other_arrays_of_the_model_and_transformations():
    model = blend(X, Y)
    for _ in range(2):
        model(A, B)
        doubled = model.replace(params={n: 2 * p for n, p in reversed(model.params.items())})
        np.testing.assert_array_equal(doubled(A, B)["z"][0], 1 - 4 * np.arange(3.0))
        gradients = jax.grad(lambda p, m=model: m.replace(params=p)(A, B)["z"].sum())(model.params)
        np.testing.assert_array_equal(gradients["weight"], [-4.0] * 3)
        np.testing.assert_array_equal(jax.jit(model)(A, B)["z"][0], WANT)
        np.testing.assert_array_equal(jax.vmap(model)(A[None], B[None])["z"][0, 0], WANT)


def test_what_a_call_changes_is_new_in_every_call():
    model = blend(X, Y, train=True)
    for count in range(1, 4):
        _, model = model(A, B, mutable=True)
        assert int(model.buffers["norm.num_batches_tracked"]) == count
    assert was_routed(model, A, B)


@pytest.mark.nightly
def test_varying_sizes():
    rows = {0: torch.export.Dim.AUTO}
    model = fmapper.convert(Blend(), "jax", (X, Y), dynamic_shapes=(rows, rows))
    for size in (2, 5, 2, 5):
        assert model(jnp.ones((size, 3)), jnp.ones((size, 3)))["z"].shape == (size, 3)
    with pytest.raises(fmapper.ProgramInputError):
        model(jnp.ones((2, 3)), jnp.ones((5, 3)))


@pytest.mark.nightly
def test_random_numbers_need_their_key_in_every_call():
    x = torch.ones(20, 30)
    model = fmapper.convert(torch.nn.Dropout(), "jax", (x,), train=True)
    array = jnp.asarray(x.numpy())
    first, same, other = (model(array, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    with pytest.raises(fmapper.ProgramInputError, match="draws random numbers"):
        model(array)


class Keywords(torch.nn.Module):
    def forward(self, x: Any, **options: Any) -> Any:
        return x * options["y"] if options["double"] is None else 2 * x * options["y"]


@pytest.mark.nightly_cases("auto")
@pytest.mark.parametrize("shapes", ["auto", "by name", "by the name of all"])
def test_varying_sizes_of_keywords_that_forward_does_not_name(shapes):
    module = Keywords()
    auto = {0: torch.export.Dim.AUTO}
    rest = {"y": auto, "double": None}
    given = {"x": X, "double": True, "y": Y}
    if shapes != "auto":
        shapes = {"x": auto, **rest} if shapes == "by name" else {"x": auto, "options": rest}
    model = fmapper.convert(module, "jax", (), given, dynamic_shapes=shapes)
    assert "forward" not in vars(module)
    x = jnp.ones((5, 3))
    np.testing.assert_array_equal(model(x=x, double=True, y=3 * x), 6 * x)


class Layer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.owner = None


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.layers[1].owner = self
        self.sums: dict[str, Any] = {}


class Filler(torch.nn.Module):
    def forward(self, x: Any, cache: Any) -> Any:
        for i, layer in enumerate(cache.layers):
            layer.keys = x if layer.keys is None else torch.cat([layer.keys, x])
            cache.sums[str(i)] = layer.keys.sum()
        return x + sum(cache.sums.values()), [layer.keys for layer in cache.layers]


def test_an_empty_cache_among_the_examples_stays_empty():
    cache = Cache()
    model = fmapper.convert(Filler(), "jax", (X, cache))
    assert cache.sums == {}
    assert [layer.keys for layer in cache.layers] == [None, None]
    assert cache.layers[1].owner is cache
    for _ in range(2):
        output, keys = model(A, cache)
        np.testing.assert_array_equal(output, A + 2 * A.sum())
        np.testing.assert_array_equal(keys, [A, A])


class Sized:
    def __init__(self, keys: Any) -> None:
        self.keys = keys
        self.seen = keys.shape[1]
        self.sizes = {"rows": [keys.shape[0]]}


class Counter(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return Sized(x + 1)


def test_sizes_that_vary_in_attributes_of_outputs():
    model = fmapper.convert(Counter(), "jax", (X,), dynamic_shapes="auto")
    found = model(jnp.ones((5, 4)))
    assert (found.seen, found.sizes["rows"]) == (4, [5])
    assert found.keys.shape == (5, 4)


class Window:
    """A cache that counts in a Python integer what has come, as sliding windows do."""

    def __init__(self, keys, seen):
        self.keys = keys
        self.seen = seen


class SlidingStep(torch.nn.Module):
    def forward(self, x, cache):
        keys = torch.cat([cache.keys[1:], x[None]])
        places = torch.arange(4) + cache.seen - 4
        return (keys * places).sum(), Window(keys, cache.seen + 1)


def test_what_an_object_counts_beside_its_tensors_is_compared():
    """A step that was recorded for one count would go on with it, and nobody would notice."""
    x, keys = torch.tensor(2.0), torch.arange(4.0)
    model = fmapper.convert(SlidingStep(), "jax", (x, Window(keys, 5)))
    got, cache = model(x.numpy(), Window(keys.numpy(), 5))
    want, after = SlidingStep()(x, Window(keys, 5))
    assert got == want.item()
    assert cache.seen == after.seen == 6
    with pytest.raises(fmapper.ProgramInputError, match=r"cache.seen is 6.*recorded for 5"):
        model(x.numpy(), cache)


@pytest.mark.parametrize("keyword", [False, True])
def test_one_example_for_two_inputs_leaves_them_two(keyword: bool) -> None:
    given = ((X,), {"y": X, "scale": X}) if keyword else ((X, X, X), {})
    model = fmapper.convert(Blend(), "jax", *given)
    third = X + 4
    want = Blend().eval()(X, Y, third)
    found = model(A, B, jnp.asarray(third.numpy())) if not keyword else None
    if found is None:
        found = model(A, y=B, scale=jnp.asarray(third.numpy()))
    np.testing.assert_allclose(found["z"], want["z"].detach().numpy())
    np.testing.assert_allclose(found["scaled"], want["scaled"].detach().numpy())


def test_a_parameter_as_an_example_stays_an_input() -> None:
    net = Blend().eval()
    model = fmapper.convert(net, "jax", (X, net.weight))
    np.testing.assert_allclose(model(A, B[0])["z"], net(X, Y[0])["z"].detach().numpy())


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("structure", [False, True])
def test_attention_recorded_with_itself_takes_other_keys_and_values(structure: bool) -> None:
    pytest.importorskip("flax")
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    q, k, v = (torch.randn(2, 5, 8) for _ in range(3))
    model = fmapper.convert(attention, "flax", (q, q, q), structure=structure)
    for given in ((q, q, q), (q, k, v)):
        want = attention(*given)[0].detach().numpy()
        found = model(*(one.numpy() for one in given))[0]
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


class Fields(OrderedDict):
    """Has what was set last at its end, and new ones in the order of the class, as ModelOutput."""

    def __init__(self, **fields: Any) -> None:
        super().__init__((name, fields[name]) for name in "abc" if name in fields)


torch.utils._pytree.register_pytree_node(
    Fields,
    lambda node: ([*node.values()], [*node]),
    lambda values, names: Fields(**dict(zip(names, values, strict=True))),
    flatten_with_keys_fn=lambda node: (
        [(torch.utils._pytree.MappingKey(name), value) for name, value in node.items()],
        [*node],
    ),
)


class SetsLater(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        found = Fields(a=x, c=(x * 2, x * 3))
        found["b"] = x * 4
        return {"sum": x.sum(), "found": found}  # a sum is decomposed: torch traces again


@pytest.mark.parametrize("check", [True, False])
def test_outputs_have_their_names_whatever_order_these_were_set_in(check):
    model = fmapper.convert(SetsLater(), "jax", (X,), check=check)
    found = model(A)["found"]
    assert found._fields == ("a", "c", "b")
    assert [float(found[name][0, 0]) for name in "ab"] == [1, 4]
    assert [float(part[0, 0]) for part in found["c"]] == [2, 3]


def test_a_strict_recording_has_its_outputs_in_the_order_of_their_structure():
    from fmapper_adapters.torch.record import ways

    exported = ways.STRICTLY.record(SetsLater(), (X,), {}, None)
    found = exported.module()(X)["found"]
    assert [float(found[name][0, 0]) for name in "ab"] == [1, 4]
    assert [float(part[0, 0]) for part in found["c"]] == [2, 3]
