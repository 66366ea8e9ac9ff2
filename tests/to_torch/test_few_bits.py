"""Integers of 4 and 2 bits in models of JAX: in torch they are held in bytes."""

import operator

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")

X = np.asarray(
    [[-100, -9.7, -8.5, -1.6, 0.4, 1.5], [7.6, 8.2, 100, np.nan, np.inf, -np.inf]], np.float32
)
INTEGERS = np.asarray([[-130, -9, 7, 8, 15, 16, 17, 300]], np.int32)
DTYPES = ["int4", "uint4", "int2", "uint2"]


def agree(function, *inputs):
    model = fmapper.convert(function, "torch", inputs)
    got = model(*(torch.from_numpy(x.copy()) for x in inputs))
    want = function(*map(jnp.asarray, inputs))
    held = {"int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8"}
    want = np.asarray(want.astype(held.get(str(want.dtype), want.dtype)))
    assert str(got.dtype).removeprefix("torch.") == want.dtype.name
    np.testing.assert_array_equal(got.detach().numpy(), want)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts(dtype):
    agree(lambda x: x.astype(dtype).astype(jnp.float32), X)
    agree(lambda x: x.astype(dtype).astype(jnp.int32), INTEGERS)
    agree(lambda x: x.astype(dtype), INTEGERS)
    agree(lambda x: (x > 0).astype(dtype).astype(jnp.float32), X)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", DTYPES[:2])  # JAX computes with few others
@pytest.mark.parametrize(
    "operation",
    [
        operator.add, operator.sub, operator.mul, operator.and_, operator.xor,
        lambda a, b: a.T.reshape(4, 8), lambda a, b: -a,
        lambda a, b: ~a, lambda a, b: jnp.where(a > b, a, b), jnp.minimum, lambda a, b: a << b,
        lambda a, b: jnp.dot(a, b.T), lambda a, b: a[:, ::-1],
        lambda a, b: a[jnp.argmax(b), 1:], lambda a, b: jnp.sort(a),
        lambda a, b: jax.lax.scan(lambda c, x: (c + x, c * x), a[0], b)[1],
    ],
)  # fmt: skip
def test_operations(dtype, operation):
    a = np.arange(-16, 16, dtype=np.int32).reshape(2, 16)
    b = (np.arange(32, dtype=np.int32) % 5).reshape(2, 16)
    agree(lambda a, b: operation(a.astype(dtype), b.astype(dtype)), a, b)


@pytest.mark.nightly
def test_constants_and_numbers():
    weight = jnp.asarray([[-8, 7, 3], [1, 0, -1]], jnp.int4)
    model = agree(
        lambda x: x @ (weight.astype(jnp.float32) * 0.5) + jnp.int4(-3).astype(jnp.float32),
        np.ones((4, 2), np.float32),
    )
    assert torch.int8 in {b.dtype for b in model.buffers()}


class Quantised(nnx.Module):
    def __init__(self):
        values = np.random.default_rng(0).integers(-8, 8, (4, 3))
        self.weight = nnx.Variable(jnp.asarray(values, jnp.int4))
        self.scale = nnx.Param(jnp.asarray([0.1, 0.2, 0.3]))

    def __call__(self, x):
        return x @ (self.weight[...].astype(jnp.float32) * self.scale[...])


def test_a_layer_of_weights_in_four_bits(tmp_path):
    net, x = Quantised(), np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    model = fmapper.convert(net, "torch", (x,))
    given = torch.from_numpy(x)
    np.testing.assert_allclose(model(given).detach(), net(x), rtol=1e-5, atol=1e-6)
    assert model.state_dict()["weight"].dtype is torch.int8
    model(given).sum().backward()
    want = nnx.grad(lambda net: net(x).sum())(net)["scale"][...]
    np.testing.assert_allclose(model.scale.grad, want, rtol=1e-5)
    model.save(tmp_path / "net.safetensors")
    loaded = type(model).load(tmp_path / "net.safetensors")
    torch.testing.assert_close(loaded(given), model(given))
    assert fmapper.verify(net, model, x)


@pytest.mark.nightly_cases("jax")
@pytest.mark.parametrize("to", ["jax", "flax"])
def test_they_come_back_as_what_they_were(to, tmp_path):
    net, x = Quantised(), np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    there = fmapper.convert(net, "torch", (x,))
    there.save(tmp_path / "there.safetensors")
    there = type(there).load(tmp_path / "there.safetensors")
    given = torch.from_numpy(x)
    outer = torch.nn.Sequential(there, torch.nn.Identity())
    for module, name in ((there, "weight"), (outer, "0.weight")):
        back = fmapper.convert(module, to, (given,))
        arrays = fmapper.state(back)
        weight = next(a for path, a in arrays.items() if name in path.removesuffix(".value"))
        assert weight.dtype == jnp.int4
        np.testing.assert_array_equal(weight, net.weight[...])
        np.testing.assert_allclose(back(x), net(x), rtol=1e-6)
        if to == "jax":
            np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(back, x), net(x), rtol=1e-6)
        back.save(tmp_path / "back.safetensors")
        again = fmapper.convert(fmapper.load_program(tmp_path / "back.safetensors"), to)
        assert jnp.dtype("int4") in {a.dtype for a in fmapper.fleaves(fmapper.state(again))}
        np.testing.assert_array_equal(again(x), back(x))
        once_more = fmapper.convert(back, "torch", (x,))
        assert torch.int8 in {b.dtype for b in once_more.buffers()}
        torch.testing.assert_close(once_more(given), there(given))


def test_integers_that_have_become_larger_do_not_come_back():
    net, x = Quantised(), np.ones((2, 4), np.float32)
    there = fmapper.convert(net, "torch", (x,))
    there.weight.fill_(100)
    with pytest.raises(fmapper.LossyCastError, match=r"weight.*int4.*int8"):
        fmapper.convert(there, "jax", (torch.from_numpy(x),), check=False)


class Counting(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(3, jnp.int4))

    def __call__(self, x):
        self.count[...] = self.count[...] + jnp.int4(1)
        return x + self.count[...].astype(jnp.float32)


def test_those_that_a_call_changes():
    x = np.ones(3, np.float32)
    there = fmapper.convert(Counting(), "torch", (x,))
    back = fmapper.convert(there, "jax", (torch.from_numpy(x),))
    after = back.call((x,), {}).model
    assert [b.tolist() for b in after.buffers.values()] == [[1, 1, 1]]
    assert all(b.dtype == jnp.int4 for b in after.buffers.values())


def test_an_input_of_four_bits():
    x = jnp.asarray([[-8, 7], [3, 1]], jnp.int4)
    model = fmapper.convert(lambda x: x.astype(jnp.float32) * 2, "torch", (x,))
    torch.testing.assert_close(
        model(torch.tensor([[-8, 7], [3, 1]], dtype=torch.int8)),
        torch.tensor([[-16.0, 14.0], [6.0, 2.0]]),
    )


def test_what_bytes_do_not_stand_for_is_refused():
    with pytest.raises(fmapper.ConversionError, match=r"scatter.*use int8 instead"):
        fmapper.convert(lambda x: x.astype(jnp.int4).at[0].add(jnp.int4(7)), "torch", (INTEGERS,))
    with pytest.raises(fmapper.ConversionError, match=r"shift_right_logical.*use int8"):
        fmapper.convert(
            lambda x: jax.lax.shift_right_logical(x.astype(jnp.int4), jnp.int4(1)),
            "torch",
            (INTEGERS,),
        )
