"""Files that are transcribed from the source of a model's classes."""

import copy
import functools
import importlib
import inspect
import math
import operator
import pathlib
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fmapper  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.constructors.arguments import find_arguments  # noqa: E402
from models.repositories import nanogpt  # noqa: E402


@dataclass
class Config:
    """The sizes of the model below."""

    width: int = 8
    heads: int = 2
    depth: int = 2


class Attention(nn.Module):
    """Attends to what is before."""

    def __init__(self, config):
        super().__init__()
        # for all heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.heads = config.heads

    def forward(self, x):
        b, n, c = x.size()
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.view(b, n, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        unseen = torch.ones(n, n).triu(1) > 0  # what comes later
        weights = F.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1)
        return (weights @ v).transpose(1, 2).contiguous().view(b, n, c)


class Model(nn.Module):
    def __init__(self, config, classes=3):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList([Attention(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, classes)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = x + block(x) * (i + 1)
        x[:, 0] = 1.0
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, inner, outer, stride=1, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm = norm(outer)
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Conv2d(inner, outer, 1, stride) if stride > 1 or inner != outer else None

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        if self.skip is not None:
            x = self.skip(x)
        return x + y


class Images(nn.Module):
    def __init__(self, widths, classes):
        super().__init__()
        self.blocks = nn.Sequential(*self.make_blocks(widths))
        self.head = nn.Linear(widths[-1], classes)

    def make_blocks(self, widths):
        blocks = [Block(3, widths[0])]
        for inner, outer in zip(widths[:-1], widths[1:], strict=True):  # noqa: RUF007
            blocks.append(Block(inner, outer, stride=2))
        return blocks

    def forward(self, x):
        x = self.blocks(x)
        return self.head(x.mean((2, 3)))


def run(made, model, *inputs):
    """What the file gives in evaluation, with the weights of the model."""
    space = {}
    exec(made.code, space)
    exec(f"def make(rngs):\n    return {made.example}", space)
    twin = space["make"](nnx.Rngs(0))
    space["load_weights"](twin, {name: x.numpy() for name, x in made.weights.items()})
    twin.eval()
    return space, twin(*(jnp.asarray(x.numpy()) for x in inputs))


@pytest.fixture(scope="module")
def sequences():
    torch.manual_seed(0)
    model, x = Model(Config()).eval(), torch.randn(2, 5, 8)
    made = transcribe(model, (x,), ((Config(),), {}))
    return made, *run(made, model, x), model(x.clone()).detach()


def test_the_file_gives_what_its_model_gives(sequences):
    *_, found, expected = sequences
    assert jnp.allclose(found, expected.numpy(), atol=1e-5)


def test_the_statements_are_those_of_the_source(sequences):
    for line in (
        "        # for all heads\n        self.qkv = Linear(config.width, 3 * config.width",
        "        b, n, c = x.shape",
        "        unseen = jnp.triu(jnp.ones((n, n)), k=1) > 0  # what comes later",
        "        for i, block in enumerate(self.blocks):\n            x = x + block(x) * (i + 1)",
        "        x = x.at[:, 0].set(1.0)",
        "nnx.List([Attention(config, rngs=rngs) for _ in range(config.depth)])",
    ):
        assert line in sequences[0].code


def test_the_top_class_takes_the_sources_arguments_and_trains(sequences):
    space = sequences[1]
    model = space["Model"](space["Config"](width=12, heads=3, depth=3), classes=4, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 7, 12))
    assert len(model.blocks) == 3

    def loss(model):
        return (model(x) ** 2).sum()

    slopes = nnx.grad(loss)(model)
    assert float(jnp.abs(slopes["blocks"][2]["qkv"]["kernel"][...]).max()) > 0
    assert model(x).shape == (3, 7, 4)


def test_conditions_of_which_both_sides_ran_are_the_sources():
    torch.manual_seed(0)
    model, x = Images((4, 6), 3).eval(), torch.randn(2, 3, 6, 6)
    made = transcribe(model, (x,), (((4, 6), 3), {}))
    space, found = run(made, model, x)
    assert jnp.allclose(found, model(x).detach().numpy(), atol=1e-5)
    assert "        if self.skip is not None:\n            x = self.skip(x)" in made.code
    assert "stride=1, norm=BatchNorm2d, *, rngs: nnx.Rngs" in made.code
    deeper = space["Images"]((4, 6, 8), 2, rngs=nnx.Rngs(0))
    assert deeper(jnp.ones((2, 3, 8, 8))).shape == (2, 2)


class Profiled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        with torch.profiler.record_function("fc"):
            first, second = self.fc(x).chunk(2, -1)
            return torch.cat([second, first], -1)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


class OfFour(Outer):
    def __init__(self, kind):
        super().__init__(kind(4))


def test_a_function_without_counterpart_is_written_by_its_operations():
    torch.manual_seed(0)
    model, x = OfFour(Profiled).eval(), torch.randn(2, 4)
    made = transcribe(model, (x,), ((Profiled,), {}))
    assert list(made.fallen) == ["Profiled.forward"]
    assert "        return self.inner(x) * 2" in made.code
    assert jnp.allclose(run(made, model, x)[1], model(x).detach().numpy(), atol=1e-5)


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x):
        y = x * self.scale
        first = y[:, 0]
        first.mul_(2.0)  # which changes y
        return y


