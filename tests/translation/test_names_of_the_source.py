"""Files keep what the source calls its functions, its variables, and what it computes at once."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

from fmapper.translation.code import text  # noqa: E402
from fmapper.translation.source import translate  # noqa: E402
from fmapper_adapters.flax.translation.dialect import FlaxDialect  # noqa: E402


def composite(raw, depths):
    """Returns the colour, the opacity and the depth of rays, as volume rendering does."""
    gaps = depths[:, 1:] - depths[:, :-1]
    gaps = torch.cat([gaps, torch.Tensor([1e10]).expand(gaps[:, :1].shape)], dim=-1)
    alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * gaps)
    left = torch.cumprod(1 - alpha + 1e-6, dim=-1)
    weights = alpha * left
    colour = (weights[..., None] * torch.sigmoid(raw[..., :3])).sum(-2)
    depth = (weights * depths).sum(-1)
    opacity = weights.sum(-1)
    return colour, opacity, depth


def noise_like(raw):
    shifted = raw + torch.rand_like(raw) * 0
    scaled = shifted * 2
    peak = scaled.amax(-1)
    mean = scaled.mean(-1)
    return peak, mean


class Renderer(nn.Module):
    def __init__(self, render=composite):
        super().__init__()
        self.field = nn.Linear(3, 4)
        self.render = render

    def forward(self, points, depths):
        colour, opacity, depth = composite(self.field(points), depths)
        return {"colour": colour, "opacity": opacity, "depth": depth}


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = nn.Linear(3, 4)

    def forward(self, x):
        mean, peak = noise_like(self.field(x))[::-1]
        return {"mean": mean, "peak": peak}


class Memory(nn.Module):
    """Slots that heads read and write beside their arguments."""

    def __init__(self):
        super().__init__()
        self.register_buffer("begin", torch.full((4, 3), 0.1))
        self.slots = None


class Head(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.memory, self.key, self.value = memory, nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        weights = (self.memory.slots @ self.key(x)[..., None]).softmax(-2)
        self.memory.slots = self.memory.slots + weights * self.value(x)[:, None]
        return (self.memory.slots * weights).sum(-2)


class Machine(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = Memory()
        self.head = Head(self.memory)

    def forward(self, x):
        self.memory.slots = self.memory.begin.repeat(x.shape[0], 1, 1)
        first = self.head(x[:, 0])
        second = self.head(x[:, 1])
        return torch.cat([first, second], -1)


class Block(nn.Module):
    """A block with a method of its own, as CLIP's."""

    def __init__(self, mask):
        super().__init__()
        self.linear, self.attn = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mask = mask

    def attend(self, x):
        return self.attn(x, x, x, need_weights=False, attn_mask=self.mask)[0]

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.linear(x).relu()


class Tower(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(mask) for _ in range(3)])

    def forward(self, x):
        return self.blocks(x)


class Square(nn.Module):
    """A model of which one size is what its code works out: 4."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, y):
        side = int(x.shape[1] ** 0.5)
        return self.linear(x).reshape(-1, side, side, 3) * y.mean((1, 2))[:, None, None, None]


class Codebook(nn.Module):
    """A table and a linear layer that nobody calls: their arrays are read."""

    def __init__(self):
        super().__init__()
        self.codes, self.proj = nn.Embedding(12, 4), nn.Linear(4, 6)

    def forward(self, x):
        distances = (x[:, None] - self.codes.weight).square().sum(-1)
        weights = F.one_hot(distances.argmin(-1), 12).float()
        return weights @ self.codes.weight, torch.addmm(self.proj.bias, x, self.proj.weight.t())


class Masked(nn.Module):
    def forward(self, x, mask):
        return (x * mask).sum(-1) / mask.float().sum(-1)


class Written(nn.Module):
    """A model that writes to a view of what it then gives to a part."""

    def __init__(self):
        super().__init__()
        self.mean = Masked()

    def forward(self, x):
        mask = x > 0
        mask[:, 0] = True
        return self.mean(x, mask)


class Levels(nn.Module):
    """Containers without a class of their own, as in VQ-GAN."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList()
        for size in (4, 8):
            level = nn.Module()
            level.block, level.norm = nn.Linear(size, 8), nn.LayerNorm(8)
            self.down.append(level)

    def forward(self, x):
        for level in self.down:
            x = level.norm(level.block(x)).relu()
        return x


class Strided(nn.Module):
    """A block of which some have a pooling and a shortcut, as in CLIP's ResNet."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, padding=1)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1)
        self.avgpool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv3 = nn.Conv2d(planes, inplanes, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.avgpool(x)
        return F.relu(self.conv3(x))


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return {"low": self.low(x["low"]), "high": self.high(x["high"]) + x["low"]}


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Scales(), Scales()

    def forward(self, x):
        feats = self.first({"low": x, "high": x.relu()})
        feats = self.second(feats)
        return feats, feats["low"].mean()


def agrees(model, *inputs):
    """Returns the code of a model's file, after it has computed what the model does."""
    source, _, _ = translate(model, "flax", inputs, {}, "auto")
    names = {}
    exec(compile(source.code, "written.py", "exec"), names)
    net = names["load_weights"](names[source.name](rngs=nnx.Rngs(0)), state_of(model))
    net.eval()
    with torch.no_grad():
        wanted = jax.tree.leaves(model(*inputs))
    for ours, theirs in zip(jax.tree.leaves(net(*map(jnp.asarray, inputs))), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)
    return source.code


