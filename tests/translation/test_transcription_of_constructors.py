"""Constructors in transcribed files: what they were given, and classes that they choose by name."""

import ast
import logging
from functools import partial

import pytest

import fmapper

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from fmapper_adapters.flax.translation.build import open_file  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.constructors.arguments import find_arguments  # noqa: E402
from fmapper_translate.constructors.notes import arguments_of, note_arguments  # noqa: E402
from fmapper_translate.flax.table import LAYERS  # noqa: E402
from fmapper_translate.recording import record  # noqa: E402
from fmapper_translate.sources.torch import TorchSource  # noqa: E402
from fmapper_translate.walk.expressions import kind_of_numbers  # noqa: E402

X = torch.ones(2, 4)


class Chosen(nn.Module):
    def __init__(self, width, kind="Linear", act="ReLU"):
        super().__init__()
        self.width = width
        self.layer = getattr(nn, kind)(width, width)
        self.act = getattr(nn, act)()
        self.kind, self.name = kind, act

    def forward(self, x):
        return self.act(self.layer(x))


def test_a_layer_that_is_chosen_by_its_name_is_taken_from_a_table():
    model = Chosen(4, act="Tanh")
    made = transcribe(model, (X,), ((4,), {"act": "Tanh"}))
    assert '{"Linear": Linear}[kind](width, width, rngs=rngs)' in made.whole
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    assert jnp.allclose(twin(jnp.array(X)), model(X).detach().numpy(), atol=1e-6)
    with pytest.raises(KeyError):
        names["Chosen"](4, "Bilinear", rngs=nnx.Rngs(0))


class Switched(nn.Module):
    def __init__(self, width=4, is_tied=False, has_bias=True):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        if is_tied:
            self.second.weight = self.first.weight
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("name", ["is_tied", "has_bias"])
def test_a_switch_that_left_no_trace_is_what_makes_the_same_model(name):
    model = Switched(**{name: name == "is_tied"})
    _, found = find_arguments(model)
    assert found[name] is (name == "is_tied")


class Shifted(nn.Module):
    def __init__(self, width=4, shift=1.0):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.by = shift + 1

    def forward(self, x):
        return self.layer(x) + self.by


class Hidden(nn.Module):
    def __init__(self, width=4, shift=1.0):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.change = lambda x: x + shift

    def forward(self, x):
        return self.change(self.layer(x))


@pytest.mark.parametrize("kind", [Shifted, Hidden])
def test_a_model_whose_arguments_are_unknown_is_refused(kind):
    with pytest.raises(NotTranscribed, match=r"arguments=\{"):
        transcribe(kind(shift=3.0), (X,))


def test_a_file_that_is_written_by_its_operations_says_why():
    code = fmapper.source(Hidden(shift=3.0), "flax", (X,))
    docstring = ast.get_docstring(ast.parse(code))
    why = "Written by its operations, not in the words of its source: Hidden: a model that is"
    assert why in docstring.replace("\n", " ")
    assert "# written" not in code


def test_a_user_says_what_a_model_does_not_keep():
    code = fmapper.source(Hidden(shift=3.0), "flax", (X,), arguments={"width": 4, "shift": 3.0})
    assert "class Hidden(nnx.Module):\n    def __init__(self, width=4, shift=1.0" in code
    assert "return Hidden(width=4, shift=3.0, rngs=rngs)" in code


@pytest.mark.parametrize("wrong", [{"shift": 2.0}, {"width": 5, "shift": 3.0}, {"depth": 1}])
def test_arguments_that_make_another_model_are_an_error(wrong):
    with pytest.raises(fmapper.ConversionError):
        fmapper.source(Hidden(shift=3.0), "flax", (X,), arguments=wrong)


