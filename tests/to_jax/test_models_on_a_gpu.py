"""Models converted where their arrays lie on a GPU that torch and JAX both see."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import fmapper

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

pytestmark = pytest.mark.gpu("torch", "jax")


class Net(torch.nn.Module):
    """Convolutions with statistics, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.attend = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(image))).flatten(2).mT
        return self.head((x + self.attend(x, x, x)[0]).mean(1))


def on_a_gpu(tree: Any) -> bool:
    """Whether every array of a tree is on one device, a GPU."""
    devices = {
        d for leaf in jax.tree.leaves(tree) if hasattr(leaf, "devices") for d in leaf.devices()
    }
    return len(devices) == 1 and next(iter(devices)).platform != "cpu"


@pytest.mark.parametrize(
    ("target", "options"), [("jax", {}), ("flax", {}), ("flax", {"structure": True})]
)
@jax.default_matmul_precision("highest")  # code of Flax has JAX's own, TF32 on a GPU
def test_a_model_is_converted_on_its_device(target: str, options: dict[str, Any]) -> None:
    if target == "flax":
        pytest.importorskip("flax")
    net, image = Net().cuda().eval(), torch.randn(2, 3, 8, 8, device="cuda")
    model = fmapper.convert(net, target, image, **options)
    assert on_a_gpu(fmapper.state(model))
    got = model(fmapper.to_jax(image))
    assert on_a_gpu(got)
    np.testing.assert_allclose(got, net(image).detach().cpu(), rtol=1e-4, atol=1e-5)

    def loss(leaves: Any) -> Any:
        return (fmapper.load_state(model, leaves)(fmapper.to_jax(image)) ** 2).sum()

    leaves = dict(fmapper.state(model))
    slopes = jax.grad(loss, allow_int=True)(leaves)
    (net(image) ** 2).sum().backward()
    assert on_a_gpu(slopes)
    params = [g for name, g in slopes.items() if not re.search(r"running|mean$|var$|batches", name)]
    norm = sum(float((g**2).sum()) for g in params)
    wanted = sum(float((p.grad**2).sum()) for p in net.parameters())
    assert norm == pytest.approx(wanted, rel=1e-3)


def test_the_way_back_stays_on_the_device() -> None:
    net, image = Net().cuda().eval(), torch.randn(2, 3, 8, 8, device="cuda")
    model = fmapper.convert(net, "jax", image)
    back = fmapper.convert(model, "torch", fmapper.to_jax(image))
    assert {p.device.type for p in back.parameters()} == {"cuda"}
    np.testing.assert_allclose(
        back(image).detach().cpu(), net(image).detach().cpu(), rtol=1e-4, atol=1e-5
    )


def test_text_is_generated_on_the_device() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    tokens = torch.randint(1, 50, (2, 5), device="cuda")
    mask = torch.ones_like(tokens)
    tokens[0, :2] = mask[0, :2] = 0
    wanted = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    generator = fmapper.generator(model, max_length=24, batch=2, max_new_tokens=12)
    got = generator(fmapper.to_numpy(tokens), fmapper.to_numpy(mask))
    assert on_a_gpu(got)
    np.testing.assert_array_equal(np.asarray(got), wanted.cpu())
