"""Models converted to Flax: trees of NNX variables with the names of torch, and Linen modules."""

import copy
import pickle

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import linen, nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

from support.converting import Function, compare  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Tied(nn.Module):
    """An embedding used twice, layers in a list, an activation among them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Convolutional(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(x).flatten(1)))


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    return transformers.BertModel(config), (torch.randint(0, 31, (2, 9)),)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=12, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, 31, (2, 9)),)


CASES = {
    "tied": lambda: (Tied(), (torch.arange(7),)),
    "convolutional": lambda: (Convolutional(), (torch.randn(5, 2, 6, 6),)),
    "bert": bert,
    "gpt2": gpt2,
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """A torch module in evaluation mode, its inputs, and what it was converted to."""
    torch.manual_seed(0)
    model, inputs = CASES[request.param]()
    return model.eval(), inputs, fmapper.convert(model, "flax", inputs)


def arrays(inputs):
    return tuple(jnp.asarray(x.numpy()) for x in inputs)


def main_output(outputs):
    if isinstance(outputs, jax.Array | torch.Tensor):
        return outputs
    return outputs[0]


def loss(model, *inputs):
    return (main_output(model(*inputs)) ** 2).sum()


def by_name(state):
    """The arrays of a state of NNX by the names of torch."""
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def trained_in(model):
    return set(fmapper.trainables(model))


# --- the tree -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_outputs_and_gradients_are_those_of_torch(case):
    model, inputs, converted = case
    want = main_output(model(*inputs))
    compare(main_output(converted(*arrays(inputs))), want)
    want.square().sum().backward()
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(converted, *arrays(inputs))
    compare(value, want.square().sum(), scale=10)
    gradients = by_name(gradients)
    assert len(gradients) == len(list(model.parameters()))
    if "lm_head.weight" in gradients:  # NNX names a tie by the first place in its own order
        gradients["transformer.wte.weight"] = gradients["lm_head.weight"]
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        np.testing.assert_allclose(gradients[name], want, atol=2e-5 * scale, err_msg=name)


@pytest.mark.nightly_cases("bert", "gpt2")
def test_names_are_those_of_torch(case):
    model, _, converted = case
    kept = model.state_dict()
    transient = {name for name, _ in model.named_buffers(remove_duplicate=False)} - set(kept)
    assert set(fmapper.state(converted)) == set(kept) | transient
    assert sorted(converted.state_dict()) == sorted(kept)
    for name, tensor in kept.items():
        np.testing.assert_array_equal(converted.state_dict()[name], tensor)
        part = converted
        for key in name.split("."):
            part = part[int(key) if key.isdecimal() else key]
        assert isinstance(part, nnx.Variable)
        np.testing.assert_array_equal(part[...], tensor)
    # after a transformation of NNX the attributes are in its order, so a tie has its other name
    trained = {
        "transformer.wte.weight" if n == "lm_head.weight" else n for n in trained_in(converted)
    }
    assert trained == {name for name, _ in model.named_parameters()}


def test_parts_are_found_by_attribute_and_by_index():
    converted = fmapper.convert(Tied(), "flax", (torch.arange(3),))
    assert converted.layers[0].weight is getattr(converted.layers, "0").weight
    assert isinstance(converted.layers[2].bias, nnx.Param)
    assert len(converted.layers) == 2
    assert list(converted.layers) == [converted.layers[0], converted.layers[2]]
    assert "0" in converted.layers
    assert bool(converted.head)
    with pytest.raises(IndexError, match="no submodule 1: there are 0, 2"):
        converted.layers[1]
    with pytest.raises(IndexError, match="numbers of the submodules"):
        converted.layers[-1]
    with pytest.raises(KeyError, match="_programs"):
        converted["_programs"]
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(converted))]
    assert ("layers", 0, "weight") in paths


def test_what_is_trained_and_what_is_not_are_variables_of_their_own_kinds():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.linear = nn.Linear(3, 3)
            self.linear.weight.requires_grad_(False)
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("hidden", torch.tensor(3), persistent=False)
            self.rows = nn.ParameterList([torch.ones(3)])

        def forward(self, x):
            return self.linear(self.norm(x)) * self.scale * self.hidden + self.rows[0]

    model = Kinds().eval()
    x = torch.randn(5, 3)
    converted = fmapper.convert(model, "flax", (x,))
    assert fmapper.verify(model, converted, x)
    assert set(by_name(nnx.state(converted, nnx.BatchStat))) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert set(by_name(nnx.state(converted, nnx.Param))) == set(fmapper.trainables(converted))
    assert set(fmapper.trainables(converted)) == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert type(converted.linear.weight).__name__ == "FrozenParam"
    assert type(converted.scale).__name__ == type(converted.hidden).__name__ == "Buffer"
    assert converted.hidden.get_metadata()["persistent"] is False
    assert isinstance(converted.rows[0], nnx.Param)
    assert sorted(converted.state_dict()) == sorted(model.state_dict())


@pytest.mark.nightly
def test_ties_are_one_variable_and_stay_one():
    model = Tied()
    converted = fmapper.convert(model, "flax", (torch.arange(7),))
    for found in (
        converted,
        nnx.merge(*nnx.split(converted)),
        nnx.clone(converted),
        copy.deepcopy(converted),
        pickle.loads(pickle.dumps(converted)),
        fmapper.fmap(lambda x: x + 0, converted),
        fmapper.to_jax(fmapper.to_numpy(converted)),
    ):
        assert found.embed.weight is found.head.weight
        compare(found(jnp.arange(7)), model(torch.arange(7)))
    compare(jax.jit(lambda m, x: m(x))(converted, jnp.arange(7)), model(torch.arange(7)))


class Mixed(nn.Sequential):
    """Children with numbers and with names."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        for layer in list(self)[:-1]:
            x = layer(x)
        return self.last(x)