class Scaled(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.rates = (1 - torch.exp(torch.linspace(-1.0, 0.0, count))).tolist()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for rate in self.rates:
            x = self.layer(x) * rate
        return x


def test_a_constructor_may_read_numbers_from_arrays(tmp_path):
    model = Scaled()
    made = transcribe(model, (X,))
    module = type(pytest)("scaled_file")
    exec(made.whole, vars(module))
    weights = {name: x.numpy() for name, x in made.weights.items()}
    twin, _ = open_file(module, "make_model", weights, train=False)
    assert jnp.allclose(twin(jnp.array(X)), model(X).detach().numpy(), atol=1e-6)


class Based(Hidden):
    def __init__(self, *sizes, depth=2, **more):
        super().__init__(sizes[0], shift=more["shift"])
        self.depth = depth


def test_arguments_are_noted_while_a_model_is_made():
    with note_arguments():
        hidden, based = Hidden(shift=3.0), Based(4, 5, shift=2.0)
    made = transcribe(hidden, (X,))
    assert "return Hidden(width=4, shift=3.0, rngs=rngs)" in made.whole
    assert arguments_of(based) == ([4, 5], {"depth": 2, "shift": 2.0})
    assert arguments_of(Hidden()) is None


class Registered(nn.Module):
    def __init__(self, sizes=(2, 3)):
        super().__init__()
        self.offsets = np.array((0, *np.cumsum(sizes)[:-1]), dtype=np.int64)
        self.table = nn.Embedding(sum(sizes), 4)
        self.register("scale", torch.ones(4), 0.1)

    def register(self, name, array, rate):
        self.register_parameter(name, nn.Parameter(array))
        getattr(self, name)._options = {"lr": rate}

    def forward(self, ids):
        return self.table(ids + ids.new_tensor(self.offsets).unsqueeze(0)) * self.scale


def test_offsets_of_numpy_and_options_of_parameters_stay():
    model, ids = Registered(), torch.tensor([[0, 2], [1, 0]])
    made = transcribe(model, (ids,), ((), {}))
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    assert jnp.allclose(twin(jnp.array(ids)), model(ids).detach().numpy(), atol=1e-6)
    assert twin.scale.get_metadata()["_options"] == {"lr": 0.1}


class Moves(nn.Module):
    def __init__(self, width, shifts=False):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.steps = 0

    def forward(self, x):
        self.steps = 3
        return self.fc(x)


def test_what_a_call_changes_says_nothing_of_arguments():
    model = Moves(4)
    model(torch.ones(1, 4))
    assert find_arguments(model) == ((), {"width": 4})


class Doubled(nn.Module):
    def __init__(self, options):
        options["shift"] *= 2
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shift = options["shift"]

    def forward(self, x):
        return self.layer(x) + self.shift


def test_noted_arguments_that_make_another_model_are_refused():
    with note_arguments():
        model = Doubled({"shift": 3.0})
    with pytest.raises(NotTranscribed, match="gives something else"):
        transcribe(model, (X,))


def test_a_model_that_was_changed_since_it_was_made_is_refused():
    class Dropping(nn.Module):
        def __init__(self, width=4, rate=0.5):
            super().__init__()
            self.width, self.rate = width, rate
            self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(rate)

    model = Dropping(rate=0.25)
    assert find_arguments(model) == ((), {"width": 4, "rate": 0.25})
    model.dropout.p = 0.75  # which no comparison in evaluation tells
    with pytest.raises(NotTranscribed, match="does not make this model of the arguments"):
        find_arguments(model)


class Distances(nn.Module):
    """Has a bias for each distance of two points."""

    def __init__(self, side=6, depth=2):
        super().__init__()
        points = [(i, j) for i in range(side) for j in range(side)]
        places, indices = {}, []
        for p in points:
            for q in points:
                place = (abs(p[0] - q[0]), abs(p[1] - q[1]))
                if place not in places:
                    places[place] = len(places)
                indices.append(places[place])
        self.biases = nn.Parameter(torch.randn(len(places)))
        self.register_buffer("indices", torch.LongTensor(indices).view(len(points), len(points)))
        self.layers = []
        for _ in range(depth):
            self.layers.append(nn.Linear(4, 4))
        self.layers = nn.ModuleList(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + self.biases[self.indices].sum()


def test_what_a_loop_over_numbers_gives_is_recorded_once():
    recording, _ = record(TorchSource(LAYERS), Distances, [lambda model: model(X)])
    counts = {
        ast.unparse(node): len(events)
        for node, events in recording.events.items()
        if isinstance(node, ast.expr)
    }
    assert counts["indices.append"] == 1
    assert counts["place"] == 36  # of 1296
    model = Distances()
    made = transcribe(model, (X,))
    assert "        for p in points:\n            for q in points:\n" in made.code
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    assert jnp.allclose(twin(jnp.array(X)), model(X).detach().numpy(), atol=1e-5)


class Frozen(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.register_buffer("weight", torch.ones(count))
        self.register_buffer("mean", torch.zeros(count))

    def forward(self, x):
        return (x - self.mean[:, None]) * self.weight[:, None]


def freeze_norms(model):
    for name, module in model.named_children():
        if isinstance(module, nn.BatchNorm1d):
            new = Frozen(module.num_features)
            new.weight.copy_(module.weight)
            new.mean.copy_(module.running_mean)
            model._modules[name] = new
        if len(list(module.children())) > 0:
            freeze_norms(module)


class Normed(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, width, 1), nn.BatchNorm1d(width), nn.ReLU())
        self.last = nn.ModuleList([nn.BatchNorm1d(width)])
        with torch.no_grad():
            freeze_norms(self)

    def forward(self, x):
        return self.last[0](self.body(x[:, None]))


def test_parts_that_are_replaced_by_name_are_replaced_in_the_file():
    model = Normed()
    with torch.no_grad():
        for array in model.state_dict().values():
            array.uniform_(0.5, 1.5)
    made = transcribe(model, (X,))
    assert (
        "        for name, module in named_children(model):\n".replace("    ", "", 1) in made.code
    )
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    assert type(twin.body[1]).__name__ == type(twin.last[0]).__name__ == "Frozen"
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    assert jnp.allclose(twin(jnp.array(X)), model(X).detach().numpy(), atol=1e-5)


def tell(kind):
    name = kind.__name__
    if not name.startswith("A"):
        name = f"of tests: {name}"
    logging.getLogger(__name__).debug(name)


class Stage:
    """A width and a depth, of which it does not keep what it was given."""

    def __init__(self, width, act, factor=1.0):
        self.width = self.rounded(width, factor)
        self.act = act

    @staticmethod
    def rounded(width, factor):
        return int(width * factor)


class Wide(nn.Module):
    def __init__(self, stages, inner=partial(nn.SiLU, inplace=True)):  # noqa: B008
        super().__init__()
        tell(type(self))
        if not all(isinstance(item, Stage) for item in stages):
            raise TypeError("stages")
        self.layers = nn.ModuleList([nn.Linear(4, stage.width) for stage in stages])
        self.acts = [stage.act() for stage in stages]
        self.inner = inner()
        self.width = stages[0].rounded(stages[0].width, 1.0)

    def forward(self, x):
        return [self.inner(act(layer(x))) for act, layer in zip(self.acts, self.layers)]  # noqa: B905


def test_settings_whose_arguments_are_not_known_keep_their_class():
    model = Wide([Stage(4, nn.ReLU, 1.5), Stage(3, nn.Tanh, 1.4)])
    made = transcribe(model, (X,), ((model_stages(model),), {}))
    assert "with_attributes(object.__new__(Stage), width=6, act=ReLU)" in made.example
    assert "    @staticmethod\n    def rounded(width, factor):" in made.code
    assert "tell" not in made.code
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    for ours, theirs in zip(twin(jnp.array(X)), model(X), strict=True):
        assert jnp.allclose(ours, theirs.detach().numpy(), atol=1e-5)
    assert len(names["Wide"]([names["Stage"](2, names["ReLU"])], rngs=nnx.Rngs(0)).layers) == 1


def model_stages(model):
    """The settings of a model as they are."""
    kinds = (nn.ReLU, nn.Tanh)
    return [Stage(x.out_features, act) for x, act in zip(model.layers, kinds, strict=True)]


class Permutes(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return torch.permute(x, self.dims)


class Drawn(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        params = {} if inplace is None else {"inplace": inplace}
        self.place = nn.Parameter(torch.empty(1, 3, 4).normal_(std=0.02))
        self.layers = nn.Sequential(
            Permutes(0, 2, 1), nn.Dropout(0.0, **params), Permutes(1, 2, 0), nn.ReLU(**params)
        )

    def forward(self, x):
        return self.layers(x[:, None] + self.place)


def test_dimensions_of_each_part_and_drawn_parameters_are_the_sources():
    model = Drawn()
    made = transcribe(model, (X,), ((), {}))
    assert "x.transpose(*self.dims)" in made.code
    assert "nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 3, 4)))" in made.code
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    assert 0 < float(jnp.std(twin.place[...])) < 0.06
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    assert jnp.allclose(twin(jnp.array(X)), model(X).detach().numpy(), atol=1e-5)


class Sinusoids(nn.Module):
    def __init__(self, rows=9, width=4):
        super().__init__()
        table = [[p / np.power(10.0, j / width) for j in range(width)] for p in range(rows)]
        self.register_buffer("table", torch.FloatTensor(np.array(table)))
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return self.fc(x + self.table[: len(x)])


def test_a_table_of_numpy_is_recorded_and_printed_once():
    recording, _ = record(TorchSource(LAYERS), Sinusoids, [lambda model: model(X)])
    power = next(x for x in recording.events if isinstance(x, ast.Attribute) and x.attr == "power")
    assert len(recording.events[power]) == 1  # of 36
    call = next(x for x in recording.events if isinstance(x, ast.Call) and x.func is power)
    kinds = {kind_of_numbers(event.value) for event in recording.events[call]}
    assert kinds == {np.float64}
    model = Sinusoids()
    made = transcribe(model, (X,))
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    names["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    assert jnp.allclose(twin(jnp.array(X)), model(X).detach().numpy(), atol=1e-5)
