"""Modules of Flax in PyTorch: state, modes, random numbers, ties."""

import copy
import pickle

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
T = torch.from_numpy(X)


def near(got, want, tolerance=2e-6):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else got
    np.testing.assert_allclose(got, np.asarray(want), rtol=tolerance, atol=tolerance)


class Counter(nnx.Variable):
    pass


class Net(nnx.Module):
    """Everything that NNX keeps: parameters, statistics, counters, random streams, containers."""

    def __init__(self, rngs):
        self.embed = nnx.Param(jnp.arange(4))
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.named = nnx.Dict({"scale": nnx.Param(jnp.ones(4) * 2)})
        self.calls = Counter(jnp.zeros((), jnp.int32))
        self.steps = Counter(0)

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        self.steps.set_value(self.steps.get_value() + 2)
        for block in self.blocks:
            x = jnp.tanh(block(x + self.embed[...] / 100))
        return self.drop(self.norm(x)) * self.named["scale"][...]


@pytest.fixture
def net():
    return Net(nnx.Rngs(0))


@pytest.mark.nightly
def test_names_are_those_of_the_module(net):
    converted = fmapper.convert(net, "torch", (X,))
    assert [name for name, _ in converted.named_parameters()] == [
        "blocks.0.kernel", "blocks.0.bias", "blocks.1.kernel", "blocks.1.bias",
        "norm.scale", "norm.bias", "named.scale",
    ]  # fmt: skip
    assert {name for name, _ in converted.named_buffers()} == {
        "embed", "norm.mean", "norm.var", "drop.rngs.key", "drop.rngs.count", "calls", "steps",
    }  # fmt: skip
    assert set(converted.state_dict()) == set(fmapper.state(net)) | {"steps"}
    assert converted.blocks[1].kernel is converted.get_parameter("blocks.1.kernel")


@pytest.mark.nightly
def test_training_is_that_of_the_module(net):
    """Dropout, statistics and counters over several steps, bit by bit where it is random."""
    converted = fmapper.convert(net, "torch", (X,))
    assert converted.training
    for _ in range(3):
        want = net(X)
        got = converted(T)
        np.testing.assert_array_equal(got.detach().numpy() == 0, np.asarray(want) == 0)
        near(got, want)
    near(converted.norm.mean, net.norm.mean[...])
    near(converted.norm.var, net.norm.var[...])
    assert int(converted.drop.rngs.count.view(torch.int32)) == int(net.drop.rngs.count[...]) == 3
    assert int(converted.calls) == 3
    assert int(converted.steps) == 6
    net.eval()
    near(converted.eval()(T), net(X))


@pytest.mark.nightly
def test_evaluation_changes_no_statistics(net):
    net.eval()
    converted = fmapper.convert(net, "torch", (X,))
    assert not converted.training
    before = {k: v.clone() for k, v in converted.named_buffers()}
    near(converted(T), net(X))
    assert torch.equal(converted.norm.mean, before["norm.mean"])
    assert torch.equal(
        converted.drop.rngs.count.view(torch.int32), before["drop.rngs.count"].view(torch.int32)
    )
    assert int(converted.calls) == 1


@pytest.mark.nightly
def test_the_module_is_not_changed(net):
    before = jax.tree.map(np.asarray, fmapper.state({"b": net.blocks, "n": net.norm}))
    assert fmapper.verify(net, fmapper.convert(net, "torch", (X,)), X)
    after = fmapper.state({"b": net.blocks, "n": net.norm})
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    assert int(net.calls[...]) == 0
    assert not net.drop.deterministic
    assert int(net.drop.rngs.count[...]) == 0


@pytest.mark.nightly
def test_gradients_are_those_of_flax(net):
    net.eval()
    converted = fmapper.convert(net, "torch", (X,))
    converted(T).square().sum().backward()
    floats = nnx.All(nnx.Param, lambda path, _: path[0] != "embed")
    wanted = nnx.grad(lambda net: (net(X) ** 2).sum(), argnums=nnx.DiffState(0, floats))(net)
    wanted = fmapper.state(wanted)
    assert len(wanted) == 7
    for name, parameter in converted.named_parameters():
        near(parameter.grad, wanted[name], 2e-5)


