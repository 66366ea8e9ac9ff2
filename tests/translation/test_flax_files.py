"""Models of torch as files for Flax NNX: what they compute, how they look, what is refused."""

from __future__ import annotations

import ast
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402


class Block(nn.Module):
    def __init__(self, dim, hidden, rate=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop = nn.Dropout(rate)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x, scale=1.0):
        residual = x
        x = self.norm(x)
        x = self.drop(self.act(self.up(x)))
        return residual + self.down(x) * scale, None


class Net(nn.Module):
    def __init__(self, hidden=(16, 16, 16)):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, size) for size in hidden)
        self.again = self.blocks[0]
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 3))

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        x, _ = self.again(x)
        x = self.norm(x)
        return self.head(x), self.blocks[0].up.weight.sum()


def run(code, name, module):
    """Runs a file and returns its model with the arrays of a module."""
    space = {"__name__": "translated"}
    exec(compile(code, "translated.py", "exec"), space)
    model = space[name](rngs=nnx.Rngs(0))
    state = {key: value.detach().numpy() for key, value in module.state_dict().items()}
    space["load_weights"](model, state)
    model.eval()
    return model


def same(found, wanted):
    all_found = [x for x in fmapper.fleaves(found) if x is not None]
    all_wanted = [x for x in fmapper.fleaves(wanted) if x is not None]
    assert all_found
    for mine, theirs in zip(all_found, all_wanted, strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def written(net):
    return translate(net, "flax", (torch.randn(5, 8),))[0]


@pytest.mark.nightly
def test_it_computes_the_same_for_other_sizes(net, written):
    model = run(written.code, "Net", net)
    for batch in (2, 7):
        x = torch.randn(batch, 8)
        same(model(x.numpy()), net(x))


@pytest.mark.nightly
def test_it_looks_like_the_model(written):
    classes = [n for n in ast.parse(written.code).body if isinstance(n, ast.ClassDef)]
    assert [c.name for c in classes if c.name in ("Block", "Net", "Block_2")] == ["Block", "Net"]
    assert written.layers[0] == written.layers[1]
    assert not written.dissolved


@pytest.mark.nightly
def test_parts_can_be_called_alone(net, written):
    model = run(written.code, "Net", net)
    x = torch.randn(4, 8)
    same(model.blocks[1](x.numpy()), net.blocks[1](x))
    same(model.blocks[2].up(x.numpy()), net.blocks[2].up(x))
    assert isinstance(model.blocks[2].up, nnx.Linear)


@pytest.mark.nightly
def test_convert_gives_the_model_of_that_source(net):
    x = torch.randn(4, 8)
    model = fmapper.convert(net, "flax", (x,), structure=True)
    same(model(x.numpy()), net(x))
    assert nnx.jit(lambda m, x: m(x))(model, x.numpy())[0].shape == (4, 3)


@pytest.mark.parametrize("option", [{"rngs": nnx.Rngs(0)}, {"precision": "highest"}])
def test_options_that_plain_code_has_not_are_refused(option):
    with pytest.raises(fmapper.ConversionError, match=f"does not accept {next(iter(option))}"):
        fmapper.convert(nn.Linear(2, 2), "flax", (torch.ones(1, 2),), structure=True, **option)


@pytest.mark.nightly
def test_a_model_of_jax_is_not_written_for_jax():
    with pytest.raises(fmapper.ConversionError, match="it cannot be translated to flax"):
        fmapper.source(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "flax", (torch.ones(1, 2),))


@pytest.mark.nightly
def test_a_tie_between_an_embedding_and_a_head_stays_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    module = Tied().eval()
    ids = torch.arange(6).reshape(2, 3)
    code = translate(module, "flax", (ids,))[0].code
    model = run(code, "Tied", module)
    same(model(ids.numpy()), module(ids))
    assert [x.shape for x in jax.tree.leaves(nnx.state(model, nnx.Param))] == [(7, 4)]


@pytest.mark.nightly
def test_convolutions_keep_their_layout():
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()
    x = torch.randn(2, 3, 9, 9)
    code = translate(module, "flax", (x,))[0].code
    model = run(code, "Sequential_2" if "class Sequential_2" in code else "Sequential", module)
    same(model(x.numpy()), module(x))


@pytest.mark.nightly
def test_a_proof_runs_in_a_process_without_torch():
    torch.manual_seed(0)
    module = Net()
    _source, _, proof = translate(module, "flax", (torch.randn(6, 8),), train=True, proved=True)
    assert proof, proof
    assert {what.split()[0] for what in proof.errors} == {"eval", "train"}


@pytest.mark.nightly
def test_a_wrong_file_has_no_proof(monkeypatch):
    from fmapper_adapters.jax.translation import layers

    honest = layers._linear

    def without_bias(site):
        layer = honest(site)
        if layer is None:
            return None
        made = ast.parse(ast.unparse(layer.made).replace("rngs=rngs", "use_bias=False, rngs=rngs"))
        kept = {k: v for k, v in layer.arrays.items() if v[0] == "kernel"}
        given = layer.inputs, layer.output, kept, layer.kind, layer.name
        return layers.Layer(made.body[0].value, *given)

    monkeypatch.setitem(layers._LAYERS, "linear", without_bias)
    module = nn.Linear(3, 2)
    proof = translate(module, "flax", (torch.randn(4, 3),), proved=True)[2]
    assert proof.errors["eval outputs"] > 1e-3
    assert not proof


@pytest.mark.nightly
def test_nothing_of_the_model_is_run_by_its_file(tmp_path):
    bad = 'x"]\nimport os; os.environ["FMAPPER_RAN"] = "1" #'

    class Named(nn.Module):
        def forward(self, x):
            return x @ self.w + 1

    Named.__name__ = Named.__qualname__ = Named.__module__ = bad
    module = Named()
    module.w = nn.Parameter(torch.ones(2, 2))
    code = translate(module, "flax", (torch.randn(3, 2),), dynamic_shapes=None)[0].code
    ast.parse(code)
    file = tmp_path / "net.py"
    file.write_text(code + "\nimport os\nassert 'FMAPPER_RAN' not in os.environ\n")
    subprocess.run([sys.executable, str(file)], check=True)


def test_a_model_that_nobody_wrote_has_no_source():
    with pytest.raises(fmapper.ConversionError, match="structure=True"):
        fmapper.source(nn.Linear(2, 2))


@pytest.mark.nightly
def test_a_branch_by_values_is_checked():
    class Checked(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    module, x = Checked(), torch.ones(3)
    code = translate(module, "flax", (x,), dynamic_shapes=None)[0].code
    model = run(code, "Checked", module)
    same(model(x.numpy()), module(x))
    with pytest.raises(ValueError, match="the other branch"):
        model(-x.numpy())
    with pytest.raises(Exception, match="the other branch"):
        np.asarray(nnx.jit(lambda m, x: m(x))(model, -x.numpy()))


def test_a_branch_by_sizes_is_checked():
    class Branch(nn.Module):
        def forward(self, x, unused, y):
            return (x + 1 if x.shape[0] % 2 else x) + y, unused

    module, given = Branch(), (torch.ones(3, 2), torch.zeros(1), torch.ones(3, 2))
    model = run(translate(module, "flax", given)[0].code, "Branch", module)
    same(model(*(x.numpy() for x in given)), module(*given))
    x = np.ones((5, 2), np.float32)
    assert model(x, x[0, :1], x)[0].shape == (5, 2)
    with pytest.raises(ValueError, match=r"x.shape\[0\] % 2 != 0"):
        model(x[:4], x[0, :1], x[:4])
    with pytest.raises(ValueError, match=r"\) is not \("):
        model(x, x[0, :1], x[:1])


def test_sizes_that_are_fixed_are_checked():
    module = nn.ReLU()
    model = run(
        translate(module, "flax", (torch.ones(3, 2),), dynamic_shapes=None)[0].code, "ReLU", module
    )
    with pytest.raises(ValueError, match=r"\) is not \("):
        model(np.ones((4, 2), np.float32))


@pytest.mark.nightly
def test_a_part_of_an_array_outlives_the_name_of_the_array():
    class Attend(nn.Module):
        def forward(self, x):
            x = x.reshape(2, 3, 4).permute(1, 0, 2)
            q, k, v = x[0], x[1], x[2]
            x = q * 2 @ k.T
            x = x + x.softmax(-1)
            return x @ v

    module, x = Attend(), torch.randn(2, 12)
    code = translate(module, "flax", (x,), dynamic_shapes=None)[0].code
    same(run(code, "Attend", module)(x.numpy()), module(x))


@pytest.mark.nightly
def test_embeddings_that_share_their_weight_are_one():
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 4)

        def forward(self, ids):
            return self.head(self.embed(ids))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Embedding(7, 4)
            self.left, self.right = Side(), Side()
            self.left.embed.weight = self.right.embed.weight = self.shared.weight

        def forward(self, ids):
            return self.left(ids) - self.right(ids)

    module, ids = Both().eval(), torch.arange(6).reshape(2, 3)
    written = translate(module, "flax", (ids,), dynamic_shapes=None)[0]
    assert written.layers[0] == written.layers[1]
    model = run(written.code, "Both", module)
    same(model(ids.numpy()), module(ids))
    assert model.left.embed is model.right.embed
    assert isinstance(model.left.embed, nnx.Embed)


class Steep(nn.Module):
    """Two rows make norms +1 and -1, whichever is larger: roundings grow."""

    def __init__(self, depth):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(depth))

    def forward(self, x):
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x)).relu()
        return 400 * x


