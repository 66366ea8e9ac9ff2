"""Weights of a converted model go back into its source in one call."""

from __future__ import annotations

import numpy as np
import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
OFFSET = np.array([3.0, 4.0], np.float32)  # a constant of the program


class OfNnx(nnx.Module):
    """Layers, statistics, a generator, and a name that torch's modules have already."""

    def __init__(self, rngs):
        self.train_ = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(jnp.tanh(self.train_(x))))) + OFFSET


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(2)(x) + OFFSET


class OfEquinox(eqx.Module):
    up: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up, self.out = eqx.nn.Linear(4, 4, key=first), eqx.nn.Linear(4, 2, key=second)

    def __call__(self, x):
        return self.out(jnp.tanh(self.up(x))) + OFFSET


def make(kind):
    """Returns what is converted, what the weights go back into, and how that is called."""
    if kind == "nnx":
        model = OfNnx(nnx.Rngs(0))
        model.eval()
        return model, model, lambda learned: learned(X)
    if kind.startswith("linen"):
        module = OfLinen()
        variables = module.init(jax.random.key(0), X)
        if kind == "linen variables":
            return (module, variables), variables, lambda learned: module.apply(learned, X)
        pair = module, variables
        return pair, pair, lambda learned: learned[0].apply(learned[1], X)
    model = OfEquinox(jax.random.key(0))
    if kind == "equinox":
        return model, model, lambda learned: learned(X[0])
    if kind == "filter_vmap":
        wrapped = eqx.filter_vmap(model)
        return wrapped, wrapped, lambda learned: learned(X)
    wrapped = jax.vmap(model)
    if kind == "function":
        return wrapped, wrapped, lambda learned: learned(X)
    return wrapped, model, lambda learned: jax.vmap(learned)(X)


SLOW = ("linen variables", "equinox", "vmap", "function")  # as the others, but for the target
KINDS = [
    "nnx",
    "linen pair",
    "filter_vmap",
    *(pytest.param(kind, marks=pytest.mark.nightly) for kind in SLOW),
]


def examples_of(kind):
    return (torch.tensor(X[0] if kind == "equinox" else X),)