def test_statements_that_give_something_else_are_not_taken():
    torch.manual_seed(0)
    with pytest.raises(NotTranscribed, match=r"Scaled.forward: its statements give something else"):
        transcribe(OfFour(Scaled), (torch.randn(2, 4),), ((Scaled,), {}))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["nanogpt", "segformer"])  # which has stochastic depth
def test_a_model_of_a_repository_is_proved(name):
    torch.manual_seed(0)
    model, inputs, *_ = importlib.import_module(f"models.repositories.{name}").build()
    proof = transcribe(model, inputs).prove(model, inputs)
    assert proof, proof


@pytest.mark.nightly
def test_the_file_of_a_repository_is_its_source_at_other_sizes():
    torch.manual_seed(0)
    space = {}
    exec(transcribe(*nanogpt.build()).code, space)
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 3, "bias": False, "vocab_size": 31}
    model = nanogpt.GPT(nanogpt.GPTConfig(**sizes, block_size=20)).eval()
    twin = space["GPT"](space["GPTConfig"](**sizes, block_size=20), rngs=nnx.Rngs(0))
    space["load_weights"](twin, {name: x.numpy() for name, x in model.state_dict().items()})
    twin.eval()
    ids = torch.randint(0, 31, (3, 9))
    assert jnp.allclose(
        twin(jnp.asarray(ids.numpy()))[0], model(ids)[0].detach().numpy(), atol=1e-5
    )


class Scaled2d(nn.Conv2d):
    """A layer whose class is the model's."""


class Initialised(nn.Module):
    def __init__(self, std=0.02):
        super().__init__()
        self.conv = Scaled2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.body = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 12, bias=False)
        self.table = nn.Embedding(12, 16, padding_idx=2)
        self.position = nn.Parameter(torch.empty(1, 12, 16))
        self.mixing = nn.Parameter(torch.empty(24, 16))
        self.gain = nn.Parameter(torch.empty(16))
        nn.init.trunc_normal_(self.position, std=std)
        nn.init.kaiming_uniform_(self.mixing, a=math.sqrt(5))
        nn.init.uniform_(self.gain, -3 * std, std)
        self.apply(self._init_weights)
        for name, weight in self.named_parameters():
            if name.endswith("2.weight"):
                nn.init.xavier_uniform_(weight, gain=3.0)
        self.body[1].weight.data.mul_(0.25)
        self.head.weight.data[:4].fill_(2.0)
        nn.init.zeros_(self.mixing[3])

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.5)
        elif isinstance(module, nn.ConvTranspose3d):
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.BatchNorm2d):
            module.weight.data.fill_(0.25)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3)) * self.gain
        for layer in self.body:
            x = layer(x)
        x = self.head(x)[:, :, None] * self.table.weight + self.position
        return x @ self.mixing.T


