"""There and back: torch to Flax or JAX to torch, and JAX to torch to JAX or Flax."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")


class Conv(torch.nn.Module):
    """Convolutions, batch normalisation, a tie, a frozen parameter, a transient buffer."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        self.layers[1].weight = self.layers[0].weight
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.full((4,), 0.1))
        self.register_buffer("hidden", torch.full((4,), 0.2), persistent=False)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x))).mean((2, 3))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"out": x + self.shift, "rest": (x * self.hidden,)}


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


MODELS = {
    "conv": lambda: (Conv(), (torch.randn(3, 2, 5, 5),)),
    "tokens": lambda: (Tokens(), (torch.randint(0, 11, (2, 5)),)),
    "sequential": lambda: (
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.GELU()),
        (torch.randn(5, 4),),
    ),
}


def leaves(tree):
    return [x.detach().numpy() for x in torch.utils._pytree.tree_leaves(tree)]


def near(got, want, tolerance=2e-5):
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.nightly_cases("tokens-flax", "tokens-jax")
@pytest.mark.parametrize("via", ["flax", "jax"])
@pytest.mark.parametrize("name", MODELS)
def test_torch_and_back(name, via):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    middle = fmapper.convert(model, via, inputs)
    back = fmapper.convert(middle, "torch", inputs)
    near(back.eval()(*inputs), model(*inputs))
    assert dict(back.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert dict(back.state_dict()).keys() == dict(model.state_dict()).keys()
    for key, p in model.named_parameters(remove_duplicate=False):
        assert back.get_parameter(key).requires_grad is p.requires_grad
    shared = {key: id(p) for key, p in model.named_parameters(remove_duplicate=False)}
    ours = {key: id(p) for key, p in back.named_parameters(remove_duplicate=False)}
    for key, one in shared.items():
        for other, two in shared.items():
            assert (one == two) == (ours[key] == ours[other])
    assert bool(fmapper.verify(middle, back, *inputs))
    model.load_state_dict(back.state_dict())
    back.load_state_dict(model.state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["conv", "sequential"])
def test_both_modes_and_back(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    middle = fmapper.convert(model, "flax", inputs, train=True)
    back = fmapper.convert(middle, "torch", inputs)
    assert back.training
    for _ in range(2):
        near(back(*inputs), model(*inputs))
    for key, x in model.state_dict().items():
        near(back.state_dict()[key].float(), x.float())
    near(back.eval()(*inputs), model.eval()(*inputs))
    before = {key: x.clone() for key, x in back.state_dict().items()}
    back(*inputs)
    assert all(torch.equal(x, before[key]) for key, x in back.state_dict().items())


@pytest.mark.nightly
def test_dropout_needs_random_numbers_on_the_way():
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    x = torch.randn(3, 4)
    middle = fmapper.convert(model, "flax", (x,), train=True)
    back = fmapper.convert(middle, "torch", (x,))
    near(back.eval()(x), model.eval()(x))
    with pytest.raises(fmapper.ProgramInputError, match="rngs"):
        back.train()(x)
    keyed = fmapper.convert(
        model.train(), "flax", (x,), train=True, rngs=nnx.Rngs(dropout=0)
    )  # fmt: skip
    back = fmapper.convert(keyed, "torch", (x,))
    keyed.train()
    for _ in range(2):
        near(back.train()(x), fmapper.to_torch(keyed(x.numpy())))


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["jax", "flax"])
def test_jax_and_back(to):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.again = self.first
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.mean = nnx.BatchStat(jnp.zeros(4))

        def __call__(self, x):
            return self.norm(jax.nn.gelu(self.again(jnp.tanh(self.first(x))))) + self.mean[...]

    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    net = Net(nnx.Rngs(0))
    middle = fmapper.convert(net, "torch", (x,))
    back = fmapper.convert(middle, to, (torch.from_numpy(x),))
    got = back(x)
    np.testing.assert_allclose(got, net(x), rtol=2e-5, atol=2e-5)
    assert sorted(back.state_dict()) == sorted(middle.state_dict())
    assert back.state_dict()["again.kernel"] is back.state_dict()["first.kernel"]
    if to == "jax":
        assert set(back.params) == {name for name, _ in middle.named_parameters()}
        assert [p.name for p in back.program.signature] == ["x"]
    np.testing.assert_allclose(back(x=x), got)


@pytest.mark.nightly
def test_keys_and_counters_and_back():
    net = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    x = np.ones((3, 4), np.float32)
    middle = fmapper.convert(net, "torch", (x,))
    back = fmapper.convert(middle, "jax", (torch.from_numpy(x),), train=True)
    got, after = back(x, mutable=True)
    np.testing.assert_allclose(got, net(x), rtol=1e-5)
    got, _ = after(x, mutable=True)
    np.testing.assert_allclose(got, net(x), rtol=1e-5)


def test_a_functor_goes_there_and_back():
    @fmapper.functor
    class Model:
        def __init__(self):
            self.w = jnp.ones((4, 2)) / 3

        def __call__(self, x):
            return jnp.tanh(x @ self.w)

    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    middle = fmapper.convert(Model(), "torch", (x,))
    back = fmapper.convert(middle, "jax", (torch.from_numpy(x),))
    assert fmapper.verify(middle, back, torch.from_numpy(x))
    np.testing.assert_allclose(back(x), Model()(x), rtol=1e-5)
