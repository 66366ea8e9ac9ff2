"""Models of JAX as source code for torch: the files run, and compute what the models do."""

from __future__ import annotations

import ast
import operator
import sys
import types

import numpy as np
import pytest

import fmapper

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
jnp = jax.numpy

from fmapper.translation.source import translate  # noqa: E402
from fmapper_adapters.torch.translation import tidy  # noqa: E402


class Attention(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        b, t, d = x.shape
        split = lambda y: y.reshape(b, t, self.heads, d // self.heads)  # noqa: E731
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d // self.heads)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        weights = jax.nn.softmax(scores, axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d)
        return self.out(y)


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, 2, rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        hidden = nnx.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))
        self.blocks = nnx.List([Block(8, rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class Dense(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x):
        hidden = linen.silu(linen.Dense(self.features)(x))
        return linen.LayerNorm()(linen.Dense(x.shape[-1])(hidden))


def load(source):
    """Runs a file; returns it as a module."""
    module = types.ModuleType("written")
    sys.modules["written"] = module
    exec(compile(source.code, "written.py", "exec"), module.__dict__)
    return module


def proved(model, *args, shapes="auto"):
    source, program, proof = translate(model, "torch", args, {}, shapes, proved=True)
    assert proof, str(proof)
    return source, program


def decoder():
    model = Decoder(nnx.Rngs(0))
    model.eval()
    return model, jnp.arange(8).reshape(2, 4)


@pytest.mark.nightly
def test_a_decoder_is_written_as_a_person_would():
    model, ids = decoder()
    source, _ = proved(model, ids)
    code = source.code
    classes = [one.name for one in ast.parse(code).body if isinstance(one, ast.ClassDef)]
    assert classes == ["Attention", "Block", "Decoder"]


@pytest.mark.nightly
def test_sizes_of_a_file_vary():
    model, ids = decoder()
    source, program = proved(model, ids)
    written = load(source)
    net = written.Decoder()
    written.load_weights(net, fmapper.to_torch(dict(program.parameters)))
    longer = jnp.arange(21).reshape(3, 7) % 11
    wanted = model(longer)
    found = net(torch.from_numpy(np.array(longer)))
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_each_part_is_called_alone():
    model, ids = decoder()
    net = fmapper.convert(model, "torch", (ids,), structure=True)
    x = jax.random.normal(jax.random.key(1), (2, 4, 8))
    given = torch.from_numpy(np.array(x))
    for ours, theirs in ((net.blocks[1], model.blocks[1]), (net.norm, model.norm),
                         (net.blocks[0].attention, model.blocks[0].attention)):  # fmt: skip
        np.testing.assert_allclose(ours(given).detach(), theirs(x), rtol=1e-5, atol=1e-5)
    assert isinstance(net.blocks[0].up, torch.nn.Linear)


@pytest.mark.nightly
def test_attention_of_flax_has_linear_layers():
    """Its kernels have dimensions for the heads; those of `nn.Linear` have them as one."""
    attention = linen.MultiHeadDotProductAttention(num_heads=2, out_features=5)
    x = jax.random.normal(jax.random.key(0), (2, 4, 6))
    variables = attention.init(jax.random.key(1), x)
    variables = jax.tree.map(lambda x: x + 0.1, variables)  # its biases are zero
    source, program, proof = translate((attention, variables), "torch", (x,), {}, proved=True)
    assert proof, str(proof)
    net = fmapper.convert((attention, variables), "torch", (x,), structure=True)
    query = next(m for name, m in net.named_modules() if name.endswith("query.linear"))
    kernel = np.asarray(variables["params"]["query"]["kernel"])  # features, heads, size
    np.testing.assert_array_equal(query.weight.detach(), kernel.reshape(6, 6).T)
    state = fmapper.to_torch(dict(program.parameters))
    wrong = {**state, "query.kernel": torch.zeros(6, 2, 2)}
    with pytest.raises(ValueError, match="shape"):
        load(source).load_weights(net, wrong)


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return Dense(3)(linen.Dropout(0.5, deterministic=not train)(Dense(4)(x)))


@pytest.mark.nightly
def test_a_file_takes_no_keys_for_dropout():
    x = jnp.ones((5, 4))
    model = Dropped()
    variables = model.init(jax.random.key(0), x, train=False)
    kwargs = {"train": True, "rngs": {"dropout": jax.random.key(1)}}
    _source, _, proof = translate(
        (model, variables), "torch", (x,), kwargs, train=True, proved=True
    )
    assert proof, str(proof)
    assert {what.split()[0] for what in proof.errors} == {"eval", "train"}


@pytest.mark.nightly
def test_a_model_takes_dicts_and_tuples():
    class Graph(nnx.Module):
        def __init__(self, rngs):
            self.node = nnx.Linear(3, 4, rngs=rngs)
            self.edge = nnx.Linear(2, 4, rngs=rngs)

        def __call__(self, graph, scale=None):
            messages = self.node(graph["nodes"])[graph["ends"][0]] + self.edge(graph["edges"])
            first, (second,) = scale
            return {"messages": messages * first, "total": (messages.sum(0) * second,)}

    graph = {
        "nodes": jnp.ones((5, 3)),
        "edges": jnp.ones((4, 2)),
        "ends": (jnp.array([0, 1, 2, 4]), None),
    }
    scale = jnp.float32(2), [jnp.arange(4.0)]
    kwargs = {"scale": scale}
    _, _, proof = translate(Graph(nnx.Rngs(0)), "torch", (graph,), kwargs, proved=True)
    assert proof, str(proof)


@pytest.mark.nightly
def test_the_first_of_the_last_dimension_are_a_slice_of_it():
    def function(x):
        return jax.lax.approx_max_k(x, 2)

    _, _, proof = translate(function, "torch", (jnp.arange(12.0).reshape(3, 4),), proved=True)
    assert proof, str(proof)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draws_are_those_of_jax(dtype):
    """Bit for bit but for what is computed of them: the file has threefry in it."""

    def function(params, x, *, key):
        first, second = jax.random.split(key)
        noise = jax.random.normal(first, x.shape) * params["scale"]
        kept = jax.random.bernoulli(second, 0.5, x.shape)
        drawn = jax.random.uniform(jax.random.fold_in(key, 3), (3,), dtype)
        return jnp.where(kept, x + noise, 0), drawn.astype("float32")

    params = {"scale": jnp.full(3, 0.5)}
    _source, _, proof = translate(
        (function, params), "torch", (jnp.ones((4, 3)),), {"key": jax.random.key(7)}, proved=True
    )
    assert proof, str(proof)


@pytest.mark.nightly
def test_linen_keys_that_are_drawn_by_are_arguments():
    class Noisy(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), (3,))

    x = jnp.ones((2, 4))
    rngs = {"params": jax.random.key(0), "noise": jax.random.key(1)}
    variables = Noisy().init(rngs, x)
    kwargs = {"rngs": {"noise": jax.random.key(2)}}
    _source, _, proof = translate((Noisy(), variables), "torch", (x,), kwargs, proved=True)
    assert proof, str(proof)


@pytest.mark.nightly
def test_lists_of_arrays():
    def function(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["w"] * layer["scales"][0] + layer["scales"][1])
        return x

    key = jax.random.key(0)
    layer = {"w": jax.random.normal(key, (3, 3)), "scales": [jnp.ones(3), jnp.arange(3.0)]}
    params = [layer, jax.tree.map(lambda x: x + 0.5, layer)]
    _source, _, proof = translate((function, params), "torch", (jnp.ones((2, 3)),), proved=True)
    assert proof, str(proof)


@pytest.mark.nightly
def test_what_has_no_gradient_in_jax_is_proved_by_its_outputs():
    def function(params, x):
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + params["w"] ** 2, x)

    _, _, proof = translate((function, {"w": jnp.ones(3)}), "torch", (jnp.zeros(3),), proved=True)
    assert proof
    assert [*proof.errors] == ["eval outputs"]


@pytest.mark.nightly
def test_a_function_without_slope_is_proved():
    def function(params, x):
        return jnp.where(x @ params["w"] > 0, 1.0, 0.0)

    given = (function, {"w": jnp.arange(6.0).reshape(2, 3) - 2}), "torch", (jnp.ones((4, 2)),)
    _, _, proof = translate(*given, proved=True)
    assert proof, str(proof)
    assert "eval gradients" in proof.errors


def test_a_squeeze_of_several_dimensions_behind_an_index_stays():
    graph, x = torch.fx.Graph(), torch.randn(2, 3, 4)
    given = graph.placeholder("x")
    part = graph.call_function(operator.getitem, (given, (slice(0, 1), slice(None), slice(0, 1))))
    squeezed = graph.call_method("squeeze", (part, (0, 2)))
    graph.output(squeezed)
    for node, value in ((given, x), (part, x[:1, :, :1]), (squeezed, x[0, :, 0])):
        node.meta["val"] = value
    tidy.tidy(graph)
    found = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    torch.testing.assert_close(found, x[0, :, 0])


@pytest.mark.nightly
def test_a_state_of_equinox_is_given_anew_to_each_call():
    eqx = pytest.importorskip("equinox")

    class Counter(eqx.nn.StatefulLayer):
        index: eqx.nn.StateIndex
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.index = eqx.nn.StateIndex(jnp.zeros(3))
            self.linear = eqx.nn.Linear(3, 2, key=key)

        def __call__(self, x, state):
            mean = 0.9 * state.get(self.index) + 0.1 * x
            return self.linear(x - mean), state.set(self.index, mean)

    model, state = eqx.nn.make_with_state(Counter)(jax.random.key(0))
    with pytest.warns(fmapper.ConversionWarning, match="fields have no names"):
        _, _, proof = translate(model, "torch", (jnp.arange(3.0), state), proved=True)
    assert proof, str(proof)


class Trained(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.norm(self.linear(x))))


