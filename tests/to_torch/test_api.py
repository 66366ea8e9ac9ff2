"""The module that `convert` gives for torch: what it refuses, its code, how it is kept."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
T = torch.from_numpy(X)


class Net(nnx.Module):
    """A child is called as a method of modules is."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.forward = nnx.Linear(8, 2, rngs=rngs)
        self.training = nnx.Param(jnp.ones(2))

    def __call__(self, x, scale=1.0, *, shift=None):
        hidden = jnp.tanh(self.first(x))
        return self.forward(hidden) * scale * self.training[...]


@pytest.fixture(scope="module")
def net():
    return Net()


@pytest.fixture
def converted(net):
    return fmapper.convert(net, "torch", (X,))


@pytest.mark.nightly
def test_names_that_modules_have_themselves(net, converted):
    assert set(converted.state_dict()) == {
        "first.kernel", "first.bias", "forward_.kernel", "forward_.bias", "training_",
    }  # fmt: skip
    assert set(converted.as_program().parameters) == set(fmapper.state(net))
    np.testing.assert_allclose(converted(T).detach(), net(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["code", "graph", "program", "_codes", "_tied", "few"])
@pytest.mark.parametrize("deep", [False, True])
def test_names_that_converted_models_have_themselves(name, deep):
    params = {name: {"w": 2 * jnp.ones(4)} if deep else 2 * jnp.ones(4)}
    model = fmapper.convert(
        (lambda p, x: x * (p[name]["w"] if deep else p[name]), params), "torch", (X,)
    )
    torch.testing.assert_close(model(T).detach(), 2 * T)
    assert model.code
    copy = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(copy(T).detach(), 2 * T)


REFUSED = {
    "shape": (lambda: (T[:2],), {}, r"x: expected shape \(3, 4\), got \(2, 4\)"),
    "dtype": (lambda: (T.double(),), {}, r"x: expected torch.float32, got torch.float64"),
    "integers": (lambda: (T.long(),), {}, r"x: expected .*, got torch.int64"),
    "NumPy": (lambda: (X,), {}, r"x is a ndarray; pass a tensor: .*fmapper.to_torch"),
    "JAX": (lambda: (jnp.asarray(X),), {}, r"x is a ArrayImpl; pass a tensor: .*fmapper.to_torch"),
    "nothing": (tuple, {}, "x is missing"),
    "static": (lambda: (T, 2.0), {}, "scale was passed, but was not among the example inputs"),
    "unknown": (lambda: (T,), {"other": 1}, "no argument 'other'"),
    "too many": (lambda: (T, 1.0, T), {}, r"args\[0\] was passed"),
    "twice": (lambda: (T,), {"x": T}, "x was passed both by position and by keyword"),
}


@pytest.mark.nightly_cases("integers", "dtype", "shape")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, converted):
    make, kwargs, match = REFUSED[name]
    with pytest.raises(fmapper.ProgramInputError, match=match):
        converted(*make(), **kwargs)


def test_defaults_may_be_given(converted):
    want = converted(T)
    for args, kwargs in (((), {"x": T}), ((T, 1.0), {}), ((T,), {"shift": None, "scale": 1.0})):
        assert torch.equal(converted(*args, **kwargs), want)


def test_a_static_value_is_asked_for(net):
    scaled = fmapper.convert(net, "torch", (X, 2.0))
    np.testing.assert_allclose(scaled(T, 2.0).detach(), 2 * net(X), rtol=1e-5, atol=1e-6)
    with pytest.raises(fmapper.ProgramInputError, match=r"scale was 2.0 in the examples.*3.0"):
        scaled(T, 3.0)
    with pytest.raises(fmapper.ProgramInputError, match="scale is missing"):
        scaled(T)


def test_the_code_can_be_read(converted):
    code = converted.code
    assert 'def forward(self, x: "f32[3, 4]")' in code
    assert "self.first.kernel" in code
    assert "hidden = jnp.tanh(self.first(x))" in code
    assert "torch.tanh(" in code
    assert "= None" not in code
    assert "No stacktrace" not in code


