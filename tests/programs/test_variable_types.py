"""The types of the variables of NNX, there and back."""

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")


class Own(nnx.Variable):
    pass


class OwnParam(nnx.Param):
    pass


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.cache = nnx.Cache(jnp.zeros(4))
        self.lora = nnx.LoRAParam(jnp.ones(4))
        self.own = Own(jnp.ones(4))
        self.scale = OwnParam(jnp.ones(4))
        self.state = nnx.BatchStat({"a": jnp.ones(4), "b": jnp.ones(4)})

    def __call__(self, x):
        x = self.dropout(self.norm(x)) * self.own[...] + self.cache[...] + self.lora[...]
        return x * self.scale[...] + self.state["a"] - self.state["b"]


X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def types(model):
    return {
        ".".join(map(str, path)): type(variable)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def wanted():
    found = types(Net())
    state = found.pop("state")
    return found | {"state.a": state, "state.b": state}


@pytest.fixture(scope="module")
def there():
    return fmapper.convert(Net(), "torch", (X,))


@pytest.mark.nightly
@pytest.mark.parametrize("train", [False, True])
def test_there_and_back(there, train):
    back = fmapper.convert(there, "flax", (torch.from_numpy(X),), train=train)
    assert types(back) == wanted()
    assert {*types(nnx.state(back, nnx.RngState))} == {"dropout.rngs.count", "dropout.rngs.key"}
    net = Net()
    net.eval()
    back.eval()
    np.testing.assert_allclose(back(jnp.asarray(X)), net(jnp.asarray(X)), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_as_a_part_of_a_module_of_torch(there):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = there
            self.linear = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(self.inner(x))

    found = types(fmapper.convert(Around(), "flax", (torch.from_numpy(X),)))
    assert {n: t for n, t in found.items() if n.startswith("inner.")} == {
        f"inner.{name}": kind for name, kind in wanted().items()
    }
    assert found["linear.weight"] is nnx.Param


def test_files_name_types_of_flax_alone(there, tmp_path):
    there.save(tmp_path / "net.safetensors")
    program = fmapper.load_program(tmp_path / "net.safetensors")
    loaded = fmapper.convert(program, "torch")
    back = fmapper.convert(loaded, "flax", (torch.from_numpy(X),))
    found = types(back)
    back.save(tmp_path / "back.safetensors")
    assert types(type(back).load(tmp_path / "back.safetensors")) == found
    assert {n for n, kind in wanted().items() if found[n] is not kind} == {"own", "scale"}
    assert issubclass(found["scale"], nnx.Param)
    data = (tmp_path / "net.safetensors").read_bytes()
    assert b"BatchStat" in data
    (tmp_path / "net.safetensors").write_bytes(data.replace(b"BatchStat", b"os.system"))
    with pytest.raises(fmapper.ProgramFileError, match="variable_types"):
        fmapper.load_program(tmp_path / "net.safetensors")


@pytest.mark.nightly
def test_what_is_not_trained_any_more():
    there = fmapper.convert(Net(), "torch", (X,))
    there.lora.requires_grad_(False)
    back = fmapper.convert(there, "flax", (torch.from_numpy(X),))
    assert not issubclass(types(back)["lora"], nnx.Param)
