"""Converted models: how they are called, what they are in JAX, and what they refuse."""

import copy
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
flax_struct = pytest.importorskip("flax.struct")
import jax.numpy as jnp  # noqa: E402

from support.converting import Function, check, compare  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def converted_mlp(**options):
    model = mlp()
    return model, fmapper.convert(model, "jax", (torch.randn(5, 4),), **options)


@pytest.mark.nightly
def test_a_multilayer_perceptron():
    model = mlp()
    converted = check(model, torch.randn(5, 4))
    assert sorted(converted.params) == sorted(dict(model.named_parameters()))
    assert converted.program.graph.calls[0].module == "0"


@pytest.mark.nightly
def test_a_convolutional_network():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, dilation=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    check(model, torch.randn(2, 3, 32, 32))


# --- inputs ---------------------------------------------------------------------------------------


class Flexible(nn.Module):
    """Everything that a forward may take."""

    def forward(self, x, scale=2, *rest, flag=False, mask=None, **more):
        y = x * scale
        for other in rest:
            y = y + other
        if flag:
            y = -y
        if mask is not None:
            y = y * mask["values"][0]
        for name in sorted(more):
            y = y + more[name]
        return y


X = torch.arange(6.0).reshape(2, 3)
J = jnp.arange(6.0).reshape(2, 3)


def test_arguments_may_be_given_by_position_or_by_keyword_whichever_the_examples_used():
    converted = fmapper.convert(Flexible(), "jax", (X,), {"mask": {"values": [X]}})
    want = np.asarray(J * 2 * J)
    for got in (
        converted(J, mask={"values": [J]}),
        converted(x=J, mask={"values": (J,)}),
        converted(J, 2, mask={"values": [J]}, flag=False),
    ):
        np.testing.assert_array_equal(got, want)


def test_further_positional_and_keyword_arguments():
    converted = fmapper.convert(Flexible(), "jax", (X, 3, X, 2 * X), {"extra": X})
    np.testing.assert_array_equal(converted(J, 3, J, 2 * J, extra=J), 7 * J)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((J, 3), {}, "scale was passed, but was not among the example inputs"),
        ((), {}, "x is missing"),
        ((J,), {"x": J}, "x was passed both by position and by keyword"),
        ((J,), {"flag": True}, "flag was passed"),
        ((J.astype(int),), {}, "expected an array of float32, got int32"),
        ((J[:1],), {}, r"expected shape \(2, 3\), got \(1, 3\)"),
        ((J[0],), {}, r"got \(3,\)"),
        ((X,), {}, "got Tensor; convert it with fmapper.to_jax"),
        (([J],), {}, "got list"),
    ],
)
def test_inputs_that_the_program_is_not_for_are_refused(args, kwargs, message):
    converted = fmapper.convert(Flexible(), "jax", (X,))
    with pytest.raises(fmapper.ProgramInputError, match=message):
        converted(*args, **kwargs)


def test_an_argument_that_is_missing_or_unknown_says_what_to_do():
    converted = fmapper.convert(nn.Bilinear(3, 3, 2), "jax", (X, X))
    with pytest.raises(fmapper.ProgramInputError) as caught:
        converted(J, imput2=J)
    assert "input2 is missing" in str(caught.value)
    assert "There is no argument 'imput2'. Did you mean 'input" in str(caught.value)

    class Masked(nn.Module):
        def forward(self, x, mask=None):
            return x if mask is None else x * mask

    converted = fmapper.convert(Masked(), "jax", (X,), {"mask": X})
    with pytest.raises(fmapper.ProgramInputError, match="convert it with examples that omit mask"):
        converted(J)
    converted = fmapper.convert(Masked(), "jax", (X,))
    with pytest.raises(fmapper.ProgramInputError, match=r"example_kwargs=\{'mask': \.\.\.\}"):
        converted(J, mask=J)
    with pytest.raises(fmapper.ProgramInputError, match="There is no argument 'mosk'"):
        converted(J, mosk=J)


def test_a_structure_that_the_program_is_not_for_is_refused():
    converted = fmapper.convert(Flexible(), "jax", (X,), {"mask": {"values": [X]}})
    with pytest.raises(fmapper.ProgramInputError, match=r"mask\['values'\]: expected a list of 1"):
        converted(J, mask={"values": []})
    with pytest.raises(fmapper.ProgramInputError, match="a dict with the keys"):
        converted(J, mask=J)