def state_of(model):
    return {key: one.numpy() for key, one in model.state_dict().items()}


@pytest.mark.nightly
def test_a_long_function_is_one_though_it_is_called_once():
    code = agrees(Renderer().eval(), torch.randn(4, 6, 3), torch.rand(4, 6))
    assert "def composite(raw, depths):" in code
    assert "colour, opacity, depth = composite(self.field(points), depths)" in code
    assert "left = jnp.cumprod(" in code  # a variable of the function


@pytest.mark.nightly
def test_what_several_results_are_called_is_not_guessed():
    code = agrees(Noisy().eval(), torch.randn(4, 3))
    assert "mean = scaled.mean(axis=-1)" in code
    assert "peak = largest(scaled, axis=-1, shared=True)" in code
    assert "def noise_like" not in code  # it draws


@pytest.mark.nightly
def test_a_value_from_beside_has_the_name_of_its_variable():
    code = agrees(Machine().eval(), torch.randn(4, 2, 5))
    assert code.count("def __call__(self, x, slots)") == 1
    assert "call_2" not in code.partition("class Head")[2].partition("class Machine")[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("full", "code"),
    [(float("-inf"), "jnp.full((5, 5), -jnp.inf, jnp.float32)"), (True, "jnp.ones((5, 5), bool)")],
    ids=["numbers", "bool"],
)
def test_parts_with_methods_of_their_own_are_in_a_sequence(full, code):
    found = agrees(Tower(torch.full((5, 5), full).triu(1)).eval(), torch.randn(2, 5, 8))
    assert "self.blocks = Sequential(" in found
    assert f"attn_mask=jnp.triu({code}, 1)" in found


@pytest.mark.nightly
def test_a_size_that_the_code_works_out_is_a_number():
    model, x, y = Square().eval(), torch.randn(2, 16, 3), torch.randn(2, 16, 5)
    code = agrees(model, x, y)
    assert " 16 3'), (y, 'batch " in code, code
    assert "== 16" not in code


@pytest.mark.nightly
def test_arrays_that_are_only_read_are_those_of_layers():
    code = agrees(Codebook().eval(), torch.randn(3, 4))
    assert "self.codes = nnx.Embed(12, 4, rngs=rngs)" in code
    assert "self.proj = nnx.Linear(4, 6, rngs=rngs)" in code
    assert "nnx.Param(" not in code
    assert ".T.T" not in code


@pytest.mark.nightly
def test_a_part_is_given_what_was_written_before():
    code = agrees(Written().eval(), torch.randn(3, 4))
    assert "def __call__(self, x, mask):" in code
    assert "self.mean(x, mask)" in code


@pytest.mark.nightly
def test_containers_without_a_class_are_called_after_their_places():
    code = agrees(Levels().eval(), torch.randn(3, 4))
    assert "class Down(nnx.Module)" in code
    assert "class Module" not in code


@pytest.mark.nightly
def test_layers_that_some_blocks_have_are_no_reason_for_a_class():
    model = nn.Sequential(Strided(4, 8), Strided(4, 8, stride=2), Strided(4, 6)).eval()
    code = agrees(model, torch.randn(2, 4, 8, 8))
    assert code.count("class Strided") == 1
    assert "if self.has_avgpool:" in code
    assert code.count("has_avgpool=True") == 1


@pytest.mark.nightly
def test_a_dict_is_given_on_as_a_whole():
    code = agrees(Pyramid().eval(), torch.randn(3, 4))
    assert "feats = self.second(feats)" in code
    assert "return feats, feats['low'].mean()" in code


@pytest.mark.nightly_cases("two_numbers")
@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.triu(np.full((4, 4), -np.inf, np.float32), 1),
         "jnp.triu(jnp.full((4, 4), -jnp.inf, jnp.float32), 1)"),
        (~np.tri(4, dtype=bool), "jnp.triu(jnp.ones((4, 4), bool), 1)"),
        (np.tri(4, 4, -1, dtype=np.int32), "jnp.tril(jnp.ones((4, 4), jnp.int32), -1)"),
        (np.where(np.tri(3, 5, dtype=bool), 1, -9).astype(np.float32),
         "jnp.where(jnp.tri(3, 5, dtype=bool), jnp.ones((3, 5), jnp.float32), "
         "jnp.full((3, 5), -9.0, jnp.float32))"),
        (np.float32(np.inf) * np.ones(3, np.float32), "jnp.full((3,), jnp.inf, jnp.float32)"),
    ],
    ids=["mask", "hidden", "below", "two_numbers", "infinite"],
)  # fmt: skip
def test_masks_are_code_for_the_same_numbers(array, code):
    found = text(FlaxDialect().constant(array))
    assert found == code
    made = np.asarray(eval(found, {"jnp": jnp}))
    assert (made.dtype, made.tobytes()) == (array.dtype, array.tobytes())


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.scale + self.shift


class Connected(nn.Module):
    """Calls a function with what a part gives, which has no name."""

    def __init__(self):
        super().__init__()
        self.norm, self.attend = Shifted(), nn.Linear(8, 4)

    def connect(self, x, sublayer):
        return x + sublayer(self.norm(x))

    def forward(self, x):
        return self.connect(x, lambda x: self.attend(torch.cat([x, x.flip(0)], -1)))


@pytest.mark.nightly
def test_what_a_part_gives_is_not_called_after_what_it_does_last():
    code = agrees(Connected().eval(), torch.randn(3, 4))
    assert "self.norm(x)" in code
    assert "total = self.norm" not in code