def learn(module):
    """Changes every array of a module, as a training does, and returns it in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, array in (*module.named_parameters(), *module.named_buffers()):
            if array.is_floating_point() and "constant" not in name:
                array.add_(torch.rand(array.shape, generator=generator))
    return module.eval()


@pytest.fixture(scope="module", params=KINDS)
def cells(request):
    kind = request.param
    model, target, call = make(kind)
    found = {
        structured: learn(
            fmapper.convert(model, "torch", examples_of(kind), structure=structured, check=False)
        )
        for structured in (False, True)
    }
    return kind, found, target, call


def by_state(converted, target, structured, folder):
    return fmapper.load_state(target, fmapper.state(converted, source=structured))


def by_state_dict(converted, target, structured, folder):
    if not structured:
        return fmapper.load_state(target, converted.state_dict())
    again = fmapper.load_state(converted, {k: 0 * v for k, v in fmapper.state(converted).items()})
    again.load_state_dict(converted.state_dict())
    return fmapper.load_state(target, fmapper.state(again, source=True))


def by_file(converted, target, structured, folder):
    saved = fmapper.state(converted, source=True) if structured else converted
    fmapper.save(saved, folder / "learned.safetensors")
    return fmapper.load(folder / "learned.safetensors", like=target)


@pytest.mark.nightly_cases(
    "nnx-by_state_dict-flat",
    "filter_vmap-by_state_dict-flat",
    "nnx-by_state-structured",
    "filter_vmap-by_state-structured",
    "nnx-by_state-flat",
    "filter_vmap-by_state-flat",
)
@pytest.mark.parametrize("structured", [False, True], ids=["flat", "structured"])
@pytest.mark.parametrize("way", [by_state, by_state_dict, by_file])
def test_the_way_back_is_one_call(cells, structured, way, tmp_path):
    kind, found, target, call = cells
    learned = way(found[structured], target, structured, tmp_path)
    with torch.no_grad():
        wanted = found[structured](*examples_of(kind))
    assert type(learned) is type(target)
    np.testing.assert_allclose(call(learned), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("structured", [False, True], ids=["flat", "structured"])
def test_names_are_those_of_the_source(cells, structured):
    _, found, target, _ = cells
    names = fmapper.state(found[structured], source=True)
    wanted = fmapper.state(target)
    assert set(names) == set(wanted)
    if not structured:
        assert list(fmapper.state(found[False])) == list(names)


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_there_is_one_call(kind):
    model, target, call = make(kind)
    converted = learn(fmapper.convert(model, "torch", examples_of(kind), check=False))
    again = fmapper.load_state(converted, fmapper.state(target))
    with torch.no_grad():
        np.testing.assert_allclose(call(target), again(*examples_of(kind)), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_linen_comes_back_as_linen():
    module = OfLinen()
    variables = module.init(jax.random.key(0), X)
    there = fmapper.convert((module, variables), "torch", examples_of("linen pair"))
    back = fmapper.convert(there, "linen", examples_of("linen"))
    made = back.init(jax.random.key(1), X)
    assert jax.tree.structure(made) == jax.tree.structure(variables)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(variables), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- models of torch ------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("inverse", torch.arange(1.0, 5.0), persistent=False)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids) * self.inverse))


IDS = torch.tensor([1, 2, 5])


def convert_to(target, net):
    module = fmapper.convert(net, target, (IDS,))
    if target != "linen":
        return module
    return module, module.init(jax.random.key(0), IDS.numpy())


@pytest.mark.parametrize("target", ["jax", "nnx", "linen"])
@pytest.mark.parametrize("file", [False, True])
def test_the_way_back_to_torch_is_one_call(target, file, tmp_path):
    net, blank = Net().eval(), Net().eval()
    converted = convert_to(target, net)
    if file:
        fmapper.save(converted, tmp_path / "net.safetensors")
        learned = fmapper.load(tmp_path / "net.safetensors", like=blank)
    else:
        learned = fmapper.load_state(blank, fmapper.state(converted))
    assert learned.head.weight is learned.embed.weight
    assert torch.equal(learned(IDS), net(IDS))


@pytest.mark.parametrize("target", ["jax", "nnx", "linen"])
@pytest.mark.parametrize("file", [False, True])
def test_files_and_states_of_torch_fill_what_was_converted(target, file, tmp_path):
    net = Net().eval()
    blank = convert_to(target, Net().eval())
    if file:
        fmapper.save(net, tmp_path / "net.safetensors")
        learned = fmapper.load(tmp_path / "net.safetensors", like=blank)
    else:
        learned = fmapper.load_state(blank, fmapper.state(net))
    for name, array in fmapper.state(learned).items():
        np.testing.assert_array_equal(array, fmapper.state(net)[name].detach())


@pytest.mark.parametrize("target", ["jax", "nnx"])
def test_the_state_dict_goes_back_without_buffers_that_it_lacks(target):
    net, blank = Net().eval(), Net().eval()
    converted = convert_to(target, net)
    assert "inverse" not in converted.state_dict()
    learned = fmapper.load_state(blank, converted.state_dict())
    assert torch.equal(learned(IDS), net(IDS))
    assert fmapper.load_state(converted, net.state_dict()) is not converted


def test_generators_that_a_model_was_given_are_no_weights(tmp_path):
    net, blank = Net().eval(), Net().eval()
    converted = fmapper.convert(net, "nnx", (IDS,), rngs=nnx.Rngs(0))
    for source in (False, True):
        names = {*fmapper.state(converted, source=source)}
        assert names == {*fmapper.state(net)}
        learned = fmapper.load_state(blank, fmapper.state(converted, source=source))
        assert torch.equal(learned(IDS), net(IDS))
    fmapper.save(net, tmp_path / "net.safetensors")
    fmapper.load(tmp_path / "net.safetensors", like=converted)
    fmapper.load_state(converted, net.state_dict())


@pytest.mark.parametrize("target", ["jax", "nnx"])
def test_models_without_memory_are_filled_whole(target, tmp_path):
    net = Net().eval()
    hollow = fmapper.to_jax(convert_to(target, net), device="meta")
    fmapper.save(net, tmp_path / "net.safetensors")
    fmapper.save({**net.state_dict()}, tmp_path / "dict.safetensors")
    with pytest.raises(fmapper.StructureMismatchError, match=r"inverse: not in the checkpoint"):
        fmapper.load(tmp_path / "dict.safetensors", like=hollow)
    found = fmapper.load(tmp_path / "net.safetensors", like=hollow)
    assert all(isinstance(array, jax.Array) for array in fmapper.state(found).values())
    given = {"inverse": net.inverse}
    found = fmapper.load(tmp_path / "dict.safetensors", like=hollow, default=given)
    assert all(isinstance(array, jax.Array) for array in fmapper.state(found).values())


def test_constants_of_a_model_that_has_lost_them_are_named():
    wrapped, _, _ = make("vmap")
    converted = fmapper.convert(wrapped, "torch", examples_of("vmap"), check=False)
    assert any("constant" in name for name, _ in converted.named_buffers())
    hollow = fmapper.to_torch(converted, device="meta")
    with pytest.raises(fmapper.StructureMismatchError, match="constants of a converted model"):
        fmapper.materialize(hollow, fmapper.state(converted))


def test_keys_and_their_words_take_the_place_of_one_another():
    held = {"key": jax.random.split(jax.random.key(3), 2), "w": jnp.zeros(2)}
    words = {"key": torch.tensor([[0, 1], [2, 3]], dtype=torch.uint32), "w": torch.ones(2)}
    for found in (
        fmapper.load_state(held, words),
        fmapper.materialize(fmapper.to_jax(held, device="meta"), words),
    ):
        assert found["key"].dtype == held["key"].dtype
        assert jax.random.key_data(found["key"]).tolist() == [[0, 1], [2, 3]]
    back = fmapper.load_state(words, held)
    assert back["key"].tolist() == jax.random.key_data(held["key"]).tolist()
    with pytest.raises(fmapper.StructureMismatchError, match=r"key: shape \(2, 3\)"):
        fmapper.load_state(held, {**words, "key": torch.zeros(2, 3, dtype=torch.uint32)})


def test_compiled_modules_have_the_names_of_their_modules(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    head = torch.nn.Linear(3, 2)
    plain = torch.nn.Sequential(net, head)
    for model, known in (
        (torch.compile(net, backend="eager"), net),
        (torch.nn.Sequential(torch.compile(net, backend="eager"), head), plain),
    ):
        assert list(fmapper.state(model)) == list(fmapper.state(known))
        moved = {name: x + 1 for name, x in fmapper.state(known).items()}
        filled = fmapper.load_state(model, moved)
        assert type(filled) is type(model)
        assert all(torch.equal(x, moved[n]) for n, x in fmapper.state(filled).items())
        fmapper.save(model, tmp_path / "model.safetensors")
        back = fmapper.load(tmp_path / "model.safetensors", like=known)
        assert torch.equal(next(back.parameters()), next(known.parameters()))


def test_names_that_do_not_fit_name_the_state_of_the_source():
    model = {"a": np.zeros(2)}
    with pytest.raises(fmapper.StructureMismatchError, match=r"state\(model, source=True\)"):
        fmapper.load_state(model, {"b": np.zeros(2)})


def test_the_generators_of_a_converted_model_are_not_among_its_weights():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
    model = fmapper.convert(net, "flax", (X,), rngs=nnx.Rngs(0), check=False)
    assert fmapper.state(model).keys() == net.state_dict().keys()
    wide = {name: 2 * array for name, array in fmapper.state(model).items()}
    there = fmapper.load_state(model, wide)
    assert np.array_equal(there["0"].weight[...], 2 * model["0"].weight[...])
    assert there.rngs is not None
    back = fmapper.load_state(net, fmapper.state(there))
    assert torch.equal(back[0].weight, 2 * net[0].weight)
