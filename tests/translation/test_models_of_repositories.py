"""Idioms of models in public repositories: named results, members by key, losses of parts."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax.nnx")

from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import translate_proved  # noqa: E402


class Encoded(NamedTuple):
    hidden: Any
    penalty: Any


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Any) -> Encoded:
        hidden = self.linear(x)
        return Encoded(hidden, hidden.pow(2).mean())


@pytest.mark.nightly
def test_named_tuples_keep_their_name() -> None:
    _source, proof, _ = translate_proved(Encoder(), "flax", (torch.randn(2, 4),))
    assert proof


class ScaleDiscriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.pool = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        hidden = self.conv(x).mean(2)
        return hidden, self.pool(hidden)


class Scales(nn.Module):
    """Has parts by name that are all alike, as discriminators of several scales."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({f"disc_{i}": ScaleDiscriminator() for i in range(4)})

    def forward(self, x: Any) -> Any:
        results = []
        for part in self.model.values():
            results.append(part(x))
            x = nn.functional.avg_pool1d(x, 2)
        return results


@pytest.mark.nightly
def test_parts_by_name_that_are_alike_are_a_comprehension() -> None:
    _source, proof, _ = translate_proved(Scales(), "flax", (torch.randn(2, 1, 40),))
    assert proof


def normed(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv1d(*args, **kwargs))


class Dilated(nn.Module):
    def __init__(self, dim: int, dilation: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.ReflectionPad1d(dilation), normed(dim, dim, 3, dilation=dilation)
        )
        self.outer = normed(dim, dim, kernel_size=1)

    def forward(self, x: Any) -> Any:
        return x + self.outer(self.inner(x).tanh())


@pytest.mark.nightly
def test_names_are_read_through_functions_that_pass_everything_on() -> None:
    layers = nn.Sequential(Dilated(4, 1), nn.Conv1d(4, 6, 1), Dilated(6, 3))
    _source, proof, _ = translate_proved(layers, "flax", (torch.randn(2, 4, 20),))
    assert proof


class Relative(nn.Module):
    """Attends to itself or to others; only some blocks of the former have a table of positions."""

    def __init__(self, has_table: bool, is_causal: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_causal = is_causal
        if has_table:
            self.table = nn.Embedding(7, 1)

    def forward(self, x: Any, others: Any = None, mask: Any = None, bias: Any = None) -> Any:
        seen = x if others is None else others
        scores = self.q(x) @ self.k(seen).transpose(1, 2)
        if bias is None:
            if hasattr(self, "table"):
                at = torch.arange(x.shape[1])
                steps = at[:, None] - at
                steps = steps.clamp(min=0) if self.is_causal else steps.abs()
                bias = self.table(steps.clamp(max=6)).permute(2, 0, 1)
            else:
                bias = torch.zeros(1, x.shape[1], seen.shape[1])
            if mask is not None:
                bias = bias + mask
        return F.softmax(scores + bias, dim=-1) @ seen, bias


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Relative(i == 0) for i in range(2)])
        self.decoder = nn.ModuleList([Relative(i == 0, is_causal=True) for i in range(2)])
        self.across = nn.ModuleList([Relative(False) for _ in range(2)])

    def forward(self, x: Any, y: Any, mask: Any, mask_y: Any) -> Any:
        bias, own, cross = None, None, None
        for part in self.encoder:
            x, bias = part(x, mask=mask, bias=bias)
        for part, across in zip(self.decoder, self.across, strict=True):
            y, own = part(y, mask=mask_y, bias=own)
            y, cross = across(y, x, mask, cross)
        return y


@pytest.mark.nightly
def test_an_argument_that_no_block_of_a_class_is_given_is_not_read() -> None:
    torch.manual_seed(0)
    shapes = (3, 5, 8), (3, 4, 8), (3, 1, 5), (3, 4, 4)
    _source, proof, _ = translate_proved(Coded(), "flax", tuple(torch.randn(x) for x in shapes))
    assert proof


class Target(nn.Module):
    """Makes a target without gradients, in place, and compares with what has them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Any, y: Any) -> Any:
        kept = self.net(x) * self.scale
        with torch.no_grad():
            target = self.net(y)
            target.clamp_(-0.2, 0.2)
            target = target + kept
            kept.mul_(2.0)
        return F.mse_loss(kept, target)


@pytest.mark.nightly
def test_what_is_made_without_gradients_is_changed_in_place_without_care_for_them() -> None:
    torch.manual_seed(0)
    _source, proof, _ = translate_proved(Target(), "flax", (torch.randn(5, 4), torch.randn(5, 4)))
    assert proof


class Wrapped(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.conv = part
        self.register_buffer("std", torch.tensor([0.1, 0.2, 0.1]))
        self.register_buffer("mix", torch.tensor([1.0, 0.25]))

    def forward(self, x: Any) -> Any:
        return self.mix[0] * self.conv(x) * self.std + self.mix[1] * x


@pytest.mark.nightly
def test_helpers_are_not_taken_for_arguments_and_numbers_are_short() -> None:
    layers = nn.Sequential(
        Wrapped(nn.Linear(3, 3)), Wrapped(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    )
    _source, proof, _ = translate_proved(layers, "flax", (torch.randn(5, 3),))
    assert proof


class Crops(nn.Module):
    """Computes crops of one size together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, crops: Any) -> Any:
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        begin, found = 0, []
        for end in ends.tolist():
            found.append(self.conv(torch.cat(crops[begin:end])).mean((2, 3)))
            begin = end
        return torch.cat(found)


@pytest.mark.nightly
def test_conditions_on_constants_are_left_out() -> None:
    crops = [torch.randn(2, 3, n, n) for n in (8, 8, 6, 6)]
    _source, proof, _ = translate_proved(Crops(), "flax", (crops,))
    assert proof