@pytest.mark.parametrize("value", [False, 1, 1.0, 2, None, "x"])
def test_a_static_input_must_be_what_it_was(value):
    converted = fmapper.convert(Flexible(), "jax", (X,), {"flag": True, "mask": None})
    np.testing.assert_array_equal(converted(J, flag=True), -2 * J)
    with pytest.raises(fmapper.ProgramInputError, match="was recorded for True"):
        converted(J, flag=value)


@dataclass
class Point:
    x: torch.Tensor
    y: list


class Cache:
    """A class of somebody's that no framework knows."""

    def __init__(self, name):
        self.name, self.kept = name, []

    def add(self, x):
        self.kept = [*self.kept, {"value": x}]


def test_classes_that_no_framework_knows_are_records():
    def forward(point, cache):
        cache.add(point.x)
        return point.y[0] + point.x, cache, Point(point.x, [2 * point.x])

    cache = Cache("one")
    cache.add(3 * X)
    converted = fmapper.convert(Function(forward), "jax", (Point(X, [X]), cache))
    assert not {Point, Cache} & set(torch.utils._pytree.SUPPORTED_NODES)
    point = fmapper.programs.record_type("Point", ("x", "y"))(J, [J])
    result, kept, other = converted(point, {"kept": [{"value": 3 * J}]})
    np.testing.assert_array_equal(result, 2 * J)
    assert type(kept).__name__ == "Cache"
    np.testing.assert_array_equal(kept.kept[0]["value"], 3 * J)
    np.testing.assert_array_equal(kept.kept[1]["value"], J)
    np.testing.assert_array_equal(other.y[0], 2 * J)
    assert len(cache.kept) == 1  # the example is as it was
    # what came out goes in again, through jit as well
    jitted = jax.jit(lambda p, c: converted(p, c)[0])
    np.testing.assert_array_equal(jitted(point, Cache2([{"value": J}])), 2 * J)


class Cache2:
    def __init__(self, kept):
        self.kept = kept


fmapper.functor(Cache2)


# --- outputs --------------------------------------------------------------------------------------


def test_outputs_keep_their_structure_and_what_is_no_array():
    def forward(x):
        return {"a": [x, (x + 1, None)], "b": 3, "c": "text", "d": x.shape[0]}

    converted = fmapper.convert(Function(forward), "jax", (X,))
    got = converted(J)
    assert got["b"] == 3
    assert got["c"] == "text"
    assert got["d"] == 2
    assert got["a"][1][1] is None
    np.testing.assert_array_equal(got["a"][1][0], J + 1)


@dataclass
class Scaled:
    x: torch.Tensor
    y: torch.Tensor | None = None
    scale: float = 2.0


@flax_struct.dataclass
class ScaledInJax:
    x: jax.Array
    scale: float = flax_struct.field(pytree_node=False, default=2.0)


def test_fields_of_inputs_that_the_examples_fixed_are_compared(tmp_path):
    def forward(given):
        return (given.x if given.y is None else given.x + given.y) * given.scale

    converted = fmapper.convert(Function(forward), "jax", (Scaled(X),))
    converted.save(tmp_path / "model.safetensors")
    for model in (converted, fmapper.load(tmp_path / "model.safetensors")):
        for same in (Scaled(J), {"x": J}, {"x": J, "scale": 2.0, "y": None}):
            np.testing.assert_array_equal(model(same), 2 * J)
        with pytest.raises(fmapper.ProgramInputError, match=r"\.scale: expected 2\.0.* got 3\.0"):
            model(Scaled(J, scale=3.0))
        with pytest.raises(fmapper.ProgramInputError, match=r"\.scale: expected 2\.0.* got 2;"):
            model({"x": J, "scale": 2})
        with pytest.raises(fmapper.ProgramInputError, match=r"\.y: expected None.* got a "):
            model(Scaled(J, J))


def test_fields_of_inputs_of_jax_that_the_examples_fixed_are_compared():
    converted = fmapper.convert(lambda given: given.x * given.scale, "torch", (ScaledInJax(J),))
    for same in (ScaledInJax(X), Scaled(X), {"x": X}):
        torch.testing.assert_close(converted(same), 2 * X)
    with pytest.raises(fmapper.ProgramInputError, match=r"\.scale: expected 2\.0.* got 3\.0"):
        converted(ScaledInJax(X, 3.0))


