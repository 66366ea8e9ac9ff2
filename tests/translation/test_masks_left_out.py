"""Parts that were recorded with a mask take None for it, as those of the source do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fmapper

pytest.importorskip("flax")
pytestmark = pytest.mark.filterwarnings("ignore::fmapper.FixedSizeWarning")


class Attention(nn.Module):
    """Attention as in transformers: without a mask it may be causal."""

    def __init__(self, *, is_causal: bool, mask_is_added: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.is_causal = is_causal
        self.mask_is_added = mask_is_added

    def forward(self, x: Any, mask: Any = None) -> Any:
        heads = self.query(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        if self.mask_is_added:
            scores = heads @ heads.transpose(2, 3)
            scores = scores * 2 if mask is None else torch.where(mask, scores, -1e9)
            found = torch.softmax(scores, -1) @ heads
        else:
            is_causal = mask is None and self.is_causal
            found = nn.functional.scaled_dot_product_attention(
                heads, heads, heads, attn_mask=mask, is_causal=is_causal
            )
        return found.transpose(1, 2).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = Attention(**options)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Any, attention_mask: Any = None) -> Any:
        return self.norm(x + self.attention(x, mask=attention_mask))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sees_all = Layer(is_causal=False)
        self.sees_before = Layer(is_causal=True)
        self.differs = Layer(is_causal=False, mask_is_added=True)

    def forward(self, x: Any, padding: Any) -> Any:
        size = x.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril() & padding[:, None, None].bool()
        for layer in (self.sees_all, self.sees_before, self.differs):
            x = layer(x, attention_mask=mask)
        return x


@pytest.fixture(scope="module", params=["auto", None])
def both(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = Net().eval()
    padding = torch.ones(2, 5, dtype=torch.int64)
    padding[0, 3:] = 0
    given = (torch.randn(2, 5, 8), padding)
    return module, fmapper.convert(
        module, "flax", given, structure=True, dynamic_shapes=request.param
    )


@pytest.mark.nightly_cases(
    "auto-True-sees_before",
    "None-False-sees_all",
    "None-True-sees_before",
    "auto-True-sees_all",
    "auto-False-sees_all",
    "auto-False-sees_before",
)
@pytest.mark.parametrize("name", ["sees_all", "sees_before"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_mask_may_be_none(both: Any, name: str, inner: bool) -> None:
    module, model = both
    mine, theirs = getattr(model, name), getattr(module, name)
    mine, theirs = (mine.attention, theirs.attention) if inner else (mine, theirs)
    x = torch.randn(2, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    key = "mask" if inner else "attention_mask"
    for given in (None, mask):
        with torch.no_grad():
            wanted = theirs(x, given)
        found = mine(x.numpy(), **{key: given if given is None else given.numpy()})
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_mask_whose_absence_is_another_program_is_needed(both: Any) -> None:
    _, model = both
    x = np.ones((2, 5, 8), np.float32)
    with pytest.raises((TypeError, ValueError), match=r"an array|requires ndarray"):
        model.differs(x, attention_mask=None)


def test_submodules_stay_as_they_were() -> None:
    from fmapper_adapters.torch.record.masks import find_meanings

    module = Net()
    module.sees_all.eval()
    modes = [part.training for part in module.modules()]
    given = (torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.int64))
    found = find_meanings(module, given, {})
    assert found["sees_all"] == {"attention_mask": "ones"}
    assert found["sees_before.attention"] == {"mask": "causal"}
    assert not found["differs"]
    assert [part.training for part in module.modules()] == modes
    assert not any(part._forward_pre_hooks for part in module.modules())


class Particular(nn.Module):
    """Counts its calls, draws random numbers, and insists on a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Any, mask: Any) -> Any:
        assert mask is not None
        self.calls += 1
        return x * mask + torch.rand(())


def test_buffers_and_random_numbers_stay_as_they_were() -> None:
    from fmapper_adapters.torch.record.masks import find_meanings

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Particular()

        def forward(self, x: Any, mask: Any) -> Any:
            return self.part(x, mask)

    module = Whole()
    before = torch.random.get_rng_state()
    assert find_meanings(module, (torch.ones(2, 3), torch.ones(2, 3)), {}) == {"part": {}}
    assert module.part.calls == 0
    assert torch.equal(torch.random.get_rng_state(), before)