@pytest.mark.nightly
def test_training_without_random_numbers_is_refused_in_the_module():
    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x):
            return self.drop(self.linear(x))

    model = Dropping(nnx.Rngs(0))
    converted = fmapper.convert(model, "torch", (X,))
    model.eval()
    near(converted(T), model(X))
    with pytest.raises(fmapper.ProgramInputError, match=r"for evaluation only.*rngs"):
        converted.train()(T)
    with pytest.raises(fmapper.ConversionError, match="rngs"):
        fmapper.convert(model, "torch", (X,), train=True)


def test_variables_that_a_call_makes_are_refused():
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return x

    with pytest.raises(fmapper.ConversionError, match="Sowing: a call makes seen"):
        fmapper.convert(Sowing(), "torch", (X,))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.first
        self.head = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.head.kernel = self.first.kernel
        self.mean = nnx.BatchStat(jnp.zeros(()))
        self.shared = self.mean

    def __call__(self, x):
        self.mean[...] = self.mean[...] + 1
        return self.head(jnp.tanh(self.again(jnp.tanh(self.first(x))))) + self.shared[...]


def _loaded(model, tmp_path):
    model.save(tmp_path / "model.safetensors")
    return type(model).load(tmp_path / "model.safetensors")


CARRIED = {
    "itself": lambda model, _: model,
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "to": lambda model, _: model.to(torch.float64).to(torch.float32),
    "half": lambda model, _: copy.deepcopy(model).bfloat16(),
    "cast": lambda model, _: fmapper.cast(model, "bfloat16"),
    "moved": lambda model, _: fmapper.to_cpu(model, copy=True),
    "assigned": lambda model, _: (model.load_state_dict(model.state_dict(), assign=True), model)[1],
    "saved": _loaded,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CARRIED)
def test_ties(name, tmp_path):
    model = Tied(nnx.Rngs(0))
    converted = fmapper.convert(model, "torch", (X,))
    assert converted.program.aliases == {
        "again.kernel": "first.kernel", "again.bias": "first.bias",
        "head.kernel": "first.kernel", "shared": "mean",
    }  # fmt: skip
    assert len(list(converted.parameters())) == 2
    original = {key: x.clone() for key, x in converted.state_dict().items()}
    found = CARRIED[name](converted, tmp_path)
    assert set(found.state_dict()) == set(original)
    assert found.again.kernel is found.first.kernel is found.head.kernel
    assert isinstance(found.head.kernel, torch.nn.Parameter)
    assert found.shared is found.mean
    dtype = found.first.kernel.dtype
    got = found(T.to(dtype))
    assert got.dtype is dtype
    near(got.float(), model(X), 5e-2 if dtype is torch.bfloat16 else 2e-6)
    assert float(found.shared) == 1
    for key, x in converted.state_dict().items():
        if name != "itself" and found is not converted:
            assert torch.equal(x, original[key]), key


@pytest.mark.nightly
def test_a_split_module(net):
    net.eval()
    converted = fmapper.convert(nnx.split(net), "torch", (X,))
    near(converted(T), net(X))


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["method", "lambda", "jit"])
def test_methods_in_both_modes(net, how):
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = net

        def encode(self, x):
            return self.inner(x)

    outer = Outer()
    made = {
        "method": lambda: outer.encode,
        "lambda": lambda: lambda x: outer.encode(x),  # noqa: PLW0108
        "jit": lambda: nnx.jit(lambda x: outer.encode(x)),  # noqa: PLW0108
    }[how]()
    with pytest.warns(fmapper.ConversionWarning, match=r"inner\.steps"):  # a Python number
        converted = fmapper.convert(made, "torch", (X,))
    prefix = "" if how == "method" else "outer."
    assert f"{prefix}inner.norm.mean" in converted.state_dict()
    assert converted.training
    near(converted(T), outer.encode(X))
    near(converted(T), outer.encode(X))
    net.eval()
    near(converted.eval()(T), outer.encode(X))


# --- Linen ----------------------------------------------------------------------------------------


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(3, name="dense")(x)
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dropout(0.5, deterministic=not train)(x)

    def twice(self, x):
        return 2 * self(x, train=False)