def test_outputs_have_the_fields_that_are_no_arrays():
    converted = fmapper.convert(Function(lambda x: Scaled(x + 1, None, 3.0)), "jax", (X,))
    found = converted(J)
    assert (found.scale, found.y) == (3.0, None)
    assert pickle.loads(pickle.dumps(found)).scale == 3.0


def test_a_record_is_read_by_name_key_and_position_and_is_a_pytree():
    Output = fmapper.programs.record_type("Output", ("logits", "keys"), ("loss",))
    output = Output(J, [1, 2])
    assert output.logits is output["logits"] is output[0] is J
    assert output.loss is None
    assert "keys" in output
    assert "loss" not in output
    with pytest.raises(KeyError, match="Output has no 'loss'"):
        output["loss"]
    assert len(jax.tree.leaves(output)) == 3
    assert type(jax.tree.map(lambda x: x, output)) is Output
    assert type(fmapper.fmap(lambda x: x, output)) is Output
    assert pickle.loads(pickle.dumps(output)).keys == [1, 2]


# --- what the model is in JAX ---------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.nightly
def test_tied_parameters_are_one_parameter_and_their_gradients_are_summed():
    model = Tied()
    ids = torch.tensor([[1, 2, 1]])
    converted = check(model, ids)
    assert list(converted.params) == ["embed.weight"]
    assert converted.aliases == {"head.weight": "embed.weight"}
    assert sorted(converted.state_dict()) == sorted(model.state_dict())
    model(ids).square().sum().backward()
    tokens = jnp.asarray(ids.numpy())

    def loss(params):
        return (converted.replace(params=params)(tokens) ** 2).sum()

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        compare(gradient(converted.params)["embed.weight"], model.embed.weight.grad)


@pytest.mark.nightly
def test_jax_transforms_functions_of_the_model():
    model, converted = converted_mlp()
    x = torch.randn(5, 4)
    want = model(x)
    want.square().sum().backward()
    array = jnp.asarray(x.numpy())
    compare(jax.jit(lambda m, x: m(x))(converted, array), want)
    gradients = jax.grad(lambda m: (m(array) ** 2).sum())(converted)
    assert type(gradients) is type(converted)
    for name, parameter in model.named_parameters():
        compare(gradients.params[name], parameter.grad)
    again = jax.grad(jax.checkpoint(lambda m: (m(array) ** 2).sum()))(converted)
    compare(again.params["0.weight"], model[0].weight.grad)
    many = jax.vmap(converted)(jnp.stack([array, array]))
    compare(many[1], want)
    assert [*fmapper.trainables(converted)] == [*fmapper.state(converted)] == [*converted.params]


def test_a_call_is_compiled_once():
    traced = []

    @fmapper.lowering("mylib::counted")
    def counted(x):
        traced.append(x)
        return x

    converted = fmapper.convert(Function(torch.ops.mylib.counted), "jax", (X,))
    for _ in range(3):
        converted(J)
        copy.deepcopy(converted)(J)
        jax.tree.map(lambda x: x, converted)(J)
    assert len(traced) == 1


@pytest.mark.nightly
def test_in_bfloat16_arrays_of_the_model_are_and_stay_bfloat16():
    model, converted = converted_mlp()
    half = fmapper.cast(converted, "bfloat16")
    x = torch.randn(5, 4)
    want = model.bfloat16()(x.bfloat16())
    compare(half(jnp.asarray(x.numpy(), "bfloat16")), want)
    assert half(jnp.asarray(x.numpy())).dtype == "bfloat16"


def test_the_precision_of_products_is_the_highest_unless_asked_otherwise():
    _, converted = converted_mlp()
    x = jnp.ones((5, 4))
    assert "HIGHEST" in str(jax.make_jaxpr(converted)(x))
    assert "HIGHEST" not in str(jax.make_jaxpr(converted.replace(precision=None))(x))
    _, lower = converted_mlp(precision="default")
    assert "HIGHEST" not in str(jax.make_jaxpr(lower)(x))


def test_a_model_is_pickled_and_takes_other_weights():
    model, converted = converted_mlp()
    x = torch.randn(5, 4)
    compare(pickle.loads(pickle.dumps(converted))(x.numpy()), model(x))
    other = mlp()
    compare(converted.load_state_dict(other.state_dict())(x.numpy()), other(x))
    state = other.state_dict()
    del state["0.bias"]
    with pytest.raises(fmapper.StructureMismatchError, match=r"0\.bias: missing"):
        converted.load_state_dict(state)