def test_optimizers_change_what_it_computes(converted):
    optimizer = torch.optim.SGD(converted.parameters(), 0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = converted(T).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


def test_frozen_parameters(converted):
    converted.first.requires_grad_(False)
    converted(T).sum().backward()
    assert converted.first.kernel.grad is None
    assert converted.forward_.kernel.grad is not None
    again = fmapper.convert(converted.as_program(), "torch")
    trained = {name: p.requires_grad for name, p in again.named_parameters()}
    assert not trained["first.kernel"]
    assert trained["forward_.kernel"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["to", "cast", "data"])
def test_dtypes_of_the_graph_follow(net, converted, dtype, how):
    name = str(dtype).removeprefix("torch.")
    if how == "to":
        other = copy.deepcopy(converted).to(dtype)
    elif how == "cast":
        other = fmapper.cast(converted, name)
    else:
        other = copy.deepcopy(converted)
        for p in other.parameters():
            p.data = p.data.to(dtype)
    got = other(T.to(dtype))
    assert got.dtype is dtype
    np.testing.assert_allclose(got.detach().float(), net(X), atol=5e-2)
    with pytest.raises(fmapper.ProgramInputError, match=r"got torch\.float32"):
        other(T)
    np.testing.assert_allclose(converted(T).detach(), net(X), rtol=1e-5, atol=1e-6)
    if how == "to":
        back = other.float()
        np.testing.assert_allclose(back(T).detach(), net(X), atol=5e-2)


def test_parameters_of_two_dtypes_are_refused(converted):
    converted.forward_.kernel.data = converted.forward_.kernel.data.double()
    converted.first.kernel.data = converted.first.kernel.data.double()
    with pytest.raises(fmapper.ProgramInputError, match=r"cast either all of them or none"):
        converted(T.double())


def test_walks_and_checkpoints(net, converted):
    twice = fmapper.fmap(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, converted)
    assert torch.equal(twice.first.kernel, converted.first.kernel * 2)
    assert not torch.equal(twice(T), converted(T))
    file = io.BytesIO()
    torch.save(converted.state_dict(), file)
    file.seek(0)
    twice.load_state_dict(torch.load(file))
    assert torch.equal(twice(T), converted(T))
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(T), converted(T))


@pytest.mark.nightly
def test_no_jax_is_needed_to_load_it(converted, tmp_path):
    converted.save(tmp_path / "net.safetensors")
    torch.save((T, converted(T).detach()), tmp_path / "want.pt")
    code = """
import sys
for name in ("jax", "jaxlib", "flax"):
    sys.modules[name] = None
import torch, fmapper
model = fmapper.convert(fmapper.load_program("net.safetensors"), "torch")
x, want = torch.load("want.pt")
assert torch.equal(model(x), want)
"""
    root = os.pathsep.join(p for p in sys.path if p)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


# --- errors ---------------------------------------------------------------------------------------