def test_a_new_model_begins_with_the_values_of_the_source():
    torch.manual_seed(0)
    made = transcribe(Initialised(), (torch.ones(1, 3, 4, 4),))
    space = {}
    exec(made.code, space)
    theirs = [Initialised().state_dict() for _ in range(8)]
    ours = [space["source_state"](space["Initialised"](rngs=nnx.Rngs(i))) for i in range(8)]
    for name in made.weights:
        a = np.stack([state[name].numpy() for state in theirs])
        b = np.stack([np.asarray(state[name]) for state in ours])
        bound = 6 * a.std() / a.size**0.5 + 1e-6
        assert abs(a.mean() - b.mean()) < bound, name
        assert abs(a.std() - b.std()) < bound, name
    assert "Parameters begin" not in made.code
    assert "isinstance(module, (Linear, Conv2d))" in made.code


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        nn.init.sparse_(self.head.weight, 0.5)

    def forward(self, x):
        return self.head(x)


def test_a_file_says_which_initial_values_of_the_source_it_lacks():
    said = "not with those of the source in Sparse."
    assert said in transcribe(Sparse(), (torch.ones(1, 3),)).code.split('"""')[1]


def test_arrays_go_to_the_file_and_back(sequences):
    made, space, *_ = sequences
    torch.manual_seed(1)
    state = Model(Config()).state_dict()
    model = space["Model"](space["Config"](), rngs=nnx.Rngs(0))
    space["load_weights"](model, {name: x.numpy() for name, x in state.items()})
    back = space["source_state"](model)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], x.numpy()) for name, x in state.items())
    renamed = made.rules.apply({name: x.numpy() for name, x in state.items()})
    kept = fmapper.state(model)
    assert renamed.keys() == kept.keys()
    assert all(np.array_equal(np.asarray(renamed[name]), kept[name]) for name in kept)
    assert made.rules.inverse().apply(renamed).keys() == state.keys()


class Told(nn.Module):
    def __init__(self, inner, outer, depth, rate=0.1, *, kind=nn.ReLU, eps=1e-5):
        super().__init__()
        self.n = depth
        self.first = nn.Linear(inner, 4 * outer)
        self.blocks = nn.ModuleList([nn.Linear(4 * outer, 4 * outer) for _ in range(depth)])
        self.body = nn.Sequential(kind(), nn.Dropout(rate), nn.LayerNorm(4 * outer, eps=eps))


class Untold(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.factor = scale**2


def test_arguments_of_the_constructor_are_read_from_the_model():
    _, arguments = find_arguments(Told(3, 2, 4, rate=0.3, eps=1e-3))
    assert arguments == {"inner": 3, "outer": 2, "depth": 4, "rate": 0.3, "eps": 1e-3}


def test_arguments_that_left_no_trace_are_asked_for():
    with pytest.raises(NotTranscribed, match="the model does not say what scale was"):
        find_arguments(Untold(3, 2.0))
    with pytest.raises(NotTranscribed, match="does not say what"):
        find_arguments(Told(3, 2, 4, kind=nn.GELU))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask.relu()
        y = self.fc(x)
        return y if mask is None else y + 1


def test_conditions_of_which_each_example_takes_one_side_are_the_sources():
    torch.manual_seed(0)
    model, x, mask = Masked().eval(), torch.randn(2, 4), torch.rand(2, 4)
    made = transcribe(model, [(x,), (x, mask)])
    assert "        if mask is not None:\n            x = x * jax.nn.relu(mask)" in made.code
    _, result = run(made, model, x, mask)
    assert jnp.allclose(result, model(x, mask).detach().numpy(), atol=1e-5)
    assert jnp.allclose(run(made, model, x)[1], model(x).detach().numpy(), atol=1e-5)
    with pytest.raises(AssertionError, match="which no example has shown"):
        run(transcribe(model, (x,)), model, x, mask)


@pytest.mark.nightly
def test_a_model_of_transformers_keeps_its_configuration_and_leaves_caches_out():
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=1, sliding_window=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, head_dim=4,
    )  # fmt: skip
    model = transformers.MistralModel(config).eval()
    code = transcribe(model, (torch.arange(6)[None],)).code
    assert "class MistralModel(PreTrainedModel):" in code
    assert "    def __init__(self, config: MistralConfig, *, rngs: nnx.Rngs):" in code
    assert "    num_key_value_heads: int = 8" in code  # a field that it reads, with its default
    assert "past_key_values" not in code
    assert "use_cache" not in code
    assert "create_sliding_window_causal_mask(" in code


