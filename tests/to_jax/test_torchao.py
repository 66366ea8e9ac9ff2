"""Modules whose weights torchao has quantised: converted, moved, refused where they cannot go."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fmapper

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # libraries that warn while they are imported
    quantization = pytest.importorskip("torchao.quantization")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

CONFIGS: dict[str, Any] = {
    "int8 weights": quantization.Int8WeightOnlyConfig,
    "int8": quantization.Int8DynamicActivationInt8WeightConfig,
    "int4 weights": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "int8 by int4 weights": quantization.Int8DynamicActivationIntxWeightConfig,
    "float8 weights": quantization.Float8WeightOnlyConfig,
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def quantised(name: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    net = net.eval().to(dtype)
    quantization.quantize_(net, CONFIGS[name]())
    assert type(net[0].weight) is not torch.nn.Parameter
    return net


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantised_module_gives_its_own_numbers(name: str, dtype: Any) -> None:
    # Without negative numbers: the code of the smallest one of a row lies between -127 and -128.
    net, x = quantised(name, dtype), torch.rand(20, 64, dtype=dtype)
    converted = fmapper.convert(net, "jax", (x,))
    with torch.no_grad():
        wanted = net(x).float()
    found = np.asarray(jax.jit(lambda model, x: model(x))(converted, fmapper.to_jax(x)), np.float32)
    largest = float(wanted.abs().max())
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE[dtype] * largest, rtol=0)
    assert fmapper.verify(net, converted, x)
    kinds = {array.dtype.itemsize for array in fmapper.fleaves(converted) if array.ndim == 2}
    assert 1 in kinds  # the codes are kept, not their products with the scales


@pytest.mark.parametrize("name", ["int8 weights", "int4 weights", "float8 weights"])
def test_quantised_weights_move_within_torch(name: str) -> None:
    net = quantised(name)
    hollow = fmapper.to_device("torch:meta")(net)
    weight = hollow[0].weight
    assert type(weight) is type(net[0].weight)
    assert weight.device.type == weight.qdata.device.type == weight.scale.device.type == "meta"
    assert net[0].weight.qdata.device.type == "cpu"
    x = torch.randn(2, 64)
    copied = fmapper.to_torch(net, copy=True)
    assert copied[0].weight.qdata.data_ptr() != net[0].weight.qdata.data_ptr()
    assert torch.equal(copied(x), net(x))
    given = fmapper.load_state(quantised(name), fmapper.state(net))
    assert torch.equal(given(x), net(x))


@pytest.mark.parametrize("mover", [fmapper.to_jax, fmapper.to_numpy])
def test_quantised_weights_say_what_can_leave_torch(mover: Any) -> None:
    state = fmapper.state(quantised("int8 weights"))
    with pytest.raises(fmapper.UnsupportedLeafError, match=r"an Int8Tensor .*\.qdata, \.scale"):
        mover(state)
    parts = {name: getattr(state["0.weight"], name) for name in ("qdata", "scale")}
    for name, array in mover(parts).items():
        np.testing.assert_array_equal(np.asarray(array), parts[name])