@pytest.mark.nightly
def test_a_model_that_multiplies_roundings_is_compared_in_double_precision():
    torch.manual_seed(1)
    modules = Steep(6), nn.Linear(6, 6)
    x = torch.randn(2, 6)
    steep, even = (
        translate(module, "flax", (x,), train=True, proved=True)[2] for module in modules
    )
    assert even, even
    assert steep, steep
    assert (steep.double, even.double) == (True, False)
    assert max(steep.errors.values()) < 1e-9
    assert float(steep.data["train.rate"]) == float(even.data["train.rate"]) == 0.1


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return 1e4 * self.linear(x) ** 3


@pytest.mark.nightly
def test_steps_of_a_model_that_leaves_the_numbers_are_small_enough_to_be_compared():
    torch.manual_seed(1)
    proof = translate(Cubed(), "flax", (torch.randn(2, 6),), train=True, proved=True)[2]
    assert proof, proof
    assert float(proof.data["train.rate"]) < 0.1
    assert np.isfinite(proof.data["train.after.linear.weight"]).all()


@pytest.mark.nightly
def test_statistics_of_batches_after_steps_are_those_of_the_model():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.linear(x))

    _source, _, proof = translate(
        Normed(), "flax", (torch.randn(8, 3),), dynamic_shapes=None, train=True, proved=True
    )
    assert {"train.after.norm.running_mean", "train.after.norm.running_var"} <= {*proof.data}
    assert proof, proof