UNRECORDABLE = {
    "branch": (lambda x: x if x.sum() > 0 else -x, r"test_api.*branch on a value.*cond"),
    "loop": (lambda x: sum(x for _ in range(x.sum().astype(int))), "as a Python int"),
    "NumPy": (lambda x: np.sin(np.asarray(x)), "use jax.numpy"),
    "mask": (lambda x: x[x > 0], "use jnp.where"),
    "float": (lambda x: x * float(x.sum()), "only the shape is known"),
    "callback": (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3, 4), np.float32), x),
                 "pure_callback.*calls back into Python"),
    "own error": (lambda x: x.no_such_attribute, "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_what_cannot_be_recorded(name):
    function, match = UNRECORDABLE[name]
    with pytest.raises(fmapper.ConversionError, match=match):
        fmapper.convert(function, "torch", (X,))


def test_missing_operations_are_listed_whole(net):
    class Strange(nnx.Module):
        def __init__(self):
            self.inner = net

        def __call__(self, x):
            y = self.inner(x)
            with jax.named_scope("odd"):
                y = first.bind(y)
            return second.bind(y)

    import jax.extend

    made = []
    for name in ("strange_one", "strange_two"):
        primitive = jax.extend.core.Primitive(name)
        primitive.def_abstract_eval(lambda aval: aval)
        made.append(primitive)
    first, second = made
    with pytest.raises(fmapper.UnsupportedOpsError) as caught:
        fmapper.convert(Strange(), "torch", (X,))
    assert set(caught.value.ops) == {"lax::strange_one", "lax::strange_two"}
    assert "odd" in str(caught.value)
    assert 'to="torch"' in str(caught.value)

    @fmapper.lowering("lax::strange_one", "lax::strange_two")
    def strange(x):
        return x * 3

    converted = fmapper.convert(Strange(), "torch", (X,), check=False)  # JAX cannot run it
    np.testing.assert_allclose(converted(T).detach(), 9 * net(X), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_a_conversion_can_be_verified(net):
    wrong = fmapper.convert(net, "torch", (X,))
    assert fmapper.verify(net, wrong, X)
    with torch.no_grad():
        wrong.first.bias += 1
    report = fmapper.verify(net, wrong, X)
    assert not report
    assert "tanh" in str(report.first) or "add" in str(report.first)
    assert report.exact[0] < 1e-6
    assert report.exact[1] > 1e-2


@pytest.mark.nightly
def test_the_first_operation_that_differs_is_found_behind_others_that_became_one():
    """Batch norm is one call in torch and ten in JAX; relu is a function with its own derivative.

    What `verify` names is the first operation of JAX whose result the converted model has and has
    otherwise.
    """
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(
        nnx.Conv(3, 4, (3, 3), rngs=rngs),
        nnx.BatchNorm(4, use_running_average=True, rngs=rngs),
        nnx.relu,
        nnx.Conv(4, 4, (1, 1), rngs=rngs),
    )
    net.layers[0].bias[...] += 0.5
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
    for layer, name, op in [
        (0, "kernel", "conv_general_dilated"),
        (0, "bias", "add"),
        (1, "scale", "add"),
        (3, "kernel", "conv_general_dilated"),
    ]:
        wrong = fmapper.convert(net, "torch", (x,))
        with torch.no_grad():
            wrong.get_parameter(f"layers.{layer}.{name}").mul_(1.5)
        first = fmapper.verify(net, wrong, x).first
        assert f"lax::{op} " in first.path
        assert first.error > 100 * first.allowed
        line = {0: "linear.py", 1: "normalization.py", 3: "linear.py"}[layer]
        assert line in first.path


def test_constants_and_random_state_are_pickled():
    import pickle

    table = np.arange(6, dtype=np.float32).reshape(2, 3)

    class Noisy(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.dropout(x) @ jnp.asarray(table) + jnp.eye(4, 3)

    model = fmapper.convert(Noisy(), "torch", (np.ones((4, 2), np.float32),))
    again = pickle.loads(pickle.dumps(model))
    assert again.state_dict().keys() == model.state_dict().keys()
    x = torch.ones(4, 2)
    for _ in range(2):  # the state of the generator has come along
        torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_a_model_with_loops_of_random_numbers_is_saved_by_torch():
    import io

    def walk(x, key):
        def step(c, key):
            return c + jax.random.normal(key, (3,)), None

        return jax.lax.scan(step, x, jax.random.split(key, 5))[0]

    model = fmapper.convert(walk, "torch", (np.ones(3, np.float32), jax.random.key(0)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    key = torch.tensor([0, 1], dtype=torch.uint32)
    torch.testing.assert_close(again(torch.ones(3), key), model(torch.ones(3), key))


# torch.export.load of torch 2.11 says so of the file that it has read
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_model_that_changes_its_state_is_exported_and_loaded():
    import io

    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    x = torch.arange(6.0).reshape(2, 3)
    model = fmapper.convert(layer, "torch", (x,)).train()
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(x), model(x))
    torch.testing.assert_close(loaded.state_dict()["mean"], model.mean)


def test_parts_are_iterated_over():
    layers = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    model = fmapper.convert(layers, "torch", (np.ones((1, 2), np.float32),))
    assert [tuple(part.kernel.shape) for part in model.layers] == [(2, 2), (2, 2)]


@pytest.mark.nightly
def test_many_models_are_compiled_in_one_process():
    torch._dynamo.reset()
    for n in range(1, 13):
        layer = nnx.Linear(n, 2, rngs=nnx.Rngs(0))
        x = torch.ones(3, n)
        model = fmapper.convert(layer, "torch", (x,))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))