@pytest.fixture(scope="module")
def encoder():
    model = Encoder()
    variables = model.init(jax.random.key(0), X, train=False)
    return model, variables


LINEN = {
    "pair": lambda model, variables: (model, variables),
    "bound": lambda model, variables: model.bind(variables),
    "apply": lambda model, variables: (model.apply, variables),
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", LINEN)
def test_linen(encoder, form):
    model, variables = encoder
    key = jax.random.key(4)
    given = LINEN[form](model, variables)
    converted = fmapper.convert(given, "torch", (X,), {"rngs": {"dropout": key}})
    assert {name for name, _ in converted.named_parameters()} == {
        "params.dense.kernel", "params.dense.bias", "params.norm.scale", "params.norm.bias",
    }  # fmt: skip
    assert set(converted.state_dict()) - {n for n, _ in converted.named_parameters()} == {
        "batch_stats.norm.mean", "batch_stats.norm.var",
    }  # fmt: skip
    assert not converted.training
    near(converted(T), model.apply(variables, X, train=False))
    near(converted(T, train=False), model.apply(variables, X, train=False))
    with pytest.raises(fmapper.ProgramInputError, match="train"):
        converted(T, train=True)
    words = fmapper.to_torch(jax.random.key_data(key))
    converted.train()
    for _ in range(2):
        want, updates = model.apply(
            variables, X, train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        near(converted(T, rngs={"dropout": words}), want)
        variables = {**variables, **updates}
    near(converted.batch_stats.norm.var, variables["batch_stats"]["norm"]["var"])
    with pytest.raises(fmapper.ProgramInputError, match="rngs is missing"):
        converted(T)


@pytest.mark.nightly
@pytest.mark.parametrize("train", [False, True])
def test_a_mode_among_the_examples(encoder, train):
    model, variables = encoder
    rngs = {"rngs": {"dropout": jax.random.key(4)}}
    converted = fmapper.convert((model, variables), "torch", (X, train), rngs)
    assert converted.training is train
    near(converted.eval()(T), model.apply(variables, X, train=False))
    near(converted(T, False), model.apply(variables, X, train=False))


@pytest.mark.nightly
def test_linen_methods(encoder):
    model, variables = encoder
    want = model.apply(variables, X, method="twice")
    for given, kwargs in (
        ((model, variables), {"method": "twice"}),
        ((model, variables), {"method": Encoder.twice}),
        (model.bind(variables).twice, {}),
    ):
        near(fmapper.convert(given, "torch", (X,), kwargs)(T), want)


@pytest.mark.nightly
def test_linen_without_random_numbers_is_for_evaluation(encoder):
    converted = fmapper.convert(encoder, "torch", (X,))
    with pytest.raises(fmapper.ProgramInputError, match=r"rngs=\{"):
        converted.train()(T)


def test_mutable_collections_are_buffers_and_new_ones_are_output():
    class Caching(linen.Module):
        @linen.compact
        def __call__(self, x):
            cache = self.variable("cache", "total", jnp.zeros, (4,))
            cache.value = cache.value + x.sum(0)
            self.sow("intermediates", "seen", x)
            return x + cache.value

    model = Caching()
    variables = {"cache": model.init(jax.random.key(0), X)["cache"]}
    converted = fmapper.convert((model, variables), "torch", (X,), {"mutable": ["cache"]})
    after = variables
    for _ in range(2):
        want, after = model.apply(after, X, mutable=["cache"])
        near(converted(T), want)
    near(converted.cache.total, after["cache"]["total"])
    both = {"mutable": ["cache", "intermediates"]}
    out, new = fmapper.convert((model, variables), "torch", (X,), both)(T)
    near(out, model.apply(variables, X, **both)[0])
    near(new["intermediates"]["seen"][0], X)


def test_collections_with_one_name():
    class Twice(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", linen.initializers.ones, (4,))
            other = self.variable("stats", "w", lambda: jnp.ones(4) * 3)
            return x * w + other.value

    model = Twice()
    converted = fmapper.convert((model, model.init(jax.random.key(0), X)), "torch", (X,))
    assert set(converted.state_dict()) == {"params.w", "stats.w"}
    near(converted(T), X + 3)


def test_frozen_dicts_and_partitioned_parameters():
    from flax.core import freeze

    class Sharded(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_partitioning(linen.initializers.ones, ("a", "b"))
            w = self.param("w", init, (4, 2))
            logical = linen.with_logical_partitioning(linen.initializers.ones, ("c",))
            return x @ w + self.param("b", logical, (2,))

    model = Sharded()
    variables = model.init(jax.random.key(0), X)
    converted = fmapper.convert((model, freeze(variables)), "torch", (X,))
    assert fmapper.verify((model, freeze(variables)), converted, X)
    assert set(converted.state_dict()) == {"params.w", "params.b"}
    near(converted(T), model.apply(variables, X))


def test_layers_that_are_told_their_mode():
    for layer, args in ((linen.BatchNorm(), ()), (linen.Dropout(0.5), ())):
        kwargs = {"use_running_average": True} if isinstance(layer, linen.BatchNorm) else {
            "deterministic": True}  # fmt: skip
        variables = layer.init(jax.random.key(0), X, **kwargs)
        converted = fmapper.convert((layer, variables), "torch", (X, *args))
        near(converted.eval()(T), layer.apply(variables, X, **kwargs))


def test_what_a_call_gives_back_unchanged_is_no_state():
    class Careful(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        @nnx.remat
        def __call__(self, x):
            return jnp.sin(self.linear(x))

    model = fmapper.convert(Careful(), "torch", (np.ones((1, 2), np.float32),))
    loss = model.linear.kernel.square().sum() + model(torch.ones(1, 2)).sum()
    loss.backward()
    assert model.linear.kernel.grad is not None
    assert "clone(" not in model.code


def test_a_module_of_linen_without_variables_is_refused_with_the_way_out():
    with pytest.raises(fmapper.ConversionError, match=r"pass the pair \(module, variables\)"):
        fmapper.convert(linen.Dense(2), "torch", (np.ones((1, 2), np.float32),))


class Normed(linen.Module):
    def setup(self):
        self.dense = linen.Dense(3)
        self.norm = linen.BatchNorm()

    def __call__(self, x, train):
        return self.norm(self.dense(x), use_running_average=not train)

    def features(self, x):
        return self.dense(x)


@pytest.mark.nightly_cases("more2-kwargs2", "more0-kwargs0", "more1-kwargs1")
@pytest.mark.parametrize(
    ("more", "kwargs"),
    [
        ((True,), {"mutable": ["batch_stats"]}),
        ((True,), {}),
        ((False,), {}),
        ((), {"method": "features"}),
        ((), {"method": Normed.features}),
    ],
)
def test_modules_of_linen_are_verified_as_they_are_applied(more, kwargs):
    """Options of `apply` are no inputs of what is converted; `train=True` compares training."""
    x = np.random.RandomState(0).randn(5, 4).astype(np.float32)
    module = Normed()
    model = module, module.init(jax.random.key(0), x, False)
    converted = fmapper.convert(model, "torch", (x, *more), kwargs)
    before = {name: array.clone() for name, array in converted.state_dict().items()}
    assert fmapper.verify(model, converted, x, *more, example_kwargs=kwargs)
    for name, array in converted.state_dict().items():
        assert torch.equal(array, before[name]), f"verify has changed {name}"
    with torch.no_grad():
        converted.get_parameter("params.dense.kernel" if not more else "params.norm.scale").mul_(
            1.5
        )
    assert not fmapper.verify(model, converted, x, *more, example_kwargs=kwargs)


@pytest.mark.nightly
def test_a_module_of_nnx_that_keeps_rngs():
    """`nnx.Rngs` has an attribute of any name, also of those that others are known by."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.rngs = rngs

        def __call__(self, x):
            return self.linear(x)

    model, x = Model(nnx.Rngs(0)), np.ones((4, 3), np.float32)
    found = fmapper.convert(model, "torch", (x,))(torch.from_numpy(x))
    np.testing.assert_allclose(found.detach(), model(x), rtol=1e-6)
