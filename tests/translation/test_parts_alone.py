"""Each part of a translated model is called by itself, with what the source gave its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")

from torch import nn  # noqa: E402

import fmapper  # noqa: E402

FUNCTIONS = ("Dropout", "Identity", "Tanh", "Activation", "ReLU", "GELU", "Pool2d")


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x, scale=1.0, mask=None, flag=False, *, hidden=None):
        h = self.down(self.act(self.up(self.norm(x)))) * scale
        if flag:
            h = h + 1
        return x + (h if mask is None else h * mask)


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))

    def encode(self, ids, mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask=mask, hidden=ids)
        return x


class Net(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.encoder = Encoder(dim)
        self.again = self.encoder.blocks[0]

    def forward(self, ids, mask, all_states=False):
        x = self.encoder.encode(ids, mask.float()[..., None])
        x = self.again(x, 0.5)
        x = self.again(x, 2.0, flag=True)
        return self.encoder.head(x)


class BasicBlock(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            short = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(short, nn.BatchNorm2d(out))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 16, (2, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    return ids, mask


def user():
    ids, mask = tokens()
    return Net(), (ids,), {"mask": mask}


def resnet():
    return ResNet(), (torch.randn(2, 3, 32, 32),), {}


def llama():
    transformers = pytest.importorskip("transformers")
    ids, mask = tokens()
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    kwargs = {"attention_mask": mask, "use_cache": False}
    return transformers.LlamaForCausalLM(config), (ids,), kwargs


def bert():
    transformers = pytest.importorskip("transformers")
    ids, mask = tokens()
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=8,
    )  # fmt: skip
    return transformers.BertModel(config), (ids,), {"attention_mask": mask}


def t5():
    transformers = pytest.importorskip("transformers")
    ids, mask = tokens()
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    decoder = {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask.flip(0)}
    kwargs = {"input_ids": ids, "attention_mask": mask, **decoder, "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), (), kwargs


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    return transformers.ViTModel(config), (torch.randn(2, 3, 16, 16),), {}


def record_calls(module, args, kwargs):
    """Calls a module; returns what each part was given and gave, in order."""
    calls, hooks = [], []
    for path, part in module.named_modules():

        def note(part, args, kwargs, result, path=path):
            calls.append((path, part, args, kwargs, copy.deepcopy(result)))

        hooks.append(part.register_forward_hook(note, with_kwargs=True))
    with torch.no_grad():
        module(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return calls


def as_numpy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: as_numpy(one) for key, one in value.items()}
    return tuple(map(as_numpy, value)) if isinstance(value, tuple | list) else value


def leaves(value):
    value = list(value.values()) if hasattr(value, "values") else value
    if isinstance(value, tuple | list):
        return [leaf for one in value for leaf in leaves(one)]
    return [] if value is None else [np.asarray(value)]


def part_at(model, path):
    for step in path.split(".") if path else []:
        model = model[int(step)] if step.isdigit() else getattr(model, step)
    return model


def methods_of(part):
    return [part, *(getattr(part, name) for name in dir(part) if name.startswith("call_"))]


def same(found, wanted):
    found, wanted = leaves(found), leaves(as_numpy(wanted))
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)


class Memory(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.LSTM(3, 4, 2)
        self.cell = torch.nn.LSTMCell(4, 5)
        self.gru = torch.nn.GRU(3, 4)

    def forward(self, x, h, c):
        y, (h, c) = self.rnn(x, (h, c))
        return self.cell(y[0], self.cell(y[1])), self.gru(x, h[:1])


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox"])
def test_states_are_taken_as_the_source_takes_them(to):
    pytest.importorskip(to)
    torch.manual_seed(0)
    module, args = (
        Memory().eval(),
        (torch.randn(6, 2, 3), torch.randn(2, 2, 4), torch.randn(2, 2, 4)),
    )
    model = fmapper.convert(module, to, args, structure=True)
    for path, _, given, keywords, wanted in record_calls(module, args, {}):
        same(part_at(model, path)(*as_numpy(given), **as_numpy(keywords)), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["flax", "equinox"])
@pytest.mark.parametrize("make", [user, resnet, llama, bert, t5, vit])
def test_each_part_gives_what_it_gives_in_the_source(make, to):
    pytest.importorskip(to)
    torch.manual_seed(0)
    module, args, kwargs = make()
    module.eval()
    if to == "equinox" and make is t5:
        with pytest.raises(fmapper.ConversionError, match="are one submodule"):
            fmapper.convert(module, to, args, kwargs, structure=True)
        return
    model = fmapper.convert(module, to, args, kwargs, structure=True)
    compared = 0
    for path, part, given, keywords, wanted in record_calls(module, args, kwargs):
        try:
            mine = part_at(model, path)
        except AttributeError:
            if path == "lm_head" and part.weight is module.shared.weight:
                continue
            assert type(part).__name__.endswith(FUNCTIONS), path
            assert not [*part.parameters()]
            continue
        answers, refusals = [], []
        for method in methods_of(mine):
            try:
                answers.append(method(*as_numpy(given), **as_numpy(keywords)))
            except (TypeError, ValueError) as error:
                refusals.append(error)
        if not answers and "an array attention_mask" in str(refusals):
            assert keywords.get("attention_mask", given[-1]) is None  # recorded, it is all ones
            continue
        assert len(answers) == 1, (path, refusals)
        same(answers[0], wanted)
        compared += 1
    assert compared > 10


def model_of(module, *args, to="flax", **kwargs):
    """Returns the model with its own classes for a module."""
    return fmapper.convert(module.eval(), to, args, kwargs, structure=True)


@pytest.mark.nightly
def test_what_the_model_was_not_recorded_with_is_refused():
    ids, mask = tokens()
    block = model_of(Net(), ids, mask=mask).encoder.blocks[0]
    x, hidden = np.ones((2, 5, 8), np.float32), np.ones((2, 5), np.int32)
    block(x, mask=x[..., :1], hidden=hidden)
    block.call_2(x)
    block.call_2(x, 0.5)
    with pytest.raises(ValueError, match=r"written for scale=0\.5"):
        block.call_2(x, 0.4)
    with pytest.raises(ValueError, match=r"written for scale=2\.0, flag=True"):
        block.call_3(x, flag=False)
    with pytest.raises(TypeError):
        block(x, 1.0)
    with pytest.raises(TypeError, match="mask"):
        block(x, hidden=hidden)
    with pytest.raises(TypeError, match="hidden"):
        block(x, mask=x[..., :1])


class Attend(nn.Module):
    def forward(self, query, key, value, mask=None):
        return nn.functional.scaled_dot_product_attention(query, key, value, mask)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attend = Attend()
        self.cross = Attend()

    def forward(self, x, mask):
        x = self.attend(x, x, x, self.linear(x) @ x.mT + mask)
        return self.cross(self.linear(x), key=x, value=x, mask=mask)


@pytest.mark.nightly
def test_what_is_given_several_times_is_to_be_the_same():
    x, mask = torch.randn(2, 3, 4), torch.randn(2, 3, 3)
    module = Attends().eval()
    model = model_of(module, x, mask)
    given, other = x.numpy(), mask.numpy()
    same(model(given, other), module(x, mask))
    same(model.attend(given, given, given, other), module.attend(x, x, x, mask))
    with pytest.raises(ValueError, match="key=query, value=query"):
        model.attend(given, given + 1, given, other)
    same(model.cross(given, given + 1, mask=other), module.cross(x, x + 1, x + 1, mask))
    with pytest.raises(ValueError, match="an array mask"):
        model.cross(given, given + 1, mask=None)


class Places(nn.Embedding):
    def forward(self, ids, places=None):
        return super().forward(places + 0)


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = Places(6, 4)

    def forward(self, ids):
        return self.places(ids, places=torch.arange(ids.shape[1])) + ids[..., None]


def test_a_part_that_is_not_given_what_a_layer_takes_is_no_layer():
    ids, _ = tokens()
    module = Placed().eval()
    model = model_of(module, ids)
    same(model(ids.numpy()), module(ids))
    at = torch.arange(5)
    same(model.places(ids.numpy(), at.numpy()), module.places(ids, at))
    with pytest.raises(TypeError):
        model.places(ids.numpy())


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def encode(self, ids, scale=1.0, *, places=None):
        x = self.embed(ids) * scale
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.drop(x)

    def train(self, x):
        return self.layers[1](x)

    def __call__(self, x):
        return self.layers[0](x)


class Towers(nnx.Module):
    def __init__(self, rngs):
        self.left, self.right = Tower(rngs), Tower(rngs)

    def __call__(self, ids, others):
        left = self.left.encode(ids, places=others)
        return self.right(left) @ self.right.train(self.left.encode(others, 2.0)).mT


@pytest.mark.nightly
def test_methods_of_jax_keep_their_names():
    model = Towers(nnx.Rngs(0))
    model.eval()
    ids, others = (x.numpy().astype(np.int32) for x in tokens())
    module = fmapper.convert(model, "torch", (ids, others), structure=True)
    a, b = torch.tensor(ids), torch.tensor(others)
    np.testing.assert_allclose(module(a, b).detach(), model(ids, others), atol=1e-5)
    left = module.left.encode(a, places=b)
    np.testing.assert_allclose(left.detach(), model.left.encode(ids), atol=1e-5)
    np.testing.assert_allclose(
        module.right(left).detach(), model.right(model.left.encode(ids)), atol=1e-5
    )
    assert module.right.train(False) is module.right  # of torch; the model's has another name


class Flagged(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        x = linen.Dense(4)(x)
        return linen.BatchNorm()(x, use_running_average=deterministic)


class Flags(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        return Flagged(name="inner")(x, deterministic=not train)


@pytest.mark.nightly
def test_flags_for_the_mode_are_no_arguments_in_torch():
    x = jax.numpy.ones((2, 3))
    model = Flags()
    variables = model.init(jax.random.key(0), x)
    source = fmapper.source((model, variables), "torch", (x,), train=True)
    assert "deterministic" not in source


@pytest.mark.nightly
@pytest.mark.parametrize("make", [user, resnet, llama])
def test_flax_captures_what_each_part_gives(make):
    torch.manual_seed(0)
    module, args, kwargs = make()
    model = model_of(module, *args, **kwargs)
    capture = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, state = capture(*as_numpy(args), **as_numpy(kwargs))
    found = {}
    for path, variable in nnx.to_flat_state(state):
        *steps, method = map(str, path)
        if method == "__call__":
            found[".".join(steps)] = variable.get_value()
    calls = {
        path: (part, result) for path, part, _, _, result in record_calls(module, args, kwargs)
    }
    assert len(found) > 10
    assert found.keys() <= calls.keys()
    missing = [calls[path][0] for path in calls.keys() - found.keys()]
    assert all(type(one).__name__.endswith((*FUNCTIONS, "Sequential")) for one in missing)
    for path, values in found.items():
        if not path.startswith("encoder.blocks.0"):  # that has several methods
            same(values[-1], calls[path][1])


@pytest.mark.nightly
def test_equinox_takes_another_part_that_keeps_what_one_gives():
    equinox = pytest.importorskip("equinox")
    ids, mask = tokens()
    module = Net().eval()
    model = model_of(module, ids, mask=mask, to="equinox")
    seen = []

    class Seen(equinox.Module):
        part: object

        def __call__(self, *args, **kwargs):
            seen.append(self.part(*args, **kwargs))
            return seen[-1]

    where = lambda m: m.encoder.blocks[1]  # noqa: E731
    changed = equinox.tree_at(where, model, Seen(model.encoder.blocks[1]))
    changed(ids.numpy(), mask.numpy())
    calls = record_calls(module, (ids,), {"mask": mask})
    (wanted,) = [result for path, *_, result in calls if path == "encoder.blocks.1"]
    same(seen, (wanted,))


@pytest.mark.nightly
def test_hooks_of_torch_see_what_each_part_gives():
    model = Towers(nnx.Rngs(0))
    model.eval()
    ids, others = (x.numpy().astype(np.int32) for x in tokens())
    module = fmapper.convert(model, "torch", (ids, others), structure=True)
    capture = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, state = capture(ids, others)
    wanted = {
        ".".join(map(str, path[:-1])): variable.get_value()
        for path, variable in nnx.to_flat_state(state)
        if path[-1] == "__call__"
    }
    calls = record_calls(module, (torch.tensor(ids), torch.tensor(others)), {})
    paths = {path for path, *_ in calls}
    assert {"left.embed", "left.layers.0", "right", "right.layers.1", ""} <= paths
    for path in paths & wanted.keys():
        results = [result for found, *_, result in calls if found == path]
        same(as_numpy(results), wanted[path])


class Sampled(nn.Module):
    """Has its channels last within, and first outside."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 3)

    def forward(self, points):
        points = points.permute(0, 2, 1)
        return torch.relu(self.dense(points) + points).permute(0, 2, 1)


