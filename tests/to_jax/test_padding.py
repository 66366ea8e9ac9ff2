"""Padded places of `nn.TransformerEncoder`: zeros without gradients, other numbers with them."""

import warnings

import numpy as np
import pytest

import fmapper

torch = pytest.importorskip("torch")
pytest.importorskip("jax")


class Reader(torch.nn.Module):
    def __init__(self, *, norm=False, **options):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        last = torch.nn.LayerNorm(8) if norm else None
        self.encoder = torch.nn.TransformerEncoder(layer, 2, norm=last, **options)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding).mean(1)


def examples():
    torch.manual_seed(0)
    padding = torch.tensor([[False, False, True, True], [False, False, False, True]])
    return torch.randn(2, 4, 8), padding


def numbers(module, x, padding):
    with torch.no_grad():
        return module(x, padding).numpy()


@pytest.mark.nightly
@pytest.mark.parametrize("norm", [False, True])
def test_recorded_without_gradients_it_is_what_the_module_gives_so(norm):
    module, (x, padding) = Reader(norm=norm).eval(), examples()
    other = torch.tensor([[False, True, True, True], [False, False, False, False]])
    in_the_middle = torch.tensor([[False, True, False, True], [False, False, False, True]])
    with torch.no_grad():
        model = fmapper.convert(module, "jax", (x, padding))
        assert fmapper.verify(module, model, x, padding)
    for mask in (padding, other, in_the_middle):
        got = np.asarray(model(x.numpy(), mask.numpy()))
        np.testing.assert_allclose(got, numbers(module, x, mask), atol=1e-5)
    assert set(model.params) == set(dict(module.named_parameters()))
    assert "forward" not in vars(module.encoder)


@pytest.mark.nightly
def test_recorded_with_gradients_it_says_that_there_are_two_answers():
    module, (x, padding) = Reader().eval(), examples()
    with pytest.warns(fmapper.ConversionWarning, match=r"Reader\.encoder.*no_grad"):
        model = fmapper.convert(module, "jax", (x, padding))
    got = np.asarray(model(x.numpy(), padding.numpy()))
    np.testing.assert_allclose(got, module(x, padding).detach().numpy(), atol=1e-5)
    assert fmapper.verify(module, model, x, padding)
    with torch.no_grad():
        assert not fmapper.verify(module, model, x, padding)


@pytest.mark.nightly
def test_frozen_encoders_leave_padding_out_in_both_modes():
    module, (x, padding) = Reader().eval().requires_grad_(False), examples()
    model = fmapper.convert(module, "jax", (x, padding))
    got = np.asarray(model(x.numpy(), padding.numpy()))
    np.testing.assert_allclose(got, numbers(module, x, padding), atol=1e-5)


@pytest.mark.nightly
def test_where_there_is_one_answer_nothing_is_said():
    x, padding = examples()
    for module in (Reader(enable_nested_tensor=False), Reader().train()):
        train = module.training
        fmapper.convert(module, "jax", (x, padding), train=train)
    module = Reader().eval()
    fmapper.convert(module.encoder, "jax", (x,))


def blind_layer(**options):
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options).eval()


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, src_key_padding_mask):
        return self.inner(x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False)[0]


HIDDEN = torch.tensor([[True] * 3, [False] * 3])


@pytest.mark.nightly
@pytest.mark.parametrize("make", [blind_layer, lambda: blind_layer(norm_first=True), Attending])
def test_what_sees_nothing_is_told_of(make):
    module = make().eval()
    x = torch.arange(48.0).reshape(2, 3, 8) / 48
    with pytest.warns(fmapper.ConversionWarning, match="hides all positions") as told:
        model = fmapper.convert(module, "jax", (x,), {"src_key_padding_mask": HIDDEN})
    assert len(told) == 1
    kwargs = {"src_key_padding_mask": HIDDEN}
    assert fmapper.verify(module, model, x, example_kwargs=kwargs)  # with gradients
    with torch.no_grad():
        assert module(x, **kwargs).isnan().any()
        assert not fmapper.verify(module, model, x, example_kwargs=kwargs)
        with pytest.warns(fmapper.ConversionWarning, match="hides all positions"):  # noqa: SIM117
            with pytest.raises(fmapper.ConversionError, match="NaN at other places"):
                fmapper.convert(module, "jax", (x,), kwargs)
    seen = {"src_key_padding_mask": torch.tensor([[False, True, True], [False] * 3])}
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        assert fmapper.verify(module, model, x, example_kwargs=seen)


class Translator(torch.nn.Module):
    """Is given its masks, as in torch's own examples."""

    def __init__(self):
        super().__init__()
        self.transformer = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, source, target, target_mask):
        return self.transformer(source, target, tgt_mask=target_mask)


@pytest.mark.nightly
@pytest.mark.parametrize("mask", ["causal", "other"])
def test_a_mask_that_is_causal_for_the_examples_may_be_another_one(mask):
    """Whether it is depends on its values; torch would look, and fix all sizes by that."""
    torch.manual_seed(0)
    net = Translator().eval()
    causal = torch.nn.Transformer.generate_square_subsequent_mask
    vary = {"source": {0: "b", 1: "a"}, "target": {0: "b", 1: "c"}, "target_mask": {0: "c", 1: "c"}}
    dims = {name: torch.export.Dim(name) for name in "abc"}
    shapes = {name: {at: dims[one] for at, one in sizes.items()} for name, sizes in vary.items()}
    given = torch.randn(3, 6, 8), torch.randn(3, 5, 8), causal(5)
    model = fmapper.convert(net, "jax", given, dynamic_shapes=shapes)
    other = causal(7) if mask == "causal" else torch.where(torch.rand(7, 7) > 0.7, -np.inf, 0.0)
    other = other.fill_diagonal_(0.0)
    args = torch.randn(2, 9, 8), torch.randn(2, 7, 8), other
    want = net(*args).detach()
    np.testing.assert_allclose(model(*[x.numpy() for x in args]), want, rtol=1e-4, atol=1e-5)