def test_a_functor_without_a_model_is_moved():
    @fmapper.functor
    class Affine:
        def __init__(self, w):
            self.w = w

    moved = fmapper.convert(Affine(np.ones(2, np.float32)), "jax")
    assert isinstance(moved.w, jax.Array)


@pytest.mark.nightly
def test_the_module_keeps_its_modes():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3), nn.Dropout())
    model.train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for train in (False, True):
        fmapper.convert(model, "jax", (X,), train=train)
        assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_hooks


# --- training -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_dropout_takes_a_key():
    model = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.25))
    x = jnp.ones((100, 100))
    converted = fmapper.convert(model, "jax", (torch.ones(100, 100),), train=True)
    with pytest.raises(fmapper.ProgramInputError, match=r"key=jax\.random\.key"):
        converted(x)
    first = converted(x, key=jax.random.key(0))
    np.testing.assert_array_equal(first, converted(x, key=jax.random.key(0)))
    assert (first != converted(x, key=jax.random.key(1))).any()
    values, counts = np.unique(np.asarray(first), return_counts=True)
    np.testing.assert_allclose(values, [0, 16 / 9], rtol=1e-6)
    # kept twice with 3/4 each: the two operations draw numbers of their own
    assert abs(counts[1] / 10_000 - 9 / 16) < 0.03


def test_a_forward_with_a_parameter_called_key_gets_it():
    model = nn.Sequential(nn.Dropout(0.5))

    class Named(nn.Module):
        def forward(self, key):
            return model(key)

    converted = fmapper.convert(Named(), "jax", (X,), train=True)
    np.testing.assert_array_equal(converted.call((), {"key": J * 0}, key=jax.random.key(0))[0], 0)


@pytest.mark.nightly
def test_running_statistics_are_new_state():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3))
    x = torch.randn(10, 3)
    converted = fmapper.convert(model, "jax", (x,), train=True)
    array = jnp.asarray(x.numpy())
    output, new = converted(array, mutable=True)
    jitted_output, jitted = jax.jit(lambda m, x: m(x, mutable=True))(converted, array)
    model.train()
    want = model(x)
    for got in (output, jitted_output, converted(array)):
        compare(got, want, scale=10)
    for state in (new, jitted):
        for name, buffer in model.named_buffers():
            compare(state.buffers[name], buffer)
    assert int(converted.buffers["1.num_batches_tracked"]) == 0


def test_an_input_that_the_forward_changes_is_given_back():
    def forward(x, more):
        more["y"].add_(x)
        return more["y"] * 2

    converted = fmapper.convert(Function(forward), "jax", (X, {"y": X.clone()}))
    outcome = converted.call((J, {"y": J}))
    np.testing.assert_array_equal(outcome.output, 4 * J)
    np.testing.assert_array_equal(outcome.args[1]["y"], 2 * J)