@pytest.mark.nightly
def test_a_model_may_be_as_far_off_as_it_is_from_itself_and_no_further():
    from fmapper.verification.files.proof import Proof

    errors = {"train outputs": 3e-4, "train gradients": 2e-3}
    assert not Proof(errors)
    assert not Proof(errors, {"train outputs": 1e-4, "train gradients": 4e-4})
    steep = Proof(errors, {"train outputs": 1e-4, "train gradients": 6e-4})
    assert steep
    assert "a rounding of its weights: 1.0e-04" in str(steep)
    assert not Proof({"train outputs": 0.5}, {"train outputs": 0.5}), "that says nothing"
    assert Proof({"eval outputs": 1e-6}, {"eval outputs": 0.5})
    torch.manual_seed(0)
    own = translate(Steep(4), "flax", (torch.randn(2, 6),), train=True, proved=True)[2].own
    assert 1e-13 < own["eval outputs"] < 1e-9  # that of weights in double precision
    assert set(own) == {
        f"{m} {w}" for m in ("eval", "train") for w in ("outputs", "gradients", "steps")
    }


@pytest.mark.nightly
def test_fields_of_results_have_names_that_a_named_tuple_takes():
    @fmapper.functor
    class Cache:
        def __init__(self, keys):
            self._keys, self.keys, self._0 = keys, 2 * keys, keys.sum()

    class Cached(nn.Module):
        def forward(self, x):
            return Cache(x + 1)

    module, x = Cached(), torch.ones(2, 3)
    code = translate(module, "flax", (x,), dynamic_shapes=None)[0].code
    found = run(code, "Cached", module)(x.numpy())
    assert found._fields == ("keys", "keys_2", "item_0")
    np.testing.assert_array_equal(found.keys_2, 4 * np.ones((2, 3)))