class Samples(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Sampled(), Sampled()

    def forward(self, points):
        return self.second(self.first(points))


@pytest.mark.nightly
def test_parts_keep_their_layouts_where_permutations_undo_each_other():
    points, net = torch.randn(2, 3, 5), Samples()
    model = fmapper.convert(net, "flax", (points,), structure=True)
    same(model(points.numpy()), net(points))
    same(model.first(points.numpy()), net.first(points))
    same(model.second(points.numpy()), net.second(points))


class Doubled(Block):
    def forward(self, x, scale=1.0):
        return super().forward(x, scale) * 2


class CallsForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Doubled(8)
        self.block = Block(8)
        self.again = self.block
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.again.forward(self.norm.forward(self.block.forward(self.first.forward(x))), 0.5)


@pytest.mark.nightly
def test_parts_called_by_forward_are_parts():
    torch.manual_seed(0)
    net, x = CallsForward().eval(), torch.randn(3, 8)
    net.norm.register_forward_hook(lambda *_: 1 / 0)  # which runs for `norm(x)` alone
    new = fmapper.convert(net, "flax", (x,), structure=True)
    np.testing.assert_allclose(new(x.numpy()), net(x).detach(), rtol=1e-4, atol=1e-5)
    for name in ("first", "block", "norm"):
        found, part = getattr(new, name)(x.numpy()), type(getattr(net, name))
        np.testing.assert_allclose(found, part.forward(getattr(net, name), x).detach(), atol=1e-5)