@pytest.mark.nightly
def test_a_default_of_equal_elements_is_one_of_them_many_times():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    code = transcribe(transformers.Qwen3Model(config).eval(), (torch.arange(6)[None],)).code
    assert """default_factory=lambda: ["full_attention"] * 32)""" in code


class Choice(nn.Module):
    """Has a side that no example reaches."""

    def __init__(self, groups=1):
        super().__init__()
        self.groups = groups
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if self.groups == 1:
            return x * self.scale
        x = x.unflatten(-1, (self.groups, -1)).transpose(-1, -2)
        return x.flatten(-2) * self.scale


def test_a_side_that_does_not_run_is_written_from_a_call_with_the_condition_turned():
    code = transcribe(Choice(), (torch.rand(2, 4),)).code
    assert "        if self.groups == 1:\n            return x * self.scale[...]" in code
    assert "self.groups, -1" in code
    assert "not written" not in code


class Frozen(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.5, depth)]
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in rates])
        self.scales = [1 - rate for rate in rates]
        w = self.layers[0].weight.data
        nn.init.xavier_uniform_(w.view([w.shape[0], -1]), gain=4.0)

    @torch.no_grad()
    def mean(self, x):
        return x.mean(-1, keepdim=True)

    def forward(self, x):
        b, *axes, _, device = *x.shape, x.device  # noqa: F841
        with torch.no_grad():
            offset = self.layers[0](x)
            offset = offset * 2
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x) * scale
        return (x + offset - self.mean(x)).view(b, *axes, 4)


def test_what_has_no_gradient_in_the_source_has_none():
    torch.manual_seed(0)
    model, x = Frozen().eval(), torch.randn(2, 3, 4)
    made = transcribe(model, (x,))
    space, result = run(made, model, x)
    assert jnp.allclose(result, model(x).detach().numpy(), atol=1e-5)
    twin = space["load_weights"](
        space["Frozen"](rngs=nnx.Rngs(0)), {name: x.numpy() for name, x in made.weights.items()}
    )
    slopes = nnx.grad(lambda net: (net(jnp.asarray(x.numpy())) ** 2).sum())(twin)
    (model(x) ** 2).sum().backward()
    theirs = model.layers[0].weight.grad.numpy()
    assert jnp.allclose(slopes["layers"][0]["kernel"][...].T, theirs, atol=1e-4)
    first = [space["Frozen"](rngs=nnx.Rngs(i)).layers[0].kernel[...] for i in range(50)]
    assert abs(float(jnp.std(jnp.stack(first))) - 2.0) < 0.3


REPOSITORIES = sorted(path.stem for path in pathlib.Path(nanogpt.__file__).parent.glob("[!_]*.py"))
# Arguments that make a model wider or deeper, beside those of the example.
SIZES = {
    "nanogpt": {"n_embd": 24, "n_layer": 3}, "t5": {"d_model": 24, "num_layers": 3},
    "xlstm": {"embedding_dim": 24, "num_blocks": 3}, "mamba": {"d_model": 24, "n_layer": 3},
    "resnet": {"width": 12}, "ghostnet": {"width": 1.0}, "mobilenetv3": {"width_mult": 1.0},
    "nbeats": {"hidden_layer_units": 24}, "unet": {"init_dim": 12}, "fno": {"layers": 3},
    "pointnet": {"width": 12}, "vqvae": {"beta": 0.5}, "dcgan": {"ngf": 10},
    "segformer": {"depths": (2, 3), "decoder_dim": 12}, "tagger": {"hidden_dim": 20},
    "gnn": {"n_layers": 3}, "nerf": {"W": 24, "D": 5}, "dit": {"hidden_size": 24, "depth": 3},
    "tcn": {"channels": [8, 8, 12]}, "mbconv": {"classes": 7}, "gat": {"hidden": 10, "heads": 3},
    "conformer": {"num_layers": 2}, "perceiver": {"latent_dim": 24, "depth": 3},
}  # fmt: skip