@pytest.mark.nightly
@pytest.mark.parametrize("deep", [False, True])
def test_numbers_and_names_may_be_children_of_one_part(deep):
    x = torch.randn(2, 3)
    model = Mixed(nn.Linear(3, 3), nn.Dropout(0.5))
    if deep:
        model = nn.Sequential(model, nn.Identity(), Mixed(nn.Linear(3, 3)))
    converted = fmapper.convert(model, "flax", (x,), train=True, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(converted, optax.sgd(0.1), wrt=nnx.Param)
    gradients = nnx.grad(lambda m, x: m(x).sum())(converted, x.numpy())
    merged = nnx.merge(*nnx.split(converted))
    merged.eval()
    compare(merged(x.numpy()), model.eval()(x))
    compare(fmapper.fmap(lambda a: a, merged)(x.numpy()), model(x))
    optimizer.update(converted, gradients)
    assert set(model.state_dict()) < set(fmapper.state(converted))
    assert converted[0]["last" if deep else "weight"] is not None


def test_a_tie_that_came_apart_is_not_passed_over():
    converted = fmapper.convert(Tied(), "flax", (torch.arange(7),))
    converted.head.weight = nnx.Param(jnp.zeros((7, 4)))
    with pytest.raises(fmapper.ProgramInputError, match=r"head\.weight and embed\.weight are tied"):
        converted(jnp.arange(7))
    del converted.head.weight
    with pytest.raises(fmapper.ProgramInputError, match=r"head\.weight is no longer in the model"):
        converted(jnp.arange(7))


def test_a_copy_is_not_compiled_anew():
    traced = []

    @fmapper.lowering("aten::sinh")
    def sinh(x):
        traced.append(x)
        return jnp.sinh(x)

    try:
        converted = fmapper.convert(Function(torch.sinh), "flax", (torch.ones(3),))
        for model in (converted, nnx.clone(converted), copy.deepcopy(converted)):
            model(jnp.ones(3))
            model(jnp.ones(3))
        assert len(traced) == 1
    finally:
        from fmapper.programs import lowering

        del lowering.added[None]["aten::sinh"]


def test_a_name_that_flax_needs_is_refused():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.rngs = nn.Linear(3, 3)

        def forward(self, x):
            return self.rngs(x)

    with pytest.raises(fmapper.ConversionError, match="child 'rngs' has a name"):
        fmapper.convert(Named(), "flax", (torch.ones(2, 3),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["save", "state_dict_", "call", "params", "sow", "variables"])
def test_other_names_are_free(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, nn.Linear(3, 3))

        def forward(self, x):
            return getattr(self, name)(x)

    x = torch.randn(2, 3)
    model = Named()
    converted = fmapper.convert(model, "flax", (x,))
    compare(converted(x.numpy()), model(x))
    module = fmapper.convert(model, "linen", (x,))
    compare(module.apply(module.init(jax.random.key(0), x.numpy()), x.numpy()), model(x))


def test_the_name_of_the_collection_of_parameters_is_reserved_beside_others():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.params, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.params(x))

    with pytest.raises(fmapper.ConversionError, match="child 'params' has a name"):
        fmapper.convert(Named(), "linen", (torch.randn(2, 3),))


@pytest.mark.nightly
def test_outputs_can_be_batched_over():
    x = torch.randn(6, 5, 2, 6, 6)
    model = Convolutional().eval()
    converted = fmapper.convert(model, "flax", (x[0],))
    many = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(converted, jnp.asarray(x.numpy()))
    compare(many[4], model(x[4]))


@pytest.mark.nightly
def test_in_bfloat16():
    model, inputs = CASES["tied"]()
    converted = fmapper.cast(fmapper.convert(model, "flax", inputs), "bfloat16")
    assert converted.embed.weight is converted.head.weight
    compare(converted(*arrays(inputs)), model.bfloat16()(*inputs))


# --- training -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_twenty_steps_of_an_optimizer_are_those_of_torch():
    model = Convolutional()
    x, y = torch.randn(4, 8, 2, 6, 6), torch.randint(0, 3, (4, 8))
    converted = fmapper.convert(model, "flax", (x[0],), train=True)
    optimizer = nnx.Optimizer(converted, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)

    def cross_entropy(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.jit
    def step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(cross_entropy)(model, x, y)
        optimizer.update(model, gradients)
        return value

    model.train()
    theirs = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for i in range(20):
        theirs.zero_grad()
        want = nn.functional.cross_entropy(model(x[i % 4]), y[i % 4])
        want.backward()
        theirs.step()
        got = step(converted, optimizer, x[i % 4].numpy(), y[i % 4].numpy())
        np.testing.assert_allclose(got, want.detach(), rtol=1e-4)
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(
            converted.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, err_msg=name
        )
    assert int(converted.body[1].num_batches_tracked[...]) == 20
    converted.eval()
    compare(converted(x[0].numpy()), model.eval()(x[0]), scale=10)


@pytest.mark.nightly
def test_twenty_steps_with_a_tie():
    model, ids = Tied(), torch.arange(7)
    converted = fmapper.convert(model, "flax", (ids,), train=True)
    optimizer = nnx.Optimizer(converted, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(lambda m: (m(jnp.arange(7)) ** 2).mean())(model)
        optimizer.update(model, gradients)

    theirs = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(20):
        theirs.zero_grad()
        model(ids).square().mean().backward()
        theirs.step()
        step(converted, optimizer)
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(converted.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    assert converted.embed.weight is converted.head.weight


@pytest.mark.nightly
def test_statistics_are_changed_in_place_in_training_and_not_in_evaluation():
    model = Convolutional()
    x = torch.randn(5, 2, 6, 6)
    converted = fmapper.convert(model, "flax", (x,), train=True)
    model.train()
    assert not converted.deterministic
    compare(converted(x.numpy()), model(x), scale=10)
    for name, buffer in model.named_buffers():
        compare(converted.state_dict()[name], buffer)
    model.eval()
    converted.eval()
    before = converted.state_dict()
    compare(converted(x.numpy()), model(x), scale=10)
    assert all(converted.state_dict()[name] is array for name, array in before.items())


@pytest.mark.nightly
def test_dropout_draws_from_rngs_and_is_off_in_evaluation():
    model = Convolutional(p=0.5).eval()
    x = torch.randn(5, 2, 6, 6)
    array = jnp.asarray(x.numpy())
    converted = fmapper.convert(model, "flax", (x,), train=True)
    assert converted.deterministic  # as the module is
    compare(converted(array), model(x))
    converted.train()
    with pytest.raises(fmapper.ProgramInputError, match=r"rngs=nnx\.Rngs\(dropout=0\)"):
        converted(array)
    first = converted(array, rngs=nnx.Rngs(dropout=0))
    np.testing.assert_array_equal(first, converted(array, rngs=nnx.Rngs(dropout=0)))
    assert (first != converted(array, rngs=nnx.Rngs(dropout=1))).any()
    for rngs in (nnx.Rngs(0).dropout, jax.random.key(0)):
        assert converted(array, rngs=rngs).shape == (5, 3)

    @nnx.jit
    def run(model, x):
        return model(x)

    converted.rngs = nnx.Rngs(0)
    again = fmapper.convert(model, "flax", (x,), train=True, rngs=nnx.Rngs(0))
    again.train()
    mine = [run(converted, array), converted(array)]
    theirs = [again(array), run(again, array)]
    np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert np.abs(mine[0] - mine[1]).max() > 1e-3


def test_a_model_without_a_program_for_the_mode_says_so():
    x = torch.randn(5, 3)
    converted = fmapper.convert(nn.Linear(3, 3), "flax", (x,))
    assert converted.deterministic
    converted.train()
    with pytest.raises(fmapper.ProgramInputError, match="convert it with train=True"):
        converted(x.numpy())
    program = fmapper.convert(nn.Linear(3, 3), "jax", (x,), train=True).as_program()
    converted = fmapper.convert(program, "flax")
    converted(x.numpy())
    converted.eval()
    with pytest.raises(fmapper.ProgramInputError, match="for training only"):
        converted(x.numpy())


@pytest.mark.nightly
def test_a_module_around_it_switches_it_too():
    class Around(nnx.Module):
        def __init__(self, inner, rngs):
            self.inner = inner
            self.head = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(self.inner(x))

    x = torch.randn(5, 2, 6, 6)
    model = Convolutional().eval()
    around = Around(fmapper.convert(model, "flax", (x,), train=True), nnx.Rngs(0))
    around.eval()
    want = model(x).detach().numpy() @ np.asarray(around.head.kernel[...])
    np.testing.assert_allclose(around(x.numpy()), want, atol=1e-5)
    around.train()
    assert np.abs(around(x.numpy()) - want).max() > 1e-3


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(nnx, "view"), reason="an older Flax")
def test_a_view_in_the_other_mode_shares_its_variables():
    x = torch.randn(5, 2, 6, 6)
    model = Convolutional().eval()
    converted = fmapper.convert(model, "flax", (x,), train=True)
    converted.train()
    view = nnx.view(converted, deterministic=True)
    assert not converted.deterministic
    compare(view(x.numpy()), model(x))
    assert view.head.weight is converted.head.weight


# --- weights and files ----------------------------------------------------------------------------


def test_other_weights_are_taken_in_place():
    model, inputs = CASES["tied"]()
    converted = fmapper.convert(Tied(), "flax", inputs)
    variable = converted.embed.weight
    converted.load_state_dict(model.state_dict())
    assert converted.embed.weight is variable is converted.head.weight
    compare(converted(*arrays(inputs)), model(*inputs))
    state = model.state_dict()
    del state["layers.0.bias"]
    with pytest.raises(fmapper.StructureMismatchError, match=r"layers\.0\.bias: missing"):
        converted.load_state_dict(state)


@pytest.mark.nightly
def test_both_programs_are_saved_and_loaded(tmp_path):
    class Constants(nn.Module):
        """Constants that differ between the modes."""

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            offset = torch.tensor([1.0, 2.0, 3.0] if self.training else [10.0, 20.0, 30.0])
            return self.norm(x) + offset

    model = Constants()
    x = torch.randn(5, 3)
    converted = fmapper.convert(model, "flax", (x,), train=True)
    converted(x.numpy())
    converted.save(tmp_path / "model.safetensors")
    copies = [
        type(converted).load(tmp_path / "model.safetensors"),
        pickle.loads(pickle.dumps(converted)),
    ]
    wanted = [model.train()(x), model(x), model.eval()(x)]
    compare(converted(x.numpy()), wanted[1], scale=10)
    converted.eval()
    compare(converted(x.numpy()), wanted[2], scale=10)
    for again in copies:
        assert not again.deterministic
        compare(again(x.numpy()), wanted[1], scale=10)
        again.eval()
        compare(again(x.numpy()), wanted[2], scale=10)


@pytest.mark.nightly
def test_a_checkpoint_of_orbax_is_restored(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    model, inputs = CASES["tied"]()
    converted = fmapper.convert(model, "flax", inputs)
    _, state = nnx.split(converted)
    other = fmapper.convert(Tied(), "flax", inputs)
    graph, target = nnx.split(other)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    compare(nnx.merge(graph, restored)(*arrays(inputs)), model(*inputs))


# --- Linen ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_linen_module_has_the_variables_as_nested_dicts():
    model, inputs = CASES["tied"]()
    module = fmapper.convert(model, "linen", inputs)
    assert isinstance(module, linen.Module)
    variables = module.init(jax.random.key(0), *arrays(inputs))
    assert sorted(variables) == ["params"]
    flat = {".".join(path): x for path, x in linen_flat(variables["params"])}
    assert set(flat) == {name for name, _ in model.named_parameters()}
    np.testing.assert_array_equal(flat["layers.0.weight"], model.layers[0].weight.detach())
    compare(module.apply(variables, *arrays(inputs)), model(*inputs))
    model(*inputs).square().sum().backward()
    gradients = jax.jit(
        jax.grad(lambda p: (module.apply({"params": p}, *arrays(inputs)) ** 2).sum())
    )(variables["params"])
    compare(gradients["embed"]["weight"], model.embed.weight.grad)


def linen_flat(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from linen_flat(value, (*path, key))
        else:
            yield (*path, key), value


@pytest.mark.nightly
def test_a_linen_module_is_trained_with_a_train_state():
    class State(TrainState):
        batch_stats: dict

    model = Convolutional()
    x, y = torch.randn(8, 2, 6, 6), torch.randint(0, 3, (8,))
    module = fmapper.convert(model, "linen", (x,), train=True)
    variables = module.init(jax.random.key(0), x.numpy())
    assert sorted(variables) == ["batch_stats", "params"]
    assert int(variables["batch_stats"]["body"]["1"]["num_batches_tracked"]) == 0
    state = State.create(
        apply_fn=module.apply,
        params=variables["params"],
        tx=optax.sgd(0.05),
        batch_stats=variables["batch_stats"],
    )

    @jax.jit
    def step(state, x, y):
        def loss(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                train=True,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), updates

        gradients, updates = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=updates["batch_stats"])

    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        state = step(state, x.numpy(), y.numpy())
    trained = {**linen_dict(state.params), **linen_dict(state.batch_stats)}
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(trained[name], tensor, rtol=1e-4, atol=1e-5, err_msg=name)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    compare(module.apply(variables, x.numpy()), model.eval()(x), scale=10)


def linen_dict(tree):
    return {".".join(path): x for path, x in linen_flat(tree)}


@pytest.mark.nightly
def test_linen_dropout_and_immutable_statistics():
    model = Convolutional(p=0.5)
    x = jnp.asarray(torch.randn(5, 2, 6, 6).numpy())
    module = fmapper.convert(model, "linen", (torch.ones(5, 2, 6, 6),), train=True)
    variables = module.init(jax.random.key(0), x)

    def run(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return module.apply(variables, x, train=True, rngs=rngs, mutable=["batch_stats"])[0]

    np.testing.assert_array_equal(run(0), run(0))
    assert (run(0) != run(1)).any()
    with pytest.raises(fmapper.ProgramInputError, match=r"pass apply rngs="):
        module.apply(variables, x, train=True, mutable=["batch_stats"])
    from flax.errors import ModifyScopeVariableError

    with pytest.raises(ModifyScopeVariableError):
        module.apply(variables, x, train=True, rngs={"dropout": jax.random.key(0)})
    fixed = module.clone(train=True)
    with pytest.raises(fmapper.ProgramInputError, match="draws random numbers"):
        fixed.apply(variables, x, mutable=["batch_stats"])


@pytest.mark.nightly
def test_a_linen_module_inside_another():
    model, inputs = CASES["tied"]()
    module = fmapper.convert(model, "linen", inputs)

    class Around(linen.Module):
        inner: linen.Module

        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(self.inner(x))

    around = Around(module)
    variables = around.init(jax.random.key(0), *arrays(inputs))
    assert set(variables["params"]) == {"inner", "Dense_0"}
    want = model(*inputs).detach().numpy() @ np.asarray(variables["params"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(around.apply(variables, *arrays(inputs)), want, atol=1e-5)
    with pytest.raises(fmapper.ConversionError, match="pass them to apply"):
        fmapper.convert(model, "linen", inputs, rngs=nnx.Rngs(0))


def test_a_part_that_is_called_says_how_parts_are_called():
    module, x = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.ones(4, 3)
    converted = fmapper.convert(module, "nnx", (x,))
    assert type(converted).__name__ == "FlaxModel"
    with pytest.raises(TypeError, match=r"structure=True.* submodules can be called"):
        converted[0](x.numpy())