@fmapper.functor
class Kept:
    def __init__(self, first=None, second=None):
        self.first, self.second = first, second


class Keeps(nn.Module):
    """Keeps its result in an object that it returns, as layers do with their cache."""

    def __init__(self, field):
        super().__init__()
        self.linear, self.field = nn.Linear(3, 3), field

    def forward(self, x, kept):
        x = self.linear(x)
        setattr(kept, self.field, x * 2)
        return x.tanh(), kept


class KeepsAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Keeps("first"), Keeps("second")])

    def forward(self, x):
        kept = Kept()
        for layer in self.layers:
            x, kept = layer(x, kept)
        return x, kept


@pytest.mark.nightly
def test_what_other_parts_have_put_into_a_result_is_theirs():
    torch.manual_seed(0)
    module, x = KeepsAll(), torch.randn(2, 3)
    source, _, proof = translate(module, "flax", (x,), proved=True)
    assert proof
    found, wanted = run(source.code, "KeepsAll", module)(x.numpy()), module(x)
    same(found, wanted)
    assert len(fmapper.fleaves(found)) == 3


@pytest.mark.nightly
def test_a_model_that_gives_more_in_evaluation_is_written_for_that():
    from fmapper.translation.source import translate_proved

    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            x = self.linear(x)
            return x if self.training else (x, x.sum())

    source, proof, reason = translate_proved(Caches(), "jax", (torch.randn(2, 3),))
    assert proof
    assert source.modes == ("eval",)
    assert "eval outputs inf" in reason
    source, proof, reason = translate_proved(Caches(), "flax", (torch.randn(2, 3),))
    assert proof
    assert (source.modes, reason) == (("eval", "train"), "")
    source, proof, reason = translate_proved(nn.Linear(3, 3), "flax", (torch.randn(2, 3),))
    assert proof
    assert source.modes == ("eval", "train")
    assert not reason


class CallsItSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.self = nn.Linear(4, 4)
        self.output = nn.Linear(4, 4)

    def forward(self, x):
        return self.output(torch.tanh(self.self(x)))


@pytest.mark.nightly_cases("equinox")
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_an_attribute_may_be_called_self(to):
    pytest.importorskip(to)
    net, x = CallsItSelf().eval(), torch.randn(3, 4)
    model = fmapper.convert(net, to, (x,), structure=True)
    np.testing.assert_allclose(model(x.numpy()), net(x).detach(), atol=1e-6)
    inner = model.self(x.numpy()) if to == "flax" else jax.vmap(model.self)(x.numpy())
    np.testing.assert_allclose(inner, net.self(x).detach(), atol=1e-6)
    assert "params['self']" in fmapper.source(net, "jax", (x,)).replace('"', "'")
