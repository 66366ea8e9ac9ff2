"""What `convert` hands over is run on the examples: kinds of all results, and the outputs."""

import warnings

import numpy as np
import pytest

import fmapper

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

X = torch.arange(-2.0, 4.0).reshape(2, 3)


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_squares_have_the_dtype_of_torch(dtype):
    def twice(x):
        y = torch.square(x)
        return y + y

    x = torch.tensor([True, False, True]).to(dtype)
    model = fmapper.convert(Function(twice), "jax", (x,))
    got, want = np.asarray(model(x.numpy())), twice(x).numpy()
    assert got.dtype == np.dtype(jax.dtypes.canonicalize_dtype(want.dtype))
    np.testing.assert_array_equal(got, want)


@pytest.fixture
def wrong(monkeypatch):
    """Enters a lowering that is wrong, for the time of a test."""

    def enter(op, function):
        from fmapper.programs import lowering

        added = {**lowering.added.get("jax", {}), op: fmapper.programs.Lowering(function)}
        monkeypatch.setitem(lowering.added, "jax", added)

    return enter


@pytest.mark.parametrize("to", ["jax", "flax"])
def test_another_dtype_is_an_error_that_names_the_operation(wrong, to):
    if to == "flax":
        pytest.importorskip("flax")
    wrong("aten::sin", lambda x: jax.numpy.sin(x).astype("float16"))
    module = Function(lambda x: x.sin().float())
    with pytest.raises(fmapper.ConversionError, match=r"aten::sin\.default.* gives float16 for fl"):
        fmapper.convert(module, to, (X,))
    fmapper.convert(module, to, (X,), check=False)


def test_another_shape_is_an_error(wrong):
    wrong("aten::sin", lambda x: jax.numpy.sin(x)[:1])
    with pytest.raises(fmapper.ConversionError, match="give different results"):
        fmapper.convert(Function(lambda x: x.sin() + x), "jax", (X,))


@pytest.mark.parametrize("to", ["jax", "flax"])
def test_other_outputs_are_an_error(wrong, to):
    if to == "flax":
        pytest.importorskip("flax")
    wrong("aten::sin", lambda x: jax.numpy.sin(x) * 1.1)
    module = Function(lambda x: x.sin() + x)
    with pytest.raises(fmapper.ConversionError, match="aten::sin"):
        fmapper.convert(module, to, (X,))
    fmapper.convert(module, to, (X,), check=False)


def test_the_first_call_is_compiled_already(caplog):
    model = fmapper.convert(Function(lambda x: x.sin()), "jax", (X,))
    with jax.log_compiles():
        model(X.numpy())
    assert "Finished XLA compilation of jit(_compiled)" not in caplog.text


class Chooser(torch.nn.Module):
    """Chooses among scores of which many are zero, as sparse attention does."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(40, 8))

    def forward(self, x):
        scratch = torch.empty(3, 4)
        chosen = torch.relu(x).topk(30).indices
        scratch[:] = 1.0
        return self.rows[chosen].sum(1) * scratch.mean()


@pytest.mark.nightly
def test_equal_elements_that_are_chosen_otherwise_are_said():
    torch.manual_seed(0)
    module, x = Chooser().eval(), torch.randn(2, 40)
    with pytest.warns(fmapper.ConversionWarning, match="topk.*equal elements"):
        model = fmapper.convert(module, "jax", (x,))
    report = fmapper.verify(module, model, x)
    assert not report
    assert "topk" in report.first.path
    assert "equal" in report.first.note
    different = x.abs() + 1  # no two of them are equal
    assert fmapper.verify(module, model, different)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fmapper.convert(module, "jax", (different,))