@pytest.mark.nightly
@pytest.mark.parametrize("train", [False, True])
def test_gradients_end_where_torch_ends_them(train):
    class Ended(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

        def forward(self, x):
            with torch.no_grad():
                y = self.a(x)
            z = self.b(x).detach() + self.c(x)
            changed = self.d(x)
            changed.detach().mul_(2)  # a view that is written to stays one
            return y * z * changed

    model = Ended()
    x = torch.randn(5, 3)
    converted = fmapper.convert(model, "jax", (x,), train=train)
    array = jnp.asarray(x.numpy())
    compare(converted(array), model(x))
    model(x).sum().backward()
    gradients = jax.grad(lambda p: converted.replace(params=p)(array).sum())(converted.params)
    for name in ("a.weight", "b.weight"):
        assert model.get_parameter(name).grad is None
        assert not gradients[name].any()
    compare(gradients["c.weight"], model.c.weight.grad)


# --- sizes ----------------------------------------------------------------------------------------


def sums(x, y):
    return (x.reshape(x.shape[0] * x.shape[1]) + y.sum()).reshape(x.shape) / x.shape[1]


@pytest.mark.nightly
def test_sizes_that_may_vary():
    dim = torch.export.Dim
    shapes = ({0: dim("b"), 1: dim("s", min=3, max=8)}, {0: dim("b")})
    options = {"dynamic_shapes": {"args": shapes}}
    converted = check(sums, torch.randn(3, 4), torch.randn(3), options=options)
    for b, s in [(1, 3), (7, 8)]:
        x, y = torch.randn(b, s), torch.randn(b)
        compare(converted(x.numpy(), y.numpy()), sums(x, y))
    with pytest.raises(fmapper.ProgramInputError, match="may be from 3 to 8"):
        converted(jnp.ones((2, 9)), jnp.ones(2))
    with pytest.raises(fmapper.ProgramInputError, match="elsewhere"):
        converted(jnp.ones((2, 4)), jnp.ones(3))


def test_sizes_that_depend_on_each_other():
    dim = torch.export.Dim("n")
    converted = check(
        lambda x, y: y[::2] + x,
        torch.randn(3),
        torch.randn(6),
        options={"dynamic_shapes": {"args": ({0: dim}, {0: 2 * dim})}},
    )
    x, y = torch.randn(5), torch.randn(10)
    compare(converted(x.numpy(), y.numpy()), y[::2] + x)
    with pytest.raises(fmapper.ProgramInputError, match="inputs are inconsistent: a size is 9"):
        converted(jnp.ones(5), jnp.ones(9))


def test_sizes_that_vary_are_named_in_a_text():
    """As `jax.export` has it, in both directions: see tests/to_torch/test_sizes.py."""
    converted = fmapper.convert(torch.nn.Tanh(), "jax", (X,), dynamic_shapes=["batch, _"])
    assert converted(jnp.ones((7, 3))).shape == (7, 3)
    with pytest.raises(fmapper.ProgramInputError, match="3"):
        converted(jnp.ones((7, 4)))


def test_a_name_that_stands_twice_is_one_size():
    class Sum(torch.nn.Module):
        def forward(self, x, y, *, extra):
            return x + y + extra["z"]

    inputs = (torch.ones(3, 4), torch.ones(3, 1)), {"extra": {"z": torch.ones(4)}}
    shapes = {"x": "n, _", "y": "(n, _)", "extra": {"z": "..."}}
    converted = fmapper.convert(Sum(), "jax", *inputs, dynamic_shapes=shapes)
    assert converted(jnp.ones((5, 4)), jnp.ones((5, 1)), extra={"z": jnp.ones(4)}).shape == (5, 4)
    with pytest.raises(fmapper.ProgramInputError, match=r"y: expected shape .*, got \(6, 1\)"):
        converted(jnp.ones((5, 4)), jnp.ones((6, 1)), extra={"z": jnp.ones(4)})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["2*n, _"], "a size is a name, as in 'batch, _', not '2\\*n'"),
        ("batch, _", "write 'auto', a list with a string for each input, as in \\['batch, _'\\]"),
    ],
)
def test_words_for_sizes_that_mean_nothing(shapes, message):
    with pytest.raises(fmapper.ConversionError, match=message):
        fmapper.convert(torch.nn.Tanh(), "jax", (X,), dynamic_shapes=shapes)


def test_the_result_is_exported_with_symbolic_sizes():
    from jax import export

    dim = torch.export.Dim
    shapes = {"args": ({0: dim("b"), 1: dim("s")}, {0: dim("b")})}
    converted = fmapper.convert(
        Function(sums), "jax", (torch.ones(3, 4), torch.ones(3)), dynamic_shapes=shapes
    )
    b, s = export.symbolic_shape("b, s")
    x, y = jax.ShapeDtypeStruct((b, s), "float32"), jax.ShapeDtypeStruct((b,), "float32")
    exported = export.export(jax.jit(converted.__call__))(x, y)
    a, c = torch.randn(5, 6), torch.randn(5)
    compare(exported.call(a.numpy(), c.numpy()), sums(a, c))


def test_an_integer_that_may_vary():
    def forward(x, n):
        return x * n + x.shape[0]

    converted = fmapper.convert(
        Function(forward), "jax", (X, 3), dynamic_shapes={"args": (None, torch.export.Dim.DYNAMIC)}
    )
    np.testing.assert_array_equal(converted(J, 5), J * 5 + 2)
    with pytest.raises(fmapper.ProgramInputError, match="expected a Python int"):
        converted(J, 5.0)


# --- control flow ---------------------------------------------------------------------------------


def conditional(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))


def loop(x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))