def copy_into(value, space):
    """A setting with the classes of a file in place of the source's."""
    if isinstance(value, type) or inspect.isfunction(value):
        return space.get(value.__name__, value)
    if type(value).__name__ in space and isinstance(value, tuple):
        return space[type(value).__name__](*value)
    if type(value).__name__ in space:  # a configuration
        made = copy.copy(value)
        made.__class__ = space[type(value).__name__]
        return made
    return value


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_model_of_a_repository_is_made_at_another_size_and_trains(name):
    torch.manual_seed(0)
    module = importlib.import_module(f"models.repositories.{name}")
    model, inputs, *given = module.build()
    args, kwargs = given[0] if given else find_arguments(model)
    made, space = transcribe(model, inputs, (args, kwargs)), {}
    exec(compile(made.code, name, "exec"), space)
    other = dict(kwargs)
    records = (key for key, x in other.items() if type(x).__name__ in space)
    config = next((key for key in records if not isinstance(other[key], tuple)), None)
    if config is not None:
        other[config] = copy.copy(other[config])
        vars(other[config]).update(SIZES[name])
    else:
        other |= SIZES[name]
    source = type(model)(*args, **other)
    twin = space[made.name](
        *(copy_into(value, space) for value in args),
        **{key: copy_into(value, space) for key, value in other.items()},
        **({"rngs": nnx.Rngs(0)} if "rngs=" in made.example else {}),
    )
    space["load_weights"](twin, {n: x.numpy() for n, x in source.state_dict().items()})
    arrays = [jnp.asarray(x.numpy()) for x in inputs]

    def leaves(result):
        floats = (x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating))
        return [*floats]

    twin.eval()
    with torch.no_grad():
        wanted = jax.tree.map(lambda x: jnp.asarray(x.numpy()), source.eval()(*inputs))
    for ours, theirs in zip(leaves(twin(*arrays)), leaves(wanted), strict=True):
        assert jnp.allclose(ours, theirs, atol=1e-4 * float(1 + jnp.abs(theirs).max()))

    def loss(model):
        return sum(((x - 1.0) ** 2).mean() for x in leaves(model(*arrays)))

    optimizer = nnx.Optimizer(twin, optax.adam(1e-4), wrt=nnx.Param)
    before, slopes = nnx.value_and_grad(loss)(twin)
    optimizer.update(twin, slopes)
    assert float(loss(twin)) < float(before)