@pytest.mark.nightly
def test_dropout_and_statistics_of_batches_are_layers():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    source, program, proof = translate(Trained(nnx.Rngs(0)), "torch", (x,), {}, proved=True)
    assert {what.split()[0] for what in proof.errors} == {"eval", "train"}
    assert proof, str(proof)
    model, written = Trained(nnx.Rngs(0)), load(source)
    net = written.Trained()
    written.load_weights(net, fmapper.to_torch({**program.parameters, **program.buffers}))
    model.train(), net.train()
    model(x), net(torch.from_numpy(np.array(x)))
    for ours, theirs in ((net.norm.mean, model.norm.mean), (net.norm.var, model.norm.var)):
        np.testing.assert_allclose(ours, theirs[...], rtol=1e-5, atol=1e-6)


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.kept = nnx.Variable(jnp.zeros(4))

    def __call__(self, x):
        y = self.linear(x) * (1 + self.calls[...])
        self.calls[...] += 1
        self.kept[...] = y.mean(0)
        return y + self.kept[...]


@pytest.mark.nightly
def test_what_a_call_keeps_is_kept():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    model = Counting(nnx.Rngs(0))
    net = fmapper.convert(model, "torch", (x,), structure=True)
    for _ in range(3):
        wanted = model(x)
        found = net(torch.from_numpy(np.array(x)))
        np.testing.assert_allclose(found.detach(), wanted, rtol=1e-5, atol=1e-6)
    assert int(net.calls) == 3


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        kernel = self.linear.kernel[...]
        self.linear.kernel[...] = kernel / jnp.linalg.norm(kernel)
        return self.linear(x)