def loop_with_a_number(x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, y: y.sum() < 50, lambda i, y: (i + 1, y * 2), (0, x))[1]


def scanned(x):
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, y: (c + y, c * y), x.sum(0), x, dim=0)


def mapped(x):
    from torch._higher_order_ops.map import map

    return map(lambda y, z: y * z, x, x.sum(0))


@pytest.mark.nightly
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("function", [conditional, loop, loop_with_a_number, scanned, mapped])
def test_control_flow(function, sign):
    if function is loop_with_a_number and sign < 0:
        sign = 2
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    converted = fmapper.convert(Function(function), "jax", (x,))
    compare(converted((sign * x).numpy()), function(sign * x))


def test_autocast_is_recorded():
    linear = nn.Linear(3, 3)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.linear(x)

    check(Cast(), X)


@pytest.mark.nightly
def test_a_value_read_as_a_number_is_promoted_as_a_number():
    check(lambda x: x.bfloat16() * x.sum().item(), X)
    check(lambda x: x.to(torch.int8) + x.sum().to(torch.int32).item(), X)


FLOAT64 = """
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np, torch, fmapper
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4)).double()
x = torch.randn(5, 3, dtype=torch.float64)
index = torch.arange(5) + 2**40
both = fmapper.convert(model, "jax", (x,))
got = both(x.numpy())
assert got.dtype == "float64"
assert np.abs(np.asarray(got) - model(x).detach().numpy()).max() < 1e-14


class Shifted(torch.nn.Module):
    def forward(self, i):
        return i * 2**20 + 1


shifted = fmapper.convert(Shifted(), "jax", (index,))(index.numpy())
assert shifted.dtype == "int64"
assert (np.asarray(shifted) == Shifted()(index).numpy()).all()
"""


@pytest.mark.nightly
def test_with_x64_dtypes_are_those_of_torch():
    subprocess.run([sys.executable, "-c", FLOAT64], check=True)


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, torch, fmapper
from jax.sharding import NamedSharding, PartitionSpec as P
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
x = torch.randn(16, 8)
converted = fmapper.convert(model, "jax", (x,))
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
specs = {"0.weight": P("model"), "0.bias": P("model"), "2.weight": P(None, "model"), "2.bias": P()}
shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
sharded = converted.replace(params=jax.device_put(converted.params, shardings))
batch = jax.device_put(x.numpy(), NamedSharding(mesh, P("data")))


def loss(params, x):
    return (sharded.replace(params=params)(x) ** 2).mean()


