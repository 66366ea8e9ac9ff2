"""`nn.MultiheadAttention` in files, as its operations."""

import numpy as np
import pytest
import torch
from torch import nn

import fmapper
from fmapper.translation.source import translate_proved

pytestmark = pytest.mark.nightly

WIDE, BATCH, LONG, OTHER = 12, 2, 5, 7


def hidden(length: int) -> torch.Tensor:
    return torch.triu(torch.ones(length, length, dtype=torch.bool), 1)


class Attends(nn.Module):
    """Calls attention by one of the ways below."""

    def __init__(self, call, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDE, 3, **{"batch_first": True, **options})
        self.call = call

    def forward(self, x, *others):
        return self.call(self.attn, torch.tanh(x), *others)


def plain(attn, x):
    return attn(x, x, x, need_weights=False)[0]


def with_weights(attn, x):
    return attn(x, x, x)


def of_each_head(attn, x):
    return attn(x, x, x, average_attn_weights=False)


def across(attn, x, y):
    return attn(x, y, y, need_weights=False)[0]


def of_three(attn, x, y):
    return attn(x, y, y + 1)[0]


def of_other_widths(attn, x, y, z):
    return attn(x, y, z)[0]


def hidden_later(attn, x):
    return attn(x, x, x, attn_mask=hidden(x.shape[1]), need_weights=False)[0]


def causal(attn, x):
    mask = hidden(x.shape[1])
    return attn(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def padded(attn, x, is_padding):
    return attn(x, x, x, key_padding_mask=is_padding, attn_mask=hidden(x.shape[1]))


def of_added_numbers(attn, x, mask):
    return attn(x, x, x, attn_mask=mask)[0]


def of_masks_for_heads(attn, x, mask):
    return attn(x, x, x, attn_mask=mask, need_weights=False)[0]


def x(*shape):
    return torch.randn(*(shape or (BATCH, LONG)), WIDE)


IS_PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
# The way -> the call, the options of the layer, and further inputs.
ITSELF = {
    "plain": (plain, {}, ()),
    "length first": (with_weights, {"batch_first": False}, ()),
    "without biases": (plain, {"bias": False}, ()),
    "weights of heads": (of_each_head, {}, ()),
    "mask": (hidden_later, {}, ()),
    "causal": (causal, {}, ()),
}
OTHERS = {
    "across": (across, {}, (x(BATCH, OTHER),)),
    "three": (of_three, {}, (x(BATCH, OTHER),)),
    "widths": (
        of_other_widths,
        {"kdim": 4, "vdim": 6},
        (torch.randn(BATCH, OTHER, 4), torch.randn(BATCH, OTHER, 6)),
    ),
    "padding": (padded, {}, (IS_PADDING,)),
    "numbers": (of_added_numbers, {}, (torch.randn(LONG, LONG),)),
    "heads": (of_masks_for_heads, {}, (torch.randn(6, LONG, LONG),)),
}


class Ways(nn.Module):
    def __init__(self, ways):
        super().__init__()
        self.ways = [*ways.values()]
        for at, (call, options, _) in enumerate(self.ways):
            setattr(self, f"way_{at}", Attends(call, dropout=0.25, **options))

    def forward(self, x, *others):
        others = iter(others)
        found = ()
        for at, (_, _, given) in enumerate(self.ways):
            found += (getattr(self, f"way_{at}")(x, *(next(others) for _ in given)),)
        return found


@pytest.mark.parametrize(
    ("ways", "target"), [(ITSELF, "flax"), (OTHERS, "flax"), (OTHERS, "equinox")]
)
def test_attention_is_proved_in_both_modes(ways, target):
    pytest.importorskip(target)
    torch.manual_seed(0)
    inputs = x(), *(one for _, _, given in ways.values() for one in given)
    source, proof, reason = translate_proved(Ways(ways), target, inputs)
    assert proof, reason
    assert source.modes == ("eval", "train")


def test_attention_without_a_batch():
    torch.manual_seed(0)
    _source, proof, reason = translate_proved(Attends(with_weights), "flax", (x(LONG),))
    assert proof, reason


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDE, 3, batch_first=True)

    def forward(self, x, y):
        x = self.attn(x, x, x)[0]
        return self.attn(x, y, y)[0]


def test_a_layer_that_attends_to_itself_and_across():
    torch.manual_seed(0)
    _source, proof, reason = translate_proved(Both(), "flax", (x(), x(BATCH, OTHER)))
    assert proof, reason


class Turned(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        found, weights = super().forward(query, key, value, **options)
        return found * 2, weights


class Patched(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x):
        return self.attn(x, x, x)[0]


@pytest.mark.parametrize(
    "attn",
    [
        Turned(WIDE, 3),
        nn.MultiheadAttention(WIDE, 3, add_bias_kv=True),
        nn.MultiheadAttention(WIDE, 3, add_zero_attn=True),
    ],
)
def test_what_attends_otherwise_is_code(attn):
    torch.manual_seed(0)
    _source, proof, reason = translate_proved(Patched(attn), "flax", (x(),))
    assert proof, reason


def test_a_way_back_has_the_arrays_of_the_source():
    torch.manual_seed(0)
    for call, given in ((plain, (x(),)), (across, (x(), x(BATCH, OTHER)))):
        net = Attends(call)
        model = fmapper.convert(net, "flax", given, structure=True)
        back = fmapper.state(model, source=True)
        for name, array in net.state_dict().items():
            np.testing.assert_array_equal(back[name], array)


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDE, 2, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x):
        hidden = self.encoder(x * 2)
        return hidden + 1


def test_encoders_of_torch_read_as_their_own_code():
    torch.manual_seed(0)
    source, proof, reason = translate_proved(Encoded(), "flax", (x(),))
    assert proof, reason
    layer = source.code.partition("class TransformerEncoderLayer(")[2].partition("\n\n\n")[0]
    assert "encoder" not in layer  # the caller's line