class Filtered(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        first = torch.zeros_like(spectrum)
        first[:, :3] = spectrum[:, :3] * self.scale
        return torch.fft.irfft(first, n=x.size(-1))


def test_the_size_of_an_inverse_transform_is_that_of_the_source():
    torch.manual_seed(0)
    model, x = Filtered().eval(), torch.randn(2, 12)
    made = transcribe(model, (torch.randn(2, 8),))
    assert jnp.allclose(run(made, model, x)[1], model(x).detach().numpy(), atol=1e-5)


def scaled(x, scale):
    return x * scale


class Named(nn.Module):
    """Has a method with the name of the function that it calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def scaled(self, x):
        return scaled(x, self.scale)

    def forward(self, x):
        return self.scaled(x)


def test_a_method_calls_the_function_of_its_name():
    code = transcribe(Named(), (torch.rand(2, 4),)).code
    assert "        return scaled(x, self.scale[...])" in code


def scaled_by_length(forward):
    @functools.wraps(forward)
    def call(self, x):
        x = x * 2 if bool(x.sum() > 1e6) else x
        return forward(self, x)

    return call


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = 0.5

    @scaled_by_length
    def forward(self, x):
        return x * self.rate


class AroundDecorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Decorated()

    def forward(self, x):
        return self.inner(x) + 1


def test_a_decorator_that_computes_is_not_left_out():
    with pytest.raises(NotTranscribed, match="a decorator or hook of it computes with tensors"):
        transcribe(AroundDecorated(), (torch.ones(2),), ((), {}))


def dropped(x, rate, training):
    return F.dropout(x, rate, training)


KINDS = {"wide": Named, "masked": Masked}


class Various(nn.Module):
    """Draws in a function, chooses a class by its name, pads, and has a frozen table."""

    def __init__(self, kind):
        super().__init__()
        name = kind.lower()
        self.inner = KINDS[name]()
        self.table = nn.Embedding(4, 4, _freeze=True)

    def forward(self, ids):
        x = dropped(self.inner(self.table(ids)), 0.5, self.training)
        left = ids.size(-1) // 2
        padding = (left, left + 1)
        return F.pad(x, padding, "constant", 0.0)


def test_functions_draw_from_the_random_numbers_of_their_callers():
    torch.manual_seed(0)
    model, ids = Various("WIDE").eval(), torch.tensor([[0, 2, 1]])
    made = transcribe(model, (ids,), (("WIDE",), {}))
    space, result = run(made, model, ids)
    assert jnp.allclose(result, model(ids).detach().numpy(), atol=1e-5)
    assert "def dropped(x, rate, training, *, rngs):" in made.code
    assert "0.5, not self.deterministic, rngs=self.rngs)" in made.code
    assert "self.inner = Named()" in made.code
    assert "return pad(x, padding)" in made.code
    twin = space["Various"]("WIDE", rngs=nnx.Rngs(0))
    assert not isinstance(twin.table.embedding, nnx.Param)
    assert 0 < float((twin(jnp.asarray(ids.numpy())) == 0).mean()) < 1


class Joined(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        return torch.cat((x, 2 * x), axis=self.axis)


class Normed(nn.LayerNorm):
    def __init__(self, width, eps=1e-5, device=None, dtype=None):
        nn.LayerNorm.__init__(self, width, eps, True, False, device, dtype)

    def forward(self, x):
        return nn.LayerNorm.forward(self, x) + 1


PARTS = {"joined": Joined, "normed": Normed, "masked": Masked}


class Chosen(nn.Module):
    def __init__(self, names=("joined", "normed")):
        super().__init__()
        self.last = self.activation = None
        if names:
            self.last = Joined(0)
            self.activation = nn.Tanh()
        self.parts = nn.ModuleList([PARTS[name](2) for name in names])
        self.pad = nn.ZeroPad2d((1, -1, 0, 2))
        self.unfold = nn.Unfold((1, 3), padding=(0, 1))

    def forward(self, x):
        y = self.unfold(self.pad(x[:, None, None]))
        del x
        for part in self.parts:
            y = part(y[..., :2])
        return self.activation(self.last(y))


def test_classes_of_a_table_and_dimensions_of_parts_are_the_sources():
    torch.manual_seed(0)
    model, x = Chosen().eval(), torch.randn(2, 5)
    made = transcribe(model, (x,), ((), {}))
    assert jnp.allclose(run(made, model, x)[1], model(x).detach().numpy(), atol=1e-5)
    assert 'PARTS = {"joined": Joined, "normed": Normed}' in made.code
    assert "jnp.concatenate([x, 2 * x], axis=self.axis)" in made.code
    assert "super().__init__(width, eps, True, False, rngs=rngs)" in made.code
    assert "return LayerNorm.__call__(self, x) + 1" in made.code
    assert "self.activation = jnp.tanh" in made.code  # a function, which is no array


class Attending(nn.Module):
    def __init__(self, first, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=first, **options)

    def forward(self, x, y, unseen, hidden):
        return self.attention(x, y, y, unseen, attn_mask=hidden)


@pytest.mark.parametrize("first", [True, False])
def test_attention_of_several_heads_has_both_kinds_of_masks(first):
    torch.manual_seed(0)
    unseen = torch.tensor([[False, True, False], [False, False, True]])
    hidden, x, y = torch.ones(4, 3).triu(2) > 0, torch.randn(2, 4, 8), torch.randn(2, 3, 8)
    if not first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    model = Attending(first, bias=first).eval()
    nn.init.normal_(model.attention.out_proj.weight)
    made = transcribe(model, (x, y, unseen, hidden), ((first,), {"bias": first}))
    expected = model(x, y, unseen, hidden)
    for ours, theirs in zip(run(made, model, x, y, unseen, hidden)[1], expected, strict=True):
        assert jnp.allclose(ours, theirs.detach().numpy(), atol=1e-5)


@pytest.mark.nightly
def test_experts_of_transformers_are_the_functions_that_the_library_calls():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, use_cache=False,
    )  # fmt: skip
    model, ids = transformers.MixtralModel(config).eval(), torch.arange(6)[None]
    made = transcribe(model, (ids,))
    _, result = run(made, model, ids)
    expected = model(ids).last_hidden_state.detach().numpy()
    assert jnp.allclose(result.last_hidden_state, expected, atol=1e-5)
    assert "= batched_mm_experts_forward(" in made.code
    assert "_default_apply_gate(self, proj_out)" in made.code
    assert "is_transposed=False" in made.code  # which no constructor of the file gives
    assert not made.fallen


class Typed(nn.Module):
    dtype = property(operator.attrgetter("fc.weight.dtype"))  # as a library has it

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).clamp(min=torch.finfo(self.dtype).eps)


def test_a_property_that_is_not_the_sources_is_its_dtype():
    torch.manual_seed(0)
    model, x = Typed().eval(), torch.randn(2, 4)
    made = transcribe(model, (x,), ((), {}))
    assert jnp.allclose(run(made, model, x)[1], model(x).detach().numpy(), atol=1e-5)
    assert "jnp.finfo(jnp.float32)" in made.code


def scale(x, gain, dim=1):
    return x * gain.unsqueeze(dim)


class Spread(nn.Module):
    def forward(self, x, gain):
        return scale(x, gain)


def test_a_dimension_that_is_an_argument_stays_one():
    model, x, gain = Spread().eval(), torch.randn(2, 2, 2), torch.randn(2, 2)
    made = transcribe(model, (x, gain), ((), {}))
    assert jnp.allclose(run(made, model, x, gain)[1], model(x, gain).detach().numpy())
    names = {}
    exec(made.code, names)
    other = names["scale"](jnp.array(x), jnp.array(gain), 2)
    assert jnp.allclose(other, scale(x, gain, 2).numpy())


def test_random_numbers_go_on_as_if_nothing_was_transcribed():
    model, x = Typed().eval(), torch.ones(2, 4)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    transcribe(model, (x,), ((), {}))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.75).add_(0.25 * x.mean(0))
        return x - self.mean


def test_methods_in_a_row_that_change_an_array_are_one_statement():
    model, x = Averaged(), torch.randn(2, 4)
    made = transcribe(copy.deepcopy(model), (x,), ((), {}))
    names = {}
    exec(made.whole, names)
    twin = names["make_model"](rngs=nnx.Rngs(0))
    assert jnp.allclose(twin(jnp.array(x)), model(x).numpy(), atol=1e-6)
    assert jnp.allclose(twin.mean[...], model.mean.numpy(), atol=1e-6)


class ReadsWhatChanges(Averaged):
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.75).add_(0.25 * self.mean)
        return x - self.mean


def test_a_file_refuses_training_that_reads_an_array_while_it_changes():
    made = transcribe(ReadsWhatChanges(), (torch.randn(2, 4),), ((), {}))
    assert "read while it changes" in made.only_evaluation