@pytest.mark.nightly
def test_a_call_that_changes_parameters_is_refused():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    with pytest.raises(fmapper.ConversionError, match=r"changes the parameter linear\.kernel"):
        fmapper.source(Normed(nnx.Rngs(0)), "torch", (x,))


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        if not self.deterministic:
            x = x + jax.random.normal(self.noise.rngs(), x.shape)
        return self.linear(x)


@pytest.mark.nightly
def test_what_training_draws_otherwise_is_left_to_evaluation():
    x = jax.random.normal(jax.random.key(0), (5, 4))
    source, _, proof = translate(Noisy(nnx.Rngs(0)), "torch", (x,), {}, proved=True)
    assert source.modes == ("eval",)
    assert proof, str(proof)


@pytest.mark.nightly
def test_a_parts_marks_are_not_in_the_program():
    model, ids = decoder()
    program = fmapper.convert(model, "torch", (ids,)).program
    assert not any("fmapper_part" in call.op for call in program.graph.calls)


@pytest.mark.nightly
def test_sizes_that_cannot_vary_leave_no_logs_of_torch(capfd, caplog):
    """The sizes of a picture that is flattened are fixed, after an attempt without."""

    class Flat(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.avg_pool(linen.Conv(2, (3, 3))(x), (2, 2), (2, 2))
            return linen.Dense(3)(x.reshape(x.shape[0], -1))

    net, x = Flat(), np.ones((2, 8, 8, 1), np.float32)
    fmapper.source((net, net.init(jax.random.key(0), x)), "torch", (x,))
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    assert "failed while" not in capfd.readouterr().err
