"""Models of half precision become files of single precision that `make_model` casts."""

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

import fmapper  # noqa: E402
from fmapper.translation.source import transcribe_proved  # noqa: E402
from fmapper_translate import NotTranscribed, transcribe  # noqa: E402
from fmapper_translate.flax.target import FlaxTarget  # noqa: E402
from fmapper_translate.sources.halves import check_dtypes  # noqa: E402


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.register_buffer("places", torch.arange(3))

    def forward(self, x):
        dtype = x.dtype
        x = self.first(x).float()
        return torch.rsqrt(x.square() + self.places[1]).to(dtype)


@pytest.mark.parametrize("target", ["flax", "equinox"])
def test_arrays_are_cast_and_what_the_source_casts_follows_them(target):
    model = Net(5).bfloat16()
    x = torch.randn(3, 4).bfloat16()
    code = transcribe(model, (x,), target=target).whole
    assert "jnp.bfloat16)" in code
    assert ".astype(dtype)" in code
    names = {}
    exec(code, names)
    made = {"flax": lambda: names["make_model"](rngs=nnx.Rngs(0)),
            "equinox": lambda: names["make_model"](key=jax.random.key(0))}[target]()  # fmt: skip
    assert made.places.dtype == jnp.int32
    made = names["load_weights"](made, fmapper.to_jax(dict(model.state_dict())))
    given = fmapper.to_jax(x)
    ours, theirs = made(given), model(x)
    assert ours.dtype == jnp.bfloat16
    wanted = theirs.detach().float().numpy()
    assert jnp.allclose(ours.astype(jnp.float32), wanted, atol=1e-2)


def test_several_precisions_are_refused():
    model = Net()
    model.first.bfloat16()
    with pytest.raises(NotTranscribed, match=r"0.first.bias is of bfloat16 and 1.*of float32"):
        transcribe(nn.Sequential(model, Net()), (torch.randn(3, 4),))


def test_a_file_that_gives_another_precision_than_its_model_is_refused():
    class Plain(Net):
        def forward(self, x):
            return self.first(x)

    x = torch.randn(3, 4)
    found = transcribe(Plain().bfloat16(), (x.bfloat16(),))
    given = (found.whole, "make_model", FlaxTarget(), found.weights)
    check_dtypes(*given, Plain().bfloat16(), ((x.bfloat16(),), {}))
    with pytest.raises(NotTranscribed, match="gives float32 where the model gives float16"):
        check_dtypes(*given, Plain().half(), ((x.half(),), {}))


@pytest.mark.nightly
def test_they_are_proved_in_double_precision():
    model = Net(5).half()
    found, proof = transcribe_proved(model, "flax", (torch.randn(3, 4).half(),), None)
    assert proof
    assert proof.double
    assert max(proof.errors.values()) < 1e-9
    found.__dict__["code"] = found.code.replace(" + self.places", " - self.places")
    assert not found.prove(model, (torch.randn(3, 4).half(),))