got = sharded(batch)
assert len(got.sharding.device_set) == 8
np.testing.assert_allclose(got, model(x).detach().numpy(), atol=1e-6)
gradients = jax.jit(jax.grad(loss))(sharded.params, batch)
assert gradients["0.weight"].sharding.is_equivalent_to(shardings["0.weight"], 2)
(model(x) ** 2).mean().backward()
np.testing.assert_allclose(gradients["0.weight"], model[0].weight.grad, atol=1e-6)
"""


@pytest.mark.nightly
def test_parameters_may_be_sharded():
    subprocess.run([sys.executable, "-c", SHARDED], check=True)


@pytest.mark.nightly
def test_products_of_groups_of_rows():
    def forward(x, weight, offs):
        return torch.ops.transformers.grouped_mm_fallback(x, weight, offs)

    pytest.importorskip("transformers.integrations.moe")
    x, weight = torch.randn(7, 4), torch.randn(4, 4, 3)
    for ends in ([2, 2, 5, 7], [0, 3, 3, 6]):
        check(forward, x, weight, torch.tensor(ends, dtype=torch.int32))


# --- what is refused, and operations of one's own -------------------------------------------------

torch.library.define("mylib::counted", "(Tensor x) -> Tensor")
torch.library.define("mylib::twice", "(Tensor x, *, int times=2) -> Tensor")
torch.library.define("mylib::unknown", "(Tensor x) -> Tensor")
torch.library.define("mylib::nested", "(Tensor x) -> Tensor")
for _name in ("counted", "unknown", "nested"):
    torch.library.impl(f"mylib::{_name}", "CompositeExplicitAutograd")(lambda x: x.clone())
torch.library.impl("mylib::twice", "CompositeExplicitAutograd")(lambda x, times=2: x * times)


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Function(torch.ops.mylib.unknown) for _ in range(2)])

    def forward(self, x):
        for inner in self.inner:
            x = inner(x)
        return torch.cond(x.sum() > 0, torch.ops.mylib.nested, torch.clone, (x,))


@pytest.mark.nightly
def test_all_operations_without_a_lowering_are_listed_at_once():
    with pytest.raises(fmapper.UnsupportedOpsError) as caught:
        fmapper.convert(Strange(), "jax", (torch.ones(3, 3),))
    assert caught.value.ops["mylib::unknown.default"] == ["inner.0", "inner.1"]
    message = str(caught.value)
    assert "mylib::nested: used in" in message
    assert "mylib::unknown: used in inner.0, inner.1" in message
    assert '@fmapper.lowering("' in message


def test_a_lowering_of_ones_own():
    @fmapper.lowering("mylib::twice")
    def twice(x, *, times=2):
        return x * times

    check(lambda x: torch.ops.mylib.twice(x, times=5), X)
    with pytest.raises(fmapper.DeclarationError, match="'aten::add' or 'mylib::add'"):
        fmapper.lowering("add")


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else -x


@pytest.mark.nightly
def test_a_branch_on_values_is_recorded_for_the_examples_and_checked(capfd):
    model = nn.Sequential(nn.Identity(), Branching())
    converted = check(model, X)
    with pytest.raises(
        fmapper.ProgramInputError,
        match=r"in 1 a condition that these inputs violate, at .*\.py:\d+: its code took the other",
    ):
        converted(-J)
    jitted = jax.jit(converted)
    np.testing.assert_array_equal(jitted(J), 2 * J)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="asserts in 1 a condition that these inputs violate"
    ):
        jax.block_until_ready(jitted(-J))
    assert "No stacktrace found" not in capfd.readouterr().err


@pytest.mark.nightly
def test_sizes_that_depend_on_values():
    def forward(x, sizes):
        return [part.sum(0) for part in torch.split(x, sizes.tolist())]

    x, sizes = torch.randn(4, 3), torch.tensor([1, 3])
    converted = fmapper.convert(Function(forward), "jax", (x, sizes))
    for given in (sizes, torch.tensor([2, 2])):
        compare(converted(x.numpy(), given.numpy()), forward(x, given))
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        jax.jit(converted)(x.numpy(), sizes.numpy())
    assert "depend on the values of arrays" in "".join(caught.value.__notes__)


def test_what_torch_cannot_record_is_reported_with_its_reason_the_place_and_a_remedy():
    class Unknown(nn.Module):
        def forward(self, x):
            return x if bool((x.numpy() > 0).all()) else -x

    with pytest.raises(fmapper.ConversionError) as caught:
        fmapper.convert(nn.Sequential(nn.Identity(), Unknown()), "jax", (X,))
    message = str(caught.value)
    assert "could not record it in 1" in message
    assert "numpy" in message
    assert "torch.export.export(module, args, kwargs)" in message
    with pytest.raises(fmapper.ConversionError, match="example_inputs and example_kwargs"):
        fmapper.convert(nn.Linear(3, 3), "jax")
    with pytest.raises(fmapper.ConversionError, match="dynamic_shapes"):
        fmapper.convert(
            Function(lambda x: x.reshape(2, 3)),
            "jax",
            (X,),
            dynamic_shapes={"args": ({0: torch.export.Dim("n")},)},
        )


def test_examples_that_a_model_does_not_take_are_told_from_what_cannot_be_recorded():
    net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2))
    with pytest.raises(
        fmapper.ConversionError, match=r"called with the examples, in 1\. .*Error: "
    ):
        fmapper.convert(net, "jax", (torch.ones(4, 5),))


def test_an_error_in_a_lowering_says_which_call_failed():
    @fmapper.lowering("mylib::counted")
    def fails(x):
        raise ValueError("no")

    converted = fmapper.convert(nn.Sequential(Function(torch.ops.mylib.counted)), "jax", (X,))
    with pytest.raises(ValueError, match="no") as caught:
        converted(J)
    assert "while running mylib::counted.default in 0" in caught.value.__notes__[0]


# --- files ----------------------------------------------------------------------------------------


class Saved(nn.Module):
    def __init__(self):
        super().__init__()
        self.tied = Tied()
        self.register_buffer("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        self.register_buffer("hidden", torch.tensor(2), persistent=False)

    def forward(self, ids, *, flag=True):
        y = torch.cond(ids.sum() > 0, lambda y: y + 1, lambda y: y * 2, (self.tied(ids),))
        constant = torch.tensor([float("inf"), 1.0, 2.0])
        return {"y": y * self.hidden, "b": self.b.float(), "c": constant, "n": None}


RUN = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
import jax.numpy as jnp, numpy as np, fmapper, pickle
model = fmapper.convert(fmapper.load_program(sys.argv[1]), "jax")
out = model(jnp.asarray(np.array([[1, 2, 6]])))
assert out["n"] is None
np.savez(sys.argv[2], **{key: value for key, value in out.items() if value is not None})
"""