class Stretched(nn.Module):
    """Compares places of two axes, one of which is stretched to the other, as ViTDet does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        _, height, width, _ = x.shape
        rows = torch.arange(height)[:, None] * max(width / height, 1.0)
        columns = torch.arange(width)[None] * max(height / width, 1.0)
        places = (rows - columns) + (width - 1) * max(height / width, 1.0)
        return self.linear(x) * places[..., None], places.long()


@pytest.mark.nightly
def test_quotients_of_sizes_hold_for_sizes_with_the_same_larger_one() -> None:
    torch.manual_seed(0)
    module = Stretched()
    x = torch.randn(2, 5, 7, 4)
    source, proof, _ = translate_proved(module, "flax", (x,))
    assert proof
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fmapper.FixedSizeWarning)
        model = fmapper.convert(module, "jax", (x,), dynamic_shapes="auto")
    written: dict[str, Any] = {}
    exec(source.code, written)
    file = written["Stretched"](rngs=nnx.Rngs(0))
    written["load_weights"](file, {k: v.numpy() for k, v in module.state_dict().items()})
    for one in (model, file):
        other = torch.randn(3, 4, 8, 4)
        assert np.allclose(one(other.numpy())[0], module(other)[0].detach(), atol=1e-5)
        with pytest.raises((ValueError, fmapper.ProgramInputError), match=r"shape|recorded for"):
            one(torch.randn(3, 8, 3, 4).numpy())


class Wide(nn.Module):
    def forward(self, x: Any) -> Any:
        return 2 * x if x.shape[0] / x.shape[1] > 0.3 else x


class Share(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * int(x.shape[0] * 0.3)


@pytest.mark.nightly_cases("Wide")
@pytest.mark.parametrize("module", [Wide(), Share()], ids=lambda one: type(one).__name__)
def test_numbers_that_rounding_may_decide_fix_their_sizes(module: nn.Module) -> None:
    with pytest.warns(fmapper.FixedSizeWarning, match="cannot be checked for other sizes"):
        model = fmapper.convert(module, "jax", (torch.randn(5, 7),), dynamic_shapes="auto")
    assert np.allclose(model(np.ones((5, 7), np.float32)), module(torch.ones(5, 7)))
    with pytest.raises(fmapper.ProgramInputError, match="recorded for sizes"):
        model(np.ones((2, 9), np.float32))


class Halves(nn.Module):
    def forward(self, x: Any) -> Any:
        count = int(x.shape[1] * 0.5)
        return x[:, :count] + x[:, x.shape[1] - count :]


@pytest.mark.nightly
def test_shares_of_a_size_hold_for_sizes_of_which_they_are_as_many() -> None:
    module = Halves()
    model = fmapper.convert(module, "jax", (torch.randn(5, 8),), dynamic_shapes="auto")
    x = torch.randn(3, 9)
    assert np.allclose(model(x.numpy()), module(x))
    with pytest.raises(fmapper.ProgramInputError, match="recorded for sizes"):
        model(np.ones((3, 10), np.float32))


class Resized(nn.Module):
    def forward(self, x: Any) -> Any:
        small = F.interpolate(x, scale_factor=0.5, mode="bilinear", recompute_scale_factor=True)
        return F.interpolate(small, size=x.shape[2:])


@pytest.mark.nightly
def test_scales_of_a_size_leave_it_free() -> None:
    module = Resized()
    model = fmapper.convert(module, "jax", (torch.randn(2, 3, 16, 24),), dynamic_shapes="auto")
    x = torch.randn(1, 3, 32, 8)
    assert np.allclose(model(x.numpy()), module(x), atol=1e-5)


class CastConv(nn.Conv1d):
    """A layer of a class of its own, as those of Whisper."""

    def _conv_forward(self, x: Any, weight: Any, bias: Any) -> Any:
        return super()._conv_forward(x, weight.to(x.dtype), bias.to(x.dtype))


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = CastConv(4, 8, 3), CastConv(8, 8, 3, stride=2)

    def forward(self, x: Any) -> Any:
        return self.conv2(self.conv1(x))


@pytest.mark.nightly
def test_methods_of_layers_are_layers() -> None:
    _source, proof, _ = translate_proved(Halving(), "flax", (torch.randn(2, 4, 9),))
    assert proof


class Pool(nn.Module):
    """Has a method with a stride that is not an argument of it."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def _pool(self, x: Any) -> Any:
        x = F.avg_pool1d(torch.tanh(x), 2, self.step)
        return x * torch.sigmoid(x)

    def forward(self, x: Any) -> Any:
        return self._pool(x) + self._pool(-x)


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 8)
        self.one, self.two = Pool(1), Pool(2)

    def forward(self, x: Any) -> Any:
        return self.one(x.transpose(1, 2)), self.two(self.mix(x).transpose(1, 2))


@pytest.mark.nightly
def test_strides_are_no_sizes() -> None:
    """The channels are 4 and 8, the strides 1 and 2: no function may divide one by the other."""
    _source, proof, _ = translate_proved(Pools(), "flax", (torch.randn(2, 7, 4),))
    assert proof


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, mask: Any) -> Any:
        sim = (self.q(x) * 8**-0.25) @ (self.k(x) * 8**-0.25).transpose(1, 2)
        sim.masked_fill_(mask, -1e9)
        return sim.softmax(-1) + sim.sum()


@pytest.mark.nightly
def test_what_is_changed_in_place_keeps_its_name() -> None:
    model, mask = Changes(), torch.tensor([[False, True], [False, False]])
    _source, proof, _ = translate_proved(model, "flax", (torch.randn(3, 2, 8), mask))
    assert proof
