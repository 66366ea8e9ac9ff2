"""Rules that follow from a program: what is divided, and what is sent for that."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import fmapper  # noqa: E402
from fmapper.meshes import Sharding, derive  # noqa: E402
from support import many_devices  # noqa: E402
from support.jax_decoder import decoder, parameters  # noqa: E402

nn = torch.nn
COLUMNS, ROWS = ("tensor", None), (None, "tensor")


@pytest.fixture(scope="module")
def on_eight_devices():
    return many_devices.run("jax", "derive")


@pytest.mark.nightly
@pytest.mark.parametrize("check", many_devices.names("jax", "derive"))
def test_jax(on_eight_devices, check):
    assert on_eight_devices.get(check, "did not run") == "", on_eight_devices.get("")


def derived(module, *inputs, mesh=None):
    model = fmapper.convert(module.eval(), "jax", inputs, check=False)
    return derive(model, mesh or {"model": 2})


@pytest.mark.nightly
def test_of_two_products_the_first_is_divided_by_outputs_and_the_second_by_inputs():
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4))
    found = derived(net, torch.ones(3, 4))
    assert found.axes == {"0.weight": COLUMNS, "0.bias": ("tensor",), "3.weight": ROWS,
                          "3.bias": (None,)}  # fmt: skip
    assert found.sums == ("3",)


@pytest.mark.parametrize(
    ("rules", "sums", "gathers"),
    [
        ({"0": ("model",), "2.weight": (None, "model")}, ("2",), ()),
        ({"0": ("model",)}, ("2",), ()),  # the other weight is cut where it is
        ({"2.weight": ("model",)}, (), ()),
        ({"*.weight": ("data",)}, (), ("0.weight", "2.weight")),
        ({"0.weight": ("fsdp", "model")}, ("0",), ("0.weight",)),
        ("derive", ("2",), ("0.weight", "2.weight", "2.bias")),
        (None, (), ()),
    ],
)
def test_a_plan_tells_what_any_rules_send(rules, sums, gathers):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = fmapper.convert(net, "jax", (torch.ones(3, 4),), check=False)
    plan = fmapper.plan(Sharding({"data": 2, "fsdp": 2, "model": 2}, rules), {"net": model, "n": 1})
    assert (plan.sums, plan.gathers, plan.moves) == (sums, gathers, ())
    assert (f"gathers {len(gathers)} times" in str(plan)) == bool(gathers)


def test_a_plan_tells_where_a_divided_array_is_needed_whole():
    net = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4))
    model = fmapper.convert(net, "jax", (torch.ones(3, 4),), check=False)
    plan = fmapper.plan(Sharding({"model": 2}, {"0": ("model",)}), model)
    assert plan.gathers == ("1",)


@pytest.mark.nightly
def test_a_decoder_of_jax_is_divided_as_one_of_torch():
    """By inputs and outputs, whichever comes first in a weight; two sums for each layer."""
    model = fmapper.convert((decoder, parameters()), "torch", (np.ones((2, 6), np.int32),))
    found = derive(model, {"data": 2, "model": 4})
    by_outputs, by_inputs = (None, "tensor"), ("tensor", None)
    for layer in (0, 1):
        got = {name: found.axes[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "up", "gate")}
        assert set(got.values()) == {by_outputs}
        assert {found.axes[f"layers.{layer}.{name}"] for name in ("o", "down")} == {by_inputs}
        assert found.axes[f"layers.{layer}.scale"] == (None,)
    assert found.axes["table"] == by_inputs
    assert found.axes["head"] == by_outputs
    assert len(found.sums) == 2 * 2 + 1


def test_convolutions_of_jax_are_divided_by_channels():
    def net(params, x):
        for name in ("first", "second"):
            x = lax.conv_general_dilated(
                x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.concatenate([x, x], -1)[:, ::-1]

    params = {"first": jnp.ones((3, 3, 4, 8)), "second": jnp.ones((3, 3, 8, 4))}
    model = fmapper.convert((net, params), "torch", (np.ones((2, 8, 8, 4), np.float32),))
    axes = derive(model, {"model": 2}).axes
    assert axes == {"first": (None, None, None, "tensor"), "second": (None, None, "tensor", None)}


@pytest.mark.parametrize("between", [nn.LayerNorm(8), nn.Softmax(-1)])
def test_what_needs_a_row_as_a_whole_stands_between(between):
    net = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 6))
    found = derived(net, torch.ones(3, 4))
    assert found.axes["0.weight"] == (None, None)
    assert found.axes["2.weight"] == COLUMNS  # whose outputs nothing follows
    assert found.sums == ()


def test_of_three_products_the_chain_comes_before_what_is_left():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 6))
    found = derived(net, torch.ones(3, 4))
    matrices = [found.axes[f"{at}.weight"] for at in (0, 2, 4)]
    assert matrices == [COLUMNS, ROWS, COLUMNS]
    assert len(found.sums) == 1


def test_residual_blocks_without_a_norm_are_summed_where_they_are_narrow():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    net = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 2))
    assert derived(net, torch.ones(3, 4)).sums == ("1.down", "2.down")


def test_a_size_that_does_not_divide_is_left():
    net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4))
    assert derived(net, torch.ones(3, 4)).axes["0.weight"] == (None, None)


class Attention(nn.Module):
    def __init__(self, heads, shared):
        super().__init__()
        self.heads, self.shared = heads, shared
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16 * shared // heads)
        self.v, self.o = nn.Linear(16, 16 * shared // heads), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 16 // self.heads)).transpose(1, 2)
                   for f in (self.q, self.k, self.v))  # fmt: skip
        several = self.heads // self.shared
        k, v = (a.repeat_interleave(several, 1) if several > 1 else a for a in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.nightly_cases("4-4-True")
@pytest.mark.parametrize(
    ("shared", "parts", "divided"), [(4, 4, True), (4, 8, False), (2, 2, True), (2, 4, False)]
)
def test_heads_are_divided_where_there_are_enough(shared, parts, divided):
    found = derived(Attention(4, shared), torch.ones(2, 3, 16), mesh={"tp": parts})
    assert found.axes["q.weight"] == found.axes["v.weight"] == (COLUMNS if divided else (None,) * 2)
    assert found.axes["q.bias"] == ("tensor" if divided else None,)
    assert (found.axes["o.weight"] == ROWS) == divided
    assert found.sums == (("o",) if divided else ())


def test_one_table_for_tokens_and_head():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.norm(self.embed(ids)))

    found = derived(Tied(), torch.arange(6).reshape(2, 3))
    assert found.axes["embed.weight"] == COLUMNS
    assert found.sums == ("embed",)


def test_what_is_packed_in_one_array_is_divided():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.down = nn.Linear(4, 16), nn.Linear(8, 4)

        def forward(self, x):
            gate, up = self.both(x).chunk(2, -1)
            return self.down(torch.sigmoid(gate) * up)

    model = fmapper.convert(Gated(), "jax", (torch.ones(3, 4),))
    for source, moves in ((model, ()), (model.program, ("chunk",))):  # nobody divides for a program
        found = derive(source, {"model": 2})
        assert (found.axes["both.weight"], found.axes["down.weight"]) == (COLUMNS, ROWS)
        assert (found.sums, found.moves) == (("down",), moves)


class Packed(nn.Module):
    """An attention whose queries, keys and values come from one matrix."""

    def __init__(self, how, batches_first=True):
        super().__init__()
        self.how, self.batches_first = how, batches_first
        self.qkv, self.o = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x):
        n, t, _ = x.shape
        y = self.qkv(x)
        if self.how == "slices":  # as Phi-3 has them: four heads, which share two keys
            q, k, v = y[..., :16], y[..., 16:24], y[..., 24:]
        elif self.how == "split":
            q, k, v = y.split([16, 8, 8], -1)
        elif self.how == "index":  # as Falcon has them
            y = y.view(n, t, 2, 4, 4)
            q, k, v = y[:, :, :, :-2].flatten(2), y[:, :, :, [-2]], y[:, :, :, [-1]]
        else:
            q, k, v = y[..., :16], y[..., 8:16], y[..., 24:]
        q, k, v = (a.reshape(n, t, -1, 4).transpose(1, 2) for a in (q, k, v))
        k, v = (a.repeat_interleave(2, 1) for a in (k, v))
        if not self.batches_first:  # as Bloom has them
            q, k, v = (a.reshape(n * 4, t, 4) for a in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).reshape(n, 4, t, 4)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.nightly_cases("index-0")
@pytest.mark.parametrize(("how", "moves"), [("slices", 1), ("split", 1), ("index", 0)])
def test_queries_keys_and_values_in_one_matrix_are_divided(how, moves):
    model = fmapper.convert(Packed(how), "jax", (torch.ones(2, 3, 16),))
    assert derive(model, {"model": 2}).moves == ()
    found = derive(model.program, {"model": 2})
    assert (found.axes["qkv.weight"], found.axes["o.weight"]) == (COLUMNS, ROWS)
    assert (found.axes["qkv.bias"], found.sums, len(found.moves)) == (("tensor",), ("o",), moves)
    four = derived(Packed(how), torch.ones(2, 3, 16), mesh={"model": 4})
    assert four.axes["qkv.weight"] == (None, None)  # of two keys


@pytest.mark.parametrize(("how", "batches_first"), [("overlaps", True), ("slices", False)])
def test_queries_keys_and_values_that_are_mixed_stay_whole(how, batches_first):
    found = derived(Packed(how, batches_first), torch.ones(2, 3, 16))
    assert found.axes["qkv.weight"] == (None, None)
    assert found.sums == found.moves == ()


def test_functions_with_a_gradient_of_their_own_are_no_obstacle():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(Double.apply(self.up(x)))

    found = derived(Net(), torch.ones(3, 4))
    assert (found.axes["up.weight"], found.axes["down.weight"]) == (COLUMNS, ROWS)


def test_convolutions_are_divided_by_channels():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 5, 1))  # fmt: skip
    found = derived(net, torch.ones(2, 3, 12, 12))
    first = ("tensor", None, None, None)
    assert found.axes["0.weight"] == found.axes["4.weight"] == first
    assert found.axes["1.weight"] == ("tensor",)
    assert found.axes["6.weight"] == (None, "tensor", None, None)
    assert found.sums == ("6",)


def test_what_is_left_is_divided_where_an_axis_is_for_that():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4))
    found = derived(net, torch.ones(3, 4), mesh={"fsdp": 4, "model": 2})
    assert found.axes["0.weight"] == ("tensor", "zero")
    assert found.axes["2.weight"] == ("zero", "tensor")
    assert found.axes["3.weight"] == ("zero",)
    model = fmapper.convert(net, "jax", (torch.ones(3, 4),))
    both = derive(model, {"data": 2}, names={"zero": "data"})
    assert both.axes["0.weight"] == (None, "zero") or both.axes["0.weight"] == ("zero", None)


def test_what_is_made_from_nothing_is_made_in_parts():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            y = self.up(x)
            return self.down(y + torch.full((3, 8), 0.5) * y.new_ones((8,)))

    found = derived(Masked(), torch.ones(3, 4))
    assert (found.axes["up.weight"], found.axes["down.weight"]) == (COLUMNS, ROWS)


@pytest.mark.nightly
def test_sizes_that_vary_are_not_divided_and_are_not_in_the_way():
    module = Attention(4, 4).eval()
    model = fmapper.convert(
        module, "jax", (torch.ones(2, 3, 16),), dynamic_shapes=["batch, length, _"], check=False
    )
    found = derive(model, {"model": 2})
    assert (found.axes["q.weight"], found.axes["o.weight"], found.sums) == (COLUMNS, ROWS, ("o",))


def test_an_operation_that_is_not_known_leaves_its_operands_whole():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(torch.cummax(self.up(x), -1).values)

    assert derived(Odd(), torch.ones(3, 4)).axes["up.weight"] == (None, None)


@pytest.mark.nightly
def test_experts_are_divided_where_an_axis_is_for_them():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)  # fmt: skip
    module = transformers.MixtralForCausalLM(config).eval()
    example = {"input_ids": torch.arange(6).reshape(2, 3), "use_cache": False}
    model = fmapper.convert(module, "jax", example_kwargs=example, check=False)
    experts = "model.layers.0.mlp.experts"
    found = derive(model, {"model": 2})
    assert found.axes[f"{experts}.gate_up_proj"] == (None, "tensor", None)
    assert found.axes[f"{experts}.down_proj"] == (None, None, "tensor")
    found = derive(model, {"ep": 2, "model": 2})
    assert found.axes[f"{experts}.gate_up_proj"] == ("expert", None, None)
    assert found.axes["model.layers.0.self_attn.o_proj.weight"] == ROWS


def test_rules_can_be_changed_and_are_refused_for_what_has_no_program():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = fmapper.convert(net, "jax", (torch.ones(3, 4),))
    rules = derive(model, {"model": 2}).axes | {"2.bias": ("tensor",)}
    sharding = fmapper.meshes.Sharding({"model": 2}, rules)
    for tree in (model, net):  # of the converted model and of the one that it was converted from
        plan = fmapper.plan(sharding, tree)
        assert [leaf.shard for leaf in plan] == [(4, 4), (4,), (4, 4), (2,)]
    with pytest.raises(fmapper.PlacementError, match="a Sequential has no program"):
        derive(net, {"model": 2})
    with pytest.raises(fmapper.PlacementError, match="nothing in this tree has a program"):
        fmapper.plan(fmapper.meshes.Sharding({"model": 1}, "derive"), {"w": torch.ones(2)})


def scanned(params, x):
    def body(carry, layer):
        return carry + jax.nn.relu(carry @ layer["up"] + layer["bias"]) @ layer["down"], carry

    return jax.lax.scan(body, x, params)


def test_stacked_layers_of_a_loop_are_divided_like_layers_apart():
    params = {
        "up": np.ones((3, 8, 16), np.float32),
        "bias": np.ones((3, 16), np.float32),
        "down": np.ones((3, 16, 8), np.float32),
    }
    model = fmapper.convert((scanned, params), "torch", (np.ones((4, 8), np.float32),))
    found = derive(model, {"model": 2})
    assert found.axes == {
        "up": (None, None, "tensor"),
        "bias": (None, "tensor"),
        "down": (None, "tensor", None),
    }
    assert len(found.sums) == 3  # once a turn
    assert derive(model, {"model": 3}).axes["up"] == (None, None, None)


def test_functions_that_are_called_as_a_whole_are_looked_into():
    def call(params, x):
        return jax.checkpoint(jax.jit(jax.nn.relu))(x @ params["a"]) @ params["b"]

    params = {"a": np.ones((8, 16), np.float32), "b": np.ones((16, 8), np.float32)}
    model = fmapper.convert((call, params), "torch", (np.ones((4, 8), np.float32),))
    assert derive(model, {"model": 2}).axes == {"a": (None, "tensor"), "b": ("tensor", None)}


def test_lowerings_of_pointwise_operations_of_torch_say_so():
    from fmapper.meshes import pointwise
    from fmapper_adapters.jax.aten import table

    table.load()
    for op, lowering in table.LOWERINGS.items():
        name, _, overload = op.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, name, None) if op.startswith("aten::") else None
        overloads = [overload] if overload else packet.overloads() if packet else []
        tags = [getattr(packet, each).tags for each in overloads if hasattr(packet, each)]
        if tags and all(torch.Tag.pointwise in each for each in tags):
            assert lowering.dims is pointwise, op