@pytest.mark.nightly
def test_a_saved_model_runs_where_torch_is_not_installed(tmp_path):
    model = Saved()
    ids = torch.tensor([[1, 2, 6]])
    converted = fmapper.convert(model, "jax", (ids,), {"flag": True})
    path = tmp_path / "model.safetensors"
    converted.save(path)
    command = [sys.executable, "-c", RUN, path, tmp_path / "out.npz"]
    subprocess.run(command, check=True)
    with np.load(tmp_path / "out.npz") as out:
        with torch.no_grad():
            want = model(ids)
        for key in ("y", "b", "c"):
            compare(out[key], want[key])
    again = type(converted).load(path)
    assert again.aliases == converted.aliases
    assert sorted(again.state_dict()) == sorted(model.state_dict())
    assert repr(again.program.graph.calls) == repr(converted.program.graph.calls) or [
        call.op for call in again.program.graph.walk()
    ] == [call.op for call in converted.program.graph.walk()]
    assert again.program.in_spec == converted.program.in_spec
    assert again.program.signature == converted.program.signature


def test_other_readers_find_the_weights_in_the_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, converted = converted_mlp()
    converted.save(tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "longer or shorter"),
        (lambda data: data[:4], "header|damaged|no safetensors"),
        (lambda data: b"\xff" * 8 + data[8:], "header would be too long"),
        (lambda data: data[:8] + b"[" + data[9:], "not a safetensors file"),
        (lambda data: data.replace(b"fmapper.program", b"fmapper_program"), "no program"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    _, converted = converted_mlp()
    path = tmp_path / "model.safetensors"
    converted.save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(fmapper.ConversionError, match=message):
        fmapper.load_program(path)


class DependsOnRecording(torch.nn.Module):
    """A module that does something else while it is recorded, as what it does cannot be."""

    def forward(self, x):
        return 2 * x if torch.compiler.is_compiling() else torch.from_numpy(x.numpy())


def test_a_program_that_is_not_what_the_module_computes_is_refused():
    x = torch.ones(3)
    with pytest.raises(fmapper.ConversionError, match=r"output.* differs by 1\b"):
        fmapper.convert(DependsOnRecording(), "jax", (x,))
    assert fmapper.convert(DependsOnRecording(), "jax", (x,), check=False)(x.numpy()).tolist() == [
        2,
        2,
        2,
    ]


class Unwritten(torch.nn.Module):
    """Gives memory that it has not written: other numbers in every call, in principle."""

    calls = 0  # of the class, which a conversion does not restore

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        free = x.new_empty(1000)
        if not torch.compiler.is_compiling():
            Unwritten.calls += 1
            if not torch.utils.deterministic.fill_uninitialized_memory:
                free.fill_(random.random() if self.change else 10.0**Unwritten.calls)
            elif torch.are_deterministic_algorithms_enabled():
                x = x + self.change
        return x + 1, free


@pytest.mark.nightly_cases("0")
@pytest.mark.parametrize("change", [0, 1])
def test_memory_that_was_never_written_is_not_compared(change, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setattr(Unwritten, "calls", 0)
    model, x = Unwritten(change), torch.ones(3)
    if change:
        with pytest.raises(fmapper.ConversionError, match=r"output\[0\].* differs by 1\b"):
            fmapper.convert(model, "jax", (x,))
    else:
        assert fmapper.convert(model, "jax", (x,))(x.numpy())[0].tolist() == [2, 2, 2]
    assert Unwritten.calls >= 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_what_the_check_runs_changes_no_buffer():
    norm = torch.nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    x = torch.randn(4, 3)
    given = x.clone()
    fmapper.convert(norm, "jax", (x,), train=True)
    assert torch.equal(x, given)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])
